"""A mirror into a real Kafka and out of it: equal by offset, gaps kept where a log can keep them and refused where it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater as hw
from headwater.model.errors import Diverged, Unsupported
from headwater.testing.servers.kafka import KafkaServer
from tests.rigs.services import fresh_logs

pytestmark = pytest.mark.service("kafka")


@pytest.fixture(scope="module")
def fresh_urls(kafka: KafkaServer) -> Iterator[Iterator[str]]:
    """Addresses of empty logs."""
    yield from fresh_logs(kafka)


@pytest.fixture
def url(fresh_urls: Iterator[str]) -> str:
    """The address of an empty log."""
    return next(fresh_urls)


def held(log: hw.Log, topic: str) -> list[dict[str, object]]:
    """What a topic holds, but for its append times: Kafka has its own."""
    rows = log.read(topic, columns=["id", "n", "_partition", "_offset", "_headers", "_deleted"]).to_pylist()
    return sorted(rows, key=lambda row: (row["_partition"], row["_offset"]))


@pytest.mark.covers("concept: replication")
def test_a_log_is_copied_to_kafka_and_back(url: str, tmp_path: Path) -> None:
    """In several steps, each going on where Kafka's topic ends."""
    with hw.open_log(tmp_path / "log") as log, hw.open_log(url) as copy:
        log.create_topic("t", "id STRING, n BIGINT", key="id", partitions=2)
        for step in range(3):
            log.append("t", [{"id": f"k{n % 7}", "n": n} for n in range(2_000)])
            log.append("t", [{"id": "k1", "_deleted": True}])
            with log.producer() as producer:
                producer.send("t", {"id": "k2", "n": step}, headers={"h": b"\xff"})
            assert log.mirror(copy).events == 2_002
            assert held(copy, "t") == held(log, "t")
        assert log.mirror(copy).events == 0
        copy.mirror(tmp_path / "back")
        with hw.open_log(tmp_path / "back") as back:
            assert held(back, "t") == held(log, "t")
        copy.append("t", [{"id": "mine", "n": 1}])
        with pytest.raises(Diverged):
            log.mirror(copy)


def test_what_kafka_cannot_keep_is_refused_with_advice(url: str, tmp_path: Path) -> None:
    """Gaps, and first events that are gone; what has neither is copied."""
    with hw.open_log(tmp_path / "log") as log, hw.open_log(url) as copy:
        shape = {"key": "id", "partitions": 1, "segment_bytes": 4096}
        log.create_topic("newest", "id STRING, n BIGINT", compact=True, **shape)
        log.create_topic("recent", "id STRING, n BIGINT", retention_bytes=4096, **shape)
        for number in range(60):
            for name in ("newest", "recent"):
                log.append(name, [{"id": f"k{n}", "n": number} for n in range(10)])
        for name in ("newest", "recent"):
            assert log.tidy(name) > 0
            with pytest.raises(Unsupported) as refusal:
                log.mirror(copy, topics=[name])
            assert "log in a folder" in refusal.value.advice
            assert copy.offsets(name) == {0: range(0)}


def test_the_gaps_of_kafkas_transactions_are_kept(url: str, tmp_path: Path) -> None:
    """Where one ended there is an offset without an event, in the copy too."""
    with hw.open_log(url) as log, hw.open_log(tmp_path / "copy") as copy:
        log.create_topic("t", "id STRING, n BIGINT", key="id", partitions=2)
        for number in range(3):
            with log.transaction() as transaction:
                transaction.append("t", [{"id": f"k{n}", "n": number} for n in range(20)])
            log.append("t", [{"id": f"k{n}", "n": -number} for n in range(5)])
            log.mirror(copy)
            assert held(copy, "t") == held(log, "t")
            assert copy.offsets("t") == log.offsets("t")
        assert copy.read("t").num_rows < sum(map(len, copy.offsets("t").values()))
        with hw.open_log(tmp_path / "again") as again:
            copy.mirror(again)
            assert held(again, "t") == held(copy, "t")
