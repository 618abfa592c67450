"""What goes wrong in an application: a sentence with the stage and the line, nothing lost, and it can be gone on with."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark import util as spark_util
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.model.errors import InvalidApp
from headwater.processing.stages.status import AppStatus, StageStatus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCHEMA = "n BIGINT, word STRING"
WAIT_S_MAX = 400.0


class Place:
    """A log with one topic, and applications on it."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.url = str(folder / "log")
        self.spark = spark
        self.log = hw.open_log(self.url)
        self.log.create_topic("numbers", SCHEMA, key="n", partitions=2)

    def app(self) -> hw.App:
        return hw.App("shop", log=self.url, spark=self.spark)

    def append(self, start: int, end: int) -> None:
        self.log.append("numbers", [{"n": n, "word": f"w{n}"} for n in range(start, end)])

    def numbers(self, topic: str) -> list[int]:
        return sorted(self.log.read(topic)["n"].to_pylist()) if topic in self.log.topics() else []


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession) -> Iterator[Place]:
    place = Place(tmp_path, spark)
    yield place
    place.log.close()


def wait_for(app: hw.App, done: Callable[[AppStatus], bool]) -> AppStatus:
    deadline = time.monotonic() + WAIT_S_MAX
    while time.monotonic() < deadline:
        status = app.status()
        if status is not None and done(status):
            return status
        time.sleep(0.05)
    raise AssertionError(f"not within {WAIT_S_MAX:g} s: {app.status()}")


def stage(status: AppStatus, name: str) -> StageStatus:
    return next(each for each in status.stages if each.name == name)


def is_hungry(stage: StageStatus) -> bool:
    """Whether it waits for memory, and knows by how much it is behind."""
    return (stage.state, stage.lag) == ("waiting", 30) and "MemoryError: cannot allocate" in (stage.error or "")


def test_a_worker_without_memory_is_tried_again_and_loses_nothing(place: Place, tmp_path: Path) -> None:
    """It is no event's fault, so none is set aside; the other stage goes on, and the lag of the one that waits is told."""
    full = tmp_path / "full"
    full.touch()

    def hungry(word):  # type: ignore[no-untyped-def]  # Spark reads the types of a function, and not as text
        if full.exists():
            raise MemoryError("cannot allocate")
        return word

    app = place.app()
    numbers = app.topic("numbers")

    @app.stream(numbers, to="eaten", key="n")
    def eaten(numbers: DataFrame) -> DataFrame:
        return numbers.select("n", F.udf(hungry, "string")("word").alias("word"))

    @app.stream(numbers, to="copied", key="n")
    def copied(numbers: DataFrame) -> DataFrame:
        return numbers.select("n")

    place.append(0, 20)
    app.start()
    try:
        wait_for(app, lambda status: stage(status, "eaten").restarts >= 2 and stage(status, "copied").events == 20)
        place.append(20, 30)
        told = wait_for(app, lambda status: stage(status, "copied").events == 30 and is_hungry(stage(status, "eaten")))
        waiting = stage(told, "eaten")
        assert "test_app_trouble.py:" in (waiting.error or "")
        assert waiting.where.startswith("test_app_trouble.py:") and waiting.dead == 0
        full.unlink()
        good = wait_for(app, lambda status: stage(status, "eaten").events == 30)
        assert stage(good, "eaten").error is None
    finally:
        app.stop()
    assert place.numbers("eaten") == place.numbers("copied") == list(range(30))
    assert "eaten.dead" not in place.log.topics()


def test_a_driver_that_spark_has_given_up_takes_the_batch_again(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By TCP Spark waits ten seconds for a driver that has connected. Its own `toArrow` never returns then, and the stage stood still."""
    connect, given_up = spark_util.local_connect_and_auth, list[int]()

    def given_up_twice(*address: Any) -> Any:
        if len(given_up) < 2:
            given_up.append(1)
            raise EOFError
        return connect(*address)

    app = place.app()
    numbers = app.topic("numbers")

    @app.stream(numbers, to="copied", key="n")
    def copied(numbers: DataFrame) -> DataFrame:
        return numbers.select("n")

    app.sink(numbers, to=f"sqlite:///{tmp_path}/copy.db", name="copy")
    place.append(0, 5)
    app.start()
    try:
        wait_for(app, lambda status: all(each.events == 5 for each in status.stages))
        monkeypatch.setattr(spark_util, "local_connect_and_auth", given_up_twice)
        place.append(5, 9)
        told = wait_for(app, lambda status: all(each.events == 9 for each in status.stages))
    finally:
        app.stop()
    assert len(given_up) == 2 == sum(each.restarts for each in told.stages)
    assert place.numbers("copied") == list(range(9))
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        assert sorted(copy.execute("select n from numbers")) == [(n,) for n in range(9)]


def test_another_schema_is_refused_with_stage_and_line_and_more_columns_are_taken(place: Place) -> None:
    place.append(0, 5)

    def run(function: Any) -> AppStatus:
        app = place.app()
        app.stream(app.topic("numbers"), to="out", key="n")(function)
        return app.run(available_now=True)

    def made(*columns: Any) -> Any:
        def chosen(numbers: DataFrame) -> DataFrame:
            return numbers.select(*columns)

        return chosen

    run(made("n", "word"))
    with pytest.raises(InvalidApp, match=r"Stage 'chosen' \(test_app_trouble.py:\d+\) does not fit topic 'out'.*word"):
        run(made("n", F.col("n").alias("word")))
    place.append(5, 10)
    last = run(made("n", "word", F.length("word").cast("bigint").alias("length")))
    assert last.stages[0].state == "done"
    assert place.numbers("out") == list(range(10))
    assert place.log.read("out").select(["n", "length"]).to_pylist().count({"n": 7, "length": 2}) == 1


def test_a_batch_that_never_succeeds_ends_with_a_sentence(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's own code fails on columns that were promised and do not come. Nothing is written; the corrected function goes on there."""
    monkeypatch.setattr("headwater.processing.stages.supervisor.RETRIES_MAX", 1)
    place.append(0, 5)

    def lying(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch.drop_columns(["word"])

    def honest(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches

    def run(mapping: Any) -> StageStatus:
        app = place.app()

        @app.stream(app.topic("numbers"), to="mapped", key="n")
        def mapped(numbers: DataFrame) -> DataFrame:
            return numbers.mapInArrow(mapping, SCHEMA)

        return app.run(available_now=True, check=False).stages[0]

    last = run(lying)
    assert (
        last.state == "failed" and last.error and "\n" not in last.error and last.where.startswith("test_app_trouble")
    )
    assert place.numbers("mapped") == []
    assert run(honest).state == "done" and place.numbers("mapped") == list(range(5))


def test_a_topic_whose_schema_moves_on_is_read_on(place: Place) -> None:
    """A column that is new does not disturb who does not know it; who asks for it gets null for what was before."""
    app = place.app()

    @app.stream(app.topic("numbers"), to="copied", key="n")
    def copied(numbers: DataFrame) -> DataFrame:
        return numbers.select("n")

    place.append(0, 5)
    app.start()
    try:
        wait_for(app, lambda status: stage(status, "copied").events == 5)
        place.log.alter_topic("numbers", schema=f"{SCHEMA}, more DOUBLE")
        place.log.append("numbers", [{"n": n, "word": "w", "more": n / 2} for n in range(5, 10)])
        told = wait_for(app, lambda status: stage(status, "copied").events == 10)
        assert stage(told, "copied").restarts == 0
    finally:
        app.stop()
    again = place.app()

    @again.stream(again.topic("numbers"), to="halves", key="n")
    def halves(numbers: DataFrame) -> DataFrame:
        return numbers.select("n", "more")

    assert again.run(available_now=True).stages[0].state == "done"
    assert place.numbers("copied") == place.numbers("halves") == list(range(10))
    found = {row["n"]: row["more"] for row in place.log.read("halves").to_pylist()}
    assert found == {n: None if n < 5 else n / 2 for n in range(10)}
