"""A database of its own for each test of the capture of PostgreSQL, and a log that captures it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from headwater.log.log import Log
from headwater.testing.servers.postgres import PostgresServer
from tests.rigs.capture.server import ServerRig, follow
from tests.rigs.capture.server import rigged as any_rigged

__all__ = ["Rig", "follow", "rigged"]


class Rig(ServerRig):
    """One database of PostgreSQL."""

    def __init__(self, server: PostgresServer, log: Log) -> None:
        super().__init__(log)
        self.server = server
        self._admin = psycopg.connect(server.url, autocommit=True)
        self._admin.execute(f"create database {self.name}")
        self.url = server.url.removesuffix("/postgres") + f"/{self.name}"
        self._connection = psycopg.connect(self.url, autocommit=True)

    def run(self, *statements: str) -> list[Any]:
        for statement in statements:
            cursor = self._connection.execute(statement)
        return cursor.fetchall() if cursor.description else []

    def together(self, *statements: str) -> None:
        """Statements in one transaction."""
        with self._connection.transaction():
            self.run(*statements)

    def end_position(self) -> str:
        ((position,),) = self.run(
            "select lpad(to_hex((pg_logical_emit_message(true, 'headwater.test', '') - '0/0')::bigint), 16, '0')"
        )
        return str(position)

    def end(self) -> None:
        self._connection.close()
        for slot, pid in self._admin.execute(
            "select slot_name, active_pid from pg_replication_slots where database = %s", (self.name,)
        ):
            if pid:
                self._admin.execute("select pg_terminate_backend(%s, 5000)", (pid,))
            self._admin.execute("select pg_drop_replication_slot(%s)", (slot,))
        self._admin.execute(f"drop database {self.name} (force)")
        self._admin.close()


@contextmanager
def rigged(server: PostgresServer, folder: Path) -> Iterator[Rig]:
    """A rig that leaves nothing behind."""
    with any_rigged(lambda log: Rig(server, log), folder) as rig:
        yield rig
