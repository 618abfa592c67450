"""A MongoDB database as a capture source: one change stream over the whole database, whose collections are the tables.

A position is the text of the stream's resume token, which sorts as the changes were made and leads back to its place. The stream begins
before the first document is copied, so nothing falls between the two. The events of a transaction, which the server numbers, are told as
one; any other write is a transaction of its own. Nothing is put into the database.

A collection that is dropped is emptied in the log; one that is renamed stops. Not thread-safe, except `lag`, which has a client of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from headwater.capture.document_source import DocumentSource
from headwater.capture.documents import (
    Begun,
    DocumentStore,
    batches_of,
    check_keys,
    document_table,
    transactions_of,
)
from headwater.capture.mongodb.changes import RENAME, change_of, position_of, transaction_of
from headwater.capture.mongodb.client import Mongo
from headwater.capture.mongodb.documents import MongoDocuments
from headwater.capture.source import CaptureSource, Changes, SourceLag, SourceTable, TableChange
from headwater.capture.source_url import SourceUrl
from headwater.model.errors import InvalidInput, NotCapturable

CHANGES_ROWS = 5_000
CHUNK_ROWS = 2_000
QUIET_S = 2.0
"""How often a position is told behind which nothing of interest came."""


def source_of(url: SourceUrl, *, name: str, keys: Mapping[str, tuple[str, ...]]) -> CaptureSource:
    """The database at a URL; the key of documents is given by themselves."""
    check_keys(url.shown, keys)
    return MongoSource(url, name=name)


def documents_of(url: SourceUrl) -> DocumentStore:
    """The documents of the one collection that a URL names."""
    return MongoDocuments(Mongo(url), url)


class MongoSource(DocumentSource):
    """One database; see the module."""

    _documents: MongoDocuments

    def __init__(self, url: SourceUrl, *, name: str) -> None:
        self._mongo = Mongo(url)
        super().__init__(url, name=name, documents=MongoDocuments(self._mongo, url), chunk_rows=CHUNK_ROWS)
        self._events: deque[Any] = deque()
        """Of the stream, not told yet."""
        self._begun: Begun | None = None
        self._told_to = ""
        self._reached = ""
        self._quiet_at = 0.0

    # What the runner calls

    def check(self) -> list[SourceTable]:
        """The collections, by the names that were given, or all; that there is a change stream is found out by opening one."""
        found = self._documents.collections()
        names = self._url.tables or [name for name in found if self._can_be(found[name])]
        for name in names:
            if name not in found:
                raise self._documents.not_found(name, found)
            if not self._can_be(found[name]):
                raise NotCapturable(
                    f"{name!r} of {self.url} is a {found[name]['type']}, not a collection.",
                    advice="Capture a collection.",
                )
        if not names:
            raise NotCapturable(
                f"{self.url} has no collection.", advice="Create a collection first, or use another database."
            )
        self._mongo.open_stream(self._match(names), after=None)
        self._mongo.close_stream()
        self._tables = {name: self._table(name, alone=len(names) == 1) for name in names}
        return list(self._tables.values())

    def prepare(self, resume: str | None) -> str:
        """Opens the stream where the last capture ended, or at the present."""
        self.check()
        told = self._mongo.ask({"hello": 1})
        self.identity = f"{told.get('setName', 'sharded')}/{self._mongo.name}"
        self._reset()
        position = self._open(resume)
        if not position:
            raise NotCapturable(f"{self.url} does not support resume tokens.", advice="Use MongoDB 4.2 or newer.")
        self._told_to = position
        return position

    def confirm(self, position: str) -> None:
        """Nothing to do: the server forgets by itself, by the size and age of its oplog."""

    def heartbeat(self) -> None:
        """Nothing to do: the server writes to its oplog when nobody else does."""

    def lag(self, position: str | None = None) -> SourceLag:
        """The seconds between a position and what the server last wrote."""
        at = position or self._told_to
        with closing(Mongo(self._url)) as mongo:
            written = mongo.ask({"hello": 1}).get("lastWrite", {}).get("opTime", {}).get("ts")
        if written is None or not at.startswith("82"):
            return SourceLag()
        return SourceLag(seconds=max(0.0, float(written.time - int(at[2:10], 16))))

    def remove(self) -> None:
        """Nothing was put into the database."""

    def close(self) -> None:
        """Ends the connections."""
        self._reset()
        self._mongo.close()

    # Collections

    def _can_be(self, described: Mapping[str, Any]) -> bool:
        return described.get("type", "collection") == "collection" and not described["name"].startswith("system.")

    def _table(self, name: str, *, alone: bool) -> SourceTable:
        if "schema" in self._url.options and not alone:
            raise InvalidInput(
                f"{self.url}: ?schema= applies only to a single collection.",
                advice=f"Use ?schema.{name}=… for each collection.",
            )
        with self._mongo.told():
            count = self._mongo.database[name].estimated_document_count()
        return document_table(name, self._documents.declared(name), has_rev=False, rows_estimate=count)

    # The stream

    def _match(self, names: Any) -> dict[str, Any]:
        return {"$or": [{"ns.coll": {"$in": list(names)}}, {"operationType": "invalidate"}]}

    def _open(self, after: str | None) -> str:
        events, reached = self._mongo.open_stream(self._match(self._tables), after=after)
        self._events.extend(events)
        self._reached = reached or after or ""
        return after or self._reached

    def _reset(self) -> None:
        self._feed.clear()
        self._events.clear()
        self._begun = None

    def _fill(self, wait_s: float) -> bool:
        """Asks for more events; whether there are any."""
        events, reached = self._mongo.read_stream(int(wait_s * 1000))
        self._events.extend(events)
        self._reached = reached or (position_of(events[-1]) if events else self._reached)
        return bool(events)

    def _read(self, after: str, timeout_s: float) -> Changes | None:
        if not self._events:
            if not self._mongo.is_streaming:
                self._open(after)
            if not self._events and not self._fill(timeout_s):
                return self._quiet(after)
        if self._events[0]["operationType"] == RENAME:
            return self._stop_renamed(self._events.popleft())
        events = self._take()
        last = transaction_of(events[-1])
        goes_on = last is not None and bool(self._events) and transaction_of(self._events[0]) == last
        found = [
            change_of(event, self._tables[event["ns"]["coll"]])
            for event in events
            if event.get("ns", {}).get("coll") in self._tables
        ]
        changes = [change for change in found if change is not None]
        batches = batches_of(changes, self._tables, self._begun)
        transactions, self._begun = transactions_of(changes, self._begun, whole=not goes_on)
        self._told_to = position_of(events[-1]) if self._events else max(self._reached, position_of(events[-1]))
        return Changes(batches=tuple(batches), transactions=transactions, end=self._told_to, whole=self._begun is None)

    def _take(self) -> list[Any]:
        """Events of one page: up to a rename, and not ended inside a transaction unless that is larger than a page."""
        events = [self._events.popleft()]
        while len(events) < CHANGES_ROWS:
            if not self._events and not (transaction_of(events[-1]) is not None and self._fill(0.0)):
                break
            if self._events[0]["operationType"] == RENAME:
                break
            events.append(self._events.popleft())
        if not self._events and transaction_of(events[-1]) is not None:
            self._fill(0.0)
        return events

    def _quiet(self, after: str) -> Changes | None:
        """The stream has gone on though none of our collections changed: told now and then, so that the oplog may forget."""
        now = time.monotonic()
        if self._reached <= after or now - self._quiet_at < QUIET_S:
            return None
        self._quiet_at, self._told_to = now, self._reached
        return Changes(end=self._reached)

    def _stop_renamed(self, event: Any) -> Changes:
        self._told_to = position_of(event)
        name = event["ns"]["coll"]
        to = event.get("to", {}).get("coll", "another name")
        why = (
            f"Collection {name!r} was renamed to {to!r}. Capture the renamed collection; or undo the renaming, "
            "and start the capture again."
        )
        stopped = TableChange(table=self._tables[name], error=why)
        return Changes(tables=(stopped,), end=self._told_to)
