"""A case of the contract of groups: a topic of numbers, and members that poll it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from headwater.log.clients.consumer import Consumer
from headwater.log.log import Log
from headwater.model.event import Event
from headwater.testing.contracts.case import NOON

NUMBERS = "n INT, at TIMESTAMP"


def numbered(log: Log, name: str = "t", *, partitions: int = 4, count: int = 100) -> None:
    """A topic of numbers."""
    log.create_topic(name, NUMBERS, key="n", time="at", partitions=partitions)
    append(log, name, range(count))


def append(log: Log, name: str, numbers: Iterable[int]) -> None:
    """More of them, one event a second."""
    log.append(name, [{"n": number, "at": NOON + timedelta(seconds=number)} for number in numbers])


def numbers_of(events: Iterable[Event]) -> list[int]:
    """What the events say, sorted."""
    return sorted(event.value["n"] for event in events)


def drain(*consumers: Consumer, polls_max: int = 200) -> list[Event]:
    """All that is there for these members, in turns, until none of them gets anything for a while."""
    found: list[Event] = []
    quiet = 0
    for _ in range(polls_max):
        events = [event for consumer in consumers for event in consumer.poll(timeout_s=0.02)]
        found += events
        quiet = 0 if events else quiet + 1
        if quiet == 4:
            return found
    raise AssertionError("the members were not done")


def until(condition: Callable[[], Any], *consumers: Consumer, timeout_s: float = 20.0) -> list[Event]:
    """The members poll until something is true; what they got meanwhile."""
    found: list[Event] = []
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        found += [event for consumer in consumers for event in consumer.poll(timeout_s=0.01)]
    return found
