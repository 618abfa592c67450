"""A slot read as a stream: a replication connection on which the server sends as transactions commit, and we what is durable.

It is there for latency. The server sends each message by a system call of its own and psycopg2 gives them one by one, which is the only
loop over single messages: together some 8 microseconds each. What is much is read in bulk (`bulk`), which gives the same messages
in the same order. Not thread-safe.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from headwater.capture.postgres.connection import PostgresDatabase
from headwater.capture.postgres.pgoutput import BEGIN, COMMIT
from headwater.capture.source import is_readable

BLOCK_BYTES_MAX = 8 << 20
BLOCK_BYTES = 1 << 20
"""From here on a block ends with a transaction."""

FEEDBACK_S = 10.0
LINGER_BYTES = 64 << 10
LINGER_S = 0.02


class SlotStream:
    """Changes as they commit."""

    def __init__(self, database: PostgresDatabase, *, slot: str, publication: str, after: int) -> None:
        self._database = database
        self._connection = database.stream()
        self._cursor = self._connection.cursor()
        self._told_s = time.monotonic()
        self._is_open = False
        """Whether the end of a transaction is still to come; the server sends none before it has committed."""
        try:
            with database.told():
                self._cursor.start_replication(
                    slot_name=slot,
                    decode=False,
                    start_lsn=after,
                    options=plugin_options(publication),
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

    def read(self, timeout_s: float) -> list[bytes]:
        """The next messages; none where none came in that time."""
        with self._database.told():
            return self._messages(timeout_s)

    def confirm(self, lsn: int) -> None:
        """Everything that committed before this is durable."""
        with self._database.told():
            self._cursor.send_feedback(write_lsn=lsn, flush_lsn=lsn, apply_lsn=lsn, force=True)
        self._told_s = time.monotonic()

    def close(self) -> None:
        """Lets the slot go."""
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
                messages.append(payload := message.payload)
                size += len(payload)
                self._is_open = (self._is_open or payload[0] == BEGIN) and payload[0] != COMMIT
                if size >= BLOCK_BYTES and payload[0] == COMMIT:
                    break
                continue
            now = time.monotonic()
            if now - self._told_s > FEEDBACK_S:
                self._cursor.send_feedback(force=True)
                self._told_s = now
            if (messages and size < LINGER_BYTES and not self._is_open) or now >= deadline:
                break
            if messages:  # the rest is on its way; or much has come, so more is, and a large block costs less than many small ones
                deadline = min(deadline, now + LINGER_S)
            if not is_readable(self._connection, min(deadline - now, FEEDBACK_S)) and messages:
                break
        return messages


def plugin_options(publication: str) -> dict[str, str]:
    """What pgoutput is told, by a stream and in bulk."""
    name = '"' + publication.replace('"', '""') + '"'
    return {"proto_version": "1", "publication_names": name, "messages": "true"}
