"""`headwater topics …`: creates, lists, shows, alters and deletes topics."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from headwater.cli.log_option import LogOption, open_existing, open_or_create
from headwater.cli.output.json import print_json
from headwater.cli.output.quantities import bytes_text, events_text
from headwater.cli.output.table import Right, lined_table, print_table, to_cell
from headwater.cli.output.terminal import printable
from headwater.model.clock import time_of
from headwater.model.errors import HeadwaterError, InvalidInput
from headwater.model.url import without_password
from headwater.query.forecast import forecast

if TYPE_CHECKING:
    from headwater.log.log import Log
    from headwater.log.port.topic import Topic

SCHEMA_CHARACTERS_MAX = 60
NO_LIMIT = {"retention": "forever", "retention_bytes": 0, "bytes_max": 0, "archive": ""}
"""How the command line says that there is none."""

topics = typer.Typer(help="Create, list, show, alter and delete topics.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The topic's name.")]
Schema = Annotated[
    str | None, typer.Option(metavar="DDL", help='The columns, such as "id STRING, amount DOUBLE, at TIMESTAMP".')
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Lateness = Annotated[
    str | None, typer.Option(metavar="DURATION", help='How late an event may arrive, such as "1 minute".')
]
FutureMax = Annotated[
    str | None, typer.Option(metavar="DURATION", help='How far in the future an event time may be, such as "1 day".')
]
EventBytes = Annotated[int | None, typer.Option(metavar="BYTES", help="The largest event that the topic accepts.")]

Retention = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help='How long the log keeps events: a duration such as "7 days", or "forever".'),
]
RetentionBytes = Annotated[
    int | None, typer.Option(metavar="BYTES", help="How many bytes of each partition the log keeps; 0 keeps all.")
]

Compact = Annotated[bool | None, typer.Option("--compact/--no-compact", help="Keep only the last event of each key.")]
Tombstones = Annotated[
    str | None, typer.Option(metavar="DURATION", help='How long the log keeps tombstones, such as "1 day".')
]

BytesMax = Annotated[
    int | None, typer.Option(metavar="BYTES", help="The largest size of a partition; 0 sets no limit.")
]
Policy = Annotated[
    Literal["block", "buffer", "drop_oldest", "reject"] | None,
    typer.Option(help="What an append to a full partition does."),
]

ArchiveUrl = Annotated[
    str | None,
    typer.Option(
        "--archive", metavar="URL", help='Where to move expired events, such as s3://bucket/log; "" deletes them.'
    ),
]
BufferBytes = Annotated[
    int | None, typer.Option(metavar="BYTES", help="How far a partition may exceed its limit with --overload buffer.")
]
Retained = Annotated[
    Literal["all", "until_acked"] | None,
    typer.Option(help="Keep all events, or remove each one after every queue group has acknowledged it."),
]


@topics.command()
def create(
    name: Name,
    schema: Schema = None,
    key: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column that decides an event's partition.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column that holds the event time, a TIMESTAMP.")
    ] = None,
    lateness: Lateness = None,
    future_max: FutureMax = None,
    partitions: Annotated[int | None, typer.Option(help="The number of partitions. Default: 4.")] = None,
    durability: Annotated[
        Literal["fsync", "os"],
        typer.Option(help="Acknowledge an event when it is on disk, or when the operating system has it."),
    ] = "fsync",
    segment_bytes: Annotated[int | None, typer.Option(metavar="BYTES", help="The size of one segment file.")] = None,
    event_bytes_max: EventBytes = None,
    retention: Retention = None,
    retention_bytes: RetentionBytes = None,
    compact: Compact = None,
    tombstones: Tombstones = None,
    bytes_max: BytesMax = None,
    overload: Policy = None,
    archive: ArchiveUrl = None,
    retain: Retained = None,
    buffer_bytes: BufferBytes = None,
    exist_ok: Annotated[
        bool, typer.Option("--exist-ok", help="If the topic already exists, keep it unchanged.")
    ] = False,
    log: LogOption = None,
) -> None:
    """Create a topic, and the log if it does not exist. Without --schema, events are bytes."""
    if schema is None and key is not None:
        raise InvalidInput(
            f"--key {key} names a column, but without --schema the topic has no columns.",
            advice="Add --schema, or leave out --key.",
        )
    settings: dict[str, Any] = {
        "lateness": lateness,
        "future_max": future_max,
        "partitions": partitions,
        "segment_bytes": segment_bytes,
        "event_bytes_max": event_bytes_max,
        "retention": retention,
        "retention_bytes": retention_bytes,
        "compact": compact,
        "tombstones": tombstones,
        "bytes_max": bytes_max,
        "overload": overload,
        "archive": archive,
        "retain": retain,
        "buffer_bytes": buffer_bytes,
    }
    with open_or_create(log) as opened:
        topic = opened.create_topic(
            name, schema, key=key, time=time, durability=durability, exist_ok=exist_ok, **_given(settings)
        )
        typer.echo(f"topic {topic.name}: {_partitions_text(topic)}, {_columns_text(topic)}")


@topics.command(name="list")
def list_(json: Json = False, log: LogOption = None) -> None:
    """List the topics of the log."""
    with open_existing(log) as opened:
        rows = [_summary(opened, name) for name in opened.topics()]
    if json:
        print_json(rows)
        return
    table = lined_table("topic", Right("partitions"), Right("events"), Right("on disk"), "key", "time", "columns")
    for row in rows:
        table.add_row(*_list_cells(row))
    print_table(table)


@topics.command()
def show(name: Name, json: Json = False, log: LogOption = None) -> None:
    """Show the columns, settings and partitions of a topic."""
    with open_existing(log) as opened:
        topic = opened.topic(name)
        summary = _summary(opened, name)
        partitions = _partitions(opened, topic)
        summary |= forecast(opened, name, bytes_on_disk=summary.get("bytes"))
    settings = {
        "lateness_us": topic.lateness_us,
        "future_us": topic.future_us,
        "durability": topic.durability,
        "segment_bytes": topic.segment_bytes,
        "event_bytes_max": topic.event_bytes_max,
        "retention_us": topic.retention_us,
        "retention_bytes": topic.retention_bytes,
        "compact": topic.compact,
        "tombstones_us": topic.tombstones_us,
        "bytes_max": topic.bytes_max,
        "overload": topic.overload,
        "archive": None if topic.archive is None else without_password(topic.archive),
        "retain": topic.retain,
        "buffer_bytes": topic.buffer_bytes if topic.overload == "buffer" else None,
        "created": time_of(topic.created),
        "schema_versions": len(topic.schemas),
    }
    if json:
        print_json(summary | settings | {"partitions": partitions})
        return
    typer.secho(topic.name, bold=True)
    facts = summary | settings
    facts["on disk"] = _size_text(facts.pop("bytes"))
    facts["lateness"] = f"{facts.pop('lateness_us') / 1e6:g} s"
    facts["future_max"] = f"{facts.pop('future_us') / 1e6:g} s"
    facts["retention_us"] = _duration_text(topic.retention_us)
    facts["tombstones_us"] = _duration_text(topic.tombstones_us)
    facts["bytes_per_s"] = None if facts["bytes_per_s"] is None else bytes_text(round(facts["bytes_per_s"]))
    growth = ("events_per_s", "bytes_per_s", "hours_to_full", "hours_to_overtaken")
    for fact in ("columns", "key", "time", "events", "on disk", *growth, *[*settings][2:], "lateness", "future_max"):
        value = facts[fact]
        name = fact.removesuffix("_us").replace("_", " ")
        typer.echo(f"  {name:<18} {to_cell(value) if value is not None else '-'}")
    _print_partitions(partitions)


@topics.command()
def alter(
    name: Name,
    schema: Schema = None,
    add_column: Annotated[
        list[str] | None,
        typer.Option(metavar="DDL", help='A nullable column to add, such as "note STRING". Repeatable.'),
    ] = None,
    lateness: Lateness = None,
    future_max: FutureMax = None,
    event_bytes_max: EventBytes = None,
    retention: Retention = None,
    retention_bytes: RetentionBytes = None,
    compact: Compact = None,
    tombstones: Tombstones = None,
    bytes_max: BytesMax = None,
    overload: Policy = None,
    archive: ArchiveUrl = None,
    partitions: Annotated[
        int | None,
        typer.Option(help="The new number of partitions, a multiple of the present one. Each key keeps its order."),
    ] = None,
    retain: Retained = None,
    buffer_bytes: BufferBytes = None,
    log: LogOption = None,
) -> None:
    """Change a topic. You can add columns and widen types; old events have null in a new column."""
    settings: dict[str, Any] = {
        "schema": schema,
        "lateness": lateness,
        "future_max": future_max,
        "event_bytes_max": event_bytes_max,
        "retention": retention,
        "retention_bytes": retention_bytes,
        "compact": compact,
        "tombstones": tombstones,
        "bytes_max": bytes_max,
        "overload": overload,
        "archive": archive,
        "partitions": partitions,
        "retain": retain,
        "buffer_bytes": buffer_bytes,
    }
    if not add_column and not _given(settings):
        raise InvalidInput("No setting to change was given.", advice="See `headwater topics alter --help`.")
    with open_existing(log) as opened:
        if add_column:
            from headwater.model.schema import to_ddl

            settings["schema"] = ", ".join([schema or to_ddl(opened.topic(name).schema), *add_column])
        topic = opened.alter_topic(name, **_given(settings))
        shown = _columns_text(topic) if partitions is None else f"{_partitions_text(topic)}, {_columns_text(topic)}"
        typer.echo(f"topic {topic.name}: {shown}")


@topics.command()
def tidy(name: Name, log: LogOption = None) -> None:
    """Apply retention and compaction to a topic now. Running programs do this in the background."""
    with open_existing(log) as opened:
        typer.echo(f"removed {events_text(opened.tidy(name))} from topic {name}")


@topics.command()
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    log: LogOption = None,
) -> None:
    """Delete a topic and all its events."""
    with open_existing(log) as opened:
        events = _summary(opened, opened.topic(name).name)["events"]
        if not yes:
            if not sys.stdin.isatty():
                raise InvalidInput(
                    f"Deleting topic {name!r} with {events_text(events)} needs a confirmation.", advice="Pass --yes."
                )
            typer.confirm(f"Permanently delete topic {name} with {events_text(events)}?", abort=True)
        opened.delete_topic(name)
        typer.echo(f"deleted topic {name} with {events_text(events)}")


def _summary(log: Log, name: str) -> dict[str, Any]:
    """One row of the list; a damaged topic has its error in place of its facts."""
    try:
        topic = log.topic(name)
        held = log.offsets(name)
    except HeadwaterError as error:
        return {"topic": name, "error": f"{error.what} {error.advice}".strip(), "code": error.code}
    return {
        "topic": name,
        "partitions": topic.partitions,
        "events": sum(len(offsets) for offsets in held.values()),
        "bytes": _bytes_on_disk(log, name),
        "key": topic.key,
        "time": topic.time,
        "columns": _columns_text(topic) if topic.has_schema else None,
    }


def _partitions(log: Log, topic: Topic) -> list[dict[str, Any]]:
    """The offsets, newest append time and parent of each partition."""
    name, held = topic.name, log.offsets(topic.name)
    last = {number: max(offsets.start, offsets.stop - 1) for number, offsets in held.items()}
    newest = log.read(
        name,
        start=last,
        end={number: offsets.stop for number, offsets in held.items()},
        columns=[
            "_partition",
            "_appended",
        ],
    )
    appended = dict(zip(newest["_partition"].to_pylist(), newest["_appended"].to_pylist(), strict=True))
    rows = []
    for number, offsets in sorted(held.items()):
        row = {"partition": number, "first": offsets.start, "end": offsets.stop, "newest": appended.get(number)}
        if topic.splits:
            row["parent"], row["fence"] = next(iter(topic.ancestors(number)), (None, None))
        rows.append(row)
    return rows


def _bytes_on_disk(log: Log, name: str) -> int | None:
    """The disk space of a topic, with what its files have reserved; None if the log is not a folder."""
    scheme, _, folder = log.url.partition("://")
    if scheme != "file":
        return None
    total = 0
    for path, _, files in os.walk(f"{folder}/topics/{name}"):
        for file in files:
            try:
                total += os.stat(f"{path}/{file}").st_blocks * 512
            except FileNotFoundError:
                continue  # sealed or removed by another process meanwhile
    return total


def _list_cells(row: dict[str, Any]) -> list[Text]:
    name = Text(printable(row["topic"]), style="bold")
    if "error" in row:
        return [name, *[Text("?")] * 5, Text(printable(row["error"]), style="red")]
    columns = row["columns"] or "bytes"
    if len(columns) > SCHEMA_CHARACTERS_MAX:
        columns = columns[: SCHEMA_CHARACTERS_MAX - 1] + "…"
    counts = [Text(f"{row['partitions']:,}"), Text(f"{row['events']:,}"), Text(_size_text(row["bytes"]))]
    return [name, *counts, Text(row["key"] or "-"), Text(row["time"] or "-"), Text(printable(columns))]


def _print_partitions(partitions: list[dict[str, Any]]) -> None:
    is_split = any("parent" in row for row in partitions)
    numbers = map(Right, ("partition", "first", "end", "events"))
    table = lined_table(*numbers, "newest appended", *(["split off"] if is_split else []))
    for row in partitions:
        counts = (row["partition"], row["first"], row["end"], row["end"] - row["first"])
        cells = [*(f"{count:,}" for count in counts), to_cell(row["newest"]) if row["newest"] else "-"]
        if is_split:
            cells.append("-" if row["parent"] is None else f"from {row['parent']} at {row['fence']:,}")
        table.add_row(*cells)
    print_table(table)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were named, without a limit where the word for that was."""
    named = {setting: value for setting, value in settings.items() if value is not None}
    return {setting: None if value == NO_LIMIT.get(setting) else value for setting, value in named.items()}


def _size_text(count: int | None) -> str:
    return "-" if count is None else bytes_text(count)


def _duration_text(duration_us: int | None) -> str:
    return "forever" if duration_us is None else str(timedelta(microseconds=duration_us))


def _partitions_text(topic: Topic) -> str:
    return f"{topic.partitions} partition{'s' if topic.partitions > 1 else ''}"


def _columns_text(topic: Topic) -> str:
    from headwater.model.schema import to_ddl

    return to_ddl(topic.schema) if topic.has_schema else "bytes"
