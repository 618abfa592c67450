"""A feed: changes that a server gives page by page, some of them read ahead so that a chunk of a backfill knows where it belongs.

Neither CouchDB nor MongoDB says at which position rows were read. So the rows are read, and then the feed up to its present end: all
that can be in the rows is in those pages, which are handed over before the chunk is. A feed that is far behind is read by the
runner first; nothing more than `AHEAD_PAGES` pages is ever kept here. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from headwater.capture.source import BackfillChunk, Changes, SourceTable

AHEAD_PAGES = 4

ReadPage = Callable[[str, float], Changes | None]
"""Reads what comes behind a position, waiting so many seconds for something to come; None: nothing."""

ReadRows = Callable[[], tuple[pa.Table, Any, bool, float | None]]
"""Reads some rows of a table; with them how far this is, whether it is the end, and which part of the whole."""


class Feed:
    """The pages of one source, in order."""

    def __init__(self, read: ReadPage) -> None:
        self._read = read
        self._ahead: deque[Changes] = deque()

    def next(self, after: str, *, timeout_s: float) -> Changes | None:
        """The page behind a position, which is the end of the one before."""
        return self._ahead.popleft() if self._ahead else self._read(after, timeout_s)

    def chunk(self, table: SourceTable, done: Any | None, read: ReadRows, *, position: str) -> BackfillChunk:
        """The rows that are read now, between `position` and the end of what is ahead; none while the feed is far behind."""
        if not self._ahead:
            rows, reached, last, fraction = read()
            until = self._read_ahead(position)
            if until is not None:
                return BackfillChunk(rows=rows, done=reached, last=last, after=position, until=until, fraction=fraction)
        return BackfillChunk(rows=table.schema.empty_table(), done=done, last=False, after=position, until=position)

    def clear(self) -> None:
        """Forgets what was read ahead: it is read again."""
        self._ahead.clear()

    def _read_ahead(self, position: str) -> str | None:
        """The present end of the feed; None where it is too far."""
        end, whole = position, True
        for _ in range(AHEAD_PAGES):
            page = self._read(end, 0.0)
            if page is None:
                return end if whole else None
            self._ahead.append(page)
            end, whole = page.end, page.whole
        return None
