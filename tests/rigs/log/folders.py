"""Folders of local logs, for tests of what a folder is: everybody can reach it, and some events are in it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headwater as hw


def open_folders() -> Iterator[Path]:
    """A folder that every user can reach, for a module's fixture; no log is in it yet."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        yield Path(parent) / "log"


def filled(folder: Path, *, events: int = 10, **settings: Any) -> hw.Log:
    """A log with one topic of bytes in one partition."""
    log = hw.open_log(str(folder))
    log.create_topic("raw", partitions=1, **settings)
    log.append("raw", [b"%d" % number for number in range(events)])
    return log
