"""The columns of MariaDB and MySQL in the types of the log: one map for what the catalog declares and for what the binlog describes.

| MariaDB, MySQL | log | |
|---|---|---|
| TINYINT, BOOLEAN; SMALLINT; MEDIUMINT, INT; BIGINT | TINYINT; SMALLINT; INT; BIGINT | a BOOLEAN is a TINYINT; it may hold 2 |
| the same, UNSIGNED | SMALLINT; INT; INT, BIGINT; DECIMAL(20, 0) | the next type that holds them all |
| DECIMAL(p, s) with p ≤ 38; with more digits | DECIMAL(p, s); STRING | nothing is rounded |
| FLOAT; DOUBLE | FLOAT; DOUBLE | |
| CHAR, VARCHAR, TEXT, ENUM, SET, JSON | STRING | in UTF-8, whatever the column's character set is; of a SET the elements with commas |
| BINARY, VARBINARY, BLOB, GEOMETRY | BINARY | BINARY(n) has its zeros at the end, as the database shows it |
| DATE; DATETIME; TIMESTAMP | DATE; TIMESTAMP_NTZ; TIMESTAMP | what is no date (0000-00-00, 2024-00-10) is null |
| TIME | STRING | as the database prints it: it may be negative, and longer than a day |
| YEAR | SMALLINT | |
| BIT(1); BIT(n); BIT(64) | BOOLEAN; BIGINT; DECIMAL(20, 0) | |

A `Declared` is a column by the catalog, `mapped_type` one by the binlog; of one column both give the same type. Functions and frozen data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.capture.mysql import binlog
from headwater.capture.mysql.binlog import MappedColumn
from headwater.databases.address import load_client

BINARY_COLLATION = 63
DECIMAL_DIGITS_MAX = 38
UNSIGNED_BIG = pa.decimal128(20, 0)
LOCAL, MOMENT = pa.timestamp("us"), pa.timestamp("us", tz="UTC")

_INTEGERS = {
    "tinyint": (pa.int8(), pa.int16()),
    "smallint": (pa.int16(), pa.int32()),
    "mediumint": (pa.int32(), pa.int32()),
    "int": (pa.int32(), pa.int64()),
    "bigint": (pa.int64(), UNSIGNED_BIG),
}
_INTEGER_NUMBERS = {
    binlog.TINY: "tinyint",
    binlog.SHORT: "smallint",
    binlog.INT24: "mediumint",
    binlog.LONG: "int",
    binlog.LONGLONG: "bigint",
}
_PLAIN: dict[str, pa.DataType] = {
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "datetime": LOCAL,
    "timestamp": MOMENT,
    "year": pa.int16(),
    **dict.fromkeys(
        ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set", "json", "time"), pa.string()
    ),
    **dict.fromkeys(
        (
            *("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob", "geometry", "point", "linestring"),
            *("polygon", "multipoint", "multilinestring", "multipolygon", "geometrycollection", "geomcollection"),
        ),
        pa.binary(),
    ),
}
_PLAIN_NUMBERS: dict[int, pa.DataType] = {
    binlog.FLOAT: pa.float32(),
    binlog.DOUBLE: pa.float64(),
    binlog.DATE: pa.date32(),
    binlog.DATETIME: LOCAL,
    binlog.TIMESTAMP: MOMENT,
    binlog.YEAR: pa.int16(),
    binlog.TIME: pa.string(),
    binlog.ENUM: pa.string(),
    binlog.SET: pa.string(),
    binlog.JSON: pa.string(),
    binlog.GEOMETRY: pa.binary(),
}
_CHARACTERS = (binlog.VARCHAR, binlog.VAR_STRING, binlog.STRING, binlog.BLOB)
_NO_DATE = "^0000-|-00"
_NOT_ASCII = 0x80
_WIDE = ("utf-16", "utf-32")
_LITERALLY = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_())


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """A column as information_schema has it; `full` is its type with everything, as in `int(10) unsigned`."""

    name: str
    type: str
    full: str
    precision: int | None = None
    scale: int | None = None
    nullable: bool = True
    generated: bool = False

    @property
    def arrow(self) -> pa.DataType | None:
        """The type in the log, None where it has none."""
        if self.type in _INTEGERS:
            return _INTEGERS[self.type]["unsigned" in self.full]
        if self.type == "decimal":
            return decimal_type(self.precision or 10, self.scale or 0)
        if self.type == "bit":
            return bit_type(self.precision or 1)
        return _PLAIN.get(self.type)

    def selected(self, column: str) -> str:
        """How a backfill selects it, so that the text that comes holds all of it."""
        if self.type in ("float", "bit"):
            return f"({column} + 0{'e0' if self.type == 'float' else ''})"
        return column

    def ordered(self, column: str) -> str:
        """By what a backfill walks over it, if it is part of the key: elements of an ENUM have an order of their own."""
        return f"({column} + 0)" if self.type in ("enum", "set", "bit") else column

    def compared(self, column: str) -> str:
        """What a backfill selects to go on behind it: a FLOAT is printed exactly as a DOUBLE only."""
        return self.selected(column) if self.type == "float" else self.ordered(column)

    def from_text(self, texts: pa.Array) -> pa.Array:
        """A column of texts as the server prints them, in the log's type."""
        arrow = self.arrow
        if arrow == pa.binary():
            return texts
        if arrow == pa.bool_():
            return pc.not_equal(texts, b"0")
        column = decoded(texts)
        if pa.types.is_temporal(arrow):
            column = pc.if_else(pc.match_substring_regex(column, _NO_DATE), None, column)
        if arrow == MOMENT:
            return column.cast(LOCAL).cast(pa.int64()).cast(MOMENT)
        if arrow == pa.float32():  # its exact value comes as a double
            return column.cast(pa.float64()).cast(pa.float32())
        return column.cast(arrow)

    @property
    def is_literal(self) -> bool:
        """Whether its text may stand in a statement without quotes."""
        return self.arrow in _LITERALLY or pa.types.is_decimal(self.arrow) or self.type in ("enum", "set")


def mapped_type(column: MappedColumn) -> pa.DataType | None:
    """The type in the log of a column of the binlog, None where it has none."""
    if column.type in _INTEGER_NUMBERS:
        return _INTEGERS[_INTEGER_NUMBERS[column.type]][column.unsigned]
    if column.type == binlog.DECIMAL:
        return decimal_type(column.first, column.second)
    if column.type == binlog.BIT:
        return bit_type(column.first + 8 * column.second)
    if column.type in _CHARACTERS:
        return pa.binary() if column.collation == BINARY_COLLATION else pa.string()
    return _PLAIN_NUMBERS.get(column.type)


def decimal_type(precision: int, scale: int) -> pa.DataType:
    """A decimal, or its digits where it has more than the log's."""
    return pa.decimal128(precision, scale) if precision <= DECIMAL_DIGITS_MAX else pa.string()


def bit_type(bits: int) -> pa.DataType:
    """A BIT of so many bits."""
    return pa.bool_() if bits == 1 else UNSIGNED_BIG if bits == 64 else pa.int64()


def decoded(texts: pa.Array, codec: str = "utf8") -> pa.Array:
    """Bytes as text; what the character set does not know gets replacement characters."""
    if codec == "utf8" or (not codec.startswith(_WIDE) and _is_ascii(texts)):
        try:
            return texts.cast(pa.string())
        except pa.ArrowInvalid:
            pass
    values = [None if value is None else _text(value, codec) for value in texts.to_pylist()]
    return pa.array(values, pa.string())


def codecs(charsets: Mapping[int, str]) -> dict[int, str]:
    """What Python calls the character set of each collation."""
    charset_by_name = load_client("pymysql.charset", extra="mysql", purpose="Capturing MySQL").charset_by_name
    found = {}
    for collation, charset in charsets.items():
        if re.match("utf8|ascii|binary", charset):
            found[collation] = "utf8"
        elif charset in ("ucs2", "utf16"):
            found[collation] = "utf-16-be"
        else:
            known = {"utf16le": "utf-16-le", "utf32": "utf-32-be", "tis620": "tis_620"}.get(charset)
            found[collation] = known or charset_by_name(charset).encoding or "utf8"
    return found


def _is_ascii(texts: pa.Array) -> bool:
    """Whether all characters are such as nearly every character set has at the same place."""
    data = texts.buffers()[2]
    return data is None or not (np.frombuffer(data, np.uint8) >= _NOT_ASCII).any()


def _text(value: bytes, codec: str) -> str:
    """MySQL's latin1 is cp1252 in which the five bytes that this leaves out mean themselves."""
    if codec == "cp1252":
        try:
            return value.decode(codec)
        except UnicodeDecodeError:
            return "".join(_latin1(byte) for byte in value)
    return value.decode(codec, "replace")


def _latin1(byte: int) -> str:
    one = bytes([byte])
    return one.decode("cp1252", "ignore") or one.decode("latin1")
