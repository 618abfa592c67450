"""`headwater sql "select …"`: one question to the topics, answered as a table, JSON lines or CSV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.location import LogOption, open_existing
from headwater.cli.output.rows import (
    Format,
    is_terminal,
    make_table,
    print_table,
    rows_of,
    to_cell,
    write_csv,
    write_json,
)

if TYPE_CHECKING:
    import pyarrow as pa

TABLE_ROWS_MAX = 1_000


def sql(
    query: Annotated[str, typer.Argument(help='One SELECT of DuckDB\'s SQL; write "orders.eu" in quotes.')],
    format: Annotated[
        Format | None, typer.Option("--format", help="Default: a table on a terminal, JSON lines in a pipe.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Stop after so long.")
    ] = 60.0,
    memory_mb: Annotated[
        int, typer.Option("--memory", metavar="MB", min=16, max=1_000_000_000, help="The memory that it may take.")
    ] = 1_000,
    log: LogOption = None,
) -> None:
    """Query topics in SQL; nothing can be changed by it."""
    from headwater.query.query import answer

    with (
        open_existing(log) as opened,
        answer(opened, query, timeout_s=timeout_s, memory_mb=memory_mb) as batches,
    ):
        print_answer(batches, format)


def print_answer(batches: pa.RecordBatchReader, format: Format | None) -> None:
    """Prints the rows of an answer; the default is a table on a terminal, JSON lines in a pipe."""
    shape = format or ("table" if is_terminal() else "json")
    if shape == "table":
        _print(batches)
    elif shape == "csv":
        write_csv([tuple(batches.schema.names)])
        for batch in batches:
            write_csv(rows_of(batch))
    else:
        names = _unique(batches.schema.names)
        for batch in batches:
            write_json(names, rows_of(batch))


def _print(batches: pa.RecordBatchReader) -> None:
    table = make_table(batches.schema.names, batches.schema.types)
    more = False
    for batch in batches:
        room = TABLE_ROWS_MAX - table.row_count
        for row in rows_of(batch.slice(0, room)):
            table.add_row(*map(to_cell, row))
        if batch.num_rows > room:
            more = True
            break
    print_table(table)
    if more:
        typer.echo(f"The first {TABLE_ROWS_MAX:,} rows; --format csv or json gives all.", err=True)


def _unique(names: list[str]) -> list[str]:
    """The names with a number behind those that come again, so that a JSON object keeps every column."""
    return [name if name not in names[:at] else f"{name}_{at}" for at, name in enumerate(names)]
