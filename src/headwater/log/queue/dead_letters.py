"""Dead letters: events that a queue could not get done, kept in a topic of their own until they are sent back.

The topic is made when the first one comes, with the columns of the queue's topic. Each dead letter keeps its headers and gets
`_dead_reason`, `_dead_topic`, `_dead_partition`, `_dead_offset`, `_dead_deliveries`, `_dead_at`, and `_group`, the group whose
dead letter it is. That topic is itself read as a queue by that group: what was sent back is acknowledged there.

A dead letter is written under the lock of its partition's window, after the window says that it is on its way. Whoever finds
that after a crash looks for it in the topic first, so it is there once. It is written in one transaction with the acknowledgement of
the event that it was, and sent back in one with its own (see `work`), so that a power loss doubles neither.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from headwater.log.port.topic import Topic
from headwater.log.port.write import Write
from headwater.log.queue.headers import DEAD_PREFIX, DELAY, DELIVER_AT, GROUP, ID, row_again
from headwater.log.transaction import Transaction
from headwater.model.errors import InvalidInput, TopicNotFound
from headwater.model.event import Event

if TYPE_CHECKING:
    from headwater.log.log import Log
    from headwater.log.queue.queue import Queue

_HEADERS_BYTES = 1 << 16
_BATCH_EVENTS = 500
_EVENT_BYTES_MAX = 1 << 30


class DeadLetters:
    """The dead letters of one group on one topic; `dead` names their topic, None where there are none."""

    def __init__(self, log: Log, *, topic: str, group: str, dead: str | None) -> None:
        self._log = log
        self._topic = topic
        self._group = group
        self._dead = dead
        self._mutex = threading.Lock()
        self._queue: Queue | None = None

    def check(self) -> None:
        """Refuses where there is no place for dead letters."""
        if self._dead is None:
            raise InvalidInput(
                f"Topic {self._topic!r} holds dead letters and has none of its own.",
                advice="Acknowledge the event, or give it back.",
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
        assert self._dead is not None
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
                f"{DEAD_PREFIX}at": b"%d" % self._log.clock(),
                GROUP: self._group.encode("utf-8"),
            }
            headers.pop(DELIVER_AT, None)
            headers.pop(DELAY, None)
            headers.pop(ID, None)
            rows.append(row_again(target, event, headers))
        if not rows:
            return
        if not acks:
            self._log.append(target.name, rows)
            return
        with Transaction(self._log, acks) as unit:
            unit.append(target.name, rows)

    def browse(self, events_max: int) -> list[Event]:
        """Those that were not sent back."""
        queue = self._as_queue()
        return [] if queue is None else [entry.event for entry in queue.browse(events_max=events_max)]

    def count(self) -> int:
        """How many there are."""
        queue = self._as_queue()
        if queue is None:
            return 0
        depth = queue.depth()
        return depth.ready + depth.leased + depth.scheduled

    def redrive(self, events_max: int | None) -> int:
        """Sends them back to the queue's topic, for its group only; how many."""
        queue = self._as_queue()
        if queue is None:
            return 0
        target, sent = self._log.store.refresh(self._topic), 0
        while events_max is None or sent < events_max:
            wanted = _BATCH_EVENTS if events_max is None else min(_BATCH_EVENTS, events_max - sent)
            leases = queue.lease(events_max=wanted, timeout_s=0)
            if not leases:
                break
            with self._log.transaction() as unit:
                unit.append(target.name, self._rows_back(target, [lease.event for lease in leases]))
                unit.ack(leases)
            sent += len(leases)
        return sent

    def close(self) -> None:
        """Frees what it opened."""
        if self._queue is not None:
            self._queue.close()

    def _send_back(self, target: Topic, letters: Sequence[Event]) -> None:
        """Appends dead letters to the queue's topic."""
        self._log.append(target.name, self._rows_back(target, letters))

    def _rows_back(self, target: Topic, letters: Sequence[Event]) -> list[dict[str, Any]]:
        """Dead letters as events of the queue's topic, as they were, for the group that they name."""
        rows = []
        for letter in letters:
            old = letter.headers or {}
            headers = {name: raw for name, raw in old.items() if not name.startswith(DEAD_PREFIX)}
            rows.append(row_again(target, letter, headers))
        return rows

    def _as_queue(self) -> Queue | None:
        from headwater.log.queue.queue import Queue

        with self._mutex:
            if self._queue is None and self._dead is not None:
                with suppress(TopicNotFound):
                    self._queue = Queue(self._log, self._dead, group=self._group, is_dead=True)
            return self._queue

    def _open(self) -> Topic:
        """The topic of the dead letters, with all columns that the queue's topic has now."""
        assert self._dead is not None
        topic = self._log.store.topic(self._topic)
        try:
            dead = self._log.store.topic(self._dead)
        except TopicNotFound:
            dead = self._log.create_topic(
                self._dead,
                topic.schema if topic.has_schema else None,
                key=topic.key,
                time=topic.time,
                partitions=topic.partitions,
                durability=topic.durability,
                event_bytes_max=min(_EVENT_BYTES_MAX, topic.event_bytes_max + _HEADERS_BYTES),
                exist_ok=True,
            )
        if dead.has_schema and dead.schema != topic.schema:
            dead = self._log.alter_topic(self._dead, schema=topic.schema)
        return dead

    def _there(self) -> set[tuple[int, int]]:
        """The original places of this group's dead letters; looked for only after a crash."""
        assert self._dead is not None
        places: set[tuple[int, int]] = set()
        wanted = (self._topic.encode("utf-8"), self._group.encode("utf-8"))
        for batch in self._log.scan(self._dead, columns=["_headers"]):
            headers = batch.column("_headers")
            names = [f"{DEAD_PREFIX}topic", GROUP, f"{DEAD_PREFIX}partition", f"{DEAD_PREFIX}offset"]
            columns = [pc.map_lookup(headers, name, "last").to_pylist() for name in names]
            for topic, group, partition, offset in zip(*columns, strict=True):
                if (topic, group) == wanted:
                    places.add((int(partition), int(offset)))
        return places
