"""Rows as plain Python values, for tables (`table`), JSON lines (`json`) and CSV.

In JSON, BINARY is text if it is UTF-8 and else `{"base64": …}`; TIMESTAMP is ISO 8601 in UTC.
"""

from __future__ import annotations

import base64
import csv
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from headwater.model.errors import HeadwaterError

if TYPE_CHECKING:
    import pyarrow as pa

Format = Literal["table", "json", "csv"]


def rows_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """One tuple for each row, in plain Python values: BINARY as text or base64, maps and structs as dicts."""
    return zip(*(_plain_column(column) for column in batch.columns), strict=True)


def write_csv(rows: Iterable[tuple[Any, ...]]) -> None:
    """Writes rows as CSV; nested values as JSON."""
    sys.stdout.buffer.write(csv_lines(rows))
    sys.stdout.buffer.flush()


def csv_lines(rows: Iterable[tuple[Any, ...]]) -> bytes:
    """Rows as lines of CSV; nested values as JSON."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([csv_cell(value) for value in row] for row in rows)
    return text.getvalue().encode("utf-8", errors="replace")


def csv_cell(value: Any) -> Any:
    """A value as one cell of CSV; a nested value is JSON."""
    import msgspec

    if isinstance(value, bool):
        return str(value).lower()
    if value is None or isinstance(value, str | int | float):
        return value
    text = msgspec.json.encode(value, enc_hook=str).decode("utf-8")
    return text[1:-1] if text.startswith('"') else text


def _plain_column(column: pa.Array) -> Iterable[Any]:
    import pyarrow as pa

    from headwater.log.arrow.columns import values_of

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    plain = _plain_of(column.type)
    values = values_of(column, _times)
    return values if plain is None else [None if value is None else plain(value) for value in values]


def _times(column: pa.Array) -> list[Any]:
    """Times and dates as Python values; as text if Python cannot represent them, or if DuckDB means infinity."""
    import pyarrow as pa

    from headwater.log.arrow.columns import datetimes_of

    try:
        if pa.types.is_date(column.type):
            return list(column.to_pylist())
        micros = pa.timestamp("us", "UTC" if column.type.tz else None)
        # From nanoseconds it loses digits, from seconds it may not fit.
        return datetimes_of(column.cast(micros, safe=column.type.unit in ("s", "ms")))
    except (HeadwaterError, pa.ArrowInvalid, OverflowError, ValueError):
        pass
    if len(column) > 1:
        half = len(column) // 2
        return [*_times(column.slice(0, half)), *_times(column.slice(half))]
    number = column.cast(pa.int32() if pa.types.is_date32(column.type) else pa.int64())[0].as_py()
    greatest = (1 << (31 if pa.types.is_date32(column.type) else 63)) - 1
    if abs(number) == greatest:
        return ["infinity" if number > 0 else "-infinity"]
    return [column.cast(pa.string())[0].as_py()]


def _plain_of(type_: pa.DataType) -> Callable[[Any], Any] | None:
    """The conversion to a plain value; None if the value already is one."""
    import pyarrow as pa

    if pa.types.is_binary(type_) or pa.types.is_large_binary(type_) or pa.types.is_fixed_size_binary(type_):
        return _text
    if pa.types.is_decimal(type_) and type_.scale == 0:
        return int
    nested = pa.types.is_nested(type_)
    return _plain_nested if nested and "binary" in str(type_) else None


def _plain_nested(value: Any) -> Any:
    if isinstance(value, bytes):
        return _text(value)
    if isinstance(value, dict):
        return {_key(key): _plain_nested(item) for key, item in value.items()}
    return [_plain_nested(item) for item in value] if isinstance(value, list) else value


def _key(key: Any) -> Any:
    text = _plain_nested(key)
    return text["base64"] if isinstance(text, dict) else text


def _text(value: bytes) -> str | dict[str, str]:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode("ascii")}
