"""The tables of a captured SQLite database: those that change their columns, come and go, and those that cannot be captured."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.model.errors import NotCapturable
from tests.rigs.capture.sqlite import USERS, Make, Rig, rigs


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def test_a_row_without_a_key_stops_its_table_alone(rig: Make) -> None:
    """SQLite allows null in a primary key; nothing can be said of such a row. Once it is gone the table is copied anew."""
    shop = rig(USERS, "CREATE TABLE t (k TEXT PRIMARY KEY, v TEXT)", "INSERT INTO t VALUES ('a', '1')")
    shop.capture.catch_up()
    shop.run("INSERT INTO t VALUES (NULL, 'x')", "INSERT INTO t VALUES ('b', '2')", "INSERT INTO users (id) VALUES (1)")
    shop.assert_same("users")
    assert shop.state("t") == "stopped"
    assert "NULL in the key column 'k'" in (shop.capture.progress.tables["t"].why or "")
    shop.run("DELETE FROM t WHERE k IS NULL OR k = 'a'")
    shop.open()
    shop.assert_same("t", "users")


def test_columns_are_added_renamed_and_dropped(rig: Make) -> None:
    """The topic has every column that the table ever had; those that are gone are null in what comes."""
    shop = rig(USERS, "INSERT INTO users (id, name) VALUES (1, 'ada'), (2, 'bob')")
    shop.capture.catch_up()
    shop.run("ALTER TABLE users ADD COLUMN note TEXT", "UPDATE users SET note = 'n' WHERE id = 1")
    shop.assert_same("users")
    assert [op for op, *_ in shop.ops("users")] == ["u", "u"]  # nothing was copied again
    shop.run("ALTER TABLE users ADD COLUMN level INTEGER DEFAULT 5", "INSERT INTO users (id) VALUES (3)")
    shop.assert_same("users")
    shop.run("ALTER TABLE users RENAME COLUMN note TO remark", "UPDATE users SET remark = 'r' WHERE id = 2")
    shop.assert_same("users")
    with pytest.raises(sqlite3.OperationalError, match="headwater:shop:users"):
        shop.run("ALTER TABLE users DROP COLUMN level")
    shop.run(
        "BEGIN", *drop_triggers(shop), "ALTER TABLE users DROP COLUMN level", "DELETE FROM users WHERE id = 1", "COMMIT"
    )
    shop.assert_same("users")
    assert shop.log.topic("users").schema.names == [
        "id", "name", "amount", "data", "is_new", "committed", "note", "level", "remark",
    ]  # fmt: skip


def drop_triggers(shop: Rig) -> list[str]:
    return [f'DROP TRIGGER "{name}"' for name in shop.objects() if name.startswith("headwater:shop:users:")]


def test_a_table_made_anew_in_its_place_is_followed(rig: Make) -> None:
    """As migration tools do it: copy, drop, rename. What nobody saw meanwhile is found by comparing."""
    shop = rig(USERS, "INSERT INTO users (id, name) VALUES (1, 'ada'), (2, 'bob')")
    shop.capture.catch_up()
    shop.run(
        "CREATE TABLE other (id INTEGER PRIMARY KEY, name TEXT, email TEXT)",
        "INSERT INTO other (id, name) SELECT id, name FROM users",
        "DROP TABLE users",
        "ALTER TABLE other RENAME TO users",
        "DELETE FROM users WHERE id = 1",
        "INSERT INTO users VALUES (3, 'eve', 'e@x')",
    )
    shop.assert_same("users")
    shop.run("UPDATE users SET email = 'b@x' WHERE id = 2")
    shop.assert_same("users")


def test_a_change_that_cannot_be_followed_stops_that_table_alone(rig: Make) -> None:
    """Text where numbers were: with advice, and the other tables go on."""
    shop = rig(USERS, "CREATE TABLE t (k INTEGER PRIMARY KEY, v INTEGER)", "INSERT INTO t VALUES (1, 1)")
    shop.capture.catch_up()
    shop.run("DROP TABLE t", "CREATE TABLE t (k INTEGER PRIMARY KEY, v TEXT)", "INSERT INTO t VALUES (1, 'x')")
    shop.run("INSERT INTO users (id) VALUES (1)")
    shop.assert_same("users")
    assert shop.state("t") == "stopped"
    assert "Delete the topics 't' and 't.changes'" in (shop.capture.progress.tables["t"].why or "")
    for topic in ("t", "t.changes"):
        shop.log.delete_topic(topic)
    shop.open()
    shop.assert_same("t", "users")


def test_a_dropped_table_stops_and_comes_back(rig: Make) -> None:
    """Its topic keeps what it had."""
    shop = rig(USERS, "CREATE TABLE t (k INTEGER PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    shop.capture.catch_up()
    shop.run("DROP TABLE t", "INSERT INTO users (id) VALUES (1)")
    shop.assert_same("users")
    assert shop.state("t") == "stopped"
    shop.run("CREATE TABLE t (k INTEGER PRIMARY KEY)", "INSERT INTO t VALUES (2)")
    shop.assert_same("users", "t")
    assert shop.state("t") == "live"


def test_tables_can_be_added_and_left_out_later(rig: Make) -> None:
    """Without starting over: the new one is copied, the others go on; one that was let go is compared when it comes back."""
    shop = rig(USERS, "CREATE TABLE t (k INTEGER PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    shop.capture.catch_up()
    before = shop.log.offsets("users")
    shop.open(tables=["users"])
    shop.run("INSERT INTO t VALUES (2)", "DELETE FROM t WHERE k = 1")
    shop.capture.catch_up()
    assert not [name for name in shop.objects() if ":t:" in name]
    shop.run("CREATE TABLE u (k INTEGER PRIMARY KEY)", "INSERT INTO u VALUES (5)")
    shop.open(tables=["users", "t", "u"])
    shop.assert_same("users", "t", "u")
    assert shop.log.offsets("users") == before


def test_a_table_without_a_key_is_refused_with_what_to_do(rig: Make) -> None:
    """Unless columns are named that are unique and never null."""
    shop = rig(USERS, "CREATE TABLE t (a INTEGER NOT NULL, b TEXT, c TEXT)")
    assert "primary key" in shop.capture.source.left_out["t"]
    with pytest.raises(NotCapturable, match=r"no primary key.*--key t="):
        shop.open(tables=["t"])
    with pytest.raises(NotCapturable, match=r'CREATE UNIQUE INDEX "t_key" ON "t" \("a"\)'):
        shop.open(tables=["t"], key={"t": ["a"]})
    with pytest.raises(NotCapturable, match="no key column 'z'"):
        shop.open(tables=["t"], key={"t": ["z"]})
    shop.run('CREATE UNIQUE INDEX "t_key" ON "t" ("a")', "INSERT INTO t VALUES (1, 'x', 'y')")
    shop.open(tables=["t"], key={"t": ["a"]})
    shop.assert_same("t")


@pytest.mark.parametrize(
    ("statement", "table", "word"),
    [
        ("CREATE TABLE other (id INTEGER PRIMARY KEY)", "users2", "Its tables are: other, users"),
        ("CREATE VIEW v AS SELECT 1 AS a", "v", "is a view"),
        ("CREATE TABLE t (_id INTEGER PRIMARY KEY)", "t", "underscore"),
        ("CREATE TABLE t (id INTEGER PRIMARY KEY, committed TEXT)", "t", "'committed'"),
        ('CREATE TABLE "a b" (id INTEGER PRIMARY KEY)', "a b", "not a valid name of a topic"),
        ("CREATE TABLE t (op INTEGER PRIMARY KEY)", "t", "column of its history"),
    ],
)
def test_a_table_that_cannot_be_captured_is_refused(rig: Make, statement: str, table: str, word: str) -> None:
    """With what is in the way."""
    shop = rig(USERS, statement)
    with pytest.raises(NotCapturable, match=word):
        shop.open(tables=[table])


def test_a_unique_index_on_an_expression_needs_a_promise(rig: Make) -> None:
    """What REPLACE removes for it cannot be seen."""
    shop = rig(USERS, "CREATE TABLE t (k INTEGER PRIMARY KEY, e TEXT)", "CREATE UNIQUE INDEX i ON t (lower(e))")
    with pytest.raises(NotCapturable, match=r"\?replace=never"):
        shop.open(tables=["t"])
    shop.url += "?replace=never"
    shop.open(tables=["t"])
