"""Event time on Kafka, which does not keep how far it has come: tasks tell it from batch to batch, and the results are the same."""

from __future__ import annotations

import shutil
import uuid
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from headwater.processing.time.event_time import with_time
from headwater.processing.time.maxima import Maxima
from headwater.testing.servers.kafka import KafkaServer
from tests.processing.time.test_event_time import (
    LATENESS_S,
    NOON,
    SCHEMA,
    collected,
    counts,
    fill,
    per_window,
    stream,
    told,
    windows,
)
from tests.processing.time.test_late_windows import SCHEMA as WINDOWED
from tests.processing.time.test_late_windows import counted
from tests.rigs.spark import patiently

pytestmark = [pytest.mark.slow, pytest.mark.service("kafka"), pytest.mark.timeout(600)]


def test_windows_on_kafka_do_not_depend_on_how_batches_are_cut(
    kafka: KafkaServer, spark: SparkSession, tmp_path: Path
) -> None:
    """Also where what the tasks told is lost; and time passes by a heartbeat where nothing is appended."""
    url = f"kafka://{kafka.bootstrap}?prefix=e{uuid.uuid4().hex[:8]}."
    with hw.open_log(url) as log:
        rows = fill(log, seed=3)
        late, watermark = told(log, "clicks")
        in_time = [row for row in rows if row["id"] not in late]
        expected = counts(in_time, watermark)
        for number, per_trigger in enumerate((37, 1000)):
            maxima, folder = tmp_path / f"maxima-{number}", tmp_path / f"checkpoint-{number}"
            frame = stream(spark, url, per_trigger, "*", "_late", "_watermark", maxima=str(maxima))
            timed = per_window(with_time(frame, "at", lateness_us=LATENESS_S * 1_000_000, count_as="late rows"))
            found = patiently(lambda: collected(timed, folder))  # noqa: B023 - called at once
            got = {(row["begin"], row["who"]): row["n"] for row in found}
            assert len(got) == len(found) and got == dict(expected), per_trigger
        for at, span in log.offsets("clicks").items():
            beat = int((NOON + timedelta(hours=1)).timestamp() * 1_000_000)
            Maxima(str(maxima)).tell(("clicks", at), span.stop, beat, is_heartbeat=True)
        rest = {(row["begin"], row["who"]): row["n"] for row in patiently(lambda: collected(timed, folder))}
        assert got | rest == counts(in_time, NOON + timedelta(minutes=30)) and not got.keys() & rest.keys()


def test_what_tasks_told_is_read_again_where_it_is_lost(
    kafka: KafkaServer, spark: SparkSession, tmp_path: Path
) -> None:
    """Between two runs of a query somebody empties the folder: late is who was late before."""
    url = f"kafka://{kafka.bootstrap}?prefix=e{uuid.uuid4().hex[:8]}."
    with hw.open_log(url) as log:
        log.create_topic("clicks", SCHEMA, key="who", time="at", lateness="5 seconds", partitions=1)
        frame = stream(spark, url, 1000, "id", "_late", maxima=str(tmp_path / "maxima"))
        found: list[Any] = []
        for number in range(3):
            at = NOON + timedelta(seconds=20 - 10 * number)
            log.append("clicks", [{"id": number, "who": "w", "at": at}])
            found += patiently(lambda: collected(frame, tmp_path / "checkpoint"))
            shutil.rmtree(tmp_path / "maxima")
        assert {row["id"]: row["_late"] for row in found} == {0: False, 1: True, 2: True}


def test_an_application_on_kafka_keeps_late_events(kafka: KafkaServer, spark: SparkSession, tmp_path: Path) -> None:
    """In their topic; and it does not wait for a partition that fell silent."""
    url = f"kafka://{kafka.bootstrap}?prefix=e{uuid.uuid4().hex[:8]}."
    app = hw.App(
        "late", log=url, spark=spark, idle="1 second", state=tmp_path / "state", views=f"sqlite:///{tmp_path}/v.db"
    )
    clicks = app.topic("clicks", schema=SCHEMA, key="who", time="at", partitions=3)
    app.stream(clicks, late="topic")(windows)
    with hw.open_log(url) as log:
        log.create_topic("clicks", SCHEMA, key="who", time="at", partitions=3)
        log.append("clicks", [{"id": number, "who": f"w{number}", "at": NOON} for number in range(9)])
        log.append("clicks", [{"id": 9, "who": "w0", "at": NOON + timedelta(hours=1)}])
        log.append("clicks", [{"id": 10, "who": "w0", "at": NOON + timedelta(minutes=30)}])
        patiently(app.start)
        try:
            reader = log.reader(["windows", "windows.late"], start="earliest")
            seen: list[Any] = []
            for _ in range(90):
                seen += [(event.topic, event.value.get("n")) for event in reader.poll(timeout_s=1.0)]
                if len(seen) == 10:
                    break
            assert sorted(seen, key=str) == sorted([("windows", 1)] * 9 + [("windows.late", None)], key=str), (
                app.status()
            )
        finally:
            app.stop()


def per_half_minute(clicks: DataFrame) -> DataFrame:
    return hw.windowed(clicks, by="who", over="30 seconds", n="count")


def in_pieces(clicks: DataFrame) -> DataFrame:
    return per_half_minute(clicks)


def test_an_open_window_takes_late_events_on_kafka(kafka: KafkaServer, spark: SparkSession, tmp_path: Path) -> None:
    """`late="window"` works there as in a folder: what counts, and what is late, is the same however batches are cut."""
    url, random = f"kafka://{kafka.bootstrap}?prefix=e{uuid.uuid4().hex[:8]}.", Random(7)
    app = hw.App("open", log=url, spark=spark, state=tmp_path / "state", views=f"sqlite:///{tmp_path}/v.db")
    clicks = app.topic("clicks", schema=WINDOWED, key="who", time="at", lateness="5 seconds", partitions=2)
    app.stream(clicks, key="who", late="window")(per_half_minute)
    app.stream(clicks, key="who", late="window", events_max=60)(in_pieces)
    users = [f"w{number}" for number in range(6)]
    with hw.open_log(url) as log:
        log.create_topic("clicks", WINDOWED, key="who", time="at", lateness="5 seconds", partitions=2)
        late = dict.fromkeys(app.graph.stages, 0)
        behind = [random.choice([0, 0, 3, 12, 25, 70]) for _ in range(300)]
        rows = [
            {"who": random.choice(users), "v": 0, "at": NOON + timedelta(seconds=number - each)}
            for number, each in enumerate(behind)
        ]
        ends = [[{"who": who, "v": 0, "at": NOON + timedelta(hours=hour)} for who in users] for hour in (1, 2)]
        for appended in (rows, *ends):
            log.append("clicks", appended)
            for stage in patiently(lambda: app.run(available_now=True)).stages:
                late[stage.name] += stage.late
                assert stage.is_whole
        counts, expected_late = counted(log, "who")
        closed = {at: n for at, n in counts.items() if at[1] < NOON + timedelta(hours=1)}
        assert 0 < expected_late < 100 and set(late.values()) == {expected_late}
        for topic in ("per_half_minute", "in_pieces"):
            found = log.read(topic).to_pylist()
            passed = [row for row in found if row["window_start"] < NOON + timedelta(hours=1)]
            assert {(row["who"], row["window_start"]): row["n"] for row in passed} == closed, topic
            assert len(passed) == len(closed), topic


def test_operators_run_on_kafka(kafka: KafkaServer, spark: SparkSession, tmp_path: Path) -> None:
    """One that works by event time, and one that does not: over two runs as over all rows at once."""
    url = f"kafka://{kafka.bootstrap}?prefix=e{uuid.uuid4().hex[:8]}."
    app = hw.App("operators", log=url, spark=spark, state=tmp_path / "state", views=f"sqlite:///{tmp_path}/v.db")
    clicks = app.topic("clicks", schema=SCHEMA, key="who", time="at", lateness=f"{LATENESS_S} seconds", partitions=3)

    @app.stream(clicks)
    def recent(clicks: DataFrame) -> DataFrame:
        return hw.sliding(clicks, by="who", over="20 seconds", n="count")

    @app.view(clicks, key=["who", "rank"])
    def last(clicks: DataFrame) -> DataFrame:
        return hw.top_n(clicks, 1, by="who", order="id DESC")

    with hw.open_log(url) as log:
        rows = fill(log, seed=4)
        app.run(available_now=True)
        log.append("clicks", [{"id": 1000, "who": "w1", "at": NOON + timedelta(minutes=3)}])
        app.run(available_now=True)
        late, watermark = told(log, "clicks")
        in_time = [row for row in rows if row["id"] not in late]
        expected = {
            row["id"]: sum(
                other["who"] == row["who"] and row["at"] - timedelta(seconds=20) <= other["at"] <= row["at"]
                for other in in_time
            )
            for row in in_time
            if row["at"] < watermark
        }
        found = {row["id"]: row["n"] for row in log.read("recent").to_pylist()}
        assert found == expected
    with app.views["last"] as view:
        newest = {row["who"]: row["id"] for row in [*rows, {"id": 1000, "who": "w1"}]}
        assert {row["who"]: row["id"] for row in view.rows().to_pylist()} == newest
