"""The changelog of a captured SQLite database: triggers write every change into a table of the database itself, in its own transaction.

    "headwater:<source>:source"     id (what was made here, and when it is made anew another), format
    "headwater:<source>:layouts"    layout, tbl, definition (JSON of `SQLiteTable`), gone: what triggers wrote down at what time
    "headwater:<source>:changes"    seq, layout, op, at (Julian day), c0, c1 … the row after the change, behind it the row before
    "headwater:<source>:replaced"   layout, c0, c1 … rows that a statement may be about to replace
    "headwater:<source>:<table>:…"  triggers

Invariants:
- `seq` rises with every change, without gaps, and never goes back: the newest row stays when the others are removed;
- rows of the changelog never change, and are removed from the front only, once they are confirmed. So the greatest `seq` that a reader
  sees lies between two transactions, and what it reads up to there in any number of steps is whole transactions;
- columns of the changelog have no type, so SQLite keeps every value as it is;
- each row says by which layout it was written. When a table changes, its triggers are made anew under the next layout, in one transaction
  with a row `op = 's'` that tells where in the order of changes that was;
- our triggers run before those that others made on the same table (SQLite runs the newest first): a trigger of theirs that writes to
  the same table comes behind the change that fired it.

What REPLACE removes fires no delete trigger (unless the application sets recursive_triggers). The row with the same key is simply
written anew. Rows that are in the way by another unique index are noted before the statement, and, if they are gone behind it, deleted.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from headwater.capture.sqlite.tables import SQLiteTable, text_literal
from headwater.databases.address import quoted
from headwater.model.errors import FormatTooNew

FORMAT = 1
SCHEMA = "s"
"""The op of a row that says how a table looks from here on: c0 is whether it is to be copied again, c1 why it cannot be captured."""

_NOW = "julianday('now')"
_FIXED = ("seq", "layout", "op", "at")


class ChangelogLayout(msgspec.Struct, frozen=True):
    """How rows of the changelog are to be read: the columns of a table as its triggers saw them."""

    number: int
    table: SQLiteTable
    gone: bool = False


class Changelog:
    """The changelog of one source. Whoever calls what writes has begun a transaction and ends it; not thread-safe."""

    def __init__(self, connection: sqlite3.Connection, source: str) -> None:
        self._connection = connection
        self._prefix = f"headwater:{source}:"
        self.changes = quoted(f"{self._prefix}changes")
        self._source = quoted(f"{self._prefix}source")
        self._layouts = quoted(f"{self._prefix}layouts")
        self._replaced = quoted(f"{self._prefix}replaced")

    # Reading

    @property
    def identity(self) -> str | None:
        """What tells this changelog from others; None where there is none."""
        if not self._is_there(f"{self._prefix}source"):
            return None
        identity, format_ = self._connection.execute(f"SELECT id, format FROM {self._source}").fetchone()
        if format_ > FORMAT:
            raise FormatTooNew("The changelog was created by a newer version of Headwater.", advice="Update Headwater.")
        return str(identity)

    def span(self) -> range:
        """The numbers of the changes that are there, from the first to the last; empty where none ever was."""
        first, last = self._connection.execute(f"SELECT min(seq), max(seq) FROM {self.changes}").fetchone()
        return range(0) if last is None else range(first, last + 1)

    def layouts(self) -> dict[int, ChangelogLayout]:
        """All layouts by number, in order."""
        rows = self._connection.execute(f"SELECT layout, definition, gone FROM {self._layouts} ORDER BY layout")
        return {
            number: ChangelogLayout(number, msgspec.json.decode(definition, type=SQLiteTable), bool(gone))
            for number, definition, gone in rows
        }

    def columns(self) -> list[str]:
        """The columns that hold values."""
        names = [row[1] for row in self._connection.execute(f"PRAGMA table_info({self.changes})")]
        return names[len(_FIXED) :]

    def is_intact(self, layout: ChangelogLayout) -> bool:
        """Whether the triggers of a layout are all there as they were made, and run before those of others."""
        found = self._triggers(layout.table.name)
        expected = dict(self._statements(layout))
        if {name: sql for name, sql, _ in found if name in expected} != expected:
            return False
        others = [at for name, _, at in found if not name.startswith("headwater:")]
        return max(others, default=0) < min(at for name, _, at in found if name in expected)

    # Writing

    def make(self) -> str:
        """The tables, empty; where there are some already, their changes and layouts are forgotten. Returns the identity."""
        self.remove()
        run = self._connection.execute
        run(f"CREATE TABLE {self._source} (id TEXT, format INTEGER)")
        run(
            f"CREATE TABLE {self._layouts} (layout INTEGER PRIMARY KEY, tbl TEXT, definition TEXT, gone INTEGER DEFAULT 0)"
        )
        run(f"CREATE TABLE {self.changes} (seq INTEGER PRIMARY KEY, layout, op, at)")
        run(f"CREATE TABLE {self._replaced} (layout)")
        identity = uuid.uuid4().hex
        run(f"INSERT INTO {self._source} VALUES (?, ?)", (identity, FORMAT))
        return identity

    def add(self, table: SQLiteTable) -> ChangelogLayout:
        """Triggers for a table as it is now, under a layout of its own; those it had are removed."""
        run = self._connection.execute
        self.drop_triggers(table.name)
        self._make_room(2 * len(table.columns))
        definition = msgspec.json.encode(table, order="deterministic").decode("utf-8")
        number = run(f"INSERT INTO {self._layouts} (tbl, definition) VALUES (?, ?)", (table.name, definition)).lastrowid
        assert number is not None
        layout = ChangelogLayout(number, table)
        for _, statement in self._statements(layout):
            run(statement)
        return layout

    def tell(self, layout: ChangelogLayout, *, refresh: bool = False, error: str | None = None) -> None:
        """Writes down that from here on a table looks as the layout says; or, with an error, that it cannot be captured."""
        if error is not None:
            self._connection.execute(f"UPDATE {self._layouts} SET gone = 1 WHERE layout = ?", (layout.number,))
        self._connection.execute(
            f"INSERT INTO {self.changes} (layout, op, at, c0, c1) VALUES (?, ?, {_NOW}, ?, ?)",
            (layout.number, SCHEMA, int(refresh), error),
        )

    def write_again(self, layout: ChangelogLayout, old: ChangelogLayout, *, since: int) -> None:
        """Writes down, by the new layout, the rows as they are now whose changes behind `since` only the old one saw."""
        table = layout.table
        rows = ", ".join(f"t.{quoted(column)}" for column in table.columns)
        key = " AND ".join(f"t.{quoted(column)} IS h.c{old.table.columns.index(column)}" for column in table.key)
        count = len(table.columns)
        into = ", ".join(f"c{at}" for at in range(2 * count))
        self._connection.execute(
            f"INSERT INTO {self.changes} (layout, op, at, {into}) SELECT DISTINCT ?, 'u', {_NOW}, {rows}, {rows} "
            f"FROM {self.changes} h JOIN {quoted(table.name)} t ON {key} WHERE h.seq > ? AND h.layout = ? AND h.op IN ('c', 'u')",
            (layout.number, since, old.number),
        )

    def forget(self, position: int) -> None:
        """Removes changes up to here, but for the newest of all: its number must never be given again."""
        self._connection.execute(
            f"DELETE FROM {self.changes} WHERE seq <= ? AND seq < (SELECT max(seq) FROM {self.changes})", (position,)
        )

    def drop_triggers(self, table: str) -> None:
        """Removes our triggers of a table, wherever a renaming has taken them."""
        prefix = f"{self._prefix}{table}:"
        for name in self._names("trigger"):
            if name.startswith(prefix):
                self._connection.execute(f"DROP TRIGGER {quoted(name)}")

    def remove(self) -> None:
        """Removes everything of this source."""
        for kind in ("trigger", "table"):
            for name in self._names(kind):
                self._connection.execute(f"DROP {kind} {quoted(name)}")

    def _names(self, kind: str) -> list[str]:
        rows = self._connection.execute("SELECT name FROM sqlite_master WHERE type = ?", (kind,)).fetchall()
        return [name for (name,) in rows if name.startswith(self._prefix)]

    def _is_there(self, table: str) -> bool:
        return table in self._names("table")

    def _triggers(self, table: str) -> list[tuple[str, str, int]]:
        """Name, statement and age of all triggers of a table."""
        rows = self._connection.execute(
            "SELECT name, sql, rowid FROM sqlite_master WHERE type = 'trigger' AND tbl_name = ?", (table,)
        )
        return rows.fetchall()

    def _make_room(self, count: int) -> None:
        for name in (self.changes, self._replaced):
            there = {row[1] for row in self._connection.execute(f"PRAGMA table_info({name})")}
            for column in (f"c{at}" for at in range(max(2, count))):
                if column not in there:
                    self._connection.execute(f"ALTER TABLE {name} ADD COLUMN {column}")

    def _statements(self, layout: ChangelogLayout) -> Iterator[tuple[str, str]]:
        """Name and statement of each trigger, in the order in which they are made."""
        table = layout.table
        for kind, when, body in self._bodies(layout):
            name = f"{self._prefix}{table.name}:{kind}"
            yield name, f"CREATE TRIGGER {quoted(name)} {when} BEGIN {body} END"

    def _bodies(self, layout: ChangelogLayout) -> Iterator[tuple[str, str, str]]:
        table, on = layout.table, f"ON {quoted(layout.table.name)}"
        new, old = _of("new", table.columns), _of("old", table.columns)
        after = self._insert(layout, "c", new, ())
        deleted = self._insert(layout, "d", (), old)
        same = " AND ".join(f"new.{c} IS old.{c} COLLATE BINARY" for c in map(quoted, table.key))
        if table.uniques:
            yield from self._replacing(layout)
            deleted += f" DELETE FROM {self._replaced} WHERE layout = {layout.number} AND {self._noted(table, 'old')};"
        yield "insert", f"AFTER INSERT {on}", after
        yield "update", f"AFTER UPDATE {on} WHEN {same}", self._insert(layout, "u", new, old)
        yield "rekey", f"AFTER UPDATE {on} WHEN NOT ({same})", f"{self._insert(layout, 'd', (), old)} {after}"
        yield "delete", f"AFTER DELETE {on}", deleted

    def _insert(self, layout: ChangelogLayout, op: str, after: Sequence[str], before: Sequence[str]) -> str:
        count = len(layout.table.columns)
        into = [f"c{at}" for at in range(len(after))] + [f"c{count + at}" for at in range(len(before))]
        values = ", ".join([*after, *before])
        return (
            f"INSERT INTO {self.changes} (layout, op, at, {', '.join(into)}) "
            f"VALUES ({layout.number}, {text_literal(op)}, {_NOW}, {values});"
        )

    def _replacing(self, layout: ChangelogLayout) -> Iterator[tuple[str, str, str]]:
        """Triggers for the rows that REPLACE removes because of another unique index than the key's."""
        table, name = layout.table, quoted(layout.table.name)
        count = len(table.columns)
        clash = " OR ".join(
            "("
            + " AND ".join(f"{quoted(c)} COLLATE {collation} = new.{quoted(c)}" for c, collation in unique.columns)
            + ")"
            for unique in table.uniques
        )
        held = ", ".join(f"c{at}" for at in range(count))
        before = ", ".join(f"c{count + at}" for at in range(count))
        columns = ", ".join(map(quoted, table.columns))
        gone = " AND ".join(f"t.{quoted(c)} IS r.c{table.columns.index(c)}" for c in table.key)
        note_gone = (
            f"INSERT INTO {self.changes} (layout, op, at, {before}) SELECT {layout.number}, 'd', {_NOW}, {held} FROM {self._replaced} r "
            f"WHERE r.layout = {layout.number} AND NOT EXISTS (SELECT 1 FROM {name} t WHERE {gone}); DELETE FROM {self._replaced};"
        )
        watched = dict.fromkeys(column for unique in table.uniques for column, _ in unique.columns)
        of = ", ".join(map(quoted, watched))
        for kind, event, row in (("replace", "INSERT", "new"), ("overwrite", f"UPDATE OF {of}", "old")):
            others = " AND ".join(f"{c} IS {row}.{c}" for c in map(quoted, table.key))
            where = f"({clash}) AND NOT ({others})"
            note = f"DELETE FROM {self._replaced}; INSERT INTO {self._replaced} (layout, {held}) SELECT {layout.number}, {columns} "
            yield (
                kind,
                f"BEFORE {event} ON {name} WHEN EXISTS (SELECT 1 FROM {name} WHERE {where})",
                f"{note} FROM {name} WHERE {where};",
            )
            yield f"{kind}d", f"AFTER {event} ON {name} WHEN EXISTS (SELECT 1 FROM {self._replaced})", note_gone

    def _noted(self, table: SQLiteTable, row: str) -> str:
        return " AND ".join(f"c{table.columns.index(c)} IS {row}.{quoted(c)}" for c in table.key)


def newest(layouts: Mapping[int, ChangelogLayout]) -> dict[str, ChangelogLayout]:
    """The last layout of each table."""
    return {layout.table.name: layout for layout in layouts.values()}


def _of(row: str, columns: Sequence[str]) -> list[str]:
    return [f"{row}.{quoted(column)}" for column in columns]
