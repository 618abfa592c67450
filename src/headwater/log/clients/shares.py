"""A member's shares: the partitions it reads now, and how far each of them was fetched, handed out, done and committed.

Invariant: fetched ≥ handed ≥ done. Whatever fails in between, the cursors go back to what was handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from headwater.log.clients.reader import Reader, Start
from headwater.log.port.assignment import Place
from headwater.log.port.chunk import Chunk
from headwater.log.port.group import NO_OFFSET, Committed, Owner
from headwater.log.port.split import is_held
from headwater.log.port.store import Bounds, Cursor, ReadStore
from headwater.log.port.topic import Topic
from headwater.model.errors import EventsMissed, HeadwaterError, InvalidInput

CommittedOf = Callable[[Collection[Place]], Mapping[Place, Committed]]
"""The committed offsets of a group in some partitions."""


class Share:
    """One partition of a member."""

    def __init__(self, topic: Topic, owner: Owner, cursor: Cursor, *, number: int, committed: int) -> None:
        self.topic_id = topic.id
        self.ancestors = topic.ancestors(number)
        self.owner = owner
        self.cursor = cursor
        self.handed = self.done = cursor.offset
        self.committed = committed
        self.refusal: HeadwaterError | None = None


class Shares:
    """The partitions of one member."""

    def __init__(self, store: ReadStore, group: str, *, committed: CommittedOf, skip: bool) -> None:
        self.by_place: dict[Place, Share] = {}
        self.missed = 0
        self._store = store
        self._committed_of = committed
        self._group = group
        self._skip = skip
        self._paused: set[Place] = set()

    def keep(self, places: Collection[Place]) -> None:
        """Drops every partition but these."""
        self.by_place = {place: share for place, share in self.by_place.items() if place in places}
        self._paused &= self.by_place.keys()

    def pause(self, partitions: Iterable[int | Place]) -> None:
        """Nothing is fetched of these partitions from now on."""
        self._paused |= self._places(partitions)

    def resume(self, partitions: Iterable[int | Place] | None) -> None:
        """Goes on with these partitions, or with all."""
        self._paused -= self._paused.copy() if partitions is None else self._places(partitions)

    def seek(self, to: Start) -> None:
        """Moves the partitions that `to` names, all of them where it names none."""
        named = self._named(to)
        for name in sorted({topic for topic, _ in named}):
            start: Start = to
            if isinstance(to, Mapping):
                start = {number: to[number] for topic, number in named if topic == name}
            for position in Reader(self._store, [name], start=start).positions():
                place = (name, position.partition)
                if place in named:
                    share = self.by_place[place]
                    share.refusal = None
                    share.handed = share.done = position.offset
        self.go_back()

    def fetch(self, events_max: int, *, turn: int) -> list[Chunk]:
        """What can be read now, at one moment of the log; each turn begins with another partition, so that none starves."""
        if not self.by_place:
            return []
        bounds = self._store.bounds(sorted({topic for topic, _ in self.by_place}))
        ready = [place for place in self.by_place if place not in self._paused and self._is_ready(place, bounds)]
        chunks: list[Chunk] = []
        try:
            for step in range(len(ready)):
                place = ready[(turn + step) % len(ready)]
                try:
                    found = self.by_place[place].cursor.read(bounds[place].end, events_max=events_max)
                except EventsMissed as missed:  # since the bounds were asked for
                    self._move_on(place, missed.last + 1)
                    continue
                count = sum(chunk.batch.num_rows for chunk in found)
                if not count:  # a gap holds nothing to be handed out, and is passed
                    self.by_place[place].handed = self.by_place[place].cursor.offset
                    continue
                events_max -= count
                chunks += found
                if events_max <= 0:
                    break
        except BaseException:
            self.go_back()
            raise
        return chunks

    def has_begun(self, topic: Topic, number: int) -> bool:
        """Whether the group has committed anything of a partition's ancestors."""
        places = [(topic.name, ancestor) for ancestor, _ in topic.ancestors(number)]
        return any(committed.holds_for(topic.id) for committed in self._committed_of(places).values())

    def hand(self, chunks: Iterable[Chunk]) -> None:
        """All that was fetched is handed out."""
        for chunk in chunks:
            share = self.by_place[chunk.topic.name, chunk.partition]
            share.handed = share.cursor.offset

    def go_back(self) -> None:
        """Puts every cursor where the program stands."""
        for place, share in self.by_place.items():
            if share.cursor.offset != share.handed:
                share.cursor = self._store.cursor(*place, offset=share.handed)

    def _is_ready(self, place: Place, bounds: Mapping[Place, Bounds]) -> bool:
        share = self.by_place[place]
        if share.refusal is not None:
            raise share.refusal
        if place not in bounds:
            return False
        if share.handed < bounds[place].first:
            self._move_on(place, bounds[place].first)
        return bounds[place].end > share.cursor.offset and not self._is_held(place, share)

    def _is_held(self, place: Place, share: Share) -> bool:
        """One that was split off waits until the group has committed its ancestors up to their fences, whoever reads them."""
        if not share.ancestors:
            return False
        known = self._committed_of([(place[0], number) for number, _ in share.ancestors])
        done = {
            number: found.offset if found.holds_for(share.topic_id) else NO_OFFSET
            for (_, number), found in known.items()
        }
        held = is_held(share.ancestors, lambda number: done.get(number, NO_OFFSET))
        if not held:
            share.ancestors = ()
        return held

    def _move_on(self, place: Place, first: int) -> None:
        """What lies before the first event that there is was missed."""
        share = self.by_place[place]
        if not self._skip:
            raise EventsMissed(
                f"Events {share.handed} to {first - 1} of partition {place[1]} of topic {place[0]!r} were removed "
                f"before group {self._group!r} read them.",
                advice='Continue with consumer.seek("earliest"), or open the consumer with missed="skip".',
                first=share.handed,
                last=first - 1,
            )
        self.missed += first - share.handed
        share.handed = share.done = first
        share.cursor = self._store.cursor(*place, offset=first)

    def _places(self, partitions: Iterable[int | Place]) -> set[Place]:
        wanted = set(partitions)
        numbers = {one for one in wanted if isinstance(one, int)}
        places = {place for place in self.by_place if place in wanted or place[1] in numbers}
        self._check_mine(wanted - places - {number for _, number in places})
        return places

    def _named(self, to: Start) -> set[Place]:
        """The places that a seek moves."""
        if isinstance(to, Mapping):
            named = {place for place in self.by_place if place[1] in to}
            self._check_mine(set(to) - {number for _, number in named})
            return named
        if isinstance(to, Sequence) and not isinstance(to, str):
            wanted = {(position.topic, position.partition) for position in to}
            self._check_mine(wanted - self.by_place.keys())
            return wanted
        return set(self.by_place)

    def _check_mine(self, others: Collection[object]) -> None:
        if others:
            raise InvalidInput(
                f"{', '.join(sorted(map(str, others)))} is not a partition of this member of group {self._group!r}.",
                advice=f"It has {sorted(self.by_place)}.",
            )


def is_count(value: object) -> bool:
    """Whether it says how many events to hand out."""
    return isinstance(value, int) and value >= 1
