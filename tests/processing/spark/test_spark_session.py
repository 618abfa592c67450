"""A session: refused clearly where Spark cannot run, and gone with the program that started it."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from headwater.model.errors import SparkUnavailable, Unsupported
from headwater.processing.operators.beats import BeatsSource
from headwater.processing.source.spark_source import HeadwaterSource, RemoteSource, make_session, register
from headwater.processing.spark import local_files
from headwater.processing.spark import worker_daemon as daemon
from headwater.processing.spark.session import check_java, check_reachable, listen
from headwater.processing.spark.worker_python import worker_python
from tests.rigs.spark import patiently

PROGRAM = """
import headwater as hw
from headwater.processing.source.spark_source import make_session
with hw.open_log("log") as log:
    log.create_topic("t", "n BIGINT", partitions=1)
    log.append("t", [{"n": n} for n in range(10)])
spark = make_session("left alone", "local[1]")
frame = spark.readStream.format("headwater").option("log", "log").option("topic", "t").load()
query = frame.writeStream.format("noop").start()
print(spark.read.format("headwater").option("log", "log").option("topic", "t").load().count(), flush=True)
query.awaitTermination()
"""


def test_workers_find_pyspark_with_its_bytecode(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in Spark's archive, which each of them would compile again; a Spark from elsewhere keeps its own pyspark."""

    def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyspark

        list(batches)
        yield pa.record_batch({"pyspark": [pyspark.__file__], "python": [sys.executable]})

    (row,) = spark.range(1).repartition(1).mapInArrow(where, "pyspark STRING, python STRING").collect()
    assert (row.pyspark, row.python) == (pyspark.__file__, sys.executable)
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert worker_python() == sys.executable


def test_workers_are_started_without_the_archives_and_forked_from_ours() -> None:
    """However often Spark names them, and wherever; what it names besides is kept."""
    folder = Path(pyspark.__file__).parent / "python" / "lib"
    archives = [str(path) for path in sorted(folder.glob("py*.zip"), reverse=True)]
    shown = "import os, sys; print(os.environ['PYTHONPATH'], sys.argv[1:])"
    for path, left in [
        ((*archives, "a.jar", *archives, "/b c"), "a.jar:/b c"),
        ((archives[0], *archives), ""),
        (("a", archives[1], archives[1], archives[0]), "a"),
        (("a", "b"), "a:b"),
    ]:
        told = os.environ | {"PYTHONPATH": ":".join(path)}
        done = subprocess.run(
            [worker_python(), "-c", shown, "x y"], env=told, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == f"{left} ['x y']\n", done.stderr
    words = ["-m", "pyspark.daemon", "nobody"]
    done = subprocess.run([worker_python(), *words], capture_output=True, text=True, timeout=60)
    assert "headwater/processing/spark/worker_daemon.py" in done.stderr and "No module named 'nobody'" in done.stderr


def test_workers_do_not_look_for_garbage_in_what_was_imported_for_all(spark: SparkSession) -> None:
    """They are forked with it, and Spark has them look behind each task."""

    def counts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        list(batches)
        looked_at = {id(thing) for thing in gc.get_objects()}
        shared = [
            vars(module) for name, module in sys.modules.items() if name.partition(".")[0] in ("pyarrow", "numpy")
        ]
        seen = sum(id(module) in looked_at for module in shared)
        yield pa.record_batch({"modules": [len(shared)], "seen": [seen], "frozen": [gc.get_freeze_count()]})

    (row,) = spark.range(1).repartition(1).mapInArrow(counts, "modules BIGINT, seen BIGINT, frozen BIGINT").collect()
    assert row.frozen > 10_000
    assert row.seen < row.modules / 2, "a worker that was used before may have imported a few more"


def test_a_worker_whose_spark_has_gone_ends_in_silence(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Spark's daemon runs it, in a process of its own: nobody is there to be told of the error it gives."""
    monkeypatch.setenv("PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE", "1")
    ours, theirs = socket.socketpair()
    if (child := os.fork()) == 0:
        ours.close()
        os._exit(40 + daemon.work(theirs, authenticated=True))
    theirs.close()
    ours.close()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 41
    assert capfd.readouterr().err == ""


def test_files_are_written_without_starting_a_process(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java sets their permissions, which are those that `chmod` would have set; where that cannot be, all stays as it was."""
    assert local_files.file_system(spark) == "HeadwaterFiles"
    spark.range(1).repartition(1).write.parquet(str(tmp_path / "files"))
    umask = os.umask(0)
    os.umask(umask)
    for path in (tmp_path / "files").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask, path
    monkeypatch.setattr(local_files, "_NAME", "Another")
    monkeypatch.setattr(local_files, "_SOURCE", "public class Another {")
    local_files.write_without_processes(spark)
    assert local_files.file_system(spark) == "HeadwaterFiles"


def test_without_java_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of what a missing program does to a shell script of Spark's."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(SparkUnavailable, match=r"no Java|not found on the PATH.*Install Java 17"):
        make_session("none")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    with pytest.raises(SparkUnavailable, match=r"not found in JAVA_HOME.*Install Java 17"):
        check_java()


def test_an_old_java_is_refused_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    for line, words in [
        ('openjdk version "11.0.2"', "is version 11"),
        ('java version "1.8.0_1"', "is version 8"),
        ("what", "'what'"),
    ]:
        java.write_text(f"#!/bin/sh\necho '{line}' >&2\n")
        java.chmod(0o755)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        with pytest.raises(SparkUnavailable, match=words):
            check_java()


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "k8s://https://host", "local-cluster[2,1,1024]"])
def test_a_folder_and_a_master_elsewhere_are_refused_together(master: str) -> None:
    """Before anything is started; Kafka is reachable from everywhere."""
    for log in ("./data", "file:///data"):
        with pytest.raises(Unsupported, match=r"folder of this machine.*kafka://"):
            make_session("cluster", master, log=log)
    check_reachable("kafka://host:9092", master)
    for local in ("local", "local[*]", "local[2, 4]"):
        check_reachable("./data", local)


@pytest.mark.parametrize(
    ("master", "kind"), [("local[2]", HeadwaterSource), ("spark://host:7077", RemoteSource), ("yarn", RemoteSource)]
)
def test_a_session_gets_the_source_for_its_master(master: str, kind: type) -> None:
    """The source that refuses folders is registered where tasks run elsewhere, under the same name."""
    registered: list[type] = []
    context, sources = SimpleNamespace(master=master), SimpleNamespace(register=registered.append)
    register(cast(SparkSession, SimpleNamespace(sparkContext=context, dataSource=sources)))
    assert registered == [kind, BeatsSource]
    assert kind.name() == "headwater"


def copy(t: DataFrame) -> DataFrame:
    return t


@pytest.fixture
def many_files() -> Iterator[None]:
    """More files open than `select` knows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    handles = []
    try:
        handles += [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        yield
    finally:
        for handle in handles:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_spark_calls_back_into_a_process_with_many_files(spark: SparkSession, tmp_path: Path, many_files: None) -> None:
    """What it calls is there since the session began; made with the first batch, it would never hear the call."""
    url = str(tmp_path / "log")
    with hw.open_log(url) as log:
        log.create_topic("t", "n BIGINT")
        log.append("t", [{"n": n} for n in range(10)])
    app = hw.App("many", log=url, spark=spark)
    app.stream(app.topic("t", schema="n BIGINT"))(copy)
    patiently(lambda: app.run(available_now=True))
    with hw.open_log(url) as log:
        assert sorted(log.read("copy").column("n").to_pylist()) == list(range(10))


def test_a_session_that_begins_too_late_says_so(spark: SparkSession, many_files: None) -> None:
    """Instead of a stage that waits for ever."""
    handle = os.dup(0)
    late = SimpleNamespace(_callback_server=SimpleNamespace(server_socket=SimpleNamespace(fileno=lambda: handle)))
    try:
        with pytest.raises(SparkUnavailable, match="1,024 files open"):
            listen(cast(SparkSession, SimpleNamespace(sparkContext=SimpleNamespace(_gateway=late))))
    finally:
        os.close(handle)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_survives_a_killed_program(tmp_path: Path) -> None:
    """Neither the JVM nor a Python worker, when the program that started Spark is killed in the middle of a stream."""
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        assert program.stdout.readline().strip() == "10"
        left = descendants(program.pid)
        assert any("java" in name for name in left.values())
        assert any("python" in name for name in left.values())
    finally:
        program.send_signal(signal.SIGKILL)
        program.communicate()
    deadline = time.monotonic() + 60
    while any(alive(pid, name) for pid, name in left.items()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not {pid: name for pid, name in left.items() if alive(pid, name)}


def descendants(pid: int) -> dict[int, str]:
    """The processes that a process has started, and that those have, by name."""
    children = {}
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and int((process / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                children[int(process.name)] = (process / "comm").read_text().strip()
        except OSError:
            continue
    return children | {below: name for child in children for below, name in descendants(child).items()}


def alive(pid: int, name: str) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return f"({name})" in status and ") Z " not in status and os.path.exists(f"/proc/{pid}")


def test_the_state_of_spark_can_be_copied_into_a_checkpoint(spark: SparkSession) -> None:
    """Spark's RocksDB asks Hadoop for its own local file system; with another one its snapshots stay where they are, in silence."""
    jvm = spark._jvm
    assert jvm is not None
    settings = spark._jsparkSession.sessionState().newHadoopConf()
    local = jvm.org.apache.hadoop.fs.FileSystem.getLocal(settings)
    assert jvm.java.lang.Class.forName("org.apache.hadoop.fs.LocalFileSystem").isInstance(local)
