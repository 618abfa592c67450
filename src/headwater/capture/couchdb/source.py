"""A CouchDB database as a capture source: its `_changes` feed, which tells of each document the last change only.

The database is one table, by its own name. `couchdb://user@host:5984/shop?password_env=…`; `couchdbs://` is HTTPS. The feed is asked with
`since`, which is what the last answer gave, opaque as it is: a position here is a number of our own, which counts changes and so sorts as
text, and at the end of a page `since` behind it. A longpoll request beside it only rings: what rang is asked for anew, so nothing
depends on that request. The feed knows neither transactions nor times: each change is a transaction of its own, committed when it was read.

The document `_local/headwater.<name>`, which is never replicated and no part of the feed, names this database: one that was made anew does
not have it. Documents whose id begins with `_design/` are left out. Not thread-safe, except `lag`, which has a connection of its own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from headwater.capture.couchdb.client import Bell, Couch
from headwater.capture.couchdb.documents import DESIGN, CouchDocuments, document_of
from headwater.capture.document_source import DocumentSource
from headwater.capture.documents import (
    Document,
    DocumentChange,
    DocumentStore,
    batches_of,
    check_keys,
    json_text,
    transactions_of,
)
from headwater.capture.source import DELETE, INSERT, UPDATE, CaptureSource, Changes, SourceLag, SourceTable
from headwater.capture.source_url import SourceUrl
from headwater.model.errors import CaptureLost

CHANGES_ROWS = 1_000
CHUNK_ROWS = 1_000


def source_of(url: SourceUrl, *, name: str, keys: Mapping[str, tuple[str, ...]]) -> CaptureSource:
    """The database at a URL; the key of documents is given by themselves."""
    check_keys(url.shown, keys)
    return CouchSource(url, name=name)


def documents_of(url: SourceUrl) -> DocumentStore:
    """The documents of the database at a URL."""
    return CouchDocuments(Couch(url), url)


class CouchSource(DocumentSource):
    """One database; see the module."""

    def __init__(self, url: SourceUrl, *, name: str) -> None:
        self._couch = Couch(url)
        super().__init__(url, name=name, documents=CouchDocuments(self._couch, url), chunk_rows=CHUNK_ROWS)
        self._bell = Bell(self._couch)
        self._read_to = ""

    # What the runner calls

    def check(self) -> list[SourceTable]:
        """The one table."""
        table = self._documents.table()
        self._tables = {table.name: table}
        return [table]

    def prepare(self, resume: str | None) -> str:
        """Finds or makes the document that names the database; begins at the present, or goes on where it was."""
        self.check()
        found = self._couch.find(self._local)
        if found is None and resume is not None:
            raise CaptureLost(
                f"{self.url} is not the database of the capture {self.name!r}, because it lacks the document {self._local}.",
                advice="The database was deleted and created again. Start the capture with --backfill-again: it copies the "
                "documents again and removes deleted ones.",
            )
        update_seq = self._couch.get("")["update_seq"]
        if resume is not None:
            self._check_seq(_seq(resume), update_seq)
        if found is None:
            found = {"identity": str(uuid.uuid4())}
            self._couch.put(self._local, found)
        self.identity = found["identity"]
        self._feed.clear()
        position = resume if resume is not None else _end(0, update_seq)
        self._read_to = position
        return position

    def confirm(self, position: str) -> None:
        """Nothing to do: the feed forgets nothing."""

    def heartbeat(self) -> None:
        """Nothing to do."""

    def lag(self, position: str | None = None) -> SourceLag:
        """The changes behind a position."""
        since = _seq(position or self._read_to)
        with Couch(self._url) as couch:
            page = couch.get("_changes", since=since, limit=1)
            if "pending" in page:
                return SourceLag(rows=page["pending"] + len(page["results"]))
            newest = couch.get("")["update_seq"]
        return SourceLag(rows=max(0, newest - since) if isinstance(newest, int) and isinstance(since, int) else None)

    def remove(self) -> None:
        """The document that names the database."""
        found = self._couch.find(self._local)
        if found is not None:
            self._couch.delete(self._local, found["_rev"])

    def close(self) -> None:
        """Ends the connections."""
        self._feed.clear()
        self._bell.take_down()
        self._couch.close()

    # Reading

    @property
    def _local(self) -> str:
        return f"_local/headwater.{quote(self.name, safe='')}"

    def _check_seq(self, since: Any, newest: Any) -> None:
        """Numbers that are plain say when a database was put back; CouchDB's own since 2.0 are opaque."""
        if isinstance(since, int) and isinstance(newest, int) and since > newest:
            raise CaptureLost(
                f"{self.url} has {newest} changes, but the log has the changes up to {since}.",
                advice="The database was restored from an earlier copy. Start the capture with --backfill-again: it copies "
                "the documents again and removes deleted ones.",
            )

    def _read(self, after: str, timeout_s: float) -> Changes | None:
        (table,) = self._tables
        since, deadline = _seq(after), time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if timeout_s <= 0 or not self._bell.hangs(since) or self._bell.rings(max(0.0, left_s)):
                page = self._couch.get("_changes", since=since, limit=CHANGES_ROWS, include_docs=True)
                if page["results"]:
                    break
                if timeout_s > 0:
                    self._bell.hang(since)
            if time.monotonic() >= deadline:
                return None
        changes = page_changes(page["results"], table, after=after, read_us=time.time_ns() // 1000)
        transactions, _ = transactions_of(changes, None, whole=True)
        self._read_to = _end(_number(after) + len(page["results"]), page["last_seq"])
        batches = batches_of(changes, self._tables, None)
        return Changes(batches=tuple(batches), transactions=transactions, end=self._read_to)


def page_changes(results: list[Any], table: str, *, after: str, read_us: int) -> list[DocumentChange]:
    """The changes that the rows of a page say; a document that the page has twice is told by its last row."""
    last = {row["id"]: at for at, row in enumerate(results)}
    changes = []
    for at, row in enumerate(results):
        if last[row["id"]] != at or row["id"].startswith(DESIGN):
            continue
        document = row.get("doc")
        deleted = bool(row.get("deleted")) or document is None or bool(document.get("_deleted"))
        op = DELETE if deleted else INSERT if document["_rev"].startswith("1-") else UPDATE
        changes.append(
            DocumentChange(
                table=table,
                op=op,
                before=Document(id=row["id"]) if deleted else None,
                after=None if deleted else document_of(document),
                position=f"{_number(after) + at + 1:016d}",
                committed_us=read_us,
            )
        )
    return changes


def _end(number: int, seq: Any) -> str:
    """A position at the end of a page: our number, and where the feed goes on, as JSON."""
    return f"{number:016d}/{json_text(seq)}"


def _number(position: str) -> int:
    return int(position.partition("/")[0])


def _seq(position: str) -> Any:
    return msgspec.json.decode(position.partition("/")[2])
