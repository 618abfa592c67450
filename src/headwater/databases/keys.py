"""A key's text: what identifies a row in a view's store, in a cache or in an index, whatever the types of its key columns.

The key's values in order, with `|` between them: STRING as it is (`\\` as `\\\\`, `|` as `\\p`), null as `\\N`, TIMESTAMP as
microseconds since 1970, BINARY in hex, everything else as Arrow writes it. So a key of one STRING column is its own text and
goes to the partition that its rows came from, and null is a key like any other. This is stored behaviour: it must never
change. Functions only, no state: safe from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

_NULL = "\\N"


def key_texts(rows: pa.Table | pa.RecordBatch, key: Sequence[str]) -> pa.Array:
    """The text of each row's key."""
    parts = [_texts(_one_array(rows.column(column))) for column in key]
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, "|")


def _one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _texts(column: pa.Array) -> pa.Array:
    is_, type_ = pa.types, column.type
    if is_.is_string(type_):
        texts = column
        if pc.any(pc.match_substring_regex(texts, r"[|\\]")).as_py():
            texts = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), "|", "\\p")
    elif is_.is_timestamp(type_):
        texts = column.cast(pa.int64()).cast(pa.string())
    elif is_.is_binary(type_):
        texts = pa.array([None if value is None else value.hex() for value in column.to_pylist()], pa.string())
    elif is_.is_floating(type_):
        texts = pc.add(column, pa.scalar(0.0, type_)).cast(pa.string())  # -0.0 is the key 0.0
    else:
        texts = column.cast(pa.string())
    return texts.fill_null(_NULL) if texts.null_count else texts


def plain_key_texts(rows: pa.Table | pa.RecordBatch, key: Sequence[str]) -> pa.Array:
    """The text of each row's key where others look it up by that: a key of one STRING column is exactly its value."""
    if len(key) == 1 and pa.types.is_string(rows.schema.field(key[0]).type):
        return _one_array(rows.column(key[0]))
    return key_texts(rows, key)
