"""The `filter` option: Spark's answer where the expression language has the condition, DuckDB's elsewhere."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pyarrow as pa
import pytest

from headwater.processing.source.condition import Filter, parse_condition

SCHEMA = pa.schema(
    {
        "amount": pa.int64(),
        "price": pa.float64(),
        "page": pa.string(),
        "at": pa.timestamp("us", tz="UTC"),
        "tags": pa.list_(pa.string()),
    }
)
COLUMNS = [
    [1, 12, None, 20],
    [0.5, float("nan"), 2.0, None],
    ["/shop/a", None, "/a", "/shop/"],
    [0, 10**6, 2 * 10**6, None],
    [["a"], [], None, ["b"]],
]
ROWS = pa.record_batch(COLUMNS, schema=SCHEMA)


def picked(text: str) -> list[bool]:
    return Filter(parse_condition(text, tuple(SCHEMA))).mask(ROWS).to_pylist()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("amount > 10", [False, True, False, True]),
        ("amount % 10 = 2 AND page IS NULL", [False, True, False, False]),
        ("amount > 11.5", [False, True, False, True]),
        ("price > 1e300", [False, True, False, False]),
        ("page LIKE '/shop/%'", [True, False, False, True]),
        ("at >= '1970-01-01T00:00:01Z'", [False, True, True, False]),
        ("AMOUNT IS NULL", [False, False, True, False]),
        ("true", [True] * 4),
    ],
)
def test_conditions_of_the_language_have_sparks_answer(text: str, rows: list[bool]) -> None:
    """NaN is greater than every number, a null is not picked."""
    assert parse_condition(text, tuple(SCHEMA)).expression is not None
    assert picked(text) == rows


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("len(tags) = 1", [True, False, False, True]),  # a list
        ("regexp_matches(page, 'shop')", [True, False, False, True]),  # a function of DuckDB
        ("10 / (amount - 12) > 1", [False, False, False, True]),  # could fail: a division by zero is null there
    ],
)
def test_other_conditions_are_answered_by_duckdb(text: str, rows: list[bool]) -> None:
    """What the language does not have, and what could fail for a row."""
    assert parse_condition(text, tuple(SCHEMA)).expression is None
    assert picked(text) == rows


def test_a_condition_travels_to_workers() -> None:
    """With what it was compiled to."""
    copy = pickle.loads(pickle.dumps(parse_condition("amount > 10", tuple(SCHEMA))))
    assert Filter(copy).mask(ROWS).to_pylist() == [False, True, False, True]


def test_a_condition_of_the_language_does_not_load_duckdb() -> None:
    """A process of Spark that filters starts without it."""
    script = (
        "import sys, pyarrow as pa; from headwater.processing.source.condition import parse_condition;"
        "parse_condition('a > 1', (pa.field('a', pa.int64()),)); print('duckdb' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "False"
