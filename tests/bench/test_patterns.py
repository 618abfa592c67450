"""The figures of row patterns: the peers find as many matches as loops that are written for each pattern alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.patterns import oracle, queries
from bench.patterns.bids import Bids
from bench.patterns.esper_side import EsperSide
from bench.patterns.flink_side import FlinkSide
from bench.patterns.queries import AVERAGE, RISING, small_large

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
