"""Removing groups and queues on a local log: killed at any step, and at the command line."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import headwater as hw
from headwater.model.errors import GroupNotFound
from headwater.testing import SimDisk
from headwater.testing.contracts.groups.case import drain, numbered
from headwater.testing.crash.disk import CrashingDisk
from headwater.testing.crash.points import removal_points
from tests.rigs.children import Child, in_child
from tests.rigs.commands import Command, refused


def test_the_points_are_all_there() -> None:
    """Each of them is killed at below."""
    assert len(removal_points()) == 4


@pytest.mark.slow
@pytest.mark.parametrize("point", removal_points())
def test_a_process_dies_while_it_removes(tmp_path: Path, point: str) -> None:
    """Either nothing has happened, or all of it has by the time that anybody sees."""
    folder = str(tmp_path / "log")
    with hw.open_log(folder, durability="os") as log:
        numbered(log, "events", partitions=2, count=20)
        with log.consumer("events", group="g") as consumer:
            drain(consumer)
        with log.queue("events", group="g") as queue:
            queue.ack(queue.lease())

    def remove() -> None:
        with hw.open_log(folder, disk=CrashingDisk(point)) as log:
            log.delete_group("g")
            log.delete_queue("events", group="g")
            use(log)

    def use(log: hw.Log) -> tuple[int, int]:
        with log.consumer("events", group="g") as consumer, log.queue("events", group="g") as queue:
            leases = queue.lease(timeout_s=0)
            queue.ack(leases)
            return len(drain(consumer)), len(leases)

    child = Child(remove)
    assert os.WTERMSIG(child.wait()) == signal.SIGKILL, f"{point} was not reached"

    def go_on() -> tuple[int, int]:
        with hw.open_log(folder) as log:
            for again in (lambda: log.delete_group("g"), lambda: log.delete_queue("events", group="g")):
                try:
                    again()
                except GroupNotFound:
                    continue
            return use(log)

    assert in_child(go_on) == (20, 20)
    with hw.open_log(folder) as log:
        assert use(log) == (0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_a_removed_group_stays_removed_after_a_power_loss(seed: int) -> None:
    """Neither its offsets nor those of its transactions come back."""
    disk = SimDisk(seed)
    log = hw.open_log("/disk/log", disk=disk.process("one"))
    numbered(log, "events", partitions=2, count=20)
    log.create_topic("out")
    with log.consumer("events", group="g", commit="manual") as consumer:
        assert len(drain(consumer)) == 20
        with log.transaction() as transaction:
            transaction.append("out", [b"x"])
            transaction.commit_offsets(consumer)
    log.delete_group("g")
    disk.power_loss()
    log = hw.open_log("/disk/log", disk=disk.process("two"))
    assert log.groups() == []
    with log.consumer("events", group="g", commit="manual") as consumer:
        assert len(drain(consumer)) == 20
    disk.power_loss()
    log = hw.open_log("/disk/log", disk=disk.process("three"))
    with log.consumer("events", group="g") as consumer:
        assert len(drain(consumer)) == 20


def test_the_commands_ask_first(tmp_path: Path, command: Command) -> None:
    """A program has to say --yes; what is not there is named."""
    with hw.open_log(str(tmp_path / "data")) as log:
        numbered(log, "events", partitions=1, count=3)
        with log.consumer("events", group="g") as consumer:
            drain(consumer)
        with log.queue("events", group="q") as queue:
            queue.ack(queue.lease())
    refused(command("groups", "delete", "g"), "invalid_input", "--yes")
    assert "deleted group g" in command("groups", "delete", "g", "--yes").out
    refused(command("groups", "delete", "g", "--yes"), "group_not_found", "'g'")
    refused(command("queues", "delete", "events"), "invalid_input", "--yes")
    assert "deleted the queue of group q" in command("queues", "delete", "events", "--yes").out
    refused(command("queues", "delete", "events", "--yes"), "invalid_input", "has no queue")
