"""Replacing a file as a whole: written beside its path, synced, moved there, and its folder synced.

Whoever looks, at whichever moment somebody is killed or the power fails, finds the old file or the new one. What is left under the
name `<path>.new` by one who died is written over by the next.
"""

from __future__ import annotations

from collections.abc import Iterable

from headwater.log.disk import Buffer, Disk


def replace_file(
    disk: Disk,
    path: str,
    pieces: Iterable[Buffer],
    *,
    point: str = "replace:",
    sync: bool = True,
    sync_folder: bool = True,
) -> None:
    """Puts a file of these bytes at a path; its callers see to it that two of them do not do so at once.

    `sync=False` is for what need not outlive a power loss, `sync_folder=False` for callers that sync the folder later, with more in it.
    `point` begins the names of the two crash points.
    """
    file = disk.open(f"{path}.new", "create")
    try:
        file.truncate(0)
        position = 0
        for piece in pieces:
            file.write_at(position, [piece])
            position += memoryview(piece).nbytes
        if sync:
            file.sync()
    finally:
        file.close()
    disk.reach(f"{point} written")
    disk.rename(f"{path}.new", path)
    disk.reach(f"{point} named")
    if sync_folder:
        disk.sync_folder(path.rpartition("/")[0])
