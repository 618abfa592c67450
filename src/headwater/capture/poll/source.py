"""A database asked again and again, as a capture source: for what has no log that could be read, by a column that increases.

    poll+sqlite:///shop.db?table=users&by=updated_at
    poll+postgresql://me@host/shop?table=users&by=version&settle=30 seconds&compare=1 hour

**What is seen.** Rows whose `by` is greater than all that was read, in its order. So a row that was changed twice between two looks is
seen once, as it is then; whether it is new or was changed cannot be told (op `u`, without `before`); and a row that was deleted is not
seen at all, unless `compare` says how often the whole table is read again and held against the log.

**Late commits.** A transaction may commit a value that is smaller than one that is visible already. So a value counts as reached only
when it was seen `settle` ago: all rows up to it are taken to be there by then. Nothing has to be remembered of single rows, and rows
with the same value come together. A transaction that takes longer than `settle` from setting the value to its commit is missed until the
next compare.

**The first read** goes by key, in chunks, up to the value that was reached when it began; what is greater comes by polling. When a table is
read again, rows are taken whatever their value is.

A position is how many rows were read, and for each table where it is: `above`, up to which everything was read; and while it reads on,
`upto` and the row that it is behind. Values are SQL literals that the database itself has written. Not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.capture.source import (
    COMMITTED,
    UPDATE,
    BackfillChunk,
    CaptureSource,
    ChangeBatch,
    Changes,
    SourceLag,
    SourceTable,
    TableChange,
)
from headwater.capture.source_url import SourceUrl
from headwater.model.clock import duration_us, system_clock
from headwater.model.errors import InvalidInput, NotCapturable
from headwater.model.schema import HEADERS

ROWS_MAX = 50_000
SETTLE = "5 seconds"
EVERY = "1 second"
OPTIONS = ("by", "settle", "every", "compare")

_HOMES = {
    "poll+sqlite": "headwater.capture.poll.sqlite",
    "poll+postgresql": "headwater.capture.poll.postgres",
}
_NAP_S = 0.05


class RowRange(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows of a table are wanted, in the order of `order`: those behind `after` in it, and by the polled column a range."""

    by: str
    order: tuple[str, ...]
    after: tuple[str, ...] = ()
    above: str | None = None
    upto: str | None = None


class Polled(Protocol):
    """A kind of database. Values that go in and out are SQL literals."""

    left_out: dict[str, str]

    def tables(self, by: Mapping[str, str]) -> list[SourceTable]:
        """The tables that have the column by which they are polled (`by` a table's name, or "" for all); `NotCapturable`."""

    def greatest(self, table: str, by: str, above: str | None) -> tuple[str | None, bool]:
        """The greatest value above another one, if there is any, and whether any row has none."""

    def rows(self, table: str, where: RowRange, *, rows_max: int) -> tuple[pa.Table, tuple[str, ...]]:
        """Rows, and what stands in the last one in the columns of the order."""

    def close(self) -> None:
        """Ends connections."""


class PollCursor(msgspec.Struct, frozen=True):
    """Where a table is: everything up to `above` was read, and of what is up to `upto` the rows up to `after`."""

    above: str | None = None
    upto: str | None = None
    after: tuple[str, ...] = ()


def source_of(url: SourceUrl, *, name: str, keys: Mapping[str, tuple[str, ...]]) -> CaptureSource:
    """The tables of a database."""
    database: Polled = import_module(_HOMES[url.scheme]).polled(url, keys)
    return PollSource(url, database, name=name)


class PollSource:
    """One database; see the module."""

    def __init__(self, url: SourceUrl, database: Polled, *, name: str) -> None:
        self.name = name
        self.url = url.shown
        self.identity = f"poll:{name}"
        self.left_out: dict[str, str] = {}
        self._database = database
        self._by = _columns(url)
        self._settle_s = duration_us(url.options.get("settle", SETTLE)) / 1e6
        self._every_s = duration_us(url.options.get("every", EVERY)) / 1e6
        compare = url.options.get("compare")
        self._compare_s = None if compare is None else duration_us(compare) / 1e6
        self._tables: dict[str, SourceTable] = {}
        self._cursors: dict[str, PollCursor] = {}
        self._count = 0
        self._seen: dict[str, list[tuple[float, str | None]]] = {}
        """What was the greatest value of a table, and when that was seen, oldest first."""
        self._looked_at: dict[str, float] = {}
        self._stopped: set[str] = set()
        self._compared_at: dict[str, float] = {}

    # What the runner calls

    def check(self) -> list[SourceTable]:
        """The tables; a column that cannot be polled by, or rows that have nothing in it, are refused."""
        tables = self._database.tables(self._by)
        self.left_out = self._database.left_out
        for table in tables:
            _, has_null = self._database.greatest(table.name, self._column(table.name), None)
            if has_null:
                raise self._null(table.name)
        self._tables = {table.name: table for table in tables}
        return tables

    def prepare(self, resume: str | None) -> str:
        """Goes on where it was."""
        number, _, cursors = (resume or "0~{}").partition("~")
        self._count = int(number)
        known = msgspec.json.decode(cursors, type=dict[str, PollCursor])
        self._cursors = {table: cursor for table, cursor in known.items() if table in self._tables}
        self._seen, self._looked_at, self._stopped = {}, {}, set()
        self._compared_at = dict.fromkeys(self._tables, time.monotonic())
        return self._position

    def changes(self, after: str, *, timeout_s: float) -> Changes | None:
        """The next rows of a table that has some; looked for as often as `every` says."""
        deadline = time.monotonic() + timeout_s
        while True:
            if after != self._position:
                return Changes(end=self._position)
            for table in self._cursors.keys() - self._stopped:
                found = self._poll(table)
                if found is not None:
                    return found
            left = deadline - time.monotonic()
            if after == self._position and left <= 0:
                return None
            time.sleep(max(0.0, min(_NAP_S, left)))

    def chunk(self, table: str, done: Any | None, *, position: str) -> BackfillChunk:
        """The next rows by their keys; the first ones when it is settled how far the copy goes."""
        info, by = self._tables[table], self._column(table)
        if done is None and table in self._cursors:
            done = {"upto": None, "after": []}
        elif done is None:
            settled, upto = self._settled(table, None)
            if not settled:
                time.sleep(min(_NAP_S, self._settle_s))
                return self._chunk(info.schema.empty_table(), None, position)
            if upto is None:
                self._cursors[table] = PollCursor()
                self._count += 1
                return self._chunk(info.schema.empty_table(), None, position, last=True)
            done = {"upto": upto, "after": []}
        if table not in self._cursors:
            self._cursors[table] = PollCursor(above=done["upto"])
            self._count += 1
        where = RowRange(by=by, order=info.key, after=tuple(done["after"]), upto=done["upto"])
        rows, last = self._database.rows(table, where, rows_max=ROWS_MAX)
        if not rows.num_rows:
            self._compared_at[table] = time.monotonic()
        return self._chunk(
            rows, {"upto": done["upto"], "after": last or done["after"]}, position, last=not rows.num_rows
        )

    def confirm(self, position: str) -> None:
        """Nothing to do: nothing is kept for us."""

    def heartbeat(self) -> None:
        """Nothing to do."""

    def lag(self, position: str | None = None) -> SourceLag:
        """Nobody knows, without counting."""
        return SourceLag()

    def remove(self) -> None:
        """Nothing to do: nothing was put into the database."""

    def close(self) -> None:
        """Ends connections."""
        self._database.close()

    # Parts

    @property
    def _position(self) -> str:
        return f"{self._count:020d}~{msgspec.json.encode(self._cursors, order='sorted').decode()}"

    def _column(self, table: str) -> str:
        return self._by.get(table) or self._by[""]

    def _chunk(self, rows: pa.Table, done: Any, position: str, *, last: bool = False) -> BackfillChunk:
        """A chunk that is appended together with where the table is from here on."""
        return BackfillChunk(rows=rows, done=done, last=last, after=position, until=self._position)

    def _poll(self, table: str) -> Changes | None:
        """The next rows of a table, or that it is to be compared, or cannot go on."""
        cursor, by, info = self._cursors[table], self._column(table), self._tables[table]
        now = time.monotonic()
        if self._compare_s is not None and now - self._compared_at[table] >= self._compare_s:
            self._compared_at[table] = float("inf")  # until it is done
            self._count += 1
            return Changes(tables=(TableChange(table=info, refresh=True),), end=self._position)
        if cursor.upto is None:
            try:
                settled, upto = self._settled(table, cursor.above)
            except NotCapturable as error:
                self._stopped.add(table)
                self._count += 1
                return Changes(tables=(TableChange(table=info, error=str(error)),), end=self._position)
            if not settled or upto is None:
                return None
            cursor = PollCursor(cursor.above, upto)
        where = RowRange(by=by, order=(by, *info.key), after=cursor.after, above=cursor.above, upto=cursor.upto)
        rows, last = self._database.rows(table, where, rows_max=ROWS_MAX)
        if not rows.num_rows and not cursor.after:  # what was the greatest is gone, or smaller by now
            return None
        is_last = rows.num_rows < ROWS_MAX
        self._cursors[table] = PollCursor(cursor.upto) if is_last else PollCursor(cursor.above, cursor.upto, last)
        batches = (ChangeBatch(table, self._told(table, rows)),) if rows.num_rows else ()
        self._count += max(1, rows.num_rows)
        return Changes(batches=batches, end=self._position)

    def _settled(self, table: str, above: str | None) -> tuple[bool, str | None]:
        """Whether it is known how far a table has come, and how far: the greatest value that was seen long enough ago."""
        now, seen = time.monotonic(), self._seen.setdefault(table, [])
        if now - self._looked_at.get(table, float("-inf")) >= self._every_s:
            greatest, has_null = self._database.greatest(table, self._column(table), above)
            if has_null:
                raise self._null(table)
            self._looked_at[table] = now
            seen.append((now, greatest))
        old = [at for at, (when, _) in enumerate(seen) if now - when >= self._settle_s]
        if not old:
            return False, None
        _, value = seen[old[-1]]
        del seen[: old[-1] + 1]
        return True, value

    def _told(self, table: str, rows: pa.Table) -> pa.Table:
        """Rows as changes."""
        info, count = self._tables[table], rows.num_rows
        fields = [field.with_nullable(True) for field in info.schema]
        after = pa.StructArray.from_arrays([rows.column(f.name).combine_chunks() for f in fields], fields=fields)
        numbers = pa.array(np.arange(self._count + 1, self._count + count + 1)).cast(pa.string())
        columns = {
            "op": pa.array([UPDATE] * count, pa.string()),
            "before": pa.nulls(count, after.type),
            "after": after,
            "position": pc.binary_join_element_wise(pc.utf8_lpad(numbers, 20, "0"), f" {table}", ""),
            "transaction": pa.nulls(count, pa.string()),
            "transaction_order": pa.nulls(count, pa.int64()),
            "committed": pa.array(np.full(count, system_clock(), np.int64)).view(COMMITTED),
        }
        if HEADERS.name in rows.column_names:
            columns[HEADERS.name] = rows.column(HEADERS.name)
        return pa.table(columns)

    def _null(self, table: str) -> NotCapturable:
        by = self._column(table)
        return NotCapturable(
            f"Table {table!r} has rows with null in {by!r}, which polling never finds.",
            advice=f"Set the column: UPDATE {table} SET {by} = … WHERE {by} IS NULL; and declare the column NOT NULL.",
        )


def _columns(url: SourceUrl) -> dict[str, str]:
    """The column to poll by for each table; that of "" is for all others."""
    columns = {name.removeprefix("by."): value for name, value in url.options.items() if name.startswith("by.")}
    if "by" in url.options:
        columns[""] = url.options["by"]
    missing = [table for table in url.tables if "" not in columns and table not in columns]
    if not columns or missing:
        raise InvalidInput(
            f"{url.shown} does not name the column{f' of {missing[0]}' if missing else ''} to poll by.",
            advice="Add ?by=updated_at to the URL, a column that increases with each write. For one table, use ?by.users=….",
        )
    return columns


def chosen(found: Sequence[str], named: Sequence[str], by: Mapping[str, str]) -> list[str]:
    """The tables to look at: those that were named, or those that a column was given for, or all."""
    return list(named or [table for table in by if table] or found)


def bare_options(url: SourceUrl) -> SourceUrl:
    """The URL without what is meant for polling, as the kind of database itself has it."""
    kept = {name: value for name, value in url.options.items() if name not in OPTIONS and not name.startswith("by.")}
    return msgspec.structs.replace(url, scheme=url.scheme.removeprefix("poll+"), options=kept)


def refuse_column(table: str, by: str, columns: Sequence[str], *, type_: str | None) -> NotCapturable:
    """Why a table cannot be polled by a column: it is not there, or has a type that says nothing of order."""
    if type_ is None:
        return NotCapturable(
            f"Table {table!r} has no column {by!r} to poll by.", advice=f"Its columns are: {', '.join(columns)}."
        )
    return NotCapturable(
        f"Column {by!r} of table {table!r} has the type {type_}, which does not increase with each write.",
        advice="Use a time, a number or a version that each INSERT and UPDATE increases.",
    )


def statement(selected: str, table: str, where: RowRange, quoted: Any, *, rows_max: int) -> str:
    """The SELECT of some rows, as both databases take it."""
    by, order = quoted(where.by), [quoted(name) for name in where.order]
    wanted = [f"{by} > {where.above}"] if where.above is not None else []
    wanted += [f"{by} <= {where.upto}"] if where.upto is not None else []
    wanted += [f"({', '.join(order)}) > ({', '.join(where.after)})"] if where.after else []
    condition = f" WHERE {' AND '.join(wanted)}" if wanted else ""
    return f"SELECT {selected} FROM {table}{condition} ORDER BY {', '.join(order)} LIMIT {rows_max}"
