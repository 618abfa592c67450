"""`hw.windowed`: aggregates of each group in each window of event time, given once.

A window is given when the watermark has passed it: then it is complete, however batches were cut and rows were shuffled within the
lateness. Windows follow each other (`over`), overlap (`over`, `every`; see `panes`), or are sessions (`gap`; see `session_windows`).
They are Spark's own, to the microsecond. A row is given before any time later than its `window_end` has passed, so that is an event time by
which another operator can work behind.

Rows can be combined before they come to the operator's task: `combine` makes of the rows of a group and pane one with their partial
sums (see `partials`). It leaves out rows without a time; what is late must not be among them.

State: `panes`, partial sums of each group in each pane, by the start of the pane; several for one where several batches brought rows,
until runs are merged.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from headwater.model.clock import NO_TIME, Duration, duration_us
from headwater.model.errors import InvalidInput
from headwater.processing.operators.aggregate import Aggregate, Wanted, aggregates_of
from headwater.processing.operators.grouping import ALL, Groups, keyed, with_all
from headwater.processing.operators.operator import Input, Time, note_windows, operate
from headwater.processing.operators.panes import END, PANE, START, WINDOW_FIELDS, Panes, checked
from headwater.processing.operators.partials import KINDS, Partials
from headwater.processing.operators.row_order import in_time, time_column
from headwater.processing.operators.session_windows import Sessions
from headwater.processing.spark.types import to_arrow
from headwater.processing.state.sorted_runs import AT, H1, H2, Keys, column, in_order
from headwater.processing.state.state import State, TableSpec
from headwater.processing.time.event_time import MARK

_PANES = "panes"


def windowed(
    df: DataFrame,
    by: str | Sequence[str] | None = None,
    *,
    over: Duration | None = None,
    every: Duration | None = None,
    gap: Duration | None = None,
    at: str | None = None,
    uid: str | None = None,
    **wanted: Wanted,
) -> DataFrame:
    """Aggregates of each group `by`, or of all rows, in each window of event time `at`, with its `window_start` and `window_end`.

    hw.windowed(bids, by="auction", over="10 seconds", every="2 seconds", n="count", highest=("max", "price"))
    hw.windowed(bids, by="bidder", gap="10 seconds", n="count")
    """
    panes = _shape(over, every, gap)
    group = [] if by is None else [by] if isinstance(by, str) else list(by)
    _check_names(df, group)
    time = time_column(df, at)
    aggregates = aggregates_of(wanted, to_arrow(df.schema), taken=[*group, START, END], kinds=KINDS)
    used = [each.column for each in aggregates if each.column is not None]
    rows, key = keyed(df.select(*(F.col(f"`{name}`") for name in dict.fromkeys([*group, time, *used]))), group)
    schema = to_arrow(rows.schema)
    if panes is None:
        return operate(Sessions(schema, key, time, duration_us(gap), aggregates), [Input(rows, key)], uid=uid)
    is_declared = panes.over == panes.every and MARK in (df.schema[time].metadata or {})
    takes_late = is_declared and note_windows(panes.over)
    operator = Windowed(schema, key, time, panes, aggregates, takes_late=takes_late)
    return operate(operator, [Input(rows, key)], uid=uid)


def _check_names(df: DataFrame, group: Sequence[str]) -> None:
    """Refuses groups by columns that are not there, or that a result has for its windows."""
    for name in group:
        if name not in df.columns:
            raise InvalidInput(
                f"The column {name!r} to group by does not exist.", advice=f"Columns are {', '.join(df.columns)}."
            )
        if name in (START, END):
            raise InvalidInput(f"The result has a column {name!r} of its own.", advice="Rename yours first.")


def _shape(over: Duration | None, every: Duration | None, gap: Duration | None) -> Panes | None:
    """How windows lie; None for sessions."""
    if (over is None) == (gap is None):
        raise InvalidInput(
            "over= and gap= are both missing." if over is None else "over= and gap= exclude each other.",
            advice='Use over="10 seconds", with every="2 seconds" where they overlap; or gap="10 seconds" for sessions.',
        )
    if over is not None:
        return checked(over, every)
    if every is not None:
        raise InvalidInput("Sessions begin with their first row, so every= does not apply.", advice="Leave out every=.")
    if duration_us(gap) <= 0:
        raise InvalidInput(f"A gap of {gap!r} is none.", advice='Use a positive time, such as gap="10 seconds".')
    return None


class Windowed:
    """The operator for windows of one length."""

    name = "windowed"
    keeps = END

    def __init__(
        self, schema: pa.Schema, group: Sequence[str], at: str, panes: Panes, aggregates: Sequence[Aggregate], *,
        takes_late: bool = False,
    ) -> None:  # fmt: skip
        """`takes_late`: a row that the watermark has passed counts while its window is open."""
        self._takes_late = takes_late
        self.settings = (tuple(group), at, *panes, tuple(aggregates))
        shown = [schema.field(name) for name in group if name != ALL]
        self.schema = pa.schema([*shown, *WINDOW_FIELDS, *(pa.field(each.name, each.type) for each in aggregates)])
        self.at = (
            None if takes_late else at
        )  # what it leaves out is then late by its window, and was left out where it was read
        self._group, self._at, self._panes, self._partials = list(group), at, panes, Partials(aggregates, schema)
        self.remembers = self._partials.used
        keys = [schema.field(name) for name in group]
        self.combined = pa.schema([*keys, pa.field(PANE, pa.int64()), *self._partials.fields])
        own = [pa.field(f"b{number}", field.type) for number, field in enumerate(keys)]
        self.tables = {_PANES: TableSpec("timed", [*own, *self._partials.fields])}

    def combine(self, rows: pa.Table) -> pa.Table:
        """One row for each group and pane, without hashes."""
        rows = with_all(rows) if self._group == [ALL] else rows
        rows, times = in_time(rows, self._at)
        panes = self._panes.of(times)
        groups = Groups.of([*(rows.column(name) for name in self._group), panes], len(panes))
        one = pa.array(groups.one)
        keys = {name: rows.column(name).take(one) for name in self._group}
        return pa.table({**keys, PANE: panes[groups.one], **self._partials.of(rows, groups)}).cast(self.combined)

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """The windows that end with the batch."""
        table = state[_PANES]
        table.folds = self._folded
        table.put(self._parts(inputs[0], time))
        parts, starts = self._panes.close(table, time)
        if not parts.num_rows:
            return self.schema.empty_table()
        groups = Groups.of([Keys.of(parts).row, starts], parts.num_rows)
        shown = {
            name: parts.column(f"b{at}").take(pa.array(groups.one))
            for at, name in enumerate(self._group)
            if name != ALL
        }
        summed = pa.table(self._partials.folded(parts, groups))
        return pa.table({**shown, **self._panes.columns(starts[groups.one]), **self._partials.results(summed)})

    def _parts(self, rows: pa.Table, time: Time) -> pa.Table:
        """The partial sums of what comes, combined or not, of each key and pane."""
        is_combined = PANE in rows.column_names
        if is_combined:
            rows = rows.filter(pa.array(self._panes.are_open(column(rows, PANE), time.before)))
            panes = column(rows, PANE)
        else:
            rows, times = in_time(rows, self._at, after=NO_TIME if self._takes_late else time.before)
            panes = self._panes.of(times)
            if self._takes_late:
                is_open = panes + (self._panes.width - 1) > time.before
                rows, panes = rows.filter(pa.array(is_open)), panes[is_open]
        groups = Groups.of([Keys.of(rows).row, panes], len(panes))
        sums = self._partials.folded(rows, groups) if is_combined else self._partials.of(rows, groups)
        names = {H1: H1, H2: H2} | {f"b{at}": name for at, name in enumerate(self._group)}
        keys = {name: rows.column(own).take(pa.array(groups.one)) for name, own in names.items()}
        return pa.table({**keys, AT: pa.array(panes[groups.one], pa.int64()), **sums})

    def _folded(self, parts: pa.Table) -> pa.Table:
        """One row for each key and pane."""
        groups = Groups.of([Keys.of(parts).row, column(parts, AT)], parts.num_rows)
        if len(groups) == parts.num_rows:
            return parts
        names = [H1, H2, AT, *(f"b{at}" for at in range(len(self._group)))]
        kept = parts.select(names).take(pa.array(groups.one))
        summed = self._partials.folded(parts, groups)
        return in_order(pa.table({name: kept.column(name) for name in names} | summed), "timed")
