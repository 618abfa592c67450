"""Dead letters of a queue on Kafka: the same topic and headers as everywhere, read by place instead of as a queue.

A share group cannot be browsed. So the record of the queue (see `share_group`) says how far the dead letters of each partition
were sent back, and those behind that are the ones there are. They are sent back in order, first appended and then noted: a crash in
between, or two that send back at the same time, send some of them twice.

An event becomes a dead letter before Kafka is told, so a crash in between makes it one twice unless the next member finds the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from headwater.log.arrow.events import to_events
from headwater.log.kafka.queue.share_group import QueueRecords
from headwater.log.queue.dead_letters import DeadLetters
from headwater.log.queue.headers import is_for_others
from headwater.model.errors import TopicNotFound
from headwater.model.event import Event

if TYPE_CHECKING:
    from headwater.log.log import Log

_READ_EVENTS = 10_000
_BATCH_EVENTS = 500


class KafkaDeadLetters(DeadLetters):
    """The dead letters of one group on one topic."""

    def __init__(self, log: Log, records: QueueRecords, *, topic: str, group: str, dead: str | None) -> None:
        super().__init__(log, topic=topic, group=group, dead=dead)
        self._records = records

    def browse(self, events_max: int) -> list[Event]:
        return list(islice(self._letters(), events_max))

    def redrive(self, events_max: int | None) -> int:
        target, letters, sent = self._log.store.refresh(self._topic), self._letters(), 0
        while events_max is None or sent < events_max:
            wanted = _BATCH_EVENTS if events_max is None else min(_BATCH_EVENTS, events_max - sent)
            some = list(islice(letters, wanted))
            if not some:
                break
            self._send_back(target, some)
            self._note({letter.partition: letter.offset + 1 for letter in some})
            sent += len(some)
        return sent

    def _letters(self) -> Iterator[Event]:
        """Those that were not sent back, partition after partition."""
        assert self._dead is not None
        store = self._log.store
        try:
            noted = self._noted(store.refresh(self._dead).id)
            bounds = store.bounds([self._dead])
        except TopicNotFound:
            return
        for (_, number), bound in bounds.items():
            cursor = store.cursor(self._dead, number, offset=max(bound.first, noted.get(number, 0)))
            while cursor.offset < bound.end:
                for chunk in cursor.read(bound.end, events_max=_READ_EVENTS):
                    others = is_for_others(chunk, self._group).tolist()
                    yield from (event for event, other in zip(to_events(chunk), others, strict=True) if not other)

    def _noted(self, dead_id: str) -> dict[int, int]:
        """Where each partition's dead letters begin that were not sent back; a topic made anew begins anew."""
        made = self._records.get(self._topic, self._group) or {}
        noted = made.get("sent_back", {})
        return {int(number): at for number, at in noted.get("to", {}).items()} if noted.get("id") == dead_id else {}

    def _note(self, places: dict[int, int]) -> None:
        assert self._dead is not None
        dead_id = self._log.store.topic(self._dead).id
        noted = self._noted(dead_id) | places
        made = self._records.get(self._topic, self._group)
        assert made is not None
        self._records.put(made | {"sent_back": {"id": dead_id, "to": {str(n): at for n, at in noted.items()}}})
