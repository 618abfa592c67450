"""Stages that are started again in the background, whatever they died of: an error, or a task that an earlier run left behind."""

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
from headwater.processing.failure import is_about_data
from headwater.processing.runner import OVERTAKEN_MAX

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
        from headwater.processing.opened import log_for_writing
        from headwater.processing.staging import take_number

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
