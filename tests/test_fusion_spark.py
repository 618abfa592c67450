"""An operator inside a source, in an application on Spark: its topic gets more partitions, its state is lost and rebuilt."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from headwater.processing.state_list import find_states

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
    assert "totals-1 runs inside" not in app.plan()
    assert "reads bids: who, lot, price\n" in app.plan(), "and nothing that no operator needs"
    checkpoint = tmp_path / "log/apps/auction/checkpoints/winners"
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("bids", SCHEMA, key="who", partitions=2)
        feed(tmp_path, random, 1, 3000)
        status = app.run(available_now=True)
        assert status.stages[0].events == 3000
        log.alter_topic("bids", partitions=4)
        feed(tmp_path, random, 2, 300)
        make(tmp_path, spark).run(available_now=True)
        shutil.rmtree(checkpoint / "operators/top_n-1")
        feed(tmp_path, random, 3, 40)
        make(tmp_path, spark).run(available_now=True, rebuild_state={"winners": "all"})
        events = log.read("bids").to_pylist()
    rows = app.views["winners"].rows().to_pylist()
    assert {row["lot"]: (row["n"], row["total"]) for row in rows} == brute_force(events)
    kept = {state.operator: state for state in find_states(str(checkpoint))}
    assert kept["top_n-1"].partitions == 2, "as many as the topic was created with"
    assert sorted(path.name for path in (checkpoint / "operators/top_n-1").iterdir()) == [
        "00000-of-00002.topic",
        "00001-of-00002.topic",
    ]


def brute_force(events: list[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    best: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["who"] not in best or event["price"] > best[event["who"]]["price"]:
            best[event["who"]] = event
    lots = Counter(event["lot"] for event in best.values())
    return {lot: (n, sum(each["price"] for each in best.values() if each["lot"] == lot)) for lot, n in lots.items()}
