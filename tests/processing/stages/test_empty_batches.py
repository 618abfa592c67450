"""Batches that give nothing, one row, or have nothing but late events, through every kind of stage, every operator and every mode."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.processing.graph.table import Table
from tests.rigs.spark import patiently

Row = dict[str, Any]

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
BIDS = "id BIGINT NOT NULL, who STRING NOT NULL, item STRING NOT NULL, at TIMESTAMP"
ITEMS = "item STRING NOT NULL, name STRING, since TIMESTAMP"
BATCH = 40

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def never(bids: DataFrame) -> DataFrame:
    return bids.where("id = -1")


def last(bids: DataFrame) -> DataFrame:
    return bids.where(f"id = {BATCH}")


def once(bids: DataFrame) -> DataFrame:
    return hw.dedupe(bids, "id")


def once_inside(bids: DataFrame) -> DataFrame:
    return hw.dedupe(bids, ["who", "id"])


def paced(bids: DataFrame) -> DataFrame:
    return hw.sliding(bids, by="item", over="1 minute", n="count")


def named(bids: DataFrame, items: Table) -> DataFrame:
    return hw.lookup(bids, items, on="item", at="at")


def minutes(bids: DataFrame) -> DataFrame:
    return hw.windowed(bids, by="item", over="10 seconds", n="count")


def visits(bids: DataFrame) -> DataFrame:
    return hw.windowed(bids, by="item", gap="5 seconds", n="count")


def rises(bids: DataFrame) -> DataFrame:
    return hw.detect(
        bids,
        key="item",
        at="at",
        steps=[hw.step("low"), hw.step("high", "id > 0")],
        within="10 seconds",
        first="low.id",
    )


def searched(bids: DataFrame, items: Table) -> DataFrame:
    saved = items.versions.select(
        F.col("item").alias("search"), F.lit("w1").alias("query"), F.col("since").alias("changed")
    )
    return hw.percolate(bids, saved, ["who"], at="at", searches_at="changed")


def best(bids: DataFrame) -> DataFrame:
    return hw.top_n(bids, 2, by="item", order="id", over="10 seconds")


def ranked(bids: DataFrame) -> DataFrame:
    return hw.top_n(bids, 2, by="item", order="id DESC")


def sums(bids: DataFrame) -> DataFrame:
    return hw.totals(bids, by="item", n="count", until=("max", "at"))


def windows(bids: DataFrame) -> DataFrame:
    grouped = bids.groupBy(F.window("at", "10 seconds").alias("w"), "item").count()
    return grouped.select(F.col("w.start").alias("at"), "item", "count")


def counts(bids: DataFrame) -> DataFrame:
    return bids.groupBy("item").agg(F.count("*").alias("n"), F.max("at").alias("at"))


def no_rows(bids: DataFrame) -> DataFrame:
    return never(bids).select("id", "item")


def per_item(bids: DataFrame) -> DataFrame:
    return never(bids).groupBy("item").count()


def all_items(bids: DataFrame) -> DataFrame:
    return bids.groupBy("item").count()


TIMED: dict[Callable[..., DataFrame], str] = {
    once: "at", once_inside: "at", paced: "at", named: "at", minutes: "window_end", visits: "window_end", best: "window_end",
    windows: "at", rises: "matched_at", searched: "at",
}  # fmt: skip
"""What works by event time, and the time of its result."""

UNTIMED: dict[Callable[..., DataFrame], str] = {never: "at", last: "at", ranked: "at", sums: "until"}


def application(url: str, spark: SparkSession) -> hw.App:
    app = hw.App("empty", log=url, spark=spark, state_partitions=2)
    bids = app.topic("bids", schema=BIDS, key="who", time="at", partitions=1)
    items = app.table("items", ITEMS, key="item", time="since", partitions=1)
    for function, time in {**TIMED, **UNTIMED}.items():
        inputs = (bids, items) if function in (named, searched) else (bids,)
        late: dict[str, Any] = {"late": "topic"} if function in (once, windows) else {}
        app.stream(*inputs, key="item", time=time, partitions=2, events_max=BATCH, **late)(function)
    app.stream(bids, key="item", time="at", mode="update", events_max=BATCH)(counts)
    app.view(bids, key="id", mode="append", events_max=BATCH)(no_rows)
    app.view(bids, key="item", mode="update", events_max=BATCH)(per_item)
    app.view(bids, key="item", mode="complete", events_max=BATCH)(all_items)
    return app


def sinks(app: hw.App, folder: Path) -> None:
    """Of topics that have no rows, and of one that has few."""
    for number, topic in enumerate(("last", "once.late")):
        app.sink(topic, to=f"{folder}/files-{number}", name=f"files_{number}", events_max=BATCH)
        app.sink(topic, to=f"sqlite:///{folder}/target.db?table=t{number}", key="id", name=f"rows_{number}")


def bid(number: int, second: int) -> Row:
    return {"id": number, "who": f"w{number % 5}", "item": f"i{number % 3}", "at": NOON + timedelta(seconds=second)}


def test_batches_that_give_nothing_stop_no_stage(spark: SparkSession, tmp_path: Path) -> None:
    """A batch of events, one of their copies, one that is late as a whole, and one of a single event; each stage reads them so. All are
    accounted for, and what is in the results is what on-time events give."""
    fresh = [bid(number, 100 + number) for number in range(BATCH)]
    late = [bid(1000 + number, number) for number in range(BATCH)]
    rows = [*fresh, *([fresh[-1]] * BATCH), *late, bid(BATCH, 200)]
    with hw.open_log(tmp_path / "log") as log:
        app = application(log.url, spark)
        sinks(app, tmp_path)
        log.create_topic("bids", BIDS, key="who", time="at", partitions=1)
        log.append("bids", rows)
        log.create_topic("items", ITEMS, key="item", time="since", partitions=1, compact=True)
        log.append("items", [{"item": f"i{number}", "name": "n", "since": NOON} for number in range(3)])
        log.heartbeat("items", NOON + timedelta(hours=1))
        status = patiently(lambda: app.run(available_now=True, check=False))
        assert {stage.name: (stage.state, stage.error) for stage in status.stages if stage.state != "done"} == {}
        timed = {function.__name__ for function in TIMED}
        for stage in status.stages:
            assert stage.is_whole, stage.name
            if stage.inputs[0] == "bids" and not stage.name.endswith(".late"):
                assert stage.late == (BATCH if stage.name in timed else 0), stage.name
                assert stage.events == len(rows) + (3 if stage.name in ("named", "searched") else 0), stage.name
        found = {name: log.read(name).num_rows for name in log.topics()}
        assert (found["never"], found["last"], found["once"], found["once_inside"]) == (0, 1, BATCH + 1, BATCH + 1)
        assert (found["paced"], found["named"]) == (2 * BATCH, 2 * BATCH), "all but the last, which time has not passed"
        assert found["searched"] == 3 * BATCH // 5, "three searches for one word, which every fifth bid has"
        assert found["rises"] == 39, "54, 13 and 13 rows of the items, two by two"
        assert sum(row["n"] for row in log.read("minutes").to_pylist()) == 2 * BATCH
        assert sum(row["n"] for row in log.read("visits").to_pylist()) == 2 * BATCH
        assert sum(row["count"] for row in log.read("windows").to_pylist()) == 2 * BATCH
        assert (found["once.late"], found["windows.late"]) == (BATCH, BATCH)
        totals = {row["item"]: row["n"] for row in log.read("sums").to_pylist()}
        assert sum(totals.values()) == len(rows)
        for name, wanted in (("no_rows", 0), ("per_item", 0), ("all_items", 3)):
            with app.views[name] as view:
                assert view.rows().num_rows == wanted, name
