"""Stages on a real Kafka: the contract, and what a killed holder leaves."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater as hw
from headwater.testing.contract_case import OpenLog, values_of
from headwater.testing.contract_stages import StageContract, marker, rows
from headwater.testing.servers.kafka import KafkaServer
from stage_holder import EPOCHS

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
        [sys.executable, str(Path(__file__).parent / "stage_holder.py"), url, *words], stdout=subprocess.PIPE, text=True
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
        assert [value["n"] for value in values_of(log, "b")] == list(range(EPOCHS))


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
