"""Blocks of pgoutput's messages as `Changes`: transactions whole and in commit order, every event with its position.

Invariants:
- the events of a transaction are numbered from 1 in the order of the stream, over all tables and emitted messages; a change of a key takes
  two numbers. A number is given to events of captured tables only, so it is the same whenever the stream is read again;
- a transaction that committed before the position where reading began is left out, whatever the server sends;
- where the columns of a table change the block is cut: the table's new form stands before its first change in it;
- a transaction that begins in one block and ends in another waits for its end where others end before it, so that these can be appended.
  One that is larger than a block is given in parts; what is known of it is kept in between (`_Open`).

Of each block the xids go to `xids`, for the backfill to know what was given.

One `PgoutputDecoder` serves one session of the stream: a new session describes its tables anew. Not thread-safe.

A few messages, as of a single small transaction, are read one by one: taking blocks apart by columns costs as much for one row as for some
hundred, and a transaction of one row took three times as long that way (decision 0017). Invariant: `few_changes` gives what the way by
columns would give of the same messages, or None: where the block has anything but whole transactions of plain inserts, updates and
deletes (a table described, a key that changed, a value that was not sent), it is left to that.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.capture.byte_columns import Bytes, Flags, Indexes, numbers
from headwater.capture.postgres.pgoutput import (
    BEGIN,
    COMMIT,
    DELETE,
    EPOCH_US,
    INSERT,
    MESSAGE,
    NOTHING,
    NULL,
    OLD_ROW,
    RELATION,
    TEXT,
    TRUNCATE,
    UPDATE,
    Emitted,
    PgoutputBlock,
    Relation,
    block_of,
    joined,
    read_emitted,
    read_relation,
    read_truncate,
)
from headwater.capture.postgres.positions import end_text, event_text, event_texts, lsn_texts
from headwater.capture.postgres.rows import Present, oids_of, table_rows
from headwater.capture.postgres.tables import CapturedPgTable, Types
from headwater.capture.source import BEGIN as BEGUN
from headwater.capture.source import (
    COMMITTED,
    END,
    MESSAGES_SCHEMA,
    TRANSACTIONS_SCHEMA,
    ChangeBatch,
    ChangeRow,
    Changes,
    FewRows,
    TableChange,
    changes_schema,
)
from headwater.capture.source import DELETE as DELETED
from headwater.capture.source import INSERT as INSERTED
from headwater.capture.source import (
    TRUNCATE as TRUNCATED,
)
from headwater.capture.source import UPDATE as UPDATED
from headwater.capture.topics import transaction_rows

OUR_PREFIX = "headwater."
"""What we emit ourselves; it moves the position on and is no event."""

FEW_MESSAGES = 32

_NEW_ROW = ord("N")
_BEGIN = struct.Struct(">QqI")
_COMMIT = struct.Struct(">QQ")
_OID = struct.Struct(">I")
_WIDTH = struct.Struct(">H")

Row = list[str | None]


Follow = Callable[[Relation], tuple[TableChange, CapturedPgTable | None] | None]
"""Asked when the stream describes a table: None if it is as the runner knows it; else the change, and what is captured from here on."""


class _Open(NamedTuple):
    """A transaction of which the end has not come yet: its commit, its number, how many numbers it has given, and its events by table."""

    lsn: int
    committed_us: int
    xid: int
    given: int
    events: dict[str, int]


class _Transactions(NamedTuple):
    """The transactions of a segment; the first is the one that was open before, or none at all."""

    lsns: Indexes
    committed_us: Indexes
    xids: Indexes
    given: Indexes

    def names(self, which: Indexes) -> pa.Array:
        """What transactions are called: their xid, which PostgreSQL uses again, and the LSN of their commit."""
        return pc.binary_join_element_wise(
            pa.array(self.xids[which]).cast(pa.string()), lsn_texts(self.lsns[which]), ":"
        )


class PgoutputDecoder:
    """Follows one session of the stream. `captured` is by the oid of the table, and is changed by `follow`'s answers."""

    def __init__(
        self,
        captured: dict[int, CapturedPgTable],
        *,
        types: Types,
        present: Present,
        follow: Follow,
        after: int,
        xids: deque[Indexes],
    ) -> None:
        self._captured = captured
        self._types = types
        self._present = present
        self._follow = follow
        self._after = after
        self._xids = xids
        self._relations: dict[int, Relation] = {}
        self._few_tables: dict[int, FewTable] = {}
        self._open: _Open | None = None
        self._kept = NOTHING
        """Of a transaction that has no end yet, not given."""
        self.end = after
        """Everything that committed before this LSN was given."""

    @property
    def is_whole(self) -> bool:
        """Whether no transaction was given without its end."""
        return self._open is None

    @property
    def is_between(self) -> bool:
        """Whether no transaction has begun and not ended, given or not."""
        return self._open is None and not len(self._kept.starts)

    def changes(self, messages: PgoutputBlock | list[bytes]) -> Iterator[Changes]:
        """What messages say; a new piece where a table changes its columns."""
        if isinstance(messages, list):
            if self.is_between and (few := self._few(messages)):
                yield few
                return
            messages = block_of(messages)
        block, self._kept = _cut(joined(self._kept, messages))
        described = np.flatnonzero(block.kinds == RELATION)
        tables: tuple[TableChange, ...] = ()
        begin = 0
        for at in described.tolist():
            relation = read_relation(block.message(at))
            if self._relations.get(relation.oid) == relation:
                continue
            if relation.oid in self._captured and (answer := self._follow(relation)):
                if at > begin or tables:
                    yield self._segment(PgoutputBlock(block.data, block.starts[begin:at]), tables)
                change, captured = answer
                begin, tables = at, (change,)
                if captured is None:
                    del self._captured[relation.oid]
                else:
                    self._captured[relation.oid] = captured
            self._relations[relation.oid] = relation
        if len(block.starts) > begin or tables:
            yield self._segment(PgoutputBlock(block.data, block.starts[begin:]), tables)

    def _few(self, messages: list[bytes]) -> Changes | None:
        few = few_changes(messages, self._few_table, after=self._after, end=self.end)
        if few is None:
            return None
        self.end = few.end
        self._xids.append(np.array(few.xids, np.int64))
        return few.changes

    def _few_table(self, oid: int) -> FewTable | None:
        captured, known = self._captured.get(oid), self._few_tables.get(oid)
        if captured is None:
            return None
        relation = self._relations[oid]
        if known is None or known.captured is not captured or known.relation is not relation:
            known = self._few_tables[oid] = few_table(captured, relation, self._types)
        return known

    def _segment(self, block: PgoutputBlock, tables: tuple[TableChange, ...]) -> Changes:
        kinds = block.kinds
        begins, commits = np.flatnonzero(kinds == BEGIN), np.flatnonzero(kinds == COMMIT)
        transactions = self._transactions(block, begins)
        of_message = np.cumsum(kinds == BEGIN)
        wanted = transactions.lsns[of_message] >= self._after
        rows = self._rows(block, kinds, wanted)
        truncates = self._truncates(block, kinds, wanted)
        emitted = self._emitted(block, kinds, transactions.lsns[of_message])
        # How many numbers each message takes, and from there the number of each event in its transaction.
        takes = np.zeros(len(kinds) + 1, np.int64)
        for placed, _ in rows.values():
            takes += np.bincount(placed.messages + 1, minlength=len(takes))
        for at, names in truncates:
            takes[at + 1] += len(names)
        for at, message in emitted:
            takes[at + 1] += message.transactional
        before = np.cumsum(takes)
        first = np.concatenate([[0], before[begins]]) - transactions.given
        numbered = _Numbered(of_message, before, first, transactions)
        batches, counts = self._batches(rows, truncates, numbered)
        ended = self._ended(commits, numbered, counts, wanted, emitted)
        if len(commits):
            ends = numbers(block.data, block.starts[commits] + 10, ">u8")
            self.end = max(self.end, int(ends[-1]))
        self._xids.append(transactions.xids)
        self._keep_open(begins, commits, numbered, counts, len(kinds))
        messages = _messages(emitted, numbered)
        outside = [message.lsn + 1 for _, message in emitted if not message.transactional]
        self.end = max([self.end, *outside]) if self._open is None else self.end
        return Changes(
            batches=tuple(batches),
            transactions=ended,
            messages=messages,
            tables=tables,
            end=end_text(self.end),
            whole=self._open is None,
        )

    def _transactions(self, block: PgoutputBlock, begins: Indexes) -> _Transactions:
        at = block.starts[begins]
        found = (
            numbers(block.data, at + 1, ">u8"),
            numbers(block.data, at + 9, ">i8") + EPOCH_US,
            numbers(block.data, at + 17, ">u4"),
            np.zeros(len(at), np.int64),
        )
        opened = self._open or _Open(0, 0, 0, 0, {})
        return _Transactions(*(np.concatenate([[known], new]) for known, new in zip(opened[:4], found, strict=True)))

    def _rows(self, block: PgoutputBlock, kinds: Bytes, wanted: Flags) -> dict[int, tuple[_Placed, CapturedPgTable]]:
        """The changes of rows by table."""
        about = np.flatnonzero(((kinds == INSERT) | (kinds == UPDATE) | (kinds == DELETE)) & wanted)
        oids = oids_of(block.data, block.starts[about])
        found = {}
        for oid in dict.fromkeys(np.unique(oids).tolist()):
            captured = self._captured.get(oid)
            if captured is None:
                continue
            mine = about[oids == oid]
            rows = table_rows(
                block.data,
                block.starts[mine],
                self._relations[oid],
                captured.table,
                captured.info.key,
                captured.info.schema,
                types=self._types,
                present=self._present,
            )
            found[oid] = (_Placed(mine[rows.messages], rows.places, rows.ops, rows.before, rows.after), captured)
        return found

    def _truncates(self, block: PgoutputBlock, kinds: Bytes, wanted: Flags) -> list[tuple[int, list[int]]]:
        found = []
        for at in np.flatnonzero((kinds == TRUNCATE) & wanted).tolist():
            oids = [oid for oid in read_truncate(block.message(at)) if oid in self._captured]
            if oids:
                found.append((at, oids))
        return found

    def _emitted(self, block: PgoutputBlock, kinds: Bytes, lsns: Indexes) -> list[tuple[int, Emitted]]:
        found = []
        for at in np.flatnonzero(kinds == MESSAGE).tolist():
            message = read_emitted(block.message(at))
            lsn = int(lsns[at]) if message.transactional else message.lsn
            if lsn >= self._after and not message.prefix.startswith(OUR_PREFIX):
                found.append((at, message))
        return found

    def _batches(
        self,
        rows: dict[int, tuple[_Placed, CapturedPgTable]],
        truncates: list[tuple[int, list[int]]],
        numbered: _Numbered,
    ) -> tuple[list[ChangeBatch], dict[str, Indexes]]:
        """The events of each table with all their columns, and how many each transaction has of each table."""
        emptied: dict[int, list[tuple[int, int]]] = {}
        for at, oids in truncates:
            for place, oid in enumerate(oids):
                emptied.setdefault(oid, []).append((at, place))
        batches, counts = [], {}
        for oid in sorted(rows.keys() | emptied.keys()):
            captured = self._captured[oid]
            schema = changes_schema(captured.info.schema)
            parts = []
            if oid in rows:
                placed = rows[oid][0]
                parts.append((placed.messages, placed.places, placed.ops, placed.before, placed.after))
            if oid in emptied:
                at, place = np.array(emptied[oid], np.int64).T
                nothing = pa.nulls(len(at), schema.field("after").type)
                parts.append((at, place, pa.array([TRUNCATED] * len(at)), nothing, nothing))
            made = [_event_table(part, schema, numbered) for part in parts]
            events = made[0] if len(made) == 1 else _in_order(made, parts)
            messages = np.concatenate([part[0] for part in parts])
            counts[captured.info.name] = np.bincount(numbered.of_message[messages], minlength=len(numbered.first))
            batches.append(ChangeBatch(captured.info.name, events))
        return batches, counts

    def _ended(
        self,
        commits: Indexes,
        numbered: _Numbered,
        counts: dict[str, Indexes],
        wanted: Flags,
        emitted: list[tuple[int, Emitted]],
    ) -> pa.Table | None:
        """Begin and end of the transactions that end here and have any event of ours."""
        ends = commits[wanted[commits]]
        which = numbered.of_message[ends]
        opened = {name: count for name, count in (self._open.events if self._open else {}).items() if count}
        names = list(dict.fromkeys([*counts, *opened]))
        matrix = np.zeros((len(names), len(numbered.first)), np.int64)
        for at, name in enumerate(names):
            if name in counts:
                matrix[at] = counts[name]
            matrix[at, 0] += opened.get(name, 0)
        last = numbered.before[ends] - numbered.first[which]
        kept = last > 0
        ends, which, last = ends[kept], which[kept], last[kept]
        if not len(which):
            return None
        known = numbered.transactions
        orders = np.zeros(2 * len(which), np.int64)
        orders[1::2] = last + 1
        positions = event_texts(np.repeat(known.lsns[which], 2), orders)
        changes = matrix[:, which]
        return transaction_rows(known.names(which), positions, known.committed_us[which], tables=names, changes=changes)

    def _keep_open(
        self, begins: Indexes, commits: Indexes, numbered: _Numbered, counts: dict[str, Indexes], length: int
    ) -> None:
        """Remembers the transaction whose end is in another block, or none."""
        begun, ended = begins[-1] if len(begins) else -1, commits[-1] if len(commits) else -1
        if begun < ended or (begun < 0 and self._open is None):
            self._open = None
            return
        events = {name: int(count[-1]) for name, count in counts.items()}
        if self._open is not None and not len(begins):
            for name, count in self._open.events.items():
                events[name] = events.get(name, 0) + count
        known = numbered.transactions
        given = int(numbered.before[length] - numbered.first[-1])
        self._open = _Open(int(known.lsns[-1]), int(known.committed_us[-1]), int(known.xids[-1]), given, events)


def _cut(block: PgoutputBlock) -> tuple[PgoutputBlock, PgoutputBlock]:
    """The transactions of a block that end in it, and the messages behind them; where none ends, all are given."""
    begins, commits = np.flatnonzero(block.kinds == BEGIN), np.flatnonzero(block.kinds == COMMIT)
    if not len(commits) or not len(begins) or begins[-1] < commits[-1]:
        return block, NOTHING
    count, at = int(begins[-1]), int(block.starts[begins[-1]])
    return PgoutputBlock(block.data[:at], block.starts[:count]), PgoutputBlock(
        block.data[at:].copy(), block.starts[count:] - at
    )


class _Placed(NamedTuple):
    """Events of a table: the message of each in the segment, its place within it, and what it shows."""

    messages: Indexes
    places: Indexes
    ops: pa.Array
    before: pa.Array
    after: pa.Array


class _Numbered(NamedTuple):
    """How the messages of a segment lie in its transactions, and which numbers they take."""

    of_message: Indexes
    before: Indexes
    first: Indexes
    transactions: _Transactions

    def orders(self, messages: Indexes, places: Indexes) -> Indexes:
        """The numbers of events in their transactions."""
        return self.before[messages] + places - self.first[self.of_message[messages]] + 1


def _event_table(
    part: tuple[Indexes, Indexes, pa.Array, pa.Array, pa.Array], schema: pa.Schema, numbered: _Numbered
) -> pa.Table:
    messages, places, ops, before, after = part
    which = numbered.of_message[messages]
    orders = numbered.orders(messages, places)
    return pa.Table.from_arrays(
        [
            ops,
            before,
            after,
            event_texts(numbered.transactions.lsns[which], orders),
            numbered.transactions.names(which),
            pa.array(orders),
            pa.array(numbered.transactions.committed_us[which]).cast(COMMITTED),
        ],
        schema=schema,
    )


def _in_order(made: list[pa.Table], parts: list[tuple[Indexes, Indexes, pa.Array, pa.Array, pa.Array]]) -> pa.Table:
    """Rows and truncates of one table as they came."""
    messages = np.concatenate([part[0] for part in parts])
    places = np.concatenate([part[1] for part in parts])
    return pa.concat_tables(made).combine_chunks().take(pa.array(np.lexsort((places, messages))))


def _messages(emitted: list[tuple[int, Emitted]], numbered: _Numbered) -> pa.Table | None:
    if not emitted:
        return None
    at = np.array([at for at, _ in emitted], np.int64)
    inside = np.array([message.transactional for _, message in emitted], bool)
    which = numbered.of_message[at]
    known = numbered.transactions
    own = np.array([message.lsn for _, message in emitted], np.int64)
    lsns = np.where(inside, known.lsns[which], own)
    orders = np.where(inside, numbered.orders(at, np.zeros(len(at), np.int64)), 0)
    times = np.where(
        inside, known.committed_us[which], time.time_ns() // 1000
    )  # outside of one PostgreSQL does not say when
    return pa.Table.from_arrays(
        [
            pa.array([message.prefix for _, message in emitted]),
            pa.array([message.content for _, message in emitted], pa.binary()),
            event_texts(lsns, orders),
            pc.if_else(pa.array(inside), numbered.transactions.names(which), None),
            pa.array(times).cast(COMMITTED),
        ],
        schema=MESSAGES_SCHEMA,
    )


class FewTable(NamedTuple):
    """A table as its changes are read here; another one is needed where it is captured or described otherwise."""

    captured: CapturedPgTable
    relation: Relation
    changes: pa.Schema
    columns: list[tuple[int, Callable[[str], Any]] | None]
    """Of each column of the topic its place in a message and how its text is read; None where it is not sent."""
    key: list[int]
    is_plain: bool
    """Without columns that the database generates: their values are in no message."""


def few_table(captured: CapturedPgTable, relation: Relation, types: Types) -> FewTable:
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
    events: dict[int, tuple[FewTable, list[ChangeRow]]] = {}
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
            change = ChangeRow(
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
