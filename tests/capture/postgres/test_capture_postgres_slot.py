"""PostgreSQL's slot and connections, against a real server: WAL that is kept, lost or passed over, and the application beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from headwater.capture.postgres import source as postgres
from headwater.capture.source_url import open_source
from headwater.model.errors import CaptureLost, NotCapturable, Unreachable
from headwater.testing.servers.postgres import PostgresServer
from tests.rigs.capture.postgres import Rig, follow, rigged

pytestmark = pytest.mark.service("postgres")


@pytest.fixture
def rig(postgres: PostgresServer, tmp_path: Path) -> Iterator[Rig]:
    """A database and a log of one test."""
    with rigged(postgres, tmp_path) as made:
        yield made


def test_an_idle_table_keeps_no_wal(rig: Rig) -> None:
    """Complaint: slots that keep WAL while a table is idle, and others are not."""
    rig.run("create table quiet (id int primary key)", "create table busy (id int)")
    with rig.capture("quiet", heartbeat_s=0.05) as capture:
        before = capture.source.lag().bytes
        rig.run("insert into busy select generate_series(1, 50000)")
        assert (capture.source.lag().bytes or 0) > 1_000_000
        for _ in range(200):
            capture.step(timeout_s=0.05)
            if (capture.source.lag().bytes or 0) < 500_000:
                break
        assert before is not None and (capture.source.lag().bytes or 0) < 500_000


def test_much_wal_without_a_change_of_ours_is_passed_over(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bulk finds nothing in it and gives way to the stream, which moves on."""
    monkeypatch.setattr(postgres, "BEHIND_BYTES", 100_000)
    rig.run("create table quiet (id int primary key)", "create table busy (id int)")
    with rig.capture("quiet"):
        pass
    rig.run("insert into busy select generate_series(1, 50000)")
    with rig.capture("quiet", heartbeat_s=0.05) as capture:
        for _ in range(200):
            capture.step(timeout_s=0.05)
            if (capture.source.lag().bytes or 0) < 100_000:
                break
        assert (capture.source.lag().bytes or 0) < 100_000


def test_a_lost_slot_is_reported_and_repaired(rig: Rig) -> None:
    """Never silently skipped: the new backfill also removes what was deleted meanwhile."""
    rig.run("create table a (id int primary key)", "insert into a values (1), (2)")
    with rig.capture("a"):
        pass
    rig.run(
        f"select pg_drop_replication_slot('headwater_{rig.name}')",
        "delete from a where id = 1",
        "insert into a values (3)",
    )
    with pytest.raises(CaptureLost, match="does not exist, so the changes after"), rig.capture("a"):
        pass
    with rig.capture("a", backfill_again=True):
        assert rig.table("a") == [{"id": 2}, {"id": 3}]
    with rig.capture("a"):
        pass


def test_wal_that_the_server_threw_away_is_told(rig: Rig) -> None:
    """With `max_slot_wal_keep_size`: nothing is skipped, and the setting is named."""
    rig.run("create table a (id int primary key)")
    with rig.capture("a"):
        pass
    rig.run("alter system set max_slot_wal_keep_size = '16MB'", "select pg_reload_conf()")
    try:
        for number in range(5):
            rig.run(f"insert into a values ({number})", "select pg_switch_wal()")
        rig.run("checkpoint")
        with pytest.raises(CaptureLost, match="max_slot_wal_keep_size"), rig.capture("a"):
            pass
        with rig.capture("a", backfill_again=True):
            assert [row["id"] for row in rig.table("a")] == list(range(5))
    finally:
        rig.run("alter system reset max_slot_wal_keep_size", "select pg_reload_conf()")


def test_a_log_that_is_behind_its_slot_is_told(rig: Rig) -> None:
    """PostgreSQL would go on from the slot without a word, and the changes between would be missing."""
    rig.run("create table a (id int primary key)")
    with rig.capture("a"):
        pass
    rig.run(
        "insert into a values (1)", f"select pg_replication_slot_advance('headwater_{rig.name}', pg_current_wal_lsn())"
    )
    with pytest.raises(CaptureLost, match=r"after the position .* of this log"), rig.capture("a"):
        pass


def test_a_connection_that_is_lost_is_made_again(rig: Rig) -> None:
    """In the middle of a stream; nothing is lost and nothing doubled."""
    rig.run("create table a (id int primary key)")
    with rig.capture("a") as capture:
        rig.run("insert into a values (1)")
        follow(capture, rig)
        rig.run(
            "select pg_terminate_backend(active_pid, 5000) from pg_replication_slots where active",
            "insert into a values (2)",
        )
        with pytest.raises(Unreachable) as caught:
            follow(capture, rig)
        assert caught.value.retriable
        follow(capture, rig)
    assert [(row["op"], row["id"]) for row in rig.history("a")] == [("c", 1), ("c", 2)]


def test_the_application_is_never_broken(rig: Rig) -> None:
    """A table without a key is refused before it is published; one that loses its key is taken out."""
    rig.run(
        "create table keyless (n int)",
        "insert into keyless values (1)",
        "create table a (id int primary key, n int)",
        "insert into a values (1, 1)",
    )
    with pytest.raises(NotCapturable, match=r'ALTER TABLE "public"\."keyless" ADD PRIMARY KEY'):
        _checked(rig.url, "keyless")
    assert rig.run("select * from pg_publication") == []
    with rig.capture() as capture:
        assert "keyless" in capture.source.left_out and list(capture.progress.tables) == ["a"]
        rig.run("update keyless set n = 2", "alter table a drop constraint a_pkey")
        with pytest.raises(psycopg.Error, match="replica identity"):
            rig.run("update a set n = 2")
        capture.source.heartbeat()
        rig.run("update a set n = 2")
        follow(capture, rig)
        assert "ADD PRIMARY KEY" in (capture.progress.tables["a"].why or "")


def _checked(url: str, *tables: str) -> None:
    source = open_source(url, tables)
    try:
        source.check()
    finally:
        source.close()


def test_remove_leaves_nothing_behind(rig: Rig) -> None:
    """No slot, no publication, no trigger; while a capture runs, and twice."""
    rig.run("create table a (id int primary key)")
    with rig.capture("a"):
        assert rig.run("select count(*) from pg_replication_slots where database = current_database()") == [(1,)]
        other = open_source(rig.url, ["a"], name=rig.name)
        other.remove()
        other.remove()
        other.close()
    assert rig.run("select count(*) from pg_replication_slots where database = current_database()") == [(0,)]
    assert rig.run("select count(*) from pg_publication") == [(0,)]
    assert rig.run("select count(*) from pg_trigger") == [(0,)]


def test_a_second_capture_takes_over(rig: Rig) -> None:
    """The slot of one that hangs is taken from it."""
    rig.run("create table a (id int primary key)")
    with rig.capture("a"):
        rig.run("insert into a values (1)")
        with rig.capture("a"):
            assert rig.table("a") == [{"id": 1}]
