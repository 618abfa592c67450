"""CouchDB's feed: opaque sequences, what a page says, and what a server refuses; rows are built by hand as CouchDB 3 gives them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from headwater.capture.couchdb import source as couchdb
from headwater.capture.couchdb.documents import document_of
from headwater.capture.documents import document_rows, document_table
from headwater.capture.source_url import parse_source_url
from headwater.model.errors import CaptureLost, NotCapturable, NotFound
from headwater.testing.servers.couchdb import CouchServer
from tests.rigs.capture.documents import CouchDocuments, Rig, check
from tests.rigs.wait import wait_until

pytestmark = pytest.mark.timeout(400)  # the first of them fetches its server

SEQ = "{}-g1AAAACheJzLYWBgYMpgTmHgz8tPSTV0MDQy1zMAQsMckEQiQ1L9____szKYExlzgQLsJsmpBqaJpmgKcRqRxwIkGRqA1H-oSYwAZ0gh8A"


def row(number: int, key: str, rev: str, **more: Any) -> dict[str, Any]:
    """A row of the feed, with its document."""
    document = {"_id": key, "_rev": rev, "n": number}
    return {"seq": SEQ.format(number), "id": key, "changes": [{"rev": rev}], "doc": document, **more}


class Server:
    """A server that has one page of the feed, whatever its sequence."""

    def __init__(self, page: list[dict[str, Any]]) -> None:
        self.page = page
        self.asked: list[Any] = []

    def get(self, path: str, **query: Any) -> Any:
        self.asked.append(query["since"])
        left = self.page if query["since"] != SEQ.format(9) else []
        return {"results": left, "last_seq": SEQ.format(9), "pending": 0}


def test_a_sequence_that_is_opaque_is_carried_and_positions_sort() -> None:
    """What the server gave is what it is asked with; the position's own number sorts."""
    source = couchdb.CouchSource(parse_source_url("couchdb://nowhere/shop"), name="shop")
    source._tables = {"shop": document_table("shop", None, has_rev=True)}
    server = Server([row(8, "a", "1-x"), row(9, "b", "3-y")])
    source._couch = server  # type: ignore[assignment]
    first = source.changes(couchdb._end(41, SEQ.format(7)), timeout_s=0.0)
    assert first is not None
    assert server.asked == [SEQ.format(7)]
    positions = first.batches[0].changes["position"].to_pylist()
    assert [couchdb._end(41, "x"), *positions, first.end, couchdb._end(44, "a")] == sorted(
        [couchdb._end(41, "x"), *positions, first.end, couchdb._end(44, "a")]
    )
    assert source.changes(first.end, timeout_s=0.0) is None
    assert server.asked[1:] == [SEQ.format(9)]


def test_a_field_that_is_called_as_the_revision_is_not_taken_for_it() -> None:
    """The column `rev` is the document's `_rev`; the field stands in the whole."""
    table = document_table("shop", None, has_rev=True)
    (found,) = document_rows([document_of({"_id": "a", "_rev": "1-x", "rev": 7})], table).to_pylist()
    assert (found["rev"], found["document"]) == ("1-x", '{"_id":"a","_rev":"1-x","rev":7}')


def test_what_a_row_says_is_one_change() -> None:
    """First revisions are inserts; a document twice in a page is told by its last row; design documents are left out."""
    page = [
        row(1, "a", "1-x"),
        row(2, "_design/views", "1-x"),
        row(3, "b", "2-x"),
        row(4, "c", "4-x", deleted=True),
        row(5, "a", "2-y"),
        row(6, "d", "2-x", doc=None),
    ]
    changes = couchdb.page_changes(page, "shop", after=couchdb._end(10, "0"), read_us=7)
    assert [(c.op, (c.after or c.before).id, int(c.position)) for c in changes] == [  # type: ignore[union-attr]
        ("u", "b", 13),
        ("d", "c", 14),
        ("u", "a", 15),
        ("d", "d", 16),
    ]
    assert {change.committed_us for change in changes} == {7}


def test_a_database_that_was_put_back_is_noticed_by_plain_numbers() -> None:
    """Opaque ones cannot be compared."""
    source = couchdb.CouchSource(parse_source_url("couchdb://nowhere/shop"), name="shop")
    source._check_seq(5, 5)
    source._check_seq(SEQ.format(9), SEQ.format(5))
    with pytest.raises(CaptureLost, match="--backfill-again"):
        source._check_seq(6, 5)


@pytest.mark.service("couchdb")
def test_options_and_tables_that_it_does_not_have_are_told(couchdb: CouchServer) -> None:
    """With those that it has."""
    documents = CouchDocuments(f"http://127.0.0.1:{couchdb.port}")
    with pytest.raises(NotFound, match=f"table={documents.name}"):
        check(documents.url, ["users"])
    with pytest.raises(NotCapturable, match="password_env"):
        check(documents.url + "?shema=a INT")


@pytest.mark.service("couchdb")
def test_a_wrong_password_is_told_without_it(couchdb: CouchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right one, from the environment, gets as far as the database that is not there."""
    with CouchServer(password="right-word") as server:
        url = f"couchdb://admin@127.0.0.1:{server.port}/nowhere?password_env=SHOP_PASSWORD"
        monkeypatch.setenv("SHOP_PASSWORD", "wrong-word")
        with pytest.raises(NotCapturable, match="password_env") as caught:
            check(url)
        assert "wrong-word" not in str(caught.value)
        monkeypatch.setenv("SHOP_PASSWORD", "right-word")
        with pytest.raises(NotFound):
            check(url)


@pytest.mark.slow
@pytest.mark.service("couchdb")
def test_a_server_that_is_killed_and_comes_back_is_gone_on_with(couchdb: CouchServer, tmp_path: Path) -> None:
    """The capture waits and tries again; nothing is lost or told twice."""
    with CouchServer() as server:
        documents = CouchDocuments(f"http://127.0.0.1:{server.port}")
        documents.put("a", {"n": 1})
        shop = Rig(documents, tmp_path)
        capture, stop = shop.open(), threading.Event()
        runner = threading.Thread(target=capture.run, args=(stop,))
        runner.start()
        try:
            wait_until(lambda: shop.log.table(documents.name).num_rows == 1, seconds=10)
            server.kill()
            wait_until(lambda: capture.status().state == "waiting", seconds=10)
            assert "Check that the server runs" in str(capture.status().error)
            server.restart()
            documents.put("b", {"n": 2})
            wait_until(lambda: shop.log.table(documents.name).num_rows == 2, seconds=30)
        finally:
            stop.set()
            runner.join()
        shop.close_capture()
        assert [(e["op"], e["id"]) for e in shop.history()] == [("c", "b")]
        shop.close()
