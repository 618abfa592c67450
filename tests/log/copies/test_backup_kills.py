"""Backups and restores that are killed with SIGKILL, at each of their points and anywhere, while three processes write."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow.parquet as parquet
import pytest

import headwater as hw
from headwater.log.copies.backup import newest_manifest
from headwater.log.copies.vault import open_vault
from headwater.log.disk.disk import RealDisk
from headwater.log.doctor.doctor import examine
from headwater.testing.crash.disk import CrashingDisk, RandomCrashDisk
from headwater.testing.crash.points import copy_points
from tests.rigs.children import Child
from tests.rigs.log.copies import await_lines, check_accounts, make_topics, write_until_told
from tests.rigs.memory_folders import memory_folder

WRITERS = 3


BACKUP_POINTS = [point for point in copy_points() if point.startswith("backup")]
RESTORE_POINTS = [point for point in copy_points() if point.startswith("restore")]


@contextmanager
def busy_log(seed: int) -> Iterator[Path]:
    """A log that three processes write to for as long as the block lasts."""
    print(f"seed {seed}")
    with memory_folder() as folder:
        with hw.open_log(folder / "log") as log:
            make_topics(log)
        writers = [
            Child(lambda worker=worker: write_until_told(folder, worker, seed, pause_s=0.05))
            for worker in range(WRITERS)
        ]
        await_lines(folder, 20)
        try:
            yield folder
        finally:
            (folder / "stop").touch()
            for writer in writers:
                writer.result()


def back_up(folder: Path, disk: RealDisk) -> int:
    with hw.open_log(folder / "log", disk=disk) as log:
        return log.backup(folder / "backup").events


def stored_lines(folder: Path) -> list[list[object]]:
    """What the writers were told is stored by now."""
    texts = [account.read_text() for account in folder.glob("account.*")]
    return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]


def check_restored(folder: Path, lines: list[list[object]]) -> None:
    """The backup restores to a healthy log: a beginning of the source, transactions whole, with all that was stored before."""
    restored = folder / f"restored.{time.monotonic_ns()}"
    hw.restore_log(folder / "backup", restored)
    assert examine(str(restored)).findings == []
    check_accounts(folder, restored, complete=False)
    with hw.open_log(restored) as log, hw.open_log(folder / "log", read_only=True) as source:
        for name in log.topics():
            columns = [
                "_partition",
                "_offset",
                "_appended",
                "_deleted",
                *hw.open_log(restored).topic(name).schema.names,
            ]
            ends = {number: span.stop for number, span in log.offsets(name).items()}
            files_ = [f"{folder}/{side}.parquet" for side in ("left", "right")]
            parquet.write_table(log.read(name, columns=columns), files_[0])
            parquet.write_table(source.read(name, end=ends, columns=columns), files_[1])
            for one, other in (files_, files_[::-1]):
                assert duckdb.sql(f"(from '{one}') except all (from '{other}')").fetchall() == []
            assert duckdb.sql(f"select count(*) from '{files_[0]}'").fetchall()[0][0] == sum(ends.values())
        for topic, partition, _, stop, _ in lines:
            assert log.offsets(str(topic))[int(str(partition))].stop >= int(str(stop))


def die_at(folder: Path, point: str) -> None:
    """A backup that is killed at a point. One for which no segment was closed meanwhile may pass it by; then another is begun."""
    for _ in range(50):
        await_lines(folder, len(stored_lines(folder)) + 10)
        if Child(lambda: back_up(folder, CrashingDisk(point))).was_killed():
            return
    raise AssertionError(f"no backup came to {point!r}")


@pytest.mark.slow
def test_a_backup_killed_at_any_point_leaves_the_one_before() -> None:
    """And the next one goes through, beside the writers, and holds everything acknowledged before it began."""
    with busy_log(1) as folder:
        (folder / "log/groups").mkdir()
        (folder / "log/groups/one").write_bytes(b"one")
        lines = stored_lines(folder)
        back_up(folder, RealDisk())
        for point in BACKUP_POINTS:
            die_at(folder, point)
            hw.restore_log(folder / "backup", folder / f"after {point}")
            assert examine(str(folder / f"after {point}")).findings == []
        check_restored(folder, lines)
        lines = stored_lines(folder)
        back_up(folder, RealDisk())
        check_restored(folder, lines)
        assert not list((folder / "backup").rglob("*.new"))


def kill_round(seed: int) -> int:
    """Backups killed anywhere until three got through; returns how many died."""
    chance = random.Random(seed)
    deaths = whole = 0
    with busy_log(seed) as folder:
        while whole < 3:
            lines = stored_lines(folder)
            probability = chance.choice((0.05, 0.02, 0.005)) / (1 + deaths)
            disk = RandomCrashDisk(chance.randrange(1 << 30), probability)
            if Child(lambda disk=disk: back_up(folder, disk)).was_killed():
                deaths += 1
            else:
                whole += 1
                check_restored(folder, lines)
        check_restored(folder, [])
    return deaths


@pytest.mark.slow
def test_backups_killed_anywhere_leave_the_one_before() -> None:
    """Killed at any operation of its disk, until three got through."""
    assert kill_round(5) > 0


@pytest.mark.bench
@pytest.mark.parametrize("seed", range(100, 140))
def test_backups_are_killed_many_more_times(seed: int) -> None:
    """The long tier of the same."""
    kill_round(seed)


def back_up_and_die(folder: Path, seed: int) -> None:
    """Backups one after the other, each in a process that may be killed anywhere, until told to stop."""
    chance = random.Random(seed)
    while not (folder / "enough").exists():
        disk = RandomCrashDisk(chance.randrange(1 << 30), chance.choice((0.0, 0.001, 0.01)))
        Child(lambda disk=disk: back_up(folder, disk)).was_killed()


@pytest.mark.slow
def test_restores_beside_backups_that_are_killed_are_whole() -> None:
    """None calls a healthy backup damaged, and each gives a backup that counted when it began, or a later one."""
    with busy_log(9) as folder:
        back_up(folder, RealDisk())
        others = Child(lambda: back_up_and_die(folder, 9))
        try:
            for number in range(6):
                taken_us = newest_manifest(open_vault(str(folder / "backup"), RealDisk())).taken_us
                restored = hw.restore_log(
                    folder / "backup",
                    folder / f"restored.{number}",
                    on_progress=lambda progress: time.sleep(0.01),  # so that backups end while it reads
                )
                assert restored.taken_us >= taken_us
                assert examine(str(folder / f"restored.{number}")).findings == []
                check_accounts(folder, folder / f"restored.{number}", complete=False)
        finally:
            (folder / "enough").touch()
            others.result()
        lines = stored_lines(folder)
        back_up(folder, RealDisk())
        check_restored(folder, lines)
        assert len(list((folder / "backup").glob("manifest-*"))) == 1
        assert not list(folder.glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("point", [*RESTORE_POINTS, "anywhere"])
def test_a_killed_restore_leaves_nothing_and_the_next_one_works(point: str) -> None:
    """The log has its name only when it is whole."""
    with memory_folder() as folder:
        with hw.open_log(folder / "log") as log:
            make_topics(log)
            log.append("plain", [{"id": f"k{row}", "n": row} for row in range(500)])
            (folder / "log/groups").mkdir()
            (folder / "log/groups/one").write_bytes(b"one")
            log.backup(folder / "backup")
        disk = RandomCrashDisk(4, 0.02) if point == "anywhere" else CrashingDisk(point)
        with pytest.raises(AssertionError, match="SIGKILL"):
            Child(lambda: hw.restore_log(folder / "backup", folder / "restored", disk=disk)).result()
        if point != "restore: named":
            assert not (folder / "restored").exists()
            hw.restore_log(folder / "backup", folder / "restored")
        assert examine(str(folder / "restored")).findings == []
        with hw.open_log(folder / "restored") as log:
            assert log.read("plain").num_rows == 500
        assert sorted(path.name for path in folder.iterdir()) == ["backup", "log", "restored"]
