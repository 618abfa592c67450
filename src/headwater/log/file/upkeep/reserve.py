"""The reserve: room on the disk that a partition of a topic with `overload="buffer"` has set aside for itself.

`<partition>/reserve` is a file of allocated zeros that nobody reads. It is as large as the part of `buffer_bytes` that is not in use:
cut by what the partition holds above its `bytes_max`, and by what it took when the disk was full; made whole again when it is tidied
and there is room. So a burst finds its room even where others have filled the disk, and the two together never take more than
`bytes_max` and `buffer_bytes`.

Since it holds nothing, a crash, a race of two writers or its loss cost no event: at worst there is less set aside until it is
tidied next.
"""

from __future__ import annotations

from headwater.log.disk.disk import Disk
from headwater.log.file.partition.partition import Partition
from headwater.log.file.upkeep.retention import segment_sizes
from headwater.model.errors import DiskFull

NAME = "reserve"

_MORE_BYTES = 64 << 10
"""Given back beside what a batch takes: a new segment and its index may be needed too."""


def fill(disk: Disk, partition: Partition, *, coming_bytes: int = 0) -> None:
    """Sets room aside as far as it is to be had, but for what is in use or coming. Gives it back where the topic wants none."""
    path = f"{partition.folder}/{NAME}"
    if partition.topic.overload != "buffer":
        disk.remove(path)
        return
    over = 0
    if partition.topic.bytes_max is not None:
        over = max(0, sum(segment_sizes(disk, partition).values()) + coming_bytes - partition.topic.bytes_max)
    file = disk.open(path, "create")
    try:
        size, wanted = file.size(), max(0, partition.topic.buffer_bytes - over)
        if size > wanted:
            file.truncate(wanted)
        elif size < wanted:
            # Never more than half of what is free: an allocation that fails may keep what it got, and others need room too.
            file.allocate(min(wanted, size + disk.free_bytes(partition.folder) // 2))
    except DiskFull:
        return
    finally:
        file.close()


def take(disk: Disk, partition: Partition, size: int) -> bool:
    """Gives the disk back what so many bytes of events need; False where nothing is left that could help."""
    path = f"{partition.folder}/{NAME}"
    if not disk.exists(path):
        return False
    file = disk.open(path, "write")
    try:
        left = file.size()
        if left < size:
            return False
        file.truncate(max(0, left - size - _MORE_BYTES))
        disk.reach("overload: reserve taken")
        return True
    finally:
        file.close()
