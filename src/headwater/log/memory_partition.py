"""A partition of a log in memory."""

from __future__ import annotations

import msgspec

from headwater.log.frame import NO_TIME
from headwater.log.heartbeats import Heartbeat
from headwater.log.lateness import reached_after
from headwater.log.store import Chunk


class MemoryPartition:
    """Its chunks from old to new, and what is remembered of those that are gone."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.first = 0
        self.end = 0
        self.bytes = 0
        self.appended = 0
        self.running = NO_TIME
        self.heartbeats: list[Heartbeat] = []
        self.tombstones: dict[int, int] = {}
        self.sequences: dict[bytes, tuple[int, int]] = {}

    def add(self, chunk: Chunk) -> None:
        """Puts a chunk behind the others."""
        self.chunks.append(msgspec.structs.replace(chunk, running=self.running))
        self.bytes += chunk.batch.nbytes
        assert chunk.appended is not None
        self.appended = chunk.appended
        self.running = reached_after(chunk, self.running)

    def split_off(self) -> MemoryPartition:
        """A new partition that goes on where this one stands, for some of its keys."""
        child = MemoryPartition()
        child.appended, child.running = self.appended, self.running
        child.sequences = {producer: (last, 0) for producer, (last, _) in self.sequences.items()}
        return child
