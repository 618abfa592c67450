"""A page of a table of MariaDB or MySQL: rows in the order of the key, taken apart by whole columns.

They come by the text protocol, as the server prints them. PyMySQL asks and reads what describes the result; the rows behind that are cut
here, because a tuple for each of them would be most of the work. Functions and frozen data only.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headwater.capture.byte_columns import Bytes, Indexes, numbers, texts_at
from headwater.capture.mysql.connection import quoted
from headwater.capture.mysql.tables import MyTable
from headwater.capture.mysql.types import Declared
from headwater.capture.mysql.values import padded
from headwater.databases.address import load_client

_QUERY = 3
_NULL, _TWO, _THREE, _EIGHT, _END, _ERROR = 0xFB, 0xFC, 0xFD, 0xFE, 0xFE, 0xFF
_PACKET_MAX = 0xFFFFFF


class Page(NamedTuple):
    """The columns of some rows as the server prints them, how many they are, and the key of the last one."""

    texts: list[pa.Array]
    rows: int
    last: list[str]


def read_page(
    connection: Any, table: MyTable, names: list[str], *, key: tuple[str, ...], behind: list[str] | None, limit: int
) -> Page:
    """So many rows in the order of the key: the first ones, or those behind a key."""
    columns = [table.by_name[name] for name in names]
    keys = [table.by_name[name] for name in key]
    selected = [column.selected(quoted(column.name)) for column in columns]
    ordered = [column.ordered(quoted(column.name)) for column in keys]
    compared = [column.compared(quoted(column.name)) for column in keys]
    where = "" if behind is None else f"WHERE {_behind(ordered, [*map(_literal, keys, behind)])}"
    statement = f"SELECT {', '.join([*selected, *compared])} FROM {table.sql} {where} ORDER BY {', '.join(ordered)} LIMIT {limit}"
    texts, count = _rows_of(connection, statement, len(selected) + len(ordered))
    last = [
        (value.hex() if column.arrow == pa.binary() else value.decode("utf8", "replace"))
        for column, value in zip(keys, (text[-1].as_py() for text in texts[len(selected) :] if count), strict=False)
    ]
    return Page(texts[: len(selected)], count, last)


def _behind(columns: list[str], values: list[str]) -> str:
    """Rows behind a key of several columns, in words that every version uses the index for."""
    parts = []
    for at, (column, value) in enumerate(zip(columns, values, strict=True)):
        same = [f"{columns[before]} = {values[before]}" for before in range(at)]
        parts.append(" AND ".join([*same, f"{column} > {value}"]))
    return f"{columns[0]} >= {values[0]} AND ({' OR '.join(parts)})"


def _literal(column: Declared, text: str) -> str:
    """A value of a key in a statement."""
    if column.arrow == pa.binary():
        return f"X'{text}'"
    return text if column.is_literal else "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _rows_of(connection: Any, statement: str, width: int) -> tuple[list[pa.Array], int]:
    """The columns of a result as bytes. PyMySQL asks, and reads what describes the result; its rows are cut here."""
    connection._execute_command(_QUERY, statement)
    for _ in range(width + 2):  # the number of columns, each of them, and an end
        connection._read_packet()
    read, parts = connection._rfile.read, []
    lengths = []
    while True:
        length = struct.unpack("<I", _exactly(read, 4))[0] & _PACKET_MAX
        body = _exactly(read, length)
        if length == _PACKET_MAX:
            while length == _PACKET_MAX:
                length = struct.unpack("<I", _exactly(read, 4))[0] & _PACKET_MAX
                body += _exactly(read, length)
        elif body[0] == _END and length < 9:
            break
        elif body[0] == _ERROR:
            raise _error(int.from_bytes(body[1:3], "little"), body[9:].decode("utf8", "replace"))
        parts.append(body)
        lengths.append(len(body))
    data = padded(b"".join(parts))
    starts = np.cumsum([0, *lengths[:-1]]) if lengths else np.zeros(0, np.int64)
    columns = []
    for _ in range(width):
        text, starts = _column(data, starts)
        columns.append(text)
    return columns, len(lengths)


def _exactly(read: Any, count: int) -> bytes:
    got = read(count)
    if len(got) < count:
        raise ConnectionError("the server closed the connection")
    return bytes(got)


def _error(number: int, text: str) -> Exception:
    """An error of the server in the middle of a result, as PyMySQL would raise it."""
    client = load_client("pymysql", extra="mysql", purpose="A capture of MariaDB or MySQL")
    error: Exception = client.OperationalError(number, text)
    return error


def _column(data: Bytes, at: Indexes) -> tuple[pa.Array, Indexes]:
    """A column of length-encoded texts, and where the next column of each row begins."""
    first = data[at].astype(np.int64)
    there = first != _NULL
    length, start = np.where(first < _NULL, first, 0), at + 1
    for mark, kind, width, mask in (
        (_TWO, "<u2", 2, 0xFFFF),
        (_THREE, "<u4", 3, 0xFFFFFF),
        (_EIGHT, "<i8", 8, (1 << 63) - 1),
    ):
        mine = first == mark
        if mine.any():
            length[mine] = numbers(data, at[mine] + 1, kind) & mask
            start[mine] += width
    return texts_at(data, start, length, there), start + length


def typed_rows(page: Page, names: list[str], table: MyTable, schema: pa.Schema) -> pa.Table:
    """The rows in other columns and types; what has no place in them is null."""
    by_name = dict(zip(names, page.texts, strict=True))
    columns = []
    for field in schema:
        if field.name not in by_name:
            columns.append(pa.nulls(page.rows, field.type))
            continue
        column = table.by_name[field.name].from_text(by_name[field.name])
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                column = pa.nulls(page.rows, field.type)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)
