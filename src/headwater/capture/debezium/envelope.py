"""Debezium's envelope as JSON, read by whole columns: events of one topic become the changes of one table.

    {"schema": {…}, "payload": {"before": …, "after": {…}, "source": {…}, "op": "u", "ts_ms": …, "transaction": {…}}}

The schema part is the same text in every event until the table changes. So it is understood once, the events that begin with this text
are found by comparing bytes, and only payloads go through Arrow's JSON reader. Events without it (`schemas.enable=false`) are read by
columns that somebody has given. Events with other white space or another order of the two parts are put in this form first, one by one:
no converter of Kafka Connect writes such.

A value that the database did not send (`__debezium_unavailable_value`: large and not touched) is taken from `before`. Where that does not
have it either, nothing here knows it: the table stops, unless the source was told that null will do.

Not thread-safe.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.capture.source import COMMITTED, DELETE, INSERT, READ, TRUNCATE, UPDATE, SourceTable
from headwater.databases.connect_types import ColumnReader, reading_by_type, reading_of, row_reading
from headwater.log.arrow.json_types import columns_of_texts
from headwater.log.port.topic import Topic
from headwater.model.errors import NotCapturable, SchemaMismatch

UNAVAILABLE = "__debezium_unavailable_value"

_UNAVAILABLE = pa.array([UNAVAILABLE, base64.b64encode(UNAVAILABLE.encode()).decode()])
_OPS = pa.array([INSERT, UPDATE, DELETE, READ, TRUNCATE])
_WRAPPED = b'{"schema":'


class EnvelopeOptions(msgspec.Struct, frozen=True):
    """What a schema part would say, where there is none: columns, the unit of times, how decimals are written; and what may be null."""

    columns: pa.Schema | None = None
    time_unit: str = "us"
    decimals: str = "base64"
    unavailable_is_null: bool = False


class EnvelopeShape(msgspec.Struct, frozen=True):
    """How events that begin with `prefix` are read: the table as they know it, its rows, and the topic by the payload's columns."""

    prefix: bytes
    table: SourceTable
    row: ColumnReader
    payload: Topic


class _Event(msgspec.Struct):
    schema: msgspec.Raw = msgspec.Raw(b"null")
    payload: msgspec.Raw = msgspec.Raw()
    """Empty where the event is the payload itself."""


class Envelopes:
    """The events of one topic."""

    def __init__(self, topic: Topic, table: str, *, key: tuple[str, ...] | None, options: EnvelopeOptions) -> None:
        self._topic = topic
        self._table = table
        self._options = options
        self._shapes: dict[bytes, EnvelopeShape] = {}
        self._last: EnvelopeShape | None = None
        self.key = key

    def look(self, key: bytes | None, value: bytes) -> SourceTable:
        """The table as an event knows it; its key's columns are those of the first event that has a key. `NotCapturable`."""
        if self.key is None and key is not None:
            self.key = _key_columns(key)
        self._last = self._shape(value)
        return self._last.table

    def runs(self, values: pa.Array) -> Iterator[tuple[EnvelopeShape, pa.Array, int, int]]:
        """Events that follow one another and are read alike: their payloads, and from where to where they stand."""
        start = 0
        while start < len(values):
            shape = self._shape(values[start].as_py())
            rest = values.slice(start)
            alike = pc.starts_with(rest, shape.prefix or _WRAPPED).to_numpy(zero_copy_only=False)
            if not shape.prefix:
                alike = ~alike
            if not alike[0]:  # other white space: see the module
                values = pa.array([_canonical(value) for value in values.to_pylist()], pa.binary())
                continue
            count = len(rest) if alike.all() else int(np.argmin(alike))
            run = rest.slice(0, count)
            yield shape, pc.binary_slice(run, len(shape.prefix), -1) if shape.prefix else run, start, start + count
            start += count

    def changes(
        self, shape: EnvelopeShape, payloads: pa.Array, positions: pa.Array, *, partition: int, offsets: Any
    ) -> pa.Table:
        """The changes that payloads tell, by the columns of `changes_schema`; `NotCapturable`, `SchemaMismatch`."""
        self._last = shape
        read = _read(payloads.to_pylist(), shape.payload, partition, offsets)
        op = read.column("op")
        known = pc.is_in(op, value_set=_OPS).to_numpy(zero_copy_only=False)
        if not known.all():
            at = int(np.argmin(known))
            raise SchemaMismatch(
                f"Topic {self._topic.name!r}, partition {partition}, offset {offsets[at]}: The op {op[at].as_py()!r} is unknown.",
                advice=f"The op of a Debezium event is one of {', '.join(_OPS.to_pylist())}. Leave out the topic.",
            )
        before, after = self._available(read.column("before"), read.column("after"), partition, offsets)
        source, transaction = read.column("source"), read.column("transaction")
        own = pc.struct_field(source, "txId").cast(pa.string())
        columns = {
            "op": op,
            "before": self._decoded(shape, before, partition, offsets),
            "after": self._decoded(shape, after, partition, offsets),
            "position": positions,
            "transaction": pc.coalesce(pc.struct_field(transaction, "id"), own),
            "transaction_order": pc.struct_field(transaction, "total_order"),
            "committed": _committed(source, read.column("ts_ms")),
        }
        return pa.table(columns)

    def deletions(self, keys: pa.Array, positions: pa.Array, *, partition: int, offsets: Any) -> pa.Table:
        """What tombstones tell whose delete is gone: the key, and that it has no row. `committed` is left to the capture."""
        like = self._last
        assert like is not None, "look() comes first"
        texts = [_payload(key) for key in keys.to_pylist()]
        read = _read(texts, _by(like.payload, like.row.read), partition, offsets)
        before = pa.StructArray.from_arrays(read.columns, fields=list(like.row.read))
        count = len(keys)
        return pa.table(
            {
                "op": pa.array([DELETE] * count, pa.string()),
                "before": self._decoded(like, before, partition, offsets),
                "after": pa.nulls(count, like.row.log),
                "position": positions,
                "transaction": pa.nulls(count, pa.string()),
                "transaction_order": pa.nulls(count, pa.int64()),
                "committed": pa.array(np.zeros(count, np.int64)).view(COMMITTED),
            }
        )

    def _shape(self, value: bytes) -> EnvelopeShape:
        event = _parsed(value)
        prefix = _WRAPPED + bytes(event.schema) + b',"payload":' if bytes(event.payload) else b""
        if prefix not in self._shapes:
            self._shapes[prefix] = self._understood(prefix, event, value)
        return self._shapes[prefix]

    def _understood(self, prefix: bytes, event: _Event, value: bytes) -> EnvelopeShape:
        schema = msgspec.json.decode(event.schema)
        payload = msgspec.json.decode(bytes(event.payload) or value)
        if not isinstance(payload, dict) or "op" not in payload or not {"before", "after"} & payload.keys():
            raise self._refused(
                "does not contain Debezium events.", "Leave out the topic, by naming the tables with ?table=."
            )
        parts = self._by_schema(schema) if schema else self._by_columns()
        if self.key is None:
            raise self._refused(
                "has events without a key.",
                f"Set message.key.columns in Debezium, or pass --key {self._table}=<column>.",
            )
        names = [name for name, _ in parts]
        for column in self.key:
            if column not in names:
                raise self._refused(
                    f"has the key {column!r}, which is not one of its columns.", f"Its columns are: {', '.join(names)}."
                )
        row = row_reading(parts)
        table = pa.schema([pa.field(name, part.log, nullable=name not in (self.key or ())) for name, part in parts])
        return EnvelopeShape(
            prefix,
            SourceTable(name=self._table, schema=table, key=self.key, is_told=True),
            row,
            _by(self._topic, pa.struct(_payload_fields(row.read, payload))),
        )

    def _by_schema(self, schema: Any) -> list[tuple[str, ColumnReader]]:
        rows = [field for field in schema.get("fields", ()) if field.get("field") in ("after", "before")]
        if not rows:
            raise self._refused("has events whose schema lacks before and after.", "Leave out the topic.")
        try:
            return [(field["field"], reading_of(field)) for field in rows[-1]["fields"]]
        except (ValueError, KeyError) as error:
            raise self._refused(
                f"has a column that the capture cannot read: {error}.",
                "Exclude the column with column.exclude.list in Debezium.",
            ) from None

    def _by_columns(self) -> list[tuple[str, ColumnReader]]:
        options = self._options
        if options.columns is None:
            raise self._refused(
                "has events without a schema, so the types of its columns are unknown.",
                f"Pass the types as ?columns.{self._table}=id BIGINT, name STRING; or set value.converter.schemas.enable=true in Debezium.",
            )
        read = [
            reading_by_type(f.type, time_unit=options.time_unit, decimals=options.decimals) for f in options.columns
        ]
        return list(zip(options.columns.names, read, strict=True))

    def _decoded(self, shape: EnvelopeShape, rows: pa.Array, partition: int, offsets: Any) -> pa.Array:
        try:
            return shape.row.decode(rows)
        except (pa.ArrowInvalid, ValueError) as error:
            raise SchemaMismatch(
                f"Topic {self._topic.name!r}, partition {partition}, offsets {offsets[0]} to {offsets[-1]}: A value "
                f"does not match the type of its column: {error}.",
                advice="If the events have no schema, declare other types with ?columns.…, ?time_unit= or ?decimals=text.",
            ) from None

    def _available(self, before: pa.Array, after: pa.Array, partition: int, offsets: Any) -> tuple[pa.Array, pa.Array]:
        """The rows with what was not sent taken from before, or null."""

        def filled(at: int, column: pa.Array) -> pa.Array:
            if not pa.types.is_string(column.type):
                return column
            missing = pc.is_in(column, value_set=_UNAVAILABLE)
            if not pc.any(missing, min_count=0).as_py():
                return column
            old = pc.struct_field(before, [at])
            unknown = pc.and_(missing, pc.or_(before.is_null(), pc.is_in(old, value_set=_UNAVAILABLE)))
            if pc.any(unknown).as_py() and not self._options.unavailable_is_null:
                raise NotCapturable(
                    f"Topic {self._topic.name!r}, partition {partition}, offset {offsets[pc.index(unknown, True).as_py()]}: the value of "
                    f"{after.type[at].name!r} is missing from the event and from earlier rows.",
                    advice=f"Run in PostgreSQL: ALTER TABLE {self._table} REPLICA IDENTITY FULL; then let Debezium copy the "
                    "table again. Or read such values as null with ?unavailable=null.",
                )
            return pc.if_else(missing, pc.if_else(unknown, None, old), column)

        after = _mapped(after, filled)
        return _mapped(before, lambda _, column: _or_null(column)), after

    def _refused(self, what: str, advice: str) -> NotCapturable:
        return NotCapturable(f"Topic {self._topic.name!r} {what}", advice=advice)


def _parsed(value: bytes) -> _Event:
    try:
        return msgspec.json.decode(value, type=_Event)
    except (msgspec.MsgspecError, RecursionError):
        raise NotCapturable(
            f"An event is not a JSON object: {value[:60]!r}.",
            advice="The capture reads only JSON. Set value.converter=org.apache.kafka.connect.json.JsonConverter in Debezium.",
        ) from None


def _canonical(value: bytes) -> bytes:
    event = _parsed(value)
    return b'%b%b,"payload":%b}' % (_WRAPPED, event.schema, event.payload) if bytes(event.payload) else value


def _payload(text: bytes) -> bytes:
    return bytes(_parsed(text).payload) or text


def _key_columns(key: bytes) -> tuple[str, ...]:
    fields = msgspec.json.decode(_payload(key))
    if not isinstance(fields, dict) or not fields:
        raise NotCapturable(
            f"The key {key[:60]!r} has no columns.", advice="Pass the columns that identify a row: --key TABLE=COLUMN."
        )
    return tuple(fields)


def _payload_fields(row: pa.DataType, payload: dict[str, Any]) -> list[pa.Field]:
    """What is read of a payload. Databases number their transactions, or name them."""
    own = (payload.get("source") or {}).get("txId")
    source = [
        ("ts_ms", pa.int64()),
        ("ts_us", pa.int64()),
        ("txId", pa.string() if isinstance(own, str) else pa.int64()),
    ]
    transaction = [("id", pa.string()), ("total_order", pa.int64())]
    return [
        pa.field("before", row),
        pa.field("after", row),
        pa.field("source", pa.struct(source)),
        pa.field("op", pa.string()),
        pa.field("ts_ms", pa.int64()),
        pa.field("transaction", pa.struct(transaction)),
    ]


def _read(texts: list[bytes], topic: Topic, partition: int, offsets: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        columns_of_texts(texts, topic, partition=partition, offsets=offsets), schema=topic.schema
    )


def _by(topic: Topic, columns: pa.DataType) -> Topic:
    """A topic read by other columns than its own."""
    return msgspec.structs.replace(topic, schemas=(pa.schema(list(columns)),), has_schema=True)


def _committed(source: pa.Array, told_ms: pa.Array) -> pa.Array:
    """When the database committed, as finely as it says; or when Debezium told it."""
    ms = pc.coalesce(pc.struct_field(source, "ts_ms"), told_ms)
    us = pc.coalesce(pc.struct_field(source, "ts_us"), pc.multiply(ms, 1000), pa.scalar(0, pa.int64()))
    return us.view(COMMITTED)


def _mapped(rows: pa.Array, change: Callable[[int, pa.Array], pa.Array]) -> pa.Array:
    columns = [pc.struct_field(rows, [at]) for at in range(rows.type.num_fields)]
    changed = [change(at, column) for at, column in enumerate(columns)]
    if all(new is old for new, old in zip(changed, columns, strict=True)):
        return rows
    return pa.StructArray.from_arrays(changed, fields=list(rows.type), mask=rows.is_null())


def _or_null(column: pa.Array) -> pa.Array:
    if not pa.types.is_string(column.type):
        return column
    missing = pc.is_in(column, value_set=_UNAVAILABLE)
    return pc.if_else(missing, None, column) if pc.any(missing, min_count=0).as_py() else column
