"""Columns: how operators look at the times and the order of rows.

Of rows with equal times that of the log comes first which was appended first, as far as rows come in that order (see `in_log_order`). Rows
that Spark has shuffled before come in any: of these the fixed order is by event time, then by all other columns, so that a batch that is
run again, or cut in another way, is worked on in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import TimestampType

from headwater.model.clock import NO_TIME
from headwater.model.errors import InvalidInput
from headwater.processing.operators.operator import note_time
from headwater.processing.state.sorted_runs import H1, H2
from headwater.processing.time.event_time import MARK


def time_column(df: DataFrame, at: str | None) -> str:
    """The column of event time: the one that is named, or the one that the input declares. Who asks works by it."""
    note_time()
    if at is None:
        declared = [field.name for field in df.schema if MARK in (field.metadata or {})]
        times = declared or [field.name for field in df.schema if isinstance(field.dataType, TimestampType)]
        if len(times) != 1:
            raise InvalidInput(
                f"The event time is ambiguous: it could be {', '.join(times) or 'none'}.", advice="Name it with at=."
            )
        return times[0]
    if at not in df.columns or not isinstance(df.schema[at].dataType, TimestampType):
        raise InvalidInput(f"Column {at!r} with times (TIMESTAMP) does not exist.", advice="Name another with at=.")
    return at


def times_of(rows: pa.Table, at: str) -> Any:
    """Times in µs; a row without one is before everything."""
    return rows.column(at).cast(pa.int64()).fill_null(NO_TIME).to_numpy()


def in_time(rows: pa.Table, at: str, *, after: int = NO_TIME) -> tuple[pa.Table, Any]:
    """The rows that have a time later than another, and their times."""
    times = times_of(rows, at)
    is_later = times > after
    return (rows, times) if bool(is_later.all()) else (rows.filter(pa.array(is_later)), times[is_later])


def flags(rows: pa.Table, *, value: bool) -> pa.Array:
    """The same truth for each row."""
    return pa.array(np.full(rows.num_rows, value))


def in_fixed_order(rows: pa.Table, at: str, *, by_key: bool = False, in_log_order: bool = False) -> pa.Table:
    """Rows by time, and by everything else where that is the same; with `by_key` by their key before that.

    With `in_log_order` rows of the same time stay in the order in which they come.
    """
    keys = ([H1, H2] if by_key else []) + [at]
    if rows.num_rows < 2:
        return rows
    rows = rows.take(_order(rows.select(keys)))
    if in_log_order:
        return rows
    same = np.ones(rows.num_rows - 1, bool)
    for name in keys:
        values = rows.column(name).cast(pa.int64()).fill_null(NO_TIME).to_numpy()
        same &= values[1:] == values[:-1]
    tied = np.flatnonzero(np.r_[same, False] | np.r_[False, same])
    if not len(tied):
        return rows
    rest = rows.drop_columns([name for name in (at, H1, H2) if name in rows.column_names]).take(pa.array(tied))
    columns = {"group": pa.array(np.cumsum(~np.r_[False, same])[tied])}
    columns |= {f"c{number}": _sortable(column) for number, column in enumerate(rest.columns)}
    order = np.arange(rows.num_rows)
    order[tied] = tied[_order(pa.table(columns)).to_numpy()]
    return rows.take(pa.array(order))


def _order(columns: pa.Table) -> pa.Array:
    return pc.sort_indices(columns, sort_keys=[(name, "ascending") for name in columns.column_names])


def _sortable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """What Arrow cannot sort is sorted as text."""
    if pa.types.is_nested(column.type):
        return pa.chunked_array([pa.array([repr(value) for value in column.to_pylist()], pa.string())])
    return column


class Ranks:
    """Pairs of a number and a time as single numbers in their order, for whole arrays at once."""

    def __init__(self, *times: Any) -> None:
        self._times = np.unique(np.concatenate(times))

    def of(self, number: Any, times: Any) -> Any:
        """The pair itself; its time must be among those known."""
        return self.at_least(number, times)

    def at_least(self, number: Any, times: Any) -> Any:
        """The first pair of that number whose time is not before."""
        return number * (len(self._times) + 1) + np.searchsorted(self._times, times, "left")

    def after(self, number: Any, times: Any) -> Any:
        """The first pair of that number whose time is later."""
        return number * (len(self._times) + 1) + np.searchsorted(self._times, times, "right")
