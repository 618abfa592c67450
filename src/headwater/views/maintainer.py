"""A maintainer: applies the batches of a query to a view, each exactly once, whoever dies in between.

For each batch, in this order:
1. the store is brought up to the end of the topic of changes, should it be behind;
2. the batch is compared with the old rows of its keys, which gives its changes;
3. the changes are appended to the topic together with the batch's marker, all of it or nothing (`headwater.log.port.stage`);
4. they are applied to the store, in one transaction with the place in the topic.

The topic is the truth: a store that is behind it, was deleted, or belongs to another log is brought up from the topic, at the
start and before each batch. A batch whose marker is there already is not written again. A maintainer that was overtaken is
refused by the log (its stage was opened again) and by the store (which is no longer where it left it): `Fenced`.

A generation after the first appends its changes to `<view>.changes` too, once it is the view; the swap to it appends there what the rows
of both generations differ in (see `topic`). The swap is one transaction of the log, and opens the stage of the old generation before,
so that nobody appends changes of that one any more.

Thread-safety: none; one thread at a time calls a maintainer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.databases.keys import key_texts
from headwater.log.arrow.rows import to_batch
from headwater.log.log import Log
from headwater.log.port.topic import Durability
from headwater.model.errors import EventsMissed, InvalidInput, SchemaConflict
from headwater.model.points import PROCESS
from headwater.views.catalog import TOPIC as CATALOG
from headwater.views.catalog import CatalogEntry, ViewCatalog, catalog_row
from headwater.views.changes import (
    CHANGES_KEY,
    DELETE,
    KEY,
    Delta,
    changes_of,
    changes_schema,
    delta_of,
    last_of_each,
    stored_schema,
)
from headwater.views.definition import ViewDefinition
from headwater.views.store import Applied, ViewSelection, ViewStore
from headwater.views.topic import ViewTopic, fold


class Committing(Protocol):
    """The part of `headwater.log.port.stage.Stage` that a maintainer needs."""

    def commit(self, marker: Any, appends: Iterable[tuple[str, Any]] = ()) -> Any:
        """Appends and commits the marker, once."""


class Maintained(msgspec.Struct, frozen=True):
    """What became of a batch: whether it was written now (or had been before), how many rows it changed, and where."""

    written: bool
    changes: int
    positions: dict[int, int]


class ViewMaintainer:
    """Keeps one generation of a view; makes its topic, its table and its place in the catalogue where they are missing.

    The first generation of a view is seen at once, a later one after `swap`. The topic of changes has one partition, so that
    subscribers see all changes in one order.
    """

    def __init__(
        self,
        log: Log,
        store: ViewStore,
        definition: ViewDefinition,
        *,
        app: str = "views",
        stage: Committing | None = None,
        compact: bool = False,
        durability: Durability | None = None,
    ) -> None:
        self.definition = definition
        self.apart = ""
        """Why readers of `<view>.changes` cannot follow this generation; nothing where they can."""
        self._app = app
        self._log = log
        self._store = store
        self._catalog = ViewCatalog(log)
        name = f"{app}.{definition.name}" + ("" if definition.generation == 1 else f".{definition.generation}")
        self._stage = log.stage(name) if stage is None else stage
        store.create(definition)  # first, because a store may refuse the names
        PROCESS.reach("views: table made")
        self._topic = log.create_topic(
            definition.changes,
            changes_schema(definition),
            key=CHANGES_KEY,
            partitions=1,
            compact=compact,
            durability=durability,
            exist_ok=True,
        )
        PROCESS.reach("views: topic made")
        self._shared = self._shared_topic(compact=compact, durability=durability)
        entry = self._register()
        PROCESS.reach("views: registered")
        self._applied = self._stored_applied()
        self._catch_up()
        self._is_current = entry.current == definition.generation
        if self._is_current:
            self._lead_readers()
            self._show(entry)

    def __repr__(self) -> str:
        seen = "current" if self._is_current else "not current"
        view, generation = self.definition.name, self.definition.generation
        return f"ViewMaintainer(view={view!r}, generation={generation}, {seen}, store={self._store.url!r}, log={self._log.url!r})"

    def maintain(self, rows: pa.Table, marker: Any) -> Maintained:
        """Applies one batch: result rows with the view's columns, and `_deleted` where some of them remove their key."""
        self._catch_up()
        table, gone = self._checked(rows)
        self._store.check(self.definition, table)
        old = self._old_rows(table)
        if self.definition.mode == "append":
            self._check_added(table, old, gone)
        changes = changes_of(self.definition, table, old, gone=gone, epoch=marker.epoch)
        appended = self._with_tombstones(changes)
        PROCESS.reach("views: changes known")
        appends = [(self._topic.name, appended)]
        if self._is_current and self._shared is not None:
            appends.append((self._shared.name, self._shared.changes(changes)))
        done = self._stage.commit(marker, appends=appends if len(changes) else [])
        PROCESS.reach("views: changes appended")
        if not done.written:
            self._catch_up()
            return Maintained(written=False, changes=0, positions=self._applied.positions)
        spans = done.positions.get(self._topic.name, {})
        ends = self._applied.positions | {number: span.stop for number, span in spans.items()}
        after = Applied(topic_id=self._topic.id, positions=ends, query=marker.query, epoch=marker.epoch)
        self._apply(delta_of(changes, self.definition), after)
        PROCESS.reach("views: changes applied")
        return Maintained(written=True, changes=len(changes), positions=ends)

    def swap(self) -> None:
        """Makes this generation the view: readers and subscribers see it from one moment on, and the old one goes.

        What reads `<view>.changes` gets what changed. The rows of both generations are in memory for that.
        The old topic of changes stays, for what was read `as_of` an earlier time or by others.
        """
        self._catch_up()
        entry = self._catalog.get(self.definition.name)
        generation = self.definition.generation
        if entry.current != generation:
            old = ViewMaintainer(self._log, self._store, entry.definition, app=self._app)
            PROCESS.reach("views: old generation fenced")
            entry = CatalogEntry(current=generation, building=None, definitions={generation: self.definition})
            decision = [(CATALOG, [catalog_row(self.definition.name, entry)])]
            if self._shared is None:
                self._catalog.put(self.definition.name, entry)
            else:
                difference = self._difference(self._shared, old)
                PROCESS.reach("views: difference known")
                self._shared.commit(difference, decision=decision)
            PROCESS.reach("views: swapped in the log")
        self._is_current = True
        self._show(entry)

    def _shared_topic(self, *, compact: bool, durability: Durability | None) -> ViewTopic | None:
        """The topic that readers of the view follow, where that is another one than the generation's own and can hold its rows."""
        if self.definition.generation == 1:
            return None
        try:
            return ViewTopic(self._log, self.definition, compact=compact, durability=durability)
        except SchemaConflict as error:
            self.apart = error.what
            return None

    def _lead_readers(self) -> None:
        """Appends what the view's topic lacks of this generation, where it was swapped in without that."""
        shared = self._shared
        if shared is not None and not shared.is_followed:
            shared.commit(shared.difference(shared.folded(), self._rows(), pairs=False))

    def _difference(self, shared: ViewTopic, old: ViewMaintainer) -> pa.Table:
        """What the rows of this generation differ in from those that readers of the view's topic have."""
        if old.apart:
            return shared.difference(shared.folded(), self._rows(), pairs=False)
        pairs = bool(self.definition.key) and self.definition.key == old.definition.key
        return shared.difference(old._rows(), self._rows(), pairs=pairs)

    def _rows(self) -> pa.Table:
        """All rows of this generation, with their keys."""
        return self._store.read(self.definition.name, generation=self.definition.generation).rows

    def _register(self) -> CatalogEntry:
        """The view's entry in the catalogue, with this generation in it."""
        definition = self.definition
        entry = self._catalog.find(definition.name)
        generation = definition.generation
        if entry is not None and entry.definitions.get(generation) == definition:
            return entry
        if entry is None:
            new = CatalogEntry(current=generation, building=None, definitions={generation: definition})
        else:
            if generation < entry.current:
                raise InvalidInput(
                    f"Generation {generation} of view {definition.name!r} was replaced by generation {entry.current}.",
                    advice="Call `plan_view` to get the present generation of the definition.",
                )
            building = None if generation == entry.current else generation
            known = {entry.current: entry.definition, generation: definition}
            new = CatalogEntry(current=entry.current, building=building, definitions=known)
        self._catalog.put(definition.name, new)
        return new

    def _show(self, entry: CatalogEntry) -> None:
        """Lets the store follow the catalogue, and forgets what is neither seen nor built."""
        name = self.definition.name
        self._store.show(name, entry.current)
        PROCESS.reach("views: swapped in the store")
        for stored in self._store.stored():
            if stored.definition.name == name and stored.definition.generation not in entry.definitions:
                self._store.drop(name, stored.definition.generation)

    def _stored_applied(self) -> Applied:
        for stored in self._store.stored():
            if (stored.definition.name, stored.definition.generation) == (
                self.definition.name,
                self.definition.generation,
            ):
                return stored.applied
        return Applied()

    def _catch_up(self) -> None:
        """Brings the store to the end of the topic of changes."""
        held = self._log.offsets(self._topic.name)
        ends = {number: span.stop for number, span in held.items()}
        applied = self._applied
        if applied.topic_id == self._topic.id and applied.positions == ends:
            return
        if self._can_go_on(held):
            missing = self._log.read(self._topic.name, start=applied.positions, end=ends)
            delta, clear = delta_of(missing, self.definition), False
        else:
            self._check_whole(held)
            delta, clear = Delta(fold(self._log, self.definition, ends), pa.array([], pa.string())), True
        epochs = self._log.read(
            self._topic.name, start={n: max(end - 1, held[n].start) for n, end in ends.items()}, end=ends
        )
        epoch = max(epochs.column("epoch").to_pylist(), default=applied.epoch)
        after = Applied(topic_id=self._topic.id, positions=ends, query=applied.query, epoch=epoch)
        PROCESS.reach("views: catching up")
        self._apply(delta, after, clear=clear)

    def _can_go_on(self, held: dict[int, range]) -> bool:
        """Whether the changes that the store lacks are all there; a compacted topic forgets tombstones after a while."""
        applied = self._applied
        if applied.topic_id != self._topic.id or applied.positions.keys() != held.keys():
            return False
        if any(not span.start <= applied.positions[number] <= span.stop for number, span in held.items()):
            return False
        if not self._topic.compact:
            return True
        since = self._log.clock() - self._topic.tombstones_us
        kept = self._log.offsets_at(self._topic.name, since, by="appended")
        return all(applied.positions[number] >= offset for number, offset in kept.items())

    def _check_whole(self, held: dict[int, range]) -> None:
        """Refuses to make a store of what retention has left: rows would be missing without a word."""
        first = max(span.start for span in held.values())
        if first:
            raise EventsMissed(
                f"The store of view {self.definition.name!r} must be rebuilt from its topic, but retention has removed changes.",
                advice="Restore a backup of the store, or rebuild the view as a new generation.",
                last=first - 1,
            )

    def _apply(self, delta: Delta, after: Applied, *, clear: bool = False) -> None:
        self._store.apply(self.definition, delta, before=self._applied, after=after, clear=clear)
        self._applied = after

    def _checked(self, rows: pa.Table) -> tuple[pa.Table, pa.Array]:
        """The rows in the view's own types with their keys, of each key the last; and which of them remove their key."""
        batch = to_batch(rows, self.definition.schema)
        gone = pa.array(np.zeros(batch.num_rows, bool))
        if "_deleted" in batch.schema.names:
            gone = batch.column("_deleted").fill_null(False)
        key = self.definition.key
        keys = key_texts(batch, key) if key else self._row_numbers(batch.num_rows)
        columns = [keys, *(batch.column(name) for name in self.definition.schema.names)]
        table = pa.Table.from_arrays(columns, schema=stored_schema(self.definition)).append_column("_gone", gone)
        table = last_of_each(table, KEY)
        return table.drop_columns(["_gone"]), table.column("_gone").combine_chunks()

    def _row_numbers(self, count: int) -> pa.Array:
        """Keys for rows that have none: the offsets that they will have, since only this stage appends to the topic."""
        first = sum(self._applied.positions.values())
        return pa.array([f"{first + at:016d}" for at in range(count)], pa.string())

    def _old_rows(self, table: pa.Table) -> pa.Table:
        if not self.definition.key:
            return stored_schema(self.definition).empty_table()
        keys = None if self.definition.mode == "complete" else table.column(KEY).combine_chunks()
        selection = ViewSelection(keys=keys)
        return self._store.read(self.definition.name, selection, generation=self.definition.generation).rows

    def _check_added(self, table: pa.Table, old: pa.Table, gone: pa.Array) -> None:
        """Rows of an append view are there for good: nothing is removed, and a key comes once."""
        if pc.any(gone).as_py():
            raise InvalidInput(
                f'View {self.definition.name!r} has mode="append" but received rows with _deleted.',
                advice='Use mode="update" for rows that can be deleted.',
            )
        changed = changes_of(self.definition, table, old, gone=gone, epoch=0)
        changed = changed.filter(pc.not_equal(changed.column("op"), "insert"))
        if len(changed):
            raise InvalidInput(
                f'View {self.definition.name!r} has mode="append", but key {changed["key"][0].as_py()!r} already exists '
                "with another row.",
                advice='Use mode="update" for rows that change, or use a unique key.',
            )

    def _with_tombstones(self, changes: pa.Table) -> pa.Table:
        if not self._topic.compact:
            return changes
        return changes.append_column("_deleted", pc.equal(changes.column("op"), DELETE))
