"""Groups: consuming as a member of a group with automatic commits, and how long a dead member's partitions stand still."""

from __future__ import annotations

import itertools
import os
import signal
import time
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection

from confluent_kafka import Consumer

import headwater as hw
from bench.harness import Figure, Options, Target, measure, scratch
from bench.log.headwater_side import TOPIC, HeadwaterSide
from bench.log.headwater_side import send as send_all
from bench.log.kafka_side import CONSUMER, KafkaSide, kafka_side
from bench.log.payload import make_payload

EVENTS = 2_000_000
EVENTS_QUICK = 200_000
EVENTS_PER_CALL = 10_000
WAIT_S = 20.0

_GROUPS = itertools.count()


def groups(options: Options) -> list[Figure]:
    """One member reads everything; then two share a topic and one is killed."""
    payload = make_payload(EVENTS_QUICK if options.quick else EVENTS)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        log = stack.enter_context(HeadwaterSide(folder).new_log())
        if options.wants("ours"):
            send_all(log, payload)
        if options.wants("peer"):
            kafka = stack.enter_context(kafka_side(folder))
            topic = kafka.create_topic()
            kafka.produce(payload, topic=topic)
        rates = measure(options, lambda: consume(log, len(payload)), lambda: consume_kafka(kafka, topic, len(payload)))
        takeover = measure(options, lambda: take_over(log), better="lower")
    return [
        Figure(
            "group_consume",
            "consumer.poll as the only member of a group, every value taken, automatic commits",
            "events/s",
            rates,
            "Kafka group, value()",
            Target(">=", 1.5),
        ),
        Figure(
            "group_takeover",
            "from kill -9 of a member to the first event of its partition in another member",
            "s",
            takeover,
            None,
            Target("<=", 1.0, of="ours"),
        ),
    ]


def consume(log: hw.Log, events: int) -> float:
    """Read every event's value by a new group; events per second, from the first event on."""
    with log.consumer(TOPIC, group=f"readers-{next(_GROUPS)}", start="earliest") as consumer:
        start, left = 0.0, events
        while left:
            found = consumer.poll(events_max=EVENTS_PER_CALL, timeout_s=WAIT_S)
            start = start or time.perf_counter()
            assert found, f"{left} events did not arrive"
            for event in found:
                event.value  # noqa: B018 - this is what is timed
            left -= len(found)
        consumer.commit()
        return events / (time.perf_counter() - start)


def consume_kafka(kafka: KafkaSide, topic: str, events: int) -> float:
    """The same with confluent-kafka."""
    settings = {**CONSUMER, "group.id": f"readers-{next(_GROUPS)}", "enable.auto.commit": True}
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "auto.offset.reset": "earliest", **settings})
    consumer.subscribe([topic])
    start, left, deadline = 0.0, events, time.monotonic() + WAIT_S
    while left:
        found = consumer.consume(EVENTS_PER_CALL, 1.0)
        if found:
            start, deadline = start or time.perf_counter(), time.monotonic() + WAIT_S
        assert time.monotonic() < deadline, f"{left} events did not arrive"
        for message in found:
            message.value()
        left -= len(found)
    consumer.commit(asynchronous=False)
    elapsed_s = time.perf_counter() - start
    consumer.close()
    return events / elapsed_s


def take_over(log: hw.Log) -> float:
    """Seconds from the kill of one of two members until the other holds an event of each partition."""
    topic, group = f"shared-{next(_GROUPS)}", "pair"
    log.create_topic(topic, partitions=2)
    ours, theirs = get_context("spawn").Pipe()
    member = get_context("spawn").Process(target=_member, args=(log.url, topic, group, theirs))
    member.start()
    assert ours.recv() == "joined"
    with log.consumer(topic, group=group, start="earliest") as consumer:
        deadline = time.monotonic() + WAIT_S
        while len(consumer.assignment()) != 1 or ours.poll() is False:
            consumer.poll(timeout_s=0.05)
            assert time.monotonic() < deadline, "the partitions were not shared"
        assert member.pid is not None
        os.kill(member.pid, signal.SIGKILL)
        start = time.perf_counter()
        for number in range(16):
            log.append(topic, [{"key": str(number).encode(), "value": b"x"}])
        seen: set[int] = set()
        while len(seen) < 2:
            seen |= {event.partition for event in consumer.poll(timeout_s=0.05)}
            assert time.perf_counter() - start < WAIT_S, "the partition was not taken over"
        elapsed_s = time.perf_counter() - start
    member.join()
    return elapsed_s


def _member(url: str, topic: str, group: str, report: Connection) -> None:
    with hw.open_log(url) as log, log.consumer(topic, group=group, start="earliest") as consumer:
        consumer.poll(timeout_s=0.1)
        report.send("joined")
        told = False
        while True:
            consumer.poll(timeout_s=0.05)
            if not told and len(consumer.assignment()) == 1:
                report.send("shared")
                told = True
