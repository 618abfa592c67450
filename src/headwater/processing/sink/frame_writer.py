"""A stage of an application that Spark runs by `foreachBatch`: the driver commits each batch, in the process that it has already.

Few rows are fetched into the driver; more are staged by the tasks, as the sink does it, so that they never pass through one process.
Update and complete mode know no other way, and the data source's own writer costs two new Python processes in every batch. The writer is
made anew for each run of the query, in the driver: that takes the stage's fencing number, so whatever still lives of an earlier run is
refused.

    writer = FrameWriter(log_url, stage="app.per_page", topic="per_page.changes", checkpoint=path)
    df.writeStream.outputMode("update").option("checkpointLocation", path).foreachBatch(writer.commit).start()
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.log.clients.stage import Stage
from headwater.log.disk.disk import RealDisk
from headwater.log.port.stage import StageCommit
from headwater.log.port.topic import Topic
from headwater.model.marker import Marker
from headwater.processing.checkpoint.marker import marker_of
from headwater.processing.checkpoint.offsets import count_between
from headwater.processing.sink.batch_order import BatchOrder, Order
from headwater.processing.sink.staging import StagedRows, can_stage, commit_staged, stage_rows, sweep, take_number
from headwater.processing.spark.driver_rows import rows_of
from headwater.processing.spark.log_cache import log_for_writing

FETCH_EVENTS_MAX = 10_000
"""So many events, or fewer, are read by a batch whose rows are fetched into the driver."""

_MESSAGE = "message BINARY"
_TASK = "__task"


class FrameWriter:
    """Writes the batches of one run of a query to a topic, each exactly once.

    `fetches` says that a batch gives about as many rows as it reads events: true of a query without state. Where a window ends, one
    event may bring a million rows. `order` is that of the rows of a batch in the topic, as far as it has an event time.
    """

    def __init__(
        self, log_url: str, *, stage: str, topic: str, checkpoint: str, fetches: bool = False, order: Order = "tasks"
    ) -> None:
        self._log = log_for_writing(log_url)
        self._can_stage = can_stage(self._log)
        number = take_number(self._log, stage) if self._can_stage else None
        self._stage = Stage(self._log.appender, stage, number=number)
        self._topic = topic
        self._checkpoint = checkpoint
        self._url = log_url
        self._fetches = fetches
        self._order: Order = order
        self._last = self._stage.last

    def commit(self, df: DataFrame, batch_id: int) -> StageCommit:
        """Appends the DataFrame to the topic, unless that was done before; made to be given to `foreachBatch`.

        The DataFrame is computed also where the batch is there already: Spark keeps its state only by that. On Kafka, which has
        nowhere to stage rows, they are always fetched.
        """
        marker = marker_of(self._checkpoint, batch_id)
        if not self._can_stage or (self._fetches and self._is_small(marker)):
            done = self._stage.commit(marker, [(self._topic, self._fetched(df))])
        else:
            done = self._commit_staged(df, marker)
        self._last = marker
        return done

    def _fetched(self, df: DataFrame) -> pa.Table:
        topic = self._log.topic(self._topic)
        if topic.time is None:
            return rows_of(df)
        rows = rows_of(df.withColumn(_TASK, F.spark_partition_id()))
        weaving = BatchOrder(topic, self._order, now_us=self._log.clock())
        return weaving.rows(rows.drop_columns(_TASK), rows.column(_TASK).to_numpy())

    def _commit_staged(self, df: DataFrame, marker: Marker) -> StageCommit:
        target, stage = self._log.store.refresh(self._topic), self._stage
        rows = df.mapInArrow(_stager(self._url, stage.name, stage.number, target), _MESSAGE).collect()
        disk = RealDisk()
        disk.reach("frame: all staged")
        messages: list[StagedRows] = [pickle.loads(row.message) for row in rows]
        done = commit_staged(self._log, stage, target, marker, messages, order=self._order)
        disk.reach("frame: committed")
        sweep(self._log, stage.name, stage.number)
        disk.reach("frame: swept")
        return done

    def _is_small(self, marker: Marker) -> bool:
        """Whether a batch reads few events; nobody knows of the first one, which has no batch before it."""
        if self._last is None or self._last.epoch + 1 != marker.epoch:
            return False
        return count_between(self._last.ends, marker.ends) <= FETCH_EVENTS_MAX


def _stager(url: str, stage: str, number: int, topic: Topic) -> Any:
    def stage_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        staged = stage_rows(log_for_writing(url), stage, number, topic, batches)
        RealDisk().reach("frame: task staged")
        yield pa.record_batch([pa.array([pickle.dumps(staged)], pa.binary())], names=["message"])

    return stage_task
