"""A table of MariaDB or MySQL as a side, read in one snapshot; its columns are those that a capture would give it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pyarrow as pa

from headwater.capture.mysql.connection import MySqlDatabase
from headwater.capture.mysql.pages import read_page, typed_rows
from headwater.capture.mysql.tables import MyTable, info_of, key_of, read_tables
from headwater.capture.source_url import parse_source_url
from headwater.model.errors import InvalidInput, NotFound, Unsupported
from headwater.sinks.sink import Shape, Sink
from headwater.verify.side import Follows, Look, Places, nullable, picked
from headwater.verify.table_sides import conformed

_PAGE_ROWS = 20_000


class MySqlSide:
    """A table; no sink of ours writes to it, so nothing in it says how far it follows a log."""

    def __init__(self, url: str) -> None:
        parsed = parse_source_url(url)
        if len(parsed.tables) != 1:
            raise InvalidInput(f"The URL {parsed.shown} does not name a table.", advice="Add ?table=NAME to the URL.")
        (self._name,) = parsed.tables
        self._database = MySqlDatabase(parsed)
        self.url = msgspec.structs.replace(parsed, options={}).shown
        self._shape: Shape | None = None

    def shape(self) -> Shape | None:
        table = self._table()
        info = info_of(table, key_of(table))
        return Shape(self._name, info.schema, info.key)

    def take(self, shape: Shape) -> None:
        self._shape = shape

    @contextmanager
    def look(self, *, at: Places | None = None, topic: str | None = None, stage: str | None = None) -> Iterator[Look]:
        assert self._shape is not None
        self._database.ask("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        self._database.ask("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        try:
            table = self._table()
            missing = [name for name in self._shape.schema.names if name not in table.by_name]
            if missing:
                raise NotFound(
                    f"{self.url}: Table {self._name!r} has no column {missing[0]!r}.",
                    advice="Use --columns to compare only columns that both sides have.",
                )
            yield MySqlLook(self._database, table, self._shape)
        finally:
            if self._database.is_connected:
                self._database.ask("ROLLBACK")

    def repairs(self, stage: str) -> Sink:
        raise Unsupported(f"{self.url} is not the target of a sink.", advice="Correct the rows in the database itself.")

    def close(self) -> None:
        self._database.close()

    def _table(self) -> MyTable:
        table = read_tables(self._database, self._name).get(self._name)
        if table is None:
            raise NotFound(
                f"{self.url}: Table {self._name!r} does not exist.", advice="Choose another table with ?table=."
            )
        return table


class MySqlLook:
    """What a table holds in one snapshot."""

    is_moment = is_final = True
    follows: Follows | None = None

    def __init__(self, database: MySqlDatabase, table: MyTable, shape: Shape) -> None:
        self._database = database
        self._table = table
        self._shape = shape
        self.unreadable: list[str] = []

    def chunks(self) -> Iterator[pa.Table]:
        names, key = self._shape.schema.names, key_of(self._table)
        own = pa.schema([(name, self._table.by_name[name].arrow) for name in names])
        behind, rows = None, _PAGE_ROWS
        while rows == _PAGE_ROWS:
            with self._database.told():
                page = read_page(
                    self._database.connection(), self._table, names, key=key, behind=behind, limit=_PAGE_ROWS
                )
            behind, rows = page.last, page.rows
            yield conformed(typed_rows(page, names, self._table, nullable(own)), self._shape)

    def rows(self, keys: pa.Table) -> pa.Table:
        return picked(self.chunks(), keys, self._shape)
