"""Ctrl-C at any instruction of a consumer: nothing stays locked, nothing is skipped, and transactions stay exactly once."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import headwater as hw
from headwater.testing.contracts.groups.case import numbered
from tests.rigs.interrupts import interrupt_in, run_interrupted

INTERRUPTS = 80


def test_an_interrupted_consumer_skips_nothing(tmp_path: Path) -> None:
    """One that commits by itself, and one that copies in transactions."""
    run_interrupted(consume, f"file://{tmp_path}/log")


def consume(url: str) -> None:
    chance = random.Random(7)
    seen: set[int] = set()
    log = hw.open_log(url, durability="os")
    numbered(log, partitions=3, count=4000)
    log.create_topic("out", "n INT", partitions=2)
    for _ in range(INTERRUPTS):
        with suppress(KeyboardInterrupt):
            try:
                interrupt_in(chance.uniform(0.0005, 0.03))
                with (
                    log.consumer("t", group="plain") as plain,
                    log.consumer("t", group="copy", commit="manual") as copying,
                ):
                    for _ in range(5):
                        seen |= {event.value["n"] for event in plain.poll(events_max=10, timeout_s=0)}
                        with log.transaction() as transaction:
                            events = copying.poll(events_max=10, timeout_s=0)
                            transaction.append("out", [{"n": event.value["n"]} for event in events])
                            transaction.commit_offsets(copying)
                time.sleep(0.03)
            finally:
                interrupt_in(0)
    with hw.open_log(url) as other:  # another owner of locks, as another process would be
        for name in ("plain", "copy"):
            other.consumer("t", group=name).close(commit=False)
        groups = {name: other.group(name) for name in ("plain", "copy")}
    committed = {name: {part.partition: part.committed for part in group.partitions} for name, group in groups.items()}
    numbers: dict[str, Counter[int]] = {name: Counter() for name in committed}
    for row in log.read("t", columns=["n", "_partition", "_offset"]).to_pylist():
        for name, ends in committed.items():
            numbers[name][row["n"]] += row["_offset"] < (ends[row["_partition"]] or 0)
    log_out = Counter(log.read("out")["n"].to_pylist())
    log.close()
    print(f"committed {[counter.total() for counter in numbers.values()]}, copied {log_out.total()}")
    assert {number for number, count in numbers["plain"].items() if count} <= seen
    assert log_out == +numbers["copy"]
    assert log_out.total() > 50
