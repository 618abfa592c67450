"""Sealing: turns closed segments of frames into standard Arrow files, beside the readers and writers.

A closed segment is read with all its checksums, written as `<base>.arrow.new`, synced, renamed to `<base>.arrow`, and only then
are the frames removed. Where both stand the sealed file counts, so a crash at any point leaves the events readable. One
process at a time seals a partition (the lock file `seal`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from headwater.log.disk import Disk
from headwater.log.frame import damaged
from headwater.log.partition import Partition
from headwater.log.recovery import segment_bases
from headwater.log.sealed import Piece, Sealed, encode_sealed, sealed_name
from headwater.log.segment import Segment, index_name, segment_name
from headwater.log.topic import Topic
from headwater.model.errors import HeadwaterError

SEAL_AFTER_S = 30.0
"""How long a closed segment stays as frames: what was just written is read most, and a burst is not slowed down."""


def seal_partition(disk: Disk, partition: Partition) -> int:
    """Seals every closed segment of a partition; returns how many. Does nothing while another process is at it."""
    lock = disk.open(f"{partition.folder}/seal", "write")
    try:
        if not lock.lock(wait=False):
            return 0
        # A power loss must not bring back a durable mark in a segment whose frames are gone.
        partition.sync_head()
        sealed = 0
        for base in segment_bases(disk, partition.folder):
            if base < partition.durable_base():
                seal_segment(disk, partition.folder, base, topic=partition.topic, number=partition.number)
                sealed += 1
        return sealed
    finally:
        lock.close()


def seal_segment(disk: Disk, folder: str, base: int, *, topic: Topic, number: int) -> None:
    """Seals one closed segment; the caller holds the lock `seal`."""
    path = f"{folder}/{sealed_name(base)}"
    if not disk.exists(path):
        segment = Segment(disk, folder, base)
        try:
            data = encode_sealed(
                _pieces(segment, topic, number),
                schema=topic.schema,
                schema_id=topic.schema_id,
                time_column=topic.time,
            )
        finally:
            segment.close()
        write_sealed(disk, folder, base, data)
    disk.reach("seal: renamed")
    disk.remove(f"{folder}/{segment_name(base)}")
    disk.remove(f"{folder}/{index_name(base)}")
    disk.reach("seal: removed")


def write_sealed(disk: Disk, folder: str, base: int, data: bytearray) -> None:
    """Puts a sealed file in its place as a whole, and looks at it once."""
    path = f"{folder}/{sealed_name(base)}"
    file = disk.open(f"{path}.new", "create")
    try:
        file.truncate(0)
        file.write_at(0, [data])
        file.sync()
    finally:
        file.close()
    disk.reach("seal: written")
    disk.rename(f"{path}.new", path)
    disk.sync_folder(folder)
    Sealed(disk, folder, base)


class Sealer:
    """A thread that seals what has been closed for a while."""

    def __init__(self, seal: Callable[[], object], *, after_s: float = SEAL_AFTER_S) -> None:
        self._seal = seal
        self._after_s = after_s
        self._closed = threading.Event()
        self._due: float | None = None
        self._thread = threading.Thread(target=self._run, name="headwater-sealer", daemon=True)
        self._thread.start()

    def later(self) -> None:
        """A segment was closed: it is sealed in a while."""
        self._due = self._due or time.monotonic() + self._after_s

    def close(self) -> None:
        """Ends the thread, after the segment at hand."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(1.0):
            if self._due is not None and time.monotonic() >= self._due:
                self._due = None
                try:
                    self._seal()
                except HeadwaterError:
                    continue


def _pieces(segment: Segment, topic: Topic, number: int) -> Iterator[Piece]:
    position, expected = segment.start, segment.base
    running, appended = segment.header.running, segment.header.appended
    while (frame := segment.frame_at(position)) is not None:
        found = segment.read(position, topic=topic, partition=number)
        if found is None or found[0].base_offset != expected:
            raise damaged(segment.path, position, f"event {expected} is not where it should be")
        yield Piece(found[0], running, frame.running_after, appended, frame.appended)
        position, expected = found[1], found[0].end_offset
        running, appended = frame.running_after, frame.appended
    if position < segment.size():
        raise damaged(segment.path, position, f"event {expected} is not where it should be")
