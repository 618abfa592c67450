"""A queue on Kafka: the same API over a share group (KIP-932), in which the brokers keep who has which event.

What differs, because share groups differ (`docs/kafka.md` has the list): a lease is a setting of the whole group and cannot be
extended; there is no order by key, no delay, no looking in; an event counts as delivered when the process has it, before anybody
asked for it. What cannot be done is refused (`refusals`).

A crash may deliver again and loses nothing: an event is done only when Kafka has its acknowledgement. At our limit of deliveries
it is appended to the dead letters first, and rejected then. The brokers drop an event at a higher limit of their own: a
member that is handed one beyond ours makes it a dead letter before it hands out anything.

Lock order: the lock of gathered acknowledgements, one member's, then the locks of the log. Thread-safety: a queue may be
used by many threads; those that have leases out have a member each.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from headwater.log.arrow.events import to_events
from headwater.log.clients.reader import Start
from headwater.log.kafka.queue.dead_letters import KafkaDeadLetters
from headwater.log.kafka.queue.member import ACCEPT, REJECT, RELEASE, Place, ShareBatch, ShareMember
from headwater.log.kafka.queue.refusals import refuse
from headwater.log.kafka.queue.share_group import ShareGroup
from headwater.log.kafka.reader import to_chunks
from headwater.log.queue.depth import Depth, QueueEntry
from headwater.log.queue.headers import is_for_others
from headwater.log.queue.lease import Grant, Lease
from headwater.log.queue.partition import QueuePartition
from headwater.log.queue.queue import Queue
from headwater.log.queue.settings import Order, QueueSettings, check_lease, to_settings
from headwater.model.errors import HeadwaterError, TopicNotFound
from headwater.model.event import Event
from headwater.model.position import Position

if TYPE_CHECKING:
    from headwater.log.log import Log

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


class KafkaQueue(Queue):
    """One consumer's handle on a queue on Kafka."""

    _states: ShareGroup

    def __init__(
        self,
        log: Log,
        topic: str,
        *,
        lease_s: float = 30.0,
        deliveries_max: int | None = 5,
        order: Order = "none",
        credit: int | None = None,
        duplicates_s: float | None = None,
        where: Callable[[Event], bool] | None = None,
        **names: Any,
    ) -> None:
        to_settings(
            lease_s=lease_s, deliveries_max=deliveries_max, order=order, duplicates_s=duplicates_s, credit=credit
        )
        if order != "none":
            refuse(f"order={order!r}")
        if duplicates_s is not None:
            refuse("duplicates_s=")
        if where is not None:
            refuse("where=")
        if deliveries_max is None:
            refuse("deliveries_max=None")
        self._members: list[ShareMember] = []
        self._growing = threading.Lock()
        self._tokens = itertools.count(1)
        self._holders: dict[int, ShareMember] = {}
        super().__init__(log, topic, lease_s=lease_s, deliveries_max=deliveries_max, credit=credit, **names)
        self._topic_now = self._described

    # Leasing

    def lease(self, *, events_max: int = 500, timeout_s: float = 1.0) -> list[Lease]:
        check_lease(events_max, timeout_s)
        begun = time.monotonic()
        while True:
            leases = self._look(events_max, begun + max(timeout_s, LOOK_S) - time.monotonic())
            if leases or time.monotonic() - begun >= max(timeout_s, self._patience_s()):
                return leases

    async def lease_async(self, *, events_max: int = 500, timeout_s: float = 1.0) -> list[Lease]:
        check_lease(events_max, timeout_s)
        loop, begun = asyncio.get_running_loop(), time.monotonic()
        while True:
            wait_s = begun + max(timeout_s, LOOK_S) - time.monotonic()
            leases = await loop.run_in_executor(None, self._look, events_max, wait_s)
            if leases or time.monotonic() - begun >= max(timeout_s, self._patience_s()):
                return leases

    def _patience_s(self) -> float:
        members = list(self._members)
        if any(member.is_settling_in(JOIN_S) for member in members):
            return JOIN_S
        return LOOK_S * len(members)

    def _look(self, events_max: int, wait_s: float) -> list[Lease]:
        """What waits here, or else what Kafka hands over to one member in a little time."""
        self._check_usable(to_change=True)
        if self._credit is not None:
            events_max = min(events_max, self._credit - self._acks.outstanding(self._steady()))
        leases = self._hand_out(events_max) if events_max > 0 else []
        if leases:
            return leases
        self._acks.write()
        if events_max > 0:
            self._check_topic()
            member = self._free_member(events_max)
            if member is not None:
                self._fill(member, wait_s)
                return self._hand_out(events_max)
        time.sleep(max(0.0, min(wait_s, _FULL_S)))
        return []

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
            self._check_usable()
            if len(self._members) >= MEMBERS_MAX:
                return None
            self._states.prepare(self._settings)
            member = ShareMember(
                self._states,
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
            if self._closed or member.batch is not None:
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
        most = self._settings.deliveries_max
        assert most is not None
        over = {place: found for place, found in batch.open.items() if found[1] > most}
        for place in not_mine:
            over.pop(place, None)
        gone = {*not_mine, *over}
        batch.waiting.extend(place for place in batch.open if place not in gone)
        if bad:
            member.settle(bad, RELEASE)
        if over:
            events = [event for event, _ in over.values()]
            self._dead.bury(events, [most] * len(over), [_EXPIRED] * len(over), [True] * len(over))
            member.settle(over, REJECT)
        if not_mine:
            member.settle(not_mine, ACCEPT)
        return unread

    def _decoded(self, messages: Sequence[Any], number: int) -> tuple[list[Event], list[int], HeadwaterError | None]:
        """Events, the offsets of those for other groups, and why some could not be read."""
        try:
            chunks = to_chunks(messages, self._topic_now, number)
        except HeadwaterError as error:
            if len(messages) == 1:
                return [], [], error
            middle = len(messages) // 2
            left, right = self._decoded(messages[:middle], number), self._decoded(messages[middle:], number)
            return left[0] + right[0], left[1] + right[1], left[2] or right[2]
        events: list[Event] = []
        others: list[int] = []
        for chunk in chunks:
            is_other = is_for_others(chunk, self.group)
            events += to_events(chunk)
            others += [chunk.base_offset + row for row in is_other.nonzero()[0].tolist()]
        return events, others, None

    def _hand_out(self, events_max: int) -> list[Lease]:
        """Leases of what waits; what has waited for half its lease is given back instead."""
        leases: list[Lease] = []
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
                count = min(len(batch.waiting), events_max - len(leases))
                found = [batch.open[batch.waiting.popleft()] for _ in range(count)]
            leases += self._granted(batch, found)
            if len(leases) >= events_max:
                break
        return leases

    def _granted(self, batch: ShareBatch, found: Sequence[tuple[Event, int]]) -> list[Lease]:
        """Leases of events of a batch; without its member's lock, which is taken by whoever writes acknowledgements."""
        grants: dict[int, Grant] = {}
        leases = []
        for event, deliveries in found:
            grant = grants.get(event.partition)
            if grant is None:
                grant = Grant(self, self._acks, event.partition, batch.token, 0, batch.deadline)
                grants[event.partition] = grant
            grant.count += 1
            leases.append(Lease(event, deliveries, grant))
        for grant in grants.values():
            self._acks.add(grant)
        self._counters["leased"] += len(leases)
        self._counters["redelivered"] += sum(lease.deliveries > 1 for lease in leases)
        return leases

    # Settling and sending

    def nack(self, leases: Iterable[Lease], *, delay_s: float = 0.0, reason: str = "given back") -> None:
        if delay_s > 0:
            refuse("nack(delay_s=…)")
        super().nack(leases, reason=reason)

    def send(
        self,
        value: Any = None,
        *,
        key: Any = None,
        delay_s: float | None = None,
        at: datetime | str | int | None = None,
        id: str | None = None,
        headers: Mapping[str, bytes] | None = None,
    ) -> Position:
        if (delay_s is None) != (at is None):
            refuse("send(delay_s=…) and send(at=…)")
        return super().send(value, key=key, delay_s=delay_s, at=at, id=id, headers=headers)

    def close(self) -> None:
        is_mine = not self._closed and not self._foreign
        super().close()
        if is_mine:
            self._leave()

    def holder(self, token: int) -> ShareMember | None:
        """The member that has the batch of this token, if it has it still."""
        return self._holders.get(token)

    # What share groups cannot do

    def extend(self, leases: Iterable[Lease], s: float) -> None:
        refuse("extend")

    def defer(self, leases: Iterable[Lease]) -> list[Position]:
        refuse("defer")

    def recall(self, places: Iterable[Position]) -> int:
        refuse("recall")

    def browse(self, *, events_max: int = 100) -> list[QueueEntry]:
        self._check_usable()
        refuse("browse")

    def depth(self) -> Depth:
        self._check_usable()
        refuse("depth")

    def floors(self) -> dict[int, int]:
        refuse("floors")

    def seek(self, start: Start) -> None:
        refuse("seek")

    def _check_unit_of_work(self) -> None:
        refuse("tx.ack")

    # Small things

    def _leave(self) -> None:
        with self._growing:
            members, self._members = self._members, []
        for member in members:
            with member.lock:
                member.close()

    def _check_topic(self) -> None:
        self._topic_now = self._store.topic(self.topic)
        if self._topic_now.id != self._described.id:
            self._leave()
            raise TopicNotFound(f"Topic {self.topic!r} was deleted and created again.", advice="Open another queue.")

    def _new_part(self, number: int) -> QueuePartition:
        return _Part(self, number, self._settings)

    def _letters(self, dead: str | None) -> KafkaDeadLetters:
        return KafkaDeadLetters(self._log, self._states.records, topic=self.topic, group=self.group, dead=dead)


class _Part(QueuePartition):
    """How leases of one partition are settled: by the member that was handed them, if it still holds that batch."""

    def __init__(self, queue: KafkaQueue, number: int, settings: QueueSettings) -> None:
        super().__init__(
            queue._store,
            queue._states,
            topic=queue.topic,
            number=number,
            group=queue.group,
            settings=settings,
            clock=queue._clock,
            steady=queue._steady,
            bury=queue._dead.bury,
        )
        self._queue = queue

    def ack(self, offsets: Sequence[int], token: int) -> int:
        return len(self._settle(offsets, token, lambda found: ACCEPT))

    def nack(self, offsets: Sequence[int], token: int, *, time: int, reason: str, delivered: bool = True) -> list[int]:
        most = self._settings.deliveries_max
        assert most is not None
        return self._settle(offsets, token, lambda found: REJECT if found[1] >= most else RELEASE, reason=reason)

    def reject(self, offsets: Sequence[int], token: int, *, reason: str) -> list[int]:
        return self._settle(offsets, token, lambda found: REJECT, reason=reason)

    def _settle(
        self, offsets: Sequence[int], token: int, kind_of: Callable[[tuple[Event, int]], int], *, reason: str = ""
    ) -> list[int]:
        """Settles leases; those that are rejected are dead letters first. Returns those that were not in force."""
        member = self._queue.holder(token)
        if member is None:
            return list(offsets)
        with member.lock:
            batch = member.batch
            if batch is None or batch.token != token:
                return list(offsets)
            if batch.deadline <= self._queue._steady():
                # Kafka would say yes if somebody else has acknowledged it meanwhile.
                member.give_back()
                return list(offsets)
            late = [offset for offset in offsets if (self.number, offset) not in batch.open]
            by_kind: dict[int, list[Place]] = {}
            for offset in offsets:
                found = batch.open.get((self.number, offset))
                if found is not None:
                    by_kind.setdefault(kind_of(found), []).append((self.number, offset))
            for kind, places in by_kind.items():
                if kind == REJECT:
                    dying = [batch.open[place] for place in places]
                    reasons, begun = [reason] * len(dying), [False] * len(dying)
                    self._bury_events([event for event, _ in dying], [count for _, count in dying], reasons, begun)
                if not member.settle(places, kind):
                    late += [offset for _, offset in places]
        return late
