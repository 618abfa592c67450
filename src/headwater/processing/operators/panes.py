"""Panes: pieces of event time that windows are made of, and which windows end with a batch.

A window of the length `over` begins every `every`, as Spark's do: at a multiple of it since 1970, with its start in it and its end not.
The widest pieces that no window cuts are its panes. Of the rows of a pane an operator keeps **parts** (sums, or the best rows) in a timed
table by the start of the pane; a window is made of the parts of its panes when the watermark has passed it: `Time.until` is its last
microsecond, or later. Parts are gone when the last window that needs them was given.

A row that comes after `Time.before` has a window that is still open, so its pane was not dropped.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headwater.model.clock import Duration, duration_us
from headwater.model.errors import InvalidInput
from headwater.processing.operators.operator import MAX_TIME, Time
from headwater.processing.state.sorted_runs import AT, MIN_TIME, column
from headwater.processing.state.state import StateTable

PANE = "_pane"
"""In rows that were combined: the start of their pane, in µs."""

START, END = "window_start", "window_end"
MOMENT = pa.timestamp("us", tz="UTC")
WINDOW_FIELDS = [pa.field(START, MOMENT), pa.field(END, MOMENT)]

Array = Any
"""A NumPy array."""


def checked(over: Duration, every: Duration | None) -> Panes:
    """The panes of windows of the length `over`, one after the other or one each `every`."""
    over_us, every_us = duration_us(over), duration_us(over if every is None else every)
    if over_us <= 0 or every_us <= 0:
        raise InvalidInput(
            f"A window of {over!r}{'' if every is None else f' every {every!r}'} is empty.",
            advice='Use positive times, such as over="10 seconds", every="2 seconds".',
        )
    if every_us > over_us:
        raise InvalidInput(
            f"Rows between windows of {over!r} every {every!r} rows would be lost.",
            advice="Use an every= that is not longer than over=, and filter the windows afterwards.",
        )
    return Panes(over_us, every_us)


class Panes(NamedTuple):
    """How windows lie in time, in µs."""

    over: int
    every: int

    @property
    def width(self) -> int:
        """How wide a pane is."""
        return gcd(self.over, self.every)

    def of(self, times: Array) -> Array:
        """The starts of the panes in which times are."""
        return times // self.width * self.width

    def are_open(self, panes: Array, before: int) -> Array:
        """Which panes may have rows after a time."""
        return panes > before - self.width

    def close(self, table: StateTable, time: Time) -> tuple[pa.Table, Array]:
        """The parts of the windows that end with a batch, each once for every such window it is in, and that window's start."""
        done, last = self._last_ended(time.before), self._last_ended(time.until)
        if last <= done:
            return table.empty(), np.zeros(0, np.int64)
        parts = table.between(_bounded(done + self.every - 1), _bounded(last + self.over - 1))
        table.drop(_bounded(last + self.every - 1))
        at = column(parts, AT)
        first = np.maximum(((at - self.over) // self.every + 1) * self.every, _bounded(done + self.every))
        counts = np.maximum((np.minimum(at // self.every * self.every, last) - first) // self.every + 1, 0)
        if bool((counts == 1).all()):
            return parts, first
        place = np.repeat(np.arange(len(at)), counts)
        turn = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        return parts.take(pa.array(place)), first[place] + turn * self.every

    def columns(self, starts: Array) -> dict[str, pa.Array]:
        """Start and end of windows, as columns of a result."""
        return {START: pa.array(starts).cast(MOMENT), END: pa.array(starts + self.over).cast(MOMENT)}

    def _last_ended(self, time: int) -> int:
        """The start of the last window whose last microsecond is not after a time."""
        return _bounded((time + 1 - self.over) // self.every * self.every)


def _bounded(time: int) -> int:
    """A time as 64 bits hold it."""
    return min(max(time, MIN_TIME), MAX_TIME)
