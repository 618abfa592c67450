"""Processes: workers started together, each in a fresh interpreter, that end with the program that started them."""

from __future__ import annotations

import multiprocessing
import os
import re
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

from headwater.testing.servers.guard import die_with_parent

TIMEOUT_S = 600.0

Worker = tuple[Callable[..., Any], tuple[Any, ...]]


class WorkerFailed(RuntimeError):
    """A worker raised or died; the text holds its traceback."""


def run_together(*workers: Worker, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """What each worker returns, in order.

    A worker `(function, arguments)` is called as `function(ready, *arguments)`. `ready()` returns in all of
    them at once, when each has called it: to begin together and, called again, to end together.
    """
    context = multiprocessing.get_context("spawn")
    gate = context.Barrier(len(workers))
    running = []
    for function, arguments in workers:
        result, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(function, arguments, gate, sender), daemon=True)
        process.start()
        sender.close()
        running.append((process, result))
    try:
        return [_result(result, timeout_s) for _, result in running]
    finally:
        for process, result in running:
            process.terminate()
            process.join()
            result.close()


def peak_memory_mb() -> float:
    """The most memory this process has held, mapped files included."""
    with open(f"/proc/{os.getpid()}/status") as file:
        found = re.search(r"VmHWM:\s+(\d+) kB", file.read())
    assert found is not None
    return int(found[1]) / 1000


def _work(function: Callable[..., Any], arguments: tuple[Any, ...], gate: Barrier, sender: Connection) -> None:
    die_with_parent()
    try:
        sender.send((function(gate.wait, *arguments), None))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent raises it
        gate.abort()  # the others must not wait for a worker that will never be ready
        sender.send((None, traceback.format_exc()))


def _result(result: Connection, timeout_s: float) -> Any:
    if not result.poll(timeout_s):
        raise WorkerFailed(f"a worker did not end within {timeout_s:g} s")
    try:
        value, failure = result.recv()
    except EOFError:
        raise WorkerFailed("a worker died without a word") from None
    if failure is not None:
        raise WorkerFailed(failure)
    return value
