"""Captured documents, and what was made of them, held against their MongoDB or CouchDB, document by document."""

from __future__ import annotations

import datetime
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bson.binary import Binary
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.objectid import ObjectId

from headwater.model.errors import InvalidInput, NotFound, Unsupported
from headwater.testing.servers.couchdb import CouchServer
from headwater.testing.servers.mongodb import MongoServer
from headwater.verify import document_side
from headwater.verify.comparison import VerifyReport, compare, open_pair
from headwater.verify.side_url import side_of
from tests.rigs.capture.documents import (
    KINDS,
    CouchDocuments,
    Documents,
    Make,
    MongoDocuments,
    Rig,
    empty_documents,
    rigs,
)

pytestmark = pytest.mark.timeout(400)  # the first of them fetches its server


@pytest.fixture(params=KINDS)
def documents(request: pytest.FixtureRequest) -> Iterator[Documents]:
    """An empty table of documents."""
    yield from empty_documents(request)


@pytest.fixture
def rig(documents: Documents, tmp_path: Path) -> Iterator[Make]:
    yield from rigs(documents, tmp_path)


def verified(source: str, target: str, *, settle_s: float = 0.2) -> VerifyReport:
    pair = open_pair(source, target)
    try:
        return compare(pair, settle_s=settle_s)
    finally:
        pair.close()


def named(documents: Documents, more: str = "") -> str:
    """The table as a side."""
    return f"{documents.url}?table={documents.name}{more}"


def found(report: VerifyReport) -> set[tuple[str, str, tuple[str, ...]]]:
    return {(one.kind, one.key["id"], one.columns) for one in report.differences}


def test_the_log_is_held_against_the_database(
    rig: Make, documents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over many pages, by the backfill and by the feed; what the log does not have yet is named by its key."""
    monkeypatch.setattr(document_side, "_PAGE_DOCUMENTS", 7)
    documents.put_many({f"k{number:03}": {"n": number, "text": "ü€😀\0"} for number in range(100)})
    documents.put("k007", {"n": 8, "nested": {"b": [1, None], "a": {}}, "large": 2**53})
    here, there, shop = named(documents), f"{tmp_path}/log#{documents.name}", rig()
    shop.up()
    documents.put("k008", {"z": 1, "a": {"y": 1, "b": [1.5, "x"]}, "n": 9})
    shop.up()
    for source, target in ((here, there), (there, here)):
        report = verified(source, target)
        assert (report.is_equal, report.rows) == (True, 100), report.differences
    documents.put("k001", {"n": -1})
    documents.put("new", {"n": 0})
    documents.delete("k002")
    changed = ("rev", "document") if isinstance(documents, CouchDocuments) else ("document",)
    assert found(verified(here, there)) == {
        ("different", "k001", changed),
        ("missing", "new", ()),
        ("extra", "k002", ()),
    }
    shop.up()
    assert verified(here, there).is_equal


def test_documents_are_compared_in_the_columns_of_their_topic(rig: Make, documents: Documents, tmp_path: Path) -> None:
    """The URL need not declare them again; what does not fit its column is null on both sides."""
    documents.put("a", {"name": "Ada", "amount": 1.5, "at": "2026-01-31T12:00:00.000000Z"})
    documents.put("b", {"name": {"first": "Bob"}, "amount": "much", "other": 1})
    shop, there = rig(options="?schema=name STRING, amount DOUBLE, at TIMESTAMP"), f"{tmp_path}/log#{documents.name}"
    shop.up()
    assert verified(named(documents), there).is_equal
    documents.put("a", {"name": "Ada", "amount": 2, "at": "2026-01-31T12:00:00.000000Z"})
    report = verified(named(documents), there)
    assert [(one.kind, one.key["id"]) for one in report.differences] == [("different", "a")]
    assert "amount" in report.differences[0].columns and "name" not in report.differences[0].columns


def test_what_was_made_of_documents_is_held_against_them(documents: Documents, tmp_path: Path) -> None:
    """Without a log between: in the columns that the URL declares."""
    documents.put("a", {"name": "Ada", "age": 36})
    documents.put("b", {"name": "Bob", "age": 41})
    with sqlite3.connect(tmp_path / "copy.db") as copy:
        copy.execute("create table users (id text primary key, rev text, name text, age integer)")
        copy.executemany("insert into users (id, name, age) values (?, ?, ?)", [("a", "Ada", 36), ("b", "Bob", 40)])
    copy.close()
    here = named(documents, "&schema=name STRING, age BIGINT")
    pair = open_pair(here, f"sqlite:///{tmp_path}/copy.db?table=users", columns=["name", "age"])
    report = compare(pair, settle_s=0)
    pair.close()
    assert found(report) == {("different", "b", ("age",))}


def test_what_is_on_its_way_is_no_difference(rig: Make, documents: Documents, tmp_path: Path) -> None:
    """Keys that differ are looked at again until the log has them."""
    documents.put("a", {"n": 1})
    shop = rig()
    shop.up()
    documents.put("a", {"n": 2})
    later = threading.Timer(0.5, shop.up)
    later.start()
    report = verified(named(documents), f"{tmp_path}/log#{documents.name}", settle_s=20)
    later.join()
    assert report.is_equal and not report.exact


def test_nothing_is_put_right_in_a_database_of_documents(documents: Documents) -> None:
    side = side_of(named(documents))
    with pytest.raises(Unsupported, match="is not the target of a sink"):
        side.repairs("stage")
    side.close()


@pytest.mark.service("mongodb")
def test_ids_of_every_kind_are_found_by_their_text(mongodb: MongoServer, tmp_path: Path) -> None:
    """Each document that differs is looked up by what stands in the log, whatever its `_id` was."""
    ids = [
        "text", "5.5x", 5, Int64(2**60), 1.25, Decimal128("0.1"), ObjectId(), True, {"b": 1, "a": "x"}, Binary(b"\0\1"),
        uuid.UUID(int=7), datetime.datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=datetime.UTC), "", "nul", "{", None,
    ]  # fmt: skip
    documents = MongoDocuments(f"{mongodb.url}")
    collection = documents.collection.with_options(
        codec_options=documents.collection.codec_options.with_options(uuid_representation=4)
    )
    for id_ in ids:
        collection.insert_one({"_id": id_, "n": 1})
    shop = Rig(documents, tmp_path)
    shop.up()
    here, there = named(documents), f"{tmp_path}/log#{documents.name}"
    report = verified(here, there)
    assert (report.is_equal, report.rows) == (True, len(ids)), report.differences
    collection.update_many({}, {"$set": {"n": 2}})
    report = verified(here, there)
    assert {one.kind for one in report.differences} == {"different"} and report.differing == len(ids)
    collection.insert_one({"_id": "5", "n": 2})
    shop.up()
    assert verified(here, there).duplicates == 1  # one text of two ids, so the log has one row of them
    shop.close()
    documents.close()


@pytest.mark.service("mongodb")
def test_a_collection_that_is_not_there_is_told(mongodb: MongoServer) -> None:
    """And one that is not named."""
    documents = MongoDocuments(mongodb.url)
    for url, kind, words in (
        (documents.url, InvalidInput, "does not name a collection"),
        (f"{documents.url}?table=gone", NotFound, "no collection 'gone'"),
    ):
        side = side_of(url)
        with pytest.raises(kind, match=words):
            side.shape()
        side.close()
    documents.close()


@pytest.mark.service("couchdb")
def test_a_database_that_is_not_there_is_told(couchdb: CouchServer) -> None:
    """Design documents are no rows."""
    documents = CouchDocuments(f"http://127.0.0.1:{couchdb.port}")
    documents.put("_design/d", {"views": {}})
    documents.put("a", {"n": 1})
    side = side_of(documents.url)
    shape = side.shape()
    assert shape is not None
    side.take(shape)
    with side.look() as look:
        assert [row["id"] for chunk in look.chunks() for row in chunk.to_pylist()] == ["a"]
    side.close()
    side = side_of(f"couchdb://127.0.0.1:{couchdb.port}/gone")
    with pytest.raises(NotFound, match="does not exist"):
        side.shape()
    side.close()
