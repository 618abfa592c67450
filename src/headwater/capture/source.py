"""A capture source: one database, as the runner (`headwater.capture.capture`) sees it.

The nouns here are all that crosses the border between a kind of database and the log: Arrow tables, positions that sort as text, and
progress that JSON can hold. A source never looks at the log, and the runner never at the database.

How the runner uses a source, in one thread:

1. `check`: what is to be captured, and whether it can be; nothing is made in the database.
2. `prepare(resume)`: what the database needs (slot, publication, triggers) is made or found. `identity` is known from here on.
3. Again and again `changes(after=…)`, whose result is appended to the log in one atomic step, and now and then `confirm`.
4. In between, as long as a table's backfill is not complete, `chunk(table, …)`.
5. `close`, which leaves everything in the database as it is; `remove`, which leaves nothing behind.

Invariants of a source:
- positions of one source, compared as text, sort as its transactions committed; a position is never used twice;
- `Changes` holds whole transactions in commit order, or (`whole=False`) a part of one that the next `Changes` goes on with;
- a chunk holds the rows as they were at one moment. All that committed up to `after` is in them, nothing that committed behind `until`.
  The runner reads changes up to `until`, leaves out of the chunk what changed behind `after`, and appends the chunk then. So of each
  key the last event in the log is the newest row of the database, and no snapshot has to stay open from one chunk to the next;
- a change of a row's key is a delete of the old key and an insert of the new one.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from headwater.model.ddl import make_map

INSERT, UPDATE, DELETE, READ, TRUNCATE = "c", "u", "d", "r", "t"
"""What a change did, by the letters of Debezium's envelope; READ is a row of a backfill."""

BEGIN, END = "begin", "end"

COMMITTED = pa.timestamp("us", tz="UTC")

TRANSACTIONS_SCHEMA = pa.schema(
    [
        pa.field("transaction", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("position", pa.string(), nullable=False),
        pa.field("committed", COMMITTED, nullable=False),
        pa.field("events", pa.int64()),
        pa.field("tables", make_map(pa.string(), pa.int64())),
    ]
)
"""Begin and end of each transaction of the source; `events` and `tables` (changes by table) are known at the end."""

MESSAGES_SCHEMA = pa.schema(
    [
        pa.field("prefix", pa.string(), nullable=False),
        pa.field("content", pa.binary(), nullable=False),
        pa.field("position", pa.string(), nullable=False),
        pa.field("transaction", pa.string()),
        pa.field("committed", COMMITTED, nullable=False),
    ]
)
"""What applications write into the database's log beside its tables (the outbox pattern)."""


def changes_schema(rows: pa.Schema) -> pa.Schema:
    """The columns of `ChangeBatch.changes` for a table with these columns; `_headers` may follow them (see `headwater.model.schema`)."""
    row = pa.struct([field.with_nullable(True) for field in rows])
    return pa.schema(
        [
            pa.field("op", pa.string(), nullable=False),
            pa.field("before", row),
            pa.field("after", row),
            pa.field("position", pa.string(), nullable=False),
            pa.field("transaction", pa.string(), nullable=False),
            pa.field("transaction_order", pa.int64(), nullable=False),
            pa.field("committed", COMMITTED, nullable=False),
        ]
    )


class SourceTable(msgspec.Struct, frozen=True, kw_only=True):
    """A captured table as it is at one position: its name in the log, its columns in types of the log, and its primary key.

    `is_told`: how the table changed while no capture ran is told by `changes`, too. Otherwise the runner compares the columns.
    """

    name: str
    schema: pa.Schema
    key: tuple[str, ...]
    rows_estimate: int | None = None
    is_told: bool = False


class TableChange(msgspec.Struct, frozen=True, kw_only=True):
    """A table that looks different from here on.

    `refresh` where rows are different, too, without a change of their own: a column that was renamed or has a default, or changes that
    nobody wrote down. The runner then copies the table again, and removes the keys that are gone. `error` where the table cannot be
    captured any more: it alone stops, and the sentence says what to do.
    """

    table: SourceTable
    refresh: bool = False
    error: str | None = None


class FewRows:
    """A few rows as tuples of plain values, which become columns when they are asked for as such."""

    def __init__(self, rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> None:
        self.rows = rows
        self._schema = schema

    def __eq__(self, other: object) -> bool:
        return isinstance(other, pa.Table | FewRows) and bool(self.table.equals(as_table(other)))

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def table(self) -> pa.Table:
        """The rows as columns."""
        rows = pa.array([tuple(row) for row in self.rows], pa.struct(list(self._schema)))
        return pa.Table.from_batches([pa.RecordBatch.from_struct_array(rows)])


def as_table(rows: pa.Table | FewRows) -> pa.Table:
    """Rows as columns, however they were given."""
    return rows.table if isinstance(rows, FewRows) else rows


class ChangeRow(NamedTuple):
    """One of a few changes: values that Arrow takes for those of `changes_schema`. A row is a tuple of the table's columns."""

    op: str
    before: tuple[Any, ...] | None
    after: tuple[Any, ...] | None
    position: str
    transaction: str
    transaction_order: int
    committed: int


class ChangeBatch(msgspec.Struct, frozen=True):
    """Changes of one table, in commit order, by the columns of `changes_schema`; a few may be given as rows, each a `ChangeRow`."""

    table: str
    given: pa.Table | FewRows

    @property
    def changes(self) -> pa.Table:
        """The changes as columns."""
        return as_table(self.given)


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What a source hands over at a time.

    `tables` are those that looked different before the first of these changes: a source cuts where a table changes. `end` is the
    position up to which everything is contained, in this one and in those before it. With `whole` false a transaction goes on in the
    next one, and nothing of it is appended before a whole one has come.
    """

    batches: tuple[ChangeBatch, ...] = ()
    transactions: pa.Table | FewRows | None = None
    messages: pa.Table | None = None
    tables: tuple[TableChange, ...] = ()
    end: str
    whole: bool = True


class BackfillChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Some rows of a table as they were between two positions (see the module), and how far the backfill has come.

    `done` is handed back to `chunk` for the next rows, by another process too: JSON must be able to hold it. `rows` may have the column
    `_headers` besides the table's own.
    """

    rows: pa.Table
    done: Any
    last: bool
    after: str
    until: str
    fraction: float | None = None


class SourceLag(msgspec.Struct, frozen=True, kw_only=True):
    """How far what was confirmed is behind the database: rows or bytes, whichever the source can tell, and seconds."""

    rows: int | None = None
    bytes: int | None = None
    seconds: float | None = None


class CaptureSource(Protocol):
    """One database. Not thread-safe, except `lag`, which may be asked from another thread."""

    name: str
    """What the log calls it: part of the names of its stage and of its topic of transactions."""

    url: str
    """Where it is, without secrets."""

    identity: str
    """What tells this database and what was made in it from any other, also from one restored in its place; known once prepared."""

    left_out: dict[str, str]
    """Tables that are not captured though no table was named, with the reason; known once checked."""

    def check(self) -> list[SourceTable]:
        """The tables to capture; an error names the right, key or setting that is missing, and the statement that gives it."""

    def prepare(self, resume: str | None) -> str:
        """Makes or finds what the capture needs; the position behind which changes come.

        `resume` is where the last capture ended; that, or `CaptureLost` where the changes behind it are gone. Without it a
        capture begins anew, at the present. Tables that were added to the capture since are made ready, those left out are let go.
        """

    def changes(self, after: str, *, timeout_s: float) -> Changes | None:
        """What committed behind a position, which is the `end` of the last `Changes` (or what `prepare` gave); None: nothing so far."""

    def chunk(self, table: str, done: Any | None, *, position: str) -> BackfillChunk:
        """The next rows of a table's backfill: the first ones, or those behind `done`.

        `position` is the end of the last `Changes` that was handed over. The chunk's `after` is not before where this process began.
        """

    def confirm(self, position: str) -> None:
        """Everything up to here is durable in the log: the source may forget it. Called now and then; may do nothing."""

    def heartbeat(self) -> None:
        """Called now and then while nothing changes, so that an idle table does not keep the database from forgetting its log."""

    def lag(self, position: str | None = None) -> SourceLag:
        """How far a position is behind the database; without one, how far what this process has read is. Needs no `prepare`."""

    def remove(self) -> None:
        """Takes everything out of the database that `prepare` put there, also what a killed process left; twice does nothing."""

    def close(self) -> None:
        """Ends connections; what was prepared stays."""


def is_readable(connection: Any, timeout_s: float) -> bool:
    """Whether something came, or the other side has ended it, within the time."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
