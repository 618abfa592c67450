"""`hw.lookup`: each event with the row of a table as it was at the event's time.

An event waits until the watermark has passed it: then no change of the table that it should see is still to come. So every replay gives
every event the row of its time, however late the change was read. At equal times the table's change comes first (`ties="table"`), or
the event does (`ties="event"`).

State: `waiting`, events that the watermark has not passed; `versions`, the rows that the table had, as long as an event may ask for them:
of each key the last one that the watermark has passed, and all later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from headwater.model.errors import InvalidInput
from headwater.model.schema import DELETED
from headwater.processing.columns import time_column, times_of
from headwater.processing.operator import Input, Time, operate
from headwater.processing.runs import AT, H1, H2, Keys, column
from headwater.processing.sql import ask
from headwater.processing.state import State, TableSpec
from headwater.processing.table import Table
from headwater.processing.types import to_arrow

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
            f"how={how!r}, ties={ties!r} make no sense.", advice='Use "left" or "inner"; "table" or "event".'
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
    )  # fmt: skip
    return operate(operator, [Input(events, key), Input(changes, key)], uid=uid)


class Lookup:
    """The operator."""

    name = "lookup"

    def __init__(
        self, events: pa.Schema, table: pa.Schema, key: Sequence[str], *, at: str, table_at: str, how: How, ties: Ties
    ) -> None:
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
        self._at, self._table_at, self._how, self._ties = at, table_at, how, ties
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
        found = self._join(
            pa.table({"k": pa.array(keys.row), "row": pa.array(np.arange(due.num_rows)), "at": due.column(AT)}),
            versions.drop_columns([H1, H2]).append_column("k", pa.array(number)),
        )
        due = due.take(found.column("row"))
        columns = {name: due.column(f"r{place}") for place, name in enumerate(self._own)}
        return pa.table(columns | {name: found.column(f"c{place}") for place, name in enumerate(self._looked)})

    def _wait(self, state: State, rows: pa.Table, time: Time) -> None:
        times = times_of(rows, self._at)
        columns = {f"r{number}": rows.column(name) for number, name in enumerate(self._own)}
        kept = pa.table({H1: rows.column(H1), H2: rows.column(H2), AT: pa.array(times, pa.int64()), **columns})
        state[_WAITING].put(kept.filter(pa.array(times > time.before)))

    def _learn(self, state: State, rows: pa.Table) -> None:
        gone = rows.column(DELETED.name).fill_null(False) if self._deletes else pa.array(np.zeros(rows.num_rows, bool))
        columns = {f"c{number}": rows.column(name) for number, name in enumerate(self._looked)}
        times = pa.array(times_of(rows, self._table_at), pa.int64())
        state[_VERSIONS].put(pa.table({H1: rows.column(H1), H2: rows.column(H2), "at": times, "gone": gone, **columns}))

    def _join(self, due: pa.Table, versions: pa.Table) -> pa.Table:
        columns = ", ".join(f"c{number}" for number in range(len(self._looked)))
        picked = "".join(f", v.c{number}" for number in range(len(self._looked)))
        order = f"gone, {columns}" if columns else "gone"
        sooner = ">=" if self._ties == "table" else ">"
        last = f'select *, true as found from versions qualify row_number() over (partition by k, "at" order by {order}) = 1'
        is_met = "where v.found and not v.gone" if self._how == "inner" else ""
        joined = ask(
            f'select due."row", v.gone{picked} from due asof left join ({last}) v on due.k = v.k and due."at" {sooner} v."at" '
            f'{is_met} order by due."row"',
            due=due,
            versions=versions,
        )
        if self._deletes and self._how == "left":
            joined = _without_gone(joined)
        return joined


def _without_gone(joined: pa.Table) -> pa.Table:
    """A row that was deleted by then is no row."""
    is_gone = joined.column("gone").fill_null(False)
    columns = {
        name: values if name in ("row", "gone") else pc.if_else(is_gone, pa.scalar(None, values.type), values)
        for name, values in zip(joined.column_names, joined.columns, strict=True)
    }
    return pa.table(columns)


def _is_needed(versions: pa.Table, until: int) -> Any:
    """Which versions an event after a time can ask for: the last of each key up to it, and all later ones."""
    times, keys = column(versions, "at"), Keys.of(versions)
    passed = times <= until
    last = np.full(len(keys), -(2**63))
    np.maximum.at(last, keys.row[passed], times[passed])
    return ~passed | (times == last[keys.row])
