"""Applications in a storm: whatever is killed, and whenever, topics, views, changes and files equal an undisturbed run."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

import headwater as hw
from tests.rigs.app.app_storm import Life, check, declare, epochs, finish, produce
from tests.rigs.app.storm_orders import (
    COMMIT_STEPS,
    driver_steps,
    is_done,
    kill_session,
    order,
    sink_steps,
    task_steps,
    withdraw,
)
from tests.rigs.children import Child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PRODUCERS = 2
WHOLE = 100
"""Storms with this seed, or a greater one, are over the whole application."""

WORKER_STEPS = [*sink_steps(), *task_steps(), *COMMIT_STEPS]
DRIVER_STEPS = [*driver_steps(), *COMMIT_STEPS]


class Storm:
    """One application, its producers, and who kills it."""

    def __init__(self, folder: Path, seed: int, *, per_second: float = 60.0) -> None:
        print(f"seed {seed}")
        self.folder = folder
        self.chance = Random(seed)
        self.rounds = 0
        (folder / "log").mkdir()
        self.log = hw.open_log(f"{folder}/log")
        node = declare(folder).graph.topics["clicks"]
        self.log.create_topic("clicks", node.schema, **node.settings)
        self._producers = [Child(lambda n=n: produce(folder, n, per_second=per_second)) for n in range(PRODUCERS)]
        self.life: Life | None = None

    def start(self) -> Life:
        """A new life, once every stage has gone on from where the last one left it."""
        before = epochs(self.log, self.folder)
        self.life = Life(self.folder)
        self._wait_until_all_go_on(before, "a start")
        return self.life

    def hurt(self, kind: str, step: str = "") -> None:
        """A round that the application survives: a stage fails, is started again, and every stage goes on."""
        life, before = self._living(), epochs(self.log, self.folder)
        what = kind
        if kind == "worker":
            time.sleep(self.chance.random())
            life.kill(self.chance.choice(life.workers()))
        elif kind == "two workers":
            life.kill(*self.chance.sample(life.workers(), 2))
        elif kind == "worker at a step":
            what = f"worker at {step}"
            order(self.folder, step, "kill", who="worker", nth=self.chance.randint(1, 2))
        else:
            assert kind == "error at a step"
            what = f"error at {step}"
            order(self.folder, step, "raise", who="driver", nth=self.chance.randint(1, 2))
        self._count(what)
        life.wait_for(lambda: is_done(self.folder), f"{what} was reached")
        self._wait_until_all_go_on(before, what)

    def end(self, kind: str, step: str = "") -> None:
        """A round after which the application has to be started again."""
        life = self._living()
        time.sleep(self.chance.random())
        victims = {
            "driver": lambda: [life.driver.pid],
            "jvm": lambda: [life.jvm()],
            "driver and worker": lambda: [life.driver.pid, self.chance.choice(life.workers())],
            "jvm and worker": lambda: [life.jvm(), self.chance.choice(life.workers())],
            "driver and jvm": lambda: [life.driver.pid, life.jvm()],
        }
        self._count(f"{kind} {step}")
        if step:
            order(self.folder, step, "kill all" if kind == "all" else "kill", who="driver")
        elif kind == "all":
            kill_session(life.session)
        else:
            life.kill(*victims[kind]())
        status = life.wait_for_end()
        withdraw(self.folder)
        if "driver" in kind or kind == "all":
            assert status == -signal.SIGKILL, life.told()
        else:
            assert status == 1, life.told()
            assert "Spark's Java process was killed by signal 9." in life.told()
        self.life = None

    def clear(self) -> int:
        """The producers stop; how many events they sent."""
        (self.folder / "enough").touch()
        return sum(producer.result() for producer in self._producers)

    def close(self) -> None:
        for producer in self._producers:
            producer.kill()
        if self.life is not None:
            kill_session(self.life.session)
            self.life.driver.wait()
        self.log.close()

    def _living(self) -> Life:
        assert self.life is not None
        return self.life

    def _wait_until_all_go_on(self, before: dict[str, int], what: str) -> None:
        def gone_on() -> bool:
            now = epochs(self.log, self.folder)
            return all(now[name] > epoch for name, epoch in before.items())

        self._living().wait_for(gone_on, f"every stage has gone on after {what}")

    def _count(self, what: str) -> None:
        self.rounds += 1
        print(f"round {self.rounds}: {what}")


@pytest.fixture
def storm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Storm]:
    (tmp_path / "storm").mkdir()
    if request.param >= WHOLE:
        (tmp_path / "storm" / "whole").touch()
    storm = Storm(tmp_path / "storm", request.param)
    yield storm
    storm.close()


def rage(storm: Storm, *, lives: int, rounds: int) -> None:
    """Each life is hurt several times, then ended."""
    chance = storm.chance
    for _ in range(lives):
        storm.start()
        for _ in range(rounds):
            kind = chance.choice(["worker", "two workers", "worker at a step", "worker at a step", "error at a step"])
            steps = {"worker at a step": WORKER_STEPS, "error at a step": driver_steps()}
            storm.hurt(kind, chance.choice(steps.get(kind, [""])))
        kind = chance.choice(["driver", "jvm", "driver and worker", "jvm and worker", "driver and jvm", "all"])
        at_step = kind in ("driver", "all") and chance.random() < 0.6
        storm.end(kind, chance.choice(DRIVER_STEPS) if at_step else "")


@pytest.mark.covers("Storm")
@pytest.mark.covers("StreamBase")
@pytest.mark.parametrize("storm", [1], indirect=True)
def test_an_application_comes_out_of_a_storm_as_if_nothing_had_been(
    storm: Storm, spark: SparkSession, tmp_path: Path
) -> None:
    """Twelve rounds in three lives; then the recorded clicks are run again, undisturbed and as one batch, to the same output."""
    deaths = (("driver", ""), ("jvm and worker", ""), ("all", "views: changes appended"))
    for (death, step), at in zip(deaths, ("state: saved", "frame: task staged", ""), strict=True):
        storm.start()
        storm.hurt("worker")
        storm.hurt("worker at a step", at or storm.chance.choice(WORKER_STEPS))
        storm.hurt("error at a step", storm.chance.choice(driver_steps()))
        storm.end(death, step)
    assert storm.rounds == 12
    clicks = storm.clear()
    finish(storm.folder, spark)
    check(storm.folder, clicks=clicks)
    calm = tmp_path / "calm"
    replay(storm.folder, calm, spark)
    check(calm, clicks=clicks)
    with hw.open_log(f"{calm}/log") as again, hw.open_log(f"{storm.folder}/log") as stormy:
        for topic, by in (("cleaned", ("page", "producer")), ("pace", ("page",))):
            assert rows_by(again, topic, by) == rows_by(stormy, topic, by), topic


def replay(recorded: Path, calm: Path, spark: SparkSession) -> None:
    """The same clicks in another log, and the application over them without a disturbance."""
    with hw.open_log(f"{recorded}/log") as before, hw.open_log(f"{calm}/log") as log:
        node = declare(calm).graph.topics["clicks"]
        log.create_topic("clicks", node.schema, **node.settings)
        log.append("clicks", before.read("clicks"))
    last = declare(calm, spark=spark).run(available_now=True)
    assert {stage.state for stage in last.stages} == {"done"}, last


def rows_by(log: hw.Log, topic: str, by: Sequence[str]) -> dict[tuple[object, ...], list[dict[str, object]]]:
    """The events of each key in the order in which they were appended, which is promised; that of different keys is not."""
    found: dict[tuple[object, ...], list[dict[str, object]]] = {}
    events = log.read(topic, columns=[*log.topic(topic).schema.names, "_partition", "_offset"])
    for row in events.sort_by([("_partition", "ascending"), ("_offset", "ascending")]).to_pylist():
        del row["_partition"], row["_offset"]
        found.setdefault(tuple(row[name] for name in by), []).append(row)
    return found


@pytest.mark.bench
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("storm", range(100, 108), indirect=True)
def test_storms(storm: Storm, spark: SparkSession) -> None:
    """Fifteen rounds each."""
    rage(storm, lives=3, rounds=4)
    clicks = storm.clear()
    finish(storm.folder, spark)
    check(storm.folder, clicks=clicks)


@pytest.mark.bench
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("storm", [200], indirect=True)
def test_every_step_of_the_driver(storm: Storm, spark: SparkSession) -> None:
    """Killed at each named step between a batch's result and Spark's own commit, alone or with everything."""
    for number, step in enumerate(DRIVER_STEPS):
        storm.start()
        storm.end("all" if number % 2 else "driver", step)
    clicks = storm.clear()
    finish(storm.folder, spark)
    check(storm.folder, clicks=clicks)


@pytest.mark.bench
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("storm", [300], indirect=True)
def test_every_step_of_the_workers(storm: Storm, spark: SparkSession) -> None:
    """In one life."""
    storm.start()
    for step in WORKER_STEPS:
        storm.hurt("worker at a step", step)
    for step in driver_steps():
        storm.hurt("error at a step", step)
    storm.end("driver")
    clicks = storm.clear()
    finish(storm.folder, spark)
    check(storm.folder, clicks=clicks)
