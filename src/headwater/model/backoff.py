"""A back-off: the pauses between attempts at something that fails, each twice as long as the one before, up to a longest one.

Jitter shortens each pause at random, so that clients that failed together do not all return together. It never makes one longer.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from random import Random


class Backoff:
    """The pauses of one series of attempts. Not thread-safe."""

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        *,
        jitter: float = 0.5,
        random: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`jitter` is the share of a pause that chance may take away, from 0 to 1. `random` gives numbers from 0 to below 1."""
        assert 0 < first_s <= longest_s and 0 <= jitter <= 1
        self._first_s, self._longest_s = first_s, longest_s
        self._jitter = jitter
        self._random = random or Random().random
        self._sleep = sleep
        self._whole_s = first_s

    def next_s(self) -> float:
        """The length of the next pause, for a caller that waits by its own means."""
        whole_s, self._whole_s = self._whole_s, min(2 * self._whole_s, self._longest_s)
        return whole_s * (1 - self._jitter * self._random()) if self._jitter else whole_s

    def sleep(self, at_most_s: float = math.inf) -> None:
        """Sleeps for the next pause, or for `at_most_s` where that is shorter."""
        self._sleep(max(0.0, min(self.next_s(), at_most_s)))

    def wait(self, stop: threading.Event) -> None:
        """Waits for the next pause, or until `stop` is set."""
        stop.wait(self.next_s())

    def reset(self) -> None:
        """An attempt succeeded: the next pause is the first one again."""
        self._whole_s = self._first_s
