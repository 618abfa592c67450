"""`hw.lookup`: each event with the row of a table as it was at the event's time.

An event waits until the watermark has passed it: then no change of the table that it should see is still to come. So every replay gives
every event the row of its time, however late the change was read. At equal times the table's change comes first (`ties="table"`), or
the event does (`ties="event"`). Of several changes of a row at one time, as a transaction of a database makes them, the last in the log
counts, whichever batch it came with.

State: `waiting`, events that the watermark has not passed; `versions`, the rows that the table had, as long as an event may ask for them:
of each key those of the last time that the watermark has passed, and all later ones. Versions of a key are in the order in which they
came, so of equal times the last is the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from headwater.model.errors import InvalidInput
from headwater.model.schema import DELETED
from headwater.processing.graph.table import Table
from headwater.processing.operators.operator import Input, Time, in_log_order, operate
from headwater.processing.operators.row_order import in_fixed_order, time_column, times_of
from headwater.processing.spark.types import to_arrow
from headwater.processing.state.sorted_runs import AT, H1, H2, Keys, column
from headwater.processing.state.state import State, TableSpec

How = Literal["left", "inner"]
Ties = Literal["table", "event"]
_WAITING, _VERSIONS = "waiting", "versions"


def lookup(
    events: DataFrame,
    table: Table | DataFrame,
    on: str | Sequence[str],
    *,
    at: str | None = None,
    table_at: str | None = None,
    how: How = "left",
    ties: Ties = "table",
    uid: str | None = None,
) -> DataFrame:
    """The events, each with the columns that the table's row of the same key `on` had at the event's time `at`.

    `table` is a table of the application, or a DataFrame of its changes with their time `table_at`.
    """
    if how not in ("left", "inner") or ties not in ("table", "event"):
        raise InvalidInput(
            f"how={how!r}, ties={ties!r} are not valid.", advice='Use "left" or "inner"; "table" or "event".'
        )
    changes = table.versions if isinstance(table, Table) else table
    key = [on] if isinstance(on, str) else list(on)
    for name in key:
        if (
            name in events.columns
            and name in changes.columns
            and events.schema[name].dataType != changes.schema[name].dataType
        ):
            raise InvalidInput(
                f"Column {name!r} is {events.schema[name].dataType.simpleString()} in the events and "
                f"{changes.schema[name].dataType.simpleString()} in the table.",
                advice="Cast one of them.",
            )
    operator = Lookup(
        to_arrow(events.schema), to_arrow(changes.schema), key,
        at=time_column(events, at), table_at=time_column(changes, table_at), how=how, ties=ties,
        in_log_order=in_log_order(changes),
    )  # fmt: skip
    return operate(operator, [Input(events, key), Input(changes, key)], uid=uid)


class Lookup:
    """The operator."""

    name = "lookup"

    def __init__(
        self, events: pa.Schema, table: pa.Schema, key: Sequence[str], *, at: str, table_at: str, how: How, ties: Ties,
        in_log_order: bool = True,
    ) -> None:  # fmt: skip
        """`in_log_order`: the table's rows come in the order of the log (see `operator`)."""
        self.settings = (tuple(key), at, table_at, how, ties)
        self._own = events.names
        self._looked = [name for name in table.names if name not in (*key, table_at, DELETED.name)]
        twice = sorted(set(self._own) & set(self._looked))
        if twice:
            raise InvalidInput(
                f"Both the events and the table have a column {twice[0]!r}.", advice="Rename one of them."
            )
        found = [table.field(name).with_nullable(True) for name in self._looked]
        self.schema = pa.schema([*events, *found])
        self.keeps = at
        self.at = at
        self._at, self._table_at, self._how, self._ties = at, table_at, how, ties
        self._in_log_order = in_log_order
        self._deletes = DELETED.name in table.names
        own = [pa.field(f"r{number}", field.type) for number, field in enumerate(events)]
        columns = [pa.field(f"c{number}", field.type) for number, field in enumerate(found)]
        self.tables = {
            _WAITING: TableSpec("timed", own),
            _VERSIONS: TableSpec("gathered", [pa.field("at", pa.int64()), pa.field("gone", pa.bool_()), *columns]),
        }

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """The events that the watermark has passed, with what they found."""
        self._wait(state, inputs[0], time)
        self._learn(state, inputs[1])
        state[_VERSIONS].keeps = lambda rows: pa.array(_is_needed(rows, time.until))
        due = state[_WAITING].take(time.until)
        if not due.num_rows:
            return self.schema.empty_table()
        keys = Keys.of(due)
        versions, number = state[_VERSIONS].find(keys)
        versions, number = _last_of_times(versions, number)
        found = _last_before(keys.row, column(due, AT), number, column(versions, "at"), is_equal=self._ties == "table")
        found[found >= 0] = np.where(column(versions, "gone"), -1, np.arange(len(number)))[found[found >= 0]]
        if self._how == "inner":
            due, found = due.filter(pa.array(found >= 0)), found[found >= 0]
        place = pa.array(found, mask=found < 0)
        columns = {name: due.column(f"r{at}") for at, name in enumerate(self._own)}
        return pa.table(columns | {name: versions.column(f"c{at}").take(place) for at, name in enumerate(self._looked)})

    def _wait(self, state: State, rows: pa.Table, time: Time) -> None:
        times = times_of(rows, self._at)
        columns = {f"r{number}": rows.column(name) for number, name in enumerate(self._own)}
        kept = pa.table({H1: rows.column(H1), H2: rows.column(H2), AT: pa.array(times, pa.int64()), **columns})
        state[_WAITING].put(kept.filter(pa.array(times > time.before)))

    def _learn(self, state: State, rows: pa.Table) -> None:
        if not self._in_log_order:
            rows = in_fixed_order(rows, self._table_at)
        gone = rows.column(DELETED.name).fill_null(False) if self._deletes else pa.array(np.zeros(rows.num_rows, bool))
        columns = {f"c{number}": rows.column(name) for number, name in enumerate(self._looked)}
        times = pa.array(times_of(rows, self._table_at), pa.int64())
        state[_VERSIONS].put(pa.table({H1: rows.column(H1), H2: rows.column(H2), "at": times, "gone": gone, **columns}))


def _last_of_times(versions: pa.Table, number: Any) -> tuple[pa.Table, Any]:
    """The versions of each key in the order of their times; of several at one time, the last that came."""
    times = column(versions, "at")
    order = np.lexsort((times, number))
    number, times = number[order], times[order]
    is_last = np.r_[(number[1:] != number[:-1]) | (times[1:] != times[:-1]), np.ones(min(len(number), 1), bool)]
    return versions.take(pa.array(order[is_last])), number[is_last]


def _last_before(key: Any, at: Any, known: Any, since: Any, *, is_equal: bool) -> Any:
    """For each event the last version of its key before its time, or at it; -1 where there is none. Versions are in order."""
    if not len(known):
        return np.full(len(key), -1)
    times = np.unique(since)
    width = len(times) + 1
    places = known * width + np.searchsorted(times, since) + 1
    found = np.searchsorted(places, key * width + np.searchsorted(times, at, "right" if is_equal else "left"), "right")
    found -= 1
    found[known[found] != key] = -1
    return found


def _is_needed(versions: pa.Table, until: int) -> Any:
    """Which versions an event after a time can ask for: the last of each key up to it, and all later ones."""
    times, keys = column(versions, "at"), Keys.of(versions)
    passed = times <= until
    last = np.full(len(keys), -(2**63))
    np.maximum.at(last, keys.row[passed], times[passed])
    return ~passed | (times == last[keys.row])
