"""Event time in DataFrames: which rows come too late, and how far time has come.

`_late` says of a row whether its time lies more than the lateness before the greatest time that its own partition had reached before
it. `_watermark` is the same for all rows of a batch: the time that no row which is not late can lie before any more, the least of all
partitions. Both come from what the log keeps with the events, so they are the same however batches are cut.

Spark's own watermark is made of the greatest time in any partition: a partition that is behind loses rows by it, others when batches are
cut another way, and one clock that runs ahead makes everything late. `with_time` gives Spark ours instead. Spark takes the greatest
value of a column for its watermark, and knows times by a mark in the metadata of theirs: here the column is `_watermark`, and the mark is
put on the event time. What is late is taken out before, so whatever windows, joins and our own operators do with the rest, they
never drop a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.log.frame import NO_TIME
from headwater.log.lateness import is_late
from headwater.log.store import Chunk

LATE, PASSED = "_late", "_watermark"
FIELDS = {
    LATE: pa.field(LATE, pa.bool_(), nullable=False),
    PASSED: pa.field(PASSED, pa.timestamp("us", tz="UTC"), nullable=False),
}
MARK = "spark.watermarkDelayMs"
"""By this key in a column's metadata Spark knows event times."""


def column_of(name: str, chunk: Chunk, *, watermark: int, lateness_us: int | None) -> pa.Array:
    """`_late` or `_watermark` of the rows of a chunk, of which `running` is known."""
    if name == LATE:
        running = NO_TIME if chunk.running is None else chunk.running
        return pa.array(is_late(chunk, running, lateness_us=lateness_us))
    passed = np.full(
        chunk.batch.num_rows, max(watermark, 0)
    )  # nothing is before Spark's first watermark, which is 1970
    return pa.array(passed).cast(FIELDS[PASSED].type)


def without_late(frame: DataFrame) -> DataFrame:
    """The rows that are not late, where that is known."""
    return frame.where(~F.col(LATE)).drop(LATE) if LATE in frame.columns else frame


def with_time(frame: DataFrame, time: str, *, lateness_us: int, count_as: str) -> DataFrame:
    """A stream with `_watermark`, and `_late` perhaps, as Spark's stateful operators want it: without both, and without what is late.

    How many rows that is stands in the query's progress, under `count_as`.
    """
    if LATE in frame.columns:
        frame = frame.observe(count_as, F.count_if(LATE).alias("rows"))
    kept = without_late(frame).withWatermark(PASSED, "0 seconds").drop(PASSED)
    columns: list[Any] = [F.col(f"`{name}`") for name in kept.columns if name != time]
    marked = F.col(f"`{time}`").alias(time, metadata={MARK: lateness_us // 1000})
    columns.insert(kept.columns.index(time), marked)
    return kept.select(*columns)
