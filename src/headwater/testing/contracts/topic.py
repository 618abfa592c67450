"""The contract of topics: making, describing, listing, deleting them, and what cannot be one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from headwater.log.log import Log
from headwater.model.errors import InvalidInput, InvalidName, InvalidSchema, TopicExists, TopicNotFound
from headwater.testing.contracts.case import ORDERS, LogCase, events_of, orders, refused, values_of

HOSTILE_NAMES = [
    "",
    ".",
    "..",
    "../escape",
    "a/b",
    "/etc/passwd",
    "a\\b",
    "a\0b",
    ".hidden",
    "-rf",
    "with space",
    "new\nline",
    "grün",
    "Ａ",
    "🔥",
    "a" * 201,
    "a" * 100_000,
    "%2e%2e",
    "topic;drop",
    None,
    7,
    b"bytes",
]

UNWORKABLE: list[tuple[dict[str, Any], type[InvalidInput]]] = [
    ({"partitions": 0}, InvalidInput),
    ({"partitions": -1}, InvalidInput),
    ({"partitions": 1_000_000}, InvalidInput),
    ({"partitions": "4"}, InvalidInput),
    ({"partitions": 2.5}, InvalidInput),
    ({"partitions": True}, InvalidInput),
    ({"schema": ORDERS, "key": "missing"}, InvalidInput),
    ({"schema": ORDERS, "key": 7}, InvalidInput),
    ({"schema": ORDERS, "time": "missing"}, InvalidInput),
    ({"schema": ORDERS, "time": "amount"}, InvalidInput),
    ({"schema": ORDERS, "lateness": "soon"}, InvalidInput),
    ({"schema": ORDERS, "lateness": 5}, InvalidInput),
    ({"schema": ORDERS, "lateness": timedelta(seconds=-1)}, InvalidInput),
    ({"schema": ORDERS, "future_max": timedelta(seconds=-1)}, InvalidInput),
    ({"schema": ORDERS, "future_max": ""}, InvalidInput),
    ({"durability": "perhaps"}, InvalidInput),
    ({"segment_bytes": 1}, InvalidInput),
    ({"segment_bytes": "64 MB"}, InvalidInput),
    ({"event_bytes_max": "8 MB"}, InvalidInput),
    ({"schema": ""}, InvalidSchema),
    ({"schema": "id"}, InvalidSchema),
    ({"schema": "id STRING, id INT"}, InvalidSchema),
    ({"schema": "id STRING, ID INT"}, InvalidSchema),
    ({"schema": "_offset BIGINT"}, InvalidSchema),
    ({"schema": "id NOTATYPE"}, InvalidSchema),
    ({"schema": "id STRING); DROP TABLE t; --"}, InvalidSchema),
    ({"schema": 7}, InvalidSchema),
    ({"schema": "tags MAP<STRING, INT>", "key": "tags"}, InvalidSchema),
]


@dataclass
class ShopOrder:
    """An order as a dataclass; what may be None is nullable."""

    id: str | None
    amount: float | None
    at: datetime | None


class TopicContract(LogCase):
    """What holds for topics."""

    def test_a_topic_is_described_as_it_was_created(self, log: Log) -> None:
        """Schema, key, event time, lateness and partitions come back from the log itself."""
        log.create_topic("orders", ORDERS, key="id", time="at", lateness="1 minute", partitions=3)
        topic = log.topic("orders")
        assert (topic.name, topic.key, topic.time, topic.partitions) == ("orders", "id", "at", 3)
        assert topic.lateness_us == timedelta(minutes=1) // timedelta(microseconds=1)
        assert topic.schema.field("at").type == pa.timestamp("us", tz="UTC")
        assert topic.has_schema

    def test_a_topic_without_a_schema_carries_bytes(self, log: Log) -> None:
        """Key and value are bytes, and nothing else is asked."""
        topic = log.create_topic("raw")
        assert not topic.has_schema
        assert topic.schema == pa.schema([("key", pa.binary()), ("value", pa.binary())])

    @pytest.mark.parametrize(
        "schema",
        [
            ORDERS,
            pa.schema([("id", pa.string()), ("amount", pa.float64()), ("at", pa.timestamp("us", tz="UTC"))]),
            pa.schema([("id", pa.large_string()), ("amount", pa.float64()), ("at", pa.timestamp("ms", tz="CET"))]),
            ShopOrder,
        ],
        ids=["ddl", "arrow", "arrow of other types", "dataclass"],
    )
    def test_a_schema_can_be_written_in_three_ways(self, log: Log, schema: Any) -> None:
        """DDL, Arrow and a dataclass give the same topic, in the types that Spark reads."""
        log.create_topic("same", ORDERS)
        assert log.create_topic("orders", schema).schema == log.topic("same").schema

    def test_a_topic_is_described_as_it_is_now(self, log: Log, other: Log) -> None:
        """Also to a handle that knew it before it was changed."""
        log.create_topic("t", "n INT")
        assert other.topic("t") == log.topic("t")
        changed = log.alter_topic("t", schema="n BIGINT, note STRING", lateness="1 minute")
        assert other.topic("t") == log.topic("t") == changed

    def test_topics_are_listed_by_name(self, log: Log) -> None:
        """All of them, sorted."""
        for name in ("b", "a.1", "a_2", "A-3", "0", "x" * 200):
            log.create_topic(name, partitions=1)
        assert log.topics() == sorted(["b", "a.1", "a_2", "A-3", "0", "x" * 200])

    def test_a_topic_that_exists_is_not_made_again(self, log: Log) -> None:
        """Neither is it changed; `exist_ok` gives it as it is."""
        made = log.create_topic("orders", ORDERS, partitions=2)
        log.append("orders", orders(3))
        with refused(TopicExists, "orders"):
            log.create_topic("orders", "other INT")
        assert log.create_topic("orders", "other INT", partitions=9, exist_ok=True) == made
        assert len(values_of(log, "orders")) == 3

    def test_a_deleted_topic_is_gone_with_its_events(self, log: Log) -> None:
        """Its name is free, and a new topic of that name begins at offset 0."""
        log.create_topic("orders", ORDERS, partitions=1)
        log.create_topic("kept", partitions=1)
        log.append("orders", orders(3))
        log.append("kept", [b"here"])
        log.delete_topic("orders")
        assert log.topics() == ["kept"]
        with refused(TopicNotFound, "orders"):
            log.read("orders")
        log.create_topic("orders", "other INT", partitions=2)
        assert log.offsets("orders") == {0: range(0), 1: range(0)}
        assert sum(map(len, log.append("orders", [{"other": 1}]).values())) == 1
        assert values_of(log, "kept") == [b"here"]

    def test_a_topic_deleted_elsewhere_is_not_found(self, log: Log, other: Log) -> None:
        """A handle that knew it learns so at its next use, whatever it does."""
        log.create_topic("orders", ORDERS, partitions=1)
        other.append("orders", orders(3))
        reader = other.reader("orders")
        assert len(reader.poll()) == 3
        log.delete_topic("orders")
        with refused(TopicNotFound, "orders"):
            reader.poll(timeout_s=0)
        reader.close()
        with refused(TopicNotFound, "orders"):
            other.read("orders")
        with refused(TopicNotFound, "orders"):
            other.append("orders", orders(1))

    def test_a_topic_made_anew_elsewhere_is_used_as_it_is_now(self, log: Log, other: Log) -> None:
        """A handle that knew the old topic writes and reads the new one by the new one's schema."""
        log.create_topic("orders", ORDERS, partitions=1)
        other.append("orders", orders(3))
        log.delete_topic("orders")
        log.create_topic("orders", "n BIGINT", partitions=1)
        assert other.append("orders", [{"n": 1}]) == {0: range(1)}
        assert other.read("orders").to_pylist() == log.read("orders").to_pylist() == [{"n": 1}]

    def test_a_reader_of_a_topic_made_anew_does_not_go_on_in_the_new_one(self, log: Log, other: Log) -> None:
        """Its offsets mean other events there; it is told so instead of skipping some."""
        for partitions in (3, 1):
            log.create_topic("t", partitions=3)
            log.append("t", [b"old"] * 3)
            with log.reader("t") as reader, other.reader("t") as elsewhere:
                assert len(reader.poll()) == len(elsewhere.poll()) == 3
                log.delete_topic("t")
                log.create_topic("t", partitions=partitions)
                for _ in range(3):
                    log.append("t", [b"new"] * 9)
                for each in (reader, elsewhere):
                    with refused(TopicNotFound, "'t'"):
                        each.poll(timeout_s=0)
            log.delete_topic("t")

    def test_what_was_on_its_way_to_a_topic_made_anew_is_refused(self, log: Log) -> None:
        """It was made for the old one, by the old one's schema."""
        log.create_topic("t", "a INT", partitions=1)
        transaction, producer = log.transaction(), log.producer(linger_ms=60_000)
        transaction.append("t", [{"a": 1}])
        receipt = producer.send("t", {"a": 1})
        log.delete_topic("t")
        log.create_topic("t", "a STRING", partitions=1)
        with refused(TopicNotFound, "'t'"):
            transaction.commit()
        with refused(TopicNotFound, "'t'"):
            receipt.result()
        assert values_of(log, "t") == []
        producer.send("t", {"a": "one"}).result()
        with pytest.raises(TopicNotFound):
            producer.close()
        assert values_of(log, "t") == [{"a": "one"}]

    def test_a_topic_only_described_is_not_written_with_its_old_schema(self, log: Log, other: Log) -> None:
        """What a handle remembers of a topic is never used for another topic of that name."""
        log.create_topic("t", "a INT", partitions=1)
        assert other.topic("t").schema.names == ["a"]
        log.delete_topic("t")
        log.create_topic("t", "a STRING", partitions=1)
        with pytest.raises(InvalidInput):
            other.append("t", [{"a": 1}])
        other.append("t", [{"a": "one"}])
        assert values_of(log, "t") == [{"a": "one"}]

    @pytest.mark.parametrize(
        "use",
        [
            lambda log: log.topic("nowhere"),
            lambda log: log.offsets("nowhere"),
            lambda log: log.offsets_at("nowhere", 0),
            lambda log: log.append("nowhere", [b"x"]),
            lambda log: log.append("nowhere", [b"x"], atomic=True),
            lambda log: log.transaction().append("nowhere", [b"x"]),
            lambda log: log.producer().send("nowhere", b"x"),
            lambda log: log.reader("nowhere"),
            lambda log: log.reader(["orders", "nowhere"]),
            lambda log: log.read("nowhere"),
            lambda log: log.scan("nowhere"),
            lambda log: log.table("nowhere"),
            lambda log: log.snapshot("nowhere"),
            lambda log: log.snapshot("orders", follow="nowhere"),
            lambda log: log.consumer("nowhere", group="g"),
            lambda log: log.queue("nowhere"),
            lambda log: log.request("nowhere", b"x", timeout_s=0.1),
            lambda log: log.seal("nowhere"),
            lambda log: log.tidy("nowhere"),
            lambda log: log.alter_topic("nowhere", lateness="1 second"),
            lambda log: log.delete_topic("nowhere"),
        ],
        ids=[
            "topic", "offsets", "offsets_at", "append", "atomic append", "transaction", "producer", "reader",
            "reader of two", "read", "scan", "table", "snapshot", "snapshot of two", "consumer", "queue", "request", "seal",
            "tidy", "alter", "delete",
        ],
    )  # fmt: skip
    def test_an_unknown_topic_is_refused_and_the_known_ones_are_named(
        self, log: Log, use: Callable[[Log], object]
    ) -> None:
        """Nothing makes a topic by accident."""
        log.create_topic("orders", ORDERS, key="id")
        with refused(TopicNotFound, "'nowhere'", "orders"):
            use(log)
        assert log.topics() == ["orders"]

    @pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: f"{name!r:.20}")
    def test_a_hostile_name_is_refused_wherever_it_is_given(self, log: Log, name: Any) -> None:
        """No name leaves the log's folder, and no name is tried before it is checked."""
        uses: list[Callable[[], object]] = [
            lambda: log.create_topic(name),
            lambda: log.topic(name),
            lambda: log.append(name, [b"x"]),
            lambda: log.transaction().append(name, [b"x"]),
            lambda: log.producer().send(name, b"x"),
            lambda: log.reader([name]),
            lambda: log.read(name),
            lambda: log.table(name),
            lambda: log.offsets(name),
            lambda: log.offsets_at(name, 0),
            lambda: log.snapshot(name),
            lambda: log.consumer([name], group="g"),
            lambda: log.consumer("t", group=name),
            lambda: log.group(name),
            lambda: log.reset_group(name, to="earliest"),
            lambda: log.delete_group(name),
            lambda: log.queue(name),
            lambda: log.queue("t", group=name),
            lambda: log.delete_queue(name),
            lambda: log.delete_queue("t", group=name),
            lambda: log.request(name, b"x", timeout_s=0.1),
            lambda: log.stage(name),
            lambda: log.seal(name),
            lambda: log.tidy(name),
            lambda: log.alter_topic(name, lateness="1 second"),
            lambda: log.delete_topic(name),
        ]
        log.create_topic("t", partitions=1)
        for use in uses:
            with refused(InvalidName):
                use()
        assert (log.topics(), log.groups()) == (["t"], [])

    @pytest.mark.parametrize(("settings", "error"), UNWORKABLE, ids=lambda value: f"{value!r:.60}")
    def test_settings_that_cannot_work_are_refused(
        self, log: Log, settings: dict[str, Any], error: type[InvalidInput]
    ) -> None:
        """Before anything is made, in our words."""
        with refused(error):
            log.create_topic("orders", **settings)
        assert log.topics() == []

    def test_an_empty_topic_reads_as_nothing(self, log: Log) -> None:
        """With its columns."""
        log.create_topic("orders", ORDERS, key="id")
        assert log.read("orders").schema == log.topic("orders").schema
        assert log.read("orders").num_rows == log.table("orders").num_rows == 0
        assert events_of(log, "orders") == []
