"""What patterns cost: steps that grow with the rows and no faster, and state that returns to nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headwater.model.clock import NO_TIME
from headwater.processing.operators.operator import MAX_TIME, Time
from headwater.processing.patterns.automaton import automaton_of
from headwater.processing.patterns.grammar import parse_pattern
from headwater.processing.patterns.matcher import find_matches
from headwater.processing.patterns.outcome import Matches, Rule, SearchRows
from headwater.processing.spark.hashing import hashes_of_values
from headwater.processing.state.sorted_runs import H1, H2
from headwater.processing.state.state import StateStore
from tests.rigs.processing.operator_runs import UTC_US
from tests.rigs.processing.pattern_runs import Pattern

SCHEMA = pa.schema([("k", pa.int64()), ("x", pa.int64()), ("at", UTC_US)])
HARD = [f"{'a? ' * 30} b", "(a+)+ b", "a+ b+", "a*", "(a | a a)* b", "a a* b | a", "((a*)* | b)* c"]


def searched(pattern: str, count: int, *, is_over: bool, within_us: int | None = None) -> Matches:
    """The search in equal rows of one key: all are an `a` and a `d`, none is a `b` or a `c`, unless the pattern has `a+ b+`."""
    automaton = automaton_of(parse_pattern(f"ORDER BY at PATTERN ({pattern})").pattern)
    holds = np.array([[name == "a" or pattern == "a+ b+" for name in automaton.variables]] * count)
    key = np.array([0, count])
    rows = SearchRows(holds, np.arange(count), key, key[:-1], np.ones(1, bool), count, is_over)
    return find_matches(automaton, Rule(within_us, 10 * count), rows)


@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("within_us", [None, 500])
@pytest.mark.parametrize("pattern", HARD)
@pytest.mark.parametrize(
    "count", [1000, 4000, pytest.param(1_000_000, marks=[pytest.mark.bench, pytest.mark.timeout(900)])]
)
def test_steps_are_linear_in_the_rows(pattern: str, count: int, within_us: int | None, is_over: bool) -> None:
    """Patterns that make others try every way: each row is looked at a few times."""
    found = searched(pattern, count, is_over=is_over, within_us=within_us)
    assert found.steps <= 4 * count
    if not is_over and within_us is None and pattern in ("a*", "a+ b+"):
        assert found.open.tolist() == [0] and not len(found.start), "the end of a silent key is open"


@pytest.mark.covers("Apama")
@pytest.mark.slow
def test_state_returns_to_nothing(tmp_path: Path) -> None:
    """A hundred thousand keys with open matches come and go: rows, timers and files are as few as before."""
    text = "PARTITION BY k ORDER BY at PATTERN (a b{3} c) WITHIN '5 seconds' DEFINE a AS x = 0, b AS x = 1, c AS x = 2"
    operator, before, keys = Pattern(text, SCHEMA).operator, NO_TIME, 100_000
    sizes = list[tuple[int, int]]()
    for epoch in range(8):
        second, is_quiet = epoch * 10, epoch % 2 == 1
        count = 0 if is_quiet else keys
        at = pa.array(np.full(count, second * 1_000_000), pa.int64()).cast(UTC_US)
        rows = pa.table({"k": np.arange(count), "x": np.zeros(count, np.int64), "at": at}).cast(SCHEMA)
        hashed = zip((H1, H2), hashes_of_values(rows.column("k")), strict=True)
        for name, each in hashed:
            rows = rows.append_column(name, pa.array(each))
        store = StateStore(
            str(tmp_path), uid="op", query="q", fingerprint="f", partition=0, partitions=1, specs=operator.tables
        )  # fmt: skip
        state, until = store.load(epoch - 1), second * 1_000_000
        assert not operator.process(state, [rows], Time(before, until)).num_rows
        kept = [state[name].rows().num_rows for name in ("waiting", "open", "timers")]
        assert kept == ([0, 0, 0] if is_quiet else [0, keys, keys])
        store.save(state, epoch)
        before = until
        if is_quiet:
            sizes.append((epoch, sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())))
    assert sizes[-1][1] <= sizes[0][1] * 1.1, sizes


def test_a_match_has_at_most_so_many_rows() -> None:
    """A start that has no match by then is given up, counted, and the search continues after it."""
    automaton = automaton_of(parse_pattern("ORDER BY at PATTERN (a+ b)").pattern)
    count = 50
    holds = np.array([[(name == "b") == (row == count - 1) for name in automaton.variables] for row in range(count)])
    rows = SearchRows(holds, np.arange(count), np.array([0, count]), np.array([0]), np.ones(1, bool), MAX_TIME, True)
    found = find_matches(automaton, Rule(rows_max=10), rows)
    assert found.start.tolist() == [40] and found.end.tolist() == [50]
    assert found.given_up.tolist() == list(range(40)) and found.given_up_at.tolist() == list(range(9, 49))


def test_starts_that_are_given_up_are_counted(tmp_path: Path) -> None:
    """`headwater state list` shows the table; each start counts once, however batches are cut and whether it was tried or not."""
    for number, condition in enumerate(("x = 0", "x = FIRST(x)")):
        text = f"PARTITION BY k ORDER BY at PATTERN (a+ b) DEFINE a AS {condition}, b AS x = 1"
        operator, before = Pattern(text, SCHEMA, rows_max=10).operator, NO_TIME
        for epoch in range(5):
            at = pa.array(np.arange(epoch * 6, epoch * 6 + 6), pa.int64()).cast(UTC_US)
            rows = pa.table({"k": np.ones(6, np.int64), "x": np.zeros(6, np.int64), "at": at}).cast(SCHEMA)
            for name, each in zip((H1, H2), hashes_of_values(rows.column("k")), strict=True):
                rows = rows.append_column(name, pa.array(each))
            store = StateStore(
                str(tmp_path / str(number)), uid="op", query="q", fingerprint="f", partition=0, partitions=1,
                specs=operator.tables,
            )  # fmt: skip
            state = store.load(epoch - 1)
            operator.process(state, [rows], Time(before, epoch * 6 + 5))
            store.save(state, epoch)
            before = epoch * 6 + 5
        [found] = state["given_up"].rows().to_pylist()
        assert (found["count"], found["last"]) == (21, 29)
        assert len(state["open"].rows().to_pylist()[0]["l0"]) == 9
