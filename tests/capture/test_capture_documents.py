"""Captured CouchDB and MongoDB: what a table of documents is in the log, whatever is done to the database; one suite for both."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.capture.capture import remove_capture
from headwater.capture.couchdb import source as couchdb_source
from headwater.capture.mongodb import source as mongodb_source
from headwater.capture.source_url import open_source
from headwater.model.errors import CaptureLost, InvalidSchema, NotCapturable, NotFound, Unreachable
from tests.rigs.capture.documents import KINDS, CouchDocuments, Documents, Make, Rig, check, empty_documents, rigs
from tests.rigs.wait import wait_until

pytestmark = pytest.mark.timeout(400)  # the first of them fetches its server

ODD = {
    "null": None,
    "text": "ü€😀\n\0'\"\\",
    "nested": {"a": [1, None, {"b": [[], {}]}], "ö": True},
    "numbers": [0, -1, 2**53, 1.5, 1e300],
    "empty": "",
}


@pytest.fixture(params=KINDS)
def documents(request: pytest.FixtureRequest) -> Iterator[Documents]:
    """An empty table of documents."""
    yield from empty_documents(request)


@pytest.fixture
def rig(documents: Documents, tmp_path: Path) -> Iterator[Make]:
    yield from rigs(documents, tmp_path)


def test_documents_that_were_there_and_changes_since_are_the_table(rig: Make, documents: Documents) -> None:
    """A document of the backfill is `r`; then each change, and a deletion is a tombstone."""
    documents.put("a", {"n": 1})
    documents.put("b", {"n": 2})
    shop = rig()
    shop.assert_same()
    assert {event["op"] for event in shop.log.read(f"{documents.name}.changes").to_pylist()} == {"r"}
    documents.put("c", ODD)
    shop.up()
    documents.put("a", {"n": 3})
    shop.up()
    documents.delete("b")
    shop.assert_same()
    assert [(e["op"], e["id"]) for e in shop.history()] == [("c", "c"), ("u", "a"), ("d", "b")]
    topic = shop.log.topic(documents.name)
    assert (topic.key, topic.time, topic.compact) == ("id", "committed", True)


def test_values_of_every_kind_arrive_as_they_are(rig: Make, documents: Documents) -> None:
    """By the backfill and by the feed: null, characters of all planes, nested and empty things, large numbers, a large text."""
    documents.put("before", ODD)
    documents.put("large", {"text": "ü" * 1_000_000})
    shop = rig()
    shop.assert_same()
    documents.put("after", ODD)
    documents.put("large", {"text": "é" * 1_200_000})
    shop.assert_same()
    assert shop.table()["after"] == ODD


def test_a_backfill_in_many_chunks_is_whole(rig: Make, documents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on where it was when the capture is started again in between."""
    for module in (couchdb_source, mongodb_source):
        monkeypatch.setattr(module, "CHUNK_ROWS", 7)
    documents.put_many({f"k{number:03}": {"n": number} for number in range(100)})
    shop = rig()
    capture = shop.open()
    for _ in range(5):
        capture.step(timeout_s=0.0)
    assert 0 < shop.log.table(documents.name).num_rows < 100
    shop.open()
    shop.assert_same()
    assert shop.log.read(f"{documents.name}.changes").num_rows == 100  # none was copied twice


def test_declared_columns_are_typed(rig: Make, documents: Documents) -> None:
    """A field that is missing is null; a STRING takes anything as JSON; what does not fit is null, and stands in a header."""
    documents.put("a", {"name": "Ada", "amount": 1.5, "tags": ["x", None], "at": "2026-01-31T12:00:00.000000Z"})
    shop = rig(options="?schema=name STRING, amount DOUBLE, tags ARRAY<STRING>, at TIMESTAMP")
    shop.up()
    documents.put("b", {"name": {"first": "Bob"}, "amount": "much", "other": 1})
    shop.up()
    rows = {row["id"]: row for row in shop.log.table(documents.name).to_pylist()}
    assert (rows["a"]["name"], rows["a"]["amount"], rows["a"]["tags"]) == ("Ada", 1.5, ["x", None])
    assert rows["a"]["at"].isoformat() == "2026-01-31T12:00:00+00:00"
    assert (rows["b"]["name"], rows["b"]["amount"], rows["b"]["tags"]) == ('{"first":"Bob"}', None, None)
    events = shop.log.read(documents.name, columns=["id", "_headers"]).to_pylist()
    (headers,) = [dict(event["_headers"]) for event in events if event["_headers"]]
    assert headers == {"misfit.amount": b'"much"'}


def test_a_column_that_is_declared_later_is_filled_by_copying_again(rig: Make, documents: Documents) -> None:
    """No change has told its values."""
    documents.put("a", {"name": "Ada", "n": 1})
    shop = rig(options="?schema=name STRING")
    shop.up()
    shop.url += ", n INT"
    shop.open().catch_up()
    assert [(row["name"], row["n"]) for row in shop.log.table(documents.name).to_pylist()] == [("Ada", 1)]


def test_a_declared_column_cannot_be_the_id(documents: Documents) -> None:
    """It is there already."""
    with pytest.raises(InvalidSchema, match="_id"):
        check(documents.url + "?schema=id STRING", [documents.name])


def test_each_change_is_a_transaction_with_begin_and_end(rig: Make, documents: Documents) -> None:
    """A write by itself is one."""
    shop = rig()
    shop.up()
    for number in range(3):
        documents.put(f"k{number}", {})
    shop.up()
    told = shop.log.read(f"{shop.capture.source.name}.transactions").to_pylist() if shop.capture else []
    assert [row["status"] for row in told] == ["begin", "end"] * 3
    assert [row["transaction"] for row in told if row["status"] == "end"] == [e["transaction"] for e in shop.history()]
    assert all(row["tables"] == [(documents.name, 1)] for row in told if row["status"] == "end")


def test_a_capture_that_is_started_again_goes_on_with_the_next_change(rig: Make, documents: Documents) -> None:
    """What happened meanwhile comes once; nothing comes again."""
    documents.put("a", {"n": 1})
    shop = rig()
    shop.up()
    shop.close_capture()
    documents.put("a", {"n": 2})
    documents.put("b", {"n": 1})
    shop.assert_same()
    shop.open()
    shop.assert_same()
    assert sorted((e["op"], e["id"]) for e in shop.history()) == [("c", "b"), ("u", "a")]
    positions = [event["position"] for event in shop.history()]
    assert len(set(positions)) == len(positions)


def test_a_change_is_there_soon(rig: Make, documents: Documents) -> None:
    """The server says that something has come; nobody looks every now and then."""
    shop = rig()
    shop.up()
    assert shop.capture is not None
    stop = threading.Event()
    runner = threading.Thread(target=shop.capture.run, args=(stop,))
    runner.start()
    try:
        time.sleep(0.5)
        for number in range(3):
            documents.put(f"k{number}", {})
            wait_until(lambda: shop.log.table(documents.name).num_rows == number + 1, seconds=5)  # noqa: B023
    finally:
        stop.set()
        runner.join()


def test_backfill_again_removes_what_is_gone(rig: Make, documents: Documents) -> None:
    """Where the changes of a while are not known, the documents are compared."""
    for key in "abc":
        documents.put(key, {"n": 1})
    shop = rig()
    shop.up()
    shop.close_capture()
    source = open_source(shop.url, [documents.name])
    remove_capture(shop.log, source.name)
    documents.delete("b")
    documents.put("c", {"n": 2})
    shop.open(backfill_again=True)
    shop.assert_same()
    assert set(shop.table()) == {"a", "c"}


def test_nothing_stays_in_the_database(rig: Make, documents: Documents) -> None:
    """After `capture remove`; twice does nothing."""
    documents.put("a", {})
    shop = rig()
    shop.up()
    assert shop.capture is not None
    name = shop.capture.source.name
    shop.close_capture()
    remove_capture(shop.log, name)
    source = open_source(shop.url, [documents.name])
    source.remove()
    source.close()
    if isinstance(documents, CouchDocuments):
        with pytest.raises(OSError, match="404"):
            documents.ask("GET", f"_local/headwater.{name}")
    assert set(documents.all()) == {"a"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_database_that_is_not_there_is_told(request: pytest.FixtureRequest, kind: str) -> None:
    """And a table."""
    server = request.getfixturevalue(kind)
    url = f"{kind}://127.0.0.1:{server.port}/nowhere"
    with pytest.raises((NotFound, NotCapturable), match="nowhere"):
        check(url)
    with pytest.raises(NotFound, match="nothing"):
        check(url, ["nothing"])


@pytest.mark.parametrize("kind", ["couchdb", "mongodb"])
def test_a_server_that_is_not_there_is_worth_another_try(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its password stays unseen."""
    monkeypatch.setattr("headwater.capture.mongodb.client.CONNECT_S", 0.3)
    with pytest.raises(Unreachable) as caught:
        check(f"{kind}://me:s3cret@127.0.0.1:1/shop", ["shop"])
    assert caught.value.retriable and "s3cret" not in str(caught.value)


def test_another_database_of_the_name_is_refused(documents: Documents, tmp_path: Path) -> None:
    """One that was made anew, or whose changes are gone."""
    documents.put("a", {})
    shop = Rig(documents, tmp_path)
    try:
        shop.up()
        shop.close_capture()
        if isinstance(documents, CouchDocuments):
            documents.ask("DELETE", "")
            documents.ask("PUT", "")
            with pytest.raises(CaptureLost, match="--backfill-again"):
                shop.open()
            shop.open(backfill_again=True)
            assert shop.table() == {}
    finally:
        shop.close()
