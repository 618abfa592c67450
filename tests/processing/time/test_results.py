"""When results are given: early, on time, and again when something was late; in views with what they replace, in streams without."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.model.errors import InvalidApp

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
SCHEMA = "who STRING, at TIMESTAMP"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def per_minute(clicks: DataFrame) -> DataFrame:
    grouped = clicks.groupBy(F.window("at", "1 minute").alias("w")).count()
    return grouped.select("w.start", F.col("count").alias("n"))


def told(clicks: DataFrame) -> DataFrame:
    return per_minute(clicks)


def final(clicks: DataFrame) -> DataFrame:
    return per_minute(clicks)


@pytest.mark.covers("Cloud Dataflow")
def test_a_window_is_given_early_and_on_time_and_corrected_when_an_event_is_late(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A view has a row as soon as there is an event, and each change of it with the row before. A stream in mode update appends the row
    again, and nobody takes the earlier one back; in mode append it is given once, and without what is late."""
    url = str(tmp_path / "log")
    app = hw.App("pages", log=url, spark=spark)
    clicks = app.topic("clicks", schema=SCHEMA, time="at", lateness="10 seconds", partitions=1)
    corrects: dict[str, Any] = {"late": "correct", "corrections": "1 hour"}
    app.view(clicks, key="start", **corrects)(per_minute)
    app.stream(clicks, mode="update", partitions=1, **corrects)(told)
    app.stream(clicks, late="topic")(final)
    with hw.open_log(url) as log:
        log.create_topic("clicks", SCHEMA, time="at", lateness="10 seconds", partitions=1)

        def after(*seconds: int) -> tuple[list[Any], list[Any], list[Any]]:
            """The changes of the first minute's row, and its rows in both streams, when these events have come, too."""
            log.append("clicks", [{"who": "w", "at": NOON + timedelta(seconds=second)} for second in seconds])
            app.run(available_now=True)
            changes = [(row["old"], row["new"]) for row in log.read("per_minute.changes").to_pylist()]
            pairs = [(old and old["n"], new["n"]) for old, new in changes if new["start"] == NOON]
            rows = [
                [row["n"] for row in log.read(topic).to_pylist() if row["start"] == NOON] for topic in ("told", "final")
            ]
            return pairs, *rows

        assert after(5, 20) == ([(None, 2)], [2], [])  # early: the watermark is in the middle of the minute
        assert after(40) == ([(None, 2), (2, 3)], [2, 3], [])
        on_time = after(150)
        assert on_time == ([(None, 2), (2, 3)], [2, 3], [3])
        assert after(30) == ([(None, 2), (2, 3), (3, 4)], [2, 3, 4], [3])  # late by more than a minute
        assert [row["at"] for row in log.read("final.late").to_pylist()] == [NOON + timedelta(seconds=30)]
        with app.views["per_minute"] as view:
            assert {row["start"]: row["n"] for row in view.rows().to_pylist()}[NOON] == 4


def test_a_batch_has_no_more_events_than_the_stage_says(spark: SparkSession, tmp_path: Path) -> None:
    """So nothing is larger than its tasks can hold, however long an application was away."""
    url = str(tmp_path / "log")
    app = hw.App("pages", log=url, spark=spark)
    clicks = app.topic("clicks", schema=SCHEMA, time="at", partitions=1)
    app.stream(clicks, events_max=40)(copied)
    with hw.open_log(url) as log:
        log.create_topic("clicks", SCHEMA, time="at", partitions=1)
        log.append("clicks", [{"who": "w", "at": NOON}] * 100)
        [stage] = app.run(available_now=True).stages
        assert (stage.epoch, stage.events, len(log.read("copied"))) == (2, 100, 100)
    with pytest.raises(InvalidApp, match="events_max=0 is not a number of events"):
        app.view(clicks, key="who", events_max=0)(per_minute)


def copied(clicks: DataFrame) -> DataFrame:
    return clicks
