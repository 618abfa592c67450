"""A partition of a log in memory."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headwater.log.port.chunk import Chunk
from headwater.log.port.lateness import Heartbeat, reached_after
from headwater.log.port.write import NO_PRODUCER
from headwater.model.clock import NO_TIME


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

    def add(self, chunks: Sequence[Chunk], *, end: int, producer: bytes = NO_PRODUCER, last: int = -1) -> None:
        """Puts chunks of one producer, up to its sequence `last`, behind the others.

        Everything is made ready first; the lines that change it hold no call, so Ctrl-C cannot fall between two of them.
        """
        fresh, running, size = [], self.running, self.bytes
        for chunk in chunks:
            fresh.append(msgspec.structs.replace(chunk, running=running))
            size += chunk.batch.nbytes
            running = reached_after(chunk, running)
        appended = chunks[-1].appended if chunks else self.appended
        assert appended is not None
        self.chunks += fresh
        self.bytes, self.appended, self.running, self.end = size, appended, running, end
        if producer != NO_PRODUCER:
            self.sequences[producer] = (last, end)

    def split_off(self) -> MemoryPartition:
        """A new partition that goes on where this one stands, for some of its keys."""
        child = MemoryPartition()
        child.appended, child.running = self.appended, self.running
        child.sequences = {producer: (last, 0) for producer, (last, _) in self.sequences.items()}
        return child
