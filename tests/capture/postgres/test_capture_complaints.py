"""What people complain about in tools that capture databases, against a real PostgreSQL; docs/capture.md says which test is for which."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater
from headwater.capture import events
from headwater.capture.capture import Capture
from headwater.capture.postgres import backfill as pg_backfill
from headwater.capture.postgres import bulk as pg_bulk
from headwater.capture.progress import captures
from headwater.capture.source_url import open_source
from headwater.testing.crash.points import kill_at
from headwater.testing.servers.postgres import PostgresServer
from tests.rigs.capture.postgres import Rig, follow, rigged
from tests.rigs.children import Child

pytestmark = pytest.mark.service("postgres")

POINTS = ("capture: changes read", "capture: before append", "capture: appended", "capture: confirmed")
TRANSACTION_BYTES = 150_000_000


@pytest.fixture
def rig(postgres: PostgresServer, tmp_path: Path) -> Iterator[Rig]:
    """A database and a log of one test."""
    with rigged(postgres, tmp_path) as made:
        yield made


def slot(rig: Rig, column: str) -> str:
    """Where the slot is, as positions are written."""
    ((found,),) = rig.run(
        f"select lpad(to_hex(({column} - '0/0')::bigint), 16, '0') from pg_replication_slots "
        f"where slot_name = 'headwater_{rig.name}'"
    )
    return str(found)


def test_the_server_may_remove_its_wal_while_a_table_is_idle(rig: Rig) -> None:
    """What it keeps is from `restart_lsn` on: it goes on though nothing happens but in a table that nobody captures."""
    rig.run("create table quiet (id int primary key)", "create table busy (t text)")
    with rig.capture("quiet", heartbeat_s=0.05) as capture:
        rig.run("insert into busy select repeat('x', 1000) from generate_series(1, 3000)")
        ((now,),) = rig.run("select lpad(to_hex((pg_current_wal_lsn() - '0/0')::bigint), 16, '0')")
        for attempt in range(400):
            capture.step(timeout_s=0.05)
            if slot(rig, "restart_lsn") >= now:
                break
            if attempt % 20 == 19:
                rig.run(
                    "checkpoint"
                )  # a server makes one every five minutes; a slot's restart moves from one to the next
        assert slot(rig, "restart_lsn") >= now


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_never_leaves_the_log_behind_its_slot(rig: Rig, tmp_path: Path, point: str) -> None:
    """The slot is told of what is on disk in the log and of nothing else, so no kill makes a copy necessary: no row comes twice."""
    rig.run("create table a (id int primary key)", "insert into a select generate_series(1, 100)")
    with rig.capture("a"):
        pass
    rig.run("insert into a select generate_series(101, 150)", "insert into a select generate_series(151, 200)")

    def killed() -> None:
        with headwater.open_log(str(tmp_path / "log")) as log:
            capture = Capture(log, open_source(rig.url, ["a"], name=rig.name))
            capture.open()
            kill_at(point)
            while True:
                capture.step()

    assert os.WTERMSIG(Child(killed).wait()) == signal.SIGKILL
    assert slot(rig, "confirmed_flush_lsn") <= captures(rig.log)[rig.name].position
    with rig.capture("a"):
        pass
    history = [(row["op"], row["id"]) for row in rig.history("a")]
    assert sorted(history) == sorted([("r", n) for n in range(1, 101)] + [("c", n) for n in range(101, 201)])


def test_changes_are_taken_and_wal_is_given_back_while_a_table_is_copied(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a first copy takes, the slot does not wait for its end, and other tables are not behind by it."""
    monkeypatch.setattr(pg_backfill, "PAGES_FIRST", 16)
    monkeypatch.setattr(pg_backfill, "PAGES_MAX", 16)
    rig.run(
        "create table large (id int primary key, t text)",
        "insert into large select i, repeat('x', 100) from generate_series(1, 20000) i",
        "create table busy (id int primary key)",
    )
    capture = Capture(rig.log, open_source(rig.url, ["large", "busy"], name=rig.name))
    capture.open()
    written, confirmed, behind = 0, set(), []
    while capture.progress.tables["large"].state == "copying":
        rig.run(f"insert into busy values ({written})")
        written += 1
        capture.step()
        confirmed.add(slot(rig, "confirmed_flush_lsn"))
        behind.append(written - rig.log.table("busy").num_rows)
    assert written > 20 and len(confirmed) > 5
    assert max(behind) <= 10, behind
    follow(capture, rig)
    capture.close()
    assert rig.log.table("large").num_rows == 20_000
    assert [row["id"] for row in rig.history("busy") if row["op"] == "c"] == list(range(written))


@pytest.mark.slow
def test_a_transaction_takes_less_memory_than_it_has_bytes(rig: Rig, tmp_path: Path) -> None:
    """One part of it is in memory, the others in files, out of which they are appended; with a part of the usual ones, to be quick."""
    rig.run("create table a (id int primary key, t text)")
    with rig.capture("a"):
        pass
    rows = TRANSACTION_BYTES // 1920
    rig.run(f"insert into a select i, repeat(md5(i::text), 60) from generate_series(1, {rows}) i")

    def captured() -> int:
        events.SPILL_BYTES //= 10
        pg_bulk.BLOCKS_AHEAD, pg_bulk.BLOCK_BYTES = 1, pg_bulk.BLOCK_BYTES // 2
        with headwater.open_log(str(tmp_path / "log"), durability="os") as log, Peak() as peak:
            capture = Capture(log, open_source(rig.url, ["a"], name=rig.name))
            capture.open()
            while capture.progress.events < rows:
                capture.step()
            capture.close()
        return peak.growth_bytes

    assert Child(captured).result(timeout_s=240) < TRANSACTION_BYTES
    assert sum(span.stop for span in rig.log.offsets("a").values()) == rows


class Peak:
    """How much the memory of this process that no file backs grows while the block runs; looked at all the time."""

    def __enter__(self) -> Peak:
        self._before = self._most = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def growth_bytes(self) -> int:
        return self._most - self._before

    def _look(self) -> None:
        while not self._done.wait(0.005):
            self._most = max(self._most, self._now())

    def _now(self) -> int:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024
