"""`headwater demo`: four shops write orders to one log, one is killed with SIGKILL and starts again, the count is right.

Nothing stays behind: the log is in a temporary folder, and every process ends with this one, however it ends.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from headwater.cli.demo.proof import Line
    from headwater.cli.demo.screen import Scene

SECONDS = 20
RATE = 2_500.0
PARTITIONS = 4


def demo(
    seconds: Annotated[float, typer.Option(min=4, max=50, help="How long the shops are open.")] = SECONDS,
) -> None:
    """See it work: processes that share a log, a live tail, a question in SQL, a crash, and a count that is right."""
    console = Console()
    with (
        _ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="headwater-demo-", ignore_cleanup_errors=True) as folder,
    ):
        scene, lines = _play(Path(folder), seconds, console)
    _print_result(console, scene, lines)
    if not all(line.is_right for line in lines):
        raise typer.Exit(1)


def _play(folder: Path, seconds: float, console: Console) -> tuple[Scene, list[Line]]:
    from headwater.cli.demo.director import Director
    from headwater.cli.demo.orders import SCHEMA, TOPIC
    from headwater.cli.demo.proof import prove
    from headwater.cli.demo.screen import Plain, Scene, Stage
    from headwater.cli.demo.street import Street
    from headwater.log.log import open_log

    url = str(folder / "log")
    console.print(Text.assemble(("headwater demo", "bold"), (f"  four processes, one log, {seconds:g} s", "dim")))
    with open_log(url) as log:
        log.create_topic(TOPIC, SCHEMA, key="id", time="at", partitions=PARTITIONS)
        with Street(url, folder, rate=RATE) as street:
            scene = Scene(seconds, shops=street.shops)
            street.begin()
            screen = Stage(console) if console.is_terminal and not console.is_dumb_terminal else Plain(console)
            try:
                Director(log, street, scene, screen).run()
            finally:
                screen.close()
        return scene, prove(log, {shop.name: shop.acknowledged for shop in street.shops})


def _print_result(console: Console, scene: Scene, lines: list[Line]) -> None:
    from headwater.cli.demo.director import QUESTION
    from headwater.cli.demo.screen import answer_table

    def say(text: Text | str, style: str = "") -> None:
        console.print(Text(text, style=style) if isinstance(text, str) else text, soft_wrap=not console.is_terminal)

    if console.is_terminal:
        for at, step in scene.steps:
            say(Text.assemble((f"{at:5.1f} s  ", "dim"), step))
    say(f"\n{QUESTION}", "italic")
    console.print(Padding(answer_table(scene), (0, 0, 0, 2)))
    killed = {shop.name: shop.killed_at for shop in scene.shops if shop.killed_at is not None}
    say("\nDuckDB compared the log with what each shop should have sent:", "italic")
    console.print(Padding(_proof_table(lines, set(killed)), (0, 0, 0, 2)))
    sent, held = sum(line.acknowledged for line in lines), sum(line.in_log for line in lines)
    if not all(line.is_right for line in lines):
        say(f"\n✗ {sent:,} events acknowledged, {held:,} in the log: this is a bug.", "bold red")
        return
    say(
        f"\n✓ {sent:,} events acknowledged, {held:,} in the log, each exactly once: nothing lost, nothing doubled.",
        "bold green",
    )
    for name, after in killed.items():
        say(f"  {name} was killed after {after:,} of them, and started again.", "green")
    say("next: headwater topics create --help, headwater produce --help, examples/orders.py", "dim")


def _proof_table(lines: list[Line], killed: set[str]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("shop")
    for column in ("acknowledged", "in the log", "lost", "doubled", "never sent"):
        table.add_column(column, justify="right")
    table.add_column("")
    for line in lines:
        counts = (line.acknowledged, line.in_log, line.lost, line.doubled, line.never_sent)
        mark = Text("✓", style="green") if line.is_right else Text("✗", style="bold red")
        if line.shop in killed:
            mark.append(" killed", style="dim")
        table.add_row(line.shop, *(f"{count:,}" for count in counts), mark)
    return table


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end the block as Ctrl-C does, so that it can clean up."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
