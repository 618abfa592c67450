"""Removing a group: what it has read is forgotten, and a group of its name that comes later begins anew.

Its files stay: other processes may have them open, and two groups of one name with different locks would both believe in
themselves. In a local log the file `groups/<group>/deleted` is the decision; the offsets are wiped after it, or, where the remover
was killed, by the first member that enters, which takes the file away when the wiped offsets are on disk.
"""

from __future__ import annotations

from headwater.log.disk.disk import Disk

_MARK = "deleted"


def is_marked(disk: Disk, folder: str) -> bool:
    """Whether the group in a folder was removed."""
    return disk.exists(f"{folder}/{_MARK}")


def mark(disk: Disk, folder: str) -> None:
    """Decides that the group in a folder is removed; the caller holds its lock."""
    disk.open(f"{folder}/{_MARK}", "create").close()
    disk.sync_folder(folder)
    disk.reach("removal: group marked")


def unmark(disk: Disk, folder: str) -> None:
    """It begins anew; the caller holds its lock, and its offsets are wiped and on disk."""
    disk.reach("removal: group begins anew")
    disk.remove(f"{folder}/{_MARK}")
    disk.sync_folder(folder)
