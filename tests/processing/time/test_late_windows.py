"""`late="window"`: an event whose window is open counts, however late it is; by its own partition, so however batches are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from headwater.log.log import Log
from headwater.model.errors import InvalidApp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
SCHEMA = "who STRING NOT NULL, v INT, at TIMESTAMP"
LATENESS, OVER = timedelta(seconds=5), timedelta(seconds=30)


def inside(clicks: DataFrame) -> DataFrame:
    return hw.windowed(clicks, by="who", over="30 seconds", n="count")


def shuffled(clicks: DataFrame) -> DataFrame:
    return hw.windowed(clicks.where("abs(v) >= 0"), by="who", over="30 seconds", n="count")


def combined(clicks: DataFrame) -> DataFrame:
    return hw.windowed(clicks, by="v", over="30 seconds", n="count")


def counted(log: Log, by: str) -> tuple[Counter[Any], int]:
    """Event by event: the counts of groups and windows, and how many events came when their window had ended in their partition."""
    reached: dict[int, datetime] = {}
    counts, late = Counter[Any](), 0
    for row in log.read("clicks", columns=["who", "v", "at", "_partition", "_offset"]).sort_by("_offset").to_pylist():
        start = row["at"] - (row["at"] - NOON) % OVER
        before = reached.get(row["_partition"])
        if before is not None and start + OVER <= before - LATENESS:
            late += 1
        else:
            counts[row[by], start] += 1
        reached[row["_partition"]] = max(before or row["at"], row["at"])
    return counts, late


def test_an_event_counts_as_long_as_its_window_is_open(spark: SparkSession, tmp_path: Path) -> None:
    """Inside the source, combined there, and behind a shuffle; in large batches and in small ones."""
    url, random = str(tmp_path / "log"), Random(7)
    app = hw.App("open", log=url, spark=spark, state_partitions=2)
    clicks = app.topic("clicks", schema=SCHEMA, key="who", time="at", lateness="5 seconds", partitions=2)
    for function, key in ((inside, "who"), (shuffled, "who"), (combined, "v")):
        for events_max in (None, 60):
            name = f"{function.__name__}_{events_max}"
            app.stream(clicks, to=name, key=key, late="window", events_max=events_max)(_named(function, name))
    app.stream(clicks, to="drop", key="who")(_named(inside, "drop"))
    with hw.open_log(url) as log:
        log.create_topic("clicks", SCHEMA, key="who", time="at", lateness="5 seconds", partitions=2)
        for number in range(300):
            at = NOON + timedelta(seconds=number - random.choice([0, 0, 3, 12, 25, 70]))
            log.append("clicks", [{"who": f"w{random.randrange(6)}", "v": random.randrange(4), "at": at}])
        log.heartbeat("clicks", NOON + timedelta(hours=1))
        stages = {stage.name: stage for stage in app.run(available_now=True).stages}
        for name, stage in stages.items():
            if name == "drop":
                assert stage.late > counted(log, "who")[1]
                continue
            by = "v" if name.startswith("combined") else "who"
            counts, late = counted(log, by)
            found = Counter({(row[by], row["window_start"]): row["n"] for row in log.read(name).to_pylist()})
            assert (found, stage.late) == (counts, late), name
        assert 0 < late < 100


def _named(function: Callable[..., DataFrame], name: str) -> Callable[..., DataFrame]:
    def copy(clicks: DataFrame) -> DataFrame:
        return function(clicks)

    copy.__name__ = name
    return copy


@pytest.mark.parametrize(
    "function",
    [
        lambda clicks: hw.windowed(clicks, by="who", over="30 seconds", every="10 seconds", n="count"),
        lambda clicks: hw.windowed(clicks, by="who", gap="30 seconds", n="count"),
        lambda clicks: hw.dedupe(clicks, "who"),
        lambda clicks: hw.windowed(hw.dedupe(clicks, "who"), by="who", over="30 seconds", n="count"),
        lambda clicks: clicks.select("who"),
        lambda clicks: clicks.groupBy("who", "at").count(),
    ],
)
def test_other_stages_cannot_count_late_events_by_window(
    spark: SparkSession, tmp_path: Path, function: Callable[..., DataFrame]
) -> None:
    """Windows that overlap end one after the other, sessions end with what comes, and other operators have none."""
    app = hw.App("refused", log=str(tmp_path / "log"), spark=spark)
    clicks = app.topic("clicks", schema=SCHEMA, key="who", time="at", lateness="5 seconds")
    app.stream(clicks, to="out", key="who", late="window")(_named(function, "out"))
    with pytest.raises(InvalidApp, match=r"hw\.windowed with over= alone"):
        app.plan()
