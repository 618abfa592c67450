"""Rebuilding: how soon a query that was stopped has done its next batch, when its operator's state is on disk, in an object store, or lost.

Each run is a process of its own with a Spark of its own, which runs the same application over another log first: Java is warm then, and no
Python has seen the state. Timed is `app.run(available_now=True)` over 1,000 new events, each of a key that the state has.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from bench.harness import Figure, Options, Target, measure_sides, scratch
from bench.pipeline.rig import CORES
from bench.processes import run_together
from bench.state.growth import CHANGED
from bench.state.rig import PARTITIONS
from headwater.model.url import inside
from headwater.processing.source.spark_source import make_session
from headwater.processing.spark.session import stop_session
from headwater.testing.servers.s3 import S3Server

KEYS, KEYS_QUICK = 1_000_000, 100_000
KEYS_WARM = 1_000
NAME, STAGE = "rebuilding", "counted"


def rebuilding(options: Options) -> list[Figure]:
    """From the state on disk and from the one on S3, beside one that is made from the log."""
    if not options.wants("ours"):
        return []
    keys = KEYS_QUICK if options.quick else KEYS
    with scratch() as folder, S3Server() as s3:
        places = {"disk": None, "s3": s3.url("state"), "log": None}
        for side, place in places.items():
            run_together((_fill, (str(folder / side), place, keys)))
        found = measure_sides(
            options, {side: partial(_run, folder / side, places[side], keys) for side in places}, better="lower"
        )
    [disk], [remote], [log] = (found[side] for side in places)
    what = f"from the start of a stopped query to the end of its next batch; its operator keeps {keys:,} keys"
    beside, bound = "ours, from the log", Target("<=", 1.0)
    return [
        Figure("state_from_disk", f"{what} on this disk", "s", (disk, log), beside, bound),
        Figure("state_from_s3", f"{what} in an object store on loopback", "s", (remote, log), beside, bound),
        Figure("state_from_log", f"{what}, which are lost and made anew from as many events", "s", (log, None)),
    ]


def _run(folder: Path, place: str | None, keys: int) -> tuple[float]:
    [seconds] = run_together((_next_batch, (str(folder), place, keys)))
    return (float(seconds),)


def _fill(ready: Callable[[], None], folder: str, place: str | None, keys: int) -> None:
    """A log with an event of each key, that the application has read."""
    spark = _session(folder)
    _append(folder, np.arange(keys))
    _app(folder, place, spark).run(available_now=True)
    stop_session(spark)


def _next_batch(ready: Callable[[], None], folder: str, place: str | None, keys: int) -> float:
    """Seconds for some more events; in the folder `log` the state is lost first."""
    is_lost, warm = Path(folder).name == "log", f"{folder}-warm"
    spark = _session(folder)
    _append(warm, np.arange(KEYS_WARM))
    _app(warm, place and inside(place, "warm"), spark).run(available_now=True)
    _append(folder, np.random.default_rng().integers(0, keys, CHANGED))
    app = _app(folder, place, spark)
    if is_lost:
        shutil.rmtree(app.state / "checkpoints" / STAGE / "operators")
    begun = time.perf_counter()
    status = app.run(available_now=True, rebuild_state={STAGE: "all"} if is_lost else None)
    seconds = time.perf_counter() - begun
    assert status.stages[0].events == CHANGED, "another batch was measured"
    stop_session(spark)
    shutil.rmtree(warm)
    return seconds


def _session(folder: str) -> SparkSession:
    settings = {"spark.driver.memory": "2g", "spark.local.dir": f"{folder}-spark"}
    return make_session("bench", f"local[{CORES}]", settings)


def _append(folder: str, keys: np.ndarray) -> None:
    with hw.open_log(folder) as log:
        if "events" not in log.topics():
            log.create_topic("events", "user_id BIGINT NOT NULL", key="user_id", partitions=PARTITIONS)
        log.append("events", pa.table({"user_id": keys}))


def _app(folder: str, place: str | None, spark: SparkSession) -> hw.App:
    app = hw.App(NAME, log=folder, spark=spark, state=place)
    events = app.topic("events", schema="user_id BIGINT NOT NULL", key="user_id", partitions=PARTITIONS)

    @app.stream(events, to="counts", key="user_id")
    def counted(events: DataFrame) -> DataFrame:
        return hw.totals(events, by="user_id", n="count")

    return app
