"""The columns of tables in PostgreSQL: the one map from our types to PostgreSQL's and back, by whole columns as CSV for COPY.

| type | column |
|---|---|
| BOOLEAN; TINYINT, SMALLINT; INT; BIGINT | boolean; smallint; integer; bigint |
| FLOAT, DOUBLE | real, double precision |
| DECIMAL(p, s) | numeric(p, s) |
| STRING, BINARY | text collate "C", bytea |
| DATE; TIMESTAMP; TIMESTAMP_NTZ | date; timestamptz; timestamp |
| ARRAY, MAP, STRUCT | json |

Sessions are in UTC. An empty CSV field is null, an empty text is quoted; times are read as microseconds, bytes as hex.
Functions only, no state: safe from any thread.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv

from headwater.log.arrow.json_types import from_json_texts, json_texts

_NAMES = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.string(): 'text collate "C"',
    pa.binary(): "bytea",
    pa.date32(): "date",
    pa.timestamp("us", tz="UTC"): "timestamptz",
    pa.timestamp("us"): "timestamp",
}
_NUMERIC = 1700
_OIDS = {
    16: pa.bool_(),
    17: pa.binary(),
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    25: pa.string(),
    114: pa.string(),
    700: pa.float32(),
    701: pa.float64(),
    1043: pa.string(),
    1082: pa.date32(),
    1114: pa.timestamp("us"),
    1184: pa.timestamp("us", tz="UTC"),
    3802: pa.string(),
}


def declared_type(type_: pa.DataType) -> str:
    """How a column of this type is declared."""
    if pa.types.is_nested(type_):
        return "json"
    if pa.types.is_decimal(type_):
        return f"numeric({type_.precision}, {type_.scale})"
    return _NAMES[type_]


def cast_type(type_: pa.DataType) -> str:
    """The type as a parameter is cast to it."""
    return declared_type(type_).partition(" collate")[0]


def read_expression(name: str, type_: pa.DataType) -> str:
    """The column (an SQL name) as `from_csv` reads it."""
    if pa.types.is_timestamp(type_):
        return f"(extract(epoch from {name}) * 1000000)::bigint"
    return f"encode({name}, 'hex')" if pa.types.is_binary(type_) else name


def to_csv(rows: pa.Table) -> pa.Buffer:
    """The rows as COPY … FROM STDIN (FORMAT csv) takes them."""
    texts = pa.table({str(at): to_text(column.combine_chunks()) for at, column in enumerate(rows.columns)})
    sink = pa.BufferOutputStream()
    csv.write_csv(texts, sink, csv.WriteOptions(include_header=False))
    return sink.getvalue()


def to_text(column: pa.Array) -> pa.Array:
    """The values of a column in a type whose CSV PostgreSQL reads exactly."""
    is_, type_ = pa.types, column.type
    if is_.is_nested(type_):
        return json_texts(column)
    if is_.is_timestamp(type_):
        return column.cast(pa.timestamp("us")).cast(pa.string())
    if is_.is_date(type_) or is_.is_decimal(type_):
        return column.cast(pa.string())
    if is_.is_binary(type_):
        return pa.array([None if v is None else "\\x" + v.hex() for v in column.to_pylist()], pa.string())
    return column


def from_csv(data: bytes, schema: pa.Schema) -> pa.Table:
    """The rows that COPY … TO STDOUT (FORMAT csv) gave, by the columns' `read_expression`s."""
    if not data:
        return schema.empty_table()
    read = csv.read_csv(
        io.BytesIO(data),
        csv.ReadOptions(column_names=schema.names, block_size=max(len(data) + 1, 1 << 20)),
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(
            column_types={field.name: _csv_type(field.type) for field in schema},
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            true_values=["t"],
            false_values=["f"],
        ),
    )
    columns = [_restored(read.column(at).combine_chunks(), field) for at, field in enumerate(schema)]
    return pa.Table.from_arrays(columns, schema=schema)


def answer_column(values: Sequence[Any], described: Any) -> pa.Array:
    """A column of an answer, as the cursor describes it; numbers of any size keep their digits, other types are text."""
    if described.type_code == _NUMERIC:
        if described.precision is not None and 1 <= described.precision <= 38:
            return pa.array(values, pa.decimal128(described.precision, described.scale or 0))
        return pa.array(values) if any(value is not None for value in values) else pa.nulls(len(values), pa.string())
    if described.type_code in _OIDS:
        return pa.array(values, _OIDS[described.type_code])
    return pa.array([None if value is None else str(value) for value in values], pa.string())


def _csv_type(type_: pa.DataType) -> pa.DataType:
    is_ = pa.types
    if is_.is_timestamp(type_):
        return pa.int64()
    if is_.is_nested(type_) or is_.is_binary(type_) or is_.is_decimal(type_) or is_.is_date(type_):
        return pa.string()
    return type_


def _restored(column: pa.Array, field: pa.Field) -> pa.Array:
    is_, type_ = pa.types, field.type
    if is_.is_nested(type_):
        return from_json_texts(column.to_pylist(), field)
    if is_.is_timestamp(type_):
        return column.view(type_)
    if is_.is_binary(type_):
        return pa.array([None if text is None else bytes.fromhex(text) for text in column.to_pylist()], type_)
    return column.cast(type_)
