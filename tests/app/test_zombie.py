"""Zombies under real Spark: processes that slept while their stage was started again elsewhere, and batches that are not the same.

Nothing is lost and nothing doubled, and whoever is refused is told why. The application and the oracle are those of the storm.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import headwater as hw
from headwater.model.errors import AppRunning
from headwater.processing.stages.status import AppStatus
from tests.rigs.app.app_storm import Life, check, check_point, click, declare, epochs, finish
from tests.rigs.app.storm_orders import asleep, kill_session, order, session_of

pytestmark = pytest.mark.timeout(1800)

WAKES_S = 60.0


class Place:
    """A log with clicks, and the lives of an application over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.log = hw.open_log(f"{folder}/log")
        node = declare(folder).graph.topics["clicks"]
        self.log.create_topic("clicks", node.schema, **node.settings)
        self.clicks = 0
        self.life: Life | None = None

    def add(self, count: int) -> None:
        self.log.append("clicks", [click(0, n) for n in range(self.clicks, self.clicks + count)])
        self.clicks += count

    def close(self) -> None:
        for process in asleep(self.folder):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self.life is not None:
            kill_session(self.life.session)
            self.life.driver.wait()
        self.log.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "place")
    yield place
    place.close()


@pytest.mark.covers("concept: microbatch, checkpoint, atomic commit, idempotence", backends=["file"])
@pytest.mark.covers("InfoSphere Streams", backends=["file"])
@pytest.mark.parametrize(
    "step",
    [
        pytest.param("stream: committing", marks=pytest.mark.slow),
        pytest.param("stream: task begun", marks=pytest.mark.bench),
    ],
)
def test_a_task_or_a_commit_that_slept_can_do_nothing(place: Place, spark: SparkSession, step: str) -> None:
    """It is stopped, everything else of its application is killed, another one goes on; then it wakes.

    All stages stand at one consistent point each time: when everything was killed, when the other one has gone on, and when it woke.
    """
    place.add(100)
    place.life = life = Life(place.folder)
    order(place.folder, step, "stop", who="worker")
    life.wait_for(lambda: len(asleep(place.folder)) == 1, f"somebody sleeps at {step}")
    kill_session(life.session)
    life.driver.wait()
    killed_at = check_point(place.folder)
    assert killed_at["cleaned"] < place.clicks, "it was killed before its end"
    place.add(100)
    last = declare(place.folder, spark=spark).run(available_now=True)
    assert {stage.state for stage in last.stages} == {"done"}
    recovered_at = check_point(place.folder)
    assert recovered_at["cleaned"] == place.clicks
    (zombie,) = asleep(place.folder)
    os.kill(zombie, signal.SIGCONT)
    deadline = time.monotonic() + WAKES_S
    while Path(f"/proc/{zombie}/cmdline").exists():
        assert time.monotonic() < deadline, "who was woken does not end"
        time.sleep(0.05)
    assert check_point(place.folder) == recovered_at
    if step == "stream: committing":
        assert (place.folder / "woken").read_text().startswith("Fenced: Stage 'storm.cleaned'")
    place.add(50)
    finish(place.folder, spark)
    check(place.folder, clicks=place.clicks)
    assert list((place.folder / "log" / "staged").rglob("*.arrow")) == []


@pytest.mark.bench
def test_an_application_that_slept_is_not_overtaken_by_mistake(place: Place, spark: SparkSession) -> None:
    """A second one is told who runs it; with a folder of its own it is refused stage by stage. The first goes on, and does not notice."""
    place.add(100)
    place.life = life = Life(place.folder)
    life.wait_for(lambda: min(epochs(place.log, place.folder).values()) >= 0, "every stage has written")
    processes = list(session_of(life.session))
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    place.add(100)
    with pytest.raises(AppRunning, match=f"process {life.driver.pid}"):
        declare(place.folder, spark=spark).run(available_now=True)
    beside = declare(place.folder, spark=spark)
    beside.state = place.folder / "beside"
    assert all(
        "[checkpoint_conflict]" in error for error in errors_of(beside.run(available_now=True, check=False)).values()
    )
    for process in processes:
        os.kill(process, signal.SIGCONT)
    place.add(100)

    def goes_on() -> bool:
        status = declare(place.folder).status()
        assert status is not None
        assert [(stage.error, stage.restarts) for stage in status.stages] == [(None, 0)] * len(status.stages)
        return status.stages[0].events == place.clicks and not any(stage.lag for stage in status.stages)

    life.wait_for(goes_on, "the first has read everything")
    os.kill(life.driver.pid, signal.SIGINT)
    life.wait_for_end()
    finish(place.folder, spark)
    check(place.folder, clicks=place.clicks)


def errors_of(status: AppStatus) -> dict[str, str]:
    return {stage.name: stage.error or "" for stage in status.stages if stage.state == "failed"}


@pytest.mark.bench
def test_a_batch_that_was_planned_anew_is_refused_by_every_kind_of_stage(
    place: Place, spark: SparkSession, tmp_path: Path
) -> None:
    """As after a power loss that took back a checkpoint's last file; with the right one put back, everything goes on."""
    (place.folder / "whole").touch()
    app = declare(place.folder, spark=spark)
    checkpoints, kept = app.state / "checkpoints", tmp_path / "kept"
    place.add(60)
    app.run(available_now=True)
    shutil.copytree(checkpoints, kept)
    place.add(60)
    before = written(place)
    for stage in app.graph.stages:
        plan_anew(checkpoints / stage)
    refused = errors_of(app.run(available_now=True, check=False))
    assert refused.keys() == app.graph.stages.keys()
    assert all("[checkpoint_conflict]" in error and "planned again" in error for error in refused.values()), refused
    assert written(place) == before
    shutil.rmtree(checkpoints)
    shutil.copytree(kept, checkpoints)
    finish(place.folder, spark)
    check(place.folder, clicks=place.clicks)


def plan_anew(checkpoint: Path) -> None:
    """Takes back that the last batch is done, and lets it end an event earlier in its source."""
    last = max(int(file.name) for file in (checkpoint / "offsets").iterdir() if file.name.isdigit())
    (checkpoint / "commits" / str(last)).unlink(missing_ok=True)
    offsets = checkpoint / "offsets" / str(last)
    version, settings, *sources = offsets.read_text().split("\n")
    ends = [json.loads(source) for source in sources]
    read = next(
        places for end in ends for name, places in end.items() if not name.startswith(".") and isinstance(places, dict)
    )
    read[max(read, key=lambda number: read[number])] -= 1
    offsets.write_text("\n".join((version, settings, *map(json.dumps, ends))))
    for left in checkpoint.rglob(".*.crc"):
        left.unlink()


def written(place: Place) -> dict[str, int]:
    """How many events and files there are."""
    topics = {topic: place.log.read(topic).num_rows for topic in place.log.topics() if topic != "clicks"}
    return topics | {"files": len(list((place.folder / "files").glob("*.parquet")))}
