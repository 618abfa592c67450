"""A lease: one event of a queue, handed to one consumer until a deadline.

A grant is what one call of `lease` got of one partition: its leases share one token, by which the queue knows a lease that has
expired and was given to somebody else. `Grants` holds the grants of one handle, and the acknowledgements gathered of them.

`ack` is gathered and written a few milliseconds later, or at the next `lease`; everything else is written at once. Gathered
acknowledgements are written when the handle says so (at the next `lease`, by `flush`, `close` and whatever looks at the queue), and
by a thread a few milliseconds after the first, so that an idle consumer's acknowledgements are not forgotten until its leases
expire. On a simulated disk there is no thread.

Gathering takes no lock: appending to a list is one step of the interpreter. An acknowledgement is taken from its grant only when
it is written. A grant that is dropped is marked first and looked at then, while `ack` appends first and looks at the mark
then, so none is missed.

Lock order: the lock of the grants, then those of the engine. Thread-safety: leases may be settled by any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from headwater.log.disk.threads import Background
from headwater.log.port.lease_engine import Granted, LeaseEngine
from headwater.log.queue.settings import ACKS_GATHERED_S, NACK_DELAY_S, NACK_REASON
from headwater.model.clock import Clock
from headwater.model.errors import Closed, HeadwaterError, InvalidInput, LeaseExpired
from headwater.model.event import Event
from headwater.model.position import Position


class LeaseQueue(Protocol):
    """The queue of a lease, as far as a lease uses it."""

    topic: str
    group: str

    def nack(self, leases: Iterable[Lease], *, delay_s: float = ..., reason: str = ...) -> None: ...

    def extend(self, leases: Iterable[Lease], lease_s: float) -> None: ...

    def reject(self, leases: Iterable[Lease], reason: str) -> None: ...

    def defer(self, leases: Iterable[Lease]) -> list[Position]: ...

    def reply(self, lease: Lease, value: Any) -> None: ...


class Lease(msgspec.Struct):
    """One event until it is acknowledged, given back, or its deadline passes."""

    event: Event
    deliveries: int
    _grant: Grant
    _settled: bool = False

    def ack(self) -> None:
        """The event is done. Written with others a moment later: a crash before that delivers it again, never loses it."""
        if self._settled:
            return
        self._settled = True
        grant = self._grant
        grant.acked.append(self.event.offset)
        if grant.dropped or not grant.grants.ticking:
            grant.grants.gathered(grant)

    def nack(self, *, delay_s: float = NACK_DELAY_S, reason: str = NACK_REASON) -> None:
        """Gives the event back: it is delivered again after the delay, or goes to the dead letters with the reason."""
        self._grant.grants.queue.nack([self], delay_s=delay_s, reason=reason)

    def extend(self, lease_s: float) -> None:
        """Keeps the lease for `lease_s` seconds from now."""
        self._grant.grants.queue.extend([self], lease_s)

    def reject(self, reason: str) -> None:
        """Sends the event to the dead letters now: another delivery would not help."""
        self._grant.grants.queue.reject([self], reason)

    def defer(self) -> Position:
        """Sets the event aside until `queue.recall` is called with the position that this returns."""
        return self._grant.grants.queue.defer([self])[0]

    def reply(self, value: Any) -> None:
        """Answers the sender of a request and acknowledges it; `TimedOut` when the sender no longer waits."""
        self._grant.grants.queue.reply(self, value)

    def __repr__(self) -> str:
        event, queue = self.event, self._grant.grants.queue
        return (
            f"Lease(topic={queue.topic!r}, group={queue.group!r}, partition={event.partition}, offset={event.offset}, "
            f"key={event.key!r:.40}, deliveries={self.deliveries}, {'settled' if self._settled else 'open'})"
        )


class Grant:
    """The leases that one call got of one partition."""

    __slots__ = ("acked", "count", "deadline", "dropped", "grants", "partition", "settled", "token")

    def __init__(self, grants: Grants, granted: Granted) -> None:
        self.grants = grants
        self.partition = granted.partition
        self.token = granted.token
        self.count = len(granted.events) + len(granted.gone)
        self.deadline = granted.deadline
        self.settled = 0
        self.acked: list[int] = [*granted.gone]
        self.dropped = False


class Grants:
    """The grants of one handle, and what was acknowledged of them."""

    def __init__(
        self, queue: LeaseQueue, engine: LeaseEngine, *, steady: Clock, credit: int | None, counters: Counter[str]
    ) -> None:
        self.queue = queue
        self.engine = engine
        self.ticking = False
        """Whether somebody is about to write what is gathered."""
        self._steady = steady
        self._credit = credit
        self._counters = counters
        self._closed = False
        self._failure: HeadwaterError | None = None
        self._refused = 0
        self._grants: list[Grant] = []
        self._mutex = threading.Lock()
        self._wake: SimpleQueue[None] = SimpleQueue()  # not an Event: Ctrl-C could leave its lock taken
        self._thread: Background | None = None

    def add(self, granted: Granted) -> list[Lease]:
        """The leases of what an engine has granted."""
        grant = Grant(self, granted)
        with self._mutex:
            self._grants.append(grant)
        deliveries = granted.deliveries
        self._counters["leased"] += len(deliveries)
        self._counters["redelivered"] += len(deliveries) - deliveries.count(1)
        return list(map(Lease, granted.events, deliveries, repeat(grant)))

    def room(self, events_max: int) -> int:
        """How many of so many leases the credit allows."""
        return events_max if self._credit is None else min(events_max, self._credit - self.open())

    def open(self) -> int:
        """How many leases are out and in force."""
        now = self._steady()
        with self._mutex:
            return sum(g.count - g.settled - len(g.acked) for g in self._grants if g.deadline > now)

    def by_grant(self, leases: Iterable[Lease]) -> tuple[list[tuple[Grant, list[Lease]]], int]:
        """Leases by their grants, without those that are settled, and how many these were."""
        groups: dict[int, tuple[Grant, list[Lease]]] = {}
        settled = 0
        try:
            for lease in leases:
                grant = lease._grant
                if grant.grants is not self:
                    raise InvalidInput(
                        "The lease belongs to another queue.", advice="Settle it with the handle that leased it."
                    )
                if lease._settled:
                    settled += 1
                else:
                    groups.setdefault(id(grant), (grant, []))[1].append(lease)
        except (AttributeError, TypeError):  # looking at each of them first would cost more than the rest
            raise _no_lease(leases) from None
        return list(groups.values()), settled

    def settle(self, grant: Grant, leases: Sequence[Lease], *, late: int) -> None:
        """These leases are settled, other than by `Lease.ack`; so many of them were too late."""
        for lease in leases:
            lease._settled = True
        with self._mutex:
            grant.settled += len(leases)
        self._counters["expired"] += late

    def committed(self, leases: Iterable[Lease]) -> None:
        """A transaction has acknowledged these."""
        for grant, some in self.by_grant(leases)[0]:
            self.settle(grant, some, late=0)
            self._counters["acked"] += len(some)

    def gathered(self, grant: Grant) -> None:
        """An acknowledgement came while nobody was about to write, or after its grant was dropped."""
        if self._closed:
            raise Closed("The queue of this lease is closed.", advice="Settle leases before you close their queue.")
        if grant.dropped:
            with self._mutex:
                grant.dropped = False
                self._grants.append(grant)
        if not self.ticking:
            self.ticking = True
            if self.engine.has_threads:
                self._start()
                self._wake.put(None)

    def write(self) -> None:
        """Writes what was gathered."""
        with self._mutex:
            now, kept = self._steady(), []
            for grant in self._grants:
                is_over = grant.dropped = grant.deadline < now
                if count := len(grant.acked):
                    late = self.engine.ack(grant.partition, grant.acked[:count], grant.token)
                    del grant.acked[:count]
                    grant.settled += count
                    self._refused += late
                    self._counters["expired"] += late
                    self._counters["acked"] += count - late
                if is_over or grant.settled >= grant.count:
                    grant.dropped = True
                else:
                    kept.append(grant)
            self._grants = kept

    def flush(self) -> None:
        """Writes what was gathered, and raises what has failed since the last flush; `LeaseExpired`."""
        self.write()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        refused, self._refused = self._refused, 0
        check_in_time(refused)

    def close(self) -> None:
        """Takes no more, and ends the thread."""
        self._closed = True
        self.ticking = False
        self._wake.put(None)
        if self._thread is not None:
            self._thread.join()

    def forked(self) -> None:
        """In a child: what was gathered is the parent's."""
        self._closed = True
        self.ticking = False
        self._grants = []
        self._mutex = threading.Lock()
        self._wake = SimpleQueue()
        self._thread = None

    def _start(self) -> None:
        with self._mutex:
            if self._thread is None:
                self._thread = Background(self._run)

    def _run(self) -> None:
        while True:
            self._wake.get()
            if self._closed:
                self._wake.put(None)  # for a second thread, where Ctrl-C fell into the start of the first
                return
            time.sleep(ACKS_GATHERED_S)
            self.ticking = False
            try:
                self.write()
            except HeadwaterError as error:
                self._failure = error


def grant_of(lease: Lease) -> Grant:
    """What a lease was granted with: its partition, token and deadline, and the handle that holds it."""
    return lease._grant


def list_of_leases(leases: Iterable[Lease]) -> list[Lease]:
    """The leases that a user gives; `InvalidInput` where they are something else."""
    try:
        some = list(leases)
    except TypeError:
        raise _no_lease(leases) from None
    for lease in some:
        if not isinstance(lease, Lease):
            raise _no_lease(lease)
    return some


def check_in_time(late: int) -> None:
    """Refuses where some leases had expired before they were settled; `LeaseExpired`."""
    if late:
        leases = "1 lease" if late == 1 else f"{late} leases"
        raise LeaseExpired(
            f"{leases} expired before this call: another consumer has the events, or they are done.",
            advice="Allow more time with lease_s= or lease.extend(…). An event can be delivered more than once.",
        )


def _no_lease(given: object) -> InvalidInput:
    return InvalidInput(
        f"{given!r:.80} is not a lease.",
        advice="Pass leases that queue.lease() returned, in a list: queue.ack([lease]).",
    )
