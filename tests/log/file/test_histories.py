"""Simulated histories: kills, power losses, failed syncs and full disks by seed break no promise, and a broken log is found out.

`python -m bench.crash --only sim` runs a thousand more; `--seed N` replays one.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from random import Random
from typing import Any

import pytest

from headwater.log.disk.disk import Disk
from headwater.log.file import recovery, transactions
from headwater.log.file.commit import CommitLog, CommitState
from headwater.log.file.handles import Handles
from headwater.log.file.partition import partition
from headwater.log.file.partition.head import Mark
from headwater.log.file.partition.partition import Partition
from headwater.log.file.transactions import Transactions
from headwater.log.port.store import Bounds
from headwater.testing.crash.points import crash_points, rare_points
from headwater.testing.oracle import Violation
from headwater.testing.simulation import scheduled_disk as scheduled
from headwater.testing.simulation.history import HistoryReport, run_history
from headwater.testing.simulation.nature import TEMPERS, Temper
from headwater.testing.simulation.schedule import Deadlock, Schedule

SEEDS = range(117)
PLANTED_SEEDS_MAX = 150
FOUND_FROM = {
    "readers see what is not durable": 84,
    "batches count as stored before they are published": 40,
    "the readers' masks are forgotten": 9,
}
"""Where to look first for a mistake that few histories meet, to save a minute; all others are found within the first few."""
FOUND_WITH: dict[str, Temper] = {
    "dead transactions are not settled": "doubt",
    "recovery believes in undecided transactions": "doubt",
    "nobody notices that the commit records have begun again": "records",
    "partitions stay open though nobody can say what was decided": "doubt",
    "healing leaves the segments that were begun": "rolls",
    "recovery leaves the segments that were begun": "rolls",
}
"""The temper to look with, where what reveals a mistake is rare: a death, a failure and a power loss that come together."""

TRACE = """
import hashlib, re, sys
from headwater.testing.simulation.history import run_history
lines = "\\n".join(run_history(int(sys.argv[1])).lines)
print(hashlib.md5(re.sub("[0-9a-f]{32}", "", lines).encode()).hexdigest())
"""


def report_or_failure(seed: int) -> HistoryReport | str:
    """What a history gives, in a form that comes back from another process."""
    try:
        return run_history(seed)
    except Exception:  # noqa: BLE001 - the test shows it
        return f"seed {seed}\n{traceback.format_exc()}"


@pytest.fixture(scope="module")
def outcomes() -> list[HistoryReport | str]:
    """Every history of this tier, on all cores."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(report_or_failure, SEEDS))


@pytest.mark.parametrize("seed", range(len(TEMPERS)))
def test_a_history_keeps_every_promise(seed: int) -> None:
    """One of each temper, for the fast tier."""
    assert run_history(seed).events > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_histories_keep_every_promise(outcomes: list[HistoryReport | str]) -> None:
    """Nothing acknowledged lost, nothing doubled, torn, reordered or uncommitted served, atomic appends all or nothing."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert not failures, "\n\n".join(failures)


@pytest.mark.slow
def test_histories_meet_every_misfortune(outcomes: list[HistoryReport | str]) -> None:
    """Every point of the log is reached, and power losses and disk faults are common: the histories are not idle."""
    reports = [outcome for outcome in outcomes if isinstance(outcome, HistoryReport)]
    points: Counter[str] = sum((report.points for report in reports), Counter())
    assert {*crash_points(), *rare_points()} <= set(points)
    assert sum(report.power_losses for report in reports) > len(SEEDS)
    assert sum(report.faults for report in reports) > len(SEEDS)
    assert sum(report.events for report in reports) > 50 * len(SEEDS)


@pytest.mark.slow
def test_a_seed_gives_the_same_history_again() -> None:
    """Also in another process, with other hashes: a failure can be looked at as often as needed."""
    seed = 3
    lines = re.sub("[0-9a-f]{32}", "", "\n".join(run_history(seed).lines))
    here = hashlib.md5(lines.encode()).hexdigest()
    elsewhere = subprocess.run(
        [sys.executable, "-c", TRACE, str(seed)],
        env=os.environ | {"PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert elsewhere.stdout.strip() == here


def nothing(*_: Any, **__: Any) -> None:
    """Does not do what it should."""


def up_to_written(of: Partition) -> Bounds:
    """What readers see of a partition, and more."""
    return Bounds(of.oldest(), of.written().end)


def stage_and_remember(of: Partition, payloads: Any, *, transaction: int = 0) -> Mark:
    """Writes frames, and takes them for stored before they are published."""
    after = _STAGE(of, payloads, transaction=transaction)
    if not transaction:
        of._sequences.doubt()
        of._sequences.remember(payloads, after)
    return after


def recover_undecided(disk: Disk, folder: str, **_: Any) -> Mark | None:
    """Recovers a partition with every transaction that is found there."""
    return recovery.recover_partition(disk, folder, decided=lambda _: True, decided_or_old=lambda _: True)


def state_of_another_file(commits: CommitLog, size: int) -> CommitState:
    """The shared state, whatever file of commit records it speaks of."""
    return commits.state()


_STAGE = Partition.stage

PLANTED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "the disk lies about syncs": (scheduled._ScheduledFile, "sync", nothing),
    "the readers' masks are forgotten": (CommitLog, "pending_parts", lambda *_: ()),
    "dead transactions are not settled": (CommitLog, "settle", nothing),
    "retries are stored again": (Partition, "_stored_before", nothing),
    "stale producers are not fenced": (Handles, "fence", nothing),
    "what was written is acknowledged before it is durable": (Partition, "sync", nothing),
    "readers see what is not durable": (Partition, "bounds", up_to_written),
    "batches count as stored before they are published": (Partition, "stage", stage_and_remember),
    "commit records go before what they name is on disk": (transactions, "sync_head", nothing),
    "nobody notices that the commit records have begun again": (CommitLog, "_in_step", state_of_another_file),
    "recovery believes in undecided transactions": (recovery, "_recovered", recover_undecided),
    "partitions stay open though nobody can say what was decided": (Transactions, "_poison", nothing),
    "healing leaves the segments that were begun": (partition, "remove_begun", nothing),
    "recovery leaves the segments that were begun": (recovery, "remove_begun", nothing),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", PLANTED)
def test_a_mistake_is_found_out(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is not blind: with one mistake planted in the log or its disk, some history soon ends in a violation."""
    owner, name, instead = PLANTED[mistake]
    monkeypatch.setattr(owner, name, instead)
    first = FOUND_FROM.get(mistake, 0)
    for seed in [*range(first, PLANTED_SEEDS_MAX), *range(first)]:
        try:
            run_history(seed, temper=FOUND_WITH.get(mistake))
        except (Violation, Deadlock):
            return
    pytest.fail(f"{PLANTED_SEEDS_MAX} histories, and nobody noticed that {mistake}.")


def test_a_schedule_interleaves_and_repeats_itself() -> None:
    """Two tasks meet in different ways by seed, and in the same way again."""

    def run(seed: int) -> str:
        schedule, steps = Schedule(Random(seed), switch_probability=0.5), []
        for name in "ab":
            schedule.add(name, lambda name=name: [(steps.append(name), schedule.turn()) for _ in range(5)])
        schedule.run()
        return "".join(steps)

    runs = [run(seed) for seed in range(20)]
    assert runs == [run(seed) for seed in range(20)]
    assert len(set(runs)) > 10


def test_a_schedule_finds_a_deadlock() -> None:
    """Tasks that all wait for each other end in an error, not in a hanging test."""
    schedule = Schedule(Random(0))
    schedule.add("one", schedule.wait)
    schedule.add("other", schedule.wait)
    with pytest.raises(Deadlock, match="waits for a lock"):
        schedule.run()


def test_a_failed_task_ends_the_others() -> None:
    """Its error is what `run` raises; nobody is left waiting for a turn."""
    schedule = Schedule(Random(0), switch_probability=1.0)

    def fail() -> None:
        schedule.turn()
        raise ValueError("by itself")

    def go_on() -> None:
        while True:
            schedule.turn()

    schedule.add("failing", fail)
    schedule.add("other", go_on)
    with pytest.raises(ValueError, match="by itself"):
        schedule.run()
