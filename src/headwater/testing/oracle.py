"""The oracle: what a log must hold after everything that has happened to it, kept in plain Python beside it.

It shares no code with the log. It is told what was asked (a batch, before the call), what was answered (the offsets, after it)
and what any reader has seen, and raises `Violation` as soon as two of these cannot both be true:

- what is at an offset never changes, whether an acknowledgement said so or a reader has seen it. Only a power loss may take
  back the end of a partition with `durability="os"`: then everything from some offset on is gone, and what stands there later
  was written after the loss;
- a reader that begins now sees at least what was acknowledged, and what any reader saw, before (`floors`);
- no event is at two places; a batch is whole in each of its partitions, its rows next to each other and in order;
- of a numbered source each partition holds a beginning, without gaps, doubles or disorder, and nothing from a stale producer;
- a key is always in the same partition.

What was asked and not answered may be there or not, as a whole. That a reader sees all or nothing of an atomic group is for
`ReaderView` to check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headwater.model.errors import HeadwaterError

EventId = tuple[int, int]
"""An event's identity: the number of its batch (or of its source) and its row there."""

KEYS = ("a", "b", "c", "d", "e")
LENGTHS = (0, 0, 3, 40, 200, 1200)
NEVER = 1 << 60


class Violation(AssertionError):
    """The log has broken a promise."""


@dataclass(frozen=True)
class PartitionId:
    """One partition of one topic, with what the oracle must know of the topic. The id tells it from a later one of that name."""

    topic: str
    id: str
    partition: int
    partitions: int
    durable: bool


@dataclass
class SentBatch:
    """Events that were handed to the log in one call, for one topic.

    `born` counts the power losses before it, `ended` is a number taken when the call was over, `changes` counts those of the
    topic that comes and goes, `partition` is set where the caller has chosen it, and `extras` are columns that hold the
    batch's number.
    """

    number: int
    topic: str
    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    born: int
    group: int
    partition: int | None = None
    extras: frozenset[str] = frozenset()
    ended: int = NEVER
    changes: int = 0

    def key(self, row: int) -> str:
        return self.keys[row]

    def length(self, row: int) -> int:
        return self.lengths[row]


@dataclass
class LineSource:
    """Numbered lines that named producers, one after the other, copy into a topic.

    `producers` has for each of them the numbers taken before and after it was opened, `stale` the attempts that one began
    after it was surely replaced; `acknowledged` is how many lines are surely there, `sent` how many may be.
    """

    number: int
    topic: str
    producers: list[tuple[int, int]] = field(default_factory=list)
    acknowledged: int = 0
    sent: int = 0
    stale: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The producers' id."""
        return f"source-{self.number}"

    def is_replaced(self, producer: int) -> bool:
        """Whether another producer was opened, from beginning to end, after this one."""
        ended = self.producers[producer][1]
        return any(begun > ended and end < NEVER for begun, end in self.producers)

    def may_be_replaced(self, producer: int) -> bool:
        """Whether another producer was perhaps opened after this one."""
        begun = self.producers[producer][0]
        return any(end > begun for other, (_, end) in enumerate(self.producers) if other != producer)

    def key(self, row: int) -> str:
        return KEYS[row * row % len(KEYS)]

    def length(self, row: int) -> int:
        return LENGTHS[row % len(LENGTHS)]


@dataclass
class PartitionHistory:
    """One partition as far as anybody knows it: the event at each offset, and how much must be there.

    `kept` is how much had to survive each power loss so far.
    """

    events: list[EventId | None] = field(default_factory=list)
    floor: int = 0
    floor_after_power_loss: int = 0
    kept: dict[int, int] = field(default_factory=dict)


class Oracle:
    """Everything that was asked, answered and seen in one history."""

    def __init__(self) -> None:
        self.power_losses = 0
        self.batches: dict[int, SentBatch] = {}
        self.groups: dict[int, list[SentBatch]] = {}
        self.sources: dict[int, LineSource] = {}
        self._columns: dict[PartitionId, PartitionHistory] = {}
        self._where: dict[EventId, tuple[PartitionId, int]] = {}
        self._homes: dict[tuple[int, str], int] = {}
        self._numbers = 0

    # What was asked

    def number(self) -> int:
        """A number that nothing else has: for groups and attempts."""
        self._numbers += 1
        return self._numbers

    def batch(
        self, topic: str, keys: Sequence[str], lengths: Sequence[int], *, group: int = 0, partition: int | None = None
    ) -> SentBatch:
        """A batch that is about to be handed to the log; those of one group stand or fall together."""
        batch = SentBatch(self.number(), topic, tuple(keys), tuple(lengths), self.power_losses, group, partition)
        self.batches[batch.number] = batch
        if group:
            self.groups.setdefault(group, []).append(batch)
        return batch

    def source(self, topic: str) -> LineSource:
        """A new source for a topic."""
        source = LineSource(self.number(), topic)
        self.sources[source.number] = source
        return source

    def text(self, event: EventId) -> str:
        """What an event carries, so that half of one is recognised."""
        number, row = event
        length = self._of(event).length(row)
        return f"{number}.{row}:" + chr(97 + (number + row) % 26) * length

    # What was answered

    def acknowledged(self, batch: SentBatch, place: PartitionId, offsets: range) -> None:
        """What a batch has in this partition was given these offsets, and is to stay there."""
        if len(set(batch.keys)) == 1 and batch.partition is None:
            self._homes.setdefault((place.partitions, batch.keys[0]), place.partition)
        rows = self.rows_in(batch, place)
        if len(offsets) != len(rows):
            raise Violation(f"{len(offsets)} offsets for {len(rows)} events of batch {batch.number} in {place}.")
        for offset, row in zip(offsets, rows, strict=True):
            self._learn(place, offset, (batch.number, row))
        self._raise_floor(place, offsets.stop)

    def survives_power_loss(self, place: PartitionId, end: int) -> None:
        """What lies below this end of a partition must survive, whatever the topic's durability."""
        column = self._column(place)
        column.floor_after_power_loss = max(column.floor_after_power_loss, end)

    def line_acknowledged(self, source: LineSource, row: int, place: PartitionId, offset: int) -> None:
        """A line of a source was given this offset; a negative one says only that it is there."""
        if offset >= 0:
            self._learn(place, offset, (source.number, row))
            self._raise_floor(place, offset + 1)

    # What was seen

    def seen(self, place: PartitionId, offset: int, event: EventId) -> None:
        """A reader got this event at this place."""
        if self._of(event).topic != place.topic:
            raise Violation(f"Event {event} of topic {self._of(event).topic!r} was read from {place}.")
        key = self._of(event).key(event[1])
        if event[0] in self.sources or self.batches[event[0]].partition is None:
            home = self._homes.setdefault((place.partitions, key), place.partition)
            if home != place.partition:
                raise Violation(f"Key {key!r} is in partitions {home} and {place.partition} of {place.topic!r}.")
        self._learn(place, offset, event)
        self._raise_floor(place, offset + 1)

    def check_whole(self, place: PartitionId, events: Sequence[EventId]) -> None:
        """Events that a reader got from one partition, in one poll up to its end, must be whole batches in order."""
        at, born = 0, 0
        while at < len(events):
            batch = self.batches.get(events[at][0])
            if batch is None:
                at += 1
                continue
            run = [row for number, row in events[at : at + len(batch.keys)] if number == batch.number]
            if run != self.rows_in(batch, place):
                raise Violation(f"Rows {run} of batch {batch.number} in {place}, not {self.rows_in(batch, place)}.")
            if batch.born < born:
                raise Violation(
                    f"Batch {batch.number} in {place} was written before a power loss, those before it after it."
                )
            at, born = at + len(run), batch.born

    def check_sources(self, contents: Mapping[PartitionId, Sequence[EventId]]) -> None:
        """In each partition each source's lines are a beginning of those that belong there, up to the last acknowledged."""
        for source in self.sources.values():
            for place, events in contents.items():
                if place.topic != source.topic:
                    continue
                have = [row for number, row in events if number == source.number]
                last = max(have[-1] + 1 if have else 0, source.acknowledged)
                homes = {key: self._homes.get((place.partitions, key)) for key in KEYS}
                want = [row for row in range(last) if homes[source.key(row)] == place.partition]
                if have != want:
                    raise Violation(f"{place} has lines {have} of {source.name}, not {want}.")

    def floors(self, places: Iterable[PartitionId]) -> dict[PartitionId, int]:
        """How much a reader that begins now must see of each partition."""
        return {place: self._column(place).floor for place in places}

    def holds(self, place: PartitionId, events: Sequence[EventId]) -> bool:
        """Whether a partition still begins with these events, as far as anybody knows."""
        return self._column(place).events[: len(events)] == list(events)

    # What has happened

    def power_lost(self) -> None:
        """Only what was durable must be there from now on."""
        for column in self._columns.values():
            column.floor = column.kept[self.power_losses] = column.floor_after_power_loss
        self.power_losses += 1

    def _of(self, event: EventId) -> SentBatch | LineSource:
        number, row = event
        batch = self.batches.get(number)
        if batch is not None and row < len(batch.keys):
            return batch
        source = self.sources.get(number)
        if source is None or row >= source.sent:
            raise Violation(f"Event {event} was never written.")
        return source

    def rows_in(self, batch: SentBatch, place: PartitionId) -> list[int]:
        """The rows of a batch that belong to a partition, by where their keys were seen before."""
        if batch.partition is not None:
            return list(range(len(batch.keys))) if batch.partition == place.partition else []
        homes = [self._homes.get((place.partitions, key)) for key in batch.keys]
        return [row for row, home in enumerate(homes) if home == place.partition]

    def _column(self, place: PartitionId) -> PartitionHistory:
        return self._columns.setdefault(place, PartitionHistory())

    def _raise_floor(self, place: PartitionId, floor: int) -> None:
        column = self._column(place)
        column.floor = max(column.floor, floor)
        if place.durable:
            column.floor_after_power_loss = column.floor

    def _learn(self, place: PartitionId, offset: int, event: EventId) -> None:
        column = self._column(place)
        column.events.extend([None] * (offset + 1 - len(column.events)))
        if column.events[offset] not in (None, event):
            self._take_back(place, column, offset, event)
        elsewhere = self._where.setdefault(event, (place, offset))
        if elsewhere != (place, offset):
            raise Violation(f"Event {event} is at {elsewhere[0]} {elsewhere[1]} and at {place} {offset}.")
        column.events[offset] = event

    def _take_back(self, place: PartitionId, column: PartitionHistory, offset: int, event: EventId) -> None:
        """Another event where one was known: right only for the end of a partition, and behind a power loss."""
        known, born = column.events[offset], self._born(event)
        assert known is not None
        losses = range(self._born(known), born)
        if place.durable or all(offset < column.kept.get(loss, 0) for loss in losses):
            raise Violation(f"Offset {offset} of {place} held {known} and now holds {event}.")
        gone = [old for old in column.events[offset:] if old is not None and self._born(old) < born]
        for old in gone:
            del self._where[old]
        column.events[offset:] = [None if old in gone else old for old in column.events[offset:]]

    def _born(self, event: EventId) -> int:
        return self.batches[event[0]].born if event[0] in self.batches else 0


def check_error(error: Exception) -> HeadwaterError:
    """The error itself, if it is one that users were told about."""
    if not isinstance(error, HeadwaterError):
        raise Violation(f"{type(error).__name__} is not an error of Headwater: {error}") from error
    return error
