"""The newest row per key: what a batch leaves of itself when a target holds one row of each key.

Rows come with their place in the log (`_partition`, `_offset`) and with `_deleted`. Of each key the row with the highest place counts; in
a topic that was split a key goes on in a partition with a higher number, so places compare as pairs. Pieces of a batch may lie in files
that tasks have left: only keys and places of all pieces are held at once. Functions and a frozen view on tables: safe from any
thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.arrow.placement import comparable_keys
from headwater.model.schema import DELETED

PLACE = ("_partition", "_offset")
PIECE_ROWS = 65_536
PIECE_BYTES = 32 << 20
"""A piece has so many rows, or fewer where they are large: about so many bytes."""


class Pieces:
    """The rows of a batch to be applied, each key once, in pieces of a bounded size."""

    def __init__(self, tables: Sequence[pa.Table], key: Sequence[str]) -> None:
        self.key = tuple(key)
        self._tables = [table for table in tables if table.num_rows]
        self._picked = _picked(self._tables, self.key)

    def __iter__(self) -> Iterator[pa.Table]:
        for table, picked in zip(self._tables, self._picked, strict=True):
            rows = max(1, min(PIECE_ROWS, PIECE_BYTES * table.num_rows // max(1, table.nbytes)))
            for start in range(0, len(picked), rows):
                yield table.take(pa.array(picked[start : start + rows]))

    def without_key(self) -> Iterator[tuple[pa.Table, int]]:
        """The rows that have no key: each with the table that it is in."""
        for table in self._tables:
            for row in np.flatnonzero(_keyless(table, self.key)).tolist():
                yield table, row


def newest(table: pa.Table, key: Sequence[str]) -> pa.Table:
    """Of each key the row with the highest place, and every row without a key, in their order."""
    (picked,) = _picked([table], tuple(key)) if table.num_rows else ([],)
    keyless = np.flatnonzero(_keyless(table, key))
    return table.take(pa.array(np.sort(np.concatenate([picked, keyless])).astype(np.int64)))


def _comparable(keys: pa.Table) -> pa.Table:
    """Keys that are equal where a database takes them for equal: -0.0 is 0.0 there, and two rows of one key are refused."""
    for at, field in enumerate(keys.schema):
        if pa.types.is_floating(field.type) and keys.num_rows:
            keys = keys.set_column(at, field, comparable_keys(keys.column(at).combine_chunks()))
    return keys


def _picked(tables: Sequence[pa.Table], key: tuple[str, ...]) -> list[np.ndarray]:
    """For each table the indices of the rows that count."""
    if not tables:
        return []
    names = [*key, *PLACE]
    rows = pa.concat_tables([table.select(names) for table in tables], promote_options="permissive")
    keyed = np.flatnonzero(~_keyless(rows, key))
    order = (
        pc.sort_indices(rows.select(PLACE), sort_keys=[(name, "ascending") for name in PLACE])
        .to_numpy()
        .astype(np.int64)
    )
    rank = np.empty(rows.num_rows, np.int64)
    rank[order] = np.arange(rows.num_rows)
    ranked = _comparable(rows.select(list(key))).append_column("_rank", pa.array(rank)).take(pa.array(keyed))
    last = ranked.group_by(list(key), use_threads=False).aggregate([("_rank", "max")])
    at = np.sort(order[last.column("_rank_max").to_numpy()])
    ends = np.cumsum([table.num_rows for table in tables])
    starts = ends - [table.num_rows for table in tables]
    return [at[(at >= start) & (at < end)] - start for start, end in zip(starts, ends, strict=True)]


def _keyless(rows: pa.Table, key: Sequence[str]) -> np.ndarray:
    keyless = np.zeros(rows.num_rows, bool)
    for name in key:
        keyless |= rows.column(name).is_null().to_numpy()
    return keyless


def with_places(rows: pa.Table, *, deleted: bool) -> pa.Table:
    """Rows that come from no event, such as those of a repair, with the columns that a piece has."""
    count = rows.num_rows
    return (
        rows.append_column("_partition", pa.array(np.full(count, -1, np.int32)))
        .append_column("_offset", pa.array(np.arange(count, dtype=np.int64)))
        .append_column(DELETED.name, pa.array(np.full(count, deleted)))
    )
