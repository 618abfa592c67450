"""A storm over a captured server: eight clients write at random, the capture is killed again and again, the server once.

Each transaction also writes a row of `ledger`: who, the how manieth, and how many changes it made. So the log can be asked for gaps,
duplicates and torn transactions without trusting anything that the capture says of itself; the oracle of the rows is the database.

A kind of server is a `Storm` with statements of its own, in a script of its own, which as a program is the capture: `SCRIPT URL FOLDER`.
"""

from __future__ import annotations

import datetime
import os
import random
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any

import headwater
from headwater.capture.capture import Capture
from headwater.capture.source_url import open_source
from headwater.model.points import watch
from headwater.testing.crash.points import at
from headwater.testing.servers.server import Server

CLIENTS = 8
CHANGES_EACH = 2.5
"""About how many a transaction makes."""
LIFE_S = (0.1, 0.9)
"""How long the capture lives, once it has begun to read, until it is killed."""
TABLES = ("users", "orders", "logs", "notes", "ledger")


class Storm(ABC):
    """What differs from one kind of server to another. Connections have `execute`, `commit`, `rollback`, `close` and `closed`."""

    script: str
    ddl: tuple[str, ...]
    insert: str
    """Inserts values into columns of a table, unless the key is there: with {table}, {columns} and {values}."""
    move: str
    """Gives a user another id, unless that is taken: with the new one, the old one."""
    errors: tuple[type[Exception], ...]
    has_old_values = False
    """Whether every change tells the whole row before it."""

    @abstractmethod
    def server(self) -> Server:
        """A server that is not started yet."""

    @abstractmethod
    def url(self, server: Server) -> str:
        """Where the database is that is captured."""

    @abstractmethod
    def set_up(self, url: str) -> None:
        """Makes the tables, with rows in them."""

    @abstractmethod
    def connect(self, url: str) -> Any:
        """A connection in which statements are one transaction until `commit`."""

    @abstractmethod
    def is_lost(self, connection: Any, error: Exception) -> bool:
        """Whether a connection is of no more use after an error."""

    @abstractmethod
    def end_position(self, connection: Any) -> str:
        """Where the database is now."""

    @abstractmethod
    def use_small_parts(self) -> None:
        """Makes a small database look like a large one."""

    def put(self, connection: Any, table: str, **values: Any) -> int:
        """Inserts a row, unless its key is there."""
        statement = self.insert.format(table=table, columns=", ".join(values), values=", ".join(["%s"] * len(values)))
        return int(connection.execute(statement, tuple(values.values())).rowcount)

    def rage(self, folder: Path, *, seed: int, changes: int, kills: int) -> None:
        """One storm, and what must be true behind it."""
        print(f"seed {seed}")
        random_ = random.Random(seed)
        with self.server() as server:
            url = self.url(server)
            self.set_up(url)
            clients = Clients(self, url, seed=seed, changes=changes, lasting_s=1.2 * kills)
            capture = CaptureProcess(self.script, url, folder)
            clients.start()
            for life in range(kills):
                capture.start()
                time.sleep(random_.uniform(*LIFE_S))
                capture.kill()
                if life == kills // 2:
                    server.kill()
                    server.restart()
            capture.start()
            clients.join()
            capture.kill()
            with headwater.open_log(f"{folder}/log") as log:
                self._catch_up(log, url)
                connection = self.connect(url)
                for table in TABLES:
                    compare_table(log, connection, table)
                check_ledger(log, connection)
                connection.close()
                check_transactions(log)
                if self.has_old_values:
                    check_old_values(log)
                source = open_source(url, TABLES, name="shop")
                source.remove()
                source.close()

    def capture(self, url: str, folder: str) -> None:
        """The capture, until it is killed."""
        self.use_small_parts()
        watch(at("capture: topics made", Path(folder, "alive").touch))
        with headwater.open_log(f"{folder}/log") as log:
            source = open_source(url, TABLES, name="shop")
            Capture(log, source, heartbeat_s=0.5).run(threading.Event())

    def _catch_up(self, log: Any, url: str) -> None:
        """All that there is, and what only the catalog shows."""
        capture = Capture(log, open_source(url, TABLES, name="shop"), heartbeat_s=0.2)
        capture.open()
        connection = self.connect(url)
        wanted = self.end_position(connection)
        connection.close()
        deadline = time.monotonic() + 60
        beats = 0
        while beats < 8 or capture.progress.position < wanted:
            capture.catch_up()
            time.sleep(0.1)
            beats += 1
            assert time.monotonic() < deadline, capture.status()
        states = {name: (table.state, table.why) for name, table in capture.progress.tables.items()}
        capture.close()
        assert set(states.values()) == {("live", None)}, states


class Clients:
    """Threads that write until they have made so many changes together, at a pace that lasts for about so many seconds."""

    def __init__(self, storm: Storm, url: str, *, seed: int, changes: int, lasting_s: float) -> None:
        self._storm = storm
        self._url = url
        self._pause_s = CLIENTS * CHANGES_EACH * lasting_s / changes
        self._wanted = changes
        self._lock = threading.Lock()
        self.changes = 0
        self.problems: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(n, random.Random(seed + n))) for n in range(CLIENTS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        assert not self.problems, self.problems

    def _run(self, client: int, random_: random.Random) -> None:
        try:
            self._write(client, random_)
        except BaseException as error:  # noqa: BLE001 - the test shows it
            self.problems.append(error)

    def _write(self, client: int, random_: random.Random) -> None:
        storm = self._storm
        connection, number = None, 0
        ddl = list(storm.ddl) if client == 0 else []
        while self.changes < self._wanted or ddl:
            number += 1
            try:
                if connection is None or connection.closed:
                    connection = storm.connect(self._url)
                if ddl and self.changes > self._wanted * (1 - len(ddl) / (len(storm.ddl) + 1)):
                    connection.execute(ddl[0])
                    connection.commit()
                    ddl.pop(0)
                made = transaction(storm, connection, client, number, random_)
                connection.commit()
                with self._lock:
                    self.changes += made
                time.sleep(self._pause_s)
            except storm.errors as error:  # deadlocks, columns that are gone, and a server that was killed
                if connection is not None and not storm.is_lost(connection, error):
                    connection.rollback()
                else:
                    if connection is not None:
                        connection.close()
                    connection = None
                    time.sleep(0.05)
        if connection is not None:
            connection.close()


def transaction(storm: Storm, connection: Any, client: int, number: int, random_: random.Random) -> int:
    """Some changes of some tables, and the row of the ledger that counts them (-1 where it cannot be told)."""
    made, counted = 0, True
    for _ in range(random_.choice([1, 1, 2, 3, 6])):
        table = random_.choice(["users", "users", "orders", "logs", "notes"])
        if table == "logs" and random_.random() < 0.004:
            connection.execute("truncate table logs")
            counted = False
            continue
        write = {"users": write_users, "orders": write_orders, "logs": write_logs, "notes": write_notes}[table]
        made += write(storm, connection, random_)
    connection.execute("insert into ledger values (%s, %s, %s)", (client, number, made if counted else -1))
    return made + 1


def write_users(storm: Storm, connection: Any, random_: random.Random) -> int:
    some, other = random_.randrange(4000), random_.randrange(4000)
    what = random_.random()
    if what < 0.4:
        name = random_.choice(["ann", "bob", None, "zoë"])
        now = datetime.datetime.now(datetime.UTC)
        price = random_.randrange(10**6) / 100
        return storm.put(connection, "users", id=some, name=name, big=large(random_), price=price, at=now)
    if what < 0.7:
        return int(connection.execute("update users set name = %s where id = %s", (f"n{other}", some)).rowcount)
    if what < 0.8:
        return int(connection.execute("update users set big = %s where id = %s", (large(random_), some)).rowcount)
    if what < 0.88:
        return 2 * int(connection.execute(storm.move, (other, some)).rowcount) if some != other else 0
    return int(connection.execute("delete from users where id = %s", (some,)).rowcount)


def write_orders(storm: Storm, connection: Any, random_: random.Random) -> int:
    shop, number = random_.randrange(5), random_.randrange(400)
    what = random_.random()
    if what < 0.5:
        total = random_.choice([None, random_.random() * 100])
        return storm.put(connection, "orders", shop=shop, number=number, total=total)
    if what < 0.85:
        statement = "update orders set total = %s where shop = %s and number = %s"
        return int(connection.execute(statement, (random_.random(), shop, number)).rowcount)
    return int(connection.execute("delete from orders where shop = %s and number = %s", (shop, number)).rowcount)


def write_logs(storm: Storm, connection: Any, random_: random.Random) -> int:
    code = f"c{random_.randrange(300)}"
    what = random_.random()
    if what < 0.5:
        body = f'{{"n": {random_.randrange(99)}}}'
        return storm.put(connection, "logs", code=code, body=body, big=large(random_))
    if what < 0.8:
        return int(connection.execute("update logs set body = '[1, null]' where code = %s", (code,)).rowcount)
    return int(connection.execute("delete from logs where code = %s", (code,)).rowcount)


def write_notes(storm: Storm, connection: Any, random_: random.Random) -> int:
    """A table whose columns never change, so that nothing but its changes brings large values that were not sent."""
    number = random_.randrange(100)
    if random_.random() < 0.3:
        return storm.put(connection, "notes", id=number, body=large(random_))
    if random_.random() < 0.9:
        return int(
            connection.execute("update notes set n = %s where id = %s", (random_.randrange(99), number)).rowcount
        )
    return int(connection.execute("delete from notes where id = %s", (number,)).rowcount)


def large(random_: random.Random) -> str | None:
    """A value that is stored out of line, or a small one, or none."""
    return random_.choice([None, "small", f"{random_.randrange(10**9)}" * 400])


class CaptureProcess:
    """The capture as a process that can be killed."""

    def __init__(self, script: str, url: str, folder: Path) -> None:
        self._command = [sys.executable, script, url, str(folder)]
        self._errors = folder / "capture.err"
        self._alive = folder / "alive"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it is about to read; with a server that is down it may take long."""
        self._alive.unlink(missing_ok=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(self._command, env=environment, stderr=errors)
        deadline = time.monotonic() + 30
        while not self._alive.exists() and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def kill(self) -> None:
        assert self._process is not None and self._process.poll() is None, self._errors.read_text()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def compare_table(log: Any, connection: Any, table: str) -> None:
    """Row by row, by the columns that the database has."""
    cursor = connection.execute(f"select * from {table}")
    names = [column[0] for column in cursor.description]
    expected = Counter(tuple(map(plain, row)) for row in cursor.fetchall())
    rows = log.table(table).select(names).to_pylist()
    found = Counter(tuple(plain(row[name]) for name in names) for row in rows)
    missing, surplus = list((expected - found).elements()), list((found - expected).elements())
    assert not missing and not surplus, (
        f"{table}: missing {missing[:3]}, surplus {surplus[:3]} ({len(missing)}, {len(surplus)})"
    )


def plain(value: Any) -> Any:
    if isinstance(value, list | dict):
        return str(value).replace("'", '"').replace("None", "null")
    return value


def check_ledger(log: Any, connection: Any) -> None:
    """Each committed transaction once, whole, and in the order in which its client made it."""
    counted = {
        (client, number): changes for client, number, changes in connection.execute("select * from ledger").fetchall()
    }
    history = [row for row in log.read("ledger.changes").to_pylist() if row["op"] != "r" or row["transaction"]]
    inserted = [(row["after"]["client"], row["after"]["number"]) for row in history if row["op"] == "c"]
    copied = {(row["after"]["client"], row["after"]["number"]) for row in log.read("ledger.changes").to_pylist()} - set(
        inserted
    )
    assert len(inserted) == len(set(inserted)), "a change was appended twice"
    assert set(inserted) | copied == set(counted)
    ends = {row["transaction"]: row for row in log.read("shop.transactions").to_pylist() if row["status"] == "end"}
    for row in history:
        if row["op"] == "c":
            expected = counted[row["after"]["client"], row["after"]["number"]]
            if expected >= 0:
                assert ends[row["transaction"]]["events"] == expected + 1, row
    for client in range(CLIENTS):
        mine = [row for row in history if row["after"] and row["after"]["client"] == client]
        positions = sorted((row["position"], row["after"]["number"]) for row in mine)
        assert [number for _, number in positions] == sorted(number for _, number in positions)


def check_transactions(log: Any) -> None:
    """Begin and end in turn, in commit order; no position twice; the events of each transaction all there."""
    rows = log.read("shop.transactions").to_pylist()
    assert [row["status"] for row in rows] == ["begin", "end"] * (len(rows) // 2)
    assert [row["position"] for row in rows] == sorted(row["position"] for row in rows)
    events: dict[str, set[str]] = {}
    for table in TABLES:
        found = [row for row in log.read(f"{table}.changes").to_pylist() if row["transaction"] and row["op"] in "cud"]
        for row in found:
            mine = events.setdefault(row["transaction"], set())
            assert row["position"] not in mine, f"{row['position']} twice"
            mine.add(row["position"])
    for row in rows:
        if row["status"] == "end" and "logs" not in dict(row["tables"]):
            assert len(events[row["transaction"]]) == row["events"] == sum(dict(row["tables"]).values()), row


def check_old_values(log: Any) -> None:
    """Each change begins with the row that the one before it left, through kills and the backfill."""
    rows: dict[int, Any] = {}
    history = log.read("notes.changes").to_pylist()
    for event in sorted(history, key=lambda row: (row["position"], row["transaction_order"] or 0)):
        if event["op"] != "r" and event["id"] in rows:
            assert event["before"] == rows[event["id"]], event
        rows[event["id"]] = event["after"]
    assert sum(event["op"] == "u" and event["before"]["n"] is not None for event in history) > 50
