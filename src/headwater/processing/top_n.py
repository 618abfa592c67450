"""`hw.top_n`: the best rows of each key, kept up to date.

What it gives are changes of a table whose key is the key and the `rank`: a row for each rank whose row is another one than before the
batch. The best of equal rows is the first by all their columns, so the table is the same however batches are cut.

State: `best`, the rows of each key that have a rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from headwater.model.errors import InvalidInput
from headwater.processing.operator import Input, Time, operate
from headwater.processing.runs import H1, H2, Keys
from headwater.processing.state import State, TableSpec
from headwater.processing.types import to_arrow

RANK = "rank"
_BEST = "best"
_ORDER = re.compile(r"\s*(\S+)(?:\s+(asc|desc))?\s*", re.IGNORECASE)


def top_n(
    df: DataFrame, n: int, *, by: str | Sequence[str], order: str | Sequence[str], uid: str | None = None
) -> DataFrame:
    """The `n` first rows of each key `by` in an `order` such as "price DESC", with their `rank` from 1 on."""
    if n < 1:
        raise InvalidInput(f"There is no top {n!r}.", advice="Use 1 or more.")
    if RANK in df.columns:
        raise InvalidInput(f"There is a column {RANK!r} already.", advice="Rename it.")
    key = [by] if isinstance(by, str) else list(by)
    operator = TopN(to_arrow(df.schema), n, [order] if isinstance(order, str) else list(order))
    return operate(operator, [Input(df, key)], uid=uid)


class TopN:
    """The operator."""

    name = "top_n"

    def __init__(self, schema: pa.Schema, n: int, order: Sequence[str]) -> None:
        self.settings = (n, tuple(order))
        self.schema = schema.insert(0, pa.field(RANK, pa.int32()))
        self._own = schema.names
        fields = [pa.field(f"r{number}", field.type) for number, field in enumerate(schema)]
        self.tables = {_BEST: TableSpec("keyed", [pa.field(RANK, pa.int32()), *fields])}
        self._n, self._order = n, self._ordered(order)

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
        best = self._ranked(pa.concat_tables([known, fresh.cast(known.schema)]))
        key = best.column("k").to_numpy()
        own = {name: best.column(name) for name in columns}
        state[_BEST].put(
            pa.table({H1: pa.array(keys.h1[key]), H2: pa.array(keys.h2[key]), RANK: best.column("now"), **own})
        )
        moved = pa.array(best.column("now").to_numpy() != best.column(RANK).to_numpy())
        changed = best.filter(moved)
        named = {name: changed.column(f"r{at}") for at, name in enumerate(self._own)}
        return pa.table({RANK: changed.column("now"), **named})

    def _ranked(self, rows: pa.Table) -> pa.Table:
        import duckdb

        everything = ", ".join(f"r{number}" for number in range(len(self._own)))
        order = f"{self._order}, {everything}, {RANK} desc"
        with duckdb.connect(config={"threads": 1}) as database:
            database.register("rows", rows)
            return database.sql(
                f"select *, (row_number() over (partition by k order by {order}))::int as now from rows qualify now <= {self._n}"
            ).to_arrow_table()

    def _ordered(self, order: Sequence[str]) -> str:
        """The order in SQL, by our names of the columns; nulls come last."""
        parts = []
        for each in order:
            found = _ORDER.fullmatch(each)
            if found is None or found[1] not in self._own:
                raise InvalidInput(
                    f"There is no column to order by in {each!r}.",
                    advice=f"Use a column and ASC or DESC; columns are {', '.join(self._own)}.",
                )
            parts.append(f"r{self._own.index(found[1])} {found[2] or 'asc'} nulls last")
        if not parts:
            raise InvalidInput("The best by which order?", advice='Such as order="price DESC".')
        return ", ".join(parts)
