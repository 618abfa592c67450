"""The runner of captures with a scripted source: what any kind of database may hand over, and what the log has of it then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.capture.capture import Capture
from headwater.capture.source import (
    MESSAGES_SCHEMA,
    BackfillChunk,
    ChangeBatch,
    Changes,
    SourceLag,
    SourceTable,
    TableChange,
    changes_schema,
)
from headwater.log.log import Log, open_log
from headwater.model.errors import CaptureLost, NotCapturable, Unreachable

USERS = SourceTable(
    name="users", schema=pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())]), key=("id",)
)
WIDER = SourceTable(name="users", schema=USERS.schema.append(pa.field("city", pa.string())), key=("id",))


def changes(end: str, *rows: tuple[Any, ...], table: SourceTable = USERS, whole: bool = True, **more: Any) -> Changes:
    """Rows are op, position, before, after; all of one transaction."""
    told = [
        {
            "op": op,
            "before": before,
            "after": after,
            "position": position,
            "transaction": "t",
            "transaction_order": n,
            "committed": n,
        }
        for n, (op, position, before, after) in enumerate(rows)
    ]
    batches = (
        (ChangeBatch(table.name, pa.Table.from_pylist(told, schema=changes_schema(table.schema))),) if rows else ()
    )
    return Changes(batches=batches, end=end, whole=whole, **more)


def chunk(
    *rows: dict[str, Any], after: str, until: str, last: bool = True, table: SourceTable = USERS
) -> BackfillChunk:
    return BackfillChunk(
        rows=pa.Table.from_pylist(list(rows), schema=table.schema), done="x", last=last, after=after, until=until
    )


def user(number: int, name: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": number, "name": name, **more}


class Scripted:
    """A source that hands over what it is told to; an error among it is raised."""

    def __init__(
        self, *handed: Changes | Exception | None, chunks: list[BackfillChunk] | None = None, info: SourceTable = USERS
    ) -> None:
        self.name, self.url, self.identity = "shop", "scripted://shop", "one"
        self.left_out: dict[str, str] = {}
        self.info = info
        self.handed = list(handed)
        self.chunks = chunks if chunks is not None else [chunk(after="00", until="00")]
        self.confirmed: list[str] = []
        self.resumed: list[str | None] = []
        self.beats = 0

    def check(self) -> list[SourceTable]:
        return [self.info]

    def prepare(self, resume: str | None) -> str:
        self.resumed.append(resume)
        return resume or "00"

    def changes(self, after: str, *, timeout_s: float) -> Changes | None:
        found = self.handed.pop(0) if self.handed else None
        if isinstance(found, Exception):
            raise found
        return found

    def chunk(self, table: str, done: Any | None, *, position: str) -> BackfillChunk:
        return self.chunks.pop(0)

    def confirm(self, position: str) -> None:
        self.confirmed.append(position)

    def heartbeat(self) -> None:
        self.beats += 1

    def lag(self, position: str | None = None) -> SourceLag:
        return SourceLag(rows=0)

    def remove(self) -> None:
        """Nothing was made."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log", durability="os") as opened:
        yield opened


def captured(log: Log, source: Scripted, **settings: Any) -> Capture:
    capture = Capture(log, source, partitions=2, **settings)
    capture.open()
    while source.handed or source.chunks:
        capture.step(timeout_s=0.0)
    capture.catch_up()
    return capture


def names(log: Log) -> dict[int, Any]:
    return {row["id"]: row["name"] for row in log.table("users").to_pylist()}


def test_a_chunk_never_hides_what_changed_behind_it(log: Log) -> None:
    """It was read between two positions: what changed in between is newer, or already in it."""
    held = chunk(user(1, "old"), user(2, "two"), user(3, "gone"), after="01", until="04")
    source = Scripted(
        changes("01", ("u", "01", user(2, "x"), user(2, "two"))),
        changes("02", ("u", "02", user(1, "old"), user(1, "new"))),
        None,
        changes("05", ("d", "05", user(3, "gone"), None), ("c", "05", None, user(4, "four"))),
        chunks=[chunk(after="00", until="00", last=False), held],
    )
    captured(log, source)
    assert names(log) == {1: "new", 2: "two", 4: "four"}
    copied = [event["id"] for event in log.read("users.changes").to_pylist() if event["op"] == "r"]
    assert copied == [2]


def test_chunks_of_one_old_snapshot_never_hide_what_changed_since(log: Log) -> None:
    """All of them are as old as the first, and changes have come before they are asked for."""
    source = Scripted(
        changes("01", ("u", "01", user(9, "old"), user(9, "new"))),
        changes("02", ("d", "02", user(8), None)),
        chunks=[
            chunk(user(1, "one"), after="00", until="00", last=False),
            chunk(user(8, "dead"), after="00", until="00", last=False),
            chunk(user(9, "old"), after="00", until="00"),
        ],
    )
    captured(log, source)
    assert names(log) == {1: "one", 9: "new"}


def test_a_truncated_table_is_empty(log: Log) -> None:
    """Every key that lived gets a tombstone, those of the same transaction too, and a chunk from before it is worth nothing."""
    source = Scripted(
        None,
        changes(
            "02", ("c", "02/1", None, user(5, "five")), ("t", "02/2", None, None), ("c", "02/3", None, user(6, "six"))
        ),
        chunks=[
            chunk(user(1, "a"), user(2, "b"), after="00", until="00", last=False),
            chunk(user(3, "c"), after="01", until="02"),
        ],
    )
    captured(log, source)
    assert names(log) == {6: "six"}
    ops = sorted((event["op"], event["id"]) for event in log.read("users.changes").to_pylist())
    assert ops == [("c", 5), ("c", 6), ("r", 1), ("r", 2), ("t", 1), ("t", 2), ("t", 5)]


def test_nothing_of_a_transaction_is_seen_before_its_end(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a table changes in the middle of it."""
    monkeypatch.setattr("headwater.capture.events.SPILL_BYTES", 0)
    source = Scripted()
    capture = captured(log, source)
    source.handed = [
        changes("00", ("c", "01/1", None, user(1, "a")), whole=False),
        None,
        changes(
            "00",
            ("c", "01/2", None, user(2, "b", city="x")),
            table=WIDER,
            whole=False,
            tables=(TableChange(table=WIDER),),
        ),
        changes("01", ("u", "01/3", user(1, "a", city=None), user(1, "z", city="y")), table=WIDER),
    ]
    for _ in range(3):
        capture.step(timeout_s=0.0)
        assert names(log) == {}
    capture.step(timeout_s=0.0)
    assert {row["id"]: (row["name"], row["city"]) for row in log.table("users").to_pylist()} == {
        1: ("z", "y"),
        2: ("b", "x"),
    }
    assert len(log.read("users.changes")) == 3


def test_columns_that_came_while_nothing_was_captured_are_copied(log: Log) -> None:
    """No event speaks of them, so the table is copied again; what is gone meanwhile is removed."""
    first = captured(log, Scripted(chunks=[chunk(user(1, "a"), user(2, "b"), after="00", until="00")]))
    assert first.progress.tables["users"].state == "live"
    again = Scripted(info=WIDER, chunks=[chunk(user(1, "a", city="x"), after="00", until="00", table=WIDER)])
    captured(log, again)
    assert [(row["id"], row["city"]) for row in log.table("users").to_pylist()] == [(1, "x")]
    assert again.resumed == ["00"]


def test_a_position_behind_which_nothing_came_is_kept_and_confirmed(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a database with other traffic can forget its own log."""
    monkeypatch.setattr("headwater.capture.capture._QUIET_END_S", 0.0)
    source = Scripted()
    capture = captured(log, source, heartbeat_s=0.0)
    source.handed = [changes("07")]
    capture.step(timeout_s=0.0)
    assert source.confirmed[-1] == "07"
    assert capture.step(timeout_s=0.0) is False
    assert source.beats
    assert captured(log, source).progress.position == "07"
    assert source.resumed == [None, "07"]


def test_what_applications_write_beside_tables_is_kept(log: Log) -> None:
    """The outbox pattern, also where nothing else changed."""
    told = [{"prefix": "mail", "content": b"hi", "position": "01", "transaction": "t", "committed": 0}]
    captured(log, Scripted(changes("01", messages=pa.Table.from_pylist(told, schema=MESSAGES_SCHEMA))))
    (event,) = log.read("shop.messages").to_pylist()
    assert (event["prefix"], event["content"]) == ("mail", b"hi")


def test_a_server_that_goes_away_is_tried_again(log: Log) -> None:
    """The capture waits, and goes on where the log is; other errors end it and are told."""
    source = Scripted(
        changes("01", ("c", "01", None, user(1, "a"))),
        changes("02", ("c", "02", None, user(2, "b")), whole=False),
        Unreachable("The server is gone."),
        changes("02", ("c", "02", None, user(2, "b"))),
        NotCapturable("Somebody took the rights away."),
    )
    capture = Capture(log, source)
    with pytest.raises(NotCapturable):
        capture.run(threading.Event())
    assert names(log) == {1: "a", 2: "b"}
    assert len(log.read("users.changes")) == 2
    assert source.resumed == [None, "01"]
    status = capture.status()
    assert (status.state, status.error) == ("failed", "Somebody took the rights away.")


def test_another_database_is_refused_until_it_is_copied_anew(log: Log) -> None:
    """By its identity."""
    captured(log, Scripted(chunks=[chunk(user(1, "a"), user(2, "b"), after="00", until="00")]))
    other = Scripted(chunks=[chunk(user(2, "z"), after="00", until="00")])
    other.identity = "two"
    with pytest.raises(CaptureLost):
        Capture(log, other).open()
    captured(log, other, backfill_again=True)
    assert names(log) == {2: "z"}
    assert other.resumed == ["00", "00", None]
