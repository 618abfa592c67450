"""Columns as Kafka Connect describes them and its JSON holds them, in types of the log: what Debezium sends, and what we send.

| Connect (or Debezium) | log |
|---|---|
| int8, int16, int32, int64; float, double; boolean; string | TINYINT, SMALLINT, INT, BIGINT; FLOAT, DOUBLE; BOOLEAN; STRING |
| bytes | BINARY |
| Decimal with up to 38 digits | DECIMAL(p, s) |
| any other Decimal, `VariableScaleDecimal` | STRING: all its digits |
| `time.Date`, Connect's Date, `IsoDate` | DATE |
| `time.Timestamp`, `MicroTimestamp`, `NanoTimestamp`, Connect's Timestamp, `IsoTimestamp` | TIMESTAMP_NTZ, whole microseconds |
| `ZonedTimestamp` | TIMESTAMP |
| `time.Time`, `MicroTime`, `NanoTime`, Connect's Time | STRING: 13:14:15.678901 |
| `Json`, `Uuid`, `Enum`, `Xml`, `ZonedTime`, `Interval` … | STRING, as it is |
| `MicroDuration`, `Year` … | as the number it is |
| array, struct, map | ARRAY, STRUCT, MAP |

`ColumnReader` reads a column in two steps: Arrow's JSON reader takes it by the type `read`, and `decode` makes a column of the log of it.
`ColumnWriter` is the way back. Bytes stand in JSON as base64, the standard alphabet with padding. A decimal is its unscaled value in two's
complement, most significant byte first, as few bytes as hold it. Whole columns become one or the other by NumPy: no value becomes a
Python object. `ValueError` where text is no base64, or a number takes more than 16 bytes. Frozen data and functions: safe from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.ddl import make_list, make_map

PRECISION_MAX = 38
LOCAL, ZONED = pa.timestamp("us"), pa.timestamp("us", tz="UTC")

DECIMAL = "org.apache.kafka.connect.data.Decimal"
PRECISION = "connect.decimal.precision"
DATE, MICRO_TIMESTAMP, ZONED_TIMESTAMP = (
    f"io.debezium.time.{name}" for name in ("Date", "MicroTimestamp", "ZonedTimestamp")
)

_PLAIN: dict[str, pa.DataType] = {
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "float32": pa.float32(),
    "double": pa.float64(),
    "float64": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
}
_DAYS = (DATE, "org.apache.kafka.connect.data.Date")
_STAMPS = {
    "io.debezium.time.Timestamp": 1_000_000,
    "org.apache.kafka.connect.data.Timestamp": 1_000_000,
    MICRO_TIMESTAMP: 1_000,
    "io.debezium.time.NanoTimestamp": 1,
}
_CLOCKS = {
    "io.debezium.time.Time": 1_000_000,
    "org.apache.kafka.connect.data.Time": 1_000_000,
    "io.debezium.time.MicroTime": 1_000,
    "io.debezium.time.NanoTime": 1,
}
"""Nanoseconds in the unit of each."""

_ISO = {"io.debezium.time.IsoDate": pa.date32(), "io.debezium.time.IsoTimestamp": LOCAL}
DECIMAL_BYTES = 16
"""What a number of 38 digits takes."""

_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)
_PAD = ord("=")
_NO_DIGIT = 255
_BASE64_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
_BASE64_DIGITS[_ALPHABET] = np.arange(64)
_BASE64_DIGITS[_PAD] = 0

_DIGITS = Context(prec=2_000)
_FINER = r"(\.\d{6})\d+"


class ColumnReader(msgspec.Struct, frozen=True):
    """How a column is read; see the module."""

    read: pa.DataType
    log: pa.DataType
    decode: Callable[[pa.Array], pa.Array] = lambda column: column


class ColumnWriter(msgspec.Struct, frozen=True):
    """How a column is written: its schema in Connect's words, and what makes of it a column that is plain JSON."""

    schema: Mapping[str, Any]
    encode: Callable[[pa.Array], pa.Array] = lambda column: column


def reading_of(schema: Mapping[str, Any]) -> ColumnReader:
    """How a column with this schema of Connect's is read; `ValueError` where Connect has no such type."""
    name, kind = schema.get("name"), schema["type"]
    if name in _DAYS:
        return ColumnReader(pa.int32(), pa.date32(), lambda column: column.view(pa.date32()))
    if name in _STAMPS:
        unit = _STAMPS[name]
        return ColumnReader(pa.int64(), LOCAL, lambda column: _micros(column, unit).view(LOCAL))
    if name in _CLOCKS:
        unit = _CLOCKS[name]
        return ColumnReader(pa.int64(), pa.string(), lambda column: _clock(_micros(column, unit)))
    if name == ZONED_TIMESTAMP:
        return ColumnReader(pa.string(), ZONED, _zoned)
    if name in _ISO:
        type_ = _ISO[name]
        return ColumnReader(pa.string(), type_, lambda column: _no_finer(pc.utf8_rtrim(column, "Z")).cast(type_))
    if name == DECIMAL:
        return _decimal(schema.get("parameters", {}))
    if name == "io.debezium.data.VariableScaleDecimal":
        return ColumnReader(
            pa.struct([("scale", pa.int32()), ("value", pa.string())]),
            pa.string(),
            lambda column: _digits(
                from_base64(pc.struct_field(column, "value")), pc.struct_field(column, "scale").to_pylist()
            ),
        )
    return _PLAIN_READINGS[kind] if kind in _PLAIN_READINGS else _nested(kind, schema)


def reading_by_type(type_: pa.DataType, *, time_unit: str = "us", decimals: str = "base64") -> ColumnReader:
    """How a column of this type of the log is read where no schema says what its JSON means.

    A time without a zone is a number in `time_unit`, one with a zone is ISO 8601, a date is days since 1970; a decimal is base64, or with
    `decimals="text"` its digits.
    """
    is_ = pa.types
    if is_.is_binary(type_):
        return _BYTES
    if is_.is_date(type_):
        return reading_of({"type": "int32", "name": DATE})
    if type_ == LOCAL:
        names = {"ms": "Timestamp", "us": "MicroTimestamp", "ns": "NanoTimestamp"}
        return reading_of({"type": "int64", "name": f"io.debezium.time.{names[time_unit]}"})
    if type_ == ZONED:
        return reading_of({"type": "string", "name": ZONED_TIMESTAMP})
    if is_.is_decimal(type_):
        if decimals == "text":
            return ColumnReader(pa.string(), type_, lambda column: column.cast(type_))
        return ColumnReader(pa.string(), type_, lambda column: to_decimals(from_base64(column), type_))
    return ColumnReader(type_, type_)


def writing_of(type_: pa.DataType) -> ColumnWriter:
    """How a column of the log is written. Inside of arrays, maps and structs times are ISO 8601 and decimals their digits."""
    is_ = pa.types
    if is_.is_binary(type_):
        return ColumnWriter({"type": "bytes"}, to_base64)
    if is_.is_date(type_):
        return ColumnWriter({"type": "int32", "name": DATE, "version": 1}, lambda column: column.view(pa.int32()))
    if type_ == LOCAL:
        return ColumnWriter(
            {"type": "int64", "name": MICRO_TIMESTAMP, "version": 1}, lambda column: column.view(pa.int64())
        )
    if is_.is_decimal(type_):
        size = {"scale": str(type_.scale), PRECISION: str(type_.precision)}
        return ColumnWriter(
            {"type": "bytes", "name": DECIMAL, "version": 1, "parameters": size},
            lambda column: to_base64(from_decimals(column)),
        )
    return ColumnWriter(_schema_inside(type_))


def _schema_inside(type_: pa.DataType) -> dict[str, Any]:
    """The schema of values that are written as `headwater.log.arrow.json_types` writes them."""
    is_ = pa.types
    if is_.is_list(type_):
        return {"type": "array", "items": _optional(_schema_inside(type_.value_type))}
    if is_.is_map(type_):
        keys, values = _schema_inside(type_.key_type), _optional(_schema_inside(type_.item_type))
        return {"type": "map", "keys": {**keys, "optional": False}, "values": values}
    if is_.is_struct(type_):
        return {"type": "struct", "fields": [{**_optional(_schema_inside(f.type)), "field": f.name} for f in type_]}
    if is_.is_binary(type_):
        return {"type": "bytes"}
    if type_ == ZONED:
        return {"type": "string", "name": ZONED_TIMESTAMP, "version": 1}
    for iso, known in _ISO.items():
        if type_ == known:
            return {"type": "string", "name": iso, "version": 1}
    return {"type": next((name for name, plain in _PLAIN.items() if plain == type_), "string")}


def _optional(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "optional": True}


def _nested(kind: str, schema: Mapping[str, Any]) -> ColumnReader:
    if kind == "array":
        inner = reading_of(schema["items"])
        type_ = make_list(inner.log)
        return ColumnReader(pa.list_(inner.read), type_, lambda column: _list(column, inner, type_))
    if kind == "struct":
        parts = [(field["field"], reading_of(field)) for field in schema["fields"]]
        return row_reading(parts)
    if kind == "map":
        type_ = make_map(reading_of(schema["keys"]).read, reading_of(schema["values"]).read)
        return ColumnReader(type_, type_)
    raise ValueError(f"Kafka Connect has no type {kind!r}")


def row_reading(parts: Sequence[tuple[str, ColumnReader]]) -> ColumnReader:
    """How a struct of these fields is read, such as a row."""
    read = pa.struct([pa.field(name, part.read) for name, part in parts])
    fields = [pa.field(name, part.log) for name, part in parts]

    def decode(column: pa.Array) -> pa.Array:
        columns = [part.decode(pc.struct_field(column, [at])) for at, (_, part) in enumerate(parts)]
        return pa.StructArray.from_arrays(columns, fields=fields, mask=column.is_null())

    return ColumnReader(read, pa.struct(fields), decode)


def _list(column: pa.Array, inner: ColumnReader, type_: pa.DataType) -> pa.Array:
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, inner.decode(column.flatten()), type=type_, mask=column.is_null())


def _decimal(parameters: Mapping[str, str]) -> ColumnReader:
    scale, precision = int(parameters.get("scale", 0)), int(parameters.get(PRECISION, PRECISION_MAX))
    if 0 < precision <= PRECISION_MAX and 0 <= scale <= precision:
        type_ = pa.decimal128(precision, scale)
        return ColumnReader(pa.string(), type_, lambda column: to_decimals(from_base64(column), type_))
    return ColumnReader(pa.string(), pa.string(), lambda column: _digits(from_base64(column), [scale] * len(column)))


def _digits(octets: pa.Array, scales: Sequence[int | None]) -> pa.Array:
    """All digits of numbers of any size. One by one: no type of Arrow's holds them, and few columns are such."""
    texts = [
        None
        if value is None or scale is None
        else format(Decimal(int.from_bytes(value, "big", signed=True)).scaleb(-scale, _DIGITS), "f")
        for value, scale in zip(octets.to_pylist(), scales, strict=True)
    ]
    return pa.array(texts, pa.string())


def _micros(column: pa.Array, nanoseconds: int) -> pa.Array:
    """Microseconds of times in another unit; what is finer is cut off, towards the past."""
    values = column.cast(pa.int64())
    if nanoseconds >= 1_000:
        return pc.multiply_checked(values, nanoseconds // 1_000)
    return pa.array(values.fill_null(0).to_numpy() // 1_000, mask=np.asarray(values.is_null()))


def _clock(micros: pa.Array) -> pa.Array:
    """A time of day as text, also one that is negative or longer than a day, as MySQL has them."""
    size = pc.abs(micros)
    seconds = pc.divide(size, 1_000_000)
    parts = [pc.divide(seconds, 3600), _rest(pc.divide(seconds, 60), 60), _rest(seconds, 60)]
    texts = [pc.utf8_lpad(part.cast(pa.string()), 2, "0") for part in parts]
    fraction = pc.utf8_lpad(_rest(size, 1_000_000).cast(pa.string()), 6, "0")
    sign = pc.if_else(pc.less(micros, 0), "-", "")
    fraction = pc.replace_substring_regex(pc.binary_join_element_wise(".", fraction, ""), r"\.?0*$", "")
    return pc.binary_join_element_wise(sign, pc.binary_join_element_wise(*texts, ":"), fraction, "")


def _rest(values: pa.Array, divisor: int) -> pa.Array:
    return pc.subtract(values, pc.multiply(pc.divide(values, divisor), divisor))


def _zoned(texts: pa.Array) -> pa.Array:
    return _no_finer(texts).cast(ZONED)


def _no_finer(texts: pa.Array) -> pa.Array:
    """ISO 8601 without what is finer than a microsecond, which SQL Server and Oracle may have."""
    return pc.replace_substring_regex(texts, _FINER, r"\1")


def from_base64(texts: pa.Array) -> pa.Array:
    """The bytes that texts stand for; null stays null."""
    lengths, data = _parts(texts)
    ends = np.cumsum(lengths)
    if (lengths % 4).any():
        raise ValueError("a length of base64 that is not a multiple of four")
    pads = np.zeros(len(lengths), np.int64)
    filled = lengths > 0
    pads[filled] = (data[ends[filled] - 1] == _PAD).astype(np.int64) + (data[ends[filled] - 2] == _PAD)
    digits = _BASE64_DIGITS[data]
    if (digits == _NO_DIGIT).any() or np.count_nonzero(data == _PAD) != pads.sum():
        raise ValueError("a character that is not valid in base64")
    quads = digits.reshape(-1, 4).astype(np.uint32)
    words = quads[:, 0] << 18 | quads[:, 1] << 12 | quads[:, 2] << 6 | quads[:, 3]
    octets = np.stack([words >> 16, words >> 8, words], axis=1).astype(np.uint8).reshape(-1)
    kept = np.ones(len(octets), bool)
    last = ends * 3 // 4
    kept[last[pads > 0] - 1] = False
    kept[last[pads > 1] - 2] = False
    return _column(lengths // 4 * 3 - pads, octets[kept], texts, pa.binary())


def to_base64(values: pa.Array) -> pa.Array:
    """The text of each value; null stays null."""
    lengths, data = _parts(values)
    groups = (lengths + 2) // 3
    padded = np.zeros(int(groups.sum()) * 3, np.uint8)
    first = np.concatenate([[0], np.cumsum(groups)[:-1]]) * 3
    padded[_ranges(first, lengths)] = data
    triples = padded.reshape(-1, 3).astype(np.uint32)
    words = triples[:, 0] << 16 | triples[:, 1] << 8 | triples[:, 2]
    digits = np.stack([words >> 18, words >> 12 & 63, words >> 6 & 63, words & 63], axis=1).reshape(-1)
    texts = _ALPHABET[digits]
    pads = groups * 3 - lengths
    last = np.cumsum(groups) * 4
    texts[last[pads > 0] - 1] = _PAD
    texts[last[pads > 1] - 2] = _PAD
    return _column(groups * 4, texts, values, pa.string())


def to_decimals(octets: pa.Array, type_: pa.DataType) -> pa.Array:
    """The decimals of which these bytes are the unscaled values."""
    lengths, data = _parts(octets)
    if (lengths > DECIMAL_BYTES).any():
        raise ValueError(f"a number of more than {DECIMAL_BYTES} bytes")
    starts = np.cumsum(lengths) - lengths
    negative = np.zeros(len(lengths), bool)
    negative[lengths > 0] = data[starts[lengths > 0]] >= 128
    wide = np.repeat(np.where(negative, 255, 0).astype(np.uint8), DECIMAL_BYTES)
    first = np.arange(len(lengths)) * DECIMAL_BYTES + DECIMAL_BYTES - lengths
    wide[_ranges(first, lengths)] = data
    little = np.ascontiguousarray(wide.reshape(-1, DECIMAL_BYTES)[:, ::-1])
    made = pa.Array.from_buffers(type_, len(octets), [_validity(octets), pa.py_buffer(little)])
    made.validate(full=True)
    return made


def from_decimals(column: pa.Array) -> pa.Array:
    """The unscaled value of each decimal, in as few bytes as hold it."""
    count = len(column)
    little = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * DECIMAL_BYTES :][: count * DECIMAL_BYTES]
    wide = little.reshape(count, DECIMAL_BYTES)[:, ::-1]
    fill = np.where(wide[:, :1] >= 128, 255, 0)
    # A byte is needed if it is not only the sign, or if the next one would be taken for another sign without it.
    needed = (wide != fill)[:, :-1] | ((wide[:, 1:] >= 128) != (fill >= 128))
    lengths = DECIMAL_BYTES - np.where(needed.any(axis=1), needed.argmax(axis=1), DECIMAL_BYTES - 1)
    lengths[np.asarray(column.is_null())] = 0
    kept = np.arange(DECIMAL_BYTES)[None, :] >= DECIMAL_BYTES - lengths[:, None]
    return _column(lengths, wide[kept], column, pa.binary())


def _parts(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The length of each value, null counting as none, and the bytes of all of them."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: len(column) + 1].astype(np.int64)
    held = column.buffers()[2]
    data = np.frombuffer(held, np.uint8) if held is not None else np.zeros(0, np.uint8)
    lengths = np.diff(offsets)
    null = np.asarray(column.is_null())
    if (lengths[null] > 0).any():
        return np.where(null, 0, lengths), data[_ranges(offsets[:-1][~null], lengths[~null])]
    return lengths, data[offsets[0] : offsets[-1]]


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The indices of all ranges, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(before - starts, lengths)


def _column(lengths: np.ndarray, data: np.ndarray, like: pa.Array, type_: pa.DataType) -> pa.Array:
    """A column of these bytes, null where another is."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError("more bytes than one column holds")
    buffers = [_validity(like), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(type_, len(lengths), buffers)


def _validity(like: pa.Array) -> pa.Buffer | None:
    if not like.null_count:
        return None
    return pa.array(np.asarray(like.is_valid())).buffers()[1]


_BYTES = ColumnReader(pa.string(), pa.binary(), from_base64)
_PLAIN_READINGS = {**{name: ColumnReader(type_, type_) for name, type_ in _PLAIN.items()}, "bytes": _BYTES}
