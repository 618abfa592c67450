"""The files of a partition (see `partition`): those of one that holds nothing yet, and which of them were begun and do not count."""

from __future__ import annotations

from headwater.log.disk import Disk
from headwater.log.frame import NO_TIME
from headwater.log.head import Mark, create_head
from headwater.log.segment import SegmentHeader, create_segment

ALL = -1
"""In place of a partition's number: every partition of the topic."""

FIRST_HEADER = SegmentHeader(0, NO_TIME, 0, 0, {})


def create_partition(disk: Disk, folder: str, header: SegmentHeader = FIRST_HEADER) -> None:
    """The files of an empty partition; one that is split off goes on with the times and producers of its parent."""
    disk.make_folder(folder)
    for name in ("lock", "sync", "seal"):
        disk.open(f"{folder}/{name}", "create").close()
    position = create_segment(disk, folder, header)
    create_head(disk, f"{folder}/head", Mark(position=position, running=header.running, appended=header.appended))
    disk.sync_folder(folder)


def bases_of(disk: Disk, folder: str, ending: str) -> list[int]:
    """The base offsets in the names of a partition's files with an ending; a stranger's file has none."""
    stems = [name.removesuffix(ending) for name in disk.names(folder) if name.endswith(ending)]
    return [int(stem) for stem in stems if stem.isascii() and stem.isdigit()]


def remove_begun(disk: Disk, folder: str, base: int) -> None:
    """Removes what writers that died have begun behind the newest segment that counts; the caller syncs the folder.

    A sealed segment with its base stands for events that were not published (see `gaps`).
    """
    for ending, first in ((".frames", base + 1), (".arrow", base), (".index", base)):
        for begun in bases_of(disk, folder, ending):
            if begun >= first:
                disk.remove(f"{folder}/{begun:020d}{ending}")
