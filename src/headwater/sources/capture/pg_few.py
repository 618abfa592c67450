"""A few of pgoutput's messages as `Changes`, read one by one: what a single small transaction is, for which nobody should have to wait.

`pg_changes` takes whole blocks apart by columns, by calls that cost as much for one row as for some hundred; a transaction of one row took
three times as long that way (decision 0017).

Invariant: `few_changes` gives what `pg_changes` would give of the same messages, or None: where the block has anything but whole
transactions of plain inserts, updates and deletes (a table described, a key that changed, a value that was not sent), it is left to that.
Functions only, no state.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pyarrow as pa

from headwater.sources.capture.pg_positions import end_text, event_text
from headwater.sources.capture.pg_tables import Captured, Types
from headwater.sources.capture.pgoutput import (
    BEGIN,
    COMMIT,
    DELETE,
    EPOCH_US,
    INSERT,
    NULL,
    OLD_ROW,
    TEXT,
    UPDATE,
    Block,
    Relation,
)
from headwater.sources.capture.source import BEGIN as BEGUN
from headwater.sources.capture.source import COMMITTED, END, TRANSACTIONS_SCHEMA, ChangeBatch, Changes, changes_schema
from headwater.sources.capture.source import DELETE as DELETED
from headwater.sources.capture.source import INSERT as INSERTED
from headwater.sources.capture.source import UPDATE as UPDATED

FEW_MESSAGES = 32

_NEW_ROW = ord("N")
_BEGIN = struct.Struct(">QqI")
_COMMIT = struct.Struct(">QQ")
_OID = struct.Struct(">I")
_WIDTH = struct.Struct(">H")

Row = list[str | None]


class _Transaction(NamedTuple):
    lsn: int
    name: str
    committed_us: int
    events: dict[int, int]
    """How many there are, by the oid of the table."""


class _Event(NamedTuple):
    op: str
    before: Row | None
    after: Row | None
    order: int
    transaction: _Transaction


class Few(NamedTuple):
    """What some messages say, up to where they go, and the numbers of their transactions."""

    changes: Changes
    end: int
    xids: list[int]


def few_changes(
    block: Block,
    captured: Mapping[int, Captured],
    relations: Mapping[int, Relation],
    *,
    types: Types,
    after: int,
    end: int,
) -> Few | None:
    """The changes of a small block behind which no transaction is open; None where they have to be read by columns.

    What committed before `after` is left out, and `end` is how far everything was given before.
    """
    if len(block.starts) > FEW_MESSAGES:
        return None
    data = block.data.tobytes()
    events: dict[int, list[_Event]] = {}
    transactions: list[_Transaction] = []
    xids: list[int] = []
    current: _Transaction | None = None
    for start in block.starts.tolist():
        kind = data[start]
        if kind == BEGIN:
            lsn, time_us, xid = _BEGIN.unpack_from(data, start + 1)
            xids.append(xid)
            current = _Transaction(lsn, f"{xid}:{end_text(lsn)}", time_us + EPOCH_US, {})
        elif kind == COMMIT:
            end = max(end, _COMMIT.unpack_from(data, start + 2)[1])
            if current is not None and current.events:
                transactions.append(current)
            current = None
        elif kind not in (INSERT, UPDATE, DELETE) or current is None:
            return None
        elif (oid := _OID.unpack_from(data, start + 1)[0]) in captured and current.lsn >= after:
            found = _row_change(data, start, captured[oid], relations[oid])
            if found is None:
                return None
            order = sum(current.events.values()) + 1
            current.events[oid] = current.events.get(oid, 0) + 1
            events.setdefault(oid, []).append(_Event(*found, order, current))
    if current is not None:
        return None
    batches = tuple(
        ChangeBatch(captured[oid].info.name, _event_table(events[oid], captured[oid], relations[oid], types))
        for oid in sorted(events)
    )
    ended = _ended(transactions, lambda oid: captured[oid].info.name) if transactions else None
    return Few(Changes(batches=batches, transactions=ended, end=end_text(end)), end, xids)


def _row_change(
    data: bytes, start: int, captured: Captured, relation: Relation
) -> tuple[str, Row | None, Row | None] | None:
    """What a message did to a row, as the row was before and after; None where that cannot be seen from it alone."""
    kind, tag, before, after = data[start], data[start + 5], None, None
    if any(column.generated for column in captured.table.columns):
        return None
    at = start + 6
    if tag != _NEW_ROW:
        read = _row(data, at)
        if read is None or (kind == UPDATE and tag != OLD_ROW):
            return None
        before, at = read
        at += 1
    if kind != DELETE:
        read = _row(data, at)
        if read is None:
            return None
        after = read[0]
    if before is not None and after is not None:
        key = [at for at, column in enumerate(relation.columns) if column.name in captured.info.key]
        if any(before[at] != after[at] for at in key):
            return None
    return INSERTED if kind == INSERT else DELETED if kind == DELETE else UPDATED, before, after


def _row(data: bytes, at: int) -> tuple[Row, int] | None:
    """A row and where it ends; None where a value was not sent."""
    (width,) = _WIDTH.unpack_from(data, at)
    at += 2
    row: Row = []
    for _ in range(width):
        kind = data[at]
        if kind == TEXT:
            first = at + 5
            at = first + _OID.unpack_from(data, at + 1)[0]
            row.append(data[first:at].decode("utf-8", "replace"))
        elif kind == NULL:
            row.append(None)
            at += 1
        else:
            return None
    return row, at


def _event_table(events: list[_Event], captured: Captured, relation: Relation, types: Types) -> pa.Table:
    schema = changes_schema(captured.info.schema)
    return pa.Table.from_arrays(
        [
            pa.array([event.op for event in events], pa.string()),
            _rows([event.before for event in events], captured, relation, types),
            _rows([event.after for event in events], captured, relation, types),
            pa.array([event_text(event.transaction.lsn, event.order) for event in events], pa.string()),
            pa.array([event.transaction.name for event in events], pa.string()),
            pa.array([event.order for event in events], pa.int64()),
            pa.array([event.transaction.committed_us for event in events], pa.int64()).view(COMMITTED),
        ],
        schema=schema,
    )


def _rows(rows: list[Row | None], captured: Captured, relation: Relation, types: Types) -> pa.Array:
    fields = list(captured.info.schema)
    is_none = [row is None for row in rows]
    if all(is_none):
        return pa.nulls(len(rows), pa.struct(fields))
    places = {column.name: (at, column) for at, column in enumerate(relation.columns)}
    children = []
    for field in fields:
        if field.name in places:
            at, column = places[field.name]
            texts = pa.array([None if row is None else row[at] for row in rows], pa.string())
            children.append(types.of(column.type, column.modifier).from_text(texts))
        else:
            children.append(pa.nulls(len(rows), field.type))
    mask = pa.array(is_none) if any(is_none) else None
    return pa.StructArray.from_arrays(children, fields=fields, mask=mask)


def _ended(transactions: list[_Transaction], name_of: Callable[[int], str]) -> pa.Table:
    """Begin and end of each transaction, in turn."""
    columns: tuple[list[object], ...] = ([], [], [], [], [], [])
    for lsn, name, committed_us, events in transactions:
        count = sum(events.values())
        tables = [(name_of(oid), events[oid]) for oid in sorted(events)]
        for column, pair in zip(
            columns,
            (
                (name, name),
                (BEGUN, END),
                (event_text(lsn, 0), event_text(lsn, count + 1)),
                (committed_us, committed_us),
                (None, count),
                (None, tables),
            ),
            strict=True,
        ):
            column.extend(pair)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, TRANSACTIONS_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=TRANSACTIONS_SCHEMA)
