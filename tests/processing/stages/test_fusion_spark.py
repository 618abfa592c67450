"""An operator inside a source, in an application on Spark: its topic gets more partitions, its state is lost and rebuilt.

And why another operator is not inside one."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from headwater.processing.stages.analysis import Analysis, TopicFacts
from headwater.processing.state.state_info import find_states

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCHEMA = "who STRING NOT NULL, lot INT, price BIGINT, note STRING"


def winners(bids: DataFrame) -> DataFrame:
    """The first operator works where bids are partitioned, by who; the second by lot, behind a shuffle."""
    best = hw.top_n(bids.select("price", "who", "lot"), 1, by="who", order="price DESC")
    return hw.totals(best, by="lot", key="who", n="count", total=("sum", "price"))


def make(folder: Path, spark: SparkSession) -> hw.App:
    app = hw.App("auction", log=str(folder / "log"), spark=spark, state_partitions=2)
    bids = app.topic("bids", schema=SCHEMA, key="who", partitions=2)
    app.view(bids, key="lot")(winners)
    return app


def feed(folder: Path, random: Random, number: int, count: int) -> None:
    with hw.open_log(folder / "log") as log:
        rows = [
            {"who": f"w{random.randrange(40)}", "lot": random.randrange(5), "price": 1000 * number + place}
            for place in range(count)
        ]
        log.append("bids", random.sample(rows, count))


def test_what_is_fused_goes_on_from_its_state(tmp_path: Path, spark: SparkSession) -> None:
    """`plan` says what is; keys that move to another partition keep their state; a lost state is rebuilt as it was."""
    random, app = Random(3), make(tmp_path, spark)
    assert "top_n-1 runs inside the source of bids" in app.plan()
    assert "totals-1 is not fused: its input is not just columns of a topic" in app.plan()
    assert "reads bids: who, lot, price\n" in app.plan(), "and nothing that no operator needs"
    checkpoint = tmp_path / "log/apps/auction/checkpoints/winners"
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("bids", SCHEMA, key="who", partitions=2)
        feed(tmp_path, random, 1, 3000)
        [stage] = app.run(available_now=True).stages
        assert stage.is_whole and (stage.events, stage.given, stage.late) == (3000, 3000, 0)
        log.alter_topic("bids", partitions=4)
        feed(tmp_path, random, 2, 300)
        [stage] = make(tmp_path, spark).run(available_now=True).stages
        assert stage.is_whole and (stage.events, stage.given, stage.late) == (300, 300, 0)
        shutil.rmtree(checkpoint / "operators/top_n-1")
        feed(tmp_path, random, 3, 40)
        [stage] = make(tmp_path, spark).run(available_now=True, rebuild_state={"winners": "all"}).stages
        assert stage.is_whole and (stage.events, stage.given, stage.late) == (40, 40, 0)
        events = log.read("bids").to_pylist()
    rows = app.views["winners"].rows().to_pylist()
    assert {row["lot"]: (row["n"], row["total"]) for row in rows} == brute_force(events)
    kept = {state.operator: state for state in find_states(str(checkpoint))}
    assert kept["top_n-1"].partitions == 2, "as many as the topic was created with"
    assert sorted(path.name for path in (checkpoint / "operators/top_n-1").iterdir()) == [
        "00000-of-00002.topic",
        "00001-of-00002.topic",
    ]


def inside(bids: DataFrame) -> DataFrame:
    return hw.totals(bids, by=["lot", "who"], n="count", uid="inside")


def by_lot(bids: DataFrame) -> DataFrame:
    return hw.totals(bids, by="lot", n="count", uid="by_lot")


def ranked(bids: DataFrame) -> DataFrame:
    return hw.top_n(bids, 1, by="lot", order="rate DESC", uid="ranked")


def nullable(asks: DataFrame) -> DataFrame:
    return hw.totals(asks, by="who", n="count", uid="nullable")


def chosen(bids: DataFrame) -> DataFrame:
    return hw.totals(bids.where("lot > 3"), by="who", n="count", uid="chosen")


def computed(bids: DataFrame) -> DataFrame:
    return hw.totals(bids.where("lot + 1 > 4"), by="who", n="count", uid="computed")


def by_rate(bids: DataFrame) -> DataFrame:
    return hw.totals(bids, by=["who", "rate"], n="count", uid="by_rate")


def twice(bids: DataFrame) -> DataFrame:
    return hw.totals(bids, by="who", n="count", uid="twice").unionByName(bids.selectExpr("who", "1L AS n"))


def timed(bids: DataFrame, asks: DataFrame) -> DataFrame:
    return hw.sliding(bids, by="who", over="1 minute", at="at", n="count", uid="timed")


def looked_up(bids: DataFrame, lots: Any) -> DataFrame:
    return hw.lookup(bids, lots, on="lot", at="at", uid="looked_up")


def together(bids: DataFrame, people: Any) -> DataFrame:
    return hw.lookup(bids, people, on="who", at="at", uid="together")


def finer(bids: DataFrame, crowd: Any) -> DataFrame:
    return hw.lookup(bids, crowd, on="who", at="at", uid="finer")


def crossed(bids: DataFrame, places: DataFrame) -> DataFrame:
    return hw.lookup(bids, places, on=["who", "place"], at="at", table_at="since", uid="crossed")


APART = {
    "by_lot": "the key of bids is who, the operator's is (lot)",
    "ranked": "the key of bids is who, the operator's is (lot)",
    "nullable": "asks has no key that is NOT NULL and of a type that can be hashed here",
    "computed": "its input is not just columns of a topic",
    "by_rate": "rate of its key can be hashed by Spark only",
    "twice": "the stage reads bids 2 times",
    "timed": "the stage works by event time over 2 inputs",
    "looked_up": "the key of bids is who, the operator's is (lot)",
    "finer": "bids has 4 partitions, crowd has 8",
    "crossed": "bids and places are partitioned by different columns of its key",
}


def test_plan_says_why_an_operator_is_not_inside_a_source(tmp_path: Path, spark: SparkSession) -> None:
    """One reason for each rule; on a log that is no folder there is one for all."""
    app = hw.App("auction", log=str(tmp_path / "log"), spark=spark)
    schema = "who STRING NOT NULL, place STRING, lot INT, rate DOUBLE, at TIMESTAMP"
    bids = app.topic("bids", schema=schema, key="who", time="at")
    asks = app.topic("asks", schema="who STRING, lot INT", key="who")
    lots = app.table("lots", schema="lot INT NOT NULL, name STRING, since TIMESTAMP", key="lot", time="since")
    person = "who STRING NOT NULL, name STRING, since TIMESTAMP"
    people = app.table("people", schema=person, key="who", time="since")
    crowd = app.table("crowd", schema=person, key="who", time="since", partitions=8)
    place = "who STRING, place STRING NOT NULL, name STRING, since TIMESTAMP"
    places = app.topic("places", schema=place, key="place", time="since")
    for function in (inside, by_lot, ranked, chosen, computed, by_rate, twice):
        app.stream(bids)(function)
    for table, function in ((people, together), (crowd, finer), (places, crossed)):
        app.stream(bids, table)(function)
    app.stream(asks)(nullable)
    app.stream(bids, asks)(timed)
    app.stream(bids, lots)(looked_up)
    told = dict(line.strip().split(" is not fused: ") for line in app.plan().splitlines() if " is not fused: " in line)
    assert {uid.rpartition(" ")[2]: why for uid, why in told.items()} == APART
    assert "inside runs inside the source of bids" in app.plan()
    assert "chosen runs inside the source of bids" in app.plan(), "Arrow can ask what it asks"
    assert app.plan().count("has its rows combined") == 1
    assert "ranked has its rows combined inside the source of bids" in app.plan()
    assert "together runs inside the source of bids and people" in app.plan()

    def facts(topic: str) -> TopicFacts:
        node = app.graph.topics[topic]
        assert node.schema is not None
        return TopicFacts(node.schema, node.settings.get("time"), is_table=node.is_table)

    elsewhere = Analysis(spark, app.graph, facts, is_placed_by_key=False).run()
    assert {uid: why for stage in elsewhere.values() for uid, why in stage.apart.items()} == dict.fromkeys(
        ["inside", "chosen", "together", *APART], "the log is not a folder"
    )


def brute_force(events: list[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    best: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["who"] not in best or event["price"] > best[event["who"]]["price"]:
            best[event["who"]] = event
    lots = Counter(event["lot"] for event in best.values())
    return {lot: (n, sum(each["price"] for each in best.values() if each["lot"] == lot)) for lot, n in lots.items()}
