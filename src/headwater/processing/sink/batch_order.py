"""Weaving: in which order the rows of a batch are appended to the topic that a stage writes.

The tasks of a batch read one partition each, and each gives what it read from the oldest row to the newest. Appended one task after the
other, a backlog would reach its newest time with the first of them, and everything of the others would be late for whoever reads the
topic. So rows are appended in the order in which event time went on, as if the tasks had written side by side:

- `tasks`: a row comes where its own task had come in time. What one task gives keeps its order, late rows stay late, and no row that was
  on time where it was read is late where it is written;
- `keys`: the same of each key of a task, for functions of users that give their rows key by key. Their key need not be the topic's, so
  the order of a key is kept only as far as the topic's lateness allows: a row that would be late comes where its own time belongs;
- `times`: by time alone, for results in which rows have no other order: those of operators, which give rows by the hash of their own
  key, windows and joins of Spark's own, and whatever was shuffled. Operators that work by time are given no late rows.

In `keys` and `times` no row of a batch is late by another row of the batch, whatever the topic's key and partitions: a row is never
appended after one whose time is more than the lateness ahead of its own.

Times further ahead of now than the topic's `future_max` move nothing, as in the log. Rows of a topic without an event time stay where
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.port.topic import Topic
from headwater.log.port.write import Write
from headwater.model.clock import NO_TIME

Order = Literal["tasks", "keys", "times"]
Array = Any
"""A NumPy array."""

PIECE_ROWS = 65_536
UNORDERED = {"Aggregate", "Join", "Deduplicate", "DeduplicateWithinWatermark", "Distinct"}
"""What of Spark's own gives rows in the order of its state's files, or of a hash."""

Keep = Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]
"""Takes batches as they are made, and gives them again when all are made: held in memory, or in a file."""


def order_of(stateful: Sequence[str], *, has_operators: bool, is_shuffled: bool = False) -> Order:
    """How the result of a stage is ordered, by what keeps state in it, and whether Spark shuffles rows of several tasks into one."""
    if has_operators or (is_shuffled and not stateful):
        return "times"
    if not stateful:
        return "tasks"
    return "times" if set(stateful) <= UNORDERED else "keys"


class BatchOrder(msgspec.Struct, frozen=True):
    """The order of what is appended to a topic by a stage, at the time `now_us`."""

    topic: Topic
    order: Order
    now_us: int

    def rows(self, rows: pa.Table, task: Array) -> pa.Table:
        """The rows of a batch in their order; `task` numbers the tasks that gave them."""
        if self.topic.time not in rows.column_names or not rows.num_rows:
            return rows
        at = self._places(rows.to_batches(), task)
        return rows if _is_sorted(at) else rows.take(pa.array(np.argsort(at, kind="stable")))

    def writes(self, tasks: Iterable[Iterable[Write]], keep: Keep) -> list[Write]:
        """What the tasks of a batch give, in its order in each partition."""
        parts: dict[int, list[tuple[int, pa.RecordBatch]]] = {}
        for number, writes in enumerate(tasks):
            for write in writes:
                batch = write.batch if write.indices is None else write.batch.take(pa.array(write.indices))
                parts.setdefault(write.partition, []).append((number, batch))
        return [
            Write(self.topic, partition, batch)
            for partition, part in sorted(parts.items())
            for batch in self._part(part, keep)
        ]

    def _part(self, part: Sequence[tuple[int, pa.RecordBatch]], keep: Keep) -> Iterable[pa.RecordBatch]:
        """The rows of one partition."""
        batches = [batch for _, batch in part]
        if self.topic.time is None:
            return batches
        at = self._places(batches, np.repeat([number for number, _ in part], [batch.num_rows for batch in batches]))
        if _is_sorted(at):
            return batches
        whole, by = pa.concat_batches(batches), np.argsort(at, kind="stable")
        return keep(whole.take(pa.array(by[start : start + PIECE_ROWS])) for start in range(0, len(by), PIECE_ROWS))

    def _places(self, batches: Sequence[pa.RecordBatch], task: Array) -> Array:
        times = np.concatenate([_times(batch.column(self.topic.time)) for batch in batches])
        if self.order == "times" or (self.order == "keys" and self.topic.key is None):
            return times
        times = np.where(times <= self.now_us + self.topic.future_us, times, NO_TIME)
        if self.order == "tasks":
            return places(times, task)
        keys = pa.chunked_array([batch.column(self.topic.key) for batch in batches])
        reached = places(times, task, key=keys)
        is_late = (times != NO_TIME) & (times < np.where(reached == NO_TIME, 0, reached) - self.topic.lateness_us)
        return np.where(is_late, times, reached)


def places(times: Array, task: Array, *, key: pa.ChunkedArray | None = None) -> Array:
    """Where each row's task, or each key of it, had come in time with the row: rows are sorted by it, stably.

    NO_TIME among the times is of rows that have none that counts. A task's rows stand together.
    """
    if not len(times):
        return times
    if key is None:
        return np.concatenate(
            [np.maximum.accumulate(run) for run in np.split(times, np.flatnonzero(np.diff(task)) + 1)]
        )
    keys = np.asarray(pc.dictionary_encode(key, null_encoding="encode").combine_chunks().indices)
    group = np.unique(np.column_stack([task, keys]), axis=0, return_inverse=True)[1].ravel().astype(np.int64)
    by_group = np.argsort(group, kind="stable")
    known, rank = np.unique(times, return_inverse=True)
    greatest = np.maximum.accumulate((group * len(known) + rank.ravel())[by_group]) % len(known)
    found = np.empty_like(times)
    found[by_group] = known[greatest]
    return found


def _times(column: pa.Array) -> Array:
    """Event times, in µs; NO_TIME of rows that have none."""
    return np.asarray(column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).fill_null(NO_TIME))


def _is_sorted(at: Array) -> bool:
    return bool((at[1:] >= at[:-1]).all())
