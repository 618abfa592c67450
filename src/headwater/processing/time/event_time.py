"""Event time in DataFrames: which rows come too late, and how far time has come.

`_late` says of a row whether its time lies more than the lateness before the greatest time that its own partition had reached before
it; in a stage that works by time a row without one counts as late, too. `_reached` is that greatest time with the row. `_watermark`
is the same for all rows of a batch: the time that no row which is not late can lie before any more, the least of all partitions. All
come from what the log keeps with the events, so they are the same however batches are cut.

A row that the watermark of the batch before has passed is late, too. No partition gives one that is not late by itself, except where the
topic got another lateness, or where nobody could write to the log that time has passed an empty partition (see `watermark`). Whatever
works by event time would drop such a row, so it is left out and counted here like any other.

Spark's own watermark is made of the greatest time in any partition: a partition that is behind loses rows by it, others when batches are
cut another way, and one clock that runs ahead makes everything late. `with_time` gives Spark ours instead. Spark takes the greatest
value of a column for its watermark, and knows times by a mark in the metadata of theirs: here the column is `_watermark`, and the mark is
put on the event time. What is late is taken out before, so whatever windows, joins and our own operators do with the rest, they
never drop a row.

Spark's watermark begins in 1970, and cannot be earlier: its windows drop what is before 1970, its joins what is at its first moment as
well. So in a stage with such (`Rule.until`) these rows are late: left out before, counted and kept as others. Our own operators take any
time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from headwater.log.port.chunk import Chunk
from headwater.log.port.lateness import is_late, maxima, times_in
from headwater.model.clock import NO_TIME

LATE, REACHED, BATCH_WATERMARK = "_late", "_reached", "_watermark"
FIELDS = {
    LATE: pa.field(LATE, pa.bool_()),
    REACHED: pa.field(REACHED, pa.timestamp("us", tz="UTC")),
    BATCH_WATERMARK: pa.field(BATCH_WATERMARK, pa.timestamp("us", tz="UTC")),
}
_WIDEST = 16
"""So many bytes has a value of the widest type, a decimal."""

MARK = "spark.watermarkDelayMs"
"""By this key in a column's metadata Spark knows event times."""


class LatenessRule(NamedTuple):
    """What is late, in µs: by another lateness than the topic's; whatever has the time `until` or an earlier one; and where windows of
    a length are given, what lies in one that has ended, instead of what itself lies too far behind."""

    lateness_us: int | None = None
    until: int | None = None
    window_us: int | None = None

    def late(self, chunk: Chunk, running: int) -> Any:
        """Which events of a chunk are late, when `running` was the greatest time before it."""
        late = is_late(chunk, running, lateness_us=self.lateness_us, window_us=self.window_us)
        return late if self.until is None else late | (times_in(chunk) <= self.until)


def column_of(name: str, chunk: Chunk, *, watermark: int, rule: LatenessRule, passed: int = NO_TIME) -> pa.Array:
    """A column of `FIELDS` for the rows of a chunk, of which `running` is known; `passed` is the watermark before their batch."""
    running = NO_TIME if chunk.running is None else chunk.running
    if name == LATE:
        if passed != NO_TIME:
            allowed = chunk.topic.lateness_us if rule.lateness_us is None else rule.lateness_us
            running = max(running, passed + allowed + 1)
        return pa.array(rule.late(chunk, running))
    if name == REACHED:
        reached = maxima(chunk, running)
        return pa.array(reached, mask=reached == NO_TIME).cast(FIELDS[REACHED].type)
    return _moments(watermark, chunk.batch.num_rows)


def watermark_row(schema: pa.Schema, watermark: int) -> pa.RecordBatch:
    """A row that is no event and only tells the watermark: of a batch in which nothing but time has gone on."""
    columns = [_moments(watermark, 1) if field.name == BATCH_WATERMARK else _nothing(field) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def may_be_null(field: pa.Field) -> pa.Field:
    """A column as rows have it among which there may be such a one: one with elements of its own can be null then."""
    return field.with_nullable(field.nullable or pa.types.is_nested(field.type))


def without_late(frame: DataFrame, time: str | None) -> DataFrame:
    """The rows of a DataFrame that is no stream without those that are late, where that is known."""
    return frame.where(~_too_late(time)).drop(LATE) if time is not None and LATE in frame.columns else frame


def only_late(frame: DataFrame, time: str | None) -> DataFrame:
    """The late rows of a stream; none of one that has no event time."""
    return frame.where(F.lit(False)) if time is None else frame.where(_too_late(time)).drop(LATE)


def with_time(frame: DataFrame, time: str, *, lateness_us: int, count_as: str | None, drops: bool = True) -> DataFrame:
    """A stream with `_late` and `_watermark` as Spark's stateful operators want it: without both, and without what is late.

    How many rows that is stands in the query's progress, under `count_as`; without that whoever reads them tells it (see `late_rows`).
    With `drops=False` late rows stay.
    """
    late = _too_late(time) if drops else F.col(LATE)
    passes = ~late if drops else F.col(LATE).isNotNull()
    frame = frame.withWatermark(BATCH_WATERMARK, "0 seconds")
    if count_as is not None:
        frame = frame.observe(count_as, F.count_if(late).alias("rows"))
    kept = frame.where(passes.eqNullSafe(_always())).drop(LATE, BATCH_WATERMARK)
    columns: list[Any] = [F.col(f"`{name}`") for name in kept.columns if name != time]
    marked = F.col(f"`{time}`").alias(time, metadata={MARK: lateness_us // 1000})
    columns.insert(kept.columns.index(time), marked)
    return kept.select(*columns)


def late_among(rows: pa.RecordBatch, time: str | None) -> int:
    """How many of some rows with `_late` are late, or have no event time."""
    return pc.sum(_late_of(rows, time)).as_py() or 0


def leave_out_late(rows: pa.Table, time: str) -> tuple[pa.Table, int]:
    """Rows with `_late` where they are read, without those that are late or have no event time; and how many those are."""
    late = _late_of(rows, time)
    count = pc.sum(late).as_py() or 0
    return rows.filter(pc.invert(late)) if count else rows, count


def _late_of(rows: pa.Table | pa.RecordBatch, time: str | None) -> Any:
    """For each of some rows with `_late` whether it is late, or has no event time."""
    late = rows.column(LATE)
    if time is not None and time in rows.schema.names and rows.column(time).null_count:
        late = pc.or_(late, pc.is_null(rows.column(time)))
    return late


def _too_late(time: str) -> Column:
    """Whether a row is late, or has no event time at all: no window or watermark has a place for it. Null of what is no event."""
    return F.col(LATE) | (F.col(LATE).isNotNull() & F.col(f"`{time}`").isNull())


def _always() -> Column:
    """True, and nothing that Spark could know before: below a watermark it moves conditions, this one's and those of the stage's function,
    and that would be the watermark of the rows that are let through; but neither moves one that it cannot know, nor another past it."""
    return F.spark_partition_id() >= 0


def _nothing(field: pa.Field) -> pa.Array:
    """What a column has in a row that is no event."""
    if field.nullable:
        return pa.nulls(1, field.type)
    zeros = pa.py_buffer(bytes(_WIDEST))
    is_long = pa.types.is_string(field.type) or pa.types.is_binary(field.type)
    return pa.Array.from_buffers(field.type, 1, [None, zeros, zeros] if is_long else [None, zeros])


def _moments(watermark: int, count: int) -> pa.Array:
    """The watermark, so many times; where Spark's begins, in 1970, while there is none, or one before that."""
    return pa.array(np.full(count, max(watermark, 0))).cast(FIELDS[BATCH_WATERMARK].type)
