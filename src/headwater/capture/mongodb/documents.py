"""The documents of a collection of MongoDB: page by page in the order of their ids, or by their ids as text.

Each page is what a majority of the servers has then; an `_id` never changes, so no document comes twice or is passed over. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from bson import encode, json_util
from bson.decimal128 import Decimal128
from bson.errors import BSONError
from bson.objectid import ObjectId

from headwater.capture.documents import Document, DocumentPage, document_table
from headwater.capture.mongodb.changes import CANONICAL, RELAXED, document_of, id_text
from headwater.capture.mongodb.client import CODEC, Mongo
from headwater.capture.source import SourceTable
from headwater.capture.source_url import SourceUrl
from headwater.model.errors import InvalidInput, NotFound

_KINDS = (
    "minKey",
    "null",
    "number",
    "string",
    "object",
    "binData",
    "objectId",
    "bool",
    "date",
    "timestamp",
    "regex",
    "maxKey",
)
"""The kinds of `_id` in MongoDB's order: `$gt` compares within one kind only."""

_KINDS_OF_TEXT: tuple[Callable[[str], Any], ...] = (
    str,
    ObjectId,
    int,
    float,
    Decimal128,
    lambda text: json_util.loads(text, json_options=RELAXED),
)
"""What an id's text may have been made of (see `mongodb.changes`); each refuses what it cannot be."""


class MongoDocuments:
    """The collections of one database."""

    def __init__(self, mongo: Mongo, url: SourceUrl) -> None:
        self.url = msgspec.structs.replace(url, options={}).shown
        self._mongo = mongo
        self._url = url

    def collections(self) -> dict[str, Any]:
        """What the server says of each."""
        if not self._mongo.name:
            raise InvalidInput(f"{self._url.shown} has no database.", advice="Write mongodb://host/shop.")
        with self._mongo.told():
            return {each["name"]: each for each in self._mongo.database.list_collections(session=self._mongo.session)}

    def not_found(self, name: str, found: Mapping[str, Any]) -> NotFound:
        """There is no such collection."""
        return NotFound(
            f"{self._url.shown} has no collection {name!r}.",
            advice=f"Its collections are: {', '.join(sorted(found)) or 'none'}. To create the collection, run "
            f"db.createCollection({name!r}).",
        )

    def declared(self, name: str) -> str | None:
        """The columns that the URL declares for a collection."""
        return self._url.options.get(f"schema.{name}", self._url.options.get("schema"))

    def table(self) -> SourceTable:
        if len(self._url.tables) != 1:
            raise InvalidInput(f"The URL {self.url} does not name a collection.", advice="Add ?table=NAME to the URL.")
        (name,) = self._url.tables
        found = self.collections()
        if name not in found:
            raise self.not_found(name, found)
        return document_table(name, self.declared(name), has_rev=False)

    def page(self, table: SourceTable, done: Any | None, *, limit: int) -> DocumentPage:
        """Kind by kind."""
        kind, last = (0, None) if done is None else (done["kind"], done["id"])
        copied = 0 if done is None else done["rows"]
        found: list[Any] = []
        while kind < len(_KINDS) and len(found) < limit:
            wanted: dict[str, Any] = {"$type": _KINDS[kind]}
            if last is not None:
                wanted["$gt"] = json_util.loads(last, json_options=CANONICAL)["_id"]
            found += self._find(table.name, wanted, limit - len(found))
            if len(found) < limit:
                kind, last = kind + 1, None
        if found and kind < len(_KINDS):
            last = json_util.dumps({"_id": found[-1]["_id"]}, json_options=CANONICAL)
        return DocumentPage(
            documents=[document_of(document, table) for document in found],
            done={"kind": kind, "id": last, "rows": copied + len(found)},
            is_last=kind == len(_KINDS),
        )

    def of_ids(self, table: SourceTable, ids: Sequence[str]) -> list[Document]:
        wanted = [value for text in ids for value in _ids_of(text)]
        found = [document_of(document, table) for document in self._find(table.name, {"$in": wanted}, 0)]
        return [document for document in found if document.id in ids]

    def close(self) -> None:
        self._mongo.close()

    def _find(self, name: str, wanted: Mapping[str, Any], limit: int) -> list[Any]:
        """At most so many documents, all of them where that is 0, in the order of their ids."""
        with self._mongo.told():
            collection = self._mongo.database[name]
            return list(collection.find({"_id": wanted}, session=self._mongo.session).sort("_id", 1).limit(limit))


def _ids_of(text: str) -> list[Any]:
    """Every `_id` that has this text."""
    found = []
    for kind in _KINDS_OF_TEXT:
        with suppress(ValueError, TypeError, ArithmeticError, BSONError):
            value = kind(text)
            if id_text(value) == text:
                encode({"_id": value}, codec_options=CODEC)
                found.append(value)
    return found
