"""Tables of a captured PostgreSQL whose columns change, while they are captured and while nobody does."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from headwater.testing.servers.postgres import PostgresServer
from tests.rigs.capture.postgres import Rig, follow, rigged

pytestmark = pytest.mark.service("postgres")


@pytest.fixture
def rig(postgres: PostgresServer, tmp_path: Path) -> Iterator[Rig]:
    """A database and a log of one test."""
    with rigged(postgres, tmp_path) as made:
        yield made


def test_columns_are_followed(rig: Rig) -> None:
    """Complaint: schema changes. A default, another name and a wider type reach the rows that nobody writes to, too."""
    rig.run(
        "create table users (id int primary key, name text, n int, old text)",
        "insert into users values (1, 'ann', 1, 'o'), (2, 'bob', 2, 'o')",
    )
    with rig.capture("users") as capture:
        rig.together(
            "update users set n = 5 where id = 1",
            "alter table users add column level int default 7",
            "update users set n = 6 where id = 1",
        )
        rig.run("alter table users rename column name to called", "update users set n = 7 where id = 1")
        rig.run("alter table users alter column n type bigint", f"update users set n = {2**40} where id = 1")
        rig.run(
            "alter table users drop column old",
            "alter table users add column empty text",
            "insert into users values (3, 'cy', 3, 8, 'e')",
        )
        follow(capture, rig)
        columns = ["id", "called", "n", "level", "empty"]
        expected = [(1, "ann", 2**40, 7, None), (2, "bob", 2, 7, None), (3, "cy", 3, 8, "e")]
        assert [tuple(row[name] for name in columns) for row in rig.table("users")] == expected
        assert capture.progress.tables["users"].state == "live"


def test_a_statement_behind_which_nobody_writes_is_found(rig: Rig) -> None:
    """The stream says nothing of it; the catalog does."""
    rig.run("create table users (id int primary key)", "insert into users values (1)")
    with rig.capture("users") as capture:
        rig.run("insert into users values (2)", "alter table users add column level int default 7")
        capture.source.heartbeat()  # sees it; the insert was not read yet
        follow(capture, rig)
        assert rig.table("users") == [{"id": 1}, {"id": 2}]
        capture.source.heartbeat()
        follow(capture, rig)
        assert rig.table("users") == [{"id": 1, "level": 7}, {"id": 2, "level": 7}]


def test_columns_that_change_while_nobody_captures_reach_every_row(rig: Rig) -> None:
    """The stream never speaks of the columns from before; what was captured remembers them."""
    rig.run("create table users (id int primary key, name text)", "insert into users values (1, 'ann')")
    with rig.capture("users"):
        pass
    rig.run("alter table users add column level int default 7", "alter table users rename column name to called")
    with rig.capture("users"):
        assert [(row["id"], row["called"], row["level"]) for row in rig.table("users")] == [(1, "ann", 7)]


def test_a_type_that_cannot_be_followed_stops_its_table_alone(rig: Rig) -> None:
    """With advice; the others go on."""
    rig.run(
        "create table a (id int primary key, n int)",
        "create table b (id int primary key)",
        "insert into a values (1, 1)",
    )
    with rig.capture("a", "b") as capture:
        rig.run("alter table a alter column n type text", "insert into a values (2, 'x')", "insert into b values (1)")
        follow(capture, rig)
        stopped = capture.progress.tables["a"]
        assert stopped.state == "stopped" and stopped.why and "n" in stopped.why
        assert rig.table("b") == [{"id": 1}]


def test_changes_from_before_a_wider_type_come_though_the_topic_has_it_already(rig: Rig) -> None:
    """A capture that starts late makes its topics by the catalog; the stream then begins with the narrower columns."""
    rig.run(
        "create table users (id int primary key, n int, price numeric(12, 2))", "insert into users values (1, 1, 1.25)"
    )
    with rig.capture("users"):
        pass
    rig.run(
        "insert into users values (2, 2, 2.50)",
        "alter table users alter column n type bigint, alter column price type numeric(14, 2)",
        f"insert into users values (3, {2**40}, 123456789012.75)",
    )
    with rig.capture("users") as capture:
        follow(capture, rig)
        assert capture.progress.tables["users"].state == "live", capture.progress.tables["users"].why
        expected = [(1, 1, Decimal("1.25")), (2, 2, Decimal("2.50")), (3, 2**40, Decimal("123456789012.75"))]
        assert [(row["id"], row["n"], row["price"]) for row in rig.table("users")] == expected
        inserted = [row["after"]["n"] for row in rig.history("users") if row["op"] == "c"]
        assert inserted == [2, 2**40]


def test_a_type_that_becomes_narrower_keeps_the_wider_column(rig: Rig) -> None:
    """All that comes fits into what there is."""
    rig.run("create table users (id int primary key, n bigint)", "insert into users values (1, 1)")
    with rig.capture("users") as capture:
        rig.run("alter table users alter column n type int", "insert into users values (2, 2)")
        follow(capture, rig)
        assert capture.progress.tables["users"].state == "live", capture.progress.tables["users"].why
        assert rig.table("users") == [{"id": 1, "n": 1}, {"id": 2, "n": 2}]
