"""The contract of appending: dense offsets, order, placement, and rows that come back as they were given."""

from __future__ import annotations

import threading
from collections import defaultdict
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from headwater.log.log import Log
from headwater.model.errors import EventTooLarge, SchemaMismatch
from headwater.testing.contracts.case import (
    ORDERS,
    LogCase,
    events_of,
    order,
    orders,
    refused,
    values_by_partition,
    values_of,
)

KAFKAS_PARTITIONS_OF_16 = {b"21": 12, b"foobar": 14, b"a-little-bit-long-string": 0, b"abc": 11}
"""Where Kafka's default partitioner puts these keys, from the hashes in its own tests."""

EVERY_TYPE = (
    "s STRING, b BINARY, t BOOLEAN, i8 TINYINT, i16 SMALLINT, i32 INT, i64 BIGINT, f FLOAT, d DOUBLE, "
    "c DECIMAL(20, 4), day DATE, at TIMESTAMP, wall TIMESTAMP_NTZ, tags ARRAY<STRING>, counts MAP<STRING, INT>, "
    "place STRUCT<lat: DOUBLE, names: ARRAY<STRING>>"
)
FULL_ROW: dict[str, Any] = {
    "s": "grün 🔥",
    "b": b"\x00\xff",
    "t": True,
    "i8": -128,
    "i16": 32_767,
    "i32": -(2**31),
    "i64": 2**63 - 1,
    "f": 0.5,
    "d": 1e300,
    "c": Decimal("1234567890123456.7890"),
    "day": date(1969, 12, 31),
    "at": datetime(2026, 1, 31, 12, 0, 0, 123_456, tzinfo=UTC),
    "wall": datetime(1, 1, 1),  # noqa: DTZ001
    "tags": ["a", None, ""],
    "counts": {"a": 1, "b": None},
    "place": {"lat": 1.5, "names": []},
}

MISFITS: list[tuple[Any, list[str]]] = [
    ({"id": 7}, ["id", "STRING"]),
    ({"amount": "9.5"}, ["amount", "DOUBLE"]),
    ({"at": "yesterday"}, ["at", "TIMESTAMP"]),
    ({"at": 7}, ["at", "TIMESTAMP"]),
    ({"amuont": 9.5}, ["amuont", "amount"]),
    ({"_offset": 3}, ["_offset"]),
    ("a string", ["a string"]),
    (7, ["7"]),
    (None, ["None"]),
    ([1, 2], ["1"]),
]


class AppendContract(LogCase):
    """What holds for appends."""

    def test_offsets_are_dense_and_given_back(self, log: Log) -> None:
        """Each append continues where the last one ended, in every partition, from 0."""
        log.create_topic("orders", ORDERS, key="id", partitions=3)
        ends: dict[int, int] = defaultdict(int)
        for start in range(0, 100, 10):
            for partition, span in log.append("orders", orders(10, start=start)).items():
                assert span.start == ends[partition] and span.step == 1
                ends[partition] = span.stop
        assert sum(ends.values()) == 100
        assert log.offsets("orders") == {partition: range(ends[partition]) for partition in range(3)}
        seen = log.read("orders", columns=["_partition", "_offset"]).to_pylist()
        assert [(row["_partition"], row["_offset"]) for row in seen] == [
            (partition, offset) for partition in range(3) for offset in range(ends[partition])
        ]

    def test_the_order_of_a_partition_is_the_order_of_appends(self, log: Log) -> None:
        """Within a batch and from batch to batch."""
        log.create_topic("orders", ORDERS, key="id", partitions=4)
        rows = [order(number, key=f"k{number % 7}") for number in range(200)]
        for start in range(0, 200, 33):
            log.append("orders", rows[start : start + 33])
        for values in values_by_partition(log, "orders").values():
            amounts = [value["amount"] for value in values]
            assert amounts == sorted(amounts)

    def test_keys_go_where_kafka_would_put_them(self, log: Log) -> None:
        """murmur2 over the key's bytes: STRING as UTF-8, BINARY as it is, in every way of writing."""
        log.create_topic("text", "id STRING", key="id", partitions=16)
        log.create_topic("raw", partitions=16)
        log.append("text", [{"id": key.decode()} for key in KAFKAS_PARTITIONS_OF_16])
        log.append("raw", [{"key": key, "value": b""} for key in KAFKAS_PARTITIONS_OF_16])
        with log.producer() as producer:
            for key in KAFKAS_PARTITIONS_OF_16:
                producer.send("text", {"id": key.decode()})
                producer.send("raw", b"", key=key)
        with log.transaction() as transaction:
            transaction.append("text", [{"id": key.decode()} for key in KAFKAS_PARTITIONS_OF_16])
        events = events_of(log, ["raw", "text"])
        assert len(events) == 5 * len(KAFKAS_PARTITIONS_OF_16)
        for event in events:
            key = event.key.encode() if isinstance(event.key, str) else event.key
            assert event.partition == KAFKAS_PARTITIONS_OF_16[key]

    def test_events_without_a_key_take_turns_by_batch(self, log: Log) -> None:
        """A batch stays together, and every partition gets its share of batches."""
        log.create_topic("raw", partitions=3)
        spans = [log.append("raw", [b"x"] * 5) for _ in range(6)]
        assert all(len(span) == 1 for span in spans)
        assert log.offsets("raw") == {number: range(10) for number in range(3)}

    def test_an_event_says_when_and_where_it_was_appended(self, log: Log) -> None:
        """Event time is the time column; the log's time is never older in a later event of the partition."""
        log.create_topic("orders", ORDERS, key="id", time="at", partitions=1)
        log.create_topic("raw", partitions=1)
        log.append("orders", orders(2))
        log.append("orders", [{"id": "timeless"}])
        log.append("raw", [b"x"])
        first, second, timeless = events_of(log, "orders")
        assert (first.topic, first.partition, first.offset, first.key) == ("orders", 0, 0, "o0")
        assert (first.time, first.value["at"]) == (order(0)["at"], order(0)["at"])
        assert first.appended <= second.appended <= timeless.appended
        assert timeless.time == timeless.appended
        [raw] = events_of(log, "raw")
        assert raw.time == raw.appended
        assert (raw.key, raw.value, raw.headers) == (None, b"x", None)

    def test_rows_of_every_kind_give_the_same_events(self, log: Log) -> None:
        """Dicts, one dict, an iterator, an Arrow table, batch and reader."""
        log.create_topic("orders", ORDERS, partitions=1)
        rows = orders(3)
        table = pa.Table.from_pylist(rows, schema=log.topic("orders").schema)
        kinds = [rows, tuple(rows), iter(rows), table, table.to_batches()[0], table.to_reader(), table.slice(0, 3)]
        for kind in kinds:
            log.append("orders", kind)
        for row in rows:
            log.append("orders", row)
        assert values_of(log, "orders") == rows * (len(kinds) + 1)

    def test_every_type_comes_back_as_it_was(self, log: Log) -> None:
        """Full, empty and extreme values, as events and as Arrow."""
        log.create_topic("t", EVERY_TYPE, partitions=1)
        empty = dict.fromkeys(FULL_ROW)
        log.append("t", [FULL_ROW, empty, {}])
        assert values_of(log, "t") == [FULL_ROW, empty, empty]
        again = log.read("t")
        log.append("t", again)
        assert values_of(log, "t") == [FULL_ROW, empty, empty] * 2

    def test_bytes_come_back_as_they_were(self, log: Log) -> None:
        """Bare values, keys with values, empty ones and none."""
        log.create_topic("raw", partitions=1)
        log.append("raw", [b"bare", b"", None])
        log.append("raw", [{"key": b"k", "value": b"v"}, {"key": b"", "value": b""}, {"value": b"v"}])
        pairs = [(event.key, event.value) for event in events_of(log, "raw")]
        assert pairs == [(None, b"bare"), (None, b""), (None, None), (b"k", b"v"), (b"", b""), (None, b"v")]

    def test_headers_travel_with_their_event(self, log: Log) -> None:
        """Some events of a batch may have them, and others none."""
        log.create_topic("orders", ORDERS, partitions=1)
        log.append("orders", [{**order(0), "_headers": {"trace": b"\x01", "empty": b""}}, order(1)])
        log.append("orders", [order(2)])
        assert [event.headers for event in events_of(log, "orders")] == [{"trace": b"\x01", "empty": b""}, None, None]
        column = log.read("orders", columns=["_headers"]).column("_headers").to_pylist()
        assert column == [[("trace", b"\x01"), ("empty", b"")], None, None]

    def test_an_empty_append_stores_nothing(self, log: Log) -> None:
        """It is no error: a source may have had nothing."""
        log.create_topic("orders", ORDERS)
        empty: list[Any] = [[], iter([]), log.topic("orders").schema.empty_table()]
        for nothing in empty:
            assert log.append("orders", nothing) == {}
            assert log.append("orders", nothing, atomic=True) == {}
        assert values_of(log, "orders") == []

    @pytest.mark.parametrize(("row", "words"), MISFITS, ids=lambda value: f"{value!r:.40}")
    def test_a_row_that_does_not_fit_is_refused_with_all_its_batch(self, log: Log, row: Any, words: list[str]) -> None:
        """The error names what and where; not one event of the batch is stored."""
        log.create_topic("orders", ORDERS, key="id")
        for atomic in (False, True):
            with refused(SchemaMismatch, *words):
                log.append("orders", [order(0), order(1), row], atomic=atomic)
        assert values_of(log, "orders") == []

    def test_an_event_above_the_limit_is_refused_in_every_way_of_writing(self, log: Log) -> None:
        """Its neighbours in the batch say which one it is; events below the limit are not concerned."""
        log.create_topic("raw", partitions=1, event_bytes_max=10_000)
        large = [b"small", b"x" * 100_000, b"small"]
        for atomic in (False, True):
            with refused(EventTooLarge, "raw", "10,000"):
                log.append("raw", large, atomic=atomic)
        with refused(EventTooLarge, "raw"), log.transaction() as transaction:
            transaction.append("raw", large)
        producer = log.producer()
        receipts = [producer.send("raw", value) for value in large]
        with refused(EventTooLarge, "raw"):
            receipts[1].result()
        with pytest.raises(EventTooLarge):
            producer.close()
        log.append("raw", [b"x" * 9_000] * 100)
        assert {len(value) for value in values_of(log, "raw")} <= {5, 9_000}

    def test_a_large_batch_becomes_visible_whole(self, log: Log) -> None:
        """Whoever looks while it is written sees none of a partition's share of it, or all."""
        log.create_topic("numbers", "n BIGINT", partitions=1)
        batch = pa.record_batch({"n": pa.array(range(100_000))})
        ends: set[int] = set()
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                ends.add(log.offsets("numbers")[0].stop)

        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(5):
            log.append("numbers", batch)
        done.set()
        watcher.join()
        if self.dense_offsets:
            assert {end % 100_000 for end in ends} <= {0}
        assert len(ends) <= 6
        assert log.read("numbers").column("n").to_pylist() == list(range(100_000)) * 5

    def test_an_append_is_seen_by_every_handle_when_it_returns(self, log: Log, other: Log) -> None:
        """Acknowledged means there, for everybody."""
        log.create_topic("orders", ORDERS, key="id")
        for number in range(20):
            log.append("orders", [order(number)])
            assert len(values_of(other, "orders")) == number + 1

    def test_many_threads_append_without_loss(self, log: Log, other: Log) -> None:
        """Every batch is stored once, whole and in one piece."""
        log.create_topic("raw", partitions=2)
        spans: list[tuple[int, range, bytes]] = []

        def write(handle: Log, name: bytes) -> None:
            for number in range(20):
                value = b"%s-%d" % (name, number)
                spans.extend((partition, span, value) for partition, span in handle.append("raw", [value] * 7).items())

        threads = [
            threading.Thread(target=write, args=(handle, b"%d" % n)) for n, handle in enumerate([log, other] * 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = values_by_partition(log, "raw")
        assert sum(map(len, found.values())) == 4 * 20 * 7
        for partition, span, value in spans:
            assert found[partition][span.start : span.stop] == [value] * 7
