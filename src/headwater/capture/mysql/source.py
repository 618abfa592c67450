"""MariaDB (10.5 or newer) and MySQL (8.0 or newer) as sources of changes: by their row binlog, as a replica reads it.

    mariadb://user@host:3306/shop?password_env=SHOP_PASSWORD&table=users,orders

Nothing is made in the database, in no case a table or a trigger: the binlog is what the server writes anyway, and how long it keeps it is
its own business. Events are read by `mysql.stream`, taken apart by columns (`binlog`, `mysql.values`, `mysql.changes`), and joined to a
backfill by key (`mysql.backfill`).

Invariants:
- what the server has forgotten is noticed before anything is read: `CaptureLost` (`resume_point`);
- a connection that is lost raises `Unreachable`, and the next call begins a new stream behind the position it is given.

Not thread-safe, except `lag`, which has a connection of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from headwater.capture.mysql.backfill import MySqlBackfill
from headwater.capture.mysql.changes import BinlogDecoder
from headwater.capture.mysql.connection import MySqlDatabase
from headwater.capture.mysql.positions import BinlogPlace, place_of
from headwater.capture.mysql.requirements import MySqlServer, check_server, check_tables, read_server
from headwater.capture.mysql.resume_point import begin, bytes_behind, end_of_binlog, find
from headwater.capture.mysql.stream import BinlogStream
from headwater.capture.mysql.tables import CapturedMyTable, MyTable, chosen, info_of, read_codecs, read_tables
from headwater.capture.replica import ReplicaSource, not_captured, nothing_to_capture
from headwater.capture.source import BackfillChunk, CaptureSource, Changes, SourceLag, SourceTable
from headwater.capture.source_url import SourceUrl

STANDSTILL_S = 10.0
ANSWER_S = 0.02


class MySqlSource(ReplicaSource):
    """One database; made by `source_of`, which connects to nothing yet."""

    def __init__(self, url: SourceUrl, *, name: str, keys: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(url, name=name, keys=keys)
        self._database = MySqlDatabase(url)
        self._watching = MySqlDatabase(url)
        self._backfill = MySqlBackfill(MySqlDatabase(url))
        self._server: MySqlServer | None = None
        self._codecs: dict[int, str] = {}
        self._captured: dict[str, CapturedMyTable] = {}
        self._stream: BinlogStream | None = None
        self._decoder: BinlogDecoder | None = None
        self._reached: BinlogPlace | None = None

    def check(self) -> list[SourceTable]:
        """The tables to capture; `NotCapturable` with the statement to run."""
        self._server = check_server(self._database)
        tables = read_tables(self._database)
        keys, self.left_out = chosen(tables, self._names, self._keys)
        if not keys:
            raise nothing_to_capture(self.url)
        check_tables(self._database, [tables[name] for name in keys])
        self._codecs = read_codecs(self._database)
        infos = [info_of(tables[name], key) for name, key in keys.items()]
        self._captured = {info.name: CapturedMyTable(info, self._keys.get(info.name, ())) for info in infos}
        return infos

    def prepare(self, resume: str | None) -> str:
        """Where changes begin: where the binlog ends now, or where the last capture ended, if that can still be read."""
        if not self._captured:
            self.check()
        assert self._server is not None
        self._end_session()
        self.identity = self._server.identity
        if resume is None:
            position = begin(self._database, self._server)
        else:
            find(self._database, self._server, resume)
            position = resume
        self._reached = place_of(position)
        return position

    def chunk(self, table: str, done: Any | None, *, position: str) -> BackfillChunk:
        """The next rows of a table's backfill."""
        captured = self._captured.get(table)
        if captured is None or self._server is None:
            raise not_captured(table)
        return self._backfill.chunk(captured, done, position=position, server=self._server)

    def confirm(self, position: str) -> None:
        """The server keeps its binlogs as long as it was told to; nobody has to tell it more."""

    def heartbeat(self) -> None:
        """Nothing in the database waits for us: an idle table keeps no binlog."""

    def lag(self, position: str | None = None) -> SourceLag:
        """The bytes of binlog behind a position, or behind what was read; from any thread."""
        place = self._reached if position is None else place_of(position)
        if place is None:
            return SourceLag()
        with self._watch_lock:
            return SourceLag(bytes=bytes_behind(self._watching, place))

    def remove(self) -> None:
        """Nothing was made in the database, so nothing is there to remove; the connections end."""
        self.close()

    def close(self) -> None:
        """Ends all connections."""
        self._end_session()
        self._backfill.close()
        self._database.close()
        with self._watch_lock:
            self._watching.close()

    def _read(self, after: str, timeout_s: float) -> list[Changes]:
        goal: BinlogPlace | None = None
        deadline, standstill = time.monotonic() + timeout_s, 0.0
        while True:
            decoder, stream = self._current(after)
            wait_s = ANSWER_S if goal is not None else max(0.0, deadline - time.monotonic())
            reached = decoder.place
            block = stream.read(wait_s)
            if block is not None and (found := list(decoder.changes(block))):
                self._reached = decoder.place
                return found
            now = time.monotonic()
            if timeout_s and now >= deadline:
                return []
            if not timeout_s:
                if goal is None:
                    goal = end_of_binlog(self._database, self._the_server())[1]
                standstill = now + STANDSTILL_S if decoder.place > reached or not standstill else standstill
                if decoder.place >= goal or now > standstill:
                    return []

    def _current(self, after: str) -> tuple[BinlogDecoder, BinlogStream]:
        """The stream that goes on behind a position, the one there is or a new one."""
        decoder, stream = self._decoder, self._stream
        if decoder is not None and stream is not None and (not decoder.is_whole or decoder.end == after):
            return decoder, stream
        self._end_session()
        file = find(self._database, self._the_server(), after)
        self._stream = BinlogStream(self._database, file=file, offset=place_of(after).offset)
        self._decoder = BinlogDecoder(
            self._captured,
            database=self._database.name,
            codecs=self._codecs,
            look=self._look,
            after=after,
            folds_names=self._the_server().folds_names,
        )
        return self._decoder, self._stream

    def _the_server(self) -> MySqlServer:
        if self._server is None:
            self._server = read_server(self._database)
        return self._server

    def _look(self, table: str) -> MyTable | None:
        return read_tables(self._database, table).get(table)

    def _end_session(self) -> None:
        stream, self._stream, self._decoder = self._stream, None, None
        self._ready.clear()
        if stream is not None:
            stream.close()


def source_of(url: SourceUrl, *, name: str, keys: Mapping[str, tuple[str, ...]]) -> CaptureSource:
    """A MariaDB or MySQL database as a source."""
    return MySqlSource(url, name=name, keys=keys)
