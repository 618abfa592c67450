"""DuckDB as a sink: `duckdb:///./shop.duckdb?table=users`, for whoever asks the rows in SQL by columns.

Rows go in as Arrow, in DuckDB's own types, nested ones too. A process that has the file open keeps all others out, so it is open only
while a batch is applied. The table has no primary key: DuckDB's index refuses a key that is removed and written in one
transaction; that each key is there once is kept by removing the keys of a batch before its rows are written. DuckDB has no savepoints, so
a row that a check of a table of your own refuses is no dead letter: it stops the stage, with DuckDB's sentence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from headwater.databases.address import parse_address, quoted
from headwater.model.errors import InvalidInput, Unreachable
from headwater.sinks.ledger import TABLE
from headwater.sinks.sink import Refusal
from headwater.sinks.table import TableSink

BUSY_S = 10.0
_LOOK_S = 0.05
_ARRIVING = "headwater_arriving"
_BUSY = (duckdb.IOException, duckdb.ResourceInUseException)
"""Another process has the file, or somebody in this one closes it at this moment."""


class DuckdbSink(TableSink):
    """One table of a DuckDB file."""

    def __init__(self, to: str, *, stage: str) -> None:
        super().__init__(parse_address(to, options=("table",)), stage=stage)
        self._open: Any = None

    def delete(self, keys: pa.Table) -> None:
        with self._told():
            self._with_rows(keys, self._delete_sql())

    def upsert(self, rows: pa.Table) -> Sequence[Refusal]:
        names = ", ".join(map(quoted, rows.schema.names))
        with self._told():
            self._with_rows(
                rows, self._delete_sql(), f"insert into {self.table} ({names}) select {names} from {_ARRIVING}"
            )
        return ()

    def close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def _delete_sql(self) -> str:
        same = " and ".join(f"{self.table}.{quoted(name)} = {_ARRIVING}.{quoted(name)}" for name in self.shape.key)
        return f"delete from {self.table} using {_ARRIVING} where {same}"

    def _with_rows(self, rows: pa.Table, *statements: str) -> None:
        connection = self._connection()
        connection.register(_ARRIVING, rows)
        try:
            for statement in statements:
                connection.execute(statement)
        finally:
            connection.unregister(_ARRIVING)

    def _connection(self) -> Any:
        """The file; whoever else has it is waited for."""
        deadline = time.monotonic() + BUSY_S
        while self._open is None:
            try:
                self._open = _opened(self.address.path)
            except (*_BUSY, duckdb.CatalogException):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_S)
        return self._open

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        connection = self._start()
        try:
            yield connection
        except BaseException:
            self._finish(commits=False)
            raise
        self._finish(commits=True)

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        had = self._open is not None
        try:
            yield self._connection()
        finally:
            if not had:
                self.close()

    def _is_there(self) -> bool:
        return Path(self.address.path).exists()

    def _start(self) -> Any:
        return self._connection().execute("begin")

    def _finish(self, *, commits: bool) -> None:
        try:
            if self._open is not None:
                self._open.execute("commit" if commits else "rollback")
        except duckdb.TransactionException:
            if commits:
                raise
        finally:
            self.close()

    def _columns(self, connection: Any) -> dict[str, str]:
        name = self.address.options.get("table") or self.shape.name
        query = "select column_name, data_type from duckdb_columns() where table_name = ? and not internal"
        return dict(connection.execute(query, (name,)).fetchall())

    def _is_unique(self, connection: Any) -> bool:
        names = ", ".join(map(quoted, self.shape.key))
        twice = f"select 1 from {self.table} group by {names} having count(*) > 1 limit 1"
        return not connection.execute(twice).fetchall()

    def _key_clause(self) -> str:
        return ""

    def _has_ledger(self, connection: Any) -> bool:
        query = "select 1 from duckdb_tables() where table_name = ?"
        return bool(connection.execute(query, (TABLE,)).fetchall())

    def _declared(self, type_: pa.DataType) -> str:
        """As DuckDB itself sees an Arrow column of the type."""
        connection = self._connection()
        connection.register(_ARRIVING, pa.table({"value": pa.array([], type_)}))
        try:
            return str(connection.execute(f"describe {_ARRIVING}").fetchall()[0][1])
        finally:
            connection.unregister(_ARRIVING)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except _BUSY as error:
            said = str(error).splitlines()[0]
            raise Unreachable(
                f"{self.url}: {said}", advice="The sink retries the batch. Close the file in other programs."
            ) from None
        except duckdb.Error as error:
            said = str(error).splitlines()[0]
            raise InvalidInput(f"{self.url}: {said}", advice="Correct the table, or use another table.") from None


def _opened(path: str) -> Any:
    """A connection that can read Arrow: one that is made while another thread opens the file is without that for a moment."""
    opened = duckdb.connect(path)
    try:
        opened.execute("set timezone = 'UTC'")
        opened.register(_ARRIVING, pa.table({"value": pa.array([], pa.int64())}))
        opened.unregister(_ARRIVING)
    except BaseException:
        opened.close()
        raise
    return opened
