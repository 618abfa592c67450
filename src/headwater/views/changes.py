"""Changes: what a batch does to a view's rows, as events of the topic `<view>.changes`.

    key STRING NOT NULL      the row's key as text (see `keys`)
    op STRING NOT NULL       insert, update or delete
    old, new STRUCT<…>       the row before and after; null where there is none
    epoch BIGINT NOT NULL    the batch; -1 for what a swap to another generation changed (see `topic`)

A row that did not change is no event. In a compacted topic a deletion is a tombstone besides. Folding the topic up to any
place gives the rows as they were there. Functions only, no state: safe from any thread.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.arrow.json_types import json_texts
from headwater.views.definition import ViewDefinition

KEY = "_key"
"""The column with the key's text, beside the view's own columns."""

CHANGES_KEY = "key"
"""The column with it in the topic of changes, whose key it is."""

INSERT, UPDATE, DELETE = "insert", "update", "delete"


class Delta(msgspec.Struct, frozen=True):
    """What a store has to do: write these rows (with `KEY`), remove those keys. No key is in both, or twice in one."""

    upserts: pa.Table
    deletes: pa.Array


def stored_schema(definition: ViewDefinition) -> pa.Schema:
    """The columns of a view's rows as stores give them: the key's text, then its own, all nullable."""
    return pa.schema(
        [pa.field(KEY, pa.string(), nullable=False), *(field.with_nullable(True) for field in definition.schema)]
    )


def changes_schema(definition: ViewDefinition) -> pa.Schema:
    """The columns of the topic of changes."""
    row = pa.struct([field.with_nullable(True) for field in definition.schema])
    return pa.schema(
        [
            pa.field(CHANGES_KEY, pa.string(), nullable=False),
            pa.field("op", pa.string(), nullable=False),
            pa.field("old", row),
            pa.field("new", row),
            pa.field("epoch", pa.int64(), nullable=False),
        ]
    )


def changes_of(definition: ViewDefinition, rows: pa.Table, old: pa.Table, *, gone: pa.Array, epoch: int) -> pa.Table:
    """The changes that make of the `old` rows the new `rows`; `gone` says which of these are to be removed.

    Both have the columns of `stored_schema`, and each key once. With mode="complete" keys that are only in `old` are removed.
    """
    keys, old_keys = (table.column(KEY).combine_chunks() for table in (rows, old))
    at = pc.index_in(keys, value_set=old_keys)
    before = old.take(at) if old.num_rows else _nulls(old.schema, len(keys))
    exists = at.is_valid().to_numpy(zero_copy_only=False)
    removed = gone.to_numpy(zero_copy_only=False)
    differs = ~_same(rows, before, definition)
    pick = np.flatnonzero(np.where(removed, exists, ~exists | differs))
    ops = np.where(removed, DELETE, np.where(exists, UPDATE, INSERT))[pick]
    news = _structs(rows.take(pa.array(pick)), definition, mask=removed[pick])
    olds = _structs(before.take(pa.array(pick)), definition, mask=~exists[pick])
    changes = _table(definition, keys.take(pa.array(pick)), pa.array(ops, pa.string()), olds, news, epoch)
    if definition.mode != "complete":
        return changes
    vanished = old.filter(pc.invert(pc.is_in(old_keys, value_set=keys)))
    count = vanished.num_rows
    none = _structs(_nulls(old.schema, count), definition, mask=np.ones(count, bool))
    olds = _structs(vanished, definition, mask=np.zeros(count, bool))
    left = vanished.column(KEY).combine_chunks()
    removals = _table(definition, left, pa.array([DELETE] * count, pa.string()), olds, none, epoch)
    return pa.concat_tables([changes, removals]).combine_chunks()


def delta_of(changes: pa.Table, definition: ViewDefinition) -> Delta:
    """What changes, taken in order, do to a store: of each key only the last counts."""
    last = last_of_each(changes, "key")
    deleted = pc.equal(last.column("op"), DELETE)
    return Delta(rows_of(last.filter(pc.invert(deleted)), definition), last.filter(deleted)["key"].combine_chunks())


def rows_of(changes: pa.Table, definition: ViewDefinition) -> pa.Table:
    """The new rows of changes, with their keys; deletions have none and must not be among them."""
    new = changes.column("new").combine_chunks()
    columns = [
        changes.column("key").combine_chunks(),
        *(pc.struct_field(new, name) for name in definition.schema.names),
    ]
    return pa.Table.from_arrays(columns, schema=stored_schema(definition))


def last_of_each(table: pa.Table, column: str) -> pa.Table:
    """The last row of each value of a column, in their order."""
    numbered = pa.table({column: table.column(column), "row": pa.array(np.arange(table.num_rows, dtype=np.int64))})
    last = numbered.group_by(column, use_threads=False).aggregate([("row", "max")])
    return table if last.num_rows == table.num_rows else table.take(last.column("row_max").sort())


def _table(
    definition: ViewDefinition, keys: pa.Array, ops: pa.Array, olds: pa.Array, news: pa.Array, epoch: int
) -> pa.Table:
    epochs = pa.array(np.full(len(keys), epoch, np.int64))
    return pa.Table.from_arrays([keys, ops, olds, news, epochs], schema=changes_schema(definition))


def _structs(rows: pa.Table, definition: ViewDefinition, *, mask: np.ndarray) -> pa.Array:
    type_ = changes_schema(definition).field("new").type
    columns = [rows.column(name).combine_chunks() for name in definition.schema.names]
    return pa.StructArray.from_arrays(columns, fields=list(type_), mask=pa.array(mask))


def _nulls(schema: pa.Schema, count: int) -> pa.Table:
    fields = [field.with_nullable(True) for field in schema]
    return pa.Table.from_arrays([pa.nulls(count, field.type) for field in fields], schema=pa.schema(fields))


def _same(rows: pa.Table, others: pa.Table, definition: ViewDefinition) -> np.ndarray:
    """Row by row, whether both are equal in every column; null equals null, NaN equals NaN."""
    same = np.ones(rows.num_rows, bool)
    for name in definition.schema.names:
        one, other = (table.column(name).combine_chunks() for table in (rows, others))
        if pa.types.is_nested(one.type):
            one, other = json_texts(one), json_texts(other)
        equal = pc.equal(one, other).fill_null(False)
        if pa.types.is_floating(one.type):
            equal = pc.or_(equal, pc.and_(pc.is_nan(one), pc.is_nan(other)).fill_null(False))
        equal = pc.or_(equal, pc.and_(one.is_null(), other.is_null()))
        same &= equal.to_numpy(zero_copy_only=False)
    return same
