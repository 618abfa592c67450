"""The generations of views in an SQL database: made, shown, removed and moved on, in the same statements for each database.

What differs is how a statement marks its parameters, how a table with a key is made, and how a transaction is had.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import msgspec
import pyarrow as pa

from headwater.databases.address import quoted
from headwater.views.changes import KEY
from headwater.views.definition import ViewDefinition
from headwater.views.store import META, Applied, Stored, choose, moved_on, table_name


class SqlGenerations(ABC):
    """The part of a view store that keeps generations; the rest of it says how its database is used."""

    url: str
    _mark: ClassVar[str]
    """What stands for a parameter."""
    _key_type: ClassVar[str]
    _table_ending: ClassVar[str] = ""

    @abstractmethod
    def _changing(self) -> AbstractContextManager[Any]:
        """A transaction that makes or removes tables; one at a time."""

    @abstractmethod
    def _declared_type(self, type_: pa.DataType) -> str:
        """The database's type for a column."""

    def create(self, definition: ViewDefinition) -> None:
        columns = [f"{quoted(KEY)} {self._key_type}"]
        columns += [f"{quoted(field.name)} {self._declared_type(field.type)}" for field in definition.schema]
        with self._changing() as connection:
            found = self._stored(connection, definition.name)
            if any(at.definition.generation == definition.generation for at in found):
                return
            row = (definition.name, definition.generation, definition.to_json(), Applied().to_json())
            marks = ", ".join([self._mark] * len(row))
            connection.execute(
                f"create table {quoted(table_name(definition))} ({', '.join(columns)}){self._table_ending}"
            )
            connection.execute(f"insert into {quoted(META)} values ({marks}, false)", row)

    def show(self, name: str, generation: int) -> None:
        with self._changing() as connection:
            found = choose(self._stored(connection, name), name, generation, self.url)
            if found.current:
                return
            columns = ", ".join(map(quoted, found.definition.schema.names))
            connection.execute(f"drop view if exists {quoted(name)}")
            connection.execute(
                f"create view {quoted(name)} as select {columns} from {quoted(table_name(found.definition))}"
            )
            connection.execute(
                f"update {quoted(META)} set current = (generation = {self._mark}) where name = {self._mark}",
                (generation, name),
            )

    def drop(self, name: str, generation: int) -> None:
        with self._changing() as connection:
            for found in self._stored(connection, name):
                if found.definition.generation == generation and not found.current:
                    connection.execute(f"drop table {quoted(table_name(found.definition))}")
                    connection.execute(
                        f"delete from {quoted(META)} where name = {self._mark} and generation = {self._mark}",
                        (name, generation),
                    )

    def _move_on(self, connection: Any, definition: ViewDefinition, before: Applied, after: Applied) -> None:
        """Says how far a generation follows the log now; `Fenced` where it was not at `before`."""
        place = (definition.name, definition.generation)
        mark = self._mark
        moved = connection.execute(
            f"update {quoted(META)} set applied = {mark}, definition = {mark} "
            f"where name = {mark} and generation = {mark} and applied = {mark}",
            (after.to_json(), definition.to_json(), *place, before.to_json()),
        )
        if moved.rowcount != 1:
            found = [at.applied for at in self._stored(connection, place[0]) if at.definition.generation == place[1]]
            raise moved_on(definition, before, found[0] if found else None)

    def _stored(self, connection: Any, name: str | None = None) -> list[Stored]:
        """The generations of a view, or of all, in the order of names and generations."""
        of_name = "" if name is None else f" where name = {self._mark}"
        found = connection.execute(
            f"select name, generation, definition, applied, current from {quoted(META)}{of_name}",
            () if name is None else (name,),
        )
        return [
            Stored(ViewDefinition.from_json(text), msgspec.json.decode(applied, type=Applied), bool(current))
            for _, _, text, applied, current in sorted(found.fetchall(), key=lambda row: (row[0], row[1]))
        ]
