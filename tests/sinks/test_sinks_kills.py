"""Writers of sinks are killed, at each step and at random: the target holds each batch once, and dead letters are told once."""

from __future__ import annotations

import random
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.model.errors import Unreachable
from headwater.sinks.opensearch import OpenSearchSink
from headwater.sinks.sink import Sink
from tests.rigs.app.sink_storm import Storm, points
from tests.rigs.app.sink_targets import EMBEDDED, SERVED, SHAPE, Target, batch, marker, write

Make = Callable[[str], Target]

KINDS = [
    *EMBEDDED,
    *(pytest.param(kind, marks=pytest.mark.service(kind.partition("-")[0])) for kind in SERVED),
]
OWN = {"redis": "redis: chunk written", "tantivy": "search: entered", "opensearch": "opensearch: bulk sent"}


def test_every_step_has_a_name() -> None:
    """The rounds below follow the source."""
    assert {"sink: begun", "sink: piece applied", "sink: dead letters told", "sink: committed", *OWN.values()} == set(
        points()
    )


def steps(kind: str) -> list[str]:
    """The steps that a kind of sink comes by."""
    own = OWN.get(kind.partition("-")[0])
    return [step for step in points() if step.startswith("sink:") or step == own]


@pytest.mark.covers("concept: microbatch, checkpoint, atomic commit, idempotence", backends=["file"])
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_writer_killed_at_a_step_is_gone_on_with(make_target: Make, tmp_path: Path, kind: str) -> None:
    """Killed at every step, one process after the other, then anywhere; the last one ends what they began."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    target = make_target(kind)
    storm = Storm(target.url, tmp_path / "log", seed)
    died = [storm.life(die_at=step, die_on=chance.randrange(1, 3)) for step in steps(kind)]
    assert died.count(-signal.SIGKILL) >= 2, died
    for _ in range(2):
        storm.life(kill_after_s=chance.uniform(0.01, 0.4))
    assert storm.life() == 0
    assert target.rows() == storm.expected()
    storm.check_dead()


@pytest.mark.bench
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_kills(make_target: Make, tmp_path: Path, kind: str, seed: int) -> None:
    """The long tier."""
    chance = random.Random(seed)
    target = make_target(kind)
    storm = Storm(target.url, tmp_path / "log", seed)
    for _ in range(15):
        step = chance.choice([*steps(kind), ""])
        storm.life(
            die_at=step, die_on=chance.randrange(1, 9), kill_after_s=chance.uniform(0.01, 0.6) if not step else None
        )
    assert storm.life() == 0
    assert target.rows() == storm.expected()
    storm.check_dead()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.service(kind.partition("-")[0])) for kind in SERVED]
)
def test_a_lost_connection_is_no_lost_row(make_target: Make, kind: str) -> None:
    """The server ends the connection inside a batch: nothing counts, the error says that a retry may help, and the retry is exact."""
    target = make_target(kind)
    sink = target.sink()
    sink.open(SHAPE)
    write(sink, 0, batch([("a", {"n": 1})]))
    assert sink.begin(marker(1, 3))
    end_connections(target, sink)
    if kind == "postgres":
        with pytest.raises(Unreachable):
            sink.upsert(batch([("b", {"n": 2})]).select(SHAPE.schema.names))
        sink.rollback()
    else:  # the client connects again by itself
        sink.upsert(batch([("b", {"n": 2})]).select(SHAPE.schema.names))
    write(sink, 1, batch([("b", {"n": 2}), ("c", {"n": 3})], first=1), end=3)
    assert {key: row["n"] for key, row in target.rows().items()} == {"a": 1, "b": 2, "c": 3}


def end_connections(target: Target, sink: Sink) -> None:
    """As an administrator would; OpenSearch has no such command, so there the socket is shut under its client."""
    if isinstance(sink, OpenSearchSink):
        assert sink.client._connection is not None and sink.client._connection.sock is not None
        sink.client._connection.sock.shutdown(socket.SHUT_RDWR)
        return
    address = target.url.partition("?")[0]
    if target.kind == "postgres":
        import psycopg

        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()")
        return
    import redis

    with redis.Redis.from_url(address) as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
