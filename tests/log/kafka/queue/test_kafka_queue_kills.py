"""Queues on a real Kafka, shared by programs that are killed and stopped: nothing is lost, nothing is out twice."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from headwater.testing.servers.kafka import KafkaServer
from tests.rigs.log.kafka_queue_rounds import KILLS, STOPS, KafkaRound

pytestmark = pytest.mark.service("kafka")

ROUNDS = 2
BENCH_ROUNDS = 40


def run(kafka: KafkaServer, seed: int, folder: Path) -> None:
    """A round in a log of its own; the accounts of a failed one are kept."""
    print(f"seed {seed}")
    fight = KafkaRound(folder, seed, url=f"kafka://{kafka.bootstrap}?prefix=kills{os.getpid()}.{seed}.")
    fight.run()
    try:
        fight.check()
    except AssertionError as failure:
        failure.add_note(f"seed {seed}, accounts in {folder}")
        raise
    assert (fight.kills, fight.stops) == (KILLS, STOPS)
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_workers_on_kafka_are_killed_and_stopped(kafka: KafkaServer, seed: int, tmp_path: Path) -> None:
    """Each event is acknowledged once, or delivered again; every promise is checked from outside."""
    run(kafka, seed, tmp_path)


@pytest.mark.bench
@pytest.mark.parametrize("seed", range(ROUNDS, ROUNDS + BENCH_ROUNDS))
def test_workers_on_kafka_are_killed_and_stopped_for_long(kafka: KafkaServer, seed: int, tmp_path: Path) -> None:
    """As above, over many seeds."""
    run(kafka, seed, tmp_path)
