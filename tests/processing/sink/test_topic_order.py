"""The order of the topics that stages write, in applications: nothing on time where a stage read it is late where the next one reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.log.log import Log
from headwater.processing.graph.table import Table
from tests.rigs.spark import patiently

Row = dict[str, Any]

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATENESS_S = 5
LATENESS = f"{LATENESS_S} seconds"
BIDS = "id BIGINT NOT NULL, who STRING NOT NULL, item STRING NOT NULL, at TIMESTAMP"
ITEMS = "item STRING NOT NULL, name STRING, since TIMESTAMP"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def filtered(bids: DataFrame) -> DataFrame:
    return bids.where("id % 7 <> 0")


def shuffled(bids: DataFrame) -> DataFrame:
    return bids.repartition(3, "item")


def once(bids: DataFrame) -> DataFrame:
    return hw.dedupe(bids, "id")


def paced(bids: DataFrame) -> DataFrame:
    return hw.sliding(bids, by="item", over="1 minute", n="count")


def named(bids: DataFrame, items: Table) -> DataFrame:
    return hw.lookup(bids, items, on="item", at="at")


def minutes(bids: DataFrame) -> DataFrame:
    return hw.windowed(bids, by=["item", "who"], over="10 seconds", id=("max", "id")).withColumnRenamed(
        "window_end", "at"
    )


def visits(bids: DataFrame) -> DataFrame:
    return hw.windowed(bids, by=["item", "who"], gap="20 seconds", id=("max", "id")).withColumnRenamed(
        "window_end", "at"
    )


def best(bids: DataFrame) -> DataFrame:
    return hw.top_n(bids, 3, by="item", order="id", over="10 seconds").withColumnRenamed("window_end", "at_end")


def sums(bids: DataFrame) -> DataFrame:
    counted = hw.totals(bids, by=["item", "who"], until=("max", "at"), id=("max", "id"))
    return counted.withColumnRenamed("until", "at")


def windows(bids: DataFrame) -> DataFrame:
    grouped = bids.groupBy(F.window("at", "10 seconds").alias("w"), "item", "who").agg(F.max("id").alias("id"))
    return grouped.select(F.col("w.start").alias("at"), "item", "who", "id")


def pairs(bids: DataFrame) -> DataFrame:
    """Bids with those for the same item in the two seconds before: a join of two streams."""
    earlier = bids.select(F.col("item").alias("same"), F.col("at").alias("then"))
    is_near = F.col("then").between(F.col("at") - F.expr("INTERVAL 2 SECONDS"), F.col("at"))
    return bids.join(earlier, (F.col("item") == F.col("same")) & is_near).select("id", "who", "item", "at")


def numbered(bids: DataFrame) -> DataFrame:
    """A stateful function of a user's, which gives its rows key by key."""
    return bids.groupBy("item").applyInPandasWithState(
        number_rows, "id BIGINT, who STRING, item STRING, at TIMESTAMP, n BIGINT", "n BIGINT", "append", "NoTimeout"
    )


def number_rows(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
    """Each row with how many its key had before."""
    (before,) = state.getOption or (0,)
    for rows in frames:
        yield rows.assign(n=range(before, before + len(rows)))[["id", "who", "item", "at", "n"]]
        before += len(rows)
    state.update((before,))


STAGES: list[Callable[..., DataFrame]] = [
    filtered, shuffled, once, paced, named, minutes, visits, best, sums, windows, pairs, numbered,
]  # fmt: skip


def bids_of(random: Random, first: int, count: int) -> list[Row]:
    """A bid a second or so, a little out of order, a few of them late; some come twice."""
    rows: list[Row] = []
    for number in range(first, first + count):
        behind = random.choice((0, 0, 1, LATENESS_S - 1)) + (60 if random.random() < 0.02 else 0)
        at = NOON + timedelta(seconds=number - behind, milliseconds=random.randrange(999))
        rows.append({"id": number, "who": f"w{random.randrange(30)}", "item": f"i{random.randrange(9)}", "at": at})
        if random.random() < 0.05:
            rows.append(rows[-1])
    return rows


def late_in(log: Log, topic: str, time: str = "at") -> list[Row]:
    """The events that are late by their own partition, event by event: an oracle that shares no code."""
    late: list[Row] = []
    reached: dict[int, datetime] = {}
    events = log.read(topic, columns=["id", time, "_partition", "_offset"]).to_pylist()
    for row in sorted(events, key=lambda row: (row["_partition"], row["_offset"])):
        at, partition = row[time], row["_partition"]
        if partition in reached and at < reached[partition] - timedelta(seconds=LATENESS_S):
            late.append(row)
        reached[partition] = max(at, reached.get(partition, at))
    return late


def application(log: Log, spark: SparkSession, random: Random) -> hw.App:
    """Every kind of stage, each into a topic whose key and partitions are chosen by the seed."""
    partitions = random.choice((1, 3))
    app = hw.App("order", log=log.url, spark=spark, state_partitions=random.choice((1, 3)))
    bids = app.topic("bids", schema=BIDS, key="who", time="at", lateness=LATENESS, partitions=partitions)
    items = app.table("items", ITEMS, key="item", time="since", partitions=1)
    for function in STAGES:
        inputs = (bids, items) if function is named else (bids,)
        key, time = random.choice(("id", "who", "item")), "at_end" if function is best else "at"
        into: dict[str, Any] = {"key": key, "time": time, "lateness": LATENESS, "partitions": random.choice((1, 2, 4))}
        app.stream(*inputs, **into)(function)
    return app


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.bench), pytest.param(2, marks=pytest.mark.bench)]
)
def test_what_was_on_time_is_on_time_in_every_topic_that_is_written(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    """A backlog, and then a little: of no operator, with no key of its topic and in no partition does an event come too late that was not
    late where its stage read it."""
    random = Random(seed)
    with hw.open_log(tmp_path / "log") as log:
        app = application(log, spark, random)
        log.create_topic("items", ITEMS, key="item", time="since", partitions=1, compact=True)
        log.append("items", [{"item": f"i{n}", "name": f"n{n}", "since": NOON} for n in range(9)])
        log.heartbeat("items", NOON + timedelta(hours=2))
        partitions = app.graph.topics["bids"].settings["partitions"]
        log.create_topic("bids", BIDS, key="who", time="at", lateness=LATENESS, partitions=partitions)
        for first, count in ((0, 1500), (1500, 90)):
            rows = bids_of(random, first, count)
            log.append("bids", rows)
            status = patiently(lambda: app.run(available_now=True))
            assert all(stage.is_whole for stage in status.stages)
            late = late_in(log, "bids")
            assert late, "some are late where they are read"
            for function in STAGES:
                time = "at_end" if function is best else "at"
                found = late_in(log, function.__name__, time)
                if function in (
                    filtered,
                    shuffled,
                    sums,
                    numbered,
                ):  # for which no time matters: what was late before may be late again
                    assert {row["id"] for row in found} <= {row["id"] for row in late}, function.__name__
                else:
                    assert found == [], function.__name__
                assert log.read(function.__name__).num_rows > 100


def per_minute(once: DataFrame) -> DataFrame:
    return hw.windowed(once, by="item", over="1 minute", n="count")


def test_a_topic_behind_dedupe_with_another_key_loses_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """3,000 events in order, without copies, into a topic with another key: each is counted in its window, and none is late."""
    with hw.open_log(tmp_path / "log") as log:
        app = hw.App("behind", log=log.url, spark=spark)
        bids = app.topic("bids", schema=BIDS, key="who", time="at", partitions=3)
        app.stream(bids, key="item", time="at", partitions=3)(once)
        app.stream(once)(per_minute)
        log.create_topic("bids", BIDS, key="who", time="at", partitions=3)
        rows = [
            {"id": n, "who": f"w{n % 30}", "item": f"i{n % 9}", "at": NOON + timedelta(seconds=n)} for n in range(3000)
        ]
        log.append("bids", rows)
        stages = {stage.name: stage for stage in patiently(lambda: app.run(available_now=True)).stages}
        assert (stages["once"].late, stages["per_minute"].late) == (0, 0)
        assert sum(row["n"] for row in log.read("per_minute").to_pylist()) == 49 * 60, "all minutes but the last"
