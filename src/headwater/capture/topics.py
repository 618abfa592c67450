"""The topics of a captured table, and the events that its changes are there.

    users            the table: its columns as they are, then `committed`, the event time; a deleted row is a tombstone; compacted
    users.changes    its history: the key, op, before, after, position, transaction, transaction_order, committed

The key of both is the primary key. One of several columns is the text of a JSON array in the first column, `primary_key`. Columns that
are not in the key may be null, whatever the database says: a column that it drops is null from then on.

Functions only, no state; columns, not rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.capture.byte_columns import Indexes
from headwater.capture.source import (
    BEGIN,
    COMMITTED,
    DELETE,
    END,
    READ,
    TRANSACTIONS_SCHEMA,
    SourceTable,
    changes_schema,
)
from headwater.log.arrow.json_types import json_texts
from headwater.log.arrow.table import Newest
from headwater.log.log import Log
from headwater.log.port.topic import Topic
from headwater.model.errors import NotCapturable, Unsupported
from headwater.model.schema import DELETED, HEADERS

PRIMARY_KEY = "primary_key"
TIME = "committed"
HISTORY = ".changes"
EVENT_BYTES_MAX = 256 << 20

_EVERYTHING = (1 << 63) - 1
_OPTIONAL = ("transaction", "transaction_order")


def key_column(table: SourceTable) -> str:
    """The column that is the key of a table's topics."""
    return table.key[0] if len(table.key) == 1 else PRIMARY_KEY


def table_schema(table: SourceTable) -> pa.Schema:
    """The columns of the topic that is the table."""
    added = [] if len(table.key) == 1 else [PRIMARY_KEY]
    for name in (*added, TIME):
        if name in table.schema.names:
            raise NotCapturable(
                f"Table {table.name!r} has a column {name!r}, which is reserved for the capture.",
                advice=f"Rename the column in the database: ALTER TABLE {table.name} RENAME COLUMN {name} TO …; or leave out the table.",
            )
    columns = [field.with_nullable(field.name not in table.key) for field in table.schema]
    first = [pa.field(name, pa.string(), nullable=False) for name in added]
    return pa.schema([*first, *columns, pa.field(TIME, COMMITTED)])


def history_schema(table: SourceTable) -> pa.Schema:
    """The columns of the topic that is the table's history."""
    key = table_schema(table).field(key_column(table))
    columns = changes_schema(table.schema)
    if key.name in columns.names:
        raise NotCapturable(
            f"The key {key.name!r} of table {table.name!r} has the name of a column of its history.",
            advice=f"Rename the column in the database: ALTER TABLE {table.name} RENAME COLUMN {key.name} TO …; or leave out the table.",
        )
    return pa.schema([key, *(field.with_nullable(field.nullable or field.name in _OPTIONAL) for field in columns)])


def key_values(rows: pa.Table | pa.RecordBatch, table: SourceTable) -> pa.Array:
    """The keys of rows that have at least the key columns, as the topics have them."""
    columns = [one(rows.column(name)) for name in table.key]
    if len(columns) == 1:
        return columns[0]
    parts = pc.binary_join_element_wise(*(json_texts(column) for column in columns), ",")
    return pc.binary_join_element_wise("[", parts, "]", "")


def keys_of_changes(changes: Mapping[str, pa.Array], table: SourceTable) -> pa.Array:
    """The key of each change: of the row after it, or, where that is gone, before it."""
    after, before = changes["after"], changes["before"]
    if not after.null_count:
        columns = [after.field(name) for name in table.key]
    else:
        gone = after.is_null()
        columns = [pc.if_else(gone, pc.struct_field(before, name), pc.struct_field(after, name)) for name in table.key]
    if len(columns) == 1:
        return columns[0]
    return key_values(pa.RecordBatch.from_arrays(columns, names=list(table.key)), table)


def events_of_changes(
    changes: pa.Table, table: SourceTable, committed: pa.Array
) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """What changes are in the table's topic, and in its history; `committed` is when each of them counts as committed."""
    given = columns_of(changes)
    keys, after, before = keys_of_changes(given, table), given["after"], given["before"]
    has_deleted = after.null_count > 0
    deleted = pc.equal(given["op"], DELETE) if has_deleted else pa.repeat(False, len(after))
    columns = {PRIMARY_KEY: keys} if len(table.key) > 1 else {}
    columns |= dict(zip((field.name for field in after.type), after.flatten(), strict=True))
    if has_deleted:
        for name in table.key:
            columns[name] = pc.if_else(deleted, pc.struct_field(before, name), columns[name])
    columns |= {TIME: committed, DELETED.name: deleted}
    history = {key_column(table): keys, **given, TIME: committed}
    if HEADERS.name in given:
        columns[HEADERS.name] = given[HEADERS.name]
    return pa.record_batch(columns), pa.record_batch(history)


def events_of_rows(
    rows: pa.Table, table: SourceTable, *, position: str, committed_us: int
) -> tuple[pa.Table, pa.Table]:
    """What rows of a backfill are in the table's topic, and in its history."""
    count, keys = rows.num_rows, key_values(rows, table)
    columns: dict[str, Any] = {PRIMARY_KEY: keys} if len(table.key) > 1 else {}
    columns |= {name: one(rows.column(name)) for name in rows.schema.names}
    columns[TIME] = times(np.full(count, committed_us))
    fields = list(changes_schema(table.schema).field("after").type)
    after = pa.StructArray.from_arrays([columns[field.name].cast(field.type) for field in fields], fields=fields)
    history = {
        key_column(table): keys,
        "op": pa.repeat(READ, count),
        "after": after,
        "position": pa.repeat(position, count),
        TIME: columns[TIME],
    }
    if HEADERS.name in columns:
        history[HEADERS.name] = columns[HEADERS.name]
    return pa.table(columns), pa.table(history)


def removals(
    keys: pa.Array, table: SourceTable, *, op: str, position: pa.Array, committed: pa.Array
) -> tuple[pa.Table, pa.Table]:
    """Tombstones for keys, and the same in the history by the given op; what the rows were is not known."""
    key = key_column(table)
    deleted = pa.array(np.ones(len(keys), bool))
    columns = {key: keys, TIME: committed, DELETED.name: deleted}
    history = {key: keys, "op": pa.repeat(op, len(keys)), "position": position, TIME: committed}
    return pa.table(columns), pa.table(history)


def transaction_rows(
    names: pa.Array, positions: pa.Array, committed_us: Indexes, *, tables: list[str], changes: Indexes
) -> pa.Table:
    """Some transactions, in commit order: `changes` has a row for each table and a column for each transaction.

    `positions` are those of begin and end in turn, so twice as many.
    """
    count = len(names)
    twice = pa.array(np.repeat(np.arange(count), 2))
    table, transaction = np.nonzero(changes.T)[::-1]
    sizes = np.zeros(2 * count, np.int64)
    sizes[1::2] = np.bincount(transaction, minlength=count)
    offsets = np.zeros(2 * count + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    begun = np.zeros(2 * count, bool)
    begun[0::2] = True
    entries = pa.array(changes[table, transaction])
    keys = pa.array(tables, pa.string()).take(pa.array(table)) if tables else pa.array([], pa.string())
    type_ = TRANSACTIONS_SCHEMA.field("tables").type
    return pa.Table.from_arrays(
        [
            names.take(twice),
            pa.array([BEGIN, END] * count, pa.string()),
            positions,
            pa.array(np.repeat(committed_us, 2)).cast(COMMITTED),
            pa.array(np.repeat(changes.sum(axis=0), 2), mask=begun),
            pa.MapArray.from_arrays(pa.array(offsets), keys, entries, type=type_, mask=pa.array(begun)),
        ],
        schema=TRANSACTIONS_SCHEMA,
    )


def live_keys(log: Log, topic: Topic) -> pa.Array:
    """The keys that a topic's table has."""
    newest = Newest(topic, as_of=None)
    assert topic.key is not None
    columns = [topic.key, DELETED.name, *(["_partition"] if topic.splits else [])]
    for batch in log.scan(topic.name, columns=columns):
        newest.add(batch)
    return one(newest.table(log.store, columns=[topic.key]).column(topic.key))


def reached_us(log: Log, *topics: str) -> int:
    """The latest event time that any of the topics has been told, by an event or by a heartbeat; 0 where the log does not keep it."""
    store = log.store
    try:
        places = [(name, number) for name in topics for number in range(store.topic(name).partitions)]
        return max((store.reached(*place, offset=_EVERYTHING) for place in places), default=0)
    except Unsupported:  # Kafka
        return 0


def fitted(events: pa.Table | pa.RecordBatch, schema: pa.Schema) -> pa.Table | pa.RecordBatch:
    """Events with their structs as a topic has them: fields that these lack are null, narrower ones are widened."""
    for at, (name, type_) in enumerate(zip(events.schema.names, events.schema.types, strict=True)):
        if pa.types.is_struct(type_) and name in schema.names and type_ != (wanted := schema.field(name).type):
            events = events.set_column(at, name, _struct(one(events.column(at)), wanted))
    return events


def times(us: Any) -> pa.Array:
    """Microseconds since 1970 as a column of times."""
    return pa.array(np.asarray(us, np.int64)).view(COMMITTED)


def _struct(column: pa.Array, type_: pa.DataType) -> pa.Array:
    there = {field.name: at for at, field in enumerate(column.type)}
    columns = [
        column.field(there[field.name]).cast(field.type) if field.name in there else pa.nulls(len(column), field.type)
        for field in type_
    ]
    return pa.StructArray.from_arrays(columns, fields=list(type_), mask=column.is_null())


def one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column in one piece."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def columns_of(rows: pa.Table) -> dict[str, pa.Array]:
    """All columns by their names, each in one piece."""
    batches = rows.to_batches()
    pieces = batches[0].columns if len(batches) == 1 else map(one, rows.columns)
    return dict(zip(rows.schema.names, pieces, strict=True))
