"""An SQLite database as a capture source: triggers write down what any program changes, and this reads it.

Other programs need not know of the capture: the triggers run in their own transactions, wherever they write from. The capture looks at
`PRAGMA data_version`, which costs a few microseconds, and reads when it has changed. It writes itself only to make triggers anew when a
table was altered, and to remove what was confirmed; both are short, and the latter waits for a moment when nobody else writes.

A transaction is told as described in `sqlite.changes`. The invariants of the changelog stand in `changelog`.

Not thread-safe, except `lag`, which has a connection of its own.
"""

from __future__ import annotations

import base64
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from headwater.capture.source import BackfillChunk, CaptureSource, Changes, SourceLag, SourceTable
from headwater.capture.source_url import SourceUrl
from headwater.capture.sqlite.changelog import Changelog, ChangelogLayout, newest
from headwater.capture.sqlite.changes import Telling, fetch_columns, misfit_text, position_of, read_rows
from headwater.capture.sqlite.errors import locked_is_fine, translated
from headwater.capture.sqlite.tables import SQLiteTable, read_table, table_names
from headwater.capture.sqlite.values import KeyMisfit
from headwater.databases.address import quoted
from headwater.model.errors import CaptureLost, NoAccess, NotCapturable, NotFound

BUSY_S = 10.0
"""How long to wait for another program that writes."""

CHANGES_ROWS = 50_000
CHUNK_ROWS = 50_000
BYTES_MAX = 32 << 20
FORGET_ROWS = 10_000
FORGET_S = 5.0
GATHER_S = 0.02
"""How long changes gather while programs write more than one at a time: each append syncs files on a disk that they may wait for, too."""

_QUICK_S, _SLOW_S = 0.001, 0.005
_QUICK_FOR_S = 2.0


def source_of(url: SourceUrl, *, name: str, keys: Mapping[str, tuple[str, ...]]) -> CaptureSource:
    """The database in a file."""
    return SQLiteSource(url, name=name, keys=keys)


class SQLiteSource:
    """One SQLite file; see the module."""

    def __init__(self, url: SourceUrl, *, name: str, keys: Mapping[str, Sequence[str]] | None = None) -> None:
        self.name = name
        self.url = msgspec.structs.replace(url, path=os.path.abspath(url.path)).shown
        self.identity = ""
        self.left_out: dict[str, str] = {}
        self._path = Path(url.path)
        self._chosen = url.tables
        self._keys = dict(keys or {})
        self._replaces = url.options.get("replace") != "never"
        self._held: sqlite3.Connection | None = None
        self._layouts: dict[int, ChangelogLayout] = {}
        self._telling = Telling()
        self._boundary = self._confirmed = 0
        self._data_version = self._schema_version = -1
        self._counts: dict[str, int] = {}
        self._active_at = self._forgot_at = 0.0
        self._is_busy = False
        """Whether more than one change had come when some were last read."""

    # What the runner calls

    def check(self) -> list[SourceTable]:
        """The tables, by the names that were given, or all that can be captured; `left_out` says why others cannot."""
        with translated(self._path):
            return [table.info() for table in self._tables()]

    def prepare(self, resume: str | None) -> str:
        """Makes the changelog and the triggers, or finds them; what altered a table meanwhile is followed."""
        with translated(self._path):
            tables = self._tables()
            with self._writing():
                changelog = self._changelog
                begin = self._begin(resume)
                layouts = newest(changelog.layouts())
                for name in layouts.keys() - {table.name for table in tables}:
                    changelog.drop_triggers(name)
                for table in tables:
                    if table.name not in layouts:
                        changelog.add(table)
                self._follow(since=begin)
                self.identity = changelog.identity or ""
            self._telling = Telling()
            self._boundary = self._confirmed = begin
            self._data_version = -1
            return position_of(begin)

    def changes(self, after: str, *, timeout_s: float) -> Changes | None:
        """Up to `CHANGES_ROWS` changes behind a position."""
        number, deadline = int(after), time.monotonic() + timeout_s
        if self._is_busy and number >= self._boundary:
            time.sleep(max(0.0, min(self._active_at + GATHER_S, deadline) - time.monotonic()))
        with translated(self._path):
            while True:
                if number >= self._boundary:
                    self._look()
                if number < self._boundary:
                    self._active_at = time.monotonic()
                    self._is_busy = self._boundary - number > 1
                    return self._read(number)
                now = time.monotonic()
                if now >= deadline:
                    return None
                pause_s = _QUICK_S if now - self._active_at < _QUICK_FOR_S else _SLOW_S
                time.sleep(min(pause_s, max(0.0, deadline - now)))

    def chunk(self, table: str, done: Any | None, *, position: str) -> BackfillChunk:
        """Up to `CHUNK_ROWS` rows in the order of their keys; none where the table was altered, which `changes` tells first."""
        layout = newest(self._layouts)[table]
        with translated(self._path), self._reading() as connection:
            at = position_of(self._last())
            if self._schema_now() != self._schema_version:
                return BackfillChunk(
                    rows=layout.table.schema.empty_table(), done=done, last=False, after=position, until=position
                )
            if done is None or table not in self._counts:
                count = connection.execute(f"SELECT count(*) FROM {quoted(table)}").fetchone()
                self._counts[table] = int(count[0])
            columns = self._fetch(*_chunk_query(layout.table, done))
        try:
            rows = read_rows(columns or [[] for _ in layout.table.columns], layout.table)
        except KeyMisfit as error:
            raise NotCapturable(misfit_text(table, error)) from None
        copied = (done["rows"] if done else 0) + rows.num_rows
        keys = (
            [_to_json(columns[layout.table.columns.index(column)][-1]) for column in layout.table.key]
            if columns
            else []
        )
        return BackfillChunk(
            rows=rows,
            done={"key": keys or (done or {}).get("key"), "rows": copied},
            last=not columns,
            after=at,
            until=at,
            fraction=1.0 if not columns else min(1.0, copied / max(1, self._counts[table])),
        )

    def confirm(self, position: str) -> None:
        """Removes what was confirmed, some at a time, whenever nobody else writes."""
        confirmed, now = int(position), time.monotonic()
        if confirmed - self._confirmed < FORGET_ROWS and now - self._forgot_at < FORGET_S:
            return
        self._forgot_at = now
        with translated(self._path), locked_is_fine():
            first = self._changelog.span().start
            for upto in range(first + FORGET_ROWS, confirmed + FORGET_ROWS, FORGET_ROWS):
                with self._writing(waits=False):
                    self._changelog.forget(min(upto, confirmed))
            self._confirmed = confirmed

    def heartbeat(self) -> None:
        """Nothing to do: what is not there keeps nothing from being forgotten."""

    def lag(self, position: str | None = None) -> SourceLag:
        """The changes behind a position, and the age of the oldest."""
        after = self._boundary if position is None else int(position)
        with translated(self._path), closing(self._connect()) as connection:
            changelog = Changelog(connection, self.name)
            if changelog.identity is None:
                return SourceLag()
            oldest = connection.execute(
                f"SELECT (julianday('now') - at) * 86400 FROM {changelog.changes} WHERE seq > ? ORDER BY seq LIMIT 1",
                (after,),
            ).fetchone()
            behind = max(0, changelog.span().stop - 1 - after)
            return SourceLag(rows=behind, seconds=max(0.0, oldest[0]) if oldest else 0.0)

    def remove(self) -> None:
        """Triggers and changelog, whole, in one transaction."""
        with translated(self._path), self._writing():
            self._changelog.remove()

    def close(self) -> None:
        """Closes the connection."""
        held, self._held = self._held, None
        if held is not None:
            held.close()

    # Tables

    def _tables(self) -> list[SQLiteTable]:
        connection = self._connection
        if self._chosen:
            return [read_table(connection, name, self._keys, replaces=self._replaces) for name in self._chosen]
        found, self.left_out = [], {}
        for name in table_names(connection):
            try:
                found.append(read_table(connection, name, self._keys, replaces=self._replaces))
            except NotCapturable as error:
                self.left_out[name] = str(error)
        if not found:
            why = " ".join(self.left_out.values()) or "Create a table first."
            raise NotCapturable(f"{self._path} has no table that can be captured.", advice=why)
        return found

    def _begin(self, resume: str | None) -> int:
        """The number behind which this capture reads; a changelog that is not there yet, or not for us, is made."""
        changelog = self._changelog
        if resume is None:
            if changelog.identity is None:
                changelog.make()
            return self._last()
        if changelog.identity is None:
            raise CaptureLost(
                f"The database {self._path} no longer has the changelog of source {self.name!r}.",
                advice="The changes since then are lost. Start the capture with --backfill-again: it copies the tables "
                "again and removes deleted rows.",
            )
        span = changelog.span()
        if int(resume) > self._last() or span.start > int(resume) + 1:
            raise CaptureLost(
                f"{self._path} has changes {span.start} to {self._last()} of source {self.name!r}, but the log has "
                f"the changes up to {int(resume)}.",
                advice="The database or the log was restored from an earlier copy. Start the capture with --backfill-again: "
                "it copies the tables again and removes deleted rows.",
            )
        return int(resume)

    def _follow(self, *, since: int) -> None:
        """Makes the triggers fit the tables as they are; changes behind `since` may have been written by triggers that did not."""
        changelog = self._changelog
        for name, layout in newest(changelog.layouts()).items():
            if self._chosen and name not in self._chosen:
                continue
            try:
                table = read_table(self._connection, name, self._keys, replaces=self._replaces)
            except NotCapturable as error:
                if not layout.gone:
                    changelog.drop_triggers(name)
                    changelog.tell(layout, error=str(error))
                continue
            intact = not layout.gone and changelog.is_intact(layout)
            if intact and table == layout.table:
                continue
            added = intact and _only_added(layout.table, table)
            made = changelog.add(table)
            changelog.tell(made, refresh=not added)
            if added:
                changelog.write_again(made, layout, since=since)
        self._layouts = changelog.layouts()
        self._schema_version = self._schema_now()

    # Reading

    def _look(self) -> None:
        """Moves the boundary to the newest change, if any other program has written since the last look."""
        version = self._connection.execute("PRAGMA data_version").fetchone()[0]
        if version == self._data_version:
            return
        with self._reading():
            schema, last = self._schema_now(), self._last()
        if schema != self._schema_version:
            with self._writing():
                self._follow(since=self._boundary)
                last = self._last()
        self._boundary, self._data_version = max(self._boundary, last), version

    def _read(self, after: int) -> Changes:
        changelog = self._changelog
        wanted = 2 * max(len(layout.table.columns) for layout in self._layouts.values())
        names = ", ".join(["seq", "layout", "op", "at", *(f"c{at}" for at in range(max(2, wanted)))])
        query = f"SELECT {names} FROM {changelog.changes} WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
        columns = self._fetch(query, (after, self._boundary, CHANGES_ROWS))
        return self._telling.tell(columns, self._layouts, end=self._boundary)

    def _fetch(self, query: str, values: tuple[Any, ...]) -> list[list[Any]]:
        """The answer as columns; text that is no UTF-8 keeps its bytes as lone surrogates."""
        connection = self._connection
        try:
            return fetch_columns(connection.execute(query, values), bytes_max=BYTES_MAX)
        except sqlite3.OperationalError as error:
            if "UTF-8" not in str(error):
                raise
        connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
        try:
            return fetch_columns(connection.execute(query, values), bytes_max=BYTES_MAX)
        finally:
            connection.text_factory = str

    def _last(self) -> int:
        return max(0, self._changelog.span().stop - 1)

    def _schema_now(self) -> int:
        return int(self._connection.execute("PRAGMA schema_version").fetchone()[0])

    # Connections

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._held is None:
            self._held = self._connect()
        return self._held

    @property
    def _changelog(self) -> Changelog:
        return Changelog(self._connection, self.name)

    def _connect(self) -> sqlite3.Connection:
        if not self._path.is_file():
            raise NotFound(f"The database {self._path} does not exist.", advice="Use the path of an existing database.")
        if not (os.access(self._path, os.W_OK) and os.access(self._path.absolute().parent, os.W_OK)):
            raise NoAccess(
                f"{self._path} or its folder is read-only, but a capture creates triggers in the database.",
                advice="Run the capture as a user with write access to the file and its folder.",
            )
        url = f"file:{quote(str(self._path.absolute()))}?mode=rw"
        return sqlite3.connect(url, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Everything inside is read at one moment."""
        connection = self._connection
        connection.execute("BEGIN")
        try:
            yield connection
        finally:
            connection.execute("ROLLBACK")

    @contextmanager
    def _writing(self, *, waits: bool = True) -> Iterator[None]:
        """Everything inside is written together, or not at all."""
        connection = self._connection
        connection.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000) if waits else 0}")
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
        finally:
            connection.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")


def _only_added(old: SQLiteTable, new: SQLiteTable) -> bool:
    """Whether a table has only got new columns, all null so far: rows that nobody touched are as they were."""
    count = len(old.columns)
    same = (old.columns, old.declared, old.key, old.uniques) == (
        new.columns[:count],
        new.declared[:count],
        new.key,
        new.uniques,
    )
    return same and len(new.columns) > count and not set(new.columns[count:]) & new.defaults


def _chunk_query(table: SQLiteTable, done: Any | None) -> tuple[str, tuple[Any, ...]]:
    key = ", ".join(map(quoted, table.key))
    columns = ", ".join(map(quoted, table.columns))
    values = tuple(_from_json(value) for value in done["key"]) if done and done["key"] else ()
    behind = f"WHERE ({key}) > ({', '.join('?' * len(values))})" if values else ""
    return f"SELECT {columns} FROM {quoted(table.name)} {behind} ORDER BY {key} LIMIT {CHUNK_ROWS}", values


def _to_json(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode("ascii")} if isinstance(value, bytes) else value


def _from_json(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value
