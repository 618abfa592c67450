"""An application on Kafka in a storm: its driver, a Python worker, the broker, or driver and broker at once are killed.

Each task commits by itself there (see docs/exactly-once.md), so what is tested is that tasks, batches and the view's changes count
once whatever dies in between. The oracle is DuckDB over the events that were acknowledged.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.model.errors import InvalidApp
from headwater.processing.stages.status import StageStatus
from headwater.testing.servers.kafka import KafkaServer
from tests.rigs.app.kafka_apps import (
    BROKER,
    PARTITIONS,
    SCHEMA,
    SCRIPT,
    Clicks,
    children_named,
    environment,
    wait_until_right,
)
from tests.rigs.processing.spark_writers import kill_session
from tests.rigs.services import running_kafka

ROOT = Path(__file__).parents[2]
KINDS = ("driver", "broker", "both", "worker")
EVENTS = 300
DEADLINE_S = 400.0


class Driver:
    """The application in a process group of its own, started again whenever it was killed."""

    def __init__(self, folder: Path, told: dict[str, str]) -> None:
        self.folder, self._told = folder, told
        (folder / "app.py").write_text(SCRIPT)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it."""
        environment = {**os.environ, **self._told, "PYTHONPATH": str(ROOT / "src")}
        with (self.folder / "driver.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headwater.cli.main", "run", "app.py", "--no-page", "--master", "local[2]"],
                cwd=self.folder,
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """Ends driver, JVM and workers with SIGKILL."""
        assert self.process is not None
        kill_session(self.process.pid)
        self.process.wait()

    def kill_worker(self, chance: random.Random) -> None:
        """Ends one Python worker of Spark, if there is one at this moment."""
        assert self.process is not None
        workers = children_named(self.process.pid, "pyspark.worker")
        if workers:
            try:
                os.kill(chance.choice(workers), signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended by itself meanwhile

    def stop(self) -> None:
        """Lets it finish its batches; whatever is left afterwards is killed."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                pass
            self.kill()


def run_rounds(folder: Path, seed: int, kinds: list[str]) -> None:
    """One kill after another, each a moment after events came; then the answers have to become right."""
    print(f"seed {seed}: {kinds}")
    with running_kafka(BROKER) as broker:
        url, views = f"kafka://{broker.bootstrap}?prefix=storm.", f"sqlite:///{folder}/views.db"
        driver = Driver(folder, environment(url, folder, views))
        with hw.open_log(url) as log:
            try:
                _kill_each(log, broker, driver, Clicks(seed), kinds, random.Random(seed), views)
            finally:
                driver.stop()


def _kill_each(
    log: hw.Log,
    broker: KafkaServer,
    driver: Driver,
    clicks: Clicks,
    kinds: list[str],
    chance: random.Random,
    views: str,
) -> None:
    def wait() -> None:
        wait_until_right(log, views, clicks, state=driver.folder / "state", alive=driver.is_alive, s=DEADLINE_S)

    log.create_topic("clicks", SCHEMA, key="user_id", time="at", partitions=PARTITIONS)
    for kind in kinds:
        if not driver.is_alive():
            driver.start()
        clicks.append(log, chance.randrange(1, EVENTS))
        wait()
        clicks.append(log, chance.randrange(1, EVENTS))
        time.sleep(chance.random() * 1.5)
        if kind in ("driver", "both"):
            driver.kill()
        if kind == "worker":
            driver.kill_worker(chance)
        if kind in ("broker", "both"):
            broker.kill()
            time.sleep(chance.random() * 3)
            broker.restart()
    if not driver.is_alive():
        driver.start()
    wait()
    time.sleep(1.0)
    wait()  # nothing came twice a moment later


def per_page(clicks: DataFrame) -> DataFrame:
    return clicks.groupBy("page").agg(F.count("*").alias("clicks"))


@pytest.mark.slow
@pytest.mark.service("kafka")
@pytest.mark.timeout(300)
def test_a_stage_in_update_mode_is_committed_by_the_driver(
    kafka: KafkaServer, spark: SparkSession, tmp_path: Path
) -> None:
    """Kafka has nowhere to stage rows; a batch that is run again is written once, by its marker."""
    url = f"kafka://{kafka.bootstrap}?prefix=u{uuid.uuid4().hex[:8]}."
    with hw.open_log(url) as log:
        log.create_topic("clicks", "page STRING", key="page", partitions=2)
        for turn in (1, 2):
            log.append("clicks", [{"page": f"/{n % 3}"} for n in range(30)])
            app = hw.App("shop", log=url, spark=spark, state=tmp_path / "state", views=f"sqlite:///{tmp_path}/views.db")
            app.stream(app.topic("clicks"), to="totals", key="page", mode="update")(per_page)
            [status] = app.run(available_now=True).stages
            assert status.state == "done", status.error
            assert log.table("totals").to_pydict()["clicks"] == [10 * turn] * 3
            assert log.read("totals").num_rows == 3 * turn
        last = log.stage("shop.per_page").last
        assert last is not None and last.epoch >= 1


def passed_on(clicks: DataFrame) -> DataFrame:
    return clicks.select("page", "n")


@pytest.mark.slow
@pytest.mark.service("kafka")
@pytest.mark.timeout(300)
def test_a_deleted_checkpoint_on_kafka_is_refused_with_a_way_out(
    kafka: KafkaServer, spark: SparkSession, tmp_path: Path
) -> None:
    """Each task finds the marker of another query; nothing is written twice, and going on from the end forgets all of them."""
    url = f"kafka://{kafka.bootstrap}?prefix=d{uuid.uuid4().hex[:8]}."
    with hw.open_log(url) as log:
        log.create_topic("clicks", "page STRING, n BIGINT", key="page", partitions=2)

        def run(first: int, **more: Any) -> StageStatus:
            log.append("clicks", [{"page": f"/{n}", "n": n} for n in range(first, first + 20)])
            app = hw.App("shop", log=url, spark=spark, state=tmp_path / "state", views=f"sqlite:///{tmp_path}/views.db")
            app.stream(app.topic("clicks"), to="copies", key="page")(passed_on)
            [status] = app.run(available_now=True, check=False, **more).stages
            return status

        def copied() -> list[int]:
            return sorted(log.read("copies").column("n").to_pylist())

        assert run(0).state == "done" and copied() == list(range(20))
        shutil.rmtree(tmp_path / "state" / "checkpoints")
        refused = run(20)
        assert refused.state == "failed" and "checkpoint_conflict" in (refused.error or "")
        with pytest.raises(InvalidApp, match=r"task by task.*=latest"):
            run(40, accept_new_checkpoint={"passed_on": "marker"})
        assert run(60, accept_new_checkpoint={"passed_on": "latest"}).state == "done" and copied() == list(range(20))
        assert run(80).state == "done" and copied() == [*range(20), *range(80, 100)]


@pytest.mark.slow
@pytest.mark.service("kafka")
@pytest.mark.timeout(1800)
def test_driver_worker_and_broker_are_killed(tmp_path: Path) -> None:
    """Each kind of kill once."""
    run_rounds(tmp_path, 5, ["broker", "worker", "driver", "both"])


@pytest.mark.bench
@pytest.mark.service("kafka")
@pytest.mark.parametrize("seed", range(100, 108))
def test_many_kills(tmp_path: Path, seed: int) -> None:
    """The long tier: 32 kills, in an order that the seed gives."""
    chance = random.Random(seed)
    run_rounds(tmp_path, seed, chance.sample([*KINDS] * 2, 4))
