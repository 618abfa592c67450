"""A database of documents as a capture source: what CouchDB and MongoDB have in common, each by a feed and a store of its own.

Changes come from a feed, page by page; the backfill copies documents in the order of their ids, and the feed says where a chunk
belongs (`headwater.capture.document_feed`). Which tables there are, and what a page of the feed holds, is in the two classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pyarrow as pa

from headwater.capture.document_feed import Feed
from headwater.capture.documents import DocumentStore, document_rows
from headwater.capture.source import BackfillChunk, Changes, SourceTable
from headwater.capture.source_url import SourceUrl


class DocumentSource(ABC):
    """One database, whose feed is `_feed`; `_tables` are the captured ones, known once checked."""

    def __init__(self, url: SourceUrl, *, name: str, documents: DocumentStore, chunk_rows: int) -> None:
        """`chunk_rows`: so many documents are a chunk of a backfill."""
        self.name = name
        self.url = url.shown
        self.identity = ""
        self.left_out: dict[str, str] = {}
        self._url = url
        self._documents = documents
        self._chunk_rows = chunk_rows
        self._feed = Feed(self._read)
        self._tables: dict[str, SourceTable] = {}

    @abstractmethod
    def _read(self, after: str, timeout_s: float) -> Changes | None:
        """The next page of the feed; None where nothing has come after so long."""

    def changes(self, after: str, *, timeout_s: float) -> Changes | None:
        """What the feed has next."""
        return self._feed.next(after, timeout_s=timeout_s)

    def chunk(self, table: str, done: Any | None, *, position: str) -> BackfillChunk:
        """Some documents in the order of their ids, behind those that are done."""
        info = self._tables[table]
        return self._feed.chunk(info, done, lambda: self._rows(info, done), position=position)

    def _rows(self, table: SourceTable, done: Any | None) -> tuple[pa.Table, Any, bool, float | None]:
        page, total = self._documents.page(table, done, limit=self._chunk_rows), table.rows_estimate
        fraction = 1.0 if page.is_last else min(1.0, page.done["rows"] / total) if total else None
        return document_rows(page.documents, table), page.done, page.is_last, fraction
