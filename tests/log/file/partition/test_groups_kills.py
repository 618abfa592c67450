"""Groups whose members are killed, stopped and started again: real processes, and an oracle over what they wrote down."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater as hw
from headwater.log.disk.disk import RealDisk
from headwater.log.file import commit
from headwater.log.port import group
from headwater.model.errors import Closed
from headwater.testing.contracts.case import refused, values_of
from headwater.testing.contracts.groups.case import drain, numbered, numbers_of, until
from headwater.testing.crash.disk import CrashingDisk, of_boot
from headwater.testing.crash.points import group_points
from tests.rigs.children import Child, Gate, in_child
from tests.rigs.log.group_storm import Storm
from tests.rigs.memory_folders import memory_folder

MODES = ("transactions", "manual", "auto")
STRIKES = 8
LOOK_US = 50_000
CI_ROUNDS = range(10)
BENCH_ROUNDS = range(100, 200)


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


def run_storm(folder: Path, seed: int, *, workers: int) -> Storm:
    print(f"seed {seed}")
    storm = Storm(folder, seed, MODES[seed % len(MODES)], workers=workers)
    try:
        storm.run(strikes=STRIKES)
        storm.check()
        print(f"{storm.mode}: {storm.sent} events, {storm.lives} lives, {dict(storm.strikes)}")
    finally:
        storm.log.close()
    return storm


@pytest.mark.slow
@pytest.mark.covers("Kafka", backends=["file"])
@pytest.mark.parametrize("seed", CI_ROUNDS)
def test_a_group_survives_a_storm(folder: Path, seed: int) -> None:
    """Nothing skipped, no two owners of a partition in one generation, and in transactions everything exactly once."""
    assert run_storm(folder, seed, workers=3).sent > 0


@pytest.mark.bench
@pytest.mark.parametrize("seed", BENCH_ROUNDS)
def test_a_group_survives_many_storms(folder: Path, seed: int) -> None:
    """The same with eight processes, a hundred times."""
    assert run_storm(folder, seed, workers=8).sent > 0


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_the_partitions_of_a_dead_member_are_taken_over(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a killed one by the next look of any other, and each looks every twentieth of a second; of a stopped one by the first
    after its time is over."""
    log = hw.open_log(str(folder / "log"))
    numbered(log, count=0)
    with Gate() as joined:

        def join() -> None:
            consumer = hw.open_log(str(folder / "log")).consumer("t", group="g", poll_interval_s_max=0.3)
            until(lambda: len(consumer.assignment()) == 2, consumer)
            joined.open()
            while True:
                consumer.poll(timeout_s=0.05)

        with log.consumer("t", group="g") as consumer:
            child = Child(join)
            until(lambda: len(consumer.assignment()) == 2, consumer)
            joined.wait()
            now_us = group.boot_us()
            monkeypatch.setattr(group, "boot_us", lambda: now_us)
            now_us += LOOK_US
            consumer.poll(timeout_s=0)
            if what == "kill":
                child.kill()
                consumer.poll(timeout_s=0)
                assert len(consumer.assignment()) == 2  # it is not yet time to look
                now_us += LOOK_US
            else:
                os.kill(child.pid, signal.SIGSTOP)
                now_us += 10_000_000
            consumer.poll(timeout_s=0)
            assert len(consumer.assignment()) == 4
            monkeypatch.undo()
            child.kill()
    log.close()


def test_a_forked_child_is_no_member(folder: Path) -> None:
    """Its copy of the consumer is closed, and does not keep the parent's membership alive after the parent's death."""
    log = hw.open_log(str(folder / "log"))
    numbered(log, count=10)
    with Gate() as forked, Gate() as done:

        def parent() -> None:
            mine = hw.open_log(str(folder / "log"))
            consumer = mine.consumer("t", group="g")
            if os.fork() == 0:
                try:
                    with refused(Closed, "forked"):
                        consumer.poll()
                    assert mine.group("g").members
                    forked.open(b"good")
                    done.wait()
                finally:
                    os._exit(0)
            time.sleep(60)

        child = Child(parent)
        assert forked.wait() == b"good"
        child.kill()
        with log.consumer("t", group="g") as consumer:
            assert numbers_of(drain(consumer)) == list(range(10))
        done.open()
    log.close()


@pytest.mark.slow
@pytest.mark.parametrize("point", group_points())
def test_a_member_dies_at_a_point(folder: Path, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two steps of joining, taking, committing and recovering: the next one goes on, exactly once."""
    monkeypatch.setattr(commit, "COMMITS_BYTES_MAX", 600)
    with hw.open_log(str(folder / "log"), disk=disk_of_boot(0)) as log:
        numbered(log, partitions=2, count=60)
        log.create_topic("out", "n INT", partitions=2)
    if "recovered" in point:
        in_child(lambda: consume(folder, disk_of_boot(0), polls=3))
    for nth in (1, 2):
        child = Child(lambda nth=nth: consume(folder, disk_of_boot(nth, point, nth), polls=50))
        status = child.wait()
        assert nth == 2 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL), (
            "the point is not reached"
        )
    in_child(lambda: consume(folder, disk_of_boot(2), polls=50))
    with hw.open_log(str(folder / "log"), disk=disk_of_boot(2)) as log:
        assert sorted(value["n"] for value in values_of(log, "out")) == list(range(60))
        assert log.group("g").lag.events == 0
        assert log.group("other").lag.events == 0


def disk_of_boot(boot: int, point: str = "", nth: int = 1) -> RealDisk:
    return of_boot(CrashingDisk(point, nth) if point else RealDisk(), boot)


def consume(folder: Path, disk: RealDisk, *, polls: int) -> None:
    """Two groups: one copies in transactions, the other only commits."""
    with (
        hw.open_log(str(folder / "log"), disk=disk) as log,
        log.consumer("t", group="g", commit="manual") as consumer,
        log.consumer("t", group="other") as other,
    ):
        for _ in range(polls):
            other.poll(events_max=4, timeout_s=0)
            events = consumer.poll(events_max=4, timeout_s=0)
            with log.transaction() as transaction:
                transaction.append("out", [{"n": event.value["n"]} for event in events])
                transaction.commit_offsets(consumer)
