"""`hw.windowed` and `hw.top_n` of windows on Spark: windows are Spark's own, survive crashes, and what makes no sense is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.model.errors import InvalidInput
from headwater.testing import CRASH, AppTest
from tests.processing.operators.test_windowed import sessions, windows

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATENESS_S, SECOND = 20, 1_000_000
WINDOWS: list[dict[str, str]] = [
    {"over": "10 seconds"}, {"over": "10 seconds", "every": "2 seconds"}, {"over": "7 seconds", "every": "3 seconds"},
    {"gap": "10 seconds"},
]  # fmt: skip


@pytest.fixture(scope="module")
def bids(spark: SparkSession) -> DataFrame:
    """Some at the very edge of windows and sessions, some before 1970, one without a time."""
    random = Random(7)
    times = [random.choice([-100, 0, 10_000]) + random.randrange(90) for _ in range(300)]
    edge = [timedelta(seconds=at, microseconds=random.choice([-1, 0, 0, 1, 400_000])) for at in times]
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    rows = [
        (random.choice(["a", "b", None]), random.choice([None, *range(9)]), epoch + at) for at in edge
    ] + [("a", 1, None)]  # fmt: skip
    return spark.createDataFrame(rows, "who STRING, price BIGINT, at TIMESTAMP")


@pytest.mark.parametrize("shape", WINDOWS, ids=repr)
def test_windows_are_sparks(bids: DataFrame, shape: dict[str, str]) -> None:
    """Aligned to 1970, without their end; a session with what comes exactly a gap after its last row."""
    ours = hw.windowed(bids, by="who", **shape, n="count", total=("sum", "price"), mean=("avg", "price"), low=("min", "price"))  # fmt: skip
    at = (
        F.session_window("at", shape["gap"])
        if "gap" in shape
        else F.window("at", shape["over"], shape.get("every", shape["over"]))
    )
    grouped = bids.groupBy("who", at.alias("w")).agg(
        F.count("*").alias("n"), F.sum("price").alias("total"), F.avg("price").alias("mean"), F.min("price").alias("low")
    )  # fmt: skip
    theirs = grouped.select("who", "w.start", "w.end", "n", "total", "mean", "low")
    assert sorted(map(repr, ours.toArrow().to_pylist())) == sorted(
        map(repr, theirs.withColumnsRenamed({"start": "window_start", "end": "window_end"}).toArrow().to_pylist())
    )


def test_without_a_key_all_rows_belong_together(bids: DataFrame) -> None:
    """And the key that they share is not shown."""
    found = hw.windowed(bids, over="1 day", n="count")
    assert found.columns == ["window_start", "window_end", "n"]
    assert sorted(row.n for row in found.collect()) == sorted(
        row["count"] for row in bids.where("at IS NOT NULL").groupBy(F.window("at", "1 day")).count().collect()
    )
    best = hw.top_n(bids, 1, order="price DESC", over="1 day", ties=True)
    assert best.columns == ["rank", "who", "price", "at", "window_start", "window_end"]
    assert {(row["rank"], row.price) for row in best.collect()} == {(1, 8)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"over": "0 seconds", "n": "count"}, "is empty"),
        ({"over": "5 seconds", "every": "0 seconds", "n": "count"}, "is empty"),
        ({"over": "5 seconds", "every": "6 seconds", "n": "count"}, "rows would be lost"),
        ({"over": "5 seconds", "gap": "6 seconds", "n": "count"}, "exclude each other"),
        ({"n": "count"}, "both missing"),
        ({"gap": "0 seconds", "n": "count"}, "is none"),
        ({"gap": "5 seconds", "every": "1 second", "n": "count"}, "every= does not apply"),
        ({"over": "5 seconds"}, "No aggregate"),
        ({"over": "5 seconds", "n": ("distinct", "who")}, "aggregate 'distinct' is not available"),
        ({"over": "5 seconds", "n": ("sum", "cost")}, "sum of which column"),
        ({"over": "5 seconds", "n": ("sum", "who")}, "has no sum"),
        ({"over": "5 seconds", "window_end": "count"}, "already"),
        ({"over": "5 seconds", "by": "whom", "n": "count"}, "'whom' to group by does not exist"),
        ({"over": "5 seconds", "at": "price", "n": "count"}, "'price' with times .TIMESTAMP. does not exist"),
    ],
)
def test_what_makes_no_sense_is_refused(bids: DataFrame, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        hw.windowed(bids, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"over": "0 seconds"}, "is empty"),
        ({"over": "5 seconds", "every": "6 seconds"}, "rows would be lost"),
        ({"over": "5 seconds", "key": "who"}, "when its rows change"),
        ({"by": "who", "ties": True}, "for windows"),
        ({"by": "who", "every": "5 seconds"}, "for windows"),
        ({}, "by= is missing"),
        ({"over": "5 seconds", "by": "whom"}, "key column 'whom' does not exist"),
    ],
)
def test_the_best_of_no_window_are_refused(bids: DataFrame, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        hw.top_n(bids, 1, order="price", **settings)


def test_windows_of_windows_need_other_names(bids: DataFrame) -> None:
    counted = hw.windowed(bids, by="who", over="5 seconds", n="count")
    with pytest.raises(InvalidInput, match="'window_start' of its own"):
        hw.top_n(counted, 1, order="n", over="5 seconds", at="window_end")
    with pytest.raises(InvalidInput, match="'window_end' of its own"):
        hw.windowed(counted, by="window_end", over="5 seconds", at="window_end", m="count")


def hopping(bids: DataFrame) -> DataFrame:
    return hw.windowed(bids, by="who", over="10 seconds", every="5 seconds", n="count", most=("max", "price"))


def visits(bids: DataFrame) -> DataFrame:
    return hw.windowed(bids, by="who", gap="10 seconds", n="count")


def highest(bids: DataFrame) -> DataFrame:
    return hw.top_n(bids, 1, order="price DESC", over="10 seconds", ties=True)


def busiest(bids: DataFrame) -> DataFrame:
    """Operators behind each other: who has the most bids, of the windows that end at the same time."""
    counted = hw.windowed(bids, by="who", over="10 seconds", every="5 seconds", n="count")
    named = counted.select("who", "n", F.col("window_end").alias("ended"))
    return hw.top_n(named, 1, order="n DESC", over="5 seconds", at="ended", ties=True).select("who", "n", "ended")


def make() -> hw.App:
    app = hw.App("auction")
    schema = "id BIGINT, who STRING NOT NULL, price BIGINT, at TIMESTAMP"
    bids = app.topic("bids", schema=schema, key="who", time="at", lateness=f"{LATENESS_S} seconds", partitions=3)
    for function, time in ((hopping, "window_end"), (visits, "window_end"), (highest, "at"), (busiest, "ended")):
        app.stream(bids, to=function.__name__, time=time)(function)
    return app


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_windows_survive_crashes() -> None:
    """Each that the watermark has passed is given once, as over all events at once."""
    random = Random(1)
    bids = [
        {"id": n, "who": f"w{random.randrange(6)}", "price": random.randrange(9), "at": NOON + timedelta(seconds=n)}
        for n in range(150)
    ]
    feed: list[Any] = []
    for start in range(0, 150, 30):
        part = bids[start : start + 30]
        feed += sorted(part, key=lambda row: row["at"] + timedelta(seconds=random.uniform(0, LATENESS_S)))
        if start in (30, 90):
            feed.append(CRASH)
    with AppTest(make) as test:
        test.feed("bids", feed)
        test.run()
        test.log.heartbeat("bids", NOON + timedelta(hours=1))
        status = test.run()
        assert {stage.late for stage in status.stages} == {0}
        assert sum(row["n"] for row in test.read("visits")) == test.log.read("bids").num_rows == len(bids)
        rows = [{"id": bid["who"], "v": bid["price"], "at": _micros(bid["at"])} for bid in bids]
        counted = windows(rows, 10 * SECOND, 5 * SECOND, {"n": "count", "high": "max"})
        assert told(test.read("hopping")) == sorted(tuple(row.values()) for row in counted)
        assert told(test.read("visits")) == sorted(
            tuple(row.values()) for row in sessions(rows, 10 * SECOND, {"n": "count"})
        )
        tumbling = {row["at"] // (10 * SECOND): list[dict[str, Any]]() for row in rows}
        for row in rows:
            tumbling[row["at"] // (10 * SECOND)].append(row)
        best = [row for mine in tumbling.values() for row in mine if row["v"] == max(other["v"] for other in mine)]
        assert sorted(_micros(row["at"]) for row in test.read("highest")) == sorted(row["at"] for row in best)
        most = {
            row["window_end"]: max(r["n"] for r in counted if r["window_end"] == row["window_end"]) for row in counted
        }
        assert told(test.read("busiest")) == sorted(
            (row["id"], row["n"], row["window_end"]) for row in counted if row["n"] == most[row["window_end"]]
        )


def told(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted(tuple(_micros(value) for value in row.values()) for row in rows)


def _micros(value: Any) -> Any:
    return round(value.timestamp() * SECOND) if isinstance(value, datetime) else value
