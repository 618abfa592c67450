"""A bank: a database whose clients move money between tables, with every state it was in; and what somebody outside sees of a copy."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
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

UNSEEN = ("no such table", "does not exist", "unable to open", "could not set lock")
"""What databases say where there is nothing to be seen yet, or not at this moment."""

CLOSING_S = 30

State = tuple[tuple[int, ...], ...]
Ask = Callable[[str], Any]


class Bank:
    """A database in which money moves between two tables; `states` are all that it was ever in, by the number of the transaction."""

    def __init__(self, url: str, connected: Callable[[], AbstractContextManager[Ask]], *, begin: str = "begin") -> None:
        """`connected` gives a connection in which each statement is a transaction of its own, unless one is begun."""
        self.url = url
        self.connected = connected
        self.states: dict[int, State] = {}
        self._begin = begin
        self._stop = threading.Event()

    def make(self) -> None:
        """The tables, with their first state."""
        with self.connected() as ask:
            ask("create table accounts (id integer primary key, balance int)")
            ask("create table vaults (name varchar(20) primary key, balance int)")
            ask("create table counter (id integer primary key, n int)")
            with self._transaction(ask):
                ask("insert into accounts values " + ", ".join(f"({n}, 10)" for n in range(ACCOUNTS)))
                ask("insert into vaults values " + ", ".join(f"('{'v' * n}', 1000)" for n in range(1, 6)))
                ask("insert into counter values (1, -1)")
                self._count(ask)
                self._note(ask)

    def move(self, ask: Ask, chance: random.Random) -> None:
        """One transaction: money goes from an account to a vault or back, and sometimes the account is closed or opened."""
        account, vault, amount = chance.randrange(ACCOUNTS), "v" * chance.randrange(1, 6), chance.randrange(-5, 6)
        with self._transaction(ask):
            self._count(ask)
            # MariaDB would end who reads a table first and writes to it then, beside an ALTER TABLE.
            ask("update accounts set balance = 0 where id < 0")
            found = ask(f"select balance from accounts where id = {account}").fetchall()
            if not found:
                ask(f"insert into accounts (id, balance) values ({account}, {amount})")
            elif chance.random() < 0.3:
                ask(f"delete from accounts where id = {account}")
                amount = -found[0][0]
            else:
                ask(f"update accounts set balance = balance + {amount} where id = {account}")
            ask(f"update vaults set balance = balance - {amount} where name = '{vault}'")
            self._note(ask)

    def pay(self, ask: Ask) -> None:
        """One large transaction: a vault gives to every account."""
        with self._transaction(ask):
            self._count(ask)
            ask("update accounts set balance = balance + 1")
            ask("update vaults set balance = balance - (select count(*) from accounts) where name = 'v'")
            self._note(ask)

    @contextmanager
    def busy(self, seed: int, *, pause_s: float = 0.01) -> Iterator[None]:
        """Two clients move money meanwhile."""

        def work(number: int) -> None:
            chance = random.Random(seed + number)
            with self.connected() as ask:
                while not self._stop.wait(pause_s):
                    self.move(ask, chance)

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
        with self.connected() as ask:
            return rows_by(ask)

    @contextmanager
    def _transaction(self, ask: Ask) -> Iterator[None]:
        ask(self._begin)
        yield
        ask("commit")

    def _count(self, ask: Ask) -> None:
        """Comes first in each transaction: whoever has changed this row is alone until the commit."""
        ask("update counter set n = n + 1")

    def _note(self, ask: Ask) -> None:
        """Before the commit, so that nobody sees a state that is not known here."""
        now = state_by(ask)
        assert now[0][1] + now[1][1] == ACCOUNTS * 10 + 5_000
        self.states[now[2][1]] = now


def sqlite_bank(folder: Path) -> Bank:
    """A bank in a file."""
    path = folder / "bank.db"

    @contextmanager
    def connected() -> Iterator[Ask]:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as bank:
            yield bank.execute

    with connected() as ask:
        ask("pragma journal_mode = wal")
    return Bank(f"sqlite:///{path}", connected, begin="begin immediate")


def state_by(ask: Ask) -> State:
    return tuple(tuple(int(value) for value in ask(look).fetchall()[0]) for look in LOOKS)


def rows_by(ask: Ask) -> list[list[tuple[Any, ...]]]:
    columns = ("id, balance", "name, balance", "id, n")
    return [
        list(ask(f"select {names} from {table} order by 1").fetchall())
        for names, table in zip(columns, TABLES, strict=True)
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
        with opened(path) as found:
            found.execute("begin")
            yield found.execute
    else:
        import psycopg

        with psycopg.connect(url) as found:
            found.execute("set transaction isolation level repeatable read")
            yield found.execute


def opened(path: str) -> duckdb.DuckDBPyConnection:
    """In one process all open a file in the same way, and one that another thread is about to close cannot be opened."""
    deadline = time.monotonic() + CLOSING_S
    while True:
        try:
            return duckdb.connect(path)
        except duckdb.ResourceInUseException:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def seen_in(url: str) -> State | None:
    """What somebody outside sees; None while nothing is there, or while a file of DuckDB cannot be opened."""
    try:
        with looking(url) as ask:
            return state_by(ask)
    except Exception as error:
        said = str(error).lower()
        if any(words in said for words in UNSEEN):
            return None
        raise
