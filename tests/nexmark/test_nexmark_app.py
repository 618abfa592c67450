"""Nexmark's 23 queries as one application on Spark, over shuffled and late events, killed on the way: each answers as DuckDB does."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater as hw
from examples.nexmark.ours import OURS, QUERIES
from headwater.app.app import load_app
from headwater.model.errors import InvalidApp
from tests.rigs.app.nexmark_app import EVENING, PERIOD_US, House, script
from tests.rigs.app.nexmark_oracle import COUNTS_LATE, SQL, Oracle, rows

KILLED = ("q3", "q4", "q5", "q7", "q8", "q11", "q15", "q18", "q20")
"""Spark's join of streams; lookup, the best rows, and totals of a table that changes; windows, the best of each, and sessions; a lookup
whose events wait for the end of a window; distinct counts; the last of each key; an
operator of the example's own."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def check(house: House) -> None:
    """Every answer, by name and in order of the columns; late events were there, and those who do not count them were told."""
    with Oracle.of_log(house.log) as oracle:
        assert oracle.late_count("bids") > 10
        for query in house.queries:
            wanted = oracle.answer(query, with_late=query in COUNTS_LATE)
            assert wanted.num_rows
            assert rows(house.answer(query)) == rows(wanted), query


def assert_delayed_are_late(house: House) -> None:
    """Whoever is delayed is late by its partition: no other answer is right, however far a reader had come."""
    delayed = np.flatnonzero(house.arrival.is_delayed(np.arange(house.arrival.last)))
    with Oracle.of_log(house.log) as oracle:
        late = [
            table.filter(table["_late"]) for table in map(oracle.table, ("all_persons", "all_auctions", "all_bids"))
        ]
    times = np.concatenate([np.asarray(table["dateTime"].cast(pa.int64())) for table in late])
    assert sorted((times - EVENING) // PERIOD_US) == list(delayed)


def run_with_kills(folder: Path, queries: tuple[str, ...], *, events: int, seed: int) -> None:
    random = Random(seed)
    house = House(folder, queries, events=events, seed=seed)
    try:
        house.kill_on_the_way(random)
        house.kill_on_the_way(random)
        house.finish()
        assert_delayed_are_late(house)
        check(house)
    finally:
        house.log.close()


def test_killed_twice_the_answers_are_duckdbs(tmp_path: Path) -> None:
    """All at once, each in the middle of what it did."""
    run_with_kills(tmp_path, KILLED, events=2_500, seed=18)


@pytest.mark.bench
def test_all_killed_twice_the_answers_are_duckdbs(tmp_path: Path) -> None:
    """All 23 in one Spark session."""
    run_with_kills(tmp_path, tuple(SQL), events=5_000, seed=13)


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("NEXMARK_LOG", str(tmp_path / "log"))
    monkeypatch.delenv("NEXMARK_QUERIES", raising=False)
    return monkeypatch


def test_all_queries_are_streams(chosen: pytest.MonkeyPatch, spark: SparkSession) -> None:
    """Spark accepts each of them in its mode, and the plan names who keeps what."""
    app = load_app(script())
    app._given_spark = spark
    plan = app.plan()
    assert set(QUERIES) == set(SQL)
    for name, query in QUERIES.items():
        label = rf"{name} → view" if query.key else rf"{query.function.__name__} → topic {name}\b"
        assert re.search(label, plan), plan
    assert "reads bids: bidder, dateTime, _appended" in plan
    for operators in (
        "lookup-1, signed-1, top_n-1, totals-1",
        "lookup-1, signed-1, signed-2, top_n-1, top_n-2, totals-1",
    ):
        assert f"keeps state ({operators})" in plan


def test_a_query_that_is_none_is_refused(chosen: pytest.MonkeyPatch) -> None:
    chosen.setenv("NEXMARK_QUERIES", "q1,q99")
    with pytest.raises(InvalidApp, match="q99"):
        load_app(script())


def test_columns_of_the_log_that_are_none_are_refused(tmp_path: Path, spark: SparkSession) -> None:
    app = hw.App("shop", log=tmp_path / "log", spark=spark)
    orders = app.topic("orders", schema="id STRING", key="id")

    @app.stream(orders, log_columns=["_sent"])
    def copies(orders: DataFrame) -> DataFrame:
        return orders

    with pytest.raises(InvalidApp, match="not a column of the log"):
        app.plan()


def test_ours_are_not_natives() -> None:
    assert set(OURS) == {f"q{number}" for number in (4, 5, 6, 7, 8, 9, 11, 15, 16, 18, 19, 20)}
