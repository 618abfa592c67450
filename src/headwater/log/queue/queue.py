"""A queue: a topic read with one acknowledgement per event, shared by any number of consumers in any number of processes.

Every event of the topic is leased to one consumer of the group until a deadline. It is acknowledged, given back, extended, or
comes again when the deadline has passed or its consumer's process is dead; after `deliveries_max` deliveries it goes to the
dead letters. Readers of the topic and other groups are unaffected.

Acknowledgements of single leases are gathered and written at the next `lease`, after a few milliseconds, by `flush` and by
`close`. A crash before that delivers again; it never loses.

Thread-safety: a queue may be used by many threads, and credit counts for all of them together. After a fork it belongs to the
parent; the child opens its own. In a log that may only be read a queue can be looked at and not changed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import compress, repeat
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from headwater.log.clients.reader import Start
from headwater.log.disk.fork import tell_when_forked
from headwater.log.disk.wait import wait_async
from headwater.log.port.split import is_held
from headwater.log.port.store import Bounds, Waiter
from headwater.log.port.topic import check_name
from headwater.log.queue.dead_letters import DeadLetters
from headwater.log.queue.depth import Depth, QueueEntry, browse, count
from headwater.log.queue.headers import send_event, sending_headers
from headwater.log.queue.lease import Acks, Grant, Lease, by_grant, only_looked_at, too_late, was_closed
from headwater.log.queue.partition import Granted, QueuePartition
from headwater.log.queue.settings import (
    Order,
    check_agrees,
    check_ids_are_kept,
    check_lease,
    check_seconds,
    to_settings,
)
from headwater.log.queue.window import FAR_US
from headwater.log.queue.work import acks_topic
from headwater.model.clock import SteadyClock
from headwater.model.errors import TopicNotFound
from headwater.model.event import Event
from headwater.model.position import Position

if TYPE_CHECKING:
    from headwater.log.log import Log

SWEEP_S = 0.1
_BUSY_S = 0.0005
_BLOCKED_S = 0.005
_LOOK_AGAIN_S = 0.02
_WAIT_S_MAX = 0.25


def open_queue(log: Log, topic: str, **settings: Any) -> Queue:
    """A queue of the kind that the log's store has."""
    if log.store.capabilities.has_share_groups:
        from headwater.log.kafka.queue.queue import KafkaQueue

        return KafkaQueue(log, topic, **settings)
    return Queue(log, topic, **settings)


class Queue:
    """One consumer's handle on a queue."""

    def __init__(
        self,
        log: Log,
        topic: str,
        *,
        group: str = "default",
        lease_s: float = 30.0,
        deliveries_max: int | None = 5,
        order: Order = "none",
        credit: int | None = None,
        duplicates_s: float | None = None,
        dead: str | None = None,
        where: Callable[[Event], bool] | None = None,
        is_dead: bool = False,
    ) -> None:
        settings = to_settings(
            lease_s=lease_s, deliveries_max=deliveries_max, order=order, duplicates_s=duplicates_s, credit=credit
        )
        self.topic = check_name(topic)
        self.group = check_name(group)
        self._log = log
        self._store = log.store
        self._clock = log.clock
        self._steady = SteadyClock(log.clock)
        self._described = self._store.refresh(topic)
        self._credit = credit
        self._where = where
        self._states = self._store.queue_states(group, self._described, has_keys=order != "none")
        wanted = {
            "group": group,
            "topic": topic,
            "topic_id": self._described.id,
            "order": order,
            "dead": None if is_dead else check_name(dead or f"{topic}.dead"),
            "duplicates_us": settings.duplicates_us,
        }
        made = self._states.settings(wanted)
        check_agrees(made, order=order, dead=dead)
        check_ids_are_kept(made, settings, topic=self._described)
        self._dead = self._letters(made["dead"])
        self._settings = settings
        if made["dead"] is None:
            self._settings = msgspec.structs.replace(settings, deliveries_max=None)
        self._parts: dict[int, QueuePartition] = {}
        self._counters: Counter[str] = Counter()
        self._waiter: Waiter | None = None
        self._foreign = self._closed = False
        self._member = 0
        self._turn = 0
        self._sweep_at = 0.0
        self._peers: list[int] = []
        self._free: set[int] = set()
        self._acks = Acks(self._write_acks, clock=self._steady, threads=self._states.threads, counters=self._counters)
        tell_when_forked(self)

    # Leasing

    def lease(self, *, events_max: int = 500, timeout_s: float = 1.0) -> list[Lease]:
        """The next leases; an empty list when none came in time."""
        check_lease(events_max, timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            leases, is_busy = self._lease_now(events_max, wait=timeout_s <= 0)
            left = deadline - time.monotonic()
            if leases or left <= 0:
                return leases
            self._watch().wait(min(left, self._pause_s(is_busy=is_busy)))

    async def lease_async(self, *, events_max: int = 500, timeout_s: float = 1.0) -> list[Lease]:
        """`lease` for asyncio: other tasks run while it waits."""
        check_lease(events_max, timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            leases, is_busy = self._lease_now(events_max, wait=timeout_s <= 0)
            left = deadline - time.monotonic()
            if leases or left <= 0:
                await asyncio.sleep(0)
                return leases
            await wait_async(self._watch(), min(left, self._pause_s(is_busy=is_busy)))

    # Settling

    def ack(self, leases: Iterable[Lease]) -> None:
        """These events are done, and it is written when this returns; `LeaseExpired` names those that came too late."""
        refused = 0
        for part, grant, some in self._by_grant(leases)[0]:
            late = part.ack([lease.event.offset for lease in some], grant.token)
            self._settled(grant, some, late)
            self._counters["acked"] += len(some) - late
            refused += late
        if refused:
            raise too_late(refused)

    def _check_unit_of_work(self) -> None:
        """Refuses where a transaction cannot acknowledge leases."""

    def ack_committed(self, leases: Sequence[Lease]) -> None:
        """A transaction has acknowledged these."""
        for _, grant, some in self._by_grant(leases)[0]:
            self._settled(grant, some, 0)
            self._counters["acked"] += len(some)

    async def ack_async(self, leases: Iterable[Lease]) -> None:
        """`ack` for asyncio."""
        await asyncio.get_running_loop().run_in_executor(None, self.ack, list(leases))

    def nack(self, leases: Iterable[Lease], *, delay_s: float = 0.0, reason: str = "given back") -> None:
        """Gives events back, to be delivered again after the delay; at the delivery limit they become dead letters."""
        at = self._steady() + round(delay_s * 1e6) if delay_s > 0 else 0
        groups, refused = self._by_grant(leases)
        for part, grant, some in groups:
            late = part.nack([lease.event.offset for lease in some], grant.token, time=at, reason=reason)
            self._settled(grant, some, len(late))
            self._counters["given_back"] += len(some) - len(late)
            refused += len(late)
        if refused:
            raise too_late(refused)

    def reject(self, leases: Iterable[Lease], reason: str) -> None:
        """Sends events to the dead letters now."""
        self._dead.check()
        groups, refused = self._by_grant(leases)
        for part, grant, some in groups:
            late = part.reject([lease.event.offset for lease in some], grant.token, reason=reason)
            self._settled(grant, some, len(late))
            refused += len(late)
        if refused:
            raise too_late(refused)

    def defer(self, leases: Iterable[Lease]) -> list[Position]:
        """Lays events aside until they are recalled by their positions. It does not count as a delivery."""
        some = list(leases)
        groups, refused = self._by_grant(some)
        for part, grant, mine in groups:
            late = part.defer([lease.event.offset for lease in mine], grant.token)
            self._settled(grant, mine, len(late))
            refused += len(late)
        if refused:
            raise too_late(refused)
        incarnation = self._store.incarnation()
        return [Position(self.topic, e.event.partition, e.event.offset, incarnation) for e in some]

    def recall(self, places: Iterable[Position]) -> int:
        """Delivers what was deferred; how many of these were."""
        self._check_usable(to_change=True)
        by_part: dict[int, list[int]] = {}
        for place in places:
            by_part.setdefault(place.partition, []).append(place.offset)
        return sum(self._part(number).recall(offsets) for number, offsets in by_part.items())

    def extend(self, leases: Iterable[Lease], s: float) -> None:
        """Keeps leases for so many seconds from now."""
        check_seconds(s, "s")
        deadline = self._steady() + round(s * 1e6)
        groups, refused = self._by_grant(leases)
        for part, grant, some in groups:
            refused += len(part.extend([lease.event.offset for lease in some], grant.token, deadline=deadline))
            grant.deadline = max(grant.deadline, deadline)
        if refused:
            raise too_late(refused)

    def flush(self) -> None:
        """Returns when every acknowledgement so far is written; `LeaseExpired` if some since the last flush came too late."""
        self._check_usable()
        self._acks.write()
        failure, self._acks.failure = self._acks.failure, None
        if failure is not None:
            raise failure
        refused, self._acks.refused = self._acks.refused, 0
        if refused:
            raise too_late(refused)

    def reply(self, lease: Lease, value: Any) -> None:
        """Answers a request and acknowledges it."""
        from headwater.log.queue.request import send_reply

        send_reply(self._log, lease.event, value)
        self.ack([lease])

    # Sending

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
        """Appends one event: to be delivered now, after a delay or at a time; with an `id`, once in the duplicate window."""
        self._check_usable()
        extra = sending_headers(headers, delay_s=delay_s, at=at, id=id, now=self._clock(), steady=self._steady)
        return send_event(self._log, self.topic, value, key=key, headers=extra, spread_by=id)

    # Looking

    def browse(self, *, events_max: int = 100) -> list[QueueEntry]:
        """What is not acknowledged, without leasing any of it, partition after partition."""
        self._acks.write()
        return browse(self._all_parts(), events_max=events_max, now=self._clock())

    def depth(self) -> Depth:
        """How many events are ready, leased, scheduled and dead. Behind the newest event ever leased ids are not looked at."""
        self._acks.write()
        return count(self._all_parts(), now=self._clock(), dead=self._dead.count())

    def dead(self, *, events_max: int = 100) -> list[Event]:
        """The dead letters of this group; headers say why, from where, and after how many deliveries."""
        return self._dead.browse(events_max)

    def redrive(self, *, events_max: int | None = None) -> int:
        """Sends dead letters back to the topic, for this group only; how many."""
        self._check_usable(to_change=True)
        return self._dead.redrive(events_max)

    def seek(self, start: Start) -> None:
        """Goes on from another place, for the whole group: everything from there on is delivered, again if need be."""
        self._check_usable(to_change=True)
        self._acks.write()
        with self._log.reader(self.topic, start=start) as reader:
            for place in reader.positions():
                self._part(place.partition).restart(place.offset)
        self._free.clear()

    def floors(self) -> dict[int, int]:
        """In each partition the offset below which this group has acknowledged everything."""
        self._acks.write()
        return {number: self._part(number).floor(bounds) for number, bounds in self._bounds().items()}

    def counters(self) -> Mapping[str, int]:
        """What this handle has done so far: leased, redelivered, acked, given_back, expired, returned."""
        return dict(self._counters)

    def close(self) -> None:
        """Writes acknowledgements, gives back what is still leased, and ends."""
        if self._closed or self._foreign:
            return
        try:
            self._acks.write()
            for part in list(self._parts.values()):
                if part.has_leased:
                    part.give_back_all(self._member)
        finally:
            self._closed = True
            self._acks.close()
            if self._waiter is not None:
                self._waiter.close()
            self._dead.close()
            self._states.close(self._member)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forked(self) -> None:
        """In a child: leases and locks are the parent's."""
        self._foreign = True
        self._states.forked()
        self._acks.forked()

    # Leases of this moment

    def _lease_now(self, events_max: int, *, wait: bool) -> tuple[list[Lease], bool]:
        """What can be leased now, and whether another process was at some partition."""
        self._check_usable(to_change=True)
        self._acks.write()
        if not self._member:
            self._member = self._states.join()
            self._sweep_at = 0.0
        self._sweep()
        if self._credit is not None:
            events_max = min(events_max, self._credit - self._acks.outstanding(self._steady()))
        leases: list[Lease] = []
        if events_max <= 0:
            return leases, False
        bounds = self._bounds()
        numbers = list(bounds)
        self._turn += 1
        busy = []
        for step in range(len(numbers)):
            number = numbers[(self._turn + self._member + step) % len(numbers)]
            if self._is_held(number, bounds):
                continue
            if not self._lease_of(number, bounds[number], leases, events_max, wait=False):
                busy.append(number)
            if len(leases) >= events_max:
                return leases, False
        if wait and not leases:
            for number in busy:
                self._lease_of(number, bounds[number], leases, events_max, wait=True)
        return leases, bool(busy)

    def _lease_of(self, number: int, bounds: Bounds, leases: list[Lease], events_max: int, *, wait: bool) -> bool:
        """Adds what one partition gives; False where another process was at it."""
        part = self._part(number)
        while True:
            granted = part.lease(
                events_max - len(leases), member=self._member, peers=self._peers, bounds=bounds, wait=wait
            )
            if granted is None:
                return False
            if granted.count:
                leases += self._leases(part, granted)
            if self._where is None or not granted.count or len(leases) >= events_max:
                return True

    def _is_held(self, number: int, bounds: Mapping[int, Bounds]) -> bool:
        """In order, one that was split off waits until its ancestors are acknowledged up to their fences."""
        if not self._settings.has_keys or number in self._free:
            return False
        ancestors = self._store.topic(self.topic).ancestors(number)
        if is_held(ancestors, lambda ancestor: self._part(ancestor).floor(bounds[ancestor])):
            return True
        self._free.add(number)
        return False

    def _leases(self, part: QueuePartition, granted: Granted) -> list[Lease]:
        try:
            events, deliveries, gone = part.events(granted)
            wanted = None if self._where is None else [bool(self._where(event)) for event in events]
        except Exception:
            for offsets in granted.offsets:
                part.nack(offsets.tolist(), granted.token, time=0, reason="", delivered=False)
            raise
        if wanted is not None and not all(wanted):
            others = [event.offset for event, is_wanted in zip(events, wanted, strict=True) if not is_wanted]
            part.pass_over(others, granted.token)
            events, deliveries = list(compress(events, wanted)), list(compress(deliveries, wanted))
        grant = Grant(self, self._acks, part.number, granted.token, len(events) + len(gone), granted.until)
        grant.acked += gone
        self._acks.add(grant)
        self._counters["leased"] += len(events)
        self._counters["redelivered"] += len(deliveries) - deliveries.count(1)
        return list(map(Lease, events, deliveries, repeat(grant)))

    def _sweep(self) -> None:
        """Now and then: what members had out whose process is dead is given back; a busy partition's share the next time."""
        at = time.monotonic()
        if at < self._sweep_at:
            return
        self._sweep_at = at + SWEEP_S
        self._free.clear()
        for member in self._states.dead_members():
            returned = [self._part(number).give_back_all(member, wait=False) for number in self._bounds()]
            self._counters["returned"] += sum(filter(None, returned))
            self._states.reach("queue: given back")
            if None not in returned:
                self._states.bury_member(member)
        if self._settings.is_sticky:
            self._peers = self._states.members()

    def _pause_s(self, *, is_busy: bool) -> float:
        """How long to sleep when there was nothing: others give back without waking us."""
        if is_busy:
            return _BUSY_S
        left_us = min((part.waits_us() for part in self._parts.values()), default=FAR_US)
        if left_us >= FAR_US:
            return _WAIT_S_MAX
        left_s = left_us / 1e6
        return _BLOCKED_S if left_s <= 0 else max(_BUSY_S, min(_LOOK_AGAIN_S, left_s))

    # Settling

    def _write_acks(self, number: int, offsets: list[int], token: int) -> int:
        return self._part(number).ack(offsets, token)

    def _settled(self, grant: Grant, leases: Sequence[Lease], late: int) -> None:
        for lease in leases:
            lease._settled = True
        self._acks.settled(grant, len(leases))
        self._counters["expired"] += late

    def _by_grant(self, leases: Iterable[Lease]) -> tuple[list[tuple[QueuePartition, Grant, list[Lease]]], int]:
        self._check_usable()
        groups, settled = by_grant(self, leases)
        return [(self._part(some[0]._grant.partition), some[0]._grant, some) for some in groups], settled

    # Small things

    def _part(self, number: int) -> QueuePartition:
        found = self._parts.get(number)
        if found is None:
            found = self._parts[number] = self._new_part(number)
        return found

    def _new_part(self, number: int) -> QueuePartition:
        return QueuePartition(
            self._store,
            self._states,
            topic=self.topic,
            number=number,
            group=self.group,
            settings=self._settings,
            clock=self._clock,
            steady=self._steady,
            bury=self._dead.bury,
            acks_topic=partial(acks_topic, self._log, self.topic, self.group),
        )

    def _letters(self, dead: str | None) -> DeadLetters:
        return DeadLetters(self._log, topic=self.topic, group=self.group, dead=dead)

    def _all_parts(self) -> list[tuple[QueuePartition, Bounds]]:
        return [(self._part(number), bounds) for number, bounds in self._bounds().items()]

    def _bounds(self) -> dict[int, Bounds]:
        self._check_usable()
        if self._store.topic(self.topic).id != self._described.id:
            raise TopicNotFound(f"Topic {self.topic!r} was deleted and created again.", advice="Open another queue.")
        return {number: bound for (_, number), bound in self._store.bounds([self.topic]).items()}

    def _watch(self) -> Waiter:
        if self._waiter is None:
            self._waiter = self._store.waiter([self.topic])
        return self._waiter

    def _check_usable(self, *, to_change: bool = False) -> None:
        if self._closed or self._foreign:
            raise was_closed(self.topic, is_foreign=self._foreign)
        if to_change and not self._states.writable:
            raise only_looked_at(self.topic, self._log.url)
