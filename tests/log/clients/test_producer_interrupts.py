"""Ctrl-C at every place where the interpreter can deliver it: each receipt settles, and says the truth.

Signals reach Python code when a function begins and when a call into C has returned. A profile function is called at just these
places, so raising `KeyboardInterrupt` in it at the n-th of them, for every n, leaves nothing to chance. The fast tier strikes each third.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import FrameType

import pytest

import headwater as hw
from headwater.log.clients.producer import Producer
from headwater.log.log import Log
from headwater.model.errors import SequenceGap

LINGER_MS = 60_000

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""An interrupt in a `__del__` is shown and forgotten by the interpreter."""

STEP = 3
STARTS = [1, *(pytest.param(start, marks=pytest.mark.bench) for start in range(2, STEP + 1))]


def interrupted(work: Callable[[], object], nth: int) -> bool:
    """Calls a function and interrupts it at the nth place; False where it ended before."""
    left = nth

    def strike(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(strike)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return left <= 0


class Sent:
    """What was sent, and the receipts that were handed out for it."""

    def __init__(self) -> None:
        self.receipts: dict[str, hw.Receipt] = {}
        self.tried: set[str] = set()

    def check(self, log: Log) -> None:
        """Every receipt settles at the one place where its event stands; nothing stands there that was not sent, or twice."""
        places = {name: receipt.result(timeout_s=30) for name, receipt in self.receipts.items()}
        with log.reader("t") as reader:
            events = list(reader.poll(events_max=1_000_000, timeout_s=0))
        stored = {(event.partition, event.offset): event for event in events}
        for name, place in places.items():
            event = stored.get((place.partition, place.offset))
            assert event is not None, f"{name} has a receipt for {place}, where nothing is"
            assert event.value["id"] == name
            assert dict(event.headers or {}) == ({"name": name.encode()} if name.endswith("h") else {}), name
        counts = Counter(event.value["id"] for event in events)
        assert set(counts) <= self.tried
        assert max(counts.values()) == 1


@pytest.mark.parametrize("kind", ["fsync", "os", "memory"])
@pytest.mark.parametrize("way", ["flush", "named", "send", "headers", "roll"])
@pytest.mark.parametrize("start", STARTS)
def test_an_interrupt_anywhere_leaves_no_receipt_unsettled_or_untrue(
    tmp_path: Path, start: int, way: str, kind: str
) -> None:
    """While a batch is written, closed or begun, with headers or without, by a named producer, and where it begins another segment."""
    sent = Sent()
    durability = "fsync" if kind == "memory" else kind
    with hw.open_log(f"memory://{tmp_path.name}" if kind == "memory" else f"file://{tmp_path}/log") as log:
        log.create_topic("t", "id string, text string", partitions=1, durability=durability, segment_bytes=4096)
        name = "importer" if way == "named" else None
        producer = Producer(log.store, id=name, linger_ms=LINGER_MS, batch_events_max=2 if way == "send" else 100)
        text = "x" * (3000 if way == "roll" else 1)

        def send(name: str) -> None:
            sent.tried.add(name)
            headers = {"name": name.encode()} if name.endswith("h") else None
            sent.receipts[name] = producer.send("t", {"id": name, "text": text}, headers=headers)

        for nth in count(start, STEP):
            send(f"a{nth}")
            work: Callable[[], object]
            if way in ("flush", "named", "roll"):
                work = producer.flush
            else:
                work = lambda: send(f"b{nth}{'h' if way == 'headers' else ''}")  # noqa: B023, E731
            is_struck = interrupted(work, nth)
            send(f"c{nth}")
            if nth % (10 * STEP) == start or way != "headers":
                producer.flush()
            if not is_struck:
                break
        producer.close()
        sent.check(log)


def test_numbers_stay_with_their_events_when_a_send_is_interrupted(tmp_path: Path) -> None:
    """An event whose `send` was interrupted may be sent again with its number; it and those after it are stored once, in order."""
    stored: list[int] = []
    with hw.open_log(f"file://{tmp_path}/log") as log:
        log.create_topic("t", "id long", partitions=1)
        producer = log.producer(id="importer", linger_ms=LINGER_MS)
        number = 0
        for nth in count(1):
            is_struck = interrupted(lambda: _send(producer, number), nth)  # noqa: B023
            with suppress(SequenceGap):  # it was taken before the interrupt
                _send(producer, number)
            number += 1
            receipt = _send(producer, number)
            number += 1
            if nth % 5 == 0:
                assert receipt.result(timeout_s=30).offset == number - 1
            if not is_struck:
                break
        producer.close()
        stored = log.read("t").column("id").to_pylist()
        with log.producer(id="importer") as again:
            for each in range(number):
                again.send("t", {"id": each}, sequence=each)
        assert log.read("t").num_rows == number
    assert stored == list(range(number))


def _send(producer: Producer, number: int) -> hw.Receipt:
    return producer.send("t", {"id": number}, sequence=number)
