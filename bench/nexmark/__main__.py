"""Nexmark: `python -m bench.nexmark` writes `bench/results/nexmark.json`.

Each query as a stream over the same events, to a sink that does nothing: ours from a log in a folder, by our operators where the
application uses them; the peers are plain Spark and Flink SQL over Parquet files, for the queries that they can run. A rate is all events
of the auction house by the time that the batches take, or Flink's job. `--only q4` runs one query, `--quick` shrinks everything.

Each side first runs over a tenth of the events: that is the warming, and a side for which all of them would take more than `LONG_S` is
measured over that tenth. A query that takes a few seconds by all sides is run `OFTEN` times as often: a JVM compiles for longer than that,
and the best of two runs would say which side was lucky. So the whole is bounded: about 30 minutes for five million events.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from bench.harness import RESULTS, Figure, Options, Sample, Target, main, measure_sides
from bench.nexmark import flink, flink_sql
from bench.nexmark.rig import House, NexmarkRig
from examples.nexmark.native import NATIVE
from examples.nexmark.ours import QUERIES

EVENTS, EVENTS_QUICK = 5_000_000, 1_000_000
FEW = 10  # a tenth
LONG_S, SHORT_S = 60.0, 5.0
RUNS, OFTEN = 2, 3
OF_FLINK = "_flink"
SPARK, REFUSED_BY_SPARK = "Spark over Parquet", "Spark's streaming refuses it"


@dataclass
class Nexmark:
    """The queries, one after another, and what was found so far."""

    rig: NexmarkRig
    began_s: float = field(default_factory=time.monotonic)
    ratios: dict[str, float] = field(default_factory=dict)
    """By the names of the figures."""

    def query(self, name: str, options: Options) -> list[Figure]:
        """One query, by all that can run it."""
        rates = self._rates(name, options)
        if all(rate.seconds <= SHORT_S for rate in rates.values()):
            options = replace(options, runs=options.runs * OFTEN)
        samples = {side: found[0] for side, found in measure_sides(options, rates).items()} if rates else {}
        long = ", ".join(side for side, rate in rates.items() if rate.is_long)
        what = (QUERIES[name].function.__doc__ or name).strip().removeprefix(f"{name}: ")
        what += f" ({long}: over a tenth of the events)" if long else ""
        ours, by_spark, by_flink = (samples.get(side) for side in ("ours", "spark", "flink"))
        spark = (SPARK, Target(">=", 1.0)) if name in NATIVE else (REFUSED_BY_SPARK, None)
        figures = [Figure(name, what, "events/s", (ours, by_spark), *spark)]
        why = flink_sql.REFUSED.get(name)
        if by_flink or why:
            peer = f"{flink.PEER}: {why}" if why else flink.PEER
            figures.append(Figure(f"{name}{OF_FLINK}", what, "events/s", (ours, by_flink), peer))
        self.ratios |= {figure.name: figure.ratio for figure in figures if figure.ratio is not None}
        told = ", ".join(f"{side} {sample.best / 1e6:.3f} M/s" for side, sample in samples.items())
        print(f"{name}: {told} ({time.monotonic() - self.began_s:.0f} s so far)", file=sys.stderr, flush=True)
        return figures

    def ahead(self, options: Options) -> list[Figure]:
        """On how many queries ours is ahead; those that were not measured now count as they were last written."""
        ratios = self.ratios
        path = RESULTS / "nexmark.json"
        if options.only and path.exists():
            ratios = {row["name"]: row["ratio"] for row in json.loads(path.read_text()) if row["ratio"]} | ratios
        of_flink = [ratios[f"{name}{OF_FLINK}"] for name in QUERIES if f"{name}{OF_FLINK}" in ratios]
        return [
            *_ahead("ahead_of_spark", SPARK, 1.0, [ratios[name] for name in QUERIES if name in ratios]),
            *_ahead("ahead_of_flink", flink.PEER, 0.5, of_flink),
        ]

    def _rates(self, name: str, options: Options) -> dict[str, Rate]:
        """The sides that can run a query, warm."""
        sides: dict[str, Callable[[str, House], float]] = {}
        if options.wants("ours"):
            sides["ours"] = self.rig.ours_s
        if options.wants("peer") and name in NATIVE:
            sides["spark"] = self.rig.spark_s
        if options.wants("peer") and name in flink_sql.QUERIES and self.rig.flink:
            sides["flink"] = self.rig.flink_s
        house = self.rig.house(EVENTS_QUICK if options.quick else EVENTS)
        few = self.rig.house(house.events // FEW)
        # The first run of a side may pay for its start, so each runs twice.
        seconds = {side: min(run_s(name, few) for _ in range(2)) * FEW for side, run_s in sides.items()}
        return {
            side: Rate(partial(run_s, name), few if seconds[side] > LONG_S else house, seconds[side])
            for side, run_s in sides.items()
        }


@dataclass(frozen=True)
class Rate:
    """Events a second of one side, and about how long all of them take."""

    run_s: Callable[[House], float]
    house: House
    seconds: float

    @property
    def is_long(self) -> bool:
        """Whether only some of them are measured."""
        return self.seconds > LONG_S

    def __call__(self) -> tuple[float]:
        return (self.house.events / self.run_s(self.house),)


def _ahead(name: str, peer: str, share: float, ratios: list[float]) -> list[Figure]:
    """The row that counts the queries, if there is anything to count."""
    if not ratios:
        return []
    ahead, all_of_them = (
        Sample(best=float(count), worst=float(count), runs=1, quiet=True)
        for count in (sum(ratio >= 1.0 for ratio in ratios), len(ratios))
    )
    what = "queries on which ours is at least as fast, of those that the peer runs"
    return [Figure(name, what, "queries", (ahead, all_of_them), peer, Target(">=", share))]


if __name__ == "__main__":
    with NexmarkRig() as rig:
        nexmark = Nexmark(rig)
        benches = {name: partial(nexmark.query, name) for name in QUERIES}
        sys.exit(main("nexmark", benches | {"ahead": nexmark.ahead}, runs=RUNS))
