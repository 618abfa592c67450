"""Sums of groups in NumPy: what `hw.totals` keeps and gives, as long as all numbers are of 64 bits.

A batch of few rows costs SQL milliseconds before it begins, in every state partition; and who asks it has to load it first. So counts,
sums, averages and the ends of integers and floating numbers are computed here, with the same result. Where a sum may not fit, where there
is a NaN (which SQL has an order of its own for), and for all other types, `aggregated` gives None, and SQL is asked (see `totals`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headwater.processing.operators.aggregate import Aggregate
from headwater.processing.state.sorted_runs import Keys, column

Array = Any
"""A NumPy array."""


class GroupNumbers(NamedTuple):
    """An array of numbers, one for each group, some of which may be missing."""

    values: Array
    is_null: Array | None = None

    def differs(self, other: GroupNumbers) -> Array:
        """Where one is not as the other."""
        mine, others = self._nulls(), other._nulls()
        return (mine != others) | ((self.values != other.values) & ~mine & ~others)

    def to_arrow(self, kind: pa.DataType) -> pa.Array:
        """As a column."""
        return pa.array(self.values, mask=self.is_null).cast(kind)

    def _nulls(self) -> Array:
        return np.zeros(len(self.values), bool) if self.is_null is None else self.is_null


class GroupedRows(NamedTuple):
    """What a batch brings: for each row its group, whether it comes or goes (None where all come), and the columns that are used."""

    keys: Keys
    sign: Array | None
    columns: Sequence[pa.ChunkedArray]
    gained: Array
    """By how much the distinct counts of each group grow."""


def aggregated(
    given: GroupedRows,
    known: pa.Table,
    fields: Sequence[pa.Field],
    aggregates: Sequence[Aggregate],
    used: Sequence[str],
) -> pa.Table | None:
    """For each group the `fields` that are kept, the aggregates `a0` …, and whether they are others than before; None for SQL.

    `known` has what was kept of groups, whose number is in `k`.
    """
    names = {field.name for field in fields}
    now, before = _counts(given, known)
    for number, each in enumerate(given.columns):
        column_now = _Column(given, each, known, number).computed(names)
        if column_now is None:
            return None
        now |= column_now[0]
        before |= column_now[1]
    shown = [_result(each, at, aggregates, used) for at, each in enumerate(aggregates)]
    results = [(show(now), show(before)) for show in shown]
    was_there = np.zeros(len(given.keys), bool)
    was_there[column(known, "k")] = True
    differs = np.zeros(len(given.keys), bool)
    for after, earlier in results:
        differs |= after.differs(earlier)
    columns = {field.name: now[field.name].to_arrow(field.type) for field in fields}
    columns |= {
        f"a{at}": after.to_arrow(each.type)
        for at, (each, (after, _)) in enumerate(zip(aggregates, results, strict=True))
    }
    return pa.table({**columns, "changed": pa.array(np.where(was_there, differs, now["rows"].values > 0))})


def _counts(given: GroupedRows, known: pa.Table) -> tuple[dict[str, GroupNumbers], dict[str, GroupNumbers]]:
    """How many rows there are, and how many distinct values."""
    count, place = len(given.keys), column(known, "k")
    gains = {"rows": np.bincount(given.keys.row, weights=given.sign, minlength=count).astype(np.int64)}
    gains |= {f"d{number}": given.gained[:, number] for number in range(given.gained.shape[1])}
    now, before = {}, {}
    for name, gain in gains.items():
        was = np.zeros(count, np.int64)
        was[place] = column(known, name)
        now[name], before[name] = GroupNumbers(was + gain), GroupNumbers(was)
    return now, before


class _Column:
    """A column that is summed."""

    def __init__(self, given: GroupedRows, values: pa.ChunkedArray, known: pa.Table, number: int) -> None:
        self._given, self._column, self._known, self._at = given, values, known, number
        self._count, self._place = len(given.keys), column(known, "k")

    def computed(self, names: set[str]) -> tuple[dict[str, GroupNumbers], dict[str, GroupNumbers]] | None:
        """What is kept of it after the batch, and before it."""
        kind, at = self._column.type, self._at
        is_whole = bool(pa.types.is_signed_integer(kind))
        if not is_whole and not pa.types.is_floating(kind):
            return None
        is_there = self._column.is_valid().to_numpy()
        values = self._column.drop_null().cast(pa.int64() if is_whole else pa.float64()).to_numpy()
        row = self._given.keys.row[is_there]
        sign = None if self._given.sign is None else self._given.sign[is_there]
        if not is_whole and bool(np.isnan(values).any()):
            return None
        was = self._before(f"n{at}", np.int64)
        n = was.values + np.bincount(row, weights=sign, minlength=self._count).astype(np.int64)
        now, before = {f"n{at}": GroupNumbers(n)}, {f"n{at}": was}
        if f"s{at}" in names:
            sums = self._summed(row, values if sign is None else values * sign, is_whole=is_whole)
            if sums is None:
                return None
            now[f"s{at}"], before[f"s{at}"] = sums
        for name, do in ((f"min{at}", np.minimum), (f"max{at}", np.maximum)):
            if name in names:
                end = self._before(name, values.dtype)
                if not is_whole and bool(np.isnan(end.values).any()):
                    return None
                now[name], before[name] = self._ended(end, do, row, values), end
        return now, before

    def _summed(self, row: Array, values: Array, *, is_whole: bool) -> tuple[GroupNumbers, GroupNumbers] | None:
        try:
            was = self._before(f"s{self._at}", np.int64 if is_whole else np.float64, nothing=0)
        except pa.ArrowInvalid:  # more than 64 bits
            return None
        sums = was.values.copy()
        if not is_whole:
            sums += np.bincount(row, weights=values, minlength=self._count)
            return None if bool(np.isnan(was.values).any()) else (GroupNumbers(sums), was)
        if _most(values) * len(values) + _most(sums) >= 2**62:
            return None
        np.add.at(sums, row, values)
        return GroupNumbers(sums), was

    def _ended(self, was: GroupNumbers, do: Any, row: Array, values: Array) -> GroupNumbers:
        """The least or the greatest of each group."""
        assert was.is_null is not None
        ends = was.values.copy()
        is_first = was.is_null.copy()
        ends[row[is_first[row]]] = values[is_first[row]]  # any of them, to begin with
        do.at(ends, row, values)
        is_first[row] = False
        return GroupNumbers(ends, is_first)

    def _before(self, name: str, kind: Any, *, nothing: int | None = None) -> GroupNumbers:
        """What was kept; groups that are new have nothing."""
        found = self._known.column(name)
        is_there = found.is_valid().to_numpy()
        numbers = found.drop_null().cast(pa.from_numpy_dtype(np.dtype(kind))).to_numpy()
        values, is_null = np.zeros(self._count, kind), np.ones(self._count, bool)
        values[self._place[is_there]] = numbers
        is_null[self._place[is_there]] = False
        is_count = nothing is not None or name.startswith("n")
        return GroupNumbers(values, None if is_count else is_null)


def _most(values: Array) -> int:
    return max(abs(int(values.min())), abs(int(values.max()))) if len(values) else 0


def _result(each: Aggregate, at: int, aggregates: Sequence[Aggregate], used: Sequence[str]) -> Any:
    """How an aggregate is made of what is kept."""
    if each.kind == "distinct":
        number = sum(other.kind == "distinct" for other in aggregates[:at])
        return lambda kept: kept[f"d{number}"]
    if each.column is None:
        return lambda kept: kept["rows"]
    number = used.index(each.column)
    if each.kind == "count":
        return lambda kept: kept[f"n{number}"]
    if each.kind in ("min", "max"):
        return lambda kept: kept[f"{each.kind}{number}"]

    def show(kept: Mapping[str, GroupNumbers]) -> GroupNumbers:
        n, s = kept[f"n{number}"].values, kept[f"s{number}"].values
        return GroupNumbers(s if each.kind == "sum" else s / np.maximum(n, 1), n <= 0)

    return show
