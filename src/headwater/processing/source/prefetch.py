"""Ahead: the next batch of a stream is worked out while Spark writes down that it will come.

Spark asks how far a batch goes, writes that into the checkpoint, plans the query, and asks for the batch some ten milliseconds later. In
the meantime the process that is asked would wait. What was worked out for nothing, because the process ended before Spark asked, is made
again by the next one, from the same beginning.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any, Generic, TypeVar

Found = TypeVar("Found")


class Prefetch(Generic[Found]):
    """One thing at a time that somebody will ask for."""

    def __init__(self) -> None:
        self._begun: tuple[Any, Future[Found]] | None = None

    def begin(self, asked: Any, work: Callable[[], Found]) -> None:
        """Begins what `asked` will ask for, beside what this thread does."""
        self._leave()
        self._begun = asked, _thread(os.getpid()).submit(work)

    def take(self, asked: Any) -> Found | None:
        """What was found for it, or the error that came instead; None if it was not begun."""
        if self._begun is None or self._begun[0] != asked:
            self._leave()
            return None
        (_, found), self._begun = self._begun, None
        return found.result()

    def _leave(self) -> None:
        """Waits until nothing is worked on: two at a time would write the same files."""
        if self._begun is not None:
            wait([self._begun[1]])
            self._begun = None


@lru_cache(maxsize=1)
def _thread(process: int) -> ThreadPoolExecutor:
    """The thread that works ahead, made once in each process."""
    return ThreadPoolExecutor(1)
