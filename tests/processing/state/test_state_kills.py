"""The state of an operator through `kill -9`: at any moment, with another number of partitions now and then, equal to plain Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from headwater.processing.state import sorted_runs
from headwater.processing.state.sorted_runs import AT, H1, H2, Keys, column
from headwater.processing.state.state import StateStore, TableSpec, partition_of

ROOT = Path(__file__).parents[3]
EPOCHS, KEYS, KILLS = 60, 300, 8
FIELD = [pa.field("n", pa.int64())]
SPECS = {"counts": TableSpec("keyed", FIELD), "due": TableSpec("timed", FIELD)}


def batch_of(seed: int, epoch: int) -> list[int]:
    """The keys that a batch counts."""
    random = Random(seed * 1000 + epoch)
    return [random.randrange(KEYS) for _ in range(random.randint(1, 80))]


def partitions_of(seed: int, epoch: int) -> int:
    return Random(seed * 1000 + epoch // 7).randint(1, 4)


def hash_of(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return keys * 7919 % 1009 - 500, keys


def run(folder: str, seed: int) -> None:
    """Counts batch after batch from the one behind the last that was done, and says of each that it is."""
    sorted_runs.PART_BYTES, sorted_runs.SMALL_ROWS = 1000, 50  # type: ignore[misc]
    done = Path(folder, "done")
    for epoch in range(int(done.read_text()) + 1 if done.exists() else 0, EPOCHS):
        h1, h2 = hash_of(np.array(batch_of(seed, epoch), np.int64))
        rows, partitions = pa.table({H1: h1, H2: h2}), partitions_of(seed, epoch)
        for partition in range(partitions):
            store = store_of(folder, partition, partitions)
            state = store.load(epoch - 1)
            mine = rows.filter(pa.array(partition_of(h1, partitions) == partition))
            keys = Keys.of(mine)
            counts = np.bincount(keys.row, minlength=len(keys))
            found, number = state["counts"].find(keys)
            counts[number] += column(found, "n")
            state["counts"].put(pa.table({H1: keys.h1, H2: keys.h2, "n": counts}))
            state["due"].put(pa.table({H1: keys.h1, H2: keys.h2, AT: keys.h2 + epoch, "n": keys.h2}))
            state["due"].take(epoch)
            store.save(state, epoch, watermark=epoch)
        draft = Path(folder, "done.new")
        draft.write_text(str(epoch))
        draft.replace(done)


def store_of(folder: str, partition: int, partitions: int) -> StateStore:
    return StateStore(
        f"{folder}/state", uid="op", query="q", fingerprint="f", partition=partition, partitions=partitions, specs=SPECS
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.bench) for seed in range(2, 6))])
def test_no_kill_leaves_another_state(tmp_path: Path, seed: int) -> None:
    random, last = Random(seed), -1
    script = f"from tests.processing.state import test_state_kills as t; t.run({str(tmp_path)!r}, {seed})"
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    for kill in range(KILLS):
        process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths})
        while kill < KILLS - 1 and process.poll() is None and epoch_in(tmp_path) < last + random.randint(1, 7):
            time.sleep(random.random() / 100)
        if kill < KILLS - 1:
            process.send_signal(signal.SIGKILL)
        assert process.wait() in (0, -signal.SIGKILL)
        last = epoch_in(tmp_path)
    assert last == EPOCHS - 1
    partitions = partitions_of(seed, EPOCHS - 1)
    states = [store_of(str(tmp_path), number, partitions).load(EPOCHS - 1) for number in range(partitions)]
    expected = Counter(key for epoch in range(EPOCHS) for key in batch_of(seed, epoch))
    found = {row[H2]: row["n"] for state in states for row in state["counts"].rows().to_pylist()}
    assert found == expected
    due = Counter((row[AT], row["n"]) for state in states for row in state["due"].rows().to_pylist())
    assert due == Counter(
        (key + epoch, key) for epoch in range(EPOCHS) for key in set(batch_of(seed, epoch)) if key + epoch > EPOCHS - 1
    )
    assert not list(tmp_path.rglob("*.new")), "what was begun is swept"


def epoch_in(folder: Path) -> int:
    done = folder / "done"
    return int(done.read_text()) if done.exists() else -1
