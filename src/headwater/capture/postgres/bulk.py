"""A slot read in bulk: by SQL, many changes at once, as Arrow; at a higher rate than a stream, and for a third of the server's time.

`SlotCopy` is how a capture catches up. It reads a temporary copy of the slot, piece after piece, in a thread of its own: while the runner
decodes and appends one piece the server makes the next. The slot itself is moved now and then, to what is durable in the log, and where the
process is killed the copy goes with its connection. `SlotPeek` needs no second slot: it reads one piece of the slot itself and is over, and
the slot must be moved before the next. It serves where no copy can be made (all slots in use; a killed capture's copy not gone yet).

The server reads its WAL anew for each piece, from the last place where it can begin (it notes one every 15 seconds), so a piece must be
large; it holds a piece in a file before it sends it, so it must not be too large: as many changes as make `PIECE_BYTES`, by the size of
those before. The first is small, so that the runner does not wait for it.

Invariant: nothing but `confirm` moves the slot. Not thread-safe but for the thread in here, which has connections of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator
from contextlib import suppress

from headwater.capture.postgres.connection import PostgresDatabase, literal
from headwater.capture.postgres.pgoutput import PgoutputBlock, block_of_column
from headwater.capture.postgres.positions import lsn_sql
from headwater.capture.postgres.slot import copy_name
from headwater.capture.postgres.stream import plugin_options

PEEK_CHANGES = 200_000
PIECE_CHANGES_FIRST = 100_000
PIECE_CHANGES_MAX = 400_000
PIECE_BYTES = 64 << 20
BLOCK_BYTES = 16 << 20
BLOCKS_AHEAD = 3

MOVE_S = 5.0
"""How often the slot is moved while its copy is read."""

_LOOK_S = 0.1
_SIZE_OPTION = "adbc.postgresql.batch_size_hint_bytes"
_LET_GO_S = 10.0


class SlotCopy:
    """What a slot has, up to its end, by a copy that is read in advance."""

    has_more = False
    """It ends where there is little more."""

    def __init__(self, database: PostgresDatabase, *, slot: str, publication: str) -> None:
        self._database = database
        self._slot = slot
        self._reading = database.another()
        self._publication = publication
        copied = f"pg_copy_logical_replication_slot({literal(slot)}, {literal(copy_name(slot))}, true)"
        with self._reading.told(), self._reading.bulk().cursor() as cursor:
            cursor.execute(f"select pg_backend_pid() from {copied}")
            (self._pid,) = cursor.fetchone()
        self._moved_s = time.monotonic()
        self._found: queue.Queue[PgoutputBlock | Exception | None] = queue.Queue(BLOCKS_AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwater-ahead", daemon=True)
        self._thread.start()

    def read(self, timeout_s: float) -> PgoutputBlock | None:
        found = self._found.get()
        if isinstance(found, Exception):
            raise found
        return found

    def confirm(self, lsn: int) -> None:
        now = time.monotonic()
        if now - self._moved_s >= MOVE_S:
            advance(self._database, slot=self._slot, lsn=lsn)
            self._moved_s = now

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2 * _LOOK_S)
        if self._thread.is_alive():  # it waits for the server, which may be at work for seconds
            with suppress(Exception):
                self._database.ask("select pg_terminate_backend(%s)", (self._pid,))
            self._thread.join(_LET_GO_S)

    def _run(self) -> None:
        """Piece after piece, until one is so small that a stream may as well go on."""
        changes, goes_on = PIECE_CHANGES_FIRST, True
        copy = copy_name(self._slot)
        try:
            while goes_on:
                found = size = 0
                with self._reading.told():
                    for block in _blocks(self._reading, "get", copy, self._publication, changes_max=changes):
                        if not self._hand_over(block):
                            return
                        found, size = found + len(block.starts), size + len(block.data)
                goes_on = found >= min(changes, PIECE_CHANGES_FIRST)
                changes = max(1, min(2 * changes, PIECE_CHANGES_MAX, PIECE_BYTES * found // max(1, size)))
            self._hand_over(None)
        except Exception as error:  # noqa: BLE001 - whatever it is, the runner has to hear of it
            self._hand_over(error)
        finally:
            self._reading.close()

    def _hand_over(self, found: PgoutputBlock | Exception | None) -> bool:
        """Waits until there is room; false if nobody wants any more."""
        while not self._stop.is_set():
            with suppress(queue.Full):
                self._found.put(found, timeout=_LOOK_S)
                return True
        return False


class SlotPeek:
    """The next many changes of a slot that nobody streams; then it is over."""

    def __init__(self, database: PostgresDatabase, *, slot: str, publication: str) -> None:
        self._database = database
        self._blocks = _blocks(database, "peek", slot, publication, changes_max=PEEK_CHANGES)
        self._changes = 0

    @property
    def has_more(self) -> bool:
        """Whether it ended because it had enough, not because there was no more."""
        return self._changes >= PEEK_CHANGES

    def read(self, timeout_s: float) -> PgoutputBlock | None:
        with self._database.told():
            block = next(self._blocks, None)
        self._changes += 0 if block is None else len(block.starts)
        return block

    def confirm(self, lsn: int) -> None:
        """The slot is moved when the peek is over."""

    def close(self) -> None:
        with suppress(Exception):
            self._blocks.close()


def advance(database: PostgresDatabase, *, slot: str, lsn: int) -> None:
    """Moves a slot that nobody reads to what is durable."""
    database.ask("select pg_replication_slot_advance(%s, %s::pg_lsn)", (slot, lsn_sql(lsn)))


def _blocks(
    database: PostgresDatabase, way: str, slot: str, publication: str, *, changes_max: int
) -> Generator[PgoutputBlock]:
    """What the server gives, as it comes."""
    options = ", ".join(literal(word) for pair in plugin_options(publication).items() for word in pair)
    with database.bulk().cursor() as cursor:
        cursor.adbc_statement.set_options(**{_SIZE_OPTION: str(BLOCK_BYTES)})
        cursor.execute(
            f"select data from pg_logical_slot_{way}_binary_changes({literal(slot)}, null, {changes_max}, {options})"
        )
        for batch in cursor.fetch_record_batch():
            if batch.num_rows:
                yield block_of_column(batch.column(0))
