"""The events that a stage leaves out, and its status, on a disk that loses power and runs full."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.log.disk.disk import Disk
from headwater.processing.stages.skips import Skips
from headwater.processing.stages.status import AppStatus, read_status, write_status
from tests.rigs.processing.misfortunes import Machine

PATH = Path("/disk/state/skipped/orders.json")


@pytest.mark.parametrize("seed", range(100))
def test_what_a_stage_leaves_out_is_remembered_whole(seed: int) -> None:
    """An event that was set aside is never given to the function again, and a stage can always be started."""
    machine, wanted = Machine(seed), ""
    machine.disk.process("setup").make_folder("/disk/state")
    machine.disk.process("setup").sync_folder("/disk")
    machine.disk.process("setup").sync_folder("/disk/state")
    for number in range(4):

        def skip(disk: Disk, number: int = number) -> None:
            Skips(PATH, disk=disk).add([(("orders", 1), number)])

        before, is_over = wanted, machine.run(skip)
        there = Skips(PATH, disk=machine.disk.process("driver")).condition("orders") or ""
        wanted = " AND ".join([*([before] if before else []), f"NOT (_partition = 1 AND _offset = {number})"])
        assert there == wanted or (there == before and not is_over)
        wanted = there


@pytest.mark.parametrize("seed", range(60))
def test_a_status_is_whole_or_not_there(seed: int) -> None:
    """Whoever reads it after a power loss is not told of an error."""
    machine, folder = Machine(seed), Path("/disk")
    written = [AppStatus(name="shop", log="./data", pid=1, started_us=0, at_us=at) for at in range(5)]
    for status in written:

        def write(disk: Disk, status: AppStatus = status) -> None:
            write_status(folder, status, disk=disk)

        is_over = machine.run(write)
        found = read_status(folder, disk=machine.disk.process("reader"))
        assert found is None or found in written[: status.at_us + 1]
        assert machine.lost_power or not is_over or found == status
