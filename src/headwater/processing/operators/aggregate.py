"""An aggregate: a column that an operator computes over many rows, as users ask for it.

`n="count"`, `spent=("sum", "amount")`, `p95=("percentile", "ms", 0.95)`. Nulls do not count, as in SQL; all are exact, but for sums of
DOUBLE, whose last digits depend on the order of addition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from headwater.model.ddl import type_to_ddl
from headwater.model.errors import InvalidInput

KINDS = ("count", "sum", "avg", "min", "max", "distinct", "percentile")
_OF_NUMBERS = ("sum", "avg", "percentile")

Wanted = str | tuple[Any, ...]
"""An aggregate: "count", or one of `KINDS` and a column, and for a percentile which one (0 to 1)."""


class Aggregate(NamedTuple):
    """A column of the result."""

    name: str
    kind: str
    column: str | None
    share: float
    type: pa.DataType


def aggregates_of(
    wanted: Mapping[str, Wanted], schema: pa.Schema, *, taken: Sequence[str], kinds: Sequence[str] = KINDS
) -> list[Aggregate]:
    """The aggregates that are asked for, over rows with this schema; the result has columns with `taken` names already."""
    if not wanted:
        raise InvalidInput(
            "No aggregate is given.", advice='Name at least one, such as n="count" or total=("sum", "amount").'
        )
    return [_aggregate(name, want, schema, taken, kinds) for name, want in wanted.items()]


def _aggregate(name: str, want: Wanted, schema: pa.Schema, taken: Sequence[str], kinds: Sequence[str]) -> Aggregate:
    parts: tuple[Any, ...] = (want,) if isinstance(want, str) else want
    kind, *rest = parts
    if kind not in kinds:
        raise InvalidInput(
            f"{name}: the aggregate {kind!r} is not available here.", advice=f"Use one of {', '.join(kinds)}."
        )
    if name in taken:
        raise InvalidInput(f"There is a column {name!r} already.", advice="Give the aggregate another name.")
    if kind == "count" and not rest:
        return Aggregate(name, kind, None, 0.0, pa.int64())
    if not rest or rest[0] not in schema.names:
        raise InvalidInput(
            f"{name}: {kind} of which column?", advice=f'Such as {name}=("{kind}", "{schema.names[0]}").'
        )
    given = schema.field(rest[0]).type
    if kind in _OF_NUMBERS and not _is_number(given):
        raise InvalidInput(
            f"{name}: column {rest[0]!r} has no {kind}, it is {type_to_ddl(given)}.", advice="Use a column of numbers."
        )
    share = float(rest[1]) if kind == "percentile" and len(rest) > 1 else 0.5
    if not 0.0 <= share <= 1.0:
        raise InvalidInput(f"{name}: {share} is not a percentile.", advice="Use a number from 0 to 1, such as 0.95.")
    return Aggregate(name, kind, rest[0], share, _type(kind, given))


def _is_number(given: pa.DataType) -> bool:
    return pa.types.is_integer(given) or pa.types.is_floating(given) or pa.types.is_decimal(given)


def _type(kind: str, given: pa.DataType) -> pa.DataType:
    types: Mapping[str, pa.DataType] = {
        "count": pa.int64(), "distinct": pa.int64(), "avg": pa.float64(), "percentile": pa.float64(),
    }  # fmt: skip
    if kind == "sum":
        if pa.types.is_integer(given):
            return pa.int64()
        return pa.decimal128(38, given.scale) if pa.types.is_decimal(given) else pa.float64()
    return types.get(kind, given)
