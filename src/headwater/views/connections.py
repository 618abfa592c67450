"""The connections of a store: one for each thread of this process, closed with the store or after its thread.

A connection that was made before a fork belongs to the parent: the child opens its own and leaves the parent's alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class Connections:
    """Gives each thread its own connection, made by `connect`; safe from any thread."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._held: dict[threading.Thread, Any] = {}
        self._of_parent: list[Any] = []

    def get(self) -> Any:
        """This thread's connection."""
        thread = threading.current_thread()
        if self._pid != os.getpid():
            # Kept, so that nothing closes them: that would end the parent's sessions.
            self._of_parent, self._held, self._pid = [*self._of_parent, self._held], {}, os.getpid()
            self._lock = threading.Lock()
        connection = self._held.get(thread)
        if connection is None:
            connection = self._connect()
            with self._lock:
                ended = [other for other in self._held if not other.is_alive()]
                left = [self._held.pop(other) for other in ended]
                self._held[thread] = connection
            for other in left:
                other.close()
        return connection

    def forget(self) -> None:
        """Closes this thread's connection; the next `get` makes another."""
        with self._lock:
            connection = self._held.pop(threading.current_thread(), None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Closes all."""
        if self._pid != os.getpid():
            return
        with self._lock:
            held, self._held = self._held, {}
        for connection in held.values():
            connection.close()
