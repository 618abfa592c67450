"""`headwater demo`: two examples on Spark; each ends with a check of its results.

1. `examples/clickstream`: producers of clicks, live views, two kills, and correct counts.
2. `examples/in_sync`: a shop with dual writes, beside systems that an application derives from the shop's log; both are
   compared with the shop's database.

The demo uses a temporary folder, and all its processes end with this one.
"""

from __future__ import annotations

import os
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headwater.cli.demo.termination import Termination
from headwater.cli.output.table import Right, plain_table
from headwater.model.errors import NotFound
from headwater.model.extras import check_spark

if TYPE_CHECKING:
    from headwater.cli.demo.proof import Agreement, RegionProof
    from headwater.cli.demo.screen import Scene

SECONDS = 30
SECONDS_ON_A_TERMINAL = 60
RATE = 1_000.0
PORT = 8642


def demo(
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=3600,
            help=f"The least duration of each part. Default: {SECONDS}; {SECONDS_ON_A_TERMINAL} or until Ctrl-C on a terminal.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="The port of the status page, or the next free port after it.")
    ] = PORT,
) -> None:
    """Run two demonstrations: live views that stay correct through crashes, and four systems kept in sync with a database."""
    from headwater.cli.output.terminal import quiet_keys

    check_spark("The demonstration")
    console = Console()
    if seconds is None:
        seconds = SECONDS_ON_A_TERMINAL if console.is_terminal else SECONDS
    termination = Termination()
    with (
        termination.by_signals(),
        quiet_keys(),
        tempfile.TemporaryDirectory(prefix="headwater-demo-", ignore_cleanup_errors=True) as folder,
        _inside(folder),
    ):
        scene, lines, agreements = _play(Path(folder), seconds, port, console, termination)
        _print_result(console, scene, lines, agreements)
        if not _is_right(lines, agreements):
            raise typer.Exit(1)
        if not scene.is_cut_short:
            _play_in_sync(Path(folder), seconds, console)
    _print_next(console)


def find_script(name: str = "clickstream/app.py") -> Path:
    """A file of the examples: in the repository, or in the installed package's data folder."""
    places = [Path(__file__).parents[4], Path(sysconfig.get_path("data")) / "share" / "headwater"]
    for place in places:
        script = place / "examples" / name
        if script.exists():
            return script
    raise NotFound(
        f"The demo needs examples/{name}, which is not installed.",
        advice="Install headwater again, or run the demo in a checkout of the repository.",
    )


def _play(
    folder: Path, seconds: float, port: int, console: Console, termination: Termination
) -> tuple[Scene, list[RegionProof], list[Agreement]]:
    from headwater.app.app import load_app
    from headwater.cli.demo.application import Application
    from headwater.cli.demo.clicks import TOPIC
    from headwater.cli.demo.crowd import Crowd
    from headwater.cli.demo.director import Director
    from headwater.cli.demo.proof import prove
    from headwater.cli.demo.screen import LiveScreen, PlainScreen, Scene
    from headwater.log.log import open_log

    script = find_script()
    scene = Scene(seconds)
    console.print(Text.assemble(("headwater demo", "bold"), ("  1 of 2: examples/clickstream on Spark", "dim")))
    with Application(script, folder, port=port) as application:
        app = load_app(script)
        with open_log(app.log_url) as log:
            declared = app.graph.topics[TOPIC]
            log.create_topic(TOPIC, declared.schema, exist_ok=True, **declared.settings)
            with Crowd(str(Path(app.log_url).resolve()), folder, rate=RATE) as crowd:
                scene.regions = crowd.regions
                crowd.begin()
                screen = (
                    LiveScreen(console)
                    if console.is_terminal and not console.is_dumb_terminal
                    else PlainScreen(console)
                )
                try:
                    agreements = Director(log, app, application, crowd, scene, screen, termination).run()
                finally:
                    screen.close()
            counts = {region.name: region.acknowledged for region in crowd.regions}
            return scene, prove(log, counts, begun_us=crowd.begun_us, rate=RATE), agreements


def _play_in_sync(folder: Path, seconds: float, console: Console) -> None:
    from headwater.cli.demo.in_sync import CLIENTS, play_in_sync

    missing = [name for name in CLIENTS if find_spec(name) is None]
    if missing:
        said = f'\nThe second part, examples/in_sync, needs {", ".join(missing)}: pip install "headwater[redis,search,delta]".'
        console.print(Text(said), soft_wrap=True)
        return
    console.print(Text.assemble(("\nheadwater demo", "bold"), ("  2 of 2: examples/in_sync on Spark", "dim")))
    for line in (
        "The clients of a shop write each product to its database and then to a cache.",
        "An application captures the database and writes Redis, a search index, Parquet files",
        "and a view. Every few seconds the demo compares all of them with the database.",
    ):
        console.print(Text(line), soft_wrap=True)
    code = play_in_sync(find_script("in_sync/watch.py"), folder, seconds=seconds)
    if code:
        raise typer.Exit(code)


def _print_result(console: Console, scene: Scene, lines: list[RegionProof], agreements: list[Agreement]) -> None:
    from headwater.cli.demo.screen import top_table

    def say(text: Text | str, style: str = "") -> None:
        console.print(Text(text, style=style) if isinstance(text, str) else text, soft_wrap=not console.is_terminal)

    if console.is_terminal:
        for at, step in scene.steps:
            say(Text.assemble((f"{at:5.1f} s  ", "dim"), step))
    say("\nThe live view top_pages:", "italic")
    console.print(Padding(top_table(scene), (0, 0, 0, 2)))
    say("\nDuckDB compared the log with the events that each producer sent:", "italic")
    console.print(
        Padding(_proof_table(lines, {region.name for region in scene.regions if region.killed_at}), (0, 0, 0, 2))
    )
    say("\nDuckDB counted the clicks in the log and compared the result with the live views, row by row:", "italic")
    for each in agreements:
        mark = Text("✓ agrees  ", style="green") if each.is_right else Text("✗ differs ", style="bold red")
        say(Text.assemble("  ", mark, (each.view, "bold"), f"  {each.rows:,} rows, {each.visits:,} visits"))
        if not each.is_right:
            say(f"    expected {each.rows_expected:,} rows, {each.visits_expected:,} visits; {each.differing:,} differ")
    sent, held = sum(line.acknowledged for line in lines), sum(line.in_log for line in lines)
    if not _is_right(lines, agreements):
        say(f"\n✗ {sent:,} events acknowledged, {held:,} in the log. This is a bug, please report it.", "bold red")
        return
    say(
        f"\n✓ {sent:,} events acknowledged, {held:,} in the log, each exactly once; the live views agree with DuckDB.",
        "bold green",
    )
    killed = ["a producer"] * any(region.killed_at is not None for region in scene.regions)
    killed += ["the application with Spark"] * (scene.killed_s is not None)
    if killed:
        say(f"  The demo killed and restarted {' and '.join(killed)}.", "green")
    say(f"  The first result came {scene.first_s or 0:.1f} s after the start.", "green")


def _print_next(console: Console) -> None:
    clicks, shop = (_shown(find_script(f"{name}/app.py")) for name in ("clickstream", "in_sync"))
    console.print(Text("\nnext:", style="bold"))
    for where, what in (
        (clicks, "the application of part 1: functions from DataFrames to a DataFrame, in one file"),
        (shop, "the application of part 2: captured tables and sinks"),
        (f"headwater plan {clicks}", "checks and draws the application; headwater run runs it"),
        ("docs/apps.md, docs/views.md", "how to write an application, and how to query a view"),
        ("docs/capture.md, docs/verify.md", "how to capture a database, and how to compare copies with it"),
    ):
        console.print(Text(f"  {where}\n      {what}"), soft_wrap=True)


def _shown(script: Path) -> str:
    return min(os.path.relpath(script), str(script), key=len)


def _is_right(lines: list[RegionProof], agreements: list[Agreement]) -> bool:
    return all(line.is_right for line in lines) and all(each.is_right for each in agreements)


def _proof_table(lines: list[RegionProof], killed: set[str]) -> Table:
    table = plain_table("producer", *map(Right, ("acknowledged", "in the log", "lost", "doubled", "never sent")), "")
    for line in lines:
        counts = (line.acknowledged, line.in_log, line.lost, line.doubled, line.never_sent)
        mark = Text("✓", style="green") if line.is_right else Text("✗", style="bold red")
        if line.region in killed:
            mark.append(" killed", style="dim")
        table.add_row(line.region, *(f"{count:,}" for count in counts), mark)
    return table


@contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Changes to the folder, because the example creates its log in the current folder."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
