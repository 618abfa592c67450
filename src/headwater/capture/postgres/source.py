"""PostgreSQL (15 or newer) as a source of changes: by logical replication with its own plugin, pgoutput.

    postgresql://user@host:5432/shop?password_env=SHOP_PASSWORD&table=users,orders

In the database there is a slot and a publication, both `headwater_<name>` (or `?slot=`, `?publication=`), see `slot`; in no case a
trigger or a table. Changes are streamed while the capture keeps up (`postgres.stream`), read in bulk while it is behind (`bulk`),
decoded by columns (`pgoutput`, `rows`, `postgres.changes`), and joined to a backfill by pages (`postgres.backfill`).

Invariants:
- the slot is moved by `confirm` only, so never beyond what is durable in the log. A slot found beyond it has lost something: `CaptureLost`;
- no table is published that PostgreSQL could not identify the rows of; one that loses its key later is taken out of the publication by the
  next `heartbeat`, so that the application's own UPDATEs are not refused for long;
- a connection that is lost raises `Unreachable`, and the next call begins a new session behind the position it is given.

Not thread-safe, except `lag`, which has a connection of its own.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from headwater.capture.byte_columns import Indexes
from headwater.capture.postgres import slot as pg_slot
from headwater.capture.postgres.backfill import PostgresBackfill
from headwater.capture.postgres.bulk import SlotCopy, SlotPeek, advance
from headwater.capture.postgres.changes import OUR_PREFIX, PgoutputDecoder
from headwater.capture.postgres.connection import PostgresDatabase, client
from headwater.capture.postgres.current_values import PresentDatabase
from headwater.capture.postgres.pgoutput import Relation
from headwater.capture.postgres.positions import end_text, lsn_of, lsn_sql
from headwater.capture.postgres.requirements import check_server, check_tables
from headwater.capture.postgres.schema_changes import TableDifference, TableFollower
from headwater.capture.postgres.stream import SlotStream
from headwater.capture.postgres.tables import CapturedPgTable, Types, chosen, info_of, read_tables
from headwater.capture.replica import ReplicaSource, not_captured, nothing_to_capture
from headwater.capture.source import BackfillChunk, CaptureSource, Changes, SourceLag, SourceTable, TableChange
from headwater.capture.source_url import SourceUrl
from headwater.model.errors import HeadwaterError

BEHIND_BYTES = 16 << 20
"""From how many bytes of WAL on a capture reads in bulk: what a stream needs some tenths of a second for, as long as it takes to change."""

CLIENTS = ("psycopg", "psycopg2.extras", "adbc_driver_postgresql.dbapi")
LOOK_AT_LAG_BYTES = 1 << 20
RECENT_BLOCKS = 256
STANDSTILL_S = 10.0
ANSWER_S = 0.02
HEARTBEAT_BYTES = 64 << 10


class PostgresSource(ReplicaSource):
    """One database; made by `source_of`, which connects to nothing yet."""

    def __init__(self, url: SourceUrl, *, name: str, keys: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(url, name=name, keys=keys)
        own = "headwater_" + re.sub(r"[^a-z0-9_]", "_", name.lower())[:50]
        self._slot = url.options.get("slot", own)
        self._publication = url.options.get("publication", own)
        self._publication_is_ours = "publication" not in url.options
        self._database = PostgresDatabase(url)
        self._watching = PostgresDatabase(url)
        self._types = Types(self._database)
        self._captured: dict[int, CapturedPgTable] = {}
        self._follower = TableFollower(self._database, self._types)
        self._present = PresentDatabase(self._database)
        self._backfill = PostgresBackfill(PostgresDatabase(url), handed_over=lambda: list(self._xids))
        self._session: SlotStream | SlotCopy | SlotPeek | None = None
        self._decoder: PgoutputDecoder | None = None
        self._xids: deque[Indexes] = deque(maxlen=RECENT_BLOCKS)
        self._confirmed = 0
        self._bytes_since_look = 0
        self._beaten = 0
        self._report_idle = False
        self._noticed: dict[int, tuple[TableDifference, int]] = {}
        self._stream_next = False
        """Whether bulk has come to the end; WAL without anything for us may still lie behind it."""

    def check(self) -> list[SourceTable]:
        """The tables to capture; `NotCapturable` with the statement to run. Makes nothing."""
        for module in CLIENTS:  # one that is missing is told now, and none is loaded in the middle of a copy
            client(module)
        check_server(self._database, slot=self._slot)
        tables = read_tables(self._database)
        keys, self.left_out = chosen(tables, self._names, self._keys)
        if not keys:
            raise nothing_to_capture(self.url)
        wanted = [tables[name] for name in keys]
        check_tables(self._database, wanted, publication=self._publication)
        infos = [info_of(table, keys[table.topic], self._types) for table in wanted]
        self._captured = {table.oid: CapturedPgTable(info, table) for table, info in zip(wanted, infos, strict=True)}
        return infos

    def prepare(self, resume: str | None) -> str:
        """Makes or finds publication and slot; where changes begin."""
        if not self._captured:
            self.check()
        self._end_session()
        ((system, here),) = self._database.ask(
            "select (select system_identifier from pg_control_system())::text, "
            "(select oid::text from pg_database where datname = current_database())"
        )
        self.identity = f"postgresql:{system}/{here}/{self._slot}"
        start = None if resume is None else pg_slot.find_slot(self._database, self._slot, resume)
        tables = [captured.table for captured in self._captured.values()]
        pg_slot.publish(self._database, self._publication, tables, is_ours=self._publication_is_ours)
        if start is None:
            start = pg_slot.begin_slot(self._database, self._slot)
        self._confirmed = lsn_of(start)
        return start

    def chunk(self, table: str, done: Any | None, *, position: str) -> BackfillChunk:
        """The next rows of a table's backfill."""
        captured = next((found for found in self._captured.values() if found.info.name == table), None)
        if captured is None:
            raise not_captured(table)
        try:
            chunk = self._backfill.chunk(captured, done, position=position)
            self._emit()  # so that the stream comes to the chunk's end though nothing else happens
        except HeadwaterError:
            self._backfill.close()
            raise
        return chunk

    def confirm(self, position: str) -> None:
        """The slot may forget what committed before this position."""
        self._confirmed = max(self._confirmed, lsn_of(position))
        if self._session is not None:
            try:
                self._session.confirm(self._confirmed)
            except HeadwaterError:
                self._end_session()

    def heartbeat(self) -> None:
        """Lets an idle slot move on, and takes tables out of the publication that have lost what identifies their rows."""
        self._report_idle = True
        ((now,),) = self._database.ask("select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint")
        if now - self._beaten > HEARTBEAT_BYTES:
            self._beaten = self._emit()
        self._ready.extend(self._look_at_tables())

    def lag(self, position: str | None = None) -> SourceLag:
        """The bytes of WAL behind a position, or those that the server keeps for us; from any thread."""
        statement = "select pg_wal_lsn_diff(pg_current_wal_lsn(), %s::pg_lsn)::bigint"
        with self._watch_lock:
            if position is not None:
                lsn = lsn_of(position)
            elif found := pg_slot.read_slot(self._watching, self._slot):
                lsn = found.confirmed
            else:
                return SourceLag()
            ((behind,),) = self._watching.ask(statement, (lsn_sql(lsn),))
        return SourceLag(bytes=max(0, behind))

    def remove(self) -> None:
        """Drops slot and publication."""
        self._end_session()
        pg_slot.end_copy(self._database, self._slot)
        pg_slot.drop_slot(self._database, self._slot)
        if self._publication_is_ours:
            pg_slot.drop_publication(self._database, self._publication)

    def close(self) -> None:
        """Ends all connections; slot and publication stay."""
        self._end_session()
        self._backfill.close()
        self._database.close()
        with self._watch_lock:
            self._watching.close()

    def _read(self, after: str, timeout_s: float) -> list[Changes]:
        goal, reached, deadline, wait_s = 0, -1, 0.0, timeout_s
        while True:
            decoder, session = self._current(after)
            messages = session.read(wait_s)
            if messages:
                self._bytes_since_look += sum(map(len, messages)) if isinstance(messages, list) else len(messages.data)
                return list(decoder.changes(messages))
            if not isinstance(session, SlotStream):
                self._stream_next = not session.has_more
                self._end_session()
                continue
            goal = goal or (self._flushed() if timeout_s == 0.0 else 0)
            if session.reached > reached:
                reached, deadline = session.reached, time.monotonic() + STANDSTILL_S
            if max(decoder.end, reached) >= goal or time.monotonic() > deadline:
                return self._idle(decoder, session)
            session.ask()
            wait_s = ANSWER_S

    def _current(self, after: str) -> tuple[PgoutputDecoder, SlotStream | SlotCopy | SlotPeek]:
        """The session that goes on behind a position, the one there is or a new one."""
        decoder, session = self._decoder, self._session
        if decoder is not None and session is not None:
            goes_on = not decoder.is_whole or decoder.end == lsn_of(after)
            if goes_on and not self._is_behind(decoder, session):
                return decoder, session
            self._end_session()
        pg_slot.take_slot(self._database, self._slot)
        self._session = self._new_session(lsn_of(after))
        self._decoder = PgoutputDecoder(
            self._captured,
            types=self._types,
            present=self._present,
            follow=self._follow,
            after=lsn_of(after),
            xids=self._xids,
        )
        return self._decoder, self._session

    def _new_session(self, after: int) -> SlotStream | SlotCopy | SlotPeek:
        found = pg_slot.read_slot(self._database, self._slot)
        if found is None or found.wal_status == "lost" or found.confirmed > after:
            pg_slot.find_slot(self._database, self._slot, end_text(after))
        assert found is not None, "find_slot raises"
        stream_next, self._stream_next = self._stream_next, False
        if not stream_next and self._confirmed >= after and self._flushed() - after > BEHIND_BYTES:
            if found.confirmed < after:
                advance(self._database, slot=self._slot, lsn=after)
            return self._bulk()
        stream = SlotStream(self._database, slot=self._slot, publication=self._publication, after=after)
        if found.confirmed < after <= self._confirmed:
            stream.confirm(after)
        return stream

    def _bulk(self) -> SlotCopy | SlotPeek:
        try:
            return SlotCopy(self._database, slot=self._slot, publication=self._publication)
        except HeadwaterError:  # no copy can be made; if more than that is wrong, this one tells it
            return SlotPeek(self._database, slot=self._slot, publication=self._publication)

    def _is_behind(self, decoder: PgoutputDecoder, session: SlotStream | SlotCopy | SlotPeek) -> bool:
        """Whether a stream has fallen so far behind that bulk is better; looked at now and then, between transactions."""
        is_due = isinstance(session, SlotStream) and decoder.is_whole and self._bytes_since_look >= LOOK_AT_LAG_BYTES
        if not is_due:
            return False
        self._bytes_since_look = 0
        return self._confirmed >= decoder.end and self._flushed() - decoder.end > BEHIND_BYTES

    def _flushed(self) -> int:
        ((now,),) = self._database.ask("select (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint")
        return int(now)

    def _idle(self, decoder: PgoutputDecoder, stream: SlotStream) -> list[Changes]:
        """Where the server has read on without finding anything for us, now and then."""
        if not self._report_idle or not decoder.is_between or stream.reached <= decoder.end:
            return []
        self._report_idle = False
        decoder.end = stream.reached
        return [Changes(end=end_text(decoder.end))]

    def _follow(self, relation: Relation) -> tuple[TableChange, CapturedPgTable | None] | None:
        found = self._follower.follow(relation, self._captured[relation.oid])
        return None if found is None else (found.change, found.captured)

    def _look_at_tables(self) -> list[Changes]:
        """What the catalog says of the captured tables, where it is not what the runner knows.

        A change of columns is told when the stream has come to where it was first seen: before that there may be changes with the columns
        from before, of rows that would be taken for new ones.
        """
        decoder = self._decoder
        if decoder is None or not decoder.is_between:
            return []
        seen = self._follower.look(self._captured)
        noticed, self._noticed = self._noticed, {}
        found = []
        for oid, difference in seen.items():
            if difference.captured is not None:
                earlier, lsn = noticed.get(oid, (None, 0))
                if earlier != difference or decoder.end < lsn:
                    self._noticed[oid] = (difference, lsn if earlier == difference else self._emit())
                    continue
                self._captured[oid] = difference.captured
            else:
                if difference.unidentified and self._publication_is_ours:
                    pg_slot.withdraw(self._database, self._publication, self._captured[oid].table)
                del self._captured[oid]
            found.append(Changes(tables=(difference.change,), end=end_text(decoder.end)))
        return found

    def _emit(self) -> int:
        """Writes a transaction of ours into the WAL; its LSN."""
        ((lsn,),) = self._database.ask(
            "select (pg_logical_emit_message(true, %s, %s) - '0/0'::pg_lsn)::bigint",
            (f"{OUR_PREFIX}heartbeat", str(time.time_ns())),
        )
        return int(lsn)

    def _end_session(self) -> None:
        session, self._session, self._decoder = self._session, None, None
        self._ready.clear()
        self._bytes_since_look = 0
        if session is not None:
            session.close()


def source_of(url: SourceUrl, *, name: str, keys: Mapping[str, tuple[str, ...]]) -> CaptureSource:
    """The source at a URL; nothing is connected yet."""
    return PostgresSource(url, name=name, keys=keys)
