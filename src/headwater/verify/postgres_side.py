"""A table of PostgreSQL as a side, read in one repeatable-read transaction together with the ledger.

Where every column has the type that our sink would declare, the digests of all rows are computed by the server (the expressions here and
`digest.canonical` give the same text, byte by byte): only checksums travel, and then the keys of chunks that differ. Other
columns are read as text, by COPY, and digested here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from headwater.databases.address import quoted
from headwater.databases.postgres_types import cast_type, from_csv, to_text
from headwater.model.errors import InvalidInput, NotFound
from headwater.sinks.postgres import PostgresSink
from headwater.sinks.sink import Shape
from headwater.verify.digest import CHUNK_DIGITS, NAN_BITS, Sums
from headwater.verify.side import Follows, Look, Places, SinkSide, chosen, nullable

_CHUNK_BYTES = 8 << 20
_DECIMAL = re.compile(r"numeric\((\d+),(\d+)\)")
_FULL_NAMES = {"timestamptz": "timestamp with time zone", "timestamp": "timestamp without time zone"}
_TYPES = {
    "boolean": pa.bool_(), "smallint": pa.int16(), "integer": pa.int32(), "bigint": pa.int64(), "real": pa.float32(),
    "double precision": pa.float64(), "bytea": pa.binary(), "date": pa.date32(), "timestamp with time zone": pa.timestamp("us", "UTC"),
    "timestamp without time zone": pa.timestamp("us"),
}  # fmt: skip


class PostgresSide(SinkSide):
    """A table of PostgreSQL."""

    _sink: PostgresSink

    def shape(self) -> Shape | None:
        name = self._sink.address.options.get("table")
        if name is None:
            raise InvalidInput(f"The URL {self.url} does not name a table.", advice="Add ?table=NAME to the URL.")
        self._sink.attach(Shape(name, pa.schema([]), ()))
        with self._sink.reading() as connection:
            columns = self._sink.columns_in(connection)
            if not columns:
                raise NotFound(
                    f"{self.url}: Table {name!r} does not exist.", advice="Choose another table with ?table=."
                )
            key = self._sink.primary_key(connection)
        return Shape(name, pa.schema([(column, _arrow(type_)) for column, type_ in columns.items()]), key)

    @contextmanager
    def look(self, *, at: Places | None = None, topic: str | None = None, stage: str | None = None) -> Iterator[Look]:
        assert self._shape is not None
        with self._sink.reading() as connection:
            columns = self._sink.columns_in(connection)
            missing = [name for name in self._shape.schema.names if name not in columns]
            if missing:
                raise NotFound(
                    f"{self.url}: The table has no column {missing[0]!r}.",
                    advice="Use --columns to compare only columns that both sides have.",
                )
            follows = chosen(self._sink.entries_in(connection), topic=topic, stage=stage)
            yield PostgresLook(connection, self._sink.table, self._shape, columns, follows)


class PostgresLook:
    """What a table holds in one transaction."""

    is_moment = is_final = True

    def __init__(
        self, connection: Any, table: str, shape: Shape, columns: dict[str, str], follows: Follows | None
    ) -> None:
        self._connection = connection
        self._table = table
        self._shape = shape
        self._columns = columns
        self.follows = follows
        self.unreadable: list[str] = []

    def chunks(self) -> Iterator[pa.Table]:
        yield from self._copied(
            f"select {self._expressions(self._shape.schema)} from {self._table}", self._shape.schema
        )

    def rows(self, keys: pa.Table) -> pa.Table:
        values = [to_text(keys.column(name).combine_chunks()).cast(pa.string()).to_pylist() for name in self._shape.key]
        listed = ", ".join(
            f"({', '.join(_literal(text, self._columns[name]) for name, text in zip(self._shape.key, key, strict=True))})"
            for key in zip(*values, strict=True)
        )
        names = ", ".join(map(quoted, self._shape.key))
        query = f"select {self._expressions(self._shape.schema)} from {self._table} where ({names}) in ({listed})"
        empty = nullable(self._shape.schema).empty_table()
        return pa.concat_tables([empty, *self._copied(query, self._shape.schema)]) if listed else empty

    def digests(self) -> PostgresDigests | None:
        """The digests computed by the server; None where a column's type is not exactly the sink's own."""
        for field in self._shape.schema:
            if pa.types.is_nested(field.type) or self._columns[field.name] != _declared(field.type):
                return None
        return PostgresDigests(self, self._shape)

    def _copied(self, query: str, schema: pa.Schema) -> Iterator[pa.Table]:
        """The answer in pieces; the server sends each row whole."""
        gathered, size = [], 0
        with self._connection.cursor().copy(f"copy ({query}) to stdout (format csv)") as copy:
            for row in copy:
                gathered.append(bytes(row))
                size += len(gathered[-1])
                if size >= _CHUNK_BYTES:
                    yield from_csv(b"".join(gathered), nullable(schema))
                    gathered, size = [], 0
        if gathered:
            yield from_csv(b"".join(gathered), nullable(schema))

    def _expressions(self, schema: pa.Schema) -> str:
        return ", ".join(_read(quoted(field.name), field.type, self._columns[field.name]) for field in schema)


class PostgresDigests:
    """Digests that the server computes."""

    def __init__(self, look: PostgresLook, shape: Shape) -> None:
        self._look = look
        self._shape = shape
        key = " || ".join(_marked(shape.schema.field(name)) for name in shape.key)
        row = " || ".join(map(_marked, shape.schema))
        columns = ", ".join(map(quoted, shape.key))
        self._rows = (
            f"(select {key} as key, md5({key}) as chunk, md5({row}) as digest, {columns} from {look._table}) as rows"
        )

    def sums(self) -> Sums:
        halves = ", ".join(f"sum(('x' || substr(digest, {at}, 15))::bit(60)::bigint)" for at in (1, 16))
        query = f"select substr(chunk, 1, {CHUNK_DIGITS}), count(*), {halves} from {self._rows} group by 1"
        found = self._look._connection.execute(query).fetchall()
        return {chunk: (int(count), int(one), int(other)) for chunk, count, one, other in found}

    def of_chunks(self, chunks: Sequence[str]) -> pa.Table:
        keys = [self._shape.schema.field(name).with_nullable(True) for name in self._shape.key]
        schema = pa.schema([pa.field("key", pa.string()), pa.field("digest", pa.string()), *keys])
        listed = ", ".join(f"'{chunk}'" for chunk in chunks) or "''"
        names = ", ".join(_read(quoted(field.name), field.type) for field in keys)
        query = f"select key, digest, {names} from {self._rows} where substr(chunk, 1, {CHUNK_DIGITS}) in ({listed})"
        return pa.concat_tables([schema.empty_table(), *self._look._copied(query, schema)])

    def close(self) -> None:
        """They are the server's."""


def _declared(type_: pa.DataType) -> str:
    """The type that the sink declares, as the server names it."""
    name = cast_type(type_).replace(", ", ",")
    return _FULL_NAMES.get(name, name)


def _arrow(declared: str) -> pa.DataType:
    if found := _DECIMAL.fullmatch(declared):
        precision = int(found[1])
        return pa.decimal128(precision, int(found[2])) if precision <= 38 else pa.string()
    return _TYPES.get(declared, pa.string())


def _read(name: str, type_: pa.DataType, declared: str = "") -> str:
    """A column as `from_csv` reads it, whatever its own type is. In JSON oids would be texts, so whole numbers are cast."""
    if declared.endswith("[]") and pa.types.is_list(type_) and pa.types.is_integer(type_.value_type):
        return f"to_json({name}::text::bigint[])::text"
    if pa.types.is_timestamp(type_):
        return f"(extract(epoch from {name}) * 1000000)::bigint"
    if pa.types.is_binary(type_):
        return f"encode({name}, 'hex')"
    if pa.types.is_nested(type_):
        return f"to_json({name})::text"
    return f"{name}::text" if pa.types.is_string(type_) else name


def _marked(field: pa.Field) -> str:
    """The canonical text of a column, as SQL; see `digest`."""
    name = quoted(field.name)
    text = _text(name, field.type)
    return f"case when {name} is null then 'n' else 'v' || octet_length({text}) || ':' || {text} end"


def _text(name: str, type_: pa.DataType) -> str:
    is_ = pa.types
    if is_.is_boolean(type_):
        return f"case when {name} then 't' else 'f' end"
    if is_.is_floating(type_):
        bits = f"('x' || encode(float8send({name}::float8 + 0::float8), 'hex'))::bit(64)::bigint::text"
        return f"(case when {name} = 'NaN' then '{NAN_BITS}' else {bits} end)"
    if is_.is_timestamp(type_):
        return f"(extract(epoch from {name}) * 1000000)::bigint::text"
    if is_.is_date(type_):
        return f"({name} - date '1970-01-01')::text"
    if is_.is_binary(type_):
        return f"encode({name}, 'hex')"
    return f"{name}::text"


def _literal(text: str | None, declared: str) -> str:
    if text is None:
        return "null"
    return "'" + text.replace("'", "''") + f"'::{declared}"
