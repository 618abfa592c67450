"""Spark reads the log: the same rows, typed, as a batch and as a stream, whatever dies in between."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import headwater as hw
from headwater.log.log import Log
from headwater.model.errors import EventsMissed, InvalidInput, TopicNotFound
from headwater.processing.spark.errors import our_error_in
from tests.rigs.spark import patiently

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
QUERY_S = 120
EVERY_TYPE = """
    s STRING, b BINARY, t BOOLEAN, i8 TINYINT, i16 SMALLINT, i32 INT, i64 BIGINT NOT NULL, f FLOAT, d DOUBLE, m DECIMAL(20, 3),
    day DATE, at TIMESTAMP, clock TIMESTAMP_NTZ, tags ARRAY<STRING>, counts MAP<STRING, BIGINT>,
    exact STRUCT<a: INT NOT NULL> NOT NULL, place STRUCT<lat: DOUBLE, names: ARRAY<STRUCT<lang: STRING, n: INT>>>,
    deep MAP<STRING, ARRAY<TIMESTAMP>>
"""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with hw.open_log(tmp_path / "log") as log:
        yield log


def load(reader: Any, log: Log, **options: str) -> DataFrame:
    reader = reader.format("headwater").option("log", log.url)
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


def run(frame: DataFrame, folder: Path) -> tuple[list[Any], StreamingQuery]:
    """All that there is now, through a stream with its checkpoint: the rows that it has written so far, and the query."""
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))

    def streamed() -> StreamingQuery:
        query = writer.option("path", str(folder / "rows")).trigger(availableNow=True).start()
        assert query.awaitTermination(QUERY_S)
        return query

    query = patiently(streamed)
    return frame.sparkSession.read.schema(frame.schema).parquet(str(folder / "rows")).collect(), query


def every_type() -> list[dict[str, Any]]:
    """Rows with the ends of each type, and one that is null wherever it may be."""
    full = {
        "s": "ünïcode \x00 ☃", "b": b"\x00\xff", "t": True, "i8": -128, "i16": 32767, "i32": -(2**31), "i64": 2**63 - 1, "f": 1.5,
        "d": -1e308, "m": Decimal("12345678901234567.891"), "day": date(1, 1, 1),
        "at": datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC),
        "clock": datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC).replace(tzinfo=None),
        "tags": ["a", None, ""], "counts": {"x": 1, "y": None}, "place": {"lat": 1.25, "names": [{"lang": "de", "n": 1}, None]},
        "deep": {"k": [NOON, None]}, "exact": {"a": 1},
    }  # fmt: skip
    empty = {"i64": 0, "exact": {"a": 2}}
    other = {
        **full,
        "i64": 7,
        "s": "",
        "b": b"",
        "tags": [],
        "counts": {},
        "deep": {},
        "day": date(9999, 12, 31),
        "d": float("inf"),
    }
    return [{**row, "i64": number} if number > 2 else row for number, row in enumerate([full, empty, other] * 4)]


def test_every_type_arrives_as_the_log_has_it(spark: SparkSession, log: Log, tmp_path: Path) -> None:
    """The schema is the topic's, and each value equals what the log itself reads, with the log's own columns too."""
    log.create_topic("t", EVERY_TYPE, key="i64", time="at", partitions=3)
    log.append("t", [{**row, "_headers": {"trace": b"\x01"}} if row["i64"] == 4 else row for row in every_type()])
    names = [
        *log.topic("t").schema.names,
        "_key",
        "_time",
        "_appended",
        "_partition",
        "_offset",
        "_topic",
        "_headers",
        "_deleted",
    ]
    frame = load(spark.read, log, topic="t", columns=",".join(names))
    assert load(spark.read, log, topic="t").schema["i64"].nullable is False
    expected = log.read("t", columns=names)
    found = frame.toArrow().sort_by([("_partition", "ascending"), ("_offset", "ascending")])
    assert found.schema.types == expected.schema.types
    assert found.schema.names == expected.schema.names
    assert found.to_pylist() == expected.to_pylist()
    streamed, _ = run(
        load(spark.readStream, log, topic="t", startingOffsets="earliest", columns=",".join(names)), tmp_path
    )
    assert sorted(streamed, key=lambda row: (row["_partition"], row["_offset"])) == sorted(
        frame.collect(), key=lambda row: (row["_partition"], row["_offset"])
    )
    flat = [field.name for field in expected.schema if not pa.types.is_nested(field.type)]
    fetched, _ = run(
        load(spark.readStream, log, topic="t", startingOffsets="earliest", columns=",".join(flat)), tmp_path / "flat"
    )
    assert sorted(fetched, key=lambda row: (row["_partition"], row["_offset"])) == sorted(
        frame.select(*flat).collect(), key=lambda row: (row["_partition"], row["_offset"])
    )


def test_available_now_equals_a_batch_equals_the_log(spark: SparkSession, log: Log, tmp_path: Path) -> None:
    """In batches of a limited size, whose progress shows the lag; a second run reads what came after the first."""
    log.create_topic("orders", "id STRING, amount BIGINT, at TIMESTAMP", key="id", time="at", partitions=4)
    rows = [{"id": f"o{n % 97}", "amount": n, "at": NOON + timedelta(seconds=n)} for n in range(10_000)]
    log.append("orders", rows)
    frame = load(spark.readStream, log, topic="orders", startingOffsets="earliest", maxOffsetsPerTrigger="4000")
    seen, query = run(frame, tmp_path)
    batch = load(spark.read, log, topic="orders").collect()
    assert sorted(row.amount for row in seen) == sorted(row.amount for row in batch) == list(range(10_000))
    assert {tuple(row) for row in seen} == {tuple(row) for row in batch}
    assert {(row["id"], row["amount"]) for row in log.read("orders").to_pylist()} == {
        (row.id, row.amount) for row in batch
    }
    sizes = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
    assert sizes == [4000, 4000, 2000]
    assert [lag(progress) for progress in query.recentProgress][:3] == [6000, 2000, 0]
    log.append("orders", [{"id": "late", "amount": 10_000, "at": NOON}])
    after, _ = run(frame, tmp_path)
    assert sorted(row.amount for row in after) == list(range(10_001))


def lag(progress: Any) -> int:
    """What Spark's own progress says is still to be read."""
    [source] = progress["sources"]
    end, latest = (
        json.loads(text) if isinstance(text, str) else text for text in (source["endOffset"], source["latestOffset"])
    )
    return sum(offset - end[topic][number] for topic, numbers in latest.items() for number, offset in numbers.items())


def test_columns_filter_and_table_are_read_at_the_source(spark: SparkSession, log: Log) -> None:
    """The options of a batch through a real Spark: pruned, filtered, several topics, the newest row of each key."""
    for name in ("orders", "returns"):
        log.create_topic(name, "id STRING, amount BIGINT, at TIMESTAMP", key="id", time="at", partitions=2)
        log.append(name, [{"id": f"o{n % 10}", "amount": n, "at": NOON + timedelta(minutes=n)} for n in range(100)])
    log.append("orders", [{"id": "o5", "_deleted": True, "at": NOON + timedelta(minutes=95)}])
    picked = load(
        spark.read,
        log,
        topic="orders,returns",
        columns="amount,_topic",
        filter="amount >= 98 AND id <> 'o9'",
        minPartitions="6",
    )
    assert sorted(map(tuple, picked.collect())) == [(98, "orders"), (98, "returns")]
    assert picked.columns == ["amount", "_topic"]
    table = load(spark.read, log, topic="orders", asOf="2026-01-31T12:50:00Z")
    assert sorted(map(tuple, table.select("id", "amount").collect())) == sorted(
        (row["id"], row["amount"]) for row in log.table("orders", as_of="2026-01-31T12:50:00Z").to_pylist()
    )
    newest = load(spark.read, log, topic="orders", asOf="latest").select("id").collect()
    assert sorted(row.id for row in newest) == [f"o{n}" for n in range(10) if n != 5]


def test_what_is_refused_is_told_in_our_sentence(spark: SparkSession, tmp_path: Path) -> None:
    """A wrong option when the frame is made, and events that are gone while a stream runs: no traceback, and `our_error_in` finds it."""
    log = hw.open_log(tmp_path / "log")
    log.create_topic("t", "n BIGINT", partitions=1, segment_bytes=4096, retention_bytes=8192)
    for option, kind, words in [
        ({"topic": "nope"}, TopicNotFound, "Topic 'nope' does not exist"),
        ({"topic": "t", "filter": "n >"}, InvalidInput, "Option filter='n >' is not a condition"),
        ({"topic": "t", "startingOffsets": "first"}, InvalidInput, "Option startingOffsets='first' is not understood"),
    ]:
        with pytest.raises(PySparkException) as caught:
            load(spark.read, log, **option)
        assert_told(caught.value, kind, words)
    frame = load(spark.readStream, log, topic="t", startingOffsets="earliest")
    log.append("t", [{"n": 0}])
    run(frame, tmp_path)
    for number in range(40):
        log.append("t", [{"n": 1 + number * 50 + at} for at in range(50)])
    log.tidy("t")
    with pytest.raises(PySparkException) as caught:
        run(frame, tmp_path)
    assert_told(caught.value, EventsMissed, "Events 1 to")
    lenient = load(spark.readStream, log, topic="t", startingOffsets="earliest", failOnDataLoss="false")
    rows, _ = run(lenient, tmp_path)
    assert sorted(row.n for row in rows) == [0, *log.read("t").column("n").to_pylist()]
    log.close()


def assert_told(error: PySparkException, kind: type[hw.HeadwaterError], words: str) -> None:
    first_lines = "\n".join(str(error).splitlines()[:2])
    assert words in first_lines, error
    assert "Traceback" not in str(error)
    ours = our_error_in(error)
    assert type(ours) is kind
    assert str(ours).startswith(words)


@pytest.mark.covers("Spark Streaming")
def test_a_lost_partition_is_recomputed_identically(spark: SparkSession, log: Log) -> None:
    """Python workers that are in the middle of reading are killed with SIGKILL: their tasks run again and give the same rows."""
    log.create_topic("t", "n BIGINT, text STRING", key="n", partitions=2)
    for part in range(4):
        log.append("t", pa.table({"n": range(part * 100_000, (part + 1) * 100_000), "text": ["x" * 50] * 100_000}))

    def slowly(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(0.2)
            yield batch.select(["n", "_partition", "_offset"])

    frame = load(spark.readStream, log, topic="t", startingOffsets="earliest", columns="*,_partition,_offset")
    slow = frame.mapInArrow(slowly, "n BIGINT, _partition INT, _offset BIGINT")

    def streamed_and_killed() -> tuple[StreamingQuery, set[int]]:
        query = slow.writeStream.format("memory").queryName("killed").trigger(availableNow=True).start()
        killed: set[int] = set()
        while len(killed) < 2 and query.isActive:
            for worker in workers_that_read(log):
                os.kill(worker, signal.SIGKILL)
                killed.add(worker)
            time.sleep(0.1)
        assert query.awaitTermination(QUERY_S)
        return query, killed

    query, killed = patiently(streamed_and_killed)
    assert killed, "no worker was found in the middle of reading"
    assert failed_tasks(spark, query) > 0, "the workers were killed when they had done their tasks"
    events = log.read("t", columns=["n", "_partition", "_offset"])
    found = spark.table("killed").toArrow().sort_by([("_partition", "ascending"), ("_offset", "ascending")])
    for name in events.schema.names:
        assert found.column(name).combine_chunks().equals(events.column(name).combine_chunks()), name


def failed_tasks(spark: SparkSession, query: StreamingQuery) -> int:
    """How many tasks of a query Spark has run again."""
    tracker = spark.sparkContext.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(str(query.runId))]
    stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    return sum(stage.numFailedTasks for stage in stages if stage is not None)


def workers_that_read(log: Log) -> list[int]:
    """The processes of Spark that have a segment of the log mapped, and are in a task rather than planning."""
    segment = f"{log.url.removeprefix('file://')}/topics/"
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if "pyspark.worker" in (process / "cmdline").read_text() and re.search(
                rf"{re.escape(segment)}.*\.frames", (process / "maps").read_text()
            ):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_the_pages_program_runs(spark: SparkSession, tmp_path: Path) -> None:
    """What docs/spark.md shows, from top to bottom, in the session that is there; its folders are looked for where that was started."""
    page = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    program = "\n".join(blocks).replace('"./', f'"{tmp_path}/')
    exec(compile(program, "docs/spark.md", "exec"), {})


def test_a_log_that_was_made_again_at_the_same_path_is_read(spark: SparkSession, tmp_path: Path) -> None:
    """Workers keep logs open from task to task; a folder that was removed is no longer the log that they know."""
    found = []
    for words in (["old"], ["new", "newer"]):
        shutil.rmtree(tmp_path / "log", ignore_errors=True)
        with hw.open_log(tmp_path / "log") as log:
            log.create_topic("words", "word STRING", partitions=1)
            log.append("words", [{"word": word} for word in words])
        read = spark.read.format("headwater").options(log=f"{tmp_path}/log", topic="words").load()
        found.append([row.word for row in read.collect()])
    assert found == [["old"], ["new", "newer"]]
