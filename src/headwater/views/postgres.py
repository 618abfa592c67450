"""Views in a PostgreSQL database, shared by many machines.

Rows travel by COPY. A batch is copied to a temporary table and merged from there; the commit need not reach the disk at once
(`synchronous_commit = off`), because the maintainer brings up from the log what a power loss takes back.

A question runs as a cursor in a read-only transaction, which takes one SELECT and nothing else, under `statement_timeout`. What
functions may do is decided by the role: give readers one that is no superuser. Passwords come from the URL, `PGPASSWORD` or
`~/.pgpass`, and are never shown. Thread-safety: each thread has a connection of its own, which does not survive a fork.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headwater.databases.address import load_client, quoted
from headwater.databases.postgres_types import (
    answer_column,
    cast_type,
    declared_type,
    from_csv,
    read_expression,
    to_csv,
    to_text,
)
from headwater.model.errors import HeadwaterError, InvalidInput, NoAccess, NotFound, TimedOut, Unreachable
from headwater.model.url import without_password
from headwater.views.changes import KEY, Delta, stored_schema
from headwater.views.connections import Connections
from headwater.views.definition import ViewDefinition
from headwater.views.generations import SqlGenerations
from headwater.views.store import (
    EVERYTHING,
    META,
    Applied,
    Limits,
    Snapshot,
    Stored,
    ViewSelection,
    check_condition,
    choose,
    columns_within,
    not_stored,
    order_sql,
    table_name,
)

CONNECT_S = 10
WORK_MEMORY = "64MB"
NAME_BYTES_MAX = 63

_CHUNK_ROWS = 8_192
_NOT_SERVING = ("08", "53", "57")  # classes of SQLSTATE: connection, resources, shutdown
_LOCK = 0x6865616477617465
_CREATE_META = f"""create table if not exists {quoted(META)} (
    name text not null, generation integer not null, definition text not null, applied text not null,
    current boolean not null, primary key (name, generation))"""


class PostgresStore(SqlGenerations):
    """A database of views, in the first schema of the search path."""

    _mark = "%s"
    _key_type = 'text collate "C" primary key'

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self.url = without_password(url)
        self._address = url
        self._read_only = read_only
        self._connections = Connections(self._connect)
        self._psycopg = load_client("psycopg", extra="postgres", purpose="The PostgreSQL view store")
        if not read_only:
            with self._changing() as connection:
                connection.execute(_CREATE_META)

    def stored(self) -> list[Stored]:
        with self._reading(None) as connection:
            return self._stored(connection)

    def create(self, definition: ViewDefinition) -> None:
        _check_names(definition)
        super().create(definition)

    def check(self, definition: ViewDefinition, rows: pa.Table) -> None:
        """PostgreSQL's text has no NUL."""
        for field in definition.schema:
            if pa.types.is_string(field.type) and pc.any(pc.match_substring(rows.column(field.name), "\0")).as_py():
                raise InvalidInput(
                    f"View {definition.name!r}, column {field.name}: The text contains a NUL character, which PostgreSQL cannot store.",
                    advice="Remove the character in the view's query, or store the view in SQLite.",
                )

    def apply(
        self, definition: ViewDefinition, delta: Delta, *, before: Applied, after: Applied, clear: bool = False
    ) -> None:
        table = quoted(table_name(definition))
        with self._writing() as connection:
            connection.execute("set local synchronous_commit = off")
            self._move_on(connection, definition, before, after)
            if clear:
                connection.execute(f"delete from {table}")
            elif len(delta.deletes):
                connection.execute(
                    f"delete from {table} where {quoted(KEY)} = any(%s::text[])", (delta.deletes.to_pylist(),)
                )
            _merge(connection, table, delta.upserts)

    def read(
        self,
        name: str,
        selection: ViewSelection = EVERYTHING,
        *,
        generation: int | None = None,
        limits: Limits | None = None,
    ) -> Snapshot:
        with self._reading(limits) as connection:
            stored = choose(self._stored(connection, name), name, generation, self.url)
            schema = stored_schema(stored.definition)
            columns = ", ".join(read_expression(_escaped(quoted(field.name)), field.type) for field in schema)
            found, parameters = _where(selection, stored.definition)
            query = (
                f"copy (select {columns} from {quoted(table_name(stored.definition))}{found}) to stdout (format csv)"
            )
            # Without parameters psycopg leaves a doubled percent sign as it is.
            try:
                with connection.cursor().copy(query if parameters else query % (), parameters) as copy:
                    data = b"".join(bytes(piece) for piece in copy)
            except self._psycopg.errors.UndefinedTable:
                # Swapped away since the transaction began.
                raise not_stored(name, generation, self.url) from None
            return Snapshot(stored, from_csv(data, schema))

    def ask(self, query: str, *, limits: Limits, instead: tuple[ViewDefinition, pa.Table] | None = None) -> pa.Table:
        deadline = time.monotonic() + limits.timeout_s
        with self._told(), self._connection().transaction(force_rollback=True):
            connection = self._connection()
            if instead is not None:
                _load(connection, *instead)
            connection.execute("set transaction read only")
            connection.execute(f"set local work_mem = '{WORK_MEMORY}'")
            _limit(connection, deadline, limits)
            # Prepared, because then the server itself refuses more than one statement.
            connection.execute(f"declare question no scroll cursor for\n{query}", prepare=True)
            described: list[Any] = []

            def fetch() -> list[tuple[Any, ...]]:
                _limit(connection, deadline, limits)
                cursor = connection.execute(f"fetch forward {_CHUNK_ROWS} from question")
                described[:] = cursor.description
                return list(cursor.fetchall())

            columns = columns_within(limits, iter(fetch, [])) or [() for _ in described]
        arrays = [answer_column(values, one) for values, one in zip(columns, described, strict=True)]
        return pa.Table.from_arrays(arrays, names=[one.name for one in described])

    def close(self) -> None:
        self._connections.close()

    def _connection(self) -> Any:
        connection = self._connections.get()
        if connection.closed:
            self._connections.forget()
            connection = self._connections.get()
        return connection

    def _connect(self) -> Any:
        """Refusals are raised outside of the handler, so that not even an error's context has a password in it."""
        connection, failed = None, ""
        try:
            connection = self._psycopg.connect(self._address, autocommit=True, connect_timeout=CONNECT_S)
        except self._psycopg.Error as error:
            failed = _without_secrets(self._psycopg, _first_line(error), self._address)
        if connection is None:
            raise _unreachable(self.url, failed)
        connection.execute("set timezone to 'UTC'")
        text = import_module("psycopg.types.string").TextLoader
        for kind in ("json", "jsonb"):
            connection.adapters.register_loader(kind, text)
        return connection

    def _declared_type(self, type_: pa.DataType) -> str:
        return declared_type(type_)

    @contextmanager
    def _changing(self) -> Iterator[Any]:
        """A transaction that makes or removes tables; one at a time in the whole database."""
        with self._writing() as connection:
            connection.execute("select pg_advisory_xact_lock(%s)", (_LOCK,))
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        if self._read_only:
            raise NoAccess(f"{self.url} was opened read-only.", advice="Open the store without read_only.")
        with self._told(), self._connection().transaction():
            yield self._connection()

    @contextmanager
    def _reading(self, limits: Limits | None) -> Iterator[Any]:
        """One transaction: all that is read in it was true at one moment."""
        with self._told(), self._connection().transaction():
            connection = self._connection()
            connection.execute("set transaction isolation level repeatable read, read only")
            if limits is not None:
                _limit(connection, time.monotonic() + limits.timeout_s, limits)
            yield connection

    @contextmanager
    def _told(self) -> Iterator[None]:
        """PostgreSQL's refusals in our words."""
        try:
            yield
        except self._psycopg.Error as error:
            raise _refusal(self._psycopg, error, self.url) from None


def _where(selection: ViewSelection, definition: ViewDefinition) -> tuple[str, dict[str, Any]]:
    """The rest of a SELECT and its parameters."""
    parts: list[str] = []
    parameters: dict[str, Any] = {}
    if selection.keys is not None:
        parts.append(f"{quoted(KEY)} = any(%(keys)s::text[])")
        parameters["keys"] = selection.keys.to_pylist()
    for at, (column, value) in enumerate(selection.equals.items()):
        field = definition.schema.field(column)
        parts.append(f"{_escaped(quoted(column))} is not distinct from %(v{at})s::{cast_type(field.type)}")
        parameters[f"v{at}"] = to_text(pa.array([value], field.type))[0].as_py()
    if selection.condition is not None:
        parts.append(_escaped(check_condition(selection.condition, definition, dialect="postgres")))
    text = f" where {' and '.join(parts)}" if parts else ""
    orders = {name: _escaped(quoted(name)) for name in (KEY, *definition.schema.names)}
    return text + order_sql(selection, orders), parameters


def _escaped(text: str) -> str:
    """Text for a query with parameters, where a percent sign is written twice."""
    return text.replace("%", "%%")


def _merge(connection: Any, table: str, rows: pa.Table) -> None:
    """COPY to a temporary table, and from there in place of what the keys had."""
    if not rows.num_rows:
        return
    names = [quoted(name) for name in rows.schema.names]
    connection.execute(f"create temp table arriving (like {table}) on commit drop")
    _copy(connection, "arriving", rows)
    changes = ", ".join(f"{name} = excluded.{name}" for name in names[1:])
    connection.execute(
        f"insert into {table} ({', '.join(names)}) select {', '.join(names)} from arriving "
        f"on conflict ({names[0]}) do update set {changes}"
    )


def _load(connection: Any, definition: ViewDefinition, rows: pa.Table) -> None:
    """A temporary table with the view's name, which comes before the view."""
    own = rows.select(definition.schema.names)
    columns = ", ".join(f"{quoted(field.name)} {declared_type(field.type)}" for field in own.schema)
    connection.execute(f"create temp table {quoted(definition.name)} ({columns}) on commit drop")
    _copy(connection, f"pg_temp.{quoted(definition.name)}", own)


def _copy(connection: Any, table: str, rows: pa.Table) -> None:
    columns = ", ".join(map(quoted, rows.schema.names))
    with connection.cursor().copy(f"copy {table} ({columns}) from stdin (format csv)") as copy:
        copy.write(to_csv(rows))


def _limit(connection: Any, deadline: float, limits: Limits) -> None:
    """Gives the next statement the time that is left; asked again before each, because a question may call set_config."""
    left_ms = int((deadline - time.monotonic()) * 1000)
    if left_ms <= 0:
        raise _took_too_long(limits.timeout_s)
    connection.execute(f"set local statement_timeout = {left_ms}")


def _took_too_long(timeout_s: float | None) -> TimedOut:
    limit = "its time" if timeout_s is None else f"{timeout_s:g} s"
    return TimedOut(f"The query took longer than {limit}.", advice="Select less, or raise timeout_s.")


def _check_names(definition: ViewDefinition) -> None:
    for name in (table_name(definition), *definition.schema.names):
        if len(name.encode()) > NAME_BYTES_MAX:
            raise InvalidInput(
                f"View {definition.name!r}: {name[:40]!r}… is longer than PostgreSQL's {NAME_BYTES_MAX} bytes for a name.",
                advice="Choose a shorter name.",
            )


def _refusal(psycopg: Any, error: Any, url: str) -> HeadwaterError:
    text = _first_line(error)
    if isinstance(error, psycopg.errors.QueryCanceled):
        return _took_too_long(None)
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return NoAccess(f"{url}: {text}.", advice="Grant the role the missing privilege, or use another role.")
    if isinstance(error, psycopg.errors.UndefinedTable) and META in text:
        return NotFound(f"{url} contains no views.", advice="Run the application of the view first.")
    if isinstance(error, psycopg.OperationalError) and (error.sqlstate or "08")[:2] in _NOT_SERVING:
        return _unreachable(url, text)
    return InvalidInput(
        f"PostgreSQL rejected the query: {text}.",
        advice="Write one SELECT statement over views, since queries are read-only. Put names with '.' or '-' in double quotes.",
    )


def _unreachable(url: str, text: str) -> Unreachable:
    return Unreachable(f"{url}: {text}.", advice="Check the URL, the server, the role and its password.")


def _without_secrets(psycopg: Any, text: str, address: str) -> str:
    """What the client says of an address, unless it quotes what is secret in it."""
    try:
        secret = psycopg.conninfo.conninfo_to_dict(address).get("password")
    except psycopg.Error:
        return "the URL is not that of a database"
    return text if secret is None or str(secret) not in text else "the server is not reachable"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
