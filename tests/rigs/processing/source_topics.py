"""A log with a topic of orders, and the source that reads it as Spark would, without a Spark."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import headwater as hw
from headwater.log.log import Log
from headwater.processing.source.spark_source import BatchReader, HeadwaterSource
from headwater.processing.source.stream import StreamReader

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


class Topics:
    """A log with a topic, and the source that reads it."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder / "log")
        self.log: Log = hw.open_log(self.url)
        self.log.create_topic("orders", "id STRING, amount BIGINT, at TIMESTAMP", key="id", time="at", partitions=2)

    def add(self, count: int, *, topic: str = "orders") -> None:
        """Appends so many orders; the second of each is its number so far."""
        ends = sum(len(held) for held in self.log.offsets(topic).values())
        rows = [{"id": f"o{n}", "amount": n, "at": NOON + timedelta(seconds=n)} for n in range(ends, ends + count)]
        self.log.append(topic, rows)

    def source(self, **options: str) -> HeadwaterSource:
        return HeadwaterSource(
            {"log": self.url, **({} if "subscribePattern" in options else {"topic": "orders"}), **options}
        )

    def stream(self, **options: str) -> StreamReader:
        source = self.source(**options)
        return source.streamReader(source.schema())

    def batch(self, **options: str) -> BatchReader:
        source = self.source(**options)
        return source.reader(source.schema())

    def rows(self, reader: Any, ranges: Any) -> list[dict[str, Any]]:
        """What tasks read, each from a reader that was pickled as Spark does it; what was fetched while planning is taken first."""
        if type(reader) is StreamReader:
            reader.getCache({}, {})
        return [
            row
            for wanted in ranges
            for batch in pickle.loads(pickle.dumps(reader)).read(pickle.loads(pickle.dumps(wanted)))
            for row in batch.to_pylist()
        ]

    def amounts(self, reader: Any, *offsets: Any) -> list[int]:
        return sorted(row["amount"] for row in self.rows(reader, reader.partitions(*offsets)))


@pytest.fixture
def topics(tmp_path: Path) -> Iterator[Topics]:
    made = Topics(tmp_path)
    yield made
    made.log.close()
