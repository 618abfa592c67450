"""Range aggregates: for each row, sums and the like over the rows of its key in the time up to it, in NumPy.

Rows are put in the order of key and time; what a row sees are then neighbours, from the first that is near enough to the last of its own
time, and `reduceat` goes over all such ranges in one call. It costs by the rows that are seen in all, so where each sees many of them, and
for what NumPy has no words for, SQL is asked instead (see `sliding`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.processing.operators.aggregate import Aggregate
from headwater.processing.state.sorted_runs import order_by

SEEN_MAX = 32
"""So many rows may a row see on average."""

_KINDS = ("count", "sum", "avg", "min", "max")
Array = Any
"""A NumPy array."""


def aggregated(
    key: Array,
    at: Array,
    is_asked: Array,
    over: int,
    columns: Mapping[str, pa.ChunkedArray],
    wanted: Sequence[Aggregate],
) -> dict[str, pa.Array] | None:
    """The aggregates of the rows that are asked for, in their order; None where SQL is to be asked.

    `key` numbers keys from 0 on, `at` are times, and `over` says how far back a row sees.
    """
    if not all(each.kind in _KINDS and _is_plain(each, columns) for each in wanted):
        return None
    seen = _Seen.of(key, at, is_asked, over)
    if seen is None:
        return None
    values = {each.column: _Values(columns[each.column], seen) for each in wanted if each.column is not None}
    result = {}
    for each in wanted:
        if each.column is None:
            result[each.name] = seen.back(seen.counts)
            continue
        found = values[each.column].aggregate(each)
        if found is None:
            return None
        result[each.name] = found
    return result


def _is_plain(each: Aggregate, columns: Mapping[str, pa.ChunkedArray]) -> bool:
    if each.column is None or each.kind == "count":
        return True
    kind = columns[each.column].type
    return bool(pa.types.is_signed_integer(kind) or pa.types.is_floating(kind))


class _Seen:
    """Which rows each row that is asked for sees: neighbours in the order of key and time."""

    def __init__(self, order: Array, first: Array, end: Array, back: Array) -> None:
        self.order, self.first, self.end, self._back = order, first, end, back
        self.counts = end - first

    @classmethod
    def of(cls, key: Array, at: Array, is_asked: Array, over: int) -> _Seen | None:
        """None where the rows see too many others, or key and time do not fit into one number."""
        low = int(at.min())
        span = int(at.max()) - low + 1
        if (int(key.max()) + 1) * span >= 2**62:
            return None
        place = key * span + (at - low)
        is_by_time = bool((at[1:] >= at[:-1]).all())
        order = order_by(key) if is_by_time else np.argsort(place)
        place = place[order]
        asked = np.flatnonzero(is_asked[order])
        mine = place[asked]
        first = np.searchsorted(place, mine - np.minimum(mine % span, over), "left")
        is_next = place[1:] != place[:-1]
        ends = np.append(np.flatnonzero(is_next) + 1, len(place))  # of rows with the same key and time
        end = ends[np.append(0, np.cumsum(is_next))[asked]]
        if int((end - first).sum()) > SEEN_MAX * len(asked):
            return None
        number = np.cumsum(is_asked) - 1  # of rows that are asked for, in the order in which they were given
        back = np.empty(len(asked), np.int64)
        back[number[order[asked]]] = np.arange(len(asked))
        return cls(order, first, end, back)

    def over_ranges(self, do: Any, values: Array) -> Array:
        """A NumPy function over the values of each range; none of them is empty."""
        ends = np.column_stack([self.first, self.end]).ravel()
        if int(ends[-1]) == len(values):
            values = np.append(values, values[-1])  # an end behind the last value is an index, too
        return do.reduceat(values, ends)[::2]

    def back(self, values: Array, *, is_null: Array | None = None) -> pa.Array:
        """Values of ranges in the order of the rows that are asked for."""
        return pa.array(values[self._back], mask=None if is_null is None else is_null[self._back])


class _Values:
    """A column in the order of key and time."""

    def __init__(self, column: pa.ChunkedArray, seen: _Seen) -> None:
        self._seen, self._column = seen, column
        is_valid = pc.is_valid(column).to_numpy()[seen.order] if column.null_count else None
        self._is_valid = is_valid
        self._counts = seen.counts if is_valid is None else seen.over_ranges(np.add, is_valid.astype(np.int64))

    def aggregate(self, each: Aggregate) -> pa.Array | None:
        """One aggregate of it; None where it would not be exact, or not as SQL has it."""
        if each.kind == "count":
            return self._seen.back(self._counts)
        numbers = self._numbers()
        if numbers is None:
            return None
        is_null = None if self._is_valid is None else self._counts == 0
        if each.kind in ("sum", "avg"):
            sums = self._seen.over_ranges(np.add, self._filled(numbers, 0))
            values = sums if each.kind == "sum" else sums / np.maximum(self._counts, 1)
        else:
            do, ends = (np.minimum, 1) if each.kind == "min" else (np.maximum, 0)
            values = self._seen.over_ranges(do, self._filled(numbers, _ends(numbers.dtype)[ends]))
        return self._seen.back(values, is_null=is_null).cast(each.type)

    def _numbers(self) -> Array | None:
        """As 64-bit numbers; None where a sum may not fit, or where there are NaN, which SQL has an order of its own for."""
        is_whole = pa.types.is_integer(self._column.type)
        column = self._column.cast(pa.int64() if is_whole else pa.float64())
        numbers = (column.fill_null(0) if column.null_count else column).to_numpy()[self._seen.order]
        if is_whole:
            most = max(abs(int(numbers.min())), abs(int(numbers.max())), 1)
            return numbers if most * int(self._seen.counts.max()) < 2**62 else None
        return None if bool(np.isnan(numbers).any()) else numbers

    def _filled(self, numbers: Array, value: Any) -> Array:
        return numbers if self._is_valid is None else np.where(self._is_valid, numbers, value)


def _ends(kind: Any) -> tuple[Any, Any]:
    """What is below and above all numbers."""
    if kind == np.int64:
        return np.iinfo(np.int64).min, np.iinfo(np.int64).max
    return -np.inf, np.inf
