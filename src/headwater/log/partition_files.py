"""The files of a partition that holds nothing yet (see `partition`)."""

from __future__ import annotations

from headwater.log.disk import Disk
from headwater.log.frame import NO_TIME
from headwater.log.head import Mark, create_head
from headwater.log.segment import SegmentHeader, create_segment

FIRST_HEADER = SegmentHeader(0, NO_TIME, 0, 0, {})


def create_partition(disk: Disk, folder: str, header: SegmentHeader = FIRST_HEADER) -> None:
    """The files of an empty partition; one that is split off goes on with the times and producers of its parent."""
    disk.make_folder(folder)
    for name in ("lock", "sync", "seal"):
        disk.open(f"{folder}/{name}", "create").close()
    position = create_segment(disk, folder, header)
    create_head(disk, f"{folder}/head", Mark(position=position, running=header.running, appended=header.appended))
    disk.sync_folder(folder)
