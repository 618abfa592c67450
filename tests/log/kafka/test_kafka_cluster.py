"""Three real brokers, one of them killed: nothing that was acknowledged is lost, and whoever reads goes on."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

import pytest
from confluent_kafka.admin import AdminClient

import headwater
from headwater.model.errors import Unreachable
from headwater.testing.contracts.case import values_by_partition
from headwater.testing.servers import ServerError
from headwater.testing.servers.kafka_cluster import KafkaCluster
from tests.rigs.services import unavailable

APPENDS_AFTER = 30
DEADLINE_S = 60.0


@pytest.mark.slow
@pytest.mark.service("kafka")
@pytest.mark.covers("concept: replication")
def test_nothing_acknowledged_is_lost_when_a_leader_is_killed() -> None:
    """Producing and reading go on over the kill; every number that `append` returned for is there, once, in order."""
    cluster = KafkaCluster()
    try:
        cluster.start()
    except ServerError as error:
        unavailable("kafka", error)
    try:
        _kill_in_the_middle(cluster)
    finally:
        cluster.stop()


def _kill_in_the_middle(cluster: KafkaCluster) -> None:
    log = headwater.open_log(f"kafka://{cluster.bootstrap}")
    log.create_topic("numbers", "n BIGINT", key="n", partitions=3)
    acknowledged: list[int] = []
    unsure: list[int] = []
    seen: dict[int, list[int]] = defaultdict(list)
    killed, done = threading.Event(), threading.Event()
    after = 0

    def read() -> None:
        with log.reader("numbers") as reader:
            while not done.is_set():
                try:
                    for event in reader.poll(events_max=1000, timeout_s=0.2):
                        seen[event.partition].append(event.value["n"])
                except Unreachable:
                    continue

    reading = threading.Thread(target=read)
    reading.start()
    number, deadline = 0, time.monotonic() + DEADLINE_S
    while after < APPENDS_AFTER and time.monotonic() < deadline:
        batch = list(range(number, number + 5))
        number += 5
        try:
            log.append("numbers", [{"n": n} for n in batch], atomic=number % 4 == 0)
            acknowledged += batch
            after += killed.is_set()
        except Unreachable:
            unsure += batch
        if number == 150:
            cluster.kill(_leader(cluster.bootstrap, "numbers"))
            killed.set()
    assert after >= APPENDS_AFTER, f"{len(acknowledged)} acknowledged, {len(unsure)} unsure"
    stored = values_by_partition(log, "numbers")
    deadline = time.monotonic() + 20
    while sum(map(len, seen.values())) < sum(map(len, stored.values())) and time.monotonic() < deadline:
        time.sleep(0.05)
    done.set()
    reading.join()
    log.close()
    for partition, rows in stored.items():
        numbers = [row["n"] for row in rows]
        assert numbers == sorted(set(numbers))
        assert seen[partition] == numbers
    everything = {row["n"] for rows in stored.values() for row in rows}
    assert set(acknowledged) <= everything <= set(acknowledged) | set(unsure)


def _leader(bootstrap: str, topic: str) -> int:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    return admin.list_topics(topic, timeout=20).topics[topic].partitions[0].leader
