"""Latency: events at 500 a second into a topic, through a stage of Spark without state, into another topic, to a reader of it.

Sender and reader are processes of their own, as in `log_latency`. Ours is durable in both topics when it is seen, and written
once; the connector reads from and writes to Kafka.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from bench import log_headwater, log_kafka
from bench.harness import Figure, Options, Target, measure_each
from bench.log_latency import WARM_EVENTS, End, measure_latency
from bench.payload import Payload, make_payload
from bench.pipeline_events import PARTITIONS
from bench.pipeline_rig import CONNECTOR, Rig

EVENTS_PER_S = 500
SECONDS = 20
SECONDS_QUICK = 3
FIRST_EVENTS = 100
_START_TIMEOUT_S = 60.0
_SOURCE, _TARGET = "in", "out"


def latency(rig: Rig, options: Options) -> list[Figure]:
    """Ours beside the connector."""
    payload = make_payload(WARM_EVENTS + EVENTS_PER_S * (SECONDS_QUICK if options.quick else SECONDS))
    first = make_payload(FIRST_EVENTS)

    def ours() -> tuple[float, float]:
        with log_headwater.HeadwaterSide(rig.folder).new_folder() as folder:
            url = str(folder)
            with log_headwater.open_log(folder) as log:
                for topic in (_SOURCE, _TARGET):
                    log.create_topic(topic, partitions=PARTITIONS)
                log.append(_SOURCE, first.table)
            sink = _stage(rig.from_log(url, _SOURCE)).format("headwater").options(log=url, topic=_TARGET)
            sender = (log_headwater.open_sender, (url, "fsync", _SOURCE))
            receiver = (log_headwater.open_receiver, (url, "fsync", _TARGET))
            return _measured(rig, sink, sender, receiver, payload)

    def peer() -> tuple[float, float]:
        source, target, bootstrap = rig.kafka.create_topic(), rig.kafka.create_topic(), rig.kafka.bootstrap
        rig.kafka.produce(first, topic=source)
        sink = _stage(rig.from_connector(source)).format("kafka")
        sink = sink.options(**{"kafka.bootstrap.servers": bootstrap, "topic": target})
        sender = (log_kafka.open_sender, (bootstrap, source))
        receiver = (log_kafka.open_receiver, (bootstrap, target))
        return _measured(rig, sink, sender, receiver, payload)

    pairs = measure_each(options, ours, peer, better="lower")
    what = f"one event at {EVENTS_PER_S}/s: topic, a stage without state, topic, reader"
    names = (("latency_p50", Target("<=", 1.0)), ("latency_p99", None))
    return [
        Figure(name, what, "ms", pair, f"{CONNECTOR}, Kafka to Kafka", target)
        for (name, target), pair in zip(names, pairs, strict=True)
    ]


def _stage(events: DataFrame) -> DataStreamWriter:
    return events.select("key", "value").where(F.length("value") > 0).writeStream


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
