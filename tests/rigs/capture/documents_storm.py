"""A storm over captured documents: clients write while the capture is killed. The oracle is the database itself and what the clients did.

Each client has keys of its own and writes a version number into each document, so what the log has of a key can be compared with what was
done to it: MongoDB tells every change, CouchDB at least the last one.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwater.capture.capture import Capture
from headwater.capture.couchdb import source as couchdb
from headwater.capture.mongodb import source as mongodb
from headwater.capture.source_url import open_source
from headwater.log.log import Log, open_log
from tests.rigs.capture import sqlite_storm as capture_storm
from tests.rigs.capture.documents import Documents
from tests.rigs.children import Child

Connect = Callable[[], Documents]
"""Makes a client of its own, for each process."""

Done = list[tuple[str, str, int]]
"""Op, key and version of each write, in order."""


def write(connect: Connect, client: int, seed: int, writes: int, *, pause_s: float) -> Done:
    """One client: random inserts, updates and deletes of its own keys."""
    chance, documents = random.Random(seed), connect()
    live, done = dict.fromkeys((key for key in documents.all() if key.startswith(f"{client}-")), 0), Done()
    for version in range(1, writes + 1):
        key = f"{client}-{chance.randrange(60)}"
        if key in live and chance.random() < 0.25:
            documents.delete(key)
            del live[key]
            done.append(("d", key, 0))
        else:
            text = chance.choice((None, "", "ü€😀", "x" * chance.choice((10, 60_000))))
            documents.put(key, {"v": version, "text": text, "nested": {"list": [version, None, text]}})
            done.append(("u" if key in live else "c", key, version))
            live[key] = version
        time.sleep(chance.random() * pause_s)
    return done


def open_capture(log: Log, url: str, table: str) -> Capture:
    """A capture that works in small pieces, so that a kill finds it everywhere."""
    for module in (couchdb, mongodb):
        module.CHUNK_ROWS, module.CHANGES_ROWS = 20, 15  # type: ignore[attr-defined]
    return Capture(log, open_source(url, [table]), partitions=2, heartbeat_s=0.05)


def live_until_killed(
    url: str, table: str, folder: Path, *, after_s: float | None = None, die_at: str = "", die_on: int = 1
) -> None:
    """One life of the capture, in a process of its own."""

    def work() -> None:
        capture_storm.live(
            str(folder),
            lambda log: open_capture(log, url, table),
            die_at=die_at,
            die_on=die_on,
        )

    capture_storm.await_death(Child(work), after_s=after_s)


def catch_up(url: str, table: str, folder: Path) -> None:
    """The rest, by a process that nobody kills."""

    def rest() -> None:
        with open_log(folder, durability="os") as log:
            capture = open_capture(log, url, table)
            capture.open()
            capture.catch_up()
            assert {each.state for each in capture.progress.tables.values()} == {"live"}, capture.progress
            capture.close()

    Child(rest).result(timeout_s=60)


def check(documents: Documents, folder: Path, done: Done, *, tells_all: bool) -> int:
    """Everything that is promised; returns how many changes the log has."""
    with open_log(folder) as log:
        rows = {row["id"]: documents.load(row["document"]) for row in log.table(documents.name).to_pylist()}
        assert rows == documents.all()
        events = log.read(f"{documents.name}.changes").to_pylist()
        changes = [event for event in events if event["op"] != "r"]
        positions = [event["position"] for event in changes]
        assert len(set(positions)) == len(positions)
        assert replayed(documents, events) == rows
        by_key: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for event in sorted(changes, key=lambda event: str(event["position"])):
            by_key[event["id"]].append((event["op"], version(documents, event)))
        wanted: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for op, key, number in done:
            wanted[key].append((op, number))
        for key, told in by_key.items():
            if tells_all:
                assert [op for op, _ in told] == [op for op, _ in wanted[key]], key
                for (op, found), (_, made) in zip(told, wanted[key], strict=True):
                    assert found == made if op == "c" else found == 0 or found >= made, (
                        key
                    )  # an update is looked up later
            else:
                versions = [number for op, number in told if op != "d"]
                assert versions == sorted(set(versions)), key
        if tells_all:
            assert set(by_key) == set(wanted)
        return len(changes)


def replayed(documents: Documents, events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the history makes."""
    rows: dict[str, dict[str, Any]] = {}
    for event in events:
        rows.pop(event["id"], None)
        if event["op"] != "d" and event["after"]["document"] is not None:
            rows[event["id"]] = documents.load(event["after"]["document"])
    return rows


def version(documents: Documents, event: dict[str, Any]) -> int:
    """The version that a change tells; 0 where the document was gone when it was asked for."""
    text = (event["after"] or {}).get("document")
    return 0 if text is None else int(documents.load(text)["v"])
