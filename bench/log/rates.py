"""Rates: how many events a second go in and come out, one by one and in Arrow batches, beside Kafka's."""

from __future__ import annotations

import mmap
import os
import time
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa

from bench.harness import Figure, Options, Pair, Target, measure, scratch
from bench.log.headwater_side import PARTITIONS, HeadwaterSide, read_arrow, read_events
from bench.log.headwater_side import send as send_all
from bench.log.kafka_side import KafkaSide, kafka_side
from bench.log.payload import Payload, make_payload

EVENTS = 2_000_000
EVENTS_QUICK = 200_000
EVENTS_PER_APPEND = 250_000
ARROW_APPENDS = 3  # of the whole payload in one run: once is too short to time
ARROW_READS = 20
DIRECT_BYTES = 4 << 20


def send(options: Options) -> list[Figure]:
    """One event a call, with key routing and receipts."""
    payload = _payload(options)
    with ExitStack() as stack:
        ours, kafka = _sides(options, stack, payload)
        plain = measure(options, lambda: ours.send(payload), lambda: kafka.produce(payload))
        kept = measure(options, lambda: ours.send_with_receipts(payload), lambda: kafka.produce(payload, reports=True))
    return [
        _rate("send", "producer.send one by one, flushed at the end", plain, "Kafka produce", 1.2),
        _rate("send_receipts", "the same, every event's position taken", kept, "Kafka produce, callbacks", 1.2),
    ]


def append(options: Options) -> list[Figure]:
    """Many events a call; beside Kafka, and beside what the disk itself can take."""
    payload = _payload(options)
    tables = payload.tables(EVENTS_PER_APPEND) * ARROW_APPENDS
    with ExitStack() as stack:
        ours, kafka = _sides(options, stack, payload)
        rates = measure(options, lambda: ours.append(tables), lambda: kafka.produce(payload))
    with scratch() as folder:
        ours, in_memory = HeadwaterSide(folder), HeadwaterSide(folder, durability="os")
        disk = measure(options, lambda: ours.append(tables), lambda: _append_plainly(folder, tables))
        direct = measure(options, lambda: ours.append(tables), lambda: _write_directly(folder, tables))
        unsynced = measure(options, lambda: in_memory.append(tables))
    what = f"log.append of Arrow tables of {EVENTS_PER_APPEND:,} events"
    return [
        _rate("append_arrow", what, rates, "Kafka produce", 15),
        _rate("append_arrow_disk", "the same beside the disk alone", disk, "plain files, write + fdatasync"),
        _rate("append_arrow_direct", "the same beside the most that the disk takes", direct, "O_DIRECT, 4 MB a call"),
        _rate("append_arrow_os", 'the same, durability="os"', (unsynced[0], rates[1]), "Kafka produce"),
    ]


def read(options: Options) -> list[Figure]:
    """Events and Arrow batches, from topics that a producer has written one by one."""
    payload = _payload(options)
    count = len(payload)
    with ExitStack() as stack:
        ours, kafka = _sides(options, stack, payload)
        if options.wants("ours"):
            log = stack.enter_context(ours.new_log())
            send_all(log, payload)
        if options.wants("peer"):
            topic = kafka.create_topic()
            kafka.produce(payload, topic=topic)
        events = measure(options, lambda: read_events(log, count), lambda: kafka.consume(topic, count))
        batches = measure(
            options, lambda: read_arrow(log, count, times=ARROW_READS), lambda: kafka.consume_batches(topic, count)
        )
    values = (batches[0], events[1])
    return [
        _rate("read_events", "reader.poll, every event's value taken", events, "Kafka consume, value()", 1.5),
        _rate("read_arrow", "reader.poll_arrow, the column of values taken", values, "Kafka consume, value()", 50),
        _rate("read_arrow_counted", "the same beside messages only counted", batches, "Kafka consume, counted"),
    ]


def _append_plainly(folder: Path, tables: list[pa.Table]) -> float:
    """Write as many bytes as the tables have to plain files, one for each partition, and sync each; events per second."""
    block = os.urandom(tables[0].nbytes // PARTITIONS)
    files = [os.open(folder / f"plain-{number}", os.O_CREAT | os.O_WRONLY) for number in range(PARTITIONS)]
    start = time.perf_counter()
    for _ in tables:
        for file in files:
            os.write(file, block)
        for file in files:
            os.fdatasync(file)
    elapsed_s = time.perf_counter() - start
    for number, file in enumerate(files):
        os.close(file)
        (folder / f"plain-{number}").unlink()
    return float(sum(table.num_rows for table in tables)) / elapsed_s


def _write_directly(folder: Path, tables: list[pa.Table]) -> float:
    """Write as many bytes as the tables have past the page cache, into room that was set aside before; events per second."""
    calls = -(-sum(table.nbytes for table in tables) // DIRECT_BYTES)
    path, block = folder / "direct", mmap.mmap(-1, DIRECT_BYTES)  # aligned to a page, as O_DIRECT wants it
    block.write(os.urandom(DIRECT_BYTES))
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    os.posix_fallocate(file, 0, calls * DIRECT_BYTES)
    start = time.perf_counter()
    for number in range(calls):
        os.pwrite(file, block, number * DIRECT_BYTES)
    os.fdatasync(file)
    elapsed_s = time.perf_counter() - start
    os.close(file)
    path.unlink()
    return float(sum(table.num_rows for table in tables)) / elapsed_s


def _payload(options: Options) -> Payload:
    return make_payload(EVENTS_QUICK if options.quick else EVENTS)


def _sides(options: Options, stack: ExitStack, payload: Payload) -> tuple[HeadwaterSide, KafkaSide]:
    """Both sides on one disk; the broker is warm, and not there when it was not asked for."""
    folder = stack.enter_context(scratch())
    ours = HeadwaterSide(folder)
    if not options.wants("peer"):
        return ours, KafkaSide("")
    kafka = stack.enter_context(kafka_side(folder))
    kafka.produce(payload)
    return ours, kafka


def _rate(name: str, what: str, pair: Pair, peer: str, times_min: float | None = None) -> Figure:
    target = Target(">=", times_min) if times_min else None
    return Figure(name, what, "events/s", pair, peer, target)
