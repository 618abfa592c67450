"""Kafka's side of the log's figures: a tuned confluent-kafka client beside one broker.

Tuned as a careful user would: acks=1 and 5 ms linger, an unbounded send buffer, the partitioner our log also uses,
and a consumer queue large enough that it never starves, without the pause of a second that a full queue means by
default. Partitions are assigned, so no group is joined in the timed part.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from bench.log.payload import Payload
from headwater.testing.servers.kafka import KafkaServer

PARTITIONS = 4
EVENTS_PER_CALL = 10_000
_POLL_TIMEOUT_S = 10.0

_CLIENT = {"log_level": 0}  # a broker that is stopped is no news
_PRODUCER = {
    **_CLIENT,
    "acks": 1,
    "linger.ms": 5,
    "partitioner": "murmur2_random",
    "queue.buffering.max.messages": 0,
    "queue.buffering.max.kbytes": 2_097_151,
}
CONSUMER = {
    **_CLIENT,
    "group.id": "bench",
    "enable.auto.commit": False,
    "queued.min.messages": 1_000_000,
    "queued.max.messages.kbytes": 262_144,
    "fetch.queue.backoff.ms": 1,
}


@contextmanager
def kafka_side(folder: Path) -> Iterator[KafkaSide]:
    """A broker with a bench's heap, its data in `folder`."""
    with KafkaServer(size="bench", parent_folder=folder) as kafka:
        yield KafkaSide(kafka.bootstrap)


class KafkaSide:
    """One broker's clients; each method times one run and returns events per second."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._admin = AdminClient({"bootstrap.servers": bootstrap, **_CLIENT})
        self._numbers = itertools.count()

    def create_topic(self) -> str:
        topic = f"topic-{next(self._numbers)}"
        self._admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result()
        return topic

    def delete_topic(self, topic: str) -> None:
        self._admin.delete_topics([topic])[topic].result()

    def produce(self, payload: Payload, *, topic: str | None = None, reports: bool = False) -> float:
        """Send every event with its key; with `reports` a callback per event keeps its partition and offset."""
        into = topic or self.create_topic()
        producer = Producer({"bootstrap.servers": self.bootstrap, **_PRODUCER})
        producer.list_topics(into)
        elapsed_s = _send_with_reports(producer, into, payload) if reports else _send(producer, into, payload)
        if topic is None:
            self.delete_topic(into)
        return len(payload) / elapsed_s

    def consume(self, topic: str, events: int) -> float:
        """Read every event's value in Python."""

        def read(messages: list[Message]) -> None:
            for message in messages:
                message.value()

        return self._consume(topic, events, read)

    def consume_batches(self, topic: str, events: int) -> float:
        """Take every event in lists of messages, without looking into them."""
        return self._consume(topic, events, lambda messages: None)

    def _consume(self, topic: str, events: int, read: Callable[[list[Message]], None]) -> float:
        consumer = Consumer({"bootstrap.servers": self.bootstrap, **CONSUMER})
        consumer.list_topics(topic)
        start = time.perf_counter()
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(PARTITIONS)])
        left = events
        while left:
            # Never ask for more than is there: consume() waits for a full list.
            messages = consumer.consume(min(EVENTS_PER_CALL, left), _POLL_TIMEOUT_S)
            assert messages, "the events did not arrive"
            read(messages)
            left -= len(messages)
        elapsed_s = time.perf_counter() - start
        consumer.close()
        return events / elapsed_s


def open_sender(bootstrap: str, topic: str) -> Callable[[bytes, bytes], Any]:
    """For the latency figures: a function that sends one event at once."""
    producer = Producer({"bootstrap.servers": bootstrap, **_PRODUCER, "linger.ms": 0, "socket.nagle.disable": True})
    producer.list_topics(topic)

    def send(key: bytes, value: bytes) -> None:
        producer.produce(topic, value, key)
        producer.poll(0)

    return send


def open_receiver(bootstrap: str, topic: str) -> Callable[[], list[bytes]]:
    """For the latency figures: a function that waits for the next values; positioned at the end."""
    consumer = Consumer({"bootstrap.servers": bootstrap, **CONSUMER, "socket.nagle.disable": True})
    ends = []
    for number in range(PARTITIONS):
        partition = TopicPartition(topic, number, OFFSET_END)
        partition.offset = consumer.get_watermark_offsets(partition)[1]
        ends.append(partition)
    consumer.assign(ends)
    consumer.poll(0.1)

    def receive() -> list[bytes]:
        message = consumer.poll(_POLL_TIMEOUT_S)
        return [] if message is None else [message.value() or b""]

    return receive


def _send(producer: Producer, topic: str, payload: Payload) -> float:
    produce, poll, keys, values = producer.produce, producer.poll, payload.keys, payload.values
    start = time.perf_counter()
    for first in range(0, len(keys), EVENTS_PER_CALL):
        end = first + EVENTS_PER_CALL
        for key, value in zip(keys[first:end], values[first:end], strict=True):
            produce(topic, value, key)
        poll(0)
    left = producer.flush()
    elapsed_s = time.perf_counter() - start
    assert left == 0
    return elapsed_s


def _send_with_reports(producer: Producer, topic: str, payload: Payload) -> float:
    positions: list[tuple[int | None, int | None]] = []
    keep = positions.append

    def report(error: object, message: Message) -> None:
        if error is None:
            keep((message.partition(), message.offset()))

    produce, poll, keys, values = producer.produce, producer.poll, payload.keys, payload.values
    start = time.perf_counter()
    for first in range(0, len(keys), EVENTS_PER_CALL):
        end = first + EVENTS_PER_CALL
        for key, value in zip(keys[first:end], values[first:end], strict=True):
            produce(topic, value, key, on_delivery=report)
        poll(0)
    producer.flush()
    elapsed_s = time.perf_counter() - start
    assert len(positions) == len(payload)
    return elapsed_s
