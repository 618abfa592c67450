"""Casts between types as Spark makes them in ANSI mode: a value that does not fit, and a text that is not one of the type, fail.

DOUBLE to STRING is not here, nor FLOAT to STRING and DECIMAL: Spark takes the digits that Java prints, and before version 19 Java prints
more of them than the number needs. For DOUBLE to DECIMAL that matters from 2^53 on only, where the result is the one of newer versions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.ddl import type_to_ddl
from headwater.processing.expressions.decimals import digits_of, from_digits, rescaled
from headwater.processing.expressions.term import (
    Term,
    Values,
    anywhere,
    array_of,
    arrayed,
    constant,
    fallible,
    mapped,
    numbers,
    truths,
)
from headwater.processing.expressions.text_casts import FROM_TEXT
from headwater.processing.expressions.type_rules import (
    BOOLEAN,
    BYTE,
    DATE,
    DOUBLE,
    FLOAT,
    INT,
    LONG,
    SHORT,
    STRING,
    TIMESTAMP,
    TIMESTAMP_NTZ,
    as_decimal,
    is_decimal,
    is_fraction,
)

INTEGERS = (BYTE, SHORT, INT, LONG)
DAY_US = 86_400_000_000
SECOND_US = 1_000_000

Kernel = Callable[[Values], tuple[Values, Any]]


def cast(term: Term, type_: pa.DataType, *, tries: bool = False) -> Term | None:
    """The term as another type; None where the language has no such cast."""
    if term.type == type_:
        return term
    if pa.types.is_null(term.type):
        return constant(None, type_)
    kernel = _kernel(term.type, type_)
    if kernel is None:
        return None
    if kernel in _SAFE or _has_room(term.type, type_):
        return mapped(type_, [term], lambda values: kernel(values, type_)[0])
    what = f"a value does not fit into {type_to_ddl(type_)}"
    return fallible(type_, [term], lambda values: kernel(values, type_), what, tries=tries)


def _has_room(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether every number of a type fits into a decimal."""
    if not is_decimal(target) or not (is_decimal(source) or source in INTEGERS):
        return False
    exact = as_decimal(source)
    return target.precision - target.scale >= exact.precision - exact.scale + (target.scale < exact.scale)


def _kernel(source: pa.DataType, target: pa.DataType) -> Callable[[Values, pa.DataType], tuple[Values, Any]] | None:
    if source == STRING:
        return FROM_TEXT.get(target) or (FROM_TEXT["decimal"] if is_decimal(target) else None)
    if target == STRING:
        return _to_text(source)
    if source == BOOLEAN or target == BOOLEAN:
        return _of_truth(source, target)
    if source in (DATE, TIMESTAMP, TIMESTAMP_NTZ) or target in (DATE, TIMESTAMP, TIMESTAMP_NTZ):
        return _of_time(source, target)
    return _of_number(source, target) if _is_number(source) and _is_number(target) else None


def _is_number(type_: pa.DataType) -> bool:
    return type_ in INTEGERS or is_decimal(type_) or pa.types.is_floating(type_)


def _of_number(source: pa.DataType, target: pa.DataType) -> Callable[[Values, pa.DataType], tuple[Values, Any]] | None:
    if source in INTEGERS and target in INTEGERS:
        return _unchecked if INTEGERS.index(target) > INTEGERS.index(source) else _narrower
    if target in (DOUBLE, FLOAT):
        return _decimal_to_fraction if is_decimal(source) else _unchecked
    if is_fraction(source) and target in INTEGERS:
        return _fraction_to_integer
    if is_decimal(source):
        return _decimal_to_decimal if is_decimal(target) else _decimal_to_integer
    if source == DOUBLE:
        return _double_to_decimal
    return _integer_to_decimal if source in INTEGERS else None


def _unchecked(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    return pc.cast(values, type_, safe=False), None


def _narrower(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    limits = np.iinfo(type_.to_pandas_dtype())
    found = numbers(values)
    return pc.cast(values, type_, safe=False), anywhere((found < limits.min) | (found > limits.max), values)


def _fraction_to_integer(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    # As Java: rounded toward zero, and what is only just beyond the limits, as a DOUBLE sees them, is the limit.
    found, limits = numbers(values).astype(np.float64), np.iinfo(type_.to_pandas_dtype())
    least, most = float(limits.min), float(limits.max)
    fits = (np.floor(found) <= most) & (np.ceil(found) >= least)
    whole = np.trunc(np.where(fits, found, 0))
    stored = np.where(whole >= most, limits.max, np.where(whole >= most, 0, whole).astype(np.int64))
    return array_of(stored, type_, values), anywhere(~fits, values)


def _integer_to_decimal(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    found = numbers(values)
    wide = (type_.scale > 0 and type_.precision > 18) or type_.scale + len(str(np.iinfo(found.dtype).max)) > 18
    digits = found.astype(object) if wide else found.astype(np.int64)
    return from_digits(digits * 10**type_.scale, type_, values)


def _decimal_to_decimal(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    digits, source = digits_of(values), values.type
    if max(source.precision, source.precision - source.scale + type_.scale) > 18:
        digits = digits.astype(object)
    return from_digits(rescaled(digits, source.scale, type_.scale), type_, values)


def _decimal_to_integer(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    digits, by = digits_of(values), 10**values.type.scale
    if by >= 2**62:
        digits = digits.astype(object)
    whole = abs(digits) // by
    whole = np.where(digits < 0, -whole, whole)
    limits = np.iinfo(type_.to_pandas_dtype())
    fits = np.asarray((whole >= limits.min) & (whole <= limits.max), bool)
    return array_of(np.where(fits, whole, 0).astype(np.int64), type_, values), anywhere(~fits, values)


def _double_to_decimal(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    found = numbers(values)
    is_finite = np.isfinite(found)
    texts = pc.cast(array_of(np.where(is_finite, found, 0.0), DOUBLE, values), STRING)
    result, failed = FROM_TEXT["decimal"](texts, type_)
    # NaN and infinities are null, in ANSI mode too.
    return result if is_finite.all() else pc.if_else(pa.array(is_finite), result, pa.scalar(None, type_)), failed


def _decimal_to_fraction(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    # Through the text: Arrow's own cast multiplies, and so rounds twice.
    if isinstance(values, pa.Scalar):
        values = arrayed(values, 1)
    return pc.cast(plain_text(values), type_), None


def plain_text(values: pa.Array) -> pa.Array:
    """Decimals as texts, without an exponent."""
    precision, scale = values.type.precision, values.type.scale
    digits = digits_of(values)
    by = 10**scale
    if by >= 2**62:
        digits = digits.astype(object)
    size = abs(digits)
    wide = pa.decimal128(38, 0)
    whole = pc.cast(from_digits((size // by).astype(object), wide, values)[0], STRING)
    if scale:
        part = pc.cast(from_digits((size % by).astype(object), wide, values)[0], STRING)
        whole = pc.binary_join_element_wise(whole, pc.utf8_lpad(part, scale, "0"), ".")
    assert precision <= 38
    sign = pa.array(np.where(np.asarray(digits < 0, bool), "-", ""))
    return pc.binary_join_element_wise(sign, whole, "")


def _of_truth(source: pa.DataType, target: pa.DataType) -> Callable[[Values, pa.DataType], tuple[Values, Any]] | None:
    if source == BOOLEAN and (target in INTEGERS or is_fraction(target) or is_decimal(target)):
        return _truth_to_number
    if target == BOOLEAN and (source in INTEGERS or is_fraction(source) or is_decimal(source)):
        return _number_to_truth
    return None


def _truth_to_number(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    found = truths(values).astype(np.int64)
    if is_decimal(type_):
        return from_digits(
            found * 10**type_.scale if type_.scale < 18 else found.astype(object) * 10**type_.scale, type_, values
        )
    return array_of(found, type_, values), None


def _number_to_truth(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    found = digits_of(values) if is_decimal(values.type) else numbers(values)
    return array_of(np.asarray(found != 0, bool), BOOLEAN, values), None


def _of_time(source: pa.DataType, target: pa.DataType) -> Callable[[Values, pa.DataType], tuple[Values, Any]] | None:
    moments = (TIMESTAMP, TIMESTAMP_NTZ)
    if source == DATE and target in moments:
        return _day_to_moment
    if source in moments and target == DATE:
        return _moment_to_day
    if source in moments and target in moments:
        return _same_moment
    if source == TIMESTAMP and target in (*INTEGERS, DOUBLE):
        return _moment_to_number
    if source in INTEGERS and target == TIMESTAMP:
        return _seconds_to_moment
    return None


def _day_to_moment(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    days = numbers(values).astype(np.int64)
    fits = np.abs(days) < 2**63 // DAY_US
    return array_of(np.where(fits, days, 0) * DAY_US, type_, values), anywhere(~fits, values)


def _moment_to_day(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    return array_of((numbers(values) // DAY_US).astype(np.int32), DATE, values), None


def _same_moment(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    return array_of(numbers(values), type_, values), None


def _moment_to_number(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    found = numbers(values)
    if type_ == DOUBLE:
        return array_of(found / SECOND_US, DOUBLE, values), None
    seconds, limits = found // SECOND_US, np.iinfo(type_.to_pandas_dtype())
    fits = (seconds >= limits.min) & (seconds <= limits.max)
    return array_of(np.where(fits, seconds, 0), type_, values), anywhere(~fits, values)


def _seconds_to_moment(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    # Spark takes the limit where the seconds are too many.
    found = numbers(values).astype(np.int64)
    limit = (2**63 - 1) // SECOND_US
    micros = np.where(
        found > limit, np.iinfo(np.int64).max, np.where(found < -limit, np.iinfo(np.int64).min, found * SECOND_US)
    )
    return array_of(micros, type_, values), None


def _to_text(source: pa.DataType) -> Callable[[Values, pa.DataType], tuple[Values, Any]] | None:
    if source in INTEGERS or source == BOOLEAN:
        return _unchecked
    if is_decimal(source):
        return _decimal_to_text
    if source == DATE:
        return _day_to_text
    return _moment_to_text if source in (TIMESTAMP, TIMESTAMP_NTZ) else None


def _decimal_to_text(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    return plain_text(arrayed(values, 1)), None


def _day_to_text(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    return pc.cast(values, STRING), _beyond(numbers(values), values, 1)


def _moment_to_text(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    plain = array_of(numbers(values), TIMESTAMP_NTZ, values)
    text = pc.replace_substring_regex(pc.cast(plain, STRING), r"\.?0*$", "")
    return text, _beyond(numbers(values), values, DAY_US)


def _beyond(found: np.ndarray, values: Values, unit: int) -> Any:
    """The years that have more or less than four digits, which Arrow and Spark write differently."""
    first, last = -719_162 * unit, 2_932_897 * unit
    return anywhere((found < first) | (found >= last), values)


_SAFE = {
    _unchecked,
    _decimal_to_fraction,
    _decimal_to_text,
    _number_to_truth,
    _moment_to_day,
    _same_moment,
    _seconds_to_moment,
}
"""The casts that cannot fail."""
