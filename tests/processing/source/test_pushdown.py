"""Conditions that a stage begins with are asked in its source: never a row less than Spark lets through, and rarely one more."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.processing.source.pushdown import PushedFilter, condition_above
from headwater.processing.spark.plans import kind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUMBERS = [None, 0, 1, -1, 122, 123, -123, 246, 2**31, -(2**63), 2**63 - 1]
TEXTS = [None, "", "a", "b'", "a\\", "Ä", "a "]
TRUTHS = [None, True, False]
VALUES = list(itertools.product(NUMBERS, TEXTS, TRUTHS))
ROWS = pa.table(
    {
        "row": pa.array(range(len(VALUES)), pa.int64()),
        "n": pa.array([n for n, _, _ in VALUES], pa.int64()),
        "t": pa.array([t for _, t, _ in VALUES], pa.string()),
        "b": pa.array([b for _, _, b in VALUES], pa.bool_()),
        "at": pa.array([row * 500_000 for row in range(len(VALUES))], pa.timestamp("us", "UTC")),
    }
)
UNDERSTOOD = [
    "n % 123 = 0",
    "n % 7 > -3",
    "n = 123",
    "5 < n",
    "n >= 122 AND t = 'a'",
    "n <= 0 OR t IS NULL",
    "NOT (n = 1)",
    "NOT (n = 1 OR t = 'a')",
    "n IN (1, 123, 246)",
    "NOT n IN (1, 123)",
    "t IN ('', 'Ä')",
    't = "b\'"',
    "t = 'a\\\\'",
    "t < 'b'",
    "b",
    "b = false OR n = 0",
    "n IS NULL AND t IS NOT NULL",
    "n * 0.908BD > 111.684BD",
    "111.684 <= 0.908BD * n",
    "CAST(n * 0.908BD AS DECIMAL(23, 3)) < 1.0",
    "n * 2.5BD <= -307.5",
    "NOT (n * 0.3BD >= 37)",
    "at >= TIMESTAMP '1970-01-01 00:00:30Z'",
]
IN_PART = ["n > 0 AND length(t) = 1", "n > 0 AND t LIKE '%a%'", "n % 123 = 0 AND n / 2 > 100"]
NOT_AT_ALL = [
    "length(t) = 1",
    "n > 0 OR length(t) = 1",
    "n = row",
    "n / 3 > 0",
    "rand() < 0.5",
    "n % -5 = 0",
    "n * -1.5BD > 0",
    "n * 0.5BD = 61.5",
    "n * 1.5D > 0",
    "n * 1.234567E-21BD > 1",
    "CAST(n * 0.908BD AS DECIMAL(10, 0)) < 112",
    "CAST(t AS DECIMAL(20, 0)) * 0.5BD > 1",
]


@pytest.fixture(scope="module")
def frame(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """The rows, from a file: of rows in memory Spark gives the answer while it plans."""
    file = tmp_path_factory.mktemp("pushing") / "rows.parquet"
    pq.write_table(ROWS, file)
    return spark.read.parquet(str(file))


def asked(frame: DataFrame, condition: str) -> str | None:
    node, above = frame.where(condition)._jdf.queryExecution().optimizedPlan(), []
    while kind(node) in ("Filter", "Project"):
        above.append(node)
        node = node.child()
    return condition_above(above)


def let_through(where: str) -> set[int]:
    (rows,) = ROWS.combine_chunks().to_batches()
    return set(rows.filter(PushedFilter(where).mask(rows)).column("row").to_pylist())


@pytest.mark.parametrize("condition", UNDERSTOOD)
def test_what_is_understood_means_the_same(frame: DataFrame, condition: str) -> None:
    """Null is neither true nor false, a remainder has the sign of what is divided, texts are compared by their bytes."""
    where = asked(frame, condition)
    assert where is not None
    expected = {row["row"] for row in frame.where(condition).select("row").collect()}
    assert expected and let_through(where) == expected


@pytest.mark.parametrize("condition", IN_PART)
def test_what_is_understood_in_part_holds_no_row_back(frame: DataFrame, condition: str) -> None:
    where = asked(frame, condition)
    assert where is not None
    expected = {row["row"] for row in frame.where(condition).select("row").collect()}
    assert expected and let_through(where) > expected


@pytest.mark.parametrize("condition", NOT_AT_ALL)
def test_what_is_not_understood_is_left_to_spark(frame: DataFrame, condition: str) -> None:
    """All that is asked is what Spark adds by itself: that there is a value."""
    assert set(re.findall(r'"([A-Z]\w+)"', asked(frame, condition) or "")) <= {"And", "IsNotNull"}


def few(clicks: DataFrame) -> DataFrame:
    return clicks.where("user % 10 = 0 AND length(page) > 1").select("page", F.col("user").alias("who"))


def twice(clicks: DataFrame) -> DataFrame:
    return clicks.where("user = 1").union(clicks.where("user = 2")).select("user")


def counted(clicks: DataFrame) -> DataFrame:
    return clicks.where("user < 5").groupBy(F.window("at", "1 minute")).count().select("window.start", "count")


def test_an_application_asks_in_its_source(spark: SparkSession, tmp_path: Path) -> None:
    """Its result is as without it, and all events count as read; late ones are counted before anything is asked of them."""
    app = hw.App("shop", log=tmp_path / "log", spark=spark)
    clicks = app.topic("clicks", schema="user BIGINT, page STRING, at TIMESTAMP", time="at", key="user")
    for function, mode in ((few, "append"), (twice, "append"), (counted, "update")):
        app.stream(clicks, to=function.__name__, mode=mode)(function)
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("clicks", "user BIGINT, page STRING, at TIMESTAMP", time="at", key="user")
        events = [
            {"user": n % 50, "page": "/" * (n % 3), "at": f"2026-01-31T12:{n // 10 % 60:02}:00Z"} for n in range(500)
        ]
        log.append("clicks", events)
        launch = app._launch()
        try:
            plans = {stage.plan.stage.name: stage.plan.analysed for stage in launch.start().stages}
        finally:
            launch.close()
        assert plans["few"].filters.keys() == {"clicks"} and plans["few"].columns["clicks"] == ("user", "page")
        assert not plans["twice"].filters and not plans["counted"].filters
        status = app.run(available_now=True)
        assert {stage.name: stage.events for stage in status.stages} == {"few": 500, "twice": 1000, "counted": 500}
        found = sorted((row["page"], row["who"]) for row in log.read("few").to_pylist())
        wanted = [event for event in events if event["user"] % 10 == 0 and len(event["page"]) > 1]
        assert found == sorted((event["page"], event["user"]) for event in wanted)
        assert sorted(row["user"] for row in log.read("twice").to_pylist()) == [1] * 10 + [2] * 10
        assert sum(row["count"] for row in log.read("counted").to_pylist()) >= 45
