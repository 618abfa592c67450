"""Stages that are started again in the background, whatever they died of: an error, or a task that an earlier run left behind; and an
application that is started a second time, elsewhere, which they do not notice."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.model.errors import Fenced
from headwater.processing.stages.failure import is_about_data
from headwater.processing.stages.supervisor import OVERTAKEN_MAX
from tests.rigs.wait import wait_until

TASK_FAILURES_MAX = 4
"""So often the Spark of these tests runs a task, before its query fails."""


def at_first(flags: Path, name: str, strike: Callable[[], object], *, times: int = 1) -> Callable[[Any], Any]:
    """A function for a task that does something bad the first times it is called, in whatever process, and then nothing."""

    def check(n):  # without hints: Spark would read them
        for number in range(times):
            try:
                (flags / f"{name}.{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            strike()
            break
        return n

    return check


def declare(app: hw.App, flags: Path, **times: int) -> None:
    """A stage for each name, to which that happens so often. What functions do travels with them: workers cannot import this module."""

    def raise_an_error() -> None:
        raise ValueError("only once")

    def overtake() -> None:
        """As another process that runs the stage would."""
        from headwater.processing.sink.staging import take_number
        from headwater.processing.spark.log_cache import log_for_writing

        take_number(log_for_writing(app_url), "shop.overtaken")

    app_url = app.log_url
    words = app.topic("words", schema="n BIGINT", key="n", partitions=1)
    strikes = {"failing": raise_an_error, "overtaken": overtake}
    for name, often in times.items():
        bad = F.udf(at_first(flags, name, strikes[name], times=often), "bigint")

        def copy(words: DataFrame, bad: Any = bad) -> DataFrame:
            return words.select(bad("n").alias("n"))

        copy.__name__ = name
        app.stream(words, to=name, key="n")(copy)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_retry_can_cure_is_cured_in_the_background(spark: SparkSession, tmp_path: Path) -> None:
    """One stage raises until its query fails, and one is overtaken by somebody who leaves it alone then."""
    app = hw.App("shop", log=tmp_path / "log", spark=spark)
    declare(app, tmp_path, failing=TASK_FAILURES_MAX, overtaken=1)
    with hw.open_log(tmp_path / "log") as log:
        app.start()
        try:
            log.append("words", [{"n": 1}, {"n": 2}])
            deadline = time.monotonic() + 600
            while not is_cured(app):
                assert time.monotonic() < deadline, app.status()
                time.sleep(0.1)
        finally:
            app.stop()
        for topic in ("failing", "overtaken"):
            assert sorted(row["n"] for row in log.read(topic).to_pylist()) == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stage_that_two_run_is_left_by_one(spark: SparkSession, tmp_path: Path) -> None:
    """It would go on for ever, a number for one and a number for the other."""
    app = hw.App("shop", log=tmp_path / "log", spark=spark)
    declare(app, tmp_path, overtaken=100)
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("words", "n BIGINT", key="n", partitions=1)
        log.append("words", [{"n": 1}, {"n": 2}])
        (stage,) = app.run(available_now=True, check=False).stages
        assert (stage.state, stage.restarts) == ("failed", OVERTAKEN_MAX - 1)
        assert "[fenced]" in (stage.error or "") and "stop this one" in (stage.error or "")
        assert log.read("overtaken").num_rows == 0


def copied(words: DataFrame) -> DataFrame:
    return words.select("n")


def counted(words: DataFrame) -> DataFrame:
    return words.groupBy("n").count()


def declare_whole(app: hw.App, folder: Path) -> hw.App:
    """A stage of each kind: a stream, a view, a sink to a table and one to files."""
    words = app.topic("words", schema="n BIGINT", key="n", partitions=1)
    app.stream(words, to="copied", key="n")(copied)
    app.view(words, key="n")(counted)
    app.sink(words, to=f"sqlite:///{folder}/outside.db", name="outside")
    app.sink(words, to=f"{folder}/files", name="files")
    return app


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_who_is_started_by_mistake_stops_nobody(spark: SparkSession, tmp_path: Path) -> None:
    """With another folder for its state it is refused by what was written last, before it opens anything; the first one does not notice."""
    first = declare_whole(hw.App("shop", log=tmp_path / "log", spark=spark), tmp_path)
    beside = declare_whole(hw.App("shop", log=tmp_path / "log", spark=spark, state=tmp_path / "beside"), tmp_path)
    with hw.open_log(tmp_path / "log") as log:
        first.start()
        try:
            log.append("words", [{"n": n} for n in range(3)])
            wait_until(lambda: have_read(first, 3), seconds=600)
            numbers = {name: log.store.stage_state(name).number for name in log.stages()}
            refused = beside.run(available_now=True, check=False).stages
            assert numbers == {name: log.store.stage_state(name).number for name in log.stages()}
            assert {stage.state for stage in refused} == {"failed"} and len(refused) == 4
            for stage in refused:
                assert f"[checkpoint_conflict] Stage 'shop.{stage.name}' has last written epoch " in (stage.error or "")
                assert "deleted, or it belongs to another application" in (stage.error or "")
            log.append("words", [{"n": n} for n in range(3, 5)])
            wait_until(lambda: have_read(first, 5), seconds=600)
            with first.views["counted"] as view:
                assert {row["n"]: row["count"] for row in view.rows().to_pylist()} == dict.fromkeys(range(5), 1)
        finally:
            first.stop()
        assert sorted(log.read("copied").column("n").to_pylist()) == list(range(5))


def have_read(app: hw.App, events: int) -> bool:
    """Whether every stage has, and none of them was ever started again."""
    status = app.status()
    assert status is not None
    assert [(stage.error, stage.restarts) for stage in status.stages] == [(None, 0)] * 4
    return all(stage.events == events for stage in status.stages)


def is_cured(app: hw.App) -> bool:
    status = app.status()
    assert status is not None
    assert not [stage for stage in status.stages if stage.state == "failed"], status
    return all(stage.restarts and stage.events == 2 for stage in status.stages)


def test_a_worker_that_was_killed_is_no_poison() -> None:
    """Also where Spark tells of it by way of a function of ours; else a stage with state would stop for good after two of them."""
    traceback = "Traceback (most recent call last):\n  File …\nValueError: bad"
    assert is_about_data(Exception(f"An exception was raised by the Python Proxy. {traceback}"))
    assert not is_about_data(Exception(f"{traceback}\nPython worker exited unexpectedly (crashed). Consider …"))
    assert not is_about_data(Exception("Python worker failed to connect back."))
    assert not Fenced.retriable
