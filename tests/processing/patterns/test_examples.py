"""The worked examples that other systems document their row patterns with, in our own words and numbers."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from headwater.model.clock import NO_TIME
from headwater.processing.operators.operator import MAX_TIME, Time
from headwater.processing.state.state import State, StateTable
from tests.rigs.processing.operator_runs import UTC_US, table_of
from tests.rigs.processing.pattern_runs import Pattern

SCHEMA = pa.schema([("symbol", pa.string()), ("price", pa.int64()), ("at", UTC_US)])
PRICES = [7, 9, 8, 5, 6, 9, 4, 3, 8, 2]
FALLS_AND_RISES = "DEFINE down AS price < PREV(price), up AS price > PREV(price)"


def found(text: str) -> list[tuple[Any, ...]]:
    """The measures of all matches in the prices, one a second."""
    pattern = Pattern(f"PARTITION BY symbol ORDER BY at {text}", SCHEMA)
    rows = [{"symbol": "s", "price": price, "at": 1_000_000 * second} for second, price in enumerate(PRICES)]
    state = State({name: StateTable(spec) for name, spec in pattern.operator.tables.items()})
    table = table_of(rows, SCHEMA, "at", ["symbol"])
    given = pattern.operator.process(state, [table], Time(NO_TIME, MAX_TIME)).to_pylist()
    names = list(pattern.formulas.measures)
    return [tuple(row[name] for name in names) for row in pattern.measured(given)]


@pytest.mark.covers("Flink")
def test_flink_a_price_that_falls_and_rises_again() -> None:
    """Conditions on the row before of the same variable and on another variable; the search continues at the last row."""
    text = """MEASURES s.price AS top, LAST(d.price) AS bottom, u.price AS after AFTER MATCH SKIP TO LAST u
        PATTERN (s d+ u) DEFINE
        d AS (LAST(d.price, 1) IS NULL AND d.price < s.price) OR d.price < LAST(d.price, 1), u AS u.price > LAST(d.price)"""
    assert found(text) == [(9, 5, 6), (9, 3, 8)]


@pytest.mark.covers("Flink")
def test_flink_the_longest_run_whose_average_stays_low() -> None:
    """An aggregate over the rows so far, and the row that ends the run."""
    text = "MEASURES AVG(a.price) AS m, b.price AS p PATTERN (a+ b) DEFINE a AS AVG(a.price) < 8"
    assert found(text) == [(7.0, 9), (35 / 6, 2)]


def test_flink_a_reluctant_quantifier_stops_early() -> None:
    """`b*` takes rows that `c` could take, `b*?` does not."""
    define = "DEFINE a AS price > 8, b AS price < 9, c AS price > 3"
    assert found(f"MEASURES COUNT(*) AS n PATTERN (a b* c) {define}") == [(5,)]
    assert found(f"MEASURES COUNT(*) AS n PATTERN (a b*? c) {define}") == [(2,), (2,)]


def test_trino_a_bottom_and_a_recovery_in_two_phases() -> None:
    """A subset of variables, and a condition on the first row."""
    text = """MEASURES a.price AS start, LAST(b.price) AS bottom, LAST(u.price) AS top PATTERN (a b+ c+ d+) SUBSET u = (c, d)
        DEFINE b AS price < PREV(price), c AS price > PREV(price) AND price <= a.price, d AS price > PREV(price)"""
    assert found(text) == [(9, 5, 9)]


def test_oracle_every_row_of_v_shapes() -> None:
    """ALL ROWS PER MATCH, with running and final values; a row is in two matches where one begins at the end of another."""
    text = f"""MEASURES MATCH_NUMBER() AS m, CLASSIFIER() AS c, FINAL LAST(up.price) AS last, COUNT(down.price) AS n
        ALL ROWS PER MATCH AFTER MATCH SKIP TO LAST up PATTERN (strt down+ up+) {FALLS_AND_RISES}"""
    first = [("strt", 0), ("down", 1), ("down", 2), ("up", 2), ("up", 2)]
    second = [("strt", 0), ("down", 1), ("down", 2), ("up", 2)]
    assert found(text) == [*((1, c, 9, n) for c, n in first), *((2, c, 8, n) for c, n in second)]


def test_snowflake_a_w_shape_without_its_middle() -> None:
    """Exclusion: rows that are matched and not given."""
    text = f"MEASURES price AS p ALL ROWS PER MATCH PATTERN (down+ {{- up+ down+ -}} up+) {FALLS_AND_RISES}"
    assert found(text) == [(8,), (5,), (8,)]
    whole = f"MEASURES COUNT(*) AS n, FIRST(price) AS p PATTERN (down+ up+ down+ up+) {FALLS_AND_RISES}"
    assert found(whole) == [(7, 8)]
