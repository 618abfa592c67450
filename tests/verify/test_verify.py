"""Verification: equal systems are called equal, every key that differs is found and no other, and a repair makes both equal."""

from __future__ import annotations

import json
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headwater as hw
from headwater.model.errors import HeadwaterError, InvalidInput, NotFound, Unsupported
from headwater.model.marker import Marker
from headwater.model.schema import to_arrow_schema
from headwater.sinks.newest_rows import Pieces, with_places
from headwater.sinks.sink import Shape, Sink, write_batch
from headwater.verify.comparison import VerifyReport, compare, open_pair
from headwater.verify.digest import LocalDigests
from headwater.verify.postgres_side import PostgresLook
from headwater.verify.repair import repair
from headwater.verify.side_url import open_side
from tests.rigs.app.sink_targets import EMBEDDED, SERVED, SHAPE, Target
from tests.rigs.commands import Command, refused
from tests.sinks.test_sinks import ALL, FULL, SPECIAL

Make = Callable[[str], Target]

KINDS = [
    *EMBEDDED,
    *(pytest.param(kind, marks=pytest.mark.service(kind.partition("-")[0])) for kind in SERVED),
]


class Feed:
    """A topic, and a sink that follows it in batches as a stage of an application does."""

    def __init__(self, folder: Path) -> None:
        self.log = hw.open_log(str(folder / "log"))
        self.log.create_topic("users", "id STRING, name STRING, n BIGINT, amount DOUBLE", key="id", partitions=2)
        self.source = f"{self.log.url}#users"
        self._ends = {0: 0, 1: 0}
        self._epoch = 0

    def append(self, start: int, end: int, **more: Any) -> None:
        rows = [{"id": f"k{n}", "name": f"ü {n}", "n": n, "amount": n / 3, **more} for n in range(start, end)]
        self.log.append("users", rows)

    def apply(self, sink: Sink) -> None:
        """One batch with everything that is there."""
        if self._epoch == 0:
            sink.open(SHAPE)
        ends = {number: span.stop for number, span in self.log.offsets("users").items()}
        columns = [*SHAPE.schema.names, "_partition", "_offset", "_deleted"]
        rows = self.log.read("users", start=self._ends, end=ends, columns=columns)
        marker = Marker(query="q", epoch=self._epoch, ends=[{"users": {str(n): end for n, end in ends.items()}}])
        write_batch(sink, marker, Pieces([rows], ("id",)), tell=print)
        self._ends, self._epoch = ends, self._epoch + 1


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[Feed]:
    feed = Feed(tmp_path)
    yield feed
    feed.log.close()


def verified(source: str, target: str, *, settle_s: float = 0.5, **more: Any) -> VerifyReport:
    pair = open_pair(source, target, **more)
    try:
        return compare(pair, settle_s=settle_s)
    finally:
        pair.close()


def tamper(target: Target, sink: Sink) -> None:
    """Changes one key, removes one and adds one by hand, past the sink's ledger."""
    match target.kind:
        case "sqlite":
            with sqlite3.connect(target.url.partition("?")[0].removeprefix("sqlite:///")) as connection:
                _by_sql(connection.execute)
        case "duckdb":
            import duckdb

            with duckdb.connect(target.url.partition("?")[0].removeprefix("duckdb:///")) as connection:
                _by_sql(connection.execute)
        case "postgres":
            import psycopg

            with psycopg.connect(target.url.partition("?")[0]) as connection:
                _by_sql(connection.execute)
        case "redis-hash" | "redis-json":
            import redis

            with redis.Redis.from_url(target.url.partition("?")[0]) as client:
                client.delete("users:k2")
                row = {"id": "k1", "name": "changed", "n": 1, "amount": 1 / 3}
                for one in (row, {**row, "id": "x'"}):
                    if target.kind == "redis-json":
                        client.set(f"users:{one['id']}", json.dumps(one))
                    else:
                        client.hset(f"users:{one['id']}", mapping=one)
        case _:  # an index and a Delta table have no other writers than their library
            row = {"id": "k1", "name": "changed", "n": 1, "amount": 1 / 3}
            sink.begin_repair(sink.last)
            sink.delete(pa.table({"id": ["k2"]}))
            sink.upsert(pa.Table.from_pylist([row, {**row, "id": "x'"}], schema=SHAPE.schema))
            sink.commit(None)


def _by_sql(execute: Callable[[str], Any]) -> None:
    execute("update users set name = 'changed' where id = 'k1'")
    execute("delete from users where id = 'k2'")
    execute("insert into users select 'x''', 'changed', n, amount from users where id = 'k1'")


@pytest.mark.parametrize("kind", KINDS)
def test_differing_keys_are_found_and_repaired(feed: Feed, make_target: Make, kind: str) -> None:
    """A changed, a missing and an extra row; nothing else is named, and after the repair both are equal at the same position."""
    target = make_target(kind)
    sink = target.sink()
    feed.append(0, 500)
    feed.apply(sink)
    equal = verified(feed.source, target.url)
    assert (equal.is_equal, equal.exact, equal.rows, equal.behind) == (True, True, 500, 0)
    assert equal.stage == "app.users.sink"

    tamper(target, sink)
    pair = open_pair(feed.source, target.url)
    report = compare(pair, settle_s=0.5)
    found = {(one.kind, one.key["id"], one.columns) for one in report.differences}
    assert found == {("different", "k1", ("name",)), ("missing", "k2", ()), ("extra", "x'", ())}
    assert (report.differing, report.exact) == (3, True)
    before = sink.last
    repaired = repair(pair, report, settle_s=0.5)
    pair.close()
    assert (repaired.written, repaired.removed, repaired.after.is_equal) == (2, 1, True)
    assert sink.last == before
    assert len(target.rows()) == 500
    feed.append(500, 501)
    feed.apply(sink)  # the stage was not fenced by the repair
    assert verified(feed.source, target.url).is_equal


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_on_its_way_is_no_difference(feed: Feed, make_target: Make, kind: str) -> None:
    """The topic is read up to where the target is, and how far it is behind is told."""
    target = make_target(kind)
    sink = target.sink()
    feed.append(0, 50)
    feed.log.append("users", [{"id": "k3", "_deleted": True}])
    feed.apply(sink)
    feed.append(40, 60, name="newer")
    report = verified(feed.source, target.url)
    assert (report.is_equal, report.rows, report.behind) == (True, 49, 20)
    feed.apply(sink)
    assert verified(feed.source, target.url).rows == 59


@pytest.mark.parametrize(
    "kind",
    [
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.service("postgres")),
        pytest.param("redis-json", marks=pytest.mark.service("redis")),
    ],
)
def test_both_sides_may_move(feed: Feed, make_target: Make, kind: str) -> None:
    """Rows are changed, deleted and applied all the time; every comparison finds both equal, while what is on its way is no difference."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    target = make_target(kind)
    sink = target.sink()
    feed.append(0, 200)
    feed.apply(sink)
    stop = threading.Event()

    def move() -> None:
        while not stop.wait(0.02):
            start = chance.randrange(190)
            feed.append(start, start + chance.randrange(1, 10), name=f"{chance.random()}")
            feed.log.append("users", [{"id": f"k{chance.randrange(200)}", "_deleted": True}])
            feed.append(199, 200)  # the last key is always there
            if chance.random() < 0.7:
                feed.apply(sink)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(4):
            report = verified(feed.source, target.url, settle_s=3)
            assert report.is_equal, report
    finally:
        stop.set()
        mover.join()
    feed.apply(sink)
    assert verified(feed.source, target.url).is_equal


@pytest.mark.service("postgres")
def test_the_server_computes_the_same_digests(make_target: Make) -> None:
    """Random and special rows of all plain types: the checksums of PostgreSQL and ours are the same, and so are those of copied rows."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    schema = pa.schema([field for field in to_arrow_schema(ALL) if not pa.types.is_nested(field.type)])
    rows = [
        {
            **FULL,
            "id": f"{chosen.choice(['', 'ü', 'v1:', chr(39)])}{n}",
            "small": chosen.randrange(-128, 128),
            "big": chosen.randrange(-(2**63), 2**63),
            "real": chosen.choice([chosen.random(), -0.0, 1e-40, 3e38, float("nan")]),
            "double": chosen.choice([chosen.uniform(-1e9, 1e9), -0.0, 1e-310, float("-inf"), None]),
            "price": Decimal(chosen.randrange(-(10**20) + 1, 10**20)).scaleb(-6),
            "raw": chosen.randbytes(chosen.randrange(5)),
            "born": date.fromordinal(chosen.randrange(1, 3_000_000)),
            "seen": datetime.fromtimestamp(chosen.randrange(-(10**10), 10**11), UTC),
        }
        for n in range(300)
    ]
    table = pa.Table.from_pylist([*SPECIAL, *rows], schema=schema)
    target, shape = make_target("postgres"), Shape("users", schema, ("id",))
    sink = target.sink()
    sink.open(shape)
    write_batch(sink, Marker(query="q", epoch=0), Pieces([with_places(table, deleted=False)], ("id",)), tell=print)
    ours = LocalDigests([table], shape)
    with open_side(target.url, shape=shape) as side, side.look() as look:
        assert isinstance(look, PostgresLook)
        theirs, copied = look.digests(), LocalDigests(look.chunks(), shape)
        assert theirs is not None
        assert theirs.sums() == ours.sums() == copied.sums()
        chunks = sorted(ours.sums())[:50]
        keys = [digests.of_chunks(chunks).sort_by("key") for digests in (ours, theirs, copied)]
        assert keys[0].to_pylist() == keys[1].to_pylist() == keys[2].to_pylist()
        copied.close()
    ours.close()


@pytest.mark.covers("concept: compacted log as snapshot", backends=["file"])
def test_a_new_target_built_from_a_compacted_topic_equals_the_source(tmp_path: Path, make_target: Make) -> None:
    """Most events are gone, and so are tombstones; what is left, read from offset 0, is the table, as a plain fold of all events says."""
    chance = random.Random(7)
    columns = "id STRING, name STRING, n BIGINT, amount DOUBLE"
    target = make_target("sqlite")
    expected: dict[str, int] = {}
    with hw.open_log(str(tmp_path / "log")) as log:
        log.create_topic(
            "users", columns, key="id", compact=True, partitions=1, segment_bytes=4096, tombstones="0 seconds"
        )
        for n in range(400):
            key = f"k{chance.randrange(40)}"
            gone = chance.random() < 0.2
            log.append("users", [{"id": key, "_deleted": True} if gone else {"id": key, "name": "x" * 40, "n": n}])
            expected.pop(key, None)
            if not gone:
                expected[key] = n
        log.tidy("users")
        rows = log.read("users", columns=[*SHAPE.schema.names, "_partition", "_offset", "_deleted"])
        assert rows.num_rows < 300, "nothing was compacted"
        sink = target.sink()
        sink.open(SHAPE)
        marker = Marker(query="q", epoch=0, ends=[{"users": {"0": 400}}])
        write_batch(sink, marker, Pieces([rows], ("id",)), tell=print)
        assert {key: row["n"] for key, row in target.rows().items()} == expected
        report = verified(f"{log.url}#users", target.url)
        assert (report.is_equal, report.exact, report.rows) == (True, True, len(expected))


@pytest.mark.slow
def test_a_database_is_compared_with_a_topic(feed: Feed, tmp_path: Path) -> None:
    """Without a common position a key has to differ for a while: what arrives meanwhile is no difference."""
    path = tmp_path / "shop.db"
    feed.append(0, 100)
    with sqlite3.connect(path) as shop:
        shop.execute("create table users (id varchar(20) primary key, name text, n int, amount double)")
        shop.executemany("insert into users values (?, ?, ?, ?)", [(f"k{n}", f"ü {n}", n, n / 3) for n in range(103)])
    source = f"sqlite:///{path}?table=users"
    late = threading.Thread(target=lambda: (time.sleep(0.6), feed.append(100, 102)))
    late.start()
    report = verified(source, feed.source, settle_s=1.5)
    late.join()
    assert [(one.kind, one.key) for one in report.differences] == [("missing", {"id": "k102"})]
    assert not report.exact
    feed.append(102, 103)
    assert verified(source, feed.source).is_equal
    assert verified(source, feed.source, columns=["n"]).is_equal
    feed.append(103, 104)
    pair = open_pair(source, feed.source)
    report = compare(pair, settle_s=0.3)
    with pytest.raises(Unsupported, match="is a log"):
        repair(pair, report)
    pair.close()


def test_a_folder_of_parquet_is_a_side(feed: Feed, tmp_path: Path) -> None:
    """One row of each key; one that is there twice is told, and files are not repaired."""
    feed.append(0, 30)
    folder = tmp_path / "files"
    folder.mkdir()
    pq.write_table(feed.log.table("users").slice(0, 20), folder / "a.parquet")
    pq.write_table(feed.log.table("users").slice(20), folder / "b.parquet")
    assert verified(feed.source, str(folder)).is_equal
    assert verified(str(folder), feed.source, key=["id"]).rows == 30
    pq.write_table(feed.log.table("users").slice(5, 1), folder / "c.parquet")
    report = verified(feed.source, f"parquet:///{folder}", settle_s=0)
    assert (report.duplicates, report.differing, report.is_equal) == (1, 0, False)


@pytest.mark.service("redis")
def test_what_is_no_row_is_named(feed: Feed, make_target: Make) -> None:
    """Somebody else's list, a text that is no JSON: under the prefix it is no row, and it is not overwritten by a repair."""
    import redis

    target = make_target("redis-json")
    sink = target.sink()
    feed.append(0, 5)
    feed.apply(sink)
    with redis.Redis.from_url(target.url.partition("?")[0]) as client:
        client.rpush("users:list", "a")
        client.set("users:odd", "{no")
        client.set("other:odd", "{no")
    report = verified(feed.source, target.url)
    assert (report.unreadable, report.differing, report.is_equal) == (("users:list", "users:odd"), 0, False)
    with pytest.raises(Unsupported, match="is not a row"):
        repair(open_pair(feed.source, target.url), report)


def test_the_command_line(feed: Feed, make_target: Make, command: Command) -> None:
    """Exit code 0 for equal, 1 for not; the differing keys are printed, as JSON for programs; a repair ends with 0."""
    target = make_target("sqlite")
    sink = target.sink()
    feed.append(0, 20)
    feed.apply(sink)
    done = command("verify", feed.source, target.url)
    assert (done.code, done.rows[0]["equal"]) == (0, True)
    tamper(target, sink)
    done = command("verify", feed.source, target.url, "--json")
    assert (done.code, done.rows[0]["equal"], done.rows[0]["differing"]) == (1, False, 3)
    assert {one["key"]["id"] for one in done.rows[0]["differences"]} == {"k1", "k2", "x'"}
    done = command("verify", feed.source, target.url, "--repair")
    assert (done.code, done.rows[0]["repaired"]["written"]) == (0, 2)
    assert command("verify", feed.source, target.url).code == 0
    refused(command("verify", f"{feed.log.url}#nothing", target.url), "not_found", "nothing")


@pytest.mark.parametrize(
    ("source", "target", "error"),
    [
        ("{log}#nothing", "sqlite:///x.db?table=users", NotFound),
        ("{log}#users", "sqlite:///x.db?table=users", HeadwaterError),
        ("gopher://x", "{log}#users", Unsupported),
        ("redis://127.0.0.1:1/0", "tantivy:///{log}/no", InvalidInput),
        ("./no/such/folder", "{log}#users", NotFound),
        ("{log}#users", "./no/such/folder", NotFound),
    ],
)
def test_wrong_addresses_are_told(feed: Feed, source: str, target: str, error: type[HeadwaterError]) -> None:
    """One sentence, no traceback of a client."""
    with pytest.raises(error):
        verified(source.format(log=feed.log.url), target.format(log=feed.log.url))
