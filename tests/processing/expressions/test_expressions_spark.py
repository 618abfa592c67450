"""Expressions against Spark: the same type, the same value in every row, and a failure in exactly the rows in which Spark fails.

Many expressions are sent to Spark as one select. A row for which we fail is kept from Spark by CASE, so that Spark fails where we have
missed one; that Spark fails there too is tried one by one, for some of them.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pyarrow as pa
import pytest
import sqlglot
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from headwater.model.errors import InvalidInput, Unsupported
from headwater.processing.expressions.expression import Expression, compile_expression
from headwater.processing.expressions.function_table import FUNCTIONS
from headwater.processing.spark.types import to_arrow
from tests.rigs.processing.expression_texts import (
    CHOICES,
    KINDS,
    SCHEMA,
    TEMPLATES,
    each_template,
    random_rows,
    random_text,
)
from tests.rigs.processing.operator_runs import seeds

ROWS = 40
TEXTS = 200
AT_ONCE = 100
FAILURES_MAX = 10


def test_every_function_is_tried() -> None:
    """A function that joins the language joins the templates."""
    texts = [*CHOICES, *(text for of_kind in TEMPLATES.values() for text in of_kind)]
    words = {word.lower() for text in texts for word in re.findall(r"(\w+)\(", text)}
    assert set(FUNCTIONS) <= words


@pytest.mark.parametrize("dialect", ["spark", "databricks"])
def test_a_tree_of_sqlglot_means_what_its_text_means(dialect: str) -> None:
    """Though sqlglot may write other functions for it."""
    random = Random(3)
    rows = random_rows(random, ROWS)
    for text in each_template(random):
        from_text, from_tree = (
            compile_expression(text, SCHEMA),
            compile_expression(sqlglot.parse_one(text, dialect=dialect), SCHEMA),
        )
        assert evaluated(from_text, rows) == evaluated(from_tree, rows), (text, from_tree.sql)


@pytest.mark.slow
def test_our_sessions_are_what_the_language_follows(spark: SparkSession) -> None:
    """ANSI mode is Spark's default, which Headwater keeps; the time zone is ours."""
    assert (spark.conf.get("spark.sql.ansi.enabled"), spark.conf.get("spark.sql.session.timeZone")) == ("true", "UTC")


@pytest.mark.slow
def test_each_template_is_as_spark_has_it(spark: SparkSession) -> None:
    """Once with plain operands."""
    random = Random(1)
    check(spark, each_template(random), random_rows(random, ROWS), random)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", seeds(2))
def test_random_expressions_are_as_spark_has_them(spark: SparkSession, seed: int) -> None:
    """Nested, over random and extreme values of every type."""
    random = Random(seed)
    texts = [random_text(random, random.choice(KINDS), random.choice([1, 2, 3])) for _ in range(TEXTS)]
    check(spark, texts, random_rows(random, ROWS), random)


def check(spark: SparkSession, texts: list[str], rows: pa.Table, random: Random) -> None:
    """Compares expressions over the same rows."""
    events = spark.createDataFrame(rows.append_column("row", pa.array(range(rows.num_rows)))).cache()
    compiled = [expression for text in texts if (expression := compiled_or_refused(events, text)) is not None]
    assert len(compiled) > 0.9 * len(texts)
    failures: list[tuple[Expression, int]] = []
    for first in range(0, len(compiled), AT_ONCE):
        failures += compare(events, compiled[first : first + AT_ONCE], rows)
    for expression, row in random.sample(failures, min(FAILURES_MAX, len(failures))):
        with pytest.raises(PySparkException):
            print(expression.sql, row, events.filter(f"row = {row}").selectExpr(expression.sql).collect())
    events.unpersist()


def compiled_or_refused(events: DataFrame, text: str) -> Expression | None:
    """The expression; None where Spark refuses it as well, as it does where types share nothing."""
    try:
        return compile_expression(text, SCHEMA)
    except Unsupported:
        raise
    except InvalidInput as error:
        try:
            print(events.selectExpr(text).schema)
        except PySparkException:
            return None
        raise AssertionError(f"Spark has {text}") from error


def compare(events: DataFrame, expressions: list[Expression], rows: pa.Table) -> list[tuple[Expression, int]]:
    """Compares types and values; gives the rows in which ours fail."""
    ours = [evaluated(expression, rows) for expression in expressions]
    kept = [f"CASE WHEN row IN ({', '.join(map(str, [-1, *failing]))}) THEN NULL ELSE ({each.sql}) END AS c{number}"
            for number, (each, (_, failing)) in enumerate(zip(expressions, ours, strict=True))]  # fmt: skip
    selected = events.selectExpr("row", *kept)
    types = to_arrow(selected.schema)
    theirs = selected.toArrow().sort_by("row")
    wrong = []
    for number, (expression, (values, _)) in enumerate(zip(expressions, ours, strict=True)):
        name = f"c{number}"
        if types.field(name).type != expression.type:
            wrong.append(f"{expression.sql}: {expression.type}, Spark has {types.field(name).type}")
            continue
        for row, (our, their) in enumerate(zip(values, comparable(theirs[name]), strict=True)):
            if our != their:
                wrong.append(
                    f"{expression.sql}: {our}, Spark has {their} in {rows.slice(row, 1).select(expression.columns).to_pylist()}"
                )
                break
    assert not wrong, "\n".join(wrong)
    return [(expression, row) for expression, (_, failing) in zip(expressions, ours, strict=True) for row in failing]


def evaluated(expression: Expression, rows: pa.Table) -> tuple[list[Any], list[int]]:
    """The values, None where it fails, and the rows in which it fails."""
    left, values = list(range(rows.num_rows)), dict.fromkeys(range(rows.num_rows))
    failing: list[int] = []
    while left:
        part = rows.take(left)
        try:
            found = expression.evaluate({name: part[name] for name in expression.columns}, len(left))
        except InvalidInput as error:
            failing.append(left.pop(int(re.search(r"fails in row (\d+)", error.what)[1])))  # type: ignore[index]
            continue
        assert found.type == expression.type and len(found) == len(left)
        found.validate(full=True)
        values.update(zip(left, comparable(found), strict=True))
        break
    return list(values.values()), failing


def comparable(values: Any) -> list[Any]:
    """Values such that equal ones are the same: moments as integers, NaN as a text, and -0.0 is not 0.0."""
    if pa.types.is_temporal(values.type):
        values = values.cast(pa.int32() if pa.types.is_date32(values.type) else pa.int64())
    return [repr(value) if isinstance(value, float) else value for value in values.to_pylist()]
