"""A captured SQLite database under load while the capture is killed, at each step and at random: the log equals the database."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headwater.log.log import open_log
from headwater.model.points import points_of
from tests.rigs.capture import sqlite_storm as storm
from tests.rigs.children import Child

POINTS = points_of("capture:")
ONCE = ("capture: prepared", "capture: topics made")
"""Reached once in a life."""


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_capture_killed_at_a_step_is_gone_on_with(tmp_path: Path, point: str) -> None:
    """Killed there, and at a later time, while a client writes; the next process brings what is missing, once."""
    seed = len(point)
    path, folder = tmp_path / "shop.db", tmp_path / "log"
    storm.make_database(path, 400)
    client = Child(lambda: storm.write(str(path), seed, 150, ddl=True, pause_s=0.004))
    for die_on in (1, 1 if point in ONCE else 3):
        storm.run_until_killed(path, folder, after_s=None, die_at=point, die_on=die_on, forget=True)
    client.result()
    catch_up(path, folder, forget=True)
    storm.check(path, folder, has_changelog=False)


def rounds(
    tmp_path: Path, seed: int, *, clients: int, transactions: int, kills: int, rows: int, mode: str = "wal"
) -> int:
    """A storm; how many changes there were. The first chunk is copied when the clients begin, so all they do is captured."""
    print("seed", seed)
    chance = random.Random(seed)
    path, folder = tmp_path / "shop.db", tmp_path / "log"
    storm.make_database(path, rows, mode=mode)
    storm.run_until_killed(path, folder, after_s=None, die_at="capture: appended", forget=False)
    writers = [
        Child(lambda n=n: storm.write(str(path), seed * 1000 + n, transactions // clients, ddl=n == 0, pause_s=0.002))
        for n in range(clients)
    ]
    for _ in range(kills):
        storm.run_until_killed(path, folder, after_s=chance.uniform(0.2, 1.2), forget=False)
    for writer in writers:
        writer.result(timeout_s=600)
    catch_up(path, folder, forget=False)
    return storm.check(path, folder, has_changelog=True)


def catch_up(path: Path, folder: Path, *, forget: bool) -> None:
    """The rest, by a process that nobody kills."""

    def rest() -> None:
        with open_log(folder, durability="os") as log:
            capture = storm.open_capture(log, path, forget=forget)
            capture.open()
            capture.catch_up()
            assert {table.state for table in capture.progress.tables.values()} == {"live"}, capture.progress
            capture.close()

    Child(rest).result(timeout_s=300)


@pytest.mark.slow
@pytest.mark.covers("GoldenGate")
def test_ten_thousand_changes_while_the_capture_is_killed(tmp_path: Path) -> None:
    """Four clients write and alter, during the backfill and behind it; six kills at random."""
    assert rounds(tmp_path, 7, clients=4, transactions=4000, kills=6, rows=2000) > 10_000


@pytest.mark.slow
def test_a_rollback_journal_serves_as_well(tmp_path: Path) -> None:
    """Without WAL readers and writers wait for each other; nothing else is different."""
    rounds(tmp_path, 11, clients=2, transactions=300, kills=2, rows=500, mode="delete")


@pytest.mark.bench
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_a_hundred_thousand_changes(tmp_path: Path, seed: int) -> None:
    """The same with eight clients, and for longer."""
    assert rounds(tmp_path, 100 + seed, clients=8, transactions=40_000, kills=12, rows=20_000) > 100_000
