"""The contract of overload: a topic at its limit waits, refuses or forgets as it was told, and counts what it lost."""

from __future__ import annotations

import threading
import time

import pytest

from headwater.log.log import Log
from headwater.model.errors import InvalidInput, Overloaded, TopicFull
from headwater.testing.contracts.case import LogCase, events_of, refused, values_of

LIMIT = 40_000
EVENT = b"x" * 1000


class OverloadContract(LogCase):
    """What holds for topics with a limit."""

    def test_overload_settings_are_checked(self, log: Log) -> None:
        """A compacted topic never forgets by age, and there is no other policy."""
        assert log.create_topic("t", bytes_max=LIMIT).overload == "block"
        assert log.alter_topic("t", bytes_max=None, overload="reject").bytes_max is None
        with refused(InvalidInput, "panic"):
            log.alter_topic("t", overload="panic")  # type: ignore[arg-type]
        with refused(InvalidInput, "drop_oldest"):
            log.create_topic("kept", compact=True, overload="drop_oldest")

    @pytest.mark.covers("concept: overload")
    def test_reject_refuses_what_does_not_fit_and_counts_it(self, log: Log) -> None:
        """Everything acknowledged is there, and nothing of what was refused."""
        log.create_topic("t", partitions=1, segment_bytes=8192, bytes_max=LIMIT, overload="reject")
        stored = refusals = 0
        for _ in range(60):
            try:
                stored += len(log.append("t", [EVENT, EVENT])[0])
            except Overloaded:
                refusals += 2
        assert stored > 20 and refusals > 20
        assert len(values_of(log, "t")) == stored
        assert log.counters()["rejected"] == refusals
        with refused(Overloaded), log.transaction() as transaction:
            transaction.append("t", [EVENT] * 5)
        with log.producer() as producer:
            receipt = producer.send("t", EVENT * 5)
            with pytest.raises(Overloaded):
                producer.flush()
            with refused(Overloaded):
                receipt.result()

    @pytest.mark.covers("concept: overload")
    def test_buffer_takes_a_burst_and_refuses_what_is_more(self, log: Log) -> None:
        """Offsets, order and durability are as ever; when there is room again, so it is for the next burst."""
        policy = {"bytes_max": LIMIT, "overload": "buffer", "buffer_bytes": LIMIT // 2}
        log.create_topic("t", partitions=1, segment_bytes=8192, **policy)  # type: ignore[arg-type]
        with refused(InvalidInput, "buffer_bytes"):
            log.alter_topic("t", buffer_bytes=0)

        def fill(events_max: int) -> tuple[list[int], int]:
            offsets: list[int] = []
            refusals = 0
            for _ in range(events_max):
                try:
                    offsets += log.append("t", [EVENT])[0]
                except Overloaded:
                    refusals += 1
            return offsets, refusals

        stored, refusals = fill(80)
        assert stored == list(range(len(stored))) and refusals == 80 - len(stored)
        counters = log.counters()
        assert counters["rejected"] == refusals > 10
        below = len(stored) - counters["buffered"]
        assert 25 < below <= 40, f"{below} events fit below the limit"
        assert 10 < counters["buffered"] <= 20
        assert [event.offset for event in events_of(log, "t")] == stored
        time.sleep(0.02)
        log.alter_topic("t", retention="10 ms")
        assert log.tidy("t") == len(stored)
        log.alter_topic("t", retention="1 day")
        again, _ = fill(80)
        assert again == list(range(len(stored), len(stored) + len(again)))
        assert abs(len(again) - len(stored)) <= 1
        assert log.counters()["buffered"] > counters["buffered"]
        with refused(Overloaded), log.transaction() as transaction:
            transaction.append("t", [EVENT] * 5)

    @pytest.mark.covers("concept: overload")
    def test_drop_oldest_takes_every_event_and_counts_what_it_forgot(self, log: Log) -> None:
        """What is left is the newest, without a hole, within the limit."""
        log.create_topic("t", partitions=1, segment_bytes=8192, bytes_max=LIMIT, overload="drop_oldest")
        for number in range(100):
            log.append("t", [EVENT + b"%d" % number])
        held = log.offsets("t")[0]
        assert held.stop == 100 and 20 < len(held) <= 40
        assert [event.offset for event in events_of(log, "t")] == list(held)
        assert log.counters()["dropped"] == held.start

    @pytest.mark.covers("concept: overload")
    def test_block_waits_until_there_is_room(self, log: Log, other: Log) -> None:
        """Nothing is lost: an append and a producer go on when somebody makes room; a producer gives up after its time."""
        log.create_topic("t", partitions=1, segment_bytes=8192, bytes_max=LIMIT)
        for _ in range(14):
            log.append("t", [EVENT * 2])
        with log.producer(retry_s=0.1) as producer:
            receipt = producer.send("t", EVENT * 14)
            with refused(TopicFull):
                producer.flush()
            with refused(TopicFull):
                receipt.result()
        assert log.counters()["blocked"] > 0
        with refused(TopicFull), log.transaction() as transaction:
            transaction.append("t", [EVENT * 14])
        before = log.offsets("t")[0].stop
        room = threading.Timer(0.3, lambda: other.alter_topic("t", bytes_max=10 * LIMIT))
        room.start()
        began = time.monotonic()
        assert log.append("t", [EVENT * 14]) == {0: range(before, before + 1)}
        assert 0.1 < time.monotonic() - began < 20
        room.join()
