"""`hw.sliding`: for each event, aggregates over the events of its key in the time up to it.

A row is given when the watermark has passed it, with what its key had in the `over` before it and at its own time: SQL's
`RANGE BETWEEN … PRECEDING AND CURRENT ROW`, by event time. So the answer is the same however batches are cut and rows are shuffled within
the lateness. It is computed over the rows that are due and those of their keys that are near enough: by NumPy (see `range_aggregates`),
or where that has no words for it by DuckDB.

State: `waiting`, rows that the watermark has not passed; `passed`, what later rows may need of those it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from headwater.model.clock import Duration, duration_us
from headwater.model.errors import InvalidInput
from headwater.processing.operators.aggregate import Aggregate, Wanted, aggregates_of
from headwater.processing.operators.operator import Input, Time, operate
from headwater.processing.operators.range_aggregates import aggregated
from headwater.processing.operators.row_order import time_column, times_of
from headwater.processing.operators.sql import ask
from headwater.processing.spark.types import to_arrow
from headwater.processing.state.sorted_runs import AT, H1, H2, Keys, column
from headwater.processing.state.state import State, TableSpec

_WAITING, _PASSED = "waiting", "passed"


def sliding(
    df: DataFrame,
    by: str | Sequence[str],
    *,
    over: Duration,
    at: str | None = None,
    uid: str | None = None,
    **wanted: Wanted,
) -> DataFrame:
    """The rows of `df`, each with aggregates over the rows of the same `by` in the time `over` up to its own.

    hw.sliding(payments, by="card", over="10 minutes", n="count", spent=("sum", "amount"), p95=("percentile", "ms", 0.95))
    """
    key = [by] if isinstance(by, str) else list(by)
    schema, over_us = to_arrow(df.schema), duration_us(over)
    if over_us <= 0:
        raise InvalidInput(f"A window of {over!r} is empty.", advice='Use a positive time, such as over="5 minutes".')
    aggregates = aggregates_of(wanted, schema, taken=schema.names)
    return operate(Sliding(schema, time_column(df, at), over_us, aggregates), [Input(df, key)], uid=uid)


class Sliding:
    """The operator."""

    name = "sliding"

    def __init__(self, schema: pa.Schema, at: str, over_us: int, aggregates: Sequence[Aggregate]) -> None:
        self.settings = (at, over_us, tuple(aggregates))
        self.schema = schema
        for aggregate in aggregates:
            self.schema = self.schema.append(pa.field(aggregate.name, aggregate.type))
        self.keeps = at
        self.at = self._at = at
        self._over, self._aggregates = over_us, aggregates
        self._used = sorted({aggregate.column for aggregate in aggregates if aggregate.column is not None})
        used = [pa.field(f"c{number}", schema.field(name).type) for number, name in enumerate(self._used)]
        own = [pa.field(f"r{number}", field.type) for number, field in enumerate(schema)]
        self._own = schema.names
        self.tables = {
            _WAITING: TableSpec("timed", own),
            _PASSED: TableSpec("gathered", [pa.field("at", pa.int64()), *used]),
        }

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """The rows that the watermark has passed, with their aggregates."""
        self._wait(state, inputs[0], time)
        due = state[_WAITING].take(time.until)
        if not due.num_rows:
            return self.schema.empty_table()
        keys, oldest = Keys.of(due), max(time.until - self._over, -(2**63))
        found, number = state[_PASSED].find(keys)
        mine = {"at": due.column(AT)} | {
            f"c{at}": due.column(f"r{self._own.index(name)}") for at, name in enumerate(self._used)
        }
        near = _by_time(pa.table({"k": pa.array(number), **{n: found.column(n) for n in mine}}))
        here = pa.table({"k": pa.array(keys.row), **mine})
        computed = self._compute(pa.concat_tables([near, here.cast(near.schema)]), known=near.num_rows)
        passed = pa.table({H1: due.column(H1), H2: due.column(H2), **mine})
        state[_PASSED].put(passed.filter(_later(passed, oldest)))
        state[_PASSED].keeps = lambda rows: _later(rows, oldest)
        columns = {name: due.column(f"r{at}") for at, name in enumerate(self._own)}
        return pa.table({**columns, **computed})

    def _wait(self, state: State, rows: pa.Table, time: Time) -> None:
        times = times_of(rows, self._at)
        columns = {f"r{number}": rows.column(name) for number, name in enumerate(self._own)}
        kept = pa.table({H1: rows.column(H1), H2: rows.column(H2), AT: pa.array(times, pa.int64()), **columns})
        is_due_later = times > time.before
        state[_WAITING].put(kept if bool(is_due_later.all()) else kept.filter(pa.array(is_due_later)))

    def _compute(self, rows: pa.Table, *, known: int) -> dict[str, Any]:
        """The aggregates of all rows but the first `known`."""
        is_due = np.arange(rows.num_rows) >= known
        columns = {name: rows.column(f"c{number}") for number, name in enumerate(self._used)}
        found = aggregated(column(rows, "k"), column(rows, "at"), is_due, self._over, columns, self._aggregates)
        return self._asked(rows.append_column("due", pa.array(is_due))) if found is None else found

    def _asked(self, rows: pa.Table) -> dict[str, Any]:
        columns = ", ".join(f'{self._sql(each)} over w as "{each.name}"' for each in self._aggregates)
        window = f'partition by k order by "at" range between {self._over} preceding and current row'
        result = ask(
            f"""select * exclude (place, due) from (select place, due, {columns} from rows window w as ({window}))
                where due order by place""",
            rows=rows.append_column("place", pa.array(np.arange(rows.num_rows))),
        )
        schema = pa.schema([pa.field(each.name, each.type) for each in self._aggregates])
        cast = result.cast(schema)
        return {each.name: cast.column(each.name) for each in self._aggregates}

    def _sql(self, each: Aggregate) -> str:
        if each.column is None:
            return "count(*)"
        name = f"c{self._used.index(each.column)}"
        if each.kind == "distinct":
            return f"count(distinct {name})"
        if each.kind == "percentile":
            return f"quantile_cont({name}, {each.share})"
        return f"{each.kind}({name})"


def _later(rows: pa.Table, than: int) -> pa.Array:
    return pa.array(column(rows, "at") > than)


def _by_time(rows: pa.Table) -> pa.Table:
    """Rows in the order of their times, in which those that are due are already, and behind these."""
    return rows.take(pa.array(np.argsort(column(rows, "at"), kind="stable")))
