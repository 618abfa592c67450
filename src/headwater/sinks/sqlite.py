"""SQLite as a sink: `sqlite:///./shop.db?table=users`.

Values are stored as views store theirs (`headwater.databases.sqlite_types`): times as microseconds, decimals as their digits. A file
that is made here gets a write-ahead log, so readers and the writer do not wait for each other; every commit is synced, because the
checkpoint goes on by it. Other programs may write to the same file: a busy one is waited for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from headwater.databases.address import parse_address, quoted
from headwater.databases.sqlite_types import declared_type, to_values
from headwater.model.errors import InvalidInput, NoAccess, Unreachable
from headwater.sinks.ledger import TABLE
from headwater.sinks.sink import Refusal, refused_rows
from headwater.sinks.table import TableSink

BUSY_S = 30.0

_POINT = "headwater_rows"


class SqliteSink(TableSink):
    """One table of a SQLite file."""

    def __init__(self, to: str, *, stage: str) -> None:
        super().__init__(parse_address(to, options=("table",)), stage=stage)
        self._open: sqlite3.Connection | None = None

    def delete(self, keys: pa.Table) -> None:
        where = " and ".join(f"{quoted(name)} = ?" for name in self.shape.key)
        with self._told():
            self._connection().executemany(f"delete from {self.table} where {where}", _rows(keys))

    def upsert(self, rows: pa.Table) -> Sequence[Refusal]:
        marks = ", ".join("?" for _ in rows.schema)
        statement = self._upsert_sql(f"values ({marks})")
        values = _rows(rows)
        connection = self._connection()

        def attempt(start: int, end: int) -> str | None:
            connection.execute(f"savepoint {_POINT}")
            try:
                connection.executemany(statement, values[start:end])
            except (sqlite3.IntegrityError, sqlite3.DataError, OverflowError) as error:
                if not connection.in_transaction:  # a trigger has ended all of it
                    raise
                connection.execute(f"rollback to {_POINT}")
                connection.execute(f"release {_POINT}")
                return f"SQLite: {error}"
            connection.execute(f"release {_POINT}")
            return None

        with self._told():
            return list(refused_rows(len(values), attempt))

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def _connection(self) -> sqlite3.Connection:
        if self._open is None:
            path = Path(self.address.path)
            is_new = not path.exists()
            self._open = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            if is_new:
                self._open.execute("pragma journal_mode = wal")
            self._open.execute("pragma synchronous = full")
        return self._open

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        connection = self._start()
        try:
            yield connection
            connection.execute("commit")
        except BaseException:
            self._finish(commits=False)
            raise

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        yield self._connection()

    def _is_there(self) -> bool:
        return Path(self.address.path).exists()

    def _start(self) -> sqlite3.Connection:
        connection = self._connection()
        connection.execute("begin immediate")
        return connection

    def _finish(self, *, commits: bool) -> None:
        if self._connection().in_transaction:
            self._connection().execute("commit" if commits else "rollback")

    def _columns(self, connection: Any) -> dict[str, str]:
        return {row[1]: row[2] for row in connection.execute(f"pragma table_info({self.table})")}

    def _is_unique(self, connection: Any) -> bool:
        key = set(self.shape.key)
        primary = {row[1] for row in connection.execute(f"pragma table_info({self.table})") if row[5]}
        if primary == key:
            return True
        indexes = [row[1] for row in connection.execute(f"pragma index_list({self.table})") if row[2] and not row[4]]
        return any({row[2] for row in connection.execute(f"pragma index_info({quoted(i)})")} == key for i in indexes)

    def _has_ledger(self, connection: Any) -> bool:
        return bool(connection.execute("select 1 from sqlite_master where name = ?", (TABLE,)).fetchall())

    def _declared(self, type_: pa.DataType) -> str:
        return declared_type(type_)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            said = str(error)
            if "locked" in said or "busy" in said or "disk" in said:
                raise Unreachable(
                    f"{self.url}: {said}.", advice="The sink retries the batch. Stop the other writer."
                ) from None
            if "readonly" in said or "unable to open" in said:
                raise NoAccess(
                    f"{self.url}: {said}.", advice="Check the folder and the permissions of the file."
                ) from None
            raise InvalidInput(f"{self.url}: {said}.", advice="Correct the table, or use another table.") from None
        except sqlite3.DatabaseError as error:
            raise InvalidInput(f"{self.url}: {error}.", advice="Pass an SQLite file.") from None


def _rows(rows: pa.Table) -> list[tuple[Any, ...]]:
    """The rows as SQLite's client takes them."""
    columns = [to_values(column.combine_chunks()) for column in rows.columns]
    return list(zip(*columns, strict=True))
