"""Connectors: sources and targets of several kinds in one application, each a task of its own, and what leaves a database in order."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater.capture.progress import captures
from headwater.log.log import open_log
from headwater.sinks.debezium_export import DebeziumExport
from tests.rigs.app import connectors
from tests.rigs.app.storm_orders import kill_session
from tests.rigs.capture.debezium import envelope, pour
from tests.rigs.capture.sqlite import Rig

GOES_ON_S = 240.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.covers("Kafka Connect")
def test_connectors_run_side_by_side_and_go_on_where_they_were(tmp_path: Path) -> None:
    """A captured database, a polled one and Debezium's topics; one that cannot go on does not hold up the others; all is killed with
    `kill -9` and goes on: every change once, transformed, and each row that the target refuses is one dead letter."""
    shop, old, target = (
        sqlite3.connect(tmp_path / name, isolation_level=None) for name in ("shop.db", "old.db", "target.db")
    )
    shop.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)")
    old.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, amount REAL, version INT NOT NULL)")
    target.execute("CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT CHECK (name <> 'BAD'))")
    topics = open_log(tmp_path / "kafka", durability="os")
    shop.execute("INSERT INTO users VALUES (1, 'ada'), (2, 'bad')")
    old.execute("INSERT INTO orders VALUES (1, 1.5, 1)")
    pour(topics, [stock(1, "first")])

    def held(table: str) -> dict[int, Any]:
        try:
            return {row[0]: row[1] for row in target.execute(f"SELECT * FROM {table}")}
        except sqlite3.OperationalError:
            return {}

    life = start(tmp_path)
    wait_for(
        life, lambda: held("people") == {1: "ADA"} and held("stock") != {} and held("doubled") == {1: 3.0}, tmp_path
    )
    pour(topics, [{**stock(1, "x"), "value": '{"op":"c","before":null,"after":{"id":"none"}}'}])
    shop.execute("INSERT INTO users VALUES (3, 'eve')")
    old.execute("UPDATE orders SET amount = 2.0, version = 2")
    wait_for(life, lambda: held("people") == {1: "ADA", 3: "EVE"} and held("doubled") == {1: 4.0}, tmp_path)
    kill_session(life.pid)
    life.wait()
    shop.execute("UPDATE users SET name = 'Ada' WHERE id = 1")
    shop.execute("DELETE FROM users WHERE id = 3")
    shop.execute("INSERT INTO users VALUES (4, 'kim'), (5, 'Bad')")
    old.execute("INSERT INTO orders VALUES (2, 0.5, 3)")
    assert start(tmp_path, "now").wait(GOES_ON_S) == 0, (tmp_path / "driver.txt").read_text()[-2000:]

    with open_log(tmp_path / "log") as log:
        assert held("people").items() >= {1: "ADA", 4: "KIM"}.items()
        assert held("doubled") == {1: 4.0, 2: 1.0}
        changes = sorted((c["position"], c["op"], c["id"]) for c in log.read("users.changes").to_pylist())
        assert [(op, id_) for _, op, id_ in changes if op != "r"] == [("c", 3), ("u", 1), ("d", 3), ("c", 4), ("c", 5)]
        assert sorted(c["op"] for c in log.read("orders.changes").to_pylist()) == ["r", "u", "u"]
        dead = sorted(json.loads(one["event"])["id"] for one in log.read("people.dead").to_pylist())
        assert dead == [2, 5]
        states = {name: {t.state for t in progress.tables.values()} for name, progress in captures(log).items()}
    assert states == {"shop": {"live"}, "old": {"live"}, "erp": {"stopped"}}
    for connection in (shop, old, target):
        connection.close()


def stock(number: int, name: str) -> dict[str, Any]:
    return {"topic": "erp.hr.stock", "key": json.dumps({"id": number}), "value": envelope(number, name=name)}


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """One run of the application, in a session of its own."""
    with (folder / "driver.txt").open("ab") as output:
        words = [sys.executable, connectors.__file__, str(folder), *arguments]
        return subprocess.Popen(words, start_new_session=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def wait_for(life: subprocess.Popen[bytes], done: Callable[[], bool], folder: Path) -> None:
    """Waits; a driver that ended in the meantime is an error."""
    deadline = time.monotonic() + GOES_ON_S
    try:
        while not done():
            told = (folder / "driver.txt").read_text(errors="replace")[-3000:]
            assert life.poll() is None, told
            assert time.monotonic() < deadline, told
            time.sleep(0.05)
    except BaseException:
        kill_session(life.pid)
        raise


@pytest.mark.covers("VoltDB")
def test_a_table_that_is_only_inserted_into_leaves_in_commit_order(tmp_path: Path) -> None:
    """An outbox: several writers insert, one of them out of the order of its numbers, rows are removed once they are out; what leaves is
    every row once, in the order of the commits, in a topic of one partition that others read."""
    rig = Rig(tmp_path, "CREATE TABLE outbox (id TEXT PRIMARY KEY, body TEXT)")
    writers = [sqlite3.connect(rig.path, isolation_level=None, timeout=30) for _ in range(3)]
    out = open_log(tmp_path / "out", durability="os")
    export = DebeziumExport(rig.log, "outbox.changes", to=out, topic="bus.outbox", schemas=False, tombstones=False)
    export.open()
    committed = []
    for number in range(90):
        writer = writers[number * 7 % 3]
        names = [f"{97 * number % 101:03d}-{part}" for part in range(1 + number % 3)]
        writer.execute("BEGIN IMMEDIATE")
        for name in names:
            writer.execute("INSERT INTO outbox VALUES (?, ?)", (name, f"body of {name}"))
        writer.execute("ROLLBACK" if number % 10 == 9 else "COMMIT")
        committed += [] if number % 10 == 9 else names
        if number % 20 == 19:
            rig.capture.catch_up()
            export.catch_up()
            writer.execute("DELETE FROM outbox")
    rig.capture.catch_up()
    export.catch_up()
    events = [json.loads(value) for value in out.read("bus.outbox").column("value").to_pylist()]
    assert [event["after"]["id"] for event in events if event["op"] == "c"] == committed
    assert {event["op"] for event in events} == {"c", "d"}
    for writer in writers:
        writer.close()
