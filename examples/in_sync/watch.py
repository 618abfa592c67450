"""A shop with dual writes, an application that derives four systems from the shop's log, and a live count of wrong rows.

The cache that the clients write drifts away from the database; the systems derived from the log do not (clients.py and
drift.py say why and how). The example uses a temporary folder and its own Redis, and removes both at the end.

python examples/in_sync/watch.py                                        until Ctrl-C, or for 60 seconds
python examples/in_sync/watch.py --shop postgresql://me@localhost/shop  a database that has no table `products` yet
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from clients import CLIENTS, Clients, Shop
from drift import Drift, put_into
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import headwater as hw
from headwater.errors import AppFailed, HeadwaterError
from headwater.testing import RedisServer

APP = Path(__file__).with_name("app.py")
SECONDS = 60.0
LOOKS_MIN = 3
PAUSE_S = 2.0
START_S_MAX = 300.0
HISTORY = 24
BARS = "▁▂▃▄▅▆▇█"


class Show:
    """The display: a live table on a terminal, else lines."""

    def __init__(self, console, drift, clients):
        self.console, self.drift, self.clients = console, drift, clients
        self.begun_s = time.monotonic()
        self.state = ""
        self.live = None
        if console.is_terminal and not console.is_dumb_terminal:
            self.live = Live(console=console, get_renderable=self.draw, refresh_per_second=4, transient=True)

    @property
    def elapsed_s(self):
        """The seconds since the start."""
        return time.monotonic() - self.begun_s

    def tell(self, state):
        """Shows the current state."""
        self.state = state
        if self.live is None:
            self.line(state)

    def look(self, **how):
        """Compares all copies, and shows the result."""
        self.drift.look(self.clients, **how)
        if self.live is None:
            there = all(copy.drifts for copy in self.drift.derived)
            derived = (
                ", ".join(f"{copy.name} {copy.drifts[-1]}" for copy in self.drift.derived) if there else "starting"
            )
            self.line(f"wrong rows: {self.drift.written.drifts[-1]:3} by clients   from the log: {derived}")

    def line(self, text):
        """A line with its time."""
        self.console.print(f"{self.elapsed_s:5.1f} s  {text}", highlight=False, markup=False, soft_wrap=True)

    def draw(self):
        """The whole screen."""
        head = Text.assemble(
            (" headwater ", "bold white on blue"),
            ("  a shop, its cache, and four systems derived from its log", "bold"),
            (f"  {self.elapsed_s:.0f} s", "dim"),
        )
        writes = f"{self.clients.writes:,} writes by {CLIENTS} clients; {self.state}"
        return Group(head, Text(writes, style="dim"), Text(""), table_of(self.drift))


def table_of(drift):
    """The copies, and what is wrong in each."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading, side in (("copy", "left"), ("kept by", "left"), ("wrong rows", "right"), ("over time", "left")):
        table.add_column(heading, justify=side, no_wrap=True)
    copies = [(drift.written, "the clients"), *((copy, "the log") for copy in drift.derived)]
    most = max([1, *drift.written.drifts])
    for copy, keeper in copies:
        count = copy.drifts[-1] if copy.drifts else None
        shown = Text("starting", style="dim") if count is None else Text(f"{count:,}", style="bold")
        colour = "red" if count else "green"
        shown.stylize(colour)
        bars = "".join(BARS[min(7, each * 7 // most)] for each in copy.drifts[-HISTORY:])
        table.add_row(copy.name, Text(keeper, style="dim"), shown, Text(bars, style=colour))
    return table


def print_result(console, drift, clients):
    """What was found, in a few lines."""

    def say(text, style=""):
        console.print(Text(text, style=style), soft_wrap=not console.is_terminal)

    say("\nheadwater verify compared each copy with the shop's database, row by row:", "italic")
    console.print(Padding(table_of(drift), (0, 0, 0, 2), expand=False))
    say(
        f"\n  {drift.products:,} products, {clients.writes:,} writes by {CLIENTS} clients. Of the rows in the clients' cache,"
    )
    say(
        f"  {drift.lost} are wrong because of a failed write and {drift.overtaken} because of a race, without any error."
    )
    if drift.is_none:
        looks = len(drift.derived[0].drifts)
        found = f"0 wrong rows in {len(drift.derived)} systems, in each of {looks} comparisons"
        say(f"✓ the systems derived from the log: {found}.", "bold green")
    else:
        say("✗ the systems derived from the log have wrong rows. This is a bug, please report it.", "bold red")


def play(show, app, *, seconds):
    """Lets the clients write until the time is up, or Ctrl-C, and looks again and again."""
    looks = 0
    try:
        with ThreadPoolExecutor(1) as aside:
            show.tell("Spark is starting")
            starting = aside.submit(start, app)
            while not starting.done():
                time.sleep(PAUSE_S)
                show.look(at_derived=False)
            starting.result()
        show.tell("the application is running")
        while looks < LOOKS_MIN or show.elapsed_s < seconds:
            time.sleep(PAUSE_S)
            show.look()
            looks += 1
    except KeyboardInterrupt:
        if not looks:
            raise
        show.tell("Ctrl-C: comparing for the last time")
    show.clients.stop()
    show.look()


def start(app):
    """Starts the application; returns when every stage has had its first batch."""
    app.start()
    deadline = time.monotonic() + START_S_MAX
    while True:
        stages = [stage for stage in app.status().stages if stage.kind != "capture"]
        if all(stage.epoch >= 0 for stage in stages):
            return
        failed = [f"{stage.name}: {stage.error}" for stage in stages if stage.state == "failed"]
        if failed or time.monotonic() > deadline:
            what = failed[0] if failed else f"The stages wrote nothing within {START_S_MAX:g} s."
            raise AppFailed(what, advice="Run the example again when the machine is less busy.")
        time.sleep(0.2)


def main():
    """Runs everything, and ends with 1 where a derived system was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shop", default="sqlite:///./shop.db")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--tied", action="store_true", help="end at once when standard input ends")
    given = parser.parse_args()
    if given.tied:
        threading.Thread(target=end_with_stdin, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    console = Console()
    with ExitStack() as stack:
        stack.enter_context(inside_a_folder())
        redis = started_redis(stack, console)
        os.environ.update(SHOP=given.shop, CACHE=redis)
        shop = Shop(given.shop)
        shop.make()
        stack.callback(leave, shop)
        app = hw.load_app(APP)
        clients = Clients(shop, put_into(redis))
        drift = Drift(shop, redis)
        stack.callback(app.stop)
        clients.start()
        stack.callback(clients.stop)
        show = Show(console, drift, clients)
        with show.live or ExitStack():
            play(show, app, seconds=given.seconds)
        print_result(console, drift, clients)
    sys.exit(0 if drift.is_none else 1)


def leave(shop):
    """The database is left as it was found: without the capture, and without the table."""
    if Path("in_sync").exists():
        with hw.open_log("in_sync") as log:
            for name in hw.captures(log):
                hw.remove_capture(log, name, url=shop.url)
    shop.remove()


def started_redis(stack, console):
    """The URL of a Redis of our own; empty, with a word about it, where no redis-server is installed."""
    if shutil.which("redis-server") is None:
        console.print("The example skips Redis, because redis-server is not installed (apt-get install redis-server).")
        return ""
    server = RedisServer()
    server.gives_away = False  # it lies in a folder that nobody else may enter
    stack.enter_context(server)
    return f"redis://127.0.0.1:{server.port}/0"


@contextmanager
def inside_a_folder():
    """Works in a temporary folder, which is removed at the end."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="headwater-in-sync-", ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def end_with_stdin():
    """Whoever started this has ended, however it did: nothing goes on without it."""
    while os.read(0, 64):
        pass
    os._exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except HeadwaterError as error:
        sys.exit(f"[{error.code}] {error}")
