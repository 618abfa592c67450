"""A fused operator: one that works where the events of its topic are read, before any row is Spark's.

A topic is partitioned by its key, so all events of a key are read by one task anyway. Where that key is (part of) the operator's, the task
that reads a partition also has its state: rows are neither carried into the JVM, nor shuffled, nor carried out again. `fusion` says when
that is sound; this module is what the tasks do.

A state partition stands for each partition that the topic was created with, its **root**. Partitions that were added later have the keys of
one root each (see `headwater.log.split`), so their ranges go to the task of that root. Each key that is read is checked to belong there: a
topic that was copied from elsewhere may have been partitioned by other rules, and would give wrong results in silence.

In a stage that works by event time, late rows are left out where they are read, by the same `_late` that Spark would filter by, and
the watermarks are those in the source's offsets: the operator sees, batch by batch, what it would see behind Spark. How many rows were
left out is told in a file (see `late_rows`).

Versions of the state are numbered by the source's own offsets, which Spark writes into the checkpoint before a batch: `.version` grows
by one with every batch. So a batch that is run again, in whatever process, finds the same version before it and writes the same one.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from headwater.log.frame import NO_TIME
from headwater.log.placement import key_bytes, partitions_of
from headwater.model.errors import Unsupported
from headwater.processing.event_time import FIELDS, LATE, leave_out_late
from headwater.processing.hashing import hashes_of
from headwater.processing.marker import query_of
from headwater.processing.offsets import VERSION, WATERMARK, Offsets
from headwater.processing.operator import Operator, Time
from headwater.processing.reading import Range
from headwater.processing.runs import H1, H2, NUMBER, check_fits
from headwater.processing.shipping import pickled
from headwater.processing.state import StateStore
from headwater.processing.types import to_spark

BATCH_ROWS = 65_536
SYNCED_AT_ONCE_MAX = 4
"""So many states of a batch are waited for at the same time: the disk takes about as long for them as for one."""


class Root(InputPartition):
    """What one batch has for the state of one root: ranges of its partitions, perhaps none."""

    def __init__(self, number: int, ranges: Sequence[Range], version: int, time: Time) -> None:
        self.number, self.ranges, self.version, self.time = number, tuple(ranges), version, time

    def __repr__(self) -> str:
        return f"root {self.number}: {', '.join(map(repr, self.ranges))}"


class Roots(InputPartition):
    """A small batch: all roots, one after the other in one task."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self.roots = tuple(roots)


class Fused(NamedTuple):
    """An operator in a source: what it is, what it reads, and where its state is kept."""

    operator: Operator
    schema: pa.Schema
    """The operator's input."""
    columns: Sequence[str]
    """For each column of the input, the topic's column that it is."""
    key: Sequence[str]
    """The operator's key, as columns of the topic."""
    placed_by: str
    """The topic's key, one of them."""
    roots: int
    state: str
    uid: str
    fingerprint: str
    checkpoint: str
    time: pa.Field | None = None
    """The topic's event time, where the operator is given no late rows."""

    @property
    def read(self) -> pa.Schema:
        """What is read of the topic."""
        fields = {source: field.with_name(source) for source, field in zip(self.columns, self.schema, strict=True)}
        if self.time is not None:
            fields |= {self.time.name: self.time, LATE: FIELDS[LATE]}
        return pa.schema(list(fields.values()))

    @property
    def gives(self) -> StructType:
        """The DataFrame that the source gives."""
        return to_spark(self.operator.schema)

    def to_option(self) -> str:
        """As an option of a source, which is a text."""
        return base64.b64encode(pickled(self, ())).decode("ascii")

    @classmethod
    def from_option(cls, text: str) -> Fused:
        """What `to_option` gave."""
        found = pickle.loads(base64.b64decode(text))
        assert isinstance(found, cls)
        return found

    def tasks(self, ranges: Sequence[Range], before: Offsets, after: Offsets) -> list[Root]:
        """The work of a batch: every root, because every one has a version for every batch."""
        time = Time(before.more.get(WATERMARK, NO_TIME), after.more.get(WATERMARK, NO_TIME))
        mine: list[list[Range]] = [[] for _ in range(self.roots)]
        for wanted in ranges:
            mine[wanted.partition % self.roots].append(wanted)
        return [Root(number, wanted, after.more[VERSION], time) for number, wanted in enumerate(mine)]

    def give(
        self,
        roots: Sequence[Root],
        read: Callable[[Root], Iterable[pa.RecordBatch]],
        schema: pa.Schema,
        tell: Callable[[Range, int], None],
    ) -> Iterator[pa.RecordBatch]:
        """What the operator makes of the rows that are read of roots, as `schema` has it; all their states are saved before.

        `tell` is told how many rows were late.
        """
        given, begun, query = list[pa.Table](), list[Callable[[], None]](), query_of(self.checkpoint)
        for root, table, late in self._inputs(roots, read):
            result, finish = self._worked(root, table, query)
            given.append(result.cast(schema))
            if late:
                tell(root.ranges[0], late)
            begun.append(finish)
        # Threads only wait: where they compute beside this one, each takes the interpreter from the other for milliseconds.
        saved = [_threads(os.getpid()).submit(finish) for finish in begun]
        wait(saved)  # all of them: whoever runs the batch again must not meet one of this time
        for each in saved:
            each.result()
        yield from pa.concat_tables(given).combine_chunks().to_batches(max_chunksize=BATCH_ROWS)

    def _inputs(
        self, roots: Sequence[Root], read: Callable[[Root], Iterable[pa.RecordBatch]]
    ) -> Iterator[tuple[Root, pa.Table, int]]:
        """For each root the operator's input, and how many rows were left out of it. Keys of all roots are hashed at once."""
        schema, tables, late = self.read, list[pa.Table](), list[int]()
        for root in roots:
            rows, count = pa.Table.from_batches(list(read(root)), schema), 0
            if self.time is not None:
                rows, count = leave_out_late(rows, self.time.name)
            tables.append(rows)
            late.append(count)
        ends = np.cumsum([rows.num_rows for rows in tables])
        whole = pa.concat_tables(tables)
        named = {name: whole.column(source) for name, source in zip(self.schema.names, self.columns, strict=True)}
        numbers = np.repeat([root.number for root in roots], [rows.num_rows for rows in tables])
        table = pa.table({**named, **self._hashed(whole, numbers, roots)})
        for root, rows, count, end in zip(roots, tables, late, ends.tolist(), strict=True):
            mine = table.slice(end - rows.num_rows, rows.num_rows)
            check_fits([mine])
            yield root, mine, count

    def _worked(self, root: Root, table: pa.Table, query: str) -> tuple[pa.Table, Callable[[], None]]:
        """What a batch comes to in one root; its state is written, and saved when what stands beside the result is called."""
        store = StateStore(
            self.state, uid=self.uid, query=query, fingerprint=self.fingerprint,
            partition=root.number, partitions=self.roots, specs=self.operator.tables, by="topic",
        )  # fmt: skip
        state, until = store.load(root.version - 1), root.time.until
        result = self.operator.process(state, [table], root.time).select(self.operator.schema.names)
        return result, store.begin_save(state, root.version, watermark=until if until > NO_TIME else None)

    def _hashed(self, rows: pa.Table, numbers: Any, roots: Sequence[Root]) -> dict[str, pa.Array]:
        """The hashes of each row's key; if that is a single column, each value is hashed once, and keys are numbered."""
        columns = [_whole(rows.column(name)) for name in self.key]
        placed = columns[self.key.index(self.placed_by)].dictionary_encode()
        self._check_placed(placed, numbers, roots)
        if len(columns) > 1:
            return {name: pa.array(each) for name, each in zip((H1, H2), hashes_of(columns), strict=True)}
        h1, h2 = hashes_of([placed.dictionary])
        order = np.lexsort((h2, h1))
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(len(order))
        code = placed.indices.to_numpy()
        return {H1: pa.array(h1[code]), H2: pa.array(h2[code]), NUMBER: pa.array(number[code])}

    def _check_placed(self, keys: pa.DictionaryArray, numbers: Any, roots: Sequence[Root]) -> None:
        """`numbers` are the roots that rows were read in; of a single root each key is looked at once."""
        placed = partitions_of(key_bytes(keys.dictionary), self.roots)
        is_one = len(roots) == 1
        wrong = np.flatnonzero(placed != roots[0].number if is_one else placed[keys.indices.to_numpy()] != numbers)
        if len(wrong):
            key = keys.dictionary[int(wrong[0])] if is_one else keys[int(wrong[0])]
            topic = next(wanted.topic for root in roots for wanted in root.ranges)
            raise Unsupported(
                f"The event with {self.placed_by}={key.as_py()!r} is in a partition of topic {topic!r} where that key "
                f"does not belong, so operator {self.uid!r} cannot run inside the source.",
                advice="The topic was copied from a log that places keys by other rules. Have a stage write it into a topic "
                "of this log, with the same key, and read that.",
            )


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """What waits for the disk, made once in each process."""
    return ThreadPoolExecutor(SYNCED_AT_ONCE_MAX)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)
