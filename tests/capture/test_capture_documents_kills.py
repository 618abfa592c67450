"""Captured CouchDB and MongoDB under load while the capture is killed: the log equals the database, with no gap and nothing twice."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headwater.testing.servers.couchdb import CouchServer
from headwater.testing.servers.mongodb import MongoServer
from tests.rigs.capture import documents_storm as storm
from tests.rigs.capture.documents import CouchDocuments, MongoDocuments
from tests.rigs.children import Child

pytestmark = pytest.mark.timeout(400)  # the first of them fetches its server

POINTS = ("capture: chunk read", "capture: changes read", "capture: before append", "capture: appended")


def rounds(
    documents: CouchDocuments | MongoDocuments, connect: storm.Connect, folder: Path, *, seed: int, **load: int
) -> int:
    """Clients write during the backfill and behind it; the capture is killed at each step and at random. How many changes came."""
    print("seed", seed)
    chance, clients = random.Random(seed), load["clients"]
    documents.put_many(
        {f"{client}-{number}": {"v": 0, "text": "old"} for client in range(clients) for number in range(40)}
    )
    url, table = documents.url, documents.name
    storm.live_until_killed(url, table, folder, die_at="capture: appended")
    writers = [
        Child(lambda n=n: storm.write(connect, n, seed * 1000 + n, load["writes"] // clients, pause_s=0.01))
        for n in range(clients)
    ]
    for point in POINTS:
        storm.live_until_killed(url, table, folder, die_at=point, die_on=chance.randrange(1, 4))
    for _ in range(load["kills"]):
        storm.live_until_killed(url, table, folder, after_s=chance.uniform(0.3, 1.0))
    done = [each for writer in writers for each in writer.result(timeout_s=100)]
    storm.catch_up(url, table, folder)
    return storm.check(documents, folder, done, tells_all=isinstance(documents, MongoDocuments))


@pytest.mark.slow
@pytest.mark.service("couchdb")
@pytest.mark.covers("CouchDB")
def test_couchdb_since_resumes_exactly(couchdb: CouchServer, tmp_path: Path) -> None:
    """Eight kills; of each document the last change is in the log, once, and versions never go back."""
    server = f"http://127.0.0.1:{couchdb.port}"
    documents = CouchDocuments(server)
    name = documents.name
    rounds(
        documents, lambda: CouchDocuments(server, name=name), tmp_path / "log", seed=3, clients=2, writes=300, kills=3
    )


@pytest.mark.slow
@pytest.mark.service("mongodb")
def test_mongodb_is_dumped_then_tailed_and_resumed_after_kills(mongodb: MongoServer, tmp_path: Path) -> None:
    """Eight kills; every change that the clients made is in the log once, each key's in its order."""
    documents = MongoDocuments(mongodb.url)
    database = documents.database.name
    changes = rounds(
        documents,
        lambda: MongoDocuments(mongodb.url, database=database),
        tmp_path / "log",
        seed=5,
        clients=2,
        writes=600,
        kills=3,
    )
    assert changes == 600
    documents.close()


@pytest.mark.bench
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2))
def test_ten_thousand_writes(mongodb: MongoServer, couchdb: CouchServer, tmp_path: Path, seed: int) -> None:
    """The same with four clients, and for longer, on both."""
    documents = MongoDocuments(mongodb.url)
    database = documents.database.name
    load = {"clients": 4, "writes": 10_000, "kills": 15}
    rounds(documents, lambda: MongoDocuments(mongodb.url, database=database), tmp_path / "m", seed=seed, **load)
    documents.close()
    server = f"http://127.0.0.1:{couchdb.port}"
    couch = CouchDocuments(server)
    name = couch.name
    rounds(couch, lambda: CouchDocuments(server, name=name), tmp_path / "c", seed=seed, **load)
