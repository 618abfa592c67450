"""The columns of PostgreSQL in the types of the log: one map, and how the text of a whole column becomes such a column.

| PostgreSQL | log | |
|---|---|---|
| boolean; smallint; integer; bigint, oid | BOOLEAN; SMALLINT; INT; BIGINT | |
| real; double precision | FLOAT; DOUBLE | NaN and infinities too |
| numeric(p, s) with p ≤ 38 and 0 ≤ s ≤ p | DECIMAL(p, s) | NaN, which no decimal holds, is null |
| any other numeric | STRING | its digits: nothing is rounded, NaN and infinities are spelled |
| text, varchar, char, name; json, jsonb; uuid; enums | STRING | char(n) keeps its blanks |
| bytea | BINARY | |
| date; timestamptz; timestamp | DATE; TIMESTAMP; TIMESTAMP_NTZ | outside the years 1 to 9999, and infinity: the nearest end of them |
| time, timetz, interval (ISO 8601), ranges, and every type that is not named here | STRING | as PostgreSQL prints it |
| arrays | ARRAY | more than one dimension: one array of all elements, row by row |
| composites | STRUCT | |
| domains | as what they are made of | |

Text is what is converted, in the changes and (but for the plain types) in the backfill, so both give the same values. It is text as the
settings of `postgres.connection` make PostgreSQL print it: ISO dates, UTC, hexadecimal bytes. Text that is not UTF-8, as a database with
the encoding SQL_ASCII may hold, gets replacement characters. A `PgType` is immutable: safe from any thread.

    {1,NULL,"a \\"quoted\\" one","{}"}      an array; NULL without quotes is null; {{1,2},{3,4}} has two dimensions; [0:1]={1,2} has bounds
    (1,,"a ""quoted"" one",)                a composite; an empty part without quotes is null

Arrays without quotes, of one dimension, are split by Arrow; only others are read character by character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.ddl import make_list

OID = 26
NUMERIC = 1700
MODIFIER_NONE = -1

_PLAIN: dict[int, pa.DataType] = {
    16: pa.bool_(),
    17: pa.binary(),
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    OID: pa.int64(),
    700: pa.float32(),
    701: pa.float64(),
    1082: pa.date32(),
    1114: pa.timestamp("us"),
    1184: pa.timestamp("us", tz="UTC"),
}
_TEXTS = {25, 1042, 1043}
"""Types that are text themselves: what they print needs no function."""

_ENDS = {
    pa.date32(): ("0001-01-01", "9999-12-31"),
    pa.timestamp("us"): ("0001-01-01 00:00:00", "9999-12-31 23:59:59.999999"),
    pa.timestamp("us", tz="UTC"): ("0001-01-01 00:00:00+00", "9999-12-31 23:59:59.999999+00"),
}
_BEFORE = "^-infinity$| BC$"
_BEHIND = "^infinity$|^[0-9]{5,}-"

_HARD = r'["\\]|^\[|^.+\{'
"""What Arrow cannot split: quotes, bounds, dimensions."""

_ELEMENT = re.compile(r'"((?:[^"\\]|\\.)*)"|([^{},"]+)', re.DOTALL)
_PART = re.compile(r'"((?:[^"\\]|""|\\.)*)"|([^,()"]*)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED_PART = re.compile(r'\\(.)|"(")', re.DOTALL)


class CatalogType(msgspec.Struct, frozen=True):
    """A row of pg_type, and of a composite its columns: name, type, modifier."""

    kind: str
    element: int
    base: int
    base_modifier: int
    columns: tuple[tuple[str, int, int], ...] = ()


class PgType(msgspec.Struct, frozen=True):
    """A column's type: in the log, how its text is read, and how a backfill selects it."""

    arrow: pa.DataType
    from_text: Callable[[pa.Array], pa.Array]
    selected: Callable[[str], str]

    @property
    def from_one(self) -> Callable[[str], Any]:
        """How a single text is read, to what Arrow takes for a value; a column of one would cost some ten times as much."""

        def by_column(text: str) -> Any:
            return self.from_text(pa.array([text], pa.string()))[0]

        if self.arrow not in _ENDS:
            return _one_decimal if pa.types.is_decimal(self.arrow) else _ONE.get(self.arrow, by_column)
        read = date.fromisoformat if pa.types.is_date(self.arrow) else datetime.fromisoformat

        def moment(text: str) -> Any:
            try:
                return read(text)
            except ValueError:  # outside the years that Python knows
                return by_column(text)

        return moment

    def from_selected(self, column: pa.Array) -> pa.Array:
        """A column as a backfill got it."""
        if column.type == self.arrow:
            return column
        is_ = pa.types
        if is_.is_string(column.type) or is_.is_large_string(column.type):
            return self.from_text(column.cast(pa.string()))
        return column.cast(self.arrow)


def type_of(oid: int, modifier: int, catalog: Mapping[int, CatalogType]) -> PgType:
    """The type of a column; what the catalog does not know (any more) is text."""
    if oid in _PLAIN:
        arrow = _PLAIN[oid]
        selected = _as_bigint if oid == OID else _selector(arrow)
        return PgType(arrow, _READERS.get(arrow, lambda column: column.cast(arrow)), selected)
    if oid in _TEXTS:
        return PgType(pa.string(), _same, _same)
    if oid == NUMERIC:
        return _numeric(modifier)
    found = catalog.get(oid)
    if found is not None and found.kind == "d":
        return type_of(found.base, found.base_modifier, catalog)
    if found is not None and found.kind == "a":
        return _array(type_of(found.element, modifier, catalog))
    if found is not None and found.kind == "c" and found.columns:
        inner = {name: type_of(type_, its, catalog) for name, type_, its in found.columns}
        return _composite(inner)
    return PgType(pa.string(), _same, printed)


def decoded(column: pa.Array) -> pa.Array:
    """Bytes of the protocol as text."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([None if v is None else v.decode("utf-8", "replace") for v in column.to_pylist()], pa.string())


def named_types(oids: Iterable[int]) -> set[int]:
    """Those of some types that only the catalog can explain."""
    return {oid for oid in oids if oid not in _PLAIN and oid not in _TEXTS and oid != NUMERIC}


def printed(expression: str) -> str:
    """A value as the text that the stream sends: that of the type's own output function; a cast may make another (inet, char).

    `is not null` would be false for a composite with a null in it.
    """
    return f"case when num_nulls({expression}) = 0 then concat({expression}) end"


def _same(given: Any) -> Any:
    return given


def _as_bigint(name: str) -> str:
    """An oid has no sign. The bulk reader would take its four bytes for an integer with one."""
    return f"{name}::bigint"


def _selector(arrow: pa.DataType) -> Callable[[str], str]:
    if arrow not in _ENDS:
        return _same
    low, high = _ENDS[arrow]
    type_ = "date" if pa.types.is_date(arrow) else "timestamptz" if arrow.tz else "timestamp"
    return lambda name: (
        f"case when {name} < {type_} '{low}' then '{low}' when {name} > {type_} '{high}' then '{high}' else {name} end"
    )


def _numeric(modifier: int) -> PgType:
    precision, scale = ((modifier - 4) >> 16) & 0xFFFF, ((modifier - 4) & 0x7FF ^ 1024) - 1024
    if modifier < 4 or precision > 38 or not 0 <= scale <= precision:
        return PgType(pa.string(), _same, printed)
    arrow = pa.decimal128(precision, scale)

    def from_text(column: pa.Array) -> pa.Array:
        return pc.if_else(pc.equal(column, "NaN"), None, column).cast(arrow)

    return PgType(arrow, from_text, printed)


def _array(element: PgType) -> PgType:
    arrow = make_list(element.arrow)

    def from_text(column: pa.Array) -> pa.Array:
        values, offsets = array_texts(column)
        mask = column.is_null() if column.null_count else None
        return pa.ListArray.from_arrays(pa.array(offsets), element.from_text(values), type=arrow, mask=mask)

    return PgType(arrow, from_text, printed)


def _composite(inner: Mapping[str, PgType]) -> PgType:
    arrow = pa.struct([pa.field(name, type_.arrow) for name, type_ in inner.items()])

    def from_text(column: pa.Array) -> pa.Array:
        parts = composite_texts(column, len(inner))
        children = [type_.from_text(part) for type_, part in zip(inner.values(), parts, strict=True)]
        return pa.StructArray.from_arrays(children, fields=list(arrow), mask=column.is_null())

    return PgType(arrow, from_text, printed)


def _booleans(column: pa.Array) -> pa.Array:
    return pc.equal(column, "t")


def _moments(arrow: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    low, high = _ENDS[arrow]

    def read(column: pa.Array) -> pa.Array:
        try:
            return column.cast(arrow)
        except pa.ArrowInvalid:
            before, behind = pc.match_substring_regex(column, _BEFORE), pc.match_substring_regex(column, _BEHIND)
            return pc.if_else(before, low, pc.if_else(behind, high, column)).cast(arrow)

    return read


_DIGITS = np.zeros(256, np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)


def _hexadecimal(column: pa.Array) -> pa.Array:
    """`\\x` and two digits for each byte, of a whole column at once."""
    null = column.is_null() if column.null_count else None
    texts = pc.fill_null(column, "\\x")
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    characters = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]] if len(texts) else np.zeros(0, np.uint8)
    starts = ends[:-1] - ends[0]
    is_digit = np.ones(len(characters), bool)
    is_digit[starts] = is_digit[starts + 1] = False
    nibbles = _DIGITS[characters[is_digit]]
    made = ((ends - ends[0] - 2 * np.arange(len(ends))) // 2).astype(np.int32)
    values = nibbles[0::2] << 4 | nibbles[1::2]
    read = pa.Array.from_buffers(pa.binary(), len(texts), [None, pa.py_buffer(made), pa.py_buffer(values)])
    return read if null is None else pc.if_else(null, None, read)


_READERS: dict[pa.DataType, Callable[[pa.Array], pa.Array]] = {
    pa.bool_(): _booleans,
    pa.binary(): _hexadecimal,
    **{arrow: _moments(arrow) for arrow in _ENDS},
}


def _one_decimal(text: str) -> Decimal | None:
    return None if text == "NaN" else Decimal(text)


_ONE: dict[pa.DataType, Callable[[str], Any]] = {
    pa.bool_(): lambda text: text == "t",
    pa.int16(): int,
    pa.int32(): int,
    pa.int64(): int,
    pa.float64(): float,
    pa.string(): str,
    pa.binary(): lambda text: bytes.fromhex(text[2:]),
}
"""Where Python reads a text as Arrow does."""


def array_texts(column: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int32]]:
    """The elements of all arrays of a column as text, and the offsets of each array among them; a null has none."""
    column = pc.fill_null(column, "{}")
    if len(column) and pc.any(pc.match_substring_regex(column, _HARD)).as_py():
        lists = [elements(text) for text in column.to_pylist()]
        values = pa.array([value for found in lists for value in found], pa.string())
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    else:
        inside = pc.utf8_trim(column, "{}")
        split = pc.split_pattern(inside, ",")
        empty = pc.equal(inside, "")
        values = pc.list_flatten(pc.if_else(empty, pa.scalar([], split.type), split))
        values = pc.if_else(pc.equal(values, "NULL"), None, values)
        lengths = pc.if_else(empty, 0, pc.list_value_length(split)).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(column) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return values, offsets


def composite_texts(column: pa.Array, width: int) -> list[pa.Array]:
    """The parts of all composites of a column as text; parts that a value does not have are null, more than `width` are left out."""
    rows = [[None] * width if text is None else _fitted(parts(text), width) for text in column.to_pylist()]
    return [pa.array([row[at] for row in rows], pa.string()) for at in range(width)]


def elements(text: str) -> list[str | None]:
    """The elements of one array, of all its dimensions."""
    found: list[str | None] = []
    body = text.partition("=")[2] if text.startswith("[") else text
    for match in _ELEMENT.finditer(body):
        if match[2] is None:
            found.append(_ESCAPED.sub(r"\1", match[1]))
        else:
            found.append(None if match[2] == "NULL" else _ESCAPED.sub(r"\1", match[2]))
    return found


def parts(text: str) -> list[str | None]:
    """The parts of one composite."""
    found: list[str | None] = []
    at, end = 1, len(text) - 1
    while at <= end:
        match = _PART.match(text, at, end)
        assert match is not None, "the pattern matches nothing, too"
        found.append((match[2] or None) if match[1] is None else _ESCAPED_PART.sub(r"\1\2", match[1]))
        at = match.end() + 1
    return found


def _fitted(values: list[str | None], width: int) -> list[str | None]:
    return (values + [None] * (width - len(values)))[:width]
