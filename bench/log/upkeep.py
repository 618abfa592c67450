"""Keeping it small: how fast a topic is compacted, moved to its archive, and read back from there."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa

import headwater as hw
from bench.harness import Figure, Options, Pair, Target, measure, measure_each, scratch

EVENTS = 2_000_000
EVENTS_QUICK = 200_000
EVENTS_PER_APPEND = 100_000
KEYS = 200_000


def keeping(options: Options) -> list[Figure]:
    """Sealed segments of 2 M events with 200,000 keys; no peer does the same from Python."""
    if not options.wants("ours"):
        return []
    tables = _tables(EVENTS_QUICK if options.quick else EVENTS)
    compacted = measure(options, lambda: compact(tables))
    archived, read_back = measure_each(options, lambda: archive(tables))
    return [
        _rate("compact", "log.tidy of a topic with compact=True", compacted, Target(">=", 1e6, of="ours")),
        _rate("archive", "log.tidy of expired segments into Parquet", archived),
        _rate("archive_read", "log.scan through the archive", read_back),
    ]


def compact(tables: list[pa.Table]) -> float:
    """Events looked at per second until each key has its last one only."""
    with scratch() as place, hw.open_log(str(place)) as log:
        log.create_topic("t", "k STRING, n BIGINT", key="k", partitions=1, segment_bytes=8 << 20, compact=True)
        _fill(log, tables)
        start = time.perf_counter()
        log.tidy("t")
        elapsed_s = time.perf_counter() - start
        assert log.read("t").num_rows < KEYS * 2
    return sum(table.num_rows for table in tables) / elapsed_s


def archive(tables: list[pa.Table]) -> tuple[float, float]:
    """Events per second into the archive, and back out of it."""
    with scratch() as place, hw.open_log(str(place / "log")) as log:
        kept = {"retention_bytes": 1, "archive": f"file://{place}/archive"}
        log.create_topic("t", "k STRING, n BIGINT", partitions=1, segment_bytes=8 << 20, **kept)
        _fill(log, tables)
        start = time.perf_counter()
        log.tidy("t")
        written_s = time.perf_counter() - start
        start = time.perf_counter()
        events = sum(batch.num_rows for batch in log.scan("t"))
        read_s = time.perf_counter() - start
        assert events == sum(table.num_rows for table in tables)
    return events / written_s, events / read_s


def _fill(log: hw.Log, tables: list[pa.Table]) -> None:
    for table in tables:
        log.append("t", table)
    log.seal("t")


def _tables(events: int) -> list[pa.Table]:
    keys = np.random.default_rng(3).integers(0, KEYS, events)
    return [
        pa.table(
            {
                "k": pa.array([f"customer-{key}" for key in keys[start : start + EVENTS_PER_APPEND]]),
                "n": pa.array(range(start, start + EVENTS_PER_APPEND)),
            }
        )
        for start in range(0, events, EVENTS_PER_APPEND)
    ]


def _rate(name: str, what: str, pair: Pair, target: Target | None = None) -> Figure:
    return Figure(name, what, "events/s", pair, None, target)
