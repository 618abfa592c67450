"""Rates: events a second through Spark, from our log and with the Kafka connector, each side warmed by one run."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

import headwater as hw
from bench.harness import Better, Figure, Options, Pair, Target, measure
from bench.pipeline.events import KEY, SCHEMA
from bench.pipeline.rig import CONNECTOR, PREFIX, TOPIC, Rig, events_of

WINDOW = "1 minute"
EVENTS_FEW = 1_000


def read(rig: Rig, options: Options) -> list[Figure]:
    """Everything, to a sink that does nothing; and a few events, which is what it takes to start and end a query."""
    events = events_of(options)

    def ours(count: int) -> DataStreamWriter:
        return no_op(rig.from_log(rig.log(count), TOPIC))

    def peer(count: int) -> DataStreamWriter:
        return no_op(rig.from_connector(PREFIX + rig.on_kafka(count)))

    rates = _warm(options, lambda: rig.drain(ours(events), events), lambda: rig.drain(peer(events), events))
    small = _warm(options, lambda: rig.whole_s(ours(EVENTS_FEW)), lambda: rig.whole_s(peer(EVENTS_FEW)), better="lower")
    what, few = "a stream of five typed columns to a no-op sink", f"the whole of a query over {EVENTS_FEW:,} events"
    return [
        _rate("read_noop", what, rates, f"{CONNECTOR}, not parsed", 4),
        Figure("query_start", few, "s", small, CONNECTOR),
    ]


def window(rig: Rig, options: Options) -> list[Figure]:
    """A count by window and kind; ours reads the two columns that it needs, as an App does by itself."""
    events = events_of(options)

    def ours() -> float:
        return rig.drain(count_windows(rig.from_log(rig.log(events), TOPIC, columns="kind,at")), events)

    def peer() -> float:
        return rig.drain(count_windows(_parsed(rig.from_connector(PREFIX + rig.on_kafka(events)))), events)

    if options.side == "both":
        _check_same(rig)
    what = f"a stream counted by windows of {WINDOW} and four kinds"
    return [_rate("window_count", what, _warm(options, ours, peer), f"{CONNECTOR}, from_json", 4)]


def write(rig: Rig, options: Options) -> list[Figure]:
    """From one topic into another."""
    events = events_of(options)

    def ours() -> float:
        url = rig.log(events)
        target = rig.new_topic(url)
        sink = rig.from_log(url, TOPIC).writeStream.format("headwater").options(log=url, topic=target)
        rate = rig.drain(sink, events)
        with hw.open_log(url) as log:
            _check(sum(map(len, log.offsets(target).values())), events)
            log.delete_topic(target)
        return rate

    def peer() -> float:
        source, target = PREFIX + rig.on_kafka(events), rig.kafka.create_topic()
        sink = rig.from_connector(source).select("key", "value").writeStream.format("kafka")
        rate = rig.drain(sink.options(**{"kafka.bootstrap.servers": rig.kafka.bootstrap, "topic": target}), events)
        rig.kafka.delete_topic(target)
        return rate

    what = f"a stream from one topic into another, placed by {KEY}, exactly once"
    return [_rate("write", what, _warm(options, ours, peer), f"{CONNECTOR}, Kafka to Kafka, at least once", 1.5)]


def kafka_json(rig: Rig, options: Options) -> list[Figure]:
    """The same topic of JSON on the same broker, parsed."""
    events = events_of(options)

    def ours() -> float:
        return rig.drain(no_op(rig.from_log(rig.kafka_url, rig.on_kafka(events))), events)

    def peer() -> float:
        return rig.drain(no_op(_parsed(rig.from_connector(PREFIX + rig.on_kafka(events)))), events)

    what = "our source on kafka://, JSON parsed into five typed columns, to a no-op sink"
    return [_rate("read_kafka_json", what, _warm(options, ours, peer), f"{CONNECTOR}, from_json", 1.3)]


def no_op(frame: DataFrame) -> DataStreamWriter:
    """To a sink that takes every row and does nothing with it."""
    return frame.writeStream.format("noop")


def count_windows(frame: DataFrame) -> DataStreamWriter:
    """Counted by window and kind."""
    counts = frame.withWatermark("at", WINDOW).groupBy(F.window("at", WINDOW), "kind").count()
    return no_op(counts).outputMode("update")


def _parsed(frame: DataFrame) -> DataFrame:
    return frame.select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("event")).select("event.*")


def _warm(options: Options, ours: Callable[[], float], peer: Callable[[], float], *, better: Better = "higher") -> Pair:
    """Measure both sides after a run of each: the first one pays for compiling, and for filling the topics."""
    if options.wants("ours"):
        ours()
    if options.wants("peer"):
        peer()
    return measure(options, ours, peer, better=better)


def _check_same(rig: Rig) -> None:
    """Both sides must see the same events: a time that from_json did not understand would be a null, and less work."""
    ours = rig.from_log(rig.log(EVENTS_FEW), TOPIC, stream=False)
    peer = _parsed(rig.from_connector(PREFIX + rig.on_kafka(EVENTS_FEW), stream=False))
    assert ours.exceptAll(peer).count() == peer.exceptAll(ours).count() == 0, "the two sides read different events"


def _check(found: int, events: int) -> None:
    assert found == events, f"{found:,} of {events:,} events were written"


def _rate(name: str, what: str, pair: Pair, peer: str, times_min: float) -> Figure:
    return Figure(name, what, "events/s", pair, peer, Target(">=", times_min))
