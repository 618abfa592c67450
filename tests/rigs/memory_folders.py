"""Folders in memory, where there is some, for tests that kill: they need no disk, since a kill cannot show what a sync does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/dev/shm")


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A new folder, removed at the end."""
    with tempfile.TemporaryDirectory(
        prefix="headwater-test-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None
    ) as folder:
        yield Path(folder)
