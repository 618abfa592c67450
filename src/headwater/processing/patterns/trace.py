"""The trace of a search: which rows it has taken so far as which positions, and what conditions see of them.

Searches of different keys share one trace: each writes at its own rows. At each row stand the terms of conditions as they are after
this row: the latest row of a variable, sums, counts. A search that goes back writes over what it had written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.processing.expressions.expression import compile_condition
from headwater.processing.patterns.automaton import ABSENT, Automaton
from headwater.processing.patterns.formula import Fold, Navigation, SplitFormula
from headwater.processing.patterns.measures import fold_of, folded_type

Array = Any
"""A NumPy array."""

Members = frozenset[int] | None
"""Numbers of variables; None are all."""


class MatchCondition:
    """A condition that depends on the match. `values` are the columns that hold the values of its terms.

    With `tries` a row for which it fails does not satisfy it.
    """

    def __init__(
        self, formula: SplitFormula, values: Mapping[str, str], members: Mapping[str, Sequence[int]], schema: pa.Schema,
        *, tries: bool = False,
    ) -> None:  # fmt: skip
        self._tries = tries
        self.terms = {
            name: (term, values.get(getattr(term, "value", None) or ""), self._members(term, members))
            for name, term in formula.terms.items()
        }
        fields = [pa.field(name, _type(term, column, schema)) for name, (term, column, _) in self.terms.items()]
        self.schema = pa.schema(fields)
        self._expression = compile_condition(formula.sql, self.schema)

    @staticmethod
    def _members(term: Any, members: Mapping[str, Sequence[int]]) -> Members:
        return None if term.variable is None else frozenset(members[term.variable])

    def holds(self, trace: Trace, row: Array, start: Array) -> Array:
        """Which searches may take their rows, which are in the trace already."""
        columns = {
            name: trace.column(*term, row, start, kind=self.schema.field(name).type)
            for name, term in self.terms.items()
            if name in self._expression.columns
        }
        mask = self._expression.try_mask if self._tries else self._expression.mask
        return mask(columns, len(row))


def _type(term: Any, column: str | None, schema: pa.Schema) -> pa.DataType:
    if isinstance(term, Fold) and term.kind == "count":
        return pa.int64()
    if column is None:
        return pa.string()
    kind = schema.field(column).type
    return folded_type(term.kind, kind) if isinstance(term, Fold) else kind


class Trace:
    """The trace of all searches over some rows; `low` and `high` are for each row the bounds of its partition."""

    def __init__(
        self, automaton: Automaton, conditions: Sequence[MatchCondition], table: pa.Table, names: Sequence[str],
        low: Array, high: Array,
    ) -> None:  # fmt: skip
        self._table, self._names, self._low, self._high = table, pa.array(names, pa.string()), low, high
        self._variable = np.array(automaton.position, np.int64)
        self._is_present = np.array([not automaton.variables[each].startswith(ABSENT) for each in automaton.position])
        count = table.num_rows
        self.position = np.zeros(count, np.int64)
        terms = [term for condition in conditions for term in condition.terms.values()]
        self._is_in = {each: self._membership(each) for _, _, each in terms}
        self._latest = {each: np.full(count, -1) for each in self._is_in}
        self._first = {each: np.full(count, -1) for each in self._is_in}
        self._count = {each: np.zeros(count, np.int64) for each in self._is_in}
        self._folds = dict[tuple[Fold, str | None, Members], _RunningFold]()
        for term, column, members in terms:
            if isinstance(term, Fold) and _RunningFold.can(term, column, table):
                self._folds[term, column, members] = _RunningFold(
                    term, None if column is None else table.column(column)
                )

    def _membership(self, members: Members) -> Array:
        if members is None:
            return self._is_present
        return np.isin(self._variable, sorted(members))

    def take(self, row: Array, start: Array, position: Array) -> None:
        """Searches that began at `start` take rows as positions."""
        self.position[row] = position
        is_first, before = row == start, np.maximum(row - 1, 0)
        for members, is_in in self._is_in.items():
            mine = is_in[position]
            latest, first, count = self._latest[members], self._first[members], self._count[members]
            latest[row] = np.where(mine, row, np.where(is_first, -1, latest[before]))
            earlier = np.where(is_first, -1, first[before])
            first[row] = np.where(mine & (earlier < 0), row, earlier)
            count[row] = np.where(is_first, 0, count[before]) + mine
        for (_, _, members), fold in self._folds.items():
            fold.take(row, is_first, before, self._is_in[members][position])

    def column(self, term: Any, column: str | None, members: Members, row: Array, start: Array, *, kind: Any) -> Any:
        """A term for some searches, after these rows."""
        if isinstance(term, Fold):
            fold = self._folds.get((term, column, members))
            if fold is not None:
                return fold.result(row, kind)
            return self._folded(term, column, members, row, start, kind)
        place = self._row_of(term, members, row, start)
        if term.value is None:
            variable = self._variable[self.position[np.maximum(place, 0)]]
            return self._names.take(pa.array(variable, mask=place < 0))
        moved = place + term.shift
        is_there = (place >= 0) & (moved >= self._low[row]) & (moved < self._high[row])
        return self._table.column(column).take(pa.array(np.where(is_there, moved, 0), mask=~is_there))

    def _row_of(self, term: Navigation, members: Members, row: Array, start: Array) -> Array:
        """The row that a navigation names, or -1."""
        latest, count = self._latest[members], self._count[members][row]
        if not term.is_last and term.offset == 0:
            return self._first[members][row]
        back = np.full(len(row), term.offset) if term.is_last else count - 1 - term.offset
        place = np.where((back >= 0) & (back < count), latest[row], -1)
        for step in range(int(back.max(initial=0))):
            goes_on = (place >= 0) & (step < back)
            earlier = np.where(place > start, latest[np.maximum(place - 1, 0)], -1)
            place = np.where(goes_on, earlier, place)
        return place

    def _folded(
        self, term: Fold, column: str | None, members: Members, row: Array, start: Array, kind: pa.DataType
    ) -> pa.Array:
        """An aggregate that has no running form: DISTINCT, lists, and sums of decimals. One search after the other."""
        found = list[Any]()
        for first, last in zip(start.tolist(), row.tolist(), strict=True):
            rows = np.arange(first, last + 1)[self._is_in[members][self.position[first : last + 1]]]
            values = self._table.column(column).take(pa.array(rows)).drop_null().to_pylist()
            found.append(fold_of(term, values, kind))
        return pa.array(found, kind)


class _RunningFold:
    """An aggregate that is carried on from row to row."""

    @staticmethod
    def can(term: Fold, column: str | None, table: pa.Table) -> bool:
        """Whether there is one."""
        if term.is_distinct or term.kind == "collect_list":
            return False
        if column is None or term.kind in ("count", "min", "max"):
            return column is None or not pa.types.is_nested(table.schema.field(column).type)
        return not pa.types.is_decimal(table.schema.field(column).type)

    def __init__(self, term: Fold, column: pa.ChunkedArray | None) -> None:
        self._kind, self._column = term.kind, column
        count = 0 if column is None else len(column)
        self._is_valid: Array = None if column is None else pc.is_valid(column).to_numpy(zero_copy_only=False)
        self._numbers: Array = None
        if column is not None and term.kind in ("sum", "avg"):
            kind = np.int64 if pa.types.is_integer(column.type) else np.float64
            self._numbers = column.fill_null(0).to_numpy(zero_copy_only=False).astype(kind)
        elif column is not None and term.kind in ("min", "max"):
            self._numbers = _ranks(column) * (1 if term.kind == "max" else -1)
        self._count = np.zeros(count, np.int64)
        self._sum = np.zeros(count, np.float64 if self._numbers is None else self._numbers.dtype)
        self._best = np.full(count, -1)

    def take(self, row: Array, is_first: Array, before: Array, is_in: Array) -> None:
        """Rows are taken; `is_in` says which count."""
        if self._column is None:
            if len(self._count) <= int(row.max(initial=-1)):
                self._count = np.r_[self._count, np.zeros(int(row.max()) + 1, np.int64)]
            self._count[row] = np.where(is_first, 0, self._count[before]) + is_in
            return
        counts = is_in & self._is_valid[row]
        self._count[row] = np.where(is_first, 0, self._count[before]) + counts
        if self._kind in ("sum", "avg"):
            self._sum[row] = np.where(is_first, 0, self._sum[before]) + np.where(counts, self._numbers[row], 0)
        elif self._kind in ("min", "max"):
            best = np.where(is_first, -1, self._best[before])
            is_better = counts & ((best < 0) | (self._numbers[row] > self._numbers[np.maximum(best, 0)]))
            self._best[row] = np.where(is_better, row, best)

    def result(self, row: Array, kind: pa.DataType) -> Any:
        """The aggregate after some rows."""
        count = self._count[row]
        if self._kind == "count":
            return pa.array(count, kind)
        if self._kind in ("min", "max"):
            best = self._best[row]
            assert self._column is not None
            return self._column.take(pa.array(best, mask=best < 0))
        total = self._sum[row]
        if self._kind == "avg":
            total = total / np.maximum(count, 1)
        return pa.array(total, kind, mask=count == 0)


def _ranks(column: pa.ChunkedArray) -> Array:
    """Numbers in the order of values; NaN is above all numbers."""
    values = column.combine_chunks()
    if pa.types.is_floating(values.type):
        return np.unique(values.fill_null(0).to_numpy(zero_copy_only=False), return_inverse=True)[1].astype(np.int64)
    encoded = values.dictionary_encode()
    ranks = np.empty(len(encoded.dictionary), np.int64)
    ranks[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(ranks))
    return np.r_[ranks, 0][encoded.indices.fill_null(0).to_numpy()]
