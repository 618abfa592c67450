"""`headwater capture …`: captures a database, shows the progress, exports changes, and removes a capture."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.text import Text

from headwater.cli.log_option import LogOption, open_existing, open_or_create
from headwater.cli.output.confirmation import confirm
from headwater.cli.output.json import print_json_line
from headwater.cli.output.progress import ProgressLine, progress_line, tell_end
from headwater.cli.output.quantities import events_text
from headwater.cli.output.table import Right, lined_table, print_table
from headwater.cli.output.terminal import printable
from headwater.model.clock import system_clock
from headwater.model.errors import HeadwaterError, InvalidInput, NotFound

if TYPE_CHECKING:
    from headwater.capture.capture import Capture
    from headwater.capture.progress import CaptureProgress
    from headwater.log.log import Log

capture = typer.Typer(help="Capture the tables of a database as topics.", no_args_is_help=True)

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="The database: sqlite:///shop.db, postgresql://user@host/shop, mariadb://…, mongodb://…, debezium+kafka://host?topics=…",
    ),
]
Tables = Annotated[
    list[str] | None,
    typer.Option(
        "--table", "-t", help="Capture only this table. Repeatable. Default: every table that can be captured."
    ),
]
Name = Annotated[str | None, typer.Option(help="The name of the source in the log. Default: the name of the database.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_SHOW_S = 0.25


@capture.command()
def run(
    url: Url,
    table: Tables = None,
    name: Name = None,
    key: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE=COLUMN,…", help="The unique columns of a table without a primary key. Repeatable."),
    ] = None,
    prefix: Annotated[str, typer.Option(help="A prefix for the names of the topics.")] = "",
    partitions: Annotated[int, typer.Option(min=1, help="The number of partitions of each new topic.")] = 4,
    retention: Annotated[
        str, typer.Option(help='How long the log keeps the history of each new table, or "forever".')
    ] = "7 days",
    available_now: Annotated[
        bool, typer.Option("--available-now", help="Capture the present rows and changes, then exit.")
    ] = False,
    backfill_again: Annotated[
        bool,
        typer.Option(
            "--backfill-again",
            help="Copy the tables again if the database no longer has the changes, or is another database.",
        ),
    ] = False,
    log: LogOption = None,
) -> None:
    """Copy the tables of a database, then capture each change until Ctrl-C. The next run resumes from there."""
    from headwater.capture.capture import Capture
    from headwater.capture.source_url import open_source

    source = open_source(url, table, name=name, key=_keys(key or []))
    with open_or_create(log) as opened, _stopped_by_signals() as stop, progress_line(source.name) as line:
        running = Capture(
            opened,
            source,
            prefix=prefix,
            partitions=partitions,
            retention=None if retention == "forever" else retention,
            backfill_again=backfill_again,
        )
        try:
            running.open()
            for left, why in source.left_out.items():
                typer.secho(f"skipped table {left}: {printable(why)}", fg="yellow", err=True)
            _follow(running, stop, line, to_the_end=available_now)
        finally:
            running.close()
    progress = running.progress
    tell_end(f"{events_text(progress.events)} captured from {source.name}", _summary(source.name, progress))
    _tell_stopped(progress)


@capture.command(name="list")
def list_(json: Json = False, log: LogOption = None) -> None:
    """List the captures of the log."""
    from headwater.capture.progress import captures

    with open_existing(log) as opened:
        found = captures(opened)
    if json:
        print_json_line([_summary(name, progress) for name, progress in found.items()])
        return
    table = lined_table("source", "database", "tables", Right("events"), Right("last step"))
    for name, progress in found.items():
        told = Text(printable(", ".join(progress.tables)))
        table.add_row(
            Text(name, style="bold"), printable(progress.url), told, f"{progress.events:,}", _ago(progress.at_us)
        )
    print_table(table)


@capture.command()
def status(
    name: Annotated[str, typer.Argument(metavar="SOURCE", help="The name of the source.")],
    json: Json = False,
    log: LogOption = None,
) -> None:
    """Show the position and the lag of a capture, and the state of each table."""
    with open_existing(log) as opened:
        progress = _progress(opened, name)
    lag, error = _lag(name, progress)
    if json:
        print_json_line({**_summary(name, progress), "lag": lag, "error": error})
        return
    typer.secho(name, bold=True)
    typer.echo(f"  database         {printable(progress.url)}")
    typer.echo(f"  position         {progress.position}")
    typer.echo(f"  events           {progress.events:,}, last step {_ago(progress.at_us)}")
    typer.echo(f"  lag              {printable(error) if error else _lag_text(lag)}")
    table = lined_table("table", "topic", "state", Right("copied"))
    for each, found in progress.tables.items():
        copied = "" if found.fraction is None else f"{found.fraction:.0%}"
        style = {"live": "green", "stopped": "bold red"}.get(found.state, "yellow")
        table.add_row(printable(each), found.topic, Text(found.state, style=style), copied)
    print_table(table)
    _tell_stopped(progress)


@capture.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="SOURCE", help="The name of the source.")],
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="The database, if the log does not contain its URL.")
    ] = None,
    topics: Annotated[bool, typer.Option("--topics", help="Also delete the topics of its tables.")] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the capture from the log even if the database does not answer.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    log: LogOption = None,
) -> None:
    """Remove a capture, and everything that it created in the database. Its topics stay unless you pass --topics."""
    from headwater.capture.capture import remove_capture

    with open_existing(log) as opened:
        progress = None if url else _progress(opened, name)
        shown = url or (progress.url if progress else "")
        confirm(f"Remove the capture of {shown}" + (" and its topics?" if topics else "?"), yes=yes)
        gone = remove_capture(opened, name, url=url, topics=topics, forget=forget)
    typer.echo(f"removed capture {name}" + (f" and {len(gone)} topics" if gone else ""))


@capture.command()
def export(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The topic of the captured table.")],
    to: Annotated[str, typer.Option("--to", metavar="LOG", help="The log to write to: kafka://host:9092 or a folder.")],
    topic: Annotated[
        str | None,
        typer.Option(help="The topic to write to, such as Debezium's SERVER.TABLE. Default: debezium.TABLE."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="COLUMN,…", help="The primary key, if it has several columns.")
    ] = None,
    partitions: Annotated[int, typer.Option(min=1, help="The number of partitions of a new topic.")] = 1,
    schemas: Annotated[bool, typer.Option(help="Write the schema into each event.")] = True,
    tombstones: Annotated[bool, typer.Option(help="Write a tombstone after each delete.")] = True,
    available_now: Annotated[
        bool, typer.Option("--available-now", help="Write the present changes, then exit.")
    ] = False,
    log: LogOption = None,
) -> None:
    """Write the changes of a captured table to a topic in Debezium's format, exactly once, until Ctrl-C."""
    from headwater.log.log import open_log
    from headwater.sinks.debezium_envelope import HISTORY
    from headwater.sinks.debezium_export import DebeziumExport

    with open_existing(log) as opened, open_log(to) as target, _stopped_by_signals() as stop:
        running = DebeziumExport(
            opened,
            table + HISTORY,
            to=target,
            topic=topic or f"debezium.{table}",
            key=key.split(",") if key else (),
            partitions=partitions,
            schemas=schemas,
            tombstones=tombstones,
        )
        running.open()
        if available_now:
            running.catch_up()
        else:
            running.run(stop)
    tell_end(
        f"{events_text(running.changes)} written to {running.topic}",
        {"topic": running.topic, "changes": running.changes},
    )


def _follow(running: Capture, stop: threading.Event, line: ProgressLine, *, to_the_end: bool) -> None:
    """Runs the capture in a thread, so that this thread can show progress and receive Ctrl-C."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            if to_the_end:
                running.catch_up()
            else:
                running.run(stop)
        except BaseException as error:  # noqa: BLE001 - raised again where a person can see it
            failed.append(error)

    thread = threading.Thread(target=work, name="headwater-capture", daemon=True)
    thread.start()
    while thread.is_alive():
        _show(running, line)
        thread.join(_SHOW_S)
        if to_the_end and stop.is_set():
            raise KeyboardInterrupt
    if failed:
        raise failed[0]


def _show(running: Capture, line: ProgressLine) -> None:
    progress = running.progress
    copying = [(name, table) for name, table in progress.tables.items() if table.state in ("copying", "refreshing")]
    if copying:
        done = sum(table.fraction or 0.0 for _, table in copying) + len(progress.tables) - len(copying)
        line.show(
            f"copying {copying[0][0]}, {events_text(progress.events)}",
            done=int(1000 * done),
            total=1000 * len(progress.tables),
        )
    else:
        line.show(f"following, {events_text(progress.events)}", done=1, total=1)


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C, SIGTERM and SIGHUP set; the capture then finishes its current step."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _keys(given: list[str]) -> dict[str, list[str]]:
    keys = {}
    for each in given:
        table, equals, columns = each.partition("=")
        if not equals or not columns:
            raise InvalidInput(
                f"--key {each!r} names no columns.", advice="Write, for example, --key visits=user_id,at."
            )
        keys[table] = columns.split(",")
    return keys


def _progress(log: Log, name: str) -> CaptureProgress:
    from headwater.capture.progress import captures

    found = captures(log)
    if name not in found:
        known = f"Its captures are: {', '.join(found)}." if found else "It has no captures."
        raise NotFound(f"This log has no capture {name!r}.", advice=known)
    return found[name]


def _lag(name: str, progress: CaptureProgress) -> tuple[Any, str | None]:
    from headwater.capture.source_url import open_source

    try:
        source = open_source(progress.url, list(progress.tables), name=name)
        try:
            return source.lag(progress.position), None
        finally:
            source.close()
    except HeadwaterError as error:
        return None, str(error)


def _lag_text(lag: Any) -> str:
    parts = [
        f"{lag.rows:,} changes" if lag.rows is not None else None,
        f"{lag.bytes:,} bytes" if lag.bytes is not None else None,
    ]
    said = ", ".join(part for part in parts if part) or "unknown"
    return f"{said}, {lag.seconds:.1f} s" if lag.seconds else said


def _summary(name: str, progress: CaptureProgress) -> dict[str, Any]:
    return {"source": name, **msgspec.to_builtins(progress)}


def _tell_stopped(progress: CaptureProgress) -> None:
    for name, table in progress.tables.items():
        if table.state == "stopped":
            typer.secho(f"table {name} stopped: {printable(table.why or '')}", fg="red", err=True)


def _ago(at_us: int) -> str:
    return f"{max(0.0, (system_clock() - at_us) / 1e6):,.1f} s ago"
