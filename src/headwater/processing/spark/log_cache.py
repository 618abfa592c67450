"""Logs that a process has open: a task, or a batch in the driver, finds the one that a task before it has opened.

A folder that was removed, and made again as another log at the same path, is opened again: a notebook does that, and so do tests.
"""

from __future__ import annotations

import os
from functools import lru_cache

from headwater.log.log import Log, open_log

LOGS_MAX = 8

_FILE = "file://"


def log_for_reading(url: str) -> Log:
    """The log, opened to be read, once in each process."""
    return _opened(url, os.getpid(), _which(url), read_only=True)


def log_for_writing(url: str) -> Log:
    """The log, opened to be written to, once in each process."""
    return _opened(url, os.getpid(), _which(url), read_only=False)


def _which(url: str) -> tuple[int, int]:
    """Tells the log in a folder from one that was there before; where there is none, opening it says so."""
    try:
        found = os.stat(os.path.join(url.removeprefix(_FILE), "headwater"))
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


@lru_cache(maxsize=LOGS_MAX)
def _opened(url: str, process: int, which: tuple[int, int], *, read_only: bool) -> Log:
    return open_log(url, create=False, read_only=read_only)
