"""Ctrl-C at any instruction: the handle stays usable, nothing stays locked, and nothing acknowledged is lost."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

import headwater as hw
from interrupts import interrupt_in, run_interrupted

INTERRUPTS = 300


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_an_interrupt_leaves_nothing_locked(tmp_path: Path, durability: str) -> None:
    run_interrupted(work, f"file://{tmp_path}/log", durability)


def work(url: str, durability: str) -> None:
    chance = random.Random(durability)
    acknowledged: set[str] = set()
    log = hw.open_log(url)
    log.create_topic("t", "id string", durability=durability, partitions=2)
    producer = log.producer(linger_ms=1)
    for number in range(INTERRUPTS):
        with suppress(KeyboardInterrupt):
            try:
                interrupt_in(chance.uniform(0.0001, 0.004))
                with log.reader("t", start="latest") as reader:
                    log.append("t", [{"id": f"a{number}"}])
                    acknowledged.add(f"a{number}")
                    with log.transaction() as transaction:
                        transaction.append("t", [{"id": f"b{number}"}, {"id": f"c{number}"}])
                    acknowledged |= {f"b{number}", f"c{number}"}
                    receipt = producer.send("t", {"id": f"d{number}"})
                    reader.poll()
                    receipt.result()
                    acknowledged.add(f"d{number}")
                time.sleep(0.005)
            finally:
                interrupt_in(0)
    with hw.open_log(url) as other:  # another owner of locks, as another process would be
        other.append("t", [{"id": "other"}])
    log.append("t", [{"id": "after"}])
    producer.close()
    log.close()
    with hw.open_log(url) as other:
        stored = Counter(other.read("t").column("id").to_pylist())
    assert acknowledged | {"other", "after"} <= set(stored)
    assert max(stored.values()) == 1
    assert all((f"b{number}" in stored) == (f"c{number}" in stored) for number in range(INTERRUPTS))
