"""The sequences of a partition: the last that each producer has stored there, as far as one process has looked.

They stand in the header of each segment and in the frames behind it. This process's own frames are remembered once they are
published, so only those of others are ever read. All is asked and told by the holder of the partition's append lock.

Invariant: nothing is remembered that is not published, and what is published is remembered or in doubt: then the frames are
read. So Ctrl-C between the two neither lets a batch pass for stored nor stores it twice.

Producers with a name are remembered for a time, those without one by their number (see `recent_producers`): however many of the
latter come and go, a named producer that starts again finds what it stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.log.disk.disk import Disk
from headwater.log.file.partition.active import lost
from headwater.log.file.partition.head import Mark
from headwater.log.file.segments.frame import Payload
from headwater.log.file.segments.segment import ProducerSequence, Segment, recent_producers, segment_name
from headwater.log.port.write import NO_PRODUCER


class Sequences:
    """What the producers of one partition have stored last."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._known: dict[bytes, ProducerSequence] = {}
        self._mark: tuple[int, int, int] = (-1, 0, 0)
        self._doubts = 0

    def of(self, producer: bytes, mark: Mark, *, foreign: bool) -> ProducerSequence | None:
        """`foreign`: other processes may have written under the same id, so their frames must be looked at."""
        if foreign or self._doubts or producer not in self._known or self._mark[2] != mark.heals:
            self._look(mark)
        return self._known.get(producer)

    def all(self, mark: Mark) -> dict[bytes, ProducerSequence]:
        """Those of every producer that is remembered, up to the written mark."""
        self._look(mark)
        self._known = recent_producers(self._known, now=mark.appended)
        return self._known

    def doubt(self) -> None:
        """Frames of our own are about to be published: what is known may be too little until they are remembered."""
        self._doubts += 1

    def remember(self, payloads: Sequence[Payload], after: Mark) -> None:
        """Keeps the sequences of our own frames, which were published up to a mark."""
        stamp = payloads[-1].stamp
        if stamp.producer != NO_PRODUCER:
            self._known[stamp.producer] = ProducerSequence(stamp.epoch, stamp.sequence_last, after.end, after.appended)
        start = after.position - sum(payload.stride for payload in payloads)
        if self._mark == (after.base, start, after.heals):
            self.go_on(after)
        self._doubts -= 1

    def go_on(self, mark: Mark) -> None:
        """All up to the mark is known."""
        self._mark = (mark.base, mark.position, mark.heals)

    def _look(self, mark: Mark) -> None:
        base, position, heals = self._mark
        if (base, position, heals) != (mark.base, mark.position, mark.heals):
            self._look_from(None if (base, heals) != (mark.base, mark.heals) else position, mark)
        self._doubts = 0

    def _look_from(self, position: int | None, mark: Mark) -> None:
        """Reads the frames from a position on, or the whole segment; Ctrl-C leaves what was known as it was."""
        try:
            segment = Segment(self._disk, self._folder, mark.base)
        except FileNotFoundError:
            raise lost(f"{self._folder}/{segment_name(mark.base)}", "it is missing") from None
        try:
            if position is None:
                self._known = {**segment.header.producers, **segment.producers(segment.start, end=mark.position)}
            else:
                self._known.update(segment.producers(position, end=mark.position))
        finally:
            segment.close()
        self.go_on(mark)
