"""Our operators inside an application on Spark: killed behind a batch, restarted, cut in any way, equal to brute force."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame

import headwater as hw
from headwater.testing import CRASH, AppTest

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATENESS_S = 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def once(bids: DataFrame) -> DataFrame:
    return hw.dedupe(bids, "id")


def pace(bids: DataFrame) -> DataFrame:
    return hw.sliding(bids, by="who", over="30 seconds", n="count", most=("max", "price"))


def best(bids: DataFrame) -> DataFrame:
    return hw.top_n(bids, 2, by="who", order="price DESC")


def make() -> hw.App:
    app = hw.App("auction")
    schema = "id BIGINT, who STRING NOT NULL, price BIGINT, at TIMESTAMP"
    bids = app.topic("bids", schema=schema, key="who", time="at", lateness=f"{LATENESS_S} seconds", partitions=3)
    app.stream(bids, to="once", key="id")(once)
    app.stream(bids, to="pace", key="id")(pace)
    app.view(bids, key=["who", "rank"])(best)
    return app


def bid(number: int, random: Random) -> dict[str, Any]:
    at = NOON + timedelta(seconds=number)
    return {"id": number, "who": f"w{random.randrange(6)}", "price": random.randrange(1000), "at": at}


@pytest.mark.covers("SQLstream")
def test_operators_survive_crashes() -> None:
    """What was let through, the aggregates of each event that the watermark has passed, and the best: as over all events at once."""
    random = Random(1)
    bids = [bid(number, random) for number in range(150)]
    feed: list[Any] = []
    for start in range(0, 150, 30):
        part = bids[start : start + 30] + [dict(random.choice(bids[max(0, start - 10) : start + 30])) for _ in range(6)]
        feed += sorted(part, key=lambda row: row["at"] + timedelta(seconds=random.uniform(0, LATENESS_S)))
        if start in (30, 90):
            feed.append(CRASH)
    with AppTest(make) as test:
        test.feed("bids", feed)
        test.run()
        given = test.log.read("bids", columns=["id", "who", "price", "at", "_partition"]).to_pylist()
        assert sorted(row["id"] for row in test.read("once")) == sorted({row["id"] for row in given})
        passed = {row["id"]: row for row in test.read("pace")}
        assert len(test.read("pace")) == len(given) - sum(not is_passed(row, given) for row in given)
        for number, row in passed.items():
            near = [
                other for other in given
                if other["who"] == row["who"] and row["at"] - timedelta(seconds=30) <= other["at"] <= row["at"]
            ]  # fmt: skip
            assert (row["n"], row["most"]) == (len(near), max(other["price"] for other in near)), number
        ranks = {(row["who"], row["rank"]): (row["price"], row["id"]) for row in test.rows("best")}
        for who in {row["who"] for row in given}:
            mine = sorted((row for row in given if row["who"] == who), key=lambda row: (-row["price"], row["id"]))
            assert [ranks[who, rank] for rank in (1, 2)] == [(row["price"], row["id"]) for row in mine[:2]]


def is_passed(row: dict[str, Any], given: list[dict[str, Any]]) -> bool:
    """Whether the watermark is behind an event: every partition has come so far, less the lateness."""
    reached: dict[int, datetime] = {}
    for other in given:
        reached[other["_partition"]] = max(reached.get(other["_partition"], other["at"]), other["at"])
    return row["at"] < min(reached.values()) - timedelta(seconds=LATENESS_S)
