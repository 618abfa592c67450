"""The sequences of a partition: the last that each producer has stored there, as far as one process has looked.

They stand in the header of each segment and in the frames behind it. This process's own frames are remembered as they are
written, so only those of others are ever read. All is asked and told by the holder of the partition's append lock.

Producers with a name are remembered for a time, those without one by their number (see `recent_producers`): however many of the
latter come and go, a named producer that starts again finds what it stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.log.active import lost
from headwater.log.disk import Disk
from headwater.log.frame import NO_PRODUCER, Payload
from headwater.log.head import Mark
from headwater.log.segment import ProducerSequence, Segment, recent_producers, segment_name


class Sequences:
    """What the producers of one partition have stored last."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._known: dict[bytes, ProducerSequence] = {}
        self._mark: tuple[int, int, int] = (-1, 0, 0)

    def of(self, producer: bytes, mark: Mark, *, foreign: bool) -> ProducerSequence | None:
        """`foreign`: other processes may have written under the same id, so their frames must be looked at."""
        if foreign or producer not in self._known or self._mark[2] != mark.heals:
            self._look(mark)
        return self._known.get(producer)

    def all(self, mark: Mark) -> dict[bytes, ProducerSequence]:
        """Those of every producer that is remembered, up to the written mark."""
        self._look(mark)
        self._known = recent_producers(self._known, now=mark.appended)
        return self._known

    def remember(self, payloads: Sequence[Payload], mark: Mark, after: Mark) -> None:
        """Keeps the sequences of our own frames, which lie between two marks."""
        end = mark.end
        for payload in payloads:
            end += payload.count
            if payload.stamp.producer != NO_PRODUCER:
                stamp = payload.stamp
                self._known[stamp.producer] = ProducerSequence(stamp.epoch, stamp.sequence_last, end, after.appended)
        if self._mark == (mark.base, mark.position, mark.heals):
            self.go_on(after)

    def go_on(self, mark: Mark) -> None:
        """All up to the mark is known."""
        self._mark = (mark.base, mark.position, mark.heals)

    def _look(self, mark: Mark) -> None:
        base, position, heals = self._mark
        if (base, position, heals) == (mark.base, mark.position, mark.heals):
            return
        try:
            segment = Segment(self._disk, self._folder, mark.base)
        except FileNotFoundError:
            raise lost(f"{self._folder}/{segment_name(mark.base)}", "it is missing") from None
        try:
            if (base, heals) != (mark.base, mark.heals):
                self._known = dict(segment.header.producers)
                position = segment.start
            self._known.update(segment.producers(position, end=mark.position))
        finally:
            segment.close()
        self.go_on(mark)
