"""Signed rows: the changes of a table as rows that come (+1) and rows that go (-1).

What is computed over a table that changes takes the earlier row back before it adds the one that replaces it, also where the row now
belongs to another group. This operator, keyed by the table's key, remembers the row that each key has, and gives both.

A row with `_deleted` takes its key away. Of several rows of a key the one with the latest time `at` (or the highest `_offset`) counts,
and of equal times the last in the log, however batches are cut; a deletion is remembered then, so that an earlier row that comes
later does not bring its key back. Without a time the later batch counts, and a batch that has two rows of one key is refused.

State: `rows`, the row of each key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import TimestampType

from headwater.model.errors import InvalidInput
from headwater.model.schema import DELETED
from headwater.processing.operators.operator import Input, Time, in_log_order, operate
from headwater.processing.operators.row_order import flags, in_fixed_order
from headwater.processing.spark.types import to_arrow
from headwater.processing.state.sorted_runs import H1, H2, Keys, column
from headwater.processing.state.state import State, TableSpec

SIGN = "_sign"
OFFSET = "_offset"
"""The log's own order, which it keeps of each key."""

_ROWS, _KNOWN = "rows", "_known"


def signed(df: DataFrame, key: str | Sequence[str], *, at: str | None, uid: str | None) -> DataFrame:
    """The rows of `df`, changes of a table with this key, with their `_sign`."""
    names = [key] if isinstance(key, str) else list(key)
    # The time says which change is the later, no more: one that the watermark has passed counts as well, so this does not note it.
    if at is not None and not (
        at in df.columns and (at == OFFSET or isinstance(df.schema[at].dataType, TimestampType))
    ):
        raise InvalidInput(
            f"Column {at!r} with times (TIMESTAMP) does not exist.",
            advice=f"Name another with at=, or {OFFSET!r}, which the stage has with log_columns=[{OFFSET!r}].",
        )
    operator = SignedRows(to_arrow(df.schema), names, at, in_log_order=in_log_order(df))
    return operate(operator, [Input(df, names)], uid=None if uid is None else f"{uid}.rows")


def check_facts(df: DataFrame, *, at: str | None) -> None:
    """Refuses what only changes of a table have, where no key says that they are such."""
    if DELETED.name in df.columns:
        raise InvalidInput(
            f"Rows with {DELETED.name} are changes of a table.",
            advice=f"Name its key with key=, or drop the column {DELETED.name}.",
        )
    if at is not None:
        raise InvalidInput("at= orders the rows of a key, and key= is missing.", advice="Name the key with key=.")


class SignedRows:
    """The operator."""

    name = "signed"
    is_prompt = True

    def __init__(self, schema: pa.Schema, key: Sequence[str], at: str | None, *, in_log_order: bool = True) -> None:
        """`in_log_order`: rows come in the order of the log (see `operator`)."""
        self._in_log_order = in_log_order
        self.settings = (tuple(key), at)
        self._own = [field for field in schema if field.name != DELETED.name]
        self._deletes = DELETED.name in schema.names
        self.schema = pa.schema([*self._own, pa.field(SIGN, pa.int64())])
        self._key, self._at = key, at
        fields = [pa.field(f"r{number}", field.type) for number, field in enumerate(self._own)]
        self.tables = {_ROWS: TableSpec("keyed", [*fields, pa.field("deleted", pa.bool_())])}

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """What goes, and what comes instead."""
        rows = inputs[0]
        if not rows.num_rows:
            return self.schema.empty_table()
        keys = Keys.of(rows)
        found, _ = state[_ROWS].find(keys)
        known = self._table({f.name: found.column(f"r{at}") for at, f in enumerate(self._own)}, found, known=True)
        known = known.append_column(DELETED, found.column("deleted"))
        is_deleted = rows.column(DELETED.name).fill_null(False) if self._deletes else flags(rows, value=False)
        fresh = self._table({f.name: rows.column(f.name) for f in self._own}, rows, known=False)
        fresh = fresh.append_column(DELETED, is_deleted)
        if self._at is None:
            self._check_single(keys, rows)
            goes = known
        else:
            fresh = self._newest(known, fresh)
            asked = Keys.of(pa.concat_tables([fresh, known]).select([H1, H2]))
            is_replaced = np.isin(asked.row[fresh.num_rows :], asked.row[: fresh.num_rows])
            goes = known.filter(pa.array(is_replaced))
        self._remember(state, fresh)
        both = pa.concat_tables([_signed(goes, -1), _signed(fresh, 1)])
        return both.filter(pc.invert(both.column(DELETED.name))).select(self.schema.names)

    def _table(self, columns: dict[str, pa.ChunkedArray], rows: pa.Table, *, known: bool) -> pa.Table:
        """Rows with the columns of the table, their hashes, and whether they were known before."""
        own = {field.name: columns[field.name].cast(field.type) for field in self._own}
        return pa.table({H1: rows.column(H1), H2: rows.column(H2), **own, _KNOWN: flags(rows, value=known)})

    def _newest(self, known: pa.Table, fresh: pa.Table) -> pa.Table:
        """The rows that are the newest of their key and were not known."""
        assert self._at is not None
        columns = [*(field.name for field in self._own), DELETED.name, _KNOWN, H1, H2]
        if not self._in_log_order:
            fresh = in_fixed_order(fresh, self._at)
        both = pa.concat_tables([known, fresh]).select(
            columns
        )  # what is known came before, so of equal times it counts no more
        both = in_fixed_order(both, self._at, by_key=True, in_log_order=True)
        h1, h2 = column(both, H1), column(both, H2)
        is_last = np.r_[(h1[1:] != h1[:-1]) | (h2[1:] != h2[:-1]), True]
        return both.filter(pa.array(is_last & ~column(both, _KNOWN))).select(fresh.column_names)

    def _remember(self, state: State, rows: pa.Table) -> None:
        columns = {f"r{number}": rows.column(field.name) for number, field in enumerate(self._own)}
        put = pa.table({H1: rows.column(H1), H2: rows.column(H2), **columns, "deleted": rows.column(DELETED.name)})
        if self._at is None:
            gone = put.filter(put.column("deleted"))
            state[_ROWS].remove(Keys.of(gone))
            put = put.filter(pc.invert(put.column("deleted")))
        state[_ROWS].put(put)

    def _check_single(self, keys: Keys, rows: pa.Table) -> None:
        if len(keys) == rows.num_rows:
            return
        twice = int(np.flatnonzero(np.bincount(keys.row) > 1)[0])
        row = int(np.flatnonzero(keys.row == twice)[0])
        values = ", ".join(f"{name}={rows.column(name)[row].as_py()!r}" for name in self._key)
        raise InvalidInput(
            f"A batch has two rows of the key {values}: which one is the later?",
            advice=f"Name the column with the time of a change with at=. For a table of the log, use at={OFFSET!r}, its order there.",
        )


def _signed(rows: pa.Table, sign: int) -> pa.Table:
    return rows.append_column(SIGN, pa.array(np.full(rows.num_rows, sign, np.int64)))
