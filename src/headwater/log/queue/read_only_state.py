"""The state of a queue in a log that may only be read: copies of its windows, to look at.

Whoever looks takes the lock of a window shared, which needs no right to write, copies the window and lets go. What looking puts
in order (after a power loss, after a dead process, where retention has taken events) is put in order in the copy. A queue that nobody
has opened looks as it would when it is made.

Thread-safety: may be used by many threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from headwater.log.disk.disk import Disk
from headwater.log.port.topic import Topic
from headwater.log.queue.state import read_queue
from headwater.log.queue.window import CAPACITY_MIN, Window, copied_window, new_window


class ReadOnlyStates:
    """The state of a queue in a folder of which nothing is written."""

    threads = False
    writable = False
    on_disk = True

    def __init__(self, disk: Disk, folder: str, *, topic: Topic, incarnation: int, has_keys: bool) -> None:
        self._disk = disk
        self._folder = folder
        self._topic = topic
        self._incarnation = incarnation
        self._has_keys = has_keys

    def settings(self, wanted: dict[str, Any]) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            found = read_queue(self._disk, f"{self._folder}/queue")
            if found["topic_id"] == wanted["topic_id"]:
                return found
        return wanted

    @contextmanager
    def locked(self, partition: int, *, floor: int, wait: bool = True) -> Iterator[Window | None]:
        """A copy: nobody else has it, so there is nothing to hold or to wait for."""
        yield self._copied(partition) or new_window(
            capacity=CAPACITY_MIN,
            has_keys=self._has_keys,
            topic_id=self._topic.id,
            floor=floor,
            incarnation=self._incarnation,
        )

    def _copied(self, partition: int) -> Window | None:
        """The window as it is now; None where there is none of this topic."""
        try:
            lock = self._disk.open(f"{self._folder}/{partition}.lock")
        except FileNotFoundError:
            return None
        try:
            lock.lock(shared=True)
            window = copied_window(self._disk, f"{self._folder}/{partition}.window")
        except FileNotFoundError:
            return None
        finally:
            lock.unlock()
            lock.close()
        if window.topic_id != self._topic.id or window.has_keys != self._has_keys:
            return None
        if window.incarnation == self._incarnation:
            window.check()
        return window

    def reach(self, point: str) -> None:
        """Nothing is written, so no crash can fall between two steps."""

    def close(self, member: int) -> None:
        """Nothing is open."""

    def forked(self) -> None:
        """Nothing is open."""

    # What only those ask for who change something

    def grow(self, partition: int) -> Window:
        _never()

    def sync(self, partition: int) -> None:
        _never()

    def join(self) -> int:
        _never()

    def members(self) -> list[int]:
        _never()

    def dead_members(self) -> list[int]:
        _never()

    def bury_member(self, member: int) -> None:
        _never()


def _never() -> NoReturn:
    raise AssertionError("a queue of a log that may only be read was about to be changed")
