"""A table of documents as a side: a collection of MongoDB or a database of CouchDB, in the columns that a capture gives it.

Where the other side is the captured topic, documents are read in its columns, whether or not the URL declares them again. Neither
database has a snapshot that lasts for all of its pages, so each document is looked at in a moment of its own, and what differs is looked at
again, by its id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from headwater.capture.documents import ID, Document, DocumentStore, document_rows
from headwater.capture.source import SourceTable
from headwater.capture.source_url import open_documents
from headwater.model.errors import Unsupported
from headwater.sinks.sink import Shape, Sink
from headwater.verify.side import Follows, Look, Places, nullable, picked

_PAGE_DOCUMENTS = 1_000


class DocumentSide:
    """The documents; no sink of ours writes to them, so nothing in them says how far they follow a log."""

    def __init__(self, url: str) -> None:
        self._store = open_documents(url)
        self.url = self._store.url
        self._shape: Shape | None = None

    def shape(self) -> Shape | None:
        table = self._store.table()
        return Shape(table.name, table.schema, table.key)

    def take(self, shape: Shape) -> None:
        self._shape = shape

    @contextmanager
    def look(self, *, at: Places | None = None, topic: str | None = None, stage: str | None = None) -> Iterator[Look]:
        assert self._shape is not None
        yield DocumentLook(self._store, self._shape)

    def repairs(self, stage: str) -> Sink:
        raise Unsupported(
            f"{self.url} is not the target of a sink.", advice="Correct the documents in the database itself."
        )

    def close(self) -> None:
        self._store.close()


class DocumentLook:
    """Documents as they are found."""

    is_moment = is_final = False
    follows: Follows | None = None

    def __init__(self, store: DocumentStore, shape: Shape) -> None:
        self._store = store
        self._shape = shape
        self._table = SourceTable(name=store.table().name, schema=nullable(shape.schema), key=shape.key)
        self.unreadable: list[str] = []

    def chunks(self) -> Iterator[pa.Table]:
        page = None
        while page is None or not page.is_last:
            page = self._store.page(self._table, page and page.done, limit=_PAGE_DOCUMENTS)
            yield self._rows(page.documents)

    def rows(self, keys: pa.Table) -> pa.Table:
        if self._shape.key != (ID,):
            return picked(self.chunks(), keys, self._shape)
        ids = keys.column(ID).to_pylist()
        pages = [ids[at : at + _PAGE_DOCUMENTS] for at in range(0, len(ids), _PAGE_DOCUMENTS)]
        return self._rows([document for page in pages for document in self._store.of_ids(self._table, page)])

    def _rows(self, documents: Sequence[Document]) -> pa.Table:
        return document_rows(documents, self._table).select(self._table.schema.names)
