"""Events as Kafka carries them: JSON by the one map of types (`headwater.log.arrow.json_types`), keys, tombstones and headers.

A value is one object with the topic's columns. A column that is missing is null, one that is not known is ignored. The
record's key is the key column's bytes as `headwater.log.arrow.placement` has them. A deletion is a record without a value (a
tombstone); what its row says beyond the key travels in the header `headwater.row`. A topic without a schema carries bytes as
they are.

Functions only, no state: safe from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from headwater.log.arrow.json_types import columns_of_texts, row_texts
from headwater.log.arrow.placement import key_bytes
from headwater.log.port.topic import Topic
from headwater.model.schema import DELETED, HEADERS

ROW_HEADER = "headwater.row"

_encode = msgspec.json.Encoder().encode

Headers = list[tuple[str, bytes]]


class Records(msgspec.Struct, frozen=True):
    """Events of one partition as Kafka stores them; `headers` is None where no event has any."""

    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[Headers | None] | None

    @property
    def size(self) -> int:
        """About how many bytes they take in a record batch."""
        sizes = sum(map(len, filter(None, self.keys))) + sum(map(len, filter(None, self.values)))
        for headers in self.headers or ():
            sizes += sum(len(name) + len(value) + 8 for name, value in headers or ())
        return sizes + 40 * len(self.values)


def to_records(batch: pa.RecordBatch, topic: Topic) -> Records:
    """The events of a batch (see `headwater.log.port.write.Write`) as records."""
    names = batch.schema.names
    keys: Sequence[bytes | None] = [None] * batch.num_rows
    if topic.key is not None:
        keys = key_bytes(batch.column(topic.key)).to_pylist()
    headers: list[Headers | None] | None = None
    if HEADERS.name in names:
        headers = batch.column(HEADERS.name).to_pylist()
    if not topic.has_schema:
        return Records(keys, batch.column("value").to_pylist(), headers)
    values: list[bytes | None] = row_texts(batch.select(topic.schema.names)).view(pa.binary()).to_pylist()
    if DELETED.name in names:
        headers = headers or [None] * batch.num_rows
        for row in np.flatnonzero(batch.column(DELETED.name).fill_null(False).to_numpy(zero_copy_only=False)).tolist():
            text, values[row] = values[row], None
            told = any(batch.column(n)[row].is_valid for n in topic.schema.names if n != topic.key)
            if text is not None and (told or keys[row] is None):
                headers[row] = [*(headers[row] or []), (ROW_HEADER, text)]
    return Records(keys, values, headers)


def to_columns(records: Records, topic: Topic, *, partition: int, offsets: Sequence[int]) -> pa.RecordBatch:
    """The records as a batch of the topic's columns, with `_headers` and `_deleted` where any event has them."""
    deleted, headers = None, _headers_column(records.headers)
    if not topic.has_schema:
        columns = [pa.array(records.keys, pa.binary()), pa.array(records.values, pa.binary())]
    else:
        texts = records.values
        if None in texts:
            deleted = pa.array([text is None for text in texts], pa.bool_())
            texts = [_text_of_deleted(records, at, topic) if text is None else text for at, text in enumerate(texts)]
        columns = columns_of_texts(texts, topic, partition=partition, offsets=offsets)  # type: ignore[arg-type]
    fields = list(topic.schema)
    for field, column in ((HEADERS, headers), (DELETED, deleted)):
        if column is not None:
            fields.append(field)
            columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _text_of_deleted(records: Records, at: int, topic: Topic) -> bytes:
    """The row of a tombstone: what its header says, or its key alone."""
    for name, value in (records.headers[at] or ()) if records.headers is not None else ():
        if name == ROW_HEADER:
            return value
    key = records.keys[at]
    if key is None or topic.key is None:
        return b"{}"
    type_ = topic.schema.field(topic.key).type
    try:
        if pa.types.is_string(type_):
            text = _encode(key.decode("utf-8"))
        elif pa.types.is_binary(type_):
            text = _encode(key)
        elif pa.types.is_integer(type_):
            text = b"%d" % int.from_bytes(key, "big", signed=True)
        else:
            text = key
    except UnicodeDecodeError:
        return b"{}"
    return b"{%s:%s}" % (_encode(topic.key), text)


def _headers_column(headers: Sequence[Headers | None] | None) -> pa.Array | None:
    if headers is None or not any(headers):
        return None
    cleaned: list[Headers | None] = [
        [(name, value or b"") for name, value in pairs if name != ROW_HEADER] or None if pairs else None
        for pairs in headers
    ]
    return pa.array(cleaned, HEADERS.type) if any(cleaned) else None
