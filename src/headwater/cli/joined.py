"""Batches of a useful size: producers that flush often leave many of a few events, and each costs DuckDB as much as a large one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def joined(batches: Iterable[pa.RecordBatch], *, rows_min: int) -> Iterator[pa.RecordBatch]:
    """The same rows in the same order, at least `rows_min` in each batch but the last; large batches are not copied."""
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= rows_min:
            yield pa.concat_batches(waiting) if len(waiting) > 1 else batch
            waiting, rows = [], 0
    if waiting:
        yield pa.concat_batches(waiting)
