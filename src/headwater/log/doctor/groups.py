"""What the doctor looks at in groups: the generation, the roster, and the offset of each partition.

A roster is made again by the next member. An offset is mended from its newest version that is whole; where there is none, nobody knows
how far the group came, so it begins at the first event there is: it passes over nothing, and does some of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from headwater.log.disk.disk import Disk
from headwater.log.disk.gate import Gate
from headwater.log.disk.slots import SlotFile, create_slot_file
from headwater.log.file.groups import (
    COMMITTED,
    FORMAT,
    GENERATION,
    GENERATION_MAGIC,
    OWNER,
    FileGroup,
    group_places,
    lose_offset,
    open_slot,
    recover_slot,
    slot_path,
)
from headwater.log.file.partition.head import Head
from headwater.log.port.assignment import Place
from headwater.model.clock import system_clock
from headwater.model.errors import Damaged


def group_checks(disk: Disk, folder: str) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """For the doctor: every file of every group, how to look at it, and how to mend it when no member lives."""
    gate = Gate("The group", "")
    for name in sorted(disk.names(f"{folder}/groups")) if disk.exists(f"{folder}/groups") else ():
        path = f"{folder}/groups/{name}"
        if not disk.exists(f"{path}/offsets"):
            continue
        yield f"{path}/generation", partial(_check_generation, disk, path), partial(_mend_generation, disk, path)

        def roster(path: str = path, name: str = name) -> None:
            group = FileGroup(disk, path, name, gate=gate, settle=lambda: None, writable=False)
            try:
                group.roster()
            finally:
                group.close()

        yield f"{path}/roster", roster, partial(disk.remove, f"{path}/roster")
        for place in group_places(disk, path):
            slot = slot_path(path, place)
            yield slot, partial(_check_slot, disk, slot), partial(_mend_slot, disk, slot, folder, place)


def _check_generation(disk: Disk, folder: str) -> None:
    path = f"{folder}/generation"
    slot = SlotFile(disk, path, magic=GENERATION_MAGIC, format_max=FORMAT, shapes=(GENERATION,), writable=False)
    try:
        slot.read(0)
    finally:
        slot.close()


def _mend_generation(disk: Disk, folder: str) -> None:
    """One that is later than any that was counted; the roster of an unknown generation is nobody's."""
    disk.remove(f"{folder}/roster")
    facts = ((GENERATION, (system_clock(),)),)
    create_slot_file(disk, f"{folder}/generation", magic=GENERATION_MAGIC, version=FORMAT, facts=facts)
    disk.sync_folder(folder)


def _check_slot(disk: Disk, path: str) -> None:
    slot = open_slot(disk, path, writable=False)
    try:
        slot.read(COMMITTED)
        slot.read(OWNER)
    finally:
        slot.close()


def _mend_slot(disk: Disk, path: str, folder: str, place: Place) -> str:
    """From the newest version that is whole. Without one nobody knows how far the group came: it begins at the first event there is."""
    with suppress(Damaged):
        slot = open_slot(disk, path, writable=True)
        whole = slot.read_all(COMMITTED)
        slot.close()
        if whole:
            recover_slot(disk, path, None)
            return ""
    lose_offset(disk, path, _first_offset(disk, f"{folder}/topics/{place[0]}/{place[1]}"))
    return (
        f"How far the group had read partition {place[1]} of topic {place[0]!r} is lost: it reads it from the first event "
        "there is, unless `headwater groups reset` says otherwise."
    )


def _first_offset(disk: Disk, folder: str) -> int:
    """The first that a partition or its archive holds; 0 where nobody can say, so that nothing is passed over."""
    try:
        head = Head(disk, f"{folder}/head", writable=False)
    except (Damaged, FileNotFoundError):
        return 0
    try:
        return head.firsts()[0]
    except Damaged:
        return 0
    finally:
        head.close()
