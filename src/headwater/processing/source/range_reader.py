"""Reading in a task: one range of offsets of one partition, as Arrow batches that Spark takes as they are.

A Python worker of Spark opens each log once (see `log_cache`) and keeps it for the tasks that follow; a forked worker opens its own. A
batch is the log's own memory, mapped from its files, as long as nothing has to be picked or cast; small ones are joined, since
Spark takes as long for a batch of ten rows as for one of ten thousand.

A range is read up to its end and never further, and the log never changes what it holds: a task that is run again gives the
same rows in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition

from headwater.log.arrow.events import joined, output_schema, to_batch_of
from headwater.log.arrow.table import Newest
from headwater.log.log import Log
from headwater.log.port.chunk import Chunk
from headwater.log.port.lateness import reached_after
from headwater.log.port.topic import Topic
from headwater.model.clock import NO_TIME
from headwater.model.errors import EventsMissed, PositionLost
from headwater.model.schema import DELETED
from headwater.processing.checkpoint.offsets import At
from headwater.processing.source.condition import Condition, Filter
from headwater.processing.source.pushdown import PushedFilter
from headwater.processing.source.topic_subscription import missed
from headwater.processing.spark.types import conform
from headwater.processing.time.event_time import FIELDS, LATE, REACHED, LatenessRule, column_of, late_among
from headwater.processing.time.late_rows import LateRows
from headwater.processing.time.maxima import Maxima

BATCH_ROWS = 65_536
BATCH_ROWS_MIN = 32_768
BATCH_BYTES_MIN = 32 << 20


class OffsetRange(InputPartition):
    """The events of a partition from `start` up to, and not with, `end`; `watermark` is that of their batch, `passed` of the one before."""

    def __init__(
        self,
        topic: Topic,
        partition: int,
        start: int,
        end: int,
        *,
        skips: bool,
        running: int | None = None,
    ) -> None:
        """`skips`: what retention removes before it is read is not missed. `running` is the greatest event time before it, where
        the log does not know that."""
        self.topic, self.topic_id = topic.name, topic.id
        self.partition, self.start, self.end, self.skips = partition, start, end, skips
        self.running = running
        self.has_time = topic.time is not None
        self.watermark = self.passed = NO_TIME

    @property
    def at(self) -> At:
        """Its partition."""
        return self.topic, self.partition

    def part(self, start: int, end: int) -> OffsetRange:
        """A part of it."""
        part = copy.copy(self)
        part.start, part.end = start, end
        return part

    def __repr__(self) -> str:
        return f"{self.topic}/{self.partition} {self.start}..{self.end}"


class OffsetRanges(InputPartition):
    """Small ranges, read by one task."""

    def __init__(self, ranges: Sequence[OffsetRange]) -> None:
        self.ranges = tuple(ranges)

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.ranges))


class WatermarkOnly(InputPartition):
    """No events, only the watermark of a batch in which nothing but time has gone on."""

    def __init__(self, watermark: int) -> None:
        self.watermark = watermark


class TableSnapshot(InputPartition):
    """A whole topic up to `ends`, to be read as a table: the newest row of each key as of an event time."""

    def __init__(self, topic: Topic, ends: Mapping[int, int], *, as_of: int | None) -> None:
        Newest(topic, as_of=as_of)  # refuses a topic without a key, before a task is started
        self.topic, self.topic_id, self.ends, self.as_of = topic.name, topic.id, dict(ends), as_of

    def __repr__(self) -> str:
        return f"{self.topic} as of {self.as_of}"


class RowSelection:
    """What is read of each event: the columns of `schema`, and only of events that the condition picks.

    Deleted events are left out unless `_deleted` is among the columns.
    """

    def __init__(
        self,
        schema: pa.Schema,
        condition: Condition | None,
        where: PushedFilter | None,
        *,
        rule: LatenessRule | None = None,
        maxima: Maxima | None = None,
        late_rows: str | None = None,
    ) -> None:
        """`where` asks columns of `schema`. `rule` says what is late, where that is not the topic's lateness alone; at the end of a range
        `maxima` are told, and in the folder `late_rows` how many rows of it are late."""
        self.schema = schema
        self.late_rows = late_rows
        self._where = where
        self.maxima = maxima
        self._rule = LatenessRule() if rule is None else rule
        self._of_time = [name for name in schema.names if name in FIELDS]
        self._filter = Filter(condition) if condition else None
        self._shows_deleted = DELETED.name in schema.names
        names = [name for name in schema.names if name not in FIELDS]
        self._names = list(dict.fromkeys([*names, *(condition.columns if condition else ())]))
        self._wanted: tuple[Topic, pa.Schema] | None = None

    @property
    def names(self) -> list[str]:
        """The columns that it needs."""
        return self._names

    @property
    def needs_running(self) -> bool:
        """Whether it asks how far event time had come before each chunk."""
        return LATE in self._of_time or REACHED in self._of_time

    def of_chunk(self, chunk: Chunk, *, watermark: int = NO_TIME, passed: int = NO_TIME) -> pa.RecordBatch:
        """What is selected of a chunk, in a batch with this watermark after one in which time had passed so far."""
        if self._wanted is None or self._wanted[0] is not chunk.topic:
            own = chunk.topic.schema
            self._wanted = chunk.topic, own if self._names == own.names else output_schema(chunk.topic, self._names)
        batch = to_batch_of(chunk, self._wanted[1])
        for name in self._of_time:
            column = column_of(name, chunk, watermark=watermark, passed=passed, rule=self._rule)
            fields = pa.schema([*batch.schema, FIELDS[name]])
            batch = pa.RecordBatch.from_arrays([*batch.columns, column], schema=fields)
        if not self._shows_deleted and DELETED.name in chunk.batch.schema.names:
            batch = batch.filter(pc.invert(chunk.batch.column(DELETED.name).fill_null(False)))
        return self.of_batch(batch, chunk.topic.name)

    def of_batch(self, batch: pa.RecordBatch, topic: str) -> pa.RecordBatch:
        """What is selected of rows that have the columns of `names`."""
        if self._where is not None and batch.num_rows:
            batch = batch.filter(self._where.mask(batch))
        if self._filter is not None and batch.num_rows:
            batch = batch.filter(self._filter.mask(batch))
        return conform(batch, self.schema, topic=topic)


def read_ranges(ranges: Iterable[OffsetRange], log: Log, selection: RowSelection) -> Iterator[pa.RecordBatch]:
    """The rows of ranges, one after the other."""
    batches = (batch for wanted in ranges for batch in _selected(wanted, log, selection) if batch.num_rows)
    yield from joined(batches, rows_min=BATCH_ROWS_MIN, bytes_min=BATCH_BYTES_MIN)


def _selected(wanted: OffsetRange, log: Log, selection: RowSelection) -> Iterator[pa.RecordBatch]:
    late, late_rows = 0, selection.late_rows
    for chunk in _with_running(wanted, log, selection.maxima) if selection.needs_running else _chunks(wanted, log):
        batch = selection.of_chunk(chunk, watermark=wanted.watermark, passed=wanted.passed)
        if late_rows is not None:
            late += late_among(batch, None if DELETED.name in batch.schema.names else chunk.topic.time)
        yield batch
    if late and late_rows is not None:
        LateRows(late_rows).tell(wanted.at, wanted.start, wanted.end, late)


def read_in_time_order(ranges: Iterable[OffsetRange], log: Log, selection: RowSelection) -> Iterator[pa.RecordBatch]:
    """The rows of small ranges in the order in which event time went on in each of them, as if the partitions were one.

    One after the other, a backlog would reach its newest time with the first of them (see `batch_order`). `selection` has `_reached` last.
    """
    batches = list(read_ranges(ranges, log, selection))
    if batches:
        whole = pa.concat_batches(batches)
        reached = np.asarray(whole.column(REACHED).cast(pa.int64()).fill_null(NO_TIME))
        yield whole.select(whole.schema.names[:-1]).take(pa.array(np.argsort(reached, kind="stable")))


def read_snapshot(wanted: TableSnapshot, log: Log, selection: RowSelection) -> Iterator[pa.RecordBatch]:
    """The newest row of each key of a topic."""
    topic = _check_same(log, wanted)
    newest = Newest(topic, as_of=wanted.as_of)
    columns = list(dict.fromkeys([*newest.columns, *selection.names]))
    for batch in log.scan(topic.name, end=wanted.ends, columns=columns):
        newest.add(batch)
    for batch in newest.table(log.store, columns=selection.names).to_batches(max_chunksize=BATCH_ROWS):
        yield selection.of_batch(batch, topic.name)


def _chunks(wanted: OffsetRange, log: Log) -> Iterator[Chunk]:
    _check_same(log, wanted)
    place = wanted.topic, wanted.partition
    cursor = log.store.cursor(*place, offset=wanted.start)
    while cursor.offset < wanted.end:
        try:
            chunks = cursor.read(wanted.end, events_max=BATCH_ROWS)
        except (EventsMissed, PositionLost):
            first = log.store.bounds([wanted.topic])[place].first
            if first <= cursor.offset:
                raise
            if not wanted.skips:
                raise missed(place, cursor.offset, first) from None
            cursor = log.store.cursor(*place, offset=first)
            continue
        yield from chunks


def reached_in(wanted: OffsetRange, log: Log, running: int) -> int:
    """The greatest event time before the end of a range, when `running` was that before its start."""
    for chunk in _chunks(wanted, log):
        running = reached_after(chunk, running)
    return running


def _with_running(wanted: OffsetRange, log: Log, maxima: Maxima | None) -> Iterator[Chunk]:
    """The chunks of a range, cut where heartbeats were, each knowing how far event time had come before it."""
    running = wanted.running
    if running is None:
        running = log.store.reached(wanted.topic, wanted.partition, offset=wanted.start)
    beats = [beat for beat in log.store.heartbeats(wanted.topic, wanted.partition) if beat.offset > wanted.start]
    for whole in _chunks(wanted, log):
        running = max(running, NO_TIME if whole.running is None else whole.running)
        while beats and beats[0].offset < whole.end_offset:
            beat = beats.pop(0)
            if beat.offset > whole.base_offset:
                part, whole = whole.slice(whole.base_offset, beat.offset), whole.slice(beat.offset, whole.end_offset)
                yield msgspec.structs.replace(part, running=running)
                running = reached_after(part, running)
            running = max(running, beat.time)
        yield msgspec.structs.replace(whole, running=running)
        running = reached_after(whole, running)
    if maxima is not None:
        maxima.tell(wanted.at, wanted.end, running)


def _check_same(log: Log, wanted: OffsetRange | TableSnapshot) -> Topic:
    topic = log.topic(wanted.topic)
    if topic.id != wanted.topic_id:
        raise PositionLost(
            f"Topic {wanted.topic!r} was deleted and created again while it was read.",
            advice="Start the query with a new checkpoint, so that it reads the new topic from its beginning.",
        )
    return topic
