"""`headwater demo`: `examples/clickstream` on Spark, with processes that click, live views, two kills, and numbers that are right.

Nothing stays behind: everything lies in a temporary folder, and every process ends with this one, however it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headwater.model.errors import NotFound

if TYPE_CHECKING:
    from headwater.cli.demo.proof import Agreement, Line
    from headwater.cli.demo.screen import Scene

SECONDS = 60
SECONDS_ON_A_TERMINAL = 600
RATE = 1_000.0
PORT = 8642


def demo(
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=3600,
            help=f"How long at least; without it {SECONDS}, on a terminal until Ctrl-C ({SECONDS_ON_A_TERMINAL} at most).",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Of the status page; the next free one if it is taken.")
    ] = PORT,
) -> None:
    """See it work: clicks from several processes, an application on Spark, live views, two crashes, and the right count."""
    from headwater.cli.run_screen import quiet_keys

    console = Console()
    if seconds is None:
        seconds = SECONDS_ON_A_TERMINAL if console.is_terminal else SECONDS
    with (
        _ended_by_signals(),
        quiet_keys(),
        tempfile.TemporaryDirectory(prefix="headwater-demo-", ignore_cleanup_errors=True) as folder,
        _inside(folder),
    ):
        scene, lines, agreements = _play(Path(folder), seconds, port, console)
    _print_result(console, scene, lines, agreements)
    if not _is_right(lines, agreements):
        raise typer.Exit(1)


def find_script() -> Path:
    """The example: in the repository, or where installing the package has put it."""
    places = [Path(__file__).parents[4], Path(sysconfig.get_path("data")) / "share" / "headwater"]
    for place in places:
        script = place / "examples" / "clickstream" / "app.py"
        if script.exists():
            return script
    raise NotFound(
        "The demonstration's application is not here.", advice="Install headwater again, or run it in its repository."
    )


def _play(folder: Path, seconds: float, port: int, console: Console) -> tuple[Scene, list[Line], list[Agreement]]:
    from headwater.app import load_app
    from headwater.cli.demo.application import Application
    from headwater.cli.demo.clicks import TOPIC
    from headwater.cli.demo.crowd import Crowd
    from headwater.cli.demo.director import Director
    from headwater.cli.demo.proof import prove
    from headwater.cli.demo.screen import Plain, Scene, Stage
    from headwater.log.log import open_log

    script = find_script()
    scene = Scene(seconds)
    console.print(Text.assemble(("headwater demo", "bold"), ("  examples/clickstream/app.py on Spark", "dim")))
    with Application(script, folder, port=port) as application:
        app = load_app(script)
        with open_log(app.log_url) as log:
            declared = app.graph.topics[TOPIC]
            log.create_topic(TOPIC, declared.schema, exist_ok=True, **declared.settings)
            with Crowd(str(Path(app.log_url).resolve()), folder, rate=RATE) as crowd:
                scene.regions = crowd.regions
                crowd.begin()
                screen = Stage(console) if console.is_terminal and not console.is_dumb_terminal else Plain(console)
                try:
                    agreements = Director(log, app, application, crowd, scene, screen).run()
                finally:
                    screen.close()
            counts = {region.name: region.acknowledged for region in crowd.regions}
            return scene, prove(log, counts, begun_us=crowd.begun_us, rate=RATE), agreements


def _print_result(console: Console, scene: Scene, lines: list[Line], agreements: list[Agreement]) -> None:
    from headwater.cli.demo.screen import top_table

    def say(text: Text | str, style: str = "") -> None:
        console.print(Text(text, style=style) if isinstance(text, str) else text, soft_wrap=not console.is_terminal)

    if console.is_terminal:
        for at, step in scene.steps:
            say(Text.assemble((f"{at:5.1f} s  ", "dim"), step))
    say("\nthe live view top_pages:", "italic")
    console.print(Padding(top_table(scene), (0, 0, 0, 2)))
    say("\nDuckDB compared the log with what each producer should have sent:", "italic")
    console.print(
        Padding(_proof_table(lines, {region.name for region in scene.regions if region.killed_at}), (0, 0, 0, 2))
    )
    say("\nDuckDB counted the clicks in the log and compared the live views with that, row by row:", "italic")
    for each in agreements:
        mark = Text("✓ agrees  ", style="green") if each.is_right else Text("✗ differs ", style="bold red")
        say(Text.assemble("  ", mark, (each.view, "bold"), f"  {each.rows:,} rows, {each.visits:,} visits"))
        if not each.is_right:
            say(f"    expected {each.rows_expected:,} rows, {each.visits_expected:,} visits; {each.differing:,} differ")
    sent, held = sum(line.acknowledged for line in lines), sum(line.in_log for line in lines)
    if not _is_right(lines, agreements):
        say(f"\n✗ {sent:,} events acknowledged, {held:,} in the log: this is a bug, please report it.", "bold red")
        return
    say(
        f"\n✓ {sent:,} events acknowledged, {held:,} in the log, each exactly once; the live views agree with DuckDB.",
        "bold green",
    )
    killed = ["a producer"] * any(region.killed_at is not None for region in scene.regions)
    killed += ["the application with Spark"] * (scene.killed_s is not None)
    if killed:
        say(f"  {' and '.join(killed)} were killed on the way, and started again.", "green")
    say(f"  first result {scene.first_s or 0:.1f} s after the start.", "green")
    _print_next(say)


def _print_next(say: Callable[[str, str], None]) -> None:
    script = find_script()
    shown = min(os.path.relpath(script), str(script), key=len)
    say("\nnext:", "bold")
    for line in (
        f"{shown}   the whole application: one file of functions from DataFrames to DataFrames",
        f"headwater plan {shown}   checks and draws it; headwater run {shown} runs it",
        "docs/apps.md, docs/views.md   how to write your own, and how to ask and follow a view",
    ):
        say(f"  {line}", "")


def _is_right(lines: list[Line], agreements: list[Agreement]) -> bool:
    return all(line.is_right for line in lines) and all(each.is_right for each in agreements)


def _proof_table(lines: list[Line], killed: set[str]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("producer")
    for column in ("acknowledged", "in the log", "lost", "doubled", "never sent"):
        table.add_column(column, justify="right")
    table.add_column("")
    for line in lines:
        counts = (line.acknowledged, line.in_log, line.lost, line.doubled, line.never_sent)
        mark = Text("✓", style="green") if line.is_right else Text("✗", style="bold red")
        if line.region in killed:
            mark.append(" killed", style="dim")
        table.add_row(line.region, *(f"{count:,}" for count in counts), mark)
    return table


@contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Works in a folder: the example keeps its log beside whoever runs it."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


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
