"""PostgreSQL as a source of changes, against a real server: values, transactions, tables that are copied, come and go."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import psycopg
import pytest

from headwater.capture.capture import Capture
from headwater.capture.postgres import backfill as pg_backfill
from headwater.capture.postgres import source as postgres
from headwater.capture.postgres import stream as pg_stream
from headwater.capture.source_url import open_source
from headwater.model.errors import NotCapturable
from headwater.testing.servers.postgres import PostgresServer
from tests.rigs.capture.postgres import Rig, follow, rigged

pytestmark = pytest.mark.service("postgres")
LARGE = "x1" * 5000
TYPES = """
create type mood as enum ('sad', 'happy');
create type pair as (a int, b text);
create domain positive as int check (value > 0);
create table everything (
    id int primary key, small smallint, big bigint, single real, double double precision, price numeric(10, 2), free numeric,
    plain text, short varchar(9), padded char(4), yes boolean, raw bytea, local timestamp, moment timestamptz, day date, clock time,
    uid uuid, document json, binary_document jsonb, feeling mood, numbers int[], words text[], couple pair, pairs pair[], span interval,
    bounds int4range, address inet, domained positive, prices numeric(8, 3)[], twice int generated always as (id * 2) stored, cash money)
"""
FULL_ROW = r"""insert into everything values (
    1, -2, 9223372036854775807, 1.5, 0.1, 12.34, 123456789012345678901234567890.123456789, 'zoë "q" , \ {}', 'short', 'ab',
    true, '\x00ff10',
    '2024-02-29 03:04:05.678901', '2024-02-29 03:04:05.678901+02', '2024-02-29', '03:04:05.5', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11',
    '{"a": 1}', '{"a": [1, 2]}', 'happy', '{1,null,3}', array['a', 'b "q", \', 'NULL', null, ''], row(1, 'x"y, (\'), array[row(1, 'a'),
    row(null, '')]::pair[], '1 year 2 mons 3 days 04:05:06', '[1,5)', '192.168.1.1', 5, '{1.5,2.25}', default, 12.5)"""
EXPECTED = {
    "id": 1,
    "small": -2,
    "big": 2**63 - 1,
    "single": 1.5,
    "double": 0.1,
    "price": Decimal("12.34"),
    "free": "123456789012345678901234567890.123456789",
    "plain": 'zoë "q" , \\ {}',
    "short": "short",
    "padded": "ab  ",
    "yes": True,
    "raw": b"\x00\xff\x10",
    "local": datetime.datetime(2024, 2, 29, 3, 4, 5, 678901),  # noqa: DTZ001 - a time without a zone
    "moment": datetime.datetime(2024, 2, 29, 1, 4, 5, 678901, tzinfo=datetime.UTC),
    "day": datetime.date(2024, 2, 29),
    "clock": "03:04:05.5",
    "uid": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
    "document": '{"a": 1}',
    "binary_document": '{"a": [1, 2]}',
    "feeling": "happy",
    "numbers": [1, None, 3],
    "words": ["a", 'b "q", \\', "NULL", None, ""],
    "couple": {"a": 1, "b": 'x"y, (\\'},
    "pairs": [{"a": 1, "b": "a"}, {"a": None, "b": ""}],
    "span": "P1Y2M3DT4H5M6S",
    "bounds": "[1,5)",
    "address": "192.168.1.1",
    "domained": 5,
    "prices": [Decimal("1.500"), Decimal("2.250")],
    "twice": 2,
    "cash": "$12.50",
}


@pytest.fixture
def rig(postgres: PostgresServer, tmp_path: Path) -> Iterator[Rig]:
    """A database and a log of one test."""
    with rigged(postgres, tmp_path) as made:
        yield made


def test_every_type_comes_as_it_is_by_backfill_and_by_change(rig: Rig) -> None:
    """Both ways give the same values; null is null in each; types that nobody knows are their text."""
    rig.run(TYPES, FULL_ROW, "insert into everything (id) values (2)")
    nulls = dict.fromkeys(EXPECTED) | {"id": 2, "twice": 4}
    with rig.capture("everything") as capture:
        assert rig.table("everything") == [EXPECTED, nulls]
        rig.run("delete from everything", FULL_ROW, "insert into everything (id) values (2)")
        follow(capture, rig)
        assert rig.table("everything") == [EXPECTED, nulls]
    assert [row["op"] for row in rig.history("everything")] == ["r", "r", "d", "d", "c", "c"]


def test_what_no_type_of_the_log_holds_follows_one_rule(rig: Rig) -> None:
    """Infinity and years outside 1 to 9999 are the nearest end, NaN of a decimal is null, arrays of more dimensions are flat."""
    rig.run(
        "create table odd (id int primary key, local timestamp, moment timestamptz, day date, "
        "price numeric(5, 2), ratio float8, grid int[])"
    )
    rows = """insert into odd values (1, 'infinity', '-infinity', 'infinity', 'NaN', 'NaN', '{{1,2},{3,4}}'),
        (2, '0044-03-15 BC', '20000-01-01', '0044-03-15 BC', 1, '-Infinity', '[5:6]={7,8}')"""
    rig.run(rows)
    with rig.capture("odd") as capture:
        copied = rig.table("odd")
        rig.run("truncate odd", rows)
        follow(capture, rig)
    assert str(rig.table("odd")) == str(copied)
    last, first = datetime.datetime.max, datetime.datetime.min  # noqa: DTZ901 - the ends of what Python holds
    assert [row["local"] for row in copied] == [last, first]
    assert [row["moment"].replace(tzinfo=None) for row in copied] == [first, last]
    assert [row["day"] for row in copied] == [last.date(), first.date()]
    assert [row["price"] for row in copied] == [None, Decimal("1.00")]
    assert [str(row["ratio"]) for row in copied] == ["nan", "-inf"]
    assert [row["grid"] for row in copied] == [[1, 2, 3, 4], [7, 8]]


@pytest.mark.parametrize("identity", ["default", "full"])
def test_large_values_that_did_not_change_stay(rig: Rig, identity: str) -> None:
    """PostgreSQL does not send them; neither a plain update nor a change of the key may make them null."""
    rig.run(
        "create table docs (id int primary key, n int, body text)",
        "alter table docs alter body set storage external",
        f"alter table docs replica identity {identity}",
        f"insert into docs values (1, 0, '{LARGE}'), (2, 0, '{LARGE}')",
    )
    with rig.capture("docs") as capture:
        rig.run("update docs set n = 1 where id = 1")
        follow(capture, rig)
        # In one block: a chain of updates over changes of the key, a new row, and one that is gone at the end.
        rig.together(
            "update docs set n = 2 where id = 1",
            "update docs set id = 10 where id = 1",
            "update docs set n = 3 where id = 10",
            "update docs set id = 11 where id = 10",
            f"insert into docs values (3, 0, '{LARGE}3')",
            "update docs set n = 4 where id = 3",
            "update docs set n = 5 where id = 2",
            "delete from docs where id = 2",
        )
        follow(capture, rig)
    assert rig.table("docs") == [{"id": 11, "n": 3, "body": LARGE}, {"id": 3, "n": 4, "body": f"{LARGE}3"}]
    after = [row["after"] for row in rig.history("docs") if row["op"] in "cu" and row["after"]["id"] != 2]
    assert all(row["body"].startswith(LARGE) for row in after)
    if identity == "full":
        updates = [row for row in rig.history("docs") if row["op"] == "u"]
        assert all(
            row["before"]["body"].startswith(LARGE) and row["after"]["body"] == row["before"]["body"] for row in updates
        )


def test_a_change_of_the_key_is_a_delete_and_an_insert(rig: Rig) -> None:
    """In one transaction, each with a position of its own; composite keys too."""
    rig.run(
        "create table seats (hall int, seat int, who text, primary key (hall, seat))",
        "insert into seats values (1, 1, 'ann')",
    )
    with rig.capture("seats") as capture:
        rig.run("update seats set seat = 2")
        follow(capture, rig)
    assert rig.table("seats") == [{"primary_key": "[1,2]", "hall": 1, "seat": 2, "who": "ann"}]
    gone, come = [row for row in rig.history("seats") if row["op"] != "r"]
    assert (gone["op"], gone["primary_key"], come["op"], come["primary_key"]) == ("d", "[1,1]", "c", "[1,2]")
    assert gone["transaction"] == come["transaction"] and gone["position"] < come["position"]
    assert (gone["transaction_order"], come["transaction_order"]) == (1, 2)


def test_transactions_are_whole_and_in_commit_order_with_their_messages(rig: Rig) -> None:
    """One that began first and committed last is last; what an application emits stands among them; our own does not."""
    rig.run("create table a (id int primary key)", "create table b (id int primary key)")
    with rig.capture("a", "b") as capture:
        with psycopg.connect(rig.url) as other:
            other.execute("insert into a values (1)")
            rig.together("insert into a values (2)", "insert into b values (2), (3)")
            rig.run("select pg_logical_emit_message(false, 'outside', 'now')")
            other.execute("select pg_logical_emit_message(true, 'outbox', 'later')")
            other.commit()
        capture.source.heartbeat()
        follow(capture, rig)
    ends = [row for row in rig.log.read(f"{rig.name}.transactions").to_pylist() if row["status"] == "end"]
    assert [dict(row["tables"]) for row in ends] == [{"a": 1, "b": 2}, {"a": 1}]
    messages = rig.log.read(f"{rig.name}.messages").to_pylist()
    assert [(row["prefix"], row["content"]) for row in messages] == [("outside", b"now"), ("outbox", b"later")]
    assert messages[0]["transaction"] is None and messages[1]["transaction"] == ends[1]["transaction"]
    assert ends[0]["position"] < messages[0]["position"] < messages[1]["position"] < ends[1]["position"]


def test_truncate_empties_the_table(rig: Rig) -> None:
    """Rows that come behind it in the same transaction stay."""
    rig.run("create table a (id int primary key, n int)", "create table b (id int primary key)")
    rig.run("insert into a values (1, 1), (2, 2)", "insert into b values (1)")
    with rig.capture("a", "b") as capture:
        rig.together("insert into a values (3, 3)", "truncate a, b", "insert into a values (2, 9)")
        follow(capture, rig)
        assert (rig.table("a"), rig.table("b")) == ([{"id": 2, "n": 9}], [])
    assert {row["id"] for row in rig.history("a") if row["op"] == "t"} == {1, 2, 3}


def test_a_large_transaction_is_read_in_parts_and_appended_as_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complaint: large transactions that exhaust memory. No part is seen before all are there."""
    monkeypatch.setattr(pg_stream, "BLOCK_BYTES_MAX", 1 << 16)
    rig.run("create table a (id int primary key, t text)", "create table b (id int primary key)")
    with rig.capture("a", "b") as capture:
        rig.together(
            "insert into a select i, repeat('x', 100) from generate_series(1, 5000) i",
            "insert into b values (1)",
            "delete from a where id > 4990",
        )
        parts = 0
        while not rig.log.table("a").num_rows:
            assert capture.step()
            parts += 1
        assert rig.log.table("a").num_rows == 4990 and parts > 5
        assert rig.log.table("b").num_rows == 1
        follow(capture, rig)
    (end,) = [row for row in rig.log.read(f"{rig.name}.transactions").to_pylist() if row["status"] == "end"]
    assert end["events"] == 5011 and dict(end["tables"]) == {"a": 5010, "b": 1}
    orders = sorted(row["transaction_order"] for name in ("a", "b") for row in rig.history(name))
    assert orders == list(range(1, 5012))


@pytest.mark.parametrize("behind_bytes", [1 << 40, 1 << 16])
def test_catching_up_ends_where_the_database_was(rig: Rig, monkeypatch: pytest.MonkeyPatch, behind_bytes: int) -> None:
    """As for `--available-now`: a server that takes its time to send is not one that has nothing; by stream and in bulk."""
    monkeypatch.setattr(postgres, "BEHIND_BYTES", behind_bytes)
    rig.run("create table a (id int primary key, t text)", "create table other (id int)")
    for number in range(4):
        rig.run(
            f"insert into a select i, repeat('x', 99) from generate_series({1000 * number}, {1000 * number + 999}) i"
        )
        source = open_source(rig.url, ["a"], name=rig.name)
        capture = Capture(rig.log, source)
        capture.open()
        capture.catch_up()
        assert rig.log.table("a").num_rows == 1000 * number + 1000
        rig.run(
            "insert into other values (1)",
            f"delete from a where id = {1000 * number}",
            f"insert into a values ({1000 * number}, 'new')",
        )
        capture.catch_up()
        assert rig.log.table("a").num_rows == 1000 * number + 1000
        assert [row["op"] for row in rig.history("a")].count("d") == number + 1
        capture.close()


def test_a_table_is_added_without_starting_over(rig: Rig) -> None:
    """Complaint: adding a table without starting over. Changes of both are complete, whatever was open when it was added."""
    rig.run(
        "create table a (id int primary key)",
        "create table b (id int primary key)",
        "insert into a values (1)",
        "insert into b values (1)",
    )
    with rig.capture("a"):
        pass
    rig.run("insert into a values (2)", "insert into b values (2)")
    with rig.capture("a", "b") as capture:
        rig.run("insert into b values (3)")
        follow(capture, rig)
    assert [row["id"] for row in rig.table("b")] == [1, 2, 3]
    assert [row["op"] for row in rig.history("a")] == ["r", "c"]
    with rig.capture("b"):
        assert rig.run("select tablename from pg_publication_tables") == [("b",)]


def test_a_partitioned_table_is_one_table(rig: Rig) -> None:
    """Rows of all partitions, copied and changed, are those of the table."""
    rig.run(
        "create table events (id int, day int, primary key (id, day)) partition by range (day)",
        "create table events_1 partition of events for values from (0) to (10)",
        "create table events_2 partition of events for values from (10) to (20)",
        "insert into events values (1, 5), (2, 15)",
    )
    with rig.capture("events") as capture:
        rig.run("insert into events values (3, 6)", "update events set day = 16 where id = 1")
        follow(capture, rig)
    assert [(row["id"], row["day"]) for row in rig.table("events")] == [(1, 16), (2, 15), (3, 6)]


def test_an_interrupted_backfill_goes_on_and_one_of_a_new_file_begins_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complaint: slow first copies. Chunks that were appended are not read again; VACUUM FULL moves rows without a word."""
    monkeypatch.setattr(pg_backfill, "PAGES_FIRST", 16)
    monkeypatch.setattr(pg_backfill, "PAGES_MAX", 16)
    rig.run(
        "create table a (id int primary key, t text)",
        "insert into a select i, repeat('x', 100) from generate_series(1, 5000) i",
    )
    source = open_source(rig.url, ["a"], name=rig.name)
    source.check()
    start = source.prepare(None)
    first = source.chunk("a", None, position=start)
    second = source.chunk("a", first.done, position=start)
    ids = first.rows["id"].to_pylist() + second.rows["id"].to_pylist()
    assert not second.last and len(ids) == len(set(ids)) > 100
    rig.run("delete from a where id <= 4000")
    rig.run("vacuum full a")
    chunk, seen = second, set()
    while not chunk.last:
        chunk = source.chunk("a", chunk.done, position=start)
        seen |= set(chunk.rows["id"].to_pylist())
    assert set(range(4001, 5001)) <= seen  # of the new file's first pages, too, which would have counted as done
    source.remove()
    source.close()


def test_a_table_that_is_dropped_stops_alone(rig: Rig) -> None:
    """While it is copied, or later; one that is made again under its name is another, and copied when the capture is next started."""
    rig.run("create table a (id int primary key)", "create table b (id int primary key)", "insert into a values (1)")
    source = open_source(rig.url, ["a", "b"], name=rig.name)
    source.check()
    start = source.prepare(None)
    rig.run("alter table b rename to c")
    assert source.chunk("b", None, position=start).last
    rig.run("drop table c")
    with pytest.raises(NotCapturable):
        source.chunk("b", None, position=start)
    source.close()
    with rig.capture("a") as capture:
        rig.run("drop table a", "create table a (id int primary key)", "insert into a values (2)")
        capture.source.heartbeat()
        follow(capture, rig)
        assert "dropped" in (capture.progress.tables["a"].why or "")
        capture.step()
    with rig.capture("a"):
        assert rig.table("a") == [{"id": 2}]
