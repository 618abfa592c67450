"""A write: events on their way to one partition, whose they are, and what a store refuses of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headwater.log.port.topic import Topic
from headwater.model.errors import Diverged, Repartitioned
from headwater.model.schema import DELETED, HEADERS

NO_PRODUCER = bytes(16)
HAS_HEADERS = 1
HAS_DELETED = 2


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """Whose batch it is: a producer's id and epoch, and the sequence numbers of its first and last event.

    A stamp whose last sequence number is already stored marks a retry, and the batch is not stored again.
    """

    producer: bytes = NO_PRODUCER
    epoch: int = 0
    sequence_first: int = 0
    sequence_last: int = 0


class Write(msgspec.Struct, frozen=True):
    """Events on their way to one partition: the rows at `indices` of a batch, or all of it.

    The batch has the topic's columns in order, then `_headers` and `_deleted` if any event has them. The rows are picked
    piece by piece when they are written, so that the partitions of a large batch are prepared in parallel.

    For copies of a log: `at` is the offset that the first event must get (any other is refused with `Diverged`), and `appended`
    holds an append time for each event, in µs, to be kept instead of the store's own. Both hold for `write_atomically` too.
    """

    topic: Topic
    partition: int
    batch: pa.RecordBatch
    indices: Any = None
    stamp: Stamp = Stamp()
    at: int | None = None
    appended: Any = None

    @property
    def count(self) -> int:
        """How many events."""
        return self.batch.num_rows if self.indices is None else len(self.indices)

    def runs(self) -> list[tuple[int, int]]:
        """Its events from the start-th to the end-th, cut where the append time to keep is another one."""
        if self.appended is None:
            return [(0, self.count)]
        cuts = [0, *(np.flatnonzero(np.diff(self.appended)) + 1).tolist(), self.count]
        return list(pairwise(cuts))

    def rows(self, start: int = 0, count: int | None = None) -> pa.RecordBatch:
        """Its events from the `start`-th on."""
        stop = self.count if count is None else min(start + count, self.count)
        if self.indices is None:
            return self.batch if stop - start == self.batch.num_rows else self.batch.slice(start, stop - start)
        return self.batch.take(pa.array(self.indices[start:stop]))


def physical_schema(schema: pa.Schema, flags: int) -> pa.Schema:
    """The columns a frame holds: the topic's own, then those the frame's flags announce."""
    if flags & HAS_HEADERS:
        schema = schema.append(HEADERS)
    if flags & HAS_DELETED:
        schema = schema.append(DELETED)
    return schema


def flags_of(batch: pa.RecordBatch) -> int:
    """Which optional columns a batch carries."""
    names = batch.schema.names
    return (HAS_HEADERS if "_headers" in names else 0) | (HAS_DELETED if "_deleted" in names else 0)


def check_place(at: int, end: int, where: str) -> None:
    """Refuses events that are meant for another offset than the next one; the caller holds what keeps it the next one."""
    if at != end:
        raise Diverged(
            f"Events from offset {at} on were to be copied to {where}, which ends at {end}.",
            advice="Something else writes to the copy, or another mirror did; run the mirror again to see what differs.",
        )


def repartitioned(topic: Topic) -> Repartitioned:
    """The refusal of events that were placed when the topic had fewer partitions."""
    return Repartitioned(
        f"Topic {topic.name!r} now has {topic.partitions} partitions, and the events were placed for another number.",
        advice="Nothing was stored. Place them again.",
    )
