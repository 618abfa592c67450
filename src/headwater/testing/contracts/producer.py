"""The contract of producers: single events, receipts, order, errors that reach who sent the event."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from headwater.log.log import Log
from headwater.model.errors import Closed, InvalidInput, SchemaMismatch
from headwater.testing.contracts.case import (
    ORDERS,
    LogCase,
    events_of,
    order,
    refused,
    values_by_partition,
    values_of,
)

UNWORKABLE: list[dict[str, Any]] = [
    {"linger_ms": -1},
    {"linger_ms": "5"},
    {"retry_s": -1},
    {"retry_s": None},
]

BAD_AND_GOOD = [
    ("bad", "deleted", "headers", "plain"),
    ("headers", "bad", "deleted", "plain"),
    ("plain", "deleted", "headers", "bad"),
]

WRONG_HEADERS: list[Any] = [{"a": 1}, {1: b"a"}, {"a": [b"1"]}, [("a", b"1")], "trace", 7]


class ProducerContract(LogCase):
    """What holds for producers."""

    def test_a_receipt_says_where_its_event_stands(self, log: Log) -> None:
        """Topic, partition and offset, as a reader finds it."""
        log.create_topic("orders", ORDERS, key="id", partitions=3)
        with log.producer() as producer:
            receipts = [producer.send("orders", order(number)) for number in range(50)]
            places = [receipt.result() for receipt in receipts]
        assert all(receipt.done() for receipt in receipts)
        by_place = {(event.topic, event.partition, event.offset): event.value for event in events_of(log, "orders")}
        for number, place in enumerate(places):
            assert by_place[place.topic, place.partition, place.offset] == order(number)
        assert len(by_place) == 50

    def test_a_result_is_there_when_the_event_can_be_read(self, log: Log, other: Log) -> None:
        """`result` sends what lingers, and returns when everybody sees it."""
        log.create_topic("raw", partitions=1)
        with log.producer(linger_ms=60_000) as producer:
            for number in range(5):
                receipt = producer.send("raw", b"%d" % number)
                assert not receipt.done()
                assert receipt.result().offset == number
                assert len(values_of(other, "raw")) == number + 1

    def test_events_are_sent_without_being_asked_for(self, log: Log) -> None:
        """After `linger_ms`, or when a batch is full."""
        log.create_topic("raw", partitions=1)
        with log.producer(linger_ms=1) as producer, log.reader("raw") as reader:
            producer.send("raw", b"lingers")
            assert [event.value for event in reader.poll(timeout_s=10)] == [b"lingers"]

    def test_flush_waits_for_everything(self, log: Log) -> None:
        """Of all topics."""
        log.create_topic("a", partitions=2)
        log.create_topic("b", partitions=1)
        with log.producer(linger_ms=60_000) as producer:
            receipts = [producer.send("ab"[number % 2], b"%d" % number) for number in range(100)]
            producer.flush()
            assert all(receipt.done() for receipt in receipts)
            assert len(events_of(log, ["a", "b"])) == 100

    def test_closing_flushes(self, log: Log) -> None:
        """And a closed producer takes nothing more."""
        log.create_topic("raw", partitions=1)
        producer = log.producer(linger_ms=60_000)
        producer.send("raw", b"x")
        producer.close()
        assert values_of(log, "raw") == [b"x"]
        with refused(Closed):
            producer.send("raw", b"y")
        with refused(Closed):
            producer.flush()
        producer.close()

    @pytest.mark.parametrize("settings", UNWORKABLE, ids=repr)
    def test_settings_of_a_producer_that_cannot_work_are_refused(self, log: Log, settings: dict[str, Any]) -> None:
        """When it is opened, not when it hangs."""
        with refused(InvalidInput, next(iter(settings))):
            log.producer(**settings)

    def test_the_order_of_sends_is_the_order_of_each_partition(self, log: Log) -> None:
        """Over many batches, and mixed with another topic."""
        log.create_topic("orders", ORDERS, key="id", partitions=3)
        log.create_topic("raw", partitions=1)
        with log.producer(linger_ms=0) as producer:
            for number in range(500):
                producer.send("orders", order(number, key=f"k{number % 10}"))
                producer.send("raw", b"%d" % number)
        for values in values_by_partition(log, "orders").values():
            amounts = [value["amount"] for value in values]
            assert amounts == sorted(amounts)
        assert values_of(log, "raw") == [b"%d" % number for number in range(500)]

    def test_more_than_one_batch_holds_is_sent_all_the_same(self, log: Log) -> None:
        """`send` waits while a batch is written, instead of losing or refusing events."""
        log.create_topic("raw", partitions=2)
        with log.producer(linger_ms=60_000) as producer:
            for number in range(100_000):
                producer.send("raw", b"%d" % number)
        assert log.read("raw").num_rows == 100_000

    def test_an_event_is_what_it_was_when_it_was_sent(self, log: Log) -> None:
        """A program may use its dict again for the next event."""
        log.create_topic("orders", ORDERS, partitions=1)
        row = order(0)
        with log.producer(linger_ms=60_000) as producer:
            for number in range(3):
                row["amount"] = float(number)
                producer.send("orders", row)
        assert [value["amount"] for value in values_of(log, "orders")] == [0.0, 1.0, 2.0]

    def test_headers_are_kept(self, log: Log) -> None:
        """For the events that have them."""
        log.create_topic("raw", partitions=1)
        with log.producer(linger_ms=60_000) as producer:
            producer.send("raw", b"a")
            producer.send("raw", b"b", headers={"trace": b"\xff", "empty": b""})
            producer.send("raw", b"c", headers={})
            producer.send("raw", b"d")
        headers = [event.headers for event in events_of(log, "raw")]
        assert headers[:2] == [None, {"trace": b"\xff", "empty": b""}]
        assert not headers[2] and headers[3] is None

    @pytest.mark.parametrize("headers", WRONG_HEADERS, ids=lambda headers: f"{headers!r:.30}")
    def test_wrong_headers_are_refused_and_the_producer_goes_on(self, log: Log, headers: Any) -> None:
        """At the send or at its receipt; the next event is stored, without them."""
        log.create_topic("raw", partitions=1)
        producer = log.producer(linger_ms=60_000)
        with pytest.raises(InvalidInput) as caught:
            producer.send("raw", b"wrong", headers=headers).result(timeout_s=10)
        assert caught.value.advice
        assert producer.send("raw", b"right").result(timeout_s=10).offset == 0
        _close(producer)
        assert [(event.value, event.headers) for event in events_of(log, "raw")] == [(b"right", None)]

    def test_none_says_that_a_key_was_deleted(self, log: Log) -> None:
        """In its place in the order; in both kinds of topic."""
        log.create_topic("orders", ORDERS, key="id", time="at", partitions=1)
        log.create_topic("raw", partitions=1)
        with log.producer() as producer:
            producer.send("orders", order(1, key="a"))
            producer.send("orders", None, key="a", headers={"why": b"asked"})
            producer.send("raw", b"v", key=b"a")
            producer.send("raw", None, key=b"a")
        gone = events_of(log, "orders")[1]
        assert (gone.key, gone.value, gone.offset, gone.headers) == ("a", None, 1, {"why": b"asked"})
        assert gone.time == gone.appended
        assert [(event.key, event.value) for event in events_of(log, "raw")] == [(b"a", b"v"), (b"a", None)]
        flags = log.read("orders", columns=["id", "_deleted"]).to_pylist()
        assert flags == [{"id": "a", "_deleted": False}, {"id": "a", "_deleted": True}]

    def test_a_deletion_needs_a_key(self, log: Log) -> None:
        """A topic without a key has nothing to delete."""
        log.create_topic("keyless", "n INT", partitions=1)
        producer = log.producer()
        with pytest.raises(InvalidInput, match="key"):
            producer.send("keyless", None, key="a").result(timeout_s=10)
        _close(producer)
        assert values_of(log, "keyless") == []

    def test_a_bad_event_is_refused_alone(self, log: Log) -> None:
        """Its receipt and the next flush say why; its neighbours are stored and the producer goes on."""
        log.create_topic("orders", ORDERS, key="id", partitions=1)
        producer = log.producer(linger_ms=60_000)
        good = producer.send("orders", order(0))
        bad = producer.send("orders", {"id": "x", "amount": "much"})
        also_good = producer.send("orders", order(1))
        with refused(SchemaMismatch, "amount", "'much'"):
            producer.flush()
        assert good.result().offset == 0
        with refused(SchemaMismatch, "amount"):
            bad.result()
        assert also_good.result().offset == 1
        producer.flush()
        producer.send("orders", order(2))
        producer.close()
        assert [value["amount"] for value in values_of(log, "orders")] == [0.0, 1.0, 2.0]

    @pytest.mark.parametrize("kinds", BAD_AND_GOOD, ids=" ".join)
    def test_a_bad_event_harms_no_neighbour_of_any_kind(self, log: Log, kinds: Sequence[str]) -> None:
        """Whichever comes first of those with headers and those that delete."""
        log.create_topic("orders", ORDERS, key="id", partitions=1)
        good = [kind for kind in kinds if kind != "bad"]
        producer = log.producer(linger_ms=60_000)
        receipts = {}
        for kind in kinds:
            row = {"id": kind, "amount": "much" if kind == "bad" else 1.0}
            headers = {"trace": b"1"} if kind == "headers" else None
            receipts[kind] = producer.send("orders", None if kind == "deleted" else row, key=kind, headers=headers)
        with refused(SchemaMismatch, "amount"):
            producer.close()
        assert [receipts[kind].result().offset for kind in good] == [0, 1, 2]
        stored = log.read("orders", columns=["id", "_headers", "_deleted"]).to_pylist()
        assert [(row["id"], dict(row["_headers"] or []), bool(row["_deleted"])) for row in stored] == [
            (kind, {"trace": b"1"} if kind == "headers" else {}, kind == "deleted") for kind in good
        ]

    @pytest.mark.parametrize("value", [7, 1.5, {"a": 1}, [b"x"], object()], ids=lambda value: type(value).__name__)
    def test_a_topic_of_bytes_takes_nothing_else(self, log: Log, value: Any) -> None:
        """Neither as value nor as key."""
        log.create_topic("raw", partitions=1)
        producer = log.producer()
        with refused(SchemaMismatch, "bytes"):
            producer.send("raw", value).result(timeout_s=10)
        with refused(SchemaMismatch, "bytes"):
            producer.send("raw", b"x", key=value).result(timeout_s=10)
        _close(producer)
        assert values_of(log, "raw") == []

    def test_many_threads_share_a_producer(self, log: Log) -> None:
        """Each event is stored once, and what one thread sent keeps its order."""
        log.create_topic("t", "name STRING, n INT", key="name", partitions=2)
        with log.producer() as producer:

            def send(name: str) -> None:
                for number in range(300):
                    receipt = producer.send("t", {"name": name, "n": number})
                    if number % 50 == 0:
                        receipt.result()

            threads = [threading.Thread(target=send, args=(f"thread {n}",)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for name in {f"thread {n}" for n in range(4)}:
            numbers = [value["n"] for value in values_of(log, "t") if value["name"] == name]
            assert numbers == list(range(300))

    def test_an_event_loop_sends_and_waits(self, log: Log) -> None:
        """Receipts can be awaited, alone or together, and other tasks run meanwhile."""
        log.create_topic("raw", partitions=1)

        async def work() -> list[int]:
            async with log.producer(linger_ms=60_000) as producer:
                receipt = await producer.send_async("raw", b"first")
                first = await receipt
                receipts = [await producer.send_async("raw", b"%d" % number) for number in range(100)]
                places = await asyncio.gather(*receipts)
                await producer.send_async("raw", b"flushed")
                await producer.flush_async()
                assert len(values_of(log, "raw")) == 102
                await producer.send_async("raw", b"closed")
            return [first.offset, *(place.offset for place in places)]

        assert asyncio.run(work()) == list(range(101))
        assert len(values_of(log, "raw")) == 103

    def test_an_awaited_receipt_raises_what_went_wrong(self, log: Log) -> None:
        """As `result` does."""
        log.create_topic("orders", ORDERS)

        async def work() -> None:
            producer = log.producer()
            with refused(SchemaMismatch, "amount"):
                await (await producer.send_async("orders", {"amount": "much"}))
            with pytest.raises(SchemaMismatch):
                await producer.flush_async()
            producer.close()

        asyncio.run(work())

    def test_an_event_loop_is_not_held_up(self, log: Log) -> None:
        """A task that ticks goes on ticking while another sends much and flushes."""
        log.create_topic("raw", partitions=1)

        async def work() -> float:
            longest, last, done = 0.0, time.monotonic(), False

            async def tick() -> None:
                nonlocal longest, last
                while not done:
                    await asyncio.sleep(0.001)
                    longest, last = max(longest, time.monotonic() - last), time.monotonic()

            ticking = asyncio.create_task(tick())
            async with log.producer() as producer:
                for number in range(50):
                    for _ in range(100):
                        await producer.send_async("raw", b"%d" % number)
                    await producer.flush_async()
            done = True
            await ticking
            return longest

        assert asyncio.run(work()) < 1.0


def _close(producer: Any) -> None:
    """A producer that was given something wrong may say so again when it closes."""
    try:
        producer.close()
    except InvalidInput:
        return
