"""The events of the pipeline's figures: five typed columns, made from a seed in Arrow, one a millisecond of event time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headwater import Log

SCHEMA = "user_id BIGINT, page STRING, kind STRING, amount DOUBLE, at TIMESTAMP"
KEY, TIME = "user_id", "at"
KINDS = ("view", "click", "cart", "order")
USERS = 100_000
PAGES = 1_000
PARTITIONS = 4
EVENTS_PER_APPEND = 250_000
_START_US = 1_767_225_600_000_000  # 2026-01-01


def make_events(count: int, *, first: int = 0) -> pa.Table:
    """`count` events, the first of them `first` milliseconds after the beginning of the year."""
    source = np.random.default_rng(first)
    pages = pa.array([f"/shop/page-{number:04}" for number in range(PAGES)])
    times = (np.arange(first, first + count) * 1_000 + _START_US).astype("datetime64[us]")
    return pa.table(
        {
            "user_id": source.integers(0, USERS, count),
            "page": pages.take(pa.array(source.integers(0, PAGES, count))),
            "kind": pa.array(KINDS).take(pa.array(source.integers(0, len(KINDS), count))),
            "amount": source.integers(0, 100_000, count) / 100,
            "at": pa.array(times).cast(pa.timestamp("us", "UTC")),
        }
    )


def fill(log: Log, topic: str, events: int, *, at_once: int) -> None:
    """Make the topic and append events, `at_once` made at a time, so that any number fits into memory."""
    create(log, topic)
    for first in range(0, events, at_once):
        table = make_events(min(at_once, events - first), first=first)
        for start in range(0, table.num_rows, EVENTS_PER_APPEND):
            log.append(topic, table.slice(start, EVENTS_PER_APPEND))


def create(log: Log, topic: str) -> None:
    """Make an empty topic for such events."""
    log.create_topic(topic, SCHEMA, key=KEY, time=TIME, partitions=PARTITIONS)
