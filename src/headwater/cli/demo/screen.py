"""The screen of the demonstration: a live display on a terminal, else plain lines."""

from __future__ import annotations

import os
import time
import webbrowser
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headwater.cli.demo.crowd import Region
from headwater.cli.output.table import Right, panel_table, plain_table
from headwater.processing.stages.status import AppStatus

HISTORY = 40
PAGES_SHOWN = 7
STEPS_SHOWN = 7
LINE_EVERY_S = 2.0

_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "clicking": "green", "running": "green", "killed": "bold red", "failed": "bold red", "catching up": "yellow",
    "waiting": "yellow", "starting": "yellow", "gone": "dim", "stopped": "dim", "done": "dim",
}  # fmt: skip


@dataclass
class Scene:
    """Everything that the screen shows at one moment."""

    seconds: float
    regions: list[Region] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    url: str = ""
    total: int = 0
    rate: float = 0.0
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    status: AppStatus | None = None
    top: list[tuple[str, int]] = field(default_factory=list)
    minutes: list[tuple[datetime, str, int]] = field(default_factory=list)
    steps: list[tuple[float, str]] = field(default_factory=list)
    first_s: float | None = None
    killed_s: float | None = None
    back_s: float | None = None
    is_cut_short: bool = False

    @property
    def elapsed_s(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self.begun

    @property
    def counted(self) -> int:
        """The number of visits in the view."""
        return sum(visits for _, visits in self.top)


class DemoScreen(Protocol):
    """Where the scene is shown."""

    def show(self, scene: Scene) -> None:
        """Shows how things are now."""

    def tell(self, scene: Scene, step: str) -> None:
        """Says that something happened."""

    def open_page(self, url: str) -> None:
        """Shows the status page, where somebody can see it."""

    def close(self) -> None:
        """Ends the view."""


class PlainScreen:
    """Lines, for a pipe or a log file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = 0.0

    def show(self, scene: Scene) -> None:
        if scene.elapsed_s < self._next_s:
            return
        self._next_s = scene.elapsed_s + LINE_EVERY_S
        stages = scene.status.stages if scene.status else []
        lags = "  ".join(f"{stage.name} {stage.state}, lag {stage.lag:,}" for stage in stages)
        self._line(scene, f"{scene.total:>9,} clicks  {scene.rate:>6,.0f}/s  {scene.counted:>9,} in the view  {lags}")

    def tell(self, scene: Scene, step: str) -> None:
        scene.steps.append((scene.elapsed_s, step))
        self._line(scene, step)

    def open_page(self, url: str) -> None:
        """Nobody looks."""

    def close(self) -> None:
        """Nothing is open."""

    def _line(self, scene: Scene, text: str) -> None:
        line = f"{scene.elapsed_s:5.1f} s  {text}".rstrip()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class LiveScreen:
    """A view that is drawn again and again in the same place, and gone at the end."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=6, transient=True)
        self._live.start()

    def show(self, scene: Scene) -> None:
        self._live.update(draw(scene))

    def tell(self, scene: Scene, step: str) -> None:
        scene.steps.append((scene.elapsed_s, step))
        self.show(scene)

    def open_page(self, url: str) -> None:
        """Without a display the address is shown, and that is all."""
        if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
            webbrowser.open(url)

    def close(self) -> None:
        self._live.stop()


def draw(scene: Scene) -> RenderableType:
    """The whole view."""
    above, below = Table.grid(expand=True), Table.grid(expand=True)
    for grid in (above, below):
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
    above.add_row(
        _panel(_regions(scene), "producers: clicks acknowledged"),
        _panel(_stages(scene), "examples/clickstream on Spark"),
    )
    below.add_row(_panel(_top(scene), "view top_pages, live"), _panel(_minutes(scene), "view per_minute, live"))
    return Group(_headline(scene), above, below, _steps(scene))


def top_table(scene: Scene, *, bars: bool = False) -> Table:
    """The view `top_pages`."""
    table = plain_table("page", Right("visits"))
    for column in table.columns:
        column.no_wrap = True
    most = max([visits for _, visits in scene.top], default=1)
    for page, visits in scene.top:
        row = [Text(page), Text(f"{visits:,}")]
        table.add_row(*row, *([Text("█" * round(8 * visits / most), style="cyan")] if bars else []))
    return table


def _headline(scene: Scene) -> RenderableType:
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True)
    line.add_column(justify="right", no_wrap=True)
    left = Text.assemble(
        (" headwater ", "bold white on blue"),
        ("  ", ""),
        (f"{scene.total:,}", "bold cyan"),
        " clicks  ",
        (f"{scene.rate:,.0f}/s ", "bold"),
        (_spark(list(scene.rates)[-16:]), "cyan"),
    )
    line.add_row(left, Text.assemble((scene.url, "underline blue"), (f"  {scene.elapsed_s:.0f} s", "dim")))
    return line


def _regions(scene: Scene) -> Table:
    table = panel_table("", Right("pid"), Right("sent"), "")
    for region in scene.regions:
        table.add_row(
            Text(region.name, style="bold"),
            Text(str(region.pid), style="dim"),
            f"{region.acknowledged:,}",
            Text(region.state, style=_STYLES[region.state]),
        )
    return table


def _stages(scene: Scene) -> Table:
    if scene.status is None:
        state = "killed; restarting …" if scene.killed_s is not None and scene.back_s is None else "starting …"
        return _filled(_rows(panel_table(""), [(Text(state, style="yellow"),)]), len(scene.regions) + 1)
    table = panel_table("", "", Right("events/s"), Right("lag"))
    for stage in scene.status.stages:
        table.add_row(
            Text(stage.name, style="bold"),
            Text(stage.state, style=_STYLES[stage.state]),
            f"{stage.events_per_s:,.0f}",
            f"{stage.lag:,}",
        )
    return table


def _top(scene: Scene) -> Table:
    return _filled(top_table(scene, bars=True), PAGES_SHOWN)


def _minutes(scene: Scene) -> Table:
    table = panel_table("", "", Right(""))
    rows = [(Text(f"{at:%H:%M}", style="dim"), Text(page), f"{visits:,}") for at, page, visits in scene.minutes]
    return _filled(_rows(table, rows), PAGES_SHOWN + 1)


def _steps(scene: Scene) -> RenderableType:
    lines = [Text.assemble((f"{at:5.1f} s  ", "dim"), step) for at, step in scene.steps[-STEPS_SHOWN:]]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines, *[Text("")] * (STEPS_SHOWN - len(lines)))


def _panel(content: RenderableType, title: str) -> Panel:
    return Panel(content, title=Text(title, style="bold"), title_align="left", border_style="dim", padding=(0, 1))


def _rows(table: Table, rows: Iterable[tuple[RenderableType, ...]]) -> Table:
    for row in rows:
        table.add_row(*row)
    return table


def _filled(table: Table, rows: int) -> Table:
    while table.row_count < rows:
        table.add_row()
    return table


def _spark(rates: list[float]) -> str:
    most = max([*rates, 1.0])
    return "".join(_BARS[min(7, int(8 * rate / most))] for rate in rates)
