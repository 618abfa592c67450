"""A group's progress: what its members do, how far they have come, and what is left; and its reset.

Asking disturbs nobody: each number was true a moment ago.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from headwater.log.arrow.events import to_events
from headwater.log.clients.reader import Reader, Start
from headwater.log.port.assignment import Place
from headwater.log.port.group import Committed, MemberProgress
from headwater.log.port.store import GroupStore
from headwater.model.errors import EventsMissed, PositionLost, TopicNotFound
from headwater.model.position import Position


class Lag(msgspec.Struct, frozen=True, gc=False):
    """What is yet to be read: how many events, and how many seconds ago the oldest of them was appended."""

    events: int
    seconds: float


class PartitionProgress(msgspec.Struct, frozen=True):
    """One partition that a group reads. `committed` is None where its topic was made anew since."""

    topic: str
    partition: int
    committed: int | None
    end: int
    lag: Lag
    member: str | None


class GroupProgress(msgspec.Struct, frozen=True):
    """A group as it is now."""

    group: str
    generation: int | None
    members: list[MemberProgress]
    partitions: list[PartitionProgress]

    @property
    def lag(self) -> Lag:
        """What the whole group has yet to read."""
        return _total([partition.lag for partition in self.partitions])

    @property
    def idle(self) -> list[str]:
        """The members that have no partition."""
        return [member.member for member in self.members if member.idle]


def progress_of(store: GroupStore, group: str, *, now_us: int) -> GroupProgress:
    """A group as it is now; `GroupNotFound`."""
    state = store.group(group, create=False).state()
    shown = [_partition(store, place, *facts, now_us) for place, facts in state.partitions.items()]
    return GroupProgress(group, state.generation, state.members, [part for part in shown if part is not None])


def reset(store: GroupStore, group: str, to: Start, *, now_us: int) -> dict[Place, int]:
    """Moves the committed offsets of a group; refused while it has members that live.

    Of each topic that it has read all partitions, also those that nobody has owned: a split may have added them since.
    """
    moved = store.group(group, create=False)
    offsets: dict[Place, Committed] = {}
    for name in sorted(moved.topics()):
        try:
            topic = store.refresh(name)
        except TopicNotFound:
            continue
        start: Start = to
        if isinstance(to, Mapping):
            start = {number: offset for number, offset in to.items() if number in range(topic.partitions)}
        for position in Reader(store, [name], start=start).positions():
            place = (name, position.partition)
            if _is_named(to, place):
                offsets[place] = Committed(position.offset, position.incarnation, at_us=now_us, topic_id=topic.id)
    moved.move(offsets)
    return {place: committed.offset for place, committed in offsets.items()}


def lag_of(store: GroupStore, positions: Mapping[Place, int], now_us: int) -> Lag:
    """What lies behind these positions."""
    lags = []
    bounds = store.bounds(sorted({topic for topic, _ in positions}))
    for place, offset in positions.items():
        first, end = (bounds[place].first, bounds[place].end) if place in bounds else (0, 0)
        start = max(offset, first)
        seconds = 0.0
        if start < end:
            seconds = max(0.0, (now_us - _appended_us(store, place, start, end, now_us)) / 1e6)
        lags.append(Lag(max(0, end - start), seconds))
    return _total(lags)


def _appended_us(store: GroupStore, place: Place, start: int, end: int, now_us: int) -> int:
    """When the first event of a range was appended; now, where retention or compaction has left none."""
    with suppress(EventsMissed):
        for chunk in store.cursor(*place, offset=start).read(end, events_max=1):
            for event in to_events(chunk):
                return event.appended_us
    return now_us


def check_not_lost(store: GroupStore, position: Position) -> None:
    """Refuses a position that an unclean stop took back."""
    lost = store.lost_after(position.topic, position.partition, incarnation=position.incarnation)
    if lost is not None and position.offset > lost:
        raise PositionLost(
            f"The committed offset {position.offset} of partition {position.partition} of topic {position.topic!r} was "
            f"taken back: the machine stopped uncleanly, and the partition continued from offset {lost}.",
            advice=f"Continue with consumer.seek({{{position.partition}: {lost}}}), and discard what was computed from events "
            f"{lost} to {position.offset - 1}.",
        )


def _partition(
    store: GroupStore, place: Place, member: str | None, committed: Committed, now_us: int
) -> PartitionProgress | None:
    """One partition's progress; None where its topic is gone."""
    try:
        topic = store.topic(place[0])
        bound = store.bounds([place[0]]).get(place)
        if bound is None:
            return None
        known = committed.holds_for(topic.id)
        offset = committed.offset if known else bound.first
        lag = lag_of(store, {place: offset}, now_us)
    except TopicNotFound:
        return None
    return PartitionProgress(*place, offset if known else None, bound.end, lag, member)


def _is_named(to: Start, place: Place) -> bool:
    if isinstance(to, Mapping):
        return place[1] in to
    if isinstance(to, Sequence) and not isinstance(to, str):
        return any((position.topic, position.partition) == place for position in to)
    return True


def _total(lags: Sequence[Lag]) -> Lag:
    return Lag(sum(lag.events for lag in lags), max((lag.seconds for lag in lags), default=0.0))
