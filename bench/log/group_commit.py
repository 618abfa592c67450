"""Together: many processes, each sending single events and waiting until each is durable, share their fdatasyncs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench.harness import Figure, Options, Target, measure_each, scratch
from bench.log.headwater_side import TOPIC, open_log
from bench.log.payload import Payload, make_payload
from bench.processes import run_together
from headwater import Log

PROCESSES = 8
EVENTS_PER_PROCESS = 1_000  # sent again and again
SECONDS = 3.0
SECONDS_QUICK = 1.0


def together(options: Options) -> list[Figure]:
    """Eight processes beside one, on one partition (the most they can get in each other's way) and on four."""
    if not options.wants("ours"):
        return []
    options = replace(options, side="both")  # both sides are ours
    return _figures(options, partitions=1) + _figures(options, partitions=4)


def measure_together(payload: Payload, *, processes: int, partitions: int, seconds: float) -> tuple[float, float]:
    """Events per second of all processes together, and events per fdatasync."""
    with scratch() as folder:
        with open_log(folder) as log:
            log.create_topic(TOPIC, partitions=partitions)
        workers = []
        for first in range(0, processes * EVENTS_PER_PROCESS, EVENTS_PER_PROCESS):
            end = first + EVENTS_PER_PROCESS
            workers.append(
                (_send_and_flush, (str(folder), payload.keys[first:end], payload.values[first:end], seconds))
            )
        counts = run_together(*workers)
    events, fdatasyncs = (sum(column) for column in zip(*counts, strict=True))
    return events / seconds, events / fdatasyncs


def _figures(options: Options, *, partitions: int) -> list[Figure]:
    payload = make_payload(PROCESSES * EVENTS_PER_PROCESS)
    seconds = SECONDS_QUICK if options.quick else SECONDS

    def run(processes: int) -> tuple[float, float]:
        return measure_together(payload, processes=processes, partitions=partitions, seconds=seconds)

    rate, shared = measure_each(options, lambda: run(PROCESSES), lambda: run(1))
    where = "1 partition" if partitions == 1 else f"{partitions} partitions"
    what = f"{PROCESSES} processes, each send + flush of single events, {where}"
    name = f"together_{PROCESSES}_on_{partitions}"
    several = Target(">=", 2.0, of="ours") if partitions == 1 else None
    return [
        Figure(name, what, "events/s", rate, "one process", Target(">=", 1.8)),
        Figure(f"{name}_per_fdatasync", what, "events/fdatasync", shared, "one process", several),
    ]


def _send_and_flush(
    ready: Callable[[], None], folder: str, keys: list[bytes], values: list[bytes], seconds: float
) -> tuple[int, int]:
    """Events acknowledged within `seconds`, and the fdatasyncs this process did for them."""
    with open_log(Path(folder)) as log, log.producer(linger_ms=0) as producer:
        producer.send(TOPIC, values[0], key=keys[0])
        producer.flush()
        ready()
        before, sent, deadline = _fdatasyncs(log), 0, time.monotonic() + seconds
        while time.monotonic() < deadline:
            place = sent % EVENTS_PER_PROCESS
            producer.send(TOPIC, values[place], key=keys[place])
            producer.flush()
            sent += 1
        return sent, _fdatasyncs(log) - before


def _fdatasyncs(log: Log) -> int:
    return log.counters()["fdatasyncs"]
