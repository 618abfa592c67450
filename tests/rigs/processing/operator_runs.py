"""Operators without a Spark: random events in random batches, each batch run once or several times, over any number of partitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c

from headwater.model.clock import NO_TIME
from headwater.processing.operators.operator import MAX_TIME, Operator, Time
from headwater.processing.state.sorted_runs import H1, H2
from headwater.processing.state.state import StateStore, partition_of

SEEDS_CHECK, SEEDS, SEEDS_BENCH = 4, 30, 300

UTC_US = pa.timestamp("us", tz="UTC")


def seeds(count: int = SEEDS) -> list[Any]:
    """So many seeds in every run of all tests, a few of them in `make check`, and ten times as many where there is time for them."""
    few = min(count, SEEDS_CHECK)
    slow, more = range(few, count), range(count, count + SEEDS_BENCH)
    return [
        *range(few),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in slow),
        *(pytest.param(seed, marks=pytest.mark.bench) for seed in more),
    ]


def hashed(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """The rows with hashes of their key; few bits, so that some keys share the first."""
    texts = [repr(tuple(row.values())).encode() for row in rows.select(list(key)).to_pylist()]
    h1 = pa.array([crc32c(text) % 97 - 40 for text in texts], pa.int64())
    h2 = pa.array([crc32c(text) for text in texts], pa.int64())
    return rows.append_column(H1, h1).append_column(H2, h2)


LATE_US = 60_000_000


def shuffled(
    random: Random, rows: list[dict[str, Any]], *, at: str, lateness_us: int, late: float = 0.0
) -> list[dict[str, Any]]:
    """Rows in an order in which none comes later than the lateness allows, but for a share of them."""
    return sorted(rows, key=lambda row: row[at] + delay(random, lateness_us, late))


def delay(random: Random, lateness_us: int, late: float) -> int:
    """How long a row is on its way; a share of them for longer than is waited."""
    return random.randint(0, lateness_us) + (random.randint(1, LATE_US) if random.random() < late else 0)


def in_time(
    rows: Sequence[dict[str, Any]], batches: Sequence[Sequence[pa.Table]], watermarks: Sequence[int], *, at: str
) -> list[dict[str, Any]]:
    """Of rows, in the order in which they were cut into batches, those that no watermark had passed before their batch."""
    found, start, before = [], 0, NO_TIME
    for (batch, *_), until in zip(batches, watermarks, strict=True):
        found += [row for row in rows[start : start + batch.num_rows] if row[at] > before]
        start, before = start + batch.num_rows, until
    return found


def run_batches(
    operator: Operator, random: Random, folder: Path, batches: Sequence[Sequence[pa.Table]], watermarks: Sequence[int],
    *, copied: Sequence[int] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """What all batches gave."""
    return [row for given in run_each(operator, random, folder, batches, watermarks, copied=copied) for row in given]


def run_each(
    operator: Operator, random: Random, folder: Path, batches: Sequence[Sequence[pa.Table]], watermarks: Sequence[int],
    *, copied: Sequence[int] = (),
) -> Iterator[list[dict[str, Any]]]:  # fmt: skip
    """What each batch gave; the last one is followed by one in which all time has passed. Inputs that are copied go to every partition."""
    partitions, before = random.randint(1, 2), NO_TIME
    nothing = [rows.slice(0, 0) for rows in batches[0]]
    for epoch, (inputs, until) in enumerate([*zip(batches, watermarks, strict=True), (nothing, MAX_TIME)]):
        if random.random() < 0.2:
            partitions = random.randint(1, 3)
        for _ in range(random.choice([1, 1, 1, 2])):
            result = []
            for partition in range(partitions):
                store = StateStore(
                    str(folder), uid="op", query="q", fingerprint="f", partition=partition, partitions=partitions,
                    specs=operator.tables,
                )  # fmt: skip
                state = store.load(epoch - 1)
                mine = [
                    rows
                    if number in copied
                    else rows.filter(pa.array(partition_of(rows.column(H1).to_numpy(), partitions) == partition))
                    for number, rows in enumerate(inputs)
                ]
                found = operator.process(state, mine, Time(before, until))
                result += found.select(operator.schema.names).cast(operator.schema).to_pylist()
                store.save(state, epoch)
        yield result
        before = until


def table_of(rows: list[dict[str, Any]], schema: pa.Schema, at: str, key: Sequence[str]) -> pa.Table:
    """Rows whose time is in µs, with the hashes of their key."""
    plain = pa.schema([field.with_type(pa.int64()) if field.name == at else field for field in schema])
    return hashed(pa.Table.from_pylist(rows, plain).cast(schema), key)


def cut(
    random: Random, rows: list[dict[str, Any]], schema: pa.Schema, key: Sequence[str], *, at: str, lateness_us: int
) -> Any:
    """Batches of rows in the order given, and the watermark after each."""
    batches, watermarks, start, reached = [], [], 0, NO_TIME
    while start < len(rows):
        end = min(len(rows), start + random.choice([1, 15, 60]))
        part = rows[start:end]
        reached = max(reached, *(row[at] for row in part))
        batches.append([table_of(part, schema, at, key)])
        watermarks.append(reached - lateness_us - 1)
        start = end
    return batches, watermarks
