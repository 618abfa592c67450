"""A split: a topic gets more partitions while others write to it and read it, and every key keeps its order.

Partitions are added by multiples only. With `n` before and `k * n` after, the keys of partition `p` go to `p`, `p + n`,
`p + 2n` …, so each new partition has one parent. Where the parent ended at that moment is its fence: what the keys of the new
partition had before lies in the parent (or in its parents) below the fence, and nothing of them behind it. The topic's file
keeps the number before and the fences of each split; how many there were is the topic's generation.

The steps, under the lock of the catalog and the append and sync locks of all partitions in their order:
1. what is written is synced, so that no power loss takes the end back behind the fence;
2. the new partitions are made in a folder with a dot, each with the times and the producers' sequences that its parent has at
   the fence (a named producer that starts again must not store again what the parent holds), and renamed to their numbers;
3. `changes` in every parent's head becomes odd;
4. the topic's file is replaced. This is the moment at which it happens;
5. `changes` becomes even.

Invariants:
- a writer reads the topic's file again when `changes` is another number than it knows, under the append lock; so no event goes
  in that was placed by a number from before. It is refused (`Repartitioned`), and whoever placed it places it again. A batch
  that is stored already keeps its place, so a retry across a split stores nothing twice;
- a reader without a lock believes a topic's file only if `changes` was even before it read it;
- a process killed before step 4 leaves folders that nobody knows, which the next split removes, and perhaps odd `changes`,
  which the next writer makes even; killed after it, the split has happened;
- who reads a partition before its ancestors are read up to their fences sees keys out of order: `is_held` says when to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import numpy as np

from headwater.log.arrow.placement import place
from headwater.log.disk.disk import Disk
from headwater.log.disk.gate import Held, hold
from headwater.log.file.catalog import topic_to_json, write_text
from headwater.log.file.handles import Handles
from headwater.log.file.partition.head import Mark
from headwater.log.file.partition.partition_files import create_partition
from headwater.log.file.segments.segment import ProducerSequence, Segment, SegmentHeader, segment_name
from headwater.log.port.store import Store, Write
from headwater.log.port.topic import Split, Topic, check_topic
from headwater.model.errors import Damaged, Diverged, InvalidInput, StorageError

Fence = tuple[Mark, dict[bytes, ProducerSequence]]


def check_split(topic: Topic, partitions: object) -> None:
    """Refuses a number of partitions by which keys would not keep their order."""
    if not isinstance(partitions, int) or partitions < topic.partitions or partitions % topic.partitions:
        raise InvalidInput(
            f"Topic {topic.name!r} has {topic.partitions} partitions and cannot get {partitions!r}.",
            advice=f"Only to a multiple, so that keys keep their order: {2 * topic.partitions}, {3 * topic.partitions}, …",
        )


def after_split(topic: Topic, partitions: int, fences: Sequence[int]) -> Topic:
    """The topic with more partitions, whose parents ended at the fences."""
    split = Split(topic.partitions, tuple(fences))
    return check_topic(msgspec.structs.replace(topic, partitions=partitions, splits=(*topic.splits, split)))


def is_held(ancestors: Sequence[tuple[int, int]], reached: Callable[[int], int]) -> bool:
    """Whether a partition has to wait: some ancestor was not read up to its fence, where `reached` says how far it was."""
    return any(reached(number) < fence for number, fence in ancestors)


def place_again(store: Store, writes: Sequence[Write], *, sticky: int | None = None) -> list[Write]:
    """Writes that were refused because their topic was split, each as one for every partition its rows belong to now.

    They keep their stamps, and the columns of the schema by which the rows were made. Rows without a key go to the partition
    that `sticky` stands for, and stay where they were without it.
    """
    return [one for write in writes for one in _placed_again(write, store.refresh(write.topic.name), sticky)]


def _placed_again(write: Write, topic: Topic, sticky: int | None) -> list[Write]:
    if write.topic.generation == topic.generation or write.topic.id != topic.id:
        return [write]
    described = msgspec.structs.replace(write.topic, partitions=topic.partitions, splits=topic.splits)
    rows = np.arange(write.batch.num_rows) if write.indices is None else write.indices
    alone = write.partition if sticky is None else sticky
    placement = place(write.rows(), topic.key, topic.partitions, sticky=alone)
    return [
        msgspec.structs.replace(
            write, topic=described, partition=number, indices=write.indices if some is None else rows[some]
        )
        for number, some in placement.groups()
    ]


def check_fences(topic: Topic, wanted: Sequence[int] | None, fences: Sequence[int]) -> None:
    """Refuses to split a copy where its log was not split; the caller holds what keeps the ends where they are."""
    if wanted is not None and list(wanted) != list(fences):
        raise Diverged(
            f"Topic {topic.name!r} was to be split at offsets {list(wanted)}, and its partitions end at {list(fences)}.",
            advice="Something else writes to the copy. Delete that topic there, and mirror into a log of its own.",
        )


def split_topic(handles: Handles, name: str, partitions: int, *, at: Sequence[int] | None) -> Topic:
    """Splits a local topic; the caller holds the lock of the catalog."""
    topic = handles.refresh(name)
    check_split(topic, partitions)
    if partitions == topic.partitions:
        return topic
    parents = [handles.usable_partition(name, number) for number in range(topic.partitions)]
    held: Held = []
    try:
        for parent in parents:
            hold(held, parent.appending())
            hold(held, parent.syncing())
        fences = [parent.fence() for parent in parents]
        check_fences(topic, at, [mark.end for mark, _ in fences])
        handles.disk.reach("split: fenced")
        changed = after_split(topic, partitions, [mark.end for mark, _ in fences])
        _make_partitions(handles, topic, partitions, fences)
        for parent in parents:
            parent.count_change(is_done=False)
            handles.disk.reach("split: counted one")
        write_text(handles.disk, f"{handles.folder}/topics/{name}/topic", "topic", topic_to_json(changed))
        handles.disk.reach("split: written")
        for parent in parents:
            parent.count_change(is_done=True)
            handles.disk.reach("split: counted one again")
    finally:
        try:
            while held:
                held.pop().close()
        finally:
            held.clear()
    handles.signal(name)
    return handles.refresh(name)


def _make_partitions(handles: Handles, topic: Topic, partitions: int, fences: Sequence[Fence]) -> None:
    disk, folder = handles.disk, f"{handles.folder}/topics/{topic.name}"
    fresh = f"{handles.folder}/topics/.{topic.name}.{topic.id}.split"
    for left in [fresh, *(f"{folder}/{number}" for number in range(topic.partitions, partitions))]:
        if disk.exists(left):
            _check_empty(disk, left)
            disk.remove_folder(left)
    try:
        for number in range(topic.partitions, partitions):
            mark, producers = fences[number % topic.partitions]
            inherited = {name: ProducerSequence(found.epoch, found.last, 0) for name, found in producers.items()}
            create_partition(disk, f"{fresh}/{number}", SegmentHeader(0, mark.running, mark.appended, 0, inherited))
            disk.reach("split: partition made")
    except StorageError:
        disk.remove_folder(fresh)
        raise
    for number in range(topic.partitions, partitions):
        disk.rename(f"{fresh}/{number}", f"{folder}/{number}")
        disk.reach("split: partition named")
    disk.sync_folder(folder)
    disk.remove_folder(fresh)


def _check_empty(disk: Disk, folder: str) -> None:
    """What a dead split has left holds nothing, and may be torn by a power loss; whatever holds an event is no leftover."""
    with suppress(FileNotFoundError):
        for name in disk.names(folder):
            if name.endswith(".arrow") or (name.endswith(".frames") and _has_frames(disk, folder, name)):
                raise Damaged(
                    f"{folder} holds events, and its topic's file does not know of that partition.",
                    advice="The topic's file is older than the partition: restore it from a backup made after the split.",
                )


def _has_frames(disk: Disk, folder: str, name: str) -> bool:
    if name != segment_name(0):
        return True
    try:
        segment = Segment(disk, folder, 0)
    except Damaged:
        return False
    try:
        return segment.frame_at(segment.start) is not None
    finally:
        segment.close()
