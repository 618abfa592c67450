"""The figures of our own operators and their state: `python -m bench.state` writes `bench/results/state.json`.

Rates are those of a stream from a topic through an operator to a sink that does nothing, held against Spark's own state in Python, or
against our own stream without an operator. Latency is that of an application with an operator beside one without. How soon a stopped
query goes on is held against a state that is made anew from the log. `--only growth` runs one group, `--quick` shrinks everything.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame

import headwater as hw
from bench.harness import Figure, Options, Pair, Target, main, measure, measure_each
from bench.pipeline.latency import EVENTS_PER_S, SECONDS, SECONDS_QUICK, app_latency, passed
from bench.pipeline.rates import no_op
from bench.state.growth import growth
from bench.state.rebuild import rebuilding
from bench.state.rig import KEYED, TABLE, TOPIC, StateRig, counted, counted_by_spark, events_of

COUNTED_TIMES = 3
"""Inside a source so many times more events are counted: half a second is mostly the start of two batches."""

SPARK_SHARE = 20
"""Spark's state is measured with so many times fewer events: a rate, and minutes are enough."""

ALL, RATES = "user_id,page,kind,amount,at", "user_id,rate,since"
OVER = "5 minutes"
NEVER_NULL = "key BINARY NOT NULL, value BINARY"


def counter(rig: StateRig, options: Options) -> list[Figure]:
    """Rows counted by 100,000 keys."""
    events = events_of(options)
    few = events // SPARK_SHARE

    def ours() -> float:
        return rig.rate(rig.operated(rig.log(events), counted, {TOPIC: "user_id"}), events)

    def peer() -> float:
        return rig.rate(counted_by_spark(rig.stream(rig.log(few), TOPIC, "user_id")), few)

    pair = measure(options, _warm(options.wants("ours"), ours), _warm(options.wants("peer"), peer))
    what = "a stream counted by 100,000 keys, the counts that changed to a no-op sink"
    return [Figure("counter", what, "events/s", pair, "transformWithStateInPandas", Target(">=", 10))]


def fused(rig: StateRig, options: Options) -> list[Figure]:
    """The same count inside the source, beside the same events read and nothing done, and beside the one column that it reads."""
    events = events_of(options) * COUNTED_TIMES

    def count(events: DataFrame) -> DataFrame:
        return hw.totals(events, by="user_id", n="count")

    def ours() -> float:
        writer, checkpoint = rig.fused(rig.with_key(events), count, {KEYED: "user_id"}, uid="totals-1")
        return rig.rate(writer, events, checkpoint)

    def beside(columns: str) -> Pair:
        def read() -> float:
            return rig.rate(no_op(rig.stream(rig.with_key(events), KEYED, columns)), events)

        return measure(options, _warm(options.wants("ours"), ours), _warm(options.wants("peer"), read))

    what = "a stream counted by 100,000 keys inside the source that reads it, to a no-op sink"
    noop, column = "ours, the same events to a no-op sink", "ours, the keys of the same events to a no-op sink"
    return [
        Figure("fused_counter", what, "events/s", beside(ALL), noop, Target(">=", 1.2)),
        Figure("fused_counter_column", what, "events/s", beside("user_id"), column, None),
    ]


def operators(rig: StateRig, options: Options) -> list[Figure]:
    """Lookups and sliding aggregates, beside the same events read and nothing done."""
    events = events_of(options)
    url = rig.with_table(events)

    def looked_up(bids: DataFrame, rates: DataFrame) -> DataFrame:
        return hw.lookup(bids, rates, "user_id", at="at", table_at="since")

    def slid(bids: DataFrame) -> DataFrame:
        return hw.sliding(bids, by="user_id", over=OVER, at="at", n="count", total=("sum", "amount"))

    def inside() -> float:
        writer, checkpoint = rig.fused(rig.with_key(events), slid, {KEYED: ALL}, uid="sliding-1")
        return rig.rate(writer, events, checkpoint)

    def apart() -> float:
        return rig.rate(rig.operated(url, slid, {TOPIC: ALL}), events)

    def lookups_inside() -> float:
        writer, checkpoint = rig.fused(url, looked_up, {KEYED: ALL, TABLE: RATES}, uid="lookup-1")
        return rig.rate(writer, events, checkpoint)

    def lookups_apart() -> float:
        return rig.rate(rig.operated(url, looked_up, {TOPIC: ALL, TABLE: RATES}), events)

    def beside(ours: Callable[[], float], topic: str) -> Pair:
        def read() -> float:
            return rig.rate(no_op(rig.stream(rig.with_key(events), topic, ALL)), events)

        return measure(options, _warm(options.wants("ours"), ours), _warm(options.wants("peer"), read))

    noop, what = "ours, the same events to a no-op sink", f"each event with count and sum of its user's {OVER}"
    rate = "each event with the row that its user's rate was at its time"
    keyed = f"{what}, of a topic that is partitioned by its users"
    return [
        Figure(
            "lookup",
            f"{rate}, both partitioned by user",
            "events/s",
            beside(lookups_inside, KEYED),
            noop,
            Target(">=", 0.15),
        ),
        Figure("sliding", keyed, "events/s", beside(inside, KEYED), noop, Target(">=", 0.2)),
        Figure("lookup_shuffled", f"{rate}, behind a shuffle", "events/s", beside(lookups_apart, TOPIC), noop, None),
        Figure("sliding_shuffled", f"{what}, behind a shuffle", "events/s", beside(apart, TOPIC), noop, None),
    ]


def latency(rig: StateRig, options: Options) -> list[Figure]:
    """An application with an operator, inside the source or behind a shuffle, beside one without; all of the same topic."""
    seconds = SECONDS_QUICK if options.quick else SECONDS

    def inside() -> tuple[float, float]:
        return app_latency(rig, lambda events: counted(events, "key", passes=True), seconds=seconds, schema=NEVER_NULL)

    def apart() -> tuple[float, float]:
        return app_latency(
            rig, lambda events: counted(passed(events), "key", passes=True), seconds=seconds, schema=NEVER_NULL
        )

    def peer() -> tuple[float, float]:
        return app_latency(rig, passed, seconds=seconds, schema=NEVER_NULL)

    figures = []
    for prefix, ours, how, target in (
        ("latency", inside, "of a topic that is partitioned by it", Target("<=", 1.3)),
        ("latency_shuffled", apart, "behind a shuffle", None),
    ):
        pairs = measure_each(options, ours, peer, better="lower")
        what = f"one event at {EVENTS_PER_S}/s: topic, a stage that counts by key {how}, topic, reader"
        for name, pair, wanted in zip(("p50", "p99"), pairs, (target, None), strict=True):
            figures.append(Figure(f"{prefix}_{name}", what, "ms", pair, "ours without state", wanted))
    return figures


def _warm(is_wanted: bool, run: Callable[[], float]) -> Callable[[], float]:
    """Runs once before it is measured: the first one pays for compiling, and for filling the topics."""
    if is_wanted:
        run()
    return run


if __name__ == "__main__":
    with StateRig() as rig:
        benches = {
            "counter": lambda options: counter(rig, options),
            "fused": lambda options: fused(rig, options),
            "operators": lambda options: operators(rig, options),
            "latency": lambda options: latency(rig, options),
            "growth": growth,
            "rebuilding": rebuilding,
        }
        status = main("state", benches)
    raise SystemExit(status)
