"""A rig for captures of SQLite: a database, a log, and a capture that is brought up whenever a test asks how things are."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headwater.capture.capture import Capture
from headwater.capture.source_url import open_source
from headwater.log.log import Log, open_log

USERS = "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, amount REAL, data BLOB, is_new BOOLEAN)"


class Rig:
    """One database and one log; the oracle asks SQLite itself."""

    def __init__(self, folder: Path, *statements: str, options: str = "", **settings: Any) -> None:
        self.path = folder / "shop.db"
        self.database = sqlite3.connect(self.path, isolation_level=None)
        self.database.execute("PRAGMA journal_mode = wal")
        self.run(*statements)
        self.log: Log = open_log(folder / "log", durability="os")
        self.url = f"sqlite:///{self.path}{options}"
        self.settings = settings
        self.capture = self.open()

    def open(self, *, tables: list[str] | None = None, key: Any = None, **settings: Any) -> Capture:
        """A capture, open; it takes the place of the one before."""
        source = open_source(self.url, tables, key=key)
        self.capture = Capture(self.log, source, partitions=2, **{**self.settings, **settings})
        self.capture.open()
        return self.capture

    def run(self, *statements: str) -> None:
        """Each statement is a transaction of its own, unless they begin one."""
        for statement in statements:
            self.database.execute(statement)

    def table(self, name: str, *, up: bool = True) -> list[dict[str, Any]]:
        """The rows of a topic's table in the columns that the database has."""
        if up:
            self.capture.catch_up()
        columns = [row[1] for row in self.database.execute(f"PRAGMA table_xinfo({name})")]
        return sorted(self.log.table(name).select(columns).to_pylist(), key=str)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of the database."""
        cursor = self.database.execute(f"SELECT * FROM {name}")
        names = [column[0] for column in cursor.description]
        return sorted((dict(zip(names, row, strict=True)) for row in cursor), key=str)

    def assert_same(self, *names: str) -> None:
        """The log's tables are the database's."""
        for name in names:
            assert self.table(name) == self.rows(name), name

    def history(self, name: str) -> list[dict[str, Any]]:
        """All changes of a table, in the order of the source; those of a backfill come first."""
        self.capture.catch_up()
        events = self.log.read(f"{name}.changes").to_pylist()
        return sorted(events, key=lambda event: (event["position"], event["transaction_order"] or 0))

    def ops(self, name: str) -> list[tuple[str, Any, Any]]:
        """Op, before and after of the changes that followed the backfill."""
        return [(e["op"], e["before"], e["after"]) for e in self.history(name) if e["op"] != "r"]

    def objects(self) -> list[str]:
        """What is in the database's schema."""
        return [name for (name,) in self.database.execute("SELECT name FROM sqlite_master ORDER BY name")]

    def state(self, table: str) -> str:
        """What the capture says of a table."""
        self.capture.catch_up()
        return self.capture.progress.tables[table].state

    def close(self) -> None:
        """Frees everything."""
        self.capture.close()
        self.log.close()
        self.database.close()


Make = Callable[..., Rig]


def rigs(folder: Path) -> Iterator[Make]:
    """Makes rigs in a folder, with a table of users unless told, for a module's fixture."""
    made: list[Rig] = []

    def make(*statements: str, **settings: Any) -> Rig:
        made.append(Rig(folder, *(statements or (USERS,)), **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
