"""Retention: gives up a partition's oldest segments, by the time of their newest event, by the partition's size, or because all of
it was acknowledged.

As in Kafka, whole closed segments go, and never the active one; but an active segment whose events are all expired is closed
first. By time: a segment goes when its newest event was appended longer than `retention` ago. By size: the oldest segment
goes as long as what is left is still at least `retention_bytes`. With `retain="until_acked"` a segment goes, besides, when no queue
group needs any of its events (see `floor`).

Where the topic has an archive they are put there first. Then the partition's head says where it begins now, on disk; then the
files go, the frames of a segment before its sealed form, which stands for them. Killed in between, the next one removes what lies
below the first offset; nobody reads there any more.
"""

from __future__ import annotations

from headwater.log.disk.disk import Disk
from headwater.log.file.cursor import segments
from headwater.log.file.partition.partition import Partition
from headwater.log.file.segments.archive import Archive
from headwater.log.file.segments.sealed_segment import Sealed, sealed_name
from headwater.log.file.segments.segment import Segment, index_name, segment_name
from headwater.log.file.upkeep.seal import segment_pieces
from headwater.log.queue.floor import Acked

_EVER_US = 1 << 62


def expire_partition(disk: Disk, partition: Partition, *, now_us: int, acked: Acked | None) -> int:
    """Gives up what the topic's settings no longer keep, and what was `acked`; returns how many offsets.

    The caller holds the lock `seal`.
    """
    topic = partition.topic
    remove_given_up(disk, partition)
    oldest_us = None if topic.retention_us is None else now_us - topic.retention_us
    if oldest_us is not None and partition.written().appended < oldest_us:
        partition.roll_older_than(oldest_us)
    if acked is not None and acked.end >= partition.visible().end:
        partition.roll_older_than(now_us - acked.ids_us if acked.ids_us else _EVER_US)
    before = partition.first()
    first = _first_kept(disk, partition, now_us=now_us, oldest_us=oldest_us, acked=acked)
    return give_up(disk, partition, first) - before


def give_up(disk: Disk, partition: Partition, first: int) -> int:
    """Gives up everything below an offset with which a segment begins, archived if the topic has an archive.

    Returns the first offset that is left. The caller holds the lock `seal`.
    """
    if first > partition.first():
        first = _behind_merged(disk, partition, first)
        oldest = first if partition.topic.archive is None else _archive(disk, partition, first)
        partition.publish_first(first, oldest=oldest)
        disk.reach("retention: given up")
        remove_given_up(disk, partition)
    return partition.first()


def _behind_merged(disk: Disk, partition: Partition, first: int) -> int:
    """An offset behind all that goes: a merged segment takes those with it that it stands for and that a crash left."""
    for base, kind in sorted(segments(disk, partition.folder).items()):
        if kind is Sealed and partition.first() <= base < first:
            first = max(first, Sealed(disk, partition.folder, base).end_offset)
    return first


def _archive(disk: Disk, partition: Partition, first: int) -> int:
    """Archives the segments below an offset; returns the first offset from which on the archive has no hole."""
    archive, kinds = Archive(partition.topic), segments(disk, partition.folder)
    bases = sorted(base for base in kinds if partition.first() <= base < first)
    oldest = partition.oldest() if archive.end(partition.number) >= partition.first() else partition.first()
    done = 0
    for base, following in zip(bases, [*bases[1:], first], strict=True):
        if base < done:
            continue
        segment = kinds[base](disk, partition.folder, base)
        done = end = segment.end_offset if isinstance(segment, Sealed) else following
        try:
            pieces = segment_pieces(segment, partition.topic, partition.number)
            archive.add(partition.number, list(pieces), topic=partition.topic, end=end)
        finally:
            segment.close()
        disk.reach("archive: added one")
    return oldest


def remove_given_up(disk: Disk, partition: Partition) -> None:
    """Removes the segments below the first offset. The caller holds the lock `seal`.

    Whoever published that offset may have been killed before it was on disk.
    """
    gone = [base for base in segments(disk, partition.folder) if base < partition.first()]
    if gone:
        partition.sync_head()
    for base in sorted(gone):
        for name in (segment_name(base), index_name(base), sealed_name(base)):
            disk.remove(f"{partition.folder}/{name}")
            disk.reach("retention: removed one")
    if gone:
        disk.sync_folder(partition.folder)


def segment_sizes(disk: Disk, partition: Partition) -> dict[int, int]:
    """The bytes of each segment from the first offset on, by base offset; of the active one as far as it is written."""
    sizes = {}
    written = partition.written()
    for base in sorted(segments(disk, partition.folder)):
        if base == written.base:
            sizes[base] = written.position
        elif partition.first() <= base < written.base:
            sizes[base] = _size(disk, partition.folder, base)
    return sizes


def _first_kept(disk: Disk, partition: Partition, *, now_us: int, oldest_us: int | None, acked: Acked | None) -> int:
    """The base of the first segment that stays."""
    sizes = segment_sizes(disk, partition)
    active = partition.durable_base()
    total, keep_bytes = sum(sizes.values()), partition.topic.retention_bytes
    following = [*sizes][1:]
    for base, size, after in zip(sizes, sizes.values(), [*following, active], strict=True):
        too_old = oldest_us is not None and base < active and appended_before(disk, partition, after) < oldest_us
        too_much = keep_bytes is not None and total - size >= keep_bytes
        is_done = acked is not None and base < active and _is_done(disk, partition, after, acked, now_us=now_us)
        if base >= active or not (too_old or too_much or is_done):
            return base
        total -= size
    return partition.first()


def _is_done(disk: Disk, partition: Partition, base: int, acked: Acked, *, now_us: int) -> bool:
    """Whether no queue needs anything before a segment any more, its ids neither."""
    if base > acked.end:
        return False
    return not acked.ids_us or appended_before(disk, partition, base) < now_us - acked.ids_us


def appended_before(disk: Disk, partition: Partition, base: int) -> int:
    """When the last event before a segment was appended."""
    segment = segments(disk, partition.folder)[base](disk, partition.folder, base)
    try:
        return segment.header.appended if isinstance(segment, Segment) else segment.appended_before
    finally:
        segment.close()


def _size(disk: Disk, folder: str, base: int) -> int:
    for name in (sealed_name(base), segment_name(base)):
        if disk.exists(f"{folder}/{name}"):
            file = disk.open(f"{folder}/{name}")
            try:
                return file.size()
            finally:
                file.close()
    return 0
