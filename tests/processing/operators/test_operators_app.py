"""Our operators in applications: what is late for them, what their state depends on, and what is refused before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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
from headwater.processing.graph.table import Table
from headwater.processing.operators.operator import Input, Operator, OperatorContext, operator_context
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
        assert all(stage.is_whole for stage in stages.values())
        waits, copies = 2, 1
        assert log.read("enriched").num_rows + log.read("enriched.late").num_rows + waits == len(clicks)
        assert log.read("once").num_rows + log.read("once.late").num_rows + copies == len(clicks)
        assert (stages["enriched"].events, stages["enriched"].given) == (len(clicks) + 3, len(clicks) + 3 - 2)
        assert (stages["once"].events, stages["once"].given) == (len(clicks), len(clicks) - 2)

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
            for stage in app.run(available_now=True).stages:
                count = len(changes) + len(expected)
                assert stage.is_whole and (stage.events, stage.given, stage.late) == (count, count, 0), stage
                assert log.read(stage.to).num_rows == len(expected), "one row for each click"
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
        with operator_context(OperatorContext("", partitions=1, beats=lambda: frame, fusion=prints)):
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


def per_minute_before(clicks: DataFrame) -> DataFrame:
    counted = clicks.groupBy(F.window("at", "1 minute").alias("minute"), "page").count()
    ended = counted.select("page", "count", F.col("minute.end").alias("until"))
    return hw.top_n(ended, 1, order="count DESC", over="1 minute", at="until")


def in_pairs(clicks: DataFrame, others: DataFrame) -> DataFrame:
    """Clicks with what came of the same page within twenty seconds."""
    later = others.select(F.col("page").alias("other"), F.col("at").alias("then"))
    is_near = F.col("then").between(F.col("at"), F.col("at") + F.expr("INTERVAL 20 SECONDS"))
    return clicks.join(later, (F.col("page") == F.col("other")) & is_near)


def joined_before(clicks: DataFrame, others: DataFrame) -> DataFrame:
    return hw.dedupe(in_pairs(clicks, others).select("page", "at", "then"), ["page", "then"], at="at")


def joined_and_counted(clicks: DataFrame, others: DataFrame) -> DataFrame:
    return hw.totals(in_pairs(clicks, others), by="page", n="count")


def joined_beside(clicks: DataFrame, others: DataFrame) -> DataFrame:
    pairs = in_pairs(clicks, others)
    return hw.dedupe(clicks, "page").select("page").unionByName(pairs.select("page"))


def single_before(clicks: DataFrame) -> DataFrame:
    return hw.dedupe(clicks.dropDuplicates(["user_id"]), "page")


def single_in_time(clicks: DataFrame) -> DataFrame:
    own = clicks.withWatermark("at", "1 second").dropDuplicates(["user_id"])
    return hw.totals(own, by="page", n="count")


def single_within(clicks: DataFrame) -> DataFrame:
    return hw.totals(clicks.dropDuplicatesWithinWatermark(["user_id"]), by="page", n="count")


@pytest.mark.parametrize(
    ("function", "inputs", "said"),
    [
        (per_minute_before, ("a",), "Spark's Aggregate and an operator of Headwater"),
        (joined_before, ("a", "b"), "Spark's Join and an operator of Headwater"),
        (joined_and_counted, ("a", "b"), "Spark's Join and an operator of Headwater"),
        (joined_beside, ("a", "b"), "Spark's Join and an operator of Headwater"),
        (single_before, ("a",), "Spark's Deduplicate and an operator of Headwater"),
        (single_in_time, ("a",), "Spark's Deduplicate and an operator of Headwater"),
        (single_within, ("a",), "Spark's DeduplicateWithinWatermark and an operator of Headwater"),
        (four, ("a", "b", "c", "d"), "over 4 inputs; 3 are allowed"),
        (per_minute_after, ("a",), "Aggregate after an operator of Headwater"),
        (no_window, ("a",), "`window_duration` must be between"),
        (no_time, ("a",), "A window of '0 seconds' is empty"),
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


def users_of_pages(clicks: DataFrame) -> DataFrame:
    """How many pages have so many users, with Spark's own state in front; and a join with what is no stream."""
    words = clicks.sparkSession.createDataFrame([("p0", "home"), ("p1", "shop")], "page STRING, word STRING")
    per_page = clicks.dropDuplicates(["user_id", "page"]).join(words, "page", "left").groupBy("page", "word").count()
    return hw.totals(per_page, by="count", key="page", pages="count")


def twice(clicks: DataFrame) -> DataFrame:
    """Both halves of a topic, united."""
    return hw.dedupe(clicks.where("user_id < 3").unionByName(clicks.where("user_id >= 3")), ["user_id", "page"])


def test_operators_work_behind_what_spark_keeps_without_time(spark: SparkSession, tmp_path: Path) -> None:
    """Batches in which only time goes on, or nothing at all, do them no harm: behind Spark's aggregates and copies by other columns than
    the time, behind a join with a table that is no stream, behind conditions and a union. All that was read is there, or late."""
    url, random, seen = str(tmp_path / "log"), Random(4), list[dict[str, Any]]()
    with hw.open_log(url) as log:
        late = 0
        for step in range(3):
            app = hw.App("pages", log=url, spark=spark, state_partitions=2)
            clicks = app.topic("clicks", schema=CLICKS, key="page", time="at", lateness="10 seconds", partitions=2)
            app.view(clicks, key="count", mode="update")(users_of_pages)
            app.stream(clicks, key="page")(twice)
            if step:
                rows = [
                    {"user_id": random.randrange(6), "page": f"p{random.randrange(4)}", "at": moment(step * 30 + n)}
                    for n in range(25)
                ]
                log.append("clicks", [*rows, {"user_id": 1, "page": "p1", "at": moment(-300)}][: 25 + step - 1])
                seen += rows
                log.heartbeat("clicks", NOON + timedelta(minutes=step))
            status = app.run(available_now=True)
            late += sum(stage.late for stage in status.stages)
            assert all(stage.is_whole for stage in status.stages)
        pages = Counter(
            len({row["user_id"] for row in seen if row["page"] == page}) for page in ("p0", "p1", "p2", "p3")
        )
        with app.views["users_of_pages"] as view:
            assert {row["count"]: row["pages"] for row in view.rows().to_pylist()} == pages
        once = [(row["user_id"], row["page"], row["at"]) for row in log.read("twice").to_pylist()]
        assert sorted(once) == sorted({(row["user_id"], row["page"], row["at"]) for row in seen}) and late == 1
