"""Arrivals: a source that has nothing to read waits until something comes, and misses nothing.

A wait in these tests would last for hours. So each of them ends only if what it is about ends the wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import headwater as hw
from headwater.log.disk.wait import PollingWaiter
from headwater.log.file.handles import Handles
from headwater.log.file.store import LocalStore
from headwater.log.log import Log
from headwater.processing.source import arrivals
from headwater.processing.source.arrivals import Arrivals
from headwater.processing.source.load import Load
from headwater.processing.source.spark_source import HeadwaterSource
from headwater.processing.source.stream import StreamReader
from headwater.processing.stages.supervisor import is_in_a_batch

NEVER_S = 3600.0
SCHEMA = "id BIGINT, at TIMESTAMP"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    for name in ("WAIT_S", "LOOK_S", "WAIT_UNSIGNALLED_S"):
        monkeypatch.setattr(arrivals, name, NEVER_S)
    with hw.open_log(tmp_path / "log") as log:
        for name in ("orders", "returns"):
            log.create_topic(name, SCHEMA, key="id", time="at", partitions=2)
        yield log


@pytest.fixture
def waiting(log: Log) -> Iterator[Arrivals]:
    """A source of a query over both topics, which has been asked once."""
    with hw.open_log(log.url, read_only=True) as read:
        found = Arrivals(read, ("orders", "returns"))
        found.wait(is_idle=False)
        yield found


def put(log: Log, topic: str = "orders") -> None:
    log.append(topic, [{"id": 1, "at": "2026-01-31T12:00:00Z"}])


def alter(log: Log) -> None:
    log.alter_topic("orders", schema=f"{SCHEMA}, note STRING")


def beat(log: Log) -> None:
    log.heartbeat("orders", "2026-01-31T12:00:00Z")


ARRIVING: dict[str, Callable[[Log], object]] = {
    "an event": put,
    "an event of another input": lambda log: put(log, "returns"),
    "a heartbeat": beat,
    "more partitions": lambda log: log.alter_topic("orders", partitions=4),
    "another schema": alter,
    "a deletion": lambda log: log.delete_topic("orders"),
}


@pytest.mark.parametrize("arrive", ARRIVING.values(), ids=ARRIVING.keys())
def test_what_comes_while_it_waits_ends_the_wait(log: Log, waiting: Arrivals, arrive: Callable[[Log], object]) -> None:
    """Whatever may change the answer of a source of the query is an arrival."""
    thread = threading.Thread(target=waiting.wait, kwargs={"is_idle": True}, daemon=True)
    thread.start()
    arrive(log)
    thread.join()


@pytest.mark.parametrize("arrive", ARRIVING.values(), ids=ARRIVING.keys())
def test_what_came_since_the_last_wait_ends_the_next(
    log: Log, waiting: Arrivals, arrive: Callable[[Log], object]
) -> None:
    """Nothing is missed between two questions of Spark."""
    arrive(log)
    waiting.wait(is_idle=True)


def test_a_lost_signal_costs_one_look(log: Log, waiting: Arrivals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer may be killed when its events are in the log and the signal is not given."""
    monkeypatch.setattr(arrivals, "LOOK_S", 0.01)
    monkeypatch.setattr(Handles, "signal", lambda self, name: None)
    thread = threading.Thread(target=waiting.wait, kwargs={"is_idle": True}, daemon=True)
    thread.start()
    put(log)
    thread.join()


def test_a_topic_that_was_created_again_gives_signals_again(log: Log, waiting: Arrivals) -> None:
    """The new topic has other files than those that were watched."""
    log.delete_topic("orders")
    waiting.wait(is_idle=True)
    log.create_topic("orders", SCHEMA, key="id", time="at")
    waiting.wait(is_idle=True)
    put(log)
    waiting.wait(is_idle=True)


def test_without_signals_it_looks(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka has none, and a machine gives a user so many inotify instances and no more."""
    monkeypatch.setattr(LocalStore, "waiter", lambda self, names: PollingWaiter())
    with hw.open_log(log.url, read_only=True) as read:
        waiting = Arrivals(read, ("orders",))
        for is_idle in (False, True):
            waiting.wait(is_idle=is_idle)
        thread = threading.Thread(target=waiting.wait, kwargs={"is_idle": True}, daemon=True)
        thread.start()
        put(log)
        thread.join()


class Asked:
    """A source as Spark asks it; `waits` says of each question whether the answer was waited for."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
        given = {"log": url, "topic": "orders", "startingOffsets": "earliest", "awaits": "orders,returns", **options}
        self.reader = StreamReader(Load(given, HeadwaterSource(given).schema(), "stream"))
        self.waits: list[bool] = []
        monkeypatch.setattr(Arrivals, "wait", lambda _, is_idle: self.waits.append(is_idle))

    def ask(self, start: dict[str, Any]) -> dict[str, Any]:
        end = self.reader.latestOffset(start, ReadAllAvailable())
        self.reader.reportLatestOffset()
        return end


def test_the_second_question_that_has_the_same_answer_waits(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first one: behind its answer Spark sees whether its operators need a batch without events."""
    put(log)
    asked = Asked(log.url, monkeypatch)
    start = asked.reader.initialOffset()
    end = asked.ask(start)
    asked.reader.partitions(start, end)
    for _ in range(3):
        assert asked.ask(end) == end
    assert asked.waits == [False, False, True, True]


def test_a_batch_without_events_is_no_reason_to_wait(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's own operators by processing time need one batch after the other; of those a source sees only its commit."""
    asked = Asked(log.url, monkeypatch)
    end = asked.reader.initialOffset()
    for _ in range(3):
        end = asked.ask(end)
        asked.reader.commit(end)
    assert asked.waits == [False, False, False]


def test_a_run_over_what_is_there_never_waits(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends where there is nothing more."""
    asked = Asked(log.url, monkeypatch)
    asked.reader.prepareForTriggerAvailableNow()
    end = asked.reader.initialOffset()
    for _ in range(3):
        end = asked.ask(end)
    assert asked.waits == []


def test_a_source_outside_of_an_application_never_waits(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's `processAllAvailable` waits for a query that has nothing to do, and would wait for the source as well."""
    asked = Asked(log.url, monkeypatch, awaits="")
    end = asked.reader.initialOffset()
    for _ in range(3):
        end = asked.ask(end)
    assert asked.waits == []


@pytest.mark.parametrize(
    ("message", "is_trigger_active", "is_waited_for"),
    [
        ("Getting offsets from PythonMicroBatchStream@1", True, False),
        ("Waiting for data to arrive", False, False),
        ("Writing offsets to log", True, True),
        ("Processing new data", True, True),
    ],
)
def test_a_stop_waits_for_a_batch_and_not_for_a_source_that_waits(
    message: str, is_trigger_active: bool, is_waited_for: bool
) -> None:
    """Spark calls both an active trigger."""

    query: Any = SimpleNamespace(status={"message": message, "isTriggerActive": is_trigger_active})
    assert is_in_a_batch(query) == is_waited_for
