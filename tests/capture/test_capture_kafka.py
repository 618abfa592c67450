"""A database captured into Kafka: the same runner, with Kafka's own transactions."""

from __future__ import annotations

import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

import pytest

import headwater as hw
from headwater.capture.capture import Capture
from headwater.capture.progress import captures
from headwater.capture.source_url import open_source
from headwater.testing.servers.kafka import KafkaServer


@pytest.mark.service("kafka")
def test_a_database_is_captured_into_kafka(kafka: KafkaServer, tmp_path: Path) -> None:
    """Backfill, changes, a restart and an added column; each change once."""
    with (
        closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as shop,
        hw.open_log(f"kafka://{kafka.bootstrap}?prefix=c{uuid.uuid4().hex[:8]}.") as log,
    ):
        shop.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)")
        shop.execute("INSERT INTO users VALUES (1, 'ada'), (2, 'bob')")
        for statements in (
            ["UPDATE users SET name = 'Ada' WHERE id = 1"],
            [
                "ALTER TABLE users ADD COLUMN city TEXT",
                "INSERT INTO users VALUES (3, 'eve', 'Rome')",
                "DELETE FROM users WHERE id = 2",
            ],
        ):
            capture = Capture(log, open_source(f"sqlite:///{tmp_path}/shop.db"), partitions=1, heartbeat_s=0.0)
            capture.open()
            capture.catch_up()
            for statement in statements:
                shop.execute(statement)
            capture.catch_up()
            capture.close()
        rows = {row["id"]: (row["name"], row["city"]) for row in log.table("users").to_pylist()}
        assert rows == {1: ("Ada", None), 3: ("eve", "Rome")}
        assert [event["op"] for event in log.read("users.changes").to_pylist()] == ["r", "r", "u", "c", "d", "u"]
        assert captures(log)["shop"].tables["users"].state == "live"
