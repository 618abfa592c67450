"""Targets of sinks for tests: where each is, and what it holds as its own plain client says, which shares no code with the sink."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from headwater.model.marker import Marker
from headwater.model.schema import to_arrow_schema
from headwater.sinks.newest_rows import Pieces
from headwater.sinks.sink import Dead, Shape, Sink, Written, open_sink, write_batch
from headwater.testing.servers import ServerError
from headwater.testing.servers.debian import RedisServer
from headwater.testing.servers.opensearch import OpenSearchServer
from headwater.testing.servers.postgres import PostgresServer
from tests.rigs.services import unavailable

SCHEMA = to_arrow_schema("id STRING NOT NULL, name STRING, n BIGINT, amount DOUBLE")
SHAPE = Shape("users", SCHEMA, ("id",))
EMBEDDED = ("sqlite", "duckdb", "tantivy", "delta")
SERVED = ("postgres", "redis-hash", "redis-json", "opensearch")

Row = dict[str, Any]


class Target:
    """A target: its URL, and its rows by a plain client."""

    def __init__(self, kind: str, url: str, rows: Callable[[], dict[str, Row]]) -> None:
        self.kind = kind
        self.url = url
        self.rows = rows
        self._made: list[Sink] = []

    def sink(self, stage: str = "app.users.sink") -> Sink:
        self._made.append(open_sink(self.url, stage=stage))
        return self._made[-1]

    def close(self) -> None:
        for sink in self._made:
            sink.close()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A real Redis."""
    server = RedisServer()
    try:
        server.start()
    except ServerError as error:
        unavailable("redis", error)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def opensearch_server() -> Iterator[OpenSearchServer]:
    """A real OpenSearch."""
    server = OpenSearchServer()
    try:
        server.start()
    except ServerError as error:
        unavailable("opensearch", error)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def make_target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Target]]:
    """Gives an empty target of a kind; its sinks are closed after the test."""
    made: list[Target] = []

    def make(kind: str) -> Target:
        made.append(_make(kind))
        return made[-1]

    def _make(kind: str) -> Target:
        if kind in EMBEDDED:
            return embedded(kind, tmp_path)
        if kind == "postgres":
            return in_postgres(request.getfixturevalue("postgres"))
        if kind == "opensearch":
            return in_opensearch(request.getfixturevalue("opensearch_server"))
        return in_redis(request.getfixturevalue("redis_server"), kind.removeprefix("redis-"))

    yield make
    for target in made:
        target.close()


def embedded(kind: str, folder: Path) -> Target:
    readers = {"sqlite": sqlite_rows, "duckdb": duckdb_rows, "tantivy": tantivy_rows, "delta": delta_rows}
    ending = {"sqlite": "?table=users", "duckdb": "?table=users"}.get(kind, "")
    path = folder / f"target.{kind}"
    return Target(kind, f"{kind}:///{path}{ending}", lambda: readers[kind](path))


def sqlite_rows(path: Path) -> dict[str, Row]:
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    try:
        return {row["id"]: dict(row) for row in connection.execute("select * from users")}
    finally:
        connection.close()


def duckdb_rows(path: Path) -> dict[str, Row]:
    with duckdb.connect(str(path), read_only=True) as connection:
        return _by_id(connection.sql("select * from users").to_arrow_table())


def tantivy_rows(path: Path) -> dict[str, Row]:
    import tantivy

    index = tantivy.Index.open(str(path))
    searcher = index.searcher()
    found = [
        bytes(searcher.doc(hit)["_row"][0]) for _, hit in searcher.search(tantivy.Query.all_query(), 1_000_000).hits
    ]
    rows = [row for row in map(json.loads, found) if "id" in row]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def delta_rows(path: Path) -> dict[str, Row]:
    import deltalake

    return _by_id(deltalake.DeltaTable(str(path)).to_pyarrow_table())


def in_postgres(server: PostgresServer) -> Target:
    import psycopg

    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("drop table if exists users")
        connection.execute("drop table if exists headwater_ledger")

    def rows() -> dict[str, Row]:
        with psycopg.connect(server.url, row_factory=psycopg.rows.dict_row) as connection:
            return {row["id"]: row for row in connection.execute("select * from users").fetchall()}

    return Target("postgres", f"{server.url}?table=users", rows)


def in_redis(server: RedisServer, style: str) -> Target:
    import redis

    client = redis.Redis("127.0.0.1", server.port)
    client.flushall()
    client.close()

    def rows() -> dict[str, Row]:
        with redis.Redis("127.0.0.1", server.port) as client:
            found = {}
            for name in client.scan_iter("users:*", count=1000):
                if style == "json":
                    row = json.loads(client.get(name))
                else:
                    fields = {field.decode(): value.decode() for field, value in client.hgetall(name).items()}
                    row = {
                        "id": fields["id"],
                        "name": fields.get("name"),
                        "n": None if "n" not in fields else int(fields["n"]),
                        "amount": None if "amount" not in fields else float(fields["amount"]),
                    }
                assert name.decode() == f"users:{row['id']}"
                found[row["id"]] = row
            return found

    return Target(f"redis-{style}", f"redis://127.0.0.1:{server.port}/0?prefix=users:&as={style}", rows)


def in_opensearch(server: OpenSearchServer) -> Target:
    def ask(method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            f"{server.url}/{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)

    def rows() -> dict[str, Row]:
        ask("POST", "users/_refresh")
        hits = ask("POST", "users/_search", {"size": 10_000})["hits"]["hits"]
        assert all(hit["_id"] in (hit["_source"]["id"], _sha256(hit["_source"]["id"])) for hit in hits)
        return {hit["_source"]["id"]: hit["_source"] for hit in hits}

    ask("DELETE", "users,headwater-ledger?ignore_unavailable=true")
    return Target("opensearch", f"opensearch://127.0.0.1:{server.port}/users", rows)


def _sha256(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _by_id(table: pa.Table) -> dict[str, Row]:
    assert table.num_rows == len(set(table.column("id").to_pylist()))
    return {row["id"]: row for row in table.to_pylist()}


# Batches


def batch(changes: list[tuple[str, Row | None]], *, first: int = 0, schema: pa.Schema = SCHEMA) -> pa.Table:
    """Events as a stage gets them: (key, row), a deletion without a row; their offsets count from `first`."""
    columns = {
        field.name: pa.array(
            [key if field.name == "id" else None if row is None else row.get(field.name) for key, row in changes],
            field.type,
        )
        for field in schema
    }
    columns["_partition"] = pa.array([0] * len(changes), pa.int32())
    columns["_offset"] = pa.array(range(first, first + len(changes)), pa.int64())
    columns["_deleted"] = pa.array([row is None for _, row in changes])
    return pa.table(columns)


def marker(epoch: int, end: int = 0, *, query: str = "a query") -> Marker:
    return Marker(query=query, epoch=epoch, ends=[{"users": {"0": end}}])


def write(
    sink: Sink, epoch: int, table: pa.Table, *, end: int | None = None, dead: list[Dead] | None = None
) -> Written:
    """One batch; its dead letters are gathered."""
    told = [] if dead is None else dead
    at = marker(epoch, table.num_rows if end is None else end)
    return write_batch(sink, at, Pieces([table], ("id",)), tell=told.extend)


def folded(*batches: list[tuple[str, Row | None]]) -> dict[str, Row]:
    """What batches come to, one change after the other."""
    rows: dict[str, Row] = {}
    for changes in batches:
        for key, row in changes:
            rows.pop(key, None)
            if row is not None:
                rows[key] = {"id": key, "name": None, "n": None, "amount": None, **row}
    return rows
