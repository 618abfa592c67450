"""The order of a batch's rows in the topic that a stage writes: a backlog makes nobody late who was on time."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.log.port.topic import Topic
from headwater.log.port.write import Write
from headwater.processing.sink.batch_order import BatchOrder, Order, order_of
from tests.rigs.spark import patiently

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
NOON_US = int(NOON.timestamp() * 1_000_000)
LATENESS_S = 5
SCHEMA = "id BIGINT, who STRING, page STRING, at TIMESTAMP"


def topic(url: str = "memory://", **settings: Any) -> Topic:
    """A topic with a key and an event time."""
    with hw.open_log(url) as log:
        given = {"key": "page", "time": "at", "partitions": 1, "lateness": f"{LATENESS_S} seconds", **settings}
        return log.create_topic("t", SCHEMA, **given)


def rows_of(seed: int, tasks: int = 4, count: int = 200) -> tuple[pa.Table, list[int]]:
    """What tasks give one after the other: each from the same noon on, a little out of order, some late, one from 2099."""
    random = Random(seed)
    rows, task = [], []
    for number in range(tasks):
        for second in range(random.randint(0, count)):
            behind = random.choice((0, 0, 1, LATENESS_S, 40 if random.random() < 0.1 else 0))
            at = None if random.random() < 0.02 else NOON + timedelta(seconds=second - behind)
            at = datetime(2099, 1, 1, tzinfo=UTC) if random.random() < 0.01 else at
            rows.append({"id": len(rows), "who": f"w{number}", "page": f"p{random.randrange(5)}", "at": at})
            task.append(number)
    return pa.Table.from_pylist(rows, pa.schema([("id", pa.int64()), ("who", pa.string()), ("page", pa.string()),
                                                 ("at", pa.timestamp("us", tz="UTC"))])), task  # fmt: skip


def late_ids(rows: list[dict[str, Any]], now: datetime) -> set[int]:
    """Which are late in this order, row by row: an oracle that shares no code."""
    reached: datetime | None = None
    late = set()
    for row in rows:
        if row["at"] is None:
            continue
        if reached is not None and row["at"] < reached - timedelta(seconds=LATENESS_S):
            late.add(row["id"])
        if row["at"] <= now + timedelta(days=1):
            reached = max(reached or row["at"], row["at"])
    return late


@pytest.mark.parametrize("order", ["tasks", "keys", "times"])
@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_late_who_was_on_time(seed: int, order: Order) -> None:
    """However tasks give their rows, and each task, or each key of it, keeps its order. One after the other they would be late."""
    rows, task = rows_of(seed)
    now = NOON + timedelta(hours=1)
    weaving = BatchOrder(topic(), order, now_us=int(now.timestamp() * 1_000_000))
    found = weaving.rows(rows, np.array(task)).to_pylist()
    assert sorted(row["id"] for row in found) == list(range(len(task)))
    late = set().union(*(late_ids([row for row in rows.to_pylist() if row["who"] == f"w{n}"], now) for n in range(4)))
    assert late_ids(found, now) <= late
    assert len(late_ids(rows.to_pylist(), now)) > 2 * len(late) + 10
    if order != "times":
        same = ("who",) if order == "tasks" else ("who", "page")
        by_group: dict[tuple[str, ...], list[int]] = {}
        for row in found:
            if order == "tasks" or row["id"] not in late:
                by_group.setdefault(tuple(row[name] for name in same), []).append(row["id"])
        assert all(ids == sorted(ids) for ids in by_group.values())
    if order == "tasks":
        assert late_ids(found, now) == late, "what was late stays late: all rows are in one partition here"


@pytest.mark.parametrize("order", ["keys", "times"])
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("key", ["page", "who", None])
@pytest.mark.parametrize("seed", range(5))
def test_rows_in_the_order_of_another_key_are_late_in_no_partition(
    seed: int, key: str | None, partitions: int, order: Order
) -> None:
    """What gives rows key by key has a key of its own, of which the topic need not know: here it is the hash of `id`."""
    rows, task = rows_of(seed)
    random = Random(seed)
    hashed = sorted(range(len(task)), key=lambda at: (task[at], rows["id"][at].as_py() * 2_654_435_761 % 2**32))
    rows, task = rows.take(hashed), [task[at] for at in hashed]
    now = NOON + timedelta(hours=1)
    weaving = BatchOrder(topic(key=key, partitions=partitions), order, now_us=int(now.timestamp() * 1_000_000))
    found = weaving.rows(rows, np.array(task)).to_pylist()
    assert sorted(row["id"] for row in found) == list(range(len(task)))
    place = {row["id"]: hash(row[key]) % partitions if key else random.randrange(partitions) for row in found}
    for partition in range(partitions):
        there = [row for row in found if place[row["id"]] == partition]
        assert late_ids(there, now) == set()
    tasks = [rows.filter(pa.array([of == number for of in task])).combine_chunks() for number in range(4)]
    writes = [[Write(weaving.topic, 0, batch) for batch in each.to_batches(max_chunksize=37)] for each in tasks]
    staged = [row for write in weaving.writes(writes, list) for row in write.batch.to_pylist()]
    assert late_ids(staged, now) == set()


@pytest.mark.parametrize("seed", range(5))
def test_staged_rows_are_woven_in_each_partition(seed: int) -> None:
    """As those that were fetched; what is in order already is not copied, and what is kept in a file comes back from there."""
    rows, task = rows_of(seed)
    weaving = BatchOrder(topic(partitions=2), "tasks", now_us=NOON_US + 3_600_000_000)
    bounds = [*np.flatnonzero(np.diff([-1, *task])), len(task)]
    tasks = [rows.slice(start, end - start).combine_chunks() for start, end in pairwise(bounds)]
    batches = [table.to_batches()[0] for table in tasks]
    kept: list[int] = []

    def keep(made: Any) -> list[pa.RecordBatch]:
        given = list(made)
        kept.append(sum(batch.num_rows for batch in given))
        return given

    writes = [[Write(weaving.topic, 0, batch.slice(0, 50)), Write(weaving.topic, 1, batch, np.arange(50, batch.num_rows))]
              if batch.num_rows > 50 else [Write(weaving.topic, 0, batch)] for batch in batches]  # fmt: skip
    found = weaving.writes(writes, keep)
    for partition in (0, 1):
        there = [row for write in found if write.partition == partition for row in write.batch.to_pylist()]
        parts = [
            (number, piece) for number, batch in enumerate(batches)
            for piece in (batch.slice(0, 50) if partition == 0 else batch.slice(50)).to_pylist()
        ]  # fmt: skip
        wanted = pa.Table.from_pylist([piece for _, piece in parts], rows.schema)
        assert there == weaving.rows(wanted, np.array([number for number, _ in parts])).to_pylist()
    assert sum(kept) == sum(write.count for write in found)
    alone = weaving.writes(writes[:1], keep)
    assert [write.batch.num_rows for write in alone][:1] == [min(50, batches[0].num_rows)]


@pytest.mark.parametrize("order", ["tasks", "keys", "times"])
@pytest.mark.parametrize("batches", [0, 1, 2])
def test_a_batch_without_rows_gives_none(order: Order, batches: int) -> None:
    """A filter that lets nothing pass gives a table without rows, with or without batches in it, and tasks that staged nothing."""
    weaving = BatchOrder(topic(), order, now_us=NOON_US)
    empty = rows_of(0)[0].schema.empty_table()
    batch = pa.RecordBatch.from_pylist([], empty.schema)
    given = pa.Table.from_batches([batch] * batches, empty.schema)
    assert weaving.rows(given, np.array([], np.int32)).num_rows == 0
    assert sum(write.count for write in weaving.writes([[Write(weaving.topic, 0, batch)]] * batches, list)) == 0


def test_what_keeps_state_says_which_order_there_is() -> None:
    """Spark's windows and joins have none, nor have operators and what was shuffled; functions of users give rows key by key."""
    assert order_of((), has_operators=False) == "tasks"
    assert order_of(("Aggregate", "Join"), has_operators=False) == "times"
    assert order_of(("dedupe",), has_operators=True) == "times"
    assert order_of((), has_operators=False, is_shuffled=True) == "times"
    assert order_of(("Aggregate", "TransformWithStateInPandas"), has_operators=False) == "keys"


def feed(url: str, count: int) -> list[dict[str, Any]]:
    """An hour of clicks in four partitions, each a little out of order."""
    random = Random(count)
    lateness = f"{LATENESS_S} seconds"
    rows = [
        {"id": number, "who": f"w{random.randrange(40)}", "page": f"p{random.randrange(9)}",
         "at": NOON + timedelta(seconds=number * 3600 / count - random.randrange(LATENESS_S))}
        for number in range(count)
    ]  # fmt: skip
    with hw.open_log(url) as log:
        log.create_topic("clicks", SCHEMA, key="who", time="at", lateness=lateness, partitions=4)
        log.append("clicks", rows)
    return rows


def by_page(clicks: DataFrame) -> DataFrame:
    return clicks.where("id >= 0")


def per_minute(by_page: DataFrame) -> DataFrame:
    grouped = by_page.groupBy(F.window("at", "1 minute").alias("w"), "page").count()
    return grouped.select(F.col("w.start").alias("begin"), "page", F.col("count").alias("n"))


def per_quarter(per_minute: DataFrame) -> DataFrame:
    grouped = per_minute.groupBy(F.window("begin", "15 minutes").alias("w")).agg(F.sum("n").alias("n"))
    return grouped.select(F.col("w.start").alias("begin"), "n")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.covers("concept: rerun as batch")
@pytest.mark.parametrize("count", [700, 5_000, 30_000])
def test_a_backlog_is_late_nowhere(spark: SparkSession, tmp_path: Path, count: int) -> None:
    """An hour at once through a stage that changes the key, into windows, into windows of those: read by one task, fetched from
    several, and staged. The lateness of a few seconds is enough, and every event is counted; the last windows are not over."""
    url = str(tmp_path / "log")
    rows = feed(url, count)
    app = hw.App("backlog", log=url, spark=spark)
    clicks = app.topic("clicks", schema=SCHEMA, key="who", time="at", lateness=f"{LATENESS_S} seconds", partitions=4)
    of_page = app.stream(clicks, key="page", time="at", lateness=f"{LATENESS_S} seconds")(by_page)
    of_minute = app.stream(of_page, key="page", time="begin", lateness="0 seconds")(per_minute)
    app.view(of_minute, key="begin")(per_quarter)
    patiently(lambda: app.run(available_now=True))
    with app.views["per_quarter"] as view:
        found = {row["begin"]: row["n"] for row in view.rows().to_pylist()}
    quarters = (row["at"].replace(minute=row["at"].minute // 15 * 15, second=0, microsecond=0) for row in rows)
    last = NOON + timedelta(minutes=45)
    assert found.pop(last) > 0
    assert found == Counter(quarter for quarter in quarters if quarter < last)
