"""An operator by event time inside a source, in an application on Spark: beside the same behind a shuffle, with late events, a kill, more
partitions, a lost state and a heartbeat."""

from __future__ import annotations

import shutil
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from headwater.log.log import Log
from headwater.testing import CRASH, AppTest

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATENESS_S, OVER_S = 10, 30
SCHEMA = "id BIGINT, who STRING NOT NULL, price BIGINT, at TIMESTAMP"
LATENESS = f"{LATENESS_S} seconds"

Row = dict[str, Any]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def inside(bids: DataFrame) -> DataFrame:
    return hw.sliding(bids, by="who", over=f"{OVER_S} seconds", n="count", most=("max", "price"))


def apart(bids: DataFrame) -> DataFrame:
    """The same rows, for which Spark has to look at each."""
    return inside(bids.where("abs(id) >= 0"))


def ranked(bids: DataFrame) -> DataFrame:
    """One inside the source, and what it gives behind a shuffle in another, by the same watermark."""
    return hw.dedupe(inside(bids).select("n", "at"), "n")


def make(**where: Any) -> hw.App:
    app = hw.App("auction", state_partitions=2, **where)
    bids = app.topic("bids", schema=SCHEMA, key="who", time="at", lateness=LATENESS, partitions=3)
    app.stream(bids, key="who", time="at", late="topic")(inside)
    app.stream(bids, key="who", time="at")(apart)
    app.stream(bids)(ranked)
    return app


def bids_of(random: Random, first: int, count: int) -> list[Row]:
    """Bids in the order of their arrival: most a little out of order, some too late, some without a time."""
    rows = []
    for number in range(first, first + count):
        behind = random.choice((0, 0, 2, LATENESS_S, 60))
        at = None if random.random() < 0.02 else NOON + timedelta(seconds=number - behind)
        rows.append({"id": number, "who": f"w{random.randrange(9)}", "price": random.randrange(1000), "at": at})
    return rows


def told(log: Log) -> tuple[list[Row], list[int]]:
    """Row by row: what sliding gives, and the ids that are late by their own partition, or have no time."""
    reached: dict[int, datetime] = {}
    in_time, late = list[Row](), list[int]()
    events = log.read("bids", columns=["id", "who", "price", "at", "_partition", "_offset"]).sort_by("_offset")
    for row in events.to_pylist():
        partition, at = row.pop("_partition"), row["at"]
        before = reached.get(partition)
        if at is None or (before is not None and at < before - timedelta(seconds=LATENESS_S)):
            late.append(row["id"])
        else:
            in_time.append(row)
            reached[partition] = max(before or at, at)
    watermark = min(reached.values()) - timedelta(seconds=LATENESS_S, microseconds=1)
    given = []
    for row in in_time:
        if row["at"] <= watermark:
            span = row["at"] - timedelta(seconds=OVER_S), row["at"]
            near = [r["price"] for r in in_time if r["who"] == row["who"] and span[0] <= r["at"] <= span[1]]
            given.append({**row, "n": len(near), "most": max(near)})
    return given, late


def as_set(rows: list[Row]) -> Counter[Any]:
    return Counter((row["id"], row["who"], row["at"], row["n"], row["most"]) for row in rows)


def test_a_kill_leaves_what_is_fused_as_it_would_be_apart() -> None:
    """The application is killed behind a batch, twice; nothing is given twice, and late events are kept once."""
    random = Random(5)
    feed: list[Any] = bids_of(random, 0, 240)
    feed.insert(160, CRASH)
    feed.insert(80, CRASH)
    with AppTest(make) as test:
        test.feed("bids", feed)
        test.run()
        given, late = told(test.log)
        assert len(given) > 100 and len(late) > 10
        assert as_set(test.read("inside")) == as_set(test.read("apart")) == as_set(given)
        assert sorted(row["id"] for row in test.read("inside.late")) == sorted(late)
        ranks = [(row["n"], row["at"]) for row in test.read("ranked")]
        assert sorted(ranks) == sorted({(row["n"], row["at"]) for row in given})


def test_what_is_fused_by_time_goes_on_from_its_state(tmp_path: Path, spark: SparkSession) -> None:
    """`plan` says what is; late events are counted as elsewhere, and the watermark is told; keys that move to another partition keep their
    state; a lost state is rebuilt as it was; and where only time passes, rows are given."""
    url, random = str(tmp_path / "log"), Random(3)
    late, seen = Counter[str](), Counter[str]()
    plan = make(log=url, spark=spark).plan()
    assert plan.count("sliding-1 runs inside the source of bids") == 2 and "dedupe-1 runs inside" not in plan

    def run(**how: Any) -> str | None:
        stages = {stage.name: stage for stage in make(log=url, spark=spark).run(available_now=True, **how).stages}
        late.update({name: stage.late for name, stage in stages.items()})
        assert all(stage.is_whole for stage in stages.values())
        seen.update(events=stages["inside"].events, inside=stages["inside"].given, apart=stages["apart"].given)
        return stages["inside"].watermark

    with hw.open_log(url) as log:
        log.create_topic("bids", SCHEMA, key="who", time="at", lateness=LATENESS, partitions=3)
        log.append("bids", bids_of(random, 0, 1500))
        run()
        given, late_ids = told(log)
        assert as_set(log.read("inside").to_pylist()) == as_set(given)
        assert late["inside"] == late["apart"] == late["ranked"] == len(late_ids) > 100
        log.alter_topic("bids", partitions=6)
        log.append("bids", bids_of(random, 1500, 200))
        run()
        shutil.rmtree(tmp_path / "log/apps/auction/checkpoints/inside/operators/sliding-1")
        log.append("bids", bids_of(random, 1700, 100))
        run(rebuild_state={"inside": "all"})
        before = log.read("inside").num_rows
        log.heartbeat("bids", NOON + timedelta(hours=2))
        assert run() == "2026-01-31T13:59:49.999Z"
        found = log.read("inside").to_pylist()
        assert len(found) > before, "time passed"
        assert as_set(found) == as_set(log.read("apart").to_pylist())
        assert len(found) + late["inside"] == seen["events"] == 1800 and late["inside"] == late["apart"]
        assert seen["inside"] == seen["apart"] == len(found), "each row that was given is in the result"
        assert log.read("inside.late").num_rows == late["inside"]
        written = spark.read.format("headwater").options(log=url, topic="inside", columns="_late").load()
        assert not written.where("_late").count(), "what was on time where it was read is so where it is written"


def beside(bids: DataFrame, lots: DataFrame) -> DataFrame:
    return inside(bids).select("who", "at").unionByName(lots)


def test_a_stage_by_time_with_two_inputs_is_not_fused(tmp_path: Path, spark: SparkSession) -> None:
    """Its watermark is that of the input which is furthest behind, and the source of the other does not know it."""
    app = hw.App("auction", log=str(tmp_path / "log"), spark=spark)
    bids = app.topic("bids", schema=SCHEMA, key="who", time="at", lateness=LATENESS)
    lots = app.topic("lots", schema="who STRING NOT NULL, at TIMESTAMP", key="who", time="at")
    app.stream(bids, lots)(beside)
    assert "sliding-1" in app.plan() and "runs inside" not in app.plan()
