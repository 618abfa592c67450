"""Latency: events at 500 a second into a topic, through a stage of Spark without state, into another topic, to a reader of it.

Sender and reader are processes of their own, as in `log.latency`. Ours is a stage of an application; beside it the data source alone,
as any Spark program uses it. Both are durable in both topics when they are seen, and written once; the connector reads from and
writes to Kafka, in a Spark as it comes, and once more in one that is set up as ours is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

import headwater as hw
from bench.harness import Figure, Options, Target, measure_each
from bench.log import headwater_side, kafka_side
from bench.log.latency import WARM_EVENTS, End, measure_latency
from bench.log.payload import Payload, make_payload
from bench.pipeline.events import PARTITIONS
from bench.pipeline.rig import CONNECTOR, Rig

EVENTS_PER_S = 500
SECONDS = 20
SECONDS_QUICK = 3
FIRST_EVENTS = 100
_START_TIMEOUT_S = 60.0
_POLL_TIMEOUT_S = 10.0
_SOURCE, _TARGET = "in", "out"


def latency(rig: Rig, options: Options) -> list[Figure]:
    """Ours beside the connector."""
    seconds = SECONDS_QUICK if options.quick else SECONDS
    payload, first = _payload(seconds), make_payload(FIRST_EVENTS)

    def ours() -> tuple[float, float]:
        return app_latency(rig, passed, seconds=seconds)

    def alone() -> tuple[float, float]:
        with _new_log(rig, first) as url:
            with headwater_side.open_log(Path(url)) as log:
                log.create_topic(_TARGET, partitions=PARTITIONS)
            sink = _stage(rig.from_log(url, _SOURCE)).format("headwater").options(log=url, topic=_TARGET)
            receiver = (headwater_side.open_receiver, (url, "fsync", _TARGET))
            return _measured(rig, sink, _sender(url), receiver, payload)

    def peer(spark: SparkSession) -> tuple[float, float]:
        source, target, bootstrap = rig.kafka.create_topic(), rig.kafka.create_topic(), rig.kafka.bootstrap
        rig.kafka.produce(first, topic=source)
        sink = _stage(rig.from_connector(source, spark=spark)).format("kafka")
        sink = sink.options(**{"kafka.bootstrap.servers": bootstrap, "topic": target})
        sender = (kafka_side.open_sender, (bootstrap, source))
        receiver = (kafka_side.open_receiver, (bootstrap, target))
        return _measured(rig, sink, sender, receiver, payload)

    figures = []
    stage = "a stage of an application without state"
    for prefix, run, how, spark, target in (
        ("latency", ours, stage, rig.plain, Target("<=", 1.0)),
        ("latency_alike", ours, stage, rig.spark, None),
        ("latency_source", alone, "the same by the data source alone", rig.plain, None),
    ):
        pairs = measure_each(options, run, partial(peer, spark), better="lower")
        what = f"one event at {EVENTS_PER_S}/s: topic, {how}, topic, reader"
        other = f"{CONNECTOR}, Kafka to Kafka, {'as it comes' if spark is rig.plain else 'set up as ours'}"
        for name, pair, wanted in zip(("p50", "p99"), pairs, (target, None), strict=True):
            figures.append(Figure(f"{prefix}_{name}", what, "ms", pair, other, wanted))
    return figures


def app_latency(
    rig: Rig, function: Callable[[DataFrame], DataFrame], *, seconds: int, schema: str | None = None
) -> tuple[float, float]:
    """p50 and p99 in milliseconds of events through a function of an application; `schema` is that of the topic, if it has one."""
    with _new_log(rig, make_payload(FIRST_EVENTS), schema) as url:
        app = hw.App("latency", log=url, spark=rig.spark)

        def stage(events: DataFrame) -> DataFrame:
            return function(events)

        app.stream(app.topic(_SOURCE), to=_TARGET, key="key")(stage)
        app.start()
        try:
            _wait(lambda: app.status().stages[0].events >= FIRST_EVENTS)
            sender = _sender(url) if schema is None else (open_row_sender, (url,))
            return measure_latency(sender, (open_receiver, (url,)), _payload(seconds), events_per_s=EVENTS_PER_S)
        finally:
            app.stop()


def open_row_sender(folder: str) -> Callable[[bytes, bytes], None]:
    """As that of `log.headwater_side`, for a topic with a schema."""
    producer = hw.open_log(folder).producer(linger_ms=0)

    def send(key: bytes, value: bytes) -> None:
        producer.send(_SOURCE, {"key": key, "value": value})

    return send


def open_receiver(folder: str) -> Callable[[], list[bytes]]:
    """As that of `log.headwater_side`, for the topic of an application, which has a schema."""
    reader = hw.open_log(folder).reader(_TARGET, start="latest")

    def receive() -> list[bytes]:
        return [event.value["value"] for event in reader.poll(events_max=500, timeout_s=_POLL_TIMEOUT_S)]

    return receive


@contextmanager
def _new_log(rig: Rig, first: Payload, schema: str | None = None) -> Iterator[str]:
    with headwater_side.HeadwaterSide(rig.folder).new_folder() as folder:
        with headwater_side.open_log(folder) as log:
            log.create_topic(_SOURCE, schema, key=None if schema is None else "key", partitions=PARTITIONS)
            log.append(_SOURCE, first.table)
        yield str(folder)


def _sender(url: str) -> End:
    return (headwater_side.open_sender, (url, "fsync", _SOURCE))


def passed(events: DataFrame) -> DataFrame:
    """What a stage without state does."""
    return events.select("key", "value").where(F.length("value") > 0)


def _stage(events: DataFrame) -> DataStreamWriter:
    return passed(events).writeStream


def _payload(seconds: int) -> Payload:
    return make_payload(WARM_EVENTS + EVENTS_PER_S * seconds)


def _measured(rig: Rig, sink: DataStreamWriter, sender: End, receiver: End, payload: Payload) -> tuple[float, float]:
    query, _ = rig.start(sink, processingTime="0 seconds")
    try:
        _wait(lambda: _is_going(query))
        return measure_latency(sender, receiver, payload, events_per_s=EVENTS_PER_S)
    finally:
        query.stop()


def _is_going(query: StreamingQuery) -> bool:
    """Whether the first events are through, so that starting is not measured."""
    error = query.exception()
    if error is not None:
        raise error
    return sum(progress["numInputRows"] for progress in query.recentProgress) >= FIRST_EVENTS


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not until():
        assert time.monotonic() < deadline, "the first events did not come through"
        time.sleep(0.05)
