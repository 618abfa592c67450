"""`hw.detect` against brute force: all clauses, any cut, any order within the lateness, batches run again, other numbers of partitions."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from headwater.model.errors import InvalidInput
from tests.processing.patterns.random_searches import OF_MATCHES, Clauses, answer, random_clauses
from tests.rigs.processing.operator_runs import UTC_US, cut, in_time, run_batches, shuffled, table_of
from tests.rigs.processing.pattern_runs import Pattern

SECOND = 1_000_000
SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64()), ("x", pa.int64()), ("at", UTC_US)])
SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 300))]
BENCH = [pytest.param(seed, marks=pytest.mark.bench) for seed in range(300, 2400)]


def random_rows(random: Random) -> list[dict[str, Any]]:
    at, rows = 0, []
    for number in range(random.choice([5, 20, 40])):
        at += random.choice([0, 1, 1, 2, 4]) * SECOND
        x = random.choice([None, *range(7), *range(7)])
        rows.append({"k": random.choice("pqr"), "n": number, "x": x, "at": at})
    return rows


def by_key(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {key: sorted((r for r in rows if r["k"] == key), key=lambda r: (r["at"], r["n"])) for key in "pqr"}


@pytest.mark.parametrize("seed", [*SEEDS, *BENCH])
def test_results_are_those_of_brute_force(tmp_path: Path, seed: int) -> None:
    """Whatever the pattern and however rows come, the result is that of the standard over all rows in time."""
    random = Random(seed)
    check(tmp_path, random, random_clauses(random, anchors=random.random() < 0.2))


@pytest.mark.parametrize("seed", [*SEEDS, *BENCH])
def test_conditions_can_depend_on_the_match(tmp_path: Path, seed: int) -> None:
    """The same with conditions on other variables, on earlier rows of the match and on running aggregates."""
    random = Random(seed)
    check(tmp_path, random, random_clauses(random, OF_MATCHES, anchors=random.random() < 0.2))


def check(tmp_path: Path, random: Random, clauses: Clauses) -> None:
    """The operator gives what brute force gives."""
    try:
        pattern = Pattern(clauses.text, SCHEMA)
    except InvalidInput as error:
        if "never matches a row" in error.what:
            return
        raise
    lateness = random.choice([0, 5]) * SECOND
    rows = shuffled(random, random_rows(random), at="at", lateness_us=lateness, late=random.choice([0.0, 0.1]))
    batches, watermarks = cut(random, rows, SCHEMA, ["k"], at="at", lateness_us=lateness)
    given = pattern.measured(run_batches(pattern.operator, random, tmp_path, batches, watermarks))
    kept = by_key(in_time(rows, batches, watermarks, at="at"))
    wanted = [(key, *found) for key, each in kept.items() for found in answer(clauses, each)]
    names = ["k", *(["n"] if clauses.all_rows else []), *(f"m{number}" for number in range(len(clauses.measures)))]
    found = [tuple(row[name] for name in names) for row in given]
    assert sorted(found, key=repr) == sorted(wanted, key=repr), clauses.text


def test_the_row_before_another_variable_is_kept(tmp_path: Path) -> None:
    """PREV of a variable that can be the first row of a match needs the row before the match, however rows are cut."""
    text = "PARTITION BY k ORDER BY at, n MEASURES b.n AS m PATTERN (b d) DEFINE b AS x = 5, d AS PREV(LAST(b.x)) = 1"
    pattern = Pattern(text, SCHEMA)
    rows = [{"k": "p", "n": n, "x": x, "at": n * SECOND} for n, x in enumerate([1, 5, 2])]
    batches = [[table_of([row], SCHEMA, "at", ["k"])] for row in rows]
    given = run_batches(pattern.operator, Random(1), tmp_path, batches, [n * SECOND for n in range(3)])
    assert [row["m"] for row in pattern.measured(given)] == [1]
