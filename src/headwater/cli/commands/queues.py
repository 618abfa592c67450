"""`headwater queues …`: lists, shows and deletes queues, prints their events, and redrives dead letters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli.log_option import LogOption, open_existing
from headwater.cli.output.confirmation import confirm
from headwater.cli.output.json import write_json
from headwater.cli.output.quantities import events_text
from headwater.cli.output.table import Right, lined_table, print_table, to_cell
from headwater.cli.output.terminal import printable
from headwater.model.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from headwater.log.log import Log
    from headwater.log.queue.queue import Queue
    from headwater.model.event import Event

NUMBERS = ("partition", "offset", "deliveries", "ready", "leased", "scheduled", "dead", "floor", "end")
EVENTS = 20
COUNTED_MAX = 1_000_000

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_COUNTS = ("ready", "leased", "scheduled", "dead")

queues = typer.Typer(
    help="List, show and delete queues, print their events, and redrive dead letters.", no_args_is_help=True
)

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The queue's topic.")]
Group = Annotated[
    str | None, typer.Option(metavar="GROUP", help="The queue's group. Required if the topic has several queues.")
]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="Print at most this many events.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@queues.command(name="list")
def list_(json: Json = False, log: LogOption = None) -> None:
    """List the queues of the log, with the number of events in each state."""
    rows = []
    with open_existing(log) as opened:
        for made in _made(opened):
            with _open(opened, made) as queue:
                rows.append((made["topic"], made["group"], made["order"], *_counts(queue)))
    _print(("topic", "group", "order", *_COUNTS), rows, json=json)


@queues.command()
def show(topic: Topic, group: Group = None, json: Json = False, log: LogOption = None) -> None:
    """Show the event counts of a queue, and the acknowledged offset of each partition."""
    with open_existing(log) as opened, _open(opened, _chosen(opened, topic, group)) as queue:
        floors, ends = queue.floors(), {number: held.stop for number, held in opened.offsets(topic).items()}
        depth = queue.depth()
        if not json:
            counts = ", ".join(f"{getattr(depth, name):,} {name}" for name in _COUNTS)
            typer.echo(printable(f"queue {topic}, group {queue.group}: {counts}"))
    _print(("partition", "floor", "end"), [(number, floors[number], ends[number]) for number in floors], json=json)


@queues.command()
def peek(topic: Topic, group: Group = None, limit: Limit = EVENTS, json: Json = False, log: LogOption = None) -> None:
    """Print the unacknowledged events of a queue without leasing them."""
    with open_existing(log) as opened, _open(opened, _chosen(opened, topic, group)) as queue:
        entries = queue.browse(events_max=limit)
    rows = [
        (e.event.partition, e.event.offset, e.state, e.deliveries, _time(e.due_us), _key(e.event), _value(e.event))
        for e in entries
    ]
    _print(("partition", "offset", "state", "deliveries", "due", "key", "value"), rows, json=json)


@queues.command()
def dead(topic: Topic, group: Group = None, limit: Limit = EVENTS, json: Json = False, log: LogOption = None) -> None:
    """Print the dead letters of a queue with their reasons."""
    with open_existing(log) as opened, _open(opened, _chosen(opened, topic, group)) as queue:
        letters = queue.dead(events_max=limit)
    rows = []
    for letter in letters:
        assert letter.headers is not None
        headers = {name.removeprefix("_dead_"): raw.decode("utf-8", "replace") for name, raw in letter.headers.items()}
        place = (int(headers["partition"]), int(headers["offset"]), int(headers["deliveries"]))
        rows.append((*place, headers["reason"], _time(int(headers["at"])), _key(letter), _value(letter)))
    _print(("partition", "offset", "deliveries", "reason", "died", "key", "value"), rows, json=json)


@queues.command()
def redrive(
    topic: Topic,
    group: Group = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Send at most this many events.")] = None,
    log: LogOption = None,
) -> None:
    """Send dead letters back to the topic. Only the queue's own group receives them."""
    with open_existing(log) as opened, _open(opened, _chosen(opened, topic, group)) as queue:
        sent = queue.redrive(events_max=limit)
        typer.echo(printable(f"{events_text(sent)} sent back to {topic}, for group {queue.group}"))


@queues.command()
def delete(
    topic: Topic,
    group: Group = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    log: LogOption = None,
) -> None:
    """Delete the progress of a queue's group. Events and dead letters stay. The group must have no live consumers."""
    with open_existing(log) as opened:
        made = _chosen(opened, topic, group)
        confirm(f"Delete the progress of group {made['group']} on topic {topic}?", yes=yes)
        opened.delete_queue(topic, group=made["group"])
        typer.echo(printable(f"deleted the queue of group {made['group']} on topic {topic}"))


def _counts(queue: Queue) -> list[int | None]:
    """The number of events in each state; on Kafka only the dead letters can be counted."""
    try:
        depth = queue.depth()
    except Unsupported:
        return [None, None, None, len(queue.dead(events_max=COUNTED_MAX))]
    return [getattr(depth, name) for name in _COUNTS]


def _made(log: Log) -> list[dict[str, Any]]:
    """The queues of existing topics, without the queues of dead letters."""
    there = {name: log.topic(name).id for name in log.topics()}
    return [made for made in log.store.queues() if there.get(made["topic"]) == made["topic_id"] and made["dead"]]


def _chosen(log: Log, topic: str, group: str | None) -> dict[str, Any]:
    found = [made for made in _made(log) if made["topic"] == topic and group in (None, made["group"])]
    if len(found) == 1:
        return found[0]
    if found:
        groups = ", ".join(made["group"] for made in found)
        raise InvalidInput(f"Topic {topic!r} has {len(found)} queues.", advice=f"Choose one with --group: {groups}.")
    log.topic(topic)
    whose = "" if group is None else f" of group {group!r}"
    raise InvalidInput(
        f"Topic {topic!r} has no queue{whose}.", advice="`headwater queues list` prints the queues of the log."
    )


@contextmanager
def _open(log: Log, made: dict[str, Any]) -> Iterator[Queue]:
    with log.queue(made["topic"], group=made["group"], order=made["order"]) as queue:
        yield queue


def _print(names: tuple[str, ...], rows: Iterable[tuple[Any, ...]], *, json: bool) -> None:
    if json:
        write_json(names, rows)
        return
    table = lined_table(*(Right(name) if name in NUMBERS else name for name in names))
    for row in rows:
        table.add_row(*map(to_cell, row))
    print_table(table)


def _time(time_us: int) -> datetime | None:
    return _EPOCH + timedelta(microseconds=time_us) if time_us else None


def _key(event: Event) -> Any:
    return _plain(event.key)


def _value(event: Event) -> Any:
    return _plain(event.value)


def _plain(value: Any) -> Any:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
