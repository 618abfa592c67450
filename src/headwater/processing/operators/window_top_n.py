"""The best rows of each key in each window of event time: `hw.top_n` with `over=`.

They are given once, with their `rank` and the window's start and end, when the watermark has passed the window (see `panes`). The best
rows of a window are among the best of its panes, so no others are kept, nor needed of rows that are combined before.

State: `panes`, the best rows of each key in each pane, by the start of the pane; of each batch that brought some, until runs are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headwater.processing.operators.grouping import ALL, ALL_FIELD, Groups, with_all
from headwater.processing.operators.operator import Time
from headwater.processing.operators.panes import END, WINDOW_FIELDS, Panes
from headwater.processing.operators.ranking import Ranking
from headwater.processing.operators.row_order import in_time
from headwater.processing.state.sorted_runs import AT, H1, H2, Keys, column, in_order
from headwater.processing.state.state import State, TableSpec

RANK = "rank"
_PANES = "panes"


class TopOfWindows:
    """The operator. Where its key is `ALL`, that column is no part of its rows."""

    name = "top_n"
    keeps = END

    def __init__(
        self, schema: pa.Schema, n: int, order: Sequence[str], by: Sequence[str], at: str, panes: Panes, *, ties: bool
    ) -> None:
        own = pa.schema([field for field in schema if field.name != ALL])
        self.settings = (n, tuple(order), tuple(by), at, *panes, ties)
        self.schema = pa.schema([pa.field(RANK, pa.int32()), *own, *WINDOW_FIELDS])
        self.combined = own if ALL not in by else own.append(ALL_FIELD)
        self.at = at
        self._own, self._by, self._at, self._panes = own.names, list(by), at, panes
        self._ranking = Ranking(n, order, self._own, ties=ties)
        self._kept = [f"r{number}" for number in range(len(own))]
        fields = [pa.field(name, field.type) for name, field in zip(self._kept, own, strict=True)]
        self.tables = {_PANES: TableSpec("timed", fields)}

    def combine(self, rows: pa.Table) -> pa.Table:
        """The best rows of each key in each pane."""
        rows = with_all(rows) if self._by == [ALL] else rows
        rows, times = in_time(rows, self._at)
        groups = Groups.of([*(rows.column(name) for name in self._by), self._panes.of(times)], len(times))
        place, _ = self._ranking.best([rows.column(name) for name in self._own], groups.row)
        return rows.select(self.combined.names).take(pa.array(place)).cast(self.combined)

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """The best rows of the windows that end with the batch."""
        rows, times = in_time(inputs[0], self._at, after=time.before)
        table = state[_PANES]
        table.folds = self._folded
        fresh = rows.select([H1, H2, *self._own]).rename_columns([H1, H2, *self._kept])
        table.put(self._best(fresh.append_column(AT, pa.array(self._panes.of(times), pa.int64())), Keys.of(rows)))
        parts, starts = self._panes.close(table, time)
        groups = Groups.of([Keys.of(parts).row, starts], parts.num_rows)
        place, rank = self._ranking.best(self._columns(parts), groups.row)
        found = parts.select(self._kept).take(pa.array(place))
        own = {name: found.column(kept) for name, kept in zip(self._own, self._kept, strict=True)}
        return pa.table({RANK: pa.array(rank), **own, **self._panes.columns(starts[place])})

    def _best(self, parts: pa.Table, keys: Keys) -> pa.Table:
        """The best of each key and pane."""
        groups = Groups.of([keys.row, column(parts, AT)], parts.num_rows)
        place, _ = self._ranking.best(self._columns(parts), groups.row)
        return parts.take(pa.array(place))

    def _folded(self, parts: pa.Table) -> pa.Table:
        return in_order(self._best(parts, Keys.of(parts)), "timed")

    def _columns(self, parts: pa.Table) -> list[Any]:
        return [parts.column(name) for name in self._kept]
