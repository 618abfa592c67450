"""A case of the contract: the handles every test of a log begins with, and what each of them says about an error."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from headwater.log.log import Log
from headwater.model.errors import HeadwaterError
from headwater.model.event import Event

OpenLog = Callable[[], Log]

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
ORDERS = "id STRING, amount DOUBLE, at TIMESTAMP"


class LogCase:
    """What the parts of the contract share: `open_log` is for the backend to give, `log` is one handle.

    A backend that cannot keep a part of the promise says so here, and the tests of that part ask for what is left of it.
    """

    dense_offsets = True
    """Offsets have no gaps. False: a transaction may leave some behind it, and events keep their order all the same."""

    transactions_in_one_moment = True
    """All of a transaction becomes visible at once. False: partition by partition, in each of them whole."""

    silence_s = 0.15
    """How short a time without a poll the log can notice."""

    @pytest.fixture
    def open_log(self) -> OpenLog:
        """Opens another handle on the log under test."""
        raise NotImplementedError("a backend's test class gives `open_log`")

    @pytest.fixture
    def log(self, open_log: OpenLog) -> Iterator[Log]:
        """An empty log."""
        with open_log() as log:
            yield log

    @pytest.fixture
    def other(self, open_log: OpenLog, log: Log) -> Iterator[Log]:
        """Another handle on the same log."""
        with open_log() as other:
            yield other


@contextmanager
def refused(kind: type[HeadwaterError], *words: str) -> Iterator[None]:
    """The block is refused with exactly this error, which names these words, says what to do next and can be sent elsewhere."""
    with pytest.raises(HeadwaterError) as caught:
        yield
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    assert error.advice, f"no advice: {error}"
    assert error.code == kind.code
    for word in words:
        assert word in str(error), f"{word!r} is not in: {error}"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.advice) == (kind, str(error), error.advice)


def order(number: int, *, key: str | None = None) -> dict[str, Any]:
    """A row of `ORDERS`; numbers rise with event time."""
    return {"id": key or f"o{number}", "amount": float(number), "at": NOON + timedelta(seconds=number)}


def orders(count: int, *, start: int = 0) -> list[dict[str, Any]]:
    """So many rows of `ORDERS`."""
    return [order(number) for number in range(start, start + count)]


def events_of(log: Log, topic: str | Sequence[str]) -> list[Event]:
    """Every event that is there, in the order of (topic, partition, offset)."""
    found: list[Event] = []
    with log.reader(topic) as reader:
        while events := reader.poll(events_max=10_000, timeout_s=0):
            found += events
    return sorted(found, key=lambda event: (event.topic, event.partition, event.offset))


def values_of(log: Log, topic: str) -> list[Any]:
    """The values of every event that is there, partition after partition."""
    return [event.value for event in events_of(log, topic)]


def values_by_partition(log: Log, topic: str) -> dict[int, list[Any]]:
    """The values in each partition, in the order of offsets."""
    found: dict[int, list[Any]] = {number: [] for number in range(log.topic(topic).partitions)}
    for event in events_of(log, topic):
        found[event.partition].append(event.value)
    return found
