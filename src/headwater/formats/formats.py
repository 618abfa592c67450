"""The formats that `produce` reads: blocks of JSON lines, CSV, Parquet or plain lines become batches of a topic's columns.

Each format has a quick way (Arrow's readers, a block at a time) and a careful one (row by row, with the rules of
`headwater.log.arrow.rows`). Whatever the quick way refuses, the careful way decides on: it accepts the row or names its line.
"""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal, Protocol

import msgspec
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.json as arrow_json

from headwater.formats.blocks import LINE_BYTES_MAX, Block
from headwater.log.arrow.rows import to_batch
from headwater.log.port.topic import Topic
from headwater.model.errors import HeadwaterError, InvalidInput, SchemaMismatch
from headwater.model.schema import HEADERS

InputFormat = Literal["json", "csv", "parquet", "arrow", "lines"]

_JSON_BLOCK_BYTES = 1 << 30  # blocks are cut before they come here
_TRUE, _FALSE = ("1", "true", "TRUE", "True"), ("0", "false", "FALSE", "False")
_ARROW_ERRORS = (pa.ArrowException, ValueError)


@dataclass(frozen=True)
class BadRow:
    """A row that is no event of the topic: its line (of Parquet: its row), from 1, and why."""

    line: int
    error: HeadwaterError


@dataclass
class Parsed:
    """What became of a block. Where reading stops at the first bad row, `batches` holds exactly the rows before it."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)


class Parser(Protocol):
    """Reads the blocks of one format."""

    def parse(self, block: Block, *, stop: bool) -> Parsed:
        """The events of a block, and its bad rows: all of them, or with `stop` the first one."""


class JsonLines:
    """One JSON object on each line."""

    def __init__(self, topic: Topic) -> None:
        self._schema = topic.schema
        # Arrow reads numbers into a DATE and drops the zone of a TIMESTAMP_NTZ; as text they are cast by stricter rules.
        self._quick = pa.schema([(c.name, pa.string() if _is_read_as_text(c.type) else c.type) for c in topic.schema])
        self._decimals = [column.name for column in topic.schema if pa.types.is_decimal(column.type)]
        self._binary = {column.name: column.type for column in (*topic.schema, HEADERS) if "binary" in str(column.type)}

    def parse(self, block: Block, *, stop: bool) -> Parsed:
        try:
            return Parsed([self._parse_quickly(block.data)])
        except (*_ARROW_ERRORS, HeadwaterError):
            return self._parse_carefully(block, stop=stop)

    def _parse_quickly(self, data: bytes) -> pa.RecordBatch:
        table = arrow_json.read_json(
            io.BytesIO(data),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=_JSON_BLOCK_BYTES),
            parse_options=arrow_json.ParseOptions(explicit_schema=self._quick, unexpected_field_behavior="error"),
        )
        table.validate(full=True)  # Arrow's reader takes text that is not UTF-8
        if table.num_rows != data.count(b"\n") + (not data.endswith(b"\n")):
            raise ValueError("an object must be on one line of its own")
        columns = [table[c.name].cast(c.type) if _is_read_as_text(c.type) else table[c.name] for c in self._schema]
        return to_batch(pa.table(columns, names=self._schema.names), self._schema)

    def _parse_carefully(self, block: Block, *, stop: bool) -> Parsed:
        decode = msgspec.json.Decoder(float_hook=Decimal if self._decimals else None).decode
        rows, lines, bad = [], [], []
        for line, text in enumerate(block.data.split(b"\n"), block.first_line):
            if not text.strip():
                continue
            try:
                rows.append(self._row(decode(text)))
                lines.append(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, SchemaMismatch) as error:
                bad.append(BadRow(line, _told(error, "JSON")))
                if stop:
                    break
        return _merge(_sort_out(rows, lines, _to_batch_of(self._schema), stop=stop), bad, stop=stop)

    def _row(self, row: Any) -> dict[str, Any]:
        if not isinstance(row, dict):
            raise SchemaMismatch(
                f"The line is a JSON {type(row).__name__}, not an object.", advice="Write one JSON object per line."
            )
        row = row | {name: _with_bytes(row[name], type_) for name, type_ in self._binary.items() if name in row}
        if self._decimals:
            return {name: value if name in self._decimals else _with_floats(value) for name, value in row.items()}
        return row


class Csv:
    """Comma-separated values under a line with the columns' names; an empty cell is null, in a STRING it is empty."""

    def __init__(self, topic: Topic, header: bytes, *, name: str, delimiter: str) -> None:
        self._schema = topic.schema
        self._delimiter = delimiter
        self._names = next(csv.reader([header.decode("utf-8", errors="replace")], delimiter=delimiter), [])
        _check_columns(pa.schema([(column, pa.null()) for column in self._names]), topic, name)
        types = {column.name: column.type for column in topic.schema}
        self._types = [types.get(name, pa.string()) for name in self._names]
        csv.field_size_limit(LINE_BYTES_MAX)
        self._options = {
            "read_options": arrow_csv.ReadOptions(use_threads=False, column_names=self._names, block_size=1 << 30),
            "parse_options": arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            "convert_options": arrow_csv.ConvertOptions(
                column_types=types, null_values=[""], true_values=_TRUE, false_values=_FALSE
            ),
        }

    def parse(self, block: Block, *, stop: bool) -> Parsed:
        try:
            return Parsed([to_batch(arrow_csv.read_csv(io.BytesIO(block.data), **self._options), self._schema)])
        except (*_ARROW_ERRORS, HeadwaterError):
            return self._parse_carefully(block, stop=stop)

    def _parse_carefully(self, block: Block, *, stop: bool) -> Parsed:
        text = io.StringIO(block.data.decode("utf-8", errors="surrogateescape"), newline="")
        reader = csv.reader(text, delimiter=self._delimiter, strict=True)
        rows, lines, bad = [], [], []
        line = block.first_line
        while True:
            try:
                cells = next(reader, None)
                if cells is None:
                    break
                if cells:
                    rows.append(self._row(cells))
                    lines.append(line)
            except (csv.Error, SchemaMismatch) as error:
                bad.append(BadRow(line, _told(error, "CSV")))
                if stop:
                    break
            line = block.first_line + reader.line_num
        return _merge(_sort_out(rows, lines, _to_batch_of(self._schema), stop=stop), bad, stop=stop)

    def _row(self, cells: list[str]) -> dict[str, Any]:
        if len(cells) != len(self._names):
            raise SchemaMismatch(
                f"The row has {len(cells)} cells, but the header has {len(self._names)} columns.",
                advice="Put cells with a delimiter or a line break in double quotes.",
            )
        values = map(_cell_value, cells, self._types)
        return dict(zip(self._names, values, strict=True))


class Lines:
    """A topic without a schema: each line is a value, with a key before the separator if one is given."""

    def __init__(self, topic: Topic, *, key_separator: str | None) -> None:
        self._schema = topic.schema
        self._separator = None if key_separator is None else key_separator.encode("utf-8")

    def parse(self, block: Block, *, stop: bool) -> Parsed:
        values = [line.removesuffix(b"\r") for line in block.data.removesuffix(b"\n").split(b"\n")]
        keys: list[bytes | None] = [None] * len(values)
        bad = []
        if self._separator is not None:
            pairs = [value.partition(self._separator) for value in values]
            good = [at for at, (_, separator, _) in enumerate(pairs) if separator]
            bad = [self._no_key(block.first_line + at) for at, (_, found, _) in enumerate(pairs) if not found]
            if bad and stop:
                bad, good = bad[:1], [at for at in good if at < bad[0].line - block.first_line]
            keys, values = [pairs[at][0] for at in good], [pairs[at][2] for at in good]
        arrays = [pa.array(keys, pa.binary()), pa.array(values, pa.binary())]
        return Parsed([pa.RecordBatch.from_arrays(arrays, schema=self._schema)], bad)

    def _no_key(self, line: int) -> BadRow:
        assert self._separator is not None
        what = f"The line has no key, because the separator {self._separator.decode()!r} is missing."
        return BadRow(
            line,
            SchemaMismatch(what, advice="Write key, separator and value in each line, or leave out --key-separator."),
        )


class ArrowRows:
    """Arrow batches, as Parquet and Arrow files give them."""

    def __init__(self, topic: Topic, found: pa.Schema, *, name: str) -> None:
        self._schema = topic.schema
        _check_columns(found, topic, name)

    def parse_batch(self, batch: pa.RecordBatch, first_row: int, *, stop: bool) -> Parsed:
        """The events of a batch, and its bad rows by their number in the file."""
        rows = range(first_row, first_row + batch.num_rows)
        return _sort_out(batch, rows, self._convert, stop=stop)

    def _convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise SchemaMismatch(
                f"{error}.", advice="Encode text as UTF-8, or use a BINARY column for bytes."
            ) from None
        return to_batch(batch, self._schema)


def _check_columns(found: pa.Schema, topic: Topic, name: str) -> None:
    """Refuses an input whose columns are not the topic's, before any of its rows."""
    try:
        to_batch(found.empty_table(), topic.schema)
    except HeadwaterError as error:
        raise SchemaMismatch(f"{name}: {error.what}", advice=error.advice) from None


def _sort_out(rows: Any, lines: Sequence[int], convert: Callable[[Any], pa.RecordBatch], *, stop: bool) -> Parsed:
    """Converts rows; where that fails, halves them until each bad row stands alone."""
    parsed = Parsed()
    for part in _parts(rows, 0, len(lines), convert):
        if isinstance(part, pa.RecordBatch):
            parsed.batches.append(part)
            continue
        at, error = part
        parsed.bad.append(BadRow(lines[at], _told(error, "")))
        if stop:
            break
    return parsed


def _parts(
    rows: Any, start: int, end: int, convert: Callable[[Any], pa.RecordBatch]
) -> Iterator[pa.RecordBatch | tuple[int, HeadwaterError]]:
    if start == end:
        return
    try:
        yield convert(rows[start:end])
        return
    except HeadwaterError as error:
        if end - start == 1:
            yield start, error
            return
    middle = (start + end) // 2
    yield from _parts(rows, start, middle, convert)
    yield from _parts(rows, middle, end, convert)


def _merge(parsed: Parsed, bad: list[BadRow], *, stop: bool) -> Parsed:
    """Adds the rows that could not even be read. When reading stops at the first, all rows of `parsed` stand before it."""
    if stop and parsed.bad:
        return parsed
    return Parsed(parsed.batches, sorted([*parsed.bad, *bad], key=lambda one: one.line))


def _to_batch_of(schema: pa.Schema) -> Callable[[Any], pa.RecordBatch]:
    return lambda rows: to_batch(rows, schema)


def _cell_value(cell: str, type_: pa.DataType) -> Any:
    """A cell as the value that its column takes; what cannot be one stays text, and is refused with the row."""
    is_ = pa.types
    if is_.is_string(type_) or is_.is_binary(type_):
        return cell
    if not cell:
        return None
    if is_.is_boolean(type_):
        return True if cell in _TRUE else False if cell in _FALSE else cell
    try:
        if is_.is_integer(type_):
            return int(cell)
        if is_.is_floating(type_):
            return float(cell)
        if is_.is_nested(type_):
            return msgspec.json.decode(cell)
    except (ValueError, msgspec.DecodeError, RecursionError):
        return cell
    return cell


def _with_floats(value: Any) -> Any:
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dict):
        return {name: _with_floats(item) for name, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def _with_bytes(value: Any, type_: pa.DataType) -> Any:
    """A value with `{"base64": …}`, which stands for bytes that are no text, replaced by those bytes."""
    if pa.types.is_binary(type_) and isinstance(value, dict) and value.keys() == {"base64"}:
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (ValueError, TypeError):
            return value
    if pa.types.is_list(type_) and isinstance(value, list):
        return [_with_bytes(item, type_.value_type) for item in value]
    if pa.types.is_map(type_) and isinstance(value, dict):
        return {key: _with_bytes(item, type_.item_type) for key, item in value.items()}
    if pa.types.is_struct(type_) and isinstance(value, dict):
        types = {field.name: field.type for field in type_}
        return {name: _with_bytes(item, types[name]) if name in types else item for name, item in value.items()}
    return value


def _is_read_as_text(type_: pa.DataType) -> bool:
    return pa.types.is_date(type_) or (pa.types.is_timestamp(type_) and type_.tz is None)


def _told(error: Exception, kind: str) -> HeadwaterError:
    if isinstance(error, HeadwaterError):
        error.what = error.what.replace(", row 0 (from 0)", "")
        return error
    why = "it is nested too deeply" if isinstance(error, RecursionError) else error
    return InvalidInput(
        f"The line is not valid {kind}: {why}.", advice="Correct the line, or choose another format with --format."
    )
