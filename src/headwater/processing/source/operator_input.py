"""A side: an input of an operator as it is read of a topic, by operators that work where events are read (see `source_operator`,
`combiner`).

In a stage that works by event time, late rows are left out here, by the same `_late` that Spark would filter by; how many is told in a
file (see `late_rows`). What the stage asks of each row before the operator sees it is asked behind that, as Spark would. No row of a
table comes too late; one that was deleted has no time of its own, and was deleted when the log was told.

What works inside a source travels to it as one of its options, which is a text.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from headwater.processing.source.pushdown import PushedFilter
from headwater.processing.source.range_reader import OffsetRange
from headwater.processing.spark.serialization import pickled
from headwater.processing.time.event_time import leave_out_late
from headwater.processing.time.late_rows import LateRows

TIME = pa.field("_time", pa.timestamp("us", tz="UTC"))
"""The log's column that has the time of deletions, too."""


class OperatorInput(NamedTuple):
    """What is read, and what it becomes."""

    topic: str
    read: pa.Schema
    """What is read of the topic."""
    options: Mapping[str, str]
    """How that is read, as a source of its own would be told."""
    schema: pa.Schema
    """The operator's input."""
    columns: Sequence[str]
    """For each column of the input, the topic's column that it is."""
    key: Sequence[str]
    """The operator's key, as columns of the topic."""
    placed_by: str = ""
    """The topic's key, one of them; where that does not matter, nothing."""
    time: str | None = None
    """The topic's event time, where the operator is given no late rows."""
    deleted_at: str | None = None
    """The event time of a table, which a deletion has not."""
    where: str | None = None
    """What is asked of each row (see `pushdown`)."""
    late_rows: str | None = None
    """The folder in which it is told how many rows were late."""

    def rows(self, batches: Iterable[pa.RecordBatch]) -> tuple[pa.Table, int]:
        """Of what was read the rows that the operator is given, with the topic's columns; and how many were late."""
        rows, late = pa.Table.from_batches(list(batches), self.read), 0
        if self.time is not None:
            rows, late = leave_out_late(rows, self.time)
        if self.deleted_at is not None:
            times = pc.coalesce(rows.column(self.deleted_at), rows.column(TIME.name))
            rows = rows.set_column(rows.schema.get_field_index(self.deleted_at), self.deleted_at, times)
        if self.where is not None:
            rows = rows.filter(PushedFilter(self.where).mask(rows))
        return rows, late

    def named(self, rows: pa.Table) -> dict[str, pa.ChunkedArray]:
        """The columns of the operator's input."""
        return {name: rows.column(source) for name, source in zip(self.schema.names, self.columns, strict=True)}

    def tell(self, wanted: OffsetRange, late: int) -> None:
        """So many rows of a range were late."""
        if late and self.late_rows is not None:
            LateRows(self.late_rows).tell(wanted.at, wanted.start, wanted.end, late)


def to_option(inside: Any) -> str:
    """What works inside a source, as an option of it."""
    return base64.b64encode(pickled(inside, ())).decode("ascii")


def from_option(text: str) -> Any:
    """What `to_option` was given."""
    return pickle.loads(base64.b64decode(text))
