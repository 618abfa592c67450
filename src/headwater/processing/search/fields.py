"""Fields: what a query can name of a document, and how values of columns become numbers that can be compared.

| column | a field of | what a query says of it |
|---|---|---|
| STRING in `text=` | text | words |
| any other STRING | names | the value as it is, whole |
| integers, floats, DECIMAL up to 18 digits | numbers | values and ranges |
| BOOLEAN | truths | `true`, `false` |
| DATE, TIMESTAMP | times, in UTC without a zone | days or moments, and ranges of them |
| two columns in `places=` | places | `near(…)`, `box(…)` |

Values of a column are compared as 64-bit integers in the same order: a decimal as its digits, a float by its bits, a time in µs. Null and
NaN are `NOTHING`, which is in no range.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.errors import InvalidInput

FieldKind = Literal["text", "name", "integer", "float", "decimal", "truth", "date", "time", "place"]
NOTHING = -(2**63)
LOWEST, HIGHEST = NOTHING + 1, 2**63 - 1
DIGITS_MAX = 18
_Array = Any
"""A NumPy array."""

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


class SearchFields(msgspec.Struct, frozen=True):
    """The fields of documents: their kinds, the columns of places, and the digits behind the point of decimals."""

    kinds: dict[str, FieldKind]
    places: dict[str, tuple[str, str]]
    scales: dict[str, int]

    @classmethod
    def of(
        cls, schema: pa.Schema, text: Sequence[str], places: Mapping[str, tuple[str, str]] | None = None
    ) -> SearchFields:
        """The fields of a document's columns; columns that nothing can be said of are left out."""
        kinds: dict[str, FieldKind] = {}
        scales = {}
        for field in schema:
            kind = _kind(field.type)
            if kind is not None:
                kinds[field.name] = kind
            if kind == "decimal":
                scales[field.name] = field.type.scale
        for name in text:
            if kinds.get(name) != "name":
                raise InvalidInput(
                    f"The documents have no STRING column {name!r}.", advice=f"Columns are {', '.join(schema.names)}."
                )
            kinds[name] = "text"
        for name, columns in (places or {}).items():
            _check_place(name, columns, schema)
            kinds[name] = "place"
        return cls(kinds, {name: (pair[0], pair[1]) for name, pair in (places or {}).items()}, scales)

    def __hash__(self) -> int:
        return hash(tuple(tuple(each.items()) for each in (self.kinds, self.places, self.scales)))

    @property
    def texts(self) -> list[str]:
        """The columns that are analysed."""
        return [name for name, kind in self.kinds.items() if kind == "text"]

    def names(self) -> str:
        """All fields, to be shown."""
        return ", ".join(self.kinds)


def _check_place(name: str, columns: Sequence[str], schema: pa.Schema) -> None:
    kinds = [schema.field(column).type for column in columns if column in schema.names]
    if len(columns) != 2 or len(kinds) != 2 or not all(pa.types.is_floating(kind) for kind in kinds):
        raise InvalidInput(
            f"The place {name!r} needs two DOUBLE columns, not {', '.join(map(repr, columns))}.",
            advice='Name latitude and longitude: places={"home": ("lat", "lon")}.',
        )


def _kind(kind: pa.DataType) -> FieldKind | None:
    if pa.types.is_string(kind):
        return "name"
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind):
        return "float"
    if pa.types.is_decimal(kind) and kind.precision <= DIGITS_MAX:
        return "decimal"
    if pa.types.is_boolean(kind):
        return "truth"
    if pa.types.is_date(kind):
        return "date"
    return "time" if pa.types.is_timestamp(kind) else None


def numbers_of(column: pa.Array | pa.ChunkedArray) -> _Array:
    """The values of a column as integers in their order."""
    kind = column.type
    if pa.types.is_floating(kind):
        return _ordered(column.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False))
    if pa.types.is_decimal(kind):
        column = pc.multiply(column.cast(pa.decimal128(38, kind.scale)), pa.scalar(Decimal(10) ** kind.scale))
        column = column.cast(pa.int64())
    elif pa.types.is_date(kind):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    elif pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
    else:
        column = column.cast(pa.int64())
    found = np.array(column.fill_null(NOTHING).to_numpy(zero_copy_only=False), np.int64)
    if pa.types.is_int64(kind):
        found[(found == NOTHING) & np.asarray(column.is_valid())] = (
            LOWEST  # the one value that has no number of its own
        )
    return found


def _ordered(values: _Array) -> _Array:
    """Floats as integers in the same order: bits of negative ones are turned round, -0.0 is 0.0."""
    bits = (values + 0.0).view(np.int64)
    found = np.where(bits < 0, bits ^ np.int64(HIGHEST), bits)
    return np.where(np.isnan(values), NOTHING, found)


def bounds_of(
    fields: SearchFields,
    field: str,
    low: str | None,
    high: str | None,
    *,
    with_low: bool = True,
    with_high: bool = True,
) -> tuple[int, int]:
    """The numbers of a column's values between two texts, both inclusive; None is no bound."""
    lowest = LOWEST if low is None else _number(fields, field, low)[0 if with_low else 1] + (0 if with_low else 1)
    highest = HIGHEST if high is None else _number(fields, field, high)[1 if with_high else 0] - (0 if with_high else 1)
    return lowest, highest


def _number(fields: SearchFields, field: str, text: str) -> tuple[int, int]:
    """The first and the last number that a text names: a day is all its moments, a number between two integers lies between them.

    Of what has no number of its own the first is above the last, so the value itself is found nowhere.
    """
    match fields.kinds[field]:
        case "truth":
            return _truth(field, text)
        case "date" | "time":
            return _moments(field, text)
        case "float":
            found = int(_ordered(np.array([float(_decimal(field, text))]))[0])
            return found, found
        case _:
            exact = Fraction(_decimal(field, text)) * 10 ** fields.scales.get(field, 0)
            first, last = -(-exact.numerator // exact.denominator), exact.numerator // exact.denominator
            return min(max(first, LOWEST), HIGHEST), min(max(last, LOWEST), HIGHEST)


def _truth(field: str, text: str) -> tuple[int, int]:
    if text not in ("true", "false"):
        raise InvalidInput(f"{text!r:.40} is not a value of {field}.", advice="Use true or false.")
    return int(text == "true"), int(text == "true")


def _moments(field: str, text: str) -> tuple[int, int]:
    """The µs of a day, or a single one."""
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(
            f"{text!r:.40} is not a time of {field}.", advice='Write it as 2026-01-31 or as "2026-01-31T12:00:00Z".'
        ) from error
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
    first = (moment - _EPOCH) // dt.timedelta(microseconds=1)
    return first, first + (86_400_000_000 - 1 if _DAY.fullmatch(text) else 0)


def _decimal(field: str, text: str) -> Decimal:
    try:
        found = Decimal(text)
    except InvalidOperation:
        found = Decimal("NaN")
    if not found.is_finite() or abs(found.adjusted()) > 400:
        raise InvalidInput(f"{text!r:.40} is not a number, as {field} is.", advice="Write it as 5, -2.5 or 1e6.")
    return found


def shown_number(fields: SearchFields, field: str, number: int) -> str:
    """A number as a value of its column."""
    match fields.kinds[field]:
        case "float":
            bits = np.array([number if number >= 0 else number ^ HIGHEST], np.int64)
            return repr(float(bits.view(np.float64)[0]))
        case "decimal":
            return str(Decimal(number).scaleb(-fields.scales[field]))
        case "truth":
            return "true" if number else "false"
        case "date" | "time":
            moment = _EPOCH + dt.timedelta(microseconds=number)
            return moment.date().isoformat() if fields.kinds[field] == "date" else moment.isoformat()
        case _:
            return str(number)
