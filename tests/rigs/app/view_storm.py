"""A storm over a maintained view: processes that maintain it are killed, at a named step or anywhere, and started again.

The batches are made of their number alone, so the oracle, a loop over a dict, needs nothing of what is tested.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from headwater.log.log import open_log
from headwater.model.marker import Marker
from headwater.testing.crash.points import kill_at
from headwater.views.definition import define_view
from headwater.views.maintainer import ViewMaintainer
from headwater.views.store_url import open_view_store
from headwater.views.view import View
from tests.rigs.children import Child

BATCHES = 12
DEFINITION = define_view("storm", "k STRING, n BIGINT, at TIMESTAMP", key="k")
GIVEN = pa.schema([*DEFINITION.schema, pa.field("_deleted", pa.bool_())])


def batch_rows(seed: int, epoch: int) -> list[dict[str, Any]]:
    """The rows of a batch."""
    chance = random.Random(f"{seed}.{epoch}")
    keys = chance.sample([f"key {n}" for n in range(20)], chance.randrange(1, 12))
    return [{"k": key, "n": chance.randrange(4), "at": None, "_deleted": chance.random() < 0.25} for key in keys]


def oracle(seed: int, batches: int) -> dict[str, int]:
    """The rows after so many batches."""
    rows: dict[str, int] = {}
    for epoch in range(batches):
        for row in batch_rows(seed, epoch):
            rows.pop(row["k"], None)
            if not row["_deleted"]:
                rows[row["k"]] = row["n"]
    return rows


def maintain_all(folder: str, url: str, seed: int, die_at: str, die_on: int) -> None:
    """Maintains all batches from the last one that is known on; kills itself when it reaches a point for the n-th time."""
    kill_at(die_at, die_on)
    with open_log(folder) as log:
        store = open_view_store(url)
        maintainer = ViewMaintainer(log, store, DEFINITION)
        last = log.store.stage_state("views.storm").last
        # As Spark does: the last batch is tried again, since nobody knows whether it was finished.
        for epoch in range(0 if last is None else last.epoch, BATCHES):
            rows = pa.Table.from_pylist(batch_rows(seed, epoch), schema=GIVEN)
            maintainer.maintain(rows, Marker(query="q", epoch=epoch, ends=epoch))
        store.close()


def run(
    folder: Path, url: str, seed: int, *, die_at: str = "", die_on: int = 1, kill_after_s: float | None = None
) -> bool:
    """One process that maintains; whether it came to the end, or died by SIGKILL."""
    child = Child(lambda: maintain_all(str(folder), url, seed, die_at, die_on))
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        child.kill()
    return not child.was_killed()


def check(folder: Path, url: str, seed: int) -> None:
    """Store and topic equal the oracle; the feed has no gap and no duplicate, and old rows plus changes give new rows."""
    with open_log(folder) as log:
        store = open_view_store(url)
        view = View(store, "storm", log=log)
        now = {row["k"]: row["n"] for row in view.rows().to_pylist()}
        assert now == oracle(seed, BATCHES)
        rows: dict[str, int] = {}
        epochs: list[int] = []
        for event in log.read("storm.changes").to_pylist():
            old, new = event["old"], event["new"]
            assert rows.pop(event["key"], None) == (old and old["n"]), event
            assert old != new
            if new is not None:
                rows[event["key"]] = new["n"]
            epochs.append(event["epoch"])
        assert rows == now
        assert epochs == sorted(epochs)
        ends = {number: span.stop for number, span in log.offsets("storm.changes").items()}
        assert store.stored()[0].applied.positions == ends
        store.close()
