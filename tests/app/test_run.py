"""An application that is looked after: what fails beside its stages is told and tried again, and a stop leaves nothing running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.app.troubles import AGAIN_S, Troubles
from headwater.model.backoff import Backoff
from headwater.processing.stages.inputs import Inputs
from headwater.processing.stages.poison import PoisonHunt
from headwater.processing.stages.status import AppStatus
from headwater.views.maintainer import ViewMaintainer

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
WAIT_S_MAX = 400.0


def test_what_fails_is_told_until_it_works_and_tried_later_and_later() -> None:
    """So a disk that is full does not end those who look after the stages."""
    now, calls = [0.0], list[float]()
    troubles = Troubles(clock=lambda: now[0], backoff=lambda: Backoff(*AGAIN_S, jitter=0.0))

    def fail_for_ten_seconds() -> None:
        calls.append(now[0])
        if now[0] < 10:
            raise OSError("no space left")

    for now[0] in range(20):
        troubles.attempt("It could not be written", fail_for_ten_seconds)
        told = troubles.told
        assert told == (
            ["It could not be written. The application retries: OSError: no space left"] if now[0] < 15 else []
        )
    assert calls == [0, 1, 3, 7, 15, 16, 17, 18, 19]


class Place:
    """A log with one topic of numbers."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self.url, self.spark = str(folder / "log"), spark
        self.log = hw.open_log(self.url)
        self.log.create_topic("numbers", "n BIGINT, at TIMESTAMP", key="n", time="at", partitions=1)
        self.append(*range(10))

    def append(self, *numbers: int) -> None:
        self.log.append("numbers", [{"n": n, "at": NOON + timedelta(seconds=n)} for n in numbers])

    def app(self) -> hw.App:
        return hw.App("watched", log=self.url, spark=self.spark)

    def active(self) -> list[str]:
        return [str(query.name) for query in self.spark.streams.active]


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession) -> Iterator[Place]:
    place = Place(tmp_path, spark)
    yield place
    for query in spark.streams.active:
        query.stop()
    place.log.close()


def wait_for(done: Callable[[], Any], what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not done():
        assert time.monotonic() < deadline, f"not within {WAIT_S_MAX:g} s: {what()}"
        time.sleep(0.02)


def stopped(app: hw.App) -> bool:
    """Whether `stop` comes back."""
    stopping = threading.Thread(target=app.stop, daemon=True)
    stopping.start()
    stopping.join(WAIT_S_MAX / 4)
    return not stopping.is_alive()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stage_that_is_just_started_again_does_not_outlive_its_application(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Spark goes on and the log is closed: a query that nobody stopped would run for ever."""
    is_starting, starts = threading.Event(), list[float]()
    make = Inputs.result

    def slowly(*given: Any) -> DataFrame:
        starts.append(time.monotonic())
        if len(starts) > 1:
            is_starting.set()
            time.sleep(1)
        return make(*given)

    monkeypatch.setattr(Inputs, "result", slowly)
    app = place.app()

    @app.stream(app.topic("numbers"), to="copies", key="n")
    def copies(numbers: DataFrame) -> DataFrame:
        return numbers.select(F.udf(lambda n: 1 // 0, "bigint")("n").alias("n"))

    app.start()
    assert is_starting.wait(WAIT_S_MAX)
    app.stop()
    assert place.active() == []
    status = app.status()
    assert status is not None and status.stages[0].state == "stopped"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_search_for_poison_does_not_hold_up_a_stop(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever searches is inside a job of Spark that may take any time; the job is cancelled."""
    hunting, inside = tmp_path / "hunting", tmp_path / "inside"
    run = PoisonHunt.run

    def noted(*given: Any) -> Any:
        hunting.touch()
        return run(*given)

    monkeypatch.setattr(PoisonHunt, "run", noted)

    def hang(n):  # type: ignore[no-untyped-def]  # Spark reads the types of a function, and not as text
        if not hunting.exists():
            raise ValueError("bad")
        inside.touch()
        time.sleep(3600)

    app = place.app()

    @app.stream(app.topic("numbers"), to="copies", key="n")
    def copies(numbers: DataFrame) -> DataFrame:
        return numbers.select(F.udf(hang, "bigint")("n").alias("n"))

    app.start()
    wait_for(inside.exists, app.status)
    assert stopped(app)
    assert place.active() == [] and "copies.dead" not in place.log.topics()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_view_whose_swap_fails_is_swapped_later_and_leaves_nothing_of_the_old_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was away: that is told, the stages are looked after as before. A batch and the swap never meet in one maintainer."""
    inside, met = list[str](), list[str]()
    swap, maintain, failures = ViewMaintainer.swap, ViewMaintainer.maintain, iter(range(2))

    def alone(name: str, do: Callable[..., Any], *given: Any) -> Any:
        met.extend(inside)
        inside.append(name)
        try:
            time.sleep(0.3)
            return do(*given)
        finally:
            inside.remove(name)

    def failing(maintainer: ViewMaintainer) -> None:
        if next(failures, None) is not None:
            raise ConnectionError("the store is away")
        alone("swap", swap, maintainer)

    monkeypatch.setattr(ViewMaintainer, "swap", failing)
    monkeypatch.setattr(ViewMaintainer, "maintain", lambda *given: alone("maintain", maintain, *given))

    def once(numbers: DataFrame) -> DataFrame:
        return hw.dedupe(numbers, "n").select("n", F.lit(1).alias("times"))

    def twice(numbers: DataFrame) -> DataFrame:
        return hw.dedupe(numbers, "n").select("n", F.lit(2).alias("times"))

    def declared(function: Callable[[DataFrame], DataFrame]) -> hw.App:
        app = place.app()
        app.view(app.topic("numbers"), key="n", name="total")(function)
        return app

    declared(once).run(available_now=True)
    app = declared(twice)
    old, new = app.state / "checkpoints/total", app.state / "checkpoints/total.2"
    assert old.exists()
    app.start()
    try:
        wait_for(lambda: any("ConnectionError: the store is away" in note for note in notes(app)), app.status)
        for n in range(10, 15):
            place.append(n)
            time.sleep(0.2)
        wait_for(lambda: not old.exists(), app.status)
        wait_for(lambda: rows(app) == {(n, 2) for n in range(15)}, app.status)
        assert new.exists() and not any("away" in note for note in notes(app)) and not met
        status = app.status()
        assert status is not None and status.stages[0].state == "running" and status.stages[0].restarts == 0
        assert [path.name.partition(".")[0] for path in (app.state / "pace").iterdir()] == ["total"]
    finally:
        app.stop()
    assert not (app.state / "pace").exists()
    last = app.status()
    assert last is not None and 0 < last.stages[0].state_rows <= 15, "those that could still come twice"


def notes(app: hw.App) -> list[str]:
    status: AppStatus | None = app.status()
    return [] if status is None else status.notes


def rows(app: hw.App) -> set[tuple[int, int]]:
    with app.views["total"] as view:
        return {(row["n"], row["times"]) for row in view.rows().to_pylist()}
