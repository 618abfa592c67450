"""A few changes become the events that many would: the quick way and the one by columns, side by side."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.capture.events import EventBatch, FewTopics
from headwater.capture.progress import CaptureProgress, TableProgress
from headwater.capture.source import (
    BEGIN,
    DELETE,
    END,
    INSERT,
    TRANSACTIONS_SCHEMA,
    UPDATE,
    ChangeBatch,
    ChangeRow,
    Changes,
    FewRows,
    SourceTable,
    changes_schema,
)
from headwater.capture.source_topics import CapturedTopics
from headwater.capture.spill import Spill
from headwater.log.log import Log

COLUMNS = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("part", pa.string()),
        pa.field("amount", pa.decimal128(9, 2)),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("tags", pa.list_(pa.string())),
    ]
)
TABLES = {
    "one": SourceTable(name="one", schema=COLUMNS, key=("id",)),
    "text": SourceTable(name="text", schema=COLUMNS, key=("part",)),
    "both": SourceTable(name="both", schema=COLUMNS, key=("id", "part")),
    "narrow": SourceTable(name="narrow", schema=COLUMNS, key=("id",)),
}
"""The last has a topic with a column more than the table."""

NOW_US = 1_790_000_000_000_000
TIME_US = 10_000_000


class Side:
    """A log that is fed by batches, in one of the two ways."""

    def __init__(self, folder: Path, *, few: bool) -> None:
        self._is_few = few
        self._spill = Spill(folder / "spill")
        self._known: dict[str, FewTopics] = {}
        self._tables = {name: TableProgress(topic=name, state="live") for name in TABLES}
        self.log: Log = hw.open_log(str(folder / "log"), clock=lambda: NOW_US)
        topics = CapturedTopics(self.log, "shop", prefix="", names={}, partitions=2, retention="7 days")
        for info in TABLES.values():
            more = [pa.field("dropped", pa.string())] if info.name == "narrow" else []
            topics.make(SourceTable(name=info.name, schema=pa.schema([*info.schema, *more]), key=info.key))
        self.committed_us = 0

    def add(self, parts: list[tuple[dict[str, list[ChangeRow]], list[tuple[Any, ...]]]]) -> None:
        """One step of a capture, with changes that were handed over one after the other."""
        batch = EventBatch(self.log, "shop", self.committed_us, self._spill, self._known)
        for rows, told in parts:
            batches = [ChangeBatch(name, self._given(some, changes_schema(COLUMNS))) for name, some in rows.items()]
            ended = self._given(told, TRANSACTIONS_SCHEMA)
            progress = CaptureProgress(url="", position="", tables=self._tables)
            assert not batch.add(Changes(batches=tuple(batches), transactions=ended, end=""), TABLES, progress)
        with self.log.transaction() as transaction:
            for write in batch.writes():
                transaction.append(write.topic.name, write.rows())
        self.committed_us = batch.committed_us

    def held(self, topic: str) -> list[dict[str, Any]]:
        names = [*self.log.topic(topic).schema.names, "_partition", "_offset", "_deleted"]
        rows = self.log.read(topic, columns=names).to_pylist()
        return sorted(rows, key=lambda row: (row["_partition"], row["_offset"]))

    def _given(self, rows: list[Any], schema: pa.Schema) -> pa.Table | FewRows:
        return FewRows(rows, schema) if self._is_few else FewRows(rows, schema).table


@contextmanager
def sides(folder: Path) -> Iterator[tuple[Side, Side]]:
    few, many = Side(folder / "few", few=True), Side(folder / "many", few=False)
    with few.log, many.log:
        yield few, many


def row(chance: random.Random) -> tuple[Any, ...]:
    return (
        chance.randrange(-5, 5),
        chance.choice(["", "ä", "x" * 300]),
        chance.choice([None, Decimal("-1234567.89"), Decimal(0)]),
        chance.choice([None, datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)]),
        chance.choice([None, [], ["a", None]]),
    )


def test_events_are_the_same_either_way(tmp_path: Path) -> None:
    """Every kind of key and change, of one row and of several, with times that go back, or lie ahead of the clock, and with heartbeats."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with sides(tmp_path) as (few, many):
        number = 0
        for _ in range(60):
            parts = []
            for _ in range(chance.randrange(1, 3)):
                number += 1
                at = chance.choice([TIME_US + number, TIME_US, 0, NOW_US + number if number > 80 else 1])
                rows: dict[str, list[ChangeRow]] = {}
                for order in range(chance.randrange(1, 4)):
                    op = chance.choice([INSERT, INSERT, UPDATE, DELETE])
                    before = row(chance) if op == DELETE or (op == UPDATE and chance.random() < 0.5) else None
                    after = None if op == DELETE else row(chance)
                    change = ChangeRow(op, before, after, f"{number:08}.{order}", f"t{number}", order, at)
                    rows.setdefault(chance.choice(list(TABLES)), []).append(change)
                counts = [(name, len(some)) for name, some in rows.items()]
                told = [
                    (f"t{number}", BEGIN, f"{number:08}", at, None, None),
                    (f"t{number}", END, f"{number:08}.9", at, sum(count for _, count in counts), counts),
                ]
                parts.append((rows, told))
            if chance.random() < 0.3:
                topic, told_us = chance.choice([*TABLES, "shop.transactions"]), TIME_US + number + 5
                for side in (few, many):
                    side.log.heartbeat(topic, told_us)
            few.add(parts)
            many.add(parts)
            assert few.committed_us == many.committed_us
        for topic in [*TABLES, *(f"{name}.changes" for name in TABLES), "shop.transactions"]:
            assert few.held(topic) == many.held(topic)
            assert few.held(topic)


def test_the_quick_way_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By plain changes of a table with one key column; and not any more when the topic has got another column."""
    monkeypatch.setattr(EventBatch, "_put", lambda *given: pytest.fail(f"by columns: {given[1]}"))
    change = ChangeRow(INSERT, None, row(random.Random(1)), "1", "t", 1, TIME_US)
    with sides(tmp_path) as (few, _):
        few.add([({"one": [change], "text": [change]}, [("t", BEGIN, "1", TIME_US, None, None)])])
        assert len(few.held("one")) == len(few.held("text.changes")) == 1
        wider = pa.schema([*few.log.topic("one").schema, pa.field("more", pa.string())])
        few.log.alter_topic("one", schema=wider)
        with pytest.raises(pytest.fail.Exception, match="by columns: one"):
            few.add([({"one": [change]}, [("t", BEGIN, "1", TIME_US, None, None)])])
