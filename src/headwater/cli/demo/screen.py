"""What the demonstration shows: a live view on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headwater.cli.demo.street import Shop

HISTORY = 40
EVENTS_SHOWN = 6
STEPS_SHOWN = 6
LINE_EVERY_S = 2.0

_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {"selling": "green", "killed": "bold red", "catching up": "yellow", "starting": "yellow", "closed": "dim"}


@dataclass
class Scene:
    """Everything there is to show at one moment."""

    seconds: float
    elapsed_s: float = 0.0
    total: int = 0
    rate: float = 0.0
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    ends: dict[int, int] = field(default_factory=dict)
    shops: list[Shop] = field(default_factory=list)
    newest: deque[tuple[Any, ...]] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))
    answer: list[tuple[Any, ...]] = field(default_factory=list)
    steps: list[tuple[float, str]] = field(default_factory=list)


class Screen(Protocol):
    """Where the scene is shown."""

    def show(self, scene: Scene) -> None:
        """Shows how things are now."""

    def tell(self, scene: Scene, step: str) -> None:
        """Says that something happened."""

    def close(self) -> None:
        """Ends the view."""


class Plain:
    """Lines, for a pipe or a log file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = 0.0

    def show(self, scene: Scene) -> None:
        if scene.elapsed_s < self._next_s:
            return
        self._next_s = scene.elapsed_s + LINE_EVERY_S
        ends = "  ".join(f"p{number} {end:,}" for number, end in sorted(scene.ends.items()))
        self._line(scene, f"{scene.total:>9,} events   {scene.rate:>7,.0f}/s   {ends}")

    def tell(self, scene: Scene, step: str) -> None:
        scene.steps.append((scene.elapsed_s, step))
        self._line(scene, step)

    def close(self) -> None:
        """Nothing is open."""

    def _line(self, scene: Scene, text: str) -> None:
        self._console.print(f"{scene.elapsed_s:5.1f} s  {text}", highlight=False, markup=False, soft_wrap=True)


class Stage:
    """A view that is drawn again and again in the same place, and gone at the end."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._live.start()

    def show(self, scene: Scene) -> None:
        self._live.update(draw(scene))

    def tell(self, scene: Scene, step: str) -> None:
        scene.steps.append((scene.elapsed_s, step))
        self.show(scene)

    def close(self) -> None:
        self._live.stop()


def draw(scene: Scene) -> RenderableType:
    """The whole view."""
    above, below = Table.grid(expand=True), Table.grid(expand=True)
    for grid, left, right in ((above, 5, 4), (below, 4, 5)):
        grid.add_column(ratio=left)
        grid.add_column(ratio=right)
    above.add_row(
        _panel(_shops(scene), "four shops, a process each: acknowledged"), _panel(_partitions(scene), "topic orders")
    )
    below.add_row(_panel(_answer(scene), "SQL: revenue by product"), _panel(_newest(scene), "tail -f"))
    return Group(_headline(scene), above, below, _steps(scene))


def answer_table(scene: Scene) -> Table:
    """The answer to the question."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("product")
    table.add_column("orders", justify="right")
    table.add_column("revenue", justify="right")
    for product, orders, revenue in scene.answer:
        table.add_row(product, f"{orders:,}", f"{revenue:,.2f}")
    return table


def _headline(scene: Scene) -> RenderableType:
    done = min(scene.elapsed_s / scene.seconds, 1.0)
    line = Table.grid(expand=True)
    line.add_column()
    line.add_column(justify="right")
    left = Text.assemble(
        (" headwater ", "bold white on blue"),
        ("  ", ""),
        (f"{scene.total:,}", "bold cyan"),
        " events  ",
        (f"{scene.rate:,.0f}/s ", "bold"),
        (_spark(scene.rates), "cyan"),
    )
    line.add_row(
        left, Text(f"{'━' * round(16 * done)}{'─' * (16 - round(16 * done))} {scene.elapsed_s:.0f} s", style="blue")
    )
    return line


def _shops(scene: Scene) -> Table:
    table = Table.grid(expand=True, padding=(0, 1, 0, 0))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(no_wrap=True, width=11)
    for shop in scene.shops:
        table.add_row(
            Text(shop.name, style="bold"),
            Text(f"pid {shop.pid}", style="dim"),
            f"{shop.acknowledged:,}",
            Text(shop.state, style=_STYLES[shop.state]),
        )
    return table


def _partitions(scene: Scene) -> Table:
    table = Table.grid(expand=True, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(justify="right")
    most = max([*scene.ends.values(), 1])
    for number, end in sorted(scene.ends.items()):
        table.add_row(f"partition {number}", Text("█" * round(10 * end / most), style="cyan"), f"{end:,}")
    return table


def _newest(scene: Scene) -> Table:
    table = Table.grid(expand=True, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    for at, id_, product, amount in scene.newest:
        table.add_row(Text(f"{at:%H:%M:%S}", style="dim"), Text(id_, style="bold"), product, f"{amount:.2f}")
    return _filled(table, EVENTS_SHOWN)


def _answer(scene: Scene) -> Table:
    return _filled(answer_table(scene), EVENTS_SHOWN - 1)


def _steps(scene: Scene) -> RenderableType:
    lines = [Text.assemble((f"{at:5.1f} s  ", "dim"), step) for at, step in scene.steps[-STEPS_SHOWN:]]
    return Group(*lines, *[Text("")] * (STEPS_SHOWN - len(lines)))


def _panel(content: RenderableType, title: str) -> Panel:
    return Panel(content, title=Text(title, style="bold"), title_align="left", border_style="dim", padding=(0, 1))


def _filled(table: Table, rows: int) -> Table:
    while table.row_count < rows:
        table.add_row()
    return table


def _spark(rates: deque[float]) -> str:
    most = max([*rates, 1.0])
    return "".join(_BARS[min(7, int(8 * rate / most))] for rate in rates)
