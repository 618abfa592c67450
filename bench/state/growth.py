"""Growth: what a small batch costs when ever more keys are remembered that it does not change. No Spark, the state's files alone."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.harness import Figure, Options, Target, measure, scratch
from bench.processes import run_together
from bench.state.rig import PARTITIONS
from headwater.processing.state.sorted_runs import H1, H2, Keys, column
from headwater.processing.state.state import StateStore, TableSpec, partition_of

KEYS = (10_000, 100_000, 1_000_000, 10_000_000)
KEYS_QUICK = (10_000, 100_000)
CHANGED = 1_000
BATCHES, BATCHES_QUICK = 100, 20
KEYS_AT_ONCE = 1_000_000
_SPECS = {"counts": TableSpec("keyed", [pa.field("key", pa.int64()), pa.field("n", pa.int64())])}


def growth(options: Options) -> list[Figure]:
    """A batch at every number of keys beside one at the smallest; and the memory that it takes at the largest."""
    if not options.wants("ours"):
        return []
    options = replace(options, side="both")
    sizes, batches = (KEYS_QUICK, BATCHES_QUICK) if options.quick else (KEYS, BATCHES)
    figures = []
    with scratch() as folder:
        states = {keys: Kept(folder / str(keys), keys) for keys in sizes}
        for keys in sizes[1:]:
            pair = measure(options, _run(states[keys], batches), _run(states[sizes[0]], batches), better="lower")
            what = f"a batch that changes {CHANGED:,} of {keys:,} keys, all {PARTITIONS} partitions one after the other"
            figures.append(
                Figure(f"batch_at_{keys}", what, "ms", pair, f"ours at {sizes[0]:,} keys", Target("<=", 2.0))
            )
        memory = measure(
            replace(options, side="ours"), lambda: _memory_mb(folder / str(sizes[-1]), sizes[-1]), better="lower"
        )
        what = (
            f"the most memory of a fresh process that runs 20 such batches at {sizes[-1]:,} keys, mapped files left out"
        )
        figures.append(Figure("batch_memory", what, "MB", memory))
    return figures


class Kept:
    """A state of so many keys in a folder, that goes on batch by batch."""

    def __init__(self, folder: Path, keys: int, *, first: int = 0) -> None:
        self._url, self._keys = str(folder), keys
        self._epochs = itertools.count(first)
        self._random = np.random.default_rng(first)
        for start in range(0, 0 if first else keys, KEYS_AT_ONCE):
            self._batch(np.arange(start, min(keys, start + KEYS_AT_ONCE)))

    def batches(self, count: int) -> float:
        """Runs batches; milliseconds for one, what merging takes now and then among them."""
        wanted = [self._random.integers(0, self._keys, CHANGED) for _ in range(count)]
        start = time.perf_counter()
        for keys in wanted:
            self._batch(np.unique(keys))
        return (time.perf_counter() - start) / count * 1000

    def _batch(self, keys: np.ndarray) -> None:
        epoch, h1, h2 = next(self._epochs), _mixed(keys), _mixed(keys + 1)
        for partition in range(PARTITIONS):
            store = StateStore(
                self._url,
                uid="bench",
                query="q",
                fingerprint="f",
                partition=partition,
                partitions=PARTITIONS,
                specs=_SPECS,
            )
            state, mine = store.load(epoch - 1), partition_of(h1, PARTITIONS) == partition
            rows = pa.table({H1: h1[mine], H2: h2[mine], "key": keys[mine], "n": np.ones(int(mine.sum()), np.int64)})
            asked = Keys.of(rows)
            found, number = state["counts"].find(asked)
            n = np.ones(len(asked), np.int64)
            n[number] += column(found, "n")
            state["counts"].put(rows.set_column(3, "n", pa.array(n[asked.row])))
            store.save(state, epoch)


def _run(state: Kept, batches: int) -> Callable[[], float]:
    return lambda: state.batches(batches)


def _memory_mb(folder: Path, keys: int) -> float:
    [memory] = run_together((_most_memory, (str(folder), keys)))
    return float(memory)


def _most_memory(ready: Callable[[], None], folder: str, keys: int) -> float:
    """The anonymous memory after each batch: pages of mapped files are the kernel's to take back."""
    epochs = [int(path.stem) for path in Path(folder).rglob("*.state")]
    state, most = Kept(Path(folder), keys, first=max(epochs) + 1), 0.0
    for _ in range(20):
        state.batches(1)
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        most = max(most, int(found[1]) / 1000)
    return most


def _mixed(keys: np.ndarray) -> np.ndarray:
    """Hashes of numbers, as good as random ones."""
    x = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(29)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    return (x ^ (x >> np.uint64(32))).view(np.int64)
