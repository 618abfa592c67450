"""A number in a file of its own, which a task tells the driver: as digits, moved to its name when they are all there.

It is not synced: what a power loss takes is found again, or was a count for people. So a file without digits is one that was not told.
Several processes may tell the same at once; each writes a draft of its own, `<path>.<process>.new`.
"""

from __future__ import annotations

import os

from headwater.log.disk.atomic_file import read_file, replace_file
from headwater.log.disk.disk import Disk

DRAFT = ".new"


def write_number(disk: Disk, path: str, number: int, *, point: str) -> None:
    """Tells a number; the folder is made where it is missing."""
    disk.make_folder(path.rpartition("/")[0])
    draft = f"{path}.{os.getpid()}{DRAFT}"
    replace_file(disk, path, [str(number).encode("ascii")], point=point, sync=False, sync_folder=False, draft=draft)


def read_number(disk: Disk, path: str) -> int | None:
    """What was told; None where nothing was, or where a power loss has taken it."""
    try:
        return int(read_file(disk, path))
    except (FileNotFoundError, ValueError):
        return None


def names_in(disk: Disk, folder: str) -> list[str]:
    """The names in a folder; none where there is no folder."""
    try:
        return disk.names(folder)
    except FileNotFoundError:
        return []
