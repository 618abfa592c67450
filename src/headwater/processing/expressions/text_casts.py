"""Texts as numbers, truths, dates and moments: which texts Spark takes for one, and what it makes of them.

Spark trims white space and control characters first. A date is `[+-]yyyy[-m[m][-d[d]]]`, and anything may follow after a space or a `T`.
A moment continues with `h[h][:m[m][:s[s][.f…]]]` and an offset from UTC. Names of time zones other than UTC fail, and so does a time
without a date, which Spark takes to be of today.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.processing.expressions.decimals import from_digits
from headwater.processing.expressions.term import Values, anywhere, array_of, arrayed, truths
from headwater.processing.expressions.type_rules import (
    BOOLEAN,
    BYTE,
    DATE,
    DOUBLE,
    FLOAT,
    INT,
    LONG,
    SHORT,
    TIMESTAMP,
    TIMESTAMP_NTZ,
)

TRIMMED = "".join(map(chr, [*range(0x21), 0x7F]))

_TRUE, _FALSE = ["t", "true", "y", "yes", "1"], ["f", "false", "n", "no", "0"]
_FRACTION = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?[dDfF]?$"
_INFINITE, _MINUS_INFINITE = ["inf", "+inf", "infinity", "+infinity"], ["-inf", "-infinity"]
_DAY = r"^(?P<sign>[+-]?)(?P<year>[0-9]{4,6})(?:-(?P<month>[0-9]{1,2})(?:-(?P<day>[0-9]{1,2})"
_CLOCK = (
    r"(?:[ T](?P<hour>[0-9]{1,2})(?::(?P<minute>[0-9]{1,2})(?::(?P<second>[0-9]{1,2})(?:\.(?P<fraction>[0-9]*))?)?)?"
    r"[ ]?(?P<zone>Z|UTC|[+-][0-9]{1,2}(?::[0-9]{1,2}(?::[0-9]{1,2})?)?)?)?"
)


def _trimmed(values: Values) -> pa.Array:
    return pc.utf8_trim(arrayed(values, 1), characters=TRIMMED)


def _whole(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    texts = _trimmed(values)
    good = truths(pc.match_substring_regex(texts, r"^[+-]?[0-9]+$"))
    is_negative = truths(pc.starts_with(texts, "-"))
    digits = pc.replace_substring_regex(texts, r"^[+-]?0*([0-9])", r"\1")
    good &= numbers_of_length(digits) <= 19
    size = pc.cast(pc.if_else(pa.array(good), digits, "0"), pa.uint64()).to_numpy(zero_copy_only=False)
    limits = np.iinfo(type_.to_pandas_dtype())
    most = np.where(is_negative, np.uint64(limits.max) + np.uint64(1), np.uint64(limits.max))
    good &= size <= most
    found = np.where(good, size, 0).astype(np.uint64).view(np.int64)
    return array_of(np.where(is_negative, -found, found), type_, values), anywhere(~good, values)


def numbers_of_length(texts: pa.Array) -> np.ndarray:
    """How many characters each text has."""
    return pc.utf8_length(texts).fill_null(0).to_numpy(zero_copy_only=False)


def _fraction(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    texts = _trimmed(values)
    good = truths(pc.match_substring_regex(texts, _FRACTION))
    bare = pc.replace_substring_regex(texts, r"^\+|[dDfF]$", "")
    found = pc.cast(pc.if_else(pa.array(good), bare, "0"), type_)
    if not good.all():
        lower = pc.utf8_lower(texts)
        for names, value in ((_INFINITE, np.inf), (_MINUS_INFINITE, -np.inf), (["nan"], np.nan)):
            special = pc.is_in(lower, pa.array(names))
            found = pc.if_else(special, pa.scalar(value, type_), found)
            good |= truths(special)
    valid = pc.is_valid(texts)
    return pc.if_else(valid, found, pa.scalar(None, type_)), anywhere(~good, values)


def _truth(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    lower = pc.utf8_lower(_trimmed(values))
    is_true = truths(pc.is_in(lower, pa.array(_TRUE)))
    is_false = truths(pc.is_in(lower, pa.array(_FALSE)))
    return array_of(is_true, BOOLEAN, values), anywhere(~(is_true | is_false), values)


def _decimal(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    texts = _without_exponents(_trimmed(values))
    good = truths(pc.match_substring_regex(texts, r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$"))
    whole = pc.replace_substring_regex(texts, r"^[+-]?0*([0-9]*).*$", r"\1")
    # One digit more than is kept decides how the rest is rounded.
    part = pc.replace_substring_regex(pc.replace_substring_regex(texts, r"^[^.]*\.?", ""), r"[^0-9]", "")
    good &= numbers_of_length(whole) <= type_.precision - type_.scale + 1
    kept = pc.utf8_rpad(pc.utf8_slice_codeunits(part, 0, type_.scale + 1), type_.scale + 1, "0")
    text = pc.if_else(pa.array(good), pc.binary_join_element_wise(whole, kept, ""), "0")
    size = pc.cast(text, pa.decimal256(76, 0)).fill_null(0)
    digits = _big(size)
    rounded = (digits + 5) // 10
    signed = np.where(truths(pc.starts_with(texts, "-")), -rounded, rounded)
    found, failed = from_digits(signed, type_, values)
    bad = anywhere(~good, values)
    return found, bad if failed is None else failed if bad is None else failed | bad


def _without_exponents(texts: pa.Array) -> pa.Array:
    """Decimal texts such as `1.5e3` in full. Few columns have any, so each distinct one is left to Python."""
    has_exponent = pc.match_substring_regex(texts, r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][+-]?[0-9]{1,9}$")
    if not pc.any(has_exponent).as_py():
        return texts
    distinct = pc.unique(texts.filter(has_exponent))
    full = pa.array(
        [f"{Decimal(text.as_py()):f}" if abs(Decimal(text.as_py()).adjusted()) <= 76 else "e" for text in distinct]
    )
    return pc.if_else(has_exponent, pc.take(full, pc.index_in(texts, value_set=distinct)), texts)


def _big(values: pa.Array) -> np.ndarray:
    """The integers of a DECIMAL(76, 0) that are not negative."""
    words = np.frombuffer(values.buffers()[1], np.uint64).reshape(-1, 4)[values.offset : values.offset + len(values)]
    return words[:, 0].astype(object) + words[:, 1].astype(object) * 2**64 + words[:, 2].astype(object) * 2**128


def _day(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    parts = pc.extract_regex(_trimmed(values), _DAY + r"(?:[ T].*)?)?)?$")
    days, good = _days(parts)
    return array_of(days.astype(np.int32), DATE, values), anywhere(~good, values)


def _moment(values: Values, type_: pa.DataType) -> tuple[Values, Any]:
    parts = pc.extract_regex(_trimmed(values), _DAY + _CLOCK + r")?)?$")
    days, good = _days(parts)
    hour, minute, second = (_number(parts, name) for name in ("hour", "minute", "second"))
    good &= (hour < 24) & (minute < 60) & (second < 60)
    fraction = pc.utf8_rpad(pc.utf8_slice_codeunits(_part(parts, "fraction"), 0, 6), 6, "0")
    micros = _parsed(fraction) + 1_000_000 * (second + 60 * (minute + 60 * hour))
    if type_ == TIMESTAMP:
        offset, is_offset = _offset(_part(parts, "zone"))
        micros, good = micros - offset, good & is_offset
    total = days * 86_400_000_000 + micros
    good &= np.abs(days) < 2**63 // 86_400_000_000
    return array_of(total, type_, values), anywhere(~good, values)


def _offset(zones: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    parts = pc.extract_regex(
        zones, r"^(?P<sign>[+-])(?P<hour>[0-9]{1,2})(?::(?P<minute>[0-9]{1,2})(?::(?P<second>[0-9]{1,2}))?)?$"
    )
    hour, minute, second = (_number(parts, name) for name in ("hour", "minute", "second"))
    seconds = second + 60 * (minute + 60 * hour)
    good = (minute < 60) & (second < 60) & (seconds <= 18 * 3600)
    sign = np.where(truths(pc.equal(_part(parts, "sign"), "-")), -1, 1)
    return 1_000_000 * sign * seconds, good


def _days(parts: pa.StructArray) -> tuple[np.ndarray, np.ndarray]:
    """The days since 1970 that a text's year, month and day give, and where it gives one."""
    good = truths(pc.is_valid(parts))
    year = _number(parts, "year")
    year = np.where(truths(pc.equal(_part(parts, "sign"), "-")), -year, year)
    month, day = _number(parts, "month", otherwise=1), _number(parts, "day", otherwise=1)
    good &= (month >= 1) & (month <= 12) & (day >= 1)
    month = np.where(good, month, 1)
    first = days_of(year, month)
    length = days_of(year + (month == 12), month % 12 + 1) - first
    good &= day <= length
    return np.where(good, first + day - 1, 0), good


def days_of(year: np.ndarray, month: np.ndarray) -> np.ndarray:
    """The days from 1970 to the first of a month, in the Gregorian calendar of all times."""
    months = (np.asarray(year, np.int64) - 1970) * 12 + np.asarray(month, np.int64) - 1
    return months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)


def _part(parts: pa.StructArray, name: str) -> pa.Array:
    return pc.struct_field(parts, name)


def _number(parts: pa.StructArray, name: str, *, otherwise: int = 0) -> np.ndarray:
    return _parsed(_part(parts, name), otherwise=otherwise)


def _parsed(texts: pa.Array, *, otherwise: int = 0) -> np.ndarray:
    filled = texts.fill_null("")
    present = pc.if_else(pc.equal(filled, ""), str(otherwise), filled)
    return pc.cast(present, pa.int64()).to_numpy(zero_copy_only=False)


FROM_TEXT: dict[Any, Callable[[Values, pa.DataType], tuple[Values, Any]]] = {
    BYTE: _whole,
    SHORT: _whole,
    INT: _whole,
    LONG: _whole,
    FLOAT: _fraction,
    DOUBLE: _fraction,
    BOOLEAN: _truth,
    DATE: _day,
    TIMESTAMP: _moment,
    TIMESTAMP_NTZ: _moment,
    "decimal": _decimal,
}
