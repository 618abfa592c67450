"""Interval literals: `INTERVAL '1' DAY`, `INTERVAL 10 MINUTES`, `INTERVAL '1 02:30' DAY TO MINUTE`.

An interval is either a number of months or a number of microseconds. Spark keeps the two apart, and so does the language. One of
microseconds is a term of the type `duration[us]`; one of months is a constant that can only be added to a date or a moment.
"""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal
from typing import Any

from sqlglot import expressions as sql

from headwater.processing.expressions.operands import Operands
from headwater.processing.expressions.parser import DIALECT
from headwater.processing.expressions.term import Term, constant
from headwater.processing.expressions.type_rules import DURATION, NULL

MICROSECONDS = {"microsecond": 1, "millisecond": 1000, "second": 10**6, "minute": 60 * 10**6, "hour": 3600 * 10**6}
MICROSECONDS |= {"day": 86400 * 10**6, "week": 7 * 86400 * 10**6}
MONTHS = {"month": 1, "quarter": 3, "year": 12}
_SHORT = {"us": "microsecond", "ms": "millisecond", "s": "second", "m": "minute", "h": "hour", "d": "day", "w": "week"}
_UNITS = r"([+-]?\d+(?:\.\d+)?)\s*([a-z]+)"


def interval(operands: Operands, node: sql.Interval) -> Term:
    """The term of an interval literal."""
    text = node.sql(DIALECT)
    value, unit = node.this, node.args.get("unit")
    if isinstance(value, sql.Neg):
        value, sign = value.this, -1
    else:
        sign = 1
    if not isinstance(value, sql.Literal):
        raise operands.unsupported(f"{text}, which is not a constant,")
    digits = str(value.this).strip().lower()
    if isinstance(unit, sql.IntervalSpan):
        return _span(operands, digits, unit, text)
    parts = [(digits, unit.name.lower())] if unit is not None else re.findall(_UNITS, digits.removeprefix("interval "))
    if not parts or (unit is None and re.sub(_UNITS, "", digits.removeprefix("interval ")).strip()):
        raise operands.wrong(f"{text} is not an interval")
    return _total(
        operands,
        [(_number(operands, number, text) * sign, _unit(operands, name, text)) for number, name in parts],
        text,
    )


def _number(operands: Operands, digits: str, text: str) -> Decimal:
    if not re.fullmatch(r"[+-]?\d+(\.\d+)?", digits):
        raise operands.wrong(f"{text} is not an interval")
    return Decimal(digits)


def _unit(operands: Operands, name: str, text: str) -> str:
    found = _SHORT.get(name, name.removesuffix("s"))
    if found not in MICROSECONDS and found not in MONTHS:
        raise operands.wrong(f"{text} has no unit of time that is known")
    return found


def _total(operands: Operands, parts: list[tuple[Decimal, str]], text: str) -> Term:
    if any(number != int(number) and unit != "second" for number, unit in parts):
        raise operands.wrong(f"{text} has a fraction, which only seconds can have")
    if all(unit in MONTHS for _, unit in parts):
        return months_of(int(sum(number * MONTHS[unit] for number, unit in parts)))
    if any(unit in MONTHS for _, unit in parts):
        raise operands.unsupported(f"{text}, which mixes months and days,")
    return constant(int(sum(number * MICROSECONDS[unit] for number, unit in parts)), DURATION)


def months_of(count: int) -> Term:
    """An interval of months."""
    return replace(constant(None, NULL), months=count)


_SPANS = {
    ("year", "month"): r"([+-]?)(\d+)-(\d+)",
    ("day", "hour"): r"([+-]?)(\d+) (\d+)",
    ("day", "minute"): r"([+-]?)(\d+) (\d+):(\d+)",
    ("day", "second"): r"([+-]?)(\d+) (\d+):(\d+):(\d+(?:\.\d{1,6})?)",
    ("hour", "minute"): r"([+-]?)(\d+):(\d+)",
    ("hour", "second"): r"([+-]?)(\d+):(\d+):(\d+(?:\.\d{1,6})?)",
    ("minute", "second"): r"([+-]?)(\d+):(\d+(?:\.\d{1,6})?)",
}
_ORDER = ["year", "month", "day", "hour", "minute", "second"]


def _span(operands: Operands, digits: str, unit: Any, text: str) -> Term:
    first, last = unit.this.name.lower(), unit.expression.name.lower()
    pattern = _SPANS.get((first, last))
    found = re.fullmatch(pattern, digits) if pattern else None
    if found is None:
        raise operands.wrong(f"{text} is not an interval")
    sign, *numbers = found.groups()
    units = _ORDER[_ORDER.index(first) : _ORDER.index(last) + 1]
    limits = {"month": 12, "hour": 24, "minute": 60, "second": 60}
    if any(Decimal(number) >= limits[name] for number, name in zip(numbers[1:], units[1:], strict=True)):
        raise operands.wrong(f"{text} is not an interval")
    factor = -1 if sign == "-" else 1
    return _total(
        operands, [(Decimal(number) * factor, name) for number, name in zip(numbers, units, strict=True)], text
    )
