"""An expression: Spark SQL over the columns of one row, compiled once and computed for many rows with Arrow.

    expression = compile_expression("round(price * quantity, 2)", schema)
    expression.type                                        # pyarrow's decimal128(…): what Spark would give
    expression.evaluate({"price": …, "quantity": …}, count)

Types, nulls and errors are those of Spark with `spark.sql.ansi.enabled=true` and the session time zone UTC, which are Headwater's settings.
`docs/expressions.md` lists what the language has. What it does not have is refused when it is compiled, with its name.

Thread-safety: an `Expression` is immutable. It is pickled as its text and its schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from sqlglot import expressions as sql

from headwater.model.errors import InvalidInput
from headwater.processing.expressions.compiler import compile_term
from headwater.processing.expressions.parser import parse, shown, sql_of
from headwater.processing.expressions.term import RowFailure, Rows, Term, arrayed, constant, truths
from headwater.processing.expressions.type_rules import BOOLEAN


class Expression:
    """A compiled expression: `sql` is its Spark SQL text, `type` what it gives, `columns` what it reads, in the order of the text."""

    def __init__(self, text: str, schema: pa.Schema, term: Term, rebuilt_by: Callable[..., Expression]) -> None:
        self.sql = text
        self.type = term.type
        self.columns = term.columns
        self.may_fail = term.may_fail
        self._schema = schema
        self._term = term
        self._rebuilt_by = rebuilt_by

    def evaluate(self, columns: Mapping[str, pa.Array | pa.ChunkedArray], count: int) -> pa.Array:
        """One value for each of `count` rows; `InvalidInput` where Spark would fail, as at a division by zero."""
        rows = Rows({name: _whole(columns[name], self._schema.field(name).type) for name in self.columns}, count)
        try:
            return arrayed(self._term.run(rows, None), count)
        except RowFailure as failure:
            raise InvalidInput(
                f"The expression {shown(self.sql)} fails in row {failure.row}: {failure.what}.",
                advice="Use try_cast, try_divide or CASE for rows that have no answer.",
            ) from None

    def mask(self, columns: Mapping[str, pa.Array | pa.ChunkedArray], count: int) -> np.ndarray:
        """For each row whether a condition is true: null counts as false."""
        return truths(self.evaluate(columns, count))

    def try_evaluate(self, columns: Mapping[str, pa.Array | pa.ChunkedArray], count: int) -> pa.Array:
        """The same with null for the rows that Spark would fail for."""
        try:
            return self.evaluate(columns, count)
        except InvalidInput:
            if count < 2:
                return pa.nulls(count, self.type)
        middle = count // 2
        first = self.try_evaluate({name: column[:middle] for name, column in columns.items()}, middle)
        rest = self.try_evaluate({name: column[middle:] for name, column in columns.items()}, count - middle)
        return pa.concat_arrays([first, rest])

    def try_mask(self, columns: Mapping[str, pa.Array | pa.ChunkedArray], count: int) -> np.ndarray:
        """For each row whether a condition is true: null and failures count as false."""
        return truths(self.try_evaluate(columns, count))

    def __reduce__(self) -> tuple[Any, ...]:
        return self._rebuilt_by, (self.sql, self._schema)

    def __repr__(self) -> str:
        return f"Expression({self.sql!r}, {self.type})"


def compile_expression(text_or_node: str | sql.Expression, schema: pa.Schema) -> Expression:
    """Compiles an expression over these columns.

    `Unsupported` names a function, an operator or a type that the language does not have; `InvalidInput` says what else is wrong. A sqlglot
    tree is taken as the Spark SQL text that it stands for. Column names are found as Spark finds them, without regard to case.
    """
    text = sql_of(text_or_node)
    return Expression(text, schema, compile_term(parse(text), schema, text), compile_expression)


def compile_condition(text_or_node: str | sql.Expression, schema: pa.Schema) -> Expression:
    """Compiles an expression that is a condition: its type has to be BOOLEAN."""
    text = sql_of(text_or_node)
    term = compile_term(parse(text), schema, text)
    if pa.types.is_null(term.type):
        term = constant(None, BOOLEAN)
    if term.type != BOOLEAN:
        raise InvalidInput(
            f"The expression {shown(text)} is not a condition: it gives {term.type}, not true or false.",
            advice='Compare it with a value, as in "amount > 10".',
        )
    return Expression(text, schema, term, compile_condition)


def _whole(column: pa.Array | pa.ChunkedArray, type_: pa.DataType) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array if array.type == type_ else array.cast(type_)
