"""The changes of one table in a block, as columns: which rows were there before and after each, however PostgreSQL chose to send them.

A change of the key becomes two events, a delete of the old key and an insert of the new one. A large value that an update did not touch
(TOAST) is not sent; it is taken, in this order, from

1. the old row, where the table sends it (REPLICA IDENTITY FULL);
2. the change before it of the same row in the same block, followed from key to key where the key changed;
3. the table as it is now (`Present.values`).

The third is sound though the table may be ahead of the stream: the update left the value alone, so what the table has is either that value
or one that a later change wrote, and that change comes with it. A row that is gone has a delete, or a change of its key, to come. So of
each key the last event is right; only an earlier one may hold a value from its own future, or a null where the row was deleted since. Who
needs every old version exact gives the table REPLICA IDENTITY FULL.

Generated columns are not sent before PostgreSQL 18. Their expressions depend on the row alone and always give the same, so the database
is asked to compute them of the rows that were sent (`Present.computed`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.capture.byte_columns import Bytes, Flags, Indexes, numbers
from headwater.capture.postgres.pgoutput import (
    DELETE,
    INSERT,
    OLD_ROW,
    UNCHANGED,
    UPDATE,
    Relation,
    RowFields,
    rows_at,
    texts,
)
from headwater.capture.postgres.tables import PgTable, Types
from headwater.capture.postgres.types import decoded
from headwater.capture.source import DELETE as DELETED
from headwater.capture.source import INSERT as INSERTED
from headwater.capture.source import UPDATE as UPDATED

_NONE = -1
_OPS = pa.array([INSERTED, UPDATED, DELETED])
_INSERTED, _UPDATED, _DELETED = range(3)


class Present(Protocol):
    """The database as it is now, as far as changes need it; all values are text."""

    def values(self, table: PgTable, keys: dict[str, pa.Array], columns: list[str]) -> dict[str, pa.Array]:
        """Some columns of the rows with these keys, null where a row or a column is gone."""

    def computed(self, table: PgTable, columns: dict[str, pa.Array], count: int) -> dict[str, pa.Array]:
        """The generated columns of rows with these columns."""


class TableRows(NamedTuple):
    """The events of one table: the message of each, its place within that message, and what it did."""

    messages: Indexes
    places: Indexes
    ops: pa.Array
    before: pa.Array
    after: pa.Array


class _Sent(NamedTuple):
    """What the messages hold: which have an old row (and which of these a whole one), which a new row, and where those stand."""

    old: Indexes
    whole: Flags
    old_rows: RowFields
    new: Indexes
    new_rows: RowFields
    old_of_new: Indexes
    """For each new row its old one, or -1."""


def table_rows(
    data: Bytes,
    starts: Indexes,
    relation: Relation,
    table: PgTable,
    key: tuple[str, ...],
    schema: pa.Schema,
    *,
    types: Types,
    present: Present,
) -> TableRows:
    """The events of the messages that begin at `starts`, all of one table, with rows by the columns of `schema`."""
    kinds = data[starts]
    sent = _sent(data, starts, kinds, len(relation.columns))
    names = [column.name for column in relation.columns]
    old = {name: texts(data, sent.old_rows, at) for at, name in enumerate(names)}
    new = {name: texts(data, sent.new_rows, at) for at, name in enumerate(names)}
    moved = _moved(sent, old, new, key)
    new = _completed(sent, old, new, key, moved, names, table, present)
    events = _events(kinds, sent, moved)
    if any(column.generated for column in table.columns):
        new.update(present.computed(table, new, len(sent.new)))
    by_name = {column.name: types.of(column.type, column.modifier) for column in table.columns if column.generated}
    by_name.update({column.name: types.of(column.type, column.modifier) for column in relation.columns})
    structs = []
    for columns, picks, count in ((old, events.before, len(sent.old)), (new, events.after, len(sent.new))):
        if not (picks >= 0).any():
            structs.append(pa.nulls(len(picks), pa.struct(list(schema))))
            continue
        children = []
        for field in schema:
            if field.name in columns and field.name in by_name:
                children.append(by_name[field.name].from_text(decoded(columns[field.name])))
            else:
                children.append(pa.nulls(count, field.type))
        structs.append(_struct(children, schema, picks))
    return TableRows(events.messages, events.places, _OPS.take(pa.array(events.ops)), structs[0], structs[1])


def _sent(data: Bytes, starts: Indexes, kinds: Bytes, width: int) -> _Sent:
    tags = data[starts + 5]
    has_old = (kinds == DELETE) | ((kinds == UPDATE) & (tags != ord("N")))
    old, new = np.flatnonzero(has_old), np.flatnonzero(kinds != DELETE)
    old_rows = rows_at(data, starts[old] + 6, width)
    new_at = starts + 6
    new_at[old] = old_rows.ends + 1
    old_row = np.full(len(starts), _NONE)
    old_row[old] = np.arange(len(old))
    return _Sent(old, tags[old] == OLD_ROW, old_rows, new, rows_at(data, new_at[new], width), old_row[new])


def _moved(sent: _Sent, old: dict[str, pa.Array], new: dict[str, pa.Array], key: tuple[str, ...]) -> Flags:
    """Of each new row, whether its key was another before."""
    moved = np.zeros(len(sent.new), bool)
    both = np.flatnonzero(sent.old_of_new >= 0)
    if len(both):
        before = pa.array(sent.old_of_new[both])
        for name in key:
            differ = pc.not_equal(old[name].take(before), new[name].take(pa.array(both)))
            moved[both] |= pc.fill_null(differ, False).to_numpy(zero_copy_only=False)
    return moved


class _Events(NamedTuple):
    messages: Indexes
    places: Indexes
    ops: Indexes
    before: Indexes
    after: Indexes


def _events(kinds: Bytes, sent: _Sent, moved: Flags) -> _Events:
    """One event for each message, two for a row that moved: which old row and which new row it shows, or -1."""
    count = len(kinds)
    before, after = np.full(count, _NONE), np.full(count, _NONE)
    before[sent.old] = np.where(sent.whole | (kinds[sent.old] == DELETE), np.arange(len(sent.old)), _NONE)
    after[sent.new] = np.arange(len(sent.new))
    ops = np.where(kinds == INSERT, _INSERTED, np.where(kinds == UPDATE, _UPDATED, _DELETED))
    if not moved.any():
        return _Events(np.arange(count), np.zeros(count, np.int64), ops, before, after)
    moves = np.zeros(count, bool)
    moves[sent.new] = moved
    before[sent.new[moved]] = sent.old_of_new[moved]
    messages = np.repeat(np.arange(count), 1 + moves)
    places = np.zeros(len(messages), np.int64)
    places[1:] = messages[1:] == messages[:-1]
    first, second = moves[messages] & (places == 0), places == 1
    return _Events(
        messages,
        places,
        np.where(first, _DELETED, np.where(second, _INSERTED, ops[messages])),
        np.where(second, _NONE, before[messages]),
        np.where(first, _NONE, after[messages]),
    )


def _completed(
    sent: _Sent,
    old: dict[str, pa.Array],
    new: dict[str, pa.Array],
    key: tuple[str, ...],
    moved: Flags,
    names: list[str],
    table: PgTable,
    present: Present,
) -> dict[str, pa.Array]:
    """The new rows with the values that were not sent."""
    absent = {name: kind == UNCHANGED for name, kind in zip(names, sent.new_rows.kinds, strict=True)}
    absent = {name: flags for name, flags in absent.items() if flags.any()}
    if not absent:
        return new
    new = dict(new)
    count = len(sent.new)
    has_whole = np.zeros(count, bool)
    there = sent.old_of_new >= 0
    has_whole[there] = sent.whole[sent.old_of_new[there]]
    for name, flags in absent.items():
        from_old = flags & has_whole
        picks = np.where(from_old, count + sent.old_of_new, np.arange(count))
        new[name] = pa.concat_arrays([new[name], old[name]]).take(pa.array(picks))
        flags &= ~has_whole
    left = {name: flags for name, flags in absent.items() if flags.any()}
    if not left:
        return new
    previous = _previous(_joined(new, key), _joined(old, key), sent.old_of_new, moved)
    ends = {name: _chain_ends(flags, previous) for name, flags in left.items()}
    asked = np.unique(np.concatenate([ends[name][flags & flags[ends[name]]] for name, flags in left.items()]))
    newest = asked.copy()  # the row may have another key by now, as far as this block knows
    for name, flags in left.items():
        rows = np.flatnonzero(flags & flags[ends[name]])
        np.maximum.at(newest, np.searchsorted(asked, ends[name][rows]), rows)
    keys = {name: new[name].take(pa.array(newest)) for name in key}
    found = present.values(table, keys, list(left)) if len(asked) else {}
    for name, flags in left.items():
        end = ends[name]
        picks = np.where(
            flags & flags[end], count + np.searchsorted(asked, end), np.where(flags, end, np.arange(count))
        )
        pool = found.get(name, pa.nulls(len(asked), pa.binary()))
        new[name] = pa.concat_arrays([new[name], pool.cast(pa.binary())]).take(pa.array(picks))
    return new


def _joined(columns: dict[str, pa.Array], key: tuple[str, ...]) -> pa.Array:
    """The key of each row as one value; no text of PostgreSQL has a zero byte."""
    parts = [pc.fill_null(columns[name], b"") for name in key]
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, b"\0")


def _previous(new: pa.Array, old: pa.Array, old_of_new: Indexes, moved: Flags) -> Indexes:
    """For each new row the one before it of the same row of the table, or -1: the last that has the key from which it came."""
    count = len(new)
    came_from = pa.concat_arrays([new, old]).take(pa.array(np.where(moved, count + old_of_new, np.arange(count))))
    codes = pa.concat_arrays([came_from, new]).dictionary_encode().indices.to_numpy(zero_copy_only=False)
    # At each row's place first the question (which row had this key?), then the answer to later ones.
    order = np.lexsort((np.concatenate([2 * np.arange(count), 2 * np.arange(count) + 1]), codes))
    answers = np.where(order >= count, np.arange(2 * count), _NONE)
    last = np.maximum.accumulate(answers)
    first = np.searchsorted(codes[order], codes[order], side="left")
    row = np.where(last >= first, order[last] - count, _NONE)
    previous = np.full(count, _NONE)
    questions = order < count
    previous[order[questions]] = row[questions]
    return previous


def _chain_ends(absent: Flags, previous: Indexes) -> Indexes:
    """For each row the nearest at or before it that has the value, or the first of the chain where none has; by doubling steps."""
    at = np.arange(len(absent))
    step = np.where(absent & (previous >= 0), previous, at)
    while True:
        further = step[step]
        if (further == step).all():
            return step
        step = further


def _struct(children: list[pa.Array], schema: pa.Schema, picks: Indexes) -> pa.Array:
    """The rows that events show, null where they show none."""
    none = picks < 0
    if not none.any() and len(picks) == len(children[0]) and (picks == np.arange(len(picks))).all():
        return pa.StructArray.from_arrays(children, fields=list(schema))
    rows = pa.StructArray.from_arrays(children, fields=list(schema))
    return rows.take(pa.array(picks, mask=none))


def oids_of(data: Bytes, starts: Indexes) -> Indexes:
    """The table of each message about a row."""
    return numbers(data, starts + 1, ">u4")
