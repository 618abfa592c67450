"""Spark writes to the log exactly once: processes killed at every step, and checkpoints that do not fit.

The oracle is DuckDB over the files that the query reads.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

import headwater as hw
from headwater.model.errors import CheckpointConflict, Fenced, InvalidInput, NotFound, SchemaConflict, Unsupported
from headwater.model.points import points_of
from headwater.processing.checkpoint.marker import marker_of
from headwater.processing.sink.frame_writer import FrameWriter
from headwater.processing.sink.spark_sink import BatchWriter, SinkTask, StreamWriter
from headwater.testing.contracts.case import refused
from tests.rigs.children import Child, Gate
from tests.rigs.processing.spark_writers import SinkSource, counted, kill_session, order, start_driver

pytestmark = pytest.mark.timeout(600)

SCHEMA = StructType([StructField("n", LongType()), StructField("k", StringType())])
STEPS = points_of("stream:")
LOG_STEPS = [
    "transaction: staged",
    "transaction: synced",
    "commit: intended",
    "commit: written",
    "commit: recorded",
    "stage: marker published",
    "commit: published one",
    "commit: done",
]
DRIVER_S_MAX = 300.0
BENCH_ROUNDS = 12


@pytest.fixture(scope="module")
def spark(spark: SparkSession) -> SparkSession:
    spark.dataSource.register(SinkSource)
    return spark


def make_input(folder: Path, *, files: int) -> None:
    (folder / "in").mkdir(parents=True)
    for number in range(files):
        add_file(folder, number)
    with hw.open_log(str(folder / "log")) as log:
        log.create_topic("out", "n BIGINT, k STRING", key="k", partitions=3)


def add_file(folder: Path, number: int) -> None:
    """A small one or a large one: what they leave travels in messages or in staged files."""
    numbers = range(number * 100_000, number * 100_000 + (20_000 if number % 3 == 2 else 50))
    path, at_s = folder / "in" / f"{number:03d}.parquet", 1_700_000_000 + number
    pq.write_table(pa.table({"n": numbers, "k": [f"k{n % 97}" for n in numbers]}), path.with_suffix(".new"))
    os.utime(path.with_suffix(".new"), (at_s, at_s))
    path.with_suffix(".new").rename(path)


def write(spark: SparkSession, folder: Path, **options: str) -> Any:
    """Runs the query until everything that is there is written, or it fails."""
    given = {"log": f"{folder}/log", "topic": "out", "checkpointLocation": f"{folder}/checkpoint"} | options
    query = counted(spark, folder).writeStream.format("sink").options(**given).trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def check(folder: Path, *, files: str = "*") -> None:
    """The topic equals the input: no gap, no duplicate, every key's events in their order; and nothing staged is left."""
    with hw.open_log(str(folder / "log")) as log:
        found = log.read("out", columns=["n", "k", "_partition", "_offset"])
        assert found.num_rows
        db = duckdb.connect()
        db.register("found", found)
        wanted = f"SELECT n, k FROM read_parquet('{folder}/in/{files}.parquet')"
        assert db.execute(f"({wanted}) EXCEPT ALL (SELECT n, k FROM found)").fetchall() == []
        assert db.execute(f"(SELECT n, k FROM found) EXCEPT ALL ({wanted})").fetchall() == []
        assert (
            db.execute(
                "SELECT * FROM (SELECT n, lag(n) OVER (PARTITION BY _partition ORDER BY _offset) AS before FROM found) "
                "WHERE before > n"
            ).fetchall()
            == []
        )
    assert list((folder / "log" / "staged").rglob("*.arrow")) == []


def refusal(spark: SparkSession, folder: Path, **options: str) -> str:
    with pytest.raises(PySparkException) as caught:
        write(spark, folder, **options)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.covers("Trident", backends=["file"])
def test_its_python_processes_die_at_every_step(spark: SparkSession, tmp_path: Path) -> None:
    """Each batch is killed at another step and run again, by Spark or by a new run of the query: it is written once."""
    points = [*STEPS, *LOG_STEPS]
    assert len(STEPS) == 6
    make_input(tmp_path, files=0)
    orders, failures = tmp_path / "orders", 0
    for number, point in enumerate(points):
        add_file(tmp_path, number)
        order(orders, point, nth=1, only_worker=True)
        try:
            write(spark, tmp_path, orders=str(orders))
        except PySparkException:
            failures += 1
        assert not orders.exists(), f"{point} is not reached"
    print(f"{failures} runs failed")
    # A killed task is tried again by Spark, also one that settles what the commit before it left; a killed commit ends the query.
    assert failures >= len(points) - 4
    write(spark, tmp_path)
    check(tmp_path)
    with hw.open_log(str(tmp_path / "log")) as log:
        (stage,) = log.stages()
        last = log.store.stage_state(stage).last
        assert last is not None
        assert last.epoch == len(points) - 1


def test_checkpoints_that_do_not_fit_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Deleted, another application's, a batch planned anew: nothing is lost or doubled, and the ways out are named."""
    make_input(tmp_path, files=2)
    checkpoint, kept = tmp_path / "checkpoint", tmp_path / "kept"
    write(spark, tmp_path)
    shutil.copytree(checkpoint, kept)
    found = marker_of(str(checkpoint), 1)
    assert found.query == json.loads((checkpoint / "metadata").read_text())["id"]
    assert found.ends == [{"logOffset": 1}]

    shutil.rmtree(checkpoint)
    said = refusal(spark, tmp_path)
    assert "CheckpointConflict" in said
    assert "deleted" in said
    assert "--accept-new-checkpoint STAGE=marker" in said
    check(tmp_path)

    other = tmp_path / "other"
    write(spark, tmp_path, topic="copies", key="k", checkpointLocation=str(other))
    shutil.rmtree(checkpoint)
    shutil.copytree(other, checkpoint)
    (checkpoint / "commits" / "1").unlink()
    said = refusal(spark, tmp_path)
    assert "CheckpointConflict" in said
    assert "belongs to another application" in said
    check(tmp_path)

    shutil.rmtree(checkpoint)
    shutil.copytree(kept, checkpoint)
    (checkpoint / "commits" / "1").unlink()
    offsets = checkpoint / "offsets" / "1"
    lines = offsets.read_text().splitlines()
    offsets.write_text("\n".join([*lines[:2], '{"logOffset":0}']))
    for left in (*checkpoint.rglob(".*.crc"),):
        left.unlink()
    assert "planned again" in refusal(spark, tmp_path)
    check(tmp_path)

    shutil.rmtree(checkpoint)
    shutil.copytree(kept, checkpoint)
    pq.write_table(pa.table({"n": [10**9], "k": ["late"]}), tmp_path / "in" / "late.parquet")
    write(spark, tmp_path)
    check(tmp_path)


def test_a_new_checkpoint_is_accepted_when_told(spark: SparkSession, tmp_path: Path) -> None:
    """The stage forgets its last marker; what the new checkpoint reads again is then written again, as asked."""
    make_input(tmp_path, files=1)
    write(spark, tmp_path, stage="s")
    shutil.rmtree(tmp_path / "checkpoint")
    with hw.open_log(str(tmp_path / "log")) as log:
        last = log.stage("s").accept_new_checkpoint()
        assert last is not None
        write(spark, tmp_path, stage="s")
        assert log.read("out").num_rows == 100


def test_update_mode_goes_through_the_driver(spark: SparkSession, tmp_path: Path) -> None:
    """`foreachBatch` with the same staging: replayed with its checkpoint's last commit gone, nothing is doubled."""
    make_input(tmp_path, files=3)
    with hw.open_log(str(tmp_path / "log")) as log:
        log.create_topic("counts", "k STRING, events BIGINT", key="k", partitions=2)
        written = []

        def run() -> None:
            writer = FrameWriter(
                f"{tmp_path}/log", stage="app.counts", topic="counts", checkpoint=f"{tmp_path}/checkpoint"
            )
            counts = counted(spark, tmp_path).groupBy("k").count().withColumnRenamed("count", "events")
            query = (
                counts.writeStream.outputMode("update")
                .option("checkpointLocation", f"{tmp_path}/checkpoint")
                .foreachBatch(lambda df, epoch: written.append(writer.commit(df, epoch).written))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()

        run()
        (tmp_path / "checkpoint" / "commits" / "2").unlink()
        (tmp_path / "checkpoint" / "commits" / ".2.crc").unlink(missing_ok=True)
        run()
        assert written == [True, True, True, False]
        found = {row["k"]: row["events"] for row in log.table("counts").to_pylist()}
        wanted = duckdb.sql(f"SELECT k, count(*) FROM read_parquet('{tmp_path}/in/*.parquet') GROUP BY k").fetchall()
        assert found == dict(wanted)


@pytest.mark.parametrize("few", [0, 10_000])
def test_few_rows_are_fetched_and_many_are_staged(
    spark: SparkSession, tmp_path: Path, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query without state is committed by the driver, whichever way its rows take; run again, nothing is doubled."""
    monkeypatch.setattr("headwater.processing.sink.frame_writer.FETCH_EVENTS_MAX", few)
    with hw.open_log(str(tmp_path / "log")) as log:
        for name in ("in", "out"):
            log.create_topic(name, "k STRING, n BIGINT", key="k", partitions=2)
        log.append("in", [{"k": f"k{n % 7}", "n": n} for n in range(300)])
        written = []

        def run() -> None:
            options = {
                "log": f"{tmp_path}/log",
                "topic": "in",
                "startingOffsets": "earliest",
                "maxOffsetsPerTrigger": "100",
            }
            writer = FrameWriter(
                f"{tmp_path}/log", stage="s", topic="out", checkpoint=f"{tmp_path}/checkpoint", fetches=True
            )
            rows = spark.readStream.format("headwater").options(**options).load().selectExpr("k", "n * 2 AS n")
            (
                rows.writeStream.option("checkpointLocation", f"{tmp_path}/checkpoint")
                .foreachBatch(lambda df, epoch: written.append(writer.commit(df, epoch).written))
                .trigger(availableNow=True)
                .start()
                .awaitTermination()
            )

        run()
        (tmp_path / "checkpoint" / "commits" / "2").unlink()
        (tmp_path / "checkpoint" / "commits" / ".2.crc").unlink(missing_ok=True)
        run()
        assert written == [True, True, True, False]
        assert sorted(log.read("out")["n"].to_pylist()) == [2 * n for n in range(300)]


def test_a_batch_is_visible_in_one_moment(spark: SparkSession, tmp_path: Path) -> None:
    """`df.write` appends; a topic that is not there is made, with the DataFrame's columns and the key that is named."""
    hw.open_log(str(tmp_path / "log")).close()
    frame = spark.range(50_000).selectExpr("id AS n", "concat('k', id % 97) AS k")
    for _ in range(2):
        options = {"log": f"{tmp_path}/log", "topic": "made", "key": "k"}
        frame.write.format("sink").options(**options).mode("append").save()
    with hw.open_log(str(tmp_path / "log")) as log:
        assert log.topic("made").key == "k"
        numbers = log.read("made")["n"].to_pylist()
        assert sorted(numbers) == sorted([*range(50_000), *range(50_000)])
    assert list((tmp_path / "log" / "staged").iterdir()) == []
    with pytest.raises(PySparkException, match="overwritten"):
        frame.write.format("sink").options(**options).mode("overwrite").save()
    with pytest.raises(PySparkException, match="SchemaMismatch"):
        frame.selectExpr("n", "k", "1 AS more").write.format("sink").options(**options).mode("append").save()


class _RunWriter(StreamWriter):
    """A task's writer outside of Spark."""

    def task(self) -> SinkTask:
        return SinkTask(self.name, self.epoch, 0)


def run_writer(folder: Path, name: str, *, epoch: int = 0) -> _RunWriter:
    options = {"log": f"{folder}/log", "topic": "out", "stage": "s", "checkpointLocation": f"{folder}/checkpoint"}
    writer = _RunWriter(options, SCHEMA)
    writer.name, writer.epoch = name, epoch
    return writer


def plan_batch(folder: Path, batch: int, end: int) -> None:
    (folder / "checkpoint" / "offsets").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint" / "metadata").write_text('{"id":"q"}')
    (folder / "checkpoint" / "offsets" / str(batch)).write_text(f'v1\n{{}}\n{{"logOffset":{end}}}')


def batch_of(first: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(first, first + count)), "k": [f"k{n % 9}" for n in range(count)]})


def test_a_zombie_task_can_do_nothing(tmp_path: Path) -> None:
    """Stopped in the middle, resumed after its stage was restarted: what it stages is swept, its commit is refused."""
    make_input(tmp_path, files=1)
    plan_batch(tmp_path, 0, 1)
    with Gate() as asleep:

        def task() -> Any:
            def rows() -> Iterator[pa.RecordBatch]:
                yield batch_of(0, 30_000)
                asleep.open()
                os.kill(os.getpid(), signal.SIGSTOP)
                yield batch_of(30_000, 30_000)

            return run_writer(tmp_path, "first").write(rows())

        zombie = Child(task)
        asleep.wait()
        second = run_writer(tmp_path, "second")
        message = second.write(iter([batch_of(0, 60_000)]))
        os.kill(zombie.pid, signal.SIGCONT)
        late = zombie.result()
    first = run_writer(tmp_path, "first")
    with refused(Fenced):
        first.commit([late], 0)
    with refused(Fenced):
        first.write(iter([batch_of(0, 1)]))
    second.commit([message, None], 0)
    with refused(Fenced):
        first.commit([late], 0)
    with hw.open_log(str(tmp_path / "log")) as log:
        assert sorted(log.read("out")["n"].to_pylist()) == list(range(60_000))
    assert list((tmp_path / "log" / "staged").rglob("*.arrow")) == []


def test_a_batch_without_tasks_is_committed_all_the_same(tmp_path: Path) -> None:
    """Else the next one would seem to jump."""
    make_input(tmp_path, files=1)
    for batch in range(3):
        plan_batch(tmp_path, batch, batch)
        run_writer(tmp_path, "run").commit([], batch)
        with hw.open_log(str(tmp_path / "log")) as log:
            assert log.stage("s").last is not None  # and somebody else takes the stage in between
    with hw.open_log(str(tmp_path / "log")) as log:
        last = log.store.stage_state("s").last
    assert last is not None
    assert last.epoch == 2


def test_a_topic_that_changes_between_task_and_commit(tmp_path: Path) -> None:
    """What was staged for its old columns is appended with the new ones."""
    make_input(tmp_path, files=1)
    plan_batch(tmp_path, 0, 1)
    writer = run_writer(tmp_path, "run")
    messages = [writer.write(iter([batch_of(0, 10)])), writer.write(iter([batch_of(10, 50_000)]))]
    with hw.open_log(str(tmp_path / "log")) as log:
        log.alter_topic("out", schema="n BIGINT, k STRING, more INT")
        writer.commit(messages, 0)
        found = log.read("out")
    assert sorted(found["n"].to_pylist()) == list(range(50_010))
    assert found["more"].null_count == 50_010


def test_bad_options_are_refused(tmp_path: Path) -> None:
    """Before anything runs, with what to do."""
    make_input(tmp_path, files=1)
    with refused(InvalidInput, "topic"):
        StreamWriter({"log": f"{tmp_path}/log"}, SCHEMA)
    with refused(Unsupported, "other processes"):
        StreamWriter({"log": "memory://", "topic": "out"}, SCHEMA)
    with refused(SchemaConflict, "'k'"):
        StreamWriter({"log": f"{tmp_path}/log", "topic": "out", "key": "n"}, SCHEMA)
    with refused(Unsupported, "overwritten"):
        BatchWriter({"log": f"{tmp_path}/log", "topic": "out"}, SCHEMA, overwrite=True)
    with refused(NotFound, "metadata"):
        run_writer(tmp_path, "run").commit([], 0)
    plan_batch(tmp_path, 0, 1)
    (tmp_path / "checkpoint" / "offsets" / "0").write_text("v9\n{}\n1")
    with refused(InvalidInput, "offsets/0"):
        run_writer(tmp_path, "run").commit([], 0)
    with hw.open_log(str(tmp_path / "log")) as log:
        log.stage("s").commit(hw.Marker(query="other", epoch=0))
    plan_batch(tmp_path, 0, 1)
    with refused(CheckpointConflict, "another application"):
        run_writer(tmp_path, "run").commit([], 0)


def kill_drivers(folder: Path, seed: int, *, kills: int) -> None:
    """Drivers, with JVM and workers, die at a step or at a random moment, one after the other; the last one finishes."""
    print(f"seed {seed}")
    chance = Random(seed)
    make_input(folder, files=4 * kills + 4)
    for _ in range(kills):
        at_random = chance.random() < 0.3
        if not at_random:
            order(folder / "orders", chance.choice([*STEPS, *LOG_STEPS]), nth=chance.randint(1, 4))
        driver = start_driver(folder)
        try:
            with suppress(subprocess.TimeoutExpired):
                driver.wait(chance.uniform(8, 20) if at_random else DRIVER_S_MAX)
        finally:
            kill_session(driver.pid)
            driver.wait()
    (folder / "orders").unlink(missing_ok=True)
    assert start_driver(folder).wait(DRIVER_S_MAX) == 0, (folder / "driver.err").read_text()[-2000:]
    check(folder)


@pytest.mark.bench
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 6))
def test_python_processes_die_again_and_again(spark: SparkSession, tmp_path: Path, seed: int) -> None:
    """At random steps, for the first or a later time, of a few batches at once."""
    print(f"seed {seed}")
    chance, orders, files = Random(seed), tmp_path / "orders", 0
    make_input(tmp_path, files=0)
    for _ in range(BENCH_ROUNDS):
        for _ in range(chance.randint(1, 3)):
            add_file(tmp_path, files)
            files += 1
        order(orders, chance.choice([*STEPS, *LOG_STEPS]), nth=chance.randint(1, 3), only_worker=True)
        with suppress(PySparkException):
            write(spark, tmp_path, orders=str(orders))
    orders.unlink(missing_ok=True)
    write(spark, tmp_path)
    check(tmp_path)


@pytest.mark.slow
def test_a_driver_dies_with_everything(tmp_path: Path) -> None:
    """`kill -9` of driver, JVM and workers right after the commit, before Spark has written its own."""
    make_input(tmp_path, files=4)
    order(tmp_path / "orders", "stream: committed", nth=2)
    assert start_driver(tmp_path).wait(DRIVER_S_MAX) == -signal.SIGKILL
    assert start_driver(tmp_path).wait(DRIVER_S_MAX) == 0, (tmp_path / "driver.err").read_text()[-2000:]
    check(tmp_path)


@pytest.mark.bench
@pytest.mark.parametrize("seed", range(10))
def test_drivers_die_again_and_again(tmp_path: Path, seed: int) -> None:
    """Five kills a round."""
    kill_drivers(tmp_path, seed, kills=5)
