"""The rows of a source's topic of transactions: begin and end of each, in turn. One function, no state."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headwater.capture.byte_columns import Indexes
from headwater.capture.source import BEGIN, COMMITTED, END, TRANSACTIONS_SCHEMA

_STATUS = pa.array([BEGIN, END])


def transaction_rows(
    names: pa.Array, positions: pa.Array, committed_us: Indexes, *, tables: list[str], changes: Indexes
) -> pa.Table:
    """Some transactions, in commit order: `changes` has a row for each table and a column for each transaction.

    `positions` are those of begin and end in turn, so twice as many.
    """
    count = len(names)
    twice = pa.array(np.repeat(np.arange(count), 2))
    table, transaction = np.nonzero(changes.T)[::-1]
    sizes = np.zeros(2 * count, np.int64)
    sizes[1::2] = np.bincount(transaction, minlength=count)
    offsets = np.zeros(2 * count + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    begun = np.zeros(2 * count, bool)
    begun[0::2] = True
    entries = pa.array(changes[table, transaction])
    keys = pa.array(tables, pa.string()).take(pa.array(table)) if tables else pa.array([], pa.string())
    type_ = TRANSACTIONS_SCHEMA.field("tables").type
    return pa.Table.from_arrays(
        [
            names.take(twice),
            _STATUS.take(pa.array(np.tile([0, 1], count))),
            positions,
            pa.array(np.repeat(committed_us, 2)).cast(COMMITTED),
            pa.array(np.repeat(changes.sum(axis=0), 2), mask=begun),
            pa.MapArray.from_arrays(pa.array(offsets), keys, entries, type=type_, mask=pa.array(begun)),
        ],
        schema=TRANSACTIONS_SCHEMA,
    )
