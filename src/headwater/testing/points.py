"""The crash points: the names that the log gives to the steps between which a crash may fall."""

from __future__ import annotations

import re
from importlib.resources import files

# Whoever takes or restores a backup dies in the tests of backups; the writers of a crash round never come by there.
_APART = {"backup.py", "vault.py", "restore.py"}
_REACH = re.compile(r"""\.reach\(\s*["']([^"']+)["']\s*\)""")


_KEEPING = ("retention:", "compaction:", "archive:", "overload:")


def crash_points() -> list[str]:
    """Every point that appending, reading and sealing reach."""
    return [point for point in _all_points() if not point.startswith(_KEEPING)]


def keeping_points() -> list[str]:
    """Every point of what keeps a topic small: it needs topics with such settings, and has histories of its own."""
    return [point for point in _all_points() if point.startswith(_KEEPING)]


def _all_points() -> list[str]:
    """What the source says."""
    found: set[str] = set()
    for module in files("headwater.log").iterdir():
        if module.name.endswith(".py") and module.name not in _APART:
            found.update(_REACH.findall(module.read_text(encoding="utf-8")))
    return sorted(found)
