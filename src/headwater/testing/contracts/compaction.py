"""The contract of compaction: the last event of each key stays, with its offset, and nobody who reads can tell but by the gaps."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from headwater.log.log import Log
from headwater.model.errors import InvalidInput
from headwater.testing.contracts.case import NOON, ORDERS, LogCase, events_of, order, refused

KEYS = 7
ROUNDS = 60


class CompactionContract(LogCase):
    """What holds for compacted topics."""

    def test_compaction_needs_a_key(self, log: Log) -> None:
        """Its settings are kept, changed and taken away."""
        with refused(InvalidInput, "key"):
            log.create_topic("orders", ORDERS, compact=True)
        with refused(InvalidInput, "tombstones"):
            log.create_topic("orders", ORDERS, key="id", compact=True, tombstones=timedelta(seconds=-1))
        topic = log.create_topic("orders", ORDERS, key="id", compact=True, tombstones="1 hour")
        assert (topic.compact, topic.tombstones_us) == (True, 3_600_000_000)
        assert not log.alter_topic("orders", compact=False).compact
        assert log.create_topic("raw", compact=True).key == "key"

    @pytest.mark.covers("Kafka", "concept: compacted log as snapshot")
    def test_the_last_event_of_each_key_stays_where_it_was(self, log: Log, other: Log) -> None:
        """What is left is a part of what was, by offset; the table is the same, and so is one built from the first offset."""
        before = self._filled(log)
        table = _sorted(log.table("orders"))
        assert log.tidy("orders") > 0
        after = events_of(other, "orders")
        assert len(after) < len(before)
        assert {event.offset: event for event in before} | {event.offset: event for event in after} == {
            event.offset: event for event in before
        }
        assert {event.key: event for event in after} == {event.key: event for event in before}
        assert _sorted(log.table("orders")) == _sorted(other.table("orders")) == table
        assert log.offsets("orders") == {0: range(len(before))}

    def test_a_reader_goes_on_through_gaps(self, log: Log) -> None:
        """From any offset, in polls of any size, as events or as batches; its place is an offset as ever."""
        self._filled(log)
        log.tidy("orders")
        left = [event.offset for event in events_of(log, "orders")]
        end = log.offsets("orders")[0].stop
        for start in range(0, end, 37):
            assert log.read("orders", start=start, columns=["_offset"])["_offset"].to_pylist() == [
                offset for offset in left if offset >= start
            ]
            assert log.read("orders", end={0: start}, columns=["_offset"])["_offset"].to_pylist() == [
                offset for offset in left if offset < start
            ]
        for events_max in (1, 3, 1000):
            with log.reader("orders") as reader:
                seen: list[int] = []
                while events := reader.poll(events_max=events_max, timeout_s=0):
                    assert len(events) <= events_max
                    seen += [event.offset for event in events]
                    places = reader.positions()
                    reader.seek(places)
                assert seen == left
                assert (reader.lag(), reader.positions()[0].offset) == (0, end)

    def test_searching_by_time_finds_what_is_left(self, log: Log) -> None:
        """The first event that is there and not older, though the one that came first is gone."""
        before = self._filled(log)
        log.tidy("orders")
        left = events_of(log, "orders")
        for number in range(0, len(before) + 5, 29):
            at = NOON + timedelta(seconds=number)
            expected = [event.offset for event in left if event.value["at"] >= at]
            assert log.offsets_at("orders", at) == {0: min(expected, default=len(before))}
        appended = before[len(before) // 2].appended
        expected = [event.offset for event in left if event.appended >= appended]
        assert log.offsets_at("orders", appended, by="appended") == {0: min(expected, default=len(before))}

    def test_a_tombstone_outlives_its_key_for_a_while(self, log: Log) -> None:
        """Once compacted it stays as long as the topic says; then the key leaves nothing behind."""
        log.create_topic("raw", compact=True, partitions=1, segment_bytes=4096, tombstones="0 seconds")
        with log.producer() as producer:
            producer.send("raw", b"kept", key=b"k")
            producer.send("raw", b"old", key=b"gone")
            producer.flush()
            producer.send("raw", None, key=b"gone")
            producer.flush()
            for number in range(40):
                producer.send("raw", b"x" * 400, key=b"%d" % (number % 2))
                producer.flush()
        log.tidy("raw")
        assert [event.value for event in events_of(log, "raw") if event.key == b"gone"] == [None]
        log.tidy("raw")
        assert not [event for event in events_of(log, "raw") if event.key == b"gone"]
        assert [event.value for event in events_of(log, "raw") if event.key == b"k"] == [b"kept"]

    def test_events_without_a_key_stay(self, log: Log) -> None:
        """Nothing replaces them."""
        log.create_topic("orders", ORDERS, key="id", compact=True, partitions=1, segment_bytes=4096)
        for number in range(ROUNDS):
            log.append("orders", [order(number, key="x" * 200), order(number) | {"id": None}])
        log.tidy("orders")
        found = events_of(log, "orders")
        assert [event.value["amount"] for event in found if event.key is None] == [float(n) for n in range(ROUNDS)]
        assert len(found) < 2 * ROUNDS

    def _filled(self, log: Log) -> list[Any]:
        log.create_topic("orders", ORDERS, key="id", time="at", compact=True, partitions=1, segment_bytes=4096)
        for start in range(0, ROUNDS * KEYS, KEYS):
            log.append("orders", [order(start + n, key=f"{n * n % KEYS}" * 60) for n in range(KEYS)])
        return events_of(log, "orders")


def _sorted(table: pa.Table) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=lambda row: row["id"])
