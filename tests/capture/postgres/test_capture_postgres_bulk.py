"""A PostgreSQL slot that is read in bulk, against a real server: by a copy that is read ahead, or where there is none by peeks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.errors import InsufficientPrivilege

import headwater
from headwater.capture.capture import Capture
from headwater.capture.postgres import bulk as pg_bulk
from headwater.capture.postgres import slot as pg_slot
from headwater.capture.postgres import source as postgres
from headwater.capture.postgres import stream as pg_stream
from headwater.capture.source_url import open_source
from headwater.model.errors import Unreachable
from headwater.testing.crash.points import kill_at
from headwater.testing.servers.postgres import PostgresServer
from tests.rigs.capture.postgres import Rig, follow, rigged
from tests.rigs.children import Child

pytestmark = pytest.mark.service("postgres")

ROWS = 3000


@pytest.fixture
def rig(postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A database and a log of one test, with a capture that soon is behind and reads small pieces."""
    monkeypatch.setattr(pg_bulk, "PEEK_CHANGES", 500)
    monkeypatch.setattr(pg_bulk, "PIECE_CHANGES_FIRST", 200)
    monkeypatch.setattr(pg_bulk, "PIECE_CHANGES_MAX", 500)
    monkeypatch.setattr(pg_bulk, "MOVE_S", 0.0)
    with rigged(postgres, tmp_path) as made:
        yield made


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How the slot was read, in order."""
    monkeypatch.setattr(postgres, "BEHIND_BYTES", 100_000)
    ended: list[str] = []
    for way in (postgres.SlotCopy, postgres.SlotPeek, postgres.SlotStream):
        monkeypatch.setattr(way, "close", _noted(ended, way.__name__, way.close))
    return ended


def _noted(ways: list[str], name: str, close: object) -> object:
    def noted(self: object) -> None:
        ways.append(name)
        close(self)  # type: ignore[operator]

    return noted


def behind(rig: Rig) -> None:
    """A capture that has begun, and changes that it has not seen."""
    rig.run("create table a (id int primary key, t text)")
    with rig.capture("a"):
        pass
    for start in range(0, ROWS, 20):
        rig.run(f"insert into a select i, repeat('x', 100) from generate_series({start + 1}, {start + 20}) i")


def check_all(rig: Rig, rows: int = ROWS) -> None:
    """Every row has come, once."""
    assert rig.log.table("a").num_rows == rows
    positions = [row["position"] for row in rig.history("a")]
    assert len(set(positions)) == len(positions) == rows


def slots(rig: Rig) -> list[str]:
    """The slots of the database, when a connection that was closed has had its time to end."""
    statement = "select slot_name from pg_replication_slots where database = current_database() order by 1"
    deadline = time.monotonic() + 10
    while len(found := [name for (name,) in rig.run(statement)]) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_what_is_far_behind_is_read_ahead_and_then_streamed(rig: Rig, ways: list[str]) -> None:
    """Both ways give the same changes, nothing twice where one follows the other; the copy is gone when it has served."""
    behind(rig)
    ways.clear()
    with rig.capture("a") as capture:
        rig.run("insert into a values (10000, 'last')")
        follow(capture, rig)
        assert slots(rig) == [f"headwater_{rig.name}"]
    assert ways == ["SlotCopy", "SlotStream"]
    check_all(rig, ROWS + 1)


def test_a_stream_that_falls_behind_gives_way_to_bulk(
    rig: Rig, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two transactions, though the stream has begun to send the next one."""
    monkeypatch.setattr(postgres, "LOOK_AT_LAG_BYTES", 2_000)
    monkeypatch.setattr(pg_stream, "BLOCK_BYTES_MAX", 5_000)
    rig.run("create table a (id int primary key, t text)")
    with rig.capture("a") as capture:
        ways.clear()
        for start in range(0, ROWS, 20):
            rig.run(f"insert into a select i, repeat('x', 100) from generate_series({start + 1}, {start + 20}) i")
        assert capture.step() and rig.log.table("a").num_rows == 40, "the part of the third waits, the first two do not"
        follow(capture, rig)
    assert ways[:2] == ["SlotStream", "SlotCopy"]
    check_all(rig)


@contextmanager
def no_slot_left(rig: Rig) -> Iterator[None]:
    """All replication slots of the server are taken."""
    ((free,),) = rig.run(
        "select current_setting('max_replication_slots')::int - (select count(*) from pg_replication_slots)"
    )
    taken = [f"taken_{number}" for number in range(free)]
    for name in taken:
        rig.run(f"select pg_create_physical_replication_slot('{name}')")
    try:
        yield
    finally:
        for name in taken:
            rig.run(f"select pg_drop_replication_slot('{name}')")


@contextmanager
def name_taken(rig: Rig) -> Iterator[None]:
    """Somebody's slot is called as our copy would be; it stays."""
    name = pg_slot.copy_name(f"headwater_{rig.name}")
    rig.run(f"select pg_create_logical_replication_slot('{name}', 'pgoutput')")
    yield
    source = open_source(rig.url, ["a"], name=rig.name)
    source.remove()
    source.close()
    assert slots(rig) == [name]


@contextmanager
def no_right(rig: Rig) -> Iterator[None]:
    """Whoever captures may read the slot, and not copy it."""
    role, slot, own = f"{rig.name}_reader", f"headwater_{rig.name}", rig.url
    rig.url = own.replace("//postgres@", f"//{role}@")
    assert rig.url != own
    rig.run(
        f"create role {role} login replication",
        f"grant select on all tables in schema public to {role}",
        "revoke execute on function pg_copy_logical_replication_slot(name, name, boolean) from public",
    )
    try:
        with psycopg.connect(rig.url, autocommit=True) as asking, pytest.raises(InsufficientPrivilege):
            asking.execute(f"select pg_copy_logical_replication_slot('{slot}', 'copied', true)")
        yield
    finally:
        rig.url = own
        rig.run(f"drop owned by {role}", f"drop role {role}")


@pytest.mark.parametrize("obstacle", [no_slot_left, name_taken, no_right])
def test_where_no_copy_can_be_made_peeks_serve(rig: Rig, ways: list[str], obstacle: object) -> None:
    """The slot is moved between them; the changes are the same."""
    behind(rig)
    ways.clear()
    with obstacle(rig), rig.capture("a") as capture:  # type: ignore[operator]
        rig.run("insert into a values (10000, 'last')")
        follow(capture, rig)
        capture.close()
    assert ways.count("SlotPeek") > 2 and "SlotCopy" not in ways and ways[-1] == "SlotStream"
    check_all(rig, ROWS + 1)


def test_a_slot_is_never_beyond_the_log(rig: Rig, ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the copy is read ahead; and it does move while it is."""
    monkeypatch.setattr(pg_bulk, "BLOCK_BYTES", 10_000)
    behind(rig)
    ways.clear()
    confirmed = []
    capture = Capture(rig.log, open_source(rig.url, ["a"], name=rig.name))
    capture.open()
    while rig.log.table("a").num_rows < ROWS:
        capture.step()
        ((lsn,),) = rig.run(
            "select lpad(to_hex((confirmed_flush_lsn - '0/0')::bigint), 16, '0') from pg_replication_slots "
            f"where slot_name = 'headwater_{rig.name}'"
        )
        assert lsn <= capture.progress.position
        confirmed.append(lsn)
    assert len(set(confirmed)) > 3 and not ways, "all by one copy"
    capture.close()
    check_all(rig)


POINTS = ("capture: changes read", "capture: before append", "capture: appended", "capture: confirmed")


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("die_on", [1, 3])
def test_a_capture_killed_while_it_reads_ahead_is_gone_on_with(
    rig: Rig, ways: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, die_on: int
) -> None:
    """The copy goes with the connection, the slot stands where the log is or before; the next process brings the rest, once."""
    monkeypatch.setattr(pg_bulk, "BLOCK_BYTES", 10_000)
    behind(rig)

    def killed() -> None:
        kill_at(point, die_on)
        with headwater.open_log(str(tmp_path / "log"), durability="os") as log:
            capture = Capture(log, open_source(rig.url, ["a"], name=rig.name))
            capture.open()
            while True:
                capture.step()

    with pytest.raises(AssertionError, match="SIGKILL"):
        Child(killed).result()
    assert rig.log.table("a").num_rows < ROWS
    ways.clear()
    with rig.capture("a") as capture:
        follow(capture, rig)
    assert ways[0] != "SlotStream"
    check_all(rig)
    assert slots(rig) == [f"headwater_{rig.name}"]


def begun(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Capture:
    """A capture that has read a little of a copy, with the rest before it."""
    monkeypatch.setattr(pg_bulk, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(pg_bulk, "BLOCKS_AHEAD", 1)
    behind(rig)
    capture = Capture(rig.log, open_source(rig.url, ["a"], name=rig.name))
    capture.open()
    capture.step()
    return capture


def test_a_copy_whose_connection_is_lost_is_made_again(
    rig: Rig, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost, nothing doubled, and it is worth another try."""
    capture = begun(rig, monkeypatch)
    rig.run("select pg_terminate_backend(active_pid, 5000) from pg_replication_slots where temporary")
    with pytest.raises(Unreachable) as caught:
        follow(capture, rig)
    assert caught.value.retriable
    follow(capture, rig)
    capture.close()
    check_all(rig)


def test_remove_ends_a_copy_that_somebody_reads(rig: Rig, ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other capture is told that its slot is gone; nothing is left that keeps WAL."""
    capture = begun(rig, monkeypatch)
    assert rig.run("select count(*) from pg_replication_slots where temporary and database = current_database()") == [
        (1,)
    ]
    other = open_source(rig.url, ["a"], name=rig.name)
    other.remove()
    other.close()
    assert rig.run("select count(*) from pg_replication_slots where database = current_database()") == [(0,)]
    capture.close()
