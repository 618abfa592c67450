"""Sinks: every target holds what a plain fold of the events comes to, each batch once, whoever writes again or wakes late."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import headwater as hw
from headwater.model.errors import (
    CheckpointConflict,
    Conflict,
    Fenced,
    InvalidInput,
    Unsupported,
)
from headwater.model.points import watched
from headwater.model.schema import to_arrow_schema
from headwater.sinks import redis as redis_sink
from headwater.sinks.ledger import NO_ENTRY
from headwater.sinks.newest_rows import Pieces, newest, with_places
from headwater.sinks.sink import Dead, Shape, open_sink, write_batch
from headwater.sinks.table_group import open_together, write_together
from headwater.testing.crash.points import at
from headwater.verify.side_url import open_side
from tests.rigs.app.sink_targets import EMBEDDED, SERVED, SHAPE, Target, batch, folded, marker, write

Make = Callable[[str], Target]

DISTURBED_BATCHES = 40
KINDS = [
    *EMBEDDED,
    *(pytest.param(kind, marks=pytest.mark.service(kind.partition("-")[0])) for kind in SERVED),
]


def user(n: int, **more: Any) -> dict[str, Any]:
    return {"name": f"u{n}", "n": n, "amount": n / 4, **more}


def changes(seed: int, count: int) -> list[tuple[str, dict[str, Any] | None]]:
    chosen = random.Random(seed)
    texts = [
        "",
        "it's",
        'a "quote"',
        "back\\slash",
        "tab\tand\nline",
        "ünï✓🚲",
        "a|b",
        "%s {} $1",
        "null",
        "NULL",
        "\\N",
        "x" * 3000,
    ]
    made: list[tuple[str, dict[str, Any] | None]] = []
    for _ in range(count):
        key = chosen.choice(["k", "q'", 'd"', "b\\", "p|", "ü"]) + str(chosen.randrange(count // 4))
        row = {
            "name": chosen.choice([None, *texts]),
            "n": chosen.choice([None, 0, -1, 2**63 - 1, -(2**63), chosen.randrange(1000)]),
            "amount": chosen.choice([None, 0.0, -2.5, 1e300, 5e-324, chosen.random()]),
        }
        made.append((key, None if chosen.random() < 0.2 else row))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_holds_what_the_events_come_to(make_target: Make, kind: str) -> None:
    """Inserts, updates and deletions, many of one key in a batch, in hostile texts; each batch is written twice, and counts once."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    target = make_target(kind)
    sink = target.sink()
    sink.open(SHAPE)
    batches = [changes(seed + number, 400) for number in range(4)]
    first = 0
    for epoch, one in enumerate(batches):
        table = batch(one, first=first)
        first += len(one)
        assert write(sink, epoch, table, end=first).written
        assert not write(sink, epoch, table, end=first).written
        assert target.rows() == folded(*batches[: epoch + 1])
    assert sink.entry().last.ends == [{"users": {"0": first}}]
    sink.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_changes_no_row_counts(make_target: Make, kind: str) -> None:
    """Deletions of what is not there, and none at all: the next batch follows."""
    target = make_target(kind)
    sink = target.sink()
    sink.open(SHAPE)
    batches = [[("a", None)], [], [("a", user(1))], [("b", None)], [], [("a", None)], [("a", None)], [("c", user(2))]]
    for epoch, one in enumerate(batches):
        assert write(sink, epoch, batch(one)).written
        assert not write(sink, epoch, batch(one)).written
        assert sink.entry().last.epoch == epoch
        assert target.rows() == folded(*batches[: epoch + 1])
    sink.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_writer_that_was_overtaken_changes_nothing(make_target: Make, kind: str) -> None:
    """The one that came later has the stage; the other is refused before and in the middle of a batch."""
    target = make_target(kind)
    zombie, sink = target.sink(), target.sink()
    zombie.open(SHAPE)
    write(zombie, 0, batch([("a", user(1))]))
    sink.open(SHAPE)
    write(sink, 1, batch([("a", user(2))], first=1))
    with pytest.raises((Fenced, CheckpointConflict)):
        write(zombie, 1, batch([("a", user(3)), ("b", user(4))], first=1))
    assert target.rows() == folded([("a", user(2))])
    write(sink, 2, batch([("c", user(5))], first=2))
    assert target.rows() == folded([("a", user(2)), ("c", user(5))])


@pytest.mark.service("redis")
def test_a_writer_that_is_overtaken_inside_a_batch_stops_there(make_target: Make) -> None:
    """Redis is written in pieces; each looks at the number again."""
    target = make_target("redis-json")
    zombie, sink = target.sink(), target.sink()
    zombie.open(SHAPE)
    table = batch([("a", user(3)), ("b", user(4))])
    assert zombie.begin(marker(0, 2))
    sink.open(SHAPE)
    write(sink, 0, table)
    write(sink, 1, batch([("a", user(9))], first=2), end=3)
    with pytest.raises(Fenced):
        zombie.upsert(table.select(SHAPE.schema.names))
    with pytest.raises(Fenced):
        zombie.commit(marker(0, 2))
    assert target.rows()["a"]["n"] == 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_nobody_has_opened_knows_of_no_batch(make_target: Make, kind: str) -> None:
    """It is asked before a stage is opened."""
    assert make_target(kind).sink().entry() == NO_ENTRY


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_does_not_follow_is_refused(make_target: Make, kind: str) -> None:
    """Another query, a gap, an older one, other ends; and a target that was emptied."""
    target = make_target(kind)
    sink = target.sink()
    sink.open(SHAPE)
    table = batch([("a", user(1))])
    with pytest.raises(CheckpointConflict):
        write(sink, 7, table)
    write(sink, 0, table)
    write(sink, 1, table)
    for wrong in (marker(3, 1), marker(0, 1), marker(1, 5), marker(2, 1, query="another")):
        with pytest.raises(CheckpointConflict):
            write_batch(sink, wrong, Pieces([batch([("a", user(2))])], ("id",)), tell=lambda dead: None)
    assert target.rows() == folded([("a", user(1))])
    assert sink.accept_new_checkpoint().epoch == 1
    again = target.sink()
    again.open(SHAPE)
    assert again.entry().last is None
    assert write_batch(again, marker(0, 9, query="new"), Pieces([batch([("a", user(3))])], ("id",)), tell=print).written
    assert target.rows() == folded([("a", user(3))])


@pytest.mark.parametrize("kind", KINDS)
def test_a_repair_changes_rows_and_no_marker(make_target: Make, kind: str) -> None:
    """And it changes nothing where the stage went on since; the stage's writer is not fenced by it."""
    target = make_target(kind)
    sink, repair = target.sink(), target.sink()
    sink.open(SHAPE)
    write(sink, 0, batch([("a", user(1)), ("b", user(2))]))
    repair.attach(SHAPE)
    last = repair.entry().last
    repair.begin_repair(last)
    repair.delete(batch([("b", None)]).select(["id"]))
    repair.upsert(batch([("a", user(7))]).select(SHAPE.schema.names))
    repair.commit(None)
    assert target.rows() == folded([("a", user(7))])
    assert sink.entry().last == last
    write(sink, 1, batch([("c", user(3))], first=2))
    with pytest.raises(Conflict):
        repair.begin_repair(last)
    assert target.rows() == folded([("a", user(7)), ("c", user(3))])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_key_are_dead_letters(make_target: Make, kind: str) -> None:
    """They are told once, before the batch counts, with their place."""
    target = make_target(kind)
    sink = target.sink()
    sink.open(SHAPE)
    dead: list[Dead] = []
    table = batch([("a", user(1)), (None, user(2)), ("b", user(3))])
    assert write(sink, 0, table, dead=dead).dead == 1
    assert [(one.partition, one.offset) for one in dead] == [(0, 1)]
    assert '"u2"' in dead[0].event
    assert target.rows() == folded([("a", user(1)), ("b", user(3))])


def test_too_many_refused_rows_stop_the_stage(tmp_path: Path) -> None:
    """A target that refuses everything is not what dead letters are for: nothing is written, nothing told."""
    sink = open_sink(f"sqlite:///{tmp_path}/a.db?table=users", stage="s")
    sink.open(SHAPE)
    dead: list[Dead] = []
    with pytest.raises(InvalidInput, match="rejected more than 1,000 rows"):
        write(sink, 0, batch([(None, user(n)) for n in range(1_500)]), dead=dead)
    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute("create trigger no before insert on users begin select raise(abort, 'never'); end")
    with pytest.raises(InvalidInput, match="never"):
        write(sink, 0, batch([(f"k{n}", user(n)) for n in range(1_500)]), dead=dead)
    assert (dead, sink.last) == ([], None)
    sink.close()


def test_the_newest_of_each_key_counts_by_its_place() -> None:
    """Pieces come in any order; a partition with a higher number goes on where a split left off."""
    table = batch([("a", user(1)), ("b", user(2)), ("a", user(3)), (None, user(4))])
    later = batch([("a", user(5))]).set_column(4, "_partition", pa.array([4], pa.int32()))
    assert newest(table, ("id",)).column("n").to_pylist() == [2, 3, 4]
    pieces = Pieces([later, table], ("id",))
    assert sorted(n for piece in pieces for n in piece.column("n").to_pylist()) == [2, 5]
    large = batch([(f"k{n}", user(n, name="x" * (1 << 20))) for n in range(70)])
    assert [piece.num_rows for piece in Pieces([large], ("id",))] == [31, 31, 8]


def test_a_table_that_is_there_keeps_what_is_its_own(tmp_path: Path) -> None:
    """Columns that it lacks are added, those that are not ours stay, and without a unique key it is refused with the statement."""
    path = tmp_path / "own.db"
    with sqlite3.connect(path) as connection:
        connection.execute(
            "create table users (id text primary key, name text check (name <> 'no'), own text default 'mine')"
        )
        connection.execute("insert into users (id, own) values ('a', 'kept')")
        connection.execute("create table loose (id text)")
    sink = open_sink(f"sqlite:///{path}?table=users", stage="s")
    sink.open(SHAPE)
    dead: list[Dead] = []
    rows = [(f"k{n}", user(n, name="no" if n in (3, 17) else "yes")) for n in range(20)]
    write(sink, 0, batch([("a", user(1)), *rows]), dead=dead)
    assert [one.offset for one in dead] == [4, 18]
    assert "CHECK constraint failed" in dead[0].error
    with sqlite3.connect(path) as connection:
        assert connection.execute("select id, n, own from users where id = 'a'").fetchall() == [("a", 1, "kept")]
        assert connection.execute("select count(*) from users").fetchall() == [(19,)]
    with pytest.raises(InvalidInput, match="CREATE UNIQUE INDEX"):
        open_sink(f"sqlite:///{path}?table=loose", stage="s").open(SHAPE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_huge_value_goes_in_whole(make_target: Make, kind: str) -> None:
    """Megabytes in one column, words longer than an index takes, and a key that is long."""
    target = make_target(kind)
    sink = target.sink()
    sink.open(SHAPE)
    rows = [("huge", user(1, name="ü" * 3_000_000)), ("k" * 2_000, user(2))]
    write(sink, 0, batch(rows))
    assert target.rows() == folded(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_column_is_added(make_target: Make, kind: str) -> None:
    """When the stage starts again with it; rows from before have none. An index cannot grow, and says so."""
    target = make_target(kind)
    sink = target.sink()
    sink.open(SHAPE)
    write(sink, 0, batch([("a", user(1)), ("b", user(2))]))
    sink.close()
    wider = Shape("users", SHAPE.schema.append(pa.field("note", pa.string())), ("id",))
    again = target.sink()
    if kind == "tantivy":
        with pytest.raises(Unsupported, match="other columns"):
            again.open(wider)
        return
    again.open(wider)
    write(again, 1, batch([("b", user(3, note="new"))], first=2, schema=wider.schema))
    again.close()
    with open_side(target.url, shape=wider) as side, side.look() as look:
        read = pa.concat_tables(look.chunks())
    assert dict(zip(read.column("id").to_pylist(), read.column("note").to_pylist(), strict=True)) == {
        "a": None,
        "b": "new",
    }


@pytest.mark.parametrize("kind", ["sqlite", "duckdb", pytest.param("postgres", marks=pytest.mark.service("postgres"))])
def test_tables_together_get_a_new_column_with_the_batch_that_has_it(make_target: Make, kind: str) -> None:
    """Inside the batch's transaction: who gives the batch up leaves the table as it was."""
    target = make_target(kind)
    sink = open_together(target.url, [SHAPE], stage="app.users.sink")
    write_together(sink, marker(0), [(SHAPE, Pieces([batch([("a", user(1)), ("b", user(2))])], ("id",)))])
    wider = Shape("users", SHAPE.schema.append(pa.field("note", pa.string())), ("id",))
    rows = batch([("b", user(3, note="new"))], first=2, schema=wider.schema)

    def strike() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError), watched(at("sink: piece applied", strike)):
        write_together(sink, marker(1), [(wider, Pieces([rows], ("id",)))])
    assert target.rows() == folded([("a", user(1)), ("b", user(2))])
    write_together(sink, marker(1), [(wider, Pieces([rows], ("id",)))])
    sink.close()
    assert {key: row["note"] for key, row in target.rows().items()} == {"a": None, "b": "new"}


def test_a_file_of_duckdb_that_this_process_opens_elsewhere_is_waited_for(make_target: Make) -> None:
    """Another sink, or a program's own query: DuckDB refuses who opens a file while somebody in the same process closes it."""
    target = make_target("duckdb")
    sink = target.sink()
    sink.open(SHAPE)
    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.is_set():
            with suppress(duckdb.Error), duckdb.connect(sink.address.path) as other:
                other.execute("select 1")

    others = [threading.Thread(target=disturb) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for epoch in range(DISTURBED_BATCHES):
            write(sink, epoch, batch([("a", user(epoch))], first=epoch))
    finally:
        is_over.set()
        for other in others:
            other.join()
    assert target.rows() == folded([("a", user(DISTURBED_BATCHES - 1))])


@pytest.mark.service("postgres")
def test_postgres_refuses_single_rows_and_takes_the_rest(make_target: Make) -> None:
    """A NUL in a text, a check, a number out of range of the table's own column: dead letters with the reason."""
    import psycopg

    target = make_target("postgres")
    with psycopg.connect(target.url.partition("?")[0], autocommit=True) as connection:
        connection.execute(
            "create table users (id text primary key, name varchar(9), n smallint check (n <> 5), amount real)"
        )
    sink = target.sink()
    sink.open(SHAPE)
    rows = {
        "fine": user(1),
        "nul": user(2, name="a\0b"),
        "check": user(5),
        "range": user(2**40, name="r"),
        "long": user(3, name="x" * 10),
        "last": user(4),
    }
    dead: list[Dead] = []
    written = write(sink, 0, batch(list(rows.items())), dead=dead)
    assert (written.upserts, written.dead) == (2, 4)
    assert set(target.rows()) == {"fine", "last"}
    reasons = {one.offset: one.error for one in dead}
    assert "NUL" in reasons[1]
    assert "check constraint" in reasons[2]
    assert "out of range" in reasons[3]
    assert "too long" in reasons[4]


@pytest.mark.service("redis")
def test_a_piece_that_redis_runs_late_changes_nothing(make_target: Make) -> None:
    """A call that its client gave up may be run after later batches of the same writer; one whose answer was lost is repeated."""
    target = make_target("redis-hash")
    sink = target.sink()
    sink.open(SHAPE)
    assert sink.begin(marker(0, 1))
    old = batch([("a", user(1))])
    late = (sink._number, sink._expected, *sink._hashes(old.select(SHAPE.schema.names), marks=False))
    write(sink, 0, old, end=1)
    write(sink, 1, batch([("a", user(2))], first=1), end=2)
    with pytest.raises(Exception, match="MOVED"):
        sink.client.eval(redis_sink._HASH, 1, sink.ledger, *late)
    assert target.rows()["a"]["n"] == 2
    assert sink.begin(marker(2, 3))
    sink.commit(marker(2, 3))
    sink.commit(marker(2, 3))  # the repeated call finds what the first one did
    with pytest.raises(Fenced):
        sink.commit(marker(3, 4))


@pytest.mark.service("redis")
def test_sets_in_redis_follow_pairs(make_target: Make) -> None:
    """The first key column names the set, the others the member; also where the key is one JSON array."""
    import redis

    target = make_target("redis-json")
    url = target.url.replace("as=json", "as=set").replace("users:", "likes:")
    sink = open_sink(url, stage="likes")
    shape = Shape("likes", pa.schema([("id", pa.string()), ("n", pa.int64())]), ("id",))
    sink.open(shape)
    dead: list[Dead] = []
    pairs = [("odd", {"n": 0}), ('["a",1]', {"n": 1}), ('["a","x|y"]', {"n": 2}), ('["b",2]', {"n": 3})]
    for epoch, changes in enumerate([pairs, [('["a",1]', None), ("odd", None)]]):
        table = batch(changes, first=epoch * 4, schema=shape.schema)
        write_batch(sink, marker(epoch, epoch + 4), Pieces([table], ("id",)), tell=dead.extend)
    assert [(one.offset, "not a JSON array" in one.error) for one in dead] == [(0, True)]
    with redis.Redis.from_url(url.partition("?")[0]) as client:
        assert client.smembers("likes:a") == {b"x|y"}
        assert client.smembers("likes:b") == {b"2"}


ALL = (
    "id STRING, flag BOOLEAN, small TINYINT, big BIGINT, real FLOAT, double DOUBLE, price DECIMAL(20,6), raw BINARY, born DATE, "
    "seen TIMESTAMP, plain TIMESTAMP_NTZ, tags ARRAY<STRING>, pair STRUCT<a: INT, b: STRING>, more MAP<STRING, BIGINT>"
)
FULL = {
    "id": "full",
    "flag": True,
    "small": -128,
    "big": -(2**63),
    "real": 0.1,
    "double": float("inf"),
    "price": Decimal("-12345678901234.000001"),
    "raw": b"\0\xff'",
    "born": date(1, 1, 1),
    "seen": datetime(2026, 1, 31, 12, 0, 0, 1, tzinfo=UTC),
    "plain": datetime(1969, 12, 31, 23),  # noqa: DTZ001 - it has no zone
    "tags": ["a", None, "ü\"'"],
    "pair": {"a": None, "b": "x"},
    "more": [("k", 1), ("l", None)],
}
SPECIAL = [
    FULL,
    {"id": "null"},
    {
        **FULL,
        "id": "nan",
        "double": float("nan"),
        "real": float("-inf"),
        "price": Decimal("0.000001"),
        "tags": [],
        "more": [],
    },
    {
        **FULL,
        "id": "far",
        "double": 5e-324,
        "price": Decimal(0),
        "raw": b"",
        "seen": datetime(9999, 12, 31, tzinfo=UTC),
    },
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_held_exactly(make_target: Make, kind: str) -> None:
    """NaN, infinities, the ends of every range, empty and null: what is read back equals what was written."""
    schema = to_arrow_schema(ALL)
    rows = pa.Table.from_pylist(SPECIAL, schema=schema)
    target = make_target(kind)
    sink = target.sink()
    shape = Shape("users", schema, ("id",))
    sink.open(shape)
    pieces = Pieces([with_places(rows, deleted=False)], ("id",))
    assert write_batch(sink, marker(0), pieces, tell=print).upserts == len(SPECIAL)
    sink.close()
    with open_side(target.url, shape=shape) as side, side.look() as look:
        read = pa.concat_tables(look.chunks()).sort_by("id")
    assert repr(read.to_pylist()) == repr(rows.sort_by("id").to_pylist())


def test_a_test_of_an_application_writes_to_no_real_target(tmp_path: Path) -> None:
    """What the script says about places does not count there; the application itself keeps its own."""
    app = hw.App("shop", log=str(tmp_path / "log"))
    app.sink("users", to="redis://production/0", name="cache")
    app.sink("users", to="./files", name="files")
    moved = app.moved(tmp_path / "other", master="local[2]")
    assert {name: stage.to for name, stage in moved.graph.stages.items()} == {
        "cache": "sqlite:///./targets.db?table=cache",
        "files": "./files",
    }
    assert app.graph.stages["cache"].to == "redis://production/0"
