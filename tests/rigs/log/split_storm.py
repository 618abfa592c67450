"""A storm over a split: writers, members of a group and whoever adds partitions, in processes of their own that are killed.

Each writer has keys of its own and numbers its events, so the order of each key is known. It writes down what it is about to
store and what was acknowledged; consumers write down what they are handed, all into one file. The oracle reads those lines and
the topic; it knows nothing of partitions.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import headwater as hw
from headwater.log.disk.disk import Disk, RealDisk
from headwater.testing.crash.disk import CrashingDisk
from tests.rigs.children import Child

WRITERS = 4
CONSUMERS = 2
EVENTS = 160
KEYS = 5
SPLITS = (4, 8, 16)

Say = Callable[[dict[str, Any]], None]


class SplitStorm:
    """One seeded round; with `points` whoever splits dies at each of them in turn, where it is reached for the nth time."""

    def __init__(self, folder: Path, seed: int, *, points: Sequence[str] = (), nth: int = 1) -> None:
        self.folder = folder
        self.random = Random(seed)
        self.points = list(points)
        self.nth = nth
        self.strikes: Counter[str] = Counter()
        self.read: list[tuple[str, int]] = []
        self.log = hw.open_log(str(folder / "log"), durability="os" if seed % 3 == 2 else "fsync")
        self.log.create_topic(
            "t", "k STRING, n BIGINT", key="k", partitions=2, segment_bytes=4096 if seed % 2 else 1 << 20
        )
        self.children: dict[str, Child[None]] = {}

    def run(self, *, strikes: int) -> None:
        """Lets them work and strikes; ends when everything is written, split and read."""
        names = [f"writer {n}" for n in range(WRITERS)] + [f"consumer {n}" for n in range(CONSUMERS)] + ["splitter"]
        reader = self.log.reader("t")
        try:
            self.children = {name: self._start(name) for name in names}
            deadline = time.monotonic() + 60
            while not self._is_done(reader):
                assert time.monotonic() < deadline, f"not done: {self.log.offsets('t')}, {self.log.group('g')}"
                self.read += [(event.key, event.value["n"]) for event in reader.poll(events_max=50, timeout_s=0.01)]
                if strikes and self.random.random() < 0.15:
                    strikes -= 1
                    self._strike()
                for name, child in self.children.items():
                    if not child.is_running() and not self._has_ended(name):
                        self.strikes[f"{name.split()[0]} died"] += 1
                        child.wait()
                        self.children[name] = self._start(name)
        finally:
            reader.close()
            for child in self.children.values():
                child.kill()

    def check(self) -> None:
        """Nothing acknowledged is lost, nothing is doubled, and the numbers of each key rise wherever they are read."""
        lines = self._lines("account")
        assert not [line for line in lines if "error" in line]
        assert self.log.topic("t").partitions == SPLITS[-1]
        rows = self.log.read("t").to_pylist()
        stored = Counter((row["k"], row["n"]) for row in rows)
        assert set(stored.values()) == {1}, "an event is stored twice"
        intended = {(k, n) for line in lines for k, n in line.get("intended", ())}
        acked = {(k, n) for line in lines for k, n in line.get("acked", ())}
        assert acked <= set(stored) <= intended
        _check_rising(self.read, stored)
        handed = [(k, n) for line in self._lines("handed") for k, n in line["events"]]
        _check_rising(handed, stored)
        newest: dict[str, int] = {}
        for key, number in stored:
            newest[key] = max(number, newest.get(key, -1))
        assert {row["k"]: row["n"] for row in self.log.table("t").to_pylist()} == newest

    def _is_done(self, reader: Any) -> bool:
        if any(not self._has_ended(f"writer {n}") for n in range(WRITERS)) or not self._has_ended("splitter"):
            return False
        return reader.lag() == 0 and self.log.groups() == ["g"] and self._group_is_done()

    def _group_is_done(self) -> bool:
        progress = self.log.group("g")
        return len(progress.partitions) == SPLITS[-1] and progress.lag.events == 0

    def _has_ended(self, name: str) -> bool:
        return (self.folder / f"{name}.done").exists()

    def _strike(self) -> None:
        name = self.random.choice(list(self.children))
        if not self._has_ended(name):
            self.children[name].kill()
            self.strikes[f"{name.split()[0]} killed"] += 1

    def _start(self, name: str) -> Child[None]:
        kind, _, number = name.partition(" ")
        random = Random(self.random.random())
        dies = kind == "splitter" and self.points
        disk = CrashingDisk(self.points.pop(0), self.nth) if dies else RealDisk()
        return Child(lambda: _live(self.folder, name, kind, int(number or 0), random, disk))

    def _lines(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / f"{kind}.jsonl"
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def _check_rising(found: Iterable[tuple[str, int]], stored: Iterable[tuple[str, int]]) -> None:
    """All that is stored was read, and an event for the first time only after all before it of its key."""
    expected, seen = defaultdict(list), defaultdict(list)
    for key, number in sorted(stored):
        expected[key].append(number)
    for key, number in dict.fromkeys(found):
        seen[key].append(number)
    for key, numbers in expected.items():
        assert seen[key] == numbers, f"{key} was read as {seen[key]}, and is {numbers}"


def _live(folder: Path, name: str, kind: str, number: int, random: Random, disk: Disk) -> None:
    """One process: it works until it is done or killed."""
    account = os.open(folder / "account.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def say(line: dict[str, Any]) -> None:
        os.write(account, json.dumps(line | {"who": name}).encode() + b"\n")

    try:
        with hw.open_log(str(folder / "log"), disk=disk) as log:
            if kind == "writer":
                _WAYS[number](log, folder, number, random, say)
            elif kind == "splitter":
                _split(log, random)
            else:
                _consume(log, folder, random)
        (folder / f"{name}.done").touch()
    except BaseException as error:
        say({"error": repr(error)})
        raise


def _split(log: hw.Log, random: Random) -> None:
    for step, partitions in enumerate(SPLITS, 1):
        while sum(map(len, log.offsets("t").values())) < step * WRITERS * EVENTS // 5:
            time.sleep(0.005)
        if log.topic("t").partitions < partitions:
            time.sleep(random.uniform(0, 0.02))
            log.alter_topic("t", partitions=partitions)


def _consume(log: hw.Log, folder: Path, random: Random) -> None:
    handed = os.open(folder / "handed.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    with log.consumer("t", group="g") as consumer:
        while True:
            events = consumer.poll(events_max=random.randint(1, 40), timeout_s=0.05)
            if events:
                line = {"events": [(event.key, event.value["n"]) for event in events]}
                os.write(handed, json.dumps(line).encode() + b"\n")


def _pieces(folder: Path, number: int, random: Random) -> Iterable[list[dict[str, Any]]]:
    """What a writer has yet to store; what the one before it was about to store is left out, since it may be there."""
    begun = 0
    path = folder / "account.jsonl"
    for raw in path.read_bytes().splitlines():
        line = json.loads(raw)
        if line["who"] == f"writer {number}" and "intended" in line:
            begun = max(begun, max(n for _, n in line["intended"]) + 1)
    while begun < EVENTS:
        count = min(random.randint(1, 12), EVENTS - begun)
        yield _rows(number, begun, count)
        begun += count
        time.sleep(random.uniform(0, 0.006))


def _rows(writer: int, start: int, count: int) -> list[dict[str, Any]]:
    return [{"k": f"w{writer} k{n % KEYS}", "n": n} for n in range(start, start + count)]


def _pairs(rows: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(row["k"], row["n"]) for row in rows]


def _append(log: hw.Log, folder: Path, number: int, random: Random, say: Say) -> None:
    for rows in _pieces(folder, number, random):
        say({"intended": _pairs(rows)})
        log.append("t", rows, atomic=random.random() < 0.3)
        say({"acked": _pairs(rows)})


def _transact(log: hw.Log, folder: Path, number: int, random: Random, say: Say) -> None:
    for rows in _pieces(folder, number, random):
        say({"intended": _pairs(rows)})
        with log.transaction() as transaction:
            for row in rows:
                transaction.append("t", [row])
            time.sleep(random.uniform(0, 0.01))
        say({"acked": _pairs(rows)})


def _produce(log: hw.Log, folder: Path, number: int, random: Random, say: Say) -> None:
    with log.producer(linger_ms=60_000) as producer:
        for rows in _pieces(folder, number, random):
            say({"intended": _pairs(rows)})
            for row in rows:
                producer.send("t", row)
            time.sleep(random.uniform(0, 0.01))
            producer.flush()
            say({"acked": _pairs(rows)})


def _resume(log: hw.Log, folder: Path, number: int, random: Random, say: Say) -> None:
    """A named producer that sends everything again in each of its lives."""
    rows = _rows(number, 0, EVENTS)
    say({"intended": _pairs(rows)})
    with log.producer(id=f"writer {number}", linger_ms=60_000) as producer:
        for row in rows:
            producer.send("t", row, sequence=row["n"])
            if random.random() < 0.15:
                producer.flush()
                time.sleep(random.uniform(0, 0.02))
        producer.flush()
    say({"acked": _pairs(rows)})


_WAYS = (_append, _transact, _produce, _resume)
