"""The same application on a cluster: a real Spark master with two workers, a real Kafka, views in a real PostgreSQL.

Each worker has its own scratch disk and its own Python, and none has the checkout: see `cluster_rig`. Workers and broker are killed
while events flow; the answers must equal DuckDB's over the same events.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

import headwater as hw
from headwater.model.errors import SparkUnavailable
from headwater.processing.spark.probe import look
from headwater.processing.spark.workers import check_workers
from headwater.processing.state.files import StateFolder
from headwater.processing.state.state_info import find_states
from headwater.testing.servers import ServerError
from headwater.testing.servers.kafka import KafkaServer
from headwater.testing.servers.postgres import PostgresServer
from headwater.testing.servers.s3 import S3Server
from headwater.testing.servers.spark import SparkCluster, spark_home
from tests.rigs.app.cluster_install import make_archive, make_environment
from tests.rigs.app.kafka_apps import BROKER, PARTITIONS, SCHEMA, SCRIPT, Clicks, environment, wait_until_right
from tests.rigs.commands import Command, refused
from tests.rigs.processing.spark_writers import kill_session
from tests.rigs.services import running_kafka, unavailable
from tests.views.test_views_stores import new_schema

DEADLINE_S = 400.0
LOOPBACK = [
    "spark.driver.host=127.0.0.1",
    "spark.driver.bindAddress=127.0.0.1",
    "spark.executor.memory=512m",
    "spark.sql.shuffle.partitions=2",
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    """A master and two workers."""
    started = SparkCluster()
    try:
        started.start()
    except ServerError as error:
        unavailable("spark", error)
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture
def broker() -> Iterator[KafkaServer]:
    """A broker that may be killed."""
    with running_kafka(BROKER) as server:
        yield server


def outside(**told: str) -> dict[str, str]:
    """The environment of a program that does not see the checkout."""
    hidden = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME")
    return {name: value for name, value in os.environ.items() if name not in hidden} | told


def conf_words() -> list[str]:
    return [word for setting in LOOPBACK for word in ("--conf", setting)]


def submission(cluster: SparkCluster, archive: Path) -> list[str]:
    """How the application is submitted with its environment."""
    program = [str(spark_home() / "bin" / "spark-submit"), "--master", cluster.url]
    return [*program, "--archives", f"{archive}#environment", *conf_words(), "app.py"]


class Submitted:
    """A program in a session of its own, so that everything that it started can be ended."""

    def __init__(self, command: list[str], folder: Path, told: dict[str, str]) -> None:
        self._output = folder / "driver.log"
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=folder, env=outside(**told), stdout=output, stderr=output, start_new_session=True
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> str:
        """Waits for its end; what it said."""
        status = self._process.wait(DEADLINE_S)
        said = self._output.read_text()
        assert status == 0, said[-4000:]
        return said

    def kill(self) -> None:
        kill_session(self._process.pid)
        self._process.wait()


@pytest.mark.slow
@pytest.mark.service("kafka")
@pytest.mark.service("postgres")
@pytest.mark.service("s3")
@pytest.mark.timeout(1800)
@pytest.mark.covers("concept: rebuilding state")
def test_workers_and_broker_are_killed_under_an_application(
    cluster: SparkCluster, broker: KafkaServer, postgres: PostgresServer, s3: S3Server, tmp_path: Path
) -> None:
    """Submitted with its environment as an archive; later gone on with by `headwater run`. No gap, no duplicate.

    Workers have disks of their own. What an operator remembers is in an object store: the executor that comes for a killed one, and the
    worker that is left, take it over from there. When it is lost it is made anew from the log, by a driver that was not there before.
    """
    url, views = f"kafka://{broker.bootstrap}?prefix=cluster.", new_schema(postgres)
    place = s3.url("cluster")
    told = {**environment(url, tmp_path, views), "STATE": place}
    checkpoints = tmp_path / "clickstream/apps/clickstream"
    python = make_environment(tmp_path)
    archive = make_archive(tmp_path)
    (tmp_path / "app.py").write_text(SCRIPT)
    own = {"PYSPARK_PYTHON": "./environment/bin/python", "PYSPARK_DRIVER_PYTHON": str(python)}
    clicks = Clicks(seed := 3)
    print(f"seed {seed}")
    with hw.open_log(url) as log:
        log.create_topic("clicks", SCHEMA, key="user_id", time="at", partitions=PARTITIONS)
        clicks.append(log, 200)
        driver = Submitted(submission(cluster, archive), tmp_path, told | own)

        def wait() -> None:
            wait_until_right(log, views, clicks, state=checkpoints, alive=driver.is_alive, s=DEADLINE_S)

        try:
            wait()
            for worker in cluster.workers:
                assert list(worker.folder.glob("work/*/*/environment/bin/python")), "it has its own environment"
            clicks.append(log, 200)
            assert cluster.kill_executors(0) > 1, "an executor and its Pythons"
            clicks.append(log, 100)
            wait()
            clicks.append(log, 200)
            broker.kill()
            broker.restart()
            clicks.append(log, 100)
            wait()
            clicks.append(log, 200)
            cluster.kill_worker(1)
            wait()
        finally:
            driver.kill()
        clicks.append(log, 100)
        assert not list(tmp_path.rglob("*.state"))
        [lost] = [state for state in find_states(place) if state.stage == "busy"]
        StateFolder(lost.url).remove_all()
        run = [str(python.with_name("python")), "-m", "headwater.cli.main", "run", "app.py", "--available-now"]
        run += ["--rebuild-state", "busy"]
        settings = ["--master", cluster.url, "--conf", f"spark.pyspark.python={python}", *conf_words()]
        driver = Submitted([*run, *settings], tmp_path, told)
        try:
            said = driver.wait()
            assert "per_page: done" in said and "busy: done" in said
            wait()
        finally:
            driver.kill()


PROGRAM = """
import sys
from pathlib import Path

from headwater.model.errors import HeadwaterError
from headwater.processing.source.spark_source import make_session
from headwater.processing.spark.session import stop_session
from headwater.processing.spark.workers import check_workers

master, python, bare, shared, conf = *sys.argv[1:5], dict(word.split("=") for word in sys.argv[5:])
spark = make_session("probe", master, conf | {"spark.pyspark.python": python}, log="kafka://127.0.0.1:9")
spark.sparkContext.setLogLevel("OFF")


def look(what, folder, python):
    spark.sparkContext.pythonExec = python
    try:
        check_workers(spark, [Path(folder)])
        print(what, "ok")
    except HeadwaterError as error:
        print(what, error.code, error)


look("shared", shared, python)
look("own disk", "/proc/self/cwd/state", python)
look("bare", shared, bare)
look("none", shared, "/opt/nothing/python")
stop_session(spark)
"""


@pytest.mark.slow
@pytest.mark.service("spark")
@pytest.mark.timeout(600)
def test_workers_that_cannot_run_it_are_told_before_it_starts(cluster: SparkCluster, tmp_path: Path) -> None:
    """A path that each process finds on its own disk stands for a folder that is not shared."""
    for name in ("whole", "bare", "shared"):
        (tmp_path / name).mkdir()
    python = make_environment(tmp_path / "whole")
    bare = make_environment(tmp_path / "bare", with_headwater=False)
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [str(python), "program.py", cluster.url, str(python), str(bare), str(tmp_path / "shared"), *LOOPBACK]
    done = subprocess.run(words, cwd=tmp_path, env=outside(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[0] == "shared ok"
    assert lines[1].startswith("own disk unsupported") and "/proc/self/cwd/state" in lines[1] and "NFS" in lines[1]
    assert lines[2].startswith("bare spark_unavailable") and "no module headwater" in lines[2]
    assert lines[3].startswith("none spark_unavailable") and "/opt/nothing/python" in lines[3]
    assert not list((tmp_path / "shared").iterdir())


def test_a_log_in_a_folder_is_refused_on_a_cluster(command: Command) -> None:
    """At once, without asking the master."""
    script = """
    import headwater as hw

    app = hw.App("shop", log="./data")
    orders = app.topic("orders", schema="id STRING", key="id")
    app.sink(orders, to="copies")
    """
    Path("app.py").write_text(textwrap.dedent(script))
    refused(command("plan", "app.py", "--master", "spark://127.0.0.1:9"), "unsupported", "folder of this machine")
    result = command("run", "app.py", "--no-page", "--master", "spark://127.0.0.1:9")
    assert result.code == 1 and "error [unsupported]" in result.err and "kafka://" in result.err
    refused(command("run", "app.py", "--conf", "spark.ui.enabled"), "invalid_app", "has no value")


class SlowContext:
    """A Spark context whose master has no worker to give: a job ends when it is cancelled."""

    master = "spark://127.0.0.1:9"
    defaultParallelism = 2  # noqa: N815 (Spark's name)
    pythonExec = sys.executable  # noqa: N815 (Spark's name)

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def parallelize(self, numbers: range, count: int) -> SlowContext:
        return self

    def map(self, work: object) -> SlowContext:
        return self

    def collect(self) -> None:
        assert self._cancelled.wait(60)
        raise RuntimeError("Job 0 cancelled part of cancelled job group")

    def cancelJobGroup(self, group: str) -> None:  # noqa: N802 (Spark's name)
        self._cancelled.set()

    def setJobGroup(self, group: str, why: str) -> None:  # noqa: N802 (Spark's name)
        """Nothing to note."""

    def setLocalProperty(self, name: str, value: object) -> None:  # noqa: N802 (Spark's name)
        """Nothing to note."""


def test_a_master_without_workers_is_told_in_time(tmp_path: Path) -> None:
    """Spark itself would wait for ever; and what was put into the folder for the probe is gone."""
    spark = cast(SparkSession, SimpleNamespace(sparkContext=SlowContext()))
    context: Any = spark.sparkContext
    context.pythonExec = "./environment/bin/python"
    with pytest.raises(SparkUnavailable, match=r"This machine has no \./environment/bin/python.*folder"):
        check_workers(spark, [tmp_path / "state"])
    context.pythonExec = sys.executable
    with pytest.raises(SparkUnavailable, match=r"no worker in 0\.1 s.*spark\.cores\.max"):
        check_workers(spark, [tmp_path / "state"], wait_s=0.1)
    assert not list((tmp_path / "state").iterdir())


def test_a_probe_tells_what_it_sees(tmp_path: Path) -> None:
    """Here everything that tasks import is there; a folder counts with the file that the driver has put into it."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "mark").touch()
    seen = look(0, [str(tmp_path / "shared"), str(tmp_path / "other")], "mark")
    assert (seen["missing"], seen["version"]) == ([], hw.__version__)
    assert seen["away"] == [(str(tmp_path / "other"), "No such file or directory")]
    assert [file.name for file in (tmp_path / "shared").iterdir()] == ["mark"]
