"""A mirror that is killed with SIGKILL, at named points and anywhere, while others write: the copy ends up equal by offset."""

from __future__ import annotations

import os
import random
import threading
import time
import traceback
from pathlib import Path

import pytest

import headwater as hw
from headwater.log.disk.disk import RealDisk
from headwater.model.errors import Fenced
from headwater.testing.crash.disk import CrashingDisk, RandomCrashDisk
from tests.rigs.children import Child
from tests.rigs.log.copies import await_lines, check_accounts, check_equal, make_topics, write_until_told
from tests.rigs.memory_folders import memory_folder

WRITERS = 3
LIVES = 4
POINTS = (
    "append: locked", "append: written", "append: published", "sync: done", "roll: created", "roll: begun",
    "transaction: staged", "transaction: synced", "commit: intended", "commit: recorded", "commit: published one",
    "create: partition made", "create: named",
)  # fmt: skip


def follow(folder: Path, disk: RealDisk) -> str:
    """A mirror that ends only by being killed, or by another that takes over; any other end is written down."""
    try:
        with hw.open_log(folder / "log", read_only=True) as log, hw.open_log(folder / "copy", disk=disk) as copy:
            log.mirror(copy, follow=True)
    except Fenced:
        return "fenced"
    except BaseException:
        (folder / f"failure.{os.getpid()}").write_text(traceback.format_exc())
        raise
    return "ended"


def disk_of(chance: random.Random) -> RealDisk:
    """Where the next mirror dies: at a point, anywhere, or where the test kills it."""
    kind = chance.random()
    if kind < 0.4:
        return CrashingDisk(chance.choice(POINTS), nth=chance.randint(1, 3))
    return RandomCrashDisk(chance.randrange(1 << 30), 0.002) if kind < 0.6 else RealDisk()


def await_work(folder: Path, mirrors: list[Child[str]]) -> None:
    """Returns when something was copied since, or when all mirrors are dead already."""
    before, deadline = last_write(folder), time.monotonic() + 60
    while last_write(folder) == before and time.monotonic() < deadline and any(map(is_alive, mirrors)):
        time.sleep(0.002)


def last_write(folder: Path) -> int:
    """When an event was last copied: a topic's signal is older than its description until then."""
    written = 0
    for signal in folder.glob("copy/topics/[a-z]*/signal"):
        at = signal.stat().st_mtime_ns
        written = max(written, at if at > signal.with_name("topic").stat().st_mtime_ns else 0)
    return written


def is_alive(child: Child[str]) -> bool:
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def kill_round(folder: Path, seed: int) -> tuple[int, int]:
    """One round: three writers, and mirrors that are killed, take over from one another and are started again."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    with hw.open_log(folder / "log") as log:
        make_topics(log)
    writers = [Child(lambda worker=worker: write_until_told(folder, worker, seed)) for worker in range(WRITERS)]
    lives = 0
    while lives < LIVES or not last_write(
        folder
    ):  # two that begin together may fence each other before they copy anything
        await_lines(folder, 20 * (lives + 1))
        disks = [disk_of(chance) for _ in range(2 if chance.random() < 0.3 else 1)]
        mirrors = [Child(lambda disk=disk: follow(folder, disk)) for disk in disks]
        await_work(folder, mirrors)
        time.sleep(chance.uniform(0.0, 0.1))
        for mirror in mirrors:
            mirror.kill()
        lives += len(mirrors)
    (folder / "stop").touch()
    assert [failure.read_text() for failure in folder.glob("failure.*")] == []
    for writer in writers:
        writer.result()
    with hw.open_log(folder / "log") as log:
        caught_up = log.mirror(folder / "copy").events
        assert log.mirror(folder / "copy").events == 0
    events = check_equal(folder / "log", folder / "copy")
    assert caught_up < events, "the mirrors that were killed had copied nothing"
    assert check_accounts(folder, folder / "copy") > 0
    return events, lives


@pytest.mark.slow
@pytest.mark.covers("concept: replication")
@pytest.mark.parametrize("seed", range(8))
def test_a_killed_mirror_goes_on_without_loss_or_duplicates(seed: int) -> None:
    """Three processes append meanwhile; DuckDB compares both logs, and the writers' accounts hold for the copy too."""
    with memory_folder() as folder:
        events, lives = kill_round(folder, seed)
    assert events > 100 and lives >= LIVES


@pytest.mark.bench
@pytest.mark.parametrize("seed", range(100, 160))
def test_a_killed_mirror_goes_on_many_more_times(seed: int) -> None:
    """The long tier of the same."""
    with memory_folder() as folder:
        assert kill_round(folder, seed)[0] > 100


@pytest.mark.slow
@pytest.mark.covers("DistributedLog")
def test_the_mirror_that_came_later_is_the_only_one() -> None:
    """The earlier one is fenced at its next write, even if it only slept, and nothing is there twice."""
    with memory_folder() as folder, hw.open_log(folder / "log") as log:
        make_topics(log)
        first = Child(lambda: follow(folder, RealDisk()))
        deadline = time.monotonic() + 20
        while not (folder / "copy/topics/right/topic").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        stop = threading.Event()
        with hw.open_log(folder / "copy") as copy:
            later = threading.Thread(target=lambda: log.mirror(copy, follow=True, stop=stop))
            later.start()
            fenced = threading.Event()
            said: list[str] = []
            waiting = threading.Thread(target=lambda: (said.append(first.result()), fenced.set()))
            waiting.start()
            count = 0
            while not fenced.is_set() and time.monotonic() < deadline:
                log.append("plain", [{"id": f"k{count % 20}", "n": count}])
                count += 1
                time.sleep(0.01)
            waiting.join()
            stop.set()
            later.join()
        assert said == ["fenced"]
        log.mirror(folder / "copy")
        assert check_equal(folder / "log", folder / "copy") == count
