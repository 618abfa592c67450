"""Views in an SQLite file: one writer, any number of reading processes (WAL).

Tables are `WITHOUT ROWID`, with the key's text as primary key. The file is synced as WAL's `NORMAL` does it: a power loss can
take back its last transactions, never half of one, and the maintainer brings them up again from the log.

Thread-safety: writes take turns on one connection under a lock; each reading thread has a connection of its own. After a fork
the child reads by connections of its own and cannot write. A question has a connection that is opened for it: read-only, with
an authorizer that knows SELECT only.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from headwater.databases.address import quoted
from headwater.databases.sqlite_types import answer_column, declared_type, to_column, to_values
from headwater.model.errors import (
    Closed,
    HeadwaterError,
    InvalidInput,
    NoAccess,
    NotFound,
    Overloaded,
    StorageError,
    TimedOut,
)
from headwater.views.changes import KEY, Delta, stored_schema
from headwater.views.connections import Connections
from headwater.views.definition import ViewDefinition
from headwater.views.generations import SqlGenerations
from headwater.views.store import (
    EVERYTHING,
    META,
    QUESTION,
    Applied,
    Limits,
    Snapshot,
    Stored,
    ViewSelection,
    check_condition,
    choose,
    columns_within,
    order_sql,
    table_name,
)

BUSY_S = 30.0
CACHE_KIB = 65_536
TEXT_BYTES_MAX = 64 << 20

_DECIMAL = "headwater_decimal"
_CHUNK_ROWS = 8_192
_PROGRESS_STEPS = 10_000
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_CREATE_META = f"""create table if not exists {quoted(META)} (
    name text not null, generation integer not null, definition text not null, applied text not null,
    current integer not null, primary key (name, generation)) without rowid"""


class SqliteStore(SqlGenerations):
    """A file of views."""

    _mark = "?"
    _key_type = "TEXT NOT NULL PRIMARY KEY"
    _table_ending = " without rowid"

    def __init__(self, path: str, *, read_only: bool = False) -> None:
        self.url = f"sqlite:///{path}"
        self._path = os.path.abspath(path)
        self._read_only = read_only
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._readers = Connections(self._connect_reader)
        self._writer: sqlite3.Connection | None = None
        if not read_only:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            with self._told():
                self._writer = self._connect(read_only=False)
                self._writer.execute("pragma journal_mode = wal")
                self._writer.execute("pragma synchronous = normal")
                self._writer.execute(_CREATE_META)
        elif not os.path.exists(self._path):
            raise NotFound(f"The file {path} does not exist.", advice="Run the application of the view first.")

    def stored(self) -> list[Stored]:
        with self._told(), self._reading() as connection:
            return self._stored(connection)

    def check(self, definition: ViewDefinition, rows: pa.Table) -> None:
        """SQLite holds all that Arrow does."""

    def apply(
        self, definition: ViewDefinition, delta: Delta, *, before: Applied, after: Applied, clear: bool = False
    ) -> None:
        table = quoted(table_name(definition))
        with self._writing() as connection:
            self._move_on(connection, definition, before, after)
            if clear:
                connection.execute(f"delete from {table}")
            elif len(delta.deletes):
                keys = ((key,) for key in delta.deletes.to_pylist())
                connection.executemany(f"delete from {table} where {quoted(KEY)} = ?", keys)
            marks = ", ".join("?" * len(delta.upserts.schema))
            connection.executemany(f"insert or replace into {table} values ({marks})", _tuples(delta.upserts))

    def read(
        self,
        name: str,
        selection: ViewSelection = EVERYTHING,
        *,
        generation: int | None = None,
        limits: Limits | None = None,
    ) -> Snapshot:
        with self._told(), self._reading() as connection, _limited(connection, limits):
            stored = choose(self._stored(connection, name), name, generation, self.url)
            schema = stored_schema(stored.definition)
            found, parameters = _where(connection, selection, stored.definition)
            columns = ", ".join(map(quoted, schema.names))
            query = f"select {columns} from {quoted(table_name(stored.definition))}{found}"
            return Snapshot(stored, _table(connection.execute(query, parameters).fetchall(), schema))

    def ask(self, query: str, *, limits: Limits, instead: tuple[ViewDefinition, pa.Table] | None = None) -> pa.Table:
        with self._told(), _closing(self._connect(read_only=True)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, TEXT_BYTES_MAX)
            if instead is not None:
                _load(connection, *instead)
            connection.execute(f"create temp view {quoted(QUESTION)} as {query}")
            connection.execute("begin")
            with _limited(connection, limits):
                names = connection.execute(f"pragma table_info({quoted(QUESTION)})").fetchall()
                connection.set_authorizer(_only_reads)
                return _answer(connection.execute(f"select * from {quoted(QUESTION)}"), names, limits)

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()
        self._readers.close()

    def _connect(self, *, read_only: bool) -> sqlite3.Connection:
        mode = "ro" if read_only else "rwc"
        connection = sqlite3.connect(
            f"{Path(self._path).as_uri()}?mode={mode}",
            uri=True,
            timeout=BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.execute(f"pragma cache_size = -{CACHE_KIB}")
        connection.create_collation(_DECIMAL, _compare_decimals)
        return connection

    def _connect_reader(self) -> sqlite3.Connection:
        """For our own reads, whose temporary tables are small; a stranger's question keeps its own in files."""
        connection = self._connect(read_only=True)
        connection.execute("pragma temp_store = memory")
        return connection

    def _changing(self) -> AbstractContextManager[sqlite3.Connection]:
        return self._writing()

    def _declared_type(self, type_: pa.DataType) -> str:
        return declared_type(type_)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction; nobody else writes meanwhile."""
        with self._told(), self._lock:
            if self._pid != os.getpid():
                raise Closed(
                    f"{self.url} was opened before this process was forked.",
                    advice="Open the store again in this process.",
                )
            if self._writer is None:
                raise NoAccess(
                    f"{self.url} was opened read-only, or was closed.", advice="Open the store without read_only."
                )
            self._writer.execute("begin immediate")
            try:
                yield self._writer
                self._writer.execute("commit")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("rollback")
                raise

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all that is read in it was true at one moment."""
        connection: sqlite3.Connection = self._readers.get()
        connection.execute("begin")
        try:
            yield connection
        finally:
            if connection.in_transaction:
                connection.execute("rollback")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """SQLite's refusals in our words."""
        try:
            yield
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise _refusal(error, self.url) from None


def _where(
    connection: sqlite3.Connection, selection: ViewSelection, definition: ViewDefinition
) -> tuple[str, dict[str, Any]]:
    """The rest of a SELECT and its parameters; many keys go by way of a table of their own."""
    parts, parameters = [], {}
    if selection.keys is not None and len(selection.keys) == 1:
        parts.append(f"{quoted(KEY)} = :key")
        parameters["key"] = selection.keys[0].as_py()
    elif selection.keys is not None:
        connection.execute("create temp table if not exists wanted (key text primary key) without rowid")
        connection.execute("delete from temp.wanted")
        connection.executemany("insert into temp.wanted values (?)", ((key,) for key in selection.keys.to_pylist()))
        parts.append(f"{quoted(KEY)} in (select key from temp.wanted)")
    for at, (column, value) in enumerate(selection.equals.items()):
        parts.append(f"{quoted(column)} is :v{at}")
        field = definition.schema.field(column)
        parameters[f"v{at}"] = to_values(pa.array([value], field.type))[0]
    if selection.condition is not None:
        parts.append(check_condition(selection.condition, definition, dialect="sqlite"))
    text = f" where {' and '.join(parts)}" if parts else ""
    orders = {KEY: quoted(KEY)}
    for field in definition.schema:
        decimal = pa.types.is_decimal(field.type)
        orders[field.name] = f"{quoted(field.name)}{f' collate {_DECIMAL}' if decimal else ''}"
    return text + order_sql(selection, orders), parameters


def _load(connection: sqlite3.Connection, definition: ViewDefinition, rows: pa.Table) -> None:
    """A temporary table with the view's name, which comes before the view."""
    own = rows.select(definition.schema.names)
    columns = ", ".join(f"{quoted(field.name)} {declared_type(field.type)}" for field in own.schema)
    connection.execute("begin")
    connection.execute(f"create temp table {quoted(definition.name)} ({columns})")
    marks = ", ".join("?" * own.num_columns)
    connection.executemany(f"insert into temp.{quoted(definition.name)} values ({marks})", _tuples(own))
    connection.execute("commit")


def _tuples(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(to_values(column.combine_chunks()) for column in rows.columns), strict=True)


def _table(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    if not rows:
        return schema.empty_table()
    columns = zip(*rows, strict=True)
    return pa.Table.from_arrays(
        [to_column(values, field) for values, field in zip(columns, schema, strict=True)], schema=schema
    )


def _answer(cursor: sqlite3.Cursor, names: Sequence[tuple[Any, ...]], limits: Limits) -> pa.Table:
    """All rows, as long as they stay below the limits."""
    chunks = iter(lambda: cursor.fetchmany(_CHUNK_ROWS), [])
    columns = columns_within(limits, chunks) or [() for _ in names]
    arrays = [answer_column(values, one[1], one[2]) for values, one in zip(columns, names, strict=True)]
    return pa.Table.from_arrays(arrays, names=[one[1] for one in names])


@contextmanager
def _limited(connection: sqlite3.Connection, limits: Limits | None) -> Iterator[None]:
    """Stops what runs on the connection when its time is over."""
    if limits is None:
        yield
        return
    deadline = time.monotonic() + limits.timeout_s
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _PROGRESS_STEPS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if "interrupted" not in str(error):
            raise
        raise TimedOut(
            f"The query took longer than {limits.timeout_s:g} s.", advice="Select less, or raise timeout_s."
        ) from None
    finally:
        connection.set_progress_handler(None, 0)


@contextmanager
def _closing(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    try:
        yield connection
    finally:
        connection.close()


def _only_reads(action: int, *_: object) -> int:
    return sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY


def _compare_decimals(one: str, other: str) -> int:
    left, right = Decimal(one), Decimal(other)
    return (left > right) - (left < right)


def _refusal(error: Exception, url: str) -> HeadwaterError:
    text = str(error)
    if isinstance(error, sqlite3.OperationalError) and ("locked" in text or "busy" in text):
        return Overloaded(
            f"{url} is in use by another writer: {text}.", advice="Only one process can write to a store."
        )
    if isinstance(error, sqlite3.OperationalError) and ("unable to open" in text or "readonly" in text):
        return NoAccess(f"{url} cannot be opened: {text}.", advice="Check the path and its permissions.")
    if isinstance(error, sqlite3.OperationalError) and ("disk" in text or "full" in text):
        return StorageError(f"{url}: {text}.", advice="Check the disk.")
    if isinstance(error, sqlite3.DatabaseError) and ("malformed" in text or "not a database" in text):
        return StorageError(
            f"{url} is damaged: {text}.", advice="Delete the file. The application rebuilds it from the log."
        )
    return InvalidInput(
        f"SQLite rejected the query: {text}.",
        advice="Write one SELECT statement over views, since queries are read-only. Put names with '.' or '-' in double quotes.",
    )
