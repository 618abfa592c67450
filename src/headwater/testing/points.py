"""The crash points: the names that the log gives to the steps between which a crash may fall."""

from __future__ import annotations

import re
from importlib.resources import files

_REACH = re.compile(r"""\.reach\(\s*["']([^"']+)["']\s*\)""")


_COPIES = ("backup", "restore")


def crash_points() -> list[str]:
    """Every point that appending and reading reach, read from the source."""
    return [point for point in _all_points() if not point.startswith(_COPIES)]


def copy_points() -> list[str]:
    """Every point of backups and restores, which the writers of a crash round never come by."""
    return [point for point in _all_points() if point.startswith(_COPIES)]


def _all_points() -> list[str]:
    found: set[str] = set()
    for module in files("headwater.log").iterdir():
        if module.name.endswith(".py"):
            found.update(_REACH.findall(module.read_text(encoding="utf-8")))
    return sorted(found)
