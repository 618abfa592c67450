"""The tables of an SQLite database as a capture sees them: columns with their types in the log, keys, and what else is unique.

SQLite lets any value stand in any column, so a column's type in the log follows from how it was declared, much as SQLite's own affinity
does; `values` says what becomes of a value that does not fit.

| declared | in the log |
|---|---|
| …BOOL… | BOOLEAN |
| …INT… | BIGINT |
| …CHAR…, …CLOB…, …TEXT… | STRING |
| …BLOB… | BINARY |
| …REAL…, …FLOA…, …DOUB…, …DEC…, …NUM… | DOUBLE |
| anything else (DATE, TIMESTAMP, JSON, UUID …), or nothing | STRING |

Functions only, no state; they read through the connection they are given.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa

from headwater.capture.source import SourceTable
from headwater.databases.address import quoted
from headwater.log.port.topic import check_name
from headwater.model.errors import InvalidName, NotCapturable

COLUMNS_MAX = 900
"""A row before and after a change stands in one row of the changelog, and SQLite has room for 2,000 columns."""

_TYPES: tuple[tuple[tuple[str, ...], pa.DataType], ...] = (
    (("BOOL",), pa.bool_()),
    (("INT",), pa.int64()),
    (("CHAR", "CLOB", "TEXT"), pa.string()),
    (("BLOB",), pa.binary()),
    (("REAL", "FLOA", "DOUB", "DEC", "NUM"), pa.float64()),
)
_GENERATED = (2, 3)


class Unique(NamedTuple):
    """What must be unique in a table besides its key: columns, each with the collation by which it is compared."""

    columns: tuple[tuple[str, str], ...]


class SQLiteTable(msgspec.Struct, frozen=True):
    """A table as it is declared now. `declared` are the types as they stand there, by which a change of one is noticed."""

    name: str
    columns: tuple[str, ...]
    declared: tuple[str, ...]
    key: tuple[str, ...]
    uniques: tuple[Unique, ...] = ()
    defaults: frozenset[str] = frozenset()

    @property
    def schema(self) -> pa.Schema:
        """Its columns in types of the log; only those of the key are never null."""
        pairs = zip(self.columns, self.declared, strict=True)
        return pa.schema([pa.field(name, type_of(declared), nullable=name not in self.key) for name, declared in pairs])

    def info(self) -> SourceTable:
        """The table as the runner sees it."""
        return SourceTable(name=self.name, schema=self.schema, key=self.key, is_told=True)


def type_of(declared: str) -> pa.DataType:
    """The type in the log of a column that was declared so."""
    upper = declared.upper()
    return next((type_ for words, type_ in _TYPES if any(word in upper for word in words)), pa.string())


def text_literal(text: str) -> str:
    """A text as SQL takes it."""
    return "'" + text.replace("'", "''") + "'"


def table_names(connection: sqlite3.Connection) -> list[str]:
    """The ordinary tables of the database: neither SQLite's own, nor ours, nor virtual ones and what is behind them."""
    rows = connection.execute(
        "SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'table' ORDER BY name"
    )
    return [name for (name,) in rows if not name.startswith(("sqlite_", "headwater:"))]


def read_table(
    connection: sqlite3.Connection, name: str, keys: Mapping[str, Sequence[str]], *, replaces: bool = True
) -> SQLiteTable:
    """One table; `NotCapturable` says what is in the way.

    With `replaces` false nobody writes with REPLACE, so what it would remove needs no watching.
    """
    kinds = connection.execute(
        "SELECT type FROM pragma_table_list WHERE schema = 'main' AND name = ?", (name,)
    ).fetchall()
    if not kinds:
        raise _missing(connection, name)
    if kinds[0][0] != "table":
        raise NotCapturable(
            f"{name!r} is a {kinds[0][0]}, and a capture needs a table.", advice="Capture the tables that it reads."
        )
    _check_name(name)
    found = connection.execute(f"PRAGMA table_xinfo({quoted(name)})").fetchall()
    found = [row for row in found if row[6] in (0, *_GENERATED)]
    key = _key(connection, name, [row[1] for row in sorted(found, key=lambda row: row[5]) if row[5]], keys.get(name))
    _check_columns(name, [row[1] for row in found])
    return SQLiteTable(
        name=name,
        columns=tuple(row[1] for row in found),
        declared=tuple((row[2] or "").upper() for row in found),
        key=key,
        uniques=_uniques(connection, name, key) if replaces else (),
        defaults=frozenset(row[1] for row in found if row[4] is not None or row[6] in _GENERATED),
    )


def _key(
    connection: sqlite3.Connection, table: str, primary: list[str], given: Sequence[str] | None
) -> tuple[str, ...]:
    if primary and (given is None or set(given) == set(primary)):
        return tuple(primary)
    if given is not None:
        _check_unique(connection, table, given)
        return tuple(given)
    raise NotCapturable(
        f"Table {table!r} has no primary key, so its rows have no identity.",
        advice="SQLite cannot add a primary key to a table. Create the table again with one (CREATE TABLE … "
        "(id INTEGER PRIMARY KEY, …); INSERT … SELECT; DROP; ALTER TABLE … RENAME). "
        f"Or pass unique NOT NULL columns with --key {table}=<column> (in Python: key={{{table!r}: [<column>]}}).",
    )


def _check_unique(connection: sqlite3.Connection, table: str, key: Sequence[str]) -> None:
    columns = {
        row[1]: bool(row[3]) or bool(row[5]) for row in connection.execute(f"PRAGMA table_xinfo({quoted(table)})")
    }
    for column in key:
        if column not in columns:
            raise NotCapturable(
                f"Table {table!r} has no key column {column!r}.", advice=f"Its columns are: {', '.join(columns)}."
            )
    indexes = connection.execute(f"PRAGMA index_list({quoted(table)})").fetchall()
    unique = [
        {row[2] for row in connection.execute(f"PRAGMA index_info({quoted(index[1])})")}
        for index in indexes
        if index[2] and not index[4]
    ]
    if set(key) not in unique or not all(columns[column] for column in key):
        names = ", ".join(quoted(column) for column in key)
        raise NotCapturable(
            f"Key {', '.join(key)} of table {table!r} is not declared as unique and NOT NULL.",
            advice=f"Declare the columns NOT NULL, and run: CREATE UNIQUE INDEX {quoted(table + '_key')} ON {quoted(table)} ({names});",
        )


def _uniques(connection: sqlite3.Connection, table: str, key: tuple[str, ...]) -> tuple[Unique, ...]:
    """What REPLACE may remove another row for, without any trigger seeing that."""
    found = []
    for index in connection.execute(f"PRAGMA index_list({quoted(table)})").fetchall():
        if not index[2]:
            continue
        parts = [row for row in connection.execute(f"PRAGMA index_xinfo({quoted(index[1])})").fetchall() if row[5]]
        if any(row[2] is None for row in parts):
            raise NotCapturable(
                f"Table {table!r} has a unique index on an expression ({index[1]}), so a capture cannot see the rows that REPLACE removes.",
                advice="Add ?replace=never to the URL if no program uses REPLACE on the table. Or create the index on a column.",
            )
        if {row[2] for row in parts} != set(key):
            found.append(Unique(tuple((row[2], row[4]) for row in parts)))
    return tuple(found)


def _check_name(name: str) -> None:
    try:
        check_name(name, of="table")
    except InvalidName as error:
        raise NotCapturable(
            f"The name of table {name!r} is not a valid name of a topic.",
            advice=f"{error.advice} Or leave out the table with --table.",
        ) from None


def _check_columns(table: str, columns: Sequence[str]) -> None:
    if len(columns) > COLUMNS_MAX:
        raise NotCapturable(
            f"Table {table!r} has {len(columns)} columns, but a capture supports at most {COLUMNS_MAX}.",
            advice="Split the table.",
        )
    lower: dict[str, str] = {}
    for column in columns:
        if column.startswith("_") or not column.isprintable() or column.lower() in lower:
            raise NotCapturable(
                f"Column {column!r} of table {table!r} has a name that a topic does not support.",
                advice="A name must be printable, must not begin with an underscore, and must differ in more than case. "
                "Run: ALTER TABLE {quoted(table)} RENAME COLUMN {quoted(column)} TO …; or leave out the table.",
            )
        lower[column.lower()] = column


def _missing(connection: sqlite3.Connection, name: str) -> NotCapturable:
    known = ", ".join(table_names(connection)) or "none"
    return NotCapturable(f"Table {name!r} does not exist.", advice=f"Its tables are: {known}.")
