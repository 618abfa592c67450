"""Idle partitions: an application tells time where nobody appends, and never more than those who write there have passed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.log.log import Log
from headwater.processing.stages import idle_partitions
from headwater.processing.stages.idle_partitions import IdlePartitions
from tests.rigs.spark import patiently

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
NOON_US = int(NOON.timestamp() * 1_000_000)
SECOND = 1_000_000
SCHEMA = "id BIGINT, who STRING, at TIMESTAMP"


class Stage:
    """A stage that waits for these topics."""

    checkpoint = ""
    reached: Mapping[tuple[str, int], tuple[int, int]] = {}

    def __init__(self, *topics: str) -> None:
        self.inputs = self.timed = topics


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    monkeypatch.setattr(idle_partitions, "BEAT_S", 0.0)
    with hw.open_log(tmp_path / "log") as log:
        for name in ("clicks", "visits"):
            log.create_topic(name, SCHEMA, key="who", time="at", lateness="5 seconds", partitions=2)
        yield log


def put(log: Log, topic: str, who: str, second: float) -> int:
    """Appends an event and returns its partition."""
    before = {at: span.stop for at, span in log.offsets(topic).items()}
    log.append(topic, [{"id": 0, "who": who, "at": NOON + timedelta(seconds=second)}])
    return next(at for at, span in log.offsets(topic).items() if span.stop > before[at])


def beats(log: Log, stage: Stage, *, passed: Mapping[str, int] | None = None, idle_us: int = 0) -> None:
    """What falls silent is seen at the second look."""
    known = passed or {}
    told = IdlePartitions(log, idle_us, lambda topic, greatest: known.get(topic))
    for _ in range(2):
        told.beat([stage])
        time.sleep(0.001)


def test_a_topic_of_the_application_is_told_what_its_writer_has_passed(log: Log) -> None:
    """However far the other inputs have come, and however long it is silent: what its writer has still to read would be late."""
    put(log, "clicks", "w0", 3600)
    visited = put(log, "visits", "w0", 10)
    beats(log, Stage("clicks", "visits"), passed={"visits": NOON_US + 60 * SECOND})
    assert log.reached("visits")[visited] == NOON_US + 60 * SECOND
    beats(log, Stage("clicks", "visits"), passed={"visits": idle_partitions.NO_TIME})
    assert log.reached("visits")[visited] == NOON_US + 60 * SECOND


def test_a_partition_that_never_had_an_event_is_told_what_all_inputs_have_passed(log: Log) -> None:
    """Nobody waits for it. What comes there first is late where the watermark has passed it, and only there."""
    clicked = put(log, "clicks", "w0", 3600)
    beats(log, Stage("clicks"))
    assert log.reached("clicks") == {clicked: NOON_US + 3600 * SECOND, 1 - clicked: NOON_US + 3600 * SECOND}
    log.create_topic("orders", SCHEMA, key="who", time="at", lateness="1 minute", partitions=2)
    ordered = put(log, "orders", "w0", 4000)
    put(log, "visits", "w0", 100)
    before = IdlePartitions(log, 3600 * SECOND, lambda topic, greatest: None)
    before.beat([Stage("orders", "visits")])
    assert log.reached("orders")[1 - ordered] is None
    seen = log.reached("visits")
    for _ in range(2):  # also where it was told before
        beats(log, Stage("orders", "visits"), passed={"visits": NOON_US + 100 * SECOND})
        assert max(time or 0 for time in seen.values()) == NOON_US + 100 * SECOND
        assert log.reached("orders")[1 - ordered] == NOON_US + (100 - 5 + 60) * SECOND


def test_silence_is_what_this_process_has_seen(log: Log) -> None:
    """Also of a topic that never had an event: whoever writes to it may only just have been started, too."""
    put(log, "clicks", "w0", 3600)
    beats(log, Stage("clicks", "visits"), idle_us=30 * SECOND)
    assert set(log.reached("visits").values()) == {None}
    beats(log, Stage("clicks", "visits"))
    assert set(log.reached("visits").values()) == {NOON_US + 3600 * SECOND}


def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if batch.num_rows:
            time.sleep(3)
        yield batch


def visits(clicks: DataFrame) -> DataFrame:
    return clicks.mapInArrow(slowly, clicks.schema)


def both(clicks: DataFrame, visits: DataFrame) -> DataFrame:
    grouped = clicks.unionByName(visits).groupBy(F.window("at", "10 seconds").alias("w")).count()
    return grouped.select("w.start", F.col("count").alias("n"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_another_stage_is_still_to_write_is_not_late(spark: SparkSession, tmp_path: Path) -> None:
    """A backlog of eight minutes, and a stage that takes three times as long as a partition may be silent. Then only one key goes on, and
    nobody waits for the partitions of the others."""
    url = str(tmp_path / "log")
    app = hw.App("idle", log=url, spark=spark, idle="1 second")
    clicks = app.topic("clicks", schema=SCHEMA, key="who", time="at", lateness="5 seconds", partitions=3)
    app.stream(clicks, to="visits", key="who", time="at", lateness="5 seconds", partitions=3)(visits)
    app.stream(clicks, "visits", key=None)(both)
    with hw.open_log(url) as log:
        log.create_topic("clicks", SCHEMA, key="who", time="at", lateness="5 seconds", partitions=3)
        rows: list[dict[str, Any]] = [
            {"id": second, "who": f"w{second % 7}", "at": NOON + timedelta(seconds=second)} for second in range(480)
        ]
        log.append("clicks", [*rows, {"id": 480, "who": "w0", "at": NOON + timedelta(seconds=600)}])
        patiently(app.start)
        try:
            reader = log.reader("both", start="earliest")
            found: dict[datetime, int] = {}
            for _ in range(90):
                found |= {event.value["start"]: event.value["n"] for event in reader.poll(timeout_s=1.0)}
                if len(found) >= 48:
                    break
            status = app.status()
            assert status is not None and [stage.late for stage in status.stages] == [0, 0], status
            assert found == {NOON + timedelta(seconds=10 * number): 20 for number in range(48)}, status
        finally:
            app.stop()
