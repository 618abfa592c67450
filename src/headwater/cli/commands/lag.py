"""`headwater lag`: the lag of groups, live on a terminal, once or repeatedly in a pipe."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.commands.groups import partitions_table, summary
from headwater.cli.log_option import LogOption, open_existing
from headwater.cli.output.json import print_json_line
from headwater.cli.output.table import print_table
from headwater.cli.output.terminal import is_terminal

if TYPE_CHECKING:
    from headwater.log.clients.progress import GroupProgress
    from headwater.log.log import Log


def lag(
    group: Annotated[
        list[str] | None, typer.Argument(metavar="[GROUP]…", help="The groups to show. Default: all.")
    ] = None,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.05, help="How often to read the lag.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the lag once and exit, as in a pipe.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Repeat until Ctrl-C, also in a pipe.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per group each time.")] = False,
    log: LogOption = None,
) -> None:
    """Show how many events each group has not read yet, and the age of the oldest of them."""
    with open_existing(log) as opened:
        live = is_terminal() and not json
        if live and not once:
            _watch(opened, group, every)
            return
        while True:
            found = _look(opened, group)
            if json:
                _print_lines(found)
            else:
                print_table(partitions_table(found))
            if not follow or once:
                return
            time.sleep(every)


def _look(log: Log, names: list[str] | None) -> list[GroupProgress]:
    return [log.group(name) for name in names or log.groups()]


def _watch(log: Log, names: list[str] | None, every: float) -> None:
    """Redraws the table in place until Ctrl-C."""
    from rich.live import Live

    with Live(partitions_table(_look(log, names)), auto_refresh=False) as screen:
        while True:
            time.sleep(every)
            screen.update(partitions_table(_look(log, names)), refresh=True)


def _print_lines(found: list[GroupProgress]) -> None:
    for group in found:
        print_json_line(summary(group))
