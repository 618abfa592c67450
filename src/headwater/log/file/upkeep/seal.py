"""Sealing: turns closed segments of frames into standard Arrow files, beside the readers and writers.

A closed segment is read with all its checksums, written as `<base>.arrow.new`, synced, renamed to `<base>.arrow`, and only then
are the frames removed. Where both stand the sealed file counts, so a crash at any point leaves the events readable. One
process at a time seals a partition (see `keeper`).
"""

from __future__ import annotations

from collections.abc import Iterator

from headwater.log.disk.atomic_file import replace_file
from headwater.log.disk.disk import Disk
from headwater.log.file.partition.partition import Partition
from headwater.log.file.recovery import segment_bases
from headwater.log.file.segments.frame import damaged
from headwater.log.file.segments.sealed_segment import Piece, Sealed, encode_sealed, sealed_name
from headwater.log.file.segments.segment import Segment, index_name, segment_name
from headwater.log.port.topic import Topic


def seal_partition(disk: Disk, partition: Partition) -> int:
    """Seals every closed segment of a partition; returns how many. The caller holds the lock `seal`."""
    # A power loss must not bring back a durable mark in a segment whose frames are gone.
    partition.sync_head()
    sealed = 0
    for base in segment_bases(disk, partition.folder):
        if partition.first() <= base < partition.durable_base():
            seal_segment(disk, partition.folder, base, topic=partition.topic, number=partition.number)
            sealed += 1
    return sealed


def seal_segment(disk: Disk, folder: str, base: int, *, topic: Topic, number: int) -> None:
    """Seals one closed segment; the caller holds the lock `seal`."""
    path = f"{folder}/{sealed_name(base)}"
    if not disk.exists(path):
        segment = Segment(disk, folder, base)
        try:
            data = encode_sealed(_pieces(segment, topic, number), topic=topic)
        finally:
            segment.close()
        write_sealed(disk, folder, base, data)
    else:
        # Whoever sealed it may have been killed before the name was on disk.
        disk.sync_folder(folder)
    disk.reach("seal: renamed")
    disk.remove(f"{folder}/{segment_name(base)}")
    disk.remove(f"{folder}/{index_name(base)}")
    disk.reach("seal: removed")


def write_sealed(disk: Disk, folder: str, base: int, data: bytearray) -> None:
    """Puts a sealed file in its place as a whole, and looks at it once."""
    path = f"{folder}/{sealed_name(base)}"
    replace_file(disk, path, [data], point="seal:")
    Sealed(disk, folder, base)


def segment_pieces(segment: Segment | Sealed, topic: Topic, number: int) -> Iterator[Piece]:
    """The events of a closed segment of either kind, to be written elsewhere."""
    if isinstance(segment, Sealed):
        return segment.pieces(topic, number)
    return _pieces(segment, topic, number)


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
