"""A transaction that somebody else holds open on Kafka: readers stand before it, and nothing is sent twice because of that."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import headwater as hw
from headwater.log.kafka import writer as kafka_writer
from headwater.model.errors import Unreachable
from headwater.testing.contracts.case import refused, values_of
from headwater.testing.contracts.stages import marker, rows
from headwater.testing.servers.kafka import KafkaServer
from tests.rigs.services import fresh_logs

pytestmark = pytest.mark.service("kafka")

IMPORTER = """
import sys
import headwater

with headwater.open_log(sys.argv[1]) as log, log.producer(id="importer") as producer:
    print("opened", flush=True)
    sys.stdin.readline()
    for receipt in [producer.send("numbers", {"n": n}, sequence=n) for n in range(10)]:
        receipt.result()
    print("acknowledged", flush=True)
"""


@pytest.fixture(scope="module")
def fresh_urls(kafka: KafkaServer) -> Iterator[Iterator[str]]:
    """Addresses of empty logs; one handle keeps the clients open from test to test."""
    yield from fresh_logs(kafka)


@pytest.fixture
def url(fresh_urls: Iterator[str]) -> str:
    """The address of an empty log."""
    return next(fresh_urls)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for readers gives up soon."""
    monkeypatch.setattr(kafka_writer, "_VISIBLE_S", 0.3)


@contextmanager
def held_open(log: hw.Log, topic: str, tmp_path: Path) -> Iterator[None]:
    """A transaction of a stranger that has written to a topic of the log, and is rolled back at the end of the block."""
    store: Any = log.store
    settings = {"bootstrap.servers": store._cluster.address.brokers, "transactional.id": f"stranger.{tmp_path}"}
    stranger = store._cluster.kafka.Producer({**settings, "transaction.timeout.ms": 120_000})
    stranger.init_transactions(20)
    stranger.begin_transaction()
    stranger.produce(f"{store._prefix}{topic}", b"0", b"nobody/nothing/0", 0)
    assert stranger.flush(20) == 0
    try:
        yield
    finally:
        stranger.abort_transaction(20)


def numbers(log: hw.Log) -> list[int]:
    return [value["n"] for value in values_of(log, "numbers")]


@pytest.mark.usefixtures("impatient")
def test_a_named_producer_that_was_killed_does_not_send_again(url: str, tmp_path: Path) -> None:
    """Whoever takes its name waits until everything that it committed can be seen, or is refused."""
    with hw.open_log(url) as log, start_importer(log, url) as importer:
        with held_open(log, "__headwater.producers", tmp_path):
            killed_when_stored(log, importer)
            with refused(Unreachable, "not visible"):
                log.producer(id="importer")
        send_numbers(log, 12)
        assert numbers(log) == list(range(12))


def test_a_named_producer_waits_for_what_was_committed_in_its_name(url: str, tmp_path: Path) -> None:
    """It is opened when the transaction that is in the way has ended, and goes on where the one before it was killed."""
    with hw.open_log(url) as log, start_importer(log, url) as importer, ThreadPoolExecutor() as pool:
        with held_open(log, "__headwater.producers", tmp_path):
            killed_when_stored(log, importer)
            opening = pool.submit(send_numbers, log, 12)
            time.sleep(1.0)  # long enough for one that does not wait
        opening.result(60)
        assert numbers(log) == list(range(12))


@contextmanager
def start_importer(log: hw.Log, url: str) -> Iterator[subprocess.Popen[str]]:
    """A named producer in a process of its own that is open, and has sent nothing yet."""
    log.create_topic("numbers", "n BIGINT", partitions=1)
    command = [sys.executable, "-c", IMPORTER, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as importer:
        assert importer.stdout is not None and importer.stdout.readline() == "opened\n"
        try:
            yield importer
        finally:
            importer.kill()


def killed_when_stored(log: hw.Log, importer: subprocess.Popen[str]) -> None:
    """Lets it send, and kills it when its events are stored and it has not heard of it."""
    assert importer.stdin is not None and importer.stdout is not None
    importer.stdin.write("go\n")
    importer.stdin.flush()
    deadline = time.monotonic() + 60
    while numbers(log) != list(range(10)):
        assert importer.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    importer.send_signal(signal.SIGKILL)
    assert importer.wait(20) == -signal.SIGKILL
    assert importer.stdout.read() == ""


def send_numbers(log: hw.Log, count: int) -> None:
    """What an importer does that begins again from its first event."""
    with log.producer(id="importer") as producer:
        for n in range(count):
            producer.send("numbers", {"n": n}, sequence=n)


@pytest.mark.usefixtures("impatient")
def test_a_stored_event_of_a_named_producer_is_acknowledged_and_not_sent_again(url: str, tmp_path: Path) -> None:
    """Nobody has to see its number for that: the producer knows what it has committed."""
    with hw.open_log(url) as log:
        log.create_topic("numbers", "n BIGINT", partitions=1)
        with log.producer(id="importer") as producer:
            producer.send("numbers", {"n": 0}, sequence=0).result()
            with held_open(log, "__headwater.producers", tmp_path):
                for _ in range(2):
                    producer.send("numbers", {"n": 1}, sequence=1).result()
        assert numbers(log) == [0, 1]


@pytest.mark.usefixtures("impatient")
def test_a_stage_whose_marker_nobody_sees_yet_does_not_write_its_batch_again(url: str, tmp_path: Path) -> None:
    """It looks at its marker when that can be seen, and not before; whoever opens the stage again waits for it, too."""
    with hw.open_log(url) as log:
        log.create_topic("b", "n INT, k STRING", key="k", partitions=1)
        stage = log.stage("s")
        with held_open(log, "__headwater.stages", tmp_path):
            assert stage.commit(marker(0), [("b", rows(0))]).written
            for again in (0, 1):
                with refused(Unreachable, "not visible"):
                    stage.commit(marker(again), [("b", rows(again))])
            with refused(Unreachable, "not visible"):
                log.stage("s")
        stage = log.stage("s")
        assert not stage.commit(marker(0), [("b", rows(0))]).written
        assert stage.commit(marker(1), [("b", rows(1))]).written
        assert [value["n"] for value in values_of(log, "b")] == [0, 1]


@pytest.mark.usefixtures("impatient")
def test_a_change_of_the_catalog_that_nobody_sees_yet_is_not_lost(url: str, tmp_path: Path) -> None:
    """The next change is decided on what it left, and not on what was before it."""
    with hw.open_log(url) as log:
        log.create_topic("t", "n INT", partitions=1)
        with held_open(log, "__headwater.topics", tmp_path):
            for change in ({"schema": "n INT, m INT"}, {"event_bytes_max": 5000}):
                with refused(Unreachable, "not visible"):
                    log.alter_topic("t", **change)
        log.alter_topic("t", event_bytes_max=5000)
        topic = log.store.topic("t")
        assert (topic.schema.names, topic.event_bytes_max) == (["n", "m"], 5000)


@pytest.mark.usefixtures("impatient")
def test_a_transaction_that_is_stored_does_not_raise(url: str, tmp_path: Path) -> None:
    """Done again, as an error would advise, it would be there twice; readers see it when the one in the way has ended."""
    with hw.open_log(url) as log:
        log.create_topic("b", "n INT, k STRING", key="k", partitions=1)
        with held_open(log, "b", tmp_path):
            with log.transaction() as transaction:
                transaction.append("b", rows(0))
            assert values_of(log, "b") == []
        assert [value["n"] for value in values_of(log, "b")] == [0]
