"""A SQLite database captured again: taken over by a second capture, put back, another one in its place, removed, and stopped."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headwater.capture.capture import Capture, remove_capture
from headwater.capture.source_url import open_source
from headwater.model.errors import CaptureLost, Fenced, NotCapturable
from tests.rigs.capture.sqlite import USERS, Make, rigs


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


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
