"""Leases from a share group (KIP-932): the engine of queues on Kafka, where the brokers keep who has which event.

What differs, because share groups differ (`docs/kafka.md` has the list): a lease is a setting of the whole group and cannot be
extended; there is no order by key, no delay, no looking in; an event counts as delivered when the process has it, before anybody
asked for it. What cannot be done is in `SHARE_FEATURES`.

A crash may deliver again and loses nothing: an event is done only when Kafka has its acknowledgement. At our limit of deliveries
it is appended to the dead letters first, and rejected then. The brokers drop an event at a higher limit of their own: a
member that is handed one beyond ours makes it a dead letter before it hands out anything.

Lock order: the lock of gathered acknowledgements, one member's, then the locks of the log. Thread-safety: may be
used by many threads; those that have leases out have a member each.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headwater.log.arrow.events import to_events
from headwater.log.kafka.queue.member import ACCEPT, REJECT, RELEASE, Place, ShareBatch, ShareMember
from headwater.log.kafka.queue.share_group import SHARE_FEATURES, ShareGroup
from headwater.log.kafka.reader import to_chunks
from headwater.log.port.lease_engine import Granted, QueueOpening, SentBack, Taken, was_closed
from headwater.log.port.store import Store
from headwater.log.port.topic import Topic
from headwater.log.queue.headers import is_for_others
from headwater.model.errors import HeadwaterError, TopicNotFound
from headwater.model.event import Event

MEMBERS_MAX = 16
"""So many batches one handle may have out; one that leases beyond that waits."""

ASKED_MAX = 5_000
"""A member asks for at most so many events at once, and for as many as its first caller wanted."""

JOIN_S = 1.5
"""A handle that has just come looks at least so long: it has to join the group first."""

LOOK_S = 0.1
"""And later at least so long, since only an answer of the brokers says that there is nothing."""

_SLICE_S = 0.25
_TURN_S = 0.02
_FULL_S = 0.005
_EXPIRED = "lease expired"


class ShareEngine:
    """Hands out and settles the events of one queue by its share group, for one handle."""

    features = SHARE_FEATURES
    has_threads = True
    asks = True

    def __init__(self, store: Store, group: ShareGroup, opening: QueueOpening) -> None:
        self.made: Mapping[str, Any] = group.settings(opening.wanted)
        self.writable = group.writable
        self.sent_back: SentBack | None = group
        self._store = store
        self._group = group
        self._opening = opening
        self._topic = opening.topic
        self._steady = opening.steady
        self._settings = opening.settings
        assert self._settings.deliveries_max is not None, "the features refuse it"
        self._deliveries_max = self._settings.deliveries_max
        self._members: list[ShareMember] = []
        self._growing = threading.Lock()
        self._tokens = itertools.count(1)
        self._holders: dict[int, ShareMember] = {}
        self._turn = 0
        self._is_closed = False

    # Leasing

    def patience_s(self) -> float:
        members = list(self._members)
        if any(member.is_settling_in(JOIN_S) for member in members):
            return JOIN_S
        return LOOK_S * max(1, len(members))

    def ready(self, events_max: int) -> list[Granted]:
        """What waits here; what has waited for half its lease is given back instead."""
        granted: list[Granted] = []
        fresh = self._steady() + self._settings.lease_us // 2
        for member in list(self._members):
            if not member.has_waiting or member.lock.locked():
                continue
            with member.lock:
                batch = member.batch
                if batch is None or not batch.waiting:
                    continue
                if batch.deadline < fresh:
                    member.give_back(waiting_only=True)
                    continue
                found = [batch.open[batch.waiting.popleft()] for _ in range(min(len(batch.waiting), events_max))]
            granted += _granted(batch, found)
            events_max -= len(found)
            if events_max <= 0:
                break
        return granted

    def take(self, events_max: int, *, wait_s: float) -> Taken:
        """What Kafka hands over to one member in a little time."""
        if events_max > 0:
            self._topic = self._check_topic()
            member = self._free_member(events_max)
            if member is not None:
                self._fill(member, wait_s)
                return Taken(self.ready(events_max))
        return Taken(again_s=_FULL_S)

    def pause(self, s: float) -> None:
        time.sleep(s)

    async def pause_async(self, s: float) -> None:
        await asyncio.sleep(s)

    # Settling

    def ack(self, partition: int, offsets: Sequence[int], token: int) -> int:
        return len(self._settle(partition, offsets, token, lambda found: ACCEPT))

    def nack(self, partition: int, offsets: Sequence[int], token: int, *, time: int, reason: str) -> list[int]:
        most = self._deliveries_max
        return self._settle(
            partition, offsets, token, lambda found: REJECT if found[1] >= most else RELEASE, reason=reason
        )

    def reject(self, partition: int, offsets: Sequence[int], token: int, *, reason: str) -> list[int]:
        return self._settle(partition, offsets, token, lambda found: REJECT, reason=reason)

    def give_back(self) -> None:
        """Leaving the group gives back everything."""

    def close(self) -> None:
        self._is_closed = True
        self._leave()

    def forked(self) -> None:
        """The members are told themselves; none of them is touched."""
        self._is_closed = True

    def _settle(
        self,
        number: int,
        offsets: Sequence[int],
        token: int,
        kind_of: Callable[[tuple[Event, int]], int],
        *,
        reason: str = "",
    ) -> list[int]:
        """Settles leases by the member that was handed them, if it still holds that batch; those that were not in force.

        Those that are rejected are dead letters first.
        """
        member = self._holders.get(token)
        if member is None:
            return list(offsets)
        with member.lock:
            batch = member.batch
            if batch is None or batch.token != token:
                return list(offsets)
            if batch.deadline <= self._steady():
                # Kafka would say yes if somebody else has acknowledged it meanwhile.
                member.give_back()
                return list(offsets)
            late = [offset for offset in offsets if (number, offset) not in batch.open]
            by_kind: dict[int, list[Place]] = {}
            for offset in offsets:
                found = batch.open.get((number, offset))
                if found is not None:
                    by_kind.setdefault(kind_of(found), []).append((number, offset))
            for kind, places in by_kind.items():
                if kind == REJECT:
                    dying = [batch.open[place] for place in places]
                    reasons, begun = [reason] * len(dying), [False] * len(dying)
                    self._opening.bury([event for event, _ in dying], [count for _, count in dying], reasons, begun)
                if not member.settle(places, kind):
                    late += [offset for _, offset in places]
        return late

    # Members

    def _free_member(self, events_max: int) -> ShareMember | None:
        """The next member that holds nothing; a new one where all hold something, until there are too many."""
        now, members = self._steady(), list(self._members)
        for _ in members:
            self._turn += 1
            member = members[self._turn % len(members)]
            if member.lock.locked():
                continue
            with member.lock:
                if member.batch is not None and member.batch.deadline < now:
                    member.give_back()
                if member.batch is None:
                    return member
        with self._growing:
            if self._is_closed:
                raise was_closed(self._topic.name)
            if len(self._members) >= MEMBERS_MAX:
                return None
            self._group.prepare(self._settings)
            member = ShareMember(
                self._group,
                clock=self._steady,
                lease_us=self._settings.lease_us,
                events_max=min(events_max, ASKED_MAX),
            )
            self._members.append(member)
            return member

    def _fill(self, member: ShareMember, wait_s: float) -> None:
        """Has a member wait for a batch; what is for others or was delivered too often is settled at once."""
        slice_s = _SLICE_S if len(self._members) == 1 and not member.is_settling_in(JOIN_S) else _TURN_S
        with member.lock:
            if self._is_closed or member.batch is not None:
                return
            token = next(self._tokens)
            messages = member.poll(max(0.0, min(wait_s, slice_s)), token)
            if messages:
                others = {known: holder for known, holder in self._holders.items() if holder is not member}
                self._holders = {token: member} | others
                try:
                    unread = self._sort(member, messages)
                except Exception:
                    member.give_back(waiting_only=True)
                    raise
                if unread is not None:
                    raise unread

    def _sort(self, member: ShareMember, messages: Sequence[Any]) -> HeadwaterError | None:
        """Puts a batch in order; what cannot be read is given back until the brokers drop it, and the reason returned."""
        batch = member.batch
        assert batch is not None
        unread: HeadwaterError | None = None
        bad: list[Place] = []
        not_mine: list[Place] = []
        by_part: dict[int, list[Any]] = {}
        for message in messages:
            by_part.setdefault(message.partition(), []).append(message)
        for number, some in by_part.items():
            counts = {message.offset(): message.delivery_count() for message in some}
            events, others, failure = self._decoded(some, number)
            for event in events:
                batch.open[number, event.offset] = (event, counts.pop(event.offset))
            not_mine += [(number, offset) for offset in others]
            bad += [(number, offset) for offset in counts]
            unread = failure or unread
        most = self._deliveries_max
        over = {place: found for place, found in batch.open.items() if found[1] > most}
        for place in not_mine:
            over.pop(place, None)
        gone = {*not_mine, *over}
        batch.waiting.extend(place for place in batch.open if place not in gone)
        if bad:
            member.settle(bad, RELEASE)
        if over:
            events = [event for event, _ in over.values()]
            self._opening.bury(events, [most] * len(over), [_EXPIRED] * len(over), [True] * len(over))
            member.settle(over, REJECT)
        if not_mine:
            member.settle(not_mine, ACCEPT)
        return unread

    def _decoded(self, messages: Sequence[Any], number: int) -> tuple[list[Event], list[int], HeadwaterError | None]:
        """Events, the offsets of those for other groups, and why some could not be read."""
        try:
            chunks = to_chunks(messages, self._topic, number)
        except HeadwaterError as error:
            if len(messages) == 1:
                return [], [], error
            middle = len(messages) // 2
            left, right = self._decoded(messages[:middle], number), self._decoded(messages[middle:], number)
            return left[0] + right[0], left[1] + right[1], left[2] or right[2]
        events: list[Event] = []
        others: list[int] = []
        for chunk in chunks:
            is_other = is_for_others(chunk, self._opening.group)
            events += to_events(chunk)
            others += [chunk.base_offset + row for row in is_other.nonzero()[0].tolist()]
        return events, others, None

    def _leave(self) -> None:
        with self._growing:
            members, self._members = self._members, []
        for member in members:
            with member.lock:
                member.close()

    def _check_topic(self) -> Topic:
        """The topic as it is now; `TopicNotFound`, and the members leave, where it was made anew."""
        name = self._topic.name
        topic = self._store.topic(name)
        if topic.id != self._topic.id:
            self._leave()
            raise TopicNotFound(f"Topic {name!r} was deleted and created again.", advice="Open the queue again.")
        return topic


def _granted(batch: ShareBatch, found: Sequence[tuple[Event, int]]) -> list[Granted]:
    """Events of a batch, by partition."""
    by_part: dict[int, list[tuple[Event, int]]] = {}
    for event, deliveries in found:
        by_part.setdefault(event.partition, []).append((event, deliveries))
    return [
        Granted(number, batch.token, batch.deadline, [event for event, _ in some], [count for _, count in some])
        for number, some in by_part.items()
    ]
