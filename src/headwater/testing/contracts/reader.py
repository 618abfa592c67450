"""The contract of readers: they follow topics from any place, miss nothing, repeat nothing and wake up in time."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from itertools import islice
from typing import Any

import pyarrow as pa
import pytest

from headwater.log.log import Log
from headwater.model.errors import Closed, InvalidInput
from headwater.model.event import Event
from headwater.testing.contracts.case import NOON, ORDERS, LogCase, events_of, order, orders, refused


class ReaderContract(LogCase):
    """What holds for readers."""

    @pytest.mark.parametrize("events_max", [1, 2, 3, 7, 1000])
    def test_polls_of_any_size_give_every_event_once_and_in_order(self, log: Log, events_max: int) -> None:
        """Never more than asked for, and per partition by offset."""
        log.create_topic("orders", ORDERS, key="id", partitions=3)
        for start in range(0, 60, 5):
            log.append("orders", orders(5, start=start))
        seen: list[Event] = []
        with log.reader("orders") as reader:
            while events := reader.poll(events_max=events_max, timeout_s=0):
                assert len(events) <= events_max
                seen += events
            assert reader.lag() == 0
        for partition, span in log.offsets("orders").items():
            assert [event.offset for event in seen if event.partition == partition] == list(span)

    def test_arrow_batches_hold_what_events_hold(self, log: Log) -> None:
        """With the columns that were asked for, each batch of one partition."""
        log.create_topic("orders", ORDERS, key="id", partitions=2)
        log.append("orders", orders(30))
        with log.reader("orders", columns=["id", "_partition", "_offset"]) as reader:
            batches = reader.poll_arrow(events_max=7, timeout_s=0)
            assert sum(batch.num_rows for batch in batches) == 7
            while more := reader.poll_arrow(events_max=7, timeout_s=0):
                batches += more
        assert all(len(set(batch.column("_partition").to_pylist())) == 1 for batch in batches)
        rows = sorted(
            (row["_partition"], row["_offset"], row["id"]) for row in pa.Table.from_batches(batches).to_pylist()
        )
        assert rows == [(event.partition, event.offset, event.key) for event in events_of(log, "orders")]

    def test_latest_gives_only_what_comes(self, log: Log) -> None:
        """From the moment the reader was opened."""
        log.create_topic("orders", ORDERS, key="id", partitions=2)
        log.append("orders", orders(5))
        with log.reader("orders", start="latest") as reader:
            log.append("orders", orders(5, start=5))
            found = reader.poll(timeout_s=0) + reader.poll(timeout_s=0)
        assert sorted(event.value["amount"] for event in found) == [5.0, 6.0, 7.0, 8.0, 9.0]

    def test_a_reader_begins_at_an_offset_or_a_time(self, log: Log) -> None:
        """For all partitions, or for each of its own."""
        log.create_topic("orders", ORDERS, time="at", partitions=1)
        log.append("orders", orders(20))
        for start in (12, {0: 12}, NOON + timedelta(seconds=12), (NOON + timedelta(seconds=12)).isoformat()):
            with log.reader("orders", start=start) as reader:
                assert [event.offset for event in reader.poll()] == list(range(12, 20))

    def test_saved_positions_go_on_exactly_there(self, log: Log, other: Log) -> None:
        """In another reader, of another handle."""
        log.create_topic("orders", ORDERS, key="id", partitions=3)
        log.append("orders", orders(30))
        with log.reader("orders") as reader:
            first = reader.poll(events_max=11)
            places = reader.positions()
        log.append("orders", orders(10, start=30))
        with other.reader("orders", start=places) as reader:
            rest = reader.poll(events_max=1000)
        assert sorted(event.value["amount"] for event in first + rest) == [float(n) for n in range(40)]

    def test_seeking_back_gives_the_same_events_again(self, log: Log) -> None:
        """Reading changes nothing."""
        log.create_topic("orders", ORDERS, key="id", partitions=2)
        log.append("orders", orders(20))
        with log.reader("orders") as reader:
            places = reader.positions()
            once = reader.poll(events_max=7) + reader.poll()
            reader.seek(places)
            assert reader.lag() == 20
            again = reader.poll(events_max=7) + reader.poll()
            reader.seek("latest")
            assert reader.poll(timeout_s=0) == []
        key = [(event.partition, event.offset) for event in once]
        assert sorted(key) == sorted((event.partition, event.offset) for event in again)
        assert sorted(once, key=_place) == sorted(again, key=_place)

    def test_several_topics_are_followed_by_one_reader(self, log: Log) -> None:
        """Each event says which topic it is of."""
        log.create_topic("orders", ORDERS, partitions=2)
        log.create_topic("raw", partitions=1)
        log.append("orders", orders(5))
        log.append("raw", [b"x"] * 3)
        with log.reader(["orders", "raw"]) as reader:
            found = reader.poll()
            assert {(place.topic, place.partition) for place in reader.positions()} == {
                ("orders", 0),
                ("orders", 1),
                ("raw", 0),
            }
        assert sorted(event.topic for event in found) == ["orders"] * 5 + ["raw"] * 3

    def test_no_partition_waits_for_another_to_be_read_out(self, log: Log) -> None:
        """Small polls come round to every partition that has events, while one of them always has more."""
        log.create_topic("t", "k INT", key="k", partitions=4)
        log.append("t", [{"k": k} for k in range(400)])
        with log.reader("t") as reader:
            seen = [event.partition for _ in range(40) for event in reader.poll(events_max=5, timeout_s=0)]
        assert len(seen) == 200
        assert set(seen) == set(range(4))

    def test_a_poll_without_events_ends_in_time(self, log: Log) -> None:
        """Empty, neither at once nor for ever."""
        log.create_topic("raw")
        with log.reader("raw") as reader:
            begun = time.monotonic()
            assert reader.poll(timeout_s=0.15) == []
            assert 0.14 <= time.monotonic() - begun < 2
            assert reader.poll(timeout_s=0) == reader.poll_arrow(timeout_s=0) == []

    @pytest.mark.parametrize("limits", [{"events_max": 0}, {"events_max": "5"}, {"timeout_s": "1"}], ids=repr)
    def test_a_poll_without_sense_is_refused(self, log: Log, limits: dict[str, Any]) -> None:
        """A limit of no events would wait for ever for them."""
        log.create_topic("raw", partitions=1)
        log.append("raw", [b"x"])
        with log.reader("raw") as reader:
            with refused(InvalidInput, next(iter(limits))):
                reader.poll(**limits)
            with refused(InvalidInput, next(iter(limits))):
                reader.poll_arrow(**limits)
            assert len(reader.poll()) == 1

    def test_a_reader_of_nothing_is_refused(self, log: Log) -> None:
        """It would wait for ever."""
        with refused(InvalidInput):
            log.reader([])

    def test_a_waiting_reader_wakes_for_an_event(self, log: Log, other: Log) -> None:
        """Long before its time is over, from any handle."""
        log.create_topic("raw", partitions=2)
        with log.reader("raw") as reader:
            assert reader.poll(timeout_s=0) == []
            for _ in range(3):
                timer = threading.Timer(0.05, other.append, args=("raw", [b"x"]))
                timer.start()
                begun = time.monotonic()
                assert [event.value for event in reader.poll(timeout_s=20)] == [b"x"]
                assert time.monotonic() - begun < 5
                timer.join()

    def test_iteration_goes_on_with_what_comes(self, log: Log) -> None:
        """It ends only when it is left."""
        log.create_topic("raw", partitions=1)
        log.append("raw", [b"0", b"1"])
        timer = threading.Timer(0.05, log.append, args=("raw", [b"2", b"3"]))
        timer.start()
        with log.reader("raw") as reader:
            assert [event.value for event in islice(reader, 4)] == [b"0", b"1", b"2", b"3"]
        timer.join()

    def test_an_event_loop_follows_too(self, log: Log) -> None:
        """Other tasks run while it waits, and one of them may be the writer."""
        log.create_topic("raw", partitions=2)

        async def follow() -> list[bytes]:
            found = []
            with log.reader("raw") as reader:
                async for event in reader:
                    found.append(event.value)
                    if len(found) == 10:
                        break
            return found

        async def work() -> list[bytes]:
            following = asyncio.create_task(follow())
            async with log.producer(linger_ms=1) as producer:
                for number in range(10):
                    await producer.send_async("raw", b"%d" % number)
                    await asyncio.sleep(0.003)
            return await asyncio.wait_for(following, 20)

        assert sorted(asyncio.run(work())) == [b"%d" % number for number in range(10)]

    def test_an_event_loop_polls_with_a_limit_of_time(self, log: Log) -> None:
        """Nothing came: empty, in time."""
        log.create_topic("raw", partitions=1)

        async def work() -> None:
            with log.reader("raw") as reader:
                begun = time.monotonic()
                assert await reader.poll_async(timeout_s=0.1) == []
                assert 0.09 <= time.monotonic() - begun < 2
                log.append("raw", [b"x"])
                [batch] = await reader.poll_arrow_async()
                assert batch.column("value").to_pylist() == [b"x"]

        asyncio.run(work())

    def test_a_closed_reader_is_refused(self, log: Log) -> None:
        """Closing twice is no error."""
        log.create_topic("raw")
        reader = log.reader("raw")
        reader.close()
        reader.close()
        with refused(Closed):
            reader.poll(timeout_s=0)
        with refused(Closed):
            reader.poll_arrow(timeout_s=0)
        with refused(Closed):
            reader.seek("earliest")

    @pytest.mark.covers("Wormhole")
    def test_a_slow_reader_never_delays_a_fast_one(self, log: Log, other: Log) -> None:
        """While one stands at its first event, another has every event as soon as it is appended."""
        log.create_topic("orders", ORDERS, key="id", partitions=2)
        with log.reader("orders") as slow, other.reader("orders") as fast:
            for number in range(200):
                log.append("orders", [order(number)])
                assert [event.value for event in fast.poll(timeout_s=20)] == [order(number)]
                if number == 0:
                    assert len(slow.poll(events_max=1)) == 1
            assert (fast.lag(), slow.lag()) == (0, 199)
            assert len(slow.poll(events_max=1000)) == 199


def _place(event: Event) -> tuple[int, int]:
    return event.partition, event.offset
