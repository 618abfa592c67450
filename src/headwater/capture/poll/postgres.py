"""PostgreSQL as it is polled: by SELECTs alone, so any role that may read a table will do. Not thread-safe.

Rows come as Arrow by ADBC, in the types and by the settings of a capture from its log (`postgres.types`, `postgres.connection`).
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from headwater.capture.poll.source import Polled, RowRange, bare_options, chosen, refuse_column, statement
from headwater.capture.postgres.connection import PostgresDatabase
from headwater.capture.postgres.tables import PgTable, Types, info_of, read_tables
from headwater.capture.source import SourceTable
from headwater.capture.source_url import SourceUrl
from headwater.databases.address import quoted
from headwater.model.errors import NotCapturable


def polled(url: SourceUrl, keys: Mapping[str, tuple[str, ...]]) -> Polled:
    """The database behind a URL."""
    return PolledPostgres(url, keys)


class PolledPostgres:
    """One PostgreSQL database."""

    def __init__(self, url: SourceUrl, keys: Mapping[str, tuple[str, ...]]) -> None:
        self.left_out: dict[str, str] = {}
        self._database = PostgresDatabase(bare_options(url))
        self._named = [name.removeprefix("public.") for name in url.tables]
        self._keys = keys
        self._types = Types(self._database)
        self._tables: dict[str, tuple[PgTable, SourceTable]] = {}

    def tables(self, by: Mapping[str, str]) -> list[SourceTable]:
        found = read_tables(self._database)
        self._tables, self.left_out = {}, {}
        for name in chosen(list(found), self._named, by):
            try:
                self._tables[name] = self._look(found, name, by.get(name) or by[""])
            except NotCapturable as error:
                if self._named:
                    raise
                self.left_out[name] = str(error)
        if not self._tables:
            raise NotCapturable(
                f"{self._database.shown} has no table to poll.", advice=" ".join(self.left_out.values())
            )
        return [info for _, info in self._tables.values()]

    def greatest(self, table: str, by: str, above: str | None) -> tuple[str | None, bool]:
        described, column = self._tables[table][0], quoted(by)
        condition = "" if above is None else f" where {column} > {above}"
        literal = self._literal(described, by, f"max({column})")
        ((found,),) = self._database.ask(f"select {literal} from {described.sql}{condition}")
        ((has_null,),) = self._database.ask(f"select exists (select 1 from {described.sql} where {column} is null)")
        return found, bool(has_null)

    def rows(self, table: str, where: RowRange, *, rows_max: int) -> tuple[pa.Table, tuple[str, ...]]:
        described, info = self._tables[table]
        types = {column.name: self._types.of(column.type, column.modifier) for column in described.columns}
        selected = [f"{type_.selected(quoted(name))} AS {quoted(name)}" for name, type_ in types.items()]
        places = [f"_place_{at}" for at in range(len(where.order))]
        selected += [
            f"{self._literal(described, name, quoted(name))} AS {quoted(place)}"
            for name, place in zip(where.order, places, strict=True)
        ]
        text = statement(", ".join(selected), described.sql, where, quoted, rows_max=rows_max)
        with self._database.told(), self._database.bulk().cursor() as cursor:
            cursor.execute(text)
            found = cursor.fetch_arrow_table()
        columns = [
            pa.chunked_array([types[f.name].from_selected(chunk) for chunk in found.column(f.name).chunks], f.type)
            for f in info.schema
        ]
        last = tuple(found.column(place)[-1].as_py() for place in places) if found.num_rows else ()
        return pa.Table.from_arrays(columns, schema=info.schema), last

    def close(self) -> None:
        self._database.close()

    def _look(self, found: Mapping[str, PgTable], name: str, by: str) -> tuple[PgTable, SourceTable]:
        if name not in found:
            raise NotCapturable(
                f"Table {name!r} does not exist.", advice=f"The tables are: {', '.join(list(found)[:20]) or 'none'}."
            )
        table = found[name]
        key = self._keys.get(name) or table.primary
        if not key:
            raise NotCapturable(
                f"Table {name!r} has no primary key, so its rows have no identity.",
                advice=f"Pass unique NOT NULL columns: --key {name}=<column> (in Python: key={{{name!r}: [<column>]}}).",
            )
        info = info_of(table, key, self._types)
        if by not in info.schema.names:
            raise refuse_column(name, by, info.schema.names, type_=None)
        type_ = info.schema.field(by).type
        if not (pa.types.is_integer(type_) or pa.types.is_temporal(type_) or pa.types.is_decimal(type_)):
            raise refuse_column(
                name, by, info.schema.names, type_=next(c.declared for c in table.columns if c.name == by)
            )
        return table, info

    def _literal(self, table: PgTable, name: str, expression: str) -> str:
        declared = next(column.declared for column in table.columns if column.name == name)
        return f"quote_literal(({expression})::text) || '::{declared.replace(chr(39), chr(39) * 2)}'"
