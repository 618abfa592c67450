"""The columns of tables in SQLite: the one map from our types to SQLite's and back, exact in both directions.

| type | column | value |
|---|---|---|
| BOOLEAN | BOOLEAN | 0, 1 |
| TINYINT … BIGINT | INTEGER | the number |
| FLOAT, DOUBLE | REAL | the number; the text `NaN`, which SQLite has no number for |
| DECIMAL(p, s) | TEXT_DECIMAL(p, s) | all its digits, as text |
| STRING, BINARY | TEXT, BLOB | as it is |
| DATE | DATE | `2026-01-31` |
| TIMESTAMP, TIMESTAMP_NTZ | TIMESTAMP, TIMESTAMP_NTZ | microseconds since 1970 |
| ARRAY, MAP, STRUCT | TEXT_JSON | JSON |

The declared types are how an answer finds its types again, through SQL views too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headwater.log.arrow.columns import values_of
from headwater.log.arrow.json_types import from_json_texts, json_texts

_DECIMAL = re.compile(r"TEXT_DECIMAL\((\d+),\s*(\d+)\)", re.IGNORECASE)
_DECLARED = {
    "BOOLEAN": pa.bool_(),
    "INTEGER": pa.int64(),
    "REAL": pa.float64(),
    "TEXT": pa.string(),
    "TEXT_JSON": pa.string(),
    "BLOB": pa.binary(),
    "DATE": pa.date32(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "TIMESTAMP_NTZ": pa.timestamp("us"),
}


def declared_type(type_: pa.DataType) -> str:
    """How a column of this type is declared."""
    is_ = pa.types
    if is_.is_nested(type_):
        return "TEXT_JSON"
    if is_.is_decimal(type_):
        return f"TEXT_DECIMAL({type_.precision},{type_.scale})"
    if is_.is_integer(type_):
        return "INTEGER"
    if is_.is_floating(type_):
        return "REAL"
    return next(name for name, known in _DECLARED.items() if known == type_)


def type_of(declared: str) -> pa.DataType | None:
    """The type of a column that was declared so; None where SQLite worked the value out."""
    if found := _DECIMAL.fullmatch(declared):
        return pa.decimal128(int(found[1]), int(found[2]))
    return _DECLARED.get(declared)


def to_values(column: pa.Array) -> list[Any]:
    """The values of a column as SQLite takes them."""
    is_, type_ = pa.types, column.type
    if is_.is_nested(type_):
        return json_texts(column).to_pylist()
    if is_.is_timestamp(type_):
        return values_of(column.cast(pa.int64()))
    if is_.is_date(type_):
        return column.cast(pa.string()).to_pylist()
    if is_.is_decimal(type_):
        return [None if value is None else f"{value:f}" for value in column.to_pylist()]
    values = values_of(column)
    if is_.is_floating(type_):
        return ["NaN" if value != value else value for value in values]
    return values


def to_column(values: Sequence[Any], field: pa.Field) -> pa.Array:
    """The column that `to_values` gave these values for."""
    is_, type_ = pa.types, field.type
    if is_.is_nested(type_):
        return from_json_texts(values, field)
    if is_.is_timestamp(type_):
        return pa.array(values, pa.int64()).view(type_)
    if is_.is_date(type_) or is_.is_decimal(type_):
        return pa.array(values, pa.string()).cast(type_)
    if is_.is_boolean(type_):
        return pa.array(values, pa.int8()).cast(type_)
    if is_.is_floating(type_):
        try:
            return pa.array(values, type_)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            return pa.array([float(value) if isinstance(value, str) else value for value in values], type_)
    return pa.array(values, type_)


def answer_column(values: Sequence[Any], name: str, declared: str) -> pa.Array:
    """A column of an answer: of its declared type, or of the type that its values have; text where they differ."""
    type_ = type_of(declared)
    if type_ is not None:
        return to_column(values, pa.field(name, type_))
    try:
        found = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        found = pa.array([None if value is None else str(value) for value in values], pa.string())
    return found.cast(pa.string()) if pa.types.is_null(found.type) else found
