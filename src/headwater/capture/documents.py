"""Documents of a database as rows of a table: what CouchDB and MongoDB have in common.

A table of documents has the key `id` (the document's `_id` as text), `rev` where the database counts revisions, and then either the whole
document as JSON in `document`, or the columns that the URL declares: `?schema=name STRING, amount DOUBLE` (`headwater.log.arrow.json_types`
says how each type stands in JSON). Each column is the field of that name, null where the document has none; a STRING column takes
any value, as its JSON; `document STRING` among them is the whole again. What a column cannot hold is null there, and stands as JSON in
the event's header `misfit.<column>`: nothing stops, and nothing is lost.

Functions and frozen data only, no state: safe from any thread.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from headwater.capture.source import (
    BEGIN,
    COMMITTED,
    END,
    TRANSACTIONS_SCHEMA,
    ChangeBatch,
    SourceTable,
    changes_schema,
)
from headwater.log.arrow.json_types import from_json_texts
from headwater.model.errors import InvalidSchema, NotCapturable, SchemaMismatch
from headwater.model.schema import HEADERS, to_arrow_schema

ID, REV, DOCUMENT = "id", "rev", "document"

Misfits = dict[int, dict[str, bytes]]
"""By row: what did not fit, by the header that it stands in."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One document: its key, its fields as JSON has them, and `text`, the whole of it as JSON. Without fields only the key is known.

    Where the database counts revisions, `rev` is a field.
    """

    id: str
    fields: Mapping[str, Any] = {}
    text: str | None = None


class DocumentPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some documents in the order of their ids; `done` asks for those behind them."""

    documents: Sequence[Document]
    done: dict[str, Any]
    is_last: bool


class DocumentStore(Protocol):
    """The documents of a database, read page by page or by their ids. `url` has no password in it."""

    url: str

    def table(self) -> SourceTable:
        """The one table that the URL names; `InvalidInput`, `NotFound`."""

    def page(self, table: SourceTable, done: Any | None, *, limit: int) -> DocumentPage:
        """Up to so many documents behind those that are done, with the fields of these columns."""

    def of_ids(self, table: SourceTable, ids: Sequence[str]) -> list[Document]:
        """Those of these ids that there are."""

    def close(self) -> None:
        """Ends its connection."""


class DocumentChange(msgspec.Struct, frozen=True, kw_only=True):
    """One change of one document; `transaction` is None where it is one of its own, which its position then names."""

    table: str
    op: str
    before: Document | None = None
    after: Document | None = None
    position: str
    transaction: str | None = None
    committed_us: int


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction of which a part has been told: its changes by table, and where and when the last of them was."""

    transaction: str
    tables: Mapping[str, int]
    position: str
    committed_us: int


def document_table(name: str, declared: str | None, *, has_rev: bool, rows_estimate: int | None = None) -> SourceTable:
    """The table that documents make, by the columns that were declared."""
    fields = [pa.field(ID, pa.string(), nullable=False), *([pa.field(REV, pa.string())] if has_rev else [])]
    columns = [pa.field(DOCUMENT, pa.string())]
    if declared is not None:
        columns = [field.with_nullable(True) for field in to_arrow_schema(declared)]
        taken = {field.name for field in fields} & {field.name for field in columns}
        if taken:
            raise InvalidSchema(
                f"The schema of {name!r} declares the column {min(taken)!r}, which is reserved for the document's _{min(taken)}.",
                advice="Leave the column out of ?schema=. Every topic of documents has it.",
            )
    return SourceTable(name=name, schema=pa.schema([*fields, *columns]), key=(ID,), rows_estimate=rows_estimate)


def check_keys(shown: str, keys: Mapping[str, tuple[str, ...]]) -> None:
    """Refuses another key than the one that documents have."""
    if any(key != (ID,) for key in keys.values()):
        raise NotCapturable(
            f"{shown}: The key of documents is always their id.", advice='Leave out key=, or pass "id".'
        )


def json_text(value: Any) -> str:
    """A value as JSON, in characters wherever these are Unicode."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can write and UTF-8 cannot
        return json.dumps(value, separators=(",", ":"))
    return text


def document_rows(documents: Sequence[Document], table: SourceTable) -> pa.Table:
    """Rows of a backfill, with a column of headers where some value does not fit."""
    misfits: Misfits = {}
    rows = pa.Table.from_arrays(_columns(documents, table, misfits), schema=table.schema)
    return _with_headers(rows, misfits)


def batches_of(
    changes: Sequence[DocumentChange], tables: Mapping[str, SourceTable], begun: Begun | None
) -> list[ChangeBatch]:
    """The changes by table, each in its order; `begun` is the transaction that the first of them may go on with."""
    orders = _orders(changes, begun)
    batches = []
    for name in dict.fromkeys(change.table for change in changes):
        at = [number for number, change in enumerate(changes) if change.table == name]
        batches.append(
            ChangeBatch(
                name, _batch([changes[number] for number in at], [orders[number] for number in at], tables[name])
            )
        )
    return batches


def transactions_of(
    changes: Sequence[DocumentChange], begun: Begun | None, *, whole: bool
) -> tuple[pa.Table, Begun | None]:
    """Begin and end of the transactions that changes belong to; unless `whole`, the last one goes on, and is given back as begun."""
    rows: list[tuple[Any, ...]] = []
    present = begun
    for change in changes:
        name, at, committed_us = change.transaction or change.position, change.position, change.committed_us
        if present is not None and present.transaction != name:
            rows.append(_end(present))
            present = None
        if present is None:
            rows.append((name, BEGIN, at, committed_us, None, None))
        told = Counter(present.tables if present else {})
        told[change.table] += 1
        present = Begun(transaction=name, tables=told, position=at, committed_us=committed_us)
    if whole and present is not None:
        rows.append(_end(present))
        present = None
    named = [dict(zip(TRANSACTIONS_SCHEMA.names, row, strict=True)) for row in rows]
    return pa.Table.from_pylist(named, schema=TRANSACTIONS_SCHEMA), present


def _end(begun: Begun) -> tuple[Any, ...]:
    told = dict(begun.tables)
    return begun.transaction, END, begun.position, begun.committed_us, sum(told.values()), told


def _orders(changes: Sequence[DocumentChange], begun: Begun | None) -> list[int]:
    """The number of each change in its transaction, from 0."""
    orders: list[int] = []
    present, count = (begun.transaction, sum(begun.tables.values())) if begun else (None, 0)
    for change in changes:
        name = change.transaction or change.position
        present, count = (present, count) if name == present else (name, 0)
        orders.append(count)
        count += 1
    return orders


def _batch(changes: Sequence[DocumentChange], orders: Sequence[int], table: SourceTable) -> pa.Table:
    schema = changes_schema(table.schema)
    misfits: Misfits = {}
    times = pa.array(np.array([change.committed_us for change in changes], np.int64)).view(COMMITTED)
    arrays = [
        pa.array([change.op for change in changes], pa.string()),
        _structs([change.before for change in changes], table, schema, None),
        _structs([change.after for change in changes], table, schema, misfits),
        pa.array([change.position for change in changes], pa.string()),
        pa.array([change.transaction or change.position for change in changes], pa.string()),
        pa.array(orders, pa.int64()),
        times,
    ]
    return _with_headers(pa.Table.from_arrays(arrays, schema=schema), misfits)


def _structs(
    documents: Sequence[Document | None], table: SourceTable, schema: pa.Schema, misfits: Misfits | None
) -> pa.Array:
    mask = pa.array([document is None for document in documents], pa.bool_())
    columns = _columns(documents, table, misfits)
    return pa.StructArray.from_arrays(columns, fields=list(schema.field("after").type), mask=mask)


def _columns(documents: Sequence[Document | None], table: SourceTable, misfits: Misfits | None) -> list[pa.Array]:
    plain: dict[str, Callable[[Document], str | None]] = {ID: lambda document: document.id}
    if DOCUMENT in table.schema.names and pa.types.is_string(table.schema.field(DOCUMENT).type):
        plain[DOCUMENT] = lambda document: document.text
    columns = []
    for field in table.schema:
        if field.name in plain:
            get = plain[field.name]
            columns.append(pa.array([None if each is None else get(each) for each in documents], pa.string()))
        else:
            values = [None if each is None else each.fields.get(field.name) for each in documents]
            columns.append(_declared(values, field, misfits))
    return columns


def _declared(values: Sequence[Any], field: pa.Field, misfits: Misfits | None) -> pa.Array:
    """A column of fields; none is looked at by itself unless one is amiss."""
    if pa.types.is_string(field.type):
        values = [value if value is None or isinstance(value, str) else json_text(value) for value in values]
    texts = [None if value is None else json_text(value) for value in values]
    try:
        return from_json_texts(texts, field)
    except (ValueError, TypeError, AttributeError, SchemaMismatch):
        pass
    fitted = []
    for row, text in enumerate(texts):
        try:
            fitted.append(from_json_texts([text], field))
        except (ValueError, TypeError, AttributeError, SchemaMismatch):
            fitted.append(pa.nulls(1, field.type))
            if misfits is not None and text is not None:
                misfits.setdefault(row, {})[f"misfit.{field.name}"] = text.encode("utf-8")
    return pa.concat_arrays(fitted)


def _with_headers(rows: pa.Table, misfits: Misfits) -> pa.Table:
    if not misfits:
        return rows
    headers = pa.array([misfits.get(row) for row in range(rows.num_rows)], HEADERS.type)
    return rows.append_column(HEADERS, headers)
