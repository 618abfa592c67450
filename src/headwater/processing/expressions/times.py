"""Functions of dates and moments, and their arithmetic with intervals. The session's time zone is UTC, so a day has 24 hours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.processing.expressions import arithmetic
from headwater.processing.expressions.decimals import from_digits
from headwater.processing.expressions.interval import MICROSECONDS
from headwater.processing.expressions.operands import Function, Operands
from headwater.processing.expressions.term import Term, Values, anywhere, array_of, constant, fallible, mapped, numbers
from headwater.processing.expressions.text_casts import days_of
from headwater.processing.expressions.type_rules import (
    BYTE,
    DATE,
    DURATION,
    INT,
    LONG,
    NULL,
    SHORT,
    STRING,
    TIMESTAMP,
    TIMESTAMP_NTZ,
)

DAY_US = 86_400_000_000
SECOND_US = 1_000_000
DAYS_MAX = 2**31


def is_temporal(term: Term) -> bool:
    """Whether arithmetic with it is arithmetic of time."""
    return term.months is not None or term.type in (DATE, TIMESTAMP, TIMESTAMP_NTZ, DURATION)


def negative(term: Term) -> Term:
    """The interval of the other sign."""
    if term.months is not None:
        return replace(term, months=-term.months)
    return mapped(DURATION, [term], lambda values: array_of(-numbers(values), DURATION, values))


def computed(operands: Operands, name: str, left: Term, right: Term) -> Term:
    """`left name right` where one of them is a date, a moment or an interval."""
    if (
        name == "+"
        and (left.months is not None or left.type == DURATION)
        and right.type in (DATE, TIMESTAMP, TIMESTAMP_NTZ)
    ):
        left, right = right, left
    if name == "+" and right.type == DATE and left.type in (INT, SHORT, BYTE):
        left, right = right, left
    moments = (TIMESTAMP, TIMESTAMP_NTZ)
    if name in ("+", "-"):
        sign = 1 if name == "+" else -1
        if left.months is not None and right.months is not None:
            return replace(left, months=left.months + sign * right.months)
        if left.type == DURATION and right.type == DURATION:
            return _difference(left, right, arithmetic_name=name)
        if right.months is not None and left.type in (DATE, *moments):
            return _months_later(left, sign * right.months)
        if right.type == DURATION and left.type in (DATE, *moments):
            return _later(operands, left, right, sign)
        if left.type == DATE and right.type in (INT, SHORT, BYTE):
            return _days_later(left, right, sign)
        if name == "-" and left.type in (DATE, *moments) and right.type in (DATE, *moments):
            return _span(operands, left, right)
    raise operands.unsupported(f"{name} of {_name(left)} and {_name(right)}")


def _name(term: Term) -> str:
    names = {DATE: "DATE", TIMESTAMP: "TIMESTAMP", TIMESTAMP_NTZ: "TIMESTAMP_NTZ", STRING: "STRING"}
    return "an interval" if term.months is not None or term.type == DURATION else names.get(term.type, "a number")


def _whole(term: Term) -> Term:
    """Dates, moments and durations as BIGINT."""
    return mapped(LONG, [term], lambda values: array_of(numbers(values).astype(np.int64), LONG, values))


def _of_micros(term: Term, type_: pa.DataType) -> Term:
    return mapped(type_, [term], lambda values: array_of(numbers(values), type_, values))


def _difference(left: Term, right: Term, *, arithmetic_name: str) -> Term:
    return _of_micros(arithmetic.arithmetic(arithmetic_name, _whole(left), _whole(right)), DURATION)


def _span(operands: Operands, left: Term, right: Term) -> Term:
    type_ = left.type if left.type == right.type and left.type != DATE else TIMESTAMP
    return _difference(operands.as_type(left, type_), operands.as_type(right, type_), arithmetic_name="-")


def _later(operands: Operands, left: Term, right: Term, sign: int) -> Term:
    is_days = right.value is not None and right.value.is_valid and right.value.value % DAY_US == 0
    if left.type == DATE and is_days and right.digits is None:
        days = constant(sign * (right.value.value // DAY_US), LONG)  # type: ignore[union-attr]
        return _days_later(left, days, 1)
    start = operands.as_type(left, TIMESTAMP) if left.type == DATE else left
    total = arithmetic.arithmetic("+" if sign > 0 else "-", _whole(start), _whole(right))
    return _of_micros(total, start.type)


def _days_later(left: Term, right: Term, sign: int) -> Term:
    def run(days: Values, more: Values) -> tuple[Values, Any]:
        found = numbers(days).astype(np.int64) + sign * numbers(more).astype(np.int64)
        fits = np.abs(found + 0.5) < DAYS_MAX
        return array_of(np.where(fits, found, 0), DATE, days, more), anywhere(~fits, days, more)

    return fallible(DATE, [left, right], run, arithmetic.OVERFLOW)


def _months_later(left: Term, months: int) -> Term:
    unit = 1 if left.type == DATE else DAY_US

    def run(values: Values) -> Values:
        found = numbers(values).astype(np.int64)
        days, rest = found // unit, found % unit
        return array_of(_add_months(days, months) * unit + rest, left.type, values)

    return mapped(left.type, [left], run)


def _add_months(days: np.ndarray, months: Any) -> np.ndarray:
    """The same day of the month some months later, or that month's last."""
    dates = days.astype("datetime64[D]")
    month = dates.astype("datetime64[M]").astype(np.int64) + months
    day = days - dates.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    first = month.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    length = (month + 1).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) - first
    return first + np.minimum(day, length - 1)


class _Calendar:
    """Days since 1970 as parts of the calendar."""

    def __init__(self, days: np.ndarray) -> None:
        self.days = days.astype(np.int64)
        dates = self.days.astype("datetime64[D]")
        self.month_start = dates.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
        self.months = dates.astype("datetime64[M]").astype(np.int64)
        self.year = self.months // 12 + 1970
        self.month = self.months % 12 + 1
        self.day = self.days - self.month_start + 1
        self.weekday = (self.days + 3) % 7

    @property
    def week(self) -> np.ndarray:
        """The week of the year by ISO 8601: that of its Thursday."""
        return (_Calendar(self.days - self.weekday + 3).year_day - 1) // 7 + 1

    @property
    def year_of_week(self) -> np.ndarray:
        """The year that the week belongs to."""
        return _Calendar(self.days - self.weekday + 3).year

    @property
    def year_day(self) -> np.ndarray:
        """The day of the year, from 1."""
        return self.days - days_of(self.year, np.ones_like(self.year)) + 1


_OF_DAY: dict[str, Callable[[_Calendar], np.ndarray]] = {
    "year": lambda day: day.year,
    "quarter": lambda day: (day.month + 2) // 3,
    "month": lambda day: day.month,
    "day": lambda day: day.day,
    "dayofmonth": lambda day: day.day,
    "dayofweek": lambda day: (day.weekday + 1) % 7 + 1,
    "weekday": lambda day: day.weekday,
    "dayofyear": lambda day: day.year_day,
    "weekofyear": lambda day: day.week,
}
_OF_CLOCK: dict[str, tuple[int, int]] = {"hour": (3600, 24), "minute": (60, 60), "second": (1, 60)}
_FIELDS = {"years": "year", "yr": "year", "mon": "month", "months": "month", "days": "day", "d": "day", "hours": "hour"}
_FIELDS |= {
    "minutes": "minute",
    "min": "minute",
    "week": "weekofyear",
    "w": "weekofyear",
    "doy": "dayofyear",
    "dow": "dayofweek",
}
_FIELDS |= {"qtr": "quarter", "h": "hour", "m": "minute"}


def _of_day(name: str) -> Function:
    return Function(lambda operands, args: _day_field(operands, name, args[0]), 1)


def _day_field(operands: Operands, name: str, arg: Term) -> Term:
    def run(values: Values) -> Values:
        return array_of(_OF_DAY[name](_Calendar(numbers(values))).astype(np.int32), INT, values)

    return mapped(INT, [operands.day(arg, name)], run)


def _of_clock(name: str) -> Function:
    return Function(lambda operands, args: _clock_field(operands, name, args[0]), 1)


def _clock_field(operands: Operands, name: str, arg: Term) -> Term:
    seconds, count = _OF_CLOCK[name]

    def run(values: Values) -> Values:
        return array_of((numbers(values) // (seconds * SECOND_US) % count).astype(np.int32), INT, values)

    term = arg if arg.type == TIMESTAMP_NTZ else operands.moment(arg, name)
    return mapped(INT, [term], run)


def extracted(operands: Operands, field: str, arg: Term) -> Term:
    """`EXTRACT(field FROM arg)`."""
    name = _FIELDS.get(field, field)
    if name in ("second", "seconds", "s", "sec"):
        term = arg if arg.type == TIMESTAMP_NTZ else operands.moment(arg, "extract")
        type_ = pa.decimal128(8, 6)
        return mapped(type_, [term], lambda values: from_digits(numbers(values) % (60 * SECOND_US), type_, values)[0])
    if arg.type == DURATION or arg.months is not None or (name not in _OF_DAY and name not in _OF_CLOCK):
        raise operands.unsupported(f"EXTRACT({field.upper()})")
    return _day_field(operands, name, arg) if name in _OF_DAY else _clock_field(operands, name, arg)


def _date_added(sign: int, name: str) -> Function:
    def build(operands: Operands, args: list[Term]) -> Term:
        if args[1].type not in (INT, SHORT, BYTE, NULL, STRING):
            raise operands.wrong(f"{name} needs a number of days as INT")
        return _days_later(operands.day(args[0], name), operands.integer(args[1], name), sign)

    return Function(build, 2)


def _date_difference(operands: Operands, args: list[Term]) -> Term:
    end, start = operands.day(args[0], "datediff"), operands.day(args[1], "datediff")

    def run(one: Values, other: Values) -> Values:
        return array_of(numbers(one) - numbers(other), INT, one, other)

    return mapped(INT, [end, start], run)


DIFFERENCES = ("datediff", "date_diff", "timestampdiff")
"""Functions that count the units between two moments, where a unit is their first argument."""


def difference(operands: Operands, unit: str, start: Term, end: Term) -> Term:
    """`TIMESTAMPDIFF(unit, start, end)`: the whole units from one moment to the other."""
    if unit not in MICROSECONDS:
        raise operands.unsupported(f"a difference in {unit.upper()}")
    first, last = operands.moment(start, "timestampdiff"), operands.moment(end, "timestampdiff")
    span = arithmetic.arithmetic("-", _whole(last), _whole(first))
    return arithmetic.whole_quotient(span, constant(MICROSECONDS[unit], LONG))


def _months_added(operands: Operands, args: list[Term]) -> Term:
    day, months = operands.day(args[0], "add_months"), operands.integer(args[1], "add_months")

    def run(one: Values, other: Values) -> tuple[Values, Any]:
        with np.errstate(over="ignore"):
            found = _add_months(numbers(one).astype(np.int64), numbers(other).astype(np.int64))
        fits = np.abs(found + 0.5) < DAYS_MAX
        return array_of(np.where(fits, found, 0), DATE, one, other), anywhere(~fits, one, other)

    return fallible(DATE, [day, months], run, arithmetic.OVERFLOW)


def _last_day(operands: Operands, args: list[Term]) -> Term:
    def run(values: Values) -> Values:
        months = _Calendar(numbers(values)).months + 1
        return array_of(months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) - 1, DATE, values)

    return mapped(DATE, [operands.day(args[0], "last_day")], run)


_MONTHS_CUT = {"year": 12, "yyyy": 12, "yy": 12, "quarter": 3, "month": 1, "mon": 1, "mm": 1}
_CLOCK_CUT = {"hour": 3600, "minute": 60, "second": 1}


def _cut(days: np.ndarray, unit: str) -> np.ndarray | None:
    """The first day of the year, quarter, month or week; None for another unit."""
    if unit in _MONTHS_CUT:
        months, step = _Calendar(days).months, _MONTHS_CUT[unit]
        return (months // step * step).astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    return days - _Calendar(days).weekday if unit == "week" else None


def _date_cut(operands: Operands, args: list[Term]) -> Term:
    unit = _constant_text(operands, args[1], "trunc")
    if unit is None or _cut(np.zeros(1, np.int64), unit) is None:
        return constant(None, DATE)

    def run(values: Values) -> Values:
        return array_of(_cut(numbers(values).astype(np.int64), unit), DATE, values)  # type: ignore[arg-type]

    return mapped(DATE, [operands.day(args[0], "trunc")], run)


def _moment_cut(operands: Operands, args: list[Term]) -> Term:
    unit = _constant_text(operands, args[0], "date_trunc")
    known = {*_MONTHS_CUT, *_CLOCK_CUT, "week", "day", "dd", "millisecond", "microsecond"}
    if unit is None or unit not in known:
        return constant(None, TIMESTAMP)

    def run(values: Values) -> Values:
        found = numbers(values)
        steps = {"day": DAY_US, "dd": DAY_US, "millisecond": 1000, "microsecond": 1}
        steps |= {name: seconds * SECOND_US for name, seconds in _CLOCK_CUT.items()}
        if unit in steps:
            return array_of(found // steps[unit] * steps[unit], TIMESTAMP, values)
        days = _cut(found // DAY_US, unit)
        assert days is not None
        return array_of(days * DAY_US, TIMESTAMP, values)

    return mapped(TIMESTAMP, [operands.moment(args[1], "date_trunc")], run)


def _constant_text(operands: Operands, term: Term, name: str) -> str | None:
    found = operands.text(term, name).value
    if found is None:
        raise operands.unsupported(f"{name} with a unit that is not a constant")
    return str(found.as_py()).lower() if found.is_valid else None


def _unix(name: str, unit_us: int) -> Function:
    def build(operands: Operands, args: list[Term]) -> Term:
        if args[0].type == STRING:
            raise operands.unsupported(f"{name} of STRING")
        term = operands.moment(args[0], name)
        return mapped(LONG, [term], lambda values: array_of(numbers(values) // unit_us, LONG, values))

    return Function(build, 1)


def _from_unix(name: str, unit_us: int) -> Function:
    def build(operands: Operands, args: list[Term]) -> Term:
        if args[0].type not in (LONG, INT, SHORT, BYTE):
            raise operands.unsupported(f"{name} of {_name(args[0])}, which is not an integer,")
        factor = constant(unit_us, LONG)
        return _of_micros(arithmetic.arithmetic("*", operands.as_type(args[0], LONG), factor), TIMESTAMP)

    return Function(build, 1)


TIMES: dict[str, Function] = {
    **{name: _of_day(name) for name in _OF_DAY},
    **{name: _of_clock(name) for name in _OF_CLOCK},
    "date_add": _date_added(1, "date_add"),
    "dateadd": _date_added(1, "dateadd"),
    "date_sub": _date_added(-1, "date_sub"),
    "datediff": Function(_date_difference, 2),
    "date_diff": Function(_date_difference, 2),
    "add_months": Function(_months_added, 2),
    "last_day": Function(_last_day, 1),
    "trunc": Function(_date_cut, 2),
    "date_trunc": Function(_moment_cut, 2),
    "to_date": Function(lambda operands, args: operands.day(args[0], "to_date"), 1),
    "date": Function(lambda operands, args: operands.day(args[0], "date"), 1),
    "to_timestamp": Function(lambda operands, args: operands.moment(args[0], "to_timestamp"), 1),
    "timestamp": Function(lambda operands, args: operands.moment(args[0], "timestamp"), 1),
    "unix_seconds": _unix("unix_seconds", SECOND_US),
    "unix_millis": _unix("unix_millis", 1000),
    "unix_micros": _unix("unix_micros", 1),
    "unix_date": Function(
        lambda operands, args: mapped(
            INT, [operands.day(args[0], "unix_date")], lambda values: array_of(numbers(values), INT, values)
        ),
        1,
    ),
    "timestamp_seconds": _from_unix("timestamp_seconds", SECOND_US),
    "timestamp_millis": _from_unix("timestamp_millis", 1000),
    "timestamp_micros": _from_unix("timestamp_micros", 1),
}
