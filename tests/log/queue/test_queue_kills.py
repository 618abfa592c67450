"""Queues shared by real processes that are killed and stopped: nothing is lost, nothing is out twice, nothing is early."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

import headwater as hw
from headwater.log.queue.depth import Depth
from headwater.model.errors import Closed, LeaseExpired
from headwater.testing.contracts.case import refused
from headwater.testing.crash.disk import CrashingDisk
from headwater.testing.crash.points import queue_points
from tests.rigs.children import Child, Gate, in_child
from tests.rigs.log.queue_rounds import Round
from tests.rigs.memory_folders import memory_folder

ROUNDS = 10
BENCH_ROUNDS = 110


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "log")


def run(seed: int, kept: Path, *, phase_s: float = 1.0) -> Round:
    """A round in memory, since a kill cannot show what a sync does; a failed one is kept."""
    print(f"seed {seed}")
    with memory_folder() as where:
        try:
            fight = Round(where, seed, phase_s=phase_s)
            fight.run()
            fight.check()
        except AssertionError as failure:
            shutil.copytree(where, kept / "round")
            failure.add_note(f"seed {seed}, kept in {kept / 'round'}")
            raise
    return fight


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_workers_are_killed_and_stopped(seed: int, tmp_path: Path) -> None:
    """Each event is acknowledged once, or delivered again; every promise is checked from outside."""
    fight = run(seed, tmp_path, phase_s=0.5)
    assert fight.kills >= 2
    assert fight.stops >= 2


@pytest.mark.bench
@pytest.mark.parametrize("seed", range(ROUNDS, ROUNDS + BENCH_ROUNDS))
def test_workers_are_killed_and_stopped_for_long(seed: int, tmp_path: Path) -> None:
    """As above, over many seeds."""
    run(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("point", queue_points())
def test_a_process_dies_at_a_point(folder: str, point: str) -> None:
    """Whoever comes next goes on: each event is there, poison is a dead letter once, and windows can be read."""
    with hw.open_log(folder, durability="os") as log:
        log.create_topic("done", partitions=1)
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [{"value": b"%d" % n, "_headers": {"n": b"%d" % n}} for n in range(10)])
        log.append("tasks", [b"%d" % n for n in range(10, 5_000)])

    def use() -> None:
        with hw.open_log(folder, disk=CrashingDisk(point)) as log, log.queue("tasks", deliveries_max=1) as other:
            other.lease(events_max=20)
            Child(lambda: leave_behind(folder)).wait()
            queue = log.queue("tasks", deliveries_max=1)
            queue.nack(queue.lease(events_max=1))
            with log.transaction() as tx:
                tx.ack(queue.lease(events_max=3))
                tx.append("done", [b"three"])
            queue.lease(events_max=4_500)
            time.sleep(0.11)
            queue.lease()

    def leave_behind(folder: str) -> None:
        with hw.open_log(folder) as mine:
            mine.queue("tasks", deliveries_max=1).lease(events_max=5)
            os.kill(os.getpid(), signal.SIGKILL)

    child = Child(use)
    assert os.WTERMSIG(child.wait()) == signal.SIGKILL, f"{point} was not reached"
    with hw.open_log(folder) as log, log.queue("tasks", deliveries_max=3) as queue:
        seen: set[int] = set()
        while leases := queue.lease(timeout_s=0.3):
            seen |= {int(lease.event.value) for lease in leases}
            queue.ack(leases)
        dead = [int(event.value) for event in queue.dead(events_max=10_000)]
        assert len(set(dead)) == len(dead)
        in_unit = set(range(5_000)) - seen - set(dead)
        assert len(in_unit) == 3 * len(log.read("done"))
        assert not seen & set(dead)
        assert queue.depth() == Depth(ready=0, leased=0, scheduled=0, dead=len(dead))
        assert queue.floors() == {0: 5_000}


def test_the_leases_of_a_killed_process_come_back_at_once(folder: str) -> None:
    """Not when they expire; and the events say that they were delivered before."""
    with hw.open_log(folder) as log, Gate() as leased:
        log.create_topic("tasks", partitions=2)
        log.append("tasks", [{"key": b"%d" % n, "value": b"%d" % n} for n in range(100)])

        def hold() -> None:
            with hw.open_log(folder) as mine:
                leases = mine.queue("tasks", lease_s=600).lease()
                leased.open(b"%d" % len(leases))
                time.sleep(60)

        child = Child(hold)
        with log.queue("tasks", lease_s=600) as queue:
            assert leased.wait() == b"100"
            assert queue.lease(timeout_s=0.3) == []
            child.kill()
            begun = time.monotonic()
            leases = []
            while len(leases) < 100:
                leases += queue.lease(timeout_s=1.0)
            assert time.monotonic() - begun < 1.0
            assert {lease.deliveries for lease in leases} == {2}
            assert queue.counters()["returned"] == 100
        assert list(Path(folder).glob("queues/default/tasks/members/*")) == []


def test_a_stopped_process_loses_its_leases_when_they_end(folder: str) -> None:
    """It wakes up and is told; what it held was done by another."""
    with hw.open_log(folder) as log, Gate() as leased, Gate() as woken:
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"x"])

        def hold() -> str:
            with hw.open_log(folder) as mine, mine.queue("tasks", lease_s=0.3) as queue:
                leases = queue.lease()
                leased.open()
                woken.wait()
                try:
                    queue.ack(leases)
                except LeaseExpired as error:
                    return error.code
                return "acknowledged"

        child = Child(hold)
        leased.wait()
        os.kill(child.pid, signal.SIGSTOP)
        with log.queue("tasks") as queue:
            (lease,) = queue.lease(timeout_s=5)
            os.kill(child.pid, signal.SIGCONT)
            woken.open()
            assert child.result() == "lease_expired"
            lease.ack()
            queue.flush()


def test_a_forked_child_has_no_part_in_its_parents_queue(folder: str) -> None:
    """Its copy is of no use, and does not keep the parent's leases alive when the parent is dead."""
    with hw.open_log(folder) as log:
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"x"])
        queue = log.queue("tasks", lease_s=600)
        (lease,) = queue.lease()

        def use() -> None:
            with refused(Closed, "forked"):
                queue.lease(timeout_s=0)
            with refused(Closed):
                lease.ack()
            queue.close()
            with log.queue("tasks") as mine:
                assert mine.lease(timeout_s=0.2) == []

        in_child(use)
        lease.ack()
        queue.flush()

        def parent() -> None:
            with hw.open_log(folder) as mine:
                mine.append("tasks", [b"y"])
                theirs = mine.queue("tasks", lease_s=600)
                assert theirs.lease()
                Child(lambda: time.sleep(2))
                os.kill(os.getpid(), signal.SIGKILL)

        child = Child(parent)
        child.wait()
        assert queue.lease(timeout_s=1.0)
        queue.close()
