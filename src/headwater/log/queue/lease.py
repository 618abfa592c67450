"""A lease: one event of a queue, handed to one consumer until a deadline.

`ack` is gathered by the queue's handle and written a few milliseconds later, or at the next `lease`; everything else is written
at once. A grant is what one call of `lease` got of one partition: its leases share one token, by which the queue knows a lease
that has expired and was given to somebody else.

Gathered acknowledgements (`Acks`) are written when the owner says so (at the next `lease`, by `flush`, `close` and whatever looks at
the queue), and by a thread a few milliseconds after the first, so that an idle consumer's acknowledgements are not forgotten until its
leases expire. On a simulated disk there is no thread. Gathering takes no lock: appending to a list is one step of the interpreter. An
acknowledgement is taken from its grant only when it is written. A grant that is dropped is marked first and looked at then, while `ack`
appends first and looks at the mark then, so none is missed.

Thread-safety: leases may be settled by any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.log.disk.threads import Background
from headwater.model.clock import Clock
from headwater.model.errors import Closed, HeadwaterError, InvalidInput, LeaseExpired, NoAccess
from headwater.model.event import Event
from headwater.model.position import Position

if TYPE_CHECKING:
    from headwater.log.queue.queue import Queue


FLUSH_S = 0.005

WriteAcks = Callable[[int, list[int], int], int]
"""Writes acknowledgements: partition, offsets and token; how many came too late."""


class Grant:
    """The leases that one call got of one partition."""

    __slots__ = ("acked", "acks", "count", "deadline", "dropped", "partition", "queue", "settled", "token")

    def __init__(self, queue: Queue, acks: Acks, partition: int, token: int, count: int, deadline: int) -> None:
        self.queue = queue
        self.acks = acks
        self.partition = partition
        self.token = token
        self.count = count
        self.deadline = deadline
        self.settled = 0
        self.acked: list[int] = []
        self.dropped = False


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
        if grant.dropped or not grant.acks.ticking:
            grant.acks.gathered(grant)

    def nack(self, *, delay_s: float = 0.0, reason: str = "given back") -> None:
        """Gives the event back: it is delivered again after the delay, or goes to the dead letters with the reason."""
        self._grant.queue.nack([self], delay_s=delay_s, reason=reason)

    def extend(self, s: float) -> None:
        """Keeps the lease for so many seconds from now."""
        self._grant.queue.extend([self], s)

    def reject(self, reason: str) -> None:
        """Sends the event to the dead letters now: another delivery would not help."""
        self._grant.queue.reject([self], reason)

    def defer(self) -> Position:
        """Lays the event aside until `queue.recall` asks for it by the position returned."""
        return self._grant.queue.defer([self])[0]

    def reply(self, value: Any) -> None:
        """Answers whoever sent it with `log.request`, and acknowledges; `TimedOut` when nobody waits any more."""
        self._grant.queue.reply(self, value)


class Acks:
    """The grants of one handle and what was acknowledged of them. May be used by many threads."""

    def __init__(self, write: WriteAcks, *, clock: Clock, threads: bool, counters: Counter[str]) -> None:
        self._write = write
        self._clock = clock
        self._threads = threads
        self._counters = counters
        self._closed = False
        self.ticking = False
        """Whether somebody is about to write what is gathered."""
        self.failure: HeadwaterError | None = None
        self.refused = 0
        self._grants: list[Grant] = []
        self._mutex = threading.Lock()
        self._wake: SimpleQueue[None] = SimpleQueue()  # not an Event: Ctrl-C could leave its lock taken
        self._thread: Background | None = None

    def add(self, grant: Grant) -> None:
        """Another grant whose acknowledgements are to be written."""
        with self._mutex:
            self._grants.append(grant)

    def gathered(self, grant: Grant) -> None:
        """An acknowledgement came while nobody was about to write, or after its grant was dropped."""
        if self._closed:
            raise Closed("The queue of this lease was closed.", advice="Settle leases before you close their queue.")
        if grant.dropped:
            with self._mutex:
                grant.dropped = False
                self._grants.append(grant)
        if not self.ticking:
            self.ticking = True
            if self._threads:
                self._start()
                self._wake.put(None)

    def settled(self, grant: Grant, count: int) -> None:
        """So many leases of a grant were settled otherwise."""
        with self._mutex:
            grant.settled += count

    def outstanding(self, now: int) -> int:
        """How many leases are out and in force."""
        with self._mutex:
            return sum(g.count - g.settled - len(g.acked) for g in self._grants if g.deadline > now)

    def write(self) -> None:
        """Writes what was gathered."""
        with self._mutex:
            now, kept = self._clock(), []
            for grant in self._grants:
                is_over = grant.dropped = grant.deadline < now
                if count := len(grant.acked):
                    late = self._write(grant.partition, grant.acked[:count], grant.token)
                    del grant.acked[:count]
                    grant.settled += count
                    self.refused += late
                    self._counters["expired"] += late
                    self._counters["acked"] += count - late
                if is_over or grant.settled >= grant.count:
                    grant.dropped = True
                else:
                    kept.append(grant)
            self._grants = kept

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
            time.sleep(FLUSH_S)
            self.ticking = False
            try:
                self.write()
            except HeadwaterError as error:
                self.failure = error


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


def by_grant(queue: Queue, leases: Iterable[Lease]) -> tuple[list[list[Lease]], int]:
    """Leases of a queue by what they were granted with, without those that are settled, and how many these were."""
    groups: dict[int, list[Lease]] = {}
    settled = 0
    try:
        for lease in leases:
            if lease._grant.queue is not queue:
                raise InvalidInput("The lease is of another queue.", advice="Settle it with the handle that leased it.")
            if lease._settled:
                settled += 1
            else:
                groups.setdefault(id(lease._grant), []).append(lease)
    except (AttributeError, TypeError):  # looking at each of them first would cost more than the rest
        raise _no_lease(leases) from None
    return list(groups.values()), settled


def _no_lease(given: object) -> InvalidInput:
    return InvalidInput(
        f"{given!r:.80} is not what queue.lease() gives.",
        advice="Give the leases themselves, in a list: queue.ack([lease]).",
    )


def too_late(count: int) -> LeaseExpired:
    """Some leases had ended before they were settled."""
    return LeaseExpired(
        f"{count} lease{'' if count == 1 else 's'} had expired: the events were given to somebody else or are done.",
        advice="Give more time with lease_s= or lease.extend(…), and expect to see an event twice.",
    )


def was_closed(topic: str, *, is_foreign: bool) -> Closed:
    """A handle is used after its end, or in a child of its process."""
    why = "belongs to the process that forked this one" if is_foreign else "was closed"
    return Closed(f"The queue on {topic!r} {why}.", advice="Open another with log.queue(…).")


def only_looked_at(topic: str, url: str) -> NoAccess:
    """The queue of a log that may only be read is not changed."""
    return NoAccess(
        f"The queue on topic {topic!r} can only be looked at: its log {url} was opened read-only.",
        advice="To lease, send back or move, open the log without read_only=True, as a user who may write to it.",
    )
