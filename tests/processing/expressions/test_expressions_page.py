"""The page docs/expressions.md names what the language has: no more, and no less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headwater.model.ddl import parse_ddl, type_to_ddl
from headwater.processing.expressions.expression import compile_expression
from headwater.processing.expressions.function_table import FUNCTIONS

PAGE = (Path(__file__).parents[3] / "docs" / "expressions.md").read_text()
SCHEMA = parse_ddl("a INT, b BIGINT, d DOUBLE, m DECIMAL(10, 2), t STRING, day DATE, at TIMESTAMP")


def rows_of(heading: str) -> list[list[str]]:
    """The rows of the table below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.parametrize(("example", "type_"), [row[1:] for row in rows_of("Operators")])
def test_examples_have_the_type_that_the_page_says(example: str, type_: str) -> None:
    """Each example compiles."""
    expression = compile_expression(example.strip("`").replace("\\|", "|"), SCHEMA)
    assert type_to_ddl(expression.type) == type_


def test_the_page_names_every_function() -> None:
    """And none that does not exist."""
    named = [name for _, cell in rows_of("Functions") for name in re.findall(r"`(\w+)`", cell)]
    assert len(named) == len(set(named))
    assert set(named) == set(FUNCTIONS)
