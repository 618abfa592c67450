"""The long tier of the crash tests: thousands of simulated histories, hundreds of rounds with real kills.

``python -m bench.crash`` runs both and writes ``bench/results/crash.json``; it ends with 1 and the seeds when a promise was broken.
``--only sim`` or ``--only kill`` runs one of them, ``--first N`` begins at another seed, and ``--seed N`` repeats a single seed and shows
how it ended.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headwater.testing.crash.harness import Nursery, RoundReport, round_points, run_round
from headwater.testing.crash.points import crash_points, rare_points
from headwater.testing.simulation.history import HistoryReport, run_history

HISTORIES = 1_200
HISTORIES_PER_PROCESS = 100
ROUNDS = 240
RELENTLESS_EVERY = 6
RELENTLESS_S = 2.5
MEMORY = Path("/dev/shm")

Outcome = TypeVar("Outcome", HistoryReport, RoundReport)


def history(seed: int) -> HistoryReport | str:
    """A history's report, or how it failed."""
    try:
        return run_history(seed)
    except Exception:  # noqa: BLE001 - shown with its seed, and the others go on
        return f"history {seed}\n{traceback.format_exc()}"


def kill_round(nursery: Nursery, seed: int) -> RoundReport | str:
    """A round's report, or how it failed; every other one on the disk, the others in memory, where they are faster."""
    in_memory = seed % 2 == 0 and os.access(MEMORY, os.W_OK)
    folder = Path(tempfile.mkdtemp(prefix=f"headwater-crash-{seed}-", dir=MEMORY if in_memory else None))
    relentless = seed % RELENTLESS_EVERY == RELENTLESS_EVERY - 1
    options: dict[str, Any] = {"phase_s": RELENTLESS_S, "relentless": True} if relentless else {}
    try:
        report = run_round(nursery, folder, seed, **options)
    except Exception:  # noqa: BLE001 - shown with its seed, and the others go on
        return f"round {seed}, kept in {folder}\n{traceback.format_exc()}"
    shutil.rmtree(folder)
    return report


def histories(seeds: Sequence[int]) -> Iterator[HistoryReport | str]:
    """Histories on all cores, as they end."""
    # A killed process of a history keeps its mapped files until ours ends: receipts are invisible to the collector.
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=HISTORIES_PER_PROCESS) as pool:
        yield from pool.imap(history, seeds)


def rounds(seeds: Sequence[int]) -> Iterator[RoundReport | str]:
    """Rounds one after the other: each has enough processes."""
    with Nursery() as nursery:
        for seed in seeds:
            yield kill_round(nursery, seed)


def follow(what: str, outcomes: Iterator[Outcome | str], count: int) -> tuple[list[Outcome], list[str]]:
    """Collects the outcomes and shows how far it is; failures are shown at once."""
    began, reports, failures = time.monotonic(), [], []
    for number, outcome in enumerate(outcomes, 1):
        if isinstance(outcome, str):
            failures.append(outcome)
            print(f"\n{outcome}", flush=True)
        else:
            reports.append(outcome)
        if number % max(1, count // 50) == 0 or number == count:
            print(f"{what}: {number} of {count}, {len(failures)} failed, {time.monotonic() - began:.0f} s", flush=True)
    return reports, failures


def missing(points: Counter[str], wanted: Sequence[str]) -> list[str]:
    """What nobody came to, as a failure."""
    never = [point for point in wanted if not points[point]]
    return [f"never reached: {', '.join(never)}"] if never else []


def simulate(first: int, count: int) -> tuple[int, list[str]]:
    """All histories: how many held, and what failed."""
    reports, failures = follow("histories", histories(range(first, first + count)), count)
    points: Counter[str] = sum((report.points for report in reports), Counter())
    events, losses = sum(report.events for report in reports), sum(report.power_losses for report in reports)
    print(f"{events:,} events read in the end, {losses:,} power losses, {sum(points.values()):,} points reached")
    return len(reports), failures + missing(points, [*crash_points(), *rare_points()])


def kill(first: int, count: int) -> tuple[int, list[str]]:
    """All rounds: how many held, and what failed."""
    reports, failures = follow("rounds", rounds(range(first, first + count)), count)
    met: Counter[str] = sum((Counter({report.point: report.died_at_point}) for report in reports), Counter())
    events = sum(report.counts["events"] for report in reports)
    print(
        f"{events:,} events, {sum(met.values()):,} deaths at points, {sum(report.killed for report in reports):,} kills"
    )
    return len(reports), failures + missing(met, round_points())


def write_results(held: dict[str, int], asked: dict[str, int]) -> None:
    """The figures beside the others: how many were run and held."""
    from bench.harness import Figure, Sample, Target, write

    what = {"histories": "simulated histories that held", "rounds": "rounds of real processes and kills that held"}
    figures = [
        Figure(
            name, what[name], name, (Sample(count, count, 1, quiet=True), None), None, Target(">=", asked[name], "ours")
        )
        for name, count in held.items()
    ]
    write("crash", [figure.row() for figure in figures], whole=len(held) == len(what))


def repeat(seed: int, only: str | None) -> int:
    """One seed again, with all it has to say."""
    outcomes: list[object] = []
    if only != "kill":
        outcomes.append(history(seed))
    if only != "sim":
        with Nursery() as nursery:
            outcomes.append(kill_round(nursery, seed))
    for outcome in outcomes:
        print(outcome if not isinstance(outcome, HistoryReport) else "\n".join(outcome.lines))
    return int(any(isinstance(outcome, str) for outcome in outcomes))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.crash", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["sim", "kill"])
    parser.add_argument("--seed", type=int, help="repeat this one")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--histories", type=int, default=HISTORIES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-results", action="store_true", help="write nothing")
    given = parser.parse_args()
    if given.seed is not None:
        return repeat(given.seed, given.only)
    held, failures = {}, []
    if given.only != "kill":
        held["histories"], failed = simulate(given.first, given.histories)
        failures += failed
    if given.only != "sim":
        held["rounds"], failed = kill(given.first, given.rounds)
        failures += failed
    if not given.no_results:
        write_results(held, {"histories": given.histories, "rounds": given.rounds})
    for failure in failures:
        print(failure.partition("\n")[0], file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
