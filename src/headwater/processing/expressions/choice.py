"""Choices between terms: AND, OR, NOT, CASE, COALESCE, and the greatest or least of several.

What Spark does not evaluate for a row cannot fail for it: the right side of an AND whose left side is false, a branch of CASE that is not
taken, what comes after the first value of COALESCE that is not null.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from headwater.processing.expressions.comparison import kernel
from headwater.processing.expressions.term import (
    Active,
    Rows,
    Term,
    Values,
    arrayed,
    columns_of,
    folded,
    mapped,
    narrowed,
    truths,
)
from headwater.processing.expressions.type_rules import BOOLEAN


def both(left: Term, right: Term) -> Term:
    """`left AND right`: false where one of them is false, else null where one is null."""

    def run(rows: Rows, active: Active) -> Values:
        one = left.run(rows, active)
        needed = narrowed(active, truths(arrayed(one, rows.count), null=True)) if right.may_fail else active
        return pc.and_kleene(one, right.run(rows, needed))

    return _chosen(BOOLEAN, [left, right], run)


def either(left: Term, right: Term) -> Term:
    """`left OR right`: true where one of them is true, else null where one is null."""

    def run(rows: Rows, active: Active) -> Values:
        one = left.run(rows, active)
        needed = narrowed(active, ~truths(arrayed(one, rows.count))) if right.may_fail else active
        return pc.or_kleene(one, right.run(rows, needed))

    return _chosen(BOOLEAN, [left, right], run)


def negated(term: Term) -> Term:
    """`NOT term`."""
    return mapped(BOOLEAN, [term], pc.invert)


def cases(type_: pa.DataType, branches: Sequence[tuple[Term, Term]], otherwise: Term) -> Term:
    """`CASE WHEN … THEN … ELSE … END`: the value of the first branch whose condition is true."""
    if branches and branches[0][0].value is not None:
        first = branches[0][0].value
        return branches[0][1] if first.as_py() else cases(type_, branches[1:], otherwise)
    if not branches:
        return otherwise

    def run(rows: Rows, active: Active) -> Values:
        conditions, values, left = [], [], active
        for condition, value in branches:
            holds = arrayed(condition.run(rows, left), rows.count)
            taken = truths(holds)
            values.append(value.run(rows, narrowed(left, taken) if value.may_fail else None))
            conditions.append(pa.array(taken))
            left = narrowed(left, ~taken)
        values.append(otherwise.run(rows, left))
        names = [str(number) for number in range(len(conditions))]
        return pc.case_when(pa.StructArray.from_arrays(conditions, names=names), *_arrays(values, rows.count))

    return _chosen(type_, [*(term for branch in branches for term in branch), otherwise], run)


def _arrays(values: Sequence[Values], count: int) -> list[pa.Array]:
    return [arrayed(value, count) for value in values]


def first_valid(type_: pa.DataType, terms: Sequence[Term]) -> Term:
    """`COALESCE(…)`: the first value that is not null."""

    def run(rows: Rows, active: Active) -> Values:
        found = arrayed(terms[0].run(rows, active), rows.count)
        for term in terms[1:]:
            if not found.null_count:
                break
            missing = truths(pc.is_null(found)) if term.may_fail else None
            found = pc.coalesce(found, term.run(rows, narrowed(active, missing)))
        return found

    return _chosen(type_, terms, run)


def extreme(name: str, type_: pa.DataType, terms: Sequence[Term]) -> Term:
    """`GREATEST(…)` with `name` ">", `LEAST(…)` with "<": nulls are skipped."""
    beats = kernel(name, type_)

    def run(*values: Values) -> Values:
        found = values[0]
        for value in values[1:]:
            better = pc.or_(pc.fill_null(beats(value, found), False), pc.is_null(found))
            found = pc.if_else(better, value, found)
        return found

    return mapped(type_, terms, run, strict=False)


def _chosen(type_: pa.DataType, terms: Sequence[Term], run: object) -> Term:
    term = Term(
        type=type_,
        run=lambda rows, active: arrayed(run(rows, active), rows.count),  # type: ignore[operator]
        columns=columns_of(terms),
        may_fail=any(term.may_fail for term in terms),
    )
    return folded(term, terms)
