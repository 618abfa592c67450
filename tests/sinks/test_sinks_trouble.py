"""Sinks in trouble: what fails in the middle leaves nothing half done, is told for what it is, and can be tried again."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest

from headwater.model.errors import HeadwaterError, InvalidInput, Unreachable, Unsupported
from headwater.sinks import sqlite
from headwater.sinks.delta import DeltaSink
from headwater.sinks.ledger import NO_ENTRY
from headwater.sinks.newest_rows import Pieces, with_places
from headwater.sinks.search import SearchSink
from headwater.sinks.sink import Shape, open_sink, write_batch
from headwater.verify.side_url import open_side, side_of
from tests.rigs.app.sink_targets import EMBEDDED, SERVED, SHAPE, Target, batch, folded, marker, write
from tests.rigs.children import in_child

Make = Callable[[str], Target]

KINDS = [
    *EMBEDDED,
    *(pytest.param(kind, marks=pytest.mark.service(kind.partition("-")[0])) for kind in SERVED),
]
HOSTILE = ('a"b', "it's", "a.b", "select", "%s", "$1", "semi; drop", "back\\slash", "ünï✓", "a`b", "t", "s", "?")


def user(n: int, **more: Any) -> dict[str, Any]:
    return {"name": f"u{n}", "n": n, "amount": n / 4, **more}


def test_a_full_disk_is_told_as_such_and_the_batch_can_be_tried_again(tmp_path: Path) -> None:
    """SQLite ends the transaction by itself then; that its savepoint is gone is not what is told."""
    sink = open_sink(f"sqlite:///{tmp_path}/shop.db?table=users", stage="s")
    sink.open(SHAPE)
    connection = sink._connection()
    ((pages,),) = connection.execute("pragma page_count").fetchall()
    connection.execute(f"pragma max_page_count = {pages + 20}")
    rows = [(f"k{n}", user(n, name="x" * 2_000)) for n in range(500)]
    with pytest.raises(Unreachable, match="full"):
        write(sink, 0, batch(rows))
    assert sink.last is None
    connection.execute("pragma max_page_count = 100000")
    write(sink, 0, batch(rows))
    assert sink.last is not None
    sink.close()


def test_a_trigger_that_ends_the_transaction_is_told_in_its_own_words(tmp_path: Path) -> None:
    """Nothing of the batch is left, so no row of it is a dead letter."""
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as shop:
        shop.execute("create table users (id text primary key, name text, n integer, amount real)")
        shop.execute(
            "create trigger strict before insert on users when new.n = 5 begin select raise(rollback, 'no five'); end"
        )
    sink = open_sink(f"sqlite:///{path}?table=users", stage="s")
    sink.open(SHAPE)
    with pytest.raises(InvalidInput, match="no five"):
        write(sink, 0, batch([("a", user(1)), ("b", user(5))]))
    write(sink, 0, batch([("a", user(1))]))
    sink.close()


def test_a_commit_that_was_kept_out_leaves_nothing_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of a file without a write-ahead log keeps commits out; when it is gone the same call works."""
    monkeypatch.setattr(sqlite, "BUSY_S", 0.05)
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("create table notes (n integer)")
        reader.execute("insert into notes values (1)")
        sink = open_sink(f"sqlite:///{path}?table=users", stage="s")
        reader.execute("begin")
        reader.execute("select * from notes").fetchall()
        with pytest.raises(Unreachable, match="locked"):
            sink.open(SHAPE)
        reader.execute("rollback")
        sink.open(SHAPE)
    write(sink, 0, batch([("a", user(1))]))
    sink.close()


def test_what_is_advised_for_a_table_without_a_unique_key_helps(tmp_path: Path) -> None:
    """The statement runs as it is written."""
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as shop:
        shop.execute("create table users (id text, name text, n integer, amount real)")
        sink = open_sink(f"sqlite:///{path}?table=users", stage="s")
        with pytest.raises(InvalidInput, match="no unique index") as refused:
            sink.open(SHAPE)
        shop.execute(refused.value.advice.removeprefix("Run: ").removesuffix("."))
    sink.open(SHAPE)
    sink.close()


@pytest.mark.parametrize("table", ["arriving", "headwater_rows", *HOSTILE])
@pytest.mark.parametrize("kind", ["sqlite", "duckdb", pytest.param("postgres", marks=pytest.mark.service("postgres"))])
def test_a_table_may_have_any_name(make_target: Make, kind: str, table: str) -> None:
    """Also one that the sink itself might have used, and one with quotes in it."""
    if kind == "postgres" and "." in table:
        table = f"public.{table}"  # what stands before the first dot is a schema there
    url = make_target(kind).url.partition("?")[0] + f"?table={quote(table)}"
    with closing(open_sink(url, stage="s")) as sink:
        sink.open(SHAPE)
        write(sink, 0, batch([("a", user(1)), ("b", user(2))]))
        write(sink, 1, batch([("a", None), ("b", user(3))], first=2))
    with open_side(url, shape=SHAPE) as side, side.look() as look:
        assert pa.concat_tables(look.chunks()).to_pylist() == [{"id": "b", **user(3)}]


@pytest.mark.parametrize("kind", KINDS)
def test_columns_may_have_any_name(make_target: Make, kind: str) -> None:
    """The key's too."""
    url = make_target(kind).url
    shape = Shape("users", pa.schema([(name, pa.string()) for name in HOSTILE]), HOSTILE[:2])
    rows = pa.table({name: [f"{name} 1", f"{name} 2"] for name in HOSTILE}, schema=shape.schema)
    with closing(open_sink(url, stage="s")) as sink:
        sink.open(shape)
        pieces = Pieces([with_places(rows, deleted=False)], shape.key)
        write_batch(sink, marker(0, 2), pieces, tell=print)
        gone = Pieces([with_places(rows.slice(0, 1), deleted=True)], shape.key)
        write_batch(sink, marker(1, 3), gone, tell=print)
    with open_side(url, shape=shape) as side, side.look() as look:
        assert pa.concat_tables(look.chunks()).to_pylist() == rows.slice(1).to_pylist()


@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_a_file_that_is_not_there_knows_of_no_batch_and_is_not_made(tmp_path: Path, kind: str) -> None:
    """Not by a look, and not by accepting that everything is written again; a comparison says that it is missing."""
    url = f"{kind}:///{tmp_path}/none?table=users"
    sink = open_sink(url, stage="s")
    assert (sink.entry(), sink.accept_new_checkpoint()) == (NO_ENTRY, None)
    sink.close()
    with open_side(url, shape=SHAPE) as side, pytest.raises(Unreachable, match="does not exist"), side.look():
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.service("postgres")
def test_a_connection_that_is_lost_inside_a_batch_enters_no_marker(
    make_target: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it is lost: a marker that another connection entered would count rows that are nowhere."""
    import psycopg

    target = make_target("postgres")
    sink = target.sink()
    sink.open(SHAPE)
    plain, execute = target.url.partition("?")[0], psycopg.Connection.execute

    def lose(connection: Any, statement: Any, *more: Any, **options: Any) -> Any:
        if "release" in str(statement) and connection is sink._open:
            with psycopg.connect(plain, autocommit=True) as other:
                execute(other, "select pg_terminate_backend(%s, 5000)", (connection.info.backend_pid,))
        return execute(connection, statement, *more, **options)

    with monkeypatch.context() as patched:
        patched.setattr(psycopg.Connection, "execute", lose)
        with pytest.raises(Unreachable):
            write(sink, 0, batch([("a", user(1))]))
    assert sink.last is None
    write(sink, 0, batch([("a", user(1))]))
    assert target.rows() == folded([("a", user(1))])


@pytest.mark.service("postgres")
def test_columns_that_an_index_carries_along_are_no_part_of_the_key(make_target: Make) -> None:
    """A key with INCLUDE is unique by its own columns; one over an expression is not unique by its columns."""
    import psycopg

    target = make_target("postgres")
    with psycopg.connect(target.url.partition("?")[0], autocommit=True) as connection:
        columns = "id text, name text, n bigint, amount double precision"
        connection.execute(f"create table users ({columns}, primary key (id) include (name))")
        connection.execute(f"create table others ({columns})")
        connection.execute("create unique index on others (id, lower(name))")
    sink = target.sink()
    sink.open(SHAPE)
    write(sink, 0, batch([("a", user(1))]))
    write(sink, 1, batch([("a", user(2))], first=1))
    assert target.rows() == folded([("a", user(2))])
    with closing(side_of(target.url)) as side:
        shape = side.shape()
    assert shape is not None and shape.key == ("id",)
    with (
        closing(open_sink(target.url.replace("=users", "=others"), stage="s")) as others,
        pytest.raises(InvalidInput, match="no unique index"),
    ):
        others.open(SHAPE)


def test_an_index_is_free_again_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is given back at once, not when somebody closes the sink."""
    url = f"tantivy:///{tmp_path}/index"
    failing, sink = open_sink(url, stage="s"), open_sink(url, stage="s")

    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(SearchSink, "_enter", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            failing.open(SHAPE)
    sink.open(SHAPE)
    write(sink, 0, batch([("a", user(1))]))
    sink.close()


def test_a_full_disk_under_an_index_is_told_as_such(tmp_path: Path) -> None:
    """In a process that may write no large files. When there is room the same batch goes in."""

    def fill() -> None:
        sink = open_sink(f"tantivy:///{tmp_path}/index", stage="s")
        sink.open(SHAPE)
        rows = batch([(f"k{n}", user(n, name=f"{n**9}")) for n in range(5_000)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))
        with pytest.raises(Unreachable, match=r"too large|io::Error"):
            write(sink, 0, rows)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert sink.last is None
        write(sink, 0, rows)
        sink.close()

    in_child(fill)


def test_a_file_is_no_index(tmp_path: Path) -> None:
    """In our words."""
    (tmp_path / "index").write_text("hello")
    with pytest.raises(InvalidInput, match="exists"):
        open_sink(f"tantivy:///{tmp_path}/index", stage="s").open(SHAPE)


def test_a_batch_for_delta_does_not_read_the_whole_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That grows with every batch; what the stage wrote last is among the last commits, or it is looked for everywhere."""
    sink = open_sink(f"delta:///{tmp_path}/users", stage="s")
    other = open_sink(f"delta:///{tmp_path}/users", stage="other")
    sink.open(SHAPE)
    other.open(SHAPE)
    asked: list[int | None] = []
    entries_in = DeltaSink.entries_in

    def counted(self: DeltaSink, table: Any, *, commits: int | None = None) -> Any:
        asked.append(commits)
        return entries_in(self, table, commits=commits)

    monkeypatch.setattr(DeltaSink, "entries_in", counted)
    for epoch in range(3):
        write(sink, epoch, batch([(f"k{epoch}", user(epoch))], first=epoch))
    assert asked and None not in asked
    for epoch in range(18):
        write(other, epoch, batch([("o", user(epoch))], first=epoch))
    assert sink.last is not None and sink.last.epoch == 2
    assert None in asked


def test_wrong_addresses_are_told(tmp_path: Path) -> None:
    """One sentence each, without the password."""
    for url, error in [
        ("gopher://x/y", Unsupported),
        ("sqlite://", InvalidInput),
        ("sqlite:///x.db?tabel=users", InvalidInput),
        ("redis://127.0.0.1:1/0?as=list", InvalidInput),
        (f"sqlite:///{tmp_path}/no/such/folder.db", HeadwaterError),
        ("redis://:secret@127.0.0.1:1/0", Unreachable),
        ("postgresql://me:secret@127.0.0.1:1/x?table=users", Unreachable),
        ("postgresql://me@127.0.0.1:1/x?table=users&password_env=HEADWATER_NO_SUCH", InvalidInput),
        ("postgresql://me@127.0.0.1:1/x?table=users&password_file=/nowhere/word", InvalidInput),
    ]:
        with pytest.raises(error) as refused:
            open_sink(url, stage="s").open(SHAPE)
        assert "secret" not in str(refused.value)
