"""Overload of the local log: the limit holds for several writers, and a full disk is met as the topic says."""

from __future__ import annotations

from pathlib import Path

import pytest

from children import Child
from headwater.log.log import open_log
from headwater.model.errors import DiskFull, Overloaded
from headwater.testing import SimDisk

EVENT = b"x" * 1000


@pytest.mark.slow
def test_two_writers_forget_the_oldest_and_nothing_else(tmp_path: Path) -> None:
    """What both have dropped, by their own counters, is what is missing."""
    with open_log(str(tmp_path)) as log:
        log.create_topic(
            "t", partitions=1, segment_bytes=8192, bytes_max=40_000, overload="drop_oldest", durability="os"
        )

    def write() -> tuple[int, int]:
        with open_log(str(tmp_path)) as log:
            stored = sum(len(log.append("t", [EVENT])[0]) for _ in range(150))
            return stored, log.counters().get("dropped", 0)

    outcomes = [child.result() for child in [Child(write), Child(write)]]
    with open_log(str(tmp_path)) as log:
        held = log.offsets("t")[0]
        assert log.read("t").num_rows == len(held)
    assert held.stop == sum(stored for stored, _ in outcomes) == 300
    assert held.start == sum(dropped for _, dropped in outcomes)
    size = sum(path.stat().st_size for path in (tmp_path / "topics" / "t" / "0").glob("0*"))
    assert size <= 40_000 + 2 * 8192


@pytest.mark.parametrize("policy", ["block", "reject", "drop_oldest"])
def test_a_full_disk_is_met_as_the_topic_says(policy: str) -> None:
    """Without a limit of its own; what was acknowledged and not dropped is there."""
    disk = SimDisk(7, capacity_bytes=1 << 18)
    log = open_log("/disk/log", disk=disk.process("writer"))
    log.create_topic("t", partitions=1, segment_bytes=16_384, overload=policy)
    stored, refusal = 0, None
    for _ in range(400):
        try:
            stored += len(log.append("t", [EVENT])[0])
        except (DiskFull, Overloaded) as error:
            refusal = type(error)
            break
    held = log.offsets("t")[0]
    assert held.stop == stored
    assert log.read("t").num_rows == len(held)
    assert refusal is {"block": DiskFull, "reject": Overloaded, "drop_oldest": None}[policy]
    assert log.counters().get("dropped", 0) == held.start
    assert (held.start > 0) == (policy == "drop_oldest")
    assert log.counters().get("rejected", 0) == (1 if policy == "reject" else 0)
