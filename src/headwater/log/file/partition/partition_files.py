"""The files of a partition (see `partition`): those of one that holds nothing yet, and which of them were begun and do not count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from headwater.log.disk.disk import Disk
from headwater.log.file.partition.head import Head, Mark, create_head
from headwater.log.file.segments.segment import Segment, SegmentHeader, create_segment
from headwater.model.clock import NO_TIME
from headwater.model.errors import Damaged

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

    A sealed segment with its base stands for events that were not published (see `copies`).
    """
    for ending, first in ((".frames", base + 1), (".arrow", base), (".index", base)):
        for begun in bases_of(disk, folder, ending):
            if begun >= first:
                disk.remove(f"{folder}/{begun:020d}{ending}")


def publish_past_damage(disk: Disk, folder: str, mark: Mark) -> None:
    """Publishes a transaction's end in a partition that cannot be opened, as far as its head can still say anything.

    The caller settles the transaction, so nobody has written behind it.
    """
    with suppress(Damaged, FileNotFoundError), _head_past_damage(disk, folder, mark) as head:
        head.publish_past_damage(mark)


def poison_past_damage(disk: Disk, folder: str, mark: Mark) -> None:
    """Closes a partition that cannot be opened to appends, also to those who have it open, as `publish_past_damage` publishes there."""
    with suppress(Damaged, FileNotFoundError), _head_past_damage(disk, folder, mark) as head:
        head.set_poisoned(poisoned=True)


@contextmanager
def _head_past_damage(disk: Disk, folder: str, mark: Mark) -> Iterator[Head]:
    """The head, if the frames before a mark are there: another topic of the same name does not have them."""
    segment = Segment(disk, folder, mark.base)
    try:
        ends = [(at + frame.stride, frame.header_crc) for at, frame in segment.scan(segment.start, end=mark.position)]
    finally:
        segment.close()
    if ends[-1:] != [(mark.position, mark.chain)]:
        raise Damaged(f"The frames before {mark.end} are not in {folder}.", advice="Run `headwater doctor`.")
    head = Head(disk, f"{folder}/head")
    try:
        yield head
    finally:
        head.close()
