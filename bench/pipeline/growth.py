"""Growth: what our own rates are with ten times the events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from bench.harness import Figure, Options, measure
from bench.pipeline.rates import count_windows, no_op
from bench.pipeline.rig import EVENTS, TOPIC, Rig

TIMES = 10


def growth(rig: Rig, options: Options) -> list[Figure]:
    """Reading and counting; both sides are ours."""
    if options.quick or not options.wants("ours"):
        return []
    options = replace(options, side="both")
    sinks: dict[str, tuple[Callable[[DataFrame], DataStreamWriter], dict[str, str]]] = {
        "read": (no_op, {}),
        "window": (count_windows, {"columns": "kind,at"}),
    }
    figures = []
    for name, (sink, columns) in sinks.items():

        def run(events: int, sink: Callable[..., DataStreamWriter] = sink, columns: dict[str, str] = columns) -> float:
            return rig.drain(sink(rig.from_log(rig.log(events), TOPIC, **columns)), events)

        run(EVENTS)
        run(EVENTS * TIMES)
        pair = measure(options, lambda run=run: run(EVENTS * TIMES), lambda run=run: run(EVENTS))
        what = f"the same as {name} with {EVENTS * TIMES:,} events"
        figures.append(Figure(f"growth_{name}", what, "events/s", pair, f"ours at {EVENTS:,} events"))
    return figures
