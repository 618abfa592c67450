"""A storm over a captured MariaDB; as a program it is the capture: `python capture_mysql_storm.py URL FOLDER`."""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import urlsplit

import pymysql

from headwater.capture.mysql import backfill as mysql_backfill
from headwater.capture.mysql import stream as mysql_stream
from headwater.testing.servers.mariadb import MariaDbServer
from tests.rigs.capture.server_storm import Storm

SETUP = """
create database shop character set utf8mb4;
create table shop.users (id bigint primary key, name text, big mediumtext, price decimal(12, 2), at datetime(6),
                         tags set('a', 'b'), doubled bigint as (id * 2) stored, tripled bigint as (id * 3) virtual);
create table shop.orders (shop int, number int, total double, note text, primary key (shop, number));
create table shop.logs (code varchar(20) primary key, body json, big mediumtext);
create table shop.notes (id int primary key, n int, body mediumtext);
create table shop.ledger (client int, number int, changes int, primary key (client, number));
insert into shop.users (id, name) select seq, 'before' from seq_0_to_9999_step_2;
insert into shop.orders (shop, number) select 9, seq from seq_1_to_3000
"""


class Connection:
    """A connection as storms know it."""

    def __init__(self, url: str, database: str) -> None:
        self._bare = pymysql.connect(
            host="127.0.0.1",
            port=urlsplit(url).port or 0,
            user="root",
            database=database,
            charset="utf8mb4",
            init_command="SET time_zone = '+00:00', innodb_lock_wait_timeout = 5",
        )
        self.commit, self.rollback, self.close = self._bare.commit, self._bare.rollback, self._end

    @property
    def closed(self) -> bool:
        return not self._bare.open

    def execute(self, statement: str, parameters: Any = None) -> Any:
        cursor = self._bare.cursor()
        cursor.execute(statement, parameters)
        return cursor

    def _end(self) -> None:
        if self._bare.open:
            self._bare.close()


class MariaDbStorm(Storm):
    """MariaDB by its binlog, whose files are small here, so that many begin."""

    script = __file__
    ddl = (
        "alter table users add column extra int default 7",
        "alter table orders change note remark text",
        "alter table users modify price decimal(14, 2)",
        "alter table logs add column seen datetime",
        "alter table users drop column tags",
    )
    insert = "insert ignore into {table} ({columns}) values ({values})"
    move = "update ignore users set id = %s where id = %s"
    errors = (pymysql.Error,)
    has_old_values = True

    def server(self) -> MariaDbServer:
        return MariaDbServer(settings={"max-binlog-size": "1M"})

    def url(self, server: Any) -> str:
        return str(server.url).removesuffix("/mysql") + "/shop"

    def set_up(self, url: str) -> None:
        connection = Connection(url, "mysql")
        for statement in SETUP.split(";"):
            connection.execute(statement)
        connection.commit()
        connection.close()

    def connect(self, url: str) -> Any:
        return Connection(url, "shop")

    def is_lost(self, connection: Any, error: Exception) -> bool:
        return connection.closed or error.args[:1] in [(0,), (2006,), (2013,)]

    def end_position(self, connection: Any) -> str:
        file, offset = connection.execute("show master status").fetchone()[:2]
        return f"{int(file.rpartition('.')[2]):08x}:{offset:012x}"

    def use_small_parts(self) -> None:
        mysql_backfill.ROWS_MAX = 300  # many chunks of a small table
        mysql_stream.BLOCK_BYTES_MAX = 1 << 13  # so that transactions lie across blocks


if __name__ == "__main__":
    MariaDbStorm().capture(*sys.argv[1:])
