"""Arrivals: how a source that has nothing to read waits until something comes, instead of being asked again and again.

Spark asks every source of a query for its end, every 10 ms while there is nothing to do. A source of an application answers the second
time only when something has come to one of the topics of its query, or when `WAIT_S` are over.

Invariants:
- All sources of a query wait for the topics of all of them, because Spark asks one after the other.
- What comes after a call of `wait` ends the next one. So each source of the query is asked once after each arrival.
- A signal may be lost, with a writer that was killed or a topic that was created again. So the log is looked at every `LOOK_S` as well.

Where the log gives no signals (Kafka, or a machine with no inotify left) it is looked at more often, and a wait is short.

Thread-safety: none. One source uses it, in the process in which Spark plans.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import Any

from headwater.log.log import Log
from headwater.log.port.store import Waiter
from headwater.model.backoff import Backoff
from headwater.model.errors import HeadwaterError

WAIT_S = 60.0
LOOK_S = 10.0
WAIT_UNSIGNALLED_S = 1.0
LOOK_UNSIGNALLED_S = (0.01, 0.1)
"""The first pause between two looks where there are no signals, and the longest."""


class Arrivals:
    """What may come to the topics of one query."""

    def __init__(self, log: Log, topics: Sequence[str]) -> None:
        self._log = log
        self._topics = topics
        self._waiter: Waiter | None = None
        self._seen: Any = None

    def wait(self, *, is_idle: bool) -> None:
        """Returns when something has come since the last call; at once unless `is_idle`, and at the latest when the time is over."""
        waiter = self._waiter or self._renewed()
        has_signals = waiter.fileno() is not None
        deadline = time.monotonic() + (0.0 if not is_idle else WAIT_S if has_signals else WAIT_UNSIGNALLED_S)
        backoff = Backoff(*LOOK_UNSIGNALLED_S, jitter=0.0)
        is_told = _is_told(waiter, 0.0)
        while not is_told and (left_s := deadline - time.monotonic()) > 0 and self._is_as_seen():
            is_told = _is_told(waiter, min(left_s, LOOK_S if has_signals else backoff.next_s()))
        if is_idle and not is_told:
            self._renewed()
        self._seen = self._held() if is_idle or has_signals else None  # of Kafka it is a question more, for each batch

    def _renewed(self) -> Waiter:
        """A waiter on the files that the topics have now: a topic that was created again has others."""
        if self._waiter is not None:
            self._waiter.close()
        self._waiter = self._log.store.waiter(self._topics)
        return self._waiter

    def _is_as_seen(self) -> bool:
        held = self._held()
        return held is not None and held == self._seen

    def _held(self) -> Any:
        """What an answer of a source depends on; None where a topic is gone, which the source reports."""
        try:
            topics = [self._log.topic(name) for name in self._topics]
            bounds = self._log.store.bounds(self._topics)
        except HeadwaterError:
            return None
        return [(topic.id, topic.schema_id) for topic in topics], {at: bound.end for at, bound in bounds.items()}


def _is_told(waiter: Waiter, timeout_s: float) -> bool:
    """Waits for a signal; False after the time."""
    handle = waiter.fileno()
    if handle is None:
        time.sleep(timeout_s)
        return False
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    if not poll.poll(timeout_s * 1000):
        return False
    waiter.wait(0.0)
    return True
