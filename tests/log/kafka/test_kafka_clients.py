"""Clients of Kafka: they live as long as their log, and ask for nothing while nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

import headwater
from headwater.testing.servers.kafka import KafkaServer

pytestmark = pytest.mark.service("kafka")

USES_EVERYTHING = """
import os, sys
from pathlib import Path
import headwater as hw

def clients():
    names = (Path("/proc/self/task", task, "comm") for task in os.listdir("/proc/self/task"))
    return sum(name.read_text().startswith("rdk") for name in names if name.exists())

with hw.open_log(sys.argv[1]) as log:
    log.create_topic("t", partitions=2)
    log.append("t", [{"key": b"k", "value": b"v"}])
    with log.producer() as producer:
        producer.send("t", b"v", key=b"k")
    with log.transaction() as transaction:
        transaction.append("t", [{"key": b"k", "value": b"v"}])
    log.stage("s")
    assert log.read("t").num_rows == 3
    with log.consumer("t", group="g") as consumer:
        assert consumer.poll(timeout_s=10)
    assert clients() > 0
print(clients())
"""


def test_no_client_outlives_its_log(kafka: KafkaServer) -> None:
    """Each has threads that ask the brokers; they end with the log, not when garbage is collected."""
    url = f"kafka://{kafka.bootstrap}?prefix=outlives{os.getpid()}."
    ended = subprocess.run([sys.executable, "-c", USES_EVERYTHING, url], capture_output=True, text=True, timeout=60)
    assert (ended.stdout.strip(), ended.stderr) == ("0", "")


def test_a_reader_that_pauses_asks_the_brokers_for_nothing(kafka: KafkaServer) -> None:
    """Its client would ask hundreds of times a second for what comes after the end; read again, it goes on where it stood."""
    with headwater.open_log(f"kafka://{kafka.bootstrap}?prefix=pauses{os.getpid()}.") as log:
        log.create_topic("t", partitions=1)
        log.append("t", [{"key": b"k", "value": b"%d" % number} for number in range(100)])
        reader = log.reader("t", start="earliest")
        read = [event.value for event in reader.poll(events_max=10, timeout_s=10)]
        fetchers = log.store._cluster.fetchers._idle
        deadline = time.monotonic() + 20
        while any(fetcher.is_fetching for fetcher in fetchers):
            assert time.monotonic() < deadline, "it never comes to rest"
            time.sleep(0.05)
        while len(read) < 100:
            read += [event.value for event in reader.poll(events_max=30, timeout_s=10)]
        assert read == [b"%d" % number for number in range(100)]
