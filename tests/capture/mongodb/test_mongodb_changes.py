"""Events of change streams, built by hand as MongoDB's manual has them, and what a MongoDB refuses; no real MongoDB can be had here."""

from __future__ import annotations

import datetime
import uuid
from pathlib import Path
from typing import Any

import pytest
from bson import Int64
from bson.binary import Binary
from bson.decimal128 import Decimal128
from bson.objectid import ObjectId
from bson.timestamp import Timestamp

from headwater.capture.documents import document_rows, document_table
from headwater.capture.mongodb import source as mongodb
from headwater.capture.mongodb.changes import change_of, document_of, id_text
from headwater.capture.source_url import parse_source_url
from headwater.model.errors import CaptureLost, NotCapturable, Unreachable
from headwater.testing.servers.mongodb import MongoServer
from tests.rigs.capture.documents import MongoDocuments, Rig, check

pytestmark = pytest.mark.timeout(400)  # the first of them fetches its server

USERS = document_table("users", None, has_rev=False)
SESSION = {"id": uuid.UUID(int=7), "uid": b""}
WALL = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)


def event(
    number: int, type_: str = "insert", *, txn: int | None = None, coll: str = "users", **more: Any
) -> dict[str, Any]:
    """An event as the manual shows it."""
    told: dict[str, Any] = {
        "_id": {"_data": f"82{number:016X}"},
        "operationType": type_,
        "clusterTime": Timestamp(1_769_860_800, number),
        "wallTime": WALL,
        "ns": {"db": "shop", "coll": coll},
        "documentKey": {"_id": f"k{number}"},
    }
    if type_ == "insert":
        told["fullDocument"] = {"_id": f"k{number}", "n": number}
    if txn is not None:
        told |= {"lsid": SESSION, "txnNumber": Int64(txn)}
    return told | more


class Stream:
    """A stream that gives batches which a test has made; `reached` is the position behind all of them."""

    name = "shop"
    is_streaming = True

    def __init__(self, *batches: list[dict[str, Any]]) -> None:
        self.batches = list(batches)
        self.reached = "82"

    def read_stream(self, wait_ms: int) -> tuple[list[Any], str]:
        batch = self.batches.pop(0) if self.batches else []
        self.reached = batch[-1]["_id"]["_data"] if batch else self.reached
        return batch, self.reached


def streaming(*batches: list[dict[str, Any]]) -> mongodb.MongoSource:
    """A source that reads from a made stream."""
    source = mongodb.MongoSource(parse_source_url("mongodb://nowhere/shop"), name="shop")
    source._mongo = Stream(*batches)  # type: ignore[assignment]
    orders = document_table("orders", None, has_rev=False)
    source._tables = {"users": USERS, "orders": orders}
    return source


def test_a_transaction_that_comes_in_several_batches_is_told_whole() -> None:
    """Its events have one session and number; where it ends is known when something else, or nothing, follows."""
    source = streaming(
        [event(1), event(2, txn=1), event(3, txn=1, coll="orders")], [event(4, txn=1)], [], [event(5, txn=2)]
    )
    told = source.changes("82", timeout_s=0.0)
    assert told is not None and told.whole and told.end == f"82{4:016X}"
    assert told.transactions is not None
    ends = [row for row in told.transactions.to_pylist() if row["status"] == "end"]
    assert [row["events"] for row in ends] == [1, 3]
    assert dict(ends[1]["tables"]) == {"users": 2, "orders": 1}
    users = next(batch for batch in told.batches if batch.table == "users").changes.to_pylist()
    assert [row["transaction_order"] for row in users] == [0, 0, 2]
    assert users[1]["transaction"] == users[2]["transaction"] == f"{uuid.UUID(int=7).hex}.1"


def test_a_transaction_larger_than_a_page_goes_on_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """`whole` is false until its last part, and nothing is appended before."""
    monkeypatch.setattr(mongodb, "CHANGES_ROWS", 2)
    source = streaming([event(number, txn=1) for number in range(1, 6)])
    parts, after = [], "82"
    while (part := source.changes(after, timeout_s=0.0)) is not None:
        parts.append(part)
        after = part.end
    assert [part.whole for part in parts] == [False, False, True]
    rows = [row for part in parts if part.transactions is not None for row in part.transactions.to_pylist()]
    assert [(row["status"], row["events"]) for row in rows] == [("begin", None), ("end", 5)]
    orders = [n for part in parts for batch in part.batches for n in batch.changes["transaction_order"].to_pylist()]
    assert orders == [0, 1, 2, 3, 4]


def test_a_renamed_collection_stops_and_the_others_go_on() -> None:
    """What came before it is told before it."""
    source = streaming([event(1), event(2, "rename", to={"db": "shop", "coll": "people"}), event(3, coll="orders")])
    first = source.changes("82", timeout_s=0.0)
    assert first is not None and first.end == f"82{1:016X}" and not first.tables
    second = source.changes(first.end, timeout_s=0.0)
    assert second is not None and "people" in str(second.tables[0].error)
    third = source.changes(second.end, timeout_s=0.0)
    assert third is not None and [batch.table for batch in third.batches] == ["orders"]


def test_images_before_a_change_are_told_where_the_server_has_them() -> None:
    """Without them an update has no `before`, and a delete its id."""
    was, now = {"_id": "k1", "n": 1}, {"_id": "k1", "n": 2}
    update = change_of(event(1, "update", fullDocument=now, fullDocumentBeforeChange=was), USERS)
    assert update is not None and update.before is not None and update.before.text == '{"_id":"k1","n":1}'
    bare = change_of(event(1, "replace", fullDocument=now), USERS)
    assert bare is not None and (bare.op, bare.before) == ("u", None)
    delete = change_of(event(1, "delete", fullDocumentBeforeChange=was), USERS)
    assert delete is not None and delete.before is not None and delete.before.text == '{"_id":"k1","n":1}'
    gone = change_of(event(1, "delete"), USERS)
    assert gone is not None and gone.before is not None and (gone.before.id, gone.before.text) == ("k1", None)


def test_an_update_of_a_document_that_is_gone_since_has_its_id() -> None:
    """The server finds nothing any more; the deletion comes behind it."""
    change = change_of(event(1, "update", fullDocument=None), USERS)
    assert change is not None and change.after is not None
    assert (change.op, change.after.id, change.after.text) == ("u", "k1", None)


def test_what_changes_no_document_is_left_out() -> None:
    """An index that was made, say; and without a wall clock the cluster's time serves."""
    assert change_of(event(1, "createIndexes"), USERS) is None
    old = event(1)
    del old["wallTime"]
    change = change_of(old, USERS)
    assert change is not None and change.committed_us == 1_769_860_800_000_000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("abc", "abc"),
        (5, "5"),
        (5.0, "5"),
        (Int64(5), "5"),
        (Decimal128("5.0"), "5"),
        (5.5, "5.5"),
        (Decimal128("5.50"), "5.5"),
        (ObjectId("65f0c0ffee65f0c0ffee65f0"), "65f0c0ffee65f0c0ffee65f0"),
        (True, "true"),
        ({"a": 1, "b": "x"}, '{"a":1,"b":"x"}'),
    ],
)
def test_an_id_of_any_kind_has_a_text(value: Any, text: str) -> None:
    """Numbers that are one `_id` in MongoDB are one in the log."""
    assert id_text(value) == text


def test_values_of_bson_fit_declared_columns() -> None:
    """Times, bytes, ids, decimals; what is no finite number; inside of lists, too."""
    ddl = "at TIMESTAMP, data BINARY, owner STRING, price DECIMAL(10,2), x DOUBLE, n BIGINT, times ARRAY<TIMESTAMP>"
    table = document_table("users", ddl, has_rev=False)
    document = {
        "_id": 1,
        "at": WALL,
        "data": Binary(b"\x00\xff"),
        "owner": ObjectId("65f0c0ffee65f0c0ffee65f0"),
        "price": Decimal128("12.50"),
        "x": float("inf"),
        "n": Int64(2**40),
        "times": [WALL, None],
    }
    (row,) = document_rows([document_of(document, table)], table).to_pylist()
    assert (row["at"], row["data"], row["owner"]) == (WALL, b"\x00\xff", "65f0c0ffee65f0c0ffee65f0")
    assert (str(row["price"]), row["x"], row["n"], row["times"]) == ("12.50", float("inf"), 2**40, [WALL, None])


def test_a_declared_column_may_be_called_as_one_of_ours() -> None:
    """MongoDB counts no revisions, so `rev` is a field like any other, and so is `document` unless it is to be the whole."""
    table = document_table("users", "rev BIGINT, document DOUBLE", has_rev=False)
    document = document_of({"_id": 1, "rev": 7, "document": 1.5}, table)
    assert document_rows([document], table).to_pylist() == [{"id": "1", "rev": 7, "document": 1.5}]


# What a server refuses


@pytest.mark.service("mongodb")
def test_a_server_without_a_replica_set_is_told_how_to_become_one(mongodb: MongoServer) -> None:
    """Before anything is made in the log."""
    with MongoServer("standalone") as alone:
        documents = MongoDocuments(alone.url)
        with pytest.raises(NotCapturable, match=r"rs\.initiate"):
            check(documents.url, ["users"])
        documents.close()


@pytest.mark.service("mongodb")
def test_a_wrong_password_is_told_without_it(mongodb: MongoServer) -> None:
    """With where it is taken from."""
    with pytest.raises(NotCapturable, match="password_env") as caught:
        check(f"mongodb://me:s3cret@127.0.0.1:{mongodb.port}/shop", ["users"])
    assert "s3cret" not in str(caught.value)


@pytest.mark.service("mongodb")
def test_what_the_oplog_has_forgotten_is_reported_and_repaired(mongodb: MongoServer, tmp_path: Path) -> None:
    """Never skipped: `capture_lost`, and `backfill_again` copies and removes. So for a server that was emptied."""
    with MongoServer("entries=5") as server:
        documents = MongoDocuments(server.url, database="shop")
        documents.put_many({"a": {"n": 1}, "b": {"n": 1}})
        shop = Rig(documents, tmp_path)
        try:
            shop.up()
            shop.close_capture()
            documents.delete("a")
            documents.put_many({f"k{number}": {"n": number} for number in range(10)})
            with pytest.raises(CaptureLost, match="--backfill-again"):
                shop.open()
            shop.open(backfill_again=True)
            shop.assert_same()
            assert "a" not in shop.table()
        finally:
            shop.close()
            documents.close()


@pytest.mark.service("mongodb")
def test_a_server_that_goes_away_is_worth_another_try_and_one_that_was_emptied_is_not_taken_for_it(
    mongodb: MongoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is retried; the second lacks the changes behind the position, and is refused."""
    monkeypatch.setattr("headwater.capture.mongodb.client.CONNECT_S", 1.0)
    with MongoServer() as server:
        documents = MongoDocuments(server.url, database="shop")
        documents.put("a", {"n": 1})
        shop = Rig(documents, tmp_path)
        try:
            shop.up()
            documents.put("b", {"n": 1})
            server.kill()
            with pytest.raises(Unreachable) as caught:
                shop.up()
            assert caught.value.retriable
            shop.close_capture()
            server.restart()
            MongoDocuments(server.url, database="shop").close()
            with pytest.raises(CaptureLost):
                shop.open()
        finally:
            shop.close()
            documents.close()
