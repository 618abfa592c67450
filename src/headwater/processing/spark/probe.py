"""A probe: what a task sees of the machine that it runs on, told before a query depends on it.

It travels by value (see `serialization`) and imports nothing of ours, so it also runs where ours is missing, and can say so.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time

WANTED = ("headwater", "pyarrow", "numpy", "msgspec", "sqlglot", "confluent_kafka")
"""What our code imports in a task on Kafka."""

_LONG_ENOUGH_S = 0.2


def look(number: int, folders: list[str], name: str) -> dict[str, object]:
    """Which modules are missing, and which folders do not have the file of this name or take no other one beside it."""
    found: dict[str, object] = {"host": socket.gethostname(), "python": sys.executable, "version": ""}
    missing = []
    for module in WANTED:
        try:
            version = version_of(module)
        except ImportError as error:
            missing.append(error.name or module)
        else:
            if module == "headwater":
                found["version"] = version
    away = []
    for folder in folders:
        beside = os.path.join(folder, f"{name}.{number}")
        try:
            os.stat(os.path.join(folder, name))
            with open(beside, "xb"):
                pass
            os.unlink(beside)
        except OSError as error:
            away.append((folder, error.strerror or str(error)))
    time.sleep(_LONG_ENOUGH_S)  # the next task then goes to another worker
    return found | {"missing": missing, "away": away}


def version_of(module: str) -> str:
    """What a module says its version is; `ImportError` where there is none."""
    return str(getattr(importlib.import_module(module), "__version__", ""))
