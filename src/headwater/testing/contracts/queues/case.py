"""What the tests of queues do again and again: take what is there, and settle it."""

from __future__ import annotations

import time

from headwater.log.queue.depth import Depth
from headwater.log.queue.lease import Lease
from headwater.log.queue.queue import Queue
from headwater.testing.contracts.case import LogCase

TAKE_S = 20.0


class QueueCase(LogCase):
    """What the parts of the contract of queues share.

    A backend that cannot keep a part of the promise says so here.
    """

    queues_can_be_counted = True
    """A queue says what waits and what is out. False: only the brokers know; dead letters are counted all the same."""

    lease_s_min = 0.05
    """The shortest lease that a queue may have."""

    def is_left(self, queue: Queue, *, ready: int = 0, leased: int = 0, scheduled: int = 0, dead: int = 0) -> bool:
        """Whether so much of a queue is left; as far as this log can tell."""
        if self.queues_can_be_counted:
            return queue.depth() == Depth(ready, leased, scheduled, dead)
        return len(queue.dead(events_max=dead + 1)) == dead


def drain(queue: Queue) -> list[bytes]:
    """The values of everything there is, acknowledged."""
    values = []
    while leases := queue.lease(timeout_s=0):
        for lease in leases:
            values.append(lease.event.value)
            lease.ack()
    return values


def one(queue: Queue, *, timeout_s: float = 10.0) -> Lease:
    """The one lease there is."""
    (lease,) = queue.lease(timeout_s=timeout_s)
    return lease


def take(queue: Queue, count: int) -> list[Lease]:
    """So many leases, however many calls that takes."""
    leases: list[Lease] = []
    deadline = time.monotonic() + TAKE_S
    while len(leases) < count and time.monotonic() < deadline:
        leases += queue.lease(events_max=count - len(leases), timeout_s=0.1)
    assert len(leases) == count
    return leases


def fail(queue: Queue, times: int, **how: object) -> None:
    """Gives back whatever is leased, so many times."""
    for _ in range(times):
        queue.nack(queue.lease(timeout_s=1.0), **how)  # type: ignore[arg-type]
