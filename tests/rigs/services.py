"""The real services of the tests: started for the first test that asks, stopped after the last.

A test that uses one is marked `service("<name>")`. Where the service cannot be had the test is skipped with the reason,
or fails when `HEADWATER_SERVICES=required` says that nothing may be missing.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import pytest

import headwater
from headwater.testing.servers import ServerError
from headwater.testing.servers.couchdb import CouchServer
from headwater.testing.servers.kafka import KafkaServer
from headwater.testing.servers.mariadb import MariaDbServer
from headwater.testing.servers.mongodb import MongoServer
from headwater.testing.servers.postgres import PostgresServer
from headwater.testing.servers.s3 import S3Server

RIGHTS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}
SHARES = {
    "group.share.min.record.lock.duration.ms": "1000",
    "group.share.min.heartbeat.interval.ms": "500",
    "group.share.heartbeat.interval.ms": "500",
    "group.share.min.session.timeout.ms": "2000",
    "group.share.session.timeout.ms": "2000",
}
"""Share groups at a pace for tests: short leases, and dead members that are missed soon."""


IMPATIENCE = {
    "group.min.session.timeout.ms": "100",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
}
"""Members of groups and transactions whose process is dead are missed within a test."""


@contextmanager
def running_kafka(settings: dict[str, str]) -> Iterator[KafkaServer]:
    """A real Kafka broker, with settings of a test's own."""
    server = KafkaServer(settings=settings)
    try:
        server.start()
    except ServerError as error:
        unavailable("kafka", error)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaServer]:
    """A real Kafka broker, where everybody may do everything that no rule forbids."""
    with running_kafka(RIGHTS | SHARES | IMPATIENCE) as server:
        yield server


def fresh_logs(kafka: KafkaServer, settings: str = "") -> Iterator[Iterator[str]]:
    """Addresses of empty logs on Kafka, for a module's fixture.

    One handle keeps the clients open from test to test of the module, and no longer: what forks should not inherit them.
    """
    address = f"kafka://{kafka.bootstrap}?{settings}"
    with headwater.open_log(address):
        yield (f"{address}&prefix=t{number}." for number in _LOGS)


_LOGS = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL, whose changes can be captured."""
    server = PostgresServer(settings={"wal_level": "logical"})
    try:
        import_module("psycopg")
        server.start()
    except (ImportError, ServerError) as error:
        unavailable("postgres", error)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDbServer]:
    """A real MariaDB with a row binlog."""
    yield from _running("mariadb", MariaDbServer())


@pytest.fixture(scope="session")
def couchdb() -> Iterator[CouchServer]:
    """A server that speaks CouchDB's protocol."""
    yield from _running("couchdb", CouchServer())


@pytest.fixture(scope="session")
def mongodb() -> Iterator[MongoServer]:
    """A server that speaks MongoDB's protocol, as a replica set that keeps documents as they were before."""
    yield from _running("mongodb", MongoServer("preimages"))


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A server that speaks S3's protocol."""
    yield from _running("s3", S3Server())


def _running(name: str, server: Any) -> Iterator[Any]:
    try:
        server.start()
    except ServerError as error:
        unavailable(name, error)
    try:
        yield server
    finally:
        server.stop()


def unavailable(service: str, reason: object) -> NoReturn:
    """End a test whose service cannot be had: skipped with the reason, or failed where services are required."""
    text = f"service {service}: {reason}"
    if os.environ.get("HEADWATER_SERVICES") == "required":
        pytest.fail(text, pytrace=False)
    pytest.skip(text)
