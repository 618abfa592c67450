"""Partial sums: what is kept of rows so that sums, averages and the like of more rows can be made of it.

Of rows that belong together one is made, with how many they are, and as far as aggregates need it of each column: how many values,
their sum, the least and the greatest. Such rows are made one in the same way, in any order and any number of steps. Sums of integers and
decimals are exact: added as 64-bit numbers where they fit, else with 38 digits; those of DOUBLE depend in their last digits on the order
of addition. NaN is above all numbers, as in SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.errors import InvalidInput
from headwater.processing.operators.aggregate import Aggregate
from headwater.processing.operators.grouping import Groups
from headwater.processing.operators.sql import ask

KINDS = ("count", "sum", "avg", "min", "max")
ROWS = "_rows"
_DIGITS = 38

Array = Any
"""A NumPy array."""


class Partials:
    """The partial sums that some aggregates need."""

    def __init__(self, aggregates: Sequence[Aggregate], schema: pa.Schema) -> None:
        self._aggregates = aggregates
        self.used = sorted({each.column for each in aggregates if each.column is not None})
        """The columns whose values are needed."""
        self._parts = [(ROWS, "count", ""), *(part for number in range(len(self.used)) for part in self._of(number))]
        kinds = {name: schema.field(name).type for name in self.used}
        self.fields = [pa.field(name, _type(do, kinds.get(column))) for name, do, column in self._parts]

    def of(self, rows: pa.Table, groups: Groups) -> dict[str, pa.Array]:
        """The sums of groups of rows."""
        return {
            field.name: _reduced(do, rows.column(column) if column else None, groups, field.type)
            for (_, do, column), field in zip(self._parts, self.fields, strict=True)
        }

    def folded(self, parts: pa.Table, groups: Groups) -> dict[str, pa.Array]:
        """The sums of groups of rows that are sums themselves."""
        return {
            field.name: _reduced("sum" if do == "count" else do, parts.column(field.name), groups, field.type)
            for (_, do, _), field in zip(self._parts, self.fields, strict=True)
        }

    def results(self, parts: pa.Table) -> dict[str, pa.Array | pa.ChunkedArray]:
        """The aggregates of each row."""
        return {each.name: self._result(each, parts) for each in self._aggregates}

    def _of(self, number: int) -> list[tuple[str, str, str]]:
        """What is kept of a column: its name here, what is done, and the column."""
        name = self.used[number]
        asked = {each.kind for each in self._aggregates if each.column == name}
        needs = {"n": ("count", {"count", "avg"}), "s": ("sum", {"sum", "avg"})} | {
            end: (end, {end}) for end in ("min", "max")
        }
        return [(f"_{short}{number}", do, name) for short, (do, kinds) in needs.items() if kinds & asked]

    def _result(self, each: Aggregate, parts: pa.Table) -> pa.ChunkedArray | pa.Array:
        if each.column is None:
            return parts.column(ROWS)
        number = self.used.index(each.column)
        match each.kind:
            case "count":
                return parts.column(f"_n{number}")
            case "sum":
                return _cast(parts.column(f"_s{number}"), each)
            case "avg":
                return pc.divide(parts.column(f"_s{number}").cast(pa.float64()), parts.column(f"_n{number}"))
            case _:
                return parts.column(f"_{each.kind}{number}")


def _type(do: str, kind: pa.DataType | None) -> pa.DataType:
    """The type in which something is kept of a column."""
    if kind is None or do == "count":
        return pa.int64()
    if do != "sum":
        return kind
    if pa.types.is_floating(kind):
        return pa.float64()
    return pa.decimal128(_DIGITS, kind.scale if pa.types.is_decimal(kind) else 0)


def _cast(sums: pa.ChunkedArray, each: Aggregate) -> pa.ChunkedArray:
    try:
        return sums.cast(each.type)
    except pa.ArrowInvalid as error:
        raise _too_large(error) from None


def _too_large(error: Exception) -> InvalidInput:
    return InvalidInput(
        f"A sum does not fit into its column: {str(error).splitlines()[0]}",
        advice="Cast the column that is summed to DECIMAL(38, 0) first.",
    )


def _reduced(do: str, column: pa.ChunkedArray | None, groups: Groups, kind: pa.DataType) -> pa.Array:
    """For each group the count, sum, least or greatest of its values, null where it has none; without a column how many rows it has."""
    if column is None:
        return pa.array(np.bincount(groups.row, minlength=len(groups)))
    row = groups.row
    if column.null_count:
        row, column = row[column.is_valid().to_numpy()], column.drop_null()
    counts = np.bincount(row, minlength=len(groups)) if do == "count" or len(row) < len(groups.row) else None
    if do == "count":
        return pa.array(counts)
    is_null = None if counts is None else counts == 0
    numbers = _numbers(column) if do != "sum" or not pa.types.is_decimal(column.type) else _whole(column)
    if numbers is None or (do == "sum" and not _fits(numbers)):
        return _reduced_apart(do, column, row, len(groups), kind)
    if do == "sum":
        found = np.zeros(len(groups), numbers.dtype)
        np.add.at(found, row, numbers)
    else:
        found = _ended(do, numbers, row, len(groups))
    if pa.types.is_floating(kind) or pa.types.is_integer(kind):
        return pa.array(found, mask=is_null).cast(kind, safe=False)
    return _back(pa.array(found, mask=is_null), kind)


def _numbers(column: pa.ChunkedArray) -> Array | None:
    """Values as 64-bit numbers of the same order; None where they are none."""
    kind = column.type
    if pa.types.is_signed_integer(kind):
        return column.cast(pa.int64()).to_numpy()
    if pa.types.is_floating(kind):
        return column.cast(pa.float64()).to_numpy()
    if pa.types.is_timestamp(kind):
        return column.cast(pa.int64()).to_numpy()
    return column.cast(pa.int32()).cast(pa.int64()).to_numpy() if pa.types.is_date32(kind) else None


def _whole(column: pa.ChunkedArray) -> Array | None:
    """Sums with 38 digits as 64-bit numbers; None where they are not whole, or larger."""
    if column.type.scale:
        return None
    try:
        return column.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        return None


def _fits(numbers: Array) -> bool:
    """Whether any sum of some of them has 64 bits."""
    if not len(numbers) or numbers.dtype == np.float64:
        return True
    return max(abs(int(numbers.min())), abs(int(numbers.max()))) * len(numbers) < 2**62


def _ended(do: str, numbers: Array, row: Array, count: int) -> Array:
    """The least or the greatest of each group."""
    found = np.zeros(count, numbers.dtype)
    found[row] = numbers  # any of them, to begin with
    with np.errstate(invalid="ignore"):  # of NaN: it is the greatest, and `fmin` takes any number before it
        (np.maximum if do == "max" else np.fmin).at(found, row, numbers)
    return found


def _back(found: pa.Array, kind: pa.DataType) -> pa.Array:
    return found.cast(pa.int32()).cast(kind) if pa.types.is_date32(kind) else found.cast(kind)


def _reduced_apart(do: str, column: pa.ChunkedArray, row: Array, count: int, kind: pa.DataType) -> pa.Array:
    """The same of values that are no 64-bit numbers, by SQL."""
    import duckdb

    digits = f"::decimal({_DIGITS}, {kind.scale})" if do == "sum" else ""
    try:
        found = ask(
            f"select k, {do}(v{digits}){digits} as v from rows group by k", rows=pa.table({"k": row, "v": column})
        )
    except (duckdb.ConversionException, duckdb.OutOfRangeException) as error:
        raise _too_large(error) from None
    place = np.full(count, -1)
    place[found.column("k").to_numpy()] = np.arange(found.num_rows)
    values = found.column("v").cast(kind).combine_chunks()
    return values.take(pa.array(place, mask=place < 0))
