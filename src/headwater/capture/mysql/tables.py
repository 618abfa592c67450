"""The tables of a MariaDB or MySQL database as its catalog has them now: columns, keys, and whether they can be captured.

A row's key is the table's primary key, or columns that the caller gives, which must be unique and never null. Rows of the binlog come
whole, so nothing else has to identify them. Tables whose engine has no transactions are captured like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from headwater.capture.mysql.connection import MySqlDatabase, quoted
from headwater.capture.mysql.types import Declared, codecs
from headwater.capture.replica import with_keys
from headwater.capture.source import SourceTable
from headwater.model.errors import NotCapturable

_TABLES = """
SELECT table_name, table_type, engine, coalesce(table_rows, 0), coalesce(avg_row_length, 0) FROM information_schema.tables
WHERE table_schema = %s {one} ORDER BY table_name"""

_COLUMNS = """
SELECT table_name, column_name, data_type, column_type, numeric_precision, numeric_scale, is_nullable,
       extra LIKE '%%GENERATED%%' AND extra NOT LIKE '%%DEFAULT_GENERATED%%'
FROM information_schema.columns WHERE table_schema = %s {one} ORDER BY table_name, ordinal_position"""

_KEYS = """
SELECT table_name, column_name, sub_part FROM information_schema.statistics
WHERE table_schema = %s AND index_name = 'PRIMARY' {one} ORDER BY table_name, seq_in_index"""

_HAS_NUMBERS = """
SELECT 1 FROM information_schema.columns WHERE table_schema = 'information_schema'
AND table_name = 'COLLATION_CHARACTER_SET_APPLICABILITY' AND column_name = 'ID'"""


class MyTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table as the catalog has it; `primary` is empty where a key has parts of columns only."""

    database: str
    name: str
    kind: str
    engine: str
    rows_estimate: int
    row_bytes: int
    columns: tuple[Declared, ...]
    primary: tuple[str, ...] = ()

    @property
    def sql(self) -> str:
        """Its name in a statement."""
        return f"{quoted(self.database)}.{quoted(self.name)}"

    @property
    def by_name(self) -> dict[str, Declared]:
        """Its columns."""
        return {column.name: column for column in self.columns}


class CapturedMyTable(msgspec.Struct, frozen=True):
    """A table that is captured: as the runner knows it, and the key that the caller gave, if any."""

    info: SourceTable
    given: tuple[str, ...] = ()


def read_tables(database: MySqlDatabase, table: str | None = None) -> dict[str, MyTable]:
    """Every table and view of the database, by its name, or one of them."""
    name = database.name
    wanted = (name,) if table is None else (name, table)

    def ask(statement: str) -> list[Any]:
        return database.ask(statement.replace("{one}", "" if table is None else "AND table_name = %s"), wanted)

    columns: dict[str, list[Declared]] = {}
    for owner, column, type_, full, precision, scale, nullable, generated in ask(_COLUMNS):
        declared = Declared(
            name=column,
            type=type_.lower(),
            full=_text(full).lower(),
            precision=precision,
            scale=scale,
            nullable=nullable == "YES",
            generated=bool(generated),
        )
        columns.setdefault(owner, []).append(declared)
    keys: dict[str, list[tuple[str, int | None]]] = {}
    for owner, column, part in ask(_KEYS):
        keys.setdefault(owner, []).append((column, part))
    return {
        owner: MyTable(
            database=name,
            name=owner,
            kind=kind,
            engine=engine or "",
            rows_estimate=int(rows),
            row_bytes=int(size),
            columns=tuple(columns.get(owner, ())),
            primary=tuple(c for c, _ in keys.get(owner, ())) if all(p is None for _, p in keys.get(owner, ())) else (),
        )
        for owner, kind, engine, rows, size in ask(_TABLES)
    }


def read_codecs(database: MySqlDatabase) -> dict[int, str]:
    """What Python calls the character set of each collation, by the collation's number."""
    view = "COLLATION_CHARACTER_SET_APPLICABILITY" if database.ask(_HAS_NUMBERS) else "COLLATIONS"
    found = database.ask(f"SELECT id, character_set_name FROM information_schema.{view} WHERE id IS NOT NULL")
    return codecs({int(number): charset for number, charset in found if charset})


def key_of(table: MyTable, given: Sequence[str] = ()) -> tuple[str, ...]:
    """The columns that identify a table's rows; `NotCapturable` with the statement that gives it some."""
    what = f"Table {table.name}"
    if table.kind != "BASE TABLE":
        raise NotCapturable(
            f"{what} is a {table.kind.lower()}, not a table.", advice="Capture the tables that it reads."
        )
    strange = [column for column in table.columns if column.arrow is None]
    if strange:
        raise NotCapturable(
            f"{what} has a column {strange[0].name!r} of the type {strange[0].type}, which cannot be captured.",
            advice=f"Leave out the table, or change the column: ALTER TABLE {table.sql} MODIFY {quoted(strange[0].name)} VARCHAR(255);",
        )
    unknown = [name for name in given if name not in table.by_name]
    if unknown:
        raise NotCapturable(
            f"{what} has no column {unknown[0]!r}.",
            advice=f"Its columns are: {', '.join(column.name for column in table.columns)}.",
        )
    nullable = [name for name in given if table.by_name[name].nullable]
    if nullable:
        raise NotCapturable(
            f"{what}: Column {nullable[0]!r} is nullable, and a key must not be null.",
            advice=f"Run: ALTER TABLE {table.sql} MODIFY {quoted(nullable[0])} … NOT NULL;",
        )
    key = tuple(given) or table.primary
    if not key:
        raise NotCapturable(
            f"{what} has no primary key, or one over column prefixes, so its rows have no identity.",
            advice=f"Run: ALTER TABLE {table.sql} ADD PRIMARY KEY (…); or pass unique NOT NULL columns as `key=`.",
        )
    return key


def info_of(table: MyTable, key: tuple[str, ...]) -> SourceTable:
    """The table as the runner knows it; how it changes is told by the binlog, whenever it is read."""
    fields = [pa.field(column.name, column.arrow) for column in table.columns]
    return SourceTable(
        name=table.name, schema=pa.schema(fields), key=key, rows_estimate=table.rows_estimate, is_told=True
    )


def chosen(
    tables: Mapping[str, MyTable], names: Sequence[str], keys: Mapping[str, Sequence[str]]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """The tables to capture and their keys: those that are named, or all that can be captured; and why the others cannot."""
    missing = [name for name in names if name not in tables]
    if missing:
        raise NotCapturable(
            f"Table {missing[0]!r} does not exist, or this user has no access to it.",
            advice=f"The tables of this user are: {', '.join(list(tables)[:20]) or 'none'}. To give access to a table, "
            "run: GRANT SELECT ON ….",
        )
    return with_keys(tables, names, keys, key_of)


def _text(value: str | bytes) -> str:
    return value.decode("utf8", "replace") if isinstance(value, bytes) else value
