"""The keeper: what is done to closed segments, beside the readers and writers: sealing, retention and
compaction.

One process at a time does it to a partition (the lock file `seal`), and every step leaves whole what was there or what is to be
there, so that it may be killed anywhere and the next one goes on.

Its thread does not keep a log alive that nobody holds and nobody closed: it ends with it.

Thread-safety: `holding` excludes threads as it excludes processes, since each opens the lock file for itself.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue

from headwater.log.disk.disk import Disk
from headwater.log.disk.threads import Background
from headwater.log.file.partition.partition import Partition
from headwater.model.errors import HeadwaterError

SEAL_AFTER_S = 30.0
"""How long a closed segment stays as frames: what was just written is read most, and a burst is not slowed down."""

TIDY_EVERY_S = 60.0
"""How often topics are looked at that are to be kept small."""

_LOOK_S = 1.0


@contextmanager
def holding(disk: Disk, partition: Partition, *, wait: bool = False) -> Iterator[bool]:
    """Whether nobody else is at a partition's closed segments; then nobody else is until the block ends."""
    lock = disk.open(f"{partition.folder}/seal", "write")
    try:
        yield lock.lock(wait=wait)
    finally:
        lock.close()


class Keeper:
    """A thread that seals what has been closed for a while, and keeps topics small."""

    def __init__(
        self,
        seal: Callable[[], object],
        tidy: Callable[[], object],
        *,
        after_s: float = SEAL_AFTER_S,
        every_s: float = TIDY_EVERY_S,
    ) -> None:
        """`seal` and `tidy` are methods of what is kept."""
        self._seal = weakref.WeakMethod(seal)
        self._tidy = weakref.WeakMethod(tidy)
        self._after_s = after_s
        self._every_s = every_s
        self._end: SimpleQueue[None] = SimpleQueue()  # not an Event: Ctrl-C could leave its lock taken
        self._seal_due: float | None = None
        self._tidy_due: float | None = None
        look_s = min(_LOOK_S, self._every_s)
        self._thread = Background(partial(_run, weakref.ref(self), self._end, look_s))

    def seal_later(self) -> None:
        """A segment was closed: it is sealed in a while."""
        self._seal_due = self._seal_due or time.monotonic() + self._after_s

    def tidy_regularly(self) -> None:
        """Some topic is to be kept small."""
        self._tidy_due = self._tidy_due or time.monotonic() + min(self._after_s, self._every_s)

    def close(self) -> None:
        """Ends the thread, after the segment at hand."""
        self._end.put(None)
        self._thread.join()

    def look(self) -> None:
        """Does what is due."""
        now = time.monotonic()
        if self._seal_due is not None and now >= self._seal_due:
            self._seal_due = None
            self._try(self._seal())
        if self._tidy_due is not None and now >= self._tidy_due:
            self._tidy_due = now + self._every_s
            self._try(self._tidy())

    def _try(self, act: Callable[[], object] | None) -> None:
        """Whatever fails is tried again the next time; who appends or reads meets the same failure and hears of it."""
        try:
            if act is not None:
                act()
        except HeadwaterError:
            return


def _run(found: weakref.ref[Keeper], end: SimpleQueue[None], look_s: float) -> None:
    while not _ends_within(end, look_s):
        keeper = found()
        if keeper is None:
            return
        keeper.look()
        del keeper


def _ends_within(end: SimpleQueue[None], timeout_s: float) -> bool:
    try:
        end.get(timeout=timeout_s)
    except Empty:
        return False
    return True
