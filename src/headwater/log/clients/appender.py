"""An appender: rows on their way to any topic of a log, placed in partitions, written, and placed again where a split moved them.

Thread-safety: may be used by many threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from time import monotonic, sleep
from typing import Any

import msgspec
import numpy as np

from headwater.log.arrow.placement import place
from headwater.log.arrow.rows import check_size, to_batch
from headwater.log.port.store import Store, TopicLookup
from headwater.log.port.topic import Topic, check_name
from headwater.log.port.write import Write
from headwater.model.errors import Repartitioned, SchemaMismatch, TopicFull

BLOCK_S = 30.0
"""How long an append waits for room in a topic that is full; a producer waits for its `retry_s`."""

NAMES_KEPT_MAX = 1024
"""The names of this many topics stay checked in a process."""

_BLOCK_LOOK_S = 0.05


class Appender:
    """Places rows and writes them; what is appended through one handle of a log shares it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._sticky = 0

    def place(self, name: object, rows: Any) -> list[Write]:
        """The rows as one write for each partition that they go to, by the columns that the topic has now."""
        topic = self.store.topic(_checked_name(name) if isinstance(name, str) else check_name(name))
        try:
            batch = to_batch(rows, topic.schema)
        except SchemaMismatch:
            topic, before = self.store.refresh(topic.name), topic
            if topic.schema_id == before.schema_id:
                raise
            batch = to_batch(rows, topic.schema)
        check_size(batch, topic)
        self._sticky += 1
        placement = place(batch, topic.key, topic.partitions, sticky=self._sticky)
        return [Write(topic, partition, batch, indices) for partition, indices in placement.groups()]

    def write(self, writes: Sequence[Write]) -> tuple[list[Write], list[range | Exception]]:
        """Writes, waits for a while where a topic is full and says `overload="block"`, and places again what a split moved."""
        done: list[tuple[Write, range | Exception]] = []
        deadline = monotonic() + BLOCK_S
        while writes:
            outcomes = list(zip(writes, self.store.write(writes), strict=True))
            full = [write for write, outcome in outcomes if isinstance(outcome, TopicFull) and monotonic() < deadline]
            moved = [write for write, outcome in outcomes if isinstance(outcome, Repartitioned)]
            again = {id(write) for write in (*full, *moved)}
            done += [(write, outcome) for write, outcome in outcomes if id(write) not in again]
            if full:
                sleep(_BLOCK_LOOK_S)
            writes = [*full, *place_again(self.store, moved)]
        return [write for write, _ in done], [outcome for _, outcome in done]


@lru_cache(maxsize=NAMES_KEPT_MAX)
def _checked_name(name: str) -> str:
    """The name of a topic that is appended to again and again, checked the first time."""
    return check_name(name)


def place_again(store: TopicLookup, writes: Sequence[Write], *, sticky: int | None = None) -> list[Write]:
    """Writes that were refused because their topic was split, each as one for every partition its rows belong to now.

    They keep their stamps, and the columns of the schema by which the rows were made. Rows without a key go to the partition
    that `sticky` stands for, and stay where they were without it.
    """
    return [one for write in writes for one in _placed_again(write, store.refresh(write.topic.name), sticky)]


def _placed_again(write: Write, topic: Topic, sticky: int | None) -> list[Write]:
    if write.topic.generation == topic.generation or write.topic.id != topic.id:
        return [write]
    described = msgspec.structs.replace(write.topic, partitions=topic.partitions, splits=topic.splits)
    rows = np.arange(write.batch.num_rows) if write.indices is None else write.indices
    alone = write.partition if sticky is None else sticky
    placement = place(write.rows(), topic.key, topic.partitions, sticky=alone)
    return [
        msgspec.structs.replace(
            write, topic=described, partition=number, indices=write.indices if some is None else rows[some]
        )
        for number, some in placement.groups()
    ]
