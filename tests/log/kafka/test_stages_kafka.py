"""Stages on a real Kafka: the contract, and what a killed holder leaves."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

import headwater as hw
from headwater.log.kafka.store import KafkaStore
from headwater.model.errors import CheckpointConflict, Fenced
from headwater.processing.sink.batch_order import Order
from headwater.testing.contracts.case import OpenLog, refused, values_of
from headwater.testing.contracts.stages import StageContract, marker, rows
from headwater.testing.servers.kafka import KafkaServer
from tests.rigs.log.stage_holder import EPOCHS as HOLDER_EPOCHS
from tests.rigs.processing.task_writer import EPOCHS, TASK_EVENTS, TASKS, write_as, write_batch

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
ORDERS: tuple[Order | None, ...] = ("times", None)

pytestmark = pytest.mark.service("kafka")


@pytest.fixture(scope="module")
def fresh_urls(kafka: KafkaServer) -> Iterator[Iterator[str]]:
    """Addresses of empty logs; one handle keeps the clients open from test to test."""
    with hw.open_log(f"kafka://{kafka.bootstrap}"):
        yield (f"kafka://{kafka.bootstrap}?prefix=s{number}." for number in itertools.count())


@pytest.fixture
def url(fresh_urls: Iterator[str]) -> str:
    """The address of an empty log."""
    return next(fresh_urls)


class TestKafkaStages(StageContract):
    """A transaction holds events and marker; where the events of an earlier one stand is not kept."""

    backend = "kafka"
    dense_offsets = False
    transactions_in_one_moment = False
    keeps_positions = False

    @pytest.fixture
    def open_log(self, url: str) -> OpenLog:
        return lambda: hw.open_log(url)


def start(url: str, *words: str) -> subprocess.Popen[str]:
    """A process of its own: the client cannot be forked."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[2] / "rigs" / "log" / "stage_holder.py"), url, *words],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_holder_is_killed_in_its_transaction(url: str) -> None:
    """The next one rolls it back before it looks, and goes on: every batch once."""
    with hw.open_log(url) as log:
        log.create_topic("b", "n INT, k STRING", key="k", partitions=1)
        for killed_in in (1, 3):
            with start(url, "commit", str(killed_in)) as holder:
                assert holder.wait(60) == -signal.SIGKILL
        with start(url, "commit", "-1") as holder:
            assert holder.wait(60) == 0
        assert [value["n"] for value in values_of(log, "b")] == list(range(HOLDER_EPOCHS))


def test_a_holder_that_slept_is_fenced_by_the_brokers(url: str) -> None:
    """Even if it looked at its number before the other came."""
    with hw.open_log(url) as log:
        log.create_topic("b", "n INT, k STRING", key="k", partitions=1)
        with start(url, "sleep") as zombie:
            assert zombie.stdout is not None
            assert zombie.stdout.readline() == "asleep\n"
            stage = log.stage("s")
            os.kill(zombie.pid, signal.SIGCONT)
            assert zombie.stdout.read() == "fenced by the brokers\nfenced by the number\n"
            assert zombie.wait(60) == 0
        assert stage.last == hw.Marker(query="q", epoch=0, ends={"in": {"0": 10}}, stage="s")
        assert not stage.commit(marker(0), [("b", rows(0))]).written
        assert [value["n"] for value in values_of(log, "b")] == [0]


@pytest.mark.covers("Trident", backends=["kafka"])
def test_tasks_are_killed_in_and_after_their_transactions(url: str, tmp_path: Path) -> None:
    """Each task of a batch commits by itself: whoever dies, a batch that is run again leaves the topic as it was."""
    with hw.open_log(url) as log:
        log.create_topic("b", "n INT, k STRING", key="k", partitions=2)
        # A process opens a stage in one transaction and commits its batch in the next. So: task 0 has sent everything and not
        # committed; it is stored and nobody has heard of it; both are stored and the driver does not know; the next batch is begun.
        deaths = ["2:before", "2:after", "3:after", "3:before"]
        program = [
            sys.executable,
            str(Path(__file__).parents[2] / "rigs" / "processing" / "task_writer.py"),
            url,
            str(tmp_path / "checkpoint"),
        ]
        ended = subprocess.run([*program, *deaths], stdout=subprocess.PIPE, text=True, timeout=120)
        assert ended.stdout.split() == [str(-signal.SIGKILL)] * len(deaths) + ["0"]
        stored = [value["n"] for value in values_of(log, "b")]
        assert sorted(stored) == list(range(EPOCHS * TASKS * TASK_EVENTS))
        for number in range(TASKS):
            last = log.store.stage_state(f"s.{number}").last
            assert last is not None and last.epoch == EPOCHS - 1


def test_a_task_that_is_run_again_writes_nothing(url: str, tmp_path: Path) -> None:
    """It finds its marker; what does not follow the last one is refused."""
    with hw.open_log(url) as log:
        log.create_topic("b", "n INT, k STRING", key="k", partitions=2)
        write_as(log, tmp_path / "checkpoint", 0, 0, range(10))
        for _ in range(2):
            for number in range(2):
                write_as(log, tmp_path / "checkpoint", 0, number, range(10 * number, 10 * number + 10))
        write_as(log, tmp_path / "checkpoint", 1, 1, range(0))
        write_as(log, tmp_path / "checkpoint", 2, 1, range(20, 30))
        assert sorted(value["n"] for value in values_of(log, "b")) == list(range(30))
        assert log.stages() == ["s.0", "s.1"]
        with refused(CheckpointConflict, "'s.1'", "older"):
            write_as(log, tmp_path / "checkpoint", 0, 1, range(10, 20))
        with refused(CheckpointConflict, "planned again"):
            log.stage("s.0").commit(hw.Marker(query="q", epoch=0, ends=[7]), [("b", rows(99))])
        assert sorted(value["n"] for value in values_of(log, "b")) == list(range(30))


def test_a_task_appends_its_rows_by_event_time(url: str, tmp_path: Path) -> None:
    """An operator gives its rows by the hash of its own key. With the order that its application gives the task, each partition of the
    topic has them by time, and none is late there; without it many are."""
    schema = StructType(
        [StructField("n", IntegerType()), StructField("k", StringType()), StructField("at", TimestampType())]
    )
    given = Random(1).sample(range(500), 500)
    columns = {
        "n": pa.array(given, pa.int32()),
        "k": [f"k{n % 7}" for n in given],
        "at": pa.array([NOON + timedelta(seconds=n) for n in given], pa.timestamp("us", tz="UTC")),
    }
    with hw.open_log(url) as log:
        log.create_topic("b", "n INT, k STRING, at TIMESTAMP", key="k", time="at", lateness="5 seconds", partitions=3)
        for epoch, order in enumerate(ORDERS):
            before = {number: span.stop for number, span in log.offsets("b").items()}
            write_batch(log, tmp_path, epoch, 0, schema=schema, batch=pa.record_batch(columns), order=order)
            events = log.read("b", columns=["n", "_partition", "_offset"]).sort_by("_offset").to_pylist()
            mine = [row for row in events if row["_offset"] >= before[row["_partition"]]]
            assert sorted(row["n"] for row in mine) == sorted(given)
            parts = [[row["n"] for row in mine if row["_partition"] == number] for number in before]
            assert min(map(len, parts)) > 50
            assert [part == sorted(part) for part in parts] == [order == "times"] * 3, order


def test_a_holder_need_not_open_its_stage_again(url: str) -> None:
    """As long as nobody else did: whoever opens it is the only one who holds it."""
    with hw.open_log(url) as log, hw.open_log(url) as other:
        log.create_topic("b", "n INT, k STRING", key="k", partitions=1)
        assert isinstance(log.store, KafkaStore) and isinstance(other.store, KafkaStore)
        assert log.store.held_stage("s") is None
        stage = log.stage("s")
        stage.commit(marker(0), [("b", rows(0))])
        assert log.store.held_stage("s") == stage.number
        with start(url, "commit", "-1") as holder:
            assert holder.wait(60) == 0
        assert log.store.held_stage("s") is None
        with refused(Fenced, "opened again"):
            stage.commit(marker(HOLDER_EPOCHS), [("b", rows(1))])
        assert [value["n"] for value in values_of(log, "b")] == list(range(HOLDER_EPOCHS))
