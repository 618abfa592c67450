"""Functions of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.processing.expressions import arithmetic
from headwater.processing.expressions.casts import plain_text
from headwater.processing.expressions.decimals import digits_of, from_digits
from headwater.processing.expressions.operands import Function, Operands
from headwater.processing.expressions.term import Term, Values, anywhere, array_of, fallible, mapped, numbers
from headwater.processing.expressions.text_casts import FROM_TEXT
from headwater.processing.expressions.type_rules import BOOLEAN, DOUBLE, LONG, STRING, is_decimal, is_fraction

PLACES_MAX = 15


def _absolute(operands: Operands, args: list[Term]) -> Term:
    return arithmetic.absolute(operands.number(args[0], "abs"))


def _positive(operands: Operands, args: list[Term]) -> Term:
    return operands.number(args[0], "positive")


def _negative(operands: Operands, args: list[Term]) -> Term:
    return arithmetic.negative(operands.number(args[0], "negative"))


def _of_two(name: str, *, tries: bool = False) -> Function:
    return Function(lambda operands, args: operands.computed(name, args[0], args[1], tries=tries), 2)


def _whole(name: str) -> Function:
    """FLOOR or CEIL: of a DOUBLE a BIGINT, of a decimal a decimal without digits after its point."""
    round_ = {"floor": np.floor, "ceil": np.ceil}[name]

    def build(operands: Operands, args: list[Term]) -> Term:
        term = operands.number(args[0], name)
        if is_decimal(term.type):
            return _whole_decimal(name, term)
        if not is_fraction(term.type):
            return operands.as_type(term, LONG)

        def run(values: Values) -> tuple[Values, Any]:
            found = round_(numbers(values).astype(np.float64))
            found = np.where(np.isnan(found), 0, found)  # as Java casts it
            fits = (found >= -(2.0**63)) & (found < 2.0**63)
            stored = np.where(fits, found, 0).astype(np.int64)
            return array_of(stored, LONG, values), anywhere(~fits, values)

        return fallible(LONG, [term], run, arithmetic.OVERFLOW)

    return Function(build, 1)


def _whole_decimal(name: str, term: Term) -> Term:
    precision, scale = term.type.precision, term.type.scale
    type_ = pa.decimal128(precision - scale + (1 if scale else 0), 0) if scale else term.type
    by = 10**scale

    def run(values: Values) -> tuple[Values, Any]:
        digits = digits_of(values)
        if by >= 2**62:
            digits = digits.astype(object)
        whole = digits // by if name == "floor" else -(-digits // by)
        return from_digits(whole, type_, values)

    return fallible(type_, [term], run, arithmetic.OVERFLOW)


def _root(operands: Operands, args: list[Term]) -> Term:
    return mapped(DOUBLE, [operands.double(args[0], "sqrt")], pc.sqrt)


def _sign(operands: Operands, args: list[Term]) -> Term:
    term = operands.double(args[0], "sign")
    return mapped(DOUBLE, [term], lambda values: array_of(_signs(numbers(values)), DOUBLE, values))


def _signs(found: np.ndarray) -> np.ndarray:
    # Java's signum keeps -0.0 and NaN.
    return np.where((found == 0) | np.isnan(found), found, np.sign(found))


def _is_nan(operands: Operands, args: list[Term]) -> Term:
    term = operands.number(args[0], "isnan")
    if not is_fraction(term.type):
        term = operands.as_type(term, DOUBLE)
    return mapped(BOOLEAN, [term], lambda values: pc.fill_null(pc.is_nan(values), False), strict=False)


def _rounded(operands: Operands, args: list[Term]) -> Term:
    term = operands.number(args[0], "round")
    places = 0
    if len(args) == 2:
        if args[1].value is None or not args[1].value.is_valid or args[1].digits is None:
            raise operands.unsupported("round with a number of digits that is not an integer literal")
        places = args[1].value.as_py()
    if is_decimal(term.type):
        return _rounded_decimal(term, places)
    if not is_fraction(term.type):
        return term if places >= 0 else _rounded_integer(term, -places)
    if places != 0:
        if term.type != DOUBLE or not 0 < places <= PLACES_MAX:
            raise operands.unsupported(f"round of FLOAT, or of DOUBLE to {places} digits,")
        return mapped(DOUBLE, [term], lambda values: _rounded_fraction(values, places))
    return mapped(term.type, [term], lambda values: array_of(_half_up(numbers(values)), term.type, values))


def _half_up(found: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        whole = np.trunc(found)
        away = np.abs(found - whole) >= 0.5
        rounded = np.where(away, whole + np.sign(found), whole)
    # Through BigDecimal, so there is no -0.0.
    return np.where(np.isfinite(found), rounded + 0.0, found).astype(found.dtype)


def _rounded_fraction(values: Values, places: int) -> Values:
    """Half up by the decimal digits that a number is printed with, as Spark does it: 1.005 becomes 1.01."""
    found = numbers(values)
    with np.errstate(invalid="ignore"):
        is_whole = ~np.isfinite(found) | (np.abs(found) >= 2.0**53)
    is_zero = np.abs(found) < 0.4 / 10**places
    texts = pc.cast(pa.array(np.where(is_whole | is_zero, 0.0, found)), STRING)
    rounded, _ = FROM_TEXT["decimal"](texts, pa.decimal128(38, places))
    return array_of(np.where(is_whole, found, numbers(pc.cast(plain_text(rounded), DOUBLE)) + 0.0), DOUBLE, values)


def _rounded_integer(term: Term, places: int) -> Term:
    limits = np.iinfo(term.type.to_pandas_dtype())

    def run(values: Values) -> tuple[Values, Any]:
        found = numbers(values).astype(object)
        by = 10**places
        size = (abs(found) + by // 2) // by * by
        rounded = np.where(found < 0, -size, size)
        fits = np.asarray((rounded >= limits.min) & (rounded <= limits.max), bool)
        stored = np.where(fits, rounded, 0).astype(np.int64)
        return array_of(stored, term.type, values), anywhere(~fits, values)

    return fallible(term.type, [term], run, arithmetic.OVERFLOW)


def _rounded_decimal(term: Term, places: int) -> Term:
    precision, scale = term.type.precision, term.type.scale
    places = min(places, scale)
    whole = precision - scale + 1
    type_ = (
        pa.decimal128(min(38, max(whole, -places + 1)), 0)
        if places < 0
        else pa.decimal128(min(38, whole + places), places)
    )

    def run(values: Values) -> tuple[Values, Any]:
        digits = digits_of(values).astype(object)
        by = 10 ** (scale - places)
        size = (abs(digits) + by // 2) // by * 10 ** max(0, -places)
        return from_digits(np.where(digits < 0, -size, size), type_, values)

    return fallible(type_, [term], run, arithmetic.OVERFLOW)


MATHEMATICS: dict[str, Function] = {
    "abs": Function(_absolute, 1),
    "positive": Function(_positive, 1),
    "negative": Function(_negative, 1),
    "mod": _of_two("%"),
    "pmod": _of_two("pmod"),
    "div": _of_two("div"),
    "try_add": _of_two("+", tries=True),
    "try_subtract": _of_two("-", tries=True),
    "try_multiply": _of_two("*", tries=True),
    "try_divide": _of_two("/", tries=True),
    "try_mod": _of_two("%", tries=True),
    "floor": _whole("floor"),
    "ceil": _whole("ceil"),
    "ceiling": _whole("ceil"),
    "round": Function(_rounded, 1, 2),
    "sqrt": Function(_root, 1),
    "sign": Function(_sign, 1),
    "signum": Function(_sign, 1),
    "isnan": Function(_is_nan, 1),
}
