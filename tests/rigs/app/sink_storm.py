"""A storm over a sink: processes that write its batches are killed, at a named step or anywhere, and started again.

A batch is made of its number alone, so the oracle, a loop over a dict, needs nothing of what is tested. A process begins where the ledger
says, or one batch before that, as a checkpoint does whose own commit was lost. Processes come from a server that has imported everything
and opened nothing: what a client library starts in one is not in the next.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver as forkserver
import os
import random
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import duckdb  # noqa: F401 - imported once, for all processes
import pyarrow as pa
import pyarrow.dataset
import pytest

from headwater.app.outputs.sinks import TargetWriter
from headwater.log.log import open_log
from headwater.model.points import points_of
from headwater.processing.graph.graph import StageNode
from headwater.sinks import newest_rows as newest
from headwater.sinks import redis
from headwater.sinks.sink import open_sink, write_batch
from headwater.testing.crash.points import kill_at
from tests.rigs.app.sink_targets import SHAPE, Row, batch, folded, marker

ROOT = Path(__file__).parents[3]
BATCHES = 8
STAGE = "app.users.sink"
KEYLESS = 3
"""Every so many batches one has a row without a key."""


def points() -> list[str]:
    """The steps of sinks that have a name; those of files and of exports have tests of their own."""
    return points_of("sink:", "redis:", "search:", "opensearch:")


def changes(seed: int, epoch: int) -> list[tuple[str | None, Row | None]]:
    """The changes of a batch."""
    chance = random.Random(f"{seed}.{epoch}")
    made: list[tuple[str | None, Row | None]] = []
    for n in range(chance.randrange(1, 60)):
        row = {"name": f"{epoch}.{n}", "n": chance.randrange(9), "amount": None}
        made.append((f"key {chance.randrange(30)}", None if chance.random() < 0.25 else row))
    if epoch % KEYLESS == 0:
        made.append((None, {"name": f"lost {epoch}"}))
    return made


def first_of(seed: int, epoch: int) -> int:
    return sum(len(changes(seed, before)) for before in range(epoch))


def write_all(url: str, folder: str, seed: int, die_at: str, die_on: int) -> None:
    """Writes all batches from the last that is known on; kills itself when it reaches a step for the n-th time."""
    kill_at(die_at, die_on)
    redis.CHUNK_ROWS, newest.PIECE_ROWS = 7, 10
    node = StageNode(name="users.sink", kind="sink", inputs=("users",), function=None, to=url)
    with open_log(folder) as log:
        sink = open_sink(url, stage=STAGE)
        sink.open(SHAPE)
        last = sink.last
        first = 0 if last is None else last.epoch + random.Random(f"{seed}.{os.getpid()}").choice([0, 1])
        writer = TargetWriter(log, node, SHAPE, name=STAGE, checkpoint="", folder=Path(folder), of_view=False)
        for epoch in range(first, BATCHES):
            at = marker(epoch, first_of(seed, epoch + 1))
            pieces = newest.Pieces([batch(changes(seed, epoch), first=first_of(seed, epoch))], SHAPE.key)
            write_batch(sink, at, pieces, tell=partial(writer._bury, at))
        sink.close()
        writer.close()


class Storm:
    """Processes one after the other, over one target."""

    def __init__(self, url: str, folder: Path, seed: int) -> None:
        self._arguments = (url, str(folder), seed)
        self.folder = folder
        self.seed = seed
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.rigs.app.sink_storm"])
        with pytest.MonkeyPatch.context() as environment:  # it looks for what it imports by that alone
            environment.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
            forkserver.ensure_running()

    def life(self, *, die_at: str = "", die_on: int = 1, kill_after_s: float | None = None) -> int:
        """One process; its exit code."""
        process = self._context.Process(target=write_all, args=(*self._arguments, die_at, die_on))
        process.start()
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            process.kill()
        process.join(60)
        assert process.exitcode is not None, "it hangs"
        code = int(process.exitcode)
        process.close()
        return code

    def expected(self) -> dict[str, Row]:
        keyed = [[one for one in changes(self.seed, epoch) if one[0] is not None] for epoch in range(BATCHES)]
        return folded(*keyed)  # type: ignore[arg-type]

    def check_dead(self) -> None:
        """Each row without a key is told exactly once."""
        with open_log(str(self.folder)) as log:
            table: pa.Table = log.read("users.sink.dead")
        told = Counter(table.column("offset").to_pylist())
        wanted = [first_of(self.seed, epoch + 1) - 1 for epoch in range(0, BATCHES, KEYLESS)]
        assert told == Counter(wanted)
