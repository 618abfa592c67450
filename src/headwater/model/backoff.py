"""A back-off: the waits between attempts at something that fails, ever longer until one succeeds."""

from __future__ import annotations

import threading

_LEAST_S = 0.1


class Backoff:
    """Waits that begin at a tenth of a second and double up to `most_s`. Not thread-safe."""

    def __init__(self, *, most_s: float) -> None:
        self._most_s = most_s
        self._wait_s = _LEAST_S

    def wait(self, stop: threading.Event) -> None:
        """Waits before the next attempt, or until `stop` is set."""
        stop.wait(self._wait_s)
        self._wait_s = min(2 * self._wait_s, self._most_s)

    def reset(self) -> None:
        """An attempt succeeded: the next wait is short again."""
        self._wait_s = _LEAST_S
