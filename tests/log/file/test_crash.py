"""Real processes that are killed with SIGKILL, at every point and anywhere, lose nothing and double nothing.

`python -m bench.crash --only kill` runs some hundred rounds more; `--seed N` repeats the plan of one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.log.log import Log, open_log
from headwater.testing.crash.harness import Nursery, RoundReport, round_points, run_round
from headwater.testing.crash.invariants import check_round
from headwater.testing.crash.worker import COLUMNS, TOPICS
from headwater.testing.oracle import Violation
from tests.rigs.memory_folders import memory_folder
from tests.rigs.wait import wait_until

RELENTLESS = ("settle: before publish", "commit: published one", "roll: created", "anywhere")
DRIVER = """
import sys, time
from headwater.testing.crash.worker import WorkerOrder
from headwater.testing.crash.harness import Nursery
nursery = Nursery()
pid = nursery.start(WorkerOrder("plain", "plain", sys.argv[1] + "/log", sys.argv[1] + "/plain.jsonl", 0, 0, 0))
print(nursery.pid, pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Where the workers come from."""
    with Nursery() as nursery:
        yield nursery


def run(nursery: Nursery, kept: Path, seed: int, **options: object) -> RoundReport:
    """A round in memory where there is some, since a kill cannot show what a sync does; a failed one is kept on disk."""
    with memory_folder() as folder:
        try:
            return run_round(nursery, folder, seed, **options)
        except Violation as violation:
            shutil.copytree(folder, kept / "round")
            violation.add_note(f"kept in {kept / 'round'}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("point", round_points())
def test_writers_die_at_a_point(nursery: Nursery, tmp_path: Path, point: str) -> None:
    """Four writers and two readers; every invariant is checked from outside, over what they wrote down themselves."""
    report = run(nursery, tmp_path, round_points().index(point))
    assert report.point == point
    assert report.died_at_point > 0
    assert min(report.counts.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("point", RELENTLESS)
def test_writers_die_at_a_point_again_and_again(nursery: Nursery, tmp_path: Path, point: str) -> None:
    """Whoever comes to help dies as well, so that one half-done operation meets the next."""
    seed = round_points().index(point) + 7 * len(round_points())
    assert run(nursery, tmp_path, seed, phase_s=0.5, relentless=True).died_at_point > 5


@pytest.mark.slow
def test_nothing_outlives_the_harness(tmp_path: Path) -> None:
    """The driver is killed with SIGKILL: nursery and workers go with it."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        wait_until((tmp_path / "plain.jsonl").exists, seconds=20)
        driver.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(is_running(pid) for pid in pids), seconds=20)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# The invariants themselves: a small log whose account is right, and accounts that are not.

EVENT = {"key": "a", "worker": "w", "size": 1, "line": None, "transaction_size": None}
PLACE = {"topic": "first", "partition": 0}
SEEN = {"reader": "r.0", "poll": 1, **PLACE, "worker": "w", "row": 0, "line": None}
POLLED = {"reader": "r.0", "polled": 1, "events": 2}


def row(batch: int, **more: object) -> dict[str, object]:
    number = more.get("line", batch)
    text = "x" * ((number * 31 + more.get("row", 0) * 7) % 300)
    return EVENT | {"batch": batch, "row": 0, "text": text} | more


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Log]:
    """Batches 1 and 2, and lines 0 and 5 of a source."""
    with open_log(str(tmp_path / "log")) as log:
        for name, options in TOPICS.items():
            log.create_topic(name, COLUMNS, key="key", **options)
        for batch in (1, 2):
            log.append("first", [row(batch)])
        yield log


RIGHT = [
    {"worker": "w", "batch": 1, **PLACE, "first": 0, "count": 1},
    {"worker": "w", "batch": 2},
    SEEN | {"offset": 0, "batch": 1},
    SEEN | {"offset": 1, "batch": 2},
    POLLED,
]
WRONG = {
    "nothing acknowledged is lost or moved": [{"worker": "w", "batch": 3, **PLACE, "first": 2, "count": 1}],
    "no acknowledged transaction is lost": [{"worker": "w", "batch": 3}],
    "no acknowledged line is lost": [{"worker": "w", "lines": 1}],
    "readers saw every offset from the first, in order": [SEEN | {"offset": 1, "batch": 2, "reader": "r.1"}],
    "readers saw what is there": [SEEN | {"offset": 2, "batch": 3}],
}
UNSOUND = {
    "no event is torn": [row(3, text="y")],
    "no event is stored twice": [row(2)],
    "transactions are all or nothing": [row(3, transaction_size=2)],
    "batches are whole, together and in order": [row(3, size=2, row=1), row(3, size=2, row=0)],
    "no line is stored twice": [row(3, line=0), row(4, line=0)],
    "no line is left out before another of its key": [row(3, line=5)],
    "lines are in order": [row(3, line=5), row(3, line=0)],
}


def check(log: Log, folder: Path, lines: list[dict[str, object]]) -> None:
    account = folder / "account.jsonl"
    account.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"worker": "w", "bat')
    check_round(log, TOPICS, [account])


def test_a_right_account_is_accepted(small: Log, tmp_path: Path) -> None:
    """A line that was cut by the worker's death does not count."""
    check(small, tmp_path, RIGHT)


@pytest.mark.parametrize("invariant", WRONG)
def test_a_wrong_account_is_found_out(small: Log, tmp_path: Path, invariant: str) -> None:
    """Each invariant can fail: here the log is right and the account says something else."""
    finished = [POLLED | {"reader": line["reader"]} for line in WRONG[invariant] if "reader" in line]
    with pytest.raises(Violation, match=invariant):
        check(small, tmp_path, [*RIGHT, *WRONG[invariant], *finished])


@pytest.mark.parametrize("invariant", UNSOUND)
def test_an_unsound_log_is_found_out(small: Log, tmp_path: Path, invariant: str) -> None:
    """Each invariant can fail: here the log holds what it never should."""
    for event in UNSOUND[invariant]:
        small.append("first", [event])
    with pytest.raises(Violation, match=invariant):
        check(small, tmp_path, RIGHT)


def test_a_transaction_seen_in_two_polls_is_found_out(small: Log, tmp_path: Path) -> None:
    """All or nothing holds for every poll, not only in the end."""
    small.append("first", [row(3, transaction_size=2), row(3, transaction_size=2, row=1)])
    polls = [
        SEEN | {"offset": 2, "batch": 3, "poll": 2},
        POLLED | {"polled": 2},
        SEEN | {"offset": 3, "batch": 3, "row": 1, "poll": 3},
        POLLED | {"polled": 3},
    ]
    with pytest.raises(Violation, match="readers saw transactions whole, in one poll"):
        check(small, tmp_path, [*RIGHT, *polls])


def test_an_error_of_a_worker_is_a_violation(small: Log, tmp_path: Path) -> None:
    """What a worker did not expect ends the round."""
    with pytest.raises(Violation, match="Damaged"):
        check(small, tmp_path, [*RIGHT, {"worker": "w", "error": "headwater.model.errors.Damaged: …"}])
