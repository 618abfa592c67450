"""Grouping: which rows belong together, by the values of some columns.

Values are told apart by Arrow's dictionaries, and what is computed of groups is then NumPy's work over their numbers: several times as
quick as a group-by, and without the milliseconds that SQL takes before it begins. A null is a value like any other. Values that a key
counts as one (0.0 and -0.0) may be two here: whoever works behind a shuffle groups by the hashes of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

ALL = "_all"
"""The key of an operator that works on all rows together: a column with the same value in each."""

ALL_FIELD = pa.field(ALL, pa.int32(), nullable=False)
SPARSE = 4
"""Numbers of groups may be so many times as many as rows, before they are counted anew."""

Array = Any
"""A NumPy array."""


class Groups(NamedTuple):
    """Groups, numbered from 0 on; `row` says for each row which one it has, `one` is a row of each."""

    row: Array
    one: Array

    @classmethod
    def of(cls, columns: Sequence[pa.ChunkedArray | pa.Array | Array], rows: int) -> Groups:
        """The groups of so many rows with these columns."""
        number, count = np.zeros(rows, np.int64), 1
        for column in columns:
            found, distinct = _encoded(column)
            if distinct == 1:
                continue
            number = found if count == 1 else number * distinct + found
            count *= distinct
            if count > SPARSE * rows + 1024:
                number, count = _encoded(number)
        one = np.full(count, -1)
        one[number] = np.arange(rows)
        is_there = one >= 0
        if not bool(is_there.all()):
            number, one = (np.cumsum(is_there) - 1)[number], one[is_there]
        return cls(number, one)

    def __len__(self) -> int:
        return len(self.one)


def distinct(column: pa.Array) -> tuple[pa.Array, Array]:
    """The values that differ of a column without nulls, and for each row which of them it has."""
    if column.type == pa.int64() and len(column):
        values = column.to_numpy()
        low, span = _near(values)
        if span:
            is_there = np.zeros(span, bool)
            is_there[values - low] = True
            found = np.flatnonzero(is_there)
            code = values - low if len(found) == span else (np.cumsum(is_there) - 1)[values - low]
            return pa.array(found + low), code
    encoded = column.dictionary_encode()
    return encoded.dictionary, encoded.indices.to_numpy()


def keyed(df: DataFrame, group: Sequence[str]) -> tuple[DataFrame, list[str]]:
    """Rows with the columns of a key; where all belong together that is one column more."""
    return (df, list(group)) if group else (df.withColumn(ALL, F.lit(0)), [ALL])


def with_all(rows: pa.Table) -> pa.Table:
    """Rows with the key of all rows; who reads them where they come from has no such column."""
    return rows if ALL in rows.column_names else rows.append_column(ALL_FIELD, _zeros(rows.num_rows))


def _zeros(count: int) -> pa.Array:
    return pa.array(np.zeros(count, np.int32))


def _encoded(column: Any) -> tuple[Array, int]:
    """For each value its number among those that differ, and how many those are."""
    if isinstance(column, np.ndarray):
        if len(column) and column.dtype == np.int64:
            low, span = _near(column)
            if span:
                return column - low, span
        column = pa.array(column)
    elif isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else whole(column)
    encoded = column.dictionary_encode(null_encoding="encode")
    return encoded.indices.to_numpy().astype(np.int64), max(1, len(encoded.dictionary))


def _near(values: Array) -> tuple[int, int]:
    """The least of some numbers and how far the others reach, where they are near each other: they need no other numbers then. Else 0."""
    low, high = int(values.min()), int(values.max())
    return (low, high - low + 1) if high - low <= SPARSE * len(values) else (0, 0)


def whole(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    found = column.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)
