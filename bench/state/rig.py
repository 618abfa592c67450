"""The rig of the state's figures: Spark without the connector, streams through our operators, and what they are held against.

`transformWithStateInPandas` needs the package protobuf, which is in no group of ours: `pip install protobuf` before measuring it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.readwriter import DataStreamWriter

import headwater as hw
from bench.harness import Options
from bench.pipeline.events import KEY, SCHEMA, TIME, USERS, make_events
from bench.pipeline.rig import CORES, TOPIC, Rig
from headwater.processing.operators.beats import NAME as BEATS
from headwater.processing.operators.operator import Input, OperatorContext, Time, operate, operator_context
from headwater.processing.stages.fusion import Fusion, Origin, placed_by
from headwater.processing.stages.status import StageStatus
from headwater.processing.state.sorted_runs import H1, H2, Keys, column
from headwater.processing.state.state import State, TableSpec

PARTITIONS = 4
EVENTS, EVENTS_QUICK = 4_000_000, 200_000
BATCH_EVENTS = 2_000_000
PACE = {"maxOffsetsPerTrigger": str(BATCH_EVENTS)}
CHANGES = 300_000
TABLE, KEYED = "rates", "keyed"


class StateRig(Rig):
    """What the state is measured with."""

    @cached_property
    def spark(self) -> SparkSession:
        """Spark as an application has it."""
        return self._session({})

    def operated(self, url: str, function: Callable[..., DataFrame], topics: dict[str, str]) -> DataStreamWriter:
        """A function with an operator of ours over topics (and the columns it needs of each), to a sink that does nothing."""
        pace = tempfile.mkdtemp(dir=self.folder)
        options = {"pace": pace, "partitions": str(PARTITIONS)}
        beats = self.spark.readStream.format(BEATS).options(**options).load()
        stage = OperatorContext(
            tempfile.mkdtemp(dir=self.folder), partitions=PARTITIONS, beats=lambda: beats, tasks=CORES
        )
        with operator_context(stage):
            result = function(*(self.stream(url, topic, columns, pace=pace) for topic, columns in topics.items()))
        return result.writeStream.format("noop")

    def fused(
        self, url: str, function: Callable[..., DataFrame], topics: Mapping[str, str], *, uid: str
    ) -> tuple[DataStreamWriter, Path]:
        """A function with one operator, which runs inside the source of topics (with the columns it needs of each), to a sink that does
        nothing; and its checkpoint.

        One by event time is given no late rows, and these are told of, as in an application.
        """
        checkpoint, state = self.new_checkpoint(), tempfile.mkdtemp(dir=self.folder)
        frames = {topic: self.stream(url, topic, columns) for topic, columns in topics.items()}

        def options(topic: str, names: Sequence[str]) -> dict[str, str]:
            late = {"lateRows": f"{state}/late"}
            return {
                "log": url,
                "topic": topic,
                "columns": ",".join(names),
                "startingOffsets": "earliest",
                **PACE,
                **late,
            }

        origins = []
        with hw.open_log(url) as log:
            for topic, frame in frames.items():
                found = log.topic(topic)
                time = found.time if found.time in frame.columns else None
                placed, roots = placed_by(found.schema, found.key), found.partitions_first
                more = {"placed_by": placed, "roots": roots, "time": time, "options": partial(options, topic)}
                origins.append(Origin.of(topic, frame, **more))
        load = self.spark.readStream.format("headwater")
        fusion = Fusion(
            origins, checkpoint=str(checkpoint), wanted=[uid], make=lambda given: load.options(**given).load()
        )
        with operator_context(OperatorContext(state, partitions=PARTITIONS, beats=lambda: frame, fusion=fusion)):
            result = function(*frames.values())
        assert fusion.found, "the operator is not inside the source"
        return result.writeStream.format("noop"), checkpoint

    def stream(self, url: str, topic: str, columns: str, **options: str) -> DataFrame:
        """A topic as every figure reads it: batches of the same size, from the beginning."""
        return self.from_log(url, topic, columns=columns, **PACE, **options)

    def rate(self, writer: DataStreamWriter, events: int, checkpoint: Path | None = None) -> float:
        """Events a second of the time that the batches take; beats, and other inputs, are not counted."""
        query, _ = self._run(writer, checkpoint)
        batches = query.recentProgress
        status = StageStatus(name="", kind="", to="")
        for batch in batches:
            status.follow(batch)
        assert status.events >= events, "some events were not read"
        assert not status.late, "some events were left out"
        return events / sum(batch["durationMs"]["triggerExecution"] for batch in batches) * 1000

    def with_key(self, events: int) -> str:
        """The URL of a log that has so many events in a topic whose key is never null."""
        url = self.log(events)
        with hw.open_log(url) as log:
            if KEYED not in log.topics():
                schema = SCHEMA.replace("user_id BIGINT", "user_id BIGINT NOT NULL")
                log.create_topic(KEYED, schema, key=KEY, time=TIME, partitions=PARTITIONS)
                for batch in log.scan(TOPIC):
                    log.append(KEYED, batch)
        return url

    def with_table(self, events: int) -> str:
        """The URL of a log that has so many events, with a key that is never null as well, and a table whose rows change meanwhile."""
        url = self.with_key(events)
        with hw.open_log(url) as log:
            if TABLE not in log.topics():
                schema = "user_id BIGINT NOT NULL, rate DOUBLE, since TIMESTAMP"
                log.create_topic(TABLE, schema, key="user_id", time="since", partitions=PARTITIONS)
                log.append(TABLE, changes(events))
        return url


def changes(events: int) -> pa.Table:
    """Changes of a table of all users, spread over the time of so many events, the last of them at its end."""
    count = min(CHANGES, events)
    times = make_events(2).column(TIME).cast(pa.int64())[0].as_py() + np.linspace(0, events * 1_000, count).astype(int)
    random = np.random.default_rng(7)
    return pa.table(
        {
            "user_id": random.integers(0, USERS, count),
            "rate": random.random(count),
            "since": pa.array(times).cast(pa.timestamp("us", "UTC")),
        }
    )


def events_of(options: Options) -> int:
    """How many events the rates are measured with."""
    return EVENTS_QUICK if options.quick else EVENTS


class Counter:
    """An operator that counts the rows of each key, and gives the counts that changed; with `passes` its rows instead."""

    name = "counter"
    is_prompt = True

    def __init__(self, schema: pa.Schema, key: str, *, passes: bool) -> None:
        self.settings = (key, passes)
        field = schema.field(key)
        self.schema = schema if passes else pa.schema([field, pa.field("n", pa.int64())])
        self.tables = {"counts": TableSpec("keyed", [pa.field("n", pa.int64())])}
        self._key, self._passes = key, passes

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """Adds up."""
        rows = inputs[0]
        keys = Keys.of(rows)
        counts = np.bincount(keys.row, minlength=len(keys))
        found, number = state["counts"].find(keys)
        counts[number] += column(found, "n")
        n = pa.array(counts, pa.int64())
        state["counts"].put(pa.table({H1: pa.array(keys.h1), H2: pa.array(keys.h2), "n": n}))
        if self._passes:
            return rows
        return pa.table({self._key: rows.column(self._key).take(pa.array(keys.one)), "n": n})


def counted(df: DataFrame, key: str = "user_id", *, passes: bool = False) -> DataFrame:
    """A stream through the counter."""
    from headwater.processing.spark.types import to_arrow

    return operate(Counter(to_arrow(df.schema), key, passes=passes), [Input(df, [key])])


class SparkCounter(StatefulProcessor):
    """The same in Spark's own state."""

    def init(self, handle: Any) -> None:
        """The count of a key."""
        self._count = handle.getValueState("count", "n BIGINT")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803 - Spark's names
        """Adds up the rows of a key."""
        import pandas as pd

        known = self._count.get()
        n = (known[0] if known else 0) + sum(len(part) for part in rows)
        self._count.update((n,))
        yield pd.DataFrame({"user_id": [key[0]], "n": [n]})

    def close(self) -> None:
        """Nothing is open."""


def counted_by_spark(df: DataFrame) -> DataStreamWriter:
    """A stream through Spark's counter."""
    result = df.groupBy("user_id").transformWithStateInPandas(
        statefulProcessor=SparkCounter(),
        outputStructType="user_id BIGINT, n BIGINT",
        outputMode="Update",
        timeMode="None",
    )
    return result.writeStream.format("noop").outputMode("update")


__all__ = [
    "CHANGES", "EVENTS", "KEYED", "PARTITIONS", "TABLE", "TOPIC", "StateRig", "counted", "counted_by_spark", "events_of",
]  # fmt: skip
