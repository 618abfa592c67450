"""Reading a log in memory: cursors, and waiting for new events."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from headwater.log.port.chunk import Chunk
from headwater.log.port.store import check_not_missed
from headwater.log.port.topic import made_anew

if TYPE_CHECKING:
    from headwater.log.memory.store import MemoryStore


class MemoryCursor:
    """A place in one partition."""

    def __init__(self, store: MemoryStore, name: str, partition: int, offset: int) -> None:
        self.offset = offset
        self._store = store
        self._name = name
        self._number = partition
        self._topic_id = store.topic(name).id

    def read(self, end: int, *, events_max: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        if self._store.topic(self._name).id != self._topic_id:
            raise made_anew(self._name)
        if self.offset < end:
            check_not_missed(self._name, self._number, self.offset, first=self._store.first(self._name, self._number))
        while self.offset < end and events_max > 0:
            chunk = self._store.chunk_at(self._name, self._number, self.offset)
            part = chunk.slice(self.offset, min(chunk.end_offset, end)).slice_events(events_max)
            if part.batch.num_rows:
                chunks.append(part)
            events_max -= part.batch.num_rows
            self.offset = part.end_offset
        return chunks


class MemoryWaiter:
    """Sleeps until something was appended anywhere."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait(min(timeout_s, 0.05))

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        """Nothing to free."""
