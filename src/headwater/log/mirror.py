"""A mirror: keeps another log equal to this one, offset by offset.

A copied event has the offset, key, columns, time, headers, deletion and append time of the original, in a topic with the same
name, schema versions and partitions. The target's own end offsets are the mirror's only position: whatever kills it, the next one
goes on where the target ends, and a write that would land on another offset is refused by the target (`Write.at`), so nothing
is lost or doubled.

Each round takes one snapshot of the source's bounds. What is new up to there is copied in one transaction where it is small
(`TOGETHER_EVENTS_MAX`), so that readers of a mirror that keeps up see transactions whole. A larger backlog is copied piece
by piece, and the target is equal to that snapshot when the round ends.

Invariants:
- one mirror at a time for each topic of a target: it registers as the producer `mirror:<topic>`, which fences the one before;
- before the first event of a topic the last events of both sides are compared (`CHECKED_EVENTS`), so a target that holds other
  events is refused, not continued;
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
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from headwater.log.columns import values_of
from headwater.log.events import output_schema, to_batch_of
from headwater.log.frame import HAS_DELETED, HAS_HEADERS, Stamp, physical_schema
from headwater.log.queue_work import acks_name
from headwater.log.store import Bounds, Chunk, Cursor, Store, Waiter, Write
from headwater.log.topic import Split, Topic, check_name
from headwater.model.errors import Diverged, InvalidInput, TopicExists, TopicNotFound, Unsupported
from headwater.model.schema import project

PIECE_EVENTS_MAX = 65_536
PIECE_BYTES = 8 << 20
TOGETHER_EVENTS_MAX = 8_192
CHECKED_EVENTS = 256
LOOK_S = 0.5

_FIRST_PIECE_EVENTS = 1_024
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
        self._topics: dict[str, _CopiedTopic] = {}
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
            self._store([self._topics[name].next_write(number, ends[name, number]) for name, number in places])
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
                self._topics[name] = _CopiedTopic(self._source, self._target, topic)
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
        writes = [self._topics[name].next_write(number, ends[name, number]) for name, number in places]
        for write, stored in zip(writes, self._target.write_atomically(writes), strict=True):
            self._count(write, stored)

    def _store(self, writes: Sequence[Write]) -> None:
        outcomes = self._target.write(writes)
        for write, outcome in zip(writes, outcomes, strict=True):
            if isinstance(outcome, range):
                self._count(write, outcome)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    def _count(self, write: Write, stored: range) -> None:
        if stored.start != write.at:
            raise Diverged(
                f"Events {write.at} and on of topic {write.topic.name!r} were stored at {stored.start} by {self._target.url}.",
                advice="Something else writes to the copy. Delete that topic there, and mirror into a log of its own.",
            )
        self._topics[write.topic.name].ends[write.partition] = stored.stop
        self._events += write.count


class _CopiedTopic:
    """One topic on both sides: its settings, where the target ends, and where the source is read."""

    def __init__(self, source: Store, target: Store, topic: Topic) -> None:
        self._source = source
        self._target = target
        self.source_id = topic.id
        self._piece_events = _FIRST_PIECE_EVENTS
        self._cursors: dict[int, Cursor] = {}
        try:
            self._topic = target.refresh(topic.name)
        except TopicNotFound:
            try:
                self._topic = target.create(msgspec.structs.replace(topic, retain="all"))
            except TopicExists:
                self._topic = target.refresh(topic.name)
        self._splits: tuple[Split, ...] = ()
        self._partitions = topic.partitions
        self._check_alike(topic)
        self._producer, self._epoch = target.register_producer(f"mirror:{topic.name}")
        for number in range(self._topic.partitions):
            target.sequence_of(
                topic.name, number, producer=self._producer
            )  # what a dead mirror wrote is on disk after this
        self.follow(topic)
        self.follow_splits(topic)
        bounds = target.bounds([topic.name])
        self.ends = {number: bounds[topic.name, number].end for number in range(self._topic.partitions)}
        self._check_equal(topic)

    def follow(self, topic: Topic) -> None:
        """Brings the target's settings and schema versions up to those of the source."""
        wanted = {
            "schemas": topic.schemas,
            "lateness_us": topic.lateness_us,
            "future_us": topic.future_us,
            "event_bytes_max": topic.event_bytes_max,
        }
        self._check_alike(topic)
        if any(getattr(self._topic, name) != value for name, value in wanted.items()):
            self._topic = self._target.change(topic.name, lambda held: msgspec.structs.replace(held, **wanted))

    def follow_splits(self, topic: Topic) -> None:
        """Knows how the source was split."""
        self._splits, self._partitions = topic.splits, topic.partitions

    def upto(self, number: int, end: int) -> int:
        """How far a partition may be copied: before the target is split, to the fence."""
        due = self._splits[self._topic.generation :]
        return min(end, due[0].fences[number]) if due else end

    def split_if_due(self) -> bool:
        """Splits the target as the source was, once it has all that lies below the fences."""
        due = self._splits[self._topic.generation :]
        if not due or any(self.ends[number] < fence for number, fence in enumerate(due[0].fences)):
            return False
        partitions = due[1].partitions if len(due) > 1 else self._partitions
        self._topic = self._target.split(self._topic.name, partitions, at=due[0].fences)
        self.ends = {number: self.ends.get(number, 0) for number in range(partitions)}
        return True

    def fits(self, number: int, end: int) -> bool:
        """Whether what is left of a partition makes one piece."""
        return end - self.ends[number] <= self._piece_events

    def next_write(self, number: int, end: int) -> Write:
        """The next piece of a partition below `end`, ready for the target."""
        start = self.ends[number]
        cursor = self._cursors.get(number)
        if cursor is None or cursor.offset != start:
            cursor = self._cursors[number] = self._source.cursor(self._topic.name, number, offset=start)
        chunks = cursor.read(end, events_max=self._piece_events)
        if chunks[0].base_offset != start:
            raise self._missed(number, start, chunks[0].base_offset)
        if sum(chunk.batch.num_rows for chunk in chunks) != chunks[-1].end_offset - start:
            raise Unsupported(
                f"Compaction has left gaps behind offset {start} in partition {number} of topic {self._topic.name!r}.",
                advice="A copy by offset needs every event: make the target from a backup, then mirror what follows.",
            )
        if chunks[-1].topic.schema_id > self._topic.schema_id:
            self.follow(chunks[-1].topic)
        batch, appended = _joined(chunks, self._topic.schema)
        self._piece_events = _piece_events(batch)
        # A partition that was split off has its parent's sequences, and goes on behind them.
        first = start + sum(fence for _, fence in self._topic.ancestors(number))
        stamp = Stamp(self._producer, self._epoch, first, first + batch.num_rows - 1)
        return Write(self._topic, number, batch, stamp=stamp, at=start, appended=appended)

    def _check_alike(self, topic: Topic) -> None:
        """Refuses a target whose topic could never hold the same events at the same places."""
        held = self._topic
        partitions = (
            topic.splits[held.generation].partitions if topic.generation > held.generation else topic.partitions
        )
        if held.splits != topic.splits[: held.generation] or held.partitions != partitions:
            raise Diverged(
                f"Topic {topic.name!r} has {topic.partitions} partitions in {self._source.url}, and {held.partitions} in "
                f"{self._target.url}, which was not split where its log was.",
                advice=_DIVERGED_ADVICE,
            )
        for what in ("key", "time", "has_schema"):
            if getattr(held, what) != getattr(topic, what):
                raise Diverged(
                    f"Topic {topic.name!r} has {what} {getattr(topic, what)!r} in {self._source.url}, and "
                    f"{getattr(held, what)!r} in {self._target.url}.",
                    advice=_DIVERGED_ADVICE,
                )
        if held.schemas != topic.schemas[: len(held.schemas)]:
            raise Diverged(
                f"Topic {topic.name!r} has other schema versions in {self._target.url}.", advice=_DIVERGED_ADVICE
            )

    def _check_equal(self, topic: Topic) -> None:
        """Compares the last events that both sides should have."""
        bounds = self._source.bounds([topic.name])
        for number, end in self.ends.items():
            bound = bounds[topic.name, number]
            if end > bound.end:
                raise Diverged(
                    f"Partition {number} of topic {topic.name!r} ends at {bound.end} in {self._source.url}, and the copy in "
                    f"{self._target.url} at {end} already.",
                    advice=_DIVERGED_ADVICE,
                )
            if end < bound.first:
                raise self._missed(number, end, bound.first)
            first = max(bound.first, end - CHECKED_EVENTS)
            if checksum(self._source, topic.name, number, first, end) != checksum(
                self._target, topic.name, number, first, end
            ):
                raise Diverged(
                    f"The last events before offset {end} in partition {number} of topic {topic.name!r} differ between "
                    f"{self._source.url} and {self._target.url}.",
                    advice=_DIVERGED_ADVICE,
                )

    def _missed(self, number: int, end: int, first: int) -> Diverged:
        return Diverged(
            f"Partition {number} of topic {self._topic.name!r} no longer holds events {end} to {first - 1}, which the copy "
            "lacks.",
            advice="A copy by offset needs all of them: restore the target from a backup that has them, then mirror.",
        )


_DIVERGED_ADVICE = (
    "Nothing was copied. Delete the topic in the target and mirror again, or mirror into another log; to see what differs "
    "export both and compare."
)


def checksum(store: Store, name: str, partition: int, first: int, end: int) -> int:
    """A checksum of events by their content (not their append times): the same on any store that holds the same ones."""
    total = 0
    cursor = store.cursor(name, partition, offset=first)
    while chunks := cursor.read(end, events_max=CHECKED_EVENTS):
        columns = [*chunks[-1].topic.schema.names, "_headers", "_deleted"]
        for chunk in chunks:
            batch = to_batch_of(chunk, output_schema(chunk.topic, columns))
            for row in zip(*(values_of(column) for column in batch.columns), strict=True):
                total = crc32c(repr(row).encode("utf-8", "surrogatepass"), total)
    return total


def chosen_topics(source: Store, topics: Sequence[str] | None, pattern: str | None) -> list[str] | None:
    """The names that were asked for, all of them there; None where a pattern, or nothing, was given."""
    if topics is not None and pattern is not None:
        raise InvalidInput("A mirror takes topics or a pattern, not both.", advice="Leave out one of the two.")
    if pattern is not None:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise InvalidInput(
                f"{pattern!r} is not a regular expression: {error}.", advice='Such as pattern="orders.*".'
            ) from None
    if topics is None:
        return None
    if isinstance(topics, str) or not topics:
        raise InvalidInput(f"topics={topics!r} is no list of topics.", advice='Use topics=["orders"].')
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


def _joined(chunks: Sequence[Chunk], schema: pa.Schema) -> tuple[pa.RecordBatch, Any]:
    """Chunks as one batch with the columns of a schema, and the append time of each event."""
    physical = physical_schema(schema, HAS_HEADERS | HAS_DELETED)
    appended = np.concatenate([_appended(chunk) for chunk in chunks])
    batch = pa.concat_batches([project(chunk.batch, physical) for chunk in chunks])
    kept = list(range(len(schema)))
    if batch.column("_headers").null_count < batch.num_rows:
        kept.append(len(schema))
    if pc.any(batch.column("_deleted")).as_py():
        kept.append(len(schema) + 1)
    return batch.select(kept), appended


def _appended(chunk: Chunk) -> Any:
    if chunk.appended is not None:
        return np.full(chunk.batch.num_rows, chunk.appended, dtype=np.int64)
    return np.asarray(chunk.batch.column("_appended").cast(pa.int64()))


def _piece_events(batch: pa.RecordBatch) -> int:
    """How many such events make a piece that is good to write."""
    size = pa.ipc.get_record_batch_size(batch) // batch.num_rows + 1
    return min(PIECE_EVENTS_MAX, max(1, PIECE_BYTES // size))
