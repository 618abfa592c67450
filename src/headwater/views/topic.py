"""A view's topic: `<view>.changes`, which readers of the view follow from one generation to the next.

The first generation of a view writes its changes here. A later one has a topic of its own, `<view>.changes.<generation>`, which its
store is made of. The swap to it appends to `<view>.changes` the difference between the rows of both generations, in the transaction
that decides the swap; from then on each batch appends its changes to both topics, in one transaction.

Invariant: folded to its end, `<view>.changes` is the rows of the generation that the last marker of the stage `views.<view>.swaps` names
(of the first one where there is no marker). `followed` gives that generation. It is the current one, except where

- the columns of the new generation do not fit the topic (`SchemaConflict`): the topic then stays with the old generation;
- the swap was made by a version of Headwater that did not do this: the next maintainer appends the difference.

The changes of a difference have the epoch `SWAPPED`. Thread-safety: none; one thread at a time maintains a view.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.arrow.table import Newest
from headwater.log.clients.stage import Stage
from headwater.log.log import Log
from headwater.log.port.topic import Durability, Topic
from headwater.model.errors import EventsMissed, TopicNotFound
from headwater.model.marker import Marker
from headwater.model.schema import has_room_for, widen
from headwater.views.changes import (
    CHANGES_KEY,
    DELETE,
    INSERT,
    UPDATE,
    changes_of,
    changes_schema,
    rows_of,
    stored_schema,
)
from headwater.views.definition import ViewDefinition

SWAPPED = -1
"""The epoch of changes that a swap makes; those of batches count from 0."""

_QUERY = "swaps"


class ViewTopic:
    """The topic of a view, for the maintainer of a generation that has another topic of its own."""

    def __init__(
        self, log: Log, definition: ViewDefinition, *, compact: bool = False, durability: Durability | None = None
    ) -> None:
        """Makes the topic where it is missing, and room for the columns of the generation; `SchemaConflict`."""
        self._log = log
        self._definition = definition
        self.name = first_of(definition).changes
        schema = changes_schema(definition)
        topic = log.create_topic(
            self.name,
            schema,
            key=CHANGES_KEY,
            partitions=1,
            compact=compact,
            durability=durability,
            exist_ok=True,
        )
        shared = shared_schema(topic.schema, definition)
        if shared != topic.schema:
            topic = log.alter_topic(self.name, schema=shared)
        self._topic: Topic = topic
        self._wide = first_of(definition, columns_of=topic)

    @property
    def is_followed(self) -> bool:
        """Whether the topic has the changes of this generation."""
        return followed(self._log, self._definition.name) == self._definition.generation

    def changes(self, changes: pa.Table) -> pa.Table:
        """The changes of a batch with the columns of the topic, some of which other generations had."""
        return self._with_tombstones(changes.cast(changes_schema(self._wide)))

    def folded(self) -> pa.Table:
        """The rows that the topic holds now; `EventsMissed` where retention has removed some of its changes."""
        held = self._log.offsets(self.name)
        first = max(span.start for span in held.values())
        if first:
            raise EventsMissed(
                f"Topic {self.name!r} lacks changes for generation {self._definition.generation} of its view, because of retention.",
                advice="Delete the topic. The application then creates it with all rows of the view, and its readers begin again.",
                last=first - 1,
            )
        return fold(self._log, self._wide, {number: span.stop for number, span in held.items()})

    def difference(self, old: pa.Table, new: pa.Table, *, pairs: bool) -> pa.Table:
        """The changes that make of the rows `old` the rows `new`: first those that go, then those that change or come.

        With `pairs` a key is the same row in both, and a row that differs is an update. Without, it is removed and added: the
        key means something else, or it is only the number of a row.
        """
        wide = msgspec.structs.replace(self._wide, mode="complete")
        schema = stored_schema(wide)
        olds, news = (_widened(rows, schema) for rows in (old, new))
        none_gone = pa.array(np.zeros(new.num_rows, bool))
        changes = changes_of(wide, news, olds, gone=none_gone, epoch=SWAPPED)
        if not pairs:
            changes = _split(changes)
        is_first = pc.equal(changes.column("op"), DELETE)
        ordered = pa.concat_tables([changes.filter(is_first), changes.filter(pc.invert(is_first))])
        return self._with_tombstones(ordered)

    def commit(self, difference: pa.Table, *, decision: Iterable[tuple[str, Any]] = ()) -> None:
        """Appends a difference together with what decides the swap, all of it or nothing, and only once."""
        generation = self._definition.generation
        appends = [*decision, *([(self.name, difference)] if difference.num_rows else [])]
        stage = Stage(self._log.appender, _stage_name(self._definition.name), gaps=True)
        stage.commit(Marker(query=_QUERY, epoch=generation, ends=generation), appends)

    def _with_tombstones(self, changes: pa.Table) -> pa.Table:
        if not self._topic.compact:
            return changes
        return changes.append_column("_deleted", pc.equal(changes.column("op"), DELETE))


def fold(log: Log, definition: ViewDefinition, ends: dict[int, int]) -> pa.Table:
    """The rows that the changes up to these ends make, with their keys; memory is bounded by twice the rows."""
    newest = Newest(log.topic(definition.changes), as_of=None)
    for batch in log.scan(definition.changes, end=ends, columns=newest.columns):
        newest.add(batch)
    last = newest.table(log.store)
    return rows_of(last.filter(pc.not_equal(last.column("op"), DELETE)), definition)


def shared_schema(topic: pa.Schema, definition: ViewDefinition) -> pa.Schema:
    """The columns of a view's topic that has room for another generation, too; `SchemaConflict`.

    Columns that the generation has not stay, and are null in its rows; a type stays where it holds all values of the other.
    """
    fields = {field.name: field for field in definition.schema}
    names = {name.lower() for name in fields}
    for field in topic.field("new").type:
        other = fields.get(field.name)
        stays = field.name.lower() not in names if other is None else has_room_for(field.type, other.type)
        if stays:
            fields[field.name] = field
    both = msgspec.structs.replace(definition, schema=pa.schema(list(fields.values())))
    return widen(topic, changes_schema(both))


def followed(log: Log, name: str) -> int:
    """The generation of a view that its topic follows."""
    last = log.store.stage_state(_stage_name(name)).last
    return 1 if last is None else last.epoch


def first_of(definition: ViewDefinition, *, columns_of: Topic | None = None) -> ViewDefinition:
    """A definition whose topic is the view's own, with the columns of the rows in a topic."""
    schema = definition.schema if columns_of is None else pa.schema(list(columns_of.schema.field("new").type))
    return msgspec.structs.replace(definition, generation=1, schema=schema)


def changes_topic(log: Log, definition: ViewDefinition) -> str:
    """The topic to read for the rows of a view's current generation, and of later ones where that is possible."""
    own = first_of(definition).changes
    return (
        own if followed(log, definition.name) == definition.generation and _is_there(log, own) else definition.changes
    )


def _is_there(log: Log, topic: str) -> bool:
    try:
        log.topic(topic)
    except TopicNotFound:
        return False
    return True


def _stage_name(view: str) -> str:
    return f"views.{view}.swaps"


def _split(changes: pa.Table) -> pa.Table:
    """Each update as a deletion and an insertion."""
    updates = changes.filter(pc.equal(changes.column("op"), UPDATE))
    others = changes.filter(pc.not_equal(changes.column("op"), UPDATE))
    parts = [others]
    for op, column in ((DELETE, "new"), (INSERT, "old")):
        part = updates.set_column(1, changes.schema.field("op"), pa.array([op] * updates.num_rows, pa.string()))
        at = part.schema.get_field_index(column)
        field = part.schema.field(at)
        parts.append(part.set_column(at, field, pa.nulls(part.num_rows, field.type)))
    return pa.concat_tables(parts)


def _widened(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows with the columns of a schema; those that they lack are null."""
    columns = [
        rows.column(field.name).cast(field.type)
        if field.name in rows.schema.names
        else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
