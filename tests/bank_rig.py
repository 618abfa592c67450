"""A bank: a database whose clients move money between tables, with every state it was in; and what somebody outside sees of a copy."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import duckdb

TABLES = ("accounts", "vaults", "counter")
ACCOUNTS = 11_000
"""More than are read by the driver itself."""

LOOKS = (
    "select count(*), sum(balance), sum(id * balance), sum(id) from accounts",
    "select count(*), sum(balance), sum(length(name) * balance) from vaults",
    "select count(*), sum(n), min(id) from counter",
)

State = tuple[tuple[int, ...], ...]
Ask = Callable[[str], Any]


class Bank:
    """A database in which money moves between two tables; `states` are all that it was ever in, by the number of the transaction."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bank.db"
        self.states: dict[int, State] = {}
        self._stop = threading.Event()

    def make(self) -> None:
        """The database, with its first state."""
        with self.connected() as bank:
            bank.execute("pragma journal_mode = wal")
            bank.execute("create table accounts (id integer primary key, balance int)")
            bank.execute("create table vaults (name text primary key, balance int)")
            bank.execute("create table counter (id integer primary key, n int)")
            with transaction(bank):
                bank.executemany("insert into accounts values (?, 10)", [(n,) for n in range(ACCOUNTS)])
                bank.executemany("insert into vaults values (?, 1000)", [("v" * n,) for n in range(1, 6)])
                bank.execute("insert into counter values (1, 0)")
                self.states[0] = state_by(bank.execute)

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}"

    @contextmanager
    def connected(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=60)) as bank:
            yield bank

    def move(self, bank: sqlite3.Connection, chance: random.Random) -> None:
        """One transaction: money goes from an account to a vault or back, and sometimes the account is closed or opened."""
        account, vault, amount = chance.randrange(ACCOUNTS), "v" * chance.randrange(1, 6), chance.randrange(-5, 6)
        with transaction(bank):
            found = bank.execute("select balance from accounts where id = ?", (account,)).fetchone()
            if found is None:
                bank.execute("insert into accounts values (?, ?)", (account, amount))
            elif chance.random() < 0.3:
                bank.execute("delete from accounts where id = ?", (account,))
                amount = -found[0]
            else:
                bank.execute("update accounts set balance = balance + ? where id = ?", (amount, account))
            bank.execute("update vaults set balance = balance - ? where name = ?", (amount, vault))
            bank.execute("update counter set n = n + 1")
            now = state_by(bank.execute)
            assert now[0][1] + now[1][1] == ACCOUNTS * 10 + 5_000
            self.states[now[2][1]] = now

    @contextmanager
    def busy(self, seed: int) -> Iterator[None]:
        """Two clients move money meanwhile."""

        def work(number: int) -> None:
            chance = random.Random(seed + number)
            with self.connected() as bank:
                while not self._stop.wait(0.01):
                    self.move(bank, chance)

        self._stop.clear()
        clients = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            self._stop.set()
            for client in clients:
                client.join()

    @property
    def last(self) -> State:
        return self.states[max(self.states)]

    def rows(self) -> list[list[tuple[Any, ...]]]:
        with self.connected() as bank:
            return rows_by(bank.execute)


@contextmanager
def transaction(bank: sqlite3.Connection) -> Iterator[None]:
    bank.execute("begin immediate")
    yield
    bank.execute("commit")


def state_by(ask: Ask) -> State:
    return tuple(tuple(int(value) for value in ask(look).fetchall()[0]) for look in LOOKS)


def rows_by(ask: Ask) -> list[list[tuple[Any, ...]]]:
    columns = ("id, balance", "name, balance", "id, n")
    return [
        ask(f"select {names} from {table} order by 1").fetchall() for names, table in zip(columns, TABLES, strict=True)
    ]


@contextmanager
def looking(url: str) -> Iterator[Ask]:
    """Somebody outside, who sees the target as it is at one moment."""
    path = url.partition(":///")[2]
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)) as found:
            found.execute("begin")
            yield found.execute
    elif url.startswith("duckdb"):
        with duckdb.connect(path) as found:  # in one process all open a file in the same way
            found.execute("begin")
            yield found.execute
    else:
        import psycopg

        with psycopg.connect(url) as found:
            found.execute("set transaction isolation level repeatable read")
            yield found.execute


def seen_in(url: str) -> State | None:
    """What somebody outside sees; None while nothing is there."""
    try:
        with looking(url) as ask:
            return state_by(ask)
    except Exception as error:
        said = str(error).lower()
        if any(words in said for words in ("no such table", "does not exist", "unable to open")):
            return None
        raise
