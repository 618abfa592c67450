"""A mirror: keeps another log equal to this one, offset by offset.

A copied event has the offset, key, columns, time, headers, deletion and append time of the original, in a topic with the same
name, schema versions and partitions. The target's own end offsets are the mirror's only position: whatever kills it, the next one
goes on where the target ends, and a write that would land on another offset is refused by the target (`Write.at`), so nothing
is lost or doubled. Where a log cannot be told (Kafka), the offset that it gave is looked at afterwards.

Events that compaction or retention removed are gaps in the copy, too: a piece with gaps between its offsets is placed as a whole
(`Store.place`), and a partition whose first events are gone begins there in the copy. A log that keeps no gaps refuses both.

Each round takes one snapshot of the source's bounds. What is new up to there is copied in one transaction where it is small
(`TOGETHER_EVENTS_MAX`), so that readers of a mirror that keeps up see transactions whole. A larger backlog is copied piece
by piece, and the target is equal to that snapshot when the round ends.

Invariants:
- one mirror at a time for each topic of a target: it registers as the producer `mirror:<topic>`, which fences the one before
  (not on Kafka, where a named producer's transactions would cost offsets);
- a target that holds other events is refused, not continued (see `mirror_topic`);
- a topic's settings and schema versions reach the target before the events that need them; but a copy keeps what it has, whatever
  its queues acknowledge (`retain`). Notes of units of work stay behind with the queues to which they belong;
- a topic that was split is split in the target at the same fences: nothing behind them is copied before the target has all that
  lies below, and has been split.

Thread-safety: none; a mirror belongs to one thread. It takes no locks beyond those of the two stores.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from headwater.log.copies.mirror_topic import CopiedTopic, CopyPiece
from headwater.log.port.store import Bounds, Store, Waiter
from headwater.log.port.topic import check_name
from headwater.log.queue.acks_topic import acks_name
from headwater.model.errors import Diverged, InvalidInput, TopicNotFound
from headwater.model.text import compiled_pattern

TOGETHER_EVENTS_MAX = 8_192
LOOK_S = 0.5

_AT_ONCE = 4

Place = tuple[str, int]


class Mirrored(msgspec.Struct, frozen=True):
    """How far a mirror has come: topics it keeps, events it copied, events that were left to copy when it looked last."""

    topics: int
    events: int
    behind: int


class Mirror:
    """Copies topics of one store into another."""

    def __init__(
        self, source: Store, target: Store, *, topics: Sequence[str] | None = None, pattern: str | None = None
    ) -> None:
        if source is target:
            raise InvalidInput("A log cannot be its own mirror.", advice="Name another log as the target.")
        check_apart(source.url, target.url)
        self._source = source
        self._target = target
        self._named = chosen_topics(source, topics, pattern)
        self._pattern = pattern
        self._topics: dict[str, CopiedTopic] = {}
        self._events = 0
        self._behind = 0

    def run(
        self,
        *,
        follow: bool,
        stop: threading.Event | None = None,
        on_progress: Callable[[Mirrored], None] | None = None,
    ) -> Mirrored:
        """Copies what is there; with `follow` goes on with what comes, until `stop` is set or somebody interrupts it."""
        waiter: Waiter | None = None
        watched: list[str] = []
        try:
            while True:
                self.catch_up(on_progress)
                if not follow or (stop is not None and stop.is_set()):
                    return self.progress()
                if waiter is None or watched != sorted(self._topics):
                    if waiter is not None:
                        waiter.close()
                    watched = sorted(self._topics)
                    waiter = self._source.waiter(watched)
                    continue
                waiter.wait(LOOK_S)
        finally:
            if waiter is not None:
                waiter.close()

    def catch_up(self, on_progress: Callable[[Mirrored], None] | None = None) -> int:
        """Copies everything up to one snapshot of the source; returns how many events that were."""
        before = self._events
        self._look_for_topics()
        while True:
            self._copy(self._snapshot(), on_progress)
            split = [name for name, topic in self._topics.items() if topic.split_if_due()]
            if not split:
                return self._events - before

    def _copy(self, ends: Mapping[Place, int], on_progress: Callable[[Mirrored], None] | None) -> None:
        self._behind = self._left(ends)
        tell = on_progress or (lambda progress: None)
        tell(self.progress())
        if 0 < self._behind <= TOGETHER_EVENTS_MAX:
            self._copy_together(ends)
        while places := self._places_behind(ends):
            self._store([self._topics[name].next_piece(number, ends[name, number]) for name, number in places])
            self._behind = self._left(ends)
            tell(self.progress())
        self._behind = 0
        tell(self.progress())

    def progress(self) -> Mirrored:
        """How far it has come."""
        return Mirrored(len(self._topics), self._events, self._behind)

    # Topics

    def _look_for_topics(self) -> None:
        for name in self._names():
            try:
                topic = self._source.refresh(name)
            except TopicNotFound:
                self._drop(name)
                continue
            known = self._topics.get(name)
            if known is not None and known.source_id == topic.id:
                known.follow(topic)
            else:
                self._topics[name] = CopiedTopic(self._source, self._target, topic)
        for name in set(self._topics) - set(self._source.topics()):
            self._drop(name)

    def _names(self) -> list[str]:
        if self._named is not None:
            return self._named
        notes = {acks_name(made["topic"], made["group"]) for made in self._source.queues()}
        names = [name for name in self._source.topics() if name not in notes]
        return names if self._pattern is None else [name for name in names if re.fullmatch(self._pattern, name)]

    def _drop(self, name: str) -> None:
        """A topic that was deleted here stays in the copy, as it was."""
        self._topics.pop(name, None)

    # Events

    def _snapshot(self) -> dict[Place, int]:
        """How far to copy each partition, of one moment; topics that were deleted since the last look are left out."""
        while True:
            try:
                bounds: Mapping[Place, Bounds] = self._source.bounds(list(self._topics))
                for name, known in self._topics.items():  # after the bounds: whatever split they know of counts
                    known.follow_splits(self._source.topic(name))
                return {
                    (name, number): self._topics[name].upto(number, bound.end)
                    for (name, number), bound in bounds.items()
                    if number in self._topics[name].ends
                }
            except TopicNotFound:
                gone = set(self._topics) - set(self._source.topics())
                if not gone:
                    raise
                for name in gone:
                    self._drop(name)

    def _left(self, ends: Mapping[Place, int]) -> int:
        return sum(end - self._topics[name].ends[number] for (name, number), end in ends.items())

    def _places_behind(self, ends: Mapping[Place, int]) -> list[Place]:
        """Some partitions with events to copy, the most behind first."""
        left = {place: end - self._topics[place[0]].ends[place[1]] for place, end in ends.items()}
        return sorted((place for place, events in left.items() if events > 0), key=lambda place: -left[place])[
            :_AT_ONCE
        ]

    def _copy_together(self, ends: Mapping[Place, int]) -> None:
        """A small step in one transaction, so that those of the source stay whole."""
        places = [(name, number) for (name, number), end in ends.items() if end > self._topics[name].ends[number]]
        if len(places) < 2 or not all(self._topics[name].fits(number, ends[name, number]) for name, number in places):
            return
        pieces = [self._topics[name].next_piece(number, ends[name, number]) for name, number in places]
        if not self._target.capabilities.takes_offsets or any(piece.offsets is not None for piece in pieces):
            self._store(pieces)
            return
        for piece, stored in zip(pieces, self._target.write_atomically([piece.write for piece in pieces]), strict=True):
            self._count(piece, stored)

    def _store(self, pieces: Sequence[CopyPiece]) -> None:
        dense = [piece for piece in pieces if piece.offsets is None]
        outcomes = self._target.write([piece.write for piece in dense]) if dense else []
        for piece, outcome in zip(dense, outcomes, strict=True):
            if isinstance(outcome, range):
                self._count(piece, outcome)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        for piece in pieces:
            if piece.offsets is not None:
                assert piece.write.at is not None
                self._target.place(piece.write, piece.offsets, end=piece.end)
                self._count(piece, range(piece.write.at, piece.end))

    def _count(self, piece: CopyPiece, stored: range) -> None:
        write = piece.write
        if (stored.start, stored.stop) != (write.at, piece.end):
            raise Diverged(
                f"Events {write.at} to {piece.end - 1} of topic {write.topic.name!r} were stored at {stored.start} to "
                f"{stored.stop - 1} by {self._target.url}.",
                advice="Something else writes to the copy. Delete that topic there, and mirror into a log of its own.",
            )
        self._topics[write.topic.name].ends[write.partition] = piece.end
        self._events += write.count


def chosen_topics(source: Store, topics: Sequence[str] | None, pattern: str | None) -> list[str] | None:
    """The names that were asked for, all of them there; None where a pattern, or nothing, was given."""
    if topics is not None and pattern is not None:
        raise InvalidInput("A mirror takes topics or a pattern, not both.", advice="Leave out one of the two.")
    if pattern is not None:
        compiled_pattern(pattern)
    if topics is None:
        return None
    if isinstance(topics, str) or not topics:
        raise InvalidInput(f"topics={topics!r} is not a list of topics.", advice='Use topics=["orders"].')
    return [source.refresh(check_name(name)).name for name in topics]


def check_apart(source: str, target: str) -> None:
    """Refuses a copy of a folder onto itself, or of which one lies inside the other."""
    if any("://" in url and not url.startswith("file://") for url in (source, target)):
        return
    here, there = (os.path.realpath(url.removeprefix("file://")) for url in (source, target))
    if here == there:
        raise InvalidInput(f"{here} cannot be copied onto itself.", advice="Name another folder as the target.")
    if there.startswith(f"{here}/") or here.startswith(f"{there}/"):
        raise InvalidInput(
            f"{there} and {here} lie inside one another.", advice="Name a folder outside the log as the target."
        )
