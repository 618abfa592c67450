"""The crash points: the names that the log gives to the steps between which a crash may fall."""

from __future__ import annotations

import re
from importlib.resources import files

# Whoever takes or restores a backup dies in the tests of backups; the writers of a crash round never come by there.
_APART = {"backup.py", "vault.py", "restore.py"}
_REACH = re.compile(r"""\.reach\(\s*["']([^"']+)["']\s*\)""")


def crash_points() -> list[str]:
    """Every point that some code of the log reaches, read from its source."""
    found: set[str] = set()
    for module in files("headwater.log").iterdir():
        if module.name.endswith(".py") and module.name not in _APART:
            found.update(_REACH.findall(module.read_text(encoding="utf-8")))
    return sorted(found)
