"""Simulated readers: they follow the log while others write and die, and compare what they see with the oracle.

A `ReaderView` is what one reader has seen since it began. Every poll is checked: offsets without gaps, contents that fit their
event, nothing that contradicts the oracle. A poll that takes everything there is takes one snapshot of the log, so it must also
end behind the oracle's floors, hold whole batches, and hold all or nothing of every atomic group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.log.clients.reader import Reader, Start
from headwater.model.errors import PositionLost, TopicNotFound
from headwater.model.event import Event
from headwater.model.position import Position
from headwater.testing.oracle import EventId, PartitionId, Violation
from headwater.testing.simulation.world import TEMPORARY, Actor, Refused

EVERYTHING = 1_000_000


class ReaderView:
    """What one reader has seen: the events of each partition, from the offset where it began."""

    def __init__(self, actor: Actor, topics: Sequence[str], *, start: Start = "earliest") -> None:
        self.events: dict[PartitionId, list[EventId]] = {}
        self._actor = actor
        self._oracle = actor.world.oracle
        self._topics = list(topics)
        self._from_first = start == "earliest"
        changes = actor.world.comings.changes
        self._reader: Reader = actor.call_on(
            set(topics),
            f"reader of {', '.join(topics)}",
            lambda: actor.log.reader(topics, start=start),
            (PositionLost,),
        )
        if TEMPORARY in topics and (changes != actor.world.comings.changes or actor.world.comings.topic is None):
            raise Refused(TopicNotFound("Nobody knows which topic this is."))
        self._places: dict[tuple[str, int], PartitionId] = {}
        self._firsts: dict[PartitionId, int] = {}
        for position in self._reader.positions():
            place = actor.world.place(position.topic, position.partition)
            assert place is not None
            self._places[position.topic, position.partition] = place
            self._firsts[place] = position.offset
        self.events = {place: [] for place in self._firsts}

    def poll(self, *, events_max: int = EVERYTHING) -> int:
        """Reads on; returns how many events came."""
        floors = self._oracle.floors(self._firsts)
        found = self._actor.call_on(
            set(self._topics), "poll", lambda: _Events(self._reader.poll(events_max=events_max, timeout_s=0))
        )
        fresh: dict[PartitionId, list[EventId]] = {place: [] for place in self._firsts}
        for event in found:
            fresh[self._take(event)].append(_identity(event)[0])
        if events_max == EVERYTHING:
            for place, events in fresh.items():
                if self.end(place) < floors[place]:
                    raise Violation(
                        f"A reader sees {place} up to {self.end(place)}, others up to {floors[place]} before."
                    )
                if self._from_first:
                    self._oracle.check_whole(place, events)
            self._check_groups(fresh)
        return len(found)

    def end(self, place: PartitionId) -> int:
        """The offset behind the last event seen."""
        return self._firsts[place] + len(self.events[place])

    def positions(self) -> list[Position]:
        """Where to go on later."""
        return self._reader.positions()

    def close(self) -> None:
        """Ends the reader."""
        self._reader.close()

    def _take(self, event: Event) -> PartitionId:
        place = self._places[event.topic, event.partition]
        if event.offset != self.end(place):
            raise Violation(f"Offset {event.offset} of {place} came after {self.end(place) - 1}.")
        identity, text, value = _identity(event)
        self._oracle.seen(place, event.offset, identity)
        if text != self._oracle.text(identity):
            raise Violation(f"Event {identity} at {place} {event.offset} is torn: {text!r}.")
        self._check_value(place, identity, value)
        self.events[place].append(identity)
        return place

    def _check_value(self, place: PartitionId, identity: EventId, value: Mapping[str, Any]) -> None:
        batch = self._oracle.batches.get(identity[0])
        source = self._oracle.sources.get(identity[0])
        if source is not None and value["attempt"] in source.stale:
            raise Violation(
                f"Line {identity[1]} in {place} comes from a producer of {source.name} that was fenced before."
            )
        if batch is None:
            return
        missing = [name for name in batch.extras if value.get(name) != batch.number]
        if missing:
            raise Violation(f"Event {identity} in {place} lacks {missing}: {value}.")
        if place.topic == TEMPORARY and batch.ended < self._actor.world.comings.since.get(place.id, 0):
            raise Violation(f"Event {identity} is in a topic that was created after its write had ended.")

    def _check_groups(self, fresh: Mapping[PartitionId, Sequence[EventId]]) -> None:
        """All events of a group come in one poll, as far as their topics are read here and were there all the time."""
        if not self._from_first:
            return
        seen: Counter[int] = Counter()
        for events in fresh.values():
            seen.update(self._oracle.batches[number].group for number, _ in events if number in self._oracle.batches)
        for group, count in seen.items():
            batches = [
                b for b in self._oracle.groups.get(group, ()) if b.topic in self._topics and b.topic != TEMPORARY
            ]
            if batches and count != sum(len(batch.keys) for batch in batches):
                parts = {batch.number: batch.topic for batch in batches}
                raise Violation(
                    f"A poll has {count} events of the atomic group {group} of batches {parts}: {_text(fresh)}."
                )


class SimReader(Actor):
    """A process that reads."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._view: ReaderView | None = None
        self._saved: tuple[list[Position], dict[PartitionId, list[EventId]]] | None = None

    def forget(self) -> None:
        super().forget()
        self._view = None

    def act(self) -> None:
        choice = self.random.random()
        if choice < 0.5:
            self._follow()
        elif choice < 0.6:
            self._read_slowly()
        elif choice < 0.7:
            read_inside(self, self.random.choice(list(self.world.topics)))
        elif choice < 0.8:
            self._resume()
        elif choice < 0.9:
            read_temporary(self)
        else:
            self.close()
        self.world.schedule.sleep(self.random.randint(1, 300))

    def _follow(self) -> None:
        if self._view is None or self.random.random() < 0.1:
            self._view = None
            self._view = ReaderView(self, list(self.world.topics))
        self._view.poll()
        if self._saved is None or self.random.random() < 0.2:
            self._saved = self._view.positions(), {place: list(events) for place, events in self._view.events.items()}

    def _read_slowly(self) -> None:
        topic = self.random.choice(list(self.world.topics))
        view = ReaderView(self, [topic], start=self.random.choice(("earliest", "latest")))
        while view.poll(events_max=self.random.randint(1, 4)) and self.random.random() < 0.8:
            pass
        view.close()

    def _resume(self) -> None:
        """Goes on from positions of before: they lead to where they led then, or are refused."""
        if self._saved is None:
            return
        positions, contents = self._saved
        now = ReaderView(self, list(self.world.topics))
        now.poll()
        intact = all(now.events[place][: len(events)] == events for place, events in contents.items())
        try:
            view = ReaderView(self, list(self.world.topics), start=positions)
        except Refused as refusal:
            if isinstance(refusal.error, PositionLost) and intact:
                raise Violation(f"Positions that nothing was taken back from are lost: {refusal.error}") from refusal
            self._saved = None
            raise
        if not intact:
            raise Violation(f"Positions {positions} name other events than before, and are not refused.")
        view.poll()
        for place, events in contents.items():
            if view.events[place][: len(now.events[place]) - len(events)] != now.events[place][len(events) :]:
                raise Violation(f"A reader that went on in {place} at {len(events)} has seen something else.")
        view.close()


def read_inside(actor: Actor, topic: str) -> None:
    """Reads a topic from somewhere in the middle of each partition: which segment that is in is looked up, not come to by reading."""
    places = [actor.world.place(topic, number) for number in range(actor.world.topics[topic].partitions)]
    floors = actor.world.oracle.floors(place for place in places if place is not None)
    view = ReaderView(
        actor, [topic], start={place.partition: actor.random.randint(0, end) for place, end in floors.items()}
    )
    view.poll()
    view.close()


def read_temporary(actor: Actor) -> None:
    """Reads the topic that comes and goes, if it is there."""
    view = ReaderView(actor, [TEMPORARY])
    view.poll()
    view.close()


class _Events(list[Event]):
    """Events whose text is their number, for the history's lines."""

    def __repr__(self) -> str:
        return f"{len(self)} events"


def _identity(event: Event) -> tuple[EventId, str, Mapping[str, Any]]:
    value = event.value
    if isinstance(value, bytes):
        batch, row, text = value.decode().split("|")
        value = {"batch": int(batch), "row": int(row), "text": text, "attempt": None}
    return (value["batch"], value["row"]), value["text"], value


def _text(fresh: Mapping[PartitionId, Sequence[EventId]]) -> str:
    return "; ".join(f"{place.topic}/{place.partition} {list(events)}" for place, events in fresh.items())
