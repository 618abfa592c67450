"""The fields of hashes in Redis: each value of a column as the text, or the bytes, that other programs expect to find.

STRING and BINARY are as they are. Everything else is as the log writes it in JSON (`headwater.log.arrow.json_types`): numbers, `true`, ISO
8601 times, all digits of a decimal, `NaN`; nested values are JSON. What is text in JSON has no quotes here. Functions only:
safe from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.arrow.json_types import from_json_texts, row_texts

_WORDS = ("NaN", "Infinity", "-Infinity")


def field_texts(column: pa.Array) -> pa.Array:
    """The bytes of each value of a column; null stays null."""
    is_, type_ = pa.types, column.type
    if is_.is_binary(type_):
        return column
    if is_.is_string(type_):
        return column.view(pa.binary())
    texts = row_texts(pa.record_batch([column], names=["v"]))
    texts = pc.utf8_slice_codeunits(texts, len('{"v":'), -1)
    if not is_.is_nested(type_):
        texts = pc.utf8_trim(texts, '"')
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.string())).view(pa.binary())


def from_field_texts(values: Sequence[bytes | None], field: pa.Field) -> pa.Array:
    """The column that `field_texts` gave these values for; `ValueError` and errors of ours where somebody wrote something else."""
    is_, type_ = pa.types, field.type
    if is_.is_binary(type_):
        return pa.array(values, pa.binary())
    texts = pa.array([None if value is None else value.decode() for value in values], pa.string())
    if is_.is_string(type_):
        return texts
    if is_.is_timestamp(type_) or is_.is_date(type_) or is_.is_decimal(type_):
        texts = pc.binary_join_element_wise('"', texts, '"', "")
    elif is_.is_floating(type_):
        quoted = pc.binary_join_element_wise('"', texts, '"', "")
        texts = pc.if_else(pc.is_in(texts, value_set=pa.array(_WORDS)), quoted, texts)
    return from_json_texts(texts.to_pylist(), field)
