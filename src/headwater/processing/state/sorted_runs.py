"""Runs: rows in order that together are one table of an operator's state.

A table grows by runs. What a batch changes is one small run; older and larger ones stay as they are in their files, so a batch costs by
what it changes and not by what is there. Runs of about the same size are merged, so that there are few of them: of sizes that differ
by `GROWTH` times at least, about log(rows) many.

A run consists of parts of about `PART_BYTES`, each an Arrow table that is opened when it is needed: looking for keys opens the parts
that may have them, and merging goes on part by part, so neither needs the whole run in memory. All rows with the same `_h1` (or `_at`)
are in one part, however many there are.

Three kinds of tables, by what a row means:
- **keyed**: rows are in the order of their key (two 64-bit hashes, `_h1` and `_h2`); what the newest run holds of a key replaces all
  that older runs hold of it; a row with `_gone` stands for "nothing".
- **gathered**: rows are in the order of their key, and all runs together hold what there is of it.
- **timed**: rows are in the order of `_at`, a time in µs; what lies before the table's `floor` was taken, and counts no more.

Rows of the same order keep the order in which they were added. Nothing here is changed in place: each operation gives other runs.
Thread-safety: none is needed; a table belongs to one task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from headwater.model.errors import KeyTooLarge

Kind = Literal["keyed", "gathered", "timed"]
Array = Any
"""A NumPy array."""

H1, H2, AT, GONE = "_h1", "_h2", "_at", "_gone"
NUMBER = "_number"
"""Which key a row has, by its place in the order of all keys of a batch; a column of rows whose keys were numbered before."""

GROWTH = 4
MIN_TIME = -(2**63)
PART_BYTES = 8 << 20
SMALL_ROWS = 65_536
"""So many rows, or fewer, are merged at once."""

SORTED_ROWS = 65_536
"""So many keys, or fewer, are sorted as they are: hashing them first takes longer, and more memory."""

FOUND_BYTES_MAX = 2 << 30
"""So much of a table one batch of one state partition may need at once."""


class RunPart(NamedTuple):
    """Neighbouring rows of a run: the first and the last value of what they are ordered by, how many, and how to get at them."""

    first: int
    last: int
    rows: int
    table: Callable[[], pa.Table]


class SortedRun:
    """Rows in order, as parts that are opened one by one."""

    def __init__(self, parts: Iterable[RunPart]) -> None:
        self.parts = tuple(part for part in parts if part.rows)
        self.num_rows = sum(part.rows for part in self.parts)
        self._firsts = np.array([part.first for part in self.parts], np.int64)
        self._lasts = np.array([part.last for part in self.parts], np.int64)

    @classmethod
    def of(cls, rows: pa.Table, kind: Kind) -> SortedRun:
        """Rows in memory, in any order."""
        if not rows.num_rows:
            return cls(())
        rows = in_order(rows, kind)
        order = column(rows, order_of(kind))
        return cls([RunPart(int(order[0]), int(order[-1]), rows.num_rows, lambda: rows)])

    def with_keys(self, h1: Array) -> Iterator[tuple[RunPart, int, int]]:
        """The parts that may have some of these hashes, which are in order, and which of them: from, to."""
        low, high = np.searchsorted(h1, self._firsts, "left"), np.searchsorted(h1, self._lasts, "right")
        for number in np.flatnonzero(low < high).tolist():
            yield self.parts[number], int(low[number]), int(high[number])

    def slices(self, kind: Kind, low: int, high: int | None) -> list[pa.Table]:
        """The rows whose order is `low` at least, and below `high`."""
        found = []
        for part in self.parts:
            if part.last < low or (high is not None and part.first >= high):
                continue
            rows = part.table()
            order = column(rows, order_of(kind))
            start = int(np.searchsorted(order, low, "left"))
            end = len(order) if high is None else int(np.searchsorted(order, high, "left"))
            found.append(rows.slice(start, end - start))
        return found

    def above(self, floor: int) -> SortedRun:
        """A timed run without what lies at or before a time."""
        return SortedRun(_above(part, floor) for part in self.parts if part.last > floor)


def order_of(kind: Kind) -> str:
    """The column that parts are cut by."""
    return AT if kind == "timed" else H1


def _above(part: RunPart, floor: int) -> RunPart:
    if part.first > floor:
        return part
    times = column(part.table(), AT)
    start = int(np.searchsorted(times, floor, "right"))
    return RunPart(int(times[start]), part.last, part.rows - start, lambda: part.table().slice(start))


class Keys(NamedTuple):
    """Keys as their hashes, in order and each once; `row` says for each row it was made of which one it has, `one` is a row of each."""

    h1: Array
    h2: Array
    row: Array
    one: Array

    @classmethod
    def of(cls, rows: pa.Table) -> Keys:
        """The keys of rows in any order."""
        h1, h2 = column(rows, H1), column(rows, H2)
        if not len(h1):
            return cls(h1, h2, np.zeros(0, np.int64), np.zeros(0, np.int64))
        if NUMBER in rows.column_names:
            return cls._numbered(h1, h2, column(rows, NUMBER))
        keys = cls._numbered(h1, h2, _ranks(h1))
        if bool((keys.h2[keys.row] == h2).all()):
            return keys
        order = np.lexsort((h2, h1))  # two keys share their first hash: once in ages
        is_same = (h1[order][1:] == h1[order][:-1]) & (h2[order][1:] == h2[order][:-1])
        row = np.empty(len(order), np.int64)
        row[order] = np.cumsum(np.r_[True, ~is_same]) - 1
        return cls._numbered(h1, h2, row)

    @classmethod
    def _numbered(cls, h1: Array, h2: Array, number: Array) -> Keys:
        """Rows that have the numbers of their keys already; some of the keys may have no row any more."""
        one = np.full(int(number.max()) + 1, -1)
        one[number] = np.arange(len(number))
        is_there = one >= 0
        row = number if bool(is_there.all()) else (np.cumsum(is_there) - 1)[number]
        one = one[is_there]
        return cls(h1[one], h2[one], row, one)

    def only(self, mask: Array) -> Keys:
        """Some of them."""
        return Keys(self.h1[mask], self.h2[mask], self.row[:0], self.one[mask])

    def part(self, start: int, end: int) -> Keys:
        """Neighbouring ones."""
        return Keys(self.h1[start:end], self.h2[start:end], self.row[:0], self.one[start:end])

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
    return rows.take(pa.array(order_by(Keys.of(rows).row)))


def order_by(numbers: Array) -> Array:
    """The order of numbers from 0 on; equal ones stay as they are. NumPy counts 16 bits, which is many times as quick as comparing."""
    order = np.argsort(numbers.astype(np.uint16), kind="stable")
    if len(numbers) and int(numbers.max()) >= 1 << 16:
        order = order[order_by(numbers[order] >> 16)]
    return order


def _ranks(values: Array) -> Array:
    """For each value how many smaller ones there are, each counted once. Of many values only those that differ are sorted."""
    if len(values) <= SORTED_ROWS:
        return np.unique(values, return_inverse=True)[1]
    encoded = pa.array(values).dictionary_encode()
    order = np.argsort(encoded.dictionary.to_numpy())
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[encoded.indices.to_numpy()]


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


def find(runs: Sequence[SortedRun], kind: Kind, keys: Keys) -> Found | None:
    """What a table holds of keys. Runs are from old to new; of a keyed table the newest that knows a key counts."""
    missing, numbers, parts, needed = keys, np.arange(len(keys)), list[Found](), 0
    for run in reversed(runs):
        is_missing = np.ones(len(missing), bool)
        for part, low, high in run.with_keys(missing.h1):
            rows = part.table()
            start, end = spans(rows, missing.part(low, high))
            count = int((end - start).sum())
            if not count:
                continue
            needed += _size(rows, count)
            if needed > FOUND_BYTES_MAX:
                raise _too_large(needed, end - start)
            place, number = positions(start, end)
            parts.append((rows.take(pa.array(place)), numbers[low + number]))
            is_missing[low:high] = end == start
        if kind == "keyed":
            missing, numbers = missing.only(is_missing), numbers[is_missing]
    if not parts:
        return None
    rows, found = pa.concat_tables(rows for rows, _ in reversed(parts)), np.concatenate([n for _, n in reversed(parts)])
    if kind != "keyed":
        return rows, found
    is_there = ~column(rows, GONE)
    return rows.filter(pa.array(is_there)), found[is_there]


def check_fits(inputs: Sequence[pa.Table]) -> None:
    """`KeyTooLarge` where the rows that a batch brings to a state partition are more than a task can work on."""
    brought = sum(rows.nbytes for rows in inputs)
    if brought > FOUND_BYTES_MAX:
        raise KeyTooLarge(
            f"A batch brings {brought / 1e9:.1f} GB of rows to one state partition of an operator.",
            advice=f"One takes {FOUND_BYTES_MAX / 1e9:.1f} GB at once. Limit the batches with events_max=, or use more state_partitions; "
            "where it is a single key, take a finer one.",
        )


def _size(rows: pa.Table, count: int) -> int:
    return count * rows.nbytes // max(1, rows.num_rows)


def _too_large(needed: int, counts: Array) -> KeyTooLarge:
    return KeyTooLarge(
        f"A batch needs {needed / 1e9:.1f} GB or more of an operator's state at once; one key alone has {int(counts.max()):,} rows.",
        advice=f"A state partition takes {FOUND_BYTES_MAX / 1e9:.1f} GB of it. Use a finer key or a shorter time; "
        "`headwater state show` shows what is kept.",
    )


def between(runs: Sequence[SortedRun], after: int, until: int) -> pa.Table | None:
    """The rows of a timed table with `after` < time <= `until`."""
    if after >= until:
        return None
    parts = [rows for run in runs for rows in run.above(after).slices("timed", MIN_TIME, _behind(until))]
    return in_order(pa.concat_tables(parts), "timed") if parts else None


def _behind(time: int) -> int | None:
    return time + 1 if time < 2**63 - 1 else None


def merged(
    runs: Sequence[SortedRun], kind: Kind, *, is_oldest: bool, keeps: Callable[[pa.Table], Any] | None = None
) -> Iterator[pa.Table]:
    """Neighbouring runs as one, piece by piece. With `is_oldest` no older run is left that a missing key could be in."""
    fences = sorted({part.first for run in runs for part in run.parts})
    if sum(run.num_rows for run in runs) <= SMALL_ROWS:
        fences = fences[:1]
    for low, high in pairwise([*fences, None]):
        assert low is not None
        rows = _merge([run.slices(kind, low, high) for run in runs], kind, is_oldest=is_oldest)
        if keeps is not None:
            rows = rows.filter(keeps(rows))
        if rows.num_rows:
            yield rows


def _merge(runs: Sequence[Sequence[pa.Table]], kind: Kind, *, is_oldest: bool) -> pa.Table:
    rows = pa.concat_tables(piece for run in runs for piece in run)
    if kind != "keyed":
        return in_order(rows, kind)
    order, is_first = _in_key_order(column(rows, H1), column(rows, H2))
    run = np.repeat(np.arange(len(runs)), [sum(piece.num_rows for piece in run) for run in runs])[order]
    newest = run[np.append(np.flatnonzero(is_first)[1:], len(run)) - 1] if len(run) else run
    keeps = run == newest[np.cumsum(is_first) - 1]
    if is_oldest:
        keeps &= ~column(rows, GONE)[order]
    return rows.take(pa.array(order[keeps]))


def _in_key_order(h1: Array, h2: Array) -> tuple[Array, Array]:
    """The order of keys, in which rows of the same key stay as they are; and which rows are the first of theirs."""
    order = np.argsort(h1, kind="stable")
    is_first, differs = _changes(h1[order]), _changes(h2[order])
    if bool((differs & ~is_first).any()):
        order = np.lexsort((h2, h1))  # two keys share their first hash: once in ages
        is_first, differs = _changes(h1[order]), _changes(h2[order])
    return order, is_first | differs


def _changes(values: Array) -> Array:
    """Which values are not the one before."""
    found = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=found[1:])
    return found


def in_parts(pieces: Iterable[pa.Table], kind: Kind) -> Iterator[pa.Table]:
    """Rows in order, in tables of about the size of a part; rows of the same order stay together."""
    waiting, size = list[pa.Table](), 0
    for piece in pieces:
        waiting.append(piece)
        size += piece.nbytes
        if size >= PART_BYTES:
            yield from _cut(pa.concat_tables(waiting).combine_chunks(), kind, size)
            waiting, size = [], 0
    if waiting:
        yield from _cut(pa.concat_tables(waiting).combine_chunks(), kind, size)


def _cut(rows: pa.Table, kind: Kind, size: int) -> Iterator[pa.Table]:
    if size < 2 * PART_BYTES:
        yield rows
        return
    order = column(rows, order_of(kind))
    wanted = np.linspace(0, len(order), size // PART_BYTES + 1, dtype=np.int64)[1:-1]
    starts = np.unique(np.searchsorted(order, order[wanted], "left"))
    for start, end in pairwise([0, *starts[starts > 0].tolist(), len(order)]):
        yield rows.slice(start, end - start)


def tidied(sizes: Sequence[int]) -> int:
    """How many of the newest runs should be merged into one; 0 for none. Sizes from old to new."""
    count, total = 1, sizes[-1] if sizes else 0
    for size in reversed(sizes[:-1]):
        if size >= GROWTH * total:
            break
        count, total = count + 1, total + size
    return count if count > 1 else 0
