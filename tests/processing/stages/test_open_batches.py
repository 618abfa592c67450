"""Writing: a program does not end in the middle of a batch, whatever became of Spark."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headwater.model.errors import Closed
from headwater.processing.stages.open_batches import OpenBatches

PROGRAM = """
import os, signal, sys, time
from pathlib import Path

import headwater as hw
from headwater.model.points import watch

def stop(point):
    if point.startswith("sink: "):
        Path(point.removeprefix("sink: ")).touch()
    if point == "sink: begun":
        time.sleep(5)

if __name__ == "__main__":
    watch(stop)
    with hw.open_log("./log") as log:
        log.create_topic("users", "id STRING, name STRING", key="id")
        log.append("users", [{"id": "a", "name": "Ada"}])
    app = hw.App("shop", log="./log", master="local[1]")
    app.sink(app.topic("users"), to="delta:///./users", name="copy")
    app.start()
    while not Path("begun").exists():
        time.sleep(0.02)
    from pyspark import SparkContext

    os.kill(SparkContext._gateway.proc.pid, signal.SIGKILL)
    app.stop()
"""


def test_the_end_waits_for_batches_and_lets_none_begin() -> None:
    writing, begun, go_on, done = OpenBatches(), threading.Event(), threading.Event(), list[str]()

    def write() -> None:
        with writing.batch():
            begun.set()
            go_on.wait(10)
            done.append("batch")

    def end() -> None:
        writing.end(10)
        done.append("end")

    threads = [threading.Thread(target=work) for work in (write, end)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    threads[1].join(0.1)
    assert done == []
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert done == ["batch", "end"]
    with pytest.raises(Closed), writing.batch():
        pass


def test_a_batch_that_fails_is_not_waited_for() -> None:
    writing = OpenBatches()
    with pytest.raises(ZeroDivisionError), writing.batch():
        raise ZeroDivisionError
    writing.end(10)


def test_the_end_does_not_wait_for_ever() -> None:
    writing = OpenBatches()
    with writing.batch():
        writing.end(0.01)


def test_a_writer_says_what_its_batch_set_aside_and_what_it_raised() -> None:
    """Dead letters are counted where there are any, and an error reaches Spark as well."""
    writing, results, dead, errors = OpenBatches(), iter([None, 0, 3]), list[int](), list[Exception]()
    write = writing.writer(lambda _, epoch: 0 // epoch or next(results), on_dead=dead.append, on_error=errors.append)
    rows: Any = None
    for epoch in (1, 2, 3):
        write(rows, epoch)
    assert (dead, errors) == ([3], [])
    with pytest.raises(ZeroDivisionError):
        write(rows, 0)
    writing.end(10)
    with pytest.raises(Closed):
        write(rows, 4)
    assert dead == [3]
    assert list(map(type, errors)) == [ZeroDivisionError, Closed]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_program_whose_spark_died_finishes_its_batch(tmp_path: Path) -> None:
    """A thread that is torn out of a library written in Rust ends the program with a segmentation fault."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ended = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "committed").exists()
