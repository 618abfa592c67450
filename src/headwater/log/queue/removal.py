"""Removing a queue's group: what it has done of a topic is forgotten, and one of its name that comes later begins anew.

In a local log the file `queue` is taken away: that is the decision. Its windows are removed after it, or, where the remover was killed,
before the queue is made anew. Locks stay: they are never replaced. A handle that was opened before and has leased nothing yet finds no
`queue` when it wants to become a member; one that only looks finds its window marked as moved, and then a new one.
"""

from __future__ import annotations

from contextlib import suppress

from headwater.log.disk.disk import Disk
from headwater.log.queue.window import opened_window
from headwater.model.errors import Closed, Damaged, GroupInUse, GroupNotFound


def delete_local_queue(disk: Disk, folder: str, group: str, topic: str) -> None:
    """Removes the queue of a group on a topic; `GroupNotFound`, `GroupInUse` while some member lives."""
    where = f"{folder}/{group}/{topic}"
    if not disk.exists(f"{where}/queue"):
        raise no_queue(group, topic)
    lock = disk.open(f"{where}/lock", "write")
    try:
        lock.lock()
        if not disk.exists(f"{where}/queue"):
            raise no_queue(group, topic)
        alive = _bury_the_dead(disk, f"{where}/members")
        if alive:
            raise in_use(alive)
        disk.remove(f"{where}/queue")
        disk.sync_folder(where)
        disk.reach("removal: queue unnamed")
        forget_windows(disk, where)
    finally:
        lock.unlock()
        lock.close()


def forget_windows(disk: Disk, folder: str) -> None:
    """Removes the windows of a queue that is no more; nobody is a member of it."""
    names = [name for name in disk.names(folder) if name.endswith(".window")]
    for name in names:
        path = f"{folder}/{name}"
        with suppress(Damaged), opened_window(disk, path, writable=True) as window:
            window.moved = True  # whoever has it open looks for another
        disk.remove(path)
        disk.reach("removal: window removed")
    if names:
        disk.sync_folder(folder)


def no_queue(group: str, topic: str) -> GroupNotFound:
    """There is nothing to remove."""
    return GroupNotFound(
        f"Group {group!r} has no queue on topic {topic!r}.", advice="`headwater queues list` shows those there are."
    )


def in_use(members: int) -> GroupInUse:
    """Somebody works on it."""
    return GroupInUse(
        f"{members} consumer{'' if members == 1 else 's'} of the queue live{'s' if members == 1 else ''}.",
        advice="Close them first: what they have leased would be delivered again by nobody.",
    )


def was_deleted() -> Closed:
    """A handle outlived its queue."""
    return Closed("The queue was deleted.", advice="Open another with log.queue(…).")


def _bury_the_dead(disk: Disk, folder: str) -> int:
    """Removes what dead members left; how many live."""
    alive = 0
    for name in disk.names(folder):
        file = disk.open(f"{folder}/{name}", "write")
        try:
            if file.lock(wait=False):
                disk.remove(f"{folder}/{name}")
            else:
                alive += 1
        finally:
            file.close()
    return alive
