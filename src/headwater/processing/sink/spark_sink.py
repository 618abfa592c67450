"""The sink: what `df.writeStream.format("headwater")` and `df.write.format("headwater")` write to the log with, exactly once.

The tasks stage their rows (see `staging`), and the driver appends everything with the batch's marker in one transaction. On Kafka
each task commits its own rows with the marker, under a stage of its own, so a batch becomes visible task by task. Spark makes
a writer anew in another Python process for each batch, for each of its tasks and for its commit, so a writer holds nothing but its
options; which run of the query it belongs to, the tasks know from Spark and tell the driver.

Options: `log` and `topic`; `stage`, under which the markers are kept (by default the topic's name and a hash of the checkpoint's path,
so that a checkpoint that was deleted and begun again is noticed); `key`, the key column of a topic that is made because there is
none of that name yet. Applications give `order`, in which each task on Kafka appends its rows (see `batch_order`).
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from headwater.log.clients.stage import Stage
from headwater.log.log import Log
from headwater.log.port.topic import Topic
from headwater.model.errors import InvalidInput, SchemaConflict, TopicNotFound, Unsupported
from headwater.model.marker import Marker
from headwater.model.points import PROCESS
from headwater.processing.checkpoint.marker import marker_of
from headwater.processing.sink.batch_order import Order
from headwater.processing.sink.staging import (
    BATCH,
    StagedRows,
    can_stage,
    commit_staged,
    newest_number,
    number_of_run,
    remove_staged,
    stage_rows,
    sweep,
    sweep_batches,
    write_task,
    writes_of,
)
from headwater.processing.spark.log_cache import log_for_writing

_RUN = "spark.jobGroup.id"
_EPOCH = "streaming.sql.batchId"
"""The local properties in which a streaming query gives its tasks the id of its run and the number of the batch."""


class SinkTask(NamedTuple):
    """A task of a batch: the run of its query, the batch, and its number among the tasks."""

    run: str
    epoch: int
    number: int


class _Writer:
    """What both writers are made of: the target, from the options."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        given = {name.lower(): value for name, value in options.items()}
        for name in ("log", "topic"):
            if not given.get(name):
                raise InvalidInput(
                    f"Option {name} is missing.", advice=f'Name it: .option("{name}", "…") says where to write to.'
                )
        self.url = given["log"]
        self.topic = given["topic"]
        self.key = given.get("key")
        self.order = cast("Order | None", given.get("order"))
        self.checkpoint = given.get("checkpointlocation", "")
        self.stage = given.get("stage") or _stage_name(self.topic, self.checkpoint)
        self._make_topic(schema)

    def log(self) -> Log:
        """The log, opened once in each process."""
        return log_for_writing(self.url)

    def _make_topic(self, schema: StructType) -> None:
        """A topic that is not there yet gets the columns of the DataFrame."""
        log = self.log()
        if log.url.startswith("memory://"):
            raise Unsupported(
                "Spark's tasks run in other processes, which cannot reach this log.",
                advice="Use a log in a folder, or kafka://.",
            )
        try:
            topic = log.topic(self.topic)
        except TopicNotFound:
            columns = to_arrow_schema(schema, timezone="UTC")
            log.create_topic(self.topic, columns, key=self.key, exist_ok=True)
            return
        if self.key is not None and self.key != topic.key:
            raise SchemaConflict(
                f"Topic {self.topic!r} has the key {topic.key!r}, and option key says {self.key!r}.",
                advice="Leave out the option: a topic keeps the key that it was created with.",
            )


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Writes the batches of a streaming query."""

    def task(self) -> SinkTask:
        """In a task: which one it is."""
        context = TaskContext.get()
        run = None if context is None else context.getLocalProperty(_RUN)
        epoch = None if context is None else context.getLocalProperty(_EPOCH)
        if context is None or run is None or epoch is None:
            raise InvalidInput("This task does not belong to a streaming query.", advice="Write with df.writeStream.")
        return SinkTask(str(run), int(epoch), context.partitionId())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: stages its rows; on Kafka, which has nowhere to stage them, commits them."""
        log, task = self.log(), self.task()
        if not can_stage(log):
            name, marker = f"{self.stage}.{task.number}", self._marker(task.epoch)
            return write_task(log, name, self.topic, marker, iterator, order=self.order)
        number = number_of_run(log, self.stage, task.run)
        PROCESS.reach("stream: task begun")
        staged = stage_rows(log, self.stage, number, log.store.refresh(self.topic), iterator)
        PROCESS.reach("stream: task staged")
        return staged

    def commit(self, messages: Sequence[Any], batch_id: int) -> None:
        """In the driver: appends everything and the batch's marker, unless that was done before."""
        log, staged = self.log(), [message for message in messages if message is not None]
        if not can_stage(log):
            return
        PROCESS.reach("stream: all staged")
        number = max((message.number for message in staged), default=0) or newest_number(log, self.stage)
        stage = Stage(log.appender, self.stage, number=number)
        PROCESS.reach("stream: committing")
        commit_staged(log, stage, log.store.refresh(self.topic), self._marker(batch_id), staged)
        PROCESS.reach("stream: committed")
        sweep(log, self.stage, number)
        PROCESS.reach("stream: swept")

    def abort(self, messages: Sequence[Any], batch_id: int) -> None:
        """In the driver, after a task has failed for good."""
        remove_staged(messages)

    def _marker(self, batch_id: int) -> Marker:
        return marker_of(self.checkpoint, batch_id)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Writes a DataFrame: all of it becomes visible in one moment, on Kafka task by task. Run again, it is appended again."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise Unsupported(
                "A log is append-only and cannot be overwritten.",
                advice='Use .mode("append"), or delete the topic and create it again.',
            )
        super().__init__(options, schema)
        self.schema = schema
        # An attempt is named here, in the driver, so that its tasks find the same folder.
        self.stage = f"{BATCH}{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: stages its rows."""
        log = self.log()
        if not can_stage(log):
            log.append(self.topic, pa.Table.from_batches(iterator, to_arrow_schema(self.schema, timezone="UTC")))
            return WriterCommitMessage()
        return stage_rows(log, self.stage, 0, log.store.refresh(self.topic), iterator)

    def commit(self, messages: Sequence[Any]) -> None:
        """In the driver: appends everything."""
        log = self.log()
        if not can_stage(log):
            return
        topic: Topic = log.store.refresh(self.topic)
        log.store.write_atomically([w for message in messages if message for w in writes_of(log, topic, message)])
        self._clear(messages)

    def abort(self, messages: Sequence[Any]) -> None:
        """In the driver, after a task has failed for good."""
        self._clear(messages)

    def _clear(self, messages: Sequence[StagedRows | None]) -> None:
        if not can_stage(self.log()):
            return
        remove_staged(messages)
        sweep_batches(self.log(), self.stage)


def _stage_name(topic: str, checkpoint: str) -> str:
    path = checkpoint.removeprefix("file://").removeprefix("file:").rstrip("/")
    return f"{topic}.{hashlib.blake2b(path.encode('utf-8'), digest_size=4).hexdigest()}"
