"""Debezium's topics on a real Kafka: read as tables, written from our changes, each once, whoever is killed."""

from __future__ import annotations

import random
import uuid
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from headwater.capture.capture import Capture
from headwater.capture.progress import captures
from headwater.capture.source_url import open_source
from headwater.log.log import open_log
from headwater.model.points import points_of
from headwater.sinks.debezium_export import DebeziumExport
from headwater.testing.crash.points import kill_at
from headwater.testing.servers.kafka import KafkaServer
from tests.rigs.capture.debezium import captured, envelope, history, samples
from tests.rigs.capture.sqlite import Rig
from tests.rigs.children import Child

POINTS = points_of("capture:")
COLUMNS = "columns.users=id BIGINT, name STRING"


@pytest.mark.service("kafka")
def test_what_debezium_wrote_to_kafka_becomes_tables(kafka: KafkaServer, tmp_path: Path) -> None:
    """Topics that Kafka's own client filled, as Connect does; in those of several partitions nobody knows what a truncation comes after."""
    server = f"d{uuid.uuid4().hex[:8]}"
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    for topic in admin.create_topics(
        [NewTopic(f"{server}.shop.pairs", 1), NewTopic(f"{server}.wide.pairs", 3)]
    ).values():
        topic.result()
    for event in samples("schemas"):
        topic = event["topic"].replace("dbz", server, 1)
        producer.produce(topic, event["value"], key=event["key"])
        if topic.endswith("pairs"):
            producer.produce(topic.replace("shop", "wide"), event["value"], key=event["key"])
    producer.flush()
    log = open_log(tmp_path / "log", durability="os")
    captured(log, f"debezium+kafka://{kafka.bootstrap}?topics={server}.shop")
    rows = log.table("pairs").select(["a", "b", "note", "extra"]).to_pylist()
    assert rows == [{"a": 1, "b": "x", "note": "first", "extra": None}]
    assert log.table("everything").to_pylist()[0]["tags"] == ["x", "y"]
    assert captures(log)[server].position.startswith("0000000000")
    again = Capture(log, open_source(f"debezium+kafka://{kafka.bootstrap}?topics={server}.shop"))
    again.open()
    assert not again.step(timeout_s=0)
    lag = again.status().lag
    assert lag is not None
    assert lag.rows == 0
    again.close()
    wide = f"debezium+kafka://{kafka.bootstrap}?topics={server}.wide"
    other = open_log(tmp_path / "other", durability="os")
    assert "truncates=skip" in (captured(other, wide).progress.tables["pairs"].why or "")
    captured(other, f"{wide}&truncates=skip")
    assert {row["a"] for row in other.table("pairs").to_pylist()} == {1, 2, 3}


@pytest.mark.service("kafka")
@pytest.mark.covers("Debezium")
def test_changes_written_to_kafka_in_the_envelope_are_read_back_equal(kafka: KafkaServer, tmp_path: Path) -> None:
    """A captured table, out to Kafka by its transactions and in again: the same changes and the same table."""
    server = f"d{uuid.uuid4().hex[:8]}"
    rig = Rig(tmp_path, "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, raw BLOB, ratio REAL)")
    to = open_log(f"kafka://{kafka.bootstrap}")
    chance = random.Random(3)
    for life in range(3):
        for number in range(40):
            key = chance.randrange(15)
            rig.run(
                f"DELETE FROM users WHERE id = {key}"
                if chance.random() < 0.3
                else f"INSERT OR REPLACE INTO users VALUES ({key}, 'n{life}-{number}', x'0{life}', {number / 8})"
            )
        rig.capture.catch_up()
        export = DebeziumExport(rig.log, "users.changes", to=to, topic=f"{server}.users", partitions=3)
        export.open()
        export.catch_up()
    written = rig.history("users")
    back = open_log(tmp_path / "back", durability="os")
    captured(back, f"debezium+kafka://{kafka.bootstrap}?topics={server}")
    columns = ["id", "op", "before", "after", "transaction", "transaction_order"]
    for key in {change["id"] for change in written}:
        ours = [[change[name] for name in columns] for change in written if change["id"] == key]
        assert [[change[name] for name in columns] for change in history(back, "users") if change["id"] == key] == ours
    assert sorted(back.table("users").select(["id", "name", "raw", "ratio"]).to_pylist(), key=str) == rig.rows("users")
    to.close()


@pytest.mark.slow
def test_a_capture_of_topics_that_is_killed_at_every_step_reads_each_event_once(tmp_path: Path) -> None:
    """Two tables in several partitions that grow all the while; one life for each step, ended by `kill -9` there."""
    chance = random.Random(7)
    topics = open_log(tmp_path / "kafka", durability="os")
    url = f"debezium+file://{tmp_path}/kafka?topics=dbz.shop&{COLUMNS}&columns.orders=id BIGINT, name STRING"
    newest: dict[str, dict[int, str]] = {"users": {}, "orders": {}}
    told = {"users": 0, "orders": 0}
    for name in newest:
        topics.create_topic(f"dbz.shop.{name}", partitions=3)

    def grow(count: int) -> None:
        for name, rows in newest.items():
            events = []
            for _ in range(count):
                key = chance.randrange(25)
                gone = key in rows and chance.random() < 0.3
                text = f"{chance.random()}"
                events.append(
                    {"key": b'{"id":%d}' % key, "value": envelope(key, op="d" if gone else "c", name=text).encode()}
                )
                told[name] += 1
                if gone:
                    del rows[key]
                    events.append({"key": b'{"id":%d}' % key, "value": None})
                else:
                    rows[key] = text
            topics.append(f"dbz.shop.{name}", events)

    for point in POINTS * 2:
        grow(20)
        with pytest.raises(AssertionError, match="SIGKILL"):
            Child(lambda point=point: capture_until(tmp_path, url, point)).result()
    grow(20)
    Child(lambda: capture_until(tmp_path, url, "")).result()
    with open_log(tmp_path / "log") as log:
        for name, rows in newest.items():
            assert {row["id"]: row["name"] for row in log.table(name).to_pylist()} == rows
            changes = history(log, name)
            assert len(changes) == told[name]
            places = [change["position"].partition(" ")[2] for change in changes]
            assert len(set(places)) == len(places)


def capture_until(folder: Path, url: str, point: str) -> None:
    """A capture that dies where it is told."""
    kill_at(point)
    with open_log(folder / "log", durability="os") as log:
        capture = Capture(log, open_source(url), partitions=2)
        capture.open()
        capture.catch_up()
        capture.close()
