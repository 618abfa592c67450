"""The documents of a database of CouchDB: page by page in the order of their ids, or by their ids; without design documents.

Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headwater.capture.couchdb.client import Couch
from headwater.capture.documents import REV, Document, DocumentPage, document_table, json_text
from headwater.capture.source import SourceTable
from headwater.capture.source_url import SourceUrl
from headwater.model.errors import NotCapturable, NotFound

OPTIONS = ("schema", "password_env", "password_file", "password")
DESIGN = "_design/"


class CouchDocuments:
    """The documents of one database, which is one table."""

    def __init__(self, couch: Couch, url: SourceUrl) -> None:
        self.url = msgspec.structs.replace(url, options={}).shown
        self._couch = couch
        self._url = url

    def table(self) -> SourceTable:
        name, options = self._url.path.strip("/"), self._url.options
        unknown = set(options) - set(OPTIONS)
        if unknown:
            raise NotCapturable(
                f"{self._url.shown}: The option {min(unknown)!r} is unknown.",
                advice=f"The known options are: {', '.join(OPTIONS)}.",
            )
        for table in self._url.tables:
            if table != name:
                raise NotFound(
                    f"{self._url.shown} has no table {table!r}, because a CouchDB database is one table, {name!r}.",
                    advice=f"Use ?table={name}, or another database in the URL.",
                )
        told = self._couch.get("")
        return document_table(name, options.get("schema"), has_rev=True, rows_estimate=told.get("doc_count"))

    def page(self, table: SourceTable, done: Any | None, *, limit: int) -> DocumentPage:
        start = {} if done is None else {"startkey": json_text(done["id"] + "\0")}
        found = self._couch.get("_all_docs", include_docs=True, limit=limit, **start)["rows"]
        copied = (done["rows"] if done else 0) + len(found)
        reached = found[-1]["id"] if found else (done or {}).get("id", "")
        return DocumentPage(documents=_documents(found), done={"id": reached, "rows": copied}, is_last=not found)

    def of_ids(self, table: SourceTable, ids: Sequence[str]) -> list[Document]:
        return _documents(self._couch.post("_all_docs", {"keys": list(ids)}, include_docs=True)["rows"])

    def close(self) -> None:
        self._couch.close()


def document_of(document: Mapping[str, Any]) -> Document:
    """A document as the server gives it."""
    return Document(id=document["_id"], fields={**document, REV: document["_rev"]}, text=json_text(document))


def _documents(rows: Sequence[Any]) -> list[Document]:
    """Those that are neither missing, deleted nor design documents."""
    return [document_of(row["doc"]) for row in rows if row.get("doc") and not row["id"].startswith(DESIGN)]
