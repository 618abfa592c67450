"""Chunks as readers want them: `Event` objects, or Arrow batches with the columns that were asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.arrow.rows import to_values
from headwater.log.port.chunk import Chunk
from headwater.log.port.topic import Topic
from headwater.model.errors import InvalidInput
from headwater.model.event import Event
from headwater.model.schema import HEADERS

_TIMESTAMP = pa.timestamp("us", tz="UTC")


def to_events(chunk: Chunk) -> list[Event]:
    """The events of a chunk, in order."""
    batch, topic = chunk.batch, chunk.topic
    names = batch.schema.names
    count = batch.num_rows
    appended = _appended_us(chunk)
    keys = batch.column(topic.key).to_pylist() if topic.key else repeat(None)
    deleted = batch.column("_deleted").to_pylist() if "_deleted" in names else None
    if topic.has_schema:
        values: list[Any] = to_values(batch.select(topic.schema.names))
        if deleted is not None:
            values = [None if gone else value for value, gone in zip(values, deleted, strict=True)]
    else:
        values = batch.column("value").to_pylist()
    times = _times_us(batch, topic, appended)
    headers: Any = repeat(None)
    if "_headers" in names:
        headers = [None if pairs is None else dict(pairs) for pairs in batch.column("_headers").to_pylist()]
    offsets: Any = range(chunk.base_offset, chunk.base_offset + count)
    if chunk.offsets is not None:
        offsets = chunk.offsets.tolist()
    return list(
        map(Event, keys, values, times, appended, repeat(topic.name), repeat(chunk.partition), offsets, headers)
    )


def output_schema(topic: Topic, columns: Sequence[str] | None) -> pa.Schema:
    """The schema of Arrow batches with these columns; all of the topic's own where none are named."""
    if columns is None:
        return topic.schema
    fields = []
    for name in columns:
        field = _meta_field(topic, name)
        if field is None:
            known = ", ".join([*topic.schema.names, "_key", "_time", "_appended", "_partition", "_offset", "_topic"])
            raise InvalidInput(
                f"Topic {topic.name!r} has no column {name!r}.", advice=f"Choose from {known}, _headers, _deleted."
            )
        fields.append(field)
    return pa.schema(fields)


def to_batch_of(chunk: Chunk, schema: pa.Schema) -> pa.RecordBatch:
    """The chunk's events with the columns of `schema` (see `output_schema`)."""
    batch = chunk.batch
    if schema is chunk.topic.schema and batch.num_columns == len(schema):
        return batch
    return pa.RecordBatch.from_arrays([_column(chunk, field) for field in schema], schema=schema)


def joined(batches: Iterable[pa.RecordBatch], *, rows_min: int, bytes_min: int = 1 << 62) -> Iterator[pa.RecordBatch]:
    """The same rows in the same order, at least `rows_min` or `bytes_min` in each batch but the last; large ones are not copied.

    Producers that flush often leave many batches of a few events, and most programs take as long for a small batch as for a
    large one.
    """
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= rows_min or size >= bytes_min:
            yield pa.concat_batches(waiting) if len(waiting) > 1 else batch
            waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.concat_batches(waiting)


def _column(chunk: Chunk, field: pa.Field) -> pa.Array:
    batch, topic, count = chunk.batch, chunk.topic, chunk.batch.num_rows
    match field.name:
        case "_offset":
            return pa.array(chunk.all_offsets())
        case "_partition":
            return pa.array(np.full(count, chunk.partition, dtype=np.int32))
        case "_topic":
            return pa.repeat(pa.scalar(topic.name), count)
        case "_key":
            return batch.column(topic.key) if topic.key else pa.nulls(count, field.type)
        case "_time" if topic.time is not None:
            times = batch.column(topic.time).cast(_TIMESTAMP)
            return pc.coalesce(times, _appended(chunk)) if times.null_count else times
        case "_appended" | "_time":
            return _appended(chunk)
        case "_headers" | "_deleted" if field.name not in batch.schema.names:
            return pa.repeat(pa.scalar(False), count) if field.name == "_deleted" else pa.nulls(count, field.type)
        case "_deleted":
            return batch.column("_deleted").fill_null(False)
    column = batch.column(field.name)
    # Arrow refuses to cast a null struct with NOT NULL fields even to its own type.
    return column if column.type == field.type else column.cast(field.type)


def _appended(chunk: Chunk) -> pa.Array:
    if chunk.appended is None:
        return chunk.batch.column("_appended")
    return pa.array(np.full(chunk.batch.num_rows, chunk.appended, dtype=np.int64)).cast(_TIMESTAMP)


def _meta_field(topic: Topic, name: str) -> pa.Field | None:
    if name in topic.schema.names:
        return topic.schema.field(name)
    key = topic.schema.field(topic.key).type if topic.key else pa.binary()
    fields = {
        "_key": pa.field("_key", key),
        "_time": pa.field("_time", _TIMESTAMP),
        "_appended": pa.field("_appended", _TIMESTAMP),
        "_partition": pa.field("_partition", pa.int32()),
        "_offset": pa.field("_offset", pa.int64()),
        "_topic": pa.field("_topic", pa.string()),
        "_headers": HEADERS,
        "_deleted": pa.field("_deleted", pa.bool_()),
    }
    return fields.get(name)


def _appended_us(chunk: Chunk) -> Any:
    """The append time of each event; without end where all have the same."""
    if chunk.appended is not None:
        return repeat(chunk.appended)
    return chunk.batch.column("_appended").view(pa.int64()).to_pylist()


def _times_us(batch: pa.RecordBatch, topic: Topic, appended: Any) -> Any:
    if topic.time is None:
        return appended
    column = batch.column(topic.time)
    times = column.view(pa.int64()).to_pylist()  # no cast: that costs 0.1 ms where it is not called all the time
    if column.null_count:
        return [log if time is None else time for time, log in zip(times, appended, strict=False)]
    return times
