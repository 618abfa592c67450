"""The values of a binlog's rows as columns: how many bytes each takes, and how many of them at once become an Arrow array.

Rows have no marks between them: where one ends is known when its columns have been walked over. So the rows of many events are walked
over in step, the first of each, then the second of each; every step does one column of all of them by NumPy (`walk`). What follows is by
whole columns too, except where only Python can: decimals of more than 18 digits, TIME, JSON, and texts that are not UTF-8.

Functions and frozen data only: safe from any thread. Data must have 8 bytes of padding at its end (`padded`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.capture.byte_columns import Bytes, Flags, Indexes, everywhere, numbers, texts_at
from headwater.capture.mysql import binlog
from headwater.capture.mysql.binlog import MappedColumn
from headwater.capture.mysql.types import LOCAL, MOMENT, decoded, mapped_type
from headwater.databases.address import load_client

PADDING = 8

_DIGITS_PER_WORD = 9
_BYTES_OF_DIGITS = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
_WIDTHS = {
    binlog.TINY: 1,
    binlog.YEAR: 1,
    binlog.SHORT: 2,
    binlog.INT24: 3,
    binlog.DATE: 3,
    binlog.LONG: 4,
    binlog.FLOAT: 4,
    binlog.LONGLONG: 8,
    binlog.DOUBLE: 8,
}
_WHOLE_TIMES = {binlog.TIMESTAMP: 4, binlog.DATETIME: 5, binlog.TIME: 3}
_DECIMAL_DIGITS_FAST = 18


class ValueLayout(NamedTuple):
    """The bytes of a value: so many (`width`), or as many as a number of `prefix` bytes before it says."""

    width: int
    prefix: int


class Found(NamedTuple):
    """Where the values of one column stand, in the order of the data."""

    data: Bytes
    start: Indexes
    length: Indexes
    there: Flags


class Walked(NamedTuple):
    """Rows: the event of each, and per image and column where its values stand."""

    events: Indexes
    images: list[list[Found]]


def padded(data: bytes) -> Bytes:
    """The bytes of a block, with room behind them."""
    return np.frombuffer(data + bytes(PADDING), np.uint8)


def layout_of(column: MappedColumn) -> ValueLayout | None:
    """How a column lies in a row; None where nobody knows."""
    kind = column.type
    if kind in _WIDTHS:
        return ValueLayout(_WIDTHS[kind], 0)
    if kind in _WHOLE_TIMES:
        return ValueLayout(_WHOLE_TIMES[kind] + (column.first + 1) // 2, 0)
    if kind == binlog.DECIMAL:
        return ValueLayout(sum(_decimal_bytes(column.first, column.second)), 0)
    if kind == binlog.BIT:
        return ValueLayout(column.second + (column.first > 0), 0)
    if kind in (binlog.ENUM, binlog.SET):
        return ValueLayout(column.second, 0)
    if kind in (binlog.VARCHAR, binlog.VAR_STRING):
        return ValueLayout(0, 2 if column.first + (column.second << 8) > 255 else 1)
    if kind == binlog.STRING:
        return ValueLayout(0, 2 if column.second > 255 else 1)
    if kind in (binlog.BLOB, binlog.JSON, binlog.GEOMETRY):
        return ValueLayout(0, column.first)
    return None


def walk(data: Bytes, starts: Indexes, stops: Indexes, layouts: list[ValueLayout], *, images: int) -> Walked:
    """Walks over the rows between some bytes, of each event its own, in step; updates have two images of each row."""
    at, active = starts.copy(), np.flatnonzero(starts < stops)
    events: list[Indexes] = []
    steps: list[list[list[tuple[Indexes, Indexes, Flags]]]] = [[[] for _ in layouts] for _ in range(images)]
    bits = np.arange((len(layouts) + 7) // 8)
    while len(active):
        events.append(active)
        place = at[active]
        for image in steps:
            absent = np.unpackbits(data[place[:, None] + bits], axis=1, bitorder="little").view(bool)
            place = place + len(bits)
            for column, layout in enumerate(layouts):
                there = ~absent[:, column]
                if layout.prefix:
                    length = _length(data, place, layout.prefix) * there
                    start = place + layout.prefix * there
                else:
                    length, start = layout.width * there, place
                image[column].append((start, length, there))
                place = start + length
        at[active] = place
        active = active[place < stops[active]]
    if not events:
        return Walked(np.zeros(0, np.int64), [[_nothing(data) for _ in layouts] for _ in range(images)])
    every = np.concatenate(events)
    order = np.argsort(every, kind="stable")
    found = [
        [Found(data, *(np.concatenate(part)[order] for part in zip(*column, strict=True))) for column in image]
        for image in steps
    ]
    return Walked(every[order], found)


def read_values(column: MappedColumn, found: Found, codecs: Mapping[int, str]) -> pa.Array:
    """A column of the binlog in the log's type."""
    arrow = mapped_type(column)
    kind = column.type
    if kind in _READERS:
        return _READERS[kind](column, found)
    if kind in (binlog.ENUM, binlog.SET):
        values = [
            decoded(pa.array([value]), codecs.get(column.collation, "utf8"))[0].as_py() for value in column.values
        ]
        return _elements(kind, values, found)
    if kind == binlog.STRING and arrow == pa.binary():
        return _filled_up(found, column.second)
    texts = texts_at(*found)
    return texts if arrow == pa.binary() else decoded(texts, codecs.get(column.collation, "utf8"))


def _nothing(data: Bytes) -> Found:
    none = np.zeros(0, np.int64)
    return Found(data, none, none, np.zeros(0, bool))


def _length(data: Bytes, at: Indexes, width: int) -> Indexes:
    if width in (1, 2, 4):
        return numbers(data, at, f"<u{width}")
    return numbers(data, at, "<u4") & 0xFFFFFF


def _big_endian(found: Found, at: int, width: int) -> Indexes:
    """Numbers of any width, from a byte of each value on."""
    total = np.zeros(len(found.start), np.int64)
    for place in range(at, at + width):
        total = total << 8 | found.data[np.where(found.there, found.start + place, 0)]
    return total


def _array(values: npt.NDArray[Any], found: Found, arrow: pa.DataType | None = None) -> pa.Array:
    array = pa.array(values, mask=None if found.there.all() else ~found.there)
    return array if arrow is None else array.cast(arrow)


def _integers(column: MappedColumn, found: Found) -> pa.Array:
    width = _WIDTHS[column.type]
    start = np.where(found.there, found.start, 0)
    if width == 3:
        values = numbers(found.data, start, "<u4") & 0xFFFFFF
        if not column.unsigned:
            values = (values ^ 0x800000) - 0x800000
        return _array(values, found, mapped_type(column))
    values = everywhere(found.data, f"<{'u' if column.unsigned else 'i'}{width}")[start]
    return _array(values, found, mapped_type(column))


def _floats(column: MappedColumn, found: Found) -> pa.Array:
    width = _WIDTHS[column.type]
    return _array(everywhere(found.data, f"<f{width}")[np.where(found.there, found.start, 0)], found)


def _years(column: MappedColumn, found: Found) -> pa.Array:
    values = found.data[np.where(found.there, found.start, 0)].astype(np.int16)
    return _array(np.where(values == 0, 0, values + 1900).astype(np.int16), found)


def _bits(column: MappedColumn, found: Found) -> pa.Array:
    arrow = mapped_type(column)
    values = _big_endian(found, 0, column.second + (column.first > 0))
    return _array(values.view(np.uint64) if pa.types.is_decimal(arrow) else values, found, arrow)


def _dates(column: MappedColumn, found: Found) -> pa.Array:
    packed = numbers(found.data, np.where(found.there, found.start, 0), "<u4") & 0xFFFFFF
    days, valid = _days(packed >> 9, packed >> 5 & 15, packed & 31)
    return pa.array(days.astype(np.int32), pa.date32(), mask=~(found.there & valid))


def _datetimes(column: MappedColumn, found: Found) -> pa.Array:
    packed = _big_endian(found, 0, 5) - (1 << 39)
    month = packed >> 22
    days, valid = _days(month // 13, month % 13, packed >> 17 & 31)
    seconds = (packed >> 12 & 31) * 3600 + (packed >> 6 & 63) * 60 + (packed & 63)
    micros = (days * 86_400 + seconds) * 1_000_000 + _fraction(column, found, 5)
    return pa.array(micros, pa.int64(), mask=~(found.there & valid)).cast(LOCAL)


def _timestamps(column: MappedColumn, found: Found) -> pa.Array:
    seconds = _big_endian(found, 0, 4)
    micros = seconds * 1_000_000 + _fraction(column, found, 4)
    return pa.array(micros, pa.int64(), mask=~(found.there & (micros > 0))).cast(MOMENT)


def _fraction(column: MappedColumn, found: Found, at: int) -> Indexes:
    """The microseconds behind a whole second: two digits in each byte."""
    width = (column.first + 1) // 2
    return _big_endian(found, at, width) * 10 ** (6 - 2 * width)


def _days(year: Indexes, month: Indexes, day: Indexes) -> tuple[Indexes, Flags]:
    """Days since 1970, and which of them are dates at all."""
    months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
    dates = months.astype("datetime64[D]") + (day - 1)
    valid = (year > 0) & (month > 0) & (month < 13) & (day > 0) & (dates.astype("datetime64[M]") == months)
    return dates.astype(np.int64), valid


def _times(column: MappedColumn, found: Found) -> pa.Array:
    width = (column.first + 1) // 2
    packed = _big_endian(found, 0, 3 + width) - (1 << (23 + 8 * width))
    micros_per = 10 ** (6 - 2 * width)

    def text(value: int) -> str:
        size = abs(value)
        whole, rest = size >> 8 * width, size & ((1 << 8 * width) - 1)
        digits = f".{rest * micros_per:06d}"[: column.first + 1] if column.first else ""
        return f"{'-' if value < 0 else ''}{whole >> 12 & 0x3FF:02d}:{whole >> 6 & 63:02d}:{whole & 63:02d}{digits}"

    return pa.array(
        [text(v) if there else None for v, there in zip(packed.tolist(), found.there, strict=True)], pa.string()
    )


def _decimal_bytes(precision: int, scale: int) -> tuple[int, int]:
    """The bytes before and behind the point."""
    sizes = [
        4 * (digits // _DIGITS_PER_WORD) + _BYTES_OF_DIGITS[digits % _DIGITS_PER_WORD]
        for digits in (precision - scale, scale)
    ]
    return sizes[0], sizes[1]


def _decimals(column: MappedColumn, found: Found) -> pa.Array:
    """Words of nine digits, the first and the last of what is left; of a negative number all bits are turned round."""
    precision, scale = column.first, column.second
    before, behind = _decimal_bytes(precision, scale)
    start = np.where(found.there, found.start, 0)
    octets = found.data[start[:, None] + np.arange(before + behind)]
    octets[:, 0] ^= 0x80
    negative = octets[:, 0] >= 0x80
    octets[negative] ^= 0xFF
    words = [*_words(precision - scale, first=True), *_words(scale, first=False)]
    fast = precision <= _DECIMAL_DIGITS_FAST
    total: Any = np.zeros(len(start), np.int64 if fast else object)
    at = 0
    for digits, width in words:
        word = np.zeros(len(start), np.int64)
        for place in range(at, at + width):
            word = word << 8 | octets[:, place]
        total = total * 10**digits + word
        at += width
    total = np.where(negative, -total, total)
    arrow = mapped_type(column)
    if fast:
        return _unscaled(total, found, precision, scale)
    texts = [_digits(int(value), scale) if there else None for value, there in zip(total, found.there, strict=True)]
    return pa.array(texts, pa.string()).cast(arrow)


def _digits(value: int, scale: int) -> str:
    """A decimal as the server prints it, however long."""
    text = f"{abs(value):0{scale + 1}d}"
    point = len(text) - scale
    return f"{'-' if value < 0 else ''}{text[:point]}{'.' if scale else ''}{text[point:]}"


def _words(digits: int, *, first: bool) -> list[tuple[int, int]]:
    """The groups of digits of one side of the point, each with its bytes; the short one is away from the point."""
    whole, left = divmod(digits, _DIGITS_PER_WORD)
    groups = [(_DIGITS_PER_WORD, 4)] * whole
    rest = [(left, _BYTES_OF_DIGITS[left])] if left else []
    return rest + groups if first else groups + rest


def _unscaled(values: Indexes, found: Found, precision: int, scale: int) -> pa.Array:
    """Decimals of at most 18 digits, by the 128 bits that Arrow keeps."""
    wide = np.empty((len(values), 2), np.int64)
    wide[:, 0], wide[:, 1] = values, values >> 63
    array = pa.Array.from_buffers(pa.decimal128(precision, scale), len(values), [None, pa.py_buffer(wide)])
    return array if found.there.all() else array.take(pa.array(np.arange(len(values)), mask=~found.there))


def _elements(kind: int, values: list[str], found: Found) -> pa.Array:
    """ENUM by the number of its element, SET by a bit for each."""
    packed = np.zeros(len(found.start), np.int64)
    widths = np.unique(found.length[found.there])
    for place in range(int(widths[0]) if len(widths) else 0):
        packed |= found.data[np.where(found.there, found.start + place, 0)].astype(np.int64) << 8 * place
    known, which = np.unique(packed, return_inverse=True)
    if kind == binlog.ENUM:
        texts = [values[at - 1] if 0 < at <= len(values) else "" for at in known.tolist()]
    else:
        texts = [",".join(value for at, value in enumerate(values) if bits >> at & 1) for bits in known.tolist()]
    return pa.array(texts, pa.string()).take(pa.array(which, mask=~found.there))


def _filled_up(found: Found, width: int) -> pa.Array:
    """BINARY(n): the zeros at its end are not sent."""
    places = np.arange(width)
    within = places < found.length[:, None]
    octets = np.where(within, found.data[np.where(within, found.start[:, None] + places, 0)], 0).astype(np.uint8)
    offsets = np.arange(0, (len(octets) + 1) * width, width, dtype=np.int32)
    array = pa.Array.from_buffers(pa.binary(), len(octets), [None, pa.py_buffer(offsets), pa.py_buffer(octets)])
    return array if found.there.all() else array.take(pa.array(np.arange(len(octets)), mask=~found.there))


def _documents(column: MappedColumn, found: Found) -> pa.Array:
    """MySQL's binary JSON as the text that MySQL prints."""
    parse = load_client("pymysqlreplication.json_binary", extra="mysql", purpose="Decoding MySQL's JSON").parse_json
    texts = texts_at(*found).to_pylist()
    values = [None if text is None else "null" if not text else _printed(parse(text[0], text[1:])) for text in texts]
    return pa.array(values, pa.string())


def _printed(document: Any) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.decode("utf8", "replace")
        if isinstance(value, dict):
            return {plain(key): plain(inner) for key, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(plain(document), ensure_ascii=False, default=str)


_READERS: dict[int, Callable[[MappedColumn, Found], pa.Array]] = {
    **dict.fromkeys((binlog.TINY, binlog.SHORT, binlog.INT24, binlog.LONG, binlog.LONGLONG), _integers),
    **dict.fromkeys((binlog.FLOAT, binlog.DOUBLE), _floats),
    binlog.YEAR: _years,
    binlog.BIT: _bits,
    binlog.DATE: _dates,
    binlog.DATETIME: _datetimes,
    binlog.TIMESTAMP: _timestamps,
    binlog.TIME: _times,
    binlog.DECIMAL: _decimals,
    binlog.JSON: _documents,
}
