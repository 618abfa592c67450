"""A storm over a captured PostgreSQL; as a program it is the capture: `python capture_postgres_storm.py URL FOLDER`."""

from __future__ import annotations

import sys
from typing import Any

import psycopg

from headwater.capture.postgres import backfill as pg_backfill
from headwater.capture.postgres import bulk as pg_bulk
from headwater.capture.postgres import source as postgres
from headwater.capture.postgres import stream as pg_stream
from headwater.testing.servers.postgres import PostgresServer
from tests.rigs.capture.server_storm import Storm

SETUP = """
create table users (id bigint primary key, name text, big text, price numeric(12, 2), at timestamptz, tags text[],
                    doubled bigint generated always as (id * 2) stored);
alter table users alter big set storage external;
create table orders (shop int, number int, total double precision, note text, primary key (shop, number));
create table logs (code text primary key, body jsonb, big text);
alter table logs alter big set storage external;
alter table logs replica identity full;
create table notes (id int primary key, n int, body text);
alter table notes alter body set storage external;
create table ledger (client int, number int, changes int, primary key (client, number));
"""


class PostgresStorm(Storm):
    """PostgreSQL, read by the stream and in bulk."""

    script = __file__
    ddl = (
        "alter table users add column extra int default 7",
        "alter table orders rename column note to remark",
        "alter table users alter column price type numeric(14, 2)",
        "alter table logs add column seen timestamptz",
        "alter table users drop column tags",
    )
    insert = "insert into {table} ({columns}) values ({values}) on conflict do nothing"
    move = (
        "update users set id = target from (select %s::bigint target) new "
        "where id = %s and not exists (select from users where id = target)"
    )
    errors = (psycopg.Error,)

    def server(self) -> PostgresServer:
        return PostgresServer(settings={"wal_level": "logical", "max_connections": "60"})

    def url(self, server: Any) -> str:
        return str(server.url)

    def set_up(self, url: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(SETUP)
            connection.execute("insert into users (id, name) select i, 'before' from generate_series(0, 9999, 2) i")
            connection.execute("insert into orders (shop, number) select 9, i from generate_series(1, 3000) i")

    def connect(self, url: str) -> Any:
        return psycopg.connect(url)

    def is_lost(self, connection: Any, error: Exception) -> bool:
        return connection.closed or isinstance(error, psycopg.OperationalError)

    def end_position(self, connection: Any) -> str:
        statement = "select lpad(to_hex((pg_current_wal_lsn() - '0/0')::bigint), 16, '0')"
        return str(connection.execute(statement).fetchone()[0])

    def use_small_parts(self) -> None:
        pg_backfill.PAGES_FIRST = pg_backfill.PAGES_MAX = 16  # many chunks of a small table
        pg_stream.BLOCK_BYTES_MAX = 1 << 15  # many blocks, so that large values are not all found where they were sent
        pg_bulk.PEEK_CHANGES = pg_bulk.PIECE_CHANGES_FIRST = 400
        pg_bulk.MOVE_S = 0.1
        postgres.BEHIND_BYTES = 1 << 18  # so that it reads in bulk when it starts again, too


if __name__ == "__main__":
    PostgresStorm().capture(*sys.argv[1:])
