"""A term: one node of a compiled expression, with its type and the function that computes it for many rows.

A term gives an Arrow array with one value for each row, or a scalar that all rows share. As in Spark with
`spark.sql.ansi.enabled=true`, which is the default of Spark 4 and of Headwater, a value can fail: an overflow, a division by zero, a text
that is not a number. Spark evaluates only what a row needs: it skips the right side of `AND` where the left side is false, and the
branches of `CASE` that a row does not take. Here every branch is computed for all rows, so a term gets the rows that are `active`, and
fails only for those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Active: TypeAlias = np.ndarray | None
"""For each row whether a failure of it counts; None for all rows."""

Values: TypeAlias = Any
"""A `pyarrow.Array`, or a `pyarrow.Scalar` that all rows share."""


class RowFailure(Exception):
    """A value that Spark refuses: `what` says why, `row` is the first such row."""

    def __init__(self, what: str, row: int) -> None:
        super().__init__(what, row)
        self.what = what
        self.row = row


@dataclass(frozen=True)
class Rows:
    """The columns that terms read, and how many rows they have."""

    columns: Mapping[str, pa.Array]
    count: int


@dataclass(frozen=True, kw_only=True)
class Term:
    """A typed node. `value` is set for a constant; `digits` is how many digits an integer literal has."""

    type: pa.DataType
    run: Callable[[Rows, Active], Values]
    columns: tuple[str, ...] = ()
    may_fail: bool = False
    value: pa.Scalar | None = None
    digits: int | None = None
    months: int | None = None


def constant(value: Any, type_: pa.DataType, *, digits: int | None = None) -> Term:
    """A term that has the same value in every row."""
    scalar = value if isinstance(value, pa.Scalar) else pa.scalar(value, type_)
    return Term(type=type_, run=lambda rows, active: scalar, value=scalar, digits=digits)


def column(name: str, type_: pa.DataType) -> Term:
    """A term that reads a column."""
    return Term(type=type_, run=lambda rows, active: rows.columns[name], columns=(name,))


def mapped(type_: pa.DataType, args: Sequence[Term], kernel: Callable[..., Values], *, strict: bool = True) -> Term:
    """A term whose kernel cannot fail. `strict`: null in, null out, so a constant null makes the whole term null."""
    return _folded(type_, args, lambda *values: (kernel(*values), None), "", strict=strict, tries=False)


def fallible(
    type_: pa.DataType,
    args: Sequence[Term],
    kernel: Callable[..., tuple[Values, Any]],
    what: str,
    *,
    tries: bool = False,
    right_first: bool = False,
) -> Term:
    """A term whose kernel also gives a mask of the rows that fail, or None. With `tries` such rows are null instead.

    Spark evaluates arguments in their order, and no further where one is null; `right_first` says that it begins with the last.
    """
    if right_first:
        term = _folded(type_, args[::-1], lambda *values: kernel(*values[::-1]), what, strict=True, tries=tries)
        return replace(term, columns=columns_of(args)) if term.value is None else term
    return _folded(type_, args, kernel, what, strict=True, tries=tries)


def _folded(
    type_: pa.DataType,
    args: Sequence[Term],
    kernel: Callable[..., tuple[Values, Any]],
    what: str,
    *,
    strict: bool,
    tries: bool,
) -> Term:
    if strict and any(arg.value is not None and not arg.value.is_valid for arg in args):
        return constant(None, type_)

    def run(rows: Rows, active: Active) -> Values:
        values: list[Values] = []
        for number, arg in enumerate(args):
            values.append(arg.run(rows, active))
            if strict and any(later.may_fail for later in args[number + 1 :]):
                active = narrowed(active, valid_of(values[-1], rows.count))
        if all(isinstance(value, pa.Scalar) for value in values) and values:
            values = [arrayed(value, rows.count) for value in values]
        result, failed = kernel(*values)
        if failed is None:
            return result
        failing = failed if active is None else failed & active
        if tries:
            return pc.if_else(pa.array(failing), pa.scalar(None, type_), result) if failing.any() else result
        if failing.any():
            raise RowFailure(what, int(np.argmax(failing)))
        return result

    may_fail = any(arg.may_fail for arg in args) or (bool(what) and not tries)
    term = Term(type=type_, run=run, columns=columns_of(args), may_fail=may_fail)
    return folded(term, args)


def columns_of(terms: Sequence[Term]) -> tuple[str, ...]:
    """The columns that terms read, in the order of the terms."""
    return tuple(dict.fromkeys(name for term in terms for name in term.columns))


def folded(term: Term, args: Sequence[Term]) -> Term:
    """The constant that a term of constants gives; the term itself where that fails, which rows may never reach."""
    if any(arg.value is None for arg in args):
        return term
    try:
        value = term.run(Rows({}, 1), None)
    except RowFailure:
        return term
    return constant(value if isinstance(value, pa.Scalar) else value[0], term.type)


def narrowed(active: Active, more: Active) -> Active:
    """The rows that are in both."""
    if active is None or more is None:
        return more if active is None else active
    return active & more


def arrayed(value: Values, count: int) -> pa.Array:
    """One value for each row."""
    if isinstance(value, pa.Scalar):
        return pa.repeat(value, count) if value.is_valid else pa.nulls(count, value.type)
    return value


def valid_of(value: Values, count: int) -> Active:
    """For each row whether it is not null; None where all are."""
    if isinstance(value, pa.Scalar):
        return None if value.is_valid else np.zeros(count, bool)
    return None if value.null_count == 0 else truths(pc.is_valid(value))


def truths(value: Values, *, null: bool = False) -> np.ndarray:
    """A boolean array as NumPy has it, with `null` where it is null."""
    if isinstance(value, pa.Scalar):
        return np.array([value.as_py() if value.is_valid else null], bool)
    return (value.fill_null(null) if value.null_count else value).to_numpy(zero_copy_only=False)


def numbers(value: Values) -> np.ndarray:
    """The numbers of an array, with 0 where it is null; days and moments as integers. A scalar is an array of one that broadcasts."""
    if isinstance(value, pa.Scalar):
        value = pa.array([value.as_py()], value.type) if value.is_valid else pa.nulls(1, value.type)
    if pa.types.is_temporal(value.type):
        value = value.view(pa.int32() if pa.types.is_date32(value.type) else pa.int64())
    return (value.fill_null(0) if value.null_count else value).to_numpy(zero_copy_only=False)


def array_of(found: np.ndarray, type_: pa.DataType, *args: Values) -> pa.Array:
    """An array of these numbers, null where one of the arguments is."""
    valid: Active = None
    for arg in args:
        if not isinstance(arg, pa.Scalar):
            valid = narrowed(valid, valid_of(arg, len(arg)))
    stored = pa.array(found, mask=None if valid is None else ~valid)
    if pa.types.is_temporal(type_):
        return stored.cast(pa.int32() if pa.types.is_date32(type_) else pa.int64()).view(type_)
    return stored if stored.type == type_ else stored.cast(type_)


def anywhere(failed: np.ndarray, *args: Values) -> np.ndarray | None:
    """The rows that fail and have no null argument; None where there are none."""
    if not failed.any():
        return None
    for arg in args:
        if not isinstance(arg, pa.Scalar) and arg.null_count:
            failed = failed & truths(pc.is_valid(arg))
    return failed if failed.any() else None
