"""Tables of SQLite and DuckDB as sides, read in one transaction together with the ledger of the sink that feeds them, if one does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import duckdb
import pyarrow as pa

from headwater.databases.address import quoted
from headwater.databases.sqlite_types import to_column, to_values, type_of
from headwater.log.arrow.columns import ARROW_ERRORS
from headwater.model.errors import InvalidInput, NotFound
from headwater.sinks.sink import Shape
from headwater.sinks.table import TableSink
from headwater.verify.side import Look, Places, SinkSide, chosen, nullable, picked

_CHUNK_ROWS = 65_536
_AFFINITIES = (("INT", pa.int64()), ("CHAR", pa.string()), ("CLOB", pa.string()), ("TEXT", pa.string()), ("BLOB", pa.binary()),
               ("REAL", pa.float64()), ("FLOA", pa.float64()), ("DOUB", pa.float64()))  # fmt: skip


class TableSide(SinkSide, ABC):
    """What the tables of both have in common."""

    _sink: TableSink

    @abstractmethod
    def shape(self) -> Shape | None:
        """The columns and the key that the table has."""

    @property
    def _named(self) -> str:
        name = self._sink.address.options.get("table")
        if name is None and self._shape is None:
            raise InvalidInput(f"The URL {self.url} does not name a table.", advice="Add ?table=NAME to the URL.")
        return name or self._shape.name  # type: ignore[union-attr]

    @contextmanager
    def look(self, *, at: Places | None = None, topic: str | None = None, stage: str | None = None) -> Iterator[Look]:
        assert self._shape is not None
        with self._sink.reading() as connection:
            entries = self._sink.entries_in(connection)
            missing = [name for name in self._shape.schema.names if name not in self._sink.columns_in(connection)]
            if missing:
                raise NotFound(
                    f"{self.url}: Table {self._named!r} has no column {missing[0]!r}.",
                    advice="Use --columns to compare only columns that both sides have.",
                )
            look = self._look_at(connection)
            look.follows = chosen(entries, topic=topic, stage=stage)
            yield look

    @abstractmethod
    def _look_at(self, connection: Any) -> _TableLook:
        """What the table holds in a transaction."""


class _TableLook(ABC):
    is_moment = is_final = True

    def __init__(self, connection: Any, table: str, shape: Shape) -> None:
        self._connection = connection
        self._shape = shape
        names = ", ".join(map(quoted, shape.schema.names))
        self._select = f"select {names} from {quoted(table)}"
        self.follows: Any = None
        self.unreadable: list[str] = []

    @abstractmethod
    def chunks(self) -> Iterator[pa.Table]:
        """All rows."""

    def rows(self, keys: pa.Table) -> pa.Table:
        return picked(self.chunks(), keys, self._shape)


class SqliteSide(TableSide):
    """A table of SQLite; values of columns that nobody declared as we do are read as their type asks."""

    def shape(self) -> Shape | None:
        with self._sink.reading() as connection:
            found = connection.execute(f"pragma table_info({quoted(self._named)})").fetchall()
        if not found:
            raise NotFound(
                f"{self.url}: Table {self._named!r} does not exist.", advice="Choose another table with ?table=."
            )
        key = tuple(row[1] for row in sorted(found, key=lambda row: row[5]) if row[5])
        return Shape(self._named, pa.schema([(row[1], _sqlite_type(row[2])) for row in found]), key)

    def _look_at(self, connection: Any) -> _TableLook:
        assert self._shape is not None
        return _SqliteLook(connection, self._named, self._shape)


class _SqliteLook(_TableLook):
    def chunks(self) -> Iterator[pa.Table]:
        cursor = self._connection.execute(self._select)
        while found := cursor.fetchmany(_CHUNK_ROWS):
            yield self._table(found)

    def rows(self, keys: pa.Table) -> pa.Table:
        where = " and ".join(f"{quoted(name)} = ?" for name in self._shape.key)
        found: list[Any] = []
        wanted = [to_values(column.combine_chunks()) for column in keys.select(list(self._shape.key)).columns]
        for key in zip(*wanted, strict=True):
            found += self._connection.execute(f"{self._select} where {where}", key).fetchall()
        return self._table(found)

    def _table(self, rows: list[tuple[Any, ...]]) -> pa.Table:
        schema = nullable(self._shape.schema)
        columns = list(zip(*rows, strict=True)) if rows else [() for _ in schema]
        arrays = [_column(list(values), field) for values, field in zip(columns, schema, strict=True)]
        return pa.Table.from_arrays(arrays, schema=schema)


class DuckdbSide(TableSide):
    """A table of DuckDB."""

    def shape(self) -> Shape | None:
        with self._sink.reading() as connection:
            try:
                schema = connection.sql(f"select * from {quoted(self._named)} limit 0").to_arrow_table().schema
            except duckdb.CatalogException:
                raise NotFound(
                    f"{self.url}: Table {self._named!r} does not exist.", advice="Choose another table with ?table=."
                ) from None
        return Shape(self._named, schema, ())

    def _look_at(self, connection: Any) -> _TableLook:
        assert self._shape is not None
        return _DuckdbLook(connection, self._named, self._shape)


class _DuckdbLook(_TableLook):
    def chunks(self) -> Iterator[pa.Table]:
        for batch in self._connection.sql(self._select).to_arrow_reader(_CHUNK_ROWS):
            yield conformed(pa.Table.from_batches([batch]), self._shape)


def conformed(rows: pa.Table, shape: Shape) -> pa.Table:
    """Rows in the columns of the shape; `InvalidInput` where a value has no place in its type."""
    try:
        return rows.select(shape.schema.names).cast(nullable(shape.schema))
    except ARROW_ERRORS as error:
        raise InvalidInput(
            f"The columns of {shape.name!r} have different types: {str(error).splitlines()[0]}",
            advice="Use --columns to compare only columns with the same types.",
        ) from None


def _column(values: list[Any], field: pa.Field) -> pa.Array:
    """A column as SQLite gave it: stored by our sink, or by a program that keeps times and decimals as text."""
    is_text = pa.types.is_timestamp(field.type) and any(isinstance(value, str) for value in values)
    if is_text or pa.types.is_decimal(field.type):
        values = [None if value is None else str(value) for value in values]
    if pa.types.is_string(field.type):
        values = [value if value is None or isinstance(value, str) else str(value) for value in values]
    try:
        return pa.array(values, pa.string()).cast(field.type) if is_text else to_column(values, field)
    except ARROW_ERRORS as error:
        raise InvalidInput(
            f"Column {field.name} contains a value that is not a {field.type}: {str(error).splitlines()[0]}",
            advice="Use --columns to compare only columns with the same types.",
        ) from None


def _sqlite_type(declared: str) -> pa.DataType:
    known = type_of(declared.upper())
    if known is not None:
        return known
    return next((type_ for part, type_ in _AFFINITIES if part in declared.upper()), pa.string())
