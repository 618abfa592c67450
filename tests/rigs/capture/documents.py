"""Databases of documents and a log that captures them: what the tests of CouchDB and MongoDB have in common, and each one's own words."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import pymongo
import pytest
from bson import json_util

from headwater.capture.capture import Capture
from headwater.capture.source_url import open_source
from headwater.log.log import open_log

KINDS = [
    pytest.param("couchdb", marks=pytest.mark.service("couchdb")),
    pytest.param("mongodb", marks=pytest.mark.service("mongodb")),
]
"""Both databases, for tests that are the same for either."""

_NUMBERS = itertools.count()


class Documents(Protocol):
    """One table of documents, written to and read without any code of ours."""

    name: str
    url: str

    def put(self, key: str, fields: Mapping[str, Any]) -> None:
        """Inserts, or replaces."""

    def delete(self, key: str) -> None:
        """Removes; it must be there."""

    def all(self) -> dict[str, dict[str, Any]]:
        """All documents, without what the database adds to them."""

    def load(self, text: str) -> dict[str, Any]:
        """A document from the column `document`, likewise."""

    def close(self) -> None:
        """Ends its connections."""


class CouchDocuments:
    """A database of CouchDB."""

    def __init__(self, server: str, *, name: str | None = None) -> None:
        """`server` is http://host:port."""
        self._server = server
        self.name = name or f"shop{next(_NUMBERS)}"
        if name is None:
            self.ask("PUT", "")
        self.url = server.replace("http://", "couchdb://") + f"/{self.name}"
        self._revs: dict[str, str] = {}

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """A request of the plainest kind."""
        data = None if body is None else json.dumps(body).encode()
        url = f"{self._server}/{self.name}" + (f"/{path}" if path else "")
        request = urllib.request.Request(url, method=method, data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def put(self, key: str, fields: Mapping[str, Any]) -> None:
        rev = {"_rev": self._rev(key)} if self._rev(key) else {}
        self._revs[key] = self.ask("PUT", key, {**fields, **rev})["rev"]

    def delete(self, key: str) -> None:
        self.ask("DELETE", f"{key}?rev={self._rev(key)}")
        self._revs[key] = ""

    def put_many(self, documents: Mapping[str, Mapping[str, Any]]) -> None:
        """New ones, in one request."""
        told = self.ask("POST", "_bulk_docs", {"docs": [{**d, "_id": key} for key, d in documents.items()]})
        self._revs |= {row["id"]: row["rev"] for row in told}

    def all(self) -> dict[str, dict[str, Any]]:
        rows = self.ask("GET", "_all_docs?include_docs=true")["rows"]
        return {row["id"]: _bare(row["doc"]) for row in rows if not row["id"].startswith("_design/")}

    def load(self, text: str) -> dict[str, Any]:
        return _bare(json.loads(text))

    def close(self) -> None:
        """Nothing stays open."""

    def _rev(self, key: str) -> str:
        if key not in self._revs:
            try:
                self._revs[key] = self.ask("GET", key)["_rev"]
            except urllib.error.HTTPError:
                self._revs[key] = ""
        return self._revs[key]


class MongoDocuments:
    """A collection of MongoDB."""

    def __init__(self, server: str, *, database: str | None = None, name: str = "users") -> None:
        """`server` is mongodb://host:port."""
        self.name = name
        self.client: pymongo.MongoClient[dict[str, Any]] = pymongo.MongoClient(server)
        self.database = self.client[database or f"shop{next(_NUMBERS)}"]
        if name not in self.database.list_collection_names():
            self.database.create_collection(name)
        self.collection = self.database[name]
        self.url = f"{server}/{self.database.name}"

    def put(self, key: str, fields: Mapping[str, Any]) -> None:
        self.collection.replace_one({"_id": key}, dict(fields), upsert=True)

    def put_many(self, documents: Mapping[str, Mapping[str, Any]]) -> None:
        """New ones, in one request."""
        self.collection.insert_many([{**document, "_id": key} for key, document in documents.items()])

    def delete(self, key: str) -> None:
        assert self.collection.delete_one({"_id": key}).deleted_count == 1

    def all(self) -> dict[str, dict[str, Any]]:
        return {document["_id"]: _bare(document) for document in self.collection.find()}

    def load(self, text: str) -> dict[str, Any]:
        return _bare(json_util.loads(text))

    def close(self) -> None:
        self.client.close()


def check(url: str, tables: Sequence[str] = ()) -> None:
    """Asks whether a source can be captured; raises what it says."""
    with closing(open_source(url, tables)) as source:
        source.check()


def _bare(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if not name.startswith("_")}


class Rig:
    """One table of documents, one log, and a capture between them that has caught up whenever it is asked."""

    def __init__(self, documents: Documents, folder: Path, *, options: str = "") -> None:
        self.documents = documents
        self.log = open_log(folder / "log", durability="os")
        self.url = documents.url + options
        self.capture: Capture | None = None

    def open(self, **settings: Any) -> Capture:
        """A capture of its own, in the place of the one before."""
        self.close_capture()
        self.capture = Capture(self.log, open_source(self.url, [self.documents.name]), partitions=2, **settings)
        self.capture.open()
        return self.capture

    def up(self) -> None:
        """Brings the log up."""
        (self.capture or self.open()).catch_up()

    def table(self) -> dict[str, dict[str, Any]]:
        """The topic's table, its documents read back."""
        self.up()
        rows = self.log.table(self.documents.name).to_pylist()
        return {row["id"]: self.documents.load(row["document"]) for row in rows}

    def assert_same(self) -> None:
        """The log has what the database has."""
        assert self.table() == self.documents.all()

    def history(self) -> list[dict[str, Any]]:
        """The changes behind the backfill, in their order."""
        self.up()
        events = self.log.read(f"{self.documents.name}.changes").to_pylist()
        return sorted((e for e in events if e["op"] != "r"), key=lambda event: str(event["position"]))

    def close_capture(self) -> None:
        """Ends the capture, not the log."""
        if self.capture is not None:
            self.capture.close()
        self.capture = None

    def close(self) -> None:
        """Frees everything."""
        self.close_capture()
        self.log.close()


Make = Callable[..., Rig]


def empty_documents(request: pytest.FixtureRequest) -> Iterator[Documents]:
    """An empty table of documents of the kind that is asked for, for a module's fixture."""
    server = request.getfixturevalue(request.param)
    is_couch = request.param == "couchdb"
    made = CouchDocuments(f"http://127.0.0.1:{server.port}") if is_couch else MongoDocuments(server.url)
    yield made
    made.close()


def rigs(documents: Documents, folder: Path) -> Iterator[Make]:
    """Makes rigs over a table of documents, for a module's fixture."""
    made: list[Rig] = []

    def make(**settings: Any) -> Rig:
        made.append(Rig(documents, folder, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
