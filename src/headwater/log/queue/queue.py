"""A queue: a topic read with one acknowledgement per event, shared by any number of consumers in any number of processes.

Every event of the topic is leased to one consumer of the group until a deadline. It is acknowledged, given back, extended, or
comes again when the deadline has passed or its consumer's process is dead. After `deliveries_max` deliveries it becomes a dead
letter. Readers of the topic and other groups are unaffected.

`Queue` is the face that users see, on any log. The log's store makes the engine behind it, which decides who has which event (see
`lease_engine`); what an engine cannot do is refused by its features.

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
from types import TracebackType
from typing import Any, Self

from headwater.log.clients.reader import Start
from headwater.log.disk.fork import tell_when_forked
from headwater.log.port.lease_engine import Feature, Order, QueueOpening, was_closed
from headwater.log.port.topic import check_name
from headwater.log.port.write import Write
from headwater.log.queue import settings as defaults
from headwater.log.queue.acks_topic import acks_topic
from headwater.log.queue.dead_letters import DeadLetterQueue, DeadLetters, DeadLettersByPlace, DeadLetterTopic
from headwater.log.queue.depth import Depth, QueueEntry
from headwater.log.queue.headers import send_event, sending_headers
from headwater.log.queue.lease import Grants, Lease, check_in_time
from headwater.log.queue.queue_log import QueueLog
from headwater.log.queue.request import send_reply
from headwater.log.queue.settings import (
    check_agrees,
    check_delay,
    check_ids_are_kept,
    check_lease,
    check_seconds,
    features_of,
    to_settings,
)
from headwater.log.queue.window_engine import WindowEngine, engine_with_windows
from headwater.model.clock import SteadyClock
from headwater.model.errors import NoAccess
from headwater.model.event import Event
from headwater.model.position import Position


class Queue:
    """One consumer's handle on a queue."""

    def __init__(
        self,
        log: QueueLog,
        topic: str,
        *,
        group: str = defaults.GROUP,
        lease_s: float = defaults.LEASE_S,
        deliveries_max: int | None = defaults.DELIVERIES,
        order: Order = defaults.ORDER,
        credit: int | None = None,
        duplicates_s: float | None = None,
        dead: str | None = None,
        where: Callable[[Event], bool] | None = None,
        is_dead: bool = False,
    ) -> None:
        """`is_dead` says that the topic holds dead letters, which have none of their own."""
        settings = to_settings(
            lease_s=lease_s, deliveries_max=deliveries_max, order=order, duplicates_s=duplicates_s, credit=credit
        )
        log.store.capabilities.queues.check(*features_of(settings, has_where=where is not None))
        self.topic = check_name(topic)
        self.group = check_name(group)
        self._log = log
        self._steady = SteadyClock(log.clock)
        self._counters: Counter[str] = Counter()
        self._closed = self._is_foreign = False
        described = log.store.refresh(topic)
        wanted = {
            "group": group,
            "topic": topic,
            "topic_id": described.id,
            "order": order,
            "dead": None if is_dead else check_name(dead or f"{topic}.dead"),
            "duplicates_us": settings.duplicates_us,
        }
        self._engine = log.store.lease_engine(
            QueueOpening(
                group=group,
                topic=described,
                settings=settings,
                wanted=wanted,
                where=where,
                clock=log.clock,
                steady=self._steady,
                counters=self._counters,
                bury=self._bury,
                acks_topic=partial(acks_topic, log, topic, group),
            )
        )
        made = self._engine.made
        check_agrees(made, order=order, dead=dead)
        check_ids_are_kept(made, settings, topic=described)
        self._dead_topic = DeadLetterTopic(log, topic=topic, group=group, name=made["dead"])
        self._dead = self._dead_letters()
        self._grants = Grants(self, self._engine, steady=self._steady, credit=credit, counters=self._counters)
        tell_when_forked(self)

    # Leasing

    def lease(
        self, *, events_max: int = defaults.LEASE_EVENTS, timeout_s: float = defaults.LEASE_TIMEOUT_S
    ) -> list[Lease]:
        """The next leases; an empty list when none came in time."""
        check_lease(events_max, timeout_s)
        begun, left_s = time.monotonic(), max(timeout_s, self._engine.patience_s())
        while True:
            leases, again_s = self._look(events_max, left_s)
            left_s = begun + max(timeout_s, self._engine.patience_s()) - time.monotonic()
            if leases or left_s <= 0:
                return leases
            self._engine.pause(min(left_s, again_s))

    async def lease_async(
        self, *, events_max: int = defaults.LEASE_EVENTS, timeout_s: float = defaults.LEASE_TIMEOUT_S
    ) -> list[Lease]:
        """`lease` for asyncio: other tasks run while it waits."""
        check_lease(events_max, timeout_s)
        loop = asyncio.get_running_loop()
        begun, left_s = time.monotonic(), max(timeout_s, self._engine.patience_s())
        while True:
            if self._engine.asks:
                leases, again_s = await loop.run_in_executor(None, self._look, events_max, left_s)
            else:
                leases, again_s = self._look(events_max, left_s)
            left_s = begun + max(timeout_s, self._engine.patience_s()) - time.monotonic()
            if leases or left_s <= 0:
                await asyncio.sleep(0)
                return leases
            await self._engine.pause_async(min(left_s, again_s))

    # Settling

    def ack(self, leases: Iterable[Lease]) -> None:
        """These events are done, and it is written when this returns; `LeaseExpired` if some came too late."""
        self._check_usable()
        refused = 0
        for grant, some in self._grants.by_grant(leases)[0]:
            late = self._engine.ack(grant.partition, [lease.event.offset for lease in some], grant.token)
            self._grants.settle(grant, some, late=late)
            self._counters["acked"] += len(some) - late
            refused += late
        check_in_time(refused)

    async def ack_async(self, leases: Iterable[Lease]) -> None:
        """`ack` for asyncio."""
        await asyncio.get_running_loop().run_in_executor(None, self.ack, list(leases))

    def nack(
        self, leases: Iterable[Lease], *, delay_s: float = defaults.NACK_DELAY_S, reason: str = defaults.NACK_REASON
    ) -> None:
        """Gives events back, to be delivered again after the delay; at the delivery limit they become dead letters."""
        check_delay(delay_s)
        if delay_s > 0:
            self._engine.features.check("nack(delay_s=…)")
        at = self._steady() + round(delay_s * 1e6) if delay_s > 0 else 0
        self._settle(leases, partial(self._engine.nack, time=at, reason=reason), counted="given_back")

    def reject(self, leases: Iterable[Lease], reason: str) -> None:
        """Sends events to the dead letters now."""
        self._dead_topic.check()
        self._settle(leases, partial(self._engine.reject, reason=reason))

    def defer(self, leases: Iterable[Lease]) -> list[Position]:
        """Sets events aside until they are recalled by their positions. It does not count as a delivery."""
        engine, some = self._windows("defer"), list(leases)
        self._settle(some, lambda number, offsets, token: engine.partition(number).defer(offsets, token))
        incarnation = self._log.store.incarnation()
        return [Position(self.topic, e.event.partition, e.event.offset, incarnation) for e in some]

    def recall(self, places: Iterable[Position]) -> int:
        """Delivers what was deferred; how many of these were."""
        engine = self._windows("recall")
        self._check_usable(to_change=True)
        by_part: dict[int, list[int]] = {}
        for place in places:
            by_part.setdefault(place.partition, []).append(place.offset)
        return sum(engine.partition(number).recall(offsets) for number, offsets in by_part.items())

    def extend(self, leases: Iterable[Lease], lease_s: float) -> None:
        """Keeps leases for `lease_s` seconds from now."""
        engine = self._windows("extend")
        check_seconds(lease_s, "lease_s")
        self._check_usable()
        deadline = self._steady() + round(lease_s * 1e6)
        groups, refused = self._grants.by_grant(leases)
        for grant, some in groups:
            part, offsets = engine.partition(grant.partition), [lease.event.offset for lease in some]
            refused += len(part.extend(offsets, grant.token, deadline=deadline))
            grant.deadline = max(grant.deadline, deadline)
        check_in_time(refused)

    def flush(self) -> None:
        """Returns when every acknowledgement so far is written; `LeaseExpired` if some since the last flush came too late."""
        self._check_usable()
        self._grants.flush()

    def reply(self, lease: Lease, value: Any) -> None:
        """Answers a request and acknowledges it."""
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
        if (delay_s is None) != (at is None):
            self._engine.features.check("send(delay_s=…) and send(at=…)")
        self._check_usable()
        extra = sending_headers(headers, delay_s=delay_s, at=at, id=id, now=self._log.clock(), steady=self._steady)
        return send_event(self._log, self.topic, value, key=key, headers=extra, spread_by=id)

    # Looking

    def browse(self, *, events_max: int = defaults.SHOWN_EVENTS) -> list[QueueEntry]:
        """What is not acknowledged, without leasing any of it, partition after partition."""
        return self._looked_into("browse").browse(events_max)

    def depth(self) -> Depth:
        """How many events are ready, leased, scheduled and dead. Events that nobody has leased yet are counted without a look at
        their ids."""
        engine = self._looked_into("depth")
        return engine.depth(dead=self._dead.count())

    def dead(self, *, events_max: int = defaults.SHOWN_EVENTS) -> list[Event]:
        """The dead letters of this group; headers say why, from where, and after how many deliveries."""
        return self._dead.browse(events_max)

    def redrive(self, *, events_max: int | None = None) -> int:
        """Sends dead letters back to the topic, for this group only; how many."""
        self._check_usable(to_change=True)
        return self._dead.redrive(events_max)

    def seek(self, start: Start) -> None:
        """Continues from another place, for the whole group: everything after it is delivered, again if need be."""
        engine = self._windows("seek")
        self._check_usable(to_change=True)
        self._grants.write()
        with self._log.reader(self.topic, start=start) as reader:
            engine.restart({place.partition: place.offset for place in reader.positions()})

    def floors(self) -> dict[int, int]:
        """In each partition the offset below which this group has acknowledged everything."""
        return self._looked_into("floors").floors()

    def counters(self) -> Mapping[str, int]:
        """What this handle has done so far: leased, redelivered, acked, given_back, expired, returned."""
        return dict(self._counters)

    def close(self) -> None:
        """Writes acknowledgements, gives back what is still leased, and ends."""
        if self._closed or self._is_foreign:
            return
        try:
            self._grants.write()
            self._engine.give_back()
        finally:
            self._closed = True
            self._grants.close()
            self._dead.close()
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed or self._is_foreign else f"open={self._grants.open()}"
        return f"Queue(topic={self.topic!r}, group={self.group!r}, order={self._engine.made['order']!r}, {state})"

    def _forked(self) -> None:
        """In a child: leases and locks are the parent's."""
        self._is_foreign = True
        self._engine.forked()
        self._grants.forked()

    def _look(self, events_max: int, wait_s: float) -> tuple[list[Lease], float]:
        """What can be leased now, and how long to sleep where there is nothing."""
        self._check_usable(to_change=True)
        room, again_s = self._grants.room(events_max), 0.0
        granted = self._engine.ready(room) if room > 0 else []
        if not granted:
            self._grants.write()
            taken = self._engine.take(self._grants.room(events_max), wait_s=wait_s)
            granted, again_s = taken.granted, taken.again_s
        return [lease for one in granted for lease in self._grants.add(one)], again_s

    def _settle(
        self, leases: Iterable[Lease], settle: Callable[[int, list[int], int], list[int]], *, counted: str | None = None
    ) -> None:
        """Settles leases grant by grant, as far as they are in force; `LeaseExpired` if some are not."""
        self._check_usable()
        groups, refused = self._grants.by_grant(leases)
        for grant, some in groups:
            late = len(settle(grant.partition, [lease.event.offset for lease in some], grant.token))
            self._grants.settle(grant, some, late=late)
            if counted is not None:
                self._counters[counted] += len(some) - late
            refused += late
        check_in_time(refused)

    def _windows(self, feature: Feature) -> WindowEngine:
        return engine_with_windows(self._engine, feature)

    def _looked_into(self, feature: Feature) -> WindowEngine:
        """The engine, to be looked into, with every acknowledgement so far."""
        self._check_usable()
        engine = self._windows(feature)
        self._grants.write()
        return engine

    def _dead_letters(self) -> DeadLetters:
        if self._engine.sent_back is not None:
            return DeadLettersByPlace(self._dead_topic, self._engine.sent_back)
        return DeadLetterQueue(self._dead_topic, lambda name: Queue(self._log, name, group=self.group, is_dead=True))

    def _bury(
        self,
        events: Sequence[Event],
        deliveries: Sequence[int],
        reasons: Sequence[str],
        begun: Sequence[bool],
        *,
        acks: Sequence[Write] = (),
    ) -> None:
        """Dead letters are written to the topic that the queue was made with, which the engine finds out."""
        self._dead_topic.bury(events, deliveries, reasons, begun, acks=acks)

    def _check_usable(self, *, to_change: bool = False) -> None:
        if self._closed or self._is_foreign:
            raise was_closed(self.topic, is_foreign=self._is_foreign)
        if to_change and not self._engine.writable:
            raise NoAccess(
                f"The queue on topic {self.topic!r} is read-only, because its log {self._log.store.url} was opened read-only.",
                advice="To lease, redrive or seek, open the log without read_only=True, as a user who may write to it.",
            )
