"""PostgreSQL as a sink: `postgresql://me@host/shop?table=users`.

Rows travel by COPY to a temporary table and are merged from there; the ledger's row is locked by the same transaction, so two writers of
one stage take turns, and the older one is refused. The table may be your own: text is read by the type of its column. What
PostgreSQL refuses of single rows (a check, a foreign key, a number out of range, text with a NUL character, which its text
cannot hold) becomes a dead letter: the rest goes in, found by halves between savepoints.

`?table=` may name a schema: `sales.users`. Passwords come by `password_env=`, `password_file=`, `PGPASSWORD` or `~/.pgpass`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.databases.address import load_client, parse_address, quoted
from headwater.databases.failures import in_our_words
from headwater.databases.postgres_types import declared_type, to_csv
from headwater.model.errors import HeadwaterError, InvalidInput, NoAccess, Unreachable
from headwater.sinks.ledger import TABLE
from headwater.sinks.sink import Refusal, refused_rows
from headwater.sinks.table import TableSink

CONNECT_S = 10
IDLE_S = 120
LOCK_S = 30

_NOT_SERVING = (
    "08",
    "53",
    "57",
    "40",
    "55",
    "25",
)  # SQLSTATE: connection, resources, shutdown, deadlock, lock, a dead transaction
_OF_ROWS = ("22", "23")  # data, constraints
_ARRIVING, _POINT = "headwater_arriving", "headwater_rows"
_INDEXED = "(indkey::int2[])[0:indnkeyatts - 1]"  # without the columns that an index only carries along (INCLUDE)


class PostgresSink(TableSink):
    """One table of a PostgreSQL database."""

    _mark = "%s"
    _lock_row = " for update"
    # A snapshot waits while the other side of a comparison is read, however long that takes.
    _snapshot = "begin isolation level repeatable read, read only; set local idle_in_transaction_session_timeout to 0"

    def __init__(self, to: str, *, stage: str) -> None:
        super().__init__(parse_address(to, options=("table",), others=True), stage=stage)
        self._psycopg = load_client("psycopg", extra="postgres", purpose="The PostgreSQL sink")
        self._open: Any = None

    @property
    def table(self) -> str:
        given = self.address.options.get("table")
        return quoted(self.shape.name) if given is None else ".".join(map(quoted, given.split(".", 1)))

    def delete(self, keys: pa.Table) -> None:
        same = " and ".join(f"{self.table}.{quoted(name)} = gone.{quoted(name)}" for name in self.shape.key)
        with self._told():
            self._copy(keys)
            self._connection().execute(f"delete from {self.table} using {_ARRIVING} gone where {same}")

    def upsert(self, rows: pa.Table) -> Sequence[Refusal]:
        with_nul = np.flatnonzero(_with_nul(rows))
        kept = np.setdiff1d(np.arange(rows.num_rows), with_nul)
        good = rows.take(pa.array(kept)) if len(with_nul) else rows
        names = ", ".join(map(quoted, rows.schema.names))
        merge = self._upsert_sql(f"select {names} from {_ARRIVING}")
        connection = self._connection()

        def attempt(start: int, end: int) -> str | None:
            connection.execute(f"savepoint {_POINT}")
            try:
                self._copy(good.slice(start, end - start))
                connection.execute(merge)
            except self._psycopg.Error as error:
                if (error.sqlstate or "")[:2] not in _OF_ROWS:
                    raise
                connection.execute(f"rollback to {_POINT}")
                connection.execute(f"release {_POINT}")
                return f"PostgreSQL: {_first_line(error)}"
            connection.execute(f"release {_POINT}")
            return None

        with self._told():
            refused = [Refusal(int(kept[one.row]), one.reason) for one in refused_rows(good.num_rows, attempt)]
        return [*refused, *(Refusal(int(row), "PostgreSQL: text with a NUL character") for row in with_nul)]

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def _copy(self, rows: pa.Table) -> None:
        """The rows in a temporary table with the types of the table's own columns."""
        connection, names = self._connection(), ", ".join(map(quoted, rows.schema.names))
        connection.execute(f"drop table if exists pg_temp.{_ARRIVING}")
        connection.execute(
            f"create temp table {_ARRIVING} on commit drop as select {names} from {self.table} with no data"
        )
        with connection.cursor().copy(f"copy {_ARRIVING} ({names}) from stdin (format csv)") as copy:
            copy.write(to_csv(rows))

    def _connection(self) -> Any:
        if self._open is None or self._open.closed:
            if self._begun:
                # A new connection knows nothing of the rows before, and would enter the marker without them.
                raise Unreachable(f"{self.url}: The connection was lost.", advice="The sink retries the batch.")
            more = {} if self.address.password is None else {"password": self.address.password}
            self._open = self._psycopg.connect(
                self.address.client, autocommit=True, connect_timeout=CONNECT_S, prepare_threshold=None, **more
            )
            self._open.execute("set timezone to 'UTC'")
            self._open.execute("set client_min_messages to warning")
            # A writer that was stopped inside a batch would otherwise hold the ledger for ever.
            self._open.execute(f"set idle_in_transaction_session_timeout to '{IDLE_S}s'")
            self._open.execute(f"set lock_timeout to '{LOCK_S}s'")
        return self._open

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        connection = self._connection()
        with connection.transaction():
            # Two stages that are opened at once may both find a table missing.
            connection.execute("select pg_advisory_xact_lock(hashtext(%s))", (TABLE,))
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        yield self._connection()

    def _start(self) -> Any:
        connection = self._connection()
        connection.execute("begin")
        return connection

    def _finish(self, *, commits: bool) -> None:
        if commits:
            self._connection().execute("commit")
        elif self._open is not None and not self._open.closed:
            with suppress(self._psycopg.Error):
                self._open.execute("rollback")

    def _columns(self, connection: Any) -> dict[str, str]:
        query = (
            "select attname, format_type(atttypid, atttypmod) from pg_attribute "
            "where attrelid = to_regclass(%s) and attnum > 0 and not attisdropped order by attnum"
        )
        return dict(connection.execute(query, (self.table,)).fetchall())

    def _is_unique(self, connection: Any) -> bool:
        query = (
            f"select array_agg(attname::text) from pg_index join pg_attribute on attrelid = indrelid and attnum = any({_INDEXED}) "
            "where indrelid = to_regclass(%s) and indisunique and indpred is null and indexprs is null group by indexrelid"
        )
        return any(set(names) == set(self.shape.key) for (names,) in connection.execute(query, (self.table,)))

    def primary_key(self, connection: Any) -> tuple[str, ...]:
        """The columns of the table's primary key, in their order."""
        query = (
            f"select attname from pg_index join pg_attribute on attrelid = indrelid and attnum = any({_INDEXED}) "
            f"where indrelid = to_regclass(%s) and indisprimary order by array_position({_INDEXED}, attnum)"
        )
        return tuple(name for (name,) in connection.execute(query, (self.table,)).fetchall())

    def _has_ledger(self, connection: Any) -> bool:
        return connection.execute("select to_regclass(%s) is not null", (TABLE,)).fetchall()[0][0]

    def _declared(self, type_: pa.DataType) -> str:
        return declared_type(type_)

    def _told(self) -> AbstractContextManager[None]:
        return in_our_words(self._problem)

    def _problem(self, error: Any) -> HeadwaterError | None:
        if not isinstance(error, self._psycopg.Error):
            return None
        text, state = _first_line(error), (error.sqlstate or "08")[:2]
        if self.address.password and self.address.password in text:
            text = "the server is not reachable"
        what = f"{self.url}: {text}."
        if isinstance(error, self._psycopg.errors.InsufficientPrivilege) or state == "28":
            return NoAccess(what, advice="Grant the role the missing privilege, or use another role.")
        if isinstance(error, self._psycopg.OperationalError) and state in _NOT_SERVING:
            return Unreachable(what, advice="Check the URL, the server, the role and its password.")
        return InvalidInput(what, advice="Correct the table, or use another table.")


def _with_nul(rows: pa.Table) -> np.ndarray:
    """Which rows have text with a NUL character."""
    found = np.zeros(rows.num_rows, bool)
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if pa.types.is_string(field.type):
            found |= pc.match_substring(column, "\0").fill_null(False).to_numpy()
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
