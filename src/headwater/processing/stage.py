"""A stage of an application that Spark runs by `foreachBatch`: the driver commits each batch, with the same staging as the sink.

Update and complete mode know no other way, and a view appends to more than one topic at once. The writer is made once for each run
of the query, in the driver: that takes the stage's fencing number, so whatever still lives of an earlier run is refused.

    writer = FrameWriter(log_url, stage="app.per_page", topic="per_page.changes", checkpoint=path)
    df.writeStream.outputMode("update").option("checkpointLocation", path).foreachBatch(writer.commit).start()
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from headwater.log.stage import Stage, StageCommit
from headwater.log.topic import Topic
from headwater.processing.marker import marker_of
from headwater.processing.reading import is_local
from headwater.processing.staging import Staged, commit_staged, opened_log, stage_rows, sweep, take_number

_MESSAGE = "message BINARY"


class FrameWriter:
    """Writes the batches of one run of a query to a topic, each exactly once."""

    def __init__(self, log_url: str, *, stage: str, topic: str, checkpoint: str) -> None:
        log = opened_log(log_url)
        self.stage = Stage(log, stage, number=take_number(log, stage)) if is_local(log) else Stage(log, stage)
        self._topic = topic
        self._checkpoint = checkpoint
        self._url = log_url

    def commit(self, df: DataFrame, batch_id: int) -> StageCommit:
        """Appends the DataFrame to the topic, unless that was done before; made to be given to `foreachBatch`."""
        return commit_frame(
            df, batch_id, stage=self.stage, log_url=self._url, topic=self._topic, checkpoint=self._checkpoint
        )


def commit_frame(
    df: DataFrame,
    batch_id: int,
    *,
    stage: Stage,
    log_url: str,
    topic: str,
    checkpoint: str,
    appends: Iterable[tuple[str, Any]] = (),
) -> StageCommit:
    """Appends a batch to a topic, and more rows to other topics, with the batch's marker: all of it once.

    The DataFrame is computed also where the batch is there already: Spark keeps its state only by that. On Kafka, which has nowhere
    to stage them, the rows are collected by the driver.
    """
    log = opened_log(log_url)
    if not is_local(log):
        return stage.commit(marker_of(checkpoint, batch_id), [(topic, df.toArrow()), *appends])
    target = log.store.refresh(topic)
    rows = df.mapInArrow(_stager(log_url, stage.name, stage.number, target), _MESSAGE).collect()
    messages: list[Staged] = [pickle.loads(row.message) for row in rows]
    more = [write for name, given in appends for write in log._writes(name, given)]
    done = commit_staged(log, stage, target, marker_of(checkpoint, batch_id), messages, more)
    sweep(log, stage.name, stage.number)
    return done


def _stager(url: str, stage: str, number: int, topic: Topic) -> Any:
    def stage_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        staged = stage_rows(opened_log(url), stage, number, topic, batches)
        yield pa.record_batch([pa.array([pickle.dumps(staged)], pa.binary())], names=["message"])

    return stage_task
