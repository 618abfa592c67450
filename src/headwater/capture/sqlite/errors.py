"""SQLite's errors in our own words."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headwater.model.errors import Damaged, DiskFull, HeadwaterError, NoAccess, StorageError, TimedOut

_KNOWN: tuple[tuple[str, type[HeadwaterError], str, str], ...] = (
    (
        "locked",
        TimedOut,
        "is being written by another program, which does not come to an end",
        "Look for a transaction left open.",
    ),
    (
        "readonly",
        NoAccess,
        "cannot be written, and a capture puts triggers into the database",
        "Give the user write access.",
    ),
    ("unable to open", NoAccess, "cannot be opened", "Check the rights on the file and its folder."),
    ("not a database", Damaged, "is no SQLite database", "Name the file of one."),
    ("malformed", Damaged, "is damaged", "Ask it: PRAGMA integrity_check; and put a copy back."),
    ("full", DiskFull, "cannot grow: the disk is full", "Make room; the capture goes on by itself."),
)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """What SQLite raises inside, as an error of ours that names the file and what to do."""
    try:
        yield
    except sqlite3.Error as error:
        for word, kind, what, advice in _KNOWN:
            if word in str(error):
                raise kind(f"{path} {what}.", advice=advice) from error
        raise StorageError(f"{path}: SQLite says {error}.", advice="Check the file: PRAGMA integrity_check.") from error


@contextmanager
def locked_is_fine() -> Iterator[None]:
    """For what can be done another time: somebody else writes at this moment."""
    with suppress(TimedOut):
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
