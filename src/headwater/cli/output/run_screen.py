"""The screen of `headwater run`: a live table on a terminal, else a line for each stage every few seconds.

The table has the columns that fit: a narrow terminal shows state, rate, lag and the last batch, a wide one everything.
Columns with only zeros (restarts, dead letters) are omitted.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headwater.cli.output.quantities import duration_text
from headwater.cli.output.table import GAP, Right, live_table
from headwater.cli.output.terminal import is_terminal, printable, quiet_keys
from headwater.model.clock import system_clock

if TYPE_CHECKING:
    from headwater.processing.stages.status import AppStatus, StageStatus

LINE_EVERY_S = 5.0
NAME_MIN = 24
"""The characters of a name that take precedence over less important columns."""

_WORDS_MIN = 20
_TREE = re.compile(r"[│├└─ ]*")
_UNDER = str.maketrans("├└─", "│  ")
_NAMES = ("stage", "to")
_LEAST_FIRST = ("state rows", "to", "watermark", "last batch", "events", "restarts", "late", "dead")
_STYLES = {
    "running": "green",
    "done": "green",
    "waiting": "yellow",
    "failed": "bold red",
    "stopped": "dim",
    "starting": "dim",
}


class RunScreen(Protocol):
    """A place that shows the status of an application."""

    def show(self, status: AppStatus) -> None:
        """Shows the current status."""

    def tell(self, line: str) -> None:
        """Shows one line of text."""


@contextmanager
def open_screen(first: AppStatus) -> Iterator[RunScreen]:
    """Opens the screen that fits stdout, for an application that is about to start."""
    console = Console()
    if not is_terminal():
        lines = _Lines(console)
        lines.tell(f"{first.name}: starting Spark …")
        yield lines
        return
    with quiet_keys(), Live(console=console, refresh_per_second=4) as live:
        table = _Table(live)
        table.show(first)
        yield table


def print_status(status: AppStatus) -> None:
    """Prints a status once; for an application that has ended, its last report."""
    console = Console()
    console.print(Drawn(status))
    if not status.is_alive:
        ago = duration_text((system_clock() - status.at_us) / 1e6)
        console.print(Text(f"Process {status.pid} has ended. Its last report is from {ago} ago.", style="yellow"))


def print_plan(drawing: str) -> None:
    """Prints the drawing of a graph; on a terminal in colours, with long lines wrapped under their branch."""
    console = Console()
    if not console.is_terminal:
        console.print(Text(drawing), soft_wrap=True)
        return
    for line in drawing.splitlines():
        console.print(_branch(line, console.width))


def _branch(line: str, width: int) -> Text:
    found = _TREE.match(line)
    assert found is not None
    tree, words = found[0], line[found.end() :]
    under = tree.translate(_UNDER)
    is_stage = "─" in tree
    lines = textwrap.wrap(words, max(_WORDS_MIN, width - len(tree) - 4), subsequent_indent="    ") or [""]
    name = words.partition(" ")[0]
    text = Text(tree, style="dim")
    for number, part in enumerate(lines):
        if number:
            text.append(f"\n{under}")
        text.append(part, style="" if is_stage or not tree else "dim")
    if is_stage or not tree:
        text.stylize("bold", len(tree), len(tree) + len(name))
    return text


class Drawn:
    """A renderable status, as wide as the console."""

    def __init__(self, status: AppStatus, *, footer: str = "") -> None:
        self._status = status
        self._footer = footer

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status = self._status
        yield _headline(status)
        yield _table(status.stages, options.max_width)
        for stage in status.stages:
            if stage.error and stage.state != "running":
                yield _trouble(stage)
        for note in status.notes:
            yield Text(printable(note), style="yellow")
        if self._footer:
            yield Text(self._footer, style="dim")


class _Table:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._footer = ""
        self._status: AppStatus | None = None

    def show(self, status: AppStatus) -> None:
        self._status = status
        self._draw()

    def tell(self, line: str) -> None:
        self._footer = line
        self._draw()

    def _draw(self) -> None:
        if self._status is not None:
            self._live.update(Drawn(self._status, footer=self._footer))


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
        for note in status.notes:
            self._console.print(Text(printable(note)), soft_wrap=True)

    def tell(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def _line(stage: StageStatus) -> str:
    facts = f"{stage.name}: {stage.state}, batch {stage.epoch}, {stage.events:,} events, lag {stage.lag:,}"
    return f"{facts}; {printable(stage.error)}" if stage.error and stage.state != "running" else facts


def _headline(status: AppStatus) -> Text:
    states = {stage.state for stage in status.stages}
    order = ("failed", "waiting", "running", "starting", "done", "stopped")
    state = next((state for state in order if state in states), "starting")
    age = duration_text((status.at_us - status.started_us) / 1e6)
    return Text.assemble(
        ("● ", _STYLES[state]),
        (printable(status.name), "bold"),
        (f"  {printable(status.log)}  process {status.pid}, {age}", "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )


def _columns(stages: list[StageStatus]) -> dict[str, list[Text]]:
    """The cells by the headings of their columns."""
    columns = {
        "stage": [Text(stage.name, style="bold") for stage in stages],
        "to": [Text(printable(stage.to)) for stage in stages],
        "state": [Text(stage.state, style=_STYLES[stage.state]) for stage in stages],
        "events/s": [Text(f"{stage.events_per_s:,.0f}") for stage in stages],
        "lag": [Text(f"{stage.lag:,}", style="yellow" if stage.lag else "") for stage in stages],
        "events": [Text(f"{stage.events:,}") for stage in stages],
        "last batch": [Text(_batch(stage)) for stage in stages],
        "watermark": [Text(_clock(stage.watermark)) for stage in stages],
        "state rows": [Text(f"{stage.state_rows:,}") for stage in stages],
        "late": [Text(f"{stage.late:,}") for stage in stages],
        "restarts": [Text(str(stage.restarts)) for stage in stages],
        "dead": [Text(str(stage.dead), style="yellow" if stage.dead else "") for stage in stages],
    }
    if not any(stage.restarts for stage in stages):
        del columns["restarts"]
    if not any(stage.late for stage in stages):
        del columns["late"]
    if not any(stage.dead for stage in stages):
        del columns["dead"]
    return columns


def _table(stages: list[StageStatus], width: int) -> Table:
    """A table that fits the width: it omits the least important columns and cuts names, never numbers."""
    columns = _columns(stages)
    widths = {heading: max(len(heading), *map(len, cells)) for heading, cells in columns.items()}

    def room() -> int:
        """The width left for the names."""
        return width - 2 - sum(GAP + widths[heading] for heading in columns if heading not in _NAMES)

    for heading in _LEAST_FIRST:
        if room() >= sum(min(GAP + widths[name], NAME_MIN) for name in _NAMES if name in columns):
            break
        columns.pop(heading, None)
    names = [name for name in _NAMES if name in columns]
    for name in names:
        widths[name] = min(widths[name], max(1, room() // len(names) - GAP))
    table = live_table({heading: widths[heading] for heading in map(_heading, columns)})
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _heading(name: str) -> str:
    return name if name in (*_NAMES, "state") else Right(name)


def _trouble(stage: StageStatus) -> Text:
    goes_on = {"waiting": "will be retried", "failed": "stopped; other stages continue"}.get(stage.state, stage.state)
    style = _STYLES[stage.state]
    return Text.assemble(
        (f"{stage.name}", "bold"), f" ({stage.where}) ", (f"{goes_on}: ", style), printable(stage.error or "")
    )


def _batch(stage: StageStatus) -> str:
    if stage.epoch < 0:
        return "–"
    took = f"{stage.batch_ms} ms" if stage.batch_ms < 10_000 else f"{stage.batch_ms / 1000:.0f} s"
    return f"#{stage.epoch} {took}"


def _clock(watermark: str | None) -> str:
    """A watermark as a short time; a dash before the first event."""
    if watermark is None or watermark.startswith("1970"):
        return "–"
    with suppress(ValueError):
        at = datetime.fromisoformat(watermark)
        today = at.astimezone(UTC).date() == datetime.now(UTC).date()
        return f"{at:%H:%M:%S}" if today else f"{at:%Y-%m-%d %H:%M}"
    return watermark
