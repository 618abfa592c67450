"""Sinks that apply transactions of a captured database whole: at every look the target is what the source was at one of its commits."""

from __future__ import annotations

import random
import signal
import sqlite3
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import headwater as hw
from headwater.log.file.store import LocalStore
from headwater.log.file.upkeep.compaction import is_overtaken
from headwater.model.errors import InvalidApp, NotCapturable
from headwater.model.points import watched
from headwater.processing.source.capture_transactions import whole_ends
from headwater.testing.servers.postgres import PostgresServer
from tests.rigs.app.mirror_app import Onlooker, declared, life, until
from tests.rigs.capture.bank import TABLES, Bank, looking, rows_by, seen_in, sqlite_bank
from tests.rigs.capture.sqlite import Rig

MOVES = 60
STEPS = ("transactions: read", "sink: begun", "sink: piece applied", "sink: committed")


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    made = sqlite_bank(tmp_path)
    made.make()
    return made


def target(kind: str, folder: Path, request: pytest.FixtureRequest) -> str:
    if kind != "postgres":
        return f"{kind}:///{folder}/copy.{kind}"
    import psycopg

    server: PostgresServer = request.getfixturevalue("postgres")
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"drop table if exists headwater_ledger, {', '.join(TABLES)}")
    return server.url


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.covers("GoldenGate")
@pytest.mark.parametrize(
    "kinds", [("sqlite", "duckdb"), pytest.param(("postgres",), marks=pytest.mark.service("postgres"))], ids="+".join
)
def test_a_target_is_always_what_its_source_was_at_a_commit(
    kinds: tuple[str, ...], bank: Bank, tmp_path: Path, spark: SparkSession, request: pytest.FixtureRequest
) -> None:
    """While the tables are copied and clients write: all of a transaction, in all tables, or nothing of it; in the end all of them."""
    targets = {kind: target(kind, tmp_path, request) for kind in kinds}
    app = declared(tmp_path, bank.url, targets, spark=spark)
    onlookers = [Onlooker(bank, url) for url in targets.values()]
    app.start()
    try:
        with bank.busy(seed=7):
            until(lambda: all(len(each.seen) >= 12 for each in onlookers), *onlookers)
        until(lambda: all(each.has_all for each in onlookers), *onlookers)
    finally:
        app.stop()
    for url in targets.values():
        with looking(url) as ask:
            assert rows_by(ask) == bank.rows()


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "kind", ["sqlite", pytest.param("postgres", marks=[pytest.mark.service("postgres"), pytest.mark.bench])]
)
def test_a_killed_application_leaves_whole_transactions_and_goes_on(
    kind: str, bank: Bank, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Killed at every step of a batch, while clients write: nobody ever sees a part of one, and in the end all is there once."""
    url, chance = target(kind, tmp_path, request), random.Random(11)
    onlooker = Onlooker(bank, url)
    with bank.busy(seed=11):
        died = [life(tmp_path, bank.url, onlooker, die_at=step, die_on=chance.randrange(1, 4)) for step in STEPS]
    assert died == [-signal.SIGKILL] * len(STEPS)
    assert life(tmp_path, bank.url, onlooker) == 0
    with looking(url) as ask:
        assert rows_by(ask) == bank.rows()
        assert ask("select count(*) from headwater_ledger").fetchall() == [(1,)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_row_that_is_refused_leaves_its_transaction_out_and_stops_the_stage(
    bank: Bank, tmp_path: Path, spark: SparkSession
) -> None:
    """A part of a transaction would be worse than none. A stage cannot begin again where it would leave some out, only where it was."""
    app = declared(tmp_path, bank.url, {"copy": f"sqlite:///{tmp_path}/copy.db"}, spark=spark)
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        copy.execute("create table counter (id integer primary key, n int check (n < 3))")
    for moves, failed in ((2, ""), (3, "rejected a row of table 'counter'")):
        with bank.connected() as source:
            for _ in range(moves):
                bank.move(source, random.Random(moves))
        status = app.run(available_now=True, check=False)
        assert failed in (status.stages[-1].error or "")
    assert seen_in(f"sqlite:///{tmp_path}/copy.db") == bank.states[2]
    with pytest.raises(InvalidApp, match="parts of transactions"):
        app.run(available_now=True, accept_new_checkpoint={"to.copy": "latest"})
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        copy.executescript(
            "alter table counter rename to strict; create table counter (id integer primary key, n int);"
            "insert into counter select id, n from strict"
        )
    app.run(available_now=True, accept_new_checkpoint={"to.copy": "marker"})
    with looking(f"sqlite:///{tmp_path}/copy.db") as ask:
        assert rows_by(ask) == bank.rows()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_column_that_comes_while_it_runs_comes_with_its_values(
    bank: Bank, tmp_path: Path, spark: SparkSession
) -> None:
    """Nobody has to start the application again, and no row of the target lacks what the source's has."""
    onlooker = Onlooker(bank, f"sqlite:///{tmp_path}/copy.db")
    app = declared(tmp_path, bank.url, {"copy": onlooker.url}, spark=spark)
    app.start()
    try:
        until(lambda: onlooker.has_all, onlooker)
        with bank.connected() as ask:
            ask("alter table vaults add column owner text")
            ask("update vaults set owner = 'Ada'")
        until(lambda: owners(onlooker.url) == ["Ada"] * 5, onlooker)
    finally:
        app.stop()


def owners(url: str) -> list[str | None]:
    with looking(url) as ask:
        has_owner = "owner" in {row[1] for row in ask("pragma table_info(vaults)")}
        return [owner for (owner,) in ask("select owner from vaults")] if has_owner else []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_batch_that_compaction_overtakes_is_planned_anew(bank: Bank, tmp_path: Path, spark: SparkSession) -> None:
    """What it was to write is gone from the log for the sake of rows behind its ends: it is given up, and the next one has these."""
    with hw.open_log(tmp_path / "log") as log, ExitStack() as watching:
        for name, columns in (("vaults", "name STRING NOT NULL, balance BIGINT"), ("counter", "id BIGINT, n BIGINT")):
            key = columns.partition(" ")[0]
            more = {"key": key, "time": "committed", "compact": True, "partitions": 1, "segment_bytes": 4096}
            log.create_topic(name, f"{columns}, committed TIMESTAMP", **more)
        strikes = threading.Event()
        gone: list[int] = []

        def strike(point: str) -> None:
            if point == "transactions: planned" and strikes.is_set():
                strikes.clear()
                gone.append(overtake(bank, log))

        watching.enter_context(watched(strike))
        onlooker = Onlooker(bank, f"sqlite:///{tmp_path}/copy.db")
        app = declared(tmp_path, bank.url, {"copy": onlooker.url}, spark=spark)
        app.start()
        try:
            until(lambda: onlooker.has_all, onlooker)
            strikes.set()
            with bank.connected() as ask:
                bank.move(ask, random.Random(1))
            until(lambda: bool(gone) and onlooker.has_all, onlooker)
            assert gone == [0]
            assert app.status().stages[-1].restarts == 1
        finally:
            app.stop()
        with looking(onlooker.url) as ask:
            assert rows_by(ask) == bank.rows()


def overtake(bank: Bank, log: hw.Log) -> int:
    """Moves money until the segments that a batch is to read are closed, and compacts them; how many of its rows of `counter` are left."""
    end = log.offsets("counter")[0].stop
    chance = random.Random(2)
    with bank.connected() as ask:
        for number in range(end, end + MOVES):
            bank.move(ask, chance)
            while log.offsets("counter")[0].stop <= number:
                time.sleep(0.001)
    for topic in ("vaults", "counter"):
        log.tidy(topic)
    return log.read("counter", end={0: end}).num_rows


def test_there_are_no_ends_while_a_table_is_copied(tmp_path: Path) -> None:
    """Then those of one moment; a table that its capture cannot follow any more is told."""
    rows = ", ".join(f"({n}, {n})" for n in range(5_000))
    made = [f"create table {name} (id integer primary key, n int)" for name in "ab"]
    rig = Rig(tmp_path, *made, f"insert into a values {rows}", f"insert into b values {rows}")
    ends = whole_ends(rig.log, "capture.shop", ("a", "b"))
    while rig.capture.status().state == "copying":
        assert ends == {}
        rig.capture.step(timeout_s=0.0)
        ends = whole_ends(rig.log, "capture.shop", ("a", "b"))
    assert sum(ends.values()) == 10_000
    rig.run("drop table b")
    rig.capture.catch_up()
    with pytest.raises(NotCapturable, match="'b' has stopped"):
        whole_ends(rig.log, "capture.shop", ("a", "b"))
    rig.close()


def test_compaction_that_overtakes_a_batch_is_noticed(tmp_path: Path) -> None:
    """It has taken rows for the sake of some behind the batch's ends; what it took within them is no loss."""
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("users", "id BIGINT, n BIGINT", key="id", compact=True, partitions=1, segment_bytes=4096)
        assert isinstance(log.store, LocalStore)
        begun_us = time.time_ns() // 1000
        for n in range(20):
            log.append("users", [{"id": each, "n": n} for each in range(100)])
        end = log.offsets("users")[0].stop
        log.tidy("users")
        assert not is_overtaken(log.store.handles, "users", 0, end=end, since_us=begun_us)
        planned_us = time.time_ns() // 1000
        for n in range(20):
            log.append("users", [{"id": each, "n": n} for each in range(100)])
        assert not is_overtaken(log.store.handles, "users", 0, end=end, since_us=planned_us)
        log.tidy("users")
        assert is_overtaken(log.store.handles, "users", 0, end=end, since_us=planned_us)


@pytest.mark.parametrize(
    ("tables", "to", "more", "said"),
    [
        (["users", "orders"], "redis://host/0", {}, "redis://host/0 does not support transactions over several tables"),
        (["users", "orders"], "delta:///./warehouse", {}, "does not support transactions over several tables"),
        (["users", "orders"], "./warehouse", {}, "does not support transactions over several tables"),
        (["users", "orders"], "sqlite:///x.db?table=users", {}, "names one table"),
        (["users", "orders"], "sqlite:///x.db", {"events_max": 10}, "events_max=10 would split transactions"),
        (["users", "orders"], "sqlite:///x.db", {"key": "id"}, "cannot apply to all"),
        (["users", "orders"], "sqlite:///x.db", {"transactions": False}, "copies one topic or table"),
        (["users", "clicks"], "sqlite:///x.db", {}, "'clicks' is not a captured table"),
        (["users", "others"], "sqlite:///x.db", {}, "'users' and 'others' come from different databases"),
        (["polled"], "sqlite:///x.db", {}, "poll\\+sqlite://, which does not report"),
        ([], "sqlite:///x.db", {}, "no inputs"),
    ],
)
def test_what_cannot_be_whole_is_refused(tables: list[str], to: str, more: dict[str, Any], said: str) -> None:
    """When it is declared, with the line of the script."""
    app = hw.App("mirror", log="./data")
    app.topic("clicks", "id BIGINT", key="id")
    for name in ("users", "orders"):
        app.table(name, source="sqlite:///shop.db")
    app.table("others", source="sqlite:///other.db?table=users")
    app.table("polled", source="poll+sqlite:///shop.db?by=at")
    with pytest.raises(InvalidApp, match=said) as raised:
        app.sink(tables, to=to, **{"transactions": True, **more})
    assert "test_sinks_transactions.py" in str(raised.value)


def test_kafka_shows_transactions_in_parts() -> None:
    """Partition by partition, so a sink could not know when one is whole."""
    app = hw.App("mirror", log="kafka://host:9092", state="./state", views="sqlite:///views.db")
    users = app.table("users", source="sqlite:///shop.db")
    with pytest.raises(InvalidApp, match="partition by partition"):
        app.sink([users], to="sqlite:///x.db", transactions=True)
