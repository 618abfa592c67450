"""MariaDB as a source of changes, against a real server: values, transactions, tables that change, binlogs that are gone."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from headwater.capture.capture import Capture
from headwater.capture.mysql import backfill as mysql_backfill
from headwater.capture.mysql import stream as mysql_stream
from headwater.capture.source_url import open_source
from headwater.testing.servers.mariadb import MariaDbServer
from tests.rigs.capture.mysql import Rig, connect, follow, rigged

pytestmark = pytest.mark.service("mariadb")

TYPES = """
create table everything (
    id int primary key, tiny tinyint, tiny_u tinyint unsigned, small smallint, small_u smallint unsigned, medium mediumint,
    medium_u mediumint unsigned, big_u bigint unsigned, int_u int unsigned, big bigint, single float, double_ double,
    price decimal(10, 2), wide decimal(38, 10), huge decimal(50, 3), half decimal(5, 5),
    plain text, short varchar(9), long_ varchar(3000), padded char(4), latin varchar(20) character set latin1,
    greek char(5) character set greek, wide_text varchar(9) character set ucs2, many char(200) character set utf8mb4,
    raw varbinary(9), fixed binary(4), body longblob,
    day date, local datetime(6), second_ datetime, moment timestamp(6) null, whole timestamp null, tenth datetime(1), clock time,
    exact time(6), y year, feeling enum('sad', 'happy', 'zoë'), tags set('a', 'b', 'c'), flags bit(12), yes bit(1), all_bits bit(64),
    document json, place point, twice int as (id * 2) stored, thrice int as (id * 3) virtual
) character set utf8mb4"""
FULL_ROW = r"""insert into everything values (
    1, -128, 255, -32768, 65535, -8388608, 16777215, 18446744073709551615, 4294967295, -9223372036854775808, 0.1, -1.5e300,
    -12345678.91, 1234567890123456789012345678.0123456789, -12345678901234567890123456789012345678901234567.891, 0.00012,
    'zoë "q" , \\ {} 😀', 'short', repeat('é', 1500), 'ab', 'élan €', 'αβ', 'ŵ', repeat('ü', 100),
    X'00FF10', X'6100', X'000102',
    '2024-02-29', '2024-02-29 03:04:05.678901', '1000-01-01 00:00:00', '2024-02-29 03:04:05.678901', '2024-02-29 03:04:05',
    '9999-12-31 23:59:59.9', '-838:59:59', '-00:00:00.000001', 2155, 'zoë', 'a,c', b'100000000001', b'1', 0xFFFFFFFFFFFFFFFF,
    '{"a": [1, null]}', point(1, 2), default, default)"""
EXPECTED = {
    "id": 1,
    "tiny": -128,
    "tiny_u": 255,
    "small": -32768,
    "small_u": 65535,
    "medium": -8388608,
    "medium_u": 16777215,
    "big_u": Decimal(2**64 - 1),
    "int_u": 2**32 - 1,
    "big": -(2**63),
    "single": 0.10000000149011612,
    "double_": -1.5e300,
    "price": Decimal("-12345678.91"),
    "wide": Decimal("1234567890123456789012345678.0123456789"),
    "huge": "-12345678901234567890123456789012345678901234567.891",
    "half": Decimal("0.00012"),
    "plain": 'zoë "q" , \\ {} 😀',
    "short": "short",
    "long_": "é" * 1500,
    "padded": "ab",
    "latin": "élan €",
    "greek": "αβ",
    "wide_text": "ŵ",
    "many": "ü" * 100,
    "raw": b"\x00\xff\x10",
    "fixed": b"a\x00\x00\x00",
    "body": b"\x00\x01\x02",
    "day": datetime.date(2024, 2, 29),
    "local": datetime.datetime(2024, 2, 29, 3, 4, 5, 678901),  # noqa: DTZ001 - a time without a zone
    "second_": datetime.datetime(1000, 1, 1),  # noqa: DTZ001
    "moment": datetime.datetime(2024, 2, 29, 3, 4, 5, 678901, tzinfo=datetime.UTC),
    "whole": datetime.datetime(2024, 2, 29, 3, 4, 5, tzinfo=datetime.UTC),
    "tenth": datetime.datetime(9999, 12, 31, 23, 59, 59, 900000),  # noqa: DTZ001
    "clock": "-838:59:59",
    "exact": "-00:00:00.000001",
    "y": 2155,
    "feeling": "zoë",
    "tags": "a,c",
    "flags": 0b100000000001,
    "yes": True,
    "all_bits": Decimal(2**64 - 1),
    "document": '{"a": [1, null]}',
    "place": b"\0\0\0\0\x01\x01\0\0\0\0\0\0\0\0\0\xf0?\0\0\0\0\0\0\0@",
    "twice": 2,
    "thrice": 3,
}


@pytest.fixture
def rig(mariadb: MariaDbServer, tmp_path: Path) -> Iterator[Rig]:
    """A database and a log of one test."""
    with rigged(mariadb, tmp_path) as made:
        yield made


def test_every_type_comes_as_it_is_by_backfill_and_by_change(rig: Rig) -> None:
    """Both ways give the same values, and null is null in each."""
    rig.run(TYPES, FULL_ROW, "insert into everything (id) values (2)")
    nulls = dict.fromkeys(EXPECTED) | {"id": 2, "twice": 4, "thrice": 6}
    with rig.capture("everything") as capture:
        assert rig.table("everything") == [EXPECTED, nulls]
        rig.run("delete from everything", FULL_ROW, "insert into everything (id) values (2)")
        follow(capture, rig)
        assert rig.table("everything") == [EXPECTED, nulls]
    history = rig.history("everything")
    assert [row["op"] for row in history] == ["r", "r", "d", "d", "c", "c"]
    assert history[2]["before"] == history[0]["after"]


def test_what_is_no_date_is_null(rig: Rig) -> None:
    """MariaDB keeps 0000-00-00 and days that no calendar has; no type of the log does. Texts and bytes may hold anything."""
    rig.run(
        "set sql_mode = 'ALLOW_INVALID_DATES'",
        "create table odd (id int primary key, day date, local datetime, moment timestamp null, y year, feeling enum('a') not null, "
        "empty set('a') not null, text_ text, raw blob, old varchar(5) character set latin1)",
    )
    rows = """insert into odd values (1, '0000-00-00', '0000-00-00', 0, 0, 'x', '', '', '', ''),
        (2, '2024-00-10', '2024-01-00 10:00:00', null, 1999, 'a', 'a', '\\0', X'00', 0x818D)"""
    rig.run("set sql_mode = ''", rows)
    with rig.capture("odd") as capture:
        copied = rig.table("odd")
        rig.run("delete from odd", rows)
        follow(capture, rig)
    assert rig.table("odd") == copied
    assert [(row["day"], row["local"], row["moment"]) for row in copied] == [(None, None, None)] * 2
    assert [(row["y"], row["feeling"], row["empty"]) for row in copied] == [(0, "", ""), (1999, "a", "a")]
    assert [(row["text_"], row["raw"], row["old"]) for row in copied] == [("", b"", ""), ("\0", b"\0", "\x81\x8d")]


def test_changes_have_old_and_new_values_and_stand_in_their_transactions(rig: Rig) -> None:
    """Before and after of each, numbers over all tables, begin and end with what the transaction held."""
    rig.run("create table a (id int primary key, n int)", "create table b (id int primary key, n int)")
    with rig.capture("a", "b") as capture:
        rig.together(
            "insert into a values (1, 1), (2, 2)",
            "insert into b values (1, 10)",
            "update a set n = n + 1",
            "delete from a where id = 2",
        )
        rig.run("update b set n = 11")
        follow(capture, rig)
    told = [
        (row["op"], row["before"] and row["before"]["n"], row["after"] and row["after"]["n"], row["transaction_order"])
        for row in rig.history("a")
    ]
    assert told == [("c", None, 1, 1), ("c", None, 2, 2), ("u", 1, 2, 4), ("u", 2, 3, 5), ("d", 3, None, 6)]
    assert [(row["op"], row["transaction_order"]) for row in rig.history("b")] == [("c", 3), ("u", 1)]
    ends = [row for row in rig.log.read(f"{rig.name}.transactions").to_pylist() if row["status"] == "end"]
    assert [(row["events"], dict(row["tables"])) for row in ends] == [(6, {"a": 5, "b": 1}), (1, {"b": 1})]
    assert len({row["transaction"] for row in rig.history("a")}) == 1


def test_a_change_of_the_key_is_a_delete_and_an_insert(rig: Rig) -> None:
    """Also of one part of a key of several columns, and of the case of letters alone, which the database holds for the same."""
    rig.run(
        "create table t (shop int, code varchar(9), n int, primary key (shop, code))",
        "insert into t values (1, 'a', 1), (1, 'b', 2)",
    )
    with rig.capture("t") as capture:
        rig.run("update t set code = 'A' where code = 'a'", "update t set shop = 2, n = 3 where code = 'b'")
        follow(capture, rig)
        assert [(row["primary_key"], row["n"]) for row in rig.table("t")] == [('[1,"A"]', 1), ('[2,"b"]', 3)]
    assert [row["op"] for row in rig.history("t")][2:] == ["d", "c", "d", "c"]


def test_a_truncation_removes_every_key(rig: Rig) -> None:
    """Those of before it, also from the same step; what comes behind it stays."""
    rig.run("create table t (id int primary key)", "insert into t values (1), (2)")
    with rig.capture("t") as capture:
        rig.run("insert into t values (3)", "truncate table t", "insert into t values (4)")
        follow(capture, rig)
        assert rig.table("t") == [{"id": 4}]
    assert sorted(row["id"] for row in rig.history("t") if row["op"] == "t") == [1, 2, 3]


def test_a_large_transaction_comes_whole_in_parts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is in the log before its end; its numbers go on from part to part."""
    monkeypatch.setattr(mysql_stream, "BLOCK_BYTES_MAX", 1 << 14)
    monkeypatch.setattr(mysql_stream, "_RECEIVED_AT_ONCE", 1 << 14)
    rig.run("create table t (id int primary key, body text)")
    with rig.capture("t") as capture:
        rig.run("insert into t select seq, repeat('x', 100) from seq_1_to_5000")
        parts = 0
        while not rig.log.table("t").num_rows:
            capture.step()
            parts += 1
        assert rig.log.table("t").num_rows == 5000
        assert parts > 10
    orders = [row["transaction_order"] for row in rig.history("t")]
    assert orders == list(range(1, 5001))


def test_a_value_of_more_than_a_packet_comes_whole(rig: Rig) -> None:
    """The protocol cuts what has 16 MB or more, in the binlog and in a result; 3 columns of length bytes each."""
    rig.run("create table t (id int primary key, body longblob, behind int)")
    rig.run("set global max_allowed_packet = 67108864")
    size = (1 << 24) + 77
    with connect(rig.server, rig.name) as connection, connection.cursor() as cursor:
        cursor.execute(f"insert into t values (1, repeat('a', {size}), 5)")
        with rig.capture("t") as capture:
            cursor.execute(f"insert into t values (2, repeat('b', {size}), 6)")
            follow(capture, rig)
            rows = rig.log.table("t").sort_by("id").to_pylist()
    assert [(row["id"], row["body"][:1], len(row["body"]), row["behind"]) for row in rows] == [
        (1, b"a", size, 5),
        (2, b"b", size, 6),
    ]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("alter table t add column extra int", [{"id": 1, "n": 1, "extra": None}, {"id": 2, "n": 2, "extra": 5}]),
        (
            "alter table t add column extra int not null default 7 first",
            [{"id": 1, "n": 1, "extra": 7}, {"id": 2, "n": 2, "extra": 5}],
        ),
        ("alter table t change n extra int", [{"id": 1, "n": None, "extra": 1}, {"id": 2, "n": None, "extra": 5}]),
        (
            "alter table t modify n bigint, add extra int as (n * 4)",
            [{"id": 1, "n": 1, "extra": 4}, {"id": 2, "n": 2, "extra": 8}],
        ),
    ],
)
def test_columns_that_change_are_followed_where_they_change(
    rig: Rig, statement: str, expected: list[dict[str, int]]
) -> None:
    """Whether a capture runs meanwhile or comes later, and whether rows have other values without a change of their own."""
    insert = "insert into t (id, n) values (2, 2)" if "n * 4" in statement else "insert into t set id = 2, extra = 5"
    insert = insert if "change" in statement or "n * 4" in statement else "insert into t set id = 2, n = 2, extra = 5"
    rig.run("create table t (id int primary key, n int)", "insert into t values (1, 1)")
    with rig.capture("t") as capture:
        rig.run(statement, insert)
        follow(capture, rig)
        follow(capture, rig)
        assert rig.table("t") == expected
        rig.run("insert into t (id) values (3)", "delete from t where id = 3")
    with rig.capture("t"):
        assert rig.table("t") == expected


def test_a_column_that_is_dropped_is_null_from_then_on(rig: Rig) -> None:
    """And changes from before it, read behind it, still have it in their history."""
    rig.run("create table t (id int primary key, n int, m int)", "insert into t values (1, 1, 1)")
    with rig.capture("t"):
        pass
    rig.run("insert into t values (2, 2, 2)", "alter table t drop column n", "insert into t values (3, 3)")
    with rig.capture("t") as capture:
        follow(capture, rig)
    assert [row["after"]["n"] for row in rig.history("t") if row["op"] == "c"] == [2, None]
    assert [row["m"] for row in rig.table("t")] == [1, 2, 3]


def test_changes_from_before_a_wider_type_come_though_the_topic_has_it_already(rig: Rig) -> None:
    """A capture that starts late makes its topics by the catalog; the stream then begins with the narrower columns."""
    rig.run("create table t (id int primary key, n int)", "insert into t values (1, 1)")
    with rig.capture("t"):
        pass
    rig.run("insert into t values (2, 2)", "alter table t modify column n bigint", f"insert into t values (3, {2**40})")
    with rig.capture("t") as capture:
        follow(capture, rig)
        assert capture.progress.tables["t"].state == "live", capture.progress.tables["t"].why
    assert [(row["id"], row["n"]) for row in rig.table("t")] == [(1, 1), (2, 2), (3, 2**40)]
    assert [row["after"]["n"] for row in rig.history("t") if row["op"] == "c"] == [2, 2**40]


def test_what_a_table_cannot_follow_stops_it_alone(rig: Rig) -> None:
    """A type that became another, a key that is gone, a table that is dropped; the rest goes on, and the sentence says what to do."""
    for name in "abcd":
        rig.run(f"create table {name} (id int primary key, n int)", f"insert into {name} values (1, 1)")
    with rig.capture(*"abcd") as capture:
        rig.run(
            "alter table a modify n varchar(20)",
            "alter table b drop primary key",
            "drop table c",
            "insert into d values (2, 2)",
        )
        follow(capture, rig)
        states = {name: table.state for name, table in capture.progress.tables.items()}
        why = {name: table.why or "" for name, table in capture.progress.tables.items()}
    assert states == {"a": "stopped", "b": "stopped", "c": "stopped", "d": "live"}
    assert "revert the change of the column" in why["a"]
    assert "ADD PRIMARY KEY" in why["b"]
    assert "dropped" in why["c"]
    assert len(rig.table("d")) == 2


def test_a_table_that_another_takes_the_place_of_is_copied_again(rig: Rig) -> None:
    """As tools do that change large tables: a copy is made beside it and the names are swapped."""
    rig.run("create table t (id int primary key, n int)", "insert into t values (1, 1), (2, 2)")
    with rig.capture("t") as capture:
        rig.run(
            "create table t_new (id int primary key, n int, m int)",
            "insert into t_new values (1, 10, 100), (3, 30, 300)",
            "rename table t to t_old, t_new to t",
        )
        follow(capture, rig)
        follow(capture, rig)
        assert rig.table("t") == [{"id": 1, "n": 10, "m": 100}, {"id": 3, "n": 30, "m": 300}]


def test_statements_that_a_session_logs_instead_of_rows_are_not_missed(rig: Rig) -> None:
    """The binlog has no rows then: the table is copied again."""
    rig.run("create table t (id int primary key, n int)", "insert into t values (1, 1)")
    with rig.capture("t") as capture:
        rig.run("set binlog_format = 'statement'", "update t set n = 5", "insert into t values (2, 2)")
        follow(capture, rig)
        follow(capture, rig)
        assert rig.table("t") == [{"id": 1, "n": 5}, {"id": 2, "n": 2}]


def test_an_xa_transaction_counts_when_it_is_committed(rig: Rig) -> None:
    """Its rows stand in the binlog where it was prepared; one that is rolled back never was."""
    rig.run("create table t (id int primary key, n int)", "insert into t values (1, 1)")
    with rig.capture("t") as capture:
        rig.run("xa start 'one'", "insert into t values (2, 2)", "xa end 'one'", "xa prepare 'one'")
        follow(capture, rig)
        assert len(rig.table("t")) == 1
        rig.run("xa commit 'one'")
        follow(capture, rig)
        follow(capture, rig)
        assert rig.table("t") == [{"id": 1, "n": 1}, {"id": 2, "n": 2}]
        rig.run("xa start 'two'", "delete from t", "xa end 'two'", "xa prepare 'two'", "xa rollback 'two'")
        rig.run("insert into t values (3, 3)")
        follow(capture, rig)
        assert len(rig.table("t")) == 3


@pytest.mark.parametrize(
    "key",
    [
        "a varchar(9)",
        "a varchar(9) character set latin1",
        "a varbinary(9)",
        "a enum('z', 'y', 'x', 'w')",
        "a float",
        "a datetime(3)",
    ],
)
def test_a_backfill_walks_over_any_key_in_chunks(rig: Rig, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Rows are found once each, by keys of several columns, whatever their types and their order are."""
    monkeypatch.setattr(mysql_backfill, "ROWS_MAX", 7)
    rig.run(f"create table t ({key}, b bigint unsigned, c char(1), primary key (a, b, c))")
    values = {
        "a varchar(9)": ["''", "'a''b'", "'\\\\'", "'zoë'"],
        "a varbinary(9)": ["''", "X'00'", "X'FF27'", "X'5C'"],
        "a enum('z', 'y', 'x', 'w')": ["'z'", "'y'", "'x'", "'w'"],
        "a float": ["0.1", "-1.5", "1e30", "0"],
        "a datetime(3)": ["'2024-01-01'", "'2024-01-01 00:00:00.001'", "'1999-12-31'", "'0001-01-01'"],
    }.get(key, ["''", "'é'", "'€'", "'b'"])
    for value in values:
        rig.run(f"insert into t select {value}, 18446744073709551615 - seq, char(97 + seq mod 3) from seq_1_to_8")
    with rig.capture("t") as capture:
        assert rig.log.table("t").num_rows == 32
        rig.run("update t set b = b - 100")
        follow(capture, rig)
        assert rig.log.table("t").num_rows == 32


def test_a_table_without_transactions_is_captured_too(rig: Rig) -> None:
    rig.run("create table t (id int primary key, n int) engine = myisam", "insert into t values (1, 1)")
    with rig.capture("t") as capture:
        rig.run("insert into t values (2, 2)", "update t set n = 5 where id = 1", "delete from t where id = 2")
        follow(capture, rig)
        assert rig.table("t") == [{"id": 1, "n": 5}]
    assert [row["op"] for row in rig.history("t")] == ["r", "c", "u", "d"]


def test_a_capture_goes_on_where_it_ended_through_rotations_and_domains(rig: Rig) -> None:
    """Positions sort as transactions committed, whatever domain they are of and whatever file they are in."""
    rig.run("create table t (id int primary key)")
    for number in range(4):
        with rig.capture("t"):
            pass
        rig.run(
            f"set session gtid_domain_id = {number % 3}",
            f"insert into t values ({2 * number})",
            "flush binary logs",
            f"insert into t values ({2 * number + 1})",
        )
    with rig.capture("t"):
        assert len(rig.table("t")) == 8
    history = [row for row in rig.history("t") if row["op"] == "c"]
    assert [row["id"] for row in history] == list(range(8))
    assert len({row["position"] for row in history}) == 8


def test_an_idle_table_does_not_hold_the_position_back(rig: Rig) -> None:
    """What other tables write moves the capture on, so that the server may throw its binlogs away."""
    rig.run("create table t (id int primary key)", "create table other (id int primary key)")
    with rig.capture("t") as capture:
        rig.run("insert into other select seq from seq_1_to_1000", "flush binary logs")
        follow(capture, rig)
        assert capture._end >= rig.end_position()
        _wait_for(lambda: not capture.step() and capture.source.lag().bytes == 0)


def test_lag_counts_the_binlog_that_is_not_captured_yet(rig: Rig) -> None:
    rig.run("create table t (id int primary key, body text)")
    with rig.capture("t") as capture:
        position = capture.progress.position
        rig.run("insert into t select seq, repeat('x', 1000) from seq_1_to_100")
        behind = capture.source.lag(position).bytes
        assert behind is not None and 100_000 < behind < 300_000


@pytest.mark.slow
def test_a_capture_outlives_its_server(tmp_path: Path) -> None:
    """A server that is killed and comes back is read on where it was; names may be written in any case where it says so."""
    with MariaDbServer(settings={"lower-case-table-names": "1"}) as server, rigged(server, tmp_path) as rig:
        rig.run("create table Users (id int primary key)", "insert into users values (1)")
        stop = threading.Event()
        capture = Capture(rig.log, open_source(rig.url, ["users"], name=rig.name))
        thread = threading.Thread(target=capture.run, args=(stop,))
        thread.start()
        try:
            _wait_for(lambda: capture.status().state == "live" and len(rig.table("users")) == 1)
            server.kill()
            _wait_for(lambda: capture.status().state == "waiting")
            server.restart()
            rig.connect_again()
            rig.run("insert into USERS values (2)", "alter table USERS add column n int default 7")
            _wait_for(lambda: rig.table("users") == [{"id": 1, "n": 7}, {"id": 2, "n": 7}])
            assert [row["id"] for row in rig.history("users") if row["op"] == "c"] == [2]
        finally:
            stop.set()
            thread.join()


def _wait_for(is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to it in time"
        time.sleep(0.02)
