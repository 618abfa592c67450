"""A storm over a captured SQLite database: clients write and alter tables while the capture is killed, at a named step or anywhere.

The oracle is the database itself, asked with plain SQL, and its changelog, which a storm can keep from being removed. Money moves between
`accounts` and `transfers` in transactions that touch both and never changes in sum, so half a transaction would show.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from headwater.capture import events
from headwater.capture.capture import Capture
from headwater.capture.source_url import open_source
from headwater.capture.sqlite import source as sqlite
from headwater.log.log import Log, open_log
from headwater.testing.crash.points import kill_at
from tests.rigs.children import Child

TABLES = ("accounts", "tags", "transfers")
KEYS = {"accounts": ("id",), "tags": ("k",), "transfers": ("a", "n")}


def make_database(path: Path, rows: int, *, mode: str = "wal") -> None:
    """The tables, with rows for a backfill."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        run = connection.execute
        run(f"PRAGMA journal_mode = {mode}")
        run(
            "CREATE TABLE accounts (id INTEGER PRIMARY KEY, owner TEXT, balance INTEGER NOT NULL, note TEXT, data BLOB)"
        )
        run("CREATE TABLE transfers (a TEXT, n INTEGER, amount INTEGER, PRIMARY KEY (a, n)) WITHOUT ROWID")
        run("CREATE TABLE tags (k TEXT PRIMARY KEY NOT NULL, name TEXT UNIQUE, v REAL, done BOOLEAN)")
        run("BEGIN")
        connection.executemany(
            "INSERT INTO accounts VALUES (?, ?, 100, ?, ?)",
            [(number, f"owner {number}", None if number % 3 else "note", os.urandom(9)) for number in range(rows)],
        )
        connection.executemany(
            "INSERT INTO tags VALUES (?, ?, ?, ?)", [(f"k{n}", f"name {n}", n / 4, n % 2) for n in range(rows // 4)]
        )
        run("COMMIT")


def write(path: str, seed: int, transactions: int, *, ddl: bool, pause_s: float = 0.0) -> None:
    """One client: random transactions, some of which alter a table."""
    chance = random.Random(seed)
    with closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as connection:
        connection.execute("PRAGMA synchronous = off")
        for number in range(transactions):
            connection.execute("BEGIN IMMEDIATE")
            for _ in range(chance.randrange(1, 4)):
                chance.choice((_transfer, _transfer, _note, _open_account, _close_account, _rename_account, _tag))(
                    connection, chance, f"{seed}-{number}"
                )
            if ddl and chance.random() < 0.02:
                _alter(connection, chance)
            connection.execute("COMMIT" if chance.random() < 0.95 else "ROLLBACK")
            if pause_s:
                time.sleep(chance.random() * pause_s)


def capture_until_killed(path: str, folder: str, *, die_at: str = "", die_on: int = 1, forget: bool = True) -> None:
    """Captures for ever, in small pieces; kills itself when it reaches a point for the n-th time."""
    live(folder, lambda log: open_capture(log, path, forget=forget), die_at=die_at, die_on=die_on)


def live(folder: str, make: Callable[[Log], Capture], *, die_at: str = "", die_on: int = 1) -> None:
    """One life of a capture of any database."""
    kill_at(die_at, die_on)
    with open_log(folder, durability="os") as log:
        make(log).run(threading.Event())


def open_capture(log: Log, path: str | Path, *, forget: bool = True) -> Capture:
    """A capture that works in small pieces, so that a test comes by everywhere."""
    sqlite.CHUNK_ROWS, sqlite.CHANGES_ROWS, events.SPILL_BYTES = 150, 100, 0
    sqlite.FORGET_ROWS, sqlite.FORGET_S = (50, 0.0) if forget else (1 << 40, 1e9)
    return Capture(log, open_source(f"sqlite:///{path}"), partitions=2, heartbeat_s=0.05)


def run_until_killed(
    path: Path, folder: Path, *, after_s: float | None, die_at: str = "", die_on: int = 1, forget: bool
) -> None:
    """One life of the capture."""
    child = Child(lambda: capture_until_killed(str(path), str(folder), die_at=die_at, die_on=die_on, forget=forget))
    await_death(child, after_s=after_s)


def await_death(child: Child[None], *, after_s: float | None) -> None:
    """Kills a child after a while, unless it kills itself; any other end is a failure."""
    if after_s is not None:
        time.sleep(after_s)
        child.kill()
    child.was_killed(timeout_s=30)


# The oracle


def check(path: Path, folder: Path, *, has_changelog: bool) -> int:
    """Everything that is promised; returns how many changes there were."""
    with closing(sqlite3.connect(path)) as database, open_log(folder) as log:
        changes = 0
        for table in TABLES:
            rows = rows_of(database, table)
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            assert by_key(log.table(table).select(columns), table) == rows, table
            assert replayed(log, table, columns) == rows, table
        events = [event for table in TABLES for event in history(log, table) if event["transaction"] is not None]
        changes += len(events)
        positions = [event["position"] for event in events]
        assert len(set(positions)) == len(positions), [p for p, n in Counter(positions).items() if n > 1][:5]
        if has_changelog:
            assert {(int(e["position"]), e["op"]) for e in events} == changelog(database, first=int(min(positions)))
        check_transactions(log, events)
        return changes


def rows_of(database: sqlite3.Connection, table: str) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """The rows of a table by key."""
    columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
    at = [columns.index(name) for name in KEYS[table]]
    return {tuple(row[i] for i in at): row for row in database.execute(f"SELECT * FROM {table}")}


def by_key(rows: pa.Table, table: str) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """The rows of a topic's table as SQLite would give them."""
    return {tuple(row[name] for name in KEYS[table]): tuple(map(_plain, row.values())) for row in rows.to_pylist()}


def history(log: Log, table: str) -> list[dict[str, Any]]:
    """The changes of a table; those of a key in their order."""
    return log.read(f"{table}.changes").to_pylist()  # type: ignore[no-any-return]


def replayed(log: Log, table: str, columns: list[str]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """The rows that the history makes; what a change says was there before it was there."""
    rows: dict[str, dict[str, Any]] = {}
    key = log.topic(table).key
    assert key is not None
    for event in history(log, table):
        before = rows.pop(event[key], None)
        if table != "tags" and event["op"] in ("u", "d") and before is not None:
            assert event["before"] == before, event
        if event["op"] in ("r", "c", "u"):
            rows[event[key]] = event["after"]
        else:
            assert event["op"] == "d"
    plain = [{name: _plain(row[name]) for name in columns} for row in rows.values()]
    return {tuple(row[name] for name in KEYS[table]): tuple(row.values()) for row in plain}


def changelog(database: sqlite3.Connection, *, first: int) -> set[tuple[int, str]]:
    """Number and op of every change, as the triggers wrote them down."""
    rows = database.execute("SELECT seq, op FROM \"headwater:shop:changes\" WHERE op <> 's' AND seq >= ?", (first,))
    return set(rows.fetchall())


def check_transactions(log: Log, events: list[dict[str, Any]]) -> None:
    """Begin and end enclose all that belongs together: the counts are right, and no money came or went."""
    money: dict[str, int] = defaultdict(int)
    counted: Counter[str] = Counter(event["transaction"] for event in events)
    orders: dict[str, list[int]] = defaultdict(list)
    for event in events:
        column = "balance" if "owner" in (event["before"] or event["after"]) else "amount"
        for row, sign in ((event["before"], -1), (event["after"], 1)):
            money[event["transaction"]] += sign * (row or {}).get(column, 0)
        orders[event["transaction"]].append(event["transaction_order"])
    assert {transaction: sum_ for transaction, sum_ in money.items() if sum_} == {}
    assert all(sorted(found) == list(range(len(found))) for found in orders.values())
    told = log.read("shop.transactions").to_pylist()
    ends = {row["transaction"]: row["events"] for row in told if row["status"] == "end"}
    assert ends == counted, {
        name: (ends.get(name), counted.get(name)) for name in {*ends, *counted} if ends.get(name) != counted.get(name)
    }
    assert [row["status"] for row in told] == ["begin", "end"] * len(ends)
    positions = [row["position"] for row in told]
    assert positions == sorted(positions)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


# What clients do


def _some_id(connection: sqlite3.Connection, chance: random.Random) -> int | None:
    row = connection.execute("SELECT id FROM accounts WHERE id >= ? LIMIT 1", (chance.randrange(4000),)).fetchone()
    return None if row is None else int(row[0])


def _transfer(connection: sqlite3.Connection, chance: random.Random, mark: str) -> None:
    account, amount = _some_id(connection, chance), chance.randrange(1, 50)
    if account is not None:
        connection.execute("UPDATE accounts SET balance = balance - ? WHERE id = ?", (amount, account))
        connection.execute("INSERT INTO transfers VALUES (?, ?, ?)", (mark, chance.getrandbits(40), amount))


def _note(connection: sqlite3.Connection, chance: random.Random, mark: str) -> None:
    account = _some_id(connection, chance)
    note = chance.choice((None, "", mark, "ü€😀\n\0'\"", mark * 2000))
    data = None if chance.random() < 0.3 else chance.randbytes(chance.choice((0, 8, 30_000)))
    connection.execute("UPDATE accounts SET note = ?, data = ? WHERE id = ?", (note, data, account))


def _open_account(connection: sqlite3.Connection, chance: random.Random, mark: str) -> None:
    connection.execute(
        "INSERT OR IGNORE INTO accounts VALUES (?, ?, 0, NULL, NULL)", (chance.randrange(4000), f"of {mark}")
    )


def _close_account(connection: sqlite3.Connection, chance: random.Random, mark: str) -> None:
    account = _some_id(connection, chance)
    if account is not None:
        (balance,) = connection.execute("SELECT balance FROM accounts WHERE id = ?", (account,)).fetchone()
        connection.execute("INSERT INTO transfers VALUES (?, ?, ?)", (mark, chance.getrandbits(40), balance))
        connection.execute("DELETE FROM accounts WHERE id = ?", (account,))


def _rename_account(connection: sqlite3.Connection, chance: random.Random, mark: str) -> None:
    connection.execute(
        "UPDATE OR IGNORE accounts SET id = ?, note = ? WHERE id = ?",
        (chance.randrange(4000), mark, _some_id(connection, chance)),
    )


def _tag(connection: sqlite3.Connection, chance: random.Random, mark: str) -> None:
    key, name = f"k{chance.randrange(300)}", f"name {chance.randrange(300)}"
    match chance.randrange(4):
        case 0:
            connection.execute("REPLACE INTO tags (k, name, v, done) VALUES (?, ?, 1.5, 0)", (key, name))
        case 1:
            connection.execute(
                "INSERT INTO tags (k, name) VALUES (?, ?) ON CONFLICT DO UPDATE SET v = coalesce(v, 0) + 1", (key, name)
            )
        case 2:
            connection.execute("UPDATE OR REPLACE tags SET name = ?, done = NOT done WHERE k = ?", (name, key))
        case _:
            connection.execute("DELETE FROM tags WHERE k = ?", (key,))


def _alter(connection: sqlite3.Connection, chance: random.Random) -> None:
    columns = [row[1] for row in connection.execute("PRAGMA table_info(tags)")]
    new = f"extra{chance.getrandbits(30)}"
    extra = [name for name in columns if name.startswith("extra")]
    match chance.randrange(5):
        case 0:
            connection.execute(f"ALTER TABLE tags ADD COLUMN {new} TEXT")
            connection.execute(f"UPDATE tags SET {new} = k WHERE v > 20")
        case 1:
            connection.execute(f"ALTER TABLE tags ADD COLUMN {new} INTEGER DEFAULT 7")
        case 2 if extra:
            connection.execute(f"ALTER TABLE tags RENAME COLUMN {extra[0]} TO {new}")
            connection.execute(f"UPDATE tags SET {new} = NULL WHERE v < 20")
        case 3 if extra:
            for (name,) in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'tags'"
            ).fetchall():
                connection.execute(f'DROP TRIGGER "{name}"')
            connection.execute(f"ALTER TABLE tags DROP COLUMN {extra[0]}")
            connection.execute("DELETE FROM tags WHERE v BETWEEN 30 AND 31")
        case _:
            connection.execute("CREATE INDEX IF NOT EXISTS by_v ON tags (v)")
