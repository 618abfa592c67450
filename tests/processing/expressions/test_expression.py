"""An expression: its type, its columns, what it gives for rows, and what it refuses. The comparison with Spark has a module of its own."""

from __future__ import annotations

import pickle
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pytest
import sqlglot
from sqlglot import expressions as sql

from headwater.model.errors import InvalidInput, Unsupported
from headwater.processing.expressions.expression import Expression, compile_condition, compile_expression
from headwater.processing.expressions.row_parts import own_row_parts
from tests.rigs.processing.expression_texts import SCHEMA as ROWS_SCHEMA
from tests.rigs.processing.expression_texts import each_template, random_rows

SCHEMA = pa.schema(
    {
        "a": pa.int32(),
        "b": pa.int64(),
        "d": pa.float64(),
        "t": pa.string(),
        "dec": pa.decimal128(10, 2),
        "day": pa.date32(),
    }
)
COLUMNS = {
    "a": pa.array([1, None, 3, -2], pa.int32()),
    "b": pa.array([0, 1, 2, 2**40]),
    "d": pa.array([1.5, float("nan"), None, -0.0]),
    "t": pa.array(["Hello", "straße", None, " 12 "]),
    "dec": pa.array([Decimal("1.25"), None, Decimal("-3.10"), Decimal("99999999.99")], pa.decimal128(10, 2)),
    "day": pa.array([18292, None, -1, 19782], pa.date32()),
}


def given(text: str) -> list[Any]:
    return compile_expression(text, SCHEMA).evaluate(COLUMNS, 4).to_pylist()


@pytest.mark.parametrize(
    ("text", "type_", "values"),
    [
        ("a + b", pa.int64(), [1, None, 5, 2**40 - 2]),
        ("d > 1", pa.bool_(), [True, True, None, False]),
        ("d = d", pa.bool_(), [True, True, None, True]),
        ("d IN (1.5, 0)", pa.bool_(), [True, False, None, True]),
        ("upper(t)", pa.string(), ["HELLO", "STRASSE", None, " 12 "]),
        ("t LIKE 'H%o'", pa.bool_(), [True, False, None, False]),
        (
            "dec / 3",
            pa.decimal128(14, 6),
            [Decimal("0.416667"), None, Decimal("-1.033333"), Decimal("33333333.330000")],
        ),
        ("a IN (1, NULL)", pa.bool_(), [True, None, None, None]),
        ("a <=> NULL", pa.bool_(), [False, True, False, False]),
        ("try_cast(t AS INT)", pa.int32(), [None, None, None, 12]),
        ("year(day)", pa.int32(), [2020, None, 1969, 2024]),
        ("7", pa.int32(), [7, 7, 7, 7]),
    ],
)
def test_values_and_types_are_those_of_spark(text: str, type_: pa.DataType, values: list[Any]) -> None:
    """A few that one can check by reading."""
    expression = compile_expression(text, SCHEMA)
    found = expression.evaluate(COLUMNS, 4)
    assert (expression.type, found.type, found.to_pylist()) == (type_, type_, values)


def test_a_row_that_does_not_need_a_value_does_not_fail_for_it() -> None:
    """Spark skips what a row does not need: the right side of AND, a branch of CASE, the rest of COALESCE."""
    assert given("b <> 0 AND a / b > 1") == [False, None, True, False]
    assert given("CASE WHEN b <> 0 THEN a DIV b ELSE -1 END") == [-1, None, 1, 0]
    assert given("b = 0 OR a / b > 1") == [True, None, True, False]
    assert given("coalesce(a, 1 DIV (b - 2))") == [1, -1, 3, -2]
    with pytest.raises(InvalidInput, match="row 0: it divides by zero"):
        given("a / b > 1 AND b <> 0")


def test_an_expression_names_its_columns_in_the_order_of_the_text() -> None:
    """Without regard to case, and once each."""
    assert compile_expression("B + a * b", SCHEMA).columns == ("b", "a")
    assert compile_expression("1", SCHEMA).columns == ()


def test_chunks_are_columns_too() -> None:
    """A column of a table has chunks."""
    chunks = pa.chunked_array([COLUMNS["a"][:1], COLUMNS["a"][1:]])
    assert compile_expression("a * 2", SCHEMA).evaluate({"a": chunks}, 4).to_pylist() == [2, None, 6, -4]


def test_a_condition_has_to_be_boolean() -> None:
    """Null counts as false in its mask."""
    assert compile_condition("a > 1", SCHEMA).mask(COLUMNS, 4).tolist() == [False, False, True, False]
    assert compile_condition("NULL", SCHEMA).mask(COLUMNS, 4).tolist() == [False] * 4
    with pytest.raises(InvalidInput, match="not a condition"):
        compile_condition("a + 1", SCHEMA)


def test_an_expression_is_pickled_as_its_text() -> None:
    """So that it travels to Spark's workers."""
    for made in (compile_expression("a + 1", SCHEMA), compile_condition("a > 1", SCHEMA)):
        copy: Expression = pickle.loads(pickle.dumps(made))
        assert copy.evaluate(COLUMNS, 4) == made.evaluate(COLUMNS, 4)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("foo(a)", Unsupported, "the function foo"),
        ("rand() > 0.5", Unsupported, "the function rand"),
        ("sum(a)", Unsupported, "the function sum"),
        ("max(a) OVER () > 1", Unsupported, "the window function max"),
        ("a IN (SELECT 1)", Unsupported, "a query"),
        ("current_timestamp() > day", Unsupported, "the function current_timestamp"),
        ("nothing > 1", InvalidInput, "the column 'nothing' does not exist"),
        ("a +", InvalidInput, "line 1, column 3"),
        ("t = 'x", InvalidInput, "quotes or brackets"),
        ("a; b", InvalidInput, "semicolon"),
        ("", InvalidInput, "empty"),
        ("a = true", InvalidInput, "cannot be operands of ="),
        ("upper(t, t)", InvalidInput, "upper has 1 arguments"),
        ("t LIKE 'a\\\\b'", InvalidInput, "cannot escape"),
        ("NOT " * 2000 + "true", InvalidInput, "deep"),
        ("(" * 2000 + "a" + ")" * 2000, InvalidInput, "deep"),
    ],
)
def test_what_is_not_in_the_language_is_refused_by_name(text: str, error: type[InvalidInput], says: str) -> None:
    """With the text, and what in it is wrong."""
    with pytest.raises(error) as raised:
        compile_expression(text, SCHEMA)
    assert says in str(raised.value) and raised.value.advice


def test_parts_of_one_row_are_as_large_as_they_can_be() -> None:
    """What refers to other rows is left to the operator, with everything in it."""
    tree = sqlglot.parse_one("a > 1 AND LAST(B.price) > a + b AND upper(t) LIKE 'x'", dialect="databricks")

    def is_foreign(node: Any) -> bool:
        return isinstance(node, sql.Last) or (isinstance(node, sql.Column) and bool(node.table))

    assert [part.sql("spark") for part in own_row_parts(tree, is_foreign)] == ["a > 1", "a + b", "UPPER(t) LIKE 'x'"]
    whole = sqlglot.parse_one("a > 1 AND b < 2", dialect="databricks")
    assert own_row_parts(whole, is_foreign) == [whole]


def test_a_part_of_the_rows_gives_what_they_give_among_all() -> None:
    """Slices of columns, single rows and none at all; every function, on rows of every type."""
    random = Random(5)
    rows = random_rows(random, 12)
    for text in each_template(random):
        expression = compile_expression(text, ROWS_SCHEMA)
        try:
            whole = expression.evaluate({name: rows[name] for name in expression.columns}, 12)
        except InvalidInput:
            continue
        for start, end in ((0, 0), (5, 6), (3, 11)):
            part = rows.slice(start, end - start)
            found = expression.evaluate({name: part[name] for name in expression.columns}, end - start)
            assert repr(found.to_pylist()) == repr(whole.slice(start, end - start).to_pylist()), text
