"""`headwater capture …`: run, list, status, remove, and what is told when something is wrong."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headwater.log.log import open_log
from tests.rigs.commands import Command, command, refused, start

__all__ = ["command"]


@pytest.fixture
def database(command: Command, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)")
        connection.execute("CREATE TABLE bare (a TEXT)")
        connection.execute("INSERT INTO users VALUES (1, 'ada'), (2, 'bob')")
        yield connection


def test_a_database_is_captured_listed_and_removed(command: Command, database: sqlite3.Connection) -> None:
    """What is left out is said; nothing stays behind."""
    objects = database.execute("SELECT name FROM sqlite_master").fetchall()
    done = command("capture", "run", "sqlite:///shop.db", "--available-now")
    assert done.code == 0
    assert "skipped table bare" in done.err
    assert json.loads(done.out)["tables"]["users"]["state"] == "live"
    assert command("sql", "SELECT name FROM users ORDER BY id", "--format", "json").rows == [
        {"name": "ada"},
        {"name": "bob"},
    ]
    database.execute("INSERT INTO users VALUES (3, 'eve')")
    listed = json.loads(command("capture", "list", "--json").out)
    assert [(each["source"], each["events"]) for each in listed] == [("shop", 2)]
    status = json.loads(command("capture", "status", "shop", "--json").out)
    assert status["lag"]["rows"] == 1
    assert "1 changes" in command("capture", "status", "shop").out
    assert "shop" in command("capture", "list").out
    refused(command("capture", "remove", "shop"), "invalid_input", "--yes")
    assert command("capture", "remove", "shop", "--yes", "--topics").code == 0
    assert database.execute("SELECT name FROM sqlite_master").fetchall() == objects
    assert json.loads(command("capture", "list", "--json").out) == []


def test_what_cannot_be_captured_is_refused(command: Command, database: sqlite3.Connection) -> None:
    """Each with what to do next."""
    refused(command("capture", "run", "sqlite:///shop.db", "-t", "bare"), "not_capturable", "--key bare=")
    refused(command("capture", "run", "sqlite:///shop.db", "-t", "nobody"), "not_capturable", "users")
    refused(command("capture", "run", "sqlite:///none.db"), "not_found")
    refused(command("capture", "run", "oracle://x/y"), "unsupported", "sqlite")
    refused(command("capture", "run", "sqlite:///shop.db", "--key", "bare"), "invalid_input", "--key")
    refused(command("capture", "status", "shop"), "not_found")
    refused(command("capture", "remove", "shop", "--yes"), "not_found")
    assert not database.execute("SELECT name FROM sqlite_master WHERE name LIKE 'headwater:%'").fetchall()


def test_a_database_that_is_gone_can_be_forgotten(
    command: Command, database: sqlite3.Connection, tmp_path: Path
) -> None:
    """Its capture is taken out of the log; there is nothing to take out elsewhere."""
    command("capture", "run", "sqlite:///shop.db", "--available-now")
    (tmp_path / "shop.db").rename(tmp_path / "moved.db")
    assert "does not exist" in command("capture", "status", "shop").out
    refused(command("capture", "remove", "shop", "--yes"), "not_found")
    assert command("capture", "remove", "shop", "--yes", "--forget").code == 0


@pytest.mark.slow
def test_it_follows_until_ctrl_c(command: Command, database: sqlite3.Connection, tmp_path: Path) -> None:
    """The step under way is finished, and the next run goes on there."""
    process = start("capture", "run", f"sqlite:///{tmp_path}/shop.db", "--log", str(tmp_path / "data"))
    try:
        deadline = time.monotonic() + 60
        number = 10
        with open_log(tmp_path / "data") as log:
            while "users" not in log.topics() or number not in log.table("users")["id"].to_pylist():
                assert time.monotonic() < deadline
                assert process.poll() is None
                number += 1
                database.execute("INSERT INTO users VALUES (?, 'x')", (number,))
                time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert json.loads(out)["tables"]["users"]["state"] == "live"
    command("capture", "run", "sqlite:///shop.db", "--available-now")
    with open_log(tmp_path / "data") as log:
        assert len(log.table("users")) == database.execute("SELECT count(*) FROM users").fetchone()[0]


def test_changes_go_out_in_debeziums_envelope_and_come_in_again(
    command: Command, database: sqlite3.Connection, tmp_path: Path
) -> None:
    """`export`, then `run` on what it wrote, in another log; `status` tells how far that is behind."""
    assert command("capture", "run", "sqlite:///shop.db", "--available-now").code == 0
    words = ("capture", "export", "users", "--to", "./bus", "--topic", "shop.users", "--available-now")
    assert json.loads(command(*words).out) == {"topic": "shop.users", "changes": 2}
    assert json.loads(command(*words).out)["changes"] == 0
    url = f"debezium+file://{tmp_path}/bus?topics=shop"
    assert command("capture", "run", url, "--available-now", "--log", "./copy").code == 0
    status = json.loads(command("capture", "status", "shop", "--json", "--log", "./copy").out)
    assert (status["lag"]["rows"], status["tables"]["users"]["state"]) == (0, "live")
    refused(command("capture", "export", "nobody", "--to", "./bus"), "topic_not_found", "nobody.changes")
