"""pgoutput, the protocol of PostgreSQL's logical replication, taken apart by whole blocks of messages.

A block is the bytes of many messages end to end, and where each begins. Nothing here looks at one message at a time, except at the few that
describe tables (`R`) or carry what applications emit (`M`): the fields of thousands of messages are gathered by NumPy, and the text of a
column becomes an Arrow array by one call, its bytes copied once.

| message | bytes behind its letter |
|---|---|
| `B` begin | LSN of the commit u64, time of the commit i64 (µs since 2000), xid u32 |
| `C` commit | flags u8, LSN of the commit u64, end of the commit u64, time i64 |
| `R` relation | oid u32, schema, name, identity u8, columns u16; of each: flags u8 (1: it identifies), name, type u32, modifier i32 |
| `I` insert | oid u32, `N`, row |
| `U` update | oid u32, (`K` or `O`, row)?, `N`, row |
| `D` delete | oid u32, `K` or `O`, row |
| `T` truncate | tables u32, options u8, oid u32 of each |
| `M` message | flags u8 (1: inside a transaction), LSN u64, prefix, length u32, content |

A row is a number of columns u16 and of each a letter: `n` null, `u` a large value that did not change and is not sent, `t` a text
of so many bytes u32. `K` is a row of which only the identity's columns mean anything, `O` the whole old row. Numbers are big-endian,
names end with a zero byte. Functions only, no state: safe from any thread.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from headwater.capture.byte_columns import Bytes, Indexes, numbers, texts_at

BEGIN, COMMIT, RELATION, INSERT, UPDATE, DELETE, TRUNCATE, MESSAGE = b"BCRIUDTM"
NULL, UNCHANGED, TEXT = b"nut"
OLD_KEY, OLD_ROW = b"KO"

EPOCH_US = 946_684_800_000_000
"""2000-01-01 in microseconds since 1970: what PostgreSQL counts from."""


class PgoutputBlock(NamedTuple):
    """Messages end to end, and where each begins."""

    data: Bytes
    starts: Indexes

    def message(self, at: int) -> memoryview:
        """The bytes of one message and of all behind it."""
        return memoryview(self.data[int(self.starts[at]) :].data)

    @property
    def kinds(self) -> Bytes:
        """The letter of each message."""
        return self.data[self.starts]


NOTHING = PgoutputBlock(np.zeros(0, np.uint8), np.zeros(0, np.int64))


class RelationColumn(msgspec.Struct, frozen=True):
    """A column of a table as the stream describes it; `modifier` holds the digits of a numeric, -1 for none."""

    name: str
    type: int
    modifier: int
    key: bool


class Relation(msgspec.Struct, frozen=True):
    """A table as the stream describes it before its first change, and again behind a change of its columns."""

    oid: int
    namespace: str
    name: str
    identity: str
    columns: tuple[RelationColumn, ...]


class Emitted(msgspec.Struct, frozen=True):
    """What an application emitted by `pg_logical_emit_message`."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


class RowFields(NamedTuple):
    """Where the columns of some rows stand: per column the letters, the first bytes and the lengths; and where each row ends."""

    kinds: list[Bytes]
    starts: list[Indexes]
    lengths: list[Indexes]
    ends: Indexes


def block_of(messages: list[bytes]) -> PgoutputBlock:
    """A block of single messages."""
    starts = np.array([*accumulate(map(len, messages), initial=0)][:-1], np.int64)
    return PgoutputBlock(np.frombuffer(b"".join(messages), np.uint8), starts)


def block_of_column(column: pa.Array) -> PgoutputBlock:
    """A block of an Arrow column of bytes, without a copy."""
    if not len(column):
        return NOTHING
    kind = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    _, offsets, data = column.buffers()
    starts = np.frombuffer(offsets, kind)[column.offset : column.offset + len(column)]
    return PgoutputBlock(np.frombuffer(data, np.uint8), starts.astype(np.int64))


def joined(first: PgoutputBlock, second: PgoutputBlock) -> PgoutputBlock:
    """The messages of two blocks."""
    if not len(first.starts):
        return second
    starts = np.concatenate([first.starts, second.starts + len(first.data)])
    return PgoutputBlock(np.concatenate([first.data, second.data]), starts)


def rows_at(data: Bytes, at: Indexes, width: int) -> RowFields:
    """Walks over rows of `width` columns that begin at some bytes; column after column, all rows at once."""
    at = at + 2
    kinds, starts, lengths = [], [], []
    for _ in range(width):
        kind = data[at]
        there = kind == TEXT
        if there.all():
            length = numbers(data, at + 1, ">u4")
            start = at + 5
        else:
            length = np.zeros(len(at), np.int64)
            length[there] = numbers(data, at[there] + 1, ">u4")
            start = at + np.where(there, 5, 1)
        kinds.append(kind)
        starts.append(start)
        lengths.append(length)
        at = start + length
    return RowFields(kinds, starts, lengths, at)


def texts(data: Bytes, rows: RowFields, column: int) -> pa.Array:
    """A column as Arrow bytes, null where no text was sent; the rows must stand in the order of the block."""
    return texts_at(data, rows.starts[column], rows.lengths[column], rows.kinds[column] == TEXT)


def read_relation(message: memoryview) -> Relation:
    """The table that an `R` describes."""
    (oid,) = struct.unpack_from(">I", message, 1)
    namespace, at = _name(message, 5)
    name, at = _name(message, at)
    identity, count = struct.unpack_from(">cH", message, at)
    at += 3
    columns = []
    for _ in range(count):
        flags = message[at]
        column, at = _name(message, at + 1)
        type_, modifier = struct.unpack_from(">Ii", message, at)
        columns.append(RelationColumn(column, type_, modifier, bool(flags & 1)))
        at += 8
    return Relation(oid, namespace or "pg_catalog", name, identity.decode(), tuple(columns))


def read_truncate(message: memoryview) -> list[int]:
    """The tables that a `T` names."""
    (count,) = struct.unpack_from(">I", message, 1)
    return list(struct.unpack_from(f">{count}I", message, 6))


def read_emitted(message: memoryview) -> Emitted:
    """What an `M` holds."""
    flags, lsn = struct.unpack_from(">BQ", message, 1)
    prefix, at = _name(message, 10)
    (length,) = struct.unpack_from(">I", message, at)
    return Emitted(bool(flags & 1), lsn, prefix, bytes(message[at + 4 : at + 4 + length]))


def _name(message: memoryview, at: int) -> tuple[str, int]:
    """A name that ends with a zero byte, and where the next field begins."""
    end = at
    while message[end]:
        end += 1
    return bytes(message[at:end]).decode(), end + 1
