"""Compaction: of each key the last event stays, with the offset it had; what it replaced goes.

Closed segments are sealed and then rewritten as compacted ones (see `sealed_segment`), each in the place of the one it replaces, by one
rename; so a kill leaves the old file or the new one, and readers that have the old one mapped go on in it. The active segment
is left alone, and so are events without a key, since nothing ever replaces them.

A tombstone, the last event of a key that was deleted, must outlive every reader that has seen what it deletes. It goes
`tombstones` after the compaction that removed the older events of its key, not after it was appended: a reader that began before
that compaction has so long to come to it. Neighbours that hold no such tombstones any more are merged into files of the
topic's segment size. A tombstone in a partition that was split off stays as long as an ancestor holds an event of its key.

Invariants, each true after a kill or a power loss at any point:
- segments are rewritten from the oldest to the newest and each is on disk before the next is begun. So a tombstone goes only when
  every older event of its key is gone: no deleted key comes back;
- a removed event has a later one of its key that is still there, or was a tombstone;
- a merged file has the name of the first of its neighbours and stands for all their offsets. Those it covers are removed after it
  is on disk, before anything else is done to the partition; till then they say the same.

The keys of all closed segments are held in memory while one partition is compacted, its events segment by segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.arrow.placement import comparable_keys
from headwater.log.disk.disk import Disk
from headwater.log.file.cursor import segments
from headwater.log.file.handles import Handles
from headwater.log.file.partition.partition import Partition
from headwater.log.file.segments.sealed_segment import Compacted, Piece, Sealed, encode_sealed, sealed_name
from headwater.log.file.upkeep.seal import seal_partition, write_sealed
from headwater.log.port.chunk import Chunk
from headwater.log.port.topic import Topic

DIRTY_SHARE_MIN = 0.5
"""In the background a partition is compacted when this much has come, measured by what was compacted before: each event is then
rewritten a bounded number of times, as in Kafka."""


def compact_partition(
    disk: Disk,
    partition: Partition,
    *,
    now_us: int,
    dirty_share_min: float = 0.0,
    older_keys: Callable[[], Iterable[pa.Array]] = tuple,
) -> int:
    """Compacts the closed segments of a partition; returns how many events went. The caller holds the lock `seal`.

    `older_keys` gives the keys that its ancestors hold.
    """
    topic = partition.topic
    seal_partition(disk, partition)
    closed = remove_covered(disk, partition)
    if not _is_due(closed, topic, now_us=now_us, dirty_share_min=dirty_share_min):
        return 0
    plans = _plans(closed, topic, partition.number, now_us=now_us, older_keys=older_keys)
    removed = 0
    for group in _groups(plans, topic.segment_bytes):
        if len(group) > 1 or group[0].segment.compacted is None or not group[0].keep.all():
            disk.reach("compaction: begun")
            _rewrite(disk, partition, group, now_us=now_us)
            removed += sum(int(np.count_nonzero(~plan.keep)) for plan in group)
    return removed


def remove_covered(disk: Disk, partition: Partition) -> list[Sealed]:
    """The closed segments that are sealed, without those that a merged one stands for: they are removed.

    The caller holds the lock `seal`.
    """
    closed: list[Sealed] = []
    kinds = segments(disk, partition.folder)
    for base in sorted(base for base in kinds if partition.first() <= base < partition.durable_base()):
        if kinds[base] is not Sealed:
            continue
        if closed and base < closed[-1].end_offset:
            # Whoever merged it may have been killed before the new name was on disk.
            disk.sync_folder(partition.folder)
            disk.remove(f"{partition.folder}/{sealed_name(base)}")
            disk.reach("compaction: removed one")
        else:
            closed.append(Sealed(disk, partition.folder, base))
    return closed


def is_overtaken(handles: Handles, name: str, number: int, *, end: int, since_us: int) -> bool:
    """Whether events before `end` may have gone since a time, by the clock of the disk, for the sake of events behind it.

    That takes a closed segment that reaches further than `end`, and a compacted one before it that was written since.
    """
    disk, partition = handles.disk, handles.partition(name, number)
    if partition.durable_base() <= end:
        return False
    try:
        return any(
            disk.changed_us(f"{partition.folder}/{sealed_name(base)}") >= since_us
            and Sealed(disk, partition.folder, base).compacted is not None
            for base, kind in segments(disk, partition.folder).items()
            if kind is Sealed and base < end
        )
    except FileNotFoundError:  # merged with the one before it, at this moment
        return True


def last_of_each(keys: pa.ChunkedArray) -> Any:
    """For each row whether it is the last with its key; rows without a key all are."""
    encoded = keys.dictionary_encode().unify_dictionaries()
    codes = np.concatenate(
        [np.zeros(0, dtype=np.int64), *(chunk.indices.cast(pa.int64()).fill_null(-1) for chunk in encoded.chunks)]
    )
    rows = np.arange(len(codes))
    last = np.full(int(codes.max(initial=-1)) + 2, -1)
    np.maximum.at(last, codes, rows)
    return (last[codes] == rows) | (codes < 0)


class _Plan(msgspec.Struct):
    """A segment, which of its events stay, and which tombstones go one day; `settled` if no reader needs them any more."""

    segment: Sealed
    keep: Any
    tombstones: Any
    settled: bool


def _is_due(closed: Sequence[Sealed], topic: Topic, *, now_us: int, dirty_share_min: float) -> bool:
    dirty = sum(segment.size for segment in closed if segment.compacted is None)
    clean = sum(segment.size for segment in closed if segment.compacted is not None)
    if dirty and dirty >= dirty_share_min * clean:
        return True
    return any(
        segment.compacted.tombstones > 0 and _is_settled(segment, topic, now_us)
        for segment in closed
        if segment.compacted is not None
    )


def _is_settled(segment: Sealed, topic: Topic, now_us: int) -> bool:
    return segment.compacted is not None and segment.compacted.at_us + topic.tombstones_us <= now_us


def _plans(
    closed: Sequence[Sealed],
    topic: Topic,
    number: int,
    *,
    now_us: int,
    older_keys: Callable[[], Iterable[pa.Array]],
) -> list[_Plan]:
    keys: list[pa.Array] = []
    tombstones: list[Any] = []
    for segment in closed:
        gone = [np.zeros(0, dtype=bool)]
        for piece in segment.pieces(topic, number):
            keys.append(keys_of(piece.chunk))
            gone.append(tombstones_of(piece.chunk))
        tombstones.append(np.concatenate(gone))
    last = last_of_each(pa.chunked_array(keys))
    if any(gone.any() for gone in tombstones) and (older := list(older_keys())):
        held = pc.is_in(pa.chunked_array(keys), value_set=pa.concat_arrays(older)).to_numpy()
        tombstones = np.split(np.concatenate(tombstones) & ~held, np.cumsum([len(gone) for gone in tombstones])[:-1])
    plans, at = [], 0
    for segment, gone_here in zip(closed, tombstones, strict=True):
        keep = last[at : at + len(gone_here)]
        at += len(gone_here)
        settled = _is_settled(segment, topic, now_us)
        plans.append(_Plan(segment, keep & ~gone_here if settled else keep, gone_here, settled))
    return plans


def keys_of(chunk: Chunk) -> pa.Array:
    """The key of each event, in a form that can be compared."""
    return comparable_keys(chunk.batch.column(chunk.topic.key))


def tombstones_of(chunk: Chunk) -> Any:
    """Which events say that their key was deleted."""
    gone = np.zeros(chunk.batch.num_rows, dtype=bool)
    if "_deleted" in chunk.batch.schema.names:
        gone |= chunk.batch.column("_deleted").fill_null(False).to_numpy(zero_copy_only=False)
    if not chunk.topic.has_schema:
        gone |= chunk.batch.column("value").is_null().to_numpy(zero_copy_only=False)
    return gone


def _groups(plans: Sequence[_Plan], segment_bytes: int) -> list[list[_Plan]]:
    """What becomes one file: neighbours without tombstones that anybody needs, up to a segment's size."""
    groups: list[list[_Plan]] = []
    size = 0
    for plan in plans:
        size += plan.segment.size
        if groups and plan.settled and groups[-1][-1].settled and size <= segment_bytes:
            groups[-1].append(plan)
        else:
            groups.append([plan])
            size = plan.segment.size
    return groups


def _rewrite(disk: Disk, partition: Partition, group: Sequence[_Plan], *, now_us: int) -> None:
    first = group[0].segment
    compacted = Compacted(
        max(plan.segment.compacted.at_us if plan.segment.compacted else now_us for plan in group),
        sum(int(np.count_nonzero(plan.tombstones & plan.keep)) for plan in group),
    )
    data = encode_sealed(_pieces(group, partition), topic=partition.topic, compacted=compacted)
    write_sealed(disk, partition.folder, first.base, data)
    disk.reach("compaction: replaced one")
    for plan in group[1:]:
        disk.remove(f"{partition.folder}/{sealed_name(plan.segment.base)}")
        disk.reach("compaction: removed one")
    if len(group) > 1:
        disk.sync_folder(partition.folder)


def _pieces(group: Sequence[_Plan], partition: Partition) -> Iterator[Piece]:
    for plan in group:
        at = 0
        for piece in plan.segment.pieces(partition.topic, partition.number):
            rows = piece.chunk.batch.num_rows
            yield msgspec.structs.replace(piece, chunk=_kept(piece.chunk, plan.keep[at : at + rows]))
            at += rows


def _kept(chunk: Chunk, keep: Any) -> Chunk:
    batch = chunk.batch.filter(pa.array(keep))
    if "_deleted" in batch.schema.names and not batch.column("_deleted").true_count:
        batch = batch.drop_columns(["_deleted"])
    return msgspec.structs.replace(chunk, batch=batch, offsets=chunk.all_offsets()[keep], end=chunk.end_offset)
