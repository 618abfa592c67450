"""Rates: how many events a second go in and come out, one by one and in Arrow batches, beside Kafka's."""

from __future__ import annotations

from contextlib import ExitStack

from bench.harness import Figure, Options, Pair, Target, measure, scratch
from bench.log_headwater import HeadwaterSide, read_arrow, read_events
from bench.log_headwater import send as send_all
from bench.log_kafka import KafkaSide, kafka_side
from bench.payload import Payload, make_payload

EVENTS = 2_000_000
EVENTS_QUICK = 200_000
EVENTS_PER_APPEND = 250_000
ARROW_APPENDS = 3  # of the whole payload in one run: once is too short to time
ARROW_READS = 20


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
    """Many events a call."""
    payload = _payload(options)
    tables = payload.tables(EVENTS_PER_APPEND) * ARROW_APPENDS
    with ExitStack() as stack:
        ours, kafka = _sides(options, stack, payload)
        rates = measure(options, lambda: ours.append(tables), lambda: kafka.produce(payload))
    what = f"log.append of Arrow tables of {EVENTS_PER_APPEND:,} events"
    return [_rate("append_arrow", what, rates, "Kafka produce", 15)]


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
