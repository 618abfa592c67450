"""Applications on Spark: they run, go on where they were, fail with a sentence, and give what a batch over the same events gives."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.model.errors import AppFailed, AppRunning, InvalidApp
from headwater.processing.stages.status import AppStatus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCHEMA = "user_id BIGINT, page STRING, note STRING, at TIMESTAMP"
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def rows(start: int, end: int) -> list[dict[str, Any]]:
    return [
        {"user_id": n % 11, "page": f"/{n % 5}", "note": f"n{n}", "at": NOON + timedelta(seconds=n)}
        for n in range(start, end)
    ]


class Place:
    """A log and what is needed to run applications on it."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.folder = folder
        self.url = str(folder / "log")
        self.spark = spark
        self.log = hw.open_log(self.url)

    def app(self, name: str = "shop") -> hw.App:
        return hw.App(name, log=self.url, spark=self.spark)

    def filled(self, end: int = 100) -> None:
        self.log.create_topic("clicks", SCHEMA, key="user_id", time="at", partitions=2, exist_ok=True)
        self.log.append("clicks", rows(0, end))


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession) -> Iterator[Place]:
    place = Place(tmp_path, spark)
    yield place
    place.log.close()


def visits(clicks: DataFrame) -> DataFrame:
    return clicks.where("user_id <> 0").select("page", "user_id", "at")


def per_page(visits: DataFrame) -> DataFrame:
    return visits.groupBy("page").count()


def per_minute(clicks: DataFrame) -> DataFrame:
    counted = clicks.groupBy(F.window("at", "1 minute"), "page").count()
    return counted.select("page", F.col("window.start").alias("minute"), "count")


def declare(app: hw.App) -> hw.App:
    clicks = app.topic("clicks", schema=SCHEMA, key="user_id", time="at")
    app.stream(clicks, to="visits", key="page", time="at")(visits)
    app.view("visits", key="page")(per_page)
    app.view(clicks, key=["page", "minute"])(per_minute)
    return app


def check_answers(place: Place, app: hw.App, end: int) -> None:
    """What DuckDB makes of the same events."""
    clicks = place.log.read("clicks").select(["user_id", "page", "at"])
    assert clicks.num_rows == end
    ask = duckdb.connect()
    ask.register("clicks", clicks)
    expected = ask.execute("select page, count(*) from clicks where user_id <> 0 group by page").fetchall()
    with app.views["per_page"] as view:
        assert {(row["page"], row["count"]) for row in view.rows().to_pylist()} == set(expected)
    per_minute = "select page, time_bucket(interval 1 minute, clicks.at), count(*) from clicks group by all"
    minutes = ask.execute(per_minute).fetchall()
    with app.views["per_minute"] as view:
        found = {(row["page"], row["minute"], row["count"]) for row in view.rows().to_pylist()}
    assert found == {(page, minute.astimezone(UTC), count) for page, minute, count in minutes}
    written = place.log.read("visits")
    assert written.num_rows == ask.execute("select count(*) from clicks where user_id <> 0").fetchall()[0][0]


def wait_for(app: hw.App, done: Callable[[AppStatus], bool]) -> AppStatus:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        status = app.status()
        if status is not None and done(status):
            return status
        time.sleep(0.1)
    raise AssertionError(f"not within two minutes: {app.status()}")


def stage(status: AppStatus, name: str) -> Any:
    return next(each for each in status.stages if each.name == name)


@pytest.mark.covers("concept: rerun as batch")
def test_an_application_gives_what_a_batch_over_the_same_events_gives(place: Place, tmp_path: Path) -> None:
    """Live, then stopped, then gone on with as a batch; and the same script over the same events as one batch."""
    place.filled(100)
    app = declare(place.app())
    app.start()
    try:
        wait_for(app, lambda status: all(each.events for each in status.stages))
        place.log.append("clicks", rows(100, 150))
        wait_for(app, lambda status: stage(status, "per_minute").events == 150)
    finally:
        app.stop()
    place.log.append("clicks", rows(150, 200))
    again = declare(place.app())
    last = again.run(available_now=True)
    assert {each.state for each in last.stages} == {"done"}
    check_answers(place, again, 200)
    beside = Place(tmp_path / "beside", place.spark)
    beside.filled(200)
    batch = declare(beside.app())
    batch.run(available_now=True)
    check_answers(beside, batch, 200)
    beside.log.close()


def test_files_and_topics_get_each_event_once(place: Place, tmp_path: Path) -> None:
    place.filled(50)
    for end in (50, 80):
        app = place.app()
        clicks = app.topic("clicks")
        app.sink(clicks, to=f"{tmp_path}/warehouse/clicks")
        app.sink(clicks, to="copies", name="copy")
        app.run(available_now=True)
        found = pq.read_table(f"{tmp_path}/warehouse/clicks")
        assert sorted(found.column("note").to_pylist()) == sorted(row["note"] for row in rows(0, end))
        assert place.log.read("copies").num_rows == end
        place.log.append("clicks", rows(50, 80))


def test_columns_that_nobody_needs_are_not_read(place: Place) -> None:
    place.filled(10)
    plan = declare(place.app()).plan()
    assert "reads clicks: user_id, page, at" in plan and "reads visits: page" in plan
    assert "keeps state (Aggregate)" in plan and "keeps no state" in plan
    assert place.log.topics() == ["clicks"]


def no_key(clicks: DataFrame) -> DataFrame:
    return clicks.select("page")


def nothing(clicks: DataFrame) -> None:
    return None


def raising(clicks: DataFrame) -> DataFrame:
    return clicks.select(F.col("missing"))


def sorting(clicks: DataFrame) -> DataFrame:
    return clicks.orderBy("page")


def doubled(clicks: DataFrame) -> DataFrame:
    return clicks.select("page", "page")


def elsewhere(clicks: DataFrame) -> DataFrame:
    return clicks.sparkSession.range(3).withColumn("user_id", F.col("id"))


def test_a_setting_that_a_topic_has_not_is_told_where_it_is_given() -> None:
    """Not when the topic is made, which may be much later, and in words of ours."""
    app = hw.App("shop")
    said = r"test_app.py:\d+: a topic has no setting 'nmae'. Its settings are: key, time, .*retention"
    for declare_one in (
        lambda: app.topic("clicks", SCHEMA, nmae="x"),
        lambda: app.table("users", SCHEMA, key="user_id", nmae="x"),
        lambda: app.stream("clicks", to="out", nmae="x")(no_key),
    ):
        with pytest.raises(InvalidApp, match=said):
            declare_one()
    with pytest.raises(InvalidApp, match="no setting 'name'"):
        app.stream("clicks", name="out")(no_key)
    app.stream("clicks", to="out", partitions=2, retention="1 day")(no_key)


def test_a_copy_in_a_topic_has_one_key_column() -> None:
    """Several were taken for the first of them; a target outside has as many as are named."""
    app = hw.App("shop")
    clicks = app.topic("clicks", SCHEMA)
    with pytest.raises(
        InvalidApp, match=r"'copy'.*'copies' cannot have the key user_id, page: a topic's key is one column"
    ):
        app.sink(clicks, to="copies", key=["user_id", "page"], name="copy")
    app.sink(clicks, to="copies", key=["user_id"], name="copy")
    app.sink(clicks, to="sqlite:///./copy.db", key=["user_id", "page"], name="target")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (no_key, "has lost its key: its result has no column 'user_id'"),
        (nothing, "returned nothing, not a DataFrame"),
        (raising, r"line \d+: Spark refuses: .*missing"),
        (sorting, "cannot run as a stream in mode 'append'"),
        (doubled, "returns the column 'page' twice"),
        (elsewhere, "does not come from its inputs"),
    ],
)
def test_a_wrong_function_is_named_before_anything_runs(place: Place, function: Any, said: str) -> None:
    place.filled(1)
    app = place.app()
    app.stream(app.topic("clicks"), to="out", key="user_id")(function)
    with pytest.raises(InvalidApp, match=said) as raised:
        app.start()
    assert "test_app.py" in str(raised.value)
    assert place.log.topics() == ["clicks"]


def test_a_table_is_not_a_dataframe(place: Place) -> None:
    app = place.app()
    users = app.table("users", schema="user_id BIGINT, name STRING", key="user_id")

    @app.stream(users, to="names", key="user_id")
    def names(users: Any) -> DataFrame:
        return users.groupBy("name").count()

    with pytest.raises(InvalidApp, match=r"users\.changes"):
        app.plan()


def careful(clicks: DataFrame) -> DataFrame:
    check = F.udf(lambda note: "ok" if note != "n7" else 1 // 0, "string")
    return clicks.select("user_id", check("note").alias("note"))


def test_a_poison_event_is_set_aside_and_the_rest_goes_on(place: Place) -> None:
    place.filled(20)
    app = place.app()
    app.stream(app.topic("clicks"), to="checked", key="user_id")(careful)
    last = app.run(available_now=True)
    assert (last.stages[0].state, last.stages[0].dead) == ("done", 1)
    assert place.log.read("checked").num_rows == 19
    [dead] = place.log.read("careful.dead").to_pylist()
    assert '"n7"' in dead["event"] and "ZeroDivisionError" in dead["error"] and dead["topic"] == "clicks"
    place.log.append("clicks", rows(20, 30))
    app.run(available_now=True)
    assert (place.log.read("checked").num_rows, place.log.read("careful.dead").num_rows) == (29, 1)


def trim(log: hw.Log, topic: str) -> None:
    """Lets retention remove what is there."""
    log.alter_topic(topic, retention="1 millisecond")
    time.sleep(0.01)
    log.tidy(topic)
    log.alter_topic(topic, retention=None)
    assert all(span.start for span in log.offsets(topic).values())


def test_poison_is_looked_for_where_a_query_began(place: Place) -> None:
    """The first batch begins at what retention has left: what is gone before that is nobody's poison."""
    place.filled(300)
    trim(place.log, "clicks")
    place.log.append("clicks", rows(0, 20))
    app = place.app()
    app.stream(app.topic("clicks"), to="checked", key="user_id")(careful)
    last = app.run(available_now=True)
    assert (last.stages[0].state, last.stages[0].dead) == ("done", 1)
    assert ['"n7"' in row["event"] for row in place.log.read("careful.dead").to_pylist()] == [True]
    assert place.log.read("checked").num_rows == 19


def test_poison_is_not_looked_for_in_front_of_the_marker_that_a_stage_goes_on_from(place: Place) -> None:
    """What an earlier version of the function could do has been written, whatever a new one would say to it."""
    place.filled(10)
    app = place.app()

    def trusting(clicks: DataFrame) -> DataFrame:
        return clicks.select("user_id", "note")

    trusting.__name__ = careful.__name__
    app.stream(app.topic("clicks"), to="checked", key="user_id", partitions=1)(trusting)
    app.run(available_now=True)
    shutil.rmtree(app.state / "checkpoints")
    place.log.append("clicks", [*rows(10, 15), *rows(7, 8)])
    again = place.app()
    again.stream(again.topic("clicks"), to="checked", key="user_id", partitions=1)(careful)
    last = again.run(available_now=True, accept_new_checkpoint={"careful": "marker"})
    assert (last.stages[0].state, last.stages[0].dead) == ("done", 1)
    assert place.log.read("checked").num_rows == 15


def counting(clicks: DataFrame) -> DataFrame:
    check = F.udf(lambda note: 1 if note != "n7" else 1 // 0, "bigint")
    return clicks.groupBy("page").agg(F.sum(check("note")).alias("n"))


def test_a_stage_with_state_stops_and_names_the_range(place: Place) -> None:
    place.filled(20)
    app = place.app()
    app.view(app.topic("clicks"), key="page")(counting)
    last = app.run(available_now=True, check=False)
    error = last.stages[0].error or ""
    assert last.stages[0].state == "failed"
    assert "ZeroDivisionError" in error and "clicks[" in error and "keeps state" in error and "test_app.py:" in error


def test_a_changed_view_is_built_anew_beside_the_old_one(place: Place) -> None:
    place.filled(40)
    first = place.app()
    first.view(first.topic("clicks"), key="page", name="pages")(per_page)
    first.run(available_now=True)

    def per_page_twice(clicks: DataFrame) -> DataFrame:
        return clicks.groupBy("page").agg((2 * F.count("*")).alias("count"))

    second = place.app()
    second.view(second.topic("clicks"), key="page", name="pages")(per_page_twice)
    last = second.run(available_now=True)
    assert "must be rebuilt" in last.notes[0] and "code" in last.notes[0]
    with second.views["pages"] as view:
        assert {row["count"] for row in view.rows().to_pylist()} == {16}


def test_a_deleted_checkpoint_is_refused_and_can_be_accepted(place: Place) -> None:
    place.filled(30)
    app = declare(place.app())
    app.run(available_now=True)
    shutil.rmtree(app.state / "checkpoints")
    place.log.append("clicks", rows(30, 60))
    with pytest.raises(AppFailed, match=r"'shop': stage 'visits' .*checkpoint_conflict"):
        declare(place.app()).run(available_now=True)
    refused = declare(place.app()).status()
    assert refused is not None and {each.state for each in refused.stages} == {"failed"}
    assert "checkpoint_conflict" in (refused.stages[0].error or "")
    assert place.log.read("visits").num_rows == sum(row["user_id"] != 0 for row in rows(0, 30))
    with pytest.raises(InvalidApp, match="keeps state"):
        declare(place.app()).run(available_now=True, accept_new_checkpoint={"per_page": "marker"})
    accepted = declare(place.app()).run(
        available_now=True, accept_new_checkpoint={"visits": "marker", "per_page": "earliest", "per_minute": "earliest"}
    )
    assert {each.state for each in accepted.stages} == {"done"}
    check_answers(place, app, 60)


def test_one_process_at_a_time_runs_an_application(place: Place) -> None:
    place.filled(10)
    app = declare(place.app())
    app.start()
    try:
        with pytest.raises(AppRunning, match="already running"):
            declare(place.app()).start()
    finally:
        app.stop()


def test_a_topic_that_is_otherwise_is_refused(place: Place) -> None:
    place.log.create_topic("clicks", "user_id STRING", key="user_id")
    with pytest.raises(InvalidApp, match="clicks"):
        declare(place.app()).start()
