"""The crash points: the names that the log gives to the steps between which a crash may fall."""

from __future__ import annotations

import re
from importlib.resources import files

GROUP = "group: "
"""With it begin the points that members of groups reach; they have rounds of their own."""

_REACH = re.compile(r"""\.reach\(\s*["']([^"']+)["']\s*\)""")


def crash_points() -> list[str]:
    """Every point that appending and reading reach, read from the source."""
    return [point for point in _all_points() if not point.startswith(GROUP)]


def group_points() -> list[str]:
    """Every point that members of groups reach."""
    return [point for point in _all_points() if point.startswith(GROUP)]


def _all_points() -> list[str]:
    found: set[str] = set()
    for module in files("headwater.log").iterdir():
        if module.name.endswith(".py"):
            found.update(_REACH.findall(module.read_text(encoding="utf-8")))
    return sorted(found)
