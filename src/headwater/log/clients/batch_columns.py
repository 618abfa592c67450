"""Gathered events as columns: what `send` was given one by one becomes the rows of one Arrow batch.

Functions only, no state: safe from any thread.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.log.arrow.rows import check_size, to_batch
from headwater.log.clients.batch import Batch
from headwater.log.port.topic import Topic
from headwater.model.errors import HeadwaterError, InvalidInput, SchemaMismatch
from headwater.model.schema import DELETED, HEADERS

_BINARY = pa.binary()
_EXTRA = (HEADERS.name, DELETED.name)
"""In this order they follow the topic's columns, if any event has them."""

_OFFSETS = struct.Struct("<ii")


def to_rows(batch: Batch, topic: Topic) -> pa.RecordBatch:
    """The batch's columns, from values as users give them."""
    if topic.has_schema:
        if topic.key is None and None in batch.values:
            raise InvalidInput(
                f"Topic {topic.name!r} has no key, so nothing in it can be deleted by one.",
                advice="Send the row's columns; create the topic with key=… for deletions.",
            )
        rows = [
            value if value is not None else {topic.key: key, "_deleted": True}
            for value, key in zip(batch.values, batch.keys, strict=True)
        ]
        columns = to_batch(rows, topic.schema)
    else:
        columns = _bytes_rows(batch, topic)
    if batch.headers:
        columns = columns.add_column(len(topic.schema), HEADERS, _headers_column(batch))
    check_size(columns, topic)
    return columns


def to_rows_one_by_one(batch: Batch, topic: Topic) -> tuple[pa.RecordBatch, Any, dict[int, Exception]]:
    """The slow way, once something is wrong: one bad event must not keep its neighbours out of the log."""
    pieces, taken = [], []
    refused: dict[int, Exception] = {}
    for index in range(len(batch.values)):
        try:
            pieces.append(to_rows(batch.only(index), topic))
            taken.append(index)
        except HeadwaterError as error:
            refused[index] = error
    if not pieces:
        raise next(iter(refused.values()))
    table = pa.concat_tables([pa.Table.from_batches([piece]) for piece in pieces], promote_options="default")
    table = table.select([*topic.schema.names, *(name for name in _EXTRA if name in table.column_names)])
    if batch.sequences is not None:
        batch.sequences = [batch.sequences[index] for index in taken]
    return table.combine_chunks().to_batches()[0], np.asarray(taken), refused


def _headers_column(batch: Batch) -> pa.Array:
    pairs = [batch.headers.get(number) for number in range(len(batch.values))]
    try:
        return pa.array([None if pair is None else list(pair.items()) for pair in pairs], HEADERS.type)
    except (pa.ArrowException, AttributeError, TypeError, UnicodeError):
        raise SchemaMismatch(
            f"Headers are a dict of names to bytes; got {next(iter(batch.headers.values()))!r:.80}.",
            advice='Write headers={"trace": b"…"}.',
        ) from None


def _bytes_rows(batch: Batch, topic: Topic) -> pa.RecordBatch:
    try:
        arrays = [_bytes_column(batch.keys), _bytes_column(batch.values)]
    except (pa.ArrowException, TypeError, UnicodeError):
        fits = (bytes, bytearray, memoryview, str, type(None))
        bad = next((value for value in (*batch.keys, *batch.values) if not isinstance(value, fits)), "such text")
        raise SchemaMismatch(
            f"Topic {topic.name!r} has no schema, so keys and values are bytes; got {type(bad).__name__} {bad!r:.60}.",
            advice="Encode it, or create the topic with a schema.",
        ) from None
    return pa.RecordBatch.from_arrays(arrays, schema=topic.schema)


def _bytes_column(values: list[Any]) -> pa.Array:
    if len(values) == 1 and values[0].__class__ is bytes:  # four times as fast for an event that is sent alone
        offsets = pa.py_buffer(_OFFSETS.pack(0, len(values[0])))
        return pa.Array.from_buffers(_BINARY, 1, [None, offsets, pa.py_buffer(values[0])], 0)
    return pa.array(values, _BINARY)
