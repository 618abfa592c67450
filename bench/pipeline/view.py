"""The view: what it adds, from the result of a batch being there to a subscriber in another process having its changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

import headwater as hw
from bench.harness import Figure, Options, Target, measure_each, scratch
from bench.log.latency import percentiles, ticks
from bench.processes import run_together
from headwater.views.definition import define_view
from headwater.views.maintainer import ViewMaintainer
from headwater.views.store_url import open_view_store

ROWS = 100
WARM_BATCHES = 20
BATCHES = 200
BATCHES_QUICK = 20
BATCHES_PER_S = 20
LATENCY_MS_MAX = 50.0
_NAME = "counts"
_SCHEMA = "id BIGINT, count BIGINT, ready_ns BIGINT"
_POLL_TIMEOUT_S = 10.0


def view(options: Options) -> list[Figure]:
    """Batches as an App gives them to a view in SQLite, each row changed by each of them."""
    if not options.wants("ours"):
        return []
    batches = WARM_BATCHES + (BATCHES_QUICK if options.quick else BATCHES)

    def run() -> tuple[float, float]:
        with scratch() as folder:
            _maintain(lambda: None, str(folder), 1)  # so that there is a view to subscribe to
            latencies, _ = run_together((_subscribe, (str(folder), batches)), (_maintain, (str(folder), batches)))
        return percentiles(latencies[WARM_BATCHES * ROWS :])

    pairs = measure_each(options, run, better="lower")
    what = f"from the result of a batch ({ROWS} rows, {BATCHES_PER_S} batches/s) to a subscriber in another process"
    names = (("view_latency_p50", Target("<=", LATENCY_MS_MAX, of="ours")), ("view_latency_p99", None))
    return [Figure(name, what, "ms", pair, target=target) for (name, target), pair in zip(names, pairs, strict=True)]


def _maintain(ready: Callable[[], object], folder: str, batches: int) -> None:
    with hw.open_log(folder) as log:
        store = open_view_store(_store(folder))
        maintainer = ViewMaintainer(log, store, define_view(_NAME, _SCHEMA, key="id"))
        ready()
        first = 0 if batches == 1 else 1
        for epoch, _ in enumerate(ticks(batches, BATCHES_PER_S), first):
            now = time.monotonic_ns()
            rows = pa.table({"id": range(ROWS), "count": [epoch] * ROWS, "ready_ns": [now] * ROWS})
            done = maintainer.maintain(rows, hw.Marker(query="bench", epoch=epoch, ends={"events": epoch}))
            assert done.changes == ROWS
        ready()
        store.close()


def _subscribe(ready: Callable[[], object], folder: str, batches: int) -> list[int]:
    latencies: list[int] = []
    with (
        hw.open_log(folder) as log,
        hw.open_view(_store(folder), _NAME, log=log) as opened,
        opened.subscribe() as changes,
    ):
        while changes.poll()[-1].kind != "ready":
            continue
        ready()
        while len(latencies) < batches * ROWS:
            found = changes.poll(timeout_s=_POLL_TIMEOUT_S)
            now = time.monotonic_ns()
            assert found, f"only {len(latencies)} of {batches * ROWS} changes arrived"
            latencies += [now - change.new["ready_ns"] for change in found if change.new]
        ready()
    return latencies


def _store(folder: str) -> str:
    return f"sqlite:///{Path(folder) / 'views.db'}"
