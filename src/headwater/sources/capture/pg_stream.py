"""The two ways to read a slot: a stream for latency, and peeks for bulk.

A `Stream` is a replication connection: the server sends as transactions commit, and what was confirmed goes back on the same connection. A
`Peek` asks by SQL for many changes at once and gets them as Arrow, at a higher rate and less processor time; the server reads its
WAL anew for each, so it must be large, and before the next one the slot must be moved to what is durable in the log. Both give the same
messages in the same order, and a slot serves one of them at a time. psycopg2 gives a stream's messages one by one, which is the only loop
over single messages: it costs a microsecond each, and what is much goes by a peek. Not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol

from headwater.sources.capture.pg_connection import Database, literal
from headwater.sources.capture.pg_positions import lsn_sql
from headwater.sources.capture.pgoutput import Block, block_of, block_of_column
from headwater.sources.capture.readable import is_readable

PEEK_CHANGES = 200_000
BLOCK_BYTES_MAX = 8 << 20
FEEDBACK_S = 10.0
LINGER_BYTES = 64 << 10
LINGER_S = 0.02


class Session(Protocol):
    """A way to read a slot from one position on."""

    def read(self, timeout_s: float) -> Block | None:
        """The next messages; None: none came in that time, or (of a peek) there are none left."""

    def confirm(self, lsn: int) -> None:
        """Everything that committed before this is durable."""

    def close(self) -> None:
        """Lets the slot go."""


class Stream:
    """Changes as they commit."""

    def __init__(self, database: Database, *, slot: str, publication: str, after: int) -> None:
        self._database = database
        self._connection = database.stream()
        self._cursor = self._connection.cursor()
        self._told_s = time.monotonic()
        try:
            with database.told():
                self._cursor.start_replication(
                    slot_name=slot,
                    decode=False,
                    start_lsn=after,
                    options=_options(publication),
                    status_interval=FEEDBACK_S,
                )
        except BaseException:
            self.close()
            raise

    @property
    def reached(self) -> int:
        """How far the server has read its WAL for us: all that committed before it was sent, and read if nothing is left to read."""
        return int(self._cursor.wal_end or 0)

    def ask(self) -> None:
        """Asks the server how far it has read; the answer comes with the next messages."""
        with self._database.told():
            self._cursor.send_feedback(reply=True, force=True)

    def read(self, timeout_s: float) -> Block | None:
        with self._database.told():
            messages = self._messages(timeout_s)
        return block_of(messages) if messages else None

    def confirm(self, lsn: int) -> None:
        with self._database.told():
            self._cursor.send_feedback(write_lsn=lsn, flush_lsn=lsn, apply_lsn=lsn, force=True)
        self._told_s = time.monotonic()

    def close(self) -> None:
        with suppress(Exception):
            self._connection.close()

    def _messages(self, timeout_s: float) -> list[bytes]:
        """What has come, up to a block; waits for the first."""
        read_message: Any = self._cursor.read_message
        messages: list[bytes] = []
        size = 0
        deadline = time.monotonic() + timeout_s
        while size < BLOCK_BYTES_MAX:
            message = read_message()
            if message is not None:
                messages.append(message.payload)
                size += len(message.payload)
                continue
            now = time.monotonic()
            if now - self._told_s > FEEDBACK_S:
                self._cursor.send_feedback(force=True)
                self._told_s = now
            if (messages and size < LINGER_BYTES) or now >= deadline:
                break
            if messages:  # much has come: more is on its way, and a large block costs less than many small ones
                deadline = min(deadline, now + LINGER_S)
            if not is_readable(self._connection, min(deadline - now, FEEDBACK_S)) and messages:
                break
        return messages


class Peek:
    """The next many changes of a slot that nobody streams; then it is over."""

    def __init__(self, database: Database, *, slot: str, publication: str) -> None:
        self._database = database
        options = ", ".join(literal(word) for pair in _options(publication).items() for word in pair)
        statement = (
            f"select data from pg_logical_slot_peek_binary_changes({literal(slot)}, null, {PEEK_CHANGES}, {options})"
        )
        with database.told():
            self._cursor = database.bulk().cursor()
            self._cursor.execute(statement)
            self._blocks: Iterator[Any] = iter(self._cursor.fetch_record_batch())
        self._messages = 0

    @property
    def has_more(self) -> bool:
        """Whether it ended because it had enough, not because there was no more."""
        return self._messages >= PEEK_CHANGES

    def read(self, timeout_s: float) -> Block | None:
        with self._database.told():
            for batch in self._blocks:
                if batch.num_rows:
                    self._messages += batch.num_rows
                    return block_of_column(batch.column(0))
        return None

    def confirm(self, lsn: int) -> None:
        """The slot is moved when the peek is over."""

    def close(self) -> None:
        with suppress(Exception):
            self._cursor.close()


def advance(database: Database, *, slot: str, lsn: int) -> None:
    """Moves a slot that nobody reads to what is durable."""
    database.ask("select pg_replication_slot_advance(%s, %s::pg_lsn)", (slot, lsn_sql(lsn)))


def _options(publication: str) -> dict[str, str]:
    """What pgoutput is told, in both ways."""
    name = '"' + publication.replace('"', '""') + '"'
    return {"proto_version": "1", "publication_names": name, "messages": "true"}
