"""`headwater demo`: two examples on Spark, each with a proof at its end.

1. `examples/clickstream`: processes that click, live views, two kills, and numbers that are right.
2. `examples/in_sync`: a shop whose clients write twice, and what is derived from its log; what is wrong in which is counted.

Nothing stays behind: everything lies in a temporary folder, and every process ends with this one, however it ends.
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

from headwater.cli.demo.ending import Ending
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
            help=f"How long each part lasts at least; without it {SECONDS}, on a terminal {SECONDS_ON_A_TERMINAL} or until Ctrl-C.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Of the status page; the next free one if it is taken.")
    ] = PORT,
) -> None:
    """See it work: live views over clicks with two crashes and the right count, then a shop and four systems kept in step with it."""
    from headwater.cli.output.run_screen import quiet_keys

    check_spark("The demonstration")
    console = Console()
    if seconds is None:
        seconds = SECONDS_ON_A_TERMINAL if console.is_terminal else SECONDS
    ending = Ending()
    with (
        ending.by_signals(),
        quiet_keys(),
        tempfile.TemporaryDirectory(prefix="headwater-demo-", ignore_cleanup_errors=True) as folder,
        _inside(folder),
    ):
        scene, lines, agreements = _play(Path(folder), seconds, port, console, ending)
        _print_result(console, scene, lines, agreements)
        if not _is_right(lines, agreements):
            raise typer.Exit(1)
        if not scene.is_cut_short:
            _play_in_sync(Path(folder), seconds, console)
    _print_next(console)


def find_script(name: str = "clickstream/app.py") -> Path:
    """A file of the examples: in the repository, or where installing the package has put it."""
    places = [Path(__file__).parents[4], Path(sysconfig.get_path("data")) / "share" / "headwater"]
    for place in places:
        script = place / "examples" / name
        if script.exists():
            return script
    raise NotFound(
        "The demonstration's application is not here.", advice="Install headwater again, or run it in its repository."
    )


def _play(
    folder: Path, seconds: float, port: int, console: Console, ending: Ending
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
                    agreements = Director(log, app, application, crowd, scene, screen, ending).run()
                finally:
                    screen.close()
            counts = {region.name: region.acknowledged for region in crowd.regions}
            return scene, prove(log, counts, begun_us=crowd.begun_us, rate=RATE), agreements


def _play_in_sync(folder: Path, seconds: float, console: Console) -> None:
    from headwater.cli.demo.in_sync import CLIENTS, play_in_sync

    missing = [name for name in CLIENTS if find_spec(name) is None]
    if missing:
        said = f'\nexamples/in_sync, the second part, needs {", ".join(missing)}: pip install "headwater[redis,search,delta]".'
        console.print(Text(said), soft_wrap=True)
        return
    console.print(Text.assemble(("\nheadwater demo", "bold"), ("  2 of 2: examples/in_sync on Spark", "dim")))
    for line in (
        "Clients of a shop write each product to its database, and then to a cache.",
        "An application follows the database's log into Redis, a search index, Parquet",
        "and a view. Every few seconds all of them are compared with the database.",
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


def _print_next(console: Console) -> None:
    clicks, shop = (_shown(find_script(f"{name}/app.py")) for name in ("clickstream", "in_sync"))
    console.print(Text("\nnext:", style="bold"))
    for where, what in (
        (clicks, "each application is one file: functions from DataFrames"),
        (shop, "to a DataFrame, tables of a database, sinks"),
        (f"headwater plan {clicks}", "checks and draws it; headwater run runs it"),
        ("docs/apps.md, docs/views.md", "how to write your own, and how to ask a view"),
        ("docs/capture.md, docs/verify.md", "databases as streams, and copies proved equal"),
    ):
        console.print(Text(f"  {where}\n      {what}"), soft_wrap=True)


def _shown(script: Path) -> str:
    return min(os.path.relpath(script), str(script), key=len)


def _is_right(lines: list[RegionProof], agreements: list[Agreement]) -> bool:
    return all(line.is_right for line in lines) and all(each.is_right for each in agreements)


def _proof_table(lines: list[RegionProof], killed: set[str]) -> Table:
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
