"""Databases that are polled by a column that increases: what is seen, what waits, and what is told to be in the way."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headwater.capture.capture import Capture
from headwater.capture.poll import source as poll
from headwater.capture.progress import captures
from headwater.capture.source_url import open_source, parse_source_url
from headwater.log.log import Log, open_log
from headwater.model.errors import InvalidInput, NotCapturable
from headwater.testing.crash.points import kill_at
from headwater.testing.servers.postgres import PostgresServer
from tests.rigs.children import Child

AT_ONCE = "&settle=0 seconds&every=0 seconds"


class Shop:
    """A database that is polled, and the log."""

    def __init__(self, folder: Path, options: str = AT_ONCE) -> None:
        self.database = sqlite3.connect(folder / "shop.db", isolation_level=None)
        self.run("CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, version INT NOT NULL)")
        self.log: Log = open_log(folder / "log", durability="os")
        self.url = f"poll+sqlite:///{folder}/shop.db?table=users&by=version{options}"

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.database.execute(statement)

    def open(self, **settings: Any) -> Capture:
        capture = Capture(self.log, open_source(self.url), partitions=2, **settings)
        capture.open()
        return capture

    def rows(self) -> dict[int, tuple[str, int]]:
        return {row["id"]: (row["name"], row["version"]) for row in self.log.table("users").to_pylist()}

    def real(self) -> dict[int, tuple[str, int]]:
        return {id_: (name, version) for id_, name, version in self.database.execute("SELECT * FROM users")}

    def ops(self) -> list[tuple[str, int]]:
        events = sorted(self.log.read("users.changes").to_pylist(), key=lambda event: event["position"])
        return [(event["op"], event["id"]) for event in events]


def test_rows_are_copied_then_seen_whenever_their_column_increases(tmp_path: Path) -> None:
    """Ties come together, a row that was changed twice comes once, and a restart goes on."""
    shop = Shop(tmp_path)
    shop.run("INSERT INTO users VALUES (1, 'ada', 1), (2, 'bob', 1), (3, 'eve', 2)")
    capture = shop.open()
    capture.catch_up()
    assert sorted(shop.ops()) == [("r", 1), ("r", 2), ("r", 3)]
    shop.run(
        "INSERT INTO users VALUES (4, 'kim', 5), (5, 'lee', 5)", "UPDATE users SET name = 'A', version = 4 WHERE id = 1"
    )
    shop.run("UPDATE users SET name = 'Ada', version = 6 WHERE id = 1")
    capture.catch_up()
    capture.close()
    assert shop.ops()[3:] == [("u", 4), ("u", 5), ("u", 1)]
    shop.run("UPDATE users SET name = 'Bob', version = 7 WHERE id = 2")
    again = shop.open()
    again.catch_up()
    again.catch_up()
    again.close()
    assert shop.ops()[6:] == [("u", 2)]
    assert shop.rows() == shop.real()


def test_many_rows_with_one_value_are_read_by_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page ends between rows that have the same value; none is left out, and none comes twice."""
    monkeypatch.setattr(poll, "ROWS_MAX", 3)
    shop = Shop(tmp_path)
    shop.run(*(f"INSERT INTO users VALUES ({number}, 'a', {number // 5})" for number in range(14)))
    capture = shop.open()
    capture.catch_up()
    shop.run("UPDATE users SET name = 'b', version = 9")
    capture.catch_up()
    capture.close()
    assert sorted(shop.ops()) == sorted(
        [("r", number) for number in range(14)] + [("u", number) for number in range(14)]
    )
    assert shop.rows() == shop.real()


def test_a_value_that_commits_late_is_waited_for(tmp_path: Path) -> None:
    """A greater value is visible first; what is smaller and comes within `settle` is not passed by."""
    shop = Shop(tmp_path, "&settle=400 milliseconds&every=20 milliseconds")
    shop.run("INSERT INTO users VALUES (1, 'ada', 1)")
    capture = shop.open()
    capture.catch_up()
    shop.run("INSERT INTO users VALUES (2, 'early', 10)")
    capture.step(timeout_s=0.1)
    assert shop.rows().keys() == {1}
    shop.run("INSERT INTO users VALUES (3, 'late', 5)")
    deadline = time.monotonic() + 20
    while shop.rows().keys() != {1, 2, 3} and time.monotonic() < deadline:
        capture.step(timeout_s=0.05)
    capture.close()
    assert shop.ops()[1:] == [("u", 3), ("u", 2)]


def test_deleted_rows_are_found_by_comparing(tmp_path: Path) -> None:
    """Without `compare` they stay; with it the table is read again, and what is gone is removed."""
    shop = Shop(tmp_path)
    shop.run("INSERT INTO users VALUES (1, 'ada', 1), (2, 'bob', 2)")
    capture = shop.open()
    capture.catch_up()
    shop.run("DELETE FROM users WHERE id = 2")
    capture.catch_up()
    capture.close()
    assert shop.rows().keys() == {1, 2}
    shop.url += "&compare=1 milliseconds"
    capture = shop.open()
    deadline = time.monotonic() + 20
    while shop.rows().keys() != {1} and time.monotonic() < deadline:
        capture.step(timeout_s=0.01)
    capture.close()
    assert shop.rows() == shop.real()


def test_what_cannot_be_polled_is_told_in_a_sentence(tmp_path: Path) -> None:
    """No column, one that is not there, one that says nothing of order, and rows that have none."""
    shop = Shop(tmp_path)
    shop.run("CREATE TABLE odd (id INTEGER PRIMARY KEY, raw BLOB, at INT)", "INSERT INTO odd VALUES (1, NULL, NULL)")
    bare = f"poll+sqlite:///{tmp_path}/shop.db"
    with pytest.raises(InvalidInput, match=r"\?by="):
        open_source(bare)
    for options, said in (
        ("?table=users&by=updated", "Its columns are: id, name, version"),
        ("?table=odd&by=raw", "does not increase"),
        ("?table=odd&by=at", "WHERE at IS NULL"),
    ):
        with pytest.raises(NotCapturable, match=said):
            open_source(bare + options).check()
    several = open_source(f"{bare}?by.users=version")
    assert [table.name for table in several.check()] == ["users"]
    assert parse_source_url(parse_source_url(shop.url).shown).path == parse_source_url(shop.url).path


def test_a_row_without_a_value_stops_its_table(tmp_path: Path) -> None:
    """It would never be seen: the status says so, and the capture goes on when the row has one."""
    shop = Shop(tmp_path)
    shop.run("CREATE TABLE odd (id INTEGER PRIMARY KEY, at INT)", "INSERT INTO odd VALUES (1, 1)")
    shop.url = shop.url.replace("table=users&by=version", "by.odd=at&by.users=version")
    capture = shop.open()
    capture.catch_up()
    shop.run("INSERT INTO odd VALUES (2, NULL)")
    capture.catch_up()
    capture.close()
    odd = captures(shop.log)["shop"].tables["odd"]
    assert odd.state == "stopped"
    assert "IS NULL" in (odd.why or "")
    shop.run("UPDATE odd SET at = 2 WHERE id = 2")
    capture = shop.open()
    capture.catch_up()
    capture.close()
    assert sorted(shop.log.table("odd").column("id").to_pylist()) == [1, 2]


@pytest.mark.slow
def test_a_poll_that_is_killed_sees_each_version_once(tmp_path: Path) -> None:
    """`kill -9` at steps of the first read and behind it, while rows are written: none is missing, none comes twice."""
    shop = Shop(tmp_path)
    chance, version = random.Random(2), 0
    points = ["capture: chunk read", "capture: before append", "capture: appended", "capture: changes read"] * 2
    for number, point in enumerate([*points, ""]):
        for _ in range(30):
            version += 1
            shop.run(f"INSERT OR REPLACE INTO users VALUES ({chance.randrange(40)}, 'n{number}', {version})")
        child = Child(lambda point=point: poll_until(shop.url, tmp_path, point))
        if point:
            with pytest.raises(AssertionError, match="SIGKILL"):
                child.result()
        else:
            child.result()
    assert shop.rows() == shop.real()
    versions = [event["after"]["version"] for event in shop.log.read("users.changes").to_pylist()]
    assert len(set(versions)) == len(versions)


def poll_until(url: str, folder: Path, point: str) -> None:
    """A capture that reads in small pages and dies where it is told."""
    poll.ROWS_MAX = 7
    kill_at(point)

    with open_log(folder / "log", durability="os") as log:
        capture = Capture(log, open_source(url), partitions=2)
        capture.open()
        capture.catch_up()
        if point == "":
            capture.close()


@pytest.mark.service("postgres")
def test_postgresql_is_polled_by_a_time(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any role that may read: no slot, no publication; keys of two columns, ties, and every type as a capture has it."""
    import psycopg

    monkeypatch.setattr(poll, "ROWS_MAX", 4)
    log = open_log(tmp_path / "log", durability="os")
    name = f"polled_{os.getpid()}"
    with psycopg.connect(postgres.url, autocommit=True) as database:
        database.execute(f"DROP TABLE IF EXISTS {name}")
        database.execute(
            f"CREATE TABLE {name} (a int, b text, price numeric(8, 2), tags text[], at timestamptz NOT NULL, PRIMARY KEY (a, b))"
        )
        try:
            database.execute(
                f"INSERT INTO {name} SELECT n, 'it''s', n / 4.0, ARRAY['x', NULL], '2026-01-01Z' FROM generate_series(1, 10) n"
            )
            url = postgres.url.replace("postgresql://", "poll+postgresql://") + f"?table={name}&by=at{AT_ONCE}"
            for statement in (
                f"UPDATE {name} SET price = 0, at = '2026-01-02Z' WHERE a < 7",
                f"INSERT INTO {name} VALUES (11, 'new', 1, NULL, '2026-01-03 00:00:00.000001Z')",
            ):
                capture = Capture(log, open_source(url, name="polled"), partitions=1)
                capture.open()
                capture.catch_up()
                database.execute(statement)
                capture.catch_up()
                capture.close()
            columns = ["a", "b", "price", "tags", "at"]
            real = [dict(zip(columns, row, strict=True)) for row in database.execute(f"SELECT * FROM {name}")]
            found = log.table(name).select(columns).to_pylist()
            assert sorted(found, key=str) == sorted((_utc(row) for row in real), key=str)
            ops = [event["op"] for event in log.read(f"{name}.changes").to_pylist()]
            assert (ops.count("r"), ops.count("u")) == (10, 7)
            with (
                closing(open_source(url.replace("by=at", "by=b"), name="polled")) as refused,
                pytest.raises(NotCapturable, match="does not increase"),
            ):
                refused.check()
        finally:
            database.execute(f"DROP TABLE {name}")


def _utc(row: dict[str, Any]) -> dict[str, Any]:
    from zoneinfo import ZoneInfo

    return {**row, "at": row["at"].astimezone(ZoneInfo("UTC"))}
