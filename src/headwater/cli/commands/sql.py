"""`headwater sql "select …"`: runs one query over topics and prints a table, JSON lines or CSV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.log_option import LogOption, open_existing
from headwater.cli.output.json import write_json
from headwater.cli.output.rows import Format, rows_of, write_csv
from headwater.cli.output.table import print_table, to_cell, typed_table
from headwater.cli.output.terminal import is_terminal

if TYPE_CHECKING:
    import pyarrow as pa

TABLE_ROWS_MAX = 1_000


def sql(
    query: Annotated[
        str, typer.Argument(help='One SELECT statement in DuckDB\'s SQL. Quote names with a dot: "orders.eu".')
    ],
    format: Annotated[
        Format | None, typer.Option("--format", help="Default: a table on a terminal, JSON lines in a pipe.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Cancel the query after this time.")
    ] = 60.0,
    memory_mb: Annotated[
        int, typer.Option("--memory", metavar="MB", min=16, max=1_000_000_000, help="The memory limit of the query.")
    ] = 1_000,
    log: LogOption = None,
) -> None:
    """Query topics with SQL. Queries are read-only."""
    from headwater.query.query import answer

    with (
        open_existing(log) as opened,
        answer(opened, query, timeout_s=timeout_s, memory_mb=memory_mb) as batches,
    ):
        print_answer(batches, format)


def print_answer(batches: pa.RecordBatchReader, format: Format | None) -> None:
    """Prints the rows of a result; the default is a table on a terminal, JSON lines in a pipe."""
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
    table = typed_table(batches.schema.names, batches.schema.types)
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
        typer.echo(
            f"Only the first {TABLE_ROWS_MAX:,} rows are shown. Use --format csv or --format json to print all rows.",
            err=True,
        )


def _unique(names: list[str]) -> list[str]:
    """The names, with a number appended to repeated ones, so that a JSON object keeps every column."""
    return [name if name not in names[:at] else f"{name}_{at}" for at, name in enumerate(names)]
