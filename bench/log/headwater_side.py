"""Our side of the log's figures, written as a user would write it; the mirror of `log.kafka_side`."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pyarrow as pa

import headwater as hw
from bench.log.payload import VALUE_BYTES, Payload

TOPIC = "events"
PARTITIONS = 4
EVENTS_PER_CALL = 10_000
ARROW_EVENTS_PER_CALL = 100_000
_POLL_TIMEOUT_S = 10.0

Durability = Literal["fsync", "os"]


class HeadwaterSide:
    """Logs in one folder, a new one for each run; the methods time one run and return events per second."""

    def __init__(self, folder: Path, *, durability: Durability = "fsync") -> None:
        self._folder = folder
        self._durability = durability
        self._numbers = itertools.count()

    @contextmanager
    def new_folder(self) -> Iterator[Path]:
        """The folder of a log with one empty topic, removed afterwards."""
        folder = self._folder / f"log-{self._durability}-{next(self._numbers)}"
        with open_log(folder, self._durability) as log:
            log.create_topic(TOPIC, partitions=PARTITIONS)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    @contextmanager
    def new_log(self) -> Iterator[hw.Log]:
        """The same, opened."""
        with self.new_folder() as folder, open_log(folder, self._durability) as log:
            yield log

    def send(self, payload: Payload) -> float:
        """Send every event with its key; the receipts are not looked at, as Kafka's reports are not."""
        with self.new_log() as log:
            return len(payload) / send(log, payload)

    def send_with_receipts(self, payload: Payload) -> float:
        """Send every event with its key, keep every receipt and take the position from each."""
        with self.new_log() as log, log.producer() as producer:
            send = producer.send
            start = time.perf_counter()
            receipts = [send(TOPIC, value, key=key) for key, value in zip(payload.keys, payload.values, strict=True)]
            producer.flush()
            positions = [receipt.result() for receipt in receipts]
            elapsed_s = time.perf_counter() - start
            assert len({(position.partition, position.offset) for position in positions}) == len(payload)
            return len(payload) / elapsed_s

    def append(self, tables: list[pa.Table]) -> float:
        """Append Arrow tables one after the other; each call returns when its events are durable."""
        with self.new_log() as log:
            start = time.perf_counter()
            for table in tables:
                log.append(TOPIC, table)
            elapsed_s = time.perf_counter() - start
            return float(sum(table.num_rows for table in tables)) / elapsed_s


def open_log(folder: Path, durability: Durability = "fsync") -> hw.Log:
    """The log in a folder."""
    return hw.open_log(str(folder), durability=durability)


def send(log: hw.Log, payload: Payload) -> float:
    """Send every event and flush; the seconds it took."""
    with log.producer() as producer:
        send = producer.send
        start = time.perf_counter()
        for key, value in zip(payload.keys, payload.values, strict=True):
            send(TOPIC, value, key=key)
        producer.flush()
        elapsed_s = time.perf_counter() - start
    assert sum(map(len, log.offsets(TOPIC).values())) == len(payload)
    return elapsed_s


def read_events(log: hw.Log, events: int) -> float:
    """Read every event's value in Python; events per second."""
    start = time.perf_counter()
    with log.reader(TOPIC, start="earliest") as reader:
        left = events
        while left:
            found = reader.poll(events_max=EVENTS_PER_CALL, timeout_s=_POLL_TIMEOUT_S)
            assert found, "the events did not arrive"
            for event in found:
                event.value  # noqa: B018 - this is what is timed
            left -= len(found)
        elapsed_s = time.perf_counter() - start
    return events / elapsed_s


def read_arrow(log: hw.Log, events: int, *, times: int) -> float:
    """Take every event in Arrow batches, and of each batch the column of values, `times` over; events per second."""
    start = time.perf_counter()
    for _ in range(times):
        _read_arrow(log, events)
    return events * times / (time.perf_counter() - start)


def _read_arrow(log: hw.Log, events: int) -> None:
    with log.reader(TOPIC, start="earliest") as reader:
        left, value_bytes = events, 0
        while left:
            batches = reader.poll_arrow(events_max=ARROW_EVENTS_PER_CALL, timeout_s=_POLL_TIMEOUT_S)
            assert batches, "the events did not arrive"
            for batch in batches:
                value_bytes += batch.column("value").nbytes
                left -= batch.num_rows
    assert value_bytes >= VALUE_BYTES * events


def open_sender(folder: str, durability: Durability, topic: str = TOPIC) -> Callable[[bytes, bytes], None]:
    """For the latency figures: a function that sends one event at once."""
    producer = open_log(Path(folder), durability).producer(linger_ms=0)

    def send(key: bytes, value: bytes) -> None:
        producer.send(topic, value, key=key)

    return send


def open_receiver(folder: str, durability: Durability, topic: str = TOPIC) -> Callable[[], list[bytes]]:
    """For the latency figures: a function that waits for the next values; positioned at the end."""
    reader = open_log(Path(folder), durability).reader(topic, start="latest")

    def receive() -> list[bytes]:
        return [event.value for event in reader.poll(events_max=500, timeout_s=_POLL_TIMEOUT_S)]

    return receive
