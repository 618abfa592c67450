"""The backfill of a table: its rows as they are, some pages at a time, in any order and by any number of processes one after another.

**Why this is sound.** The slot gives every change that committed behind its position, and the runner applies them all, so a row counts as
copied in either of two cases. A row that nobody has changed since stays where it is in the file, and the chunk that covers its page has it.
A row that was changed comes by the stream, whole; whether a chunk has it too does not matter, because the runner appends a chunk behind
the changes up to its `until` and leaves out the keys that changed behind its `after`. So each chunk may be read at a moment of its own; no
snapshot has to outlive it, none is lost with a killed process, and nothing goes back in time. What moves rows without a change (VACUUM
FULL, CLUSTER, a rewriting ALTER TABLE) makes a new file: the table begins again. Pages that were added since the first chunk hold nothing
but rows that changed since.

**The moment of a chunk.** `after` is what the runner has been given; every transaction in it must be visible in the snapshot. A transaction
becomes visible a moment after its commit is in the WAL (with synchronous replication it may take long), so a snapshot in which one that
was given still runs is taken again; what was given by an earlier process, or lies before the slot, gets a second to become visible before
the first chunk. `until` is the end of the WAL after the snapshot was taken: what is visible in it committed before.
The lock comes before the snapshot, because a rewriting ALTER TABLE leaves an empty table to older snapshots. A chunk is read by two
connections that share one exported snapshot. They wait for locks for a moment only: a VACUUM FULL that waits for the lock we hold would
make them wait for itself. The chunk is given up then, lets it pass, and is read again. The next one is read ahead, while the runner
appends: its moment is earlier then, no more.

`done` is `{"parts": [[oid, file, pages] …], "part": n, "page": n}`: the files of the table (its partitions) and the next page.
Not thread-safe; a thread of its own reads ahead, by connections that nobody else uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headwater.capture.postgres.connection import PostgresDatabase
from headwater.capture.postgres.positions import end_text
from headwater.capture.postgres.tables import CapturedPgTable, PgColumn, Types
from headwater.capture.source import BackfillChunk, SourceTable
from headwater.databases.address import quoted
from headwater.model.errors import NotCapturable, TimedOut

READERS = 2
ROWS_PER_CHUNK = 100_000
PAGES_FIRST = 512
PAGES_MAX = 16_384
VISIBLE_TIMEOUT_S = 30.0
SETTLE_S = 1.0
LOCK_TIMEOUT_MS = 500

_LOOK_AGAIN_S = 0.005
_PARTS = """
select c.oid::bigint, pg_relation_filenode(c.oid)::bigint, pg_relation_size(c.oid) / current_setting('block_size')::int
from pg_class c where c.relkind = 'r' and (c.oid = %(table)s or c.oid in (select relid from pg_partition_tree(%(table)s::oid::regclass)))
order by 1"""
_COLUMNS = """
select attname, atttypid::bigint, atttypmod from pg_attribute where attrelid = %s and attnum > 0 and not attisdropped"""
_OLDEST = """
select pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint from pg_current_snapshot() s"""
_MOMENT = """
select pg_current_snapshot()::text, pg_export_snapshot(), (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint"""


class PostgresBackfillProgress(msgspec.Struct):
    """How far a table's backfill has come."""

    parts: list[tuple[int, int, int]]
    part: int = 0
    page: int = 0


class PostgresBackfill:
    """Reads chunks. `handed_over` tells the xids of the transactions that the runner has been given of late; from any thread."""

    def __init__(self, database: PostgresDatabase, *, handed_over: Callable[[], Collection[Any]]) -> None:
        """The database is for this one alone."""
        self._database = database
        self._types = Types(database)
        self._handed_over = handed_over
        self._readers: list[Any] = []
        self._pages = PAGES_FIRST
        self._is_settled = False
        self._thread = ThreadPoolExecutor(1, "headwater-backfill")
        self._ahead: tuple[CapturedPgTable, Any, Future[BackfillChunk]] | None = None

    def chunk(self, captured: CapturedPgTable, done: Any | None, *, position: str) -> BackfillChunk:
        """The next rows of a table; those behind them are read meanwhile."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == captured and ahead[1] == done:
            chunk = ahead[2].result()
        else:
            if ahead is not None:
                wait([ahead[2]])
            chunk = self._chunk(captured, done, position)
        if not chunk.last:
            self._ahead = (captured, chunk.done, self._thread.submit(self._chunk, captured, chunk.done, position))
        return chunk

    def _chunk(self, captured: CapturedPgTable, done: Any | None, position: str) -> BackfillChunk:
        info = captured.info
        with self._database.told():
            self._settle()
            while (found := self._pages_read(captured, done)) is None:
                pass
        progress, tables, end, until = found
        begin = progress.page
        rows = pa.concat_tables([info.schema.empty_table(), *tables])
        self._adapt(len(rows), end - begin)
        fraction = _fraction(progress, end)
        if progress.part < len(progress.parts) and end >= progress.parts[progress.part][2]:
            progress.part, progress.page = progress.part + 1, 0
        else:
            progress.page = end
        last = progress.part >= len(progress.parts)
        return BackfillChunk(
            rows=rows,
            done=msgspec.json.decode(msgspec.json.encode(progress)),
            last=last,
            after=position,
            until=end_text(until),
            fraction=fraction,
        )

    def _pages_read(
        self, captured: CapturedPgTable, done: Any | None
    ) -> tuple[PostgresBackfillProgress, list[pa.Table], int, int] | None:
        """Where the backfill is, the rows of the next pages, the page behind them, and the end of the WAL; None: try again."""
        oid = captured.table.oid
        keeper = self._database.statements()
        try:
            _begin(keeper, oid)
            snapshot, until = self._snapshot(keeper, oid)
            progress = self._progress(keeper, oid, done)
            if progress.part >= len(progress.parts):
                return progress, [], progress.page, until
            columns = [PgColumn(*row) for row in keeper.execute(_COLUMNS, (oid,)).fetchall()]
            part, _, pages = progress.parts[progress.part]
            (name,) = keeper.execute("select %s::oid::regclass::text", (part,)).fetchone()
            end = min(progress.page + self._pages, pages)
            return progress, self._read(name, columns, captured.info, snapshot, progress.page, end), end, until
        except Exception as error:
            if "lock timeout" not in str(error):
                raise
            return None
        finally:
            if not keeper.closed:
                keeper.execute("rollback")

    def close(self) -> None:
        """Ends the connections, when what is read ahead has been read."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            wait([ahead[2]])
        self._end_readers()
        self._database.close()
        self._is_settled = False

    def _end_readers(self) -> None:
        for reader in self._readers:
            with suppress(Exception):
                reader.close()
        self._readers = []

    def _settle(self) -> None:
        """Once: lets the transactions end that run at this moment, some of which may have committed before anything was given."""
        deadline = time.monotonic() + SETTLE_S
        running = None
        while not self._is_settled:
            oldest, next_ = self._database.ask(_OLDEST)[0]
            running = next_ if running is None else running
            self._is_settled = oldest >= running or time.monotonic() > deadline
            time.sleep(0.0 if self._is_settled else _LOOK_AGAIN_S)

    def _snapshot(self, keeper: Any, oid: int) -> tuple[str, int]:
        """A snapshot in which everything is visible that was handed over, as its name; and the end of the WAL behind it."""
        deadline = time.monotonic() + VISIBLE_TIMEOUT_S
        while True:
            text, name, until = keeper.execute(_MOMENT).fetchone()
            if not _runs_in(text, self._handed_over()):
                return name, until
            if time.monotonic() > deadline:
                raise TimedOut(
                    f"{self._database.shown}: A committed transaction did not become visible within {VISIBLE_TIMEOUT_S:g} s.",
                    advice="A synchronous standby does not answer. Look for wait_event = SyncRep in pg_stat_activity.",
                )
            time.sleep(_LOOK_AGAIN_S)
            keeper.execute("rollback")
            _begin(keeper, oid)

    def _progress(self, keeper: Any, oid: int, done: Any | None) -> PostgresBackfillProgress:
        """Where to go on: a part that has another file than before begins again, one that is gone is left out."""
        now = {part: (part, file, pages) for part, file, pages in keeper.execute(_PARTS, {"table": oid}).fetchall()}
        if done is None:
            return PostgresBackfillProgress(list(now.values()))
        progress = msgspec.convert(done, PostgresBackfillProgress)
        parts: list[tuple[int, int, int]] = []
        at, page = progress.part, progress.page
        for number, (part, file, pages) in enumerate(progress.parts):
            same = part in now and now[part][1] == file
            if number >= at and part not in now:
                page = 0 if number == at else page
                continue
            if not same and part in now and number <= at:
                return PostgresBackfillProgress(list(now.values()))
            parts.append((part, file, pages) if same else now.get(part, (part, file, 0)))
        return PostgresBackfillProgress(parts, at, page)

    def _read(
        self, name: str, columns: list[PgColumn], info: SourceTable, snapshot: str, begin: int, end: int
    ) -> list[pa.Table]:
        """The rows of some pages, by several readers at once."""
        self._types.learn(column.type for column in columns)
        by_name = {column.name: self._types.of(column.type, column.modifier) for column in columns}
        wanted = [field.name for field in info.schema if field.name in by_name]
        selected = ", ".join(f"{by_name[column].selected(quoted(column))} as {quoted(column)}" for column in wanted)
        bounds = np.linspace(begin, end, READERS + 1).astype(int).tolist()
        ranges = [(low, high) for low, high in pairwise(bounds) if low < high]
        while len(self._readers) < len(ranges):
            self._readers.append(self._database.reader(lock_timeout_ms=LOCK_TIMEOUT_MS))

        def read(which: int) -> pa.Table:
            low, high = ranges[which]
            statement = (
                f"select {selected} from only {name} where ctid >= '({low},0)'::tid and ctid < '({high},0)'::tid"
            )
            return _selected(self._readers[which], snapshot, statement)

        try:
            with ThreadPoolExecutor(max(1, len(ranges))) as pool:
                found = list(pool.map(read, range(len(ranges))))
        except BaseException:
            self._end_readers()
            raise
        return [_typed(rows, info, by_name) for rows in found]

    def _adapt(self, rows: int, pages: int) -> None:
        """The pages of the next chunk, so that it has about as many rows as it should."""
        if pages:
            wanted = pages * ROWS_PER_CHUNK // max(rows, 1)
            self._pages = max(16, min(wanted, self._pages * 4, PAGES_MAX))


def _begin(keeper: Any, oid: int) -> None:
    """A transaction that has the lock of a table, whatever it is called now, and no snapshot yet."""
    found = keeper.execute("select oid::regclass::text from pg_class where oid = %s", (oid,)).fetchone()
    if found is None:
        raise NotCapturable(
            "The table was dropped in the database.", advice="Remove the table from the capture. Its topics stay."
        )
    keeper.execute("begin isolation level repeatable read")
    keeper.execute(f"lock table {found[0]} in access share mode")


def _selected(reader: Any, snapshot: str, statement: str) -> pa.Table:
    with reader.cursor() as cursor:
        cursor.execute("set transaction isolation level repeatable read")
        cursor.execute(f"set transaction snapshot '{snapshot}'")
        cursor.execute(statement)
        rows = cursor.fetch_arrow_table()
    reader.rollback()
    return rows


def _typed(rows: pa.Table, info: SourceTable, types: Any) -> pa.Table:
    """The rows in the types that the runner knows; what the table has besides them is left to the change that will announce it."""
    columns = []
    for field in info.schema:
        if field.name not in rows.column_names:
            columns.append(pa.nulls(len(rows), field.type))
            continue
        chunks = [types[field.name].from_selected(chunk) for chunk in rows.column(field.name).chunks]
        column = pa.chunked_array(chunks, types[field.name].arrow)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                column = pa.nulls(len(rows), field.type)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=info.schema)


def _runs_in(snapshot: str, xids: Collection[Any]) -> bool:
    """Whether one of some transactions (32 bits of their ids) is not visible in a snapshot, as `pg_current_snapshot` writes it."""
    if not len(xids):
        return False
    _, top, running = snapshot.split(":")
    known = np.unique(np.concatenate(list(xids)))
    known = known[known > 0]
    ahead = (known - int(top)) % (1 << 32) < (1 << 31)
    listed = np.array([int(xid) % (1 << 32) for xid in running.split(",") if xid], np.int64)
    return bool(ahead.any() or np.isin(known, listed).any())


def _fraction(progress: PostgresBackfillProgress, end: int) -> float:
    total = sum(pages for _, _, pages in progress.parts)
    before = sum(pages for _, _, pages in progress.parts[: progress.part])
    return min(1.0, (before + end) / total) if total else 1.0
