"""The contract of tables: the newest row of each key, now or as of an earlier time."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from headwater.log.log import Log
from headwater.model.errors import InvalidInput
from headwater.testing.contracts.case import NOON, ORDERS, LogCase, events_of, order, refused

KEYS: list[tuple[str, list[Any]]] = [
    ("STRING", ["", "a", "b", "grün"]),
    ("BINARY", [b"", b"a", b"\x00\xff"]),
    ("TINYINT", [-1, 0, 1]),
    ("BIGINT", [-(2**63), 0, 2**63 - 1]),
    ("BOOLEAN", [False, True]),
    ("DOUBLE", [0.5, -1.5, 1e300]),
    ("DECIMAL(10, 2)", [Decimal("1.50"), Decimal("-3.00")]),
    ("DATE", [date(2026, 1, 31), date(1969, 1, 1)]),
    ("TIMESTAMP", [datetime(2026, 1, 31, tzinfo=UTC), datetime(1969, 1, 1, tzinfo=UTC)]),
    ("ARRAY<INT>", [[1], [1, 2], []]),
    ("STRUCT<a: INT, b: STRING>", [{"a": 1, "b": "x"}, {"a": 1, "b": None}]),
]


class TableContract(LogCase):
    """What holds for `table`."""

    def test_a_table_has_the_newest_row_of_each_key(self, log: Log) -> None:
        """By the order of the log, with the topic's own columns."""
        log.create_topic("orders", ORDERS, key="id", time="at", partitions=3)
        for number in range(60):
            log.append("orders", [order(number, key=f"k{number % 7}")])
        table = log.table("orders")
        assert table.schema == log.topic("orders").schema
        newest = {row["id"]: row["amount"] for row in table.to_pylist()}
        assert newest == {f"k{number % 7}": float(number) for number in range(53, 60)}

    def test_a_deleted_key_is_gone_until_it_comes_again(self, log: Log) -> None:
        """By `send(None)`, and by a row that says `_deleted`."""
        log.create_topic("orders", ORDERS, key="id", partitions=2)
        log.append("orders", [order(0, key="a"), order(1, key="b"), order(2, key="c")])
        with log.producer() as producer:
            producer.send("orders", None, key="a")
        log.append("orders", [{"id": "b", "_deleted": True}, {"id": "never there", "_deleted": True}])
        assert log.table("orders").column("id").to_pylist() == ["c"]
        log.append("orders", [order(9, key="a")])
        assert sorted(log.table("orders").column("amount").to_pylist()) == [2.0, 9.0]

    def test_a_topic_of_bytes_is_a_table_too(self, log: Log) -> None:
        """A null value deletes; events without a key are no rows."""
        log.create_topic("raw", partitions=2)
        pairs = [(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"b", None), (None, b"4")]
        log.append("raw", [{"key": key, "value": value} for key, value in pairs])
        assert log.table("raw").to_pylist() == [{"key": b"a", "value": b"3"}]

    @pytest.mark.parametrize(("ddl", "keys"), KEYS, ids=lambda value: value if isinstance(value, str) else "")
    def test_any_key_has_its_row(self, log: Log, ddl: str, keys: list[Any]) -> None:
        """Whatever the type of the column that is the key."""
        log.create_topic("t", f"k {ddl}, v INT", key="k", partitions=3)
        for version in range(3):
            log.append("t", [{"k": key, "v": version} for key in keys])
        rows = log.table("t").to_pylist()
        assert len(rows) == len(keys)
        assert all({"k": key, "v": 2} in rows for key in keys)

    def test_a_topic_without_a_key_is_no_table(self, log: Log) -> None:
        """The error says what to do."""
        log.create_topic("keyless", "n INT")
        with refused(InvalidInput, "keyless", "key"):
            log.table("keyless")

    @pytest.mark.parametrize("moment", ["yesterday", 1.5, []], ids=repr)
    def test_a_table_as_of_a_time_nobody_can_read_is_refused(self, log: Log, moment: Any) -> None:
        """The error shows how to write one."""
        log.create_topic("orders", ORDERS, key="id", time="at")
        with refused(InvalidInput):
            log.table("orders", as_of=moment)

    def test_a_deletion_counts_from_its_own_time_on(self, log: Log) -> None:
        """One without an event time happened when it was appended: before that the row is there, after it never again."""
        log.create_topic("orders", ORDERS, key="id", time="at", partitions=1)
        log.append("orders", [order(0, key="a"), order(0, key="b")])
        with log.producer() as producer:
            producer.send("orders", None, key="a")
        log.append("orders", [{"id": "b", "at": NOON + timedelta(hours=1), "_deleted": True}])
        gone = events_of(log, "orders")[2].time
        names = [
            sorted(log.table("orders", as_of=moment).column("id").to_pylist())
            for moment in (
                NOON - timedelta(seconds=1),
                NOON + timedelta(minutes=59),
                NOON + timedelta(minutes=61),
                gone,
                gone + timedelta(days=365),
            )
        ]
        assert names[0] == []
        assert names[1] == ["a", "b"]
        assert names[2] == (["a"] if gone > NOON + timedelta(minutes=61) else [])
        assert names[3] == names[4] == []

    @pytest.mark.covers("concept: state = integral of the stream")
    def test_the_fold_of_events_up_to_any_time_is_the_table_as_of_then(self, log: Log) -> None:
        """A plain loop over the events gives the same rows at every moment, deletions and late events included."""
        log.create_topic("orders", ORDERS, key="id", time="at", partitions=3)
        chance = random.Random(7)
        for _ in range(12):
            rows: list[dict[str, Any]] = []
            for _ in range(chance.randint(1, 15)):
                row: dict[str, Any] = order(chance.randint(0, 300), key=f"k{chance.randint(0, 9)}")
                rows.append({**row, "_deleted": True} if chance.random() < 0.2 else row)
            log.append("orders", rows)
        events = events_of(log, "orders")
        for second in (-1, *range(0, 301, 10), 10_000):
            moment = NOON + timedelta(seconds=second)
            state: dict[str, Any] = {}
            for event in events:
                if event.time <= moment:
                    state[event.key] = event.value
            expected = {key: value for key, value in state.items() if value is not None}
            assert {row["id"]: row for row in log.table("orders", as_of=moment).to_pylist()} == expected
        assert log.table("orders", as_of=NOON + timedelta(days=1)) == log.table("orders")
