"""Nexmark's queries, as Spark answers them over tables, beside DuckDB's answers: `native.py` says what the specification asks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from examples.nexmark.arrival import Arrival
from examples.nexmark.events import Nexmark
from examples.nexmark.generate import batches, create
from examples.nexmark.native import NATIVE, Query, side_input
from examples.nexmark.ours import OURS, QUERIES
from examples.nexmark.topics import TOPICS
from headwater.model.clock import time_us
from tests.rigs.app.nexmark_oracle import SQL, Oracle, read_topic, rows

SEED = 20_250_101
EVENTS = 5_000
# A bid about every 33 ms from just before midnight: windows, sessions and two days. Bidders are silent for ten seconds now and then.
EVENING = time_us("2025-01-01T23:59:00+00:00")
PERIOD_US = 30_000


@pytest.fixture(scope="module")
def tables() -> dict[str, pa.Table]:
    """What a log has after events that were shuffled, some of them late: `_late` by its partitions, `_appended` by a clock of ours."""
    now = [time_us("2025-06-01T12:00:00+00:00")]
    arrival = Arrival(0, EVENTS, seed=SEED, lateness_events=4_000_000 // PERIOD_US, shuffled=True, late=0.02)
    with hw.open_log("memory://", clock=lambda: now[0]) as log:
        create(log, partitions=2)
        for tables in batches(Nexmark(SEED, PERIOD_US, EVENING), arrival, 500):
            now[0] += 3_700_000
            for topic, table in tables.items():
                log.append(topic, table)
        return {name: read_topic(log, name) for name in TOPICS}


@pytest.fixture(scope="module")
def oracle(tables: dict[str, pa.Table]) -> Iterator[Oracle]:
    """DuckDB over them."""
    print(f"seed {SEED}")
    with Oracle(tables) as oracle:
        yield oracle


@pytest.fixture(scope="module")
def few_partitions(spark: SparkSession) -> Iterator[SparkSession]:
    """The tests' Spark, with as many tasks as it has cores: the data is small."""
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    yield spark
    spark.conf.set("spark.sql.shuffle.partitions", before)


@pytest.fixture(scope="module")
def frames(few_partitions: SparkSession, tables: dict[str, pa.Table]) -> dict[str, DataFrame]:
    """What is not late of them, as Spark's tables."""
    return {
        name: few_partitions.createDataFrame(with_zones(table)).where("NOT _late") for name, table in tables.items()
    }


def with_zones(table: pa.Table) -> pa.Table:
    """As a log gives them to Spark: times in UTC."""
    fields = [pa.field(f.name, pa.timestamp("us", "UTC")) if pa.types.is_timestamp(f.type) else f for f in table.schema]
    return table.cast(pa.schema(fields))


def test_the_specification_is_whole(oracle: Oracle) -> None:
    """23 queries, all of which the data gives something to say to; each is Spark's own or by operators of ours."""
    assert list(SQL) == list(QUERIES) == [f"q{number}" for number in range(23)]
    assert set(SQL) - set(NATIVE) == {"q4", "q6", "q9", "q15", "q16"}
    assert {query: oracle.answer(query).num_rows for query in SQL if not oracle.answer(query).num_rows} == {}


def test_late_events_are_there_and_do_not_count(oracle: Oracle) -> None:
    late = oracle.late_count("bids")
    assert late > 0
    assert oracle.answer("q0", with_late=True).num_rows == oracle.answer("q0").num_rows + late


@pytest.mark.slow
@pytest.mark.parametrize(("query", "by"), [*((query, NATIVE) for query in NATIVE), *((query, OURS) for query in OURS)])
def test_a_query_answers_as_duckdb_does(
    query: str, by: dict[str, Query], frames: dict[str, DataFrame], oracle: Oracle
) -> None:
    """All columns of all rows, by name and in order."""
    function, inputs, _, key = by[query]
    answer = function(*(frames[name] for name in inputs)).toArrow()
    assert rows(answer) == rows(oracle.answer(query))
    keys = list(zip(*(answer.column(name).to_pylist() for name in key), strict=True))
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
@pytest.mark.parametrize(("query", "by"), [("q7", NATIVE), ("q7", OURS), ("q19", NATIVE), ("q19", OURS)])
def test_equal_prices_are_ranked_as_duckdb_ranks_them(query: str, by: dict[str, Query], spark: SparkSession) -> None:
    """All of the highest; of ten, the earlier ones. Three prices are left, so that there are many of each."""
    bids = Nexmark(SEED, PERIOD_US, EVENING).tables(np.arange(EVENTS))["bids"]
    few = bids.set_column(2, "price", pa.array(np.asarray(bids["price"]) % 3))
    with Oracle(Nexmark().tables(np.arange(0)) | {"bids": few}) as oracle:
        wanted = rows(oracle.answer(query))
    assert rows(by[query].function(spark.createDataFrame(few)).toArrow()) == wanted


@pytest.mark.slow
def test_the_side_table_is_the_oracles(spark: SparkSession, oracle: Oracle) -> None:
    assert rows(side_input(spark).toArrow()) == rows(oracle.table("side_input"))


@pytest.mark.slow
@pytest.mark.parametrize("by", [NATIVE, OURS], ids=["native", "ours"])
def test_a_session_ends_when_its_gap_has_passed(spark: SparkSession, by: dict[str, Query]) -> None:
    """At the very microsecond too: all sides agree on what exactly ten seconds of silence are."""
    noon = datetime(2025, 1, 1, 12, tzinfo=UTC)
    at = [noon + timedelta(seconds=seconds) for seconds in (0, 10, 20.000001, 40)]
    numbers = np.full(len(at), 4, np.int64)
    bids = Nexmark().bids(numbers).set_column(5, "dateTime", pa.array(at, pa.timestamp("us", "UTC")))
    empty = Nexmark().tables(numbers[:0])
    with Oracle(empty | {"bids": bids}) as oracle:
        wanted = rows(oracle.answer("q11"))
    assert rows(by["q11"].function(spark.createDataFrame(bids)).toArrow()) == wanted


def in_any_order(seed: int) -> dict[str, pa.Table]:
    """Few persons and auctions, and times that say nothing about who refers to whom: sellers come after their auctions, bids before them,
    or at the very same time."""
    random = np.random.default_rng(seed)
    count, persons, auctions = 400, np.arange(40), np.arange(90)
    tables = Nexmark(seed, PERIOD_US, EVENING).tables(np.arange(EVENTS))

    def times(rows: int) -> pa.Array:
        at = EVENING + random.integers(0, 60, rows) * 1_000_000 + random.choice([0, 0, 999_999], rows)
        return pa.array(at).cast(pa.timestamp("us", "UTC"))

    def with_columns(table: pa.Table, **columns: object) -> pa.Table:
        for name, values in columns.items():
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        return table

    came = with_columns(tables["persons"].slice(0, len(persons)), id=persons, dateTime=times(len(persons)))
    opened, sellers = times(len(auctions)), random.choice(persons, len(auctions))
    closes = pa.array(np.asarray(opened.cast(pa.int64())) + random.integers(0, 30, len(auctions)) * 1_000_000)
    offered = with_columns(
        tables["auctions"].slice(0, len(auctions)), id=auctions, seller=sellers, dateTime=opened,
        expires=closes.cast(pa.timestamp("us", "UTC")), category=random.choice([10, 11], len(auctions)),
    )  # fmt: skip
    placed = with_columns(
        tables["bids"].slice(0, count), auction=random.choice(auctions, count), dateTime=times(count),
        price=random.permutation(count) + 1,
    )  # fmt: skip
    return {"persons": came, "auctions": offered, "bids": placed}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("query", ["q3", "q4", "q6", "q8", "q9", "q20"])
def test_a_join_answers_as_duckdb_does_in_whatever_order_things_happen(
    query: str, seed: int, few_partitions: SparkSession
) -> None:
    """What refers to a person or an auction may happen before it. Each answer is the specification's, on any data."""
    tables = in_any_order(seed)
    function, inputs, _, _ = QUERIES[query]
    frames = {name: few_partitions.createDataFrame(table) for name, table in tables.items()}
    with Oracle(tables) as oracle:
        wanted = rows(oracle.answer(query))
    assert len(wanted) > 2
    assert rows(function(*(frames[name] for name in inputs)).toArrow()) == wanted
    if query == "q8":
        twice = {**frames, "persons": frames["persons"].unionAll(frames["persons"])}
        assert rows(function(*(twice[name] for name in inputs)).toArrow()) == wanted
