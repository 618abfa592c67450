"""A lookup inside one source of both its topics, in an application on Spark: beside the same behind a shuffle, with late events, deletions,
conditions, kills, more partitions, a lost state and a topic that has no event yet."""

from __future__ import annotations

import shutil
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.log.log import Log
from headwater.testing import CRASH, AppTest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATENESS_S = 10
LATENESS = f"{LATENESS_S} seconds"
WHO = [f"w{number}" for number in range(9)]
SALE = "id BIGINT, who STRING NOT NULL, amount INT, at TIMESTAMP"
RATE = "who STRING NOT NULL, rate INT, since TIMESTAMP"
Row = dict[str, Any]


def priced(sales: DataFrame, rates: Any) -> DataFrame:
    return hw.lookup(sales, rates, on="who", at="at")


def apart(sales: DataFrame, rates: Any) -> DataFrame:
    """The same rows, for which Spark has to look at each."""
    return hw.lookup(sales.where("abs(id) >= 0"), rates, on="who", at="at")


def dear(sales: DataFrame, offers: DataFrame) -> DataFrame:
    """Both sides are asked something first, by columns that the lookup does not need."""
    some = sales.where("amount > 20 AND id % 7 <> 3").select("id", F.col("who").alias("whose"), "at")
    offered = offers.where("rate <> 3").select(F.col("who").alias("whose"), F.col("rate").alias("offered"), "since")
    return hw.lookup(some, offered, on="whose", at="at", table_at="since", how="inner")


def make(**where: Any) -> hw.App:
    app = hw.App("shop", state_partitions=2, **where)
    timed = {"lateness": LATENESS, "partitions": 3, "key": "who"}
    sales = app.topic("sales", schema=SALE, time="at", **timed)
    rates = app.table("rates", schema=RATE, time="since", **timed)
    offers = app.topic("offers", schema=RATE, time="since", **timed)
    app.stream(sales, rates)(priced)
    app.stream(sales, rates)(apart)
    app.stream(sales, offers)(dear)
    return app


def sales_of(random: Random, first: int, count: int) -> list[Row]:
    """Sales in the order of their arrival: most a little out of order, some too late, some without a time."""
    rows = []
    for number in range(first, first + count):
        behind = random.choice((0, 0, 2, LATENESS_S, 60))
        at = None if random.random() < 0.02 else NOON + timedelta(seconds=number - behind)
        rows.append({"id": number, "who": random.choice(WHO), "amount": random.randrange(50), "at": at})
    return rows


def rates_of(random: Random, first: int, count: int) -> list[Row]:
    """Rates of each, at times that sales have as well; ten follow each other at one time, as the changes of a transaction do."""
    since = [NOON + timedelta(seconds=number // 10 * 10) for number in range(first, first + count)]
    return [{"who": random.choice(WHO), "rate": random.randrange(6), "since": each} for each in since]


def found(log: Log, table: str, until: datetime | None = None) -> tuple[list[Row], int]:
    """Row by row: each sale in time, and passed, with the rate of its time; and how many were late. `until`: all partitions came so far."""
    in_time, late, sold = _in_time(log, "sales", "at")
    rates, _, known = _in_time(log, table, "since", keeps_late=table == "rates")
    passed = (until or min(sold, known)) - timedelta(seconds=LATENESS_S, microseconds=1)
    given = []
    for sale in in_time:
        if sale["at"] <= passed:
            mine = [each for each in rates if each["who"] == sale["who"] and each["since"] <= sale["at"]]
            last = max(reversed(mine), key=lambda each: each["since"], default=None)
            given.append({**sale, "rate": None if last is None else last["rate"]})
    return given, late


def _in_time(log: Log, topic: str, time: str, *, keeps_late: bool = False) -> tuple[list[Row], int, datetime]:
    reached: dict[int, datetime] = {}
    rows, late = list[Row](), 0
    for row in (
        log.read(topic, columns=[*log.topic(topic).schema.names, "_partition", "_offset"])
        .sort_by([("_partition", "ascending"), ("_offset", "ascending")])
        .to_pylist()
    ):
        partition, at = row.pop("_partition"), row[time]
        row.pop("_offset")
        before = reached.get(partition)
        if not keeps_late and (at is None or (before is not None and at < before - timedelta(seconds=LATENESS_S))):
            late += 1
        else:
            rows.append(row)
            reached[partition] = max(before or at, at)
    return rows, late, min(reached.values())


def of(rows: list[Row], *names: str) -> Counter[Any]:
    return Counter(tuple(row[name] for name in names) for row in rows)


def check(log: Log, read: Any, until: datetime | None = None) -> None:
    given, _ = found(log, "rates", until)
    names = ("id", "who", "amount", "at", "rate")
    assert len(given) > 50 and any(row["rate"] is not None for row in given)
    assert of(read("priced"), *names) == of(read("apart"), *names) == of(given, *names)
    offered, _ = found(log, "offers", until)
    # What an offer that is left out replaced stays: it is left out before anybody looks.
    kept = [row for row in offered if row["amount"] > 20 and row["id"] % 7 != 3]
    by_id = {row["id"]: row for row in read("dear")}
    assert set(by_id) <= {row["id"] for row in kept}
    assert {row["id"] for row in kept if row["rate"] not in (None, 3)} <= set(by_id)
    assert all(by_id[row["id"]]["offered"] == row["rate"] for row in kept if row["rate"] not in (None, 3))


def test_a_kill_leaves_a_fused_lookup_as_it_would_be_apart() -> None:
    """The application is killed behind a batch, twice; nothing is given twice or lost."""
    random = Random(5)
    with AppTest(make) as test:
        for table in ("rates", "offers"):
            test.feed(table, rates_of(random, 0, 200))
        sold: list[Any] = sales_of(random, 0, 240)
        sold.insert(160, CRASH)
        sold.insert(80, CRASH)
        test.feed("sales", sold)
        for table in ("rates", "offers"):
            test.feed(table, rates_of(random, 200, 60))
        test.run()
        check(test.log, test.read)


def test_a_fused_lookup_goes_on_from_its_state(tmp_path: Path, spark: SparkSession) -> None:
    """It waits for a table that has no event yet; late sales are counted; deletions are seen; keys that move to another partition
    keep their state on both sides; a lost state is rebuilt as it was."""
    url, random = str(tmp_path / "log"), Random(3)
    late, given = Counter[str](), Counter[str]()
    plan = make(log=url, spark=spark).plan()
    assert "lookup-1 runs inside the source of sales and rates, without a shuffle" in plan
    assert "lookup-1 runs inside the source of sales and offers, without a shuffle" in plan
    assert plan.count("lookup-1 is not fused: its input is not just columns of a topic") == 1

    def run(**how: Any) -> None:
        stages = make(log=url, spark=spark).run(available_now=True, **how).stages
        assert all(stage.is_whole for stage in stages)
        late.update({stage.name: stage.late for stage in stages})
        given.update({stage.name: stage.given for stage in stages})

    run()
    with hw.open_log(url) as log:

        def read(topic: str) -> list[Row]:
            return log.read(topic).to_pylist()

        log.append("sales", sales_of(random, 0, 100))
        run()
        assert not read("priced") and not read("apart"), "nothing is known of the table yet"
        for table in ("rates", "offers"):
            log.append(table, rates_of(random, 0, 100))
        run()
        check(log, read)
        log.alter_topic("sales", partitions=6)
        log.alter_topic("rates", partitions=9)
        at = NOON + timedelta(seconds=100)
        log.append(
            "sales", [{"id": 900, "who": who, "amount": 1, "at": at} for who in WHO]
        )  # so all partitions have one
        log.append("sales", sales_of(random, 100, 150))
        for table in ("rates", "offers"):
            log.append(table, rates_of(random, 100, 150))
        until = NOON + timedelta(seconds=250)
        for topic in ("sales", "rates", "offers"):
            log.heartbeat(topic, until)  # not every partition has an event behind the last one
        shutil.rmtree(tmp_path / "log/apps/shop/checkpoints/priced/operators/lookup-1")
        run(rebuild_state={"priced": "all"})
        check(log, read, until)
        assert late["priced"] == late["apart"] == found(log, "rates")[1] > 10
        with log.producer() as producer:
            producer.send("rates", None, key=WHO[0])
        after = {"id": 1000, "who": WHO[0], "amount": 1, "at": datetime.now(UTC) + timedelta(minutes=1)}
        log.append("sales", [after])
        for topic in ("sales", "rates"):
            log.heartbeat(topic, datetime.now(UTC) + timedelta(minutes=3))
        run()
        changed = 100 + 150 + 1
        for stage in ("priced", "apart"):
            assert [row["rate"] for row in read(stage) if row["id"] == 1000] == [None]
            assert len(read(stage)) + late[stage] == log.read("sales").num_rows, "each sale is in the result, or late"
            assert given[stage] == len(read(stage)) + changed, "the table's rows are given as well"
