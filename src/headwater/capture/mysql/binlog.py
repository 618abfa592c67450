"""The events of a row binlog as MariaDB and MySQL send them to a replica, taken apart.

An event is a header of 19 bytes (time u4, kind u1, server u4, size u4, end in its file u4, flags u2) and a body:

| kind | body |
|---|---|
| 4 rotate | position u8, name of the next file |
| 2 query | thread u4, seconds u4, bytes of database u1, error u2, bytes of status u2, status, database, 0, statement |
| 16 xid | the transaction is committed |
| 162 MariaDB GTID | sequence u8, domain u4, flags u1 |
| 33 MySQL GTID | flags u1, server's uuid 16 bytes, number i8, 1 byte and 16 of logical time, microseconds of the commit u7 |
| 19 table map | table's number u6, flags u2, database, table, columns, their types and metadata, nullable bits, more metadata |
| 23, 24, 25 and 30, 31, 32 rows | table's number u6, flags u2, (from 30 on: more bytes u2), columns, which of them are there, rows |

A checksum may follow the body (`mysql.stream` cuts it off). Numbers are little-endian, except in values. With `binlog_row_metadata = FULL`
a table map
has the names, signs, character sets and elements of its columns: so rows are read by the columns that the table had then, whatever it has
now. Functions and frozen data only: safe from any thread.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from typing import NamedTuple

import msgspec

QUERY, STOP, ROTATE, FORMAT, XID, TABLE_MAP, INCIDENT, HEARTBEAT = 2, 3, 4, 15, 16, 19, 26, 27
INSERTS, UPDATES, DELETES = (23, 30), (24, 31), (25, 32)
ROWS = (*INSERTS, *UPDATES, *DELETES)
MYSQL_GTID, MYSQL_GTID_TAGGED, XA_PREPARE, HEARTBEAT_V2 = 33, 42, 38, 41
MARIADB_GTID = 162
PARTIAL_UPDATE, PAYLOAD, COMPRESSED = 39, 40, range(165, 172)

HEADER = struct.Struct("<IBIIIH")
"""Time, kind, server, size, end, flags."""

STANDALONE, PREPARED, COMPLETED = 1, 64, 128
"""Flags of MariaDB's GTID: a statement without commit, and the two halves of an XA transaction."""

_GROUP_COMMIT = 2
_ROWS_V2_FIRST = 30
_COMMIT_TIME_AT = 1 + 16 + 8 + 1 + 16

# What columns are made of, by their numbers in the protocol.
TINY, SHORT, LONG, FLOAT, DOUBLE, LONGLONG, INT24, DATE, YEAR = 1, 2, 3, 4, 5, 8, 9, 10, 13
VARCHAR, BIT, TIMESTAMP, DATETIME, TIME, JSON, DECIMAL, ENUM, SET = 15, 16, 17, 18, 19, 245, 246, 247, 248
BLOB, VAR_STRING, STRING, GEOMETRY = 252, 253, 254, 255

_METADATA_BYTES = {
    **dict.fromkeys((FLOAT, DOUBLE, TIMESTAMP, DATETIME, TIME, JSON, BLOB, GEOMETRY), 1),
    **dict.fromkeys((VARCHAR, VAR_STRING, BIT, DECIMAL, STRING, ENUM, SET), 2),
}
_SIGNED = (TINY, SHORT, INT24, LONG, LONGLONG, DECIMAL, FLOAT, DOUBLE, YEAR)
_CHARACTERS = (STRING, VAR_STRING, VARCHAR, BLOB)
(
    _SIGNEDNESS,
    _DEFAULT_CHARSET,
    _COLUMN_CHARSET,
    _NAMES,
    _SET_VALUES,
    _ENUM_VALUES,
    _,
    _,
    _,
    _ENUM_SET_DEFAULT_CHARSET,
    _ENUM_SET_CHARSET,
) = range(1, 12)


class MappedColumn(msgspec.Struct, frozen=True):
    """A column as a table map has it: its type and the two bytes of metadata, its sign, collation, and the elements of ENUM and SET."""

    name: str
    type: int
    first: int = 0
    second: int = 0
    unsigned: bool = False
    collation: int = 0
    values: tuple[bytes, ...] = ()


class TableMap(msgspec.Struct, frozen=True):
    """A table as the binlog describes it before rows; without names the server has `binlog_row_metadata` other than FULL."""

    database: str
    table: str
    columns: tuple[MappedColumn, ...]
    named: bool


class BinlogQuery(NamedTuple):
    """A statement, and the database that was in use."""

    database: str
    statement: str


class Gtid(NamedTuple):
    """The begin of a transaction: its name, whose place that takes in a position (its domain), flags, time of the commit."""

    name: str
    stream: str
    flags: int
    committed_us: int | None
    xa: str = ""
    """Which XA transaction MariaDB prepares or completes."""


class RowsHeader(NamedTuple):
    """The head of an event with rows: how many columns, whether all are there, and where the rows begin."""

    columns: int
    whole: bool
    begin: int


def read_rotate(body: memoryview) -> tuple[int, str]:
    """Where the next file goes on, and its name."""
    (position,) = struct.unpack_from("<Q", body)
    return position, bytes(body[8:]).rstrip(b"\0").decode("latin1")


def read_query(body: memoryview) -> BinlogQuery:
    """A statement."""
    _, _, size, _, status = struct.unpack_from("<IIBHH", body)
    at = 13 + status
    return BinlogQuery(
        bytes(body[at : at + size]).decode("utf8", "replace"), bytes(body[at + size + 1 :]).decode("utf8", "replace")
    )


def read_mariadb_gtid(body: memoryview, server: int) -> Gtid:
    """The begin of a transaction of MariaDB."""
    sequence, domain, flags = struct.unpack_from("<QIB", body)
    xa = ""
    if flags & (PREPARED | COMPLETED):
        at = 13 + (8 if flags & _GROUP_COMMIT else 0)
        xa = bytes(body[at : at + 6 + body[at + 4] + body[at + 5]]).hex()
    return Gtid(f"{domain}-{server}-{sequence}", str(domain), flags, None, xa)


def read_mysql_gtid(body: memoryview) -> Gtid:
    """The begin of a transaction of MySQL."""
    source, number = str(uuid.UUID(bytes=bytes(body[1:17]))), struct.unpack_from("<q", body, 17)[0]
    committed_us = None
    if len(body) >= _COMMIT_TIME_AT + 7:
        committed_us = int.from_bytes(body[_COMMIT_TIME_AT : _COMMIT_TIME_AT + 7], "little") & ((1 << 55) - 1)
    return Gtid(f"{source}:{number}", "", 0, committed_us)


def table_number(body: memoryview) -> int:
    """The number under which a table map and the rows behind it speak of a table."""
    return int.from_bytes(body[:6], "little")


def read_rows_header(body: memoryview, kind: int) -> RowsHeader:
    """What stands before the rows of an event."""
    at = 8
    if kind >= _ROWS_V2_FIRST:
        at += int.from_bytes(body[8:10], "little")
    columns, at = _number(body, at)
    bits, whole = (columns + 7) // 8, True
    for _ in range(2 if kind in UPDATES else 1):
        present = int.from_bytes(body[at : at + bits], "little")
        whole &= present & ((1 << columns) - 1) == (1 << columns) - 1
        at += bits
    return RowsHeader(columns, whole, at)


def read_table_map(body: memoryview) -> TableMap:
    """A table, without the number it has."""
    database, at = _name(body, 8)
    table, at = _name(body, at)
    count, at = _number(body, at)
    types = list(body[at : at + count])
    length, at = _number(body, at + count)
    columns = _columns(types, body[at : at + length])
    at += length + (count + 7) // 8
    fields: dict[int, memoryview] = {}
    while at < len(body):
        kind = body[at]
        size, at = _number(body, at + 1)
        fields[kind] = body[at : at + size]
        at += size
    return TableMap(database, table, tuple(_described(columns, fields)), _NAMES in fields)


def _columns(types: list[int], metadata: memoryview) -> list[MappedColumn]:
    """The columns without names; ENUM, SET and long CHARs hide in the metadata of STRING."""
    found, at = [], 0
    for type_ in types:
        size = _METADATA_BYTES.get(type_, 0)
        first, second = (*metadata[at : at + size], 0, 0)[:2]
        at += size
        if type_ == STRING:
            if first & 0x30 != 0x30:
                first, second = first | 0x30, second | ((first & 0x30 ^ 0x30) << 4)
            type_ = first
        found.append(MappedColumn("", type_, first, second))
    return found


def _described(columns: list[MappedColumn], fields: dict[int, memoryview]) -> list[MappedColumn]:
    """The columns with what the further metadata says of them."""
    told: list[dict[str, object]] = [{} for _ in columns]
    signed = [at for at, column in enumerate(columns) if column.type in _SIGNED]
    signs = fields.get(_SIGNEDNESS, memoryview(b""))
    for place, at in enumerate(signed):
        told[at]["unsigned"] = place // 8 < len(signs) and bool(signs[place // 8] & (0x80 >> place % 8))
    for kinds, default, each in (
        (lambda kind: kind in _CHARACTERS or kind == GEOMETRY, _DEFAULT_CHARSET, _COLUMN_CHARSET),
        (lambda kind: kind in (ENUM, SET), _ENUM_SET_DEFAULT_CHARSET, _ENUM_SET_CHARSET),
    ):
        _tell_collations(columns, told, kinds, fields.get(default), fields.get(each))
    for kind, field in ((ENUM, _ENUM_VALUES), (SET, _SET_VALUES)):
        at_field, body = 0, fields.get(field, memoryview(b""))
        for at, column in enumerate(columns):
            if column.type == kind and at_field < len(body):
                told[at]["values"], at_field = _elements(body, at_field)
    names, at_name = fields.get(_NAMES, memoryview(b"")), 0
    for at in range(len(columns)):
        if at_name < len(names):
            told[at]["name"], at_name = _text(names, at_name)
    return [msgspec.structs.replace(column, **more) for column, more in zip(columns, told, strict=True)]


def _tell_collations(
    columns: list[MappedColumn],
    told: list[dict[str, object]],
    wanted: Callable[[int], bool],
    default: memoryview | None,
    each: memoryview | None,
) -> None:
    """Collations come as one for most columns and pairs for the others, or as one for each."""
    mine = [at for at, column in enumerate(columns) if wanted(column.type)]
    numbers = []
    body, at = default if default is not None else each or memoryview(b""), 0
    while at < len(body):
        number, at = _number(body, at)
        numbers.append(number)
    if default is not None and numbers:
        others = dict(zip(numbers[1::2], numbers[2::2], strict=False))
        numbers = [others.get(place, numbers[0]) for place in range(len(mine))]
    for at, number in zip(mine, numbers, strict=False):
        told[at]["collation"] = number


def _elements(body: memoryview, at: int) -> tuple[tuple[bytes, ...], int]:
    count, at = _number(body, at)
    values = []
    for _ in range(count):
        size, at = _number(body, at)
        values.append(bytes(body[at : at + size]))
        at += size
    return tuple(values), at


def _text(body: memoryview, at: int) -> tuple[str, int]:
    size, at = _number(body, at)
    return bytes(body[at : at + size]).decode("utf8", "replace"), at + size


def _name(body: memoryview, at: int) -> tuple[str, int]:
    """A name of a table map: its length, itself, a zero byte."""
    size = body[at]
    return bytes(body[at + 1 : at + 1 + size]).decode("utf8", "replace"), at + size + 2


def _number(body: memoryview, at: int) -> tuple[int, int]:
    """A length-encoded number, and where the next field begins."""
    first = body[at]
    size = {252: 2, 253: 3, 254: 8}.get(first, 0)
    return (int.from_bytes(body[at + 1 : at + 1 + size], "little") if size else first), at + 1 + size
