"""How the columns of captured tables change: what the runner is told when the stream, or the catalog, shows other ones.

PostgreSQL describes a table in the stream before its first change after a DDL statement, not at the statement. Values that a statement
put into rows that are there already are in no change at all: a column with a default, a renamed one, one of another type, a generated one.
Then the table is to be copied again (`refresh`). A column that was dropped, or added empty, needs nothing. A statement behind which the
table is not written to is found by `look`, which compares the catalog now and then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import pyarrow as pa

from headwater.capture.postgres.connection import PostgresDatabase
from headwater.capture.postgres.pgoutput import Relation
from headwater.capture.postgres.tables import FULL, CapturedPgTable, PgColumn, PgTable, Types, key_of, read_tables
from headwater.capture.source import TableChange
from headwater.model.errors import NotCapturable


class TableDifference(NamedTuple):
    """A table that is not as the runner knows it: what to tell, how it is captured from here on (None: not at all)."""

    change: TableChange
    captured: CapturedPgTable | None
    unidentified: bool = False
    """Whether PostgreSQL refuses the application's UPDATEs as long as the table is published."""


class TableFollower:
    """Compares tables with what the runner knows of them."""

    def __init__(self, database: PostgresDatabase, types: Types) -> None:
        self._database = database
        self._types = types

    def follow(self, relation: Relation, known: CapturedPgTable) -> TableDifference | None:
        """What the stream's description changes, if anything."""
        sent = [(column.name, column.type, column.modifier) for column in relation.columns]
        named = (relation.namespace, relation.name) == (known.table.namespace, known.table.name)
        if named and sent == _stored(known.table) and _same_key(relation, known):
            return None
        now = {table.oid: table for table in read_tables(self._database).values()}.get(relation.oid)
        catalog = {column.name: column for column in now.columns} if now else {}
        columns = [_as_sent(PgColumn(*column), catalog.get(column[0])) for column in sent]
        columns += [column for column in catalog.values() if column.generated]
        table = msgspec.structs.replace(
            known.table, namespace=relation.namespace, name=relation.name, columns=tuple(columns)
        )
        if not _same_key(relation, known):
            key = [column.name for column in relation.columns if column.key]
            return TableDifference(_other_key(known, key), None)
        return self._difference(known, table)

    def look(self, captured: Mapping[int, CapturedPgTable]) -> dict[int, TableDifference]:
        """What the catalog has changed, by the oid of the table."""
        now = {table.oid: table for table in read_tables(self._database).values()}
        found = {}
        for oid, known in captured.items():
            table = now.get(oid)
            if table is None:
                error = f"Table {known.info.name} was dropped in the database. Remove the table from the capture. Its topics stay."
                found[oid] = TableDifference(TableChange(table=known.info, error=error), None)
                continue
            try:
                key = key_of(table, known.info.key if table.identity == FULL else ())
            except NotCapturable as error:
                change = TableChange(table=known.info, error=str(error))
                found[oid] = TableDifference(change, None, unidentified=True)
                continue
            if set(key) != set(known.info.key):
                found[oid] = TableDifference(_other_key(known, list(key)), None)
            elif _every(table) != _every(known.table):
                found[oid] = self._difference(known, table)
        return found

    def _difference(self, known: CapturedPgTable, table: PgTable) -> TableDifference:
        self._types.learn((column.type for column in table.columns), again=True)
        fields = [pa.field(column.name, self._types.of(column.type, column.modifier).arrow) for column in table.columns]
        info = msgspec.structs.replace(known.info, schema=pa.schema(fields))
        change = TableChange(table=info, refresh=_needs_refresh(known.table, table))
        return TableDifference(change, CapturedPgTable(info, table))


def _needs_refresh(before: PgTable, after: PgTable) -> bool:
    """Whether rows that nobody has written to are different."""
    old, new = {c.name: c for c in before.columns}, {c.name: c for c in after.columns}
    added, removed = new.keys() - old.keys(), old.keys() - new.keys()
    if added and removed:  # perhaps the same column under another name
        return True
    if any(new[name].filled or new[name].generated for name in added):
        return True
    kept = new.keys() & old.keys()
    return any(
        old[name].type != new[name].type or (new[name].generated and old[name].expression != new[name].expression)
        for name in kept
    )


def _same_key(relation: Relation, known: CapturedPgTable) -> bool:
    """Whether the stream still identifies rows by the columns that are the topic's key."""
    sent = {column.name for column in relation.columns if column.key}
    return set(known.info.key) <= sent if relation.identity == FULL else set(known.info.key) == sent


def _other_key(known: CapturedPgTable, key: list[str]) -> TableChange:
    text = f"The key of table {known.info.name} changed from ({', '.join(known.info.key)}) to ({', '.join(key)})."
    advice = "The key of a topic cannot change: remove the capture, delete its topics, and capture the table again."
    return TableChange(table=known.info, error=f"{text} {advice}")


def _as_sent(sent: PgColumn, catalog: PgColumn | None) -> PgColumn:
    """A column as the stream has it, with what only the catalog knows."""
    if catalog is None:
        return sent
    return msgspec.structs.replace(catalog, name=sent.name, type=sent.type, modifier=sent.modifier)


def _stored(table: PgTable) -> list[tuple[str, int, int]]:
    return [(column.name, column.type, column.modifier) for column in table.columns if not column.generated]


def _every(table: PgTable) -> tuple[str, str, list[tuple[str, int, int, str | None]]]:
    columns = [(c.name, c.type, c.modifier, c.expression if c.generated else None) for c in table.columns]
    return table.namespace, table.name, columns
