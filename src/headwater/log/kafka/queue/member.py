"""A member of a share group: one consumer of Kafka's, and the batch of events that it was handed last.

Kafka hands out whole batches of its log, however few events were asked for, and gives a member nothing more before it has
settled all of the last batch. So what a caller did not ask for waits here until the next call, and a handle that leases while
it has leases out uses another member.

A batch counts from when it may have been acquired: an answer to one poll may come to the next, so that is when the one
before began. When its lease ends what is left of it is forgotten here, and Kafka hands it to somebody else.

A member that asks for nothing keeps its partitions from the others. So soon after a lease would have ended it is out of the
group, and comes again when it asks.

The first member of a new group is assigned nothing until its second heartbeat, five seconds later, because the brokers first
make a state for the group; a member that comes after that is assigned its partitions at once. So a member that has seen nothing
for a moment leaves and comes again, once.

Thread-safety: everything here is called under `lock`. In a forked child the parent's consumers are kept and never touched.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import cache
from typing import Any

from headwater.log.disk.fork import tell_when_forked
from headwater.log.kafka.queue.share_group import ShareGroup, no_share_groups
from headwater.model.clock import Clock
from headwater.model.event import Event

ACCEPT, RELEASE, REJECT = 1, 2, 3

Place = tuple[int, int]

_COME_AGAIN_S = 0.3
_WAS_THERE_S = 0.0005
_ROUNDED_US = 2_000  # brokers count in whole milliseconds, so a lease of theirs may end one earlier
_ON_ITS_WAY_US = 2_000_000
_COMMIT_S = 10.0
_HUNG_S_MIN, _HUNG_AFTER_S = 10.0, 5.0


class ShareBatch:
    """Events that Kafka handed over at once: those nobody has been given yet, and all that are not settled."""

    __slots__ = ("deadline", "open", "token", "waiting")

    def __init__(self, token: int, deadline: int) -> None:
        self.token = token
        self.deadline = deadline
        self.open: dict[Place, tuple[Event, int]] = {}
        self.waiting: deque[Place] = deque()


class ShareMember:
    """One consumer of the group."""

    def __init__(self, group: ShareGroup, *, clock: Clock, lease_us: int, events_max: int) -> None:
        self.lock = threading.Lock()
        self.batch: ShareBatch | None = None
        self._group = group
        self._kafka = group.cluster.kafka
        self._clock = clock
        self._lease_us = lease_us
        self._events_max = events_max
        self._begun = time.monotonic()
        self._has_come_again = self._has_seen = False
        self._looked = 0
        self._consumer = self._new()
        tell_when_forked(self)

    @property
    def has_waiting(self) -> bool:
        """Whether there are events that nobody has been given; without the lock, a hint."""
        return self.batch is not None and bool(self.batch.waiting)

    def is_settling_in(self, s: float) -> bool:
        """Whether it came less than that ago and has seen nothing yet."""
        return not self._has_seen and time.monotonic() - self._begun < s

    def poll(self, wait_s: float, token: int) -> list[Any]:
        """What Kafka hands over in that time; it is in the batch of that token then."""
        if not self._has_seen and not self._has_come_again and time.monotonic() - self._begun > _COME_AGAIN_S:
            self._has_come_again = True
            self._replace()
        begun, at = time.monotonic(), self._clock()
        try:
            found = list(self._consumer.poll(wait_s))
        except self._kafka.IllegalStateException:
            self._replace()  # an interrupt fell between Kafka's answer and us: leaving gives back what it held
            return []
        except self._kafka.KafkaException as caught:
            self._failed(caught.args[0])
            return []
        acquired = at
        if self._looked and (at - self._looked < _ON_ITS_WAY_US or time.monotonic() - begun < _WAS_THERE_S):
            acquired = self._looked
        self._looked = 0 if found else at
        errors = [message for message in found if message.error() is not None]
        if errors:
            found = [message for message in found if message.error() is None]
        if found:
            self._has_seen = True
            self.batch = ShareBatch(token, acquired + self._lease_us - _ROUNDED_US)
        for message in errors:
            self._failed(message.error())
        return found

    def settle(self, places: Iterable[Place], kind: int) -> bool:
        """Tells Kafka what became of events of the batch; False when that came too late for those of some partition."""
        assert self.batch is not None
        is_told = True
        try:
            for partition, offset in places:
                self.batch.open.pop((partition, offset), None)
                self._consumer.acknowledge_offset(self._group.physical, partition, offset, kind)
            outcome = self._consumer.commit_sync(_COMMIT_S)
        except self._kafka.IllegalStateException:
            is_told = False
            outcome = {}
        except self._kafka.KafkaException as caught:
            raise self._group.cluster.as_ours(caught.args[0], what="acknowledge events") from None
        finally:
            if not self.batch.open:
                self.batch = None
        for failure in filter(None, outcome.values()):
            if failure.args[0].code() != self._kafka.KafkaError.INVALID_RECORD_STATE:
                raise self._group.cluster.as_ours(failure.args[0], what="acknowledge events")
            is_told = False
        return is_told

    def give_back(self, *, waiting_only: bool = False) -> None:
        """Lets go of the batch, or of what nobody has been given of it; what had ended anyway is somebody else's already."""
        if self.batch is None:
            return
        places = list(self.batch.waiting if waiting_only else self.batch.open)
        self.batch.waiting.clear()
        if places:
            self.settle(places, RELEASE)
        if not waiting_only:
            self.batch = None

    def close(self) -> None:
        """Leaves the group: Kafka gives what it held to others at once."""
        self.batch = None
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _forked(self) -> None:
        """In a child: the consumer is the parent's, and to free it would wait for threads that are not here."""
        _inherited().append(self._consumer)

    def _replace(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
        self._consumer = self._new()

    def _new(self) -> Any:
        interval_ms = round(1000 * max(_HUNG_S_MIN, self._lease_us / 1e6 + _HUNG_AFTER_S))
        consumer = self._group.cluster.share_consumer(
            self._group.id, poll_interval_ms_max=interval_ms, events_max=self._events_max
        )
        consumer.subscribe([self._group.physical])
        return consumer

    def _failed(self, error: Any) -> None:
        """What passes by itself is left to pass; who was away for too long comes again."""
        code = self._kafka.KafkaError
        if error.code() == code.UNSUPPORTED_VERSION:
            raise no_share_groups(self._group.cluster)
        if error.code() == code._MAX_POLL_EXCEEDED:
            self._replace()
        elif error.fatal() or not (error.retriable() or self._group.cluster.passes(error)):
            raise self._group.cluster.as_ours(error, what=f"lease from {self._group.physical!r}")


@cache
def _inherited() -> list[Any]:
    """Consumers of a parent process, kept so that nothing frees them."""
    return []
