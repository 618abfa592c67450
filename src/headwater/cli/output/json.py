"""JSON output: what commands print with `--json`, and rows as JSON lines.

TIMESTAMP is ISO 8601 in UTC; `rows` says how other values become JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import typer


def print_json(value: object) -> None:
    """Prints a value as indented JSON."""
    import msgspec

    typer.echo(msgspec.json.format(json_text(value)))


def print_json_line(value: object) -> None:
    """Prints a value as one line of JSON."""
    typer.echo(json_text(value))


def json_text(value: object) -> str:
    """A value as one line of JSON; values that JSON cannot represent become text."""
    import msgspec

    return msgspec.json.encode(value, enc_hook=str).decode()


def write_json(names: Iterable[str], rows: Iterable[tuple[Any, ...]], *, leave_out: Iterable[str] = ()) -> None:
    """Writes one line of JSON for each row; omits empty values of the columns in `leave_out`."""
    for line in json_lines(names, rows, leave_out=leave_out):
        sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def json_lines(
    names: Iterable[str], rows: Iterable[tuple[Any, ...]], *, leave_out: Iterable[str] = ()
) -> Iterator[bytes]:
    """One line of JSON for each row; omits empty values of the columns in `leave_out`."""
    import msgspec

    encode = msgspec.json.Encoder(decimal_format="number").encode
    names, optional = list(names), set(leave_out)
    for row in rows:
        pairs = zip(names, row, strict=True)
        yield encode({n: v for n, v in pairs if v or n not in optional}) + b"\n"
