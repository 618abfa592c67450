"""Ranking: the best rows of each group, in an order such as "price DESC".

Nulls come last, NaN is above all numbers, and of equal rows the first by all their columns is first, so the best are the same in whatever
order and in however many steps they are found. Columns are compared as 64-bit numbers: those that are none by the ranks of their values.
The single best of each group is found by keeping, column by column, what equals the best; more of them by sorting.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.errors import InvalidInput
from headwater.processing.operators.sql import ask

_ORDER = re.compile(r"\s*(\S+)(?:\s+(asc|desc))?\s*", re.IGNORECASE)

Array = Any
"""A NumPy array."""


class Ranking:
    """How rows with some columns are ranked. With `ties` equal ones have the same rank, as by SQL's `rank()`; else each has its own."""

    def __init__(self, n: int, order: Sequence[str], columns: Sequence[str], *, ties: bool = False) -> None:
        self._n, self._ties = n, ties
        self._order = [(columns.index(name), is_descending) for name, is_descending in parsed(order, columns)]
        self._all = range(len(columns))

    def best(self, columns: Sequence[pa.ChunkedArray], group: Array) -> tuple[Array, Array]:
        """The places of the rows of each group that have a rank up to `n`, by group and rank, and those ranks.

        `group` numbers the groups from 0 on. Of rows that are equal in all columns the earlier is first.
        """
        if not len(group):
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        if self._n == 1:
            place = self._single(columns, group)
            return place, np.ones(len(place), np.int32)
        order, position = self._sorted(columns, group)
        is_best = position < self._n
        return order[is_best], (position[is_best] + 1).astype(np.int32)

    def _single(self, columns: Sequence[pa.ChunkedArray], group: Array) -> Array:
        """The best row of each group, or with ties all that are equal to it."""
        place, count = np.arange(len(group)), int(group.max()) + 1
        breaking = [] if self._ties else [(number, False) for number in self._all]
        for number, is_descending in [*self._order, *breaking]:
            if len(place) == count:
                break
            mine = columns[number] if len(place) == len(group) else columns[number].take(pa.array(place))
            values, of = _numbers(mine, is_descending=is_descending), group[place]
            least = np.zeros(count, np.int64)
            least[of] = values  # any of them, to begin with
            np.minimum.at(least, of, values)
            place = place[values == least[of]]
        place = place[np.argsort(group[place], kind="stable")]
        of = group[place]
        return place if self._ties else place[np.r_[True, of[1:] != of[:-1]]]

    def _sorted(self, columns: Sequence[pa.ChunkedArray], group: Array) -> tuple[Array, Array]:
        """The rows that may be among the best, by group and rank; and how many of the group are before each, or before all equal ones."""
        (number, is_descending), *more = self._order
        key = _numbers(columns[number], is_descending=is_descending)
        order = _order(group, key)
        is_first = _differs(group[order])
        is_tied = ~is_first & ~_differs(key[order])
        may_be = _since(is_first) - _since(~is_tied) < self._n
        order, is_first, is_tied = order[may_be], is_first[may_be], is_tied[may_be]
        if bool(is_tied.any()) and (more or not self._ties):
            several = np.flatnonzero(is_tied | np.r_[is_tied[1:], False])
            rows = order[several]
            keys = [_numbers(columns[number].take(pa.array(rows)), is_descending=down) for number, down in more]
            breaking = [] if self._ties else [columns[number].take(pa.array(rows)) for number in self._all]
            rest = [_numbers(column, is_descending=False) for column in breaking]
            turn = np.lexsort([rows, *reversed([*keys, *rest]), np.cumsum(~is_tied)[several]])
            order[several] = rows[turn]
            for each in keys:
                is_tied[several] &= ~_differs(each[turn])
        position = _since(is_first)
        return order, position - _since(~is_tied) if self._ties else position


def parsed(order: Sequence[str], columns: Sequence[str]) -> list[tuple[str, bool]]:
    """The columns of an order, and whether each is descending."""
    parts = []
    for each in order:
        found = _ORDER.fullmatch(each)
        if found is None or found[1] not in columns:
            raise InvalidInput(
                f"The order {each!r} does not name a column.",
                advice=f"Use a column and ASC or DESC; columns are {', '.join(columns)}.",
            )
        parts.append((found[1], (found[2] or "").lower() == "desc"))
    if not parts:
        raise InvalidInput("The order is missing.", advice='Give one, such as order="price DESC".')
    return parts


def _order(group: Array, key: Array) -> Array:
    """The order by group and key; of equal ones any."""
    low = int(key.min())
    span = int(key.max()) - low + 1
    if (int(group.max()) + 1) * span < 2**62:
        return np.argsort(group * span + (key - low))
    return np.lexsort((key, group))


def _differs(values: Array) -> Array:
    return np.r_[True, values[1:] != values[:-1]]


def _since(is_first: Array) -> Array:
    """For each row how many came before it since the last that is first."""
    place = np.arange(len(is_first))
    return place - np.maximum.accumulate(np.where(is_first, place, 0))


def _numbers(column: pa.ChunkedArray, *, is_descending: bool) -> Array:
    """Numbers by which values are in order, the first the least; null is the last."""
    kind = column.type
    if column.null_count or not (_is_whole(kind) or pa.types.is_floating(kind)):
        return _ranks(column, is_descending=is_descending)
    if pa.types.is_floating(kind):
        values = column.cast(pa.float64()).to_numpy() + 0.0  # -0.0 is 0.0
        bits = values.view(np.int64)
        numbers = np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits)  # numbers below 0 are in the opposite order
        numbers = np.where(np.isnan(values), np.int64(2**63 - 1), numbers)
    else:
        numbers = column.cast(pa.int64()).to_numpy()
    return ~numbers if is_descending else numbers


def _is_whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_signed_integer(kind) or pa.types.is_timestamp(kind))


def _ranks(column: pa.ChunkedArray, *, is_descending: bool) -> Array:
    """The ranks of values among each other."""
    kind = column.type
    if pa.types.is_nested(kind):
        column, kind = _ranked_apart(column), pa.int64()
    elif pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif pa.types.is_floating(kind):
        is_null = column.is_null().to_numpy()
        column = pa.array(_numbers(column.fill_null(0.0), is_descending=False), mask=is_null)
    order = "descending" if is_descending else "ascending"
    found = pc.rank(column, sort_keys=order, tiebreaker="dense")  # null is at the end
    return found.to_numpy().astype(np.int64)


def _ranked_apart(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The ranks of values with elements of their own; null stays null."""
    rows = pa.table({"v": column, "place": np.arange(len(column))})
    found = ask(
        "select case when v is null then null else dense_rank() over (order by v nulls last) end as v from rows order by place",
        rows=rows,
    )
    return found.column("v")
