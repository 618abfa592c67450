"""The harness: measures both sides of a figure, holds the figures, writes and prints them.

`bench/results/<name>.json` is a list of rows `{name, unit, ours, peer, peer_value, ratio, target, met}` with more
keys behind them; `bench/results/machine.json` beside it says on what they were measured.

A run counts only while nothing else runs: each one is watched, and one during which other programs took more than
`FOREIGN_CPU_MAX` of the machine is repeated, up to twice as many runs as asked for. When no run was quiet the best
of the others is kept and the row says `quiet: false`. The two sides of a figure take turns, so that a slow spell of
the machine meets both.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Column, Table

from bench import machine
from bench.draw import draw

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process that is measured compiles everything again

RESULTS = Path(__file__).with_name("results")
FOREIGN_CPU_MAX = 0.10  # of all cores
RUNS = 5
RUNS_QUICK = 2

Better = Literal["higher", "lower"]
Side = Literal["both", "ours", "peer"]


@dataclass(frozen=True)
class Target:
    """A bound on a figure's ratio (ours / peer's), or on our own value where there is no peer."""

    relation: Literal[">=", "<="]
    bound: float
    of: Literal["ratio", "ours"] = "ratio"

    def met(self, value: float) -> bool:
        return value >= self.bound if self.relation == ">=" else value <= self.bound

    def text(self, unit: str) -> str:
        return f"{self.relation} {self.bound:g} {'x' if self.of == 'ratio' else unit}"


@dataclass(frozen=True)
class Sample:
    """The runs of one side: the best, the extremes, and whether the machine was ours alone."""

    best: float
    worst: float
    runs: int
    quiet: bool

    def spread(self) -> float:
        """How far the worst run lies from the best, as a share of the best."""
        return abs(self.worst - self.best) / self.best if self.best else 0.0


Pair = tuple[Sample | None, Sample | None]  # ours and the peer's; either is missing when only the other was asked for


@dataclass(frozen=True)
class Figure:
    """One row: our value beside the peer's."""

    name: str
    what: str
    unit: str
    pair: Pair
    peer: str | None = None
    target: Target | None = None

    @property
    def ratio(self) -> float | None:
        ours, peer = self.pair
        return ours.best / peer.best if ours and peer and peer.best else None

    @property
    def met(self) -> bool | None:
        """None where there is no target, or nothing to hold against it."""
        if self.target is None or self.pair[0] is None:
            return None
        value = self.ratio if self.target.of == "ratio" else self.pair[0].best
        return None if value is None else self.target.met(value)

    @property
    def quiet(self) -> bool:
        return all(sample.quiet for sample in self.pair if sample)

    def row(self) -> dict[str, Any]:
        ours, peer = self.pair
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": ours and _rounded(ours.best),
            "peer": self.peer,
            "peer_value": peer and _rounded(peer.best),
            "ratio": self.ratio and _rounded(self.ratio),
            "target": self.target and self.target.text(self.unit),
            "met": self.met,
            "what": self.what,
            "spread": ours and _rounded(ours.spread()),
            "peer_spread": peer and _rounded(peer.spread()),
            "runs": ours.runs if ours else peer and peer.runs,
            "quiet": self.quiet,
        }


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    only: tuple[str, ...]
    quick: bool
    side: Side
    runs: int
    check: bool

    def wants(self, side: Literal["ours", "peer"]) -> bool:
        return self.side in (side, "both")


Bench = Callable[[Options], list[Figure]]


def measure(
    options: Options, ours: Callable[[], float], peer: Callable[[], float] | None = None, *, better: Better = "higher"
) -> Pair:
    """Run both sides in turns, `options.runs` times each; each call sets up for itself and returns its own figure."""
    (pair,) = measure_each(options, lambda: (ours(),), peer and (lambda: (peer(),)), better=better)
    return pair


def measure_each(
    options: Options,
    ours: Callable[[], tuple[float, ...]],
    peer: Callable[[], tuple[float, ...]] | None = None,
    *,
    better: Better = "higher",
) -> list[Pair]:
    """Like `measure` for runs that return several figures at once; one pair of samples for each."""
    sides = {"ours": ours if options.wants("ours") else None, "peer": peer if options.wants("peer") else None}
    found = measure_sides(options, {name: side for name, side in sides.items() if side}, better=better)
    count = max(len(samples) for samples in found.values())
    ours_found, peer_found = (found.get(name, [None] * count) for name in sides)
    return list(zip(ours_found, peer_found, strict=True))


def measure_sides(
    options: Options, sides: Mapping[str, Callable[[], tuple[float, ...]]], *, better: Better = "higher"
) -> dict[str, list[Sample]]:
    """Run any number of sides in turns; for each side a sample of each of its figures."""
    runs: dict[str, list[tuple[tuple[float, ...], bool]]] = {name: [] for name in sides}
    for attempt in range(2 * options.runs):
        for name, side in sides.items():
            if attempt >= options.runs and any(quiet for _, quiet in runs[name]):
                continue
            os.sync()  # what the other side left for the disk to do is not to be paid by this one
            gc.collect()
            gc.freeze()  # or each collection during the run walks through the payload, which halves a consumer's rate
            with watch() as watched:
                values = side()
            gc.unfreeze()
            runs[name].append((values, watched.quiet))
    return {
        name: [_sample(of_side, index, better) for index in range(len(of_side[0][0]))] for name, of_side in runs.items()
    }


@dataclass
class Watched:
    """What other programs took of the machine while a block ran; known after the block."""

    foreign: float = 0.0

    @property
    def quiet(self) -> bool:
        return self.foreign <= FOREIGN_CPU_MAX


@contextmanager
def watch() -> Iterator[Watched]:
    """Watch the machine while the block runs."""
    watched, before = Watched(), machine.cpu_s()
    yield watched
    watched.foreign = machine.foreign_share(before, machine.cpu_s())


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder on the disk that is measured (`TMPDIR` chooses it), removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        yield Path(folder)


def main(name: str, benches: dict[str, Bench], arguments: Sequence[str] | None = None, *, runs: int = RUNS) -> int:
    """The command line of one bench file: run, print, write. `runs` is how often where nobody says it."""
    options = _options(name, benches, arguments, runs)
    chosen = {key: bench for key, bench in benches.items() if not options.only or key in options.only}
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that folders are removed then too
    if machine.filesystem(Path(tempfile.gettempdir())) in ("tmpfs", "ramfs"):
        console.print("the temporary folder is in memory, so fdatasync costs nothing: set TMPDIR to a folder on a disk")
    figures: list[Figure] = []
    failed: list[str] = []
    for key, bench in chosen.items():
        console.print(f"[bold]{key}[/] …", highlight=False)
        try:
            figures += bench(options)
        except Exception:  # noqa: BLE001 - an hour of other figures must not be lost with one
            traceback.print_exc()
            failed.append(key)
    _print(figures)
    if options.side == "both" and not options.quick:
        write(name, [figure.row() for figure in figures], whole=not options.only and not failed)
    missed = [figure.name for figure in figures if figure.met is False]
    if missed:
        console.print(f"targets missed: {', '.join(missed)}")
    if failed:
        console.print(f"could not be measured: {', '.join(failed)}")
    return 1 if failed or (missed and options.check) else 0


def write(name: str, rows: list[dict[str, Any]], *, whole: bool) -> None:
    """Write the rows, their picture and the machine; with `whole` false only the rows measured now replace their old selves."""
    path = RESULTS / f"{name}.json"
    if not whole and path.exists():
        fresh = {row["name"]: row for row in rows}
        kept = [fresh.pop(row["name"], row) for row in json.loads(path.read_text())]
        rows = kept + list(fresh.values())
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    described = machine.describe()
    (RESULTS / "machine.json").write_text(json.dumps(described, indent=1, ensure_ascii=False) + "\n")
    path.with_suffix(".svg").write_text(draw(name, rows, described))


def _options(name: str, benches: dict[str, Bench], arguments: Sequence[str] | None, runs: int) -> Options:
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=f"Writes bench/results/{name}.json.")
    names = list(benches)
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], choices=names, help=f"of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="small and inexact; prints, writes nothing")
    parser.add_argument("--side", choices=["both", "ours", "peer"], default="both", help="one alone writes nothing")
    parser.add_argument("--runs", type=int, help=f"runs per side, the best counts (default {runs}, quick {RUNS_QUICK})")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    given = parser.parse_args(arguments)
    runs = given.runs or (RUNS_QUICK if given.quick else runs)
    return Options(only=tuple(given.only), quick=given.quick, side=given.side, runs=runs, check=given.check)


def _sample(runs: list[tuple[tuple[float, ...], bool]], index: int, better: Better) -> Sample:
    quiet = [values[index] for values, alone in runs if alone]
    kept = quiet or [values[index] for values, _ in runs]
    low, high = min(kept), max(kept)
    best, worst = (high, low) if better == "higher" else (low, high)
    return Sample(best=best, worst=worst, runs=len(kept), quiet=bool(quiet))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _print(figures: list[Figure]) -> None:
    table = Table(*(Column(heading, no_wrap=True) for heading in ("figure", "unit", "peer", "target")))
    for heading in ("ours", "spread", "peer's", "spread", "ratio", "met"):
        table.add_column(heading, justify="right")
    for figure in figures:
        row = figure.row()
        verdict = {True: "[green]yes[/]", False: "[red]no[/]", None: "–"}[figure.met]
        table.add_row(
            figure.name,
            figure.unit,
            figure.peer or "–",
            row["target"] or "–",
            *(_shown(row["ours"]), _percent(row["spread"]), _shown(row["peer_value"]), _percent(row["peer_spread"])),
            *(_shown(row["ratio"]), verdict if figure.quiet else f"{verdict} (busy)"),
        )
    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "180"))
    Console(width=width).print(table)


def _shown(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"
