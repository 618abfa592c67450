"""Overload of the local log: the limit holds for several writers, and a full disk is met as the topic says."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from headwater.log.log import open_log
from headwater.model.errors import DiskFull, Overloaded
from headwater.testing import Crashed, SimDisk
from tests.rigs.children import Child

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


@pytest.mark.parametrize("policy", ["block", "buffer", "reject", "drop_oldest"])
def test_a_full_disk_is_met_as_the_topic_says(policy: str) -> None:
    """Without a limit of its own; what was acknowledged and not dropped is there."""
    disk = SimDisk(7, capacity_bytes=1 << 18)
    log = open_log("/disk/log", disk=disk.process("writer"))
    log.create_topic("t", partitions=1, segment_bytes=16_384, overload=policy, buffer_bytes=1 << 16)
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
    assert refusal is {"block": DiskFull, "buffer": Overloaded, "reject": Overloaded, "drop_oldest": None}[policy]
    assert log.counters().get("dropped", 0) == held.start
    assert (held.start > 0) == (policy == "drop_oldest")
    assert log.counters().get("rejected", 0) == (1 if policy in ("buffer", "reject") else 0)
    assert (log.counters().get("buffered", 0) > 0) == (policy == "buffer")


def test_the_reserve_is_what_the_buffer_has_left(tmp_path: Path) -> None:
    """It shrinks as the burst grows, comes back when there is room, and goes with the policy."""
    reserve = tmp_path / "topics" / "t" / "0" / "reserve"
    with open_log(str(tmp_path)) as log:
        log.create_topic(
            "t", partitions=1, segment_bytes=8192, bytes_max=40_000, overload="buffer", buffer_bytes=100_000
        )
        log.append("t", [EVENT])
        assert reserve.stat().st_size == 100_000 and reserve.stat().st_blocks * 512 >= 100_000
        sizes = []
        for _ in range(90):
            log.append("t", [EVENT])
            sizes.append(reserve.stat().st_size)
        assert sizes == sorted(sizes, reverse=True) and 0 < sizes[-1] < 50_000
        log.alter_topic("t", retention_bytes=20_000)
        assert log.tidy("t") > 50
        assert reserve.stat().st_size == 100_000
        log.alter_topic("t", overload="block")
        log.tidy("t")
        assert not reserve.exists()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_process_that_dies_with_the_reserve_in_its_hands_loses_nothing(nth: int) -> None:
    """On a full disk, between giving room back and using it; the next process goes on with what is left."""
    disk = SimDisk(nth, capacity_bytes=1 << 19)
    stored, refused = 0, False
    for number in range(10):
        name = f"writer {number}"
        process = disk.process(name)
        if number == 0:
            disk.crash_at(name, "overload: reserve taken", nth)
        log = open_log("/disk/log", disk=process)
        log.create_topic(
            "t", partitions=1, segment_bytes=16_384, overload="buffer", buffer_bytes=1 << 18, exist_ok=True
        )
        try:
            for _ in range(600):
                stored += len(log.append("t", [EVENT])[0])
        except Crashed:
            continue
        except Overloaded:
            refused = True
            break
    assert refused and number == 1, "it died once, and then the buffer was full"
    assert log.read("t").num_rows == stored == log.offsets("t")[0].stop
    assert disk.free_bytes() < 1 << 17


@pytest.mark.slow
@pytest.mark.covers("concept: overload")
@pytest.mark.parametrize("seed", range(3))
def test_writers_that_are_killed_in_a_burst_lose_nothing_acknowledged(tmp_path: Path, seed: int) -> None:
    """Each wrote down what was acknowledged to it; everything is there once, in the order of each writer."""
    chance, folder = random.Random(seed), str(tmp_path / "log")
    with open_log(folder, durability="os") as log:
        policy = {"bytes_max": 60_000, "overload": "buffer", "buffer_bytes": 120_000, "durability": "os"}
        log.create_topic("t", partitions=1, segment_bytes=8192, **policy)  # type: ignore[arg-type]

    def write(writer: int) -> None:
        account = os.open(tmp_path / f"{writer}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with open_log(folder) as mine:
            for number in range(1000):
                try:
                    offset = mine.append("t", [b"%d %d " % (writer, number) + EVENT[:300]])[0].start
                except Overloaded:
                    return
                os.write(account, b"%d %d %d\n" % (offset, writer, number))

    children: list[Child[None]] = []
    for writer in range(12):
        children.append(Child(lambda writer=writer: write(writer)))
        time.sleep(chance.uniform(0.03, 0.1))
        if chance.random() < 0.6:
            chance.choice(children).kill()
    for child in children:
        child.wait()
    accounts = [path for path in tmp_path.iterdir() if path.name.isdigit()]
    lines = [line.split() for path in accounts for line in path.read_bytes().splitlines()]
    with open_log(folder) as log:
        values = log.read("t", columns=["value"]).column("value").to_pylist()
        stored = [tuple(map(int, value.split()[:2])) for value in values]
    assert lines and len(set(stored)) == len(stored), f"seed {seed}"
    for offset, writer, number in lines:
        assert stored[int(offset)] == (int(writer), int(number)), f"seed {seed}: offset {offset}"
    for writer in range(12):
        mine = [number for one, number in stored if one == writer]
        assert mine == sorted(mine), f"seed {seed}: writer {writer}"
