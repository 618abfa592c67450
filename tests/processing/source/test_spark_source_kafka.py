"""Spark reads a log on Kafka, without a connector: the same source, the same rows as the log itself."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import headwater as hw
from headwater.testing.servers.kafka import KafkaServer
from tests.rigs.spark import patiently

pytestmark = [pytest.mark.slow, pytest.mark.service("kafka"), pytest.mark.timeout(600)]

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
COLUMNS = "id,amount,price,at,tags,_key,_time,_appended,_partition,_offset,_topic,_headers,_deleted"


def test_kafka_topics_are_read_like_any_other(kafka: KafkaServer, spark: SparkSession) -> None:
    """Typed from JSON, with gaps where transactions ended, deletions and headers; batch, stream and log agree."""
    url = f"kafka://{kafka.bootstrap}?prefix=s{uuid.uuid4().hex[:8]}."
    with hw.open_log(url) as log:
        schema = "id STRING, amount BIGINT, price DECIMAL(10, 2), at TIMESTAMP, tags ARRAY<STRING>"
        log.create_topic("orders", schema, key="id", time="at", partitions=2)
        rows: list[dict[str, Any]] = [
            {"id": f"o{n % 50}", "amount": n, "price": "9.50", "at": NOON + timedelta(seconds=n), "tags": ["a", str(n)]}
            for n in range(5_000)
        ]
        log.append("orders", rows[:2_000])
        for start in range(2_000, 2_020, 5):
            with log.transaction() as transaction:
                transaction.append("orders", rows[start : start + 5])
        log.append("orders", rows[2_020:])
        log.append("orders", [{"id": "o7", "_deleted": True}, {**rows[0], "_headers": {"trace": b"1"}}])

        def load(reader: Any, **options: str) -> Any:
            return reader.format("headwater").options(log=url, topic="orders", **options).load()

        expected = log.read("orders", columns=COLUMNS.split(","))
        order = [("_partition", "ascending"), ("_offset", "ascending")]
        assert (
            load(spark.read, columns=COLUMNS).toArrow().sort_by(order).to_pylist()
            == expected.sort_by(order).to_pylist()
        )
        streamed = load(spark.readStream, startingOffsets="earliest", maxOffsetsPerTrigger="3000", columns=COLUMNS)

        def run() -> StreamingQuery:
            query = streamed.writeStream.format("memory").queryName("kafka").trigger(availableNow=True).start()
            assert query.awaitTermination(120)
            return query

        query = patiently(run)
        assert len([1 for progress in query.recentProgress if progress["numInputRows"]]) == 2
        assert spark.table("kafka").toArrow().sort_by(order).to_pylist() == expected.sort_by(order).to_pylist()
        later = load(spark.read, startingOffsets="2026-01-31T13:00:00Z", filter="amount % 10 = 3", columns="amount")
        start = log.read("orders", start=NOON + timedelta(hours=1), columns=["amount", "_deleted"]).to_pylist()
        assert sorted(row.amount for row in later.collect()) == sorted(
            row["amount"] for row in start if not row["_deleted"] and row["amount"] % 10 == 3
        )
        table = load(spark.read, asOf="latest", columns="id,amount").collect()
        assert sorted(map(tuple, table)) == sorted(
            (row["id"], row["amount"]) for row in log.table("orders").to_pylist()
        )
