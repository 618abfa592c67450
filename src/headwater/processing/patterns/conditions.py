"""Conditions that do not depend on the match: which rows satisfy which variables, for all rows at once.

Each is computed by the expression language (see `headwater.processing.expressions`) over columns of terms. These are values of the row
itself, or of the row at a fixed distance from it in its partition. Equal conditions are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.processing.expressions.expression import Expression, compile_condition
from headwater.processing.patterns.automaton import ABSENT
from headwater.processing.patterns.formula import Navigation, SplitFormula

Array = Any
"""A NumPy array."""


class RowCondition:
    """One condition; `values` are the columns that hold the values of its terms.

    Conditions with equal `key` are equal over rows with the same columns. With `tries` a row for which a condition fails does not
    satisfy it.
    """

    def __init__(
        self, formula: SplitFormula, values: Mapping[str, str], schema: pa.Schema, *, tries: bool = False
    ) -> None:
        self._shifts, self._tries = dict[str, tuple[str, int]](), tries
        moves = list[tuple[str, str, int]]()
        for name, term in formula.terms.items():
            assert isinstance(term, Navigation) and term.value is not None
            self._shifts[name] = values[term.value], term.shift
            moves.append((name, term.value, term.shift))
        self.key = formula.sql, tuple(moves)
        self.is_of_neighbours = any(shift for _, _, shift in moves)
        fields = [pa.field(name, schema.field(column).type) for name, (column, _) in self._shifts.items()]
        self._expression: Expression = compile_condition(formula.sql, pa.schema(fields))

    def holds(self, rows: pa.Table, low: Array, high: Array) -> Array:
        """Which rows satisfy it; `low` and `high` are for each row the bounds of its partition."""
        columns = {name: _shifted(rows.column(column), by, low, high) for name, (column, by) in self._shifts.items()}
        mask = self._expression.try_mask if self._tries else self._expression.mask
        return mask(columns, rows.num_rows)


def rows_that_hold(
    variables: Sequence[str], conditions: Mapping[str, RowCondition], rows: pa.Table, low: Array, high: Array
) -> Array:
    """For each row and variable whether the row satisfies its condition; a variable without one has all rows."""
    found = np.ones((rows.num_rows, len(variables)), bool)
    computed = dict[int, Array]()
    for number, variable in enumerate(variables):
        condition = conditions.get(variable.removeprefix(ABSENT))
        if condition is not None:
            if id(condition) not in computed:
                computed[id(condition)] = condition.holds(rows, low, high)
            found[:, number] = computed[id(condition)]
        if variable.startswith(ABSENT):
            found[:, number] = ~found[:, number]
    return found


def _shifted(column: pa.ChunkedArray, by: int, low: Array, high: Array) -> Any:
    if by == 0:
        return column
    place = np.arange(len(low)) + by
    is_there = (place >= low) & (place < high)
    return column.take(pa.array(np.where(is_there, place, 0), mask=~is_there))
