"""A background thread that Ctrl-C cannot spoil.

An interrupt while `threading` waits for a thread to start, or to end, comes out as an error about locks, and may leave one locked for ever.
So it is started by a single call into C here, and waited for by looking again. It ends with its process, like a daemon thread.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable

_LOOK_S = 0.05


class Background:
    """Runs a function until it returns."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._process = os.getpid()
        self._ended = allocate_lock()
        self._ended.acquire()
        self._is_ended = False
        self._thread = start_new_thread(self._work, ())

    def join(self) -> None:
        """Returns when the function has returned: at once in a forked process, which has no such thread, and in the function itself."""
        while not self._is_ended and self._process == os.getpid() and self._thread != get_ident():
            self._ended.acquire(timeout=_LOOK_S)

    def _work(self) -> None:
        try:
            self._run()
        finally:
            self._is_ended = True
            self._ended.release()
