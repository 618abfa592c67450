"""The one map from our types to JSON and back: what Kafka, views, sinks and captures write for a value.

| type | in JSON |
|---|---|
| STRING, BOOLEAN, TINYINT, SMALLINT, INT, BIGINT | string, true/false, number |
| FLOAT, DOUBLE | number; `"NaN"`, `"Infinity"`, `"-Infinity"` |
| DECIMAL | string of its digits |
| BINARY | base64 |
| DATE | `"2026-01-31"` |
| TIMESTAMP, TIMESTAMP_NTZ | ISO 8601 with microseconds: `"2026-01-31T12:00:00.000000Z"`; NTZ without the Z |
| ARRAY, STRUCT | array, object |
| MAP | object where its keys are strings, otherwise an array of pairs |

Whole columns become text by Arrow and are joined; text becomes columns by Arrow's JSON reader. Values that these cannot
hold exactly (not finite, nested times or bytes, maps) take the slower way over Python objects.
Functions only, no state: safe from any thread.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from headwater.log.arrow.columns import ARROW_ERRORS, Place, column_of, values_of
from headwater.log.port.topic import Topic
from headwater.model.errors import SchemaMismatch

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_NEWLINE = 10
_NEEDS_ESCAPE = '["\\\\\\x00-\\x1f]'


def row_texts(batch: pa.RecordBatch) -> pa.Array:
    """One JSON object for each row."""
    pieces: list[Any] = []
    for at, field in enumerate(batch.schema):
        pieces.append(("{" if at == 0 else ",") + _encode(field.name).decode() + ":")
        pieces.append(_texts(batch.column(at)))
    return pc.binary_join_element_wise(*pieces, "}", "")


def columns_of_texts(texts: Sequence[bytes], topic: Topic, *, partition: int, offsets: Sequence[int]) -> list[pa.Array]:
    """The topic's columns from one JSON object for each row; `partition` and `offsets` name the row that cannot be read."""
    readable = [_readable(field.type) for field in topic.schema]
    if all(type_ is not None for type_ in readable):
        try:
            return _by_arrow(texts, topic.schema, readable)
        except (*ARROW_ERRORS, KeyError):
            pass  # the slower way reads more, and can say which event it was
    try:
        return _by_python(texts, topic.schema, offsets)
    except SchemaMismatch as error:
        raise _unreadable(
            topic, partition, error.what.replace(", row ", ", offset ").replace(" (from 0)", "")
        ) from None


def json_texts(column: pa.Array) -> pa.Array:
    """The JSON text of each value of a column, by the same map; null stays null."""
    prepare = _to_json(column.type)
    values = [None if value is None else _encode(prepare(value)).decode() for value in values_of(column)]
    return pa.array(values, pa.string())


def from_json_texts(texts: Sequence[str | None], field: pa.Field) -> pa.Array:
    """The column that `json_texts` gave these texts for."""
    restore = _from_json(field.type)
    values = [None if text is None else restore(_decode(text)) for text in texts]
    return column_of(values, field.type, place=Place(field.name))


def _texts(column: pa.Array) -> pa.Array:
    """The JSON text of each value of a column."""
    is_, type_ = pa.types, column.type
    finite = is_.is_floating(type_) and pc.all(pc.is_finite(column), min_count=0).as_py()
    if is_.is_integer(type_) or is_.is_boolean(type_) or finite:
        texts = column.cast(pa.string())
    elif is_.is_timestamp(type_):
        plain = column.cast(pa.timestamp("us")).cast(pa.string())
        texts = _quoted(pc.replace_substring(plain, " ", "T"), 'Z"' if type_.tz else '"')
    elif is_.is_date(type_) or is_.is_decimal(type_):
        texts = _quoted(column.cast(pa.string()))
        if is_.is_decimal(type_):
            texts = _plain_decimals(texts, column)
    elif is_.is_string(type_) and not pc.any(pc.match_substring_regex(column, _NEEDS_ESCAPE)).as_py():
        texts = _quoted(column)
    else:
        prepare = _to_json(type_)
        values = [None if value is None else _encode(prepare(value)).decode() for value in values_of(column)]
        texts = pa.array(values, pa.string())
    return texts.fill_null("null") if texts.null_count else texts


def _quoted(texts: pa.Array, end: str = '"') -> pa.Array:
    return pc.binary_join_element_wise('"', texts, end, "")


def _plain_decimals(texts: pa.Array, column: pa.Array) -> pa.Array:
    """Arrow writes very small decimals with an exponent; Kafka's readers get all digits."""
    if not pc.any(pc.match_substring(texts, "E")).as_py():
        return texts
    return pa.array([None if value is None else f'"{value:f}"' for value in column.to_pylist()], pa.string())


def _to_json(type_: pa.DataType) -> Callable[[Any], Any]:
    """What makes of a Python value of this type one that msgspec writes as the map says."""
    is_ = pa.types
    if is_.is_floating(type_):
        return _float_to_json
    if is_.is_timestamp(type_):
        return lambda value: value.replace(tzinfo=None).isoformat(timespec="microseconds") + ("Z" if type_.tz else "")
    if is_.is_decimal(type_):
        return lambda value: f"{value:f}"
    if is_.is_list(type_):
        inner = _to_json(type_.value_type)
        return lambda values: [None if value is None else inner(value) for value in values]
    if is_.is_struct(type_):
        parts = {field.name: _to_json(field.type) for field in type_}
        return lambda value: {n: None if value[n] is None else part(value[n]) for n, part in parts.items()}
    if is_.is_map(type_):
        key, item = _to_json(type_.key_type), _to_json(type_.item_type)
        make: Any = dict if is_.is_string(type_.key_type) else lambda pairs: [list(pair) for pair in pairs]
        return lambda value: make((key(k), None if v is None else item(v)) for k, v in value.items())
    return lambda value: value


def _float_to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _by_arrow(texts: Sequence[bytes], schema: pa.Schema, readable: list[Any]) -> list[Any]:
    joined = b"\n".join(texts)
    if np.count_nonzero(np.frombuffer(joined, np.uint8) == _NEWLINE) != len(texts) - 1:  # four times as fast as `count`
        raise ValueError
    wanted = pa.schema([pa.field(field.name, type_) for field, type_ in zip(schema, readable, strict=True)])
    table = pj.read_json(
        pa.BufferReader(joined),
        read_options=pj.ReadOptions(block_size=min(max(len(joined), 1) + 1, 2**31 - 1), use_threads=False),
        parse_options=pj.ParseOptions(
            explicit_schema=wanted, newlines_in_values=False, unexpected_field_behavior="ignore"
        ),
    ).combine_chunks()
    if table.num_rows != len(texts):
        raise ValueError
    return [_converted(_only_chunk(table.column(field.name), field), field.type) for field in schema]


def _only_chunk(column: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    if column.num_chunks > 1:
        raise ValueError(field.name)
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def _readable(type_: pa.DataType) -> pa.DataType | None:
    """The type in which Arrow's JSON reader takes a column; None where it cannot."""
    is_ = pa.types
    if is_.is_string(type_) or is_.is_boolean(type_) or is_.is_integer(type_) or is_.is_floating(type_):
        return type_
    if is_.is_decimal(type_) or is_.is_date(type_) or is_.is_timestamp(type_) or is_.is_binary(type_):
        return pa.string()
    if is_.is_list(type_):
        return type_ if _readable(type_.value_type) == type_.value_type else None
    if is_.is_struct(type_):
        return type_ if all(_readable(field.type) == field.type for field in type_) else None
    return None


def _converted(column: pa.Array, type_: pa.DataType) -> pa.Array:
    if column.type == type_:
        return column
    if pa.types.is_binary(type_):
        values = [None if text is None else base64.b64decode(text, validate=True) for text in column.to_pylist()]
        return pa.array(values, type_)
    return column.cast(type_)


def _by_python(texts: Sequence[bytes], schema: pa.Schema, offsets: Sequence[int]) -> list[Any]:
    rows = []
    for at, text in enumerate(texts):
        try:
            row = _decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            row = text
        if not isinstance(row, dict):
            raise SchemaMismatch(f"The event at offset {offsets[at]} is not a JSON object: {text[:60]!r}.")
        rows.append(row)
    columns = []
    for field in schema:
        restore = _from_json(field.type)
        place = Place(field.name, lambda at: offsets[at])
        values = []
        for at, row in enumerate(rows):
            value = row.get(field.name)
            try:
                values.append(None if value is None else restore(value))
            except (ValueError, TypeError, KeyError):
                raise place.mismatch(at, value, field.type) from None
        columns.append(column_of(values, field.type, place=place))
    return columns


def _from_json(type_: pa.DataType) -> Callable[[Any], Any]:
    """What makes of a value from JSON one that `column_of` takes for this type."""
    is_ = pa.types
    if is_.is_binary(type_):
        return lambda text: base64.b64decode(text, validate=True)
    if is_.is_floating(type_):
        return lambda value: float(value) if value in ("NaN", "Infinity", "-Infinity") else value
    if is_.is_decimal(type_):
        return lambda value: Decimal(repr(value)) if isinstance(value, float) else value
    if is_.is_list(type_):
        inner = _from_json(type_.value_type)
        return lambda values: [None if value is None else inner(value) for value in values]
    if is_.is_struct(type_):
        parts = {field.name: _from_json(field.type) for field in type_}
        return lambda value: {n: None if value.get(n) is None else part(value[n]) for n, part in parts.items()}
    if is_.is_map(type_):
        key, item = _from_json(type_.key_type), _from_json(type_.item_type)
        pairs: Any = lambda value: value.items() if isinstance(value, dict) else value  # noqa: E731
        return lambda value: [(key(k), None if v is None else item(v)) for k, v in pairs(value)]
    return lambda value: value


def _unreadable(topic: Topic, partition: int, what: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"Topic {topic.name!r}, partition {partition}: {what}",
        advice="Somebody wrote it by another schema: read from the next offset, or read the topic as bytes.",
    )
