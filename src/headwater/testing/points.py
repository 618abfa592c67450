"""The crash points: the names that the log gives to the steps between which a crash may fall."""

from __future__ import annotations

import re
from importlib.resources import files

# What only some programs reach has rounds and histories of its own; writers and readers never come by there.
_KEEPING = ("retention:", "compaction:", "archive:", "overload:")
_QUEUES = ("queue:",)
_GROUPS = ("group:",)
_COPIES = ("backup:", "restore:")
_STAGES = ("stage:",)
_REACH = re.compile(r"""\.reach\(\s*["']([^"']+)["']\s*\)""")


def crash_points() -> list[str]:
    """Every point that appending, reading and sealing reach."""
    return [
        point for point in _all_points() if not point.startswith((*_KEEPING, *_QUEUES, *_GROUPS, *_COPIES, *_STAGES))
    ]


def keeping_points() -> list[str]:
    """Every point of what keeps a topic small."""
    return _beginning(_KEEPING)


def queue_points() -> list[str]:
    """Every point that queues reach."""
    return _beginning(_QUEUES)


def group_points() -> list[str]:
    """Every point that members of groups reach."""
    return _beginning(_GROUPS)


def stage_points() -> list[str]:
    """Every point that stages reach."""
    return _beginning(_STAGES)


def copy_points() -> list[str]:
    """Every point of backups and restores."""
    return _beginning(_COPIES)


def _beginning(prefixes: tuple[str, ...]) -> list[str]:
    return [point for point in _all_points() if point.startswith(prefixes)]


def _all_points() -> list[str]:
    """What the source says."""
    found: set[str] = set()
    for module in files("headwater.log").iterdir():
        if module.name.endswith(".py"):
            found.update(_REACH.findall(module.read_text(encoding="utf-8")))
    return sorted(found)
