"""The active segment: the newest file of a partition, opened for writing, with room made ahead in it.

Invariant: it is as long as the head says that it was written, or it is not opened: what were written behind the end of a file that was
cut, nobody would ever read.

Thread-safety: asked for by the holders of either lock of the partition, so opening has a mutex of its own; all else happens under
the append lock.
"""

from __future__ import annotations

import threading

from headwater.log.disk.disk import Disk, File
from headwater.log.file.partition.head import Head
from headwater.log.file.segments.segment import Segment, segment_name
from headwater.model.errors import Damaged, StorageError, TopicNotFound

_ROOM_FIRST = 64 << 10


class Active:
    """The active segment of one partition, as one process has it open."""

    def __init__(self, disk: Disk, folder: str, head: Head) -> None:
        self._disk = disk
        self._folder = folder
        self._head = head
        self._mutex = threading.Lock()
        self._open: tuple[int, File] | None = None
        self._room = 0

    def file(self, base: int) -> File:
        """The file of the segment that begins at an offset; `Damaged` where it is shorter than it was."""
        with self._mutex:
            if self._open is None or self._open[0] != base:
                file = self._opened(base)
                self._open = (base, file)
                self._room = file.size()
            return self._open[1]

    def make_room(self, file: File, length: int, *, segment_bytes: int) -> None:
        """Allocates ahead in growing steps: syncing into allocated room is twice as fast, and cannot find a full disk."""
        if length <= self._room:
            return
        self._room = file.size()
        if length <= self._room:
            return
        step = min(max(self._room, _ROOM_FIRST), max(segment_bytes - self._room, 0))
        room = max(length, self._room + step)
        try:
            file.allocate(room)
        except StorageError:
            if room == length:
                raise
            room = length
            file.allocate(room)
        self._room = room

    def cut(self, base: int, position: int) -> File:
        """Takes away what lies behind a position; `Damaged` where the file is shorter."""
        file = self.file(base)
        size = file.size()
        if size < position:
            raise lost(file.path, f"it has {size} bytes, and its events took {position}")
        file.truncate(position)
        self._room = position
        return file

    def close(self) -> None:
        """Frees the file."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _opened(self, base: int) -> File:
        path = f"{self._folder}/{segment_name(base)}"
        # Whoever heals a poisoned partition cuts it to what is on disk, and may have died or failed before the head said so.
        mark = self._head.durable() if self._head.is_poisoned() else self._head.written()
        try:
            file = self._disk.open(path, "write")
        except FileNotFoundError:
            if self._head.is_deleted():
                raise TopicNotFound(f"The topic of {path} was deleted.", advice="Create it again.") from None
            raise lost(path, "it is missing") from None
        size = file.size()
        if mark.base == base and size < mark.position:
            file.close()
            raise lost(path, f"it has {size} bytes, and its events took {mark.position}")
        Segment(self._disk, self._folder, base).close()  # behind a damaged header nobody would read anything
        return file


def lost(path: str, what: str) -> Damaged:
    """The refusal to write to a segment of which something is gone."""
    return Damaged(
        f"{path} is damaged: {what}.",
        advice="Nothing was written to it. Restore the partition from a mirror or a backup; `headwater doctor` says what is lost.",
    )
