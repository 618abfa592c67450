"""Event times of 1970 and before: any time that the log takes counts, or is late and counted, in whatever a stage is made of."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TIMES = [
    datetime(1900, 3, 1, 12, tzinfo=UTC),
    datetime(1900, 3, 1, 12, 0, 7, tzinfo=UTC),
    datetime(1969, 7, 20, 20, 17, 40, tzinfo=UTC),
    EPOCH - timedelta(microseconds=1),
    EPOCH,
    EPOCH + timedelta(microseconds=1),
    EPOCH + timedelta(seconds=3),
    datetime(1970, 1, 2, tzinfo=UTC),
    datetime(2026, 1, 31, 12, tzinfo=UTC),
]
END = datetime(2026, 6, 1, tzinfo=UTC)
SCHEMA = "id BIGINT, who STRING, at TIMESTAMP"
Row = dict[str, Any]


def windows(clicks: DataFrame) -> DataFrame:
    counted = clicks.groupBy(F.window("at", "10 seconds").alias("w"), "who").count()
    return counted.select("who", F.col("w.start").alias("start"), F.col("count").alias("n"))


def visits(clicks: DataFrame) -> DataFrame:
    counted = clicks.groupBy(F.session_window("at", "10 seconds").alias("w"), "who").count()
    return counted.select("who", F.col("w.start").alias("start"), F.col("count").alias("n"))


def pairs(clicks: DataFrame, others: DataFrame) -> DataFrame:
    same = others.select(F.col("id").alias("other"), F.col("at").alias("then"))
    near = F.col("at").between(F.col("then"), F.col("then") + F.expr("INTERVAL 1 SECOND"))
    return clicks.join(same, (F.col("id") == F.col("other")) & near).select("who", "id", F.lit(1).alias("n"))


def single(clicks: DataFrame) -> DataFrame:
    return clicks.dropDuplicates(["id", "at"]).select("who", "id", F.lit(1).alias("n"))


def single_for_ever(clicks: DataFrame) -> DataFrame:
    """Copies are told by no time, so nothing is late."""
    return clicks.dropDuplicates(["id"]).select("who", "id", F.lit(1).alias("n"))


def ours(clicks: DataFrame) -> DataFrame:
    return hw.windowed(clicks, by="who", over="10 seconds", n="count")


def our_visits(clicks: DataFrame) -> DataFrame:
    return hw.windowed(clicks, by="who", gap="10 seconds", n="count")


def once(clicks: DataFrame) -> DataFrame:
    return hw.dedupe(clicks, "id").select("who", "id", F.lit(1).alias("n"))


def paced(clicks: DataFrame) -> DataFrame:
    return hw.sliding(clicks, by="who", over="10 seconds", seen="count").select("who", "id", F.lit(1).alias("n"))


def found(clicks: DataFrame, others: DataFrame) -> DataFrame:
    known = others.select("id", F.col("at").alias("then"), F.col("who").alias("name"))
    looked = hw.lookup(clicks, known, "id", at="at", table_at="then", how="inner")
    return looked.select("who", "id", F.lit(1).alias("n"))


SPARKS = {windows: 4, visits: 4, pairs: 5, single: 5, single_for_ever: 0}
"""What of Spark's own, and how many of the times it cannot have: before 1970, or not after its first moment."""
OURS = [ours, our_visits, once, paced, found]


def test_every_time_counts_or_is_late(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's watermark is none before 1970. What it would drop is late instead: counted, and kept by `late="topic"`."""
    url = str(tmp_path / "log")
    late_kept = {windows, pairs, ours}
    expected = dict.fromkeys(OURS, 0) | SPARKS

    def run() -> Counter[str]:
        app = hw.App("early", log=url, spark=spark, state_partitions=1, idle="1 hour")
        clicks, others = (
            app.topic(name, schema=SCHEMA, key="who", time="at", lateness="1 second", partitions=1)
            for name in ("clicks", "others")
        )
        for function in expected:
            inputs = (clicks, others) if function in (pairs, found) else (clicks,)
            app.stream(*inputs, key="who", late="topic" if function in late_kept else None)(function)
        return Counter({stage.name: stage.late for stage in app.run(available_now=True).stages})

    with hw.open_log(url) as log:
        late: Counter[str] = Counter()
        for topic in ("clicks", "others"):
            log.create_topic(topic, SCHEMA, key="who", time="at", lateness="1 second", partitions=1)
        for first, end in ((0, 3), (3, len(TIMES))):
            rows = [{"id": n, "who": f"w{n % 2}", "at": TIMES[n]} for n in range(first, end)]
            for topic in ("clicks", "others"):
                log.append(topic, rows)
                log.heartbeat(topic, END if end == len(TIMES) else rows[-1]["at"])
            late += run()
        for function, missing in expected.items():
            name = function.__name__
            given = sum(row["n"] for row in log.read(name).to_pylist())
            inputs = 2 if function is pairs else 1
            assert (given, late[name]) == (len(TIMES) - missing, missing * inputs), name
        kept = {"windows.late": TIMES[:4], "pairs.late.clicks": TIMES[:5], "pairs.late.others": TIMES[:5]}
        for topic, times in kept.items():
            assert sorted(row["at"] for row in log.read(topic).to_pylist()) == times, topic
        assert log.read("ours.late").num_rows == 0


def test_copies_that_no_time_tells_are_never_late(spark: SparkSession, tmp_path: Path) -> None:
    """A stage for which no time matters counts every event, however old it is."""
    url = str(tmp_path / "log")
    app = hw.App("copies", log=url, spark=spark)
    clicks = app.topic("clicks", schema=SCHEMA, key="who", time="at", lateness="1 second", partitions=1)
    app.stream(clicks, key="who")(single_for_ever)
    with hw.open_log(url) as log:
        log.create_topic("clicks", SCHEMA, key="who", time="at", lateness="1 second", partitions=1)
        for number, at in enumerate([END, END - timedelta(days=1)]):
            log.append("clicks", [{"id": number, "who": "w", "at": at}, {"id": 0, "who": "w", "at": at}])
            assert app.run(available_now=True).stages[0].late == 0
        assert sorted(row["id"] for row in log.read("single_for_ever").to_pylist()) == [0, 1]
