"""PostgreSQL for the figures of captures (see `capture.rig`); the raw ADBC read of the same table is the backfill's peer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import adbc_driver_postgresql.dbapi as adbc
import psycopg

from bench.capture import debezium
from bench.capture.rig import Kind, Rig
from bench.harness import Target
from headwater.testing.servers.postgres import PostgresServer

SETTINGS = {"wal_level": "logical", "max_wal_size": "8GB", "shared_buffers": "512MB"}
TABLE = "create table t (id bigint primary key, k int, name text, amount double precision, ts timestamptz, note text)"
COLUMNS = "i, i % 100, 'name ' || i, i * 1.5, now(), repeat('x', 40)"


class PostgresRig(Rig):
    """A PostgreSQL server with one table."""

    table = "t"

    @property
    def url(self) -> str:
        return str(self.server.url)

    def connect(self) -> Any:
        return psycopg.connect(self.url, autocommit=True)

    def run(self, statement: str) -> None:
        with self.connect() as connection:
            connection.execute("set synchronous_commit = off")
            connection.execute(statement)

    def insert(self, rows: int, *, each: bool = False) -> None:
        step = 1 if each else 1000
        source = f"insert into t select {COLUMNS} from generate_series(n, n + {step - 1}) i"
        self.run(f"do $$ begin for n in 1..{rows} by {step} loop {source}; commit; end loop; end $$")

    def read(self) -> int:
        with adbc.connect(self.url) as connection, connection.cursor() as cursor:
            cursor.execute("select * from t")
            return int(cursor.fetch_arrow_table().num_rows)


@contextmanager
def served() -> Iterator[PostgresRig]:
    """A server with an empty table."""
    with PostgresServer(settings=SETTINGS) as server:
        rig = PostgresRig(server)
        rig.run(TABLE)
        yield rig


BENCHES = Kind(
    "postgres",
    served,
    "ADBC, into memory",
    debezium.PEER,
    {
        "bulk": Target(">=", 8),
        "bulk_cpu": Target(">=", 10),
        "small": Target(">=", 5),
        "latency_p50": Target("<=", 1 / 3),
        "latency_tuned_p50": Target("<=", 1 / 3),
        "latency_handed_p50": Target("<=", 1 / 3),
    },
).benches()
