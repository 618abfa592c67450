"""Event time in Spark: windows and joins have the same result however batches are cut, and what is late is told by the log."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.log.log import Log
from headwater.model.errors import InvalidApp
from headwater.processing.time.event_time import with_time
from headwater.testing import CRASH, AppTest
from tests.rigs.spark import patiently

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATENESS_S, WINDOW_S, FUTURE = 5, 10, datetime(2099, 1, 1, tzinfo=UTC)
SCHEMA = "id BIGINT, who STRING, at TIMESTAMP"

Row = dict[str, Any]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def clicks(seed: int, count: int = 300) -> list[Row]:
    """Rows in the order of their arrival: most of them a little out of order, some far too late, one from 2099."""
    random = Random(seed)
    rows = []
    for number in range(count):
        behind = random.choice((0, 0, 1, 3, LATENESS_S, 30 if random.random() < 0.2 else 0))
        at = NOON + timedelta(seconds=number / 4 - behind)
        rows.append({"id": number, "who": f"w{random.randrange(7)}", "at": FUTURE if number == count // 3 else at})
    return rows


def told(log: Log, topic: str, lateness_s: float = LATENESS_S) -> tuple[set[int], datetime]:
    """Row by row, which ids are late by their own partition, and the watermark at the end: an oracle that shares no code."""
    reached: dict[int, datetime] = {}
    late = set()
    for row in log.read(topic, columns=["id", "at", "_partition", "_offset"]).sort_by("_offset").to_pylist():
        before = reached.get(row["_partition"])
        if before is not None and row["at"] < before - timedelta(seconds=lateness_s):
            late.add(row["id"])
        if row["at"] != FUTURE:
            reached[row["_partition"]] = max(before or row["at"], row["at"])
    watermark = min(reached.values()) - timedelta(seconds=lateness_s, microseconds=1)
    return late, watermark.replace(microsecond=watermark.microsecond // 1000 * 1000)


def counts(rows: list[Row], watermark: datetime) -> Counter[tuple[datetime, str]]:
    """Windows that the watermark has passed, and how many rows each has."""
    found: Counter[tuple[datetime, str]] = Counter()
    for row in rows:
        begin = row["at"] - timedelta(seconds=(row["at"] - NOON).total_seconds() % WINDOW_S)
        if begin + timedelta(seconds=WINDOW_S) <= watermark:
            found[begin, row["who"]] += 1
    return found


def per_window(frame: DataFrame) -> DataFrame:
    grouped = frame.groupBy(F.window("at", f"{WINDOW_S} seconds").alias("w"), "who").count()
    return grouped.select(F.col("w.start").alias("begin"), "who", F.col("count").alias("n"))


def fill(log: Log, seed: int) -> list[Row]:
    lateness = f"{LATENESS_S} seconds"
    log.create_topic("clicks", SCHEMA, key="who", time="at", lateness=lateness, partitions=3)
    rows = clicks(seed)
    for start in range(0, len(rows), 20):
        log.append("clicks", rows[start : start + 20])
    return rows


def stream(spark: SparkSession, url: str, per_trigger: int, *columns: str, **options: str) -> DataFrame:
    reader = spark.readStream.format("headwater").options(log=url, topic="clicks", **options)
    return (
        reader.option("columns", ",".join(columns)).option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", per_trigger).load()
    )  # fmt: skip


def collected(frame: DataFrame, checkpoint: Path) -> list[Row]:
    """What the stream gives for what is there now."""
    rows: list[Row] = []
    query = (
        frame.writeStream.foreachBatch(lambda batch, _: rows.extend(batch.toArrow().to_pylist())).outputMode("append")
        .option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    return rows


def test_windows_do_not_depend_on_how_batches_are_cut(spark: SparkSession, tmp_path: Path) -> None:
    """Three partitions at their own pace, late rows, and a clock in 2099 that must not make the others late."""
    with hw.open_log(tmp_path / "log") as log:
        rows = fill(log, seed=3)
        late, watermark = told(log, "clicks")
        assert len(late) > 3
        expected = counts([row for row in rows if row["id"] not in late], watermark)
        for number, per_trigger in enumerate((37, 1000)):
            frame = stream(spark, str(tmp_path / "log"), per_trigger, "*", "_late", "_watermark")
            timed = with_time(frame, "at", lateness_us=LATENESS_S * 1_000_000, count_as="late rows")
            folder = tmp_path / f"checkpoint-{number}"
            found = patiently(lambda: collected(per_window(timed), folder))  # noqa: B023 - called at once
            got = {(row["begin"], row["who"]): row["n"] for row in found}
            assert len(got) == len(found) and got == dict(expected), per_trigger


def test_what_is_late_is_a_column(spark: SparkSession, tmp_path: Path) -> None:
    """The same for any range of offsets, and by another lateness where that is asked for."""
    with hw.open_log(tmp_path / "log") as log:
        fill(log, seed=5)
        read = spark.read.format("headwater").option("log", str(tmp_path / "log")).option("topic", "clicks")
        for lateness_s in (LATENESS_S, 0, 20):
            late, _ = told(log, "clicks", lateness_s)
            frame = read.option("columns", "id,_late").option("lateness", f"{lateness_s} seconds").load()
            assert {row.id for row in frame.where("_late").collect()} == late
        assert read.option("columns", "_late").load().where("_late").count() == len(told(log, "clicks")[0])
        part = read.option("startingOffsets", '{"clicks": {"0": 11, "1": 13, "2": 17}}').option("lateness", "5 seconds")
        some = part.option("columns", "id,_late").load().collect()
        late, _ = told(log, "clicks")
        assert {row.id for row in some if row._late} == late & {row.id for row in some}
        with pytest.raises(Exception, match="lateness='soon' is not a duration"):
            read.option("lateness", "soon").load()


def windows(clicks: DataFrame) -> DataFrame:
    return per_window(clicks)


def corrected(clicks: DataFrame) -> DataFrame:
    return per_window(clicks)


def per_user(clicks: DataFrame) -> DataFrame:
    return clicks.groupBy("who").count()


def make() -> hw.App:
    app = hw.App("late")
    lateness = f"{LATENESS_S} seconds"
    clicks = app.topic("clicks", schema=SCHEMA, key="who", time="at", lateness=lateness, partitions=3)
    app.stream(clicks, to="windows", late="topic")(windows)
    app.view(clicks, key=["begin", "who"], late="correct", corrections="1 minute")(corrected)
    app.view(clicks, key="who")(per_user)
    return app


@pytest.mark.covers("concept: stragglers")
def test_late_events_go_where_the_stage_says() -> None:
    """Beside a window that is given once: in a topic of their own. In a view that is corrected: counted in. And where no time
    matters, nothing is late. The application is killed on the way."""
    feed: list[Any] = list(clicks(seed=7))
    feed.insert(150, CRASH)
    with AppTest(make) as test:
        test.feed("clicks", feed)
        test.run()
        given = test.log.read("clicks", columns=["id", "who", "at"]).to_pylist()
        late, watermark = told(test.log, "clicks")
        beyond, _ = told(test.log, "clicks", LATENESS_S + 60)
        assert late and not beyond
        in_time = counts([row for row in given if row["id"] not in late], watermark)
        assert {(row["begin"], row["who"]): row["n"] for row in test.read("windows")} == dict(in_time)
        assert sorted(row["id"] for row in test.read("windows.late")) == sorted(late)
        everything = counts(given, FUTURE + timedelta(days=1))
        assert {(row["begin"], row["who"]): row["n"] for row in test.rows("corrected")} == dict(everything)
        assert {row["who"]: row["count"] for row in test.rows("per_user")} == Counter(row["who"] for row in given)


def test_a_heartbeat_closes_windows_and_makes_late(spark: SparkSession, tmp_path: Path) -> None:
    """Without an event: time has passed. What comes behind it and is older is late, wherever its partition stood."""
    with hw.open_log(tmp_path / "log") as log:
        fill(log, seed=3)
        late, _ = told(log, "clicks")
        given = log.read("clicks", columns=["id", "who", "at"]).to_pylist()
        frame = stream(spark, str(tmp_path / "log"), 1000, "*", "_late", "_watermark")
        timed = per_window(with_time(frame, "at", lateness_us=LATENESS_S * 1_000_000, count_as="late rows"))

        def run() -> dict[tuple[datetime, str], int]:
            found = patiently(lambda: collected(timed, tmp_path / "checkpoint"))
            return {(row["begin"], row["who"]): row["n"] for row in found}

        first = run()
        log.heartbeat("clicks", NOON + timedelta(hours=1))
        in_time = counts([row for row in given if row["id"] not in late], NOON + timedelta(minutes=30))
        assert first.items() < in_time.items()
        rest = run()
        assert first | rest == in_time and not first.keys() & rest.keys()
        old = [{"id": 1000 + number, "who": f"w{number}", "at": NOON + timedelta(seconds=50)} for number in range(7)]
        log.append("clicks", old)
        assert not run()
        read = spark.read.format("headwater").option("log", str(tmp_path / "log")).option("topic", "clicks")
        found = {row.id for row in read.option("columns", "id,_late").load().where("_late").collect()}
        assert found == late | {row["id"] for row in old}


def test_an_application_does_not_wait_for_an_idle_partition(spark: SparkSession, tmp_path: Path) -> None:
    """One key went on for an hour, in its own partition; the others fell silent."""
    url = str(tmp_path / "log")
    app = hw.App("idle", log=url, spark=spark, idle="1 second")
    clicks = app.topic("clicks", schema=SCHEMA, key="who", time="at", partitions=3)
    app.stream(clicks)(windows)
    with hw.open_log(url) as log:
        log.create_topic("clicks", SCHEMA, key="who", time="at", partitions=3)
        log.append("clicks", [{"id": number, "who": f"w{number}", "at": NOON} for number in range(9)])
        log.append("clicks", [{"id": 10, "who": "w0", "at": NOON + timedelta(hours=1)}])
        assert sum(span.stop > 0 for span in log.offsets("clicks").values()) == 3
        patiently(app.start)
        try:
            reader = log.reader("windows", start="earliest")
            rows: list[Any] = []
            for _ in range(60):
                rows += [event.value["n"] for event in reader.poll(timeout_s=1.0)]
                if len(rows) == 9:
                    break
            assert rows == [1] * 9, app.status()
        finally:
            app.stop()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"late": "later"}, "is not a policy"),
        ({"late": "correct"}, "belong together"),
        ({"corrections": "1 minute"}, "belong together"),
        ({"late": "drop", "corrections": "1 minute"}, "belong together"),
    ],
)
def test_a_way_that_is_none_is_refused(settings: dict[str, Any], said: str) -> None:
    """Where it is declared."""
    app = hw.App("late")
    clicks = app.topic("clicks", schema=SCHEMA, time="at")
    with pytest.raises(InvalidApp, match=said):
        app.stream(clicks, **settings)(windows)


@pytest.mark.parametrize(
    ("function", "settings", "said"),
    [
        (windows, {"late": "correct", "corrections": "1 minute"}, "cannot correct what it gave"),
        (per_user, {"late": "topic", "mode": "update"}, "no event can be too late for it"),
    ],
)
def test_a_way_that_a_stage_cannot_go_is_refused(
    spark: SparkSession, tmp_path: Path, function: Any, settings: dict[str, Any], said: str
) -> None:
    """Before anything runs."""
    app = hw.App("late", log=str(tmp_path / "log"), spark=spark)
    clicks = app.topic("clicks", schema=SCHEMA, time="at")
    app.stream(clicks, **settings)(function)
    with pytest.raises(InvalidApp, match=said):
        app.plan()


@pytest.mark.covers("concept: three timestamps")
@pytest.mark.parametrize("wrong_by_s", [0, -3 * 3600, 3600.25])
def test_true_time_takes_a_wrong_clock_out(spark: SparkSession, wrong_by_s: float) -> None:
    """Also where it is not known when something was sent: then the device is believed."""
    occurred, wrong = NOON + timedelta(microseconds=17), timedelta(seconds=wrong_by_s)
    sent = NOON + timedelta(minutes=5)
    frame = spark.createDataFrame(
        [(occurred + wrong, sent + wrong, sent), (occurred + wrong, None, sent), (None, sent, sent)],
        "occurred timestamp, sent timestamp, received timestamp",
    )
    found = frame.select(hw.true_time("occurred", F.col("sent"), "received").alias("at")).toArrow()
    assert found.column("at").to_pylist() == [occurred, occurred + wrong, None]
