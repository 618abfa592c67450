"""A specimen: a small local log that has every kind of file, and everything that it shows to its users."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import headwater as hw
from headwater.log.disk.disk import RealDisk
from headwater.log.log import Log
from headwater.model.clock import Clock, time_us

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
KINDS = {
    "log": "headwater",
    "state": "state",
    "commits": "commits",
    "incarnations": "incarnations",
    "topic": "topics/*/topic",
    "head": "topics/*/*/head",
    "frames": "topics/*/*/*.frames",
    "sealed": "topics/*/*/*.arrow",
    "index": "topics/*/*/*.index",
    "producer": "producers/*[0-9a-f]",
}
"""Every kind of file with content, and where it stands in the log's folder."""

NUMBERED = 25


class AnotherBoot(RealDisk):
    """The machine's disk, as if the machine had been started again."""

    def boot_id(self) -> str:
        return "another-boot"


def make_specimen(folder: Path) -> None:
    """A log with sealed, closed and active segments, an index, transactions, tombstones, headers, and an unclean stop behind it."""
    clock = seconds_from_noon()
    with hw.open_log(str(folder), clock=clock) as log:
        log.create_topic(
            "orders", "id STRING, amount DOUBLE, at TIMESTAMP", key="id", time="at", partitions=2, segment_bytes=4096
        )
        log.create_topic("raw", partitions=1, segment_bytes=50_000, durability="os")
        for number in range(20):
            log.append("orders", [order(number), order(number + 100)])
        sealed = log.store.seal("orders")
        assert sealed, "no segment was closed"
        log.alter_topic("orders", schema="id STRING, amount DOUBLE, at TIMESTAMP, note STRING")
        with log.producer(id="import", linger_ms=60_000) as producer:
            for number in range(NUMBERED):
                producer.send("orders", {**order(number), "note": "numbered"}, sequence=number)
                if number % 5 == 0:
                    producer.flush()
            producer.send("raw", b"numbered", sequence=0)
        for number in range(130):
            log.append("raw", [{"key": b"%d" % (number % 9), "value": b"%d" % number * 20}])
        log.offsets_at("raw", NOON)
    with hw.open_log(str(folder), disk=AnotherBoot(), clock=clock) as log:
        log.append("orders", [{**order(50), "_headers": {"trace": b"\x01"}}, {"id": "o3", "_deleted": True}])
    with hw.open_log(str(folder), clock=clock) as log:
        for number in range(4):
            with log.transaction() as transaction:
                transaction.append("orders", [order(60 + number)])
                transaction.append("raw", [b"together %d" % number])


def seconds_from_noon() -> Clock:
    """A clock that goes on by a second whenever somebody looks."""
    seconds = itertools.count()
    return lambda: time_us(NOON) + 1_000_000 * next(seconds)


def order(number: int) -> dict[str, Any]:
    """A row of `orders`."""
    return {"id": f"o{number % 11}", "amount": float(number), "at": NOON + timedelta(seconds=number)}


def files_of(folder: Path, kind: str) -> list[Path]:
    """The files of a kind."""
    return sorted(folder.glob(KINDS[kind]))


class Snapshot:
    """All files of a folder, to be put back as they were."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def restore(self) -> None:
        """Puts every file back, and removes what was not there."""
        shutil.rmtree(self.folder)
        for path, content in self._files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


Uses = dict[str, Callable[[Log], Any]]
Specimen = tuple[Snapshot, dict[str, Any]]
"""The log's files, and what it shows and does when nothing is damaged."""


@contextmanager
def specimen_in_memory() -> Iterator[Specimen]:
    """A specimen to be damaged again and again, where a sync costs nothing."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as parent:
        folder = Path(parent) / "log"
        make_specimen(folder)
        assert all(files_of(folder, kind) for kind in KINDS)
        snapshot = Snapshot(folder)
        truth = look(folder)
        snapshot.restore()
        assert not [name for name, seen in truth.items() if isinstance(seen, Exception)], truth
        yield snapshot, truth


def look(folder: Path) -> dict[str, Any]:
    """Everything the log shows and does, or the error in its place."""
    try:
        log = hw.open_log(str(folder))
    except Exception as error:  # noqa: BLE001 (which kinds are allowed is the test)
        return dict.fromkeys([*LOOKS, *CHANGES], error)
    seen: dict[str, Any] = {}
    with log:
        for name, use in {**LOOKS, **CHANGES}.items():
            try:
                seen[name] = use(log)
            except Exception as error:  # noqa: BLE001 (which kinds are allowed is the test)
                seen[name] = error
    return seen


def wrong(seen: dict[str, Any], truth: dict[str, Any], damaged: Path) -> Iterator[str]:
    """What is neither the truth nor an error of ours that names the damaged file."""
    for name, value in seen.items():
        if isinstance(value, hw.HeadwaterError):
            if str(damaged) not in str(value) or not value.advice:
                yield f"{name}: {type(value).__name__}: {value}"
        elif isinstance(value, Exception):
            yield f"{name}: {type(value).__name__} is not ours: {value}"
        elif value != truth[name]:
            yield f"{name}: is {value!r:.200}, should be {truth[name]!r:.200}"


LOOKS: Uses = {
    "topics": lambda log: [log.topic(name) for name in log.topics()],
    "offsets": lambda log: [log.offsets("orders"), log.offsets("raw")],
    "events of orders": lambda log: _events(log, "orders"),
    "events of raw": lambda log: _events(log, "raw"),
    "table": lambda log: log.table("orders").to_pylist(),
    "offsets at": lambda log: [log.offsets_at("orders", NOON + timedelta(seconds=second)) for second in (9, 63, 119)],
    "offsets of raw at": lambda log: [log.offsets_at("raw", NOON + timedelta(seconds=second)) for second in (90, 170)],
    "a saved position": lambda log: log.read("raw", start=[hw.Position("raw", 0, 100, 0)]).to_pylist(),
}
"""What is looked at, one by one: a damage that shows in one place need not show in another."""

CHANGES: Uses = {
    "resume": lambda log: _grown(log, lambda: _send_again(log)),
    "append": lambda log: _grown(log, lambda: log.append("orders", [order(70), order(71)])),
    "transaction": lambda log: _grown(log, lambda: log.append("orders", [order(72), order(73)], atomic=True)),
}
"""What is done afterwards; each gives how many events more there are."""

WRITES: Uses = {
    "append": lambda log: log.append("raw", [b"blind"]),
    "transaction": lambda log: log.append("raw", [b"blind"], atomic=True),
    "producer": lambda log: log.producer().send("raw", b"blind").result(),
    "named producer": lambda log: log.producer(id="import").send("raw", b"blind", sequence=1).result(),
}
"""What may be written to `raw` by one who has not read it before."""


def _events(log: Log, topic: str) -> list[Any]:
    with log.reader(topic) as reader:
        found: list[hw.Event] = []
        while events := reader.poll(events_max=37, timeout_s=0):
            found += events
    places = sorted(found, key=lambda event: (event.partition, event.offset))
    return [
        (event.partition, event.offset, event.time_us, event.appended_us, event.key, event.value, event.headers)
        for event in places
    ]


def _send_again(log: Log) -> None:
    with log.producer(id="import", linger_ms=60_000) as producer:
        for number in range(NUMBERED):
            producer.send("orders", {**order(number), "note": "numbered"}, sequence=number)


def _grown(log: Log, change: Callable[[], object]) -> Any:
    before = _events(log, "orders")
    change()
    after = _events(log, "orders")
    kept = [event for event in after if event in before]
    assert len(kept) == len(before), "events changed"
    return len(after) - len(before)
