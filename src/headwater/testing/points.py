"""The crash points: the names that the log gives to the steps between which a crash may fall."""

from __future__ import annotations

import re
from importlib.resources import files

_REACH = re.compile(r"""\.reach\(\s*["']([^"']+)["']\s*\)""")


def crash_points() -> list[str]:
    """Every point that some code of the log reaches, read from its source."""
    found: set[str] = set()
    for module in files("headwater.log").iterdir():
        if module.name.endswith(".py"):
            found.update(_REACH.findall(module.read_text(encoding="utf-8")))
    return sorted(found)
