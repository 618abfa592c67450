"""Dead letters: events that a queue could not get done, kept in a topic of their own until they are sent back.

The topic is made when the first one comes, with the columns of the queue's topic. Each dead letter keeps its headers and gets
`_dead_reason`, `_dead_topic`, `_dead_partition`, `_dead_offset`, `_dead_deliveries`, `_dead_at`, and `_group`, the group whose
dead letter it is. `DeadLetterTopic` writes it.

Where queues are windows, that topic is itself read as a queue by that group (`DeadLetterQueue`): what was sent back is acknowledged
there. A dead letter is written under the lock of its partition's window, after the window says that it is on its way. Whoever finds
that after a crash looks for it in the topic first, so it is there once. It is written in one transaction with the acknowledgement of
the event that it was, and sent back in one with its own (see `unit_of_work`), so that a power loss doubles neither.

Where an engine cannot look into a queue, dead letters are read by place (`DeadLettersByPlace`): the engine notes how far those of each
partition were sent back, and the ones behind that are those that there are. They are sent back in order, first appended and then
noted: a crash in between, or two that send back at the same time, send some of them twice. There an event becomes a dead letter before
the engine is told, so a crash in between makes it one twice unless the next member finds the first.

Thread-safety: may be used by many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

import pyarrow.compute as pc

from headwater.log.arrow.events import to_events
from headwater.log.port.lease_engine import SentBack
from headwater.log.port.topic import Topic
from headwater.log.port.write import Write
from headwater.log.queue.depth import Depth, QueueEntry
from headwater.log.queue.headers import DEAD_PREFIX, DELAY, DELIVER_AT, GROUP, ID, is_for_others, row_again
from headwater.log.queue.lease import Lease
from headwater.log.queue.queue_log import QueueLog
from headwater.log.queue.settings import REDRIVE_EVENTS
from headwater.log.transaction import Transaction
from headwater.model.errors import InvalidInput, TopicNotFound
from headwater.model.event import Event

_HEADERS_BYTES = 1 << 16
_READ_EVENTS = 10_000
_EVENT_BYTES_MAX = 1 << 30


class DeadLetters(Protocol):
    """The dead letters of one group on one topic that were not sent back."""

    def browse(self, events_max: int) -> list[Event]:
        """The first of them."""

    def count(self) -> int:
        """How many there are."""

    def redrive(self, events_max: int | None) -> int:
        """Sends them back to the queue's topic, for its group only; how many."""

    def close(self) -> None:
        """Frees what it opened."""


class DeadLetterTopic:
    """The topic of one group's dead letters on one topic."""

    def __init__(self, log: QueueLog, *, topic: str, group: str, name: str | None) -> None:
        """`name` is None where there is no place for dead letters: they have none of their own."""
        self.name = name
        self.group = group
        self.log = log
        self._topic = topic

    def check(self) -> None:
        """Refuses where there is no place for dead letters."""
        if self.name is None:
            raise InvalidInput(
                f"Topic {self._topic!r} holds dead letters, and dead letters cannot be rejected again.",
                advice="Acknowledge the event, or give it back with nack.",
            )

    def bury(
        self,
        events: Sequence[Event],
        deliveries: Sequence[int],
        reasons: Sequence[str],
        begun: Sequence[bool],
        *,
        acks: Sequence[Write] = (),
    ) -> None:
        """Writes dead letters, together with their `acks`; of those that were `begun` before, only what is not there yet."""
        assert self.name is not None
        target = self._open()
        there = self._there() if any(begun) else set()
        rows = []
        for event, count, reason, was_begun in zip(events, deliveries, reasons, begun, strict=True):
            if was_begun and (event.partition, event.offset) in there:
                continue
            headers = dict(event.headers or {}) | {
                f"{DEAD_PREFIX}reason": reason.encode("utf-8"),
                f"{DEAD_PREFIX}topic": self._topic.encode("utf-8"),
                f"{DEAD_PREFIX}partition": b"%d" % event.partition,
                f"{DEAD_PREFIX}offset": b"%d" % event.offset,
                f"{DEAD_PREFIX}deliveries": b"%d" % count,
                f"{DEAD_PREFIX}at": b"%d" % self.log.clock(),
                GROUP: self.group.encode("utf-8"),
            }
            headers.pop(DELIVER_AT, None)
            headers.pop(DELAY, None)
            headers.pop(ID, None)
            rows.append(row_again(target, event, headers))
        if not rows:
            return
        if not acks:
            self.log.append(target.name, rows)
            return
        with Transaction(self.log, acks) as unit:
            unit.append(target.name, rows)

    def home(self) -> Topic:
        """The queue's topic as it is now."""
        return self.log.store.refresh(self._topic)

    def rows_back(self, home: Topic, letters: Sequence[Event]) -> list[dict[str, Any]]:
        """Dead letters as events of the queue's topic, as they were, for the group that they name."""
        rows = []
        for letter in letters:
            old = letter.headers or {}
            headers = {name: raw for name, raw in old.items() if not name.startswith(DEAD_PREFIX)}
            rows.append(row_again(home, letter, headers))
        return rows

    def _open(self) -> Topic:
        """The topic of the dead letters, with all columns that the queue's topic has now."""
        assert self.name is not None
        topic = self.log.store.topic(self._topic)
        try:
            dead = self.log.store.topic(self.name)
        except TopicNotFound:
            dead = self.log.create_topic(
                self.name,
                topic.schema if topic.has_schema else None,
                key=topic.key,
                time=topic.time,
                partitions=topic.partitions,
                durability=topic.durability,
                event_bytes_max=min(_EVENT_BYTES_MAX, topic.event_bytes_max + _HEADERS_BYTES),
                exist_ok=True,
            )
        if dead.has_schema and dead.schema != topic.schema:
            dead = self.log.alter_topic(self.name, schema=topic.schema)
        return dead

    def _there(self) -> set[tuple[int, int]]:
        """The original places of this group's dead letters; looked for only after a crash."""
        assert self.name is not None
        places: set[tuple[int, int]] = set()
        wanted = (self._topic.encode("utf-8"), self.group.encode("utf-8"))
        for batch in self.log.scan(self.name, columns=["_headers"]):
            headers = batch.column("_headers")
            names = [f"{DEAD_PREFIX}topic", GROUP, f"{DEAD_PREFIX}partition", f"{DEAD_PREFIX}offset"]
            columns = [pc.map_lookup(headers, name, "last").to_pylist() for name in names]
            for topic, group, partition, offset in zip(*columns, strict=True):
                if (topic, group) == wanted:
                    places.add((int(partition), int(offset)))
        return places


class ReadQueue(Protocol):
    """A queue over a topic of dead letters, as far as it is used here."""

    def browse(self, *, events_max: int = ...) -> list[QueueEntry]: ...

    def depth(self) -> Depth: ...

    def lease(self, *, events_max: int = ..., timeout_s: float = ...) -> list[Lease]: ...

    def close(self) -> None: ...


class DeadLetterQueue:
    """Dead letters read as a queue of their own."""

    def __init__(self, topic: DeadLetterTopic, open_queue: Callable[[str], ReadQueue]) -> None:
        self._topic = topic
        self._open_queue = open_queue
        self._mutex = threading.Lock()
        self._queue: ReadQueue | None = None

    def browse(self, events_max: int) -> list[Event]:
        queue = self._opened()
        return [] if queue is None else [entry.event for entry in queue.browse(events_max=events_max)]

    def count(self) -> int:
        queue = self._opened()
        if queue is None:
            return 0
        depth = queue.depth()
        return depth.ready + depth.leased + depth.scheduled

    def redrive(self, events_max: int | None) -> int:
        queue = self._opened()
        if queue is None:
            return 0
        home, sent = self._topic.home(), 0
        while events_max is None or sent < events_max:
            wanted = REDRIVE_EVENTS if events_max is None else min(REDRIVE_EVENTS, events_max - sent)
            leases = queue.lease(events_max=wanted, timeout_s=0)
            if not leases:
                break
            with Transaction(self._topic.log) as unit:
                unit.append(home.name, self._topic.rows_back(home, [lease.event for lease in leases]))
                unit.ack(leases)
            sent += len(leases)
        return sent

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()

    def _opened(self) -> ReadQueue | None:
        with self._mutex:
            if self._queue is None and self._topic.name is not None:
                with suppress(TopicNotFound):
                    self._queue = self._open_queue(self._topic.name)
            return self._queue


class DeadLettersByPlace:
    """Dead letters read from the places up to which they were sent back."""

    def __init__(self, topic: DeadLetterTopic, sent_back: SentBack) -> None:
        self._topic = topic
        self._sent_back = sent_back

    def browse(self, events_max: int) -> list[Event]:
        return list(islice(self._letters(), events_max))

    def count(self) -> int:
        return sum(1 for _ in self._letters())

    def redrive(self, events_max: int | None) -> int:
        home, letters, sent = self._topic.home(), self._letters(), 0
        while events_max is None or sent < events_max:
            wanted = REDRIVE_EVENTS if events_max is None else min(REDRIVE_EVENTS, events_max - sent)
            some = list(islice(letters, wanted))
            if not some:
                break
            self._topic.log.append(home.name, self._topic.rows_back(home, some))
            assert self._topic.name is not None
            topic_id = self._topic.log.store.topic(self._topic.name).id
            self._sent_back.note(topic_id, {letter.partition: letter.offset + 1 for letter in some})
            sent += len(some)
        return sent

    def close(self) -> None:
        """Nothing is open."""

    def _letters(self) -> Iterator[Event]:
        """Those that were not sent back, partition after partition."""
        name, store = self._topic.name, self._topic.log.store
        assert name is not None
        try:
            places = self._sent_back.places(store.refresh(name).id)
            bounds = store.bounds([name])
        except TopicNotFound:
            return
        for (_, number), bound in bounds.items():
            cursor = store.cursor(name, number, offset=max(bound.first, places.get(number, 0)))
            while cursor.offset < bound.end:
                for chunk in cursor.read(bound.end, events_max=_READ_EVENTS):
                    others = is_for_others(chunk, self._topic.group).tolist()
                    yield from (event for event, other in zip(to_events(chunk), others, strict=True) if not other)
