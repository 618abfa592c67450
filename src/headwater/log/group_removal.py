"""Removing a group: what it has read is forgotten, and a group of its name that comes later begins anew.

Its files stay: other processes may have them open, and two groups of one name with different locks would both believe in
themselves. In a local log the file `groups/<group>/deleted` is the decision; the offsets are wiped after it, or, where the remover
was killed, by the first member that enters, which takes the file away when the wiped offsets are on disk.
"""

from __future__ import annotations

from headwater.log.disk import Disk
from headwater.log.group import Committed, Owner, SharedGroup, boot_us, living, next_roster
from headwater.log.store import Store
from headwater.model.errors import GroupInUse, Unsupported

_MARK = "deleted"


def delete_group(store: Store, group: str) -> None:
    """Forgets a group; refused while it has members that live."""
    shared = store.group(group, create=False)
    mark = getattr(shared, "mark_deleted", None)
    if mark is None:
        raise Unsupported(
            f"Groups of {store.url} are not removed from here.", advice="Use the broker's own kafka-consumer-groups."
        )
    with shared.locked():
        check_unused(shared, group)
        mark()
        shared.write_roster(next_roster(shared.roster(), {}))
        forget_offsets(shared)


def check_unused(shared: SharedGroup, group: str) -> None:
    """Refuses where some member lives; the caller holds the group's lock."""
    alive = living(shared, shared.roster(), boot_us())
    if alive:
        pids = sorted({member.pid for member in alive.values()})
        raise GroupInUse(
            f"Group {group!r} has {len(alive)} members that live (processes {pids}).",
            advice="Close its consumers first; offsets that move under a reader would be overwritten by its commits.",
        )


def forget_offsets(shared: SharedGroup) -> None:
    """No partition has an owner or a committed offset any more; the caller holds the group's lock.

    The last transaction stays known, so that none of before is applied again.
    """
    for place in shared.places():
        before = shared.committed(place)
        shared.set_owner(place, Owner())
        shared.set_committed(place, Committed(transaction=before.transaction, sequence=before.sequence + 1))


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
