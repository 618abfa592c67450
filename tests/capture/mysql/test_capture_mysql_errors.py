"""What a capture of MariaDB refuses, and how it says so: settings, rights, keys, binlogs that are gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.capture.mysql.ddl import effects
from headwater.capture.source_url import open_source, parse_source_url
from headwater.model.errors import CaptureLost, InvalidInput, NotCapturable, Unreachable
from headwater.testing.servers.mariadb import MariaDbServer
from tests.rigs.capture.mysql import Rig, connect, follow, rigged

service = pytest.mark.service("mariadb")


@pytest.fixture
def rig(mariadb: MariaDbServer, tmp_path: Path) -> Iterator[Rig]:
    """A database and a log of one test, with a table."""
    with rigged(mariadb, tmp_path) as made:
        made.run("create table t (id int primary key, n int)", "insert into t values (1, 1)")
        yield made


@service
@pytest.mark.parametrize(
    ("setting", "bad", "good"),
    [
        ("binlog_format", "MIXED", "ROW"),
        ("binlog_row_image", "MINIMAL", "FULL"),
        ("binlog_row_metadata", "NO_LOG", "FULL"),
        ("log_bin_compress", "ON", "OFF"),
    ],
)
def test_a_setting_that_hides_changes_is_refused_with_the_statement_that_mends_it(
    rig: Rig, setting: str, bad: str, good: str
) -> None:
    """The very statement of the advice, run as it stands, makes the capture possible."""
    rig.run(f"set global {setting} = {bad}")
    source = open_source(rig.url, name=rig.name)
    try:
        with pytest.raises(NotCapturable, match=f"{setting} = {bad}") as refused:
            source.check()
        statement = refused.value.advice.removeprefix("Run: ").partition(";")[0]
        assert statement == f"SET GLOBAL {setting} = {good}"
        rig.run(statement)
        assert [info.name for info in source.check()] == ["t"]
    finally:
        rig.run(f"set global {setting} = {good}")
        source.close()


@service
def test_a_server_without_binlog_is_refused_with_the_lines_to_write(tmp_path: Path) -> None:
    with MariaDbServer(settings={"log-bin": ""}) as server:
        source = open_source(server.url)
        with pytest.raises(NotCapturable, match=r"does not write a binlog.*log_bin = binlog"):
            source.check()
        source.close()


@service
def test_a_user_gets_what_it_lacks_by_the_statements_that_are_advised(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong password, no rights to the database, to the binlog, to its tables; no error ever shows the password."""
    admin = connect(rig.server)
    admin.query("create or replace user 'reader'@'127.0.0.1' identified by 'se''cret'")
    where = f"127.0.0.1:{rig.server.port}/{rig.name}"
    with pytest.raises(NotCapturable, match="password_env") as refused:
        open_source(f"mariadb://reader:wrong@{where}").check()
    assert "wrong" not in str(refused.value)
    monkeypatch.setenv("READER", "se'cret")
    source = open_source(f"mariadb://reader@{where}?password_env=READER", ["t"])
    assert "cret" not in source.url
    with pytest.raises(NotCapturable, match="Access denied"):
        source.check()
    admin.query(f"grant insert on {rig.name}.* to 'reader'@'127.0.0.1'")
    with pytest.raises(NotCapturable, match="is not allowed to read the binlog status") as refused:
        source.check()
    binlog, tables, _ = refused.value.advice.removeprefix("Run: ").split(";")
    admin.query(binlog)
    with pytest.raises(NotCapturable, match="SELECT command denied") as refused:
        source.check()
    assert tables.strip().startswith("GRANT SELECT ON") and "GRANT SELECT ON" in refused.value.advice
    admin.query(tables)
    source.close()
    assert [info.name for info in source.check()] == ["t"]
    source.close()
    admin.query("drop user 'reader'@'127.0.0.1'")
    admin.close()


@service
def test_a_table_without_a_key_is_left_out_or_refused_or_given_one(rig: Rig) -> None:
    """Its rows could not be told apart; columns that are unique and never null will do."""
    rig.run("create table bare (a int not null, b int)", "insert into bare values (1, 1), (2, 2)")
    rig.run("create table strange (id int primary key, u uuid)", "create view seen as select 1")
    source = open_source(rig.url)
    assert [info.name for info in source.check()] == ["t"]
    assert set(source.left_out) == {"bare", "strange", "seen"}
    source.close()
    with pytest.raises(NotCapturable, match="ADD PRIMARY KEY"), rig.capture("bare"):
        pass
    with pytest.raises(NotCapturable, match=r"is nullable.*NOT NULL"), rig.capture("bare", key={"bare": ["b"]}):
        pass
    with (
        pytest.raises(NotCapturable, match=r"Table 'gone' does not exist.*The tables of this user are"),
        rig.capture("gone"),
    ):
        pass
    with rig.capture("bare", key={"bare": ["a"]}) as capture:
        rig.run("update bare set b = 5 where a = 2")
        follow(capture, rig)
        assert rig.table("bare") == [{"a": 1, "b": 1}, {"a": 2, "b": 5}]


@service
def test_binlogs_that_are_gone_are_told_and_the_tables_copied_again(rig: Rig) -> None:
    """Nothing is passed over in silence; `--backfill-again` brings what changed and removes what went."""
    rig.run("insert into t values (2, 2)")
    with rig.capture("t"):
        pass
    rig.run("insert into t values (3, 3)", "delete from t where id = 1", "flush binary logs")
    last = rig.run("show master status")[0][0]
    while (
        len(rig.run("show binary logs")) > 1
    ):  # the server keeps what it believes to be read, and what it may need itself
        for (reader,) in rig.run("select id from information_schema.processlist where command = 'Binlog Dump'"):
            rig.run(f"kill {reader}")
        rig.run(f"purge binary logs to '{last}'")
    with pytest.raises(CaptureLost, match=r"has removed binlog.*backfill-again"), rig.capture("t"):
        pass
    with rig.capture("t", backfill_again=True):
        assert rig.table("t") == [{"id": 2, "n": 2}, {"id": 3, "n": 3}]


@service
def test_a_server_that_takes_the_place_of_another_is_not_taken_for_it(tmp_path: Path, mariadb: MariaDbServer) -> None:
    """One that was reset has the same file, and here the same statements, bytes and GTIDs in it: only its time is another."""
    with MariaDbServer() as server, rigged(server, tmp_path) as rig:
        rig.run("create table t (id int primary key, n int)", "reset master", "insert into t values (1, 1)")
        with rig.capture("t"):
            pass
        time.sleep(1.1)  # times of events are whole seconds
        rig.run("reset master", *(f"insert into t values ({number}, 0)" for number in range(2, 30)))
        with pytest.raises(CaptureLost, match="not the binlog of the capture"), rig.capture("t"):
            pass
        with rig.capture("t", backfill_again=True):
            assert len(rig.table("t")) == 29


@service
def test_a_session_that_leaves_out_columns_stops_the_table_alone(rig: Rig) -> None:
    """Old values would be missing; the sentence names the setting."""
    rig.run("create table other (id int primary key)")
    with rig.capture("t", "other") as capture:
        rig.run("set binlog_row_image = minimal", "update t set n = 2", "insert into other values (1)")
        follow(capture, rig)
        assert capture.progress.tables["t"].state == "stopped"
        assert "binlog_row_image" in (capture.progress.tables["t"].why or "")
        assert rig.table("other") == [{"id": 1}]


@service
def test_nothing_is_left_in_the_database(rig: Rig) -> None:
    """Nothing was ever made there: no table, user, or statement in the binlog."""
    before = rig.run("show master status"), rig.run("show tables")
    with rig.capture("t") as capture:
        capture.source.remove()
        capture.source.remove()
    assert (rig.run("show master status"), rig.run("show tables")) == before


def test_a_server_that_is_not_there_can_be_tried_again() -> None:
    with pytest.raises(Unreachable) as error:
        open_source("mysql://root@127.0.0.1:1/shop").check()
    assert error.value.retriable


@pytest.mark.parametrize("url", ["mysql://root@host/", "mysql://root@host/shop?sslmode=require"])
def test_urls_that_cannot_work_are_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidInput):
        open_source(url, name="shop")


def test_a_password_in_the_url_is_masked() -> None:
    assert parse_source_url("mysql://me:secret@host:3307/shop").shown == "mysql://me:***@host:3307/shop"


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("truncate t", [("t", "truncated")]),
        ("/* note */ TRUNCATE TABLE `other`.`t` -- x", [("other.t", "truncated")]),
        ("alter table t add index (n)", [("t", "altered")]),
        ("alter table t add column x int, drop column y", [("t", "altered")]),
        ("alter table t add column x int default null", [("t", "altered")]),
        ("alter table t add column x int default 5", [("t", "rewritten")]),
        ("alter table t add x int not null", [("t", "rewritten")]),
        ("ALTER TABLE t MODIFY x bigint", [("t", "rewritten")]),
        ("alter table t change `add, index` y int", [("t", "rewritten")]),
        ("alter table t rename column x to y", [("t", "rewritten")]),
        ("alter table t drop partition p1", [("t", "rewritten")]),
        ("alter table t comment = 'drop partition', algorithm = inplace", [("t", "altered")]),
        ("alter table t rename to u", [("t", "gone"), ("u", "gone")]),
        (
            "rename table t to t_old, other.n to t",
            [("t", "gone"), ("t_old", "gone"), ("other.n", "gone"), ("t", "gone")],
        ),
        ("drop table if exists a, `b c`", [("a", "gone"), ("b c", "gone")]),
        ("drop temporary table t", []),
        ("create or replace table t (id int)", [("t", "gone")]),
        ("create temporary table t (id int)", []),
        ("create table if not exists t (id int)", []),
        ("/*!50000 alter table t */ /*M!100 drop partition p */", [("t", "rewritten")]),
        ("create index i on t (n)", []),
        ("update `t` set n = 't2'", [("t", "rewritten")]),
        ("insert into elsewhere values ('t')", []),
        ("drop database shop", [("t", "gone")]),
        ("grant select on t to me", []),
    ],
)
def test_what_statements_do_to_tables(statement: str, expected: list[tuple[str, str]]) -> None:
    """What is not known to leave the rows alone counts as rewriting them."""
    found = [
        (effect.table if effect.database == "shop" else f"{effect.database}.{effect.table}", effect.doing)
        for effect in effects(statement, "shop", ["t"])
    ]
    assert found == expected
