"""A folder as a sink, whose writers are killed or put to sleep at each step: every batch is there once, whoever goes on.

The oracle is DuckDB over the files, against rows that are made of the batch's number alone.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headwater.model.errors import CheckpointConflict, HeadwaterError, TimedOut
from headwater.model.marker import Marker
from headwater.model.points import points_of, watch
from headwater.sinks import files
from headwater.sinks.files import FileSink
from headwater.testing.contracts.case import refused
from headwater.testing.crash.points import at, kill_at
from tests.rigs.children import Child, Gate, in_child

STEPS = points_of("files:")
UNLOCKED = ["files: begun", "files: staged"]
FILES = 3


def sink_of(folder: Path) -> FileSink:
    return FileSink(str(folder / "out"), stage="app.files")


def add(sink: FileSink, epoch: int, *, query: str = "a query") -> int:
    """One batch, as an application adds it."""
    marker = Marker(query=query, epoch=epoch, ends=epoch)
    staged = sink.begin(marker)
    if staged is None:
        return 0
    staged.mkdir(parents=True)
    for number in range(FILES):
        pq.write_table(pa.table({"epoch": [epoch] * 5, "n": range(number * 5, number * 5 + 5)}), staged / f"p{number}")
    (staged / "_SUCCESS").touch()
    return sink.commit(marker, staged)


def add_all(sink: FileSink, end: int) -> None:
    """As Spark does: the last batch is always tried again, since nobody knows whether it was added."""
    last = sink.last
    for epoch in range(0 if last is None else last.epoch, end):
        add(sink, epoch)


def check(folder: Path, batches: int) -> None:
    """Every batch once, and nothing left of those who died."""
    found = f"SELECT epoch, n FROM read_parquet('{folder}/out/*.parquet')"
    wanted = f"SELECT e AS epoch, n FROM range({batches}) AS e(e), range({5 * FILES}) AS n(n)"
    ask = duckdb.connect()
    assert ask.execute(f"({found}) EXCEPT ALL ({wanted})").fetchall() == []
    assert ask.execute(f"({wanted}) EXCEPT ALL ({found})").fetchall() == []
    assert list((folder / "out" / "_headwater" / "staged").iterdir()) == []


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_killed_at_a_step_is_gone_on_with(tmp_path: Path, step: str) -> None:
    def add_until_killed(nth: int) -> None:
        kill_at(step, nth)
        add_all(sink_of(tmp_path), 12)

    for nth in (1, 2, 4):
        with pytest.raises(AssertionError, match="SIGKILL"):
            in_child(lambda nth=nth: add_until_killed(nth))
    add_all(sink_of(tmp_path), 12)
    check(tmp_path, 12)


def sleeper(folder: Path, step: str, asleep: Gate) -> Child[str]:
    """Goes to sleep in its second batch, and says what became of that when it was woken."""

    def sleep() -> None:
        asleep.open()
        os.kill(os.getpid(), signal.SIGSTOP)

    def work() -> str:
        add(sink_of(folder), 0)
        watch(at(step, sleep))
        try:
            return f"added {add(sink_of(folder), 1)}"
        except HeadwaterError as error:
            return error.code

    return Child(work)


@pytest.mark.parametrize("step", UNLOCKED)
@pytest.mark.parametrize("batches", [2, 5])
def test_a_writer_that_slept_adds_nothing_and_removes_nothing(tmp_path: Path, step: str, batches: int) -> None:
    """Another one has added the batch, or more, in the meantime."""
    with Gate() as asleep:
        zombie = sleeper(tmp_path, step, asleep)
        asleep.wait()
        add_all(sink_of(tmp_path), batches)
        os.kill(zombie.pid, signal.SIGCONT)
        assert zombie.result() == ("added 0" if batches == 2 else CheckpointConflict.code)
    add_all(sink_of(tmp_path), batches + 1)
    check(tmp_path, batches + 1)


@pytest.mark.parametrize("step", [step for step in STEPS if step not in UNLOCKED])
def test_a_writer_that_sleeps_while_it_moves_files_is_named(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can go on before it does: what is half moved is its own. The error is one that a stage tries again."""
    monkeypatch.setattr(files, "LOCK_S", 0.1)
    with Gate() as asleep:
        zombie = sleeper(tmp_path, step, asleep)
        asleep.wait()
        with refused(TimedOut, f"Process {zombie.pid} holds"):
            add(sink_of(tmp_path), 1 if sink_of(tmp_path).last == Marker(query="a query", epoch=0, ends=0) else 2)
        os.kill(zombie.pid, signal.SIGCONT)
        assert zombie.result() == f"added {FILES}"
    add_all(sink_of(tmp_path), 4)
    check(tmp_path, 4)


def test_another_query_is_refused(tmp_path: Path) -> None:
    """A deleted checkpoint, or another application's; nothing is touched."""
    add_all(sink_of(tmp_path), 3)
    with refused(CheckpointConflict, "deleted"):
        add(sink_of(tmp_path), 0, query="another")
    check(tmp_path, 3)
    assert TimedOut.retriable and not CheckpointConflict.retriable
