"""A table of an SQL database as a sink: what SQLite, DuckDB and PostgreSQL have in common.

    headwater_ledger (stage, number, marker)   one row for each stage that writes to this database
    <table>                                    one row for each key; made where it is missing

A batch is one transaction: it locks the stage's row of the ledger, looks at number and marker, changes rows, and writes the marker. A
table that is there keeps its own columns and types; it needs a unique index on the key, and columns that it lacks are added. Other
columns of it are never touched by an update. What differs (types, how rows travel, which errors mean what) is in the three classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import pyarrow as pa

from headwater.databases.address import DatabaseAddress, quoted
from headwater.model.errors import InvalidInput, Unreachable
from headwater.model.marker import Marker
from headwater.sinks.ledger import NO_ENTRY, TABLE, LedgerEntry, admits, check_unmoved
from headwater.sinks.sink import Refusal, Shape, ShapedSink

_CREATE = f"create table if not exists {TABLE} (stage varchar primary key, number bigint not null, marker varchar)"


class TableSink(ShapedSink):
    """One table, fed by one stage; a kind of database adds what is its own."""

    _mark = "?"
    _lock_row = ""
    _snapshot = "begin"

    def __init__(self, address: DatabaseAddress, *, stage: str) -> None:
        super().__init__(address.shown, stage=stage)
        self.address = address
        self._number = 0
        self._begun = False

    # What a kind of database gives

    @abstractmethod
    def _writing(self) -> AbstractContextManager[Any]:
        """A transaction of its own that changes things."""

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Any]:
        """A connection to read by."""

    def _is_there(self) -> bool:
        """Whether the database is there; a file may have to be made, and nobody but a writer makes it."""
        return True

    @abstractmethod
    def _start(self) -> Any:
        """Begins the transaction of a batch; its connection."""

    @abstractmethod
    def _finish(self, *, commits: bool) -> None:
        """Ends a transaction; one that the database has ended by itself is not missed."""

    @abstractmethod
    def _columns(self, connection: Any) -> dict[str, str]:
        """The columns that the table has, with their types; none where it is missing."""

    @abstractmethod
    def _is_unique(self, connection: Any) -> bool:
        """Whether the table lets each key be there once only."""

    @abstractmethod
    def _declared(self, type_: pa.DataType) -> str:
        """A type as the database writes it."""

    @abstractmethod
    def _told(self) -> AbstractContextManager[None]:
        """The database's errors in our words."""

    @abstractmethod
    def _has_ledger(self, connection: Any) -> bool:
        """Whether the ledger is there."""

    # The sink

    @property
    def table(self) -> str:
        """The table's name in SQL."""
        return quoted(self.address.options.get("table") or self.shape.name)

    def open(self, shape: Shape, *, creates: bool = True) -> None:
        self._shape = shape
        with self._told(), self._writing() as connection:
            connection.execute(_CREATE)
            self._make(connection, creates=creates)
            entry = self._entry(connection, locks=True)
            self._number = entry.number + 1
            self._enter(connection, LedgerEntry(self._number, entry.last))

    def go_on(self, shape: Shape) -> None:
        """Goes on with another table inside a batch, by whose transaction it, or a column of it, is made where it is missing."""
        self._shape = shape
        with self._told():
            connection = self._connection()
            there = self._columns(connection)
            if there:
                self._widen(connection, there)
            else:
                self._create(connection)

    def entry(self) -> LedgerEntry:
        if not self._is_there():
            return NO_ENTRY
        with self._told(), self._reading() as connection:
            return self._entry(connection) if self._has_ledger(connection) else NO_ENTRY

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """A transaction in which everything that is read was true at one moment."""
        if not self._is_there():
            raise Unreachable(
                f"{self.url}: The table or file does not exist.", advice="The first run of the stage creates it."
            )
        with self._told(), self._reading() as connection:
            connection.execute(self._snapshot)
            try:
                yield connection
            finally:
                self._finish(commits=False)

    def entries_in(self, connection: Any) -> dict[str, LedgerEntry]:
        """What the ledger says of every stage, inside a transaction."""
        if not self._has_ledger(connection):
            return {}
        found = connection.execute(f"select stage, number, marker from {TABLE}").fetchall()
        return {stage: _entry_of(number, marker) for stage, number, marker in found}

    def columns_in(self, connection: Any) -> dict[str, str]:
        """The columns that the table has, with their types; none where it is missing."""
        return self._columns(connection)

    def begin(self, marker: Marker) -> bool:
        with self._beginning() as connection:
            self._begun = admits(self.stage, self._entry(connection, locks=True), self._number, marker)
        return self._begun

    def begin_repair(self, marker: Marker | None) -> None:
        with self._beginning() as connection:
            entry = self._entry(connection, locks=True) if self._has_ledger(connection) else NO_ENTRY
            check_unmoved(self.stage, entry, marker)
            self._begun = True

    def commit(self, marker: Marker | None) -> None:
        with self._told():
            if marker is not None:
                self._enter(self._connection(), LedgerEntry(self._number, marker))
            self._finish(commits=True)
            self._begun = False

    def rollback(self) -> None:
        if self._begun:
            self._begun = False
            with self._told():
                self._finish(commits=False)

    def accept_new_checkpoint(self) -> Marker | None:
        if not self._is_there():
            return None
        with self._told(), self._writing() as connection:
            if not self._has_ledger(connection):
                return None
            entry = self._entry(connection, locks=True)
            self._enter(connection, LedgerEntry(entry.number + 1, None))
            return entry.last

    @abstractmethod
    def upsert(self, rows: pa.Table) -> Sequence[Refusal]:
        """Writes rows in the place of what their keys had; those that it refuses."""

    @abstractmethod
    def delete(self, keys: pa.Table) -> None:
        """Removes the rows of keys."""

    @abstractmethod
    def close(self) -> None:
        """Frees connections."""

    # Parts

    @abstractmethod
    def _connection(self) -> Any:
        """The connection of the batch that is begun."""

    @contextmanager
    def _beginning(self) -> Iterator[Any]:
        with self._told():
            connection = self._start()
            try:
                yield connection
            finally:
                if not self._begun:
                    self._finish(commits=False)

    def _make(self, connection: Any, *, creates: bool) -> None:
        """The table with the columns that are written, and one row for each key; `creates`: also where there is none."""
        there = self._columns(connection)
        if not there:
            if creates:
                self._create(connection)
            return
        self._widen(connection, there)
        if not self._is_unique(connection):
            raise InvalidInput(
                f"{self.url}: Table {self.table} has no unique index over its key ({', '.join(self.shape.key)}).",
                advice=f"Run: CREATE UNIQUE INDEX {quoted(f'{self.shape.name}_key')} ON {self.table} "
                f"({', '.join(map(quoted, self.shape.key))}).",
            )

    def _widen(self, connection: Any, there: Collection[str]) -> None:
        for field in self.shape.schema:
            if field.name not in there:
                added = f"{quoted(field.name)} {self._declared(field.type)}"
                connection.execute(f"alter table {self.table} add column {added}")

    def _create(self, connection: Any) -> None:
        columns = [f"{quoted(field.name)} {self._declared(field.type)}" for field in self.shape.schema]
        connection.execute(f"create table {self.table} ({', '.join(columns)}{self._key_clause()})")

    def _key_clause(self) -> str:
        return f", primary key ({', '.join(map(quoted, self.shape.key))})"

    def _entry(self, connection: Any, *, locks: bool = False) -> LedgerEntry:
        query = f"select number, marker from {TABLE} where stage = {self._mark}{self._lock_row if locks else ''}"
        found = connection.execute(query, (self.stage,)).fetchall()
        if not found:
            return NO_ENTRY
        ((number, marker),) = found
        return _entry_of(number, marker)

    def _enter(self, connection: Any, entry: LedgerEntry) -> None:
        mark = self._mark
        named = None if entry.last is None else msgspec.structs.replace(entry.last, stage=self.stage)
        text = None if named is None else named.canonical().decode()
        connection.execute(
            f"insert into {TABLE} (stage, number, marker) values ({mark}, {mark}, {mark}) "
            "on conflict (stage) do update set number = excluded.number, marker = excluded.marker",
            (self.stage, entry.number, text),
        )

    def _upsert_sql(self, source: str) -> str:
        """Rows of `source` in place of what their keys had."""
        names = [quoted(name) for name in self.shape.schema.names]
        key = [quoted(name) for name in self.shape.key]
        others = [name for name in names if name not in key]
        changes = ", ".join(f"{name} = excluded.{name}" for name in others)
        then = f"update set {changes}" if others else "nothing"
        return f"insert into {self.table} ({', '.join(names)}) {source} on conflict ({', '.join(key)}) do {then}"


def _entry_of(number: int, marker: str | None) -> LedgerEntry:
    return LedgerEntry(number, None if marker is None else Marker.from_canonical(marker.encode()))
