"""Rows: what users append, as one Arrow batch of exactly the topic's columns; and a batch as rows again.

Invariants of a batch that `to_batch` returns: the topic's columns in their order and exact types, then `_headers` and
`_deleted` where the input had them; no null in a NOT NULL column, except in rows whose `_deleted` is true (they name a key
and may leave out everything else). A batch that already is all this is returned as it is, without a copy.
Functions only, no state: safe from any thread.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.log.arrow.cast import cast_column, is_exact
from headwater.log.arrow.columns import (
    Place,
    as_mapping,
    column_of,
    first_null,
    row_maker,
    too_large,
    values_of,
)
from headwater.log.port.topic import Topic
from headwater.model.ddl import short
from headwater.model.errors import EventTooLarge, SchemaMismatch
from headwater.model.schema import BYTES_SCHEMA, DELETED, HEADERS, to_ddl

_EXTRA = {HEADERS.name: HEADERS, DELETED.name: DELETED}
_BARE = (bytes, str, bytearray, memoryview)
_BARE_OR_NONE = {*_BARE, type(None)}


def to_batch(rows: Any, schema: pa.Schema) -> pa.RecordBatch:
    """The rows as one batch of the topic's columns; anything that does not fit raises `SchemaMismatch`.

    Rows are a dict, dataclass instances or dicts in any iterable, a pyarrow Table or RecordBatch, a pandas or Polars frame,
    or whatever else speaks Arrow's PyCapsule interface. A topic without a schema also takes bare bytes and strings.
    Columns that are missing are null.
    """
    if isinstance(rows, list):
        return _from_python(rows, schema)
    if isinstance(rows, dict):
        return _from_python([rows], schema)
    table = _as_arrow(rows)
    if table is not None:
        return _from_arrow(table, schema)
    if isinstance(rows, _BARE) or as_mapping(rows) is not None:
        return _from_python([rows], schema)
    if not isinstance(rows, Iterable):
        raise _not_rows(rows, schema)
    return _from_python(list(rows), schema)


def check_size(batch: pa.RecordBatch, topic: Topic, *, first: int = 0) -> None:
    """Refuses an event above the topic's limit, found by halving: a batch that is small as a whole costs next to nothing."""
    limit = topic.event_bytes_max
    if batch.num_rows == 0 or batch.get_total_buffer_size() <= limit or pa.ipc.get_record_batch_size(batch) <= limit:
        return
    if batch.num_rows == 1:
        size = batch.nbytes
        if size <= topic.event_bytes_max:
            return
        raise EventTooLarge(
            f"Event {first} of the batch has {size:,} bytes; topic {topic.name!r} takes {topic.event_bytes_max:,}.",
            advice="Store large content elsewhere and send its address, or raise event_bytes_max.",
        )
    half = batch.num_rows // 2
    check_size(batch.slice(0, half), topic, first=first)
    check_size(batch.slice(half), topic, first=first + half)


def to_values(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The batch as one dict per row; TIMESTAMPs are aware `datetime`s in UTC, maps and structs are dicts."""
    if not batch.num_columns:
        return [{} for _ in range(batch.num_rows)]
    make_row = row_maker(tuple(batch.schema.names))
    return list(map(make_row, *map(values_of, batch.columns)))


def _as_arrow(rows: Any) -> pa.Table | pa.RecordBatch | None:
    if isinstance(rows, pa.Table | pa.RecordBatch):
        return rows
    try:
        if type(rows).__module__.startswith("pandas."):  # its own PyCapsule stream has the index as a column
            return pa.Table.from_pandas(rows, preserve_index=False)
        if hasattr(rows, "__arrow_c_stream__"):
            return pa.table(rows)
        if hasattr(rows, "__arrow_c_array__"):
            return pa.record_batch(rows)
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise SchemaMismatch(
            f"The frame cannot be read as Arrow: {short(str(error))}.",
            advice="Give each column one type, or pass a list of dicts.",
        ) from None
    return None


def _from_arrow(table: pa.Table | pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    names = table.schema.names
    if len(set(names)) < len(names):
        twice = {name for name in names if names.count(name) > 1}
        raise SchemaMismatch(f"Column {min(twice)} occurs twice.", advice="Rename or drop one of the two.")
    wanted = _with_extra(schema, [field for name, field in _EXTRA.items() if name in names])
    if names != wanted.names:
        _refuse_unknown(set(names), schema, row=None)
    batch = _one_batch(table)
    _refuse_broken(batch)
    given = dict(zip(names, batch.columns, strict=True))
    columns = {
        name: _fitted(given[name], type_, name) if name in given else pa.nulls(batch.num_rows, type_)
        for name, type_ in zip(wanted.names, wanted.types, strict=True)
    }
    _refuse_nulls(columns, wanted)
    if batch.schema.equals(wanted, check_metadata=True):
        return batch
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=wanted)


def _fitted(column: pa.Array, type_: pa.DataType, name: str) -> pa.Array:
    return column if is_exact(column, type_) else cast_column(column, type_, place=Place(name))


def _refuse_broken(batch: pa.RecordBatch) -> None:
    """Arrow data of others may hold strings that are not UTF-8, or offsets that lead nowhere."""
    with suppress(pa.ArrowInvalid):
        batch.validate(full=True)
        return
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise SchemaMismatch(
                f"Column {name}: the Arrow data is broken ({error}).", advice="Write the column again, or as BINARY."
            ) from None


def _one_batch(table: pa.Table | pa.RecordBatch) -> pa.RecordBatch:
    if isinstance(table, pa.RecordBatch):
        return table
    batches = table.to_batches()
    if len(batches) > 1:
        batches = table.combine_chunks().to_batches()
    if len(batches) > 1:
        raise too_large(table.schema.names[0] if table.num_columns == 1 else "one of " + ", ".join(table.schema.names))
    if batches:
        return batches[0]
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in table.schema], schema=table.schema)


def _from_python(rows: list[Any], schema: pa.Schema) -> pa.RecordBatch:
    values, extra = _columns(rows, schema)
    wanted = _with_extra(schema, extra)
    columns = {
        name: column_of(values[name], type_, place=Place(name)) if name in values else pa.nulls(len(rows), type_)
        for name, type_ in zip(wanted.names, wanted.types, strict=True)
    }
    _refuse_nulls(columns, wanted)
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=wanted)


def _with_extra(schema: pa.Schema, extra: list[pa.Field]) -> pa.Schema:
    for field in extra:
        schema = schema.append(field)
    return schema


def _as_mappings(rows: list[Any], schema: pa.Schema) -> list[Mapping[str, Any]]:
    """Rows of other kinds than dict as mappings. Not column by column: dataclasses are for convenience, dicts for speed."""
    mappings = []
    for at, row in enumerate(rows):
        mapping = as_mapping(row)
        if mapping is None:
            raise _not_rows(row, schema, at=at)
        mappings.append(mapping)
    return mappings


def _columns(rows: list[Any], schema: pa.Schema) -> tuple[dict[str, list[Any]], list[pa.Field]]:
    """The values of each column that some row has, and the fields of the extra columns among them."""
    kinds = set(map(type, rows))
    if kinds != {dict}:
        if kinds.issubset(_BARE_OR_NONE) and schema.equals(BYTES_SCHEMA):
            return {"value": rows}, []
        rows = _as_mappings(rows, schema)
    values: dict[str, list[Any]] = {}
    names = schema.names
    try:
        for name in names:
            values[name] = list(map(itemgetter(name), rows))
        if not rows or max(map(len, rows)) == len(names):
            return values, []
    except KeyError:
        pass
    present = set().union(*rows)
    extra = [field for name, field in _EXTRA.items() if name in present]
    if len(present) > len(extra) and not present.issubset([*names, *_EXTRA]):
        _refuse_unknown(present, schema, row=rows)
    for name in [*names, *(field.name for field in extra)]:
        if name in present and name not in values:
            values[name] = [row.get(name) for row in rows]
    return values, extra


def _refuse_unknown(present: Collection[Any], schema: pa.Schema, *, row: list[Any] | None) -> None:
    unknown = sorted(set(present).difference(schema.names, _EXTRA), key=str)
    if not unknown:
        return
    where = "" if row is None else f", row {next(at for at, some in enumerate(row) if unknown[0] in some)} (from 0)"
    near = difflib.get_close_matches(str(unknown[0]), schema.names, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise SchemaMismatch(
        f"Column {short(unknown[0])}{where}: the topic has no such column.",
        advice=f"{hint}It has {to_ddl(schema)}; leave the column out or add it to the topic as nullable.",
    )


def _refuse_nulls(columns: dict[str, pa.Array], schema: pa.Schema) -> None:
    for name, column in columns.items():
        if not column.null_count or (field := schema.field(name)).nullable:
            continue
        if DELETED.name in columns:
            kept = ~columns[DELETED.name].fill_null(False).to_numpy(zero_copy_only=False)
            absent = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False) & kept)
            if not len(absent):
                continue
            at = int(absent[0])
        else:
            at = first_null(column)
        raise Place(field.name).mismatch(at, None, field.type)


def _not_rows(value: object, schema: pa.Schema, *, at: int | None = None) -> SchemaMismatch:
    where = "" if at is None else f"Row {at} (from 0): "
    return SchemaMismatch(
        f"{where}{short(value)} ({type(value).__name__}) is not a row.",
        advice=f"Give dicts, dataclass instances, a pyarrow table or a frame with the columns {to_ddl(schema)}.",
    )
