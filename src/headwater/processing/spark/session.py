"""A session: Spark started as our queries want it, and stopped without anything left running.

The settings and why (each can be replaced by `conf`, and by what `spark-submit` was told):
- checkpoints through a plain file manager, and local files without a process for each (see `local_files`): starting those was a
  third of the fixed cost of a micro-batch;
- streams of ours are taken in columns, not row by row (see `columnar`);
- adaptive execution off for streams: it merges partitions, and ours are explicit;
- state in RocksDB with changelog checkpoints: a batch then writes what changed, not everything;
- batches without data stay on, as Spark has them: without them a window that the watermark has closed waits for the next event;
- a local Spark binds 127.0.0.1 only, runs this Python in its workers (see `worker_python`), reaches them by Unix sockets (a tenth
  less time where a query only reads), and has four shuffle partitions, as a topic has by default;
- UTC, because the log's times are in UTC; no web page unless asked for; errors are logged, warnings are not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from typing import IO, Any

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession

from headwater.log.log import capabilities_of
from headwater.model.errors import SparkUnavailable, Unsupported
from headwater.processing.spark.columnar import read_in_columns
from headwater.processing.spark.java import how_it_ended, starting_java, stop_java
from headwater.processing.spark.local_files import write_without_processes
from headwater.processing.spark.worker_python import planners, worker_python

JAVA_MIN = 17
LOCAL = "local[*]"
FILES_MAX = 1024
PYTHON = "spark.pyspark.python"
SOCKET_FOLDER_BYTES_MAX = 60
"""The path of a socket may have 104 bytes, on some systems four more; Spark's names have 43."""

SETTINGS = {
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing."
    "FileSystemBasedCheckpointFileManager",
    "spark.sql.adaptive.streaming.stateless.enabled": "false",
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state."
    "RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.noDataMicroBatches.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
LOCAL_SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "4",
    "spark.python.daemon.module": "headwater.processing.spark.worker_daemon",
}
JAVA_OPTIONS = (
    "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false "
    "-XX:G1PeriodicGCInterval=60000 -XX:MaxHeapFreeRatio=50"
)
"""Every value that comes from Python is looked at through Arrow: without the first two by two checks, of what Spark has checked before.
With the others Java gives memory back after a minute with nothing to do; otherwise it keeps what starting the queries has taken."""


def start_session(
    name: str,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    *,
    log: str | None = None,
    said: IO[bytes] | None = None,
) -> SparkSession:
    """Starts Spark, or gives the session that runs already.

    Without a `master` it is the one that `spark-submit` was given, otherwise `local[*]`. `log` is the URL of the log that it will
    read, to refuse early what cannot work. What Java and the workers write to stderr goes to the file `said`.
    """
    submitted = submitted_settings()
    master = master or submitted.get("spark.master", LOCAL)
    if log is not None:
        check_reachable(log, master)
    check_java()
    quiet = resources.files("headwater.processing.spark") / "log4j2.properties"
    settings = SETTINGS | {"spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={quiet} {JAVA_OPTIONS}"}
    if is_local_master(master):
        os.environ.setdefault("PYSPARK_PYTHON", worker_python())
        settings |= LOCAL_SETTINGS | _sockets()
    ours = {key: value for key, value in settings.items() if key not in submitted} | dict(conf or {})
    if PYTHON in ours:  # Spark itself looks at it in `spark-submit` only
        os.environ["PYSPARK_PYTHON"] = ours[PYTHON]
    ours |= {"spark.app.name": name, "spark.master": master}
    builder = SparkSession.builder
    for key, value in ours.items():
        builder = builder.config(key, value)
    with _starting_planners(said, wanted=is_local_master(master) and PYTHON not in ours), starting_java(ours, said):
        spark = builder.getOrCreate()
    if is_local_master(master):
        write_without_processes(spark)
        read_in_columns(spark)
    listen(spark)
    return spark


@contextmanager
def _starting_planners(said: IO[bytes] | None, *, wanted: bool) -> Iterator[None]:
    """Starts what forks planners, beside Java; where Spark does not start, it is not left behind."""
    forking = planners() if wanted else None
    if forking is not None:
        forking.start(said)
    try:
        yield
    except BaseException:
        if forking is not None:
            forking.stop()
        raise


def listen(spark: SparkSession) -> None:
    """Starts what Spark calls Python through where a stage writes its batches; Spark would at the first of them.

    It waits by `select`, which knows only the first 1,024 files of a process: begun later, in a program with many open logs, it would
    never hear a call, and stages would wait for ever.
    """
    gateway: Any = spark.sparkContext._gateway
    ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
    if gateway._callback_server.server_socket.fileno() >= FILES_MAX:
        raise SparkUnavailable(
            f"Spark cannot call back into a process that had {FILES_MAX:,} files open before.",
            advice="Start Spark or the application before the program opens more files than this.",
        )


def _sockets() -> dict[str, str]:
    """Unix sockets in the folder for temporary files, where the path of one can be written down at all."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > SOCKET_FOLDER_BYTES_MAX:
        return {}
    return {"spark.python.unix.domain.socket.enabled": "true", "spark.python.unix.domain.socket.dir": folder}


def submitted_settings() -> dict[str, str]:
    """What `spark-submit` was told, when it started this program; nothing otherwise."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def active_session() -> SparkSession | None:
    """The session that this program uses already."""
    return SparkSession.getActiveSession()


def activate(spark: SparkSession) -> None:
    """Makes a session the one of this thread: where a query is started Spark looks there for data sources written in Python."""
    spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)  # type: ignore[union-attr]


def stop_session(spark: SparkSession) -> None:
    """Stops Spark and the Java process below it, which `spark.stop()` leaves until this program ends."""
    if how_it_ended() is None:
        spark.stop()
    else:  # Spark's own `stop` would ask the JVM; what it forgets then is forgotten here
        SparkContext._active_spark_context = SparkSession._instantiatedSession = None
    stop_java()
    forking = planners()
    if forking is not None:
        forking.stop()


def is_local_master(master: str) -> bool:
    """Whether tasks run on this machine, in this program's own JVM."""
    return master == "local" or master.startswith("local[")


def check_reachable(log: str, master: str) -> None:
    """Refuses a log in a folder for a Spark that runs elsewhere; `Unsupported`."""
    if log and capabilities_of(log).folder is not None and not is_local_master(master):
        raise Unsupported(
            f"The log {log!r} is a folder of this machine, and Spark's tasks run on others (master {master!r}).",
            advice='Use a kafka:// log for a cluster, or master="local[*]" for a folder.',
        )


def check_java() -> None:
    """Refuses to start without the Java that Spark needs; `SparkUnavailable`."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin")) if home else shutil.which("java")
    advice = f"Install Java {JAVA_MIN} or newer (on Debian: apt-get install default-jre-headless)"
    if java is None:
        where = f"in JAVA_HOME ({home})" if home else "on the PATH, and JAVA_HOME is not set"
        raise SparkUnavailable(f"Spark needs Java, which was not found {where}.", advice=f"{advice}, or set JAVA_HOME.")
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(?:1\.)?(\d+)', told)
    if found is None or int(found[1]) < JAVA_MIN:
        version = f"is version {found[1]}" if found else f"does not say its version: {told.strip()[:80]!r}"
        raise SparkUnavailable(f"Spark needs Java {JAVA_MIN} or newer; {java} {version}.", advice=f"{advice}.")
