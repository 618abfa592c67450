"""A captured SQLite database: what a table and its history are in the log, whatever is done to the database."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from capture_rig import Rig
from headwater.log.log import open_log
from headwater.model.errors import CaptureLost, Fenced, InvalidInput, NotCapturable, Unsupported
from headwater.sources.capture import sqlite
from headwater.sources.capture.capture import Capture
from headwater.sources.capture.open import open_source, parse_source_url
from headwater.sources.capture.removal import remove_capture

USERS = "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, amount REAL, data BLOB, is_new BOOLEAN)"
Make = Callable[..., Rig]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Make]:
    made: list[Rig] = []

    def make(*statements: str, **settings: Any) -> Rig:
        made.append(Rig(tmp_path, *(statements or (USERS,)), **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_rows_that_were_there_and_changes_since_are_the_table(rig: Make) -> None:
    """A row of the backfill is `r`; then every change with the row before and after it."""
    shop = rig(USERS, "INSERT INTO users VALUES (1, 'ada', 1.5, x'00ff', 1), (2, NULL, NULL, NULL, NULL)")
    assert [event["op"] for event in shop.history("users")] == ["r", "r"]
    shop.run(
        "INSERT INTO users VALUES (3, 'bob', 2, x'', 0)",
        "UPDATE users SET name = 'Ada' WHERE id = 1",
        "DELETE FROM users WHERE id = 2",
    )
    none = {"id": 2, "name": None, "amount": None, "data": None, "is_new": None}
    ada = {"id": 1, "name": "ada", "amount": 1.5, "data": b"\x00\xff", "is_new": True}
    assert shop.ops("users") == [
        ("c", None, {"id": 3, "name": "bob", "amount": 2.0, "data": b"", "is_new": False}),
        ("u", ada, {**ada, "name": "Ada"}),
        ("d", none, None),
    ]
    assert [row["id"] for row in shop.table("users")] == [1, 3]
    topic = shop.log.topic("users")
    assert (topic.key, topic.time, topic.compact) == ("id", "committed", True)


def test_a_changed_key_is_a_delete_and_an_insert(rig: Make) -> None:
    """In one transaction, each at a position of its own."""
    shop = rig(USERS, "INSERT INTO users (id, name) VALUES (1, 'ada')")
    shop.capture.catch_up()
    shop.run("UPDATE users SET id = 7 WHERE id = 1")
    (gone, come) = [event for event in shop.history("users") if event["op"] != "r"]
    assert (gone["op"], gone["id"], gone["before"]["name"], gone["after"]) == ("d", 1, "ada", None)
    assert (come["op"], come["id"], come["before"], come["after"]["name"]) == ("c", 7, None, "ada")
    assert gone["transaction"] == come["transaction"]
    assert gone["position"] < come["position"]
    shop.assert_same("users")


def test_a_key_that_only_changes_its_case_is_another_key(rig: Make) -> None:
    """SQLite may compare keys without regard to case; the log never does."""
    shop = rig("CREATE TABLE t (k TEXT PRIMARY KEY COLLATE NOCASE, v)", "INSERT INTO t VALUES ('a', 'x')")
    shop.capture.catch_up()
    shop.run("UPDATE t SET k = 'A'")
    assert [op for op, *_ in shop.ops("t")] == ["d", "c"]
    shop.assert_same("t")


def test_a_composite_key_is_a_json_array(rig: Make) -> None:
    """Also where the table has no rowid."""
    shop = rig("CREATE TABLE t (a TEXT, b INTEGER, v TEXT, PRIMARY KEY (a, b)) WITHOUT ROWID")
    shop.run("INSERT INTO t VALUES ('x\"', 1, 'v'), ('y', 2, NULL)", "UPDATE t SET b = 3 WHERE b = 2")
    shop.assert_same("t")
    assert sorted(shop.log.table("t")["primary_key"].to_pylist()) == ['["x\\"",1]', '["y",3]']
    shop.run("DELETE FROM t")
    assert shop.table("t") == []


@pytest.mark.parametrize("recursive", [False, True])
def test_what_replace_removes_is_removed(rig: Make, recursive: bool) -> None:
    """REPLACE deletes rows that are in the way without firing triggers, unless recursive triggers are on."""
    shop = rig(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT UNIQUE, b TEXT, c TEXT, UNIQUE (b, c))",
        "INSERT INTO t VALUES (1, 'a1', 'b', 'c1'), (2, 'a2', 'b', 'c2'), (3, 'a3', 'b', 'c3'), (4, 'a4', 'b', 'c4')",
        f"PRAGMA recursive_triggers = {int(recursive)}",
    )
    shop.capture.catch_up()
    shop.run("REPLACE INTO t VALUES (9, 'a1', 'b', 'c2')")
    shop.assert_same("t")
    assert sorted(op for op, *_ in shop.ops("t")) == ["c", "d", "d"]
    shop.run("UPDATE OR REPLACE t SET a = 'a4' WHERE id = 3")
    shop.assert_same("t")
    shop.run("INSERT OR IGNORE INTO t VALUES (10, 'a4', 'x', 'x')", "DELETE FROM t WHERE id = 3")
    shop.run("INSERT INTO t VALUES (11, 'q', 'q', 'q')")
    shop.run("INSERT INTO t VALUES (12, 'q', 'r', 'r') ON CONFLICT (a) DO UPDATE SET b = 'z'")
    shop.assert_same("t")
    assert len(shop.table("t")) == 2


def test_a_replaced_row_of_the_same_key_is_written_anew(rig: Make) -> None:
    """As an insert over what was there."""
    shop = rig(USERS, "INSERT INTO users (id, name) VALUES (1, 'ada')")
    shop.capture.catch_up()
    shop.run("REPLACE INTO users (id, name) VALUES (1, 'eve')")
    shop.assert_same("users")


def test_values_that_do_not_fit_are_null_and_kept_in_a_header(rig: Make) -> None:
    """SQLite takes any value in any column; the log's columns have one type, and nothing is lost or stopped."""
    shop = rig("CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER, r REAL, s TEXT, b BLOB, o BOOLEAN, x)")
    shop.run(
        "INSERT INTO t VALUES (1, 'many', 'x', x'ff', 'text', 7, 4)",
        f"INSERT INTO t (id, n, r, s) VALUES (2, 1.5, {2**60 + 1}, CAST(x'61ff' AS TEXT))",
        "INSERT INTO t (id, n, r) VALUES (3, 3, 9e999)",
    )
    rows = {row["id"]: row for row in shop.table("t")}
    assert rows[1] == {"id": 1, "n": None, "r": None, "s": None, "b": b"text", "o": None, "x": "4"}
    assert rows[2] == {"id": 2, "n": None, "r": float(2**60), "s": None, "b": None, "o": None, "x": None}
    assert rows[3]["r"] == float("inf")
    events = {event["id"]: event for event in shop.log.read("t", columns=["id", "_headers"]).to_pylist()}
    assert dict(events[1]["_headers"]) == {
        "misfit.n": b"'many'",
        "misfit.r": b"'x'",
        "misfit.s": b"x'ff'",
        "misfit.o": b"7",
    }
    assert dict(events[2]["_headers"]) == {"misfit.n": b"1.5", "misfit.s": b"CAST(x'61ff' AS TEXT)"}
    assert not events[3]["_headers"]


def test_a_row_without_a_key_stops_its_table_alone(rig: Make) -> None:
    """SQLite allows null in a primary key; nothing can be said of such a row. Once it is gone the table is copied anew."""
    shop = rig(USERS, "CREATE TABLE t (k TEXT PRIMARY KEY, v TEXT)", "INSERT INTO t VALUES ('a', '1')")
    shop.capture.catch_up()
    shop.run("INSERT INTO t VALUES (NULL, 'x')", "INSERT INTO t VALUES ('b', '2')", "INSERT INTO users (id) VALUES (1)")
    shop.assert_same("users")
    assert shop.state("t") == "stopped"
    assert "'k' is NULL" in (shop.capture.progress.tables["t"].why or "")
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


def test_triggers_of_others_do_not_disturb_the_order(rig: Make) -> None:
    """One that writes to the same row, made before the capture or after it."""
    shop = rig(
        USERS,
        "CREATE TRIGGER one AFTER INSERT ON users BEGIN UPDATE users SET amount = 1 WHERE id = new.id; END",
        "CREATE TABLE log (id INTEGER PRIMARY KEY, what TEXT)",
    )
    shop.run("INSERT INTO users (id, name) VALUES (1, 'ada')")
    shop.assert_same("users")
    shop.run(
        "CREATE TRIGGER two AFTER UPDATE ON users BEGIN INSERT INTO log (what) VALUES (old.name); END",
        "CREATE TRIGGER three AFTER INSERT ON users BEGIN UPDATE users SET name = upper(new.name) WHERE id = new.id; END",
        "INSERT INTO users (id, name) VALUES (2, 'bob')",
    )
    shop.assert_same("users", "log")
    shop.run("INSERT INTO users (id, name) VALUES (3, 'eve')")
    shop.assert_same("users", "log")
    assert [name for name in shop.objects() if name in ("one", "two", "three")] == ["one", "three", "two"]


def test_cascades_are_seen(rig: Make) -> None:
    """Rows that a foreign key removes fire triggers as any other."""
    shop = rig(
        "CREATE TABLE a (id INTEGER PRIMARY KEY, up INTEGER REFERENCES a ON DELETE CASCADE)",
        "CREATE TABLE b (id INTEGER PRIMARY KEY, a INTEGER REFERENCES a ON DELETE CASCADE)",
        "PRAGMA foreign_keys = on",
        "INSERT INTO a VALUES (1, NULL), (2, 1), (3, 2)",
        "INSERT INTO b VALUES (1, 1), (2, 3)",
    )
    shop.capture.catch_up()
    shop.run("DELETE FROM a WHERE id = 1")
    shop.assert_same("a", "b")
    assert shop.table("b") == []


def test_the_changes_of_a_transaction_over_two_tables_come_together(rig: Make) -> None:
    """Readers see all of it or nothing; begin and end say what belongs to it."""
    shop = rig(USERS, "CREATE TABLE t (k INTEGER PRIMARY KEY)")
    shop.capture.catch_up()
    shop.run("BEGIN", "INSERT INTO users (id) VALUES (1), (2)", "INSERT INTO t VALUES (9)", "COMMIT")
    shop.run("BEGIN", "INSERT INTO t VALUES (10)", "ROLLBACK")
    shop.capture.catch_up()
    begin, end = shop.log.read("shop.transactions").to_pylist()
    assert (begin["status"], end["status"], end["events"], dict(end["tables"])) == (
        "begin",
        "end",
        3,
        {"users": 2, "t": 1},
    )
    orders = [e["transaction_order"] for name in ("users", "t") for e in shop.history(name)]
    assert sorted(orders) == [0, 1, 2]


def test_a_large_transaction_is_spilled_and_appended_whole(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts lie in files until the last has come; no reader sees some of them."""
    monkeypatch.setattr(sqlite, "CHANGES_ROWS", 100)
    monkeypatch.setattr("headwater.sources.capture.events.SPILL_BYTES", 0)
    shop = rig(USERS)
    shop.capture.catch_up()
    shop.run("BEGIN", *(f"INSERT INTO users (id, name) VALUES ({n}, '{n}')" for n in range(450)), "COMMIT")
    folder = Path(shop.log.url.removeprefix("file://")) / "staged" / "capture.shop"
    files = []
    while not shop.table("users", up=False):
        assert shop.capture.step(timeout_s=0.0)
        files.append(len(list(folder.rglob("*.arrow"))))
    assert files == [3, 5, 7, 9, 0]
    assert len(shop.table("users", up=False)) == 450
    told = shop.log.read("shop.transactions").to_pylist()
    assert [(row["status"], row["events"]) for row in told] == [("begin", None), ("end", 450)]


def test_large_values_do_not_come_all_at_once(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at a time is bounded by bytes, too."""
    monkeypatch.setattr(sqlite, "BYTES_MAX", 1 << 20)
    monkeypatch.setattr("headwater.sources.capture.sqlite_decode._PIECE_ROWS", 2)
    shop = rig(
        USERS, "BEGIN", *(f"INSERT INTO users (id, data) VALUES ({n}, randomblob(400000))" for n in range(9)), "COMMIT"
    )
    shop.assert_same("users")
    shop.run("UPDATE users SET name = 'x'")
    assert not shop.capture.source.changes(shop.capture.progress.position, timeout_s=0.0).whole  # type: ignore[union-attr]
    shop.assert_same("users")


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


def test_event_time_goes_on_while_nothing_changes_and_never_back(rig: Make) -> None:
    """Heartbeats tell readers that nothing more comes; a clock that jumps makes nothing late."""
    shop = rig(USERS, heartbeat_s=0.0)
    shop.capture.catch_up()
    shop.capture.step(timeout_s=0.0)
    reached = shop.log.reached("users")
    assert all(time is not None for time in reached.values())
    shop.run("INSERT INTO users (id) VALUES (1)", 'UPDATE "headwater:shop:changes" SET at = at - 10')
    shop.run("INSERT INTO users (id) VALUES (2)", 'UPDATE "headwater:shop:changes" SET at = at + 20 WHERE seq = 2')
    shop.run("INSERT INTO users (id) VALUES (3)")
    shop.capture.catch_up()
    times = {row["id"]: row["committed"] for row in shop.log.table("users").to_pylist()}
    now = shop.log.clock()
    assert max(filter(None, reached.values())) <= int(times[1].timestamp() * 1e6) + 1
    assert times[1] <= times[2] <= times[3]
    assert times[3].timestamp() * 1e6 <= now + 1
    told = shop.log.clock() + 3_000_000
    shop.log.heartbeat("users", told)  # as an application does that waits for a silent partition
    shop.run("UPDATE users SET name = 'x'")
    shop.capture.catch_up()
    assert set(shop.log.table("users")["committed"].cast(pa.int64()).to_pylist()) == {told}


def test_what_was_confirmed_is_removed_from_the_changelog(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the newest change, whose number must never be given again."""
    monkeypatch.setattr(sqlite, "FORGET_S", 0.0)
    shop = rig(USERS)
    for number in range(5):
        shop.run(f"INSERT INTO users (id) VALUES ({number})")
        shop.capture.catch_up()
    changelog = '"headwater:shop:changes"'
    assert shop.database.execute(f"SELECT seq FROM {changelog}").fetchall() == [(5,)]
    shop.open()
    shop.run("INSERT INTO users (id) VALUES (100)")
    shop.assert_same("users")
    assert shop.history("users")[-1]["position"] == f"{6:016d}"


def test_a_writer_that_holds_the_lock_does_not_stop_the_capture(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In WAL mode it reads on; what it would remove it removes later."""
    monkeypatch.setattr(sqlite, "FORGET_S", 0.0)
    shop = rig(USERS)
    shop.run("INSERT INTO users (id) VALUES (1)", "BEGIN IMMEDIATE", "INSERT INTO users (id) VALUES (2)")
    shop.capture.catch_up()
    assert [row["id"] for row in shop.log.table("users").to_pylist()] == [1]
    shop.run("COMMIT")
    shop.assert_same("users")


def test_a_second_capture_of_a_source_takes_over(rig: Make) -> None:
    """The first can write nothing more."""
    shop = rig(USERS)
    first = shop.capture
    shop.open()
    shop.run("INSERT INTO users (id) VALUES (1)")
    with pytest.raises(Fenced):
        first.catch_up()
    shop.assert_same("users")
    first.close()


def test_a_database_put_back_is_refused_and_then_copied_anew(rig: Make, tmp_path: Path) -> None:
    """Numbers go back, so changes would be missed; only a new backfill mends it, with what is gone removed."""
    shop = rig(USERS, "INSERT INTO users (id) VALUES (1), (2)")
    shop.capture.catch_up()
    shop.capture.close()
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        shop.database.backup(copy)
    shop.run("INSERT INTO users (id) VALUES (3), (4)", "DELETE FROM users WHERE id = 1")
    shop.open().catch_up()
    shop.capture.close()
    with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        copy.backup(shop.database)
    shop.run("INSERT INTO users (id) VALUES (7)")
    with pytest.raises(CaptureLost, match="--backfill-again"):
        shop.open()
    shop.open(backfill_again=True)
    shop.assert_same("users")
    assert [row["id"] for row in shop.table("users")] == [1, 2, 7]


def test_another_database_of_the_same_name_is_refused(rig: Make, tmp_path: Path) -> None:
    """It would look as if all rows had changed."""
    shop = rig(USERS, "INSERT INTO users (id) VALUES (1)")
    shop.capture.catch_up()
    other = tmp_path / "other"
    other.mkdir()
    with closing(sqlite3.connect(other / "shop.db")) as made:
        made.execute(USERS)
    capture = Capture(shop.log, open_source(f"sqlite:///{other}/shop.db"))
    with pytest.raises(CaptureLost):
        capture.open()
    capture.close()


def test_a_topic_that_is_not_ours_is_not_touched(rig: Make, tmp_path: Path) -> None:
    """One that somebody fills, or that another source has; with a prefix both have their place."""
    shop = rig(USERS, "INSERT INTO users (id) VALUES (1)")
    shop.capture.catch_up()
    with closing(sqlite3.connect(tmp_path / "b.db")) as made:
        made.execute(USERS)
        made.execute("CREATE TABLE mine (k INTEGER PRIMARY KEY)")
    shop.log.create_topic("mine", "k BIGINT", key="k")
    shop.log.append("mine", [{"k": 1}])
    capture = Capture(shop.log, open_source(f"sqlite:///{tmp_path}/b.db"))
    with pytest.raises(NotCapturable, match="prefix"):
        capture.open()
    capture.close()
    capture = Capture(shop.log, open_source(f"sqlite:///{tmp_path}/b.db"), prefix="b.")
    capture.open()
    capture.catch_up()
    assert {"b.users", "b.mine", "b.users.changes"} < set(shop.log.topics())
    capture.close()


def test_nothing_is_left_behind(rig: Make) -> None:
    """Tables, triggers and the data are as they were; what ran is refused."""
    shop = rig(USERS, "CREATE TABLE t (k TEXT PRIMARY KEY, u TEXT UNIQUE)")
    before = [name for name in shop.objects() if not name.startswith("headwater:")]
    shop.run("INSERT INTO users (id) VALUES (1)")
    shop.capture.catch_up()
    running = shop.capture
    assert remove_capture(shop.log, "shop", topics=True) == [
        "t", "users", "t.changes", "users.changes", "shop.transactions", "shop.messages",
    ]  # fmt: skip
    assert shop.objects() == before
    shop.run("INSERT INTO users (id) VALUES (2)")
    running.close()
    shop.open()
    shop.assert_same("users")


def test_capturing_again_after_a_removal_compares(rig: Make) -> None:
    """The topics are still there: what is gone from the database is removed from them."""
    shop = rig(USERS, "INSERT INTO users (id) VALUES (1), (2)")
    shop.capture.catch_up()
    remove_capture(shop.log, "shop")
    shop.run("DELETE FROM users WHERE id = 1")
    shop.open()
    shop.assert_same("users")


def test_a_capture_runs_until_it_is_told_to_stop(rig: Make) -> None:
    """In a thread, following changes as they come."""
    shop = rig(USERS)
    stop = threading.Event()
    thread = threading.Thread(target=shop.capture.run, args=(stop,))
    thread.start()
    shop.run("INSERT INTO users (id) VALUES (1)")
    with shop.log.reader("users") as reader:
        assert [event.value["id"] for event in reader.poll(timeout_s=20)] == [1]
    status = shop.capture.status()
    stop.set()
    thread.join()
    assert (status.name, status.state) == ("shop", "live")
    assert shop.capture.status().state == "ended"


# Bad input


def test_a_table_without_a_key_is_refused_with_what_to_do(rig: Make) -> None:
    """Unless columns are named that are unique and never null."""
    shop = rig(USERS, "CREATE TABLE t (a INTEGER NOT NULL, b TEXT, c TEXT)")
    assert "primary key" in shop.capture.source.left_out["t"]
    with pytest.raises(NotCapturable, match=r"no primary key.*--key t="):
        shop.open(tables=["t"])
    with pytest.raises(NotCapturable, match=r'CREATE UNIQUE INDEX "t_key" ON "t" \("a"\)'):
        shop.open(tables=["t"], key={"t": ["a"]})
    with pytest.raises(NotCapturable, match="no column 'z'"):
        shop.open(tables=["t"], key={"t": ["z"]})
    shop.run('CREATE UNIQUE INDEX "t_key" ON "t" ("a")', "INSERT INTO t VALUES (1, 'x', 'y')")
    shop.open(tables=["t"], key={"t": ["a"]})
    shop.assert_same("t")


@pytest.mark.parametrize(
    ("statement", "table", "word"),
    [
        ("CREATE TABLE other (id INTEGER PRIMARY KEY)", "users2", "The database has: other, users"),
        ("CREATE VIEW v AS SELECT 1 AS a", "v", "is a view"),
        ("CREATE TABLE t (_id INTEGER PRIMARY KEY)", "t", "underscore"),
        ("CREATE TABLE t (id INTEGER PRIMARY KEY, committed TEXT)", "t", "'committed'"),
        ('CREATE TABLE "a b" (id INTEGER PRIMARY KEY)', "a b", "topic of its name"),
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


@pytest.mark.parametrize(
    ("url", "kind", "word"),
    [
        ("shop.db", InvalidInput, "sqlite:///"),
        ("oracle://x/y", Unsupported, "sqlite"),
        ("postgresql://me:secret@host:x/db", InvalidInput, r"\*\*\*@host"),
    ],
)
def test_urls_that_name_no_database(url: str, kind: type[Exception], word: str) -> None:
    """And none that is refused shows its password."""
    with pytest.raises(kind, match=word) as caught:
        open_source(url)
    assert "secret" not in str(caught.value)


def test_a_password_is_never_shown() -> None:
    """Wherever it stands in the URL."""
    shown = parse_source_url("postgresql://me:secret@host:5432/db?password=secret&sslmode=require").shown
    assert shown == "postgresql://me:***@host:5432/db?password=***&sslmode=require"


def test_a_name_cannot_be_anything(tmp_path: Path) -> None:
    """It is part of the names of topics."""
    with pytest.raises(InvalidInput):
        open_source(f"sqlite:///{tmp_path}/a b.db")


def test_files_that_are_no_database_of_ours(tmp_path: Path) -> None:
    """Missing, no database, read-only: each in its own words."""
    from headwater.model.errors import Damaged, NoAccess, NotFound

    (tmp_path / "text.db").write_text("hello, this is no database at all, but long enough to be looked at " * 20)
    for name, kind in (("none.db", NotFound), ("text.db", Damaged)):
        with pytest.raises(kind):
            open_source(f"sqlite:///{tmp_path}/{name}").check()
    assert not (tmp_path / "none.db").exists()
    if os.getuid():
        (tmp_path / "text.db").chmod(0o400)
        with pytest.raises(NoAccess):
            open_source(f"sqlite:///{tmp_path}/text.db").check()


def test_a_database_that_stays_locked_says_so_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that never ends its transaction is the user's to find; nothing is left half made."""
    from headwater.model.errors import TimedOut

    monkeypatch.setattr(sqlite, "BUSY_S", 0.05)
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other, open_log(tmp_path / "log") as log:
        other.execute(USERS)
        other.execute("BEGIN IMMEDIATE")
        capture = Capture(log, open_source(f"sqlite:///{path}"))
        with pytest.raises(TimedOut) as caught:
            capture.open()
        assert caught.value.retriable
        other.execute("ROLLBACK")
        assert other.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)
        capture.open()
        capture.close()
