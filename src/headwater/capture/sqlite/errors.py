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
        "is locked by a long transaction of another program",
        "End the open transaction.",
    ),
    (
        "readonly",
        NoAccess,
        "is read-only, but a capture creates triggers in the database",
        "Grant the user write access.",
    ),
    ("unable to open", NoAccess, "cannot be opened", "Check the permissions of the file and its folder."),
    ("not a database", Damaged, "is not an SQLite database", "Use the path of an SQLite database."),
    ("malformed", Damaged, "is damaged", "Run PRAGMA integrity_check, and restore a backup."),
    ("full", DiskFull, "cannot grow: the disk is full", "Free disk space. The capture then continues."),
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
        raise StorageError(
            f"{path}: SQLite reports {error}.", advice="Check the file with PRAGMA integrity_check."
        ) from error


@contextmanager
def locked_is_fine() -> Iterator[None]:
    """For what can be done another time: somebody else writes at this moment."""
    with suppress(TimedOut):
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
