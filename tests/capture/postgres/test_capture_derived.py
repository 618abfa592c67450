"""What is derived from a captured PostgreSQL: replicas agree, transactions stay whole, who fell behind comes back, and no commit waits."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headwater.capture.capture import Capture
from headwater.capture.progress import captures
from headwater.capture.source_url import open_source
from headwater.log.log import Log
from headwater.model.errors import EventsMissed
from headwater.model.event import Event
from headwater.model.marker import Marker
from headwater.sinks.newest_rows import Pieces
from headwater.sinks.sink import write_batch
from headwater.testing.servers.postgres import PostgresServer
from headwater.verify.comparison import compare, open_pair
from tests.rigs.app.sink_targets import SHAPE, Target
from tests.rigs.capture.postgres import Rig, follow, rigged
from tests.rigs.commands import COMMAND, Command, command
from tests.rigs.wait import wait_until

__all__ = ["command"]

pytestmark = pytest.mark.service("postgres")

CLIENTS = 4
TIMEOUT_S = 60.0


@pytest.fixture
def rig(postgres: PostgresServer, tmp_path: Path) -> Iterator[Rig]:
    """A database and a log of one test."""
    with rigged(postgres, tmp_path) as made:
        yield made


@contextmanager
def captured_by_thread(rig: Rig, *tables: str) -> Iterator[Capture]:
    """A capture that runs while the block does."""
    capture = Capture(rig.log, open_source(rig.url, tables, name=rig.name))
    stop, failed = threading.Event(), []

    def run() -> None:
        try:
            capture.run(stop)
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield capture
    finally:
        stop.set()
        thread.join()
    assert not failed, failed


def clients(url: str, seed: int, transaction: Callable[[Any, random.Random], None], *, each: int) -> None:
    """Clients that write at once; a transaction that the database refuses is tried again."""

    def write(chance: random.Random) -> None:
        with psycopg.connect(url) as connection:
            for _ in range(each):
                while True:
                    try:
                        transaction(connection, chance)
                        connection.commit()
                        break
                    except psycopg.errors.DeadlockDetected:
                        connection.rollback()

    print("seed", seed)
    threads = [threading.Thread(target=write, args=(random.Random(seed + number),)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.covers("Sherpa")
def test_every_replica_applies_the_changes_of_a_row_in_the_same_order(rig: Rig) -> None:
    """One by one, in batches, shared by a group, or read again later: each row's versions come as the database made them."""
    rig.run(
        "create table seats (id int primary key, version int, who int)",
        "insert into seats select i, 0, -1 from generate_series(0, 5) i",
    )

    def take(connection: Any, chance: random.Random) -> None:
        who, seat = chance.randrange(1000), chance.randrange(6)
        connection.execute("update seats set version = version + 1, who = %s where id = %s", (who, seat))

    log, all_ = rig.log, CLIENTS * 60 + 6
    with captured_by_thread(rig, "seats"):
        writing = threading.Thread(target=clients, args=(rig.url, 3, take), kwargs={"each": 60})
        wait_until(lambda: "seats" in log.topics() and log.table("seats").num_rows == 6)
        writing.start()
        with log.reader("seats") as single, log.reader("seats") as batched:
            replicas = [versions(all_, lambda: single.poll(events_max=1))]
            replicas += [versions(all_, lambda: batched.poll(events_max=1000))]
        writing.join()
    with log.consumer("seats", group="pair") as one, log.consumer("seats", group="pair") as two:
        shared = versions(all_, lambda: one.poll(events_max=7, timeout_s=0.1) + two.poll(events_max=3, timeout_s=0.1))
    replicas.append(shared)
    assert all(replica == replicas[0] for replica in replicas)
    assert {seat: [version for version, _ in made] for seat, made in replicas[0].items()} == {
        seat: list(range(version + 1)) for seat, version, _ in rig.run("select * from seats")
    }
    assert {(seat, made[-1][1]) for seat, made in replicas[0].items()} == set(rig.run("select id, who from seats"))


def versions(events: int, poll: Callable[[], list[Event]]) -> dict[int, list[tuple[int, int]]]:
    """The versions of each row in the order in which one replica gets them."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    deadline = time.monotonic() + TIMEOUT_S
    while sum(map(len, found.values())) < events:
        assert time.monotonic() < deadline, f"{sum(map(len, found.values()))} of {events} events came"
        for event in poll():
            found[event.value["id"]].append((event.value["version"], event.value["who"]))
    return found


@pytest.mark.covers("GoldenGate")
def test_transactions_are_applied_whole_and_in_commit_order(rig: Rig, tmp_path: Path) -> None:
    """By a program that reads the history and `<source>.transactions`, in pieces that end anywhere: the copy is never half of one."""
    rig.run(
        "create table accounts (id int primary key, balance int)",
        "create table transfers (number int primary key, amount int)",
        "insert into accounts select i, 100 from generate_series(1, 10) i",
    )

    def transfer(connection: Any, chance: random.Random) -> None:
        amount, (giver, taker) = chance.randrange(1, 9), chance.sample(range(1, 11), 2)
        move = "update accounts set balance = balance + %s where id = %s"
        connection.execute(move, (-amount, giver))
        connection.execute(move, (amount, taker))
        # The lock makes the numbers run in commit order, which is what the copy is held against.
        connection.execute("select pg_advisory_xact_lock(1)")
        connection.execute("insert into transfers select coalesce(max(number), 0) + 1, %s from transfers", (amount,))

    with captured_by_thread(rig, "accounts", "transfers") as capture:
        wait_until(lambda: len(capture.progress.tables) == 2 and not capture._is_copying())
        copy = Copy(rig.log, rig.name, tmp_path / "copy.db")
        wait_until(lambda: copy.follow(events_max=40) or len(copy.rows("accounts")) == 10)
        writing = threading.Thread(target=clients, args=(rig.url, 5, transfer), kwargs={"each": 50})
        writing.start()
        deadline = time.monotonic() + TIMEOUT_S
        while copy.applied < CLIENTS * 50:
            copy.follow(events_max=random.Random(copy.applied).choice([1, 5, 40]))
            assert time.monotonic() < deadline, copy.applied
        writing.join()
    assert copy.rows("accounts") == sorted(rig.run("select * from accounts"))
    assert copy.rows("transfers") == sorted(rig.run("select * from transfers"))
    copy.close()


class Copy:
    """A SQLite database into which whole transactions are put; after each one it is asked whether it makes sense."""

    def __init__(self, log: Log, source: str, path: Path) -> None:
        self.applied = 0
        self._ended: list[dict[str, Any]] = []
        self._changes: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
        self._transactions = log.reader(f"{source}.transactions")
        self._tables = log.reader(["accounts.changes", "transfers.changes"])
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("create table accounts (id integer primary key, balance int)")
        self._database.execute("create table transfers (number integer primary key, amount int)")

    def follow(self, *, events_max: int) -> None:
        """The next events of each; transactions all of whose changes have come are applied, in the order of their ends."""
        ends = self._transactions.poll(events_max=events_max, timeout_s=0.05)
        self._ended += [event.value for event in ends if event.value["status"] == "end"]
        for event in self._tables.poll(events_max=events_max, timeout_s=0.05):
            if event.value["op"] == "r":  # of the backfill, which was done before the first transaction
                self._put("accounts", event.value["after"])
            else:
                self._changes[event.value["transaction"]].append((event.topic.removesuffix(".changes"), event.value))
        while self._ended and len(self._changes[self._ended[0]["transaction"]]) == self._ended[0]["events"]:
            self._apply(self._ended.pop(0)["transaction"])

    def _apply(self, transaction: str) -> None:
        self._database.execute("begin")
        changes = self._changes.pop(transaction)
        for table, change in sorted(changes, key=lambda each: str(each[1]["position"])):
            self._put(table, change["after"])
        self._database.execute("commit")
        self.applied += 1
        assert self.rows("accounts") and sum(balance for _, balance in self.rows("accounts")) == 1000
        assert [number for number, _ in self.rows("transfers")] == list(range(1, self.applied + 1))

    def _put(self, table: str, row: dict[str, Any]) -> None:
        self._database.execute(f"insert or replace into {table} values (?, ?)", tuple(row.values()))

    def rows(self, table: str) -> list[tuple[int, int]]:
        return sorted(self._database.execute(f"select * from {table}").fetchall())

    def close(self) -> None:
        for reader in (self._transactions, self._tables):
            reader.close()
        self._database.close()


@pytest.mark.covers("Databus")
def test_a_consumer_of_changes_that_fell_behind_gets_a_snapshot_and_what_came_after_it(rig: Rig) -> None:
    """The history is kept for a while, the table for ever; both meet at one position, and deletions of the gap are not missed."""
    rig.run("create table stock (id int primary key, pieces int)", "insert into stock values (1, 10), (2, 20), (3, 30)")
    built: dict[int, int] = {}

    def apply(events: list[Event]) -> None:
        for event in events:
            change = event.value
            built.update({change["id"]: change["after"]["pieces"]} if change["after"] else {})
            if change["op"] == "d":
                built.pop(change["id"], None)

    with rig.capture("stock") as capture, rig.log.reader("stock.changes") as behind:
        apply(behind.poll())
        assert built == {1: 10, 2: 20, 3: 30}
        rig.run("update stock set pieces = 11 where id = 1", "delete from stock where id = 2")
        follow(capture, rig)
        time.sleep(0.02)
        rig.log.alter_topic("stock.changes", retention="10 ms")
        rig.log.tidy("stock.changes")
        rig.log.alter_topic("stock.changes", retention="1 day")
        rig.run("insert into stock values (4, 40)")
        follow(capture, rig)
        with pytest.raises(EventsMissed):
            behind.poll(timeout_s=0)
        table, places = rig.log.snapshot("stock", follow="stock.changes")
        rig.run("update stock set pieces = 31 where id = 3", "delete from stock where id = 4")
        follow(capture, rig)
        built = {row["id"]: row["pieces"] for row in table.to_pylist()}
        assert built == {1: 11, 3: 30, 4: 40}
        behind.seek(places)
        apply(behind.poll())
    assert built == dict(rig.run("select * from stock"))


@pytest.mark.covers("concept: compacted log as snapshot", backends=["file"])
def test_a_new_derived_system_built_from_the_compacted_topic_equals_the_database(
    rig: Rig, make_target: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first offset, when most events are gone; `verify` holds it against the database itself."""
    create = rig.log.create_topic
    monkeypatch.setattr(rig.log, "create_topic", lambda *given, **more: create(*given, segment_bytes=4096, **more))
    rig.run("create table users (id text primary key, name text, n bigint, amount double precision)")
    with rig.capture("users") as capture:
        for number in range(40):
            rig.run(
                f"insert into users select 'k' || i, repeat('x', 40), {number}, i / 3.0 from generate_series(1, 30) i "
                "on conflict (id) do update set n = excluded.n",
                f"delete from users where id = 'k{number}'",
            )
            follow(capture, rig)
    before = rig.log.read("users").num_rows
    rig.log.tidy("users")
    rows = rig.log.read("users", columns=[*SHAPE.schema.names, "_partition", "_offset", "_deleted"])
    assert rows.num_rows < before / 2
    target = make_target("sqlite")
    sink = target.sink()
    sink.open(SHAPE)
    ends = {str(number): span.stop for number, span in rig.log.offsets("users").items()}
    write_batch(sink, Marker(query="q", epoch=0, ends=[{"users": ends}]), Pieces([rows], ("id",)), tell=print)
    with closing(open_pair(f"{rig.url}?table=users", target.url)) as pair:
        report = compare(pair, settle_s=0.2)
    assert (report.is_equal, report.rows) == (True, 30)


@pytest.mark.covers("concept: capture is asynchronous")
def test_no_commit_waits_for_a_capture_that_stands_still(rig: Rig, tmp_path: Path, command: Command) -> None:
    """Each commit has returned before the capture could know of it: its process is stopped from before the first to after the last, and has
    confirmed nothing meanwhile. So no commit's time has a part in it that is the capture's. The database does not count it among those
    to wait for, and the lag is shown. (The times themselves are compared in the long tier.)"""
    with stopped(rig, tmp_path) as process:
        assert rig.run("select distinct sync_state from pg_stat_replication") == [("async",)]
        rig.run("set statement_timeout = '20s'")  # a COMMIT that waits would be an error, not a slow test
        before, confirmed, sent = lag(command, tmp_path, rig), confirmed_by(rig), wal_end(rig)
        for number in range(100):
            assert is_stopped(process)
            rig.run(f"insert into a values ({number}, repeat('x', 1000))")
        assert is_stopped(process) and confirmed_by(rig) == confirmed
        assert rig.run("select count(*) from a") == [(100,)]
        assert lag(command, tmp_path, rig) >= before + (wal_end(rig) - sent) * 0.9 > before + 90_000
        assert rig.log.table("a").num_rows == 0
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: rig.log.table("a").num_rows == 100)
        wait_until(lambda: lag(command, tmp_path, rig) < 10_000)
        assert confirmed_by(rig) > confirmed


@pytest.mark.bench
@pytest.mark.timeout(300)
@pytest.mark.covers("concept: capture is asynchronous")
def test_commits_take_as_long_while_everything_derived_stands_still(rig: Rig, tmp_path: Path, command: Command) -> None:
    """For a minute, beside ten seconds in which the capture follows."""
    numbers = itertools.count()

    def commits_ms(seconds: float) -> float:
        took, deadline = [], time.monotonic() + seconds
        while time.monotonic() < deadline:
            began = time.perf_counter()
            rig.run(f"insert into a values ({next(numbers)}, repeat('x', 1000))")
            took.append((time.perf_counter() - began) * 1000)
            time.sleep(0.002)
        return statistics.median(took)

    with stopped(rig, tmp_path) as process:
        still_ms = commits_ms(60)
        assert lag(command, tmp_path, rig) > 1_000_000
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: rig.log.table("a").num_rows > 0)
        assert still_ms < 1.5 * commits_ms(10)


@contextmanager
def stopped(rig: Rig, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A capture in a process of its own that has begun to follow table `a`, and then was stopped."""
    rig.run("create table a (id int primary key, t text)")
    run = ["capture", "run", rig.url, "-t", "a", "--name", rig.name, "--log", str(folder / "log")]
    with subprocess.Popen([*COMMAND, *run], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            active = f"select active from pg_replication_slots where slot_name = 'headwater_{rig.name}'"
            wait_until(lambda: process.poll() is None and is_live(rig) and rig.run(active) == [(True,)])
            time.sleep(
                0.2
            )  # or it is stopped while it holds the log's locks, and the log waits for it, not the database
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            yield process
        finally:
            process.kill()


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether the kernel lets it do nothing."""
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


def confirmed_by(rig: Rig) -> int:
    """How far the capture has told the database that it has read."""
    text = f"select (confirmed_flush_lsn - '0/0')::bigint from pg_replication_slots where slot_name = 'headwater_{rig.name}'"
    ((confirmed,),) = rig.run(text)
    return int(confirmed)


def wal_end(rig: Rig) -> int:
    """How far the database has written."""
    ((end,),) = rig.run("select (pg_current_wal_lsn() - '0/0')::bigint")
    return int(end)


def is_live(rig: Rig) -> bool:
    """Whether the table was copied, as the log says."""
    kept = captures(rig.log).get(rig.name)
    return kept is not None and kept.tables["a"].state == "live"


def lag(command: Command, folder: Path, rig: Rig) -> int:
    """The bytes that `headwater capture status` shows."""
    shown = command("capture", "status", rig.name, "--json", "--log", folder / "log")
    return int(json.loads(shown.out)["lag"]["bytes"])
