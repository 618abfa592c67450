"""Tasks of a Spark query that writes to Kafka, as a program without Spark: batches of two tasks, and a driver's checkpoint.

`task_writer.py URL FOLDER NTH:WHEN …` runs it again and again, each time in a process of its own that goes on where the
checkpoint ended and dies at its nth transaction: `before` the brokers are told to commit it, when all its events are there, or `after`,
when nobody has heard of it yet. The last process is left alone. How each one ended is printed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

import headwater as hw
from headwater.log.kafka.cluster import Cluster
from headwater.log.log import Log
from headwater.processing.sink.batch_order import Order
from headwater.processing.sink.spark_sink import SinkTask, StreamWriter

EPOCHS = 3
TASKS = 2
TASK_EVENTS = 10


class _TaskWriter(StreamWriter):
    """A task's writer outside of Spark."""

    given: Log
    place: SinkTask

    def log(self) -> Log:
        return self.given

    def task(self) -> SinkTask:
        return self.place


def write_as(log: Log, checkpoint: Path, epoch: int, number: int, numbers: range) -> None:
    """What Spark has a task of a batch do, with rows that are told apart by their numbers."""
    schema = StructType([StructField("n", IntegerType()), StructField("k", StringType())])
    batch = pa.record_batch({"n": pa.array(numbers, pa.int32()), "k": [f"k{n}" for n in numbers]})
    write_batch(log, checkpoint, epoch, number, schema=schema, batch=batch)


def write_batch(
    log: Log,
    checkpoint: Path,
    epoch: int,
    number: int,
    *,
    schema: StructType,
    batch: pa.RecordBatch,
    order: Order | None = None,
) -> None:
    """The same with any rows, and with the `order` that an application gives."""
    (checkpoint / "offsets").mkdir(parents=True, exist_ok=True)
    (checkpoint / "metadata").write_text('{"id":"q"}')
    (checkpoint / "offsets" / str(epoch)).write_text(f'v1\n{{}}\n{{"end":{epoch}}}')
    _TaskWriter.given, _TaskWriter.place = log, SinkTask("run", epoch, number)
    options = {"log": log.url, "topic": "b", "stage": "s", "checkpointLocation": str(checkpoint)}
    writer = _TaskWriter(options if order is None else {**options, "order": order}, schema)
    writer.commit([writer.write(iter([batch]))], epoch)


def run(url: str, checkpoint: Path) -> None:
    """Every batch that the checkpoint does not know to be done, task by task."""
    done = checkpoint / "commits"
    done.mkdir(parents=True, exist_ok=True)
    with hw.open_log(url) as log:
        for epoch in range(EPOCHS):
            if (done / str(epoch)).exists():
                continue
            for number in range(TASKS):
                first = (epoch * TASKS + number) * TASK_EVENTS
                write_as(log, checkpoint, epoch, number, range(first, first + TASK_EVENTS))
            (done / str(epoch)).touch()


def die_at(nth: int, when: str) -> None:
    """Ends this process with SIGKILL at a transaction, before or after it is committed."""
    ask = Cluster.ask
    commits = 0

    def counted(self: Cluster, question: Callable[[float], Any], what: str) -> Any:
        nonlocal commits
        commits += what == "commit a transaction"
        is_last = what == "commit a transaction" and commits == nth
        if is_last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = ask(self, question, what)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(Cluster, "ask", counted)  # noqa: B010 - a method is replaced


def life(url: str, checkpoint: Path, death: str) -> int:
    """One process, which knows how to die; returns how it ended."""
    pid = os.fork()
    if pid == 0:
        if death:
            nth, _, when = death.partition(":")
            die_at(int(nth), when)
        run(url, checkpoint)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    for death in [*sys.argv[3:], ""]:
        print(life(sys.argv[1], Path(sys.argv[2]), death), flush=True)
