"""First results: from an event being appended to a view that answers with it, and from a start to what it shows first."""

from __future__ import annotations

import re
import subprocess
import sys
import time

from pyspark.sql import DataFrame

import headwater as hw
from bench.harness import Figure, Options, Target, measure_each, scratch
from bench.log.latency import percentiles
from bench.pipeline.rig import Rig

WARM_EVENTS = 10
EVENTS = 100
EVENTS_QUICK = 5
QUERYABLE_MS_MAX = 1_000.0
FIRST_RESULT_S_MAX = 45.0
_SEEN_S_MAX = 120.0
_FIRST = re.compile(r"first result (\d+\.\d) s after the start")


def queryable(rig: Rig, options: Options) -> list[Figure]:
    """One event after the other, each with a page of its own, into a view of counts by page."""
    if not options.wants("ours"):
        return []
    events = WARM_EVENTS + (EVENTS_QUICK if options.quick else EVENTS)

    def run() -> tuple[float, float]:
        with scratch() as folder, hw.open_log(str(folder)) as log:
            app = hw.App("queryable", log=str(folder), spark=rig.spark)
            visits = app.topic("visits", schema="page STRING", key="page", partitions=1)

            @app.view(visits, key="page")
            def per_page(visits: DataFrame) -> DataFrame:
                return visits.groupBy("page").count()

            app.start()
            try:
                with app.views["per_page"] as view:
                    return percentiles([_seen_after(log, view, f"/{n}") for n in range(events)][WARM_EVENTS:])
            finally:
                app.stop()

    pairs = measure_each(options, run, better="lower")
    what = "one event: from append to the answer of view.get, through a count by page; log on disk, store in SQLite"
    names = (("view_queryable_p50", Target("<=", QUERYABLE_MS_MAX, of="ours")), ("view_queryable_p99", None))
    return [Figure(name, what, "ms", pair, target=target) for (name, target), pair in zip(names, pairs, strict=True)]


def first_result(options: Options) -> list[Figure]:
    """What `headwater demo` says of itself; Spark is started by it, from files that were read before."""
    if not options.wants("ours"):
        return []

    def run() -> tuple[float]:
        command = [sys.executable, "-m", "headwater.cli.main", "demo", "--seconds", "2"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = _FIRST.search(told)
        assert found is not None, told
        return (float(found[1]),)

    [pair] = measure_each(options, run, better="lower")
    what = "headwater demo: from its start, with Spark's, to the first row of a view"
    return [Figure("demo_first_result", what, "s", pair, target=Target("<=", FIRST_RESULT_S_MAX, of="ours"))]


def _seen_after(log: hw.Log, view: hw.View, page: str) -> int:
    begun = time.monotonic_ns()
    log.append("visits", [{"page": page}])
    while view.get(page=page) is None:
        assert time.monotonic_ns() - begun < _SEEN_S_MAX * 1e9, f"{page} is not in the view"
        time.sleep(0.001)
    return time.monotonic_ns() - begun
