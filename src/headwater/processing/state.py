"""The state of an operator in one partition: tables of rows that live from batch to batch, each batch a version of its own.

A task loads the version of the batch before, changes it and saves its own. Spark may run a batch several times: each time it begins with
the same version and writes the same one. When batch N runs, N-1 is committed, so what only versions before N-1 need is removed.

What is loaded must be what was saved last: by this operator, with these settings and columns (the fingerprint), by this query, in the
version before. Anything else is refused with what to do about it; nothing is guessed. The number of partitions may be another one: then
each new partition takes its rows out of all old ones.

Thread-safety: none; a state belongs to one task.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headwater.model.errors import Conflict, Damaged, InvalidInput
from headwater.processing import runs
from headwater.processing.runs import AT, GONE, H1, H2, MIN_TIME, Keys, Kind
from headwater.processing.state_files import RunAt, StateFolder, Version

OWNER = "_owner"
"""In a table whose key is finer than the operator's: the first hash of the operator's key, by which a row belongs to a partition."""

KEY_FIELDS = [pa.field(H1, pa.int64()), pa.field(H2, pa.int64())]

Keep = Callable[[pa.Table], Any]
"""Which rows may still be needed; asked when runs are merged."""


class TableSpec(msgspec.Struct, frozen=True):
    """A table of an operator's state: what its rows mean (see `runs`), and their columns beside the key's hashes."""

    kind: Kind
    fields: Sequence[pa.Field]

    @property
    def schema(self) -> pa.Schema:
        """All columns."""
        more = {"keyed": [pa.field(GONE, pa.bool_())], "timed": [pa.field(AT, pa.int64())], "gathered": []}[self.kind]
        return pa.schema([*KEY_FIELDS, *more, *self.fields])


class StateTable:
    """One table: what earlier versions hold, and what this batch adds."""

    def __init__(
        self, spec: TableSpec, held: Sequence[tuple[RunAt | None, pa.Table]] = (), *, floor: int = MIN_TIME
    ) -> None:
        self.spec = spec
        self.floor = floor
        self.keeps: Keep | None = None
        self._held = list(held)
        self._fresh: list[pa.Table] = []

    def __len__(self) -> int:
        """How many rows there are; some may have been replaced by others."""
        return sum(run.num_rows for run in self._runs())

    def find(self, keys: Keys) -> runs.Found:
        """The rows of keys, and for each the number of its key."""
        find = runs.find_keyed if self.spec.kind == "keyed" else runs.find_gathered
        return find(self._runs(), keys) or (self.empty(), np.zeros(0, np.int64))

    def put(self, rows: pa.Table) -> None:
        """Adds rows. In a keyed table they replace what there was of their keys."""
        if self.spec.kind == "keyed" and GONE not in rows.column_names:
            rows = rows.append_column(GONE, pa.repeat(pa.scalar(False), rows.num_rows))
        rows = rows.select(self.spec.schema.names).cast(self.spec.schema)
        if rows.num_rows:
            self._fresh.append(runs.in_order(rows, self.spec.kind))

    def remove(self, keys: Keys) -> None:
        """Forgets keys of a keyed table."""
        if not len(keys):
            return
        columns: dict[str, Any] = {
            H1: pa.array(keys.h1),
            H2: pa.array(keys.h2),
            GONE: pa.repeat(pa.scalar(True), len(keys)),
        }
        nulls = {field.name: pa.nulls(len(keys), field.type) for field in self.spec.fields}
        self.put(pa.table(columns | nulls))

    def take(self, until: int) -> pa.Table:
        """The rows of a timed table up to a time, in its order; they are no longer in it."""
        found = self.between(self.floor, until)
        self.floor = max(self.floor, until)
        return found

    def between(self, after: int, until: int) -> pa.Table:
        """The rows of a timed table later than `after`, up to `until`."""
        found = runs.between(self._runs(), max(after, self.floor), until)
        return self.empty() if found is None else found

    def rows(self) -> pa.Table:
        """Everything that is in it."""
        held = self._runs()
        if self.spec.kind == "timed":
            held = runs.above(held, self.floor)
        if not held:
            return self.empty()
        return runs.merge(held, self.spec.kind, is_oldest=True)

    def empty(self) -> pa.Table:
        """No rows, with the right columns."""
        return self.spec.schema.empty_table()

    def next_runs(self, epoch: int) -> tuple[list[RunAt], pa.Table | None]:
        """The runs of the version that comes now, and the one of them that is new."""
        held, fresh = self._held, list(self._fresh)
        if self.spec.kind == "timed":
            held = [(at, run) for at, run in held if runs.above([run], self.floor)]
            fresh = runs.above(fresh, self.floor)
        homeless = [run for at, run in held if at is None]
        held = [(at, run) for at, run in held if at is not None]
        fresh = homeless + fresh
        if not fresh:
            return [at for at, _ in held if at is not None], None
        own = runs.merge(fresh, self.spec.kind, is_oldest=not held)
        count = runs.tidied([*(run.num_rows for _, run in held), own.num_rows]) - 1
        if count > 0:
            merged, held = [run for _, run in held[-count:]], held[:-count]
            if self.spec.kind == "timed":
                merged = runs.above(merged, self.floor)
            own = runs.merge([*merged, own], self.spec.kind, is_oldest=not held)
            if self.keeps is not None:
                own = own.filter(self.keeps(own))
        kept = [at for at, _ in held if at is not None]
        return ([*kept, RunAt(epoch, own.num_rows)], own) if own.num_rows else (kept, None)

    def _runs(self) -> list[pa.Table]:
        return [run for _, run in self._held] + self._fresh


class State:
    """All tables of an operator in one partition."""

    def __init__(self, tables: Mapping[str, StateTable]) -> None:
        self.tables = tables

    def __getitem__(self, name: str) -> StateTable:
        return self.tables[name]


class StateStore:
    """Loads and saves the versions of one operator's state in one partition."""

    def __init__(
        self, url: str, *, uid: str, query: str, fingerprint: str, partition: int, partitions: int,
        specs: Mapping[str, TableSpec],
    ) -> None:  # fmt: skip
        self._root = f"{url}/{uid}"
        self._folder = StateFolder(f"{self._root}/{folder_name(partition, partitions)}")
        self._blank = Version(uid, fingerprint, query, partition, partitions, -1, {})
        self._specs = specs

    def load(self, before: int) -> State:
        """The state of version `before`; nothing at all where a query begins (-1)."""
        if before < 0:
            return State({name: StateTable(spec) for name, spec in self._specs.items()})
        if before in self._folder.epochs():
            version = self._checked(self._folder.version(before), self._folder)
            return State(
                {name: StateTable(spec, self._held(version, name), floor=version.floors.get(name, MIN_TIME))
                 for name, spec in self._specs.items()}
            )  # fmt: skip
        return self._rescaled(before)

    def save(self, state: State, epoch: int) -> None:
        """Saves the version of a batch, and removes what no batch will ask for again."""
        tables, fresh = {}, {}
        for name, table in state.tables.items():
            tables[name], run = table.next_runs(epoch)
            if run is not None:
                fresh[name] = run
        floors = {name: table.floor for name, table in state.tables.items() if table.floor > MIN_TIME}
        version = msgspec.structs.replace(self._blank, epoch=epoch, tables=tables, floors=floors)
        self._folder.write(version, fresh)
        self._collect(epoch)

    def _collect(self, epoch: int) -> None:
        there = self._folder.epochs()
        if epoch - 1 not in there:
            return
        needed = self._folder.version(epoch - 1).needs | {epoch}
        for old in there:
            if old < epoch and old not in needed:
                self._folder.remove(old)

    def _held(
        self, version: Version, name: str, folder: StateFolder | None = None
    ) -> list[tuple[RunAt | None, pa.Table]]:
        found: list[tuple[RunAt | None, pa.Table]] = []
        for at in version.tables.get(name, ()):
            run = (folder or self._folder).rows(name, at.epoch)
            if run.num_rows != at.rows:
                raise Damaged(
                    f"Version {at.epoch} of the state in {self._folder.url} is not the one that version {version.epoch} was made with.",
                    advice="Restore the folder, or remove the operator's state to have it rebuilt from the log.",
                )
            found.append((at, run))
        return found

    def _checked(self, version: Version, folder: StateFolder) -> Version:
        ours = self._blank
        if version.fingerprint != ours.fingerprint:
            raise Conflict(
                f"The state in {folder.url} was made by operator {version.uid!r} with other settings or columns.",
                advice="Give the changed operator another uid=, or remove its state to have it rebuilt from the log.",
            )
        if version.query != ours.query:
            raise Conflict(
                f"The state in {folder.url} belongs to another query ({version.query}).",
                advice="Each query needs a state of its own: give it another state= or uid=, or restore its checkpoint.",
            )
        return version

    def _rescaled(self, before: int) -> State:
        """The rows of this partition out of the partitions of another number of them."""
        held: dict[str, list[tuple[RunAt | None, pa.Table]]] = {name: [] for name in self._specs}
        floors: dict[str, list[int]] = {name: [] for name in self._specs}
        for folder in self._others(before):
            version = self._checked(folder.version(before), folder)
            for name, spec in self._specs.items():
                table = StateTable(spec, self._held(version, name, folder), floor=version.floors.get(name, MIN_TIME))
                floors[name].append(table.floor)
                held[name].append((None, self._mine(table.rows())))
        return State(
            {name: StateTable(spec, [(at, run) for at, run in held[name] if run.num_rows], floor=min(floors[name]))
             for name, spec in self._specs.items()}
        )  # fmt: skip

    def _others(self, before: int) -> Iterable[StateFolder]:
        """The partitions of another number of them, all of which have a version."""
        found: dict[int, list[StateFolder]] = {}
        for name in StateFolder(self._root).names():
            number, _, count = name.partition("-of-")
            if not (number.isdigit() and count.isdigit()):
                continue
            folder = StateFolder(f"{self._root}/{name}")
            if before in folder.epochs():
                found.setdefault(int(count), []).append(folder)
        for partitions, folders in found.items():
            if len(folders) == partitions:
                return folders
        raise Damaged(
            f"Version {before} of the state of operator {self._blank.uid!r} is missing in {self._root}.",
            advice="Restore the folder, or remove the operator's state and its checkpoint to have both rebuilt from the log.",
        )

    def _mine(self, rows: pa.Table) -> pa.Table:
        owner = OWNER if OWNER in rows.column_names else H1
        return rows.filter(
            pa.array(partition_of(runs.column(rows, owner), self._blank.partitions) == self._blank.partition)
        )


def partition_of(h1: Any, partitions: int) -> Any:
    """Which state partition keys belong to, by their first hash."""
    return np.mod(h1, partitions)


def folder_name(partition: int, partitions: int) -> str:
    """The folder of a partition."""
    return f"{partition:05d}-of-{partitions:05d}"


def fingerprint_of(*parts: object) -> str:
    """A short text that is another one when any part is."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def check_uid(uid: str) -> str:
    """The name of an operator's state is the name of a folder."""
    if not uid or len(uid) > 200 or not all(sign.isalnum() or sign in "._-" for sign in uid) or uid[0] in ".-":
        raise InvalidInput(f"uid={uid!r:.80} is no name for a state.", advice="Use letters, digits, dots and dashes.")
    return uid
