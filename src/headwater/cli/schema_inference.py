"""Schema inference: the columns of an input from its first block, for `produce --create` without `--schema`."""

from __future__ import annotations

import io
import re

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.json as arrow_json

from headwater.formats.blocks import Block
from headwater.formats.formats import InputFormat
from headwater.model.errors import InvalidInput

_DEPTH_MAX = 100
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"')


def infer_schema(block: Block | None, form: InputFormat, *, name: str, delimiter: str = ",") -> pa.Schema:
    """Infers the columns of JSON lines or CSV. Times without a zone are UTC; a column that is always null is STRING."""
    if block is None or not block.data.strip():
        raise InvalidInput(
            f"{name} is empty, so its columns cannot be inferred.", advice="Pass the columns with --schema."
        )
    try:
        if form == "csv":
            found = arrow_csv.read_csv(
                io.BytesIO(block.data),
                read_options=arrow_csv.ReadOptions(block_size=1 << 30),
                parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            ).schema
        else:
            _check_depth(block.data, name)
            options = arrow_json.ReadOptions(block_size=1 << 30)
            found = arrow_json.read_json(io.BytesIO(block.data), read_options=options).schema
    except (pa.ArrowException, ValueError) as error:
        raise InvalidInput(
            f"The columns of {name} cannot be inferred: {str(error).splitlines()[0]}.",
            advice="Pass the columns with --schema; the next error then names the bad line.",
        ) from None
    return pa.schema([(column.name, _useful(column.type)) for column in found])


def _check_depth(data: bytes, name: str) -> None:
    """Refuses deeply nested JSON, because Arrow's recursive reader would overflow the stack."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.count(b"[") + line.count(b"{") > _DEPTH_MAX and _depth(line) > _DEPTH_MAX:
            raise InvalidInput(
                f"{name}:{number}: The JSON is nested deeper than {_DEPTH_MAX} levels.",
                advice="Use fewer levels, or write the value as text.",
            )


def _depth(line: bytes) -> int:
    """The nesting depth of brackets outside of strings."""
    depth = deepest = 0
    for bracket in re.findall(rb"[\[{\]}]", _TEXT.sub(b"", line)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def with_time(schema: pa.Schema, time: str | None) -> pa.Schema:
    """The schema with its time column as TIMESTAMP, if it was inferred as text."""
    at = -1 if time is None else schema.get_field_index(time)
    if at < 0 or not pa.types.is_string(schema.field(at).type):
        return schema
    return schema.set(at, pa.field(time, pa.timestamp("us", "UTC")))


def _useful(type_: pa.DataType) -> pa.DataType:
    is_ = pa.types
    if is_.is_null(type_) or is_.is_time(type_):
        return pa.string()
    if is_.is_timestamp(type_):
        return pa.timestamp("us", "UTC")
    if is_.is_list(type_):
        return pa.list_(_useful(type_.value_type))
    if is_.is_struct(type_):
        return pa.struct([(column.name, _useful(column.type)) for column in type_])
    return type_
