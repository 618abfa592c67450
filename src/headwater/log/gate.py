"""A gate: lets a handle be closed while other threads use it.

Whoever uses the handle passes the gate; closing it turns newcomers away and waits for those inside, so no file is closed
under somebody's hands (its number could be another file's a moment later).
"""

from __future__ import annotations

import threading
from types import TracebackType

from headwater.model.errors import Closed


class Gate:
    """Counts who is inside; not to be passed twice by one thread."""

    def __init__(self, what: str, advice: str) -> None:
        self._what = what
        self._advice = advice
        self._left = threading.Condition(threading.Lock())
        self._inside = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._left:
            if self._closed:
                raise Closed(f"{self._what} was closed.", advice=self._advice)
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._left:
            self._inside -= 1
            if self._closed and not self._inside:
                self._left.notify_all()

    def close(self) -> bool:
        """Waits until nobody is inside; False when it was closed before."""
        with self._left:
            if self._closed:
                return False
            self._closed = True
            while self._inside:
                self._left.wait()
            return True
