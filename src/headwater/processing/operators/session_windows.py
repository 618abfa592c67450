"""Sessions: aggregates of the rows of each group that follow each other without a longer gap; `hw.windowed` with `gap=`.

A session begins with its first row and ends a gap after its last; a row at its very end still belongs to it, as in Spark. So it is given
when the watermark has reached its end. A row that comes between two sessions makes one of them.

Rows of a group in a pane of the gap's width are less than a gap apart, hence of one session: what `combine` makes of them are pieces of
sessions, each with its first and its last time and its partial sums (see `partials`). Pieces are put together in any order and any number
of steps.

State: `sessions`, the open ones of each key; `ends`, when keys are to be looked at because a session may have ended. Each open session has
an entry there at or before its end, whose time is its `_timer`: it is renewed when it has gone off, not whenever the session grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.processing.operators.aggregate import Aggregate
from headwater.processing.operators.grouping import ALL, Groups, with_all
from headwater.processing.operators.operator import Time
from headwater.processing.operators.panes import END, MOMENT, START, WINDOW_FIELDS, Panes
from headwater.processing.operators.partials import Partials
from headwater.processing.operators.row_order import in_time
from headwater.processing.state.sorted_runs import AT, H1, H2, MIN_TIME, Keys, column
from headwater.processing.state.state import State, TableSpec

FIRST, LAST = "_first", "_last"
"""In rows that were combined: the times of the first and the last of them, in µs."""

_TIMER = "_timer"
_SESSIONS, _ENDS = "sessions", "ends"
_TIMES = [pa.field(FIRST, pa.int64()), pa.field(LAST, pa.int64())]

Array = Any
"""A NumPy array."""


class Sessions:
    """The operator."""

    name = "windowed"
    keeps = END

    def __init__(
        self, schema: pa.Schema, group: Sequence[str], at: str, gap_us: int, aggregates: Sequence[Aggregate]
    ) -> None:
        self.settings = (tuple(group), at, "gap", gap_us, tuple(aggregates))
        shown = [schema.field(name) for name in group if name != ALL]
        self.schema = pa.schema([*shown, *WINDOW_FIELDS, *(pa.field(each.name, each.type) for each in aggregates)])
        self.at = at
        self._group, self._at, self._gap, self._partials = list(group), at, gap_us, Partials(aggregates, schema)
        self.remembers = self._partials.used
        keys = [schema.field(name) for name in group]
        self.combined = pa.schema([*keys, *_TIMES, *self._partials.fields])
        self._own = [pa.field(f"b{number}", field.type) for number, field in enumerate(keys)]
        parts = [*self._own, *_TIMES, pa.field(_TIMER, pa.int64()), *self._partials.fields]
        self.tables = {_SESSIONS: TableSpec("keyed", parts), _ENDS: TableSpec("timed", [])}

    def combine(self, rows: pa.Table) -> pa.Table:
        """The pieces of sessions in rows, without hashes."""
        rows = with_all(rows) if self._group == [ALL] else rows
        rows, times = in_time(rows, self._at)
        groups = Groups.of([*(rows.column(name) for name in self._group), self._panes(times)], len(times))
        return self._pieces(rows, times, groups, {name: name for name in self._group}).cast(self.combined)

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """The sessions that end with the batch."""
        fresh = self._fresh(inputs[0], time)
        due = state[_ENDS].take(time.until).select([H1, H2])
        keys = Keys.of(pa.concat_tables([fresh.select([H1, H2]), due]))
        found, number = state[_SESSIONS].find(keys)
        known = found.select(fresh.column_names)
        pieces = pa.concat_tables([known, fresh.cast(known.schema)])
        whole, key = self._joined(pieces, np.r_[number, keys.row[: fresh.num_rows]])
        is_over = column(whole, LAST) + self._gap <= time.until
        self._remember(state, whole.filter(pa.array(~is_over)), time)
        is_empty = np.zeros(len(keys), bool)
        is_empty[number] = True
        is_empty[key[~is_over]] = False
        state[_SESSIONS].remove(keys.only(is_empty))
        over = whole.filter(pa.array(is_over))
        shown = {name: over.column(f"b{at}") for at, name in enumerate(self._group) if name != ALL}
        ends = pa.array(column(over, LAST) + self._gap)
        return pa.table(
            {**shown, START: over.column(FIRST).cast(MOMENT), END: ends.cast(MOMENT), **self._partials.results(over)}
        )

    def _fresh(self, rows: pa.Table, time: Time) -> pa.Table:
        """The pieces that a batch brings, combined or not."""
        names = {H1: H1, H2: H2} | {f"b{at}": name for at, name in enumerate(self._group)}
        if FIRST in rows.column_names:
            rows = rows.filter(pa.array(column(rows, LAST) > time.before))
            pieces = rows.select([*names.values(), *self._times_and_sums()])
            pieces = pieces.rename_columns([*names, *self._times_and_sums()])
        else:
            rows, times = in_time(rows, self._at, after=time.before)
            groups = Groups.of([Keys.of(rows).row, self._panes(times)], len(times))
            pieces = self._pieces(rows, times, groups, names)
        return pieces.append_column(_TIMER, pa.array(np.full(pieces.num_rows, MIN_TIME)))

    def _pieces(self, rows: pa.Table, times: Array, groups: Groups, names: dict[str, str]) -> pa.Table:
        """One row for each group of rows; `names` are the columns that it has alike, by their new names."""
        one = pa.array(groups.one)
        first, last = times[groups.one], times[groups.one]
        np.minimum.at(first, groups.row, times)
        np.maximum.at(last, groups.row, times)
        keys = {name: rows.column(own).take(one) for name, own in names.items()}
        return pa.table({**keys, FIRST: pa.array(first), LAST: pa.array(last), **self._partials.of(rows, groups)})

    def _joined(self, pieces: pa.Table, key: Array) -> tuple[pa.Table, Array]:
        """Pieces of the same key that are not more than a gap apart as one, and their keys; each has the latest timer of its pieces."""
        order = np.lexsort((column(pieces, FIRST), key))
        pieces, key = pieces.take(pa.array(order)), key[order]
        groups = _numbered(key, column(pieces, FIRST), column(pieces, LAST), self._gap)
        if len(groups) == len(key):
            return pieces, key
        last, timer = np.full(len(groups), MIN_TIME), np.full(len(groups), MIN_TIME)
        np.maximum.at(last, groups.row, column(pieces, LAST))
        np.maximum.at(timer, groups.row, column(pieces, _TIMER))
        kept = pieces.select([H1, H2, *(field.name for field in self._own), FIRST]).take(pa.array(groups.one))
        columns = {name: kept.column(name) for name in kept.column_names}
        columns |= {LAST: pa.array(last), _TIMER: pa.array(timer)}
        return pa.table(columns | self._partials.folded(pieces, groups)).select(pieces.column_names), key[groups.one]

    def _remember(self, state: State, open_: pa.Table, time: Time) -> None:
        """Keeps open sessions instead of those that their keys had, with a timer for each that has none ahead."""
        timer, end = column(open_, _TIMER), column(open_, LAST) + self._gap
        needs = timer <= time.until
        at = open_.column_names.index(_TIMER)
        open_ = open_.set_column(at, _TIMER, pa.array(np.where(needs, end, timer)))
        state[_SESSIONS].put(open_)
        place = pa.array(np.flatnonzero(needs))
        fresh = open_.select([H1, H2]).take(place)
        state[_ENDS].put(fresh.append_column(AT, pa.array(end[needs], pa.int64())))

    def _panes(self, times: Array) -> Array:
        return Panes(self._gap, self._gap).of(times)

    def _times_and_sums(self) -> list[str]:
        return [FIRST, LAST, *(field.name for field in self._partials.fields)]


def _numbered(key: Array, first: Array, last: Array, gap: int) -> Groups:
    """Which pieces, in the order of key and first time, are one session: a piece begins another where all before it have ended."""
    if not len(key):
        return Groups(key, key)
    is_key = np.r_[True, key[1:] != key[:-1]]
    times, rank = np.unique(last, return_inverse=True)
    latest = times[np.maximum.accumulate(key * len(times) + rank) % len(times)]  # of each key the greatest so far
    is_new = is_key | np.r_[True, first[1:] > latest[:-1] + gap]
    return Groups(np.cumsum(is_new) - 1, np.flatnonzero(is_new))
