"""A table's history in Debezium's envelope: JSON as Kafka Connect's converter writes it, for whoever reads Debezium's topics.

    {"schema": {…}, "payload": {"before": …, "after": …, "source": {…}, "transaction": …, "op": "u", "ts_ms": …}}

A delete is followed by a tombstone. What Debezium does not have is written as something it has: a key that a truncation or a refresh has
removed is a delete, whose `before` holds the key alone. `source` says where the change comes from: its `position` is that of the capture.
Values are those of `headwater.databases.connect_types`. Whole columns become text by Arrow; no value becomes a Python object, but for
arrays, maps and structs. Immutable: safe from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.databases.connect_types import ColumnWriter, writing_of
from headwater.log.arrow.json_types import from_json_texts, row_texts
from headwater.model.errors import InvalidInput

HISTORY = ".changes"
COLUMNS = ("op", "before", "after", "position", "transaction", "transaction_order", "committed")
"""What the history of a captured table has, besides its key."""

_DELETES = pa.array(["d", "t"])
_SOURCE = {
    "version": "string", "connector": "string", "name": "string", "ts_ms": "int64", "snapshot": "string", "db": "string",
    "table": "string", "ts_us": "int64", "ts_ns": "int64", "position": "string",
}  # fmt: skip
_TRANSACTION = {"id": "string", "total_order": "int64", "data_collection_order": "int64"}


class EnvelopeWriter:
    """Writes the changes of one table."""

    def __init__(
        self, history: pa.Schema, *, key_column: str, key: Sequence[str], table: str, server: str, schemas: bool
    ) -> None:
        """`key` are the columns of the primary key in its order, `key_column` is the key of the history."""
        missing = [name for name in COLUMNS if name not in history.names]
        if missing:
            raise InvalidInput(
                f"The topic has no column {missing[0]!r}, so it is not the history of a captured table.",
                advice=f"Use a topic whose name ends with {HISTORY}, such as users{HISTORY}.",
            )
        self._row = list(history.field("after").type)
        unknown = [name for name in key if name not in {field.name for field in self._row}]
        if unknown:
            raise InvalidInput(
                f"Table {table!r} has no key column {unknown[0]!r}.",
                advice=f"Its columns are: {', '.join(field.name for field in self._row)}.",
            )
        self._key_column, self._key, self._table, self._server = key_column, tuple(key), table, server
        self._writing = {field.name: writing_of(field.type) for field in self._row}
        self._key_prefix, self._prefix = ("", "") if not schemas else (self._key_schema(), self._schema())
        self._end = "}" if schemas else ""

    def events(self, changes: pa.Table, *, tombstones: bool) -> pa.Table:
        """Keys and values of the events that changes become, in their order."""
        changes = changes.combine_chunks()
        op = _one(changes, "op")
        is_delete = pc.is_in(op, value_set=_DELETES)
        after, before = _one(changes, "after"), self._before(changes, is_delete)
        rows = {name: self._encoded(column) for name, column in (("before", before), ("after", after))}
        key = [
            pc.if_else(after.is_null(), _field(rows["before"], name), _field(rows["after"], name)) for name in self._key
        ]
        keys = self._joined(self._key_prefix, row_texts(pa.RecordBatch.from_arrays(key, names=list(self._key))))
        payload = pc.binary_join_element_wise(
            '{"before":', _texts(rows["before"], before), ',"after":', _texts(rows["after"], after),
            ',"source":', self._source(changes, op), ',"transaction":', _transaction(changes),
            ',"op":"', pc.if_else(is_delete, "d", op), '",', _times(changes), "}", "",
        )  # fmt: skip
        values = self._joined(self._prefix, payload)
        if not tombstones:
            return pa.table({"key": keys.cast(pa.binary()), "value": values.cast(pa.binary())})
        deleted = is_delete.to_numpy(zero_copy_only=False)
        order = np.repeat(np.arange(len(deleted)), 1 + deleted)
        is_tombstone = np.zeros(len(order), bool)
        is_tombstone[1:] = order[1:] == order[:-1]
        values = pc.if_else(pa.array(is_tombstone), None, values.take(pa.array(order)))
        return pa.table({"key": keys.take(pa.array(order)).cast(pa.binary()), "value": values.cast(pa.binary())})

    def _before(self, changes: pa.Table, is_delete: pa.Array) -> pa.Array:
        """The rows that were; of a delete that knows its key only, that."""
        before = _one(changes, "before")
        bare = pc.and_(is_delete, before.is_null())
        if not pc.any(bare, min_count=0).as_py():
            return before
        keys = self._keys(_one(changes, self._key_column), bare)
        columns = [
            pc.if_else(bare, keys[field.name], pc.struct_field(before, field.name))
            if field.name in keys
            else pc.struct_field(before, field.name)
            for field in self._row
        ]
        return pa.StructArray.from_arrays(columns, fields=self._row, mask=pc.and_(before.is_null(), pc.invert(bare)))

    def _keys(self, column: pa.Array, wanted: pa.Array) -> dict[str, pa.Array]:
        """The columns of the key; those of several columns stand in a JSON array. One by one: such deletes are few."""
        types = {field.name: field.type for field in self._row}
        if len(self._key) == 1:
            return {self._key[0]: column.cast(types[self._key[0]])}
        texts = [
            text if is_wanted else None for text, is_wanted in zip(column.to_pylist(), wanted.to_pylist(), strict=True)
        ]
        raw = [None if text is None else msgspec.json.decode(text, type=list[msgspec.Raw]) for text in texts]
        return {
            name: from_json_texts(
                [None if parts is None else bytes(parts[at]).decode() for parts in raw], pa.field(name, types[name])
            )
            for at, name in enumerate(self._key)
        }

    def _encoded(self, rows: pa.Array) -> pa.RecordBatch:
        columns = [self._writing[field.name].encode(pc.struct_field(rows, field.name)) for field in self._row]
        return pa.RecordBatch.from_arrays(columns, names=[field.name for field in self._row])

    def _source(self, changes: pa.Table, op: pa.Array) -> pa.Array:
        us = _one(changes, "committed").cast(pa.int64())
        fixed = {"version": version("headwater"), "connector": "headwater", "name": self._server}
        start = msgspec.json.encode(fixed).decode()[:-1]
        table = msgspec.json.encode({"db": self._server, "table": self._table}).decode()[1:-1]
        return pc.binary_join_element_wise(
            start + ',"ts_ms":', _integer(us, 1000), ',"snapshot":"', pc.if_else(pc.equal(op, "r"), "true", "false"),
            '",' + table + ',"ts_us":', us.cast(pa.string()), ',"ts_ns":', us.cast(pa.string()), '000,"position":',
            _quoted(_one(changes, "position")), "}", "",
        )  # fmt: skip

    def _joined(self, prefix: str, texts: pa.Array) -> pa.Array:
        return pc.binary_join_element_wise(prefix, texts, self._end, "") if prefix else texts

    def _schema(self) -> str:
        """What stands before a payload."""
        name = f"{self._server}.{self._table}"
        row = [_described(self._writing[f.name], f.name, optional=f.name not in self._key) for f in self._row]
        rows = [
            {"type": "struct", "fields": row, "optional": True, "name": f"{name}.Value", "field": field}
            for field in ("before", "after")
        ]
        source = _struct(_SOURCE, "source", name="headwater.Source", optional=False)
        transaction = _struct(_TRANSACTION, "transaction", name="event.block", optional=True)
        op = {"type": "string", "optional": False, "field": "op"}
        times = [{"type": "int64", "optional": True, "field": field} for field in ("ts_ms", "ts_us", "ts_ns")]
        fields = [*rows, source, transaction, op, *times]
        whole = {"type": "struct", "fields": fields, "optional": False, "name": f"{name}.Envelope", "version": 2}
        return f'{{"schema":{msgspec.json.encode(whole).decode()},"payload":'

    def _key_schema(self) -> str:
        fields = [_described(self._writing[name], name, optional=False) for name in self._key]
        name = f"{self._server}.{self._table}.Key"
        whole = {"type": "struct", "fields": fields, "optional": False, "name": name}
        return f'{{"schema":{msgspec.json.encode(whole).decode()},"payload":'


def _described(writing: ColumnWriter, name: str, *, optional: bool) -> dict[str, Any]:
    return {**writing.schema, "optional": optional, "field": name}


def _struct(fields: Mapping[str, str], field: str, *, name: str, optional: bool) -> dict[str, Any]:
    inside = [{"type": type_, "optional": False, "field": each} for each, type_ in fields.items()]
    return {"type": "struct", "fields": inside, "optional": optional, "name": name, "field": field}


def _transaction(changes: pa.Table) -> pa.Array:
    """The transaction's block; the order within a table is that within the transaction, with gaps."""
    order = _one(changes, "transaction_order").cast(pa.string())
    texts = pc.binary_join_element_wise(
        '{"id":', _quoted(_one(changes, "transaction")), ',"total_order":', order, ',"data_collection_order":', order, "}", "",
        null_handling="emit_null",
    )  # fmt: skip
    return texts.fill_null("null")


def _times(changes: pa.Table) -> pa.Array:
    us = _one(changes, "committed").cast(pa.int64())
    return pc.binary_join_element_wise(
        '"ts_ms":', _integer(us, 1000), ',"ts_us":', us.cast(pa.string()), ',"ts_ns":', us.cast(pa.string()), "000", ""
    )


def _texts(rows: pa.RecordBatch, structs: pa.Array) -> pa.Array:
    """The JSON of rows, and null where there is none."""
    return pc.if_else(structs.is_null(), "null", row_texts(rows))


def _quoted(texts: pa.Array) -> pa.Array:
    """A JSON string of each text; null stays null."""
    batch = pa.RecordBatch.from_arrays([texts.fill_null("")], names=["t"])
    quoted = pc.binary_slice(row_texts(batch).cast(pa.binary()), len('{"t":'), -1).cast(pa.string())
    return pc.if_else(texts.is_null(), None, quoted)


def _integer(values: pa.Array, divisor: int) -> pa.Array:
    return pc.divide(values, divisor).cast(pa.string())


def _field(rows: pa.RecordBatch, name: str) -> pa.Array:
    return rows.column(rows.schema.get_field_index(name))


def _one(table: pa.Table, name: str) -> pa.Array:
    return table.column(name).combine_chunks()
