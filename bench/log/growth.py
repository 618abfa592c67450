"""Growth: what a topic of 100 million events costs beside one of a million, and what many segments cost to open."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from bench.harness import Figure, Options, Target, measure, scratch
from bench.log.headwater_side import PARTITIONS, TOPIC, open_log
from bench.log.payload import EVENT_BYTES, make_payload
from bench.processes import peak_memory_mb, run_together
from headwater import Log

SMALL = 1_000_000
LARGE = 100_000_000
LARGE_QUICK = 4_000_000
SCANS_OF_SMALL = 20  # one scan of a million events is too short to time
EVENTS_PER_APPEND = 250_000
DISK_FACTOR = 1.6  # of the events' own bytes: frames, indexes, what is appended while measuring, and some room
SEGMENTS = 1_000
SEGMENT_BYTES = 64 * 1024
MEMORY_MB_MAX = 300.0


class NotEnoughDisk(RuntimeError):
    """The temporary folder's disk cannot hold the topic."""


def growth(options: Options) -> list[Figure]:
    """The same million events appended to, and everything read from, a large topic and a small one."""
    if not options.wants("ours"):
        return []
    options = replace(options, side="both")  # both sides are ours
    large = LARGE_QUICK if options.quick else LARGE
    table = make_payload(SMALL).table
    with scratch() as folder:
        _check_disk(folder, large)
        _fill(folder / "small", table, SMALL)
        _fill(folder / "large", table, large)
        with open_log(folder / "small") as small_log, open_log(folder / "large") as large_log:
            reads = measure(options, lambda: _scan(large_log), lambda: _scan(small_log, times=SCANS_OF_SMALL))
        memory = measure(options, lambda: _alone(_scan_memory_mb, folder / "large"), better="lower")
        size_gb = sum(file.stat().st_size for file in (folder / "large").rglob("*") if file.is_file()) / 1e9
        with open_log(folder / "large") as large_log:
            appends = measure(options, lambda: _append(large_log, table), lambda: _append_to_small(folder, table))
    target = Target(">=", 0.8)
    peer = f"ours at {SMALL:,} events"
    appended = f"{SMALL:,} events more on a topic of {large:,}"
    scanned = f"peak memory of a fresh process that scans {size_gb:.1f} GB"
    return [
        Figure("growth_append", appended, "events/s", appends, peer, target),
        Figure("growth_read", f"a scan of all {large:,} events", "events/s", reads, peer, target),
        Figure("scan_memory", scanned, "MB", memory, target=Target("<=", MEMORY_MB_MAX, of="ours")),
    ]


def segments(options: Options) -> list[Figure]:
    """Opening a partition of many segments."""
    if not options.wants("ours"):
        return []
    with scratch() as folder:
        _fill_segments(folder, make_payload(SEGMENT_BYTES // EVENT_BYTES + 1).table)
        seconds = measure(options, lambda: _alone(_open_s, folder), better="lower")
    what = f"open a partition of {SEGMENTS:,} segments, learn its end and hold its first event"
    return [Figure("open_segments", what, "s", seconds, target=Target("<=", 0.2, of="ours"))]


def _check_disk(folder: Path, events: int) -> None:
    needed, free = events * EVENT_BYTES * DISK_FACTOR, shutil.disk_usage(folder).free
    if free < needed:
        what = f"{events:,} events need {needed / 1e9:.0f} GB and {free / 1e9:.0f} GB are free"
        raise NotEnoughDisk(f"{what}; set TMPDIR to a folder on a larger disk")


def _fill(folder: Path, table: pa.Table, events: int) -> None:
    with open_log(folder) as log:
        log.create_topic(TOPIC, partitions=PARTITIONS)
        for _ in range(events // table.num_rows):
            _append(log, table)


def _append(log: Log, table: pa.Table) -> float:
    start = time.perf_counter()
    for first in range(0, table.num_rows, EVENTS_PER_APPEND):
        log.append(TOPIC, table.slice(first, EVENTS_PER_APPEND))
    return float(table.num_rows) / (time.perf_counter() - start)


def _append_to_small(folder: Path, table: pa.Table) -> float:
    """To a topic that is made anew, so that it stays small however often this runs."""
    again = folder / "again"
    _fill(again, table, SMALL)
    with open_log(again) as log:
        rate = _append(log, table)
    shutil.rmtree(again)
    return rate


def _scan(log: Log, *, times: int = 1) -> float:
    expected: int = sum(map(len, log.offsets(TOPIC).values()))
    start = time.perf_counter()
    for _ in range(times):
        found = sum(batch.num_rows for batch in log.scan(TOPIC))
        assert found == expected, f"{found:,} of {expected:,} events"
    return expected * times / (time.perf_counter() - start)


def _fill_segments(folder: Path, table: pa.Table) -> None:
    with open_log(folder) as log:
        log.create_topic(TOPIC, partitions=1, segment_bytes=SEGMENT_BYTES)
        for _ in range(SEGMENTS):
            log.append(TOPIC, table)  # more than a segment holds, so that each append begins a new one
        assert log.counters()["rolls"] >= SEGMENTS - 1


def _alone(function: Callable[..., float], folder: Path) -> float:
    """What `function` returns in a fresh process."""
    return float(run_together((function, (str(folder),)))[0])


def _scan_memory_mb(ready: Callable[[], None], folder: str) -> float:
    ready()
    with open_log(Path(folder)) as log:
        _scan(log)
    return peak_memory_mb()


def _open_s(ready: Callable[[], None], folder: str) -> float:
    ready()
    start = time.perf_counter()
    with open_log(Path(folder)) as log:
        log.offsets(TOPIC)
        with log.reader(TOPIC, start="earliest") as reader:
            assert reader.poll(events_max=1, timeout_s=1.0)
        return time.perf_counter() - start
