"""A consumer: a member of a group, which reads its share of the partitions and commits how far it came.

Three offsets are kept for each partition: how far it was fetched (the cursor), how far it was handed to the program, and how
far the program is done with it. With `commit="auto"` an event counts as done when the program asks for more, or closes the
consumer without an error; what is done is committed at the next poll. With `commit="manual"` the program says so itself, by
`commit()` or in a transaction. Either way a crash can bring an event again, and never leaves one out.

Partitions change hands inside a poll only (see `group`), after what is done has been committed.

Thread-safety: none; give each thread its own consumer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self, TypeVar

import pyarrow as pa

from headwater.log.arrow.events import output_schema, to_batch_of, to_events
from headwater.log.clients.progress import Lag, check_not_lost, lag_of
from headwater.log.clients.reader import Missed, Reader, Start
from headwater.log.clients.shares import Share, Shares, is_count
from headwater.log.disk.fork import tell_when_forked
from headwater.log.disk.wait import wait_async
from headwater.log.port.assignment import Place
from headwater.log.port.chunk import Chunk
from headwater.log.port.group import LOOK_S, NO_OFFSET, Committed, OffsetPart, Owner, Subscribed
from headwater.log.port.store import GroupStore, Waiter
from headwater.model.clock import Clock
from headwater.model.errors import Closed, HeadwaterError, InvalidInput, NotOwner, TopicNotFound, Unreachable
from headwater.model.event import Event
from headwater.model.position import Position
from headwater.model.text import compiled_pattern

T = TypeVar("T")
CommitMode = Literal["auto", "manual"]
POLL_INTERVAL_S_MAX = 300.0

_REFRESH_S = 1.0
_BEAT_S_MAX = 1.0


class Consumer:
    """A member of a group."""

    def __init__(
        self,
        store: GroupStore,
        topics: Sequence[str],
        *,
        pattern: str | None,
        group: str,
        start: Start,
        commit: CommitMode,
        poll_interval_s_max: float,
        missed: Missed,
        columns: Sequence[str] | None,
        clock: Clock,
    ) -> None:
        self.group = group
        self._store = store
        self._names = list(topics)
        self._pattern = None if pattern is None else compiled_pattern(pattern)
        self._start = start
        self._auto = commit == "auto"
        self._columns = columns
        self._clock = clock
        self._closed = False
        self._why_closed = "The consumer was closed."
        self._waiter: tuple[list[str], Waiter] | None = None
        self._turn = 0
        self._refresh_at = 0.0
        self._interval_s = poll_interval_s_max
        self._shares = Shares(store, group, committed=self._committed_of, skip=missed == "skip")
        self._first_topics = self._subscribed()
        self._membership = store.group(group, create=True).join(
            subscribe=self._subscribed, pattern=pattern, interval_s=poll_interval_s_max
        )
        tell_when_forked(self)
        try:
            self._attend()
        except BaseException:
            self.close(commit=False)
            raise

    # Reading

    def poll(self, *, events_max: int = 500, timeout_s: float = 1.0) -> list[Event]:
        """The next events; an empty list when none came in time."""
        return self._hand(self._wait(events_max, timeout_s), _events)

    def poll_arrow(self, *, events_max: int = 1_000_000, timeout_s: float = 1.0) -> list[pa.RecordBatch]:
        """The next events as Arrow batches, each of one partition; an empty list when none came in time."""
        return self._hand(self._wait(events_max, timeout_s), self._batches)

    async def poll_async(self, *, events_max: int = 500, timeout_s: float = 1.0) -> list[Event]:
        """`poll` for asyncio: other tasks run while it waits."""
        return self._hand(await self._wait_async(events_max, timeout_s), _events)

    async def poll_arrow_async(self, *, events_max: int = 1_000_000, timeout_s: float = 1.0) -> list[pa.RecordBatch]:
        """`poll_arrow` for asyncio."""
        return self._hand(await self._wait_async(events_max, timeout_s), self._batches)

    def __iter__(self) -> Iterator[Event]:
        while not self._closed:
            yield from self._one_by_one(self._wait(500, 1.0))

    async def __aiter__(self) -> AsyncIterator[Event]:
        while not self._closed:
            for event in self._one_by_one(await self._wait_async(500, 1.0)):
                yield event

    def pause(self, partitions: Iterable[int | Place]) -> None:
        """Hands out nothing of these partitions until `resume`; they stay with this member."""
        self._shares.pause(partitions)

    def resume(self, partitions: Iterable[int | Place] | None = None) -> None:
        """Goes on with paused partitions, all of them where none is named."""
        self._shares.resume(partitions)

    def seek(self, to: Start) -> None:
        """Goes on from another place in the partitions of this member; in those that `to` names, if it names some."""
        self._check_open()
        self._shares.seek(to)
        self._turn += 1

    @property
    def missed(self) -> int:
        """How many events retention removed before they were read; counted with `missed="skip"`."""
        return self._shares.missed

    # Committing

    def commit(self) -> None:
        """Commits all that was handed out; `NotOwner` where a partition belongs to another member by now."""
        self._check_open()
        self._commit_handed()

    async def commit_async(self) -> None:
        """`commit` for asyncio; it takes microseconds and waits for no disk, or for one answer of a Kafka broker."""
        self.commit()
        await asyncio.sleep(0)

    def positions(self) -> list[Position]:
        """The place after the last event handed out of each partition of this member."""
        incarnation = self._store.incarnation()
        return [Position(*place, share.handed, incarnation) for place, share in sorted(self._shares.by_place.items())]

    def committed(self) -> list[Position]:
        """The committed place of each partition of this member; `seek` takes it."""
        self._check_open()
        found = self._membership.committed(self._shares.by_place.keys())
        return [Position(*place, committed.offset, committed.incarnation) for place, committed in sorted(found.items())]

    # The group

    def assignment(self) -> list[Place]:
        """The partitions of this member, as (topic, number)."""
        return sorted(self._shares.by_place)

    def lag(self) -> Lag:
        """How many events of its partitions this member has yet to read, and how long ago the oldest of them was appended."""
        self._check_open()
        return lag_of(
            self._store, {place: share.handed for place, share in self._shares.by_place.items()}, self._clock()
        )

    def close(self, *, commit: bool = True) -> None:
        """Commits what is done (with `commit="auto"`), and leaves the group: the others go on with its partitions at once."""
        if self._closed:
            return
        try:
            with suppress(NotOwner, Closed):
                if self._auto and commit:
                    self._commit_handed()
                elif self._auto:
                    self._commit(self._shares.by_place)
        finally:
            self._leave()

    def _leave(self) -> None:
        try:
            with suppress(Closed):
                self._membership.leave()
        finally:
            self._closed = True
            self._membership.drop()
            self._shares.by_place = {}
            self._close_waiter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(commit=kind is None)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"partitions={len(self._shares.by_place)}"
        topics = self._names if self._pattern is None else self._pattern.pattern
        return f"Consumer(group={self.group!r}, topics={topics!r}, {state})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(commit=kind is None)

    # A poll

    def _wait(self, events_max: int, timeout_s: float) -> list[Chunk]:
        deadline = self._begin_poll(events_max, timeout_s)
        while True:
            chunks, left_s = self._fetched(events_max), deadline - time.monotonic()
            if chunks or left_s <= 0:
                return chunks
            self._watch().wait(min(left_s, LOOK_S))

    async def _wait_async(self, events_max: int, timeout_s: float) -> list[Chunk]:
        deadline = self._begin_poll(events_max, timeout_s)
        while True:
            chunks, left_s = self._fetched(events_max), deadline - time.monotonic()
            if chunks or left_s <= 0:
                await asyncio.sleep(0)
                return chunks
            await wait_async(self._watch(), min(left_s, LOOK_S))

    def _begin_poll(self, events_max: int, timeout_s: float) -> float:
        """Commits what is done; gives when to stop waiting."""
        self._check_open()
        if not is_count(events_max):
            raise InvalidInput(f"events_max={events_max!r} is not valid.", advice="Use 1 or more.")
        if not isinstance(timeout_s, (int, float)):
            raise InvalidInput(
                f"timeout_s={timeout_s!r} is not valid.", advice="Use a number of seconds; 0 does not wait."
            )
        self._turn += 1
        self._shares.go_back()
        if self._auto:
            with suppress(NotOwner):  # others go on from what was committed; this member joins again below
                self._commit_handed()
        return time.monotonic() + timeout_s

    def _fetched(self, events_max: int) -> list[Chunk]:
        self._check_open()
        self._attend()
        try:
            return self._shares.fetch(events_max, turn=self._turn)
        except TopicNotFound:
            if self._pattern is None:
                raise
            return []

    def _attend(self) -> None:
        """Follows the changes of the group.

        A partition whose beginning failed or was interrupted is no share yet, and is taken again at the next look.
        """
        taken = self._membership.attend({place: share.owner for place, share in self._shares.by_place.items()})
        if taken is None:
            return
        self._shares.keep(self._membership.owned.keys() - taken.keys())
        fresh = {}
        for place, committed in self._membership.committed(taken.keys()).items():
            with suppress(TopicNotFound):
                share = self._shares.by_place[place] = self._begin(place, taken[place], committed)
                if share.committed < 0:
                    fresh[place] = share
        with suppress(NotOwner):
            self._commit(fresh)

    def _committed_of(self, places: Collection[Place]) -> dict[Place, Committed]:
        return self._membership.committed(places)

    def _begin(self, place: Place, owner: Owner, committed: Committed) -> Share:
        """A partition that is this member's own from now on, from its committed offset or from the consumer's start."""
        topic = self._store.topic(place[0])
        if not committed.holds_for(topic.id):
            offset = self._first_offset(place)
            return Share(topic, owner, self._store.cursor(*place, offset=offset), number=place[1], committed=-1)
        offset = committed.offset
        share = Share(topic, owner, self._store.cursor(*place, offset=offset), number=place[1], committed=offset)
        try:
            check_not_lost(self._store, Position(*place, offset, committed.incarnation))
        except HeadwaterError as refusal:
            share.refusal = refusal
        return share

    def _first_offset(self, place: Place) -> int:
        name, number = place
        known = self._first_topics.get(name)
        bound = self._store.bounds([name])[place]
        if known is None or number >= known.partitions or known.id != self._store.topic(name).id:
            return bound.first  # it was made while the consumer ran: all of it is new
        if self._shares.has_begun(self._store.topic(name), number):
            return 0  # it was split off from what the group has read: none of it was
        found = Reader(self._store, [name], start=self._start).positions()
        return next(position.offset for position in found if position.partition == number)

    # Handing out

    def _hand(self, chunks: list[Chunk], convert: Callable[[list[Chunk]], list[T]]) -> list[T]:
        """All that was fetched, as the program wants it; what fails or is interrupted here was not handed out."""
        before = {place: share.handed for place, share in self._shares.by_place.items()}
        try:
            found = convert(chunks)
            self._shares.hand(chunks)
        except BaseException:
            for place, handed in before.items():
                self._shares.by_place[place].handed = handed
            self._shares.go_back()
            raise
        return found

    def _one_by_one(self, chunks: list[Chunk]) -> Iterator[Event]:
        """One event after the other; what is left over goes back if the program polls or seeks meanwhile, or stops."""
        turn, beat_s = self._turn, min(self._interval_s / 4, _BEAT_S_MAX)
        beat_at = time.monotonic() + beat_s
        for chunk in chunks:
            share = self._shares.by_place[chunk.topic.name, chunk.partition]
            for event in to_events(chunk):
                share.handed = event.offset + 1
                yield event
                if self._turn != turn or self._closed:
                    return
                if self._auto:
                    share.done = share.handed
                if time.monotonic() > beat_at:
                    if not self._beat():
                        return
                    beat_at = time.monotonic() + beat_s
        self._shares.hand(chunks)

    def _beat(self) -> bool:
        """Tells the group that this member works; False where it lost a partition by that: what is left over goes back."""
        if self._auto:
            with suppress(NotOwner):
                self._commit(self._shares.by_place)
        self._membership.beat()
        mine = {
            place for place, share in self._shares.by_place.items() if self._membership.owned.get(place) == share.owner
        }
        is_whole = len(mine) == len(self._shares.by_place)
        self._shares.keep(mine)
        return is_whole

    def _commit_handed(self) -> None:
        """Commits everything that was handed out."""
        for share in self._shares.by_place.values():
            share.done = share.handed
        self._commit(self._shares.by_place)

    def _commit(self, shares: Mapping[Place, Share]) -> None:
        """Commits what is done of these partitions."""
        now_us, incarnation = self._clock(), self._store.incarnation()
        offsets = {
            place: Committed(share.done, incarnation, at_us=now_us, topic_id=share.topic_id)
            for place, share in shares.items()
            if share.done != share.committed and share.refusal is None
        }
        self._membership.commit(offsets)
        for place, committed in offsets.items():
            shares[place].committed = committed.offset

    def _batches(self, chunks: list[Chunk]) -> list[pa.RecordBatch]:
        return [to_batch_of(chunk, output_schema(chunk.topic, self._columns)) for chunk in chunks]

    # Subscription and state

    def _subscribed(self) -> dict[str, Subscribed]:
        """The topics as they are; their files are read again once in a while, since partitions may be added."""
        names = self._names
        if self._pattern is not None:
            names = [name for name in self._store.topics() if self._pattern.fullmatch(name)]
        look = self._store.topic
        if time.monotonic() >= self._refresh_at:
            self._refresh_at = time.monotonic() + _REFRESH_S
            look = self._store.refresh
        found = {}
        for name in names:
            try:
                topic = look(name)
            except TopicNotFound:
                if self._pattern is None:
                    raise
                continue
            found[name] = Subscribed(topic.id, topic.partitions)
        return found

    def _watch(self) -> Waiter:
        names = sorted({topic for topic, _ in self._shares.by_place})
        if self._waiter is None or self._waiter[0] != names:
            self._close_waiter()
            self._waiter = (names, self._store.waiter(names))
        return self._waiter[1]

    def _close_waiter(self) -> None:
        if self._waiter is not None:
            self._waiter[1].close()
            self._waiter = None

    def _forked(self) -> None:
        """In a child: the membership is the parent's, and a copy of its file would keep it alive after its death."""
        self._closed = True
        self._why_closed = "The consumer belongs to the process that forked this one."
        self._membership.drop()
        self._shares.by_place = {}
        self._close_waiter()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(self._why_closed, advice="Open another with log.consumer(…).")


def _events(chunks: list[Chunk]) -> list[Event]:
    events: list[Event] = []
    for chunk in chunks:
        events += to_events(chunk)
    return events


class ConsumedPart:
    """A consumer's part in a transaction: what it has handed out and not committed, and what becomes of that."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def offsets(self, store: GroupStore) -> list[OffsetPart]:
        """What was handed out and is not committed, for a transaction on this store to commit."""
        consumer = self._consumer
        consumer._check_open()
        if store is not consumer._store or consumer._auto:
            raise InvalidInput(
                f"A transaction cannot commit the offsets of this consumer of group {consumer.group!r}.",
                advice='Open the consumer with commit="manual", on the log whose transaction it is.',
            )
        incarnation = store.incarnation()
        return [
            OffsetPart(
                consumer.group,
                place[0],
                share.topic_id,
                place[1],
                share.handed,
                incarnation,
                share.owner.member,
                share.owner.generation,
            )
            for place, share in sorted(consumer._shares.by_place.items())
            if share.handed != share.committed
        ]

    def ended(self, committed: Sequence[OffsetPart] | None) -> None:
        """After the transaction committed these offsets, its own among them. With None the consumer goes back to what is committed.

        A partition of which that is not known is begun with again at the next poll.
        """
        shares = self._consumer._shares
        if committed is not None:
            for part in committed:
                share = shares.by_place.get((part.topic, part.partition))
                owner = Owner(part.member, part.generation)
                if share is not None and part.group == self._consumer.group and share.owner == owner:
                    share.committed = share.done = part.offset
            return
        found: dict[Place, Committed] = {}
        with suppress(Closed, Unreachable):
            found = self._consumer._membership.committed(shares.by_place.keys())
        shares.keep({place for place, committed in found.items() if committed.offset != NO_OFFSET})
        for place, share in shares.by_place.items():
            share.committed = share.done = share.handed = found[place].offset
        self._consumer._turn += 1
        shares.go_back()
