"""A captured SQLite database: what a table and its history are in the log, whatever is done to the database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.capture.sqlite import source as sqlite
from tests.rigs.capture.sqlite import USERS, Make, rigs


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


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


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_changes_gather_while_a_program_writes_many(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then: a single change is brought at once, and so is anything for whoever does not want to wait."""
    shop = rig(USERS)
    shop.capture.catch_up()
    clock = Clock()
    monkeypatch.setattr(sqlite, "time", clock)
    insert = "INSERT INTO users (name) VALUES ('ada')"

    def took_s(*statements: str, timeout_s: float = 1.0) -> float:
        shop.run(*statements)
        began = clock.now_s
        assert shop.capture.step(timeout_s=timeout_s)
        return clock.now_s - began

    assert took_s(insert) == took_s(insert, insert) == 0.0
    assert took_s(insert, insert) == took_s(insert) == pytest.approx(sqlite.GATHER_S)
    assert took_s(insert, insert) == took_s(insert, insert, timeout_s=0.0) == 0.0
    clock.sleep(2 * sqlite.GATHER_S)
    assert took_s(insert) == 0.0
    shop.assert_same("users")


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
    monkeypatch.setattr("headwater.capture.events.SPILL_BYTES", 0)
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


def test_a_transaction_ends_where_a_table_changes_also_between_two_pieces(
    rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The piece before the change is full: that it was the transaction's last is known from the next one only. What was written before the
    capture saw the new column is told again behind it."""
    monkeypatch.setattr(sqlite, "CHANGES_ROWS", 3)
    shop = rig(USERS)
    shop.capture.catch_up()
    shop.run("INSERT INTO users (id) VALUES (1), (2), (3)", "ALTER TABLE users ADD COLUMN more TEXT")
    shop.capture.source._look()
    shop.run("INSERT INTO users (id, more) VALUES (4, 'x'), (5, 'y')")
    shop.capture.catch_up()
    told = [(row["status"], row["events"]) for row in shop.log.read("shop.transactions").to_pylist()]
    assert told == [("begin", None), ("end", 3), ("begin", None), ("end", 3), ("begin", None), ("end", 2)]
    assert sorted(event["transaction_order"] for event in shop.history("users")) == [0, 0, 0, 1, 1, 1, 2, 2]


def test_large_values_do_not_come_all_at_once(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at a time is bounded by bytes, too."""
    monkeypatch.setattr(sqlite, "BYTES_MAX", 1 << 20)
    monkeypatch.setattr("headwater.capture.sqlite.changes._PIECE_ROWS", 2)
    shop = rig(
        USERS, "BEGIN", *(f"INSERT INTO users (id, data) VALUES ({n}, randomblob(400000))" for n in range(9)), "COMMIT"
    )
    shop.assert_same("users")
    shop.run("UPDATE users SET name = 'x'")
    assert not shop.capture.source.changes(shop.capture.progress.position, timeout_s=0.0).whole  # type: ignore[union-attr]
    shop.assert_same("users")


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
