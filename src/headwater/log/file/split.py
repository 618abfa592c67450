"""A split in a folder: a topic gets more partitions while others write to it and read it (see `headwater.log.port.split`).

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
  which the next writer makes even; killed after it, the split has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from headwater.log.disk.disk import Disk
from headwater.log.disk.gate import Held, hold
from headwater.log.disk.text import write_text
from headwater.log.file.handles import Handles
from headwater.log.file.partition.head import Mark
from headwater.log.file.partition.partition import create_partition
from headwater.log.file.segments.segment import ProducerSequence, Segment, SegmentHeader, segment_name
from headwater.log.port.split import after_split, check_fences, check_split
from headwater.log.port.topic import Topic, topic_to_json
from headwater.model.errors import Damaged, StorageError

Fence = tuple[Mark, dict[bytes, ProducerSequence]]


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
