"""A combined input: rows of an operator behind a shuffle that become fewer where they are read.

Many operators can begin with any few of their rows, whatever key these have and whatever came before: count them, or keep the best. What
that leaves is mostly a small part, and only that is carried into the JVM, shuffled and carried out again. Nothing is remembered here, so a
source that combines has the same offsets as one that does not, and a query can go on with either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.types import StructType

from headwater.processing.operators.operator import Combining
from headwater.processing.source.operator_input import OperatorInput
from headwater.processing.source.range_reader import OffsetRange
from headwater.processing.spark.types import to_spark

COMBINED_ROWS = 1 << 20
"""So many rows are combined at once: of more there would be fewer left, and all of them are in memory."""
BATCH_ROWS = 65_536


class Combiner(NamedTuple):
    """An operator, of which a source does the first step."""

    operator: Combining
    side: OperatorInput

    @property
    def sides(self) -> Sequence[OperatorInput]:
        """What is read."""
        return (self.side,)

    @property
    def gives(self) -> StructType:
        """The DataFrame that the source gives."""
        return to_spark(self.operator.combined)

    @property
    def has_time(self) -> bool:
        """Whether the stage works by event time."""
        return self.side.time is not None

    def give(
        self, ranges: Sequence[OffsetRange], read: Callable[[OffsetRange], Iterable[pa.RecordBatch]], schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        """What is left of the rows of ranges, as `schema` has it."""
        for wanted in ranges:
            late = 0
            for some in _pieces(read(wanted)):
                rows, count = self.side.rows(some)
                left = self.operator.combine(pa.table(self.side.named(rows))).select(schema.names).cast(schema)
                yield from left.combine_chunks().to_batches(max_chunksize=BATCH_ROWS)
                late += count
            if late:
                self.side.tell(wanted, late)


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    waiting, rows = list[pa.RecordBatch](), 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= COMBINED_ROWS:
            yield waiting
            waiting, rows = [], 0
    if waiting:
        yield waiting
