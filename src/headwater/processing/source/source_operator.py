"""A fused operator: one that works where the events of its topic are read, before any row is Spark's.

A topic is partitioned by its key, so all events of a key are read by one task anyway. Where that key is (part of) the operator's, the task
that reads a partition also has its state: rows are neither carried into the JVM, nor shuffled, nor carried out again. `fusion` says when
that is sound; this module is what the tasks do.

A state partition stands for each partition that the topic was created with, its **root**. Partitions that were added later have the keys of
one root each (see `headwater.log.port.split`), so their ranges go to the task of that root. Each key that is read is checked to belong
there: a topic that was copied from elsewhere may have been partitioned by other rules, and would give wrong results in silence.

An operator with several inputs, each a topic of its own (its **sides**), has one source that reads them all. They are partitioned alike, so
what belongs together is in the partitions of one root.

In a stage that works by event time, late rows are left out where they are read, and the watermarks are those in the source's offsets, of
the topic that is furthest behind: the operator sees, batch by batch, what it would see behind Spark.

Versions of the state are numbered by the source's own offsets, which Spark writes into the checkpoint before a batch: `.version` grows
by one with every batch. So a batch that is run again, in whatever process, finds the same version before it and writes the same one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from headwater.log.arrow.placement import key_bytes, partitions_of
from headwater.model.clock import NO_TIME
from headwater.model.errors import Unsupported
from headwater.processing.checkpoint.marker import query_of
from headwater.processing.checkpoint.offsets import VERSION, WATERMARK, Offsets
from headwater.processing.operators.grouping import distinct, whole
from headwater.processing.operators.operator import Operator, Time, left_out_by
from headwater.processing.source.operator_input import OperatorInput
from headwater.processing.source.range_reader import OffsetRange
from headwater.processing.spark.hashing import hashes_of
from headwater.processing.spark.types import to_spark
from headwater.processing.state.sorted_runs import H1, H2, NUMBER, check_fits
from headwater.processing.state.state import StateStore
from headwater.processing.time.late_rows import LateRows, inside

BATCH_ROWS = 65_536
SYNCED_AT_ONCE_MAX = 4
"""So many states of a batch are waited for at the same time: the disk takes about as long for them as for one."""

Read = Callable[[str, Sequence[OffsetRange]], Iterable[pa.RecordBatch]]
"""Reads ranges of a topic."""


class Root(InputPartition):
    """What one batch has for the state of one root: ranges of its partitions, perhaps none."""

    def __init__(self, number: int, ranges: Sequence[OffsetRange], version: int, time: Time) -> None:
        self.number, self.ranges, self.version, self.time = number, tuple(ranges), version, time

    def __repr__(self) -> str:
        return f"root {self.number}: {', '.join(map(repr, self.ranges))}"


class Roots(InputPartition):
    """A small batch: all roots, one after the other in one task."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self.roots = tuple(roots)


class FusedOperator(NamedTuple):
    """An operator in a source: what it is, what it reads, and where its state is kept."""

    operator: Operator
    sides: Sequence[OperatorInput]
    """Its inputs."""
    roots: int
    state: str
    uid: str
    fingerprint: str
    checkpoint: str

    @property
    def gives(self) -> StructType:
        """The DataFrame that the source gives."""
        return to_spark(self.operator.schema)

    @property
    def has_time(self) -> bool:
        """Whether the stage works by event time."""
        return any(side.time is not None for side in self.sides)

    def tasks(self, ranges: Sequence[OffsetRange], before: Offsets, after: Offsets) -> list[Root]:
        """The work of a batch: every root, because every one has a version for every batch."""
        time = Time(before.more.get(WATERMARK, NO_TIME), after.more.get(WATERMARK, NO_TIME))
        mine: list[list[OffsetRange]] = [[] for _ in range(self.roots)]
        for wanted in ranges:
            mine[wanted.partition % self.roots].append(wanted)
        return [Root(number, wanted, after.more[VERSION], time) for number, wanted in enumerate(mine)]

    def give(self, roots: Sequence[Root], read: Read, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """What the operator makes of the rows that are read of roots, as `schema` has it; all their states are saved before."""
        given, begun, query = list[pa.Table](), list[Callable[[], None]](), query_of(self.checkpoint)
        sides = [self._inputs(side, roots, read) for side in self.sides]
        for root, *inputs in zip(roots, *sides, strict=True):
            check_fits(inputs)
            result, finish = self._worked(root, inputs, query)
            given.append(result.cast(schema))
            begun.append(finish)
        # Threads only wait: where they compute beside this one, each takes the interpreter from the other for milliseconds.
        saved = [_threads(os.getpid()).submit(finish) for finish in begun]
        wait(saved)  # all of them: whoever runs the batch again must not meet one of this time
        for each in saved:
            each.result()
        yield from pa.concat_tables(given).combine_chunks().to_batches(max_chunksize=BATCH_ROWS)

    def _inputs(self, side: OperatorInput, roots: Sequence[Root], read: Read) -> list[pa.Table]:
        """For each root what the operator is given of one input. Keys of all roots are hashed at once."""
        tables = list[pa.Table]()
        for root in roots:
            mine = [wanted for wanted in root.ranges if wanted.topic == side.topic]
            rows, late = side.rows(read(side.topic, mine))
            if late:
                side.tell(mine[0], late)
            tables.append(rows)
        counts = [rows.num_rows for rows in tables]
        whole = pa.concat_tables(tables)
        numbers = np.repeat([root.number for root in roots], counts) if len(roots) > 1 else None
        table = pa.table({**side.named(whole), **self._hashed(side, whole, numbers, roots)})
        return [table.slice(end - count, count) for count, end in zip(counts, np.cumsum(counts).tolist(), strict=True)]

    def _worked(self, root: Root, inputs: Sequence[pa.Table], query: str) -> tuple[pa.Table, Callable[[], None]]:
        """What a batch comes to in one root; its state is written, and saved when what stands beside the result is called."""
        store = StateStore(
            self.state, uid=self.uid, query=query, fingerprint=self.fingerprint,
            partition=root.number, partitions=self.roots, specs=self.operator.tables, by="topic",
        )  # fmt: skip
        state, until = store.load(root.version - 1), root.time.until
        result = self.operator.process(state, inputs, root.time).select(self.operator.schema.names)
        self._tell(root, left_out_by(self.operator, inputs, root.time))
        return result, store.begin_save(state, root.version, watermark=until if until > NO_TIME else None)

    def _tell(self, root: Root, left_out: int) -> None:
        """So many rows of a root the operator has left out."""
        folder = self.sides[0].late_rows
        if left_out and folder is not None:
            first = next(wanted for wanted in root.ranges if wanted.topic == self.sides[0].topic)
            LateRows(folder).tell((inside(self.uid), first.partition), first.start, first.end, left_out)

    def _hashed(self, side: OperatorInput, rows: pa.Table, numbers: Any, roots: Sequence[Root]) -> dict[str, pa.Array]:
        """The hashes of each row's key; if that is a single column, each value is hashed once, and keys are numbered."""
        columns = [whole(rows.column(name)) for name in side.key]
        values, code = distinct(columns[side.key.index(side.placed_by)])
        self._check_placed(side, values, code, numbers, roots)
        if len(columns) > 1:
            return {name: pa.array(each) for name, each in zip((H1, H2), hashes_of(columns), strict=True)}
        h1, h2 = hashes_of([values])
        order = np.lexsort((h2, h1))
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(len(order))
        return {H1: pa.array(h1[code]), H2: pa.array(h2[code]), NUMBER: pa.array(number[code])}

    def _check_placed(
        self, side: OperatorInput, values: pa.Array, code: Any, numbers: Any, roots: Sequence[Root]
    ) -> None:
        """`numbers` are the roots that rows were read in; of a single root each key is looked at once."""
        placed = partitions_of(key_bytes(values), self.roots)
        is_one = numbers is None
        wrong = np.flatnonzero(placed != roots[0].number if is_one else placed[code] != numbers)
        if len(wrong):
            key = values[int(wrong[0]) if is_one else int(code[wrong[0]])]
            raise Unsupported(
                f"The event with {side.placed_by}={key.as_py()!r} is in a partition of topic {side.topic!r} where that key "
                f"does not belong, so operator {self.uid!r} cannot run inside the source.",
                advice="The topic was copied from a log that places keys by other rules. Have a stage write it into a topic "
                "of this log, with the same key, and read that.",
            )


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """What waits for the disk, made once in each process."""
    return ThreadPoolExecutor(SYNCED_AT_ONCE_MAX)
