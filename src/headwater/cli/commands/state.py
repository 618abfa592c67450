"""`headwater state …`: lists and shows the state of an application's operators, read-only and without Spark."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from headwater.cli.output.json import print_json_line
from headwater.cli.output.quantities import bytes_text
from headwater.cli.output.rows import rows_of
from headwater.cli.output.table import Right, lined_table, print_table, to_cell, typed_table
from headwater.cli.output.terminal import printable
from headwater.model.errors import InvalidInput, NotFound
from headwater.model.url import without_password

if TYPE_CHECKING:
    import pyarrow as pa

    from headwater.processing.state.state_info import StateInfo

state = typer.Typer(help="List and show the state of operators.", no_args_is_help=True)

Where = Annotated[
    str,
    typer.Argument(metavar="APP.PY|FOLDER", help="The application's script, its state folder or URL, or a checkpoint."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@state.command(name="list")
def list_(where: Where, json: Json = False) -> None:
    """List the operators with the version, partitions, watermark and size of their state."""
    found = _found(where)
    if json:
        print_json_line([_plain(one) for one in found])
    else:
        numbers = map(Right, ("rows", "size"))
        table = lined_table("stage", "operator", Right("version"), Right("partitions"), "watermark", *numbers)
        for one in found:
            rows = ", ".join(f"{name} {each.rows:,}" for name, each in one.tables.items())
            table.add_row(
                Text(printable(one.stage), style="bold"),
                Text(printable(one.operator)),
                "-" if one.version is None else f"{one.version:,}",
                "-" if one.partitions is None else f"{one.partitions}",
                _time(one.watermark_us),
                Text(printable(rows or "-")),
                bytes_text(one.bytes),
            )
        print_table(table)
    for one in found:
        if one.trouble is not None:
            typer.secho(f"{one.stage}/{one.operator}: ", fg="red", err=True, nl=False)
            typer.echo(printable(one.trouble), err=True)
    if any(one.trouble is not None for one in found):
        typer.secho("next: ", fg="yellow", err=True, nl=False)
        typer.echo("Rebuild the state from the log with `headwater run APP.PY --rebuild-state STAGE`.", err=True)
        raise typer.Exit(1)


@state.command()
def show(
    where: Where,
    operator: Annotated[
        str | None, typer.Argument(metavar="[STAGE/]OPERATOR", help="The operator. Optional if there is only one.")
    ] = None,
    table: Annotated[str | None, typer.Option("--table", help="Print only this table.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="Print at most this many rows of each table.")
    ] = 10,
    json: Json = False,
) -> None:
    """Show the state of one operator, with some rows of each table."""
    from headwater.processing.state.state_info import rows_of as pieces_of

    one = _chosen(_found(where), operator)
    if one.trouble is not None:
        raise InvalidInput(one.trouble, advice="Rebuild it with `headwater run APP.PY --rebuild-state STAGE`.")
    if table is not None and table not in one.tables:
        raise NotFound(
            f"Operator {one.operator!r} has no table {table!r}.", advice=f"Its tables are: {', '.join(one.tables)}."
        )
    rows = {name: list(_first(pieces_of(one, name), limit)) for name in one.tables if table is None or name == table}
    if json:
        plain = {name: [row for batch in found for row in _dicts(batch)] for name, found in rows.items()}
        print_json_line({**_plain(one), "some": plain})
        return
    typer.secho(printable(f"{one.stage}/{one.operator}"), bold=True)
    for label, value in (
        ("in", without_password(one.url)),
        ("version", f"{one.version} of query {one.query}, settings {one.fingerprint}"),
        ("partitions", str(one.partitions)),
        ("watermark", _time(one.watermark_us)),
        ("size", bytes_text(one.bytes)),
    ):
        typer.echo(f"  {label:<12} {printable(value)}")
    for name, found in rows.items():
        info = one.tables[name]
        typer.echo(f"\n{printable(name)}: {info.kind}, {info.rows:,} rows in {info.runs} runs")
        if found:
            shown = typed_table(found[0].schema.names, found[0].schema.types)
            for batch in found:
                for row in rows_of(batch):
                    shown.add_row(*(to_cell(value) for value in row))
            print_table(shown)


def _found(where: str) -> list[StateInfo]:
    from headwater.processing.state.state_info import find_states

    if where.endswith(".py"):
        from headwater.app.app import load_app

        app = load_app(Path(where))
        return find_states(app.operators_url or str(app.state.absolute()))
    return find_states(where if "://" in where else str(Path(where).absolute()))


def _chosen(found: list[StateInfo], name: str | None) -> StateInfo:
    names = [f"{one.stage}/{one.operator}" for one in found]
    picked = [one for one, full in zip(found, names, strict=True) if name in (None, full, one.operator)]
    if len(picked) == 1:
        return picked[0]
    advice = f"Choose one of: {', '.join(names)}."
    if name is None or picked:
        what = "No operator was named" if name is None else f"The name {name!r} is ambiguous"
        raise InvalidInput(f"{what}, and there are {len(picked)}.", advice=advice)
    raise NotFound(f"Operator {name!r} does not exist.", advice=advice)


def _first(pieces: Any, limit: int) -> Any:
    """The first rows, as record batches."""
    left = limit
    for piece in pieces:
        if left <= 0:
            return
        batches: list[pa.RecordBatch] = piece.slice(0, left).to_batches()
        yield from batches
        left -= sum(batch.num_rows for batch in batches)


def _dicts(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    return [dict(zip(batch.schema.names, row, strict=True)) for row in islice(rows_of(batch), batch.num_rows)]


def _time(us: int | None) -> str:
    from datetime import UTC, datetime, timedelta

    try:
        at = None if us is None else datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)
    except OverflowError:
        return "all time"
    return "-" if at is None else at.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")


def _plain(one: StateInfo) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(one), "url": without_password(one.url)}
