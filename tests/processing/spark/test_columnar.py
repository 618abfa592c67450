"""Spark takes what Python has read in columns: the same rows of every type, and row by row where it cannot."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

import headwater as hw
from headwater.log.log import Log
from headwater.processing.spark import columnar
from tests.processing.source.test_spark_source import EVERY_TYPE, QUERY_S, every_type
from tests.rigs.spark import patiently

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LARGE = 200_000
FLAT = "id BIGINT NOT NULL, kind STRING, price DOUBLE, at TIMESTAMP"
SCHEMA = f"{FLAT}, name STRING, tags ARRAY<STRING>, place STRUCT<city: STRING, n: INT>"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with hw.open_log(tmp_path / "log") as log:
        yield log


def stream(spark: SparkSession, log: Log, topic: str, **options: str) -> DataFrame:
    reader = spark.readStream.format("headwater").options(log=log.url, topic=topic, startingOffsets="earliest")
    return reader.options(**options).load()


def run(frame: DataFrame, folder: Path, *, mode: str = "append") -> tuple[pa.Table, StreamingQuery]:
    """All that there is now: the rows that the last batch has given, and the query."""
    given: list[pa.Table] = []

    def take(batch: DataFrame, _: int) -> None:
        given.append(batch.toArrow())

    def streamed() -> StreamingQuery:
        given.clear()
        writer = frame.writeStream.foreachBatch(take).outputMode(mode)
        query = writer.option("checkpointLocation", str(folder)).trigger(availableNow=True).start()
        assert query.awaitTermination(QUERY_S)
        return query

    query = patiently(streamed)
    return pa.concat_tables(given), query


def plan_of(query: StreamingQuery) -> str:
    return str(query._jsq.streamingQuery().lastExecution().executedPlan().toString())


def shown(rows: pa.Table) -> list[str]:
    """Rows in an order of their own, also where Arrow knows none for their types."""
    return sorted(map(repr, rows.to_pylist()))


@pytest.fixture
def by_rows(spark: SparkSession) -> Iterator[Callable[[], None]]:
    """Lets Spark plan our streams as it plans others, until the test has ended."""
    planner: Any = spark._jsparkSession.experimental()
    found = planner.extraStrategies()

    def forget() -> None:
        getattr(planner, "extraStrategies_$eq")(found.take(0))

    yield forget
    getattr(planner, "extraStrategies_$eq")(found)


def large(seed: int = 0) -> pa.Table:
    draw = random.Random(seed)
    kinds = [None, "", "a", "ünïcode ☃" * 3]
    return pa.table(
        {
            "id": pa.array(range(LARGE), pa.int64()),
            "kind": [kinds[draw.randrange(4)] for _ in range(LARGE)],
            "price": [None if draw.random() < 0.1 else draw.random() for _ in range(LARGE)],
            "at": pa.array([draw.randrange(10**15) for _ in range(LARGE)], pa.timestamp("us", "UTC")),
            "name": [f"name {draw.randrange(10**9)}" * draw.randrange(3) for _ in range(LARGE)],
            "tags": [[f"tag {draw.randrange(9)}"] * draw.randrange(3) for _ in range(LARGE)],
            "place": [{"city": f"city {number % 97}", "n": draw.randrange(5)} for number in range(LARGE)],
        }
    )


def test_a_large_batch_is_taken_in_columns(
    spark: SparkSession, log: Log, tmp_path: Path, by_rows: Callable[[], None]
) -> None:
    """Through projections, conditions, joins and aggregates; each gives what it gives row by row, and counts the same input."""
    log.create_topic("t", SCHEMA, key="id", time="at", partitions=3)
    log.append("t", large())
    names = spark.createDataFrame([("a", "first"), ("", "none")], "kind STRING, called STRING")
    queries: dict[str, tuple[Callable[[DataFrame], DataFrame], str]] = {
        "all": (lambda rows: rows, "append"),
        "some": (lambda rows: rows.where("length(kind) < 5 AND price > 0.5").select(F.upper("kind"), "id"), "append"),
        "last": (lambda rows: rows.where("id % 7 = 0").select("at", (F.col("id") + 1).alias("next")), "append"),
        "none": (lambda rows: rows.select(F.lit(1).alias("one")), "append"),
        "joined": (lambda rows: rows.join(F.broadcast(names), "kind").select("id", "called", "kind"), "append"),
        "counted": (
            lambda rows: rows.groupBy("kind").agg(
                F.count("*").alias("n"),
                F.max("kind").alias("most"),
                F.max_by("kind", "id").alias("newest"),
                F.count("price").alias("priced"),
                F.sort_array(F.collect_set("place")).alias("places"),
            ),
            "update",
        ),
        "kept": (
            # Each keeps a text of a batch that has gone: in columns its bytes are in memory that is used again.
            lambda rows: rows.groupBy().agg(
                F.min("name").alias("least"),
                F.max("name").alias("most"),
                F.max_by("name", "id").alias("newest"),
                F.min_by("tags", "id").alias("oldest"),
                F.max("place").alias("place"),
            ),
            "update",
        ),
        "exploded": (
            lambda rows: (
                rows.select("id", "place.city", F.explode("tags").alias("tag"))
                .dropDuplicates(["city", "tag"])
                .select("city", "tag")
            ),
            "append",
        ),
    }
    found = {
        name: run(make(stream(spark, log, "t")), tmp_path / name, mode=mode) for name, (make, mode) in queries.items()
    }
    by_rows()
    for name, (make, mode) in queries.items():
        rows, query = found[name]
        expected, other = run(make(stream(spark, log, "t")), tmp_path / f"{name}-by-rows", mode=mode)
        assert rows.num_rows and shown(rows) == shown(expected), name
        assert [each["numInputRows"] for each in query.recentProgress] == [LARGE], name
        assert "HeadwaterScan" in plan_of(query) and "ColumnarToRow" in plan_of(query), name
        assert "HeadwaterScan" not in plan_of(other) and "ColumnarToRow" not in plan_of(other), name


def test_every_type_is_the_same_in_columns(spark: SparkSession, log: Log, tmp_path: Path) -> None:
    """Also nested ones, nulls, and what the log knows of an event; a batch of so many rows is not fetched with the plan."""
    log.create_topic("t", EVERY_TYPE, key="i64", time="at", partitions=2)
    log.append("t", [{**row, "i64": number, "s": "x" * 2000} for number, row in enumerate(every_type() * 300)])
    names = [*log.topic("t").schema.names, "_key", "_time", "_appended", "_partition", "_offset", "_topic", "_headers"]
    rows, query = run(stream(spark, log, "t", columns=",".join(names)), tmp_path / "checkpoint")
    assert "ColumnarToRow" in plan_of(query)
    by = [("_partition", "ascending"), ("_offset", "ascending")]
    expected = log.read("t", columns=names)
    assert rows.sort_by(by).to_pylist() == expected.cast(rows.schema).sort_by(by).to_pylist()


def test_a_small_batch_comes_with_its_plan(spark: SparkSession, log: Log, tmp_path: Path) -> None:
    """Its rows are rows already; a query goes on with either."""
    log.create_topic("t", FLAT, key="id", time="at")
    rows = large().select(["id", "kind", "price", "at"])
    log.append("t", rows.slice(0, 10))
    found, query = run(stream(spark, log, "t"), tmp_path / "checkpoint")
    assert found.num_rows == 10 and "HeadwaterScan" in plan_of(query) and "ColumnarToRow" not in plan_of(query)
    log.append("t", rows.slice(10))
    found, query = run(stream(spark, log, "t"), tmp_path / "checkpoint")
    assert found.num_rows == LARGE - 10 and "ColumnarToRow" in plan_of(query)
    assert sorted(found.column("id").to_pylist()) == list(range(10, LARGE))


def test_what_fails_in_a_task_is_said(spark: SparkSession, log: Log, tmp_path: Path) -> None:
    """By the error that it is by rows."""
    log.create_topic("t", SCHEMA, key="id", time="at", partitions=1)
    log.append("t", large())
    (segment,) = [path for path in (tmp_path / "log" / "topics" / "t").rglob("*") if path.stat().st_size > 1 << 20]
    damaged = bytearray(segment.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    segment.write_bytes(damaged)
    with pytest.raises(PySparkException, match=r"(?i)damaged|checksum"):
        run(stream(spark, log, "t"), tmp_path / "checkpoint")


def test_where_it_cannot_be_compiled_rows_are_taken(
    spark: SparkSession, log: Log, tmp_path: Path, by_rows: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Spark that has changed is no error."""
    by_rows()
    for name, source in (("Another", "public class Another {"), ("Third", "public class Third {}")):
        monkeypatch.setattr(columnar, "_NAME", name)
        monkeypatch.setattr(columnar, "_source", lambda source=source: source)
        columnar.read_in_columns(spark)
        assert spark._jsparkSession.experimental().extraStrategies().isEmpty()
    log.create_topic("t", SCHEMA, key="id", time="at")
    log.append("t", large())
    rows, query = run(stream(spark, log, "t"), tmp_path / "checkpoint")
    assert rows.num_rows == LARGE and "ColumnarToRow" not in plan_of(query)


def test_it_is_set_up_once(spark: SparkSession) -> None:
    """However often a program asks for a session; what else was set up there stays."""
    columnar.read_in_columns(spark)
    strategies = spark._jsparkSession.experimental().extraStrategies()
    assert [strategies.apply(place).getClass().getName() for place in range(strategies.size())] == ["HeadwaterColumns"]
