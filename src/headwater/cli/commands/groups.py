"""`headwater groups …`: lists, shows, resets and deletes groups of consumers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from headwater.cli.log_option import LogOption, open_existing
from headwater.cli.output.confirmation import confirm
from headwater.cli.output.json import print_json
from headwater.cli.output.quantities import events_text
from headwater.cli.output.table import Right, lined_table, print_table
from headwater.cli.output.terminal import printable
from headwater.model.clock import duration_us, system_clock, time_of, time_us
from headwater.model.errors import Damaged, InvalidInput

if TYPE_CHECKING:
    from headwater.log.clients.progress import GroupProgress, Lag, PartitionProgress
    from headwater.log.log import Log

groups = typer.Typer(help="List, show, reset and delete groups of consumers.", no_args_is_help=True)

Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@groups.command(name="list")
def list_(json: Json = False, log: LogOption = None) -> None:
    """List the groups of the log."""
    damaged: list[Damaged] = []
    found = []
    with open_existing(log) as opened:
        for name in opened.groups():
            try:
                found.append(opened.group(name))
            except Damaged as error:
                damaged.append(error)
    if json:
        print_json([summary(group) for group in found])
    else:
        _print_groups(found)
    if damaged:
        raise damaged[0]


def _print_groups(found: list[GroupProgress]) -> None:
    numbers = map(Right, ("members", "idle", "partitions", "lag", "oldest"))
    table = lined_table("group", *numbers, "topics")
    for group in found:
        topics = ", ".join(sorted({part.topic for part in group.partitions}))
        table.add_row(
            Text(printable(group.group), style="bold"),
            f"{len(group.members)}",
            f"{len(group.idle)}",
            f"{len(group.partitions)}",
            f"{group.lag.events:,}",
            age_text(group.lag),
            topics,
        )
    print_table(table)


@groups.command()
def show(name: Group, json: Json = False, log: LogOption = None) -> None:
    """Show the members of a group, their partitions, and their committed offsets."""
    with open_existing(log) as opened:
        group = opened.group(name)
    if json:
        print_json(summary(group))
        return
    typer.secho(group.group, bold=True)
    typer.echo(f"  generation       {_known(group.generation)}")
    typer.echo(f"  lag              {events_text(group.lag.events)}, oldest {age_text(group.lag)}")
    members = lined_table("member", Right("pid"), Right("polled"), "partitions")
    for member in group.members:
        held = ", ".join(f"{topic}/{number}" for topic, number in member.partitions)
        shown = Text(held) if held else Text("idle: more members than partitions", style="yellow")
        polled = _known(member.polled_s if member.polled_s is None else f"{member.polled_s:.1f} s ago")
        members.add_row(member.member, _known(member.pid), polled, shown)
    print_table(members)
    print_table(partitions_table([group]))


@groups.command()
def reset(
    name: Group,
    to: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help='Where to begin: "earliest", "latest", an offset, a time (ISO 8601) or a duration ago ("1 hour").',
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    log: LogOption = None,
) -> None:
    """Set the committed offsets of a group. The group must have no live members."""
    start = _start(to)
    with open_existing(log) as opened:
        parts = _partitions(opened, name)
        before = {(part.topic, part.partition): part.committed for part in parts or ()}
        where = "partitions, some of which are unreadable" if parts is None else f"{len(before)} partitions"
        confirm(f"Reset group {name} to {to} in {where}?", yes=yes)
        for (topic, number), offset in sorted(opened.reset_group(name, to=start).items()):
            old = before.get((topic, number))
            typer.echo(f"{topic}/{number}: {'-' if old is None else old} -> {offset}")


@groups.command()
def delete(
    name: Group,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    log: LogOption = None,
) -> None:
    """Delete a group and its committed offsets. The group must have no live members."""
    with open_existing(log) as opened:
        parts = _partitions(opened, name)
        offsets = "its offsets, some of which are unreadable"
        if parts is not None:
            offsets = f"its offsets in {sum(part.committed is not None for part in parts)} partitions"
        confirm(f"Delete group {name} and {offsets}?", yes=yes)
        opened.delete_group(name)
        typer.echo(printable(f"deleted group {name} and {offsets}"))


def _partitions(log: Log, name: str) -> list[PartitionProgress] | None:
    """The progress of a group; None if it is unreadable, since a damaged group can still be reset or deleted."""
    try:
        return log.group(name).partitions
    except Damaged:
        return None


def _known(value: object) -> str:
    """The value, or a dash for what the brokers of a Kafka log do not report."""
    return "-" if value is None else f"{value}"


def summary(group: GroupProgress) -> dict[str, Any]:
    """A group as JSON shows it."""
    return {
        "group": group.group,
        "generation": group.generation,
        "lag_events": group.lag.events,
        "lag_s": group.lag.seconds,
        "members": [
            {
                "member": member.member,
                "pid": member.pid,
                "polled_s": member.polled_s,
                "idle": member.idle,
                "partitions": [{"topic": topic, "partition": number} for topic, number in member.partitions],
            }
            for member in group.members
        ],
        "partitions": [
            {
                "topic": part.topic,
                "partition": part.partition,
                "committed": part.committed,
                "end": part.end,
                "lag_events": part.lag.events,
                "lag_s": part.lag.seconds,
                "member": part.member,
            }
            for part in group.partitions
        ],
    }


def partitions_table(found: list[GroupProgress]) -> Table:
    """The progress of groups in each partition."""
    numbers = map(Right, ("partition", "committed", "end", "lag", "oldest"))
    table = lined_table("group", "topic", *numbers, "member")
    for group in found:
        for part in group.partitions:
            table.add_row(
                Text(printable(group.group), style="bold"),
                Text(printable(part.topic)),
                f"{part.partition}",
                "-" if part.committed is None else f"{part.committed:,}",
                f"{part.end:,}",
                Text(f"{part.lag.events:,}", style="yellow" if part.lag.events else "green"),
                age_text(part.lag),
                part.member or "-",
            )
    return table


def age_text(lag: Lag) -> str:
    """How long ago the oldest unread event was appended."""
    if not lag.events:
        return "-"
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if lag.seconds >= seconds:
            return f"{lag.seconds / seconds:.1f} {unit}"
    return f"{lag.seconds:.1f} s"


def _start(to: str) -> str | int:
    """The place as `Log.reset_group` accepts it; a duration becomes the time that long ago."""
    if to in ("earliest", "latest"):
        return to
    if re.fullmatch(r"\d{1,18}", to):
        return int(to)
    try:
        ago_us = duration_us(to)
    except InvalidInput:
        time_us(to)
        return to
    return time_of(system_clock() - ago_us).isoformat()
