"""The termination by a signal: SIGTERM and SIGHUP end the demonstration as Ctrl-C does, so that it can clean up.

An exception from a signal handler may surface inside a callback of the interpreter, such as an import, which discards it.
So while the demonstration runs in ticks, the handler only records the signal, and the next tick ends the process.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Termination:
    """Whether a signal has come, and what becomes of it; one for a process."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._is_noted_only = False

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """A block that the signals end."""
        before = {number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def at_ticks(self) -> Iterator[None]:
        """A block that a signal ends where it calls `tick`, or at its end."""
        self._is_noted_only = True
        try:
            yield
        finally:
            self._is_noted_only = False
        self.tick()

    def tick(self) -> None:
        """Ends the process if a signal has come."""
        if self._number is not None:
            sys.exit(128 + self._number)

    def _end(self, number: int, frame: object) -> None:
        self._number = number
        if not self._is_noted_only:
            self.tick()
