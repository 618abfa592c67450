"""A few of pgoutput's messages as `Changes`, read one by one: what a single small transaction is, for which nobody should have to wait.

`postgres.changes` takes whole blocks apart by columns, by calls that cost as much for one row as for some hundred; a transaction of one
row took three times as long that way (decision 0017).

Invariant: `few_changes` gives what `postgres.changes` would give of the same messages, or None: where the block has anything but whole
transactions of plain inserts, updates and deletes (a table described, a key that changed, a value that was not sent), it is left to that.
Functions only; what of a table is the same for all its messages is a `FewTable`, made once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from headwater.capture.postgres.pgoutput import (
    BEGIN,
    COMMIT,
    DELETE,
    EPOCH_US,
    INSERT,
    NULL,
    OLD_ROW,
    TEXT,
    UPDATE,
    Relation,
)
from headwater.capture.postgres.positions import end_text, event_text
from headwater.capture.postgres.tables import Captured, Types
from headwater.capture.source import BEGIN as BEGUN
from headwater.capture.source import DELETE as DELETED
from headwater.capture.source import (
    END,
    TRANSACTIONS_SCHEMA,
    Change,
    ChangeBatch,
    Changes,
    FewRows,
    changes_schema,
)
from headwater.capture.source import INSERT as INSERTED
from headwater.capture.source import UPDATE as UPDATED

FEW_MESSAGES = 32

_NEW_ROW = ord("N")
_BEGIN = struct.Struct(">QqI")
_COMMIT = struct.Struct(">QQ")
_OID = struct.Struct(">I")
_WIDTH = struct.Struct(">H")

Row = list[str | None]


class FewTable(NamedTuple):
    """A table as its changes are read here; another one is needed where it is captured or described otherwise."""

    captured: Captured
    relation: Relation
    changes: pa.Schema
    columns: list[tuple[int, Callable[[str], Any]] | None]
    """Of each column of the topic its place in a message and how its text is read; None where it is not sent."""
    key: list[int]
    is_plain: bool
    """Without columns that the database generates: their values are in no message."""


def few_table(captured: Captured, relation: Relation, types: Types) -> FewTable:
    """What is known of a table before its next change comes."""
    places = {
        column.name: (at, types.of(column.type, column.modifier).from_one) for at, column in enumerate(relation.columns)
    }
    return FewTable(
        captured,
        relation,
        changes=changes_schema(captured.info.schema),
        columns=[places.get(name) for name in captured.info.schema.names],
        key=[at for at, column in enumerate(relation.columns) if column.name in captured.info.key],
        is_plain=not any(column.generated for column in captured.table.columns),
    )


class _Transaction(NamedTuple):
    lsn: int
    name: str
    committed_us: int
    events: dict[int, int]
    """How many there are, by the oid of the table."""


class Few(NamedTuple):
    """What some messages say, up to where they go, and the numbers of their transactions."""

    changes: Changes
    end: int
    xids: list[int]


def few_changes(
    messages: Sequence[bytes], table_of: Callable[[int], FewTable | None], *, after: int, end: int
) -> Few | None:
    """The changes of a few messages behind which no transaction is open; None where they have to be read by columns.

    `table_of` is asked by a table's oid, and has none where it is not captured. What committed before `after` is left out, and `end` is how
    far everything was given before.
    """
    if len(messages) > FEW_MESSAGES:
        return None
    events: dict[int, tuple[FewTable, list[Change]]] = {}
    transactions: list[_Transaction] = []
    xids: list[int] = []
    current: _Transaction | None = None
    for data in messages:
        kind = data[0]
        if kind == BEGIN:
            lsn, time_us, xid = _BEGIN.unpack_from(data, 1)
            xids.append(xid)
            current = _Transaction(lsn, f"{xid}:{end_text(lsn)}", time_us + EPOCH_US, {})
        elif kind == COMMIT:
            end = max(end, _COMMIT.unpack_from(data, 2)[1])
            if current is not None and current.events:
                transactions.append(current)
            current = None
        elif kind not in (INSERT, UPDATE, DELETE) or current is None:
            return None
        elif current.lsn >= after and (table := table_of(oid := _OID.unpack_from(data, 1)[0])):
            found = _row_change(data, table)
            if found is None:
                return None
            op, old, new = found
            order = sum(current.events.values()) + 1
            current.events[oid] = current.events.get(oid, 0) + 1
            change = Change(
                op,
                _values(table, old),
                _values(table, new),
                event_text(current.lsn, order),
                current.name,
                order,
                current.committed_us,
            )
            events.setdefault(oid, (table, []))[1].append(change)
    if current is not None:
        return None
    names = {oid: table.captured.info.name for oid, (table, _) in events.items()}
    batches = tuple(ChangeBatch(names[oid], FewRows(events[oid][1], events[oid][0].changes)) for oid in sorted(events))
    ended = _ended(transactions, names) if transactions else None
    return Few(Changes(batches=batches, transactions=ended, end=end_text(end)), end, xids)


def _row_change(data: bytes, table: FewTable) -> tuple[str, Row | None, Row | None] | None:
    """What a message did to a row, as the row was before and after; None where that cannot be seen from it alone."""
    kind, tag, before, after = data[0], data[5], None, None
    if not table.is_plain:
        return None
    at = 6
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
    if before is not None and after is not None and any(before[at] != after[at] for at in table.key):
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


def _values(table: FewTable, row: Row | None) -> tuple[Any, ...] | None:
    if row is None:
        return None
    texts = [(None, None) if column is None else (row[column[0]], column[1]) for column in table.columns]
    return tuple(None if text is None or read is None else read(text) for text, read in texts)


def _ended(transactions: list[_Transaction], names: Mapping[int, str]) -> FewRows:
    """Begin and end of each transaction, in turn."""
    rows: list[tuple[Any, ...]] = []
    for lsn, name, committed_us, events in transactions:
        count = sum(events.values())
        tables = [(names[oid], events[oid]) for oid in sorted(events)]
        rows.append((name, BEGUN, event_text(lsn, 0), committed_us, None, None))
        rows.append((name, END, event_text(lsn, count + 1), committed_us, count, tables))
    return FewRows(rows, TRANSACTIONS_SCHEMA)
