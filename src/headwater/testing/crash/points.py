"""The crash points: the names that the log gives to the steps between which a crash may fall."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

# What only some programs reach has rounds and histories of its own; writers and readers never come by there.
_KEEPING = ("retention:", "compaction:", "archive:", "overload:")
_QUEUES = ("queue:",)
_QUEUES_RECOVERY = ("queue recovery:",)
_GROUPS = ("group:",)
_COPIES = ("backup:", "restore:")
_GAPS = ("gap:",)
_SPLITS = ("split:",)
_REMOVAL = ("removal:",)
_STAGES = ("stage:",)
_HEARTBEATS = ("heartbeat:",)
_REPLACING = ("replace:",)
_RARE = ("heal:", "records:")
_REACH = re.compile(r"""\.reach\(\s*["']([^"']+)["']\s*\)""")
_REPLACES = re.compile(r"""\bpoint(?:: str)? ?= ?"([^"]+)\"""")


def crash_points() -> list[str]:
    """Every point that appending, reading and sealing reach."""
    others = (
        *_KEEPING,
        *_QUEUES,
        *_GROUPS,
        *_COPIES,
        *_GAPS,
        *_SPLITS,
        *_REMOVAL,
        *_STAGES,
        *_HEARTBEATS,
        *_REPLACING,
        *_RARE,
        *_QUEUES_RECOVERY,
    )
    return [point for point in _all_points() if not point.startswith(others)]


def rare_points() -> list[str]:
    """Every point to which only a failed sync or thousands of transactions lead."""
    return _beginning(_RARE)


def keeping_points() -> list[str]:
    """Every point of what keeps a topic small."""
    return _beginning(_KEEPING)


def queue_points() -> list[str]:
    """Every point that queues reach."""
    return _beginning(_QUEUES)


def queue_recovery_points() -> list[str]:
    """Every point that the first to open a queue after a power loss reaches."""
    return _beginning(_QUEUES_RECOVERY)


def group_points() -> list[str]:
    """Every point that members of groups reach."""
    return _beginning(_GROUPS)


def stage_points() -> list[str]:
    """Every point that stages reach."""
    return _beginning(_STAGES)


def heartbeat_points() -> list[str]:
    """Every point of heartbeats."""
    return _beginning(_HEARTBEATS)


def copy_points() -> list[str]:
    """Every point of backups and restores."""
    return _beginning(_COPIES)


def gap_points() -> list[str]:
    """Every point of placing events with gaps between their offsets, which is also a roll, a sealing and a retention."""
    shared = ("roll: begun", "roll: created", "roll: written published", "seal: written", "seal: named")
    return [*_beginning(_GAPS), *shared, "retention: first published", "retention: given up", "retention: removed one"]


def split_points() -> list[str]:
    """Every point of adding partitions to a topic."""
    return _beginning(_SPLITS)


def replacing_points() -> list[str]:
    """The points of replacing a file as a whole, wherever that has no names of its own."""
    return _beginning(_REPLACING)


def removal_points() -> list[str]:
    """Every point at which a group or a queue is removed."""
    return _beginning(_REMOVAL)


def _beginning(prefixes: tuple[str, ...]) -> list[str]:
    return [point for point in _all_points() if point.startswith(prefixes)]


def _all_points() -> list[str]:
    """What the source says."""
    found: set[str] = set()
    for source in _sources(files("headwater.log")):
        found.update(_REACH.findall(source))
        found.update(f"{point} {step}" for point in _REPLACES.findall(source) for step in ("written", "named"))
    return sorted(found)


def _sources(folder: Traversable) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _sources(entry)
        elif entry.name.endswith(".py"):
            yield entry.read_text(encoding="utf-8")
