"""Digests: a row as one number of 128 bits, the same whichever system holds it, and the sums of them by which chunks are compared.

A row's canonical text has for each column, in order, `n` for null, or `v`, the length in bytes, `:` and the value's text. So no two rows
share a text. A value's text:

| type | text |
|---|---|
| BOOLEAN | `t`, `f` |
| integers, DATE, TIMESTAMP | the number; days and microseconds since 1970 |
| FLOAT, DOUBLE | the bits of the double as a whole number; -0.0 as 0.0, every NaN as one |
| DECIMAL | all digits of its scale |
| STRING, BINARY | as it is, hex |
| ARRAY, MAP, STRUCT | JSON |

The digest is the md5 of that text. A row belongs to the chunk that the first three hex digits of its key's md5 name; a chunk's
checksum is how many rows it has and the sums of both halves of their digests, so order does not matter. Where all columns have the types
that the sink itself declares, PostgreSQL computes the very same (`postgres_side`); a test compares both on random rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.databases.address import quoted
from headwater.log.arrow.json_types import json_texts
from headwater.sinks.sink import Shape

CHUNK_DIGITS = 3
NAN_BITS = 0x7FF8000000000000

Sums = Mapping[str, tuple[int, int, int]]
"""For each chunk how many rows it has, and the sums of the halves of their digests."""

SUMS_SQL = (
    f"select substr(chunk, 1, {CHUNK_DIGITS}), count(*), sum(('0x' || substr(digest, 1, 15))::bigint), "
    "sum(('0x' || substr(digest, 16, 15))::bigint) from rows group by 1"
)


class Digests(Protocol):
    """The digests of all rows of a side."""

    def sums(self) -> Sums:
        """The checksums of all chunks that have rows."""

    def of_chunks(self, chunks: Sequence[str]) -> pa.Table:
        """The key columns of the rows of some chunks, with `key` (the key's canonical text) and `digest`."""

    def close(self) -> None:
        """Frees what they take."""


class LocalDigests:
    """Digests computed here, kept in a file that is removed with them: there may be more than fit into memory."""

    def __init__(self, chunks: Iterable[pa.Table], shape: Shape) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headwater-verify-")
        self._database = duckdb.connect(str(Path(self._folder.name) / "digests.duckdb"))
        self._key = [f"k{number}" for number, _ in enumerate(shape.key)]
        self._shape = shape
        try:
            empty = self._digestible(shape.schema.empty_table())
            self._insert("create table rows as", empty)
            for chunk in chunks:
                if chunk.num_rows:
                    self._insert("insert into rows", self._digestible(chunk))
        except BaseException:
            self.close()
            raise

    def sums(self) -> Sums:
        found = self._database.execute(SUMS_SQL).fetchall()
        return {chunk: (int(count), int(one), int(other)) for chunk, count, one, other in found}

    def of_chunks(self, chunks: Sequence[str]) -> pa.Table:
        names = ", ".join(self._key)
        listed = ", ".join(f"'{chunk}'" for chunk in chunks) or "''"
        query = f"select key, digest, {names} from rows where substr(chunk, 1, {CHUNK_DIGITS}) in ({listed})"
        found = self._database.sql(query).to_arrow_table()
        columns = [found.column("key"), found.column("digest")]
        fields = [pa.field("key", pa.string()), pa.field("digest", pa.string())]
        for short, name in zip(self._key, self._shape.key, strict=True):
            field = self._shape.schema.field(name).with_nullable(True)
            columns.append(found.column(short).cast(field.type))
            fields.append(field)
        return pa.Table.from_arrays(columns, schema=pa.schema(fields))

    def close(self) -> None:
        with suppress(duckdb.Error):
            self._database.close()
        self._folder.cleanup()

    def _digestible(self, rows: pa.Table) -> pa.Table:
        columns: dict[str, Any] = {
            "key": canonical(rows, self._shape.key),
            "row": canonical(rows, self._shape.schema.names),
        }
        return pa.table(columns | {s: rows.column(n) for s, n in zip(self._key, self._shape.key, strict=True)})

    def _insert(self, into: str, rows: pa.Table) -> None:
        names = ", ".join(map(quoted, self._key))
        self._database.register("arriving", rows)
        self._database.execute(f'{into} select key, md5(key) as chunk, md5("row") as digest, {names} from arriving')
        self._database.unregister("arriving")


def canonical(rows: pa.Table, columns: Sequence[str]) -> pa.Array:
    """The canonical text of some columns of each row."""
    marked = [_marked(rows.column(name)) for name in columns]
    return pc.binary_join_element_wise(*marked, "")


def _marked(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    texts = _texts(whole)
    lengths = pc.binary_length(texts).cast(pa.string())
    return pc.binary_join_element_wise("v", lengths, ":", texts, "").fill_null("n")


def _texts(column: pa.Array) -> pa.Array:
    is_, type_ = pa.types, column.type
    if is_.is_string(type_):
        return column
    if is_.is_boolean(type_):
        return pc.if_else(column, "t", "f")
    if is_.is_floating(type_):
        return _bits(column)
    if is_.is_timestamp(type_):
        return column.cast(pa.int64()).cast(pa.string())
    if is_.is_date(type_):
        return column.cast(pa.int32()).cast(pa.string())
    if is_.is_binary(type_):
        return pa.array([None if value is None else value.hex() for value in column.to_pylist()], pa.string())
    if is_.is_nested(type_):
        return json_texts(column)
    texts = column.cast(pa.string())
    if is_.is_decimal(type_) and pc.any(pc.match_substring(texts, "E")).as_py():
        return pa.array([None if value is None else f"{value:f}" for value in column.to_pylist()], pa.string())
    return texts


def _bits(column: pa.Array) -> pa.Array:
    values = column.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False) + 0.0
    bits = np.where(np.isnan(values), np.int64(NAN_BITS), values.view(np.int64))
    missing = column.is_null().to_numpy(zero_copy_only=False)
    return pa.array(bits, mask=missing).cast(pa.string())
