"""Gaps: events of a copy at the offsets that they had in a log from which others, between them or before them, were removed.

Frames are dense, so such events are not appended. They become a sealed segment of their own as compaction makes it (see `sealed_segment`),
which stands for all offsets from the partition's end to the place where the next segment begins. The steps, under the locks
`seal`, append and sync, in an active segment that holds nothing (it is closed first if it does):
1. `written.rolling` becomes the base of the next segment;
2. the sealed segment is written under the base of the active one, and is on disk with its name;
3. the next segment is made, with the times and the producers' sequences behind the events;
4. `written` and `durable` move there. This is the moment at which it happens. Then the head is synced;
5. the frames of the old active segment, which hold nothing, are removed.

Invariants:
- as long as `written.rolling` lies behind `written.end`, a sealed segment with the active one's base is one that a dead process has
  begun: the next writer removes it, and so does a recovery;
- after the fourth step the sealed segment counts, whether the frames beside it are gone or not, as with any other.

A gap without events at the beginning of a partition that holds none moves its first offset (see `retention`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.log.disk.disk import Disk
from headwater.log.file.cursor import segments
from headwater.log.file.handles import Handles
from headwater.log.file.partition.head import Mark
from headwater.log.file.partition.partition import Partition
from headwater.log.file.segments.sealed_segment import APPENDED_FIELD, Compacted, Piece, Sealed, encode_sealed
from headwater.log.file.segments.segment import ProducerSequence, SegmentHeader, index_name, segment_name
from headwater.log.file.upkeep.compaction import tombstones_of
from headwater.log.file.upkeep.keeper import holding
from headwater.log.file.upkeep.retention import give_up
from headwater.log.file.upkeep.seal import write_sealed
from headwater.log.port.chunk import Chunk
from headwater.log.port.write import Write, check_place
from headwater.model.clock import Clock


class Copies:
    """Events of other logs, at the offsets that they have there, in the partitions of one local log."""

    def __init__(self, handles: Handles, *, clock: Clock) -> None:
        self._handles = handles
        self._clock = clock

    def place(self, write: Write, offsets: Any, *, end: int) -> None:
        """Stores events as the whole of what lies from `write.at` to `end` (see `port.store`)."""
        partition = self._handles.usable_partition(write.topic.name, write.partition)
        partition.check_topic(write.topic.id)
        fence = self._handles.fence(write.stamp.producer)
        epoch, now_us = fence.epoch if fence else None, self._clock()
        _place(self._handles.disk, partition, write, offsets, end, epoch=epoch, now_us=now_us)
        self._handles.signal(write.topic.name)


def _place(
    disk: Disk,
    partition: Partition,
    write: Write,
    offsets: Any,
    end: int,
    *,
    epoch: Callable[[], int] | None,
    now_us: int,
) -> None:
    assert write.at is not None and write.appended is not None
    with holding(disk, partition, wait=True):
        with partition.appending():
            partition.check_epoch(write.stamp, epoch)
            partition.check_generation(write.topic.generation)
            check_place(write.at, partition.written().end, partition.where())
            if end > write.at:
                with partition.syncing():
                    _begin_behind(disk, partition, write, offsets, end, now_us=now_us)
        if not write.count and _holds_nothing(disk, partition):
            give_up(disk, partition, end)


def _begin_behind(disk: Disk, partition: Partition, write: Write, offsets: Any, end: int, *, now_us: int) -> None:
    """The events as a sealed segment, and the next one; the caller holds all locks of the partition."""
    mark = partition.empty_segment()
    known = dict(partition.fence()[1])
    piece = _piece(write, offsets, end, mark)
    compacted = Compacted(now_us, int(np.count_nonzero(tombstones_of(piece.chunk))))
    data = encode_sealed([piece], topic=write.topic, compacted=compacted)
    known[write.stamp.producer] = ProducerSequence(write.stamp.epoch, write.stamp.sequence_last, end)
    header = SegmentHeader(end, piece.running_after, piece.appended_after, mark.chain, known)
    partition.begin_segment(mark, header, first=lambda: write_sealed(disk, partition.folder, mark.end, data))
    disk.reach("gap: published")
    partition.sync_head()
    disk.reach("gap: head synced")
    disk.remove(f"{partition.folder}/{segment_name(mark.end)}")
    disk.remove(f"{partition.folder}/{index_name(mark.end)}")


def _piece(write: Write, offsets: Any, end: int, mark: Mark) -> Piece:
    topic, batch = write.topic, write.rows()
    appended = np.maximum.accumulate(np.maximum(np.asarray(write.appended, np.int64), mark.appended))
    running = mark.running
    if topic.time is not None and batch.num_rows:
        times = np.asarray(batch.column(topic.time).cast(pa.int64()).fill_null(mark.running))
        running = max(running, int(np.max(times, where=times <= appended + topic.future_us, initial=running)))
    batch = batch.append_column(APPENDED_FIELD, pa.array(appended).cast(APPENDED_FIELD.type))
    chunk = Chunk(topic, write.partition, mark.end, batch, None, np.asarray(offsets, np.int64), end)
    return Piece(chunk, mark.running, running, mark.appended, int(appended.max(initial=mark.appended)))


def _holds_nothing(disk: Disk, partition: Partition) -> bool:
    mark = partition.visible()
    kinds = segments(disk, partition.folder)
    closed = [base for base in kinds if partition.first() <= base < mark.base]
    return mark.end == mark.base and all(
        kinds[base] is Sealed and not Sealed(disk, partition.folder, base).count for base in closed
    )
