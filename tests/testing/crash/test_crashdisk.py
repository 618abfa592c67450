"""The crashing disks kill a real process where they say they do, and are the real disk otherwise."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwater.testing import RandomCrashDisk, RecordingDisk, SlowSyncDisk

WORK = """
from headwater.testing import CrashingDisk, RandomCrashDisk
disk = {disk}
file = disk.open({path!r}, "create")
for at in range(0, 1000, 10):
    file.write_at(at, [b"01234", b"56789"])
    disk.reach("append: locked")
    disk.reach("append: written")
    file.sync()
"""


def work(disk: str, path: Path) -> tuple[int, bytes]:
    """How a process that writes a thousand bytes through that disk ends, and what it leaves."""
    ended = subprocess.run([sys.executable, "-c", WORK.format(disk=disk, path=str(path))], check=False)
    return ended.returncode, path.read_bytes() if path.exists() else b""


@pytest.mark.parametrize(("nth", "written"), [(1, 10), (3, 30)])
def test_a_process_dies_at_the_nth_reach_of_its_point(tmp_path: Path, nth: int, written: int) -> None:
    """SIGKILL at that point and nowhere else; what was written before is there."""
    code, content = work(f"CrashingDisk('append: written', nth={nth})", tmp_path / "file")
    assert code == -signal.SIGKILL
    assert content == b"0123456789" * (written // 10)


def test_a_point_never_reached_kills_nobody(tmp_path: Path) -> None:
    """The disk is the real one otherwise."""
    assert work("CrashingDisk('sync: done')", tmp_path / "file") == (0, b"0123456789" * 100)


@pytest.mark.slow
def test_a_process_dies_at_a_random_moment_and_again_at_the_same(tmp_path: Path) -> None:
    """By seed; a write may be torn, and what is there is always a beginning."""
    ends = [work(f"RandomCrashDisk({seed}, 0.05)", tmp_path / str(seed)) for seed in range(6)]
    for code, content in ends:
        assert code == -signal.SIGKILL
        assert (b"0123456789" * 100).startswith(content)
    assert len({content for _, content in ends}) > 2
    assert work("RandomCrashDisk(0, 0.05)", tmp_path / "again") == ends[0]


def test_a_random_disk_that_never_strikes_is_a_real_disk(tmp_path: Path) -> None:
    """Every call goes through."""
    disk = RandomCrashDisk(0, 0.0)
    disk.make_folder(f"{tmp_path}/x")
    file = disk.open(f"{tmp_path}/x/a", "create")
    file.allocate(100)
    file.truncate(64)
    file.write_at(0, [b"ab"])
    assert file.lock()
    file.unlock()
    file.sync()
    assert (file.size(), file.read_at(0, 2), file.view(2).to_pybytes()) == (64, b"ab", b"ab")
    mapped = disk.map(file.path, 64)
    mapped.view[0] = 0x62
    mapped.sync()
    mapped.close()
    assert file.read_at(0, 2) == b"bb"
    file.close()
    disk.rename(f"{tmp_path}/x/a", f"{tmp_path}/x/b")
    disk.sync_folder(f"{tmp_path}/x")
    disk.remove(f"{tmp_path}/x/b")
    assert disk.names(f"{tmp_path}/x") == []
    disk.remove_folder(f"{tmp_path}/x")
    disk.reach("sync: done")
    assert not disk.exists(f"{tmp_path}/x")


def test_points_are_recorded() -> None:
    """Every point with how often it was reached."""
    disk = RecordingDisk()
    for point in ("sync: done", "roll: begun", "sync: done"):
        disk.reach(point)
    assert disk.points == {"sync: done": 2, "roll: begun": 1}


def test_syncs_are_delayed(tmp_path: Path) -> None:
    """Those of files, mappings and folders."""
    disk = SlowSyncDisk(delay_s=0.02)
    file = disk.open(f"{tmp_path}/a", "create")
    file.allocate(8)
    mapped = disk.map(file.path, 8)
    for sync in (file.sync, mapped.sync, lambda: disk.sync_folder(str(tmp_path))):
        start = time.monotonic()
        sync()
        assert time.monotonic() - start >= 0.02
    mapped.close()
    file.close()
