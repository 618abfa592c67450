"""`headwater views …`: lists, shows and queries views, and prints the changes of one live.

The log has the catalog of views. Their rows are in the store of `--store`, else of `HEADWATER_VIEWS`, else in `views.db`
in the log's folder.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from headwater.cli.commands.sql import print_answer
from headwater.cli.log_option import LogOption, log_url, open_existing
from headwater.cli.output.json import print_json, print_json_line, write_json
from headwater.cli.output.rows import Format, rows_of
from headwater.cli.output.table import Right, lined_table, print_table, to_cell
from headwater.cli.output.terminal import is_terminal, printable
from headwater.model.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    import pyarrow as pa

    from headwater.log.log import Log
    from headwater.views.view import View

VARIABLE = "HEADWATER_VIEWS"

views = typer.Typer(help="List, show, query and watch views.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="VIEW", help="The view's name.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help=f"The view store: sqlite:///… or postgresql://…. Default: ${VARIABLE}, else views.db in the log.",
    ),
]
AsOf = Annotated[
    str | None, typer.Option("--as-of", metavar="TIME", help="Query the view as of a time (ISO 8601) or a token.")
]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="Default: a table on a terminal, JSON lines in a pipe.")
]


@views.command(name="list")
def list_(json: Json = False, log: LogOption = None) -> None:
    """List the views of the log."""
    from headwater.views.catalog import ViewCatalog

    with open_existing(log) as opened:
        catalog = ViewCatalog(opened)
        found = [_summary(opened, catalog.get(name)) for name in catalog.names()]
    if json:
        print_json(found)
        return
    table = lined_table("view", "key", "mode", *map(Right, ("generation", "building", "changes")))
    for one in found:
        table.add_row(
            Text(printable(one["view"]), style="bold"),
            Text(printable(", ".join(one["key"]))),
            one["mode"],
            f"{one['generation']}",
            "-" if one["building"] is None else f"{one['building']}",
            f"{one['changes']:,}",
        )
    print_table(table)


@views.command()
def show(name: Name, store: StoreOption = None, json: Json = False, log: LogOption = None) -> None:
    """Show the columns, settings and topic of a view, and the lag of its store."""
    from headwater.views.catalog import ViewCatalog
    from headwater.views.store_url import open_view_store

    with open_existing(log) as opened:
        summary = _summary(opened, ViewCatalog(opened).get(name))
        kept = open_view_store(_store_url(store, log), read_only=True)
        try:
            stored = {(one.definition.name, one.definition.generation): one for one in kept.stored()}
        finally:
            kept.close()
    found = stored.get((name, summary["generation"]))
    summary["store"] = kept.url
    summary["applied"] = None if found is None else sum(found.applied.positions.values())
    summary["epoch"] = None if found is None else found.applied.epoch
    if json:
        print_json(summary)
        return
    typer.secho(printable(name), bold=True)
    for label, field in (
        ("columns", "columns"),
        ("key", "key"),
        ("mode", "mode"),
        ("order", "order"),
        ("limit", "limit"),
    ):
        value = summary[field]
        typer.echo(f"  {label:<12} {printable(', '.join(value) if isinstance(value, list) else str(value or '-'))}")
    typer.echo(f"  {'generation':<12} {summary['generation']}")
    if summary["building"] is not None:
        typer.echo(f"  {'building':<12} generation {summary['building']}, beside it")
    typer.echo(f"  {'topic':<12} {summary['topic']}, {summary['changes']:,} changes")
    behind = "not built yet" if found is None else f"{summary['changes'] - summary['applied']:,} changes behind"
    typer.echo(f"  {'store':<12} {printable(kept.url)}, {behind}")


@views.command()
def get(
    name: Name,
    key: Annotated[list[str], typer.Argument(metavar="COLUMN=VALUE…", help="A value for each key column.")],
    store: StoreOption = None,
    log: LogOption = None,
) -> None:
    """Print the row of a key as JSON."""
    import pyarrow as pa

    with _opened(name, store, log) as view:
        schema = view.definition.schema
        row = view.get(**_key(key, schema))
        if row is None:
            raise NotFound(f"View {name!r} has no row with {', '.join(key)}.", advice="Check the spelling of the key.")
    fields = [field.with_nullable(True) for field in schema]
    batch = pa.RecordBatch.from_pylist([row], schema=pa.schema(fields))
    write_json(schema.names, rows_of(batch))


@views.command()
def sql(
    query: Annotated[str, typer.Argument(help="One SELECT statement in the SQL of the store. Each view is a table.")],
    as_of: AsOf = None,
    view: Annotated[str | None, typer.Option("--view", help="The view that --as-of applies to.")] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="Cancel the query after this time.")
    ] = 10.0,
    rows_max: Annotated[int, typer.Option("--rows-max", help="Refuse a result with more rows.")] = 100_000,
    format: FormatOption = None,
    store: StoreOption = None,
    log: LogOption = None,
) -> None:
    """Query views with SQL. Queries are read-only."""
    if as_of is None:
        from headwater.views.store import Limits
        from headwater.views.store_url import open_view_store

        kept = open_view_store(_store_url(store, log), read_only=True)
        try:
            answer = kept.ask(query, limits=Limits(timeout_s=timeout_s, rows_max=rows_max))
        finally:
            kept.close()
    else:
        if view is None:
            raise InvalidInput("--as-of needs a view.", advice="Add --view NAME.")
        with _opened(view, store, log) as opened:
            answer = opened.sql(query, as_of=as_of, timeout_s=timeout_s, rows_max=rows_max)
    print_answer(answer.to_reader(), format)


@views.command()
def watch(
    name: Name,
    since: Annotated[str | None, typer.Option(metavar="TOKEN", help="Resume after this token.")] = None,
    order: Annotated[
        str | None, typer.Option(help='Watch only the first rows in this order, such as "-count".')
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", help="The number of rows to watch with --order.")
    ] = None,
    changes_max: Annotated[int | None, typer.Option("--changes-max", help="Stop after this many changes.")] = None,
    store: StoreOption = None,
    log: LogOption = None,
) -> None:
    """Print the rows of a view, then each change as it happens, until Ctrl-C. Prints JSON in a pipe."""
    shown = 0
    with _opened(name, store, log) as view, view.subscribe(since, order=order, limit=limit) as feed:
        person = is_terminal()
        while changes_max is None or shown < changes_max:
            for change in feed.poll(changes_max=500 if changes_max is None else min(500, changes_max - shown)):
                _print_change(change, person=person)
                shown += 1


def _print_change(change: Any, *, person: bool) -> None:
    if not person:
        plain = {name: value for name in change.__struct_fields__ if (value := getattr(change, name)) not in (None, "")}
        print_json_line(plain)
        return
    signs = {"added": ("+", "green"), "changed": ("~", "yellow"), "removed": ("-", "red")}
    sign, color = signs.get(change.kind, ("·", "cyan"))
    parts = [_row_text(row) for row in (change.old, change.new) if row is not None]
    typer.secho(f"{sign} {' → '.join(parts) or f'{change.kind} {change.why}'.strip()}", fg=color)


def _row_text(row: dict[str, Any]) -> str:
    return "  ".join(f"{printable(name)}={to_cell(value).plain}" for name, value in row.items())


def _summary(log: Log, entry: Any) -> dict[str, Any]:
    from headwater.model.schema import to_ddl

    definition = entry.definition
    return {
        "view": definition.name,
        "key": list(definition.key),
        "mode": definition.mode,
        "order": list(definition.order),
        "limit": definition.limit,
        "columns": to_ddl(definition.schema),
        "generation": entry.current,
        "building": entry.building,
        "topic": definition.changes,
        "changes": sum(span.stop for span in log.offsets(definition.changes).values()),
    }


def _store_url(given: str | None, log: str | None) -> str:
    """The store that the user means."""
    if url := given or os.environ.get(VARIABLE):
        return url
    folder = log_url(log).removeprefix("file://")
    if re.match(r"\w+://", folder):
        raise InvalidInput(
            f"The log {folder} is not a folder, so it cannot contain a view store.",
            advice=f"Pass the store with --store or {VARIABLE}.",
        )
    return f"sqlite:///{os.path.join(folder, 'views.db')}"


def _opened(name: str, store: str | None, log: str | None) -> View:
    from headwater.views.view import open_view

    return open_view(_store_url(store, log), name, log=log_url(log))


def _key(pairs: list[str], schema: pa.Schema) -> dict[str, Any]:
    """The values of the key by the types of its columns; `null` means null unless the column is text."""
    import pyarrow as pa

    key: dict[str, Any] = {}
    for pair in pairs:
        column, found, text = pair.partition("=")
        if not found or column not in schema.names:
            raise InvalidInput(f"{pair!r} does not set a key column.", advice="Write COLUMN=VALUE for each key column.")
        type_ = schema.field(column).type
        try:
            value = (
                pa.scalar(text) if type_ == pa.string() else pa.scalar(None if text == "null" else text, pa.string())
            )
            key[column] = value.cast(type_).as_py()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise InvalidInput(
                f"{text!r} is not a valid {type_} for column {column!r}.", advice="Write the value as in SQL."
            ) from None
    return key
