"""A table: the newest row of each key of a topic.

In a topic that was split a key's events lie in one partition after the other, each with a higher number; taken in the order of
partitions the last one wins. What retention has removed from such a partition was newer than all that its ancestors have of
its keys, so a row that is left in an ancestor alone is not shown again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.arrow.events import output_schema
from headwater.log.arrow.placement import comparable_keys, key_bytes, partitions_of
from headwater.log.port.store import ReadStore
from headwater.log.port.topic import Topic
from headwater.model.errors import InvalidInput

_MERGE_ROWS = 1 << 18


class Newest:
    """Takes a topic's events in order and keeps the last of each key.

    New rows are gathered and merged when there are as many as rows kept, so the work stays linear and memory is bounded by
    twice the number of keys.
    """

    def __init__(self, topic: Topic, *, as_of: int | None) -> None:
        if topic.key is None:
            raise InvalidInput(
                f"Topic {topic.name!r} has no key, so it has no newest row per key.", advice="Create it with key=…."
            )
        self._topic = topic
        self._as_of = as_of
        self._kept: pa.Table | None = None
        self._new: list[pa.RecordBatch] = []
        self._new_rows = 0

    @property
    def columns(self) -> list[str]:
        """The columns that `add` needs."""
        return [*self._topic.schema.names, "_time", "_deleted", *(["_partition"] if self._topic.splits else [])]

    def add(self, batch: pa.RecordBatch) -> None:
        """The next events."""
        if self._as_of is not None:
            batch = batch.filter(pc.less_equal(batch.column("_time").cast(pa.int64()), self._as_of))
        self._new.append(batch)
        self._new_rows += batch.num_rows
        if self._new_rows >= max(_MERGE_ROWS, self._kept.num_rows if self._kept is not None else 0):
            self._merge()

    def table(self, store: ReadStore, *, columns: Sequence[str] | None = None) -> pa.Table:
        """The newest row of each key that is not deleted, with the topic's own columns, or with others that were added.

        The store is asked what retention has removed up to now, after the last event was added.
        """
        name = self._topic.name
        firsts = {number: bound.first for (_, number), bound in store.bounds([name]).items()}
        topic = store.refresh(name)
        self._merge()
        names = self._topic.schema.names if columns is None else list(columns)
        if self._kept is None:
            return output_schema(self._topic, names).empty_table()
        gone = self._kept.column("_deleted")
        if not self._topic.has_schema:
            gone = pc.or_(gone, self._kept.column("value").is_null())
        if self._topic.splits and any(firsts.get(number) for number in range(topic.partitions_first, topic.partitions)):
            gone = pc.or_(gone, pa.array(_is_overtaken(self._kept, topic, firsts)))
        return self._kept.filter(pc.invert(gone)).select(names)

    def _merge(self) -> None:
        if not self._new:
            return
        new = pa.Table.from_batches(self._new)
        rows = new if self._kept is None else pa.concat_tables([self._kept, new])
        key = self._topic.key
        keys = rows.select([key])
        if pa.types.is_nested(keys.column(0).type) or pa.types.is_floating(keys.column(0).type):
            keys = pa.table({key: comparable_keys(keys.column(0).combine_chunks())})
        numbered = keys.append_column("_row", pa.array(np.arange(rows.num_rows, dtype=np.int64)))
        last = numbered.group_by(key, use_threads=False).aggregate([("_row", "max")])
        last = last.filter(last.column(key).is_valid())
        self._kept = rows.take(last.column("_row_max").sort()).combine_chunks()
        self._new, self._new_rows = [], 0


def _is_overtaken(rows: pa.Table, topic: Topic, firsts: Mapping[int, int]) -> npt.NDArray[np.bool_]:
    """Which rows are left of a key that had newer ones in a later partition, where retention has removed some."""
    overtaken = np.zeros((topic.partitions, topic.partitions), np.bool_)
    for number in range(topic.partitions):
        is_cut, line = False, [number, *(ancestor for ancestor, _ in topic.ancestors(number))]
        for below, ancestor in pairwise(line):
            is_cut |= firsts.get(below, 0) > 0
            overtaken[number, ancestor] = is_cut
    keys = key_bytes(rows.column(topic.key).combine_chunks())
    return np.asarray(overtaken[partitions_of(keys, topic.partitions), rows.column("_partition").to_numpy()])
