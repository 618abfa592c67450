"""Spark for the tests of the sink: our writers behind a small data source, and drivers that die where they are told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from headwater.log.log import Log, open_log
from headwater.model.points import check_point, watch
from headwater.processing.sink.spark_sink import BatchWriter, StreamWriter

ROOT = Path(__file__).parents[3]
CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def spark_session() -> SparkSession:
    """The session of a driver."""
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINTS,
        "spark.sql.adaptive.streaming.stateless.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master("local[2,3]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("FATAL")
    spark.dataSource.register(SinkSource)
    return spark


class SinkSource(DataSource):
    """Only writes. With the option `orders` its processes die where the file of that name says."""

    @classmethod
    def name(cls) -> str:
        return "sink"

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 (Spark's name)
        orders = self.options.get("orders")
        return StreamWriter(self.options, schema) if orders is None else DyingWriter(self.options, schema, orders)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return BatchWriter(self.options, schema, overwrite)


class DyingWriter(StreamWriter):
    """Kills everything of its driver, or only its own process, at a step of a batch."""

    def __init__(self, options: Any, schema: StructType, orders: str) -> None:
        self.orders = orders
        super().__init__(options, schema)

    def log(self) -> Log:
        """Opened first in each of its processes."""
        watch(partial(obey, self.orders))
        return open_log(self.url, create=False)


def order(orders: Path, point: str, *, nth: int, only_worker: bool = False) -> None:
    """Tells the processes of a driver where to die."""
    orders.write_text(json.dumps({"point": check_point(point), "left": nth, "only_worker": only_worker}))


def obey(orders: str, point: str) -> None:
    """Dies, if that is what the file says; the order is counted down first, so that it is carried out once."""
    try:
        said = json.loads(Path(orders).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return
    if said["point"] != point:
        return
    said["left"] -= 1
    if said["left"] > 0:
        Path(orders).write_text(json.dumps(said))
        return
    Path(orders).unlink(missing_ok=True)
    if not said["only_worker"]:
        kill_session(os.getsid(0))
    os.kill(os.getpid(), signal.SIGKILL)


def kill_session(session: int) -> None:
    """Kills every process of a session but the caller: a driver, its JVM and its workers."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if os.getsid(int(entry)) == session:
                    os.kill(int(entry), signal.SIGKILL)
            except ProcessLookupError:
                continue


def counted(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream of the files in a folder, one a batch: the same batch reads the same file again."""
    return spark.readStream.schema("n BIGINT, k STRING").option("maxFilesPerTrigger", "1").parquet(f"{folder}/in")


def start_driver(folder: Path) -> subprocess.Popen[bytes]:
    """A driver of its own, in a session of its own."""
    with (folder / "driver.err").open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def drive(folder: Path) -> None:
    """Runs the query until everything that is there is written."""
    spark = spark_session()
    query = (
        counted(spark, folder)
        .writeStream.format("sink")
        .option("log", f"{folder}/log")
        .option("topic", "out")
        .option("orders", f"{folder}/orders")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
