"""`hw.top_n`: the best rows of each key, kept up to date.

What it gives are changes of a table whose key is the key and the `rank`: a row for each rank whose row is another one than before the
batch. The best of equal rows is the first by all their columns, so the table is the same however batches are cut.

Rows are facts, or with `key=` changes of a table: then a row replaces the earlier one of its key (see `signed_rows`), what had fallen
off the list may come back, and a rank that nobody has any more is given with `_deleted`. With `over=` it gives the best of each window
of event time instead, once (see `window_top_n`).

State: `best`, the rows of each key that have a rank; of a table that changes `rows`, all of them with their sign, so that a batch costs by
the size of the groups it touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from headwater.model.clock import Duration
from headwater.model.errors import InvalidInput
from headwater.model.schema import DELETED
from headwater.processing.operators.grouping import Groups, keyed
from headwater.processing.operators.operator import Input, Time, operate
from headwater.processing.operators.panes import END, START, checked
from headwater.processing.operators.ranking import Ranking, parsed
from headwater.processing.operators.row_order import flags, time_column
from headwater.processing.operators.signed_rows import SIGN, check_facts, signed
from headwater.processing.operators.sql import ask
from headwater.processing.operators.window_top_n import RANK, TopOfWindows
from headwater.processing.spark.types import to_arrow
from headwater.processing.state.sorted_runs import H1, H2, Keys, column
from headwater.processing.state.state import State, TableSpec

_BEST, _ROWS = "best", "rows"


def top_n(
    df: DataFrame,
    n: int,
    *,
    by: str | Sequence[str] | None = None,
    order: str | Sequence[str],
    key: str | Sequence[str] | None = None,
    over: Duration | None = None,
    every: Duration | None = None,
    ties: bool = False,
    at: str | None = None,
    uid: str | None = None,
) -> DataFrame:
    """The `n` first rows of each key `by` in an `order` such as "price DESC", with their `rank` from 1 on.

    With `key`, rows are changes of a table with that key: a row replaces the earlier one of its key, the later by `at` if that is given.

    With `over`, those of each window of event time `at`, of all rows where there is no `by`; with `ties` all that equal the n-th, too:
    hw.top_n(bids, 1, order="price DESC", over="10 seconds", ties=True)
    """
    if n < 1:
        raise InvalidInput(f"A top {n!r} is not possible.", advice="Use 1 or more.")
    if RANK in df.columns:
        raise InvalidInput(f"There is a column {RANK!r} already.", advice="Rename it.")
    group = [] if by is None else [by] if isinstance(by, str) else list(by)
    orders = [order] if isinstance(order, str) else list(order)
    if over is not None:
        _check_windows(df, key)
        rows, names = keyed(df, group)
        operator = TopOfWindows(
            to_arrow(rows.schema), n, orders, names, time_column(df, at), checked(over, every), ties=ties
        )
        return operate(operator, [Input(rows, names)], uid=uid)
    _check_no_windows(group, every, ties=ties)
    if key is None:
        check_facts(df, at=at)
        return operate(TopOfEvents(to_arrow(df.schema), n, orders, group), [Input(df, group)], uid=uid)
    rows = signed(df, key, at=at, uid=uid)
    return operate(TopOfTable(to_arrow(rows.schema), n, orders), [Input(rows, group)], uid=uid)


def _check_windows(df: DataFrame, key: object) -> None:
    if key is not None:
        raise InvalidInput(
            "What a table had in a window cannot be derived when its rows change.", advice="Leave out key= or over=."
        )
    check_facts(df, at=None)
    for name in (START, END):
        if name in df.columns:
            raise InvalidInput(f"The result has a column {name!r} of its own.", advice="Rename yours first.")


def _check_no_windows(group: Sequence[str], every: object, *, ties: bool) -> None:
    if not group:
        raise InvalidInput(
            "by= is missing.",
            advice='Name the columns of the key, as in by="…"; or over="10 seconds" for the best of all rows in each window.',
        )
    if every is not None or ties:
        raise InvalidInput(
            "every= and ties= are for windows: a list that is kept up to date has a row for each rank.",
            advice="Add over=, or leave them out.",
        )


class TopOfEvents:
    """The operator over facts."""

    name = "top_n"
    is_prompt = True

    def __init__(self, schema: pa.Schema, n: int, order: Sequence[str], by: Sequence[str]) -> None:
        self.settings = (n, tuple(order))
        self.schema = schema.insert(0, pa.field(RANK, pa.int32()))
        self.combined = schema
        self._own, self._by = schema.names, by
        self.tables = {_BEST: TableSpec("keyed", [pa.field(RANK, pa.int32()), *_numbered(schema)])}
        self._ranking = Ranking(n, order, self._own)

    def combine(self, rows: pa.Table) -> pa.Table:
        """The best rows of each key."""
        groups = Groups.of([rows.column(name) for name in self._by], rows.num_rows)
        place, _ = self._ranking.best([rows.column(name) for name in self._own], groups.row)
        return rows.select(self._own).take(pa.array(place)).cast(self.combined)

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """The ranks that have another row now."""
        rows = inputs[0]
        if not rows.num_rows:
            return self.schema.empty_table()
        keys = Keys.of(rows)
        found, number = state[_BEST].find(keys)
        columns = {f"r{at}": rows.column(name) for at, name in enumerate(self._own)}
        nobody = pa.array(np.zeros(rows.num_rows, np.int32))
        fresh = pa.table({"k": pa.array(keys.row), RANK: nobody, **columns})
        known = pa.table(
            {"k": pa.array(number), RANK: found.column(RANK), **{name: found.column(name) for name in columns}}
        )
        united = pa.concat_tables([known, fresh.cast(known.schema)])  # of equal rows that which is known is first
        place, rank = self._ranking.best([united.column(name) for name in columns], column(united, "k"))
        best = united.take(pa.array(place))
        key, own = column(best, "k"), {name: best.column(name) for name in columns}
        state[_BEST].put(
            pa.table({H1: pa.array(keys.h1[key]), H2: pa.array(keys.h2[key]), RANK: pa.array(rank), **own})
        )
        is_moved = rank != column(best, RANK)
        changed = best.filter(pa.array(is_moved))
        named = {name: changed.column(f"r{at}") for at, name in enumerate(self._own)}
        return pa.table({RANK: pa.array(rank[is_moved]), **named})


class TopOfTable:
    """The operator over signed rows."""

    name = "top_n"
    is_prompt = True

    def __init__(self, schema: pa.Schema, n: int, order: Sequence[str]) -> None:
        own = pa.schema([field for field in schema if field.name != SIGN])
        self.settings = (n, tuple(order), SIGN)
        self.schema = own.insert(0, pa.field(RANK, pa.int32())).append(DELETED)
        self._own = own.names
        self.tables = {_ROWS: TableSpec("gathered", [pa.field(SIGN, pa.int64()), *_numbered(own)])}
        self._n, self._order = n, ordered(order, self._own)
        self._columns = ", ".join(f"r{number}" for number in range(len(own)))

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """The ranks that have another row now, or none."""
        rows = inputs[0]
        if not rows.num_rows:
            return self.schema.empty_table()
        keys, names = Keys.of(rows), [SIGN, *(f"r{number}" for number in range(len(self._own)))]
        found, number = state[_ROWS].find(keys)
        fresh = rows.select([SIGN, *self._own]).rename_columns(names)
        known = (
            found.select(names).append_column("k", pa.array(number)).append_column("fresh", flags(found, value=False))
        )
        given = fresh.append_column("k", pa.array(keys.row)).append_column("fresh", flags(rows, value=True))
        changed = self._changed(pa.concat_tables([known, given.cast(known.schema)]))
        state[_ROWS].keeps = self._kept
        state[_ROWS].put(fresh.append_column(H1, rows.column(H1)).append_column(H2, rows.column(H2)))
        named = {name: changed.column(f"r{at}") for at, name in enumerate(self._own)}
        return pa.table({RANK: changed.column("now"), **named, DELETED.name: changed.column("gone")})

    def _changed(self, rows: pa.Table) -> pa.Table:
        """Each row has a rank before the batch and one after it, or none; a rank above the list's new length is nobody's."""
        turn = f"partition by k order by {self._order}"
        return ask(
            f"""with one as (select k, {self._columns}, sum({SIGN}) as after, coalesce(sum({SIGN}) filter (not fresh), 0) as before
                             from rows group by all),
                ranked as (select *, sum(before) over ({turn} rows unbounded preceding) as was,
                                     sum(after) over ({turn} rows unbounded preceding) as now,
                                     sum(after) over (partition by k) as length from one)
                select {self._columns}, now::int as now, false as gone from ranked
                where after > 0 and now <= {self._n} and (before = 0 or was <> now)
                union all
                select {self._columns}, was::int, true from ranked where before > 0 and was <= {self._n} and was > length""",
            rows=rows,
        )

    def _kept(self, rows: pa.Table) -> Any:
        """A row that came and went is left out."""
        kept = ask(
            f"""select coalesce(s <> 0, false) as kept from (
                select place, sum({SIGN}) over (partition by {H1}, {H2}, {self._columns}) as s from rows) order by place""",
            rows=rows.append_column("place", pa.array(np.arange(rows.num_rows))),
        )
        return kept.column("kept")


def ordered(order: Sequence[str], columns: Sequence[str]) -> str:
    """The order in SQL, with columns by their numbers: nulls come last, and of equal rows the first by all columns is first."""
    parts = [f"r{columns.index(name)} {'desc' if down else 'asc'} nulls last" for name, down in parsed(order, columns)]
    return ", ".join([*parts, *(f"r{number}" for number in range(len(columns)))])


def _numbered(schema: pa.Schema) -> list[pa.Field]:
    return [pa.field(f"r{number}", field.type) for number, field in enumerate(schema)]
