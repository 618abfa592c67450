"""What keeps a PostgreSQL from being captured: each told with the exact statement to run, and nothing is left behind."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from headwater.capture.postgres import slot as pg_slot
from headwater.capture.source_url import open_source
from headwater.model.errors import HeadwaterError, InvalidInput, NotCapturable, Unreachable
from headwater.testing.servers.postgres import PostgresServer
from tests.rigs.children import let_others_in
from tests.rigs.commands import Command, command, refused

__all__ = ["command"]

pytestmark = pytest.mark.service("postgres")

SECRET = "s3cret-word"
RULES = """
host all asked 127.0.0.1/32 scram-sha-256
host replication asked 127.0.0.1/32 scram-sha-256
host all all 127.0.0.1/32 trust
"""


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A server that asks one role for its password and does not keep enough for changes."""
    folder = tmp_path_factory.mktemp("strict")
    let_others_in(folder)
    rules = folder / "pg_hba.conf"
    rules.write_text(RULES)
    rules.chmod(0o644)
    with PostgresServer(settings={"hba_file": str(rules), "wal_level": "replica"}) as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f"create role asked login superuser password '{SECRET}'")
            connection.execute("create table a (id int primary key)")
        yield server


@pytest.fixture
def shop(postgres: PostgresServer) -> Iterator[str]:
    """A database whose only table belongs to the superuser, and a role that may do nothing."""
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute("create database errors")
        url = postgres.url.removesuffix("/postgres") + "/errors"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("create table a (id int primary key, n int)")
            connection.execute("create role poor login")
        yield url
        admin.execute("drop database errors (force)")
        admin.execute("drop role poor")


def refusal(url: str, *tables: str, **keys: tuple[str, ...]) -> HeadwaterError:
    """What `check` says."""
    source = open_source(url, tables, key=keys)
    try:
        with pytest.raises(HeadwaterError) as caught:
            source.check()
    finally:
        source.close()
    assert SECRET not in "".join(traceback.format_exception(caught.value, chain=False))
    assert caught.value.__cause__ is None
    return caught.value


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def test_a_wrong_password_is_told_without_it(
    strict: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the URL, the environment or a file; the right one gets as far as the next obstacle."""
    base = strict.url.replace("//postgres@", "//asked@")
    wrong = base.replace("//asked@", f"//asked:{SECRET}-wrong@")
    error = refusal(wrong, "a")
    assert isinstance(error, NotCapturable) and "password" in error.what and "password_env" in error.advice
    assert SECRET not in open_source(wrong, ["a"]).url
    monkeypatch.setenv("SHOP_PASSWORD", SECRET)
    (tmp_path / "word").write_text(f"{SECRET}\n")
    for option in ("password_env=SHOP_PASSWORD", f"password_file={tmp_path / 'word'}", f"password={SECRET}"):
        assert "wal_level" in refusal(f"{base}?{option}", "a").advice
    assert isinstance(refusal(f"{base}?password_env=NOWHERE", "a"), InvalidInput)
    assert isinstance(refusal(f"{base}?password_file=/nowhere", "a"), InvalidInput)


def test_a_server_that_keeps_too_little_is_told_the_setting(strict: PostgresServer) -> None:
    """Before anything is made."""
    error = refusal(strict.url, "a")
    assert error.advice == "Run: ALTER SYSTEM SET wal_level = logical; and restart the server."


def test_a_server_that_is_not_there_is_worth_another_try() -> None:
    """And its password stays unseen."""
    error = refusal(f"postgresql://me:{SECRET}@127.0.0.1:1/shop", "a")
    assert isinstance(error, Unreachable) and error.retriable


def test_each_missing_right_is_named_with_its_statement(shop: str) -> None:
    """One after the other, each statement that the error gives being run, until nothing is missing."""
    poor = shop.replace("//postgres@", "//poor@")
    statements = []
    for _ in range(10):
        source = open_source(poor, ["a"], name="errors")
        try:
            source.check()
            break
        except NotCapturable as error:
            statement = error.advice.partition(": ")[2].partition(" (and")[0]
            statements.append(statement)
            run(shop, statement)
        finally:
            source.close()
    assert statements == [
        'ALTER ROLE "poor" REPLICATION;',
        'GRANT SELECT ON "public"."a" TO "poor";',
        'CREATE PUBLICATION "headwater_errors" FOR TABLE "public"."a" WITH (publish_via_partition_root = true);',
    ]
    for url in (poor, f"{poor}?publication=headwater_errors"):
        source = open_source(url, ["a"], name="errors")
        source.check()
        source.prepare(None)
        if url == poor:  # it would have been ours, but somebody else has made it
            with pytest.raises(NotCapturable, match='DROP PUBLICATION "headwater_errors";'):
                source.remove()
        else:
            source.remove()
        source.close()
    with psycopg.connect(shop) as connection:
        assert connection.execute("select pubname from pg_publication").fetchall() == [("headwater_errors",)]
        assert not connection.execute("select 1 from pg_replication_slots where database = 'errors'").fetchall()


def test_no_slot_left_names_those_that_nobody_reads(shop: str) -> None:
    """With the statement that drops one."""
    with psycopg.connect(shop, autocommit=True) as connection:
        ((limit,),) = connection.execute("select current_setting('max_replication_slots')::int").fetchall()
        ((taken,),) = connection.execute("select count(*) from pg_replication_slots").fetchall()
        mine = [f"idle_{number}" for number in range(limit - taken)]
        for name in mine:
            connection.execute("select pg_create_physical_replication_slot(%s)", (name,))
        try:
            error = refusal(shop, "a")
            assert (
                "replication slots are in use" in error.what
                and "SELECT pg_drop_replication_slot('idle_0');" in error.advice
            )
            assert not connection.execute("select 1 from pg_publication").fetchall()
        finally:
            for name in mine:
                connection.execute("select pg_drop_replication_slot(%s)", (name,))


@pytest.mark.parametrize(
    ("statement", "tables", "keys", "what", "advice"),
    [
        ("select 1", ["b"], {}, "Table 'b' does not exist", "The tables are: a."),
        ("create view b as select * from a", ["b"], {}, "not a table", "Capture the tables"),
        (
            "create unlogged table b (id int primary key)",
            ["b"],
            {},
            "is an unlogged table",
            'ALTER TABLE "public"."b" SET LOGGED;',
        ),
        ("create table b (id int)", ["b"], {}, "no primary key", 'ALTER TABLE "public"."b" ADD PRIMARY KEY'),
        (
            "create table b (id int primary key deferrable)",
            ["b"],
            {},
            "no primary key (or a deferrable one)",
            "ADD PRIMARY KEY",
        ),
        (
            "alter table a replica identity nothing",
            ["a"],
            {},
            "no replica identity",
            'ALTER TABLE "public"."a" REPLICA IDENTITY DEFAULT;',
        ),
        (
            "create table b (id int)",
            ["b"],
            {"b": ("id",)},
            "does not send",
            'ALTER TABLE "public"."b" REPLICA IDENTITY FULL;',
        ),
        ("create table b (id int)", ["b"], {"b": ("no",)}, "has no column 'no'", "Its columns are: id"),
    ],
)
def test_a_table_that_cannot_be_captured_says_why(
    shop: str, statement: str, tables: list[str], keys: dict[str, tuple[str, ...]], what: str, advice: str
) -> None:
    """And what to run."""
    run(shop, statement)
    error = refusal(shop, *tables, **keys)
    assert isinstance(error, NotCapturable) and what in error.what and advice in error.advice


def test_keys_can_be_given_where_whole_rows_are_sent(shop: str) -> None:
    """REPLICA IDENTITY FULL and unique columns, or an index of one's own."""
    run(
        shop,
        "create table b (id int, n int)",
        "alter table b replica identity full",
        "create table c (id int not null unique, n int)",
        "alter table c replica identity using index c_id_key",
    )
    source = open_source(shop, ["b", "c"], key={"b": ["id"]})
    assert [info.key for info in source.check()] == [("id",), ("id",)]
    source.close()


def test_the_command_line_captures_shows_and_removes(shop: str, command: Command) -> None:
    """The password is kept nowhere; what is wrong is one sentence and no traceback."""
    run(shop, "insert into a values (1, 1), (2, 2)")
    url = shop.replace("//postgres@", f"//postgres:{SECRET}@")
    done = command("capture", "run", url, "-t", "a", "--available-now")
    assert done.code == 0 and json.loads(done.out)["tables"]["a"]["state"] == "live"
    run(shop, "insert into a values (3, 3)")
    status = command("capture", "status", "errors", "--json")
    assert json.loads(status.out)["lag"]["bytes"] > 0
    shown = command("capture", "list", "--json")
    assert SECRET not in done.out + done.err + status.out + shown.out
    assert command("capture", "remove", "errors", "--yes").code == 0
    with psycopg.connect(shop) as connection:
        assert not connection.execute("select 1 from pg_publication").fetchall()
        assert not connection.execute("select 1 from pg_replication_slots where database = 'errors'").fetchall()
    refused(
        command("capture", "run", shop.replace("//postgres@", "//poor@"), "-t", "a"), "not_capturable", "ALTER ROLE"
    )
    refused(
        command("capture", "run", f"postgresql://me:{SECRET}@127.0.0.1:1/x", "--available-now"), "unreachable", "server"
    )


def test_a_table_is_not_added_while_a_writer_of_it_goes_on(shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of that transaction the slot would give a part only; the error names the process."""
    monkeypatch.setattr(pg_slot, "WRITERS_TIMEOUT_S", 0.1)
    run(shop, "create table b (id int primary key)")
    first = open_source(shop, ["a"], name="errors")
    first.prepare(None)
    first.close()
    source = open_source(shop, ["a", "b"], name="errors")
    with psycopg.connect(shop) as writer:
        writer.execute("insert into b values (1)")
        with pytest.raises(HeadwaterError, match="pg_terminate_backend") as caught:
            source.prepare(None)
        assert caught.value.retriable
        writer.commit()
    source.prepare(None)
    source.remove()
    source.close()
