"""A mirror: an application that keeps a bank's tables in other databases by transactions, in a process that may die; and who looks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import headwater as hw
from headwater.testing.app_test import processes_of
from headwater.testing.crash.points import kill_at
from tests.rigs.capture.bank import TABLES, Bank, State, seen_in

PATIENCE_S = 120


def declared(folder: Path, source: str, targets: Mapping[str, str], **more: Any) -> hw.App:
    """The application, with its log and its state in a folder; `targets` are URLs by the names of their stages."""
    app = hw.App("mirror", log=folder / "log", **more)
    tables = [app.table(name, source=source) for name in TABLES]
    for kind, to in targets.items():
        app.sink(tables, to=to, transactions=True, name=f"to.{kind}")
    return app


class Onlooker:
    """Somebody who looks at a target: each look is a state that the bank was in, and none is older than the one before."""

    def __init__(self, bank: Bank, url: str) -> None:
        self.url = url
        self.seen: dict[int, State] = {}
        self._bank = bank

    def look(self) -> None:
        state = seen_in(self.url)
        if state is not None:
            number = state[2][1]
            assert state == self._bank.states[number], self.url
            assert number >= max(self.seen, default=0), self.url
            self.seen[number] = state

    @property
    def has_all(self) -> bool:
        return self._bank.last in self.seen.values()


def until(is_true: Callable[[], bool], *onlookers: Onlooker) -> None:
    """Waits, and lets them look meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline
        for onlooker in onlookers:
            onlooker.look()
        time.sleep(0.005)


def life(folder: Path, source: str, onlooker: Onlooker, *, die_at: str = "", die_on: int = 1) -> int:
    """One life of the application in a process of its own, looked at meanwhile; how it ended."""
    given = (str(folder), source, onlooker.url, die_at, die_on)
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.rigs.app import mirror_app; mirror_app.live{given!r}"],
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
    )
    try:
        until(lambda: process.poll() is not None, onlooker)
    finally:
        for left in processes_of(process.pid):
            os.kill(left, signal.SIGKILL)
    return process.wait()


def live(folder: str, source: str, target: str, die_at: str, die_on: int) -> None:
    """What that process does: it kills itself when it comes to a step for the nth time, or runs over what is there, and ends."""
    kill_at(die_at, die_on)
    declared(Path(folder), source, {"copy": target}, master="local[2]").run(available_now=not die_at)
