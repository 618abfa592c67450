"""Comparisons as Spark makes them: NaN is greater than every number and equal to itself, -0.0 is 0.0, texts compare by their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.processing.expressions.term import (
    Active,
    Rows,
    Term,
    Values,
    arrayed,
    columns_of,
    mapped,
    narrowed,
    truths,
)
from headwater.processing.expressions.type_rules import BOOLEAN, is_fraction

_ARROW: dict[str, Callable[..., Values]] = {
    "=": pc.equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


def compared(name: str, left: Term, right: Term) -> Term:
    """`left name right`, of operands that have one type."""
    return mapped(BOOLEAN, [left, right], kernel(name, left.type))


def kernel(name: str, type_: pa.DataType) -> Callable[[Values, Values], Values]:
    """The comparison of two columns of a type; null where one of them is null."""
    if is_fraction(type_):
        return lambda left, right: _fractions(name, left, right)
    return _ARROW[name]


def _fractions(name: str, left: Values, right: Values) -> Values:
    if isinstance(left, pa.Scalar) and isinstance(right, pa.Scalar):
        return _fractions(name, arrayed(left, 1), right)[0]
    plain = _ARROW[name](left, right)
    left_nan, right_nan = _nan(left), _nan(right)
    if not (left_nan.any() or right_nan.any()):
        return plain
    match name:
        case "=":
            found = left_nan & right_nan
        case "<":
            found = ~left_nan & right_nan
        case "<=":
            found = right_nan | (left_nan & right_nan)
        case ">":
            found = left_nan & ~right_nan
        case _:
            found = left_nan | (left_nan & right_nan)
    # Beside a NaN Arrow's answer is false, so what is found is only added.
    found = np.broadcast_to(found, len(plain))
    return pc.if_else(pc.is_valid(plain), pc.or_(plain, pa.array(found)), plain)


def _nan(values: Values) -> np.ndarray:
    return truths(pc.is_nan(values))


def null_safe(left: Term, right: Term) -> Term:
    """`left <=> right`: nulls are equal to each other and to nothing else."""
    equal = kernel("=", left.type)

    def run(one: Values, other: Values) -> Values:
        both = pc.and_(pc.is_null(one), pc.is_null(other))
        return pc.or_(both, pc.fill_null(equal(one, other), False))

    return mapped(BOOLEAN, [left, right], run, strict=False)


def is_null(term: Term) -> Term:
    """`term IS NULL`."""
    return mapped(BOOLEAN, [term], pc.is_null, strict=False)


def is_truth(term: Term, value: bool) -> Term:
    """`term IS TRUE` or `IS FALSE`: never null."""
    return mapped(BOOLEAN, [term], lambda values: pc.fill_null(pc.equal(values, value), False), strict=False)


def among(term: Term, choices: Sequence[Term]) -> Term:
    """`term IN (choices)`: null where it is not found and one of them, or the term, is null."""
    constants = [choice.value for choice in choices]
    if all(value is not None for value in constants) and not is_fraction(term.type):
        return _among_constants(term, [value for value in constants if value is not None])
    equal = kernel("=", term.type)

    def run(rows: Rows, active: Active) -> Values:
        wanted = arrayed(term.run(rows, active), rows.count)
        found: Values = pa.scalar(False)
        for choice in choices:
            # Spark compares one after the other, up to the first that is equal.
            left = None if not choice.may_fail else ~truths(arrayed(found, rows.count)) & truths(pc.is_valid(wanted))
            found = pc.or_kleene(found, equal(wanted, choice.run(rows, narrowed(active, left))))
        return arrayed(found, rows.count)

    return Term(
        type=BOOLEAN,
        run=run,
        columns=columns_of([term, *choices]),
        may_fail=term.may_fail or any(choice.may_fail for choice in choices),
    )


def _among_constants(term: Term, choices: Sequence[pa.Scalar]) -> Term:
    valid = [choice for choice in choices if choice.is_valid]
    has_null = len(valid) < len(choices)
    wanted = pa.array([choice.as_py() for choice in valid], term.type)

    def run(values: Values) -> Values:
        found = pc.is_in(values, value_set=wanted)
        if has_null:
            return pc.if_else(found, True, pa.scalar(None, pa.bool_()))
        return pc.if_else(pc.is_valid(values), found, pa.scalar(None, pa.bool_()))

    return mapped(BOOLEAN, [term], run)
