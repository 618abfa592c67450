"""A producer on Kafka that is killed and started again from the beginning: every event is stored once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headwater
from headwater.model.errors import TopicExists
from headwater.testing.contracts.case import values_by_partition
from headwater.testing.servers.kafka import KafkaServer

SEED = 11
KILLS = 3
EVENTS = 400
WRITER = """
import sys
import headwater

url, count = sys.argv[1], int(sys.argv[2])
with headwater.open_log(url) as log, log.producer(id="importer", linger_ms=5) as producer:
    for start in range(0, count, 10):
        receipts = [
            producer.send("numbers", {"n": n, "k": n % 7}, sequence=n) for n in range(start, start + 10)
        ]
        for receipt in receipts:
            receipt.result()
        print(start + 10, flush=True)
"""


@pytest.mark.slow
@pytest.mark.service("kafka")
def test_what_a_killed_producer_sends_again_is_stored_once(kafka: KafkaServer, tmp_path: Path) -> None:
    """Killed with SIGKILL at random places and started from its first event each time; nothing acknowledged is lost."""
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    url = f"kafka://{kafka.bootstrap}?prefix=kill{os.getpid()}."
    program = tmp_path / "writer.py"
    program.write_text(WRITER)
    with headwater.open_log(url) as log:
        log.create_topic("numbers", "n BIGINT, k BIGINT", key="k", partitions=3)
        acknowledged = 0
        for kill in range(KILLS + 1):
            writer = _start(program, url)
            assert writer.stdout is not None
            for line in writer.stdout:
                acknowledged = max(acknowledged, int(line))
                if kill < KILLS and acknowledged >= (kill + 1) * EVENTS // (KILLS + 2):
                    time.sleep(chance.uniform(0, 0.05))
                    writer.send_signal(signal.SIGKILL)
                    break
            writer.stdout.close()
            writer.wait()
            assert (writer.returncode == 0) == (kill == KILLS)
        stored = values_by_partition(log, "numbers")
    assert acknowledged == EVENTS
    assert sorted(row["n"] for rows in stored.values() for row in rows) == list(range(EVENTS))
    for rows in stored.values():
        assert [row["n"] for row in rows] == sorted(row["n"] for row in rows)


def _start(program: Path, url: str) -> subprocess.Popen[str]:
    source = Path(headwater.__file__).resolve().parent.parent
    return subprocess.Popen(
        [sys.executable, str(program), url, str(EVENTS)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(source)},
    )


CREATOR = """
import os, signal, sys
import headwater
from headwater.log.kafka import store as kafka

make = kafka.make_topic

def made(*arguments, **settings):
    if sys.argv[2] == "after":
        make(*arguments, **settings)
    os.kill(os.getpid(), signal.SIGKILL)

kafka.make_topic = made
headwater.open_log(sys.argv[1]).create_topic("orders", "n BIGINT", partitions=3)
"""


@pytest.mark.slow
@pytest.mark.service("kafka")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_topic_whose_creator_is_killed_is_finished_by_the_next(kafka: KafkaServer, when: str) -> None:
    """It never becomes a topic without a schema: who comes next finds it as it was begun."""
    url = f"kafka://{kafka.bootstrap}?prefix=made{os.getpid()}{when}."
    done = subprocess.run([sys.executable, "-c", CREATOR, url, when], check=False)
    assert done.returncode == -signal.SIGKILL
    with headwater.open_log(url) as log:
        if when == "after":
            assert log.topic("orders").schema.names == ["n"]
        else:
            assert "orders" not in log.topics()
        with pytest.raises(TopicExists):
            log.create_topic("orders", "word STRING", partitions=1)
        assert (log.topic("orders").schema.names, log.topic("orders").partitions) == (["n"], 3)
        log.append("orders", [{"n": 1}])
        assert log.read("orders").to_pylist() == [{"n": 1}]
        log.delete_topic("orders")
        log.create_topic("orders", "word STRING", partitions=1)
        assert log.topic("orders").schema.names == ["word"]
