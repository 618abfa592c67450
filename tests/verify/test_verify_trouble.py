"""Comparisons in trouble: sides that hold what is no row, take their time, or are not there at all."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.model.errors import InvalidInput, NotFound, Unsupported
from headwater.sinks import postgres
from headwater.sinks.sink import Shape
from headwater.verify import comparison as compare_module
from headwater.verify.comparison import compare, open_pair
from headwater.verify.digest import LocalDigests
from headwater.verify.repair import repair
from headwater.verify.side_url import open_side
from tests.rigs.app.sink_targets import SHAPE, Target, batch, write

Make = Callable[[str], Target]


def row(n: int) -> dict[str, object]:
    return {"name": f"u{n}", "n": n, "amount": n / 4}


def table_of(path: Path, *rows: tuple[object, ...]) -> str:
    """A table of somebody's own; its URL."""
    with closing(sqlite3.connect(path, isolation_level=None)) as shop:
        shop.execute("create table users (id text primary key, name text, n integer, amount real)")
        shop.executemany("insert into users values (?, ?, ?, ?)", rows)
    return f"sqlite:///{path}?table=users"


@pytest.mark.slow
def test_however_much_differs_it_is_counted_and_put_right_in_pieces(
    make_target: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only so many rows are in memory at a time, and only so many keys are told."""
    monkeypatch.setattr(compare_module, "ROWS_AT_ONCE", 100)
    monkeypatch.setattr(compare_module, "DIFFERENCES_MAX", 25)
    at_once: list[int] = []

    def of_chunks(digests: LocalDigests, chunks: Sequence[str]) -> pa.Table:
        found = whole(digests, chunks)
        at_once.append(found.num_rows)
        return found

    whole = LocalDigests.of_chunks
    monkeypatch.setattr(LocalDigests, "of_chunks", of_chunks)
    target = make_target("sqlite")
    sink = target.sink()
    sink.open(SHAPE)
    write(sink, 0, batch([(f"k{n}", row(n)) for n in range(200, 800)]))
    source = table_of(tmp_path / "shop.db", *((f"k{n}", f"u{n}", n + 1, n / 4) for n in range(600)))
    with closing(open_pair(source, target.url, key=["id"])) as pair:
        report = compare(pair, settle_s=0)
        assert (report.differing, len(report.differences), report.duplicates) == (800, 25, 0)
        assert len(at_once) > 10
        assert max(at_once) <= 100
        repaired = repair(pair, report, settle_s=0)
    assert (repaired.written, repaired.removed, repaired.refused) == (600, 200, ())
    assert repaired.after.is_equal


def test_a_time_that_is_none_is_told(tmp_path: Path) -> None:
    """Any text may stand in a column of SQLite."""
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as shop:
        shop.execute("create table events (id text primary key, at timestamp)")
        shop.execute("insert into events values ('a', '2026-01-01 00:00:00'), ('b', 'soon')")
    shape = Shape("events", pa.schema([("id", pa.string()), ("at", pa.timestamp("us", "UTC"))]), ("id",))
    with (
        open_side(f"sqlite:///{tmp_path}/shop.db?table=events", shape=shape) as side,
        side.look() as look,
        pytest.raises(InvalidInput, match="Column at contains"),
    ):
        list(look.chunks())


@pytest.mark.parametrize("url", ["delta:///{}/none", "parquet:///{}/none"])
def test_a_table_that_is_not_there_is_told(tmp_path: Path, url: str) -> None:
    """In our words."""
    with pytest.raises(NotFound):
        open_pair(url.format(tmp_path), table_of(tmp_path / "shop.db"), key=["id"])


def test_a_folder_with_something_else_in_it_is_told(tmp_path: Path) -> None:
    """In our words."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.parquet").write_text("hello")
    with pytest.raises(InvalidInput, match="Parquet"):
        open_pair(str(tmp_path / "files"), table_of(tmp_path / "shop.db"), key=["id"])


@pytest.mark.service("postgres")
def test_a_snapshot_waits_for_the_other_side(make_target: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes to read: only a writer that was stopped inside a batch is ended by the server."""
    monkeypatch.setattr(postgres, "IDLE_S", 1)
    target = make_target("postgres")
    sink = target.sink()
    sink.open(SHAPE)
    write(sink, 0, batch([("a", row(1))]))
    with open_side(target.url, shape=SHAPE) as side, side.look() as look:
        time.sleep(2.5)
        assert pa.concat_tables(look.chunks()).num_rows == 1


@pytest.mark.service("redis")
@pytest.mark.parametrize("text", ["", "{no", '{"n": "many", "id": "x"}', '{"name": "nobody"}'])
def test_what_is_no_row_of_redis_is_named_on_either_side(make_target: Make, tmp_path: Path, text: str) -> None:
    """Were it left out of the source, a repair would remove the row that the target has."""
    import redis

    target = make_target("redis-json")
    sink = target.sink()
    sink.open(SHAPE)
    write(sink, 0, batch([("a", row(1))]))
    with redis.Redis.from_url(target.url.partition("?")[0]) as client:
        client.set("users:x", text)
    database = table_of(tmp_path / "shop.db", ("a", "u1", 1, 0.25))
    for source, other in ((target.url, database), (database, target.url)):
        with closing(open_pair(source, other)) as pair:
            report = compare(pair, settle_s=0.2)
            assert (report.unreadable, report.is_equal) == (("users:x",), False)
            with pytest.raises(Unsupported, match="is not a row"):
                repair(pair, report)


@pytest.mark.service("opensearch")
def test_what_is_no_row_of_opensearch_is_named(make_target: Make, tmp_path: Path) -> None:
    """Somebody else's documents stop no comparison."""
    target = make_target("opensearch")
    sink = target.sink()
    sink.open(SHAPE)
    write(sink, 0, batch([("a", row(1))]))
    for name, document in {"keyless": {"n": 1}, "typed": {"id": "typed", "n": "many"}}.items():
        sink.client.ask("PUT", f"/users/_doc/{name}?refresh=true", json.loads(json.dumps(document)))
    with closing(open_pair(table_of(tmp_path / "shop.db", ("a", "u1", 1, 0.25)), target.url)) as pair:
        report = compare(pair, settle_s=0.2)
    assert (report.unreadable, report.differing, report.is_equal) == (("keyless", "typed"), 0, False)
