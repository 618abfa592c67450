"""Staging: what the tasks of a batch leave for the driver, which appends all of it as one.

A task puts its rows into the shape and the partitions of their topic and writes them, as one Arrow IPC stream, to a file in the
log's folder; little of it travels inside the commit message instead. The driver maps the files and appends them with the batch's
marker in one transaction: until then nothing of them is visible, and whatever a dead attempt leaves is swept.

    staged/<stage>/<number>/<any>.arrow   one task's rows, of the holder with that fencing number
    staged/<stage>/runs                   which run of the query has which number (JSON), the newest last
    staged/<stage>/lock                   lock of `runs`
    staged/.batch-<any>/0/<any>.arrow      the same of a batch job, which has no stage

Invariants:
- a run of a query takes its number when its first task starts, and once: whoever runs the query anew gets a greater one, so a
  task or a driver of an earlier run, however late it wakes, can do nothing (`Fenced`);
- whoever takes a number sweeps what smaller numbers left; a commit sweeps everything of its own;
- staged files are not synced: they count only as copied into the log, and a machine that stops stages the batch again.

Thread-safety: functions only; `runs` is changed under its lock.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from headwater.log.arrow.placement import place
from headwater.log.arrow.rows import check_size, to_batch
from headwater.log.clients.stage import Stage
from headwater.log.log import Log
from headwater.log.port.stage import StageCommit
from headwater.log.port.topic import Topic
from headwater.log.port.write import Write
from headwater.model.errors import Fenced, Unsupported
from headwater.model.marker import Marker
from headwater.processing.sink.batch_order import BatchOrder, Order

INLINE_BYTES_MAX = 256 << 10
PIECE_ROWS = 65_536
RUNS_MAX = 1000
ORPHAN_S = 86_400.0
BATCH = ".batch-"


@dataclass
class StagedRows(WriterCommitMessage):
    """What one task staged: the partition of each batch in its stream, and for which state of the topic that was right."""

    number: int
    topic_id: str
    schema_id: int
    partitions: int
    placed: list[int]
    data: bytes | None = None
    path: str | None = None


def number_of_run(log: Log, stage: str, run: str) -> int:
    """The fencing number of a run of a query, taken by whoever asks first; `Fenced` where a later run has begun."""
    folder = staged_folder(log, stage)
    with _locked(folder):
        runs = _runs(folder)
        if run in runs:
            if next(reversed(runs)) != run:
                raise Fenced(
                    f"Stage {stage!r} now belongs to another run of its query.",
                    advice="Nothing was written. Stop this one.",
                )
            return runs[run]
        runs[run] = number = take_number(log, stage)
        kept = dict(list(runs.items())[-RUNS_MAX:])
        fresh = folder / "runs.new"
        fresh.write_bytes(msgspec.json.encode(kept))
        fresh.rename(folder / "runs")
        return number


def newest_number(log: Log, stage: str) -> int:
    """The number in force; for a batch without a task, which cannot say to which run it belongs and has nothing to write."""
    folder = staged_folder(log, stage)
    with _locked(folder):
        in_force = log.store.stage_state(stage).number
        return in_force if in_force in _runs(folder).values() else take_number(log, stage)


def take_number(log: Log, stage: str) -> int:
    """A new fencing number, with what the holders before it have staged swept away."""
    number = log.stage(stage).number
    sweep(log, stage, number - 1)
    return number


def stage_rows(log: Log, stage: str, number: int, topic: Topic, batches: Iterable[pa.RecordBatch]) -> StagedRows:
    """Stages the rows of one task."""
    staged = StagedRows(number, topic.id, topic.schema_id, topic.partitions, [])
    pieces: list[tuple[int, pa.RecordBatch]] = []
    size, writer = 0, None
    try:
        for partition, piece in _placed(batches, topic, sticky=number + os.getpid()):
            staged.placed.append(partition)
            if writer is None:
                pieces.append((partition, piece))
                size += piece.nbytes
                if size <= INLINE_BYTES_MAX:
                    continue
                staged.path = _new_file(log, stage, number)
                writer = pa.ipc.new_stream(staged.path, piece.schema)
                for _, held in pieces:
                    writer.write_batch(held)
            else:
                writer.write_batch(piece)
    finally:
        if writer is not None:
            writer.close()
    if pieces and writer is None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, pieces[0][1].schema) as stream:
            for _, piece in pieces:
                stream.write_batch(piece)
        staged.data = sink.getvalue().to_pybytes()
    return staged


def commit_staged(
    log: Log, stage: Stage, topic: Topic, marker: Marker, messages: Sequence[StagedRows], *, order: Order | None = None
) -> StageCommit:
    """Appends what the tasks of a batch have staged with the batch's marker: once; with `order` woven by it."""
    tasks = (writes_of(log, topic, staged) for staged in messages)
    if order is None:
        return stage.commit_writes(marker, [write for writes in tasks for write in writes])
    weaving = BatchOrder(topic, order, now_us=log.clock())
    keep = partial(_kept_in_file, log, stage) if any(staged.path for staged in messages) else list
    return stage.commit_writes(marker, weaving.writes(tasks, keep))


def write_task(
    log: Log,
    stage: str,
    topic: str,
    marker: Marker,
    batches: Iterable[pa.RecordBatch],
    *,
    order: Order | None = None,
) -> WriterCommitMessage:
    """On Kafka: commits the rows of one task under a stage of the task's own, with `order` woven by it.

    Opening it fences whoever wrote as this task before; only then is its marker looked at. A worker that wrote as this task in the
    batch before holds it already, and nobody came in between. The rows are all fetched also when
    they are there already: operators before this one in the same task keep their state only by that. A task without rows
    leaves its epoch out.
    """
    holder = Stage(log.appender, stage, number=log.store.held_stage(stage), gaps=True)
    fetched = [batch for batch in batches if batch.num_rows]
    if fetched:
        rows = pa.Table.from_batches(fetched)
        if order is not None:
            rows = BatchOrder(log.topic(topic), order, now_us=log.clock()).rows(rows, np.zeros(rows.num_rows, np.int64))
        holder.commit(marker, [(topic, rows)])
    return WriterCommitMessage()


def writes_of(log: Log, topic: Topic, staged: StagedRows) -> Iterator[Write]:
    """What a task staged, as it is appended; placed anew where the topic has changed since."""
    if staged.path is None and staged.data is None:
        return
    try:
        source = pa.memory_map(staged.path) if staged.path else pa.py_buffer(staged.data)
    except FileNotFoundError:
        raise Fenced(
            f"The files that the tasks staged for topic {topic.name!r} were removed: another run of the query has begun.",
            advice="Nothing was written. Stop this one.",
        ) from None
    batches = list(pa.ipc.open_stream(source))
    if (staged.topic_id, staged.schema_id, staged.partitions) == (topic.id, topic.schema_id, topic.partitions):
        for partition, batch in zip(staged.placed, batches, strict=True):
            yield Write(topic, partition, batch)
    else:
        for batch in batches:
            yield from log.appender.place(topic.name, batch)


def _kept_in_file(log: Log, stage: Stage, batches: Iterator[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    """Batches that come from a file as those of the tasks do: a large batch is not held in memory when it is put in order."""
    path = _new_file(log, stage.name, stage.number)
    first = next(batches)
    with pa.ipc.new_stream(path, first.schema) as writer:
        for batch in itertools.chain([first], batches):
            writer.write_batch(batch)
    return pa.ipc.open_stream(pa.memory_map(path))


def _new_file(log: Log, stage: str, number: int) -> str:
    folder = staged_folder(log, stage) / str(number)
    folder.mkdir(exist_ok=True)
    return str(folder / f"{uuid.uuid4().hex}.arrow")


def sweep(log: Log, stage: str, number: int) -> None:
    """Removes everything that the holders of a number, and of those before it, have staged."""
    for folder in staged_folder(log, stage).iterdir():
        if folder.name.isdigit() and int(folder.name) <= number:
            shutil.rmtree(folder, ignore_errors=True)


def sweep_batches(log: Log, done: str) -> None:
    """Removes what a batch job has staged, and what others did that ended without a word long ago."""
    for folder in staged_folder(log, done).parent.iterdir():
        if folder.name.startswith(BATCH):
            with suppress(FileNotFoundError):
                if folder.name == done or time.time() - folder.stat().st_mtime > ORPHAN_S:
                    shutil.rmtree(folder, ignore_errors=True)


def remove_staged(messages: Iterable[StagedRows | None]) -> None:
    """Removes the files of some tasks."""
    for staged in messages:
        if staged is not None and staged.path is not None:
            with suppress(FileNotFoundError):
                os.unlink(staged.path)


def can_stage(log: Log) -> bool:
    """Whether tasks can leave their rows for the driver; elsewhere each task writes its own."""
    return log.store.capabilities.folder is not None


def staged_folder(log: Log, stage: str) -> Path:
    """Where a stage's tasks leave their files."""
    if log.store.capabilities.folder is None:
        raise Unsupported(f"{log.url} has no folder in which to stage files.", advice="Use a log in a folder.")
    folder = Path(log.store.capabilities.folder) / "staged" / stage
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _placed(batches: Iterable[pa.RecordBatch], topic: Topic, *, sticky: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows with the topic's columns, in pieces of one partition each that are good to append."""
    waiting: dict[int, list[pa.RecordBatch]] = {}
    rows: dict[int, int] = {}
    for given in batches:
        batch = to_batch(given, topic.schema)
        check_size(batch, topic)
        for partition, indices in place(batch, topic.key, topic.partitions, sticky=sticky).groups():
            part = batch if indices is None else batch.take(pa.array(indices))
            waiting.setdefault(partition, []).append(part)
            rows[partition] = rows.get(partition, 0) + part.num_rows
            if rows[partition] >= PIECE_ROWS:
                yield partition, _one(waiting.pop(partition))
                rows[partition] = 0
    for partition in sorted(waiting):
        yield partition, _one(waiting[partition])


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _runs(folder: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode((folder / "runs").read_bytes(), type=dict[str, int])
    except (FileNotFoundError, msgspec.DecodeError):  # a power loss may tear it; every number from before it is fenced
        return {}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
