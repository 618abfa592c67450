"""The log on a real Kafka: the contract, and what only Kafka has: other programs, gaps, refusals, brokers that die."""

from __future__ import annotations

import gc
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

import headwater
from headwater.log.kafka import reader as kafka_reader
from headwater.log.log import Log
from headwater.model.errors import (
    Closed,
    InvalidInput,
    InvalidName,
    NoAccess,
    SchemaMismatch,
    TopicExists,
    TopicNotFound,
    Unreachable,
    Unsupported,
)
from headwater.testing.contracts.case import ORDERS, OpenLog, events_of, order, orders, refused, values_of
from headwater.testing.contracts.log import LogContract
from headwater.testing.servers.kafka import KafkaServer
from tests.rigs.children import Child
from tests.rigs.marks import CHECKOUT
from tests.rigs.services import fresh_logs

pytestmark = pytest.mark.service("kafka")


@pytest.fixture(scope="module")
def fresh_urls(kafka: KafkaServer) -> Iterator[Iterator[str]]:
    """Addresses of empty logs; a group's members hear of each other sooner."""
    yield from fresh_logs(kafka, "heartbeat.interval.ms=50")


@pytest.fixture
def url(fresh_urls: Iterator[str]) -> str:
    """The address of an empty log."""
    return next(fresh_urls)


@pytest.fixture
def log(url: str) -> Iterator[Log]:
    """An empty log."""
    with headwater.open_log(url) as log:
        yield log


class TestKafkaLog(LogContract):
    """Acknowledged means with every replica in sync."""

    backend = "kafka"
    dense_offsets = False
    transactions_in_one_moment = False
    silence_s = 1.0

    @pytest.fixture
    def open_log(self, url: str) -> OpenLog:
        return lambda: headwater.open_log(url)


# What other programs see


@pytest.mark.covers("Kafka")
def test_other_programs_read_json_by_the_written_map(log: Log, kafka: KafkaServer) -> None:
    """Keys as bytes, values as one object, times in ISO 8601, decimals as strings, bytes in base64."""
    schema = "id BIGINT, s STRING, b BINARY, d DECIMAL(10, 2), day DATE, at TIMESTAMP, x DOUBLE, tags ARRAY<INT>"
    log.create_topic("t", schema, key="id", time="at", partitions=1)
    row = {
        "id": 7, "s": 'a"\n', "b": b"\x00\xff", "d": Decimal("1.50"), "day": date(2026, 1, 31),
        "at": datetime(2026, 1, 31, 12, tzinfo=UTC), "x": float("inf"), "tags": [1, None],
    }  # fmt: skip
    log.append("t", [{**row, "_headers": {"trace": b"\x01"}}, {"id": 8, "_deleted": True}])
    first, second = _records(kafka, f"{_prefix(log)}t")
    assert first.key() == (7).to_bytes(8, "big")
    assert json.loads(first.value()) == {
        "id": 7, "s": 'a"\n', "b": "AP8=", "d": "1.50", "day": "2026-01-31", "at": "2026-01-31T12:00:00.000000Z",
        "x": "Infinity", "tags": [1, None],
    }  # fmt: skip
    assert first.headers() == [("trace", b"\x01")]
    assert (second.key(), second.value()) == ((8).to_bytes(8, "big"), None)
    assert values_of(log, "t") == [row, None]


def test_a_topic_of_others_is_read_and_written_as_bytes(log: Log, kafka: KafkaServer) -> None:
    """It has no schema here; its keys, values and headers are what they are."""
    _foreign(kafka, f"{_prefix(log)}foreign", [(b"k", b"v", [("h", b"1")]), (None, b"not json", []), (b"k", None, [])])
    assert log.topics() == ["foreign"]
    assert not log.topic("foreign").has_schema
    found = [(event.key, event.value, event.headers) for event in events_of(log, "foreign")]
    assert found == [(b"k", b"v", {"h": b"1"}), (None, b"not json", None), (b"k", None, None)]
    log.append("foreign", [{"key": b"k", "value": b"ours"}])
    assert log.table("foreign").to_pylist() == [{"key": b"k", "value": b"ours"}]
    with refused(Unsupported, "foreign"):
        log.alter_topic("foreign", lateness="1 second")
    with refused(TopicExists, "foreign"):
        log.create_topic("foreign", ORDERS)


def test_a_topic_of_others_can_be_adopted_with_a_schema(log: Log, url: str, kafka: KafkaServer) -> None:
    """Missing columns are null, unknown ones are ignored, times may have any zone; every handle knows it from then on."""
    values = [
        b'{"id": "a", "amount": 1, "at": "2026-01-31T13:00:00+01:00", "more": {"x": [1]}}',
        b'{\n "amount": 2.5,\n "id": "b"\n}',
    ]
    _foreign(kafka, f"{_prefix(log)}orders", [(b"a", value, []) for value in values])
    log.adopt_topic("orders", ORDERS, key="id", time="at")
    with headwater.open_log(url) as other:
        assert values_of(other, "orders") == [
            {"id": "a", "amount": 1.0, "at": datetime(2026, 1, 31, 12, tzinfo=UTC)},
            {"id": "b", "amount": 2.5, "at": None},
        ]
        other.append("orders", [order(3)])
    assert log.read("orders").num_rows == 3
    with refused(TopicExists, "orders"):
        log.adopt_topic("orders", ORDERS)
    with refused(TopicNotFound, "nowhere"):
        log.adopt_topic("nowhere", ORDERS)
    with refused(Unsupported), headwater.open_log("memory://") as memory:
        memory.adopt_topic("orders", ORDERS)


@pytest.mark.parametrize("value", [b"no json", b"[1]", b'{"amount": "much"}', b'{"at": "yesterday"}', b""], ids=repr)
def test_an_event_of_another_schema_is_named(log: Log, kafka: KafkaServer, value: bytes) -> None:
    """By topic, partition and offset; what stands before and behind it can be read."""
    good = b'{"amount": 1.5}'
    _foreign(kafka, f"{_prefix(log)}orders", [(None, good, []), (None, value, []), (None, good, [])])
    log.adopt_topic("orders", ORDERS)
    with refused(SchemaMismatch, "'orders'", "partition 0", "offset 1"):
        log.read("orders")
    assert log.read("orders", end=1).num_rows == log.read("orders", start=2).num_rows == 1


def test_many_events_are_read_in_pieces_up_to_one_that_cannot_be_read(
    log: Log, kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded while the next are fetched, in order, whole; what comes before a bad event is given before it is told."""
    monkeypatch.setattr(kafka_reader, "CHUNK_EVENTS_MAX", 10)
    monkeypatch.setattr(kafka_reader, "READ_EVENTS_MAX", 40)
    log.create_topic("orders", ORDERS, key="id", partitions=1)
    for start, end in ((0, 13), (13, 60), (60, 95)):
        with log.transaction() as transaction:  # each leaves a gap
            transaction.append("orders", orders(end - start, start=start))
        time.sleep(0.005)
    whole = log.read("orders", columns=["amount", "_offset", "_appended"]).to_pylist()
    assert [row["amount"] for row in whole] == [float(n) for n in range(95)]
    raw = [(event.offset(), event.timestamp()[1]) for event in _records(kafka, f"{_prefix(log)}orders")]
    assert [(row["_offset"], round(row["_appended"].timestamp() * 1000)) for row in whole] == raw
    assert len({time_ms for _, time_ms in raw}) == 3
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    producer.produce(f"{_prefix(log)}orders", b"no JSON", b"o", 0)
    assert producer.flush(10) == 0
    found: list[float] = []
    with log.reader("orders") as reader, refused(SchemaMismatch, "offset 98", "not a JSON"):
        for _ in range(10):
            found += [amount for batch in reader.poll_arrow() for amount in batch.column("amount").to_pylist()]
    assert found == [float(n) for n in range(len(found))] and 80 < len(found) <= 95


def test_what_was_rolled_back_is_never_read(log: Log, kafka: KafkaServer) -> None:
    """It leaves a gap in the offsets; readers go over it and find themselves at the end."""
    log.create_topic("raw", partitions=1)
    log.append("raw", [b"before"])
    other = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": "rolled back"})
    other.init_transactions(20)
    other.begin_transaction()
    other.produce(f"{_prefix(log)}raw", b"rolled back", partition=0)
    other.flush(20)
    assert values_of(log, "raw") == [b"before"]
    other.abort_transaction(20)
    log.append("raw", [b"after"])
    with log.reader("raw") as reader:
        seen = [(event.offset, event.value) for _ in range(3) for event in reader.poll(timeout_s=0.5)]
        assert seen == [(0, b"before"), (3, b"after")]
        assert reader.lag() == 0
    assert log.read("raw", columns=["_offset", "value"]).column("_offset").to_pylist() == [0, 3]
    assert log.read("raw", start=1, end=3).num_rows == 0


def test_the_blocks_of_the_page_run(kafka: KafkaServer) -> None:
    """On this broker instead of the one a newcomer has."""
    page = (CHECKOUT / "docs" / "kafka.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    exec("\n".join(blocks).replace("127.0.0.1:9092", kafka.bootstrap), names)
    names.clear()  # the page's own clients end here, before the broker does


def test_a_batch_of_thousands_is_one_record_batch(log: Log) -> None:
    """It is seen whole without the cost and the gap of a transaction, also while other threads write."""
    log.create_topic("t", "n BIGINT", partitions=1)
    rows = [{"n": number} for number in range(4_000)]
    ends, done = set(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            ends.add(log.offsets("t")[0].stop)

    watcher = threading.Thread(target=watch)
    writers = [
        threading.Thread(target=lambda: [log.append("t", rows) for _ in range(5)], name=f"writer {n}") for n in range(2)
    ]
    for thread in (watcher, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    watcher.join()
    assert {end % 4_000 for end in ends} == {0}
    assert [row["n"] for row in values_of(log, "t")] == list(range(4_000)) * 10


# One log, many handles


def test_changes_made_at_once_all_count(log: Log, url: str) -> None:
    """Each is decided on what the one before it left, over all handles."""
    log.create_topic("t", "n INT", partitions=1)
    names = [f"c{number}" for number in range(4)]
    gate = threading.Barrier(len(names))
    failures: list[BaseException] = []

    def add(name: str) -> None:
        try:
            with headwater.open_log(url) as mine:
                gate.wait()
                mine.store.change("t", lambda topic: _with_column(topic, name))
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=add, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(log.topic("t").schema.names) == sorted(["n", *names])


def test_of_many_that_make_a_topic_one_does(log: Log, url: str) -> None:
    """The others are told that it exists, and see the one that was made."""
    outcomes: list[Any] = []
    gate = threading.Barrier(4)

    def make(number: int) -> None:
        with headwater.open_log(url) as mine:
            gate.wait()
            try:
                outcomes.append(mine.create_topic("t", f"c{number} INT", partitions=2))
            except TopicExists as error:
                outcomes.append(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = [outcome for outcome in outcomes if not isinstance(outcome, TopicExists)]
    assert len(outcomes) == 4 and len(made) == 1
    assert log.topic("t") == made[0]
    log.append("t", [{log.topic("t").schema.names[0]: 1}])


def test_a_forked_child_is_told_to_open_its_own(log: Log) -> None:
    """A client's threads stay with the parent; the child gets an error instead of waiting for ever."""
    log.create_topic("raw", partitions=1)

    def use() -> str:
        try:
            log.append("raw", [b"child"])
        except Closed as error:
            return error.code
        return "stored"

    assert Child(use).result() == "closed"
    log.append("raw", [b"parent"])
    assert values_of(log, "raw") == [b"parent"]


def test_a_forked_child_frees_no_client_of_its_parents(log: Log, kafka: KafkaServer) -> None:
    """Also none that was garbage already: freeing a client whose threads are elsewhere is a crash."""
    circle: list[Any] = [Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "gone"})]
    circle[0].list_topics(timeout=10)
    circle.append(circle)
    gc.disable()
    try:
        del circle
        Child(gc.collect).result()
    finally:
        gc.enable()
        gc.collect()
    log.create_topic("raw", partitions=1)


# Refusals


def test_what_kafka_cannot_do_is_refused(log: Log) -> None:
    """With the reason, before anything happens."""
    log.create_topic("raw", partitions=1)
    with refused(Unsupported):
        log.seal("raw")
    with refused(InvalidName, "reserved for the log"):
        log.create_topic("__headwater.mine")
    log.create_topic("a.b", partitions=1)
    with refused(InvalidName, "a_b"):
        log.create_topic("a_b", partitions=1)
    assert log.topics() == ["a.b", "raw"]


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ("", ["names no log"]),
        ("?prefix=x", ["names no brokers"]),
        ("user:secret@host:9092", ["names no brokers"]),
        ("{broker}?acks=0", ["acks"]),
        ("{broker}?no.such.option=1", ["no.such.option"]),
        ("{broker}?sasl.password=env:HEADWATER_NOT_SET", ["HEADWATER_NOT_SET"]),
        ("{broker}?prefix=" + "x" * 50, ["prefix"]),
        ("{broker}?prefix=a/b", ["prefix"]),
    ],
)
def test_an_address_that_cannot_work_is_refused(kafka: KafkaServer, rest: str, words: list[str]) -> None:
    """At once, and without repeating secrets."""
    with refused(InvalidInput, *words):
        headwater.open_log("kafka://" + rest.format(broker=kafka.bootstrap))


def test_a_read_only_handle_writes_nothing(log: Log, url: str) -> None:
    """It reads what is there."""
    log.create_topic("raw", partitions=1)
    log.append("raw", [b"x"])
    with log.consumer("raw", group="g") as consumer:
        assert len(consumer.poll(timeout_s=30)) == 1
    with headwater.open_log(url, read_only=True) as reading:
        assert values_of(reading, "raw") == [b"x"]
        for use in (
            lambda: reading.append("raw", [b"y"]),
            lambda: reading.create_topic("new"),
            lambda: reading.reset_group("g", to="earliest"),
            lambda: reading.delete_group("g"),
        ):
            with refused(Unsupported, "read-only"):
                use()
        assert reading.group("g").partitions[0].committed == 1


def test_a_missing_package_is_named(kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with refused(Unsupported, 'pip install "headwater[kafka]"'):
        headwater.open_log(f"kafka://{kafka.bootstrap}?client.id=other")


@pytest.mark.parametrize("operation", ["ALL", "WRITE", "READ"])
def test_a_missing_right_is_named(log: Log, kafka: KafkaServer, operation: str) -> None:
    """At once, with what to ask for; what is not forbidden still works."""
    log.create_topic("raw", partitions=1)
    log.append("raw", [b"x"])
    rule = AclBinding(
        ResourceType.TOPIC, f"{_prefix(log)}raw", ResourcePatternType.LITERAL, "User:ANONYMOUS", "*",
        AclOperation[operation], AclPermissionType.DENY,
    )  # fmt: skip
    others = AclBinding(
        ResourceType.TOPIC, f"{_prefix(log)}raw", ResourcePatternType.LITERAL, "User:ANONYMOUS", "*",
        AclOperation.ALL, AclPermissionType.ALLOW,
    )  # fmt: skip
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    for future in admin.create_acls([rule, others]).values():
        future.result(30)
    if operation != "READ":
        _refused_soon(lambda: log.append("raw", [b"y"]))
    if operation != "WRITE":
        _refused_soon(lambda: log.read("raw"))
    else:
        assert values_of(log, "raw")[0] == b"x"


def test_an_address_where_nobody_listens_is_unreachable(capfd: pytest.CaptureFixture[str]) -> None:
    """Within ten seconds, and not a word of the client's own on the terminal."""
    begun = time.monotonic()
    with refused(Unreachable, "127.0.0.1:1"):
        headwater.open_log("kafka://127.0.0.1:1")
    assert time.monotonic() - begun < 10
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_broker_that_dies_is_unreachable(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever is asked of it then ends within ten seconds with an error, quietly; closing works."""
    with KafkaServer() as mine:
        log = headwater.open_log(f"kafka://{mine.bootstrap}")
        log.create_topic("orders", ORDERS, key="id", partitions=1)
        log.append("orders", orders(3))
        reader = log.reader("orders")
    for use in (lambda: log.append("orders", orders(1)), lambda: reader.poll(timeout_s=0)):
        begun = time.monotonic()
        with refused(Unreachable, mine.bootstrap):
            use()
        assert time.monotonic() - begun < 10
    log.close()
    assert capfd.readouterr() == ("", "")


def _refused_soon(use: Callable[[], object]) -> None:
    """The brokers hear of a new rule a moment after it was made; from then on it holds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            use()
        except NoAccess:
            break
    with refused(NoAccess, "raw"):
        use()


def _prefix(log: Log) -> str:
    return log.url.partition("prefix=")[2]


def _with_column(topic: Any, name: str) -> Any:
    import msgspec
    import pyarrow as pa

    wider = topic.schema.append(pa.field(name, pa.string()))
    return msgspec.structs.replace(topic, schemas=(*topic.schemas, wider))


def _foreign(kafka: KafkaServer, name: str, records: list[tuple[bytes | None, bytes | None, list[Any]]]) -> None:
    """A topic of one partition, made and filled by another program."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(name, 1)])[name].result(30)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for key, value, headers in records:
        producer.produce(name, value, key, 0, headers=headers)
    assert producer.flush(30) == 0


def _records(kafka: KafkaServer, name: str) -> list[Any]:
    """Everything in a topic of one partition, as another program reads it."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "other", "enable.partition.eof": True})
    consumer.assign([TopicPartition(name, 0, 0)])
    found = []
    while True:
        record = consumer.poll(20)
        assert record is not None
        if record.error() is not None:
            assert record.error().code() == KafkaError._PARTITION_EOF
            consumer.close()
            return found
        found.append(record)
