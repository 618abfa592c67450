"""The figures of row patterns: the peers find as many matches as loops that are written for each pattern alone."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from bench.patterns import oracle, queries
from bench.patterns.bids import CLOSERS, PERIOD_US, Bids
from bench.patterns.esper_side import EsperSide
from bench.patterns.flink_side import FlinkSide
from bench.patterns.queries import AVERAGE, LARGE, MANY, RISING, WITHIN_MS, Rule, small_large

COUNT = 20_000
KEYS = ("auction", "bidder")


@pytest.fixture(scope="module")
def bids(tmp_path_factory: pytest.TempPathFactory) -> Bids:
    return Bids(tmp_path_factory.mktemp("bids"), COUNT)


@pytest.fixture(scope="module")
def flink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlinkSide]:
    with FlinkSide(tmp_path_factory.mktemp("flink")) as flink:
        yield flink


@pytest.fixture(scope="module")
def esper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EsperSide]:
    with EsperSide(tmp_path_factory.mktemp("esper")) as esper:
        yield esper


def test_a_rise_needs_its_fall() -> None:
    """A fall ends a match and is used up; equal prices end a rise without a match."""
    times = list(range(8))
    assert oracle.rising([1, 5, 3, 4, 2], times) == 1
    assert oracle.rising([1, 5, 3, 4, 6, 2], times) == 2
    assert oracle.rising([1, 5, 5, 2], times) == 0
    assert oracle.rising([1, 2, 3, 4], times) == 0


def test_an_average_counts_from_the_first_row_that_gives_a_match() -> None:
    """The first small price is too large for the average; without it there is a match. After ten minutes there is none."""
    prices = [MANY - 1, 100, 100, MANY]
    assert oracle.average(prices, [0, 1, 2, 3]) == 1
    assert oracle.average(prices[:1] + prices[3:], [0, 1]) == 0
    assert oracle.average(prices, [0, 1, 2, 2 + WITHIN_MS]) == 0


def test_small_prices_and_the_large_one_are_of_one_key() -> None:
    rows = {"auction": [1, 1, 1, 2, 1, 2], "price": [1, 2, 3, LARGE, LARGE, 1], "dateTime": [0, 1, 2, 3, 4, 5]}
    bids = pa.table({name: pa.array(values) for name, values in rows.items()})
    bids = bids.set_column(2, "dateTime", bids.column("dateTime").cast(pa.timestamp("us", "UTC")))
    assert oracle.small_large(bids, "auction") == 1
    assert oracle.small_large(bids, "auction", times=4) == 0
    assert oracle.rules(bids, "auction", [Rule(10, LARGE, 2), Rule(10, LARGE, 3), Rule(2, LARGE, 2)]) == 2


def test_rules_are_different() -> None:
    assert len(set(queries.rules())) == queries.RULES


def test_ten_minutes_end_some_matches(bids: Bids, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the figures would say nothing of WITHIN; and no two bids lie exactly ten minutes apart, where the peers differ."""
    assert WITHIN_MS * 1_000 % PERIOD_US
    table = bids.table
    found = oracle.small_large(table, "bidder")
    monkeypatch.setattr(oracle, "WITHIN_MS", 1 << 60)
    assert 0 < found < oracle.small_large(table, "bidder")


def test_a_closing_bid_is_the_only_one_of_its_keys(bids: Bids) -> None:
    table = bids.table
    assert len(table) == len(bids) == COUNT + CLOSERS
    times = table.column("dateTime").cast(pa.int64()).to_numpy()
    assert times[COUNT:].min() - times[:COUNT].max() > 3_000_000_000
    for key in KEYS:
        column = table.column(key).to_numpy()
        assert len(set(column[COUNT:])) == CLOSERS
        assert not set(column[COUNT:]) & set(column[:COUNT])


@pytest.mark.bench
@pytest.mark.parametrize("key", KEYS)
def test_flink_finds_what_the_loops_find(key: str, bids: Bids, flink: FlinkSide) -> None:
    table = bids.table
    assert flink.matches(RISING.sql(key), bids) == oracle.counted(table, key, oracle.rising)
    assert flink.matches(small_large().sql(key), bids) == oracle.small_large(table, key)
    assert flink.matches(AVERAGE.sql(key), bids) == oracle.counted(table, key, oracle.average)


@pytest.mark.bench
@pytest.mark.parametrize("key", KEYS)
def test_esper_finds_what_the_loops_find(key: str, bids: Bids, esper: EsperSide) -> None:
    table = bids.table
    assert esper.run([RISING.statement(key)], bids)[1] == oracle.counted(table, key, oracle.rising)
    assert esper.run([small_large().statement(key)], bids)[1] == oracle.small_large(table, key)


@pytest.mark.bench
def test_esper_finds_what_the_rules_find(bids: Bids, esper: EsperSide) -> None:
    rules = queries.rules()[::50]
    statements = [rule.query.statement("auction") for rule in rules]
    assert esper.run(statements, bids)[1] == oracle.rules(bids.table, "auction", rules)
