"""Replacing a file as a whole: written beside its path, synced, moved there, and its folder synced.

Whoever looks, at whichever moment somebody is killed or the power fails, finds the old file or the new one. What is left under the
name `<path>.new` by one who died is written over by the next, and by the doctor called a leftover. One who finds the disk full leaves
nothing: what was begun would take up the room that is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from headwater.log.disk.disk import Buffer, Disk
from headwater.model.errors import StorageError


def replace_file(
    disk: Disk,
    path: str,
    pieces: Iterable[Buffer],
    *,
    point: str = "replace:",
    sync: bool = True,
    sync_folder: bool = True,
    draft: str | None = None,
) -> None:
    """Puts a file of these bytes at a path; its callers see to it that two of them do not do so at once.

    Where two may, each gives the name of a `draft` of its own, and the later file stays.
    `sync=False` is for what need not outlive a power loss, `sync_folder=False` for callers that sync the folder later, with more in it.
    `point` begins the names of the two crash points.
    """
    draft = draft or f"{path}.new"
    try:
        _write_draft(disk, draft, pieces, sync=sync)
    except StorageError:
        with suppress(StorageError):
            disk.remove(draft)
        raise
    disk.reach(f"{point} written")
    disk.rename(draft, path)
    disk.reach(f"{point} named")
    if sync_folder:
        disk.sync_folder(path.rpartition("/")[0])


def read_file(disk: Disk, path: str) -> bytes:
    """All bytes of a file; `FileNotFoundError` where it is missing."""
    file = disk.open(path)
    try:
        return file.read_at(0, file.size())
    finally:
        file.close()


def _write_draft(disk: Disk, draft: str, pieces: Iterable[Buffer], *, sync: bool) -> None:
    file = disk.open(draft, "create")
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
