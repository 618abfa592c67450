"""What `headwater run` shows: a live table on a terminal, a line for each stage now and then anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headwater.cli.output import is_terminal, printable

if TYPE_CHECKING:
    from headwater.processing.status import AppStatus, StageStatus

LINE_EVERY_S = 5.0
_STYLES = {
    "running": "green",
    "done": "green",
    "waiting": "yellow",
    "failed": "bold red",
    "stopped": "dim",
    "starting": "dim",
}


class Screen(Protocol):
    """Where a status is shown."""

    def show(self, status: AppStatus) -> None:
        """Shows how things are now."""

    def tell(self, line: str) -> None:
        """Says one thing."""


@contextmanager
def open_screen(name: str) -> Iterator[Screen]:
    """The screen that fits stdout."""
    console = Console()
    console.print(Text.assemble((name, "bold"), ("  starting Spark …", "dim")))
    if not is_terminal():
        yield _Lines(console)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield _Table(live)


def print_status(status: AppStatus) -> None:
    """Prints a status once."""
    Console().print(_drawn(status))


class _Table:
    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, status: AppStatus) -> None:
        self._live.update(_drawn(status))

    def tell(self, line: str) -> None:
        self._live.console.print(Text(line, style="dim"))


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0
        self._states: dict[str, tuple[str, str | None]] = {}

    def show(self, status: AppStatus) -> None:
        states: dict[str, tuple[str, str | None]] = {stage.name: (stage.state, stage.error) for stage in status.stages}
        if states == self._states and time.monotonic() < self._next:
            return
        self._states, self._next = states, time.monotonic() + LINE_EVERY_S
        for stage in status.stages:
            self._console.print(Text(_line(stage)), soft_wrap=True)

    def tell(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def _line(stage: StageStatus) -> str:
    facts = f"{stage.name}: {stage.state}, batch {stage.epoch}, {stage.events:,} events, lag {stage.lag:,}"
    return f"{facts}; {printable(stage.error)}" if stage.error and stage.state != "running" else facts


def _drawn(status: AppStatus) -> Group:
    table = Table(title=f"{status.name} on {status.log}", title_justify="left")
    for heading in ("stage", "to", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("batch", "events", "events/s", "lag", "state rows", "restarts", "dead"):
        table.add_column(heading, justify="right")
    table.add_column("watermark")
    for stage in status.stages:
        table.add_row(
            stage.name,
            printable(stage.to),
            Text(stage.state, style=_STYLES[stage.state]),
            str(stage.epoch) if stage.epoch >= 0 else "–",
            f"{stage.events:,}",
            f"{stage.events_per_s:,.0f}",
            f"{stage.lag:,}",
            f"{stage.state_rows:,}",
            str(stage.restarts),
            str(stage.dead),
            _clock(stage.watermark),
        )
    errors = [
        Text(f"{stage.name}: {printable(stage.error)}", style="red")
        for stage in status.stages
        if stage.error and stage.state in ("waiting", "failed")
    ]
    notes = [Text(note, style="dim") for note in status.notes]
    return Group(table, *errors, *notes)


def _clock(watermark: str | None) -> str:
    """A watermark as people read it; before the first event it is 1970."""
    return "–" if watermark is None or watermark.startswith("1970") else watermark.replace("T", " ").removesuffix("Z")
