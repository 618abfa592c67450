"""Rows of an SQLite changelog as changes, column by column.

A transaction here is what committed between two looks of the capture: SQLite has nothing by which a trigger could tell one transaction from
the next. So transactions are never divided, and those that were found together are told as one. `Telling` follows one from its begin to
its end over any number of pieces.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.capture.source import (
    BEGIN,
    COMMITTED,
    DELETE,
    END,
    INSERT,
    TRANSACTIONS_SCHEMA,
    ChangeBatch,
    Changes,
    TableChange,
    changes_schema,
)
from headwater.capture.sqlite.changelog import SCHEMA, ChangelogLayout
from headwater.capture.sqlite.tables import SQLiteTable
from headwater.capture.sqlite.values import KeyMisfit, Misfits, headers_column, to_columns
from headwater.model.schema import HEADERS

_PIECE_ROWS = 1000
_SEQ, _LAYOUT, _OP, _AT = range(4)
_FIXED = 4
_EPOCH_DAYS = 2440587.5
_DAY_MS = 86_400_000


def fetch_columns(cursor: sqlite3.Cursor, *, bytes_max: int) -> list[list[Any]]:
    """The rows of a cursor as columns, all of them or up to about so many bytes; no columns where there are no rows."""
    pieces: list[tuple[tuple[Any, ...], ...]] = []
    size = 0
    while size < bytes_max and (fetched := cursor.fetchmany(_PIECE_ROWS)):
        piece = tuple(zip(*fetched, strict=True))
        pieces.append(piece)
        size += sum(map(_bytes_of, piece))
    return [list(chain.from_iterable(parts)) for parts in zip(*pieces, strict=True)]


def position_of(number: int) -> str:
    """A change's number as a position: sorted as text it sorts as a number."""
    return f"{number:016d}"


class Telling:
    """Turns pieces of the changelog into `Changes`; what it remembers is how far the present transaction has been told."""

    def __init__(self) -> None:
        self._transaction: str | None = None
        self._events: Counter[str] = Counter()

    def tell(self, columns: Sequence[Sequence[Any]], layouts: Mapping[int, ChangelogLayout], *, end: int) -> Changes:
        """What the first rows of a piece say: changes up to where a table changes, or how tables have changed.

        The transaction is over at `end`, and wherever a table changes: that is a transaction of our own.
        """
        ops = columns[_OP]
        cut = ops.index(SCHEMA) if SCHEMA in ops else len(ops)
        if cut == 0:
            return self._schemas(columns, layouts) if self._transaction is None else self._over(columns)
        last = columns[_SEQ][cut - 1]
        whole = last == end or cut < len(ops)
        return self._changes([column[:cut] for column in columns], layouts, whole=whole)

    def _schemas(self, columns: Sequence[Sequence[Any]], layouts: Mapping[int, ChangelogLayout]) -> Changes:
        count = next((at for at, op in enumerate(columns[_OP]) if op != SCHEMA), len(columns[_OP]))
        told = zip(columns[_LAYOUT][:count], columns[_FIXED][:count], columns[_FIXED + 1][:count], strict=True)
        tables = [
            TableChange(table=layouts[number].table.info(), refresh=bool(refresh), error=error)
            for number, refresh, error in told
        ]
        return Changes(tables=tuple(tables), end=position_of(columns[_SEQ][count - 1]))

    def _over(self, columns: Sequence[Sequence[Any]]) -> Changes:
        """The end of a transaction whose last change was the last of the piece before."""
        last = position_of(columns[_SEQ][0] - 1)
        rows = [
            (self._transaction, END, last, _times(columns[_AT])[0].as_py(), self._events.total(), dict(self._events))
        ]
        self._transaction, self._events = None, Counter()
        return Changes(transactions=_transactions(rows), end=last)

    def _changes(
        self, columns: Sequence[Sequence[Any]], layouts: Mapping[int, ChangelogLayout], *, whole: bool
    ) -> Changes:
        numbers = np.asarray(columns[_SEQ], np.int64)
        committed = _times(columns[_AT])
        rows: list[tuple[Any, ...]] = []
        if self._transaction is None:
            self._transaction = position_of(int(numbers[0]))
            rows.append((self._transaction, BEGIN, self._transaction, committed[0].as_py(), None, None))
        orders = np.arange(len(numbers), dtype=np.int64) + self._events.total()
        batches, errors, told = [], [], Counter[str]()
        which = np.asarray(columns[_LAYOUT], np.int64)
        for number in dict.fromkeys(columns[_LAYOUT]):
            mask = which == number
            layout = layouts[number]
            picked = columns if mask.all() else [list(compress(column, mask)) for column in columns]
            try:
                changes = _table_changes(
                    picked, layout.table, committed.filter(pa.array(mask)), self._transaction, orders[mask]
                )
            except KeyMisfit as error:
                errors.append(TableChange(table=layout.table.info(), error=misfit_text(layout.table.name, error)))
                continue
            told[layout.table.name] += changes.num_rows
            batches.append(ChangeBatch(layout.table.name, changes))
        self._events += told
        last = position_of(int(numbers[-1]))
        if whole:
            rows.append((self._transaction, END, last, committed[-1].as_py(), self._events.total(), dict(self._events)))
            self._transaction, self._events = None, Counter()
        transactions = _transactions(rows)
        return Changes(batches=tuple(batches), transactions=transactions, tables=tuple(errors), end=last, whole=whole)


def read_rows(columns: Sequence[Sequence[Any]], table: SQLiteTable) -> pa.Table:
    """Rows of a table itself, with a column of headers where some value does not fit; `KeyMisfit`."""
    misfits: Misfits = {}
    rows = pa.Table.from_arrays(to_columns(columns, table.schema, misfits), schema=table.schema)
    headers = headers_column(misfits, rows.num_rows)
    return rows if headers is None else rows.append_column(HEADERS, headers)


def misfit_text(table: str, error: KeyMisfit) -> str:
    """Why a table has stopped that has a key which cannot be one."""
    return (
        f"Table {table!r} has a row with {error.literal} in the key column {error.column!r}, which does not "
        "have its declared type. Correct or delete the row, and start the capture again: it copies this table again."
    )


def _transactions(rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    named = [dict(zip(TRANSACTIONS_SCHEMA.names, row, strict=True)) for row in rows]
    return pa.Table.from_pylist(named, schema=TRANSACTIONS_SCHEMA)


def _table_changes(
    columns: Sequence[Sequence[Any]],
    table: SQLiteTable,
    committed: pa.Array,
    transaction: str,
    orders: npt.NDArray[np.int64],
) -> pa.Table:
    """The changes of one table; the deletion of a row that has no key, and so never came into the log, is left out."""
    count, size = len(columns[_SEQ]), len(table.columns)
    ops = columns[_OP]
    misfits: Misfits = {}
    after = to_columns(columns[_FIXED : _FIXED + size], table.schema, misfits, optional=True)
    before = to_columns(columns[_FIXED + size : _FIXED + 2 * size], table.schema, optional=True)
    is_insert, is_delete = (np.array([op == kind for op in ops], bool) for kind in (INSERT, DELETE))
    _check_keys(after, table, ~is_delete)
    schema = changes_schema(table.schema)
    fields = list(schema.field("after").type)
    arrays = [
        pa.array(ops, pa.string()),
        pa.StructArray.from_arrays(before, fields=fields, mask=pa.array(is_insert)),
        pa.StructArray.from_arrays(after, fields=fields, mask=pa.array(is_delete)),
        pa.array(list(map(position_of, columns[_SEQ])), pa.string()),
        pa.array([transaction] * count, pa.string()),
        pa.array(orders),
        committed,
    ]
    changes = pa.Table.from_arrays(arrays, schema=schema)
    headers = headers_column(misfits, count)
    changes = changes if headers is None else changes.append_column(HEADERS, headers)
    nameless = is_delete & _any_null(before, table)
    return changes.filter(pa.array(~nameless)) if nameless.any() else changes


def _any_null(rows: Sequence[pa.Array], table: SQLiteTable) -> npt.NDArray[np.bool_]:
    """Which rows lack a part of their key."""
    keys = [rows[table.columns.index(name)] for name in table.key]
    return np.logical_or.reduce([key.is_null().to_numpy(zero_copy_only=False) for key in keys])


def _check_keys(after: Sequence[pa.Array], table: SQLiteTable, there: npt.NDArray[np.bool_]) -> None:
    for name in table.key:
        column = after[table.columns.index(name)]
        if column.null_count and bool((column.is_null().to_numpy(zero_copy_only=False) & there).any()):
            raise KeyMisfit(name, None)


def _times(days: Iterable[Any]) -> pa.Array:
    """Julian days, which SQLite works out to the millisecond, as times."""
    ms = np.rint((np.asarray(days, np.float64) - _EPOCH_DAYS) * _DAY_MS).astype(np.int64)
    return pa.array(ms * 1000).view(COMMITTED)


def _bytes_of(column: Sequence[Any]) -> int:
    """About how much room the values of a column take."""
    kinds = set(map(type, column))
    if kinds.isdisjoint((str, bytes)):
        return 8 * len(column)
    if kinds <= {str, bytes, type(None)}:
        return sum(map(len, filter(None, column)))
    return sum(len(value) for value in column if isinstance(value, (str, bytes)))
