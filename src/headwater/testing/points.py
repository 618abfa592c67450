"""The crash points: the names that the log gives to the steps between which a crash may fall."""

from __future__ import annotations

import re
from importlib.resources import files

_REACH = re.compile(r"""\.reach\(\s*["']([^"']+)["']\s*\)""")


def crash_points() -> list[str]:
    """Every point that writers and readers of the log reach, read from its source."""
    return _points(of_groups=False)


def group_crash_points() -> list[str]:
    """Every point that only members of groups reach."""
    return _points(of_groups=True)


def _points(*, of_groups: bool) -> list[str]:
    found: set[str] = set()
    for module in files("headwater.log").iterdir():
        if module.name.endswith(".py") and module.name.startswith("group_") == of_groups:
            found.update(_REACH.findall(module.read_text(encoding="utf-8")))
    return sorted(found)
