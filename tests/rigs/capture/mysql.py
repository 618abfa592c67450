"""A database of its own for each test of the capture of MariaDB, and a log that captures it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pymysql

from headwater.log.log import Log
from headwater.testing.servers.mariadb import MariaDbServer
from tests.rigs.capture.server import ServerRig, follow
from tests.rigs.capture.server import rigged as any_rigged

__all__ = ["Rig", "connect", "follow", "rigged"]


def connect(server: MariaDbServer, database: str = "mysql", *, user: str = "root", password: str = "") -> Any:
    """A connection in which every statement is a transaction of its own."""
    return pymysql.connect(
        host="127.0.0.1",
        port=server.port,
        user=user,
        password=password,
        database=database,
        autocommit=True,
        charset="utf8mb4",
        init_command="SET time_zone = '+00:00'",
    )


class Rig(ServerRig):
    """One database of MariaDB."""

    def __init__(self, server: MariaDbServer, log: Log) -> None:
        super().__init__(log)
        self.server = server
        admin = connect(server)
        admin.query(f"create database {self.name} character set utf8mb4")
        admin.close()
        self.url = server.url.removesuffix("/mysql") + f"/{self.name}"
        self._connection = connect(server, self.name)

    def run(self, *statements: str) -> list[Any]:
        with self._connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    def connect_again(self) -> None:
        """After the server was killed."""
        self._connection = connect(self.server, self.name)

    def together(self, *statements: str) -> None:
        """Statements in one transaction."""
        self.run("begin", *statements, "commit")

    def end_position(self) -> str:
        ((file, offset, *_),) = self.run("show master status")
        return f"{int(file.rpartition('.')[2]):08x}:{offset:012x}"

    def end(self) -> None:
        self.run(f"drop database {self.name}")
        self._connection.close()


@contextmanager
def rigged(server: MariaDbServer, folder: Path) -> Iterator[Rig]:
    """A rig that leaves nothing behind."""
    with any_rigged(lambda log: Rig(server, log), folder) as rig:
        yield rig
