"""SQLite as it is polled: read only, without triggers; values are literals by SQLite's own `quote`. Not thread-safe."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa

from headwater.capture.poll.source import Polled, RowRange, chosen, refuse_column, statement
from headwater.capture.source import SourceTable
from headwater.capture.source_url import SourceUrl
from headwater.capture.sqlite.changes import fetch_columns, misfit_text, read_rows
from headwater.capture.sqlite.errors import translated
from headwater.capture.sqlite.tables import SQLiteTable, read_table, table_names
from headwater.capture.sqlite.values import KeyMisfit
from headwater.databases.address import quoted
from headwater.model.errors import NotCapturable, NotFound

BUSY_S = 10.0
BYTES_MAX = 1 << 40
"""A page is bounded by its rows: one that is cut would look like the last."""


def polled(url: SourceUrl, keys: Mapping[str, tuple[str, ...]]) -> Polled:
    """The database in a file."""
    return PolledSQLite(url, keys)


class PolledSQLite:
    """One SQLite file."""

    def __init__(self, url: SourceUrl, keys: Mapping[str, tuple[str, ...]]) -> None:
        self.left_out: dict[str, str] = {}
        self._path = Path(url.path)
        self._named = url.tables
        self._keys = keys
        self._tables: dict[str, SQLiteTable] = {}
        self._held: sqlite3.Connection | None = None

    def tables(self, by: Mapping[str, str]) -> list[SourceTable]:
        self._tables, self.left_out = {}, {}
        with translated(self._path):
            for name in chosen(table_names(self._connection), self._named, by):
                try:
                    table = read_table(self._connection, name, self._keys, replaces=False)
                    _check(table, by.get(name) or by[""])
                    self._tables[name] = table
                except NotCapturable as error:
                    if self._named:
                        raise
                    self.left_out[name] = str(error)
        if not self._tables:
            raise NotCapturable(f"{self._path} has no table to poll.", advice=" ".join(self.left_out.values()))
        return [SourceTable(name=table.name, schema=table.schema, key=table.key) for table in self._tables.values()]

    def greatest(self, table: str, by: str, above: str | None) -> tuple[str | None, bool]:
        column, condition = quoted(by), "" if above is None else f" WHERE {quoted(by)} > {above}"
        with translated(self._path):
            ask = self._connection.execute
            found, literal = ask(
                f"SELECT max({column}), quote(max({column})) FROM {quoted(table)}{condition}"
            ).fetchone()
            (has_null,) = ask(f"SELECT EXISTS (SELECT 1 FROM {quoted(table)} WHERE {column} IS NULL)").fetchone()
        return None if found is None else literal, bool(has_null)

    def rows(self, table: str, where: RowRange, *, rows_max: int) -> tuple[pa.Table, tuple[str, ...]]:
        described = self._tables[table]
        names = [quoted(name) for name in described.columns] + [f"quote({quoted(name)})" for name in where.order]
        with translated(self._path):
            cursor = self._connection.execute(
                statement(", ".join(names), quoted(table), where, quoted, rows_max=rows_max)
            )
            columns = fetch_columns(cursor, bytes_max=BYTES_MAX)
        if not columns:
            return described.schema.empty_table(), ()
        width = len(described.columns)
        try:
            return read_rows(columns[:width], described), tuple(column[-1] for column in columns[width:])
        except KeyMisfit as error:
            raise NotCapturable(misfit_text(table, error)) from None

    def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.close()

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._held is None:
            if not self._path.is_file():
                raise NotFound(
                    f"The database {self._path} does not exist.", advice="Use the path of an existing database."
                )
            url = f"file:{quote(str(self._path.absolute()))}?mode=ro"
            self._held = sqlite3.connect(url, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        return self._held


def _check(table: SQLiteTable, by: str) -> None:
    if by not in table.columns:
        raise refuse_column(table.name, by, table.columns, type_=None)
    at = table.columns.index(by)
    if table.schema.field(at).type not in (pa.int64(), pa.float64(), pa.string()):
        raise refuse_column(table.name, by, table.columns, type_=table.declared[at] or "without a type")
