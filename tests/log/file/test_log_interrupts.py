"""Ctrl-C at any instruction: the handle stays usable, nothing stays locked, and nothing acknowledged is lost."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

import headwater as hw
from headwater.log.clients.batch import Receipt
from headwater.model.errors import HeadwaterError, TimedOut
from tests.rigs.interrupts import interrupt_in, run_interrupted

INTERRUPTS = 300
SUCCEEDED_SHARE_MIN = 0.9


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_an_interrupt_leaves_nothing_locked(tmp_path: Path, durability: str) -> None:
    """Every receipt settles, those too whose `result` was interrupted, and what one says is stored is stored, once."""
    run_interrupted(work, f"file://{tmp_path}/log", durability)


def work(url: str, durability: str) -> None:
    chance = random.Random(durability)
    acknowledged: set[str] = set()
    receipts: dict[str, Receipt] = {}
    log = hw.open_log(url)
    log.create_topic("t", "id string", durability=durability, partitions=2)
    producer = log.producer(linger_ms=1)
    for number in range(INTERRUPTS):
        with suppress(KeyboardInterrupt):
            try:
                interrupt_in(chance.uniform(0.0001, 0.004))
                for part in range(chance.choice([0, 4])):
                    receipts[f"e{number}.{part}"] = receipt = producer.send("t", {"id": f"e{number}.{part}"})
                    receipt.result()
                with log.reader("t", start="latest") as reader:
                    log.append("t", [{"id": f"a{number}"}])
                    acknowledged.add(f"a{number}")
                    with log.transaction() as transaction:
                        transaction.append("t", [{"id": f"b{number}"}, {"id": f"c{number}"}])
                    acknowledged |= {f"b{number}", f"c{number}"}
                    receipts[f"d{number}"] = receipt = producer.send("t", {"id": f"d{number}"})
                    reader.poll()
                    receipt.result()
                time.sleep(0.005)
            finally:
                interrupt_in(0)
    with hw.open_log(url) as other:  # another owner of locks, as another process would be
        other.append("t", [{"id": "other"}])
    log.append("t", [{"id": "after"}])
    stored_by_receipt: set[str] = set()
    for name, receipt in receipts.items():
        try:
            receipt.result(timeout_s=30)
            stored_by_receipt.add(name)
        except TimedOut:
            raise AssertionError(f"the receipt of {name} never settles") from None
        except HeadwaterError:
            continue  # it was not stored, and its receipt says so
    acknowledged |= stored_by_receipt
    assert len(receipts) > INTERRUPTS / 4
    assert len(stored_by_receipt) > len(receipts) * SUCCEEDED_SHARE_MIN, (
        "interrupts fail receipts of events that they do not touch"
    )
    with suppress(HeadwaterError):  # what the receipts said
        producer.close()
    log.close()
    with hw.open_log(url) as other:
        stored = Counter(other.read("t").column("id").to_pylist())
    assert acknowledged | {"other", "after"} <= set(stored)
    assert max(stored.values()) == 1
    assert all((f"b{number}" in stored) == (f"c{number}" in stored) for number in range(INTERRUPTS))
