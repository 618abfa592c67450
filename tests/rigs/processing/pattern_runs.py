"""Patterns without a Spark: the operator of a text, and what its terms give when measures are computed from them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from headwater.processing.expressions.expression import compile_expression
from headwater.processing.patterns.grammar import parse_pattern
from headwater.processing.patterns.operator import Detect
from headwater.processing.patterns.plan import Formulas, formulas_of, plan_of, spark_parts


class Pattern:
    """A pattern whose formulas the expression language can compute all."""

    def __init__(self, text: str, schema: pa.Schema, *, rows_max: int = 100_000, timeouts: bool = False) -> None:
        parsed = parse_pattern(text)
        self.formulas: Formulas = formulas_of(parsed, schema.names)
        assert not spark_parts(parsed, self.formulas, schema)
        self.operator = Detect(schema, plan_of(parsed, self.formulas, schema, {}, rows_max=rows_max, timeouts=timeouts))

    def measured(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The operator's rows with measures in place of terms."""
        table = pa.Table.from_pylist(rows, self.operator.schema)
        terms = set(self.formulas.terms)
        columns = {name: table.column(name) for name in table.column_names if name not in terms}
        for name, formula in self.formulas.measures.items():
            expression = compile_expression(formula.sql, table.schema)
            columns[name] = expression.evaluate({each: table.column(each) for each in expression.columns}, len(table))
        return pa.table(columns).to_pylist()
