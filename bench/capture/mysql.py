"""MariaDB for the figures of captures (see `capture.rig`); a plain read of the same table by PyMySQL is the backfill's peer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pymysql
import pymysql.cursors

from bench.capture import debezium
from bench.capture.rig import Kind, Rig
from bench.harness import Target
from headwater.testing.servers.mariadb import MariaDbServer

SETTINGS = {"innodb-buffer-pool-size": "512M", "innodb-log-file-size": "512M"}
TABLE = "create table shop.t (id bigint primary key, k int, name text, amount double, ts datetime(6), note text)"
VALUES = "seq, seq mod 100, concat('name ', seq), seq * 1.5, now(6), repeat('x', 40)"


class MariaDbRig(Rig):
    """A MariaDB server with one table."""

    table = "shop.t"

    @property
    def url(self) -> str:
        return str(self.server.url).removesuffix("/mysql") + "/shop"

    def connect(self, **more: Any) -> Any:
        return pymysql.connect(host="127.0.0.1", port=self.server.port, user="root", autocommit=True, **more)

    def run(self, statement: str) -> None:
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(statement)

    def insert(self, rows: int, *, each: bool = False) -> None:
        step = 1 if each else 1000
        with self.connect() as connection, connection.cursor() as cursor:
            for first in range(1, rows + 1, step):
                cursor.execute(f"insert into shop.t select {VALUES} from mysql.seq_{first}_to_{first + step - 1}")

    def read(self) -> int:
        with self.connect(cursorclass=pymysql.cursors.SSCursor) as connection, connection.cursor() as cursor:
            cursor.execute("select * from shop.t")
            return sum(1 for _ in cursor)


@contextmanager
def served() -> Iterator[MariaDbRig]:
    """A server with an empty table."""
    with MariaDbServer(settings=SETTINGS) as server:
        rig = MariaDbRig(server)
        rig.run("create database shop")
        rig.run(TABLE)
        yield rig


BENCHES = Kind(
    "mariadb", served, "PyMySQL, into memory", debezium.PEER_OF_MARIADB, {"bulk": Target(">=", 1.5)}
).benches()
