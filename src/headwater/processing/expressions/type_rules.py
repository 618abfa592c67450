"""The type rules of Spark in ANSI mode: which type two operands share, and which type an operation on them gives.

An integer counts as a decimal of its largest number of digits beside a decimal; a literal counts as one of its own digits. The result of
an operation on decimals has at most 38 digits; where more would be needed, digits after the point go first, down to six.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

BOOLEAN, STRING, BINARY = pa.bool_(), pa.string(), pa.binary()
BYTE, SHORT, INT, LONG = pa.int8(), pa.int16(), pa.int32(), pa.int64()
FLOAT, DOUBLE = pa.float32(), pa.float64()
DATE, TIMESTAMP, TIMESTAMP_NTZ = pa.date32(), pa.timestamp("us", tz="UTC"), pa.timestamp("us")
DURATION, NULL = pa.duration("us"), pa.null()

DIGITS_MAX = 38
SCALE_KEPT = 6

_WIDENED = [BYTE, SHORT, INT, LONG, FLOAT, DOUBLE]
_DIGITS = {BYTE: 3, SHORT: 5, INT: 10, LONG: 20}
_MOMENTS = [DATE, TIMESTAMP_NTZ, TIMESTAMP]


def is_number(type_: pa.DataType) -> bool:
    """Whether it is one of Spark's numeric types."""
    return type_ in _WIDENED or pa.types.is_decimal128(type_)


def is_decimal(type_: pa.DataType) -> bool:
    """Whether it is DECIMAL."""
    return pa.types.is_decimal128(type_)


def is_fraction(type_: pa.DataType) -> bool:
    """Whether it is FLOAT or DOUBLE."""
    return type_ in (FLOAT, DOUBLE)


def decimal(precision: int, scale: int) -> pa.DataType:
    """DECIMAL with these digits."""
    return pa.decimal128(precision, scale)


def as_decimal(type_: pa.DataType, digits: int | None = None) -> pa.DataType:
    """The decimal that has room for every value of an integer type, or for a literal of so many digits."""
    return type_ if is_decimal(type_) else decimal(digits or _DIGITS[type_], 0)


def adjusted(precision: int, scale: int) -> pa.DataType:
    """The decimal that an operation gives which needs these digits."""
    if precision <= DIGITS_MAX:
        return decimal(precision, scale)
    return decimal(DIGITS_MAX, max(DIGITS_MAX - (precision - scale), min(scale, SCALE_KEPT)))


def wider_decimal(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The decimal that has room for both; beyond 38 digits those after the point go first."""
    scale = max(one.scale, other.scale)
    whole = max(one.precision - one.scale, other.precision - other.scale)
    if whole + scale <= DIGITS_MAX:
        return decimal(whole + scale, scale)
    return decimal(DIGITS_MAX, max(0, DIGITS_MAX - whole))


def sum_decimal(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """What `+` and `-` give."""
    scale = max(one.scale, other.scale)
    return adjusted(max(one.precision - one.scale, other.precision - other.scale) + scale + 1, scale)


def product_decimal(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """What `*` gives."""
    return adjusted(one.precision + other.precision + 1, one.scale + other.scale)


def quotient_decimal(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """What `/` gives."""
    scale = max(SCALE_KEPT, one.scale + other.precision + 1)
    return adjusted(one.precision - one.scale + other.scale + scale, scale)


def remainder_decimal(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """What `%` gives."""
    scale = max(one.scale, other.scale)
    return adjusted(min(one.precision - one.scale, other.precision - other.scale) + scale, scale)


def common_type(types: Sequence[pa.DataType]) -> pa.DataType | None:
    """The type that values of all these types are converted to; None where they have none."""
    found = NULL
    for type_ in sorted(types, key=lambda each: each != STRING):  # as Spark: texts are widened first
        wider = wider_type(found, type_)
        if wider is None:
            return None
        found = wider
    return found


def wider_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that two operands share; None where they share none."""
    if one == other or other == NULL:
        return one
    if one == NULL:
        return other
    if STRING in (one, other):
        return _beside_text(other if one == STRING else one)
    if is_number(one) and is_number(other):
        return _wider_number(one, other)
    if one in _MOMENTS and other in _MOMENTS:
        return max(one, other, key=_MOMENTS.index)
    return None


def _wider_number(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if is_decimal(one) or is_decimal(other):
        if is_fraction(one) or is_fraction(other):
            return DOUBLE
        return wider_decimal(as_decimal(one), as_decimal(other))
    wider = max(one, other, key=_WIDENED.index)
    return DOUBLE if wider == FLOAT else wider


def _beside_text(type_: pa.DataType) -> pa.DataType | None:
    if type_ in _DIGITS:
        return LONG
    if is_number(type_):
        return DOUBLE
    return None if type_ == DURATION else type_
