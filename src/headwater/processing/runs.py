"""Runs: sorted Arrow tables that together are one table of an operator's state.

A table grows by runs. What a batch changes is one small run; older and larger ones stay as they are, mapped from their files, so a batch
costs by what it changes and not by what is there. Runs of about the same size are merged, so that there are few of them: of sizes
that differ by `GROWTH` times at least, about log(rows) many.

Three kinds of tables, by what a row means:
- **keyed**: rows are in the order of their key (two 64-bit hashes, `_h1` and `_h2`); what the newest run holds of a key replaces all
  that older runs hold of it; a row with `_gone` stands for "nothing".
- **gathered**: rows are in the order of their key, and all runs together hold what there is of it.
- **timed**: rows are in the order of `_at`, a time in µs; what lies before the table's `floor` was taken, and counts no more.

Rows of the same order keep the order in which they were added. Nothing here is changed in place: each operation gives other runs.
Thread-safety: none is needed; a table belongs to one task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

Kind = Literal["keyed", "gathered", "timed"]
Array = Any
"""A NumPy array."""

H1, H2, AT, GONE = "_h1", "_h2", "_at", "_gone"
GROWTH = 4
MIN_TIME = -(2**63)


class Keys(NamedTuple):
    """Keys as their hashes, in order and each once; `row` says for each row it was made of which one it has."""

    h1: Array
    h2: Array
    row: Array

    @classmethod
    def of(cls, rows: pa.Table) -> Keys:
        """The keys of rows in any order."""
        h1, h2 = column(rows, H1), column(rows, H2)
        if not len(h1):
            return cls(h1, h2, np.zeros(0, np.int64))
        order = np.lexsort((h2, h1))
        h1, h2 = h1[order], h2[order]
        is_first = np.r_[True, (h1[1:] != h1[:-1]) | (h2[1:] != h2[:-1])]
        row = np.empty(len(order), np.int64)
        row[order] = np.cumsum(is_first) - 1
        return cls(h1[is_first], h2[is_first], row)

    def only(self, mask: Array) -> Keys:
        """Some of them."""
        return Keys(self.h1[mask], self.h2[mask], np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.h1)


def column(rows: pa.Table, name: str) -> Array:
    """A column of integers, times or booleans as an array, without a copy where there is one chunk."""
    found = rows.column(name)
    if pa.types.is_timestamp(found.type):
        found = found.cast(pa.int64())
    if found.num_chunks == 1:
        return found.chunk(0).to_numpy(zero_copy_only=False)
    return found.to_numpy()


def in_order(rows: pa.Table, kind: Kind) -> pa.Table:
    """Rows as a run has them."""
    if kind == "timed":
        times = column(rows, AT)
        if len(times) < 2 or bool((times[1:] >= times[:-1]).all()):
            return rows
        return rows.take(pa.array(np.argsort(times, kind="stable")))
    h1, h2 = column(rows, H1), column(rows, H2)
    if len(h1) < 2 or bool(((h1[1:] > h1[:-1]) | ((h1[1:] == h1[:-1]) & (h2[1:] >= h2[:-1]))).all()):
        return rows
    return rows.take(pa.array(np.lexsort((h2, h1))))


def spans(run: pa.Table, keys: Keys) -> tuple[Array, Array]:
    """For each key the first row of a run that has it, and the row after the last."""
    h1 = column(run, H1)
    start: Array = np.searchsorted(h1, keys.h1, "left")
    end: Array = np.searchsorted(h1, keys.h1, "right")
    several = np.flatnonzero(end - start > 1)
    single = np.flatnonzero(end - start == 1)
    h2 = column(run, H2)
    end[single[h2[start[single]] != keys.h2[single]]] = 0
    for number in several.tolist() if _is_mixed(h2, start[several], end[several]) else ():
        part = h2[start[number] : end[number]]
        low, high = np.searchsorted(part, keys.h2[number], "left"), np.searchsorted(part, keys.h2[number], "right")
        start[number], end[number] = start[number] + low, start[number] + high
    several = several[end[several] > start[several]]
    end[several[h2[start[several]] != keys.h2[several]]] = 0
    return start, np.maximum(start, end)


def _is_mixed(h2: Array, start: Array, end: Array) -> bool:
    """Whether two keys share their first hash: once in ages, and then right all the same."""
    return bool((h2[start] != h2[end - 1]).any())


def positions(start: Array, end: Array) -> tuple[Array, Array]:
    """All rows of spans, and for each the number of its span."""
    counts = end - start
    number = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return np.arange(len(number)) - np.repeat(before, counts) + np.repeat(start, counts), number


Found = tuple[pa.Table, Array]
"""Rows, and for each the number of its key among those that were asked for."""


def find_keyed(runs: Sequence[pa.Table], keys: Keys) -> Found | None:
    """What the newest run that knows a key holds of it; runs from old to new."""
    missing, numbers, parts = keys, np.arange(len(keys)), []
    for run in reversed(runs):
        if not len(missing):
            break
        start, end = spans(run, missing)
        place, number = positions(start, end)
        found = run.take(pa.array(place))
        is_there = ~column(found, GONE)
        parts.append((found.filter(pa.array(is_there)), numbers[number[is_there]]))
        missing, numbers = missing.only(end == start), numbers[end == start]
    return _together(parts)


def find_gathered(runs: Sequence[pa.Table], keys: Keys) -> Found | None:
    """What all runs hold of keys, older before newer."""
    parts = []
    for run in runs:
        place, number = positions(*spans(run, keys))
        parts.append((run.take(pa.array(place)), number))
    return _together(parts)


def _together(parts: Sequence[Found]) -> Found | None:
    if not parts:
        return None
    return pa.concat_tables(rows for rows, _ in parts), np.concatenate([numbers for _, numbers in parts])


def between(runs: Sequence[pa.Table], after: int, until: int) -> pa.Table | None:
    """The rows of a timed table with `after` < time <= `until`."""
    parts = []
    for run in runs:
        times = column(run, AT)
        start, end = np.searchsorted(times, (after, until), "right").tolist()
        parts.append(run.slice(start, max(0, end - start)))
    return in_order(pa.concat_tables(parts), "timed") if parts else None


def above(runs: Sequence[pa.Table], floor: int) -> list[pa.Table]:
    """Timed runs without what lies at or before a time; those that are empty then are left out."""
    kept = [run.slice(int(np.searchsorted(column(run, AT), floor, "right"))) for run in runs]
    return [run for run in kept if run.num_rows]


def merge(runs: Sequence[pa.Table], kind: Kind, *, is_oldest: bool) -> pa.Table:
    """Neighbouring runs as one. With `is_oldest` no older run is left that a missing key could be in."""
    rows = pa.concat_tables(runs)
    if kind != "keyed":
        return in_order(rows, kind)
    newest = Keys.of(rows)
    run = np.repeat(np.arange(len(runs)), [run.num_rows for run in runs])
    last = np.full(len(newest), -1)
    np.maximum.at(last, newest.row, run)
    keeps = run == last[newest.row]
    if is_oldest:
        keeps &= ~column(rows, GONE)
    return in_order(rows.filter(pa.array(keeps)), kind)


def tidied(sizes: Sequence[int]) -> int:
    """How many of the newest runs should be merged into one; 0 for none. Sizes from old to new."""
    count, total = 1, sizes[-1] if sizes else 0
    for size in reversed(sizes[:-1]):
        if size >= GROWTH * total:
            break
        count, total = count + 1, total + size
    return count if count > 1 else 0
