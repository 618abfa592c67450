"""Our operators in applications: what is late for them, what their state depends on, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.log.log import Log
from headwater.model.errors import InvalidApp
from headwater.processing.operator import Building, Input, Operator, building
from headwater.processing.table import Table
from headwater.testing import transform

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
CLICKS = "user_id BIGINT, page STRING, at TIMESTAMP"
USERS = "user_id BIGINT, name STRING, since TIMESTAMP"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def moment(second: int | None) -> datetime | None:
    return None if second is None else NOON + timedelta(seconds=second)


def enriched(clicks: DataFrame, users: Table) -> DataFrame:
    return hw.lookup(clicks, users, on="user_id", at="at")


def once(clicks: DataFrame) -> DataFrame:
    return hw.dedupe(clicks, "page")


def paced(clicks: DataFrame) -> DataFrame:
    return hw.sliding(clicks, by="user_id", over="1 minute", n="count")


def make(url: str, spark: SparkSession) -> hw.App:
    app = hw.App("pages", log=url, spark=spark, state_partitions=1)
    clicks = app.topic("clicks", schema=CLICKS, key="user_id", time="at", lateness="10 seconds", partitions=1)
    users = app.table(
        "users", "user_id BIGINT, name STRING, since TIMESTAMP", key="user_id", time="since", partitions=1
    )
    app.stream(clicks, users, to="enriched", key="user_id", late="topic")(enriched)
    app.stream(clicks, late="topic")(once)
    app.stream(clicks)(paced)
    return app


def pages(log: Log, topic: str) -> list[str]:
    return sorted(row["page"] for row in log.read(topic).to_pylist())


def test_late_events_of_a_lookup_are_kept_and_late_rows_of_its_table_are_taken(
    spark: SparkSession, tmp_path: Path
) -> None:
    """An event without a time is late as well; all of them are counted. Another lateness, or a column that no state has in it, then
    changes nothing; a column of rows that are remembered does, and it is told what to do."""
    url = str(tmp_path / "log")
    with hw.open_log(url) as log:
        app = make(url, spark)
        clicks = [("early", 20), ("between", 40), ("now", 100), ("late", 50), ("never", None), ("now", 100)]
        log.create_topic("users", USERS, key="user_id", time="since", partitions=1, compact=True)
        for name, second in (("anna", 0), ("berta", 60), ("clara", 30)):
            log.append("users", [{"user_id": 1, "name": name, "since": moment(second)}])
        log.create_topic("clicks", CLICKS, key="user_id", time="at", lateness="10 seconds", partitions=1)
        log.append("clicks", [{"user_id": 1, "page": page, "at": moment(second)} for page, second in clicks])
        stages = {stage.name: stage for stage in app.run(available_now=True).stages}
        assert [(row["page"], row["name"]) for row in log.read("enriched").to_pylist()] == [
            ("early", "anna"),
            ("between", "clara"),
        ]
        assert (stages["enriched"].late, stages["once"].late, stages["paced"].late) == (3, 2, 2)
        for topic in ("enriched.late", "once.late"):
            assert pages(log, topic) == ["late", "never"], topic
        assert pages(log, "once") == ["between", "early", "now"]

        log.alter_topic("clicks", lateness="20 seconds")
        log.append("clicks", [{"user_id": 1, "page": "early", "at": moment(95)}])
        assert {stage.state for stage in make(url, spark).run(available_now=True).stages} == {"done"}
        log.alter_topic("clicks", schema=f"{CLICKS}, referrer STRING")
        log.append("clicks", [{"user_id": 1, "page": "now", "at": moment(100), "referrer": "r"}])
        status = make(url, spark).run(available_now=True, check=False)
        states = {stage.name: stage.state for stage in status.stages}
        assert states["once"] == "done" and states["paced"] == "failed"
        assert pages(log, "once") == ["between", "early", "early", "now"]
        [error] = [stage.error for stage in status.stages if stage.name == "paced"]
        assert error is not None and "select()" in error and "--rebuild-state" in error


def renamed(clicks: DataFrame, users: Table) -> DataFrame:
    """The table as a DataFrame, whose names Spark makes."""
    names = users.versions.withColumn("name", F.upper("name"))
    return hw.lookup(clicks, names, on="user_id", at="at", table_at="since")


def test_of_the_changes_of_a_transaction_the_last_is_found(spark: SparkSession, tmp_path: Path) -> None:
    """They have one time. A row that was updated twice is found as the second left it, one that was deleted in the end is not found;
    behind a shuffle, inside the source, as a DataFrame, and over rows that are no stream."""
    url, at = str(tmp_path / "log"), NOON
    names: list[tuple[int, str | None]] = [
        (1, "b"), (1, "a"), (2, "new"), (2, None), (3, None), (3, "old"), (4, "c"), (4, "d"), (4, "b")
    ]  # fmt: skip
    expected = {1: "a", 2: None, 3: "old", 4: "b"}
    with hw.open_log(url) as log:
        for place, null in (("fused", " NOT NULL"), ("shuffled", "")):
            app = hw.App(place, log=url, spark=spark, state_partitions=2)
            clicks = app.topic(
                f"{place}_clicks", schema=CLICKS.replace("BIGINT", f"BIGINT{null}"), key="user_id", time="at"
            )
            users = app.table(f"{place}_users", USERS.replace("BIGINT", f"BIGINT{null}"), key="user_id", time="since")
            app.stream(clicks, users, to=f"{place}_found", key="user_id")(enriched)
            app.stream(clicks, users, to=f"{place}_renamed", key="user_id")(renamed)
            assert ("runs inside the source" in app.plan()) == (place == "fused")
            app.run(available_now=True)
            changes = [{"user_id": user, "name": name, "since": at, "_deleted": name is None} for user, name in names]
            log.append(f"{place}_users", changes)
            log.append(f"{place}_clicks", [{"user_id": user, "page": "p", "at": at} for user in expected])
            for topic in ("clicks", "users"):
                log.heartbeat(f"{place}_{topic}", NOON + timedelta(minutes=1))
            app.run(available_now=True)
            found = {row["user_id"]: row["name"] for row in log.read(f"{place}_found").to_pylist()}
            assert found == expected, place
            upper = {row["user_id"]: row["name"] for row in log.read(f"{place}_renamed").to_pylist()}
            assert upper == {user: name and name.upper() for user, name in expected.items()}, place
    clicked = [{"user_id": user, "at": at} for user in expected]
    rows = transform(
        lambda clicks, users: hw.lookup(clicks, users, on="user_id", at="at", table_at="since"),
        clicks=clicked, users=changes,
    )  # fmt: skip
    assert {row["user_id"]: row["name"] for row in rows} == expected


class Prints:
    """Notes the fingerprint of each operator instead of running it."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def fuse(self, operator: Operator, inputs: Sequence[Input], state: str, uid: str, fingerprint: str) -> DataFrame:
        self.found.append(fingerprint)
        return inputs[0].frame


@pytest.mark.parametrize(
    ("operate", "but_not"),
    [
        (once, {"column"}),
        (paced, set[str]()),
        (lambda f: hw.top_n(f, 1, by="page", order="at"), set[str]()),
        (lambda f: hw.top_n(f, 1, by="page", order="at", over="1 minute"), set[str]()),
        (lambda f: hw.windowed(f, by="page", over="1 minute", n="count"), {"column"}),
        (lambda f: hw.windowed(f, by="page", gap="1 minute", n="count"), {"column"}),
    ],
)
def test_a_state_depends_on_what_it_has_in_it(
    spark: SparkSession, tmp_path: Path, operate: Callable[[DataFrame], DataFrame], but_not: set[str]
) -> None:
    """On the key's type, and on further columns only where rows are remembered; on the lateness never."""

    def fingerprint(schema: str, lateness: str) -> str:
        frame = spark.readStream.schema(schema).json(str(tmp_path)).withWatermark("at", lateness)
        prints = Prints()
        with building(Building("", partitions=1, beats=lambda: frame, fusion=prints)):
            operate(frame)
        [found] = prints.found
        return found

    first = fingerprint(CLICKS, "10 seconds")
    others = {
        "lateness": fingerprint(CLICKS, "20 seconds"),
        "column": fingerprint(f"{CLICKS}, more STRING", "10 seconds"),
        "key": fingerprint("user_id INT, page INT, at TIMESTAMP", "10 seconds"),
    }
    assert {what for what, found in others.items() if found != first} == {"column", "key"} - but_not


def busy(clicks: DataFrame) -> DataFrame:
    return clicks.repartition(2).observe("seen", F.count(F.lit(1)).alias("n")).coalesce(1).repartition("user_id")


def test_where_rows_are_worked_on_is_no_state(spark: SparkSession, tmp_path: Path) -> None:
    """A stage that only moves or counts rows can be poisoned, and go on behind its marker, like any that remembers nothing."""
    app = hw.App("plain", log=str(tmp_path / "log"), spark=spark)
    app.stream(app.topic("clicks", schema=CLICKS, time="at"))(busy)
    assert "keeps no state" in app.plan()


def four(*inputs: DataFrame) -> DataFrame:
    whole = inputs[0]
    for frame in inputs[1:]:
        whole = whole.unionByName(frame)
    return hw.dedupe(whole, "page")


def per_minute_after(clicks: DataFrame) -> DataFrame:
    return hw.dedupe(clicks, "page").withWatermark("at", "1 second").groupBy(F.window("at", "1 minute")).count()


def no_window(clicks: DataFrame) -> DataFrame:
    return clicks.groupBy(F.window("at", "0 seconds")).count()


def no_time(clicks: DataFrame) -> DataFrame:
    return hw.sliding(clicks, by="page", over="0 seconds", n="count")


@pytest.mark.parametrize(
    ("function", "inputs", "said"),
    [
        (four, ("a", "b", "c", "d"), "over 4 inputs; 3 are possible"),
        (per_minute_after, ("a",), "Aggregate behind an operator of Headwater"),
        (no_window, ("a",), "`window_duration` must be between"),
        (no_time, ("a",), "A window of '0 seconds' holds nothing"),
    ],
)
def test_what_an_operator_cannot_do_is_refused(
    spark: SparkSession, tmp_path: Path, function: Callable[..., DataFrame], inputs: Sequence[str], said: str
) -> None:
    """Before anything runs, with the stage and what to do instead."""
    app = hw.App("refused", log=str(tmp_path / "log"), spark=spark)
    topics: list[Any] = [app.topic(name, schema=CLICKS, key="page", time="at") for name in inputs]
    app.stream(*topics)(function)
    with pytest.raises(InvalidApp, match=said) as raised:
        app.plan()
    assert "test_operators_app.py" in str(raised.value)


def test_three_inputs_are_not_too_many(spark: SparkSession, tmp_path: Path) -> None:
    """So many sources, and the beats, Spark asks in order."""
    app = hw.App("three", log=str(tmp_path / "log"), spark=spark)
    app.stream(*(app.topic(name, schema=CLICKS, key="page", time="at") for name in "abc"))(four)
    assert "dedupe-1" in app.plan()
