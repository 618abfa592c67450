"""`hw.dedupe`: of events that came several times, one.

A row is another copy when a row of the same key was let through whose time is at most `within` away. What was let through is remembered
until the watermark is `within` past it: a copy that comes after that is late for its topic, too. Of copies with the same time the one that
was appended first is let through.

The result is the same however batches are cut as long as all copies of an event lie within `within` of each other, and other events
of the same key do not: sent again, an event has the time that it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from headwater.model.clock import Duration, duration_us
from headwater.processing.operators.operator import Input, Time, in_log_order, operate
from headwater.processing.operators.row_order import Ranks, in_fixed_order, time_column, times_of
from headwater.processing.spark.types import to_arrow
from headwater.processing.state.sorted_runs import H1, H2, Keys, column
from headwater.processing.state.state import State, TableSpec

_SEEN = "seen"


def dedupe(
    df: DataFrame,
    on: str | Sequence[str],
    *,
    within: Duration = "0 seconds",
    at: str | None = None,
    uid: str | None = None,
) -> DataFrame:
    """The rows of `df` without further copies: rows of the same key `on` whose times `at` are at most `within` apart.

    `at` is the event time that the topic declares, unless another column is named.
    """
    key = [on] if isinstance(on, str) else list(on)
    operator = Dedupe(to_arrow(df.schema), time_column(df, at), duration_us(within), in_log_order=in_log_order(df))
    return operate(operator, [Input(df, key)], uid=uid)


class Dedupe:
    """The operator."""

    name = "dedupe"
    is_prompt = True
    remembers = ()

    def __init__(self, schema: pa.Schema, at: str, within_us: int, *, in_log_order: bool = True) -> None:
        """`in_log_order`: rows come in the order of the log (see `operator`)."""
        self.schema = schema
        self.settings = (at, within_us)
        self.tables = {_SEEN: TableSpec("keyed", [pa.field("at", pa.int64())])}
        self._at = self.at = self.keeps = at
        self._within = within_us
        self._in_log_order = in_log_order

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """The rows that come for the first time."""
        rows = in_fixed_order(inputs[0], self._at, by_key=True, in_log_order=self._in_log_order)
        times = times_of(rows, self._at)
        rows = rows.filter(pa.array(times > time.before))
        if not rows.num_rows:
            return rows
        times, keys = times_of(rows, self._at), Keys.of(rows)
        found, number = state[_SEEN].find(keys)
        seen = column(found, "at")
        ranks = Ranks(times, seen)
        passes = ~_is_near(ranks, times, keys.row, seen, number, self._within)
        passes &= _firsts(ranks, times, keys.row, passes, self._within)
        of = np.r_[number, keys.row[passes]]
        kept = pa.table(
            {H1: pa.array(keys.h1[of]), H2: pa.array(keys.h2[of]), "at": pa.array(np.r_[seen, times[passes]])}
        )
        over = _less(time.until, self._within)
        state[_SEEN].put(kept.filter(pa.array(column(kept, "at") > over)))
        state[_SEEN].keeps = lambda merged: pa.array(column(merged, "at") > over)
        return rows.filter(pa.array(passes))


def _less(time: int, by: int) -> int:
    return max(time - by, -(2**63))


def _is_near(ranks: Ranks, times: Any, key: Any, seen: Any, number: Any, within: int) -> Any:
    """Which rows have a time of the same key near them."""
    known = np.sort(ranks.of(number, seen))
    low = np.searchsorted(known, ranks.at_least(key, times - within), "left")
    return np.searchsorted(known, ranks.after(key, times + within), "left") > low


def _firsts(ranks: Ranks, times: Any, key: Any, free: Any, within: int) -> Any:
    """Of rows in the order of key and time, those that are first, and first again when `within` has passed; only free ones count."""
    place = np.flatnonzero(free)
    times, key = times[place], key[place]
    known = ranks.of(key, times)
    after = np.searchsorted(known, ranks.after(key, times + within), "left")
    ends = np.searchsorted(key, key, "right")
    result = np.zeros(len(free), bool)
    at = np.flatnonzero(np.r_[True, key[1:] != key[:-1]]) if len(key) else place
    while len(at):
        result[place[at]] = True
        at = after[at][after[at] < ends[at]]
    return result
