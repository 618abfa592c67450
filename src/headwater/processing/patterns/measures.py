"""Measures: the values of terms at the rows of matches.

A **point** is where terms are evaluated: a match and how many of its rows count. Those are all rows for ONE ROW PER MATCH and FINAL, and
the rows so far for the rows of ALL ROWS PER MATCH.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headwater.processing.operators.sql import ask
from headwater.processing.patterns.automaton import ABSENT
from headwater.processing.patterns.formula import Fold, MatchNumber, Navigation, Term

Array = Any
"""A NumPy array."""

DIGITS = 100
"""Decimals are added up with so many digits before they are rounded."""


class MeasurePoints(NamedTuple):
    """Where terms are evaluated, and the matches that they are in."""

    match: Array
    """For each point its match, or -1 where there is none."""
    rows: Array
    """How many rows of the match count."""
    number: Array
    """The number of each match in its partition."""
    offset: Array
    path: Array
    variable: Array
    """The rows of all matches (see `Matches`) and the number of the variable of each."""
    low: Array
    high: Array
    """For each match the first row of its partition that is there, and the bound after the last."""


class Measures:
    """Computes terms. `values` are the columns that hold their values, `names` those of the variables, as they are shown."""

    def __init__(
        self, terms: Mapping[str, Term], values: Mapping[str, str], members: Mapping[str, Sequence[int]], names: Sequence[str]
    ) -> None:  # fmt: skip
        self._terms, self._values, self._members, self._names = dict(terms), dict(values), dict(members), list(names)
        self._absent = [number for number, name in enumerate(names) if name.startswith(ABSENT)]

    def fields(self, schema: pa.Schema) -> list[pa.Field]:
        """The columns of the terms; `schema` has those of their values."""
        return [pa.field(name, self._type(term, schema)) for name, term in self._terms.items()]

    def _type(self, term: Term, schema: pa.Schema) -> pa.DataType:
        if isinstance(term, MatchNumber) or (isinstance(term, Fold) and term.kind == "count"):
            return pa.int64()
        if term.value is None:
            return pa.string()
        kind = schema.field(self._values[term.value]).type
        return kind if isinstance(term, Navigation) else folded_type(term.kind, kind)

    def columns(self, rows: pa.Table, points: MeasurePoints) -> dict[str, pa.Array]:
        """The terms at all points."""
        fields = self.fields(rows.schema)
        found = zip(fields, self._terms.values(), strict=True)
        return {field.name: self._column(term, rows, points, field.type) for field, term in found}

    def _column(self, term: Term, rows: pa.Table, points: MeasurePoints, kind: pa.DataType) -> Any:
        if isinstance(term, MatchNumber):
            number = np.r_[points.number, 0][points.match]
            return pa.array(number, kind, mask=points.match < 0)
        if isinstance(term, Fold):
            return self._fold(term, rows, points, kind)
        place = _places(term, points, self._is_in(term, points))
        if term.value is None:
            names = pa.array(self._names, kind)
            variable = np.r_[points.variable, 0][place]
            return names.take(pa.array(variable, mask=place < 0))
        row = np.r_[points.path, 0][place] + term.shift
        match = np.maximum(points.match, 0)
        low, high = np.r_[points.low, 0][match], np.r_[points.high, 0][match]
        is_there = (place >= 0) & (row >= low) & (row < high)
        return rows.column(self._values[term.value]).take(pa.array(np.where(is_there, row, 0), mask=~is_there))

    def _is_in(self, term: Navigation | Fold, points: MeasurePoints) -> Array:
        """Which rows of the matches are of the term's variable."""
        if term.variable is None:
            return ~np.isin(points.variable, self._absent)
        return np.isin(points.variable, self._members[term.variable])

    def _fold(self, term: Fold, rows: pa.Table, points: MeasurePoints, kind: pa.DataType) -> Any:
        """An aggregate: once for each match where all rows count, and else for each row with those before it."""
        import duckdb  # for those who search for patterns

        try:
            return self._fold_by_sql(term, rows, points, kind)
        except (pa.ArrowInvalid, duckdb.Error):
            return self._fold_by_values(term, rows, points, kind)

    def _fold_by_values(self, term: Fold, rows: pa.Table, points: MeasurePoints, kind: pa.DataType) -> pa.Array:
        """The same match by match, where a result does not fit its type; such a one is null."""
        counted, is_in = _counts(points, is_final=term.is_final), self._is_in(term, points)
        found = list[Any]()
        for match, count in zip(points.match.tolist(), counted.tolist(), strict=True):
            start = int(points.offset[match])
            path = points.path[start : start + count][is_in[start : start + count]]
            column = rows.column(self._values[term.value]) if term.value is not None else None
            values = path.tolist() if column is None else column.take(pa.array(path)).drop_null().to_pylist()
            found.append(fold_of(term, values, kind) if match >= 0 and (count or term.kind == "count") else None)
        return pa.array(found, kind)

    def _fold_by_sql(self, term: Fold, rows: pa.Table, points: MeasurePoints, kind: pa.DataType) -> Any:
        counted = _counts(points, is_final=term.is_final)
        lengths = np.diff(points.offset)
        match = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(match)) - points.offset[:-1][match]
        value = pa.array(np.ones(len(match), np.int64))
        if term.value is not None and term.value in self._values:
            value = rows.column(self._values[term.value]).take(pa.array(points.path))
        table = pa.table({"m": match, "j": place, "i": pa.array(self._is_in(term, points)), "v": value})
        aggregate = f"{_SQL[term.kind]}({'distinct ' if term.is_distinct else ''}v)"
        if term.kind == "collect_list":
            aggregate = f"list({'distinct ' if term.is_distinct else ''}v order by j)"
            aggregate += " filter (i and v is not null)"
        else:
            aggregate += " filter (i)"
        is_whole = bool((counted == np.r_[lengths, 0][points.match]).all())
        if is_whole:
            found = ask(f"select m, {aggregate} as x from rows group by m", rows=table)
            key = found.column("m").to_numpy()
        else:
            window = "partition by m order by j rows unbounded preceding"
            found = ask(f"select m, j, {aggregate} over ({window}) as x from rows", rows=table)
            key = points.offset[found.column("m").to_numpy()] + found.column("j").to_numpy()
        where = np.full(len(lengths) + len(match) + 1, -1)
        where[key] = np.arange(len(key))
        wanted = points.match if is_whole else np.r_[points.offset[:-1], 0][points.match] + counted - 1
        is_there = (points.match >= 0) & (counted > 0)
        place = np.where(is_there, where[np.where(is_there, wanted, -1)], -1)
        result = found.column("x").cast(kind).take(pa.array(place, mask=place < 0))
        if term.kind == "count":
            is_empty = (points.match >= 0) & (counted == 0)
            result = pa.array(np.where(is_empty, 0, result.fill_null(0).to_numpy()), kind, mask=~is_there & ~is_empty)
        return result


_SQL = {"count": "count", "sum": "sum", "avg": "avg", "min": "min", "max": "max"}


def folded_type(kind: str, value: pa.DataType) -> pa.DataType:
    """The type of an aggregate, as Spark has it."""
    if kind == "collect_list":
        return pa.list_(value)
    if kind in ("min", "max"):
        return value
    if pa.types.is_decimal(value):
        digits, scale = (10, 0) if kind == "sum" else (4, 4)
        return pa.decimal128(min(38, value.precision + digits), min(38, value.scale + scale))
    return pa.int64() if kind == "sum" and pa.types.is_integer(value) else pa.float64()


def fold_of(term: Fold, values: list[Any], type_: pa.DataType) -> Any:
    """An aggregate of some values; None where its type cannot hold it."""
    if term.is_distinct:
        values = list(dict.fromkeys(values))
    if term.kind in ("count", "collect_list"):
        return len(values) if term.kind == "count" else values
    if not values or term.kind in ("min", "max"):
        return None if not values else min(values) if term.kind == "min" else max(values)
    if pa.types.is_decimal(type_):
        with localcontext(prec=DIGITS):
            total = sum(values, Decimal(0)) / (len(values) if term.kind == "avg" else 1)
            total = total.quantize(Decimal(1).scaleb(-type_.scale), ROUND_HALF_UP)
        return total if total.adjusted() < type_.precision - type_.scale else None
    total = sum(values) if term.kind == "sum" else sum(values) / len(values)
    return total if not pa.types.is_integer(type_) or -(2**63) <= total < 2**63 else None


def _counts(points: MeasurePoints, *, is_final: bool) -> Array:
    """How many rows of its match count at each point."""
    return np.r_[np.diff(points.offset), 0][points.match] if is_final else points.rows


def _places(term: Navigation, points: MeasurePoints, is_in: Array) -> Array:
    """For each point the place in `path` of the row that a navigation names, or -1."""
    before = np.r_[0, np.cumsum(is_in)]
    start = np.r_[points.offset[:-1], 0][points.match]
    first = before[start]
    count = before[start + np.where(points.match < 0, 0, _counts(points, is_final=term.is_final))] - first
    count = np.where(points.match < 0, 0, count)
    wanted = first + (count - 1 - term.offset if term.is_last else term.offset)
    is_there = term.offset < count
    return np.where(is_there, np.r_[np.flatnonzero(is_in), -1][np.where(is_there, wanted, -1)], -1)
