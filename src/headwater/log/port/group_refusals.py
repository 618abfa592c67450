"""What a group refuses: a change while it has members, and the commit of one who is not the owner."""

from __future__ import annotations

from collections.abc import Iterable

from headwater.log.port.assignment import Place
from headwater.model.errors import GroupInUse, NotOwner


def group_in_use(group: str, pids: Iterable[int | None]) -> GroupInUse:
    """The refusal of a reset."""
    known = list(pids)
    return GroupInUse(
        f"Group {group!r} has {len(known)} members that live (processes {sorted({pid for pid in known if pid})}).",
        advice="Close its consumers first; offsets that move under a reader would be overwritten by its commits.",
    )


def not_owner(group: str, place: Place) -> NotOwner:
    """The refusal of a commit."""
    return NotOwner(
        f"Partition {place[1]} of topic {place[0]!r} does not belong to this member of group {group!r} any more.",
        advice="It did not poll for too long, or its partitions were given to others; poll again, and what was not "
        "committed comes again to whoever owns it now.",
    )
