"""The peer of `bench.idle`: queries over Kafka in plain Spark, in a process of their own."""

from __future__ import annotations

import signal
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

SHUFFLE_PARTITIONS = 4
_LOOK_S = 0.2


def run(bootstrap: str, topic: str, count: str, folder_name: str, jars: str) -> None:
    """Starts the queries, makes the file `ready` when each has done a batch, and runs until SIGTERM."""
    over, folder = threading.Event(), Path(folder_name)
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    settings = {
        "spark.jars": jars,
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(SHUFFLE_PARTITIONS),
    }
    builder = SparkSession.builder.master("local[*]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    options = {"kafka.bootstrap.servers": bootstrap, "subscribe": topic, "startingOffsets": "earliest"}
    queries = []
    for number in range(int(count)):
        pages = spark.readStream.format("kafka").options(**options).load().selectExpr("CAST(key AS STRING) AS page")
        writer = pages.groupBy("page").count().writeStream.outputMode("update")
        writer = writer.foreachBatch(_upsert(folder / f"view-{number}.db"))
        queries.append(writer.option("checkpointLocation", str(folder / f"checkpoint-{number}")).start())
    while not over.wait(_LOOK_S) and not all(map(_has_begun, queries)):
        continue
    (folder / "ready").touch()
    over.wait()
    spark.stop()


def _upsert(path: Path) -> Callable[[DataFrame, int], None]:
    with sqlite3.connect(path) as store:
        store.execute("CREATE TABLE pages (page TEXT PRIMARY KEY, count INTEGER)")

    def write(rows: DataFrame, epoch: int) -> None:
        with sqlite3.connect(path) as store:
            store.executemany("REPLACE INTO pages VALUES (?, ?)", [tuple(row) for row in rows.collect()])

    return write


def _has_begun(query: StreamingQuery) -> bool:
    error = query.exception()
    if error is not None:
        raise error
    return any(progress["durationMs"].get("addBatch") for progress in query.recentProgress)  # the last one may be idle
