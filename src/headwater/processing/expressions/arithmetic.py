"""Arithmetic with Spark's results in ANSI mode: an overflow fails, and so does a division by zero, of DOUBLE too.

Integers wrap in NumPy, so an overflow is seen by the signs of operands and result, or by dividing back. Decimals are computed as integers
without their point: in 64 bits where 18 digits are enough for every step, otherwise as Python integers in a NumPy array, which is slower
and has no limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.processing.expressions.decimals import digits_of, from_digits, rescaled
from headwater.processing.expressions.term import Term, Values, anywhere, array_of, fallible, mapped, numbers
from headwater.processing.expressions.type_rules import (
    DIGITS_MAX,
    DOUBLE,
    LONG,
    is_decimal,
    is_fraction,
    product_decimal,
    quotient_decimal,
    remainder_decimal,
    sum_decimal,
)

OVERFLOW = "its result overflows"
ZERO = "it divides by zero"
JAVA_DIGITS = 34

_FLOATS: dict[str, Callable[..., Values]] = {"+": pc.add, "-": pc.subtract, "*": pc.multiply}
_CHECKED: dict[str, Callable[..., Values]] = {"+": pc.add_checked, "-": pc.subtract_checked, "*": pc.multiply_checked}
_WRAPPED: dict[str, Callable[..., Any]] = {"+": np.add, "-": np.subtract, "*": np.multiply}


def arithmetic(name: str, left: Term, right: Term, *, tries: bool = False) -> Term:
    """`left name right` with one of `+ - *`, of operands that have one numeric type, or two decimals."""
    type_ = left.type
    if is_decimal(type_):
        return _decimals(name, left, right, tries=tries)
    if is_fraction(type_):
        return mapped(type_, [left, right], _FLOATS[name])
    return fallible(type_, [left, right], lambda one, other: _integers(name, one, other), OVERFLOW, tries=tries)


def _integers(name: str, left: Values, right: Values) -> tuple[Values, Any]:
    try:
        return _CHECKED[name](left, right), None
    except pa.ArrowInvalid:
        pass
    one, other = numbers(left), numbers(right)
    with np.errstate(over="ignore"):
        result = _WRAPPED[name](one, other)
    exact = _WRAPPED[name](one.astype(object), other.astype(object))
    failed = np.asarray(result.astype(object) != exact, bool)
    return array_of(result, left.type, left, right), anywhere(failed, left, right)


def _is_safe(divisor: Term) -> bool:
    """Whether nothing can fail with it as divisor: a constant other than 0, and than -1, by which the least integer overflows."""
    value = None if divisor.value is None else divisor.value.as_py()
    return value is not None and value not in (0, -1)


def _dividing(type_: pa.DataType, left: Term, right: Term, run: Any, what: str, *, tries: bool = False) -> Term:
    if _is_safe(right):
        return mapped(type_, [left, right], lambda one, other: run(one, other)[0])
    return fallible(type_, [left, right], run, what, tries=tries, right_first=True)


def divided(left: Term, right: Term, *, tries: bool = False) -> Term:
    """`left / right`, of two DOUBLE or two decimals."""
    if is_decimal(left.type):
        return _decimals("/", left, right, tries=tries)

    def run(one: Values, other: Values) -> tuple[Values, Any]:
        with np.errstate(all="ignore"):
            result = array_of(numbers(one) / numbers(other), DOUBLE, one, other)
        return result, anywhere(_spread(numbers(other) == 0, result), one, other)

    return _dividing(DOUBLE, left, right, run, ZERO, tries=tries)


def whole_quotient(left: Term, right: Term) -> Term:
    """`left DIV right`: the quotient without its fraction, as BIGINT."""
    if is_decimal(left.type):
        return _decimals("div", left, right)

    def run(one: Values, other: Values) -> tuple[Values, Any]:
        above, below = numbers(one), numbers(other)
        zero, overflows = below == 0, (above == np.iinfo(np.int64).min) & (below == -1)
        safe = np.where(zero | overflows, 1, below)
        quotient = _toward_zero(above, safe)
        result = array_of(quotient, LONG, one, other)
        return result, anywhere(_spread(zero | overflows, result), one, other)

    return _dividing(LONG, left, right, run, "it divides by zero or overflows")


def _toward_zero(above: Any, below: Any) -> Any:
    quotient = np.floor_divide(above, below)
    is_rounded_down = (quotient * below != above) & ((above < 0) != (below < 0))
    return quotient + is_rounded_down


def remainder(left: Term, right: Term, *, positive: bool = False, tries: bool = False) -> Term:
    """`left % right`, which has the sign of `left`; with `positive` it is `PMOD(left, right)`."""
    if is_decimal(left.type):
        return _decimals("pmod" if positive else "%", left, right, tries=tries)

    def run(one: Values, other: Values) -> tuple[Values, Any]:
        above, below = numbers(one), numbers(other)
        zero = below == 0
        with np.errstate(all="ignore"):
            safe = np.where(zero, np.ones(1, below.dtype), below) if not is_fraction(left.type) else below
            found = np.fmod(above, safe)
            if positive:
                found = np.where(found < 0, np.fmod(found + safe, safe), found).astype(found.dtype)
        result = array_of(found, left.type, one, other)
        return result, anywhere(_spread(zero, result), one, other)

    return _dividing(left.type, left, right, run, ZERO, tries=tries)


def _spread(mask: np.ndarray, result: pa.Array) -> np.ndarray:
    return mask if len(mask) == len(result) else np.broadcast_to(mask, len(result))


def negative(term: Term) -> Term:
    """`-term`."""
    return _signed(term, np.negative, pc.negate)


def absolute(term: Term) -> Term:
    """`ABS(term)`."""
    return _signed(term, np.abs, pc.abs)


def _signed(term: Term, kernel: Callable[..., Any], of_fractions: Callable[..., Values]) -> Term:
    if is_fraction(term.type):
        return mapped(term.type, [term], of_fractions)
    if is_decimal(term.type):
        return _signed_decimal(term, kernel)
    least = np.iinfo(term.type.to_pandas_dtype()).min

    def run(values: Values) -> tuple[Values, Any]:
        found = numbers(values)
        with np.errstate(over="ignore"):
            return array_of(kernel(found), term.type, values), anywhere(found == least, values)

    return fallible(term.type, [term], run, OVERFLOW)


def _signed_decimal(term: Term, kernel: Callable[..., Any]) -> Term:
    if term.type.precision <= JAVA_DIGITS:
        return mapped(term.type, [term], lambda each: from_digits(kernel(digits_of(each)), term.type, each)[0])

    def run(values: Values) -> tuple[Values, Any]:
        digits = digits_of(values)
        turned = kernel(digits)
        return from_digits(np.where(turned == digits, digits, _rounded_by_java(turned)), term.type, values)

    return fallible(term.type, [term], run, OVERFLOW)


def _rounded_by_java(digits: Any) -> Any:
    """What Spark gives where it changes a sign: 34 digits, rounded half to even, as Java's DECIMAL128 has them."""
    size = abs(digits)
    for places in range(DIGITS_MAX - JAVA_DIGITS, 0, -1):
        by = 10**places
        whole, rest = size // by, size % by
        even = whole + ((2 * rest > by) | ((2 * rest == by) & (whole % 2 == 1)))
        size = np.where(size >= 10 ** (JAVA_DIGITS + places - 1), even * by, size)
    return np.where(digits < 0, -size, size)


_DECIMAL_TYPES = {
    "+": sum_decimal,
    "-": sum_decimal,
    "*": product_decimal,
    "/": quotient_decimal,
    "%": remainder_decimal,
    "pmod": remainder_decimal,
}


def _decimals(name: str, left: Term, right: Term, *, tries: bool = False) -> Term:
    one, other = left.type, right.type
    type_ = LONG if name == "div" else _DECIMAL_TYPES[name](one, other)

    def run(above: Values, below: Values) -> tuple[Values, Any]:
        return _decimal_result(name, above, below, type_)

    what = ZERO if name in ("%", "pmod") else OVERFLOW if name in "+-*" else "it divides by zero or overflows"
    return fallible(type_, [left, right], run, what, tries=tries, right_first=name not in "+-*")


def _decimal_result(name: str, left: Values, right: Values, type_: pa.DataType) -> tuple[Values, Any]:
    one, other = digits_of(left), digits_of(right)
    scale, other_scale = left.type.scale, right.type.scale
    if name == "*":
        wide = left.type.precision + right.type.precision > 18
        product = one.astype(object) * other.astype(object) if wide else one.astype(np.int64) * other.astype(np.int64)
        return from_digits(rescaled(product, scale + other_scale, type_.scale), type_, left, right)
    common = max(scale, other_scale)
    is_wide = max(left.type.precision - scale, right.type.precision - other_scale) + common + 1 > 18
    if is_wide or name in ("/", "div"):
        one, other = one.astype(object), other.astype(object)
    one, other = one * 10 ** (common - scale), other * 10 ** (common - other_scale)
    if name in "+-":
        return from_digits(
            rescaled(one + other if name == "+" else one - other, common, type_.scale), type_, left, right
        )
    zero = np.asarray(other == 0, bool)
    other = np.where(zero, 1, other)
    if name in ("%", "pmod"):
        found = np.sign(one) * (abs(one) % abs(other))
        if name == "pmod":
            found = np.where(found < 0, _truncated_remainder(found + other, other), found)
        result, failed = from_digits(rescaled(found, common, type_.scale), type_, left, right)
        zero = zero | _is_beyond_java(one, other)
    else:
        result, failed = _quotient(name, one, other, type_, left, right)
    zeros = anywhere(_spread(zero, result), left, right)
    return result, zeros if failed is None else failed if zeros is None else failed | zeros


def _is_beyond_java(one: Any, other: Any) -> np.ndarray:
    """The rows whose whole quotient needs more than 34 digits, for which Java finds no remainder. They are rare."""
    if np.asarray(one).dtype != object and np.asarray(other).dtype != object:
        return np.zeros(1, bool)
    quotient = np.asarray(abs(one) // abs(other), object)
    large = np.asarray(quotient >= 10**JAVA_DIGITS, bool)
    large[large] = [len(str(each).rstrip("0")) > JAVA_DIGITS for each in quotient[large]]
    return large


def _truncated_remainder(one: Any, other: Any) -> Any:
    return np.sign(one) * (abs(one) % abs(other))


def _quotient(name: str, one: Any, other: Any, type_: pa.DataType, left: Values, right: Values) -> tuple[Values, Any]:
    sign = np.where((one < 0) != (other < 0), -1, 1)
    if name == "div":
        found = np.broadcast_arrays(sign * (abs(one) // abs(other)), sign)[0]
        fits = np.asarray((found >= -(2**63)) & (found < 2**63), bool)
        return array_of(np.where(fits, found, 0).astype(np.int64), LONG, left, right), anywhere(~fits, left, right)
    # Spark divides to 38 digits after the point first, and rounds what that gives.
    steps = 38
    size, by = abs(one) * 10**steps, abs(other)
    quotient, rest = size // by, size % by
    quotient = quotient + (2 * rest >= by)
    return from_digits(rescaled(sign * quotient, steps, type_.scale), type_, left, right)
