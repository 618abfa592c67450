"""The backfill of a table: its rows as they are, in the order of the key, some thousand at a time and by any number of processes.

**The moment of a chunk.** With MariaDB a snapshot tells exactly where in the binlog it is (`binlog_snapshot_position`): everything before
that byte is in it and nothing behind, so the chunk's `after` and `until` are that byte. With MySQL, and for tables whose engine has no
snapshots, what was handed over must be visible before the snapshot is taken, and `until` is the end of the binlog when it has been read.
Either way no transaction outlives a chunk, and what changes meanwhile comes by the binlog.

The table's columns are read again for each chunk, behind the lock that the snapshot has on the table's form: an ALTER TABLE waits for the
chunk, or the chunk begins again.

`done` is `{"key": [texts of the last key], "rows": n}`. Not thread-safe.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from headwater.capture.mysql.connection import MySqlDatabase, quoted
from headwater.capture.mysql.pages import Page, read_page, typed_rows
from headwater.capture.mysql.positions import BinlogPlace, end_text, file_number, gtids_of, place_of
from headwater.capture.mysql.requirements import MySqlServer
from headwater.capture.mysql.resume_point import end_of_binlog
from headwater.capture.mysql.tables import CapturedMyTable, read_tables
from headwater.capture.source import BackfillChunk
from headwater.model.errors import NotCapturable, TimedOut

ROWS_MAX = 50_000
CHUNK_BYTES = 16 << 20
VISIBLE_TIMEOUT_S = 30.0
TRIES_MAX = 100

_LOOK_AGAIN_S = 0.005
_CHANGED_MEANWHILE = (1054, 1205, 1213, 1222, 1412)
"""The table has other columns now, or somebody holds it: the chunk begins again."""


class MySqlBackfillProgress(msgspec.Struct):
    """How far a table's backfill has come."""

    key: list[str]
    rows: int


class MySqlBackfill:
    """Reads chunks by a connection of its own."""

    def __init__(self, database: MySqlDatabase) -> None:
        self._database = database
        self._rows: dict[str, int] = {}

    def chunk(
        self, captured: CapturedMyTable, done: Any | None, *, position: str, server: MySqlServer
    ) -> BackfillChunk:
        """The next rows of a table."""
        progress = None if done is None else msgspec.convert(done, MySqlBackfillProgress)
        for _ in range(TRIES_MAX):
            with self._database.told():
                try:
                    return self._chunk(captured, progress, position, server)
                except Exception as error:
                    if error.args[:1] not in [(number,) for number in _CHANGED_MEANWHILE]:
                        raise
                    self._database.close()
            time.sleep(_LOOK_AGAIN_S)
        raise TimedOut(
            f"{self._database.shown}: Table {captured.info.name} is constantly locked or altered.",
            advice="Run SHOW PROCESSLIST to find the session that locks the table.",
        )

    def close(self) -> None:
        """Ends the connection."""
        self._database.close()

    def _chunk(
        self, captured: CapturedMyTable, progress: MySqlBackfillProgress | None, position: str, server: MySqlServer
    ) -> BackfillChunk:
        info, database = captured.info, self._database
        after = self._snapshot(position, server)
        try:
            with database.connection().cursor() as cursor:
                cursor.execute(f"SELECT 1 FROM {quoted(database.name)}.{quoted(info.name)} LIMIT 0")
            table = read_tables(database, info.name).get(info.name)
            if table is None:
                raise NotCapturable(
                    f"Table {info.name} was dropped in the database.",
                    advice="Remove the table from the capture. Its topics stay.",
                )
            gone = [name for name in info.key if name not in table.by_name]
            if gone:
                raise NotCapturable(
                    f"Table {info.name} no longer has the column {gone[0]!r}, which is in its key.",
                    advice="Remove the capture, and capture the table again.",
                )
            limit = self._rows.get(info.name) or max(1, min(ROWS_MAX, CHUNK_BYTES // max(table.row_bytes, 64)))
            names = [field.name for field in info.schema if field.name in table.by_name]
            behind = None if progress is None else progress.key
            found = read_page(database.connection(), table, names, key=info.key, behind=behind, limit=limit)
            is_exact = server.is_mariadb and table.engine.upper() == "INNODB"
            until = place_of(after) if is_exact else end_of_binlog(database, server)[1]
        finally:
            if database.is_connected:
                database.ask("ROLLBACK")
        self._adapt(info.name, found)
        rows = (progress.rows if progress else 0) + found.rows
        last = found.rows < limit
        return BackfillChunk(
            rows=typed_rows(found, names, table, info.schema),
            done=msgspec.to_builtins(MySqlBackfillProgress(found.last, rows)) if found.rows else None,
            last=last,
            after=after,
            until=end_text(until),
            fraction=1.0 if last else min(1.0, rows / max(table.rows_estimate, rows, 1)),
        )

    def _snapshot(self, position: str, server: MySqlServer) -> str:
        """Begins a transaction in which everything is visible that was handed over; the position of its moment, or before it."""
        database = self._database
        deadline = time.monotonic() + VISIBLE_TIMEOUT_S
        database.ask("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        while time.monotonic() < deadline:
            if server.is_mariadb:
                database.ask("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
                moment = _snapshot_place(database)
                if moment >= place_of(position):
                    return end_text(moment)
                database.ask("ROLLBACK")
            else:
                gtids = gtids_of(position)
                if not gtids or database.ask("SELECT GTID_SUBSET(%s, @@GLOBAL.gtid_executed)", (gtids,))[0][0]:
                    database.ask("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
                    return position
            time.sleep(_LOOK_AGAIN_S)
        raise TimedOut(
            f"{database.shown}: A committed transaction did not become visible within {VISIBLE_TIMEOUT_S:g} s.",
            advice="A semi-synchronous replica does not answer. Run SHOW PROCESSLIST to find it.",
        )

    def _adapt(self, table: str, found: Page) -> None:
        """The rows of the next chunk, so that it has about as many bytes as it should."""
        if found.rows:
            size = max(1, sum(text.nbytes for text in found.texts) // found.rows)
            self._rows[table] = max(1, min(CHUNK_BYTES // size, ROWS_MAX))


def _snapshot_place(database: MySqlDatabase) -> BinlogPlace:
    found = {name.lower(): value for name, value in database.ask("SHOW STATUS LIKE 'binlog_snapshot_%'")}
    return BinlogPlace(file_number(found["binlog_snapshot_file"]), int(found["binlog_snapshot_position"]))
