"""A segment of a binlog: transactions and their rows while no table changes, which become columns all at once.

What is gathered are places in a block, not values: the rows of all events of a table are read together (`mysql_values.walk`). A change of a
row's key becomes two events, a delete of the old key and an insert of the new one. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.capture.byte_columns import Bytes, Flags, Indexes
from headwater.capture.mysql import binlog
from headwater.capture.mysql.binlog import TableMap
from headwater.capture.mysql.positions import BinlogPlace, event_texts
from headwater.capture.mysql.tables import CapturedMyTable
from headwater.capture.mysql.values import Found, layout_of, padded, read_values, walk
from headwater.capture.source import (
    COMMITTED,
    DELETE,
    INSERT,
    TRUNCATE,
    UPDATE,
    ChangeBatch,
    SourceTable,
    changes_schema,
)
from headwater.capture.topics import transaction_rows

_NONE = -1
_OPS = pa.array([INSERT, UPDATE, DELETE, TRUNCATE])
_INSERT, _UPDATE, _DELETE, _TRUNCATE = range(4)


class BinlogTransaction(msgspec.Struct, kw_only=True):
    """A transaction: where it begins, what it is called, and what was given of it in earlier segments."""

    place: BinlogPlace
    committed_us: int
    name: str
    stream: str
    began: bool
    """Whether a commit will end it; otherwise its one statement does."""
    wanted: bool
    xa: str | None = None
    """The XA transaction that is prepared by it: its rows do not count yet."""
    completes: str = ""
    """The XA transaction that ends with it."""
    given: int = 0
    counts: dict[str, int] = msgspec.field(default_factory=dict)


class RowEvent(NamedTuple):
    """An event with rows of a captured table, and where they stand; a truncation has none."""

    transaction: int
    table: str
    mapped: TableMap | None
    op: int
    start: int
    stop: int


class _Rows(NamedTuple):
    """The events of a table: of each the row event it came from, what it did, and its rows."""

    events: Indexes
    ops: Indexes
    before: pa.Array
    after: pa.Array


class BinlogSegment:
    """Gathers transactions; `codecs` are what Python calls the character set of each collation."""

    def __init__(self, codecs: Mapping[int, str]) -> None:
        self._codecs = codecs
        self._transactions: list[BinlogTransaction] = []
        self._ended: list[int] = []
        self._events: list[RowEvent] = []

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._events) or any(self._transactions[at].given for at in self._ended)

    def begin(self, transaction: BinlogTransaction) -> None:
        """A transaction whose events follow."""
        self._transactions.append(transaction)

    def commit(self) -> None:
        """The end of the last transaction."""
        self._ended.append(len(self._transactions) - 1)

    def add(self, table: str, mapped: TableMap, kind: int, start: int, stop: int) -> None:
        """Rows of the last transaction."""
        op = _INSERT if kind in binlog.INSERTS else _UPDATE if kind in binlog.UPDATES else _DELETE
        self._events.append(RowEvent(len(self._transactions) - 1, table, mapped, op, start, stop))

    def truncate(self, table: str) -> None:
        """A table that the last transaction has emptied."""
        self._events.append(RowEvent(len(self._transactions) - 1, table, None, _TRUNCATE, 0, 0))

    def changes(
        self, block: bytes, captured: Mapping[str, CapturedMyTable]
    ) -> tuple[tuple[ChangeBatch, ...], pa.Table | None]:
        """The events of each table, and begin and end of the transactions that ended."""
        data = padded(block)
        by_table: dict[str, list[int]] = {}
        for at, event in enumerate(self._events):
            by_table.setdefault(event.table, []).append(at)
        rows = {table: self._rows(data, captured[table].info, events) for table, events in by_table.items()}
        # How many numbers each row event takes, and from there the number of each event in its transaction.
        takes = np.zeros(len(self._events) + 1, np.int64)
        for found in rows.values():
            takes[1:] += np.bincount(found.events, minlength=len(self._events))
        before = np.cumsum(takes)
        of_event = np.array([event.transaction for event in self._events], np.int64)
        every = np.arange(len(self._transactions))
        given = np.array([transaction.given for transaction in self._transactions], np.int64)
        first = before[np.searchsorted(of_event, every)] - given
        counts = np.zeros((len(rows), len(self._transactions)), np.int64)
        batches = []
        for number, (table, found) in enumerate(rows.items()):
            within = np.arange(len(found.events)) - np.searchsorted(found.events, found.events)
            which = of_event[found.events]
            orders = before[found.events] + within - first[which] + 1
            counts[number] = np.bincount(which, minlength=len(self._transactions))
            batches.append(ChangeBatch(table, self._event_table(found, which, orders, captured[table].info)))
        self._count(list(rows), counts)
        return tuple(batches), self._ended_rows()

    def _rows(self, data: Bytes, info: SourceTable, events: list[int]) -> _Rows:
        """The rows of a table's events, in order."""
        groups: dict[tuple[int, int], list[int]] = {}
        for at in events:
            event = self._events[at]
            groups.setdefault((id(event.mapped), event.op), []).append(at)
        row = pa.struct([field.with_nullable(True) for field in info.schema])
        parts = [self._group(data, info, row, np.array(group, np.int64)) for group in groups.values()]
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate([part.events for part in parts]), kind="stable")
        picks = pa.array(order)
        return _Rows(
            np.concatenate([part.events for part in parts])[order],
            np.concatenate([part.ops for part in parts])[order],
            pa.concat_arrays([part.before for part in parts]).take(picks),
            pa.concat_arrays([part.after for part in parts]).take(picks),
        )

    def _group(self, data: Bytes, info: SourceTable, row: pa.StructType, group: Indexes) -> _Rows:
        """The rows of events that did the same to a table with the same columns."""
        event = self._events[group[0]]
        mapped = event.mapped
        if mapped is None:
            nothing = pa.nulls(len(group), row)
            return _Rows(group, np.full(len(group), _TRUNCATE), nothing, nothing)
        starts = np.array([self._events[at].start for at in group], np.int64)
        stops = np.array([self._events[at].stop for at in group], np.int64)
        layouts = [layout for column in mapped.columns if (layout := layout_of(column)) is not None]
        walked = walk(data, starts, stops, layouts, images=2 if event.op == _UPDATE else 1)
        events = group[walked.events]
        images = [self._columns(mapped, image, row, len(events)) for image in walked.images]
        structs = [pa.StructArray.from_arrays(columns, fields=list(row)) for columns in images]
        ops, nothing = np.full(len(events), event.op), pa.nulls(len(events), row)
        if event.op == _INSERT:
            return _Rows(events, ops, nothing, structs[0])
        if event.op == _DELETE:
            return _Rows(events, ops, structs[0], nothing)
        moved = _moved(images, row, info.key)
        if not moved.any():
            return _Rows(events, ops, structs[0], structs[1])
        which = np.repeat(np.arange(len(events)), 1 + moved)
        second = np.concatenate([[False], which[1:] == which[:-1]])
        leaves = moved[which] & ~second
        return _Rows(
            events[which],
            np.where(leaves, _DELETE, np.where(second, _INSERT, _UPDATE)),
            structs[0].take(pa.array(which, mask=second)),
            structs[1].take(pa.array(which, mask=leaves)),
        )

    def _columns(self, mapped: TableMap, image: list[Found], row: pa.StructType, count: int) -> list[pa.Array]:
        """The rows in the columns that the runner knows."""
        by_name = {column.name: (column, found) for column, found in zip(mapped.columns, image, strict=True)}
        columns = []
        for field in row:
            if field.name not in by_name:
                columns.append(pa.nulls(count, field.type))
                continue
            values = read_values(*by_name[field.name], self._codecs)
            columns.append(values if values.type == field.type else values.cast(field.type))
        return columns

    def _event_table(self, found: _Rows, which: Indexes, orders: Indexes, info: SourceTable) -> pa.Table:
        return pa.Table.from_arrays(
            [
                _OPS.take(pa.array(found.ops)),
                found.before,
                found.after,
                self._positions(which, orders),
                pa.array([transaction.name for transaction in self._transactions]).take(pa.array(which)),
                pa.array(orders),
                pa.array(self._committed()[which]).cast(COMMITTED),
            ],
            schema=changes_schema(info.schema),
        )

    def _positions(self, which: Indexes, orders: Indexes) -> pa.Array:
        places = np.array([transaction.place for transaction in self._transactions], np.int64).reshape(-1, 2)[which]
        return event_texts(places[:, 0], places[:, 1], orders)

    def _committed(self) -> Indexes:
        return np.array([transaction.committed_us for transaction in self._transactions], np.int64)

    def _count(self, tables: list[str], counts: Indexes) -> None:
        """Adds what is given now to what each transaction knows of itself."""
        for table, transaction in zip(*np.nonzero(counts), strict=True):
            known, some = self._transactions[transaction], int(counts[table, transaction])
            known.counts[tables[table]] = known.counts.get(tables[table], 0) + some
            known.given += some

    def _ended_rows(self) -> pa.Table | None:
        """Begin and end of the transactions that ended here and have any event of ours."""
        ended = [at for at in self._ended if self._transactions[at].given]
        if not ended:
            return None
        which = np.array(ended, np.int64)
        known = [self._transactions[at] for at in ended]
        tables = list(dict.fromkeys(table for transaction in known for table in transaction.counts))
        changes = np.array([[transaction.counts.get(table, 0) for transaction in known] for table in tables], np.int64)
        orders = np.zeros(2 * len(which), np.int64)
        orders[1::2] = [transaction.given + 1 for transaction in known]
        return transaction_rows(
            pa.array([transaction.name for transaction in known]),
            self._positions(np.repeat(which, 2), orders),
            self._committed()[which],
            tables=tables,
            changes=changes,
        )


def _moved(images: list[list[pa.Array]], row: pa.StructType, key: tuple[str, ...]) -> Flags:
    """Of each updated row, whether its key is another than before."""
    moved: Any = np.zeros(len(images[0][0]), bool)
    for name in key:
        at = row.get_field_index(name)
        moved |= pc.fill_null(pc.not_equal(images[0][at], images[1][at]), False).to_numpy(zero_copy_only=False)
    return moved
