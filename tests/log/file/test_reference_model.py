"""The local log against the reference model: whatever is done to both, both show the same."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import headwater as hw
from headwater.log.clients.batch import Receipt
from headwater.log.clients.producer import Producer
from headwater.log.clients.reader import Reader
from headwater.log.file.segments import segment
from headwater.log.log import Log
from headwater.log.memory.store import MemoryStore
from headwater.model.clock import time_us

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
NAMES = ("a", "b", "c")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

KINDS: dict[str, dict[str, Any]] = {
    "bytes": {},
    "keyed": {"schema": "id STRING, n INT, tags ARRAY<STRING>", "key": "id"},
    "timed": {"schema": "id INT, at TIMESTAMP, x FLOAT", "key": "id", "time": "at", "future_max": "1 hour"},
    "keyless": {"schema": "n INT, text STRING"},
}
WIDER: dict[str, list[str]] = {
    "keyed": [
        "id STRING, n BIGINT, tags ARRAY<STRING>",
        "id STRING, n INT, tags ARRAY<STRING>, note STRING",
        "id STRING, n DOUBLE, tags ARRAY<STRING>, note STRING, place STRUCT<lat: DOUBLE>",
        "id STRING, n STRING, tags ARRAY<STRING>",
    ],
    "timed": [
        "id BIGINT, at TIMESTAMP, x FLOAT",
        "id INT, at TIMESTAMP, x DOUBLE, note STRING",
        "id INT, x FLOAT",
    ],
    "keyless": ["n BIGINT, text STRING", "n INT, text STRING, more INT", "n INT NOT NULL, text STRING"],
}
OWN_COLUMNS = ["_key", "_time", "_appended", "_partition", "_offset", "_headers", "_deleted"]

sizes = st.sampled_from([0, 1, 20, 400, 3000])
headers = st.none() | st.dictionaries(st.sampled_from(["h", "trace"]), st.binary(max_size=3), max_size=2)
seconds = st.integers(-20, 100) | st.just(10_000)
times = seconds.map(lambda second: NOON + timedelta(seconds=second))
places = (
    st.sampled_from(["earliest", "latest"])
    | st.integers(-1, 40)
    | times
    | st.dictionaries(st.integers(0, 2), st.integers(0, 20), max_size=3)
)


@st.composite
def rows_of(draw: st.DrawFn, kind: str) -> list[Any]:
    """Rows for a topic of that kind, a few of which do not fit it."""
    if kind == "bytes":
        keys = st.none() | st.sampled_from([b"", b"k", b"l", b"m"])
        values = st.none() | st.builds(lambda size: b"v" * size, sizes)
        pairs = st.builds(lambda key, value: {"key": key, "value": value}, keys, values)
        return draw(st.lists(pairs, max_size=6) | st.lists(values, max_size=3))
    columns: dict[str, Any] = {
        "keyed": {
            "id": st.none() | st.sampled_from("klmn"),
            "n": st.none() | st.integers(-3, 3) | st.sampled_from([2**31, "no number"]),
            "tags": st.none() | st.lists(st.none() | st.builds(lambda size: "t" * size, sizes), max_size=2),
            "note": st.sampled_from(["new", None]),
        },
        "timed": {
            "id": st.integers(0, 5),
            "at": st.none() | times,
            "x": st.none() | st.sampled_from([0.5, -1.0]),
            "note": st.just("new"),
        },
        "keyless": {"n": st.none() | st.integers(0, 9), "text": st.builds(lambda size: "t" * size, sizes)},
    }[kind]
    required = {name: strategy for name, strategy in columns.items() if name not in ("note",)}
    optional = {"note": columns["note"]} if "note" in columns and draw(st.integers(0, 3)) == 0 else {}
    if draw(st.integers(0, 2)) == 0:
        optional["_headers"] = headers
    if kind != "keyless" and draw(st.integers(0, 2)) == 0:
        optional["_deleted"] = st.booleans()
    return draw(st.lists(st.fixed_dictionaries(required, optional=optional), max_size=6))


def many_rows(kind: str, count: int, chance: random.Random) -> list[Any]:
    """So many rows that fit a topic of that kind, cheaper to draw than one by one."""
    rows: list[Any] = []
    for _ in range(count):
        size = chance.choice([0, 1, 20, 400, 1500])
        moment = NOON + timedelta(seconds=chance.randint(-20, 100))
        row: dict[str, Any] = {
            "bytes": {"key": chance.choice([None, b"k", b"l", b"m"]), "value": b"v" * size},
            "keyed": {"id": chance.choice([None, *"klmnop"]), "n": chance.randint(-9, 9), "tags": ["t" * size]},
            "timed": {"id": chance.randint(0, 9), "at": chance.choice([None, moment, moment]), "x": 0.5},
            "keyless": {"n": chance.randint(0, 9), "text": "t" * size},
        }[kind]
        if chance.random() < 0.1:
            row["_headers"] = {"h": b"1"}
        if kind in ("keyed", "timed") and chance.random() < 0.1:
            row["_deleted"] = True
        rows.append(row)
    return rows


class Pair:
    """Something that exists twice: on the local log and on the model."""

    def __init__(self, handle: int, local: Any, model: Any, topics: frozenset[str] = frozenset()) -> None:
        self.handle = handle
        self.local = local
        self.model = model
        self.topics = topics


class LogsAgree(RuleBasedStateMachine):
    """Two handles on one local log, and two on one log in memory, in step."""

    def __init__(self) -> None:
        super().__init__()
        self.now = time_us(NOON)
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY)) / "log"
        self.store = MemoryStore(clock=self.clock)
        self.handles = [self.open_handle(number) for number in range(2)]
        self.kinds: dict[str, str] = {}
        self.readers: list[Pair] = []
        self.producers: list[Pair] = []
        self.receipts: list[tuple[Receipt, Receipt]] = []
        self.sequence = 0
        # Segments are small here, so that there are many; an index is kept for each of them all the same.
        self.small_indexes = mock.patch.object(segment, "_WORTH_SAVING", 1)
        self.small_indexes.start()

    def clock(self) -> int:
        return self.now

    def open_handle(self, number: int) -> Pair:
        local = hw.open_log(str(self.folder), clock=self.clock)
        return Pair(number, local, Log(self.store, "fsync", self.clock))

    def teardown(self) -> None:
        with ExitStack() as rest:
            rest.callback(shutil.rmtree, self.folder.parent)
            rest.callback(self.small_indexes.stop)
            for handle in self.handles:
                rest.callback(handle.local.close)
            for number in range(2):
                rest.callback(self.drop, number)
            for handle in self.handles:
                self.compare_everything(handle)

    # Topics

    @initialize(kinds=st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(KINDS))))
    def begin(self, kinds: tuple[str, str]) -> None:
        """With something to work on."""
        for name, kind in zip(NAMES, kinds, strict=False):
            self.create(0, name, kind, partitions=2, durability="fsync")

    @rule(
        handle=st.integers(0, 1),
        name=st.sampled_from(NAMES),
        kind=st.sampled_from(sorted(KINDS)),
        partitions=st.integers(1, 3),
        durability=st.sampled_from(["fsync", "os"]),
    )
    def create(self, handle: int, name: str, kind: str, partitions: int, durability: Any) -> None:
        made = self.both(
            self.handles[handle],
            lambda log: _description(
                log.create_topic(name, **KINDS[kind], partitions=partitions, durability=durability, segment_bytes=4096)
            ),
        )
        if not isinstance(made, hw.HeadwaterError):
            self.kinds[name] = kind

    @precondition(lambda self: self.kinds)
    @rule(handle=st.integers(0, 1), data=st.data())
    def alter(self, handle: int, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.kinds)))
        schema = data.draw(st.sampled_from(WIDER.get(self.kinds[name], ["n INT"])))
        self.both(self.handles[handle], lambda log: _description(log.alter_topic(name, schema=schema)))

    @precondition(lambda self: self.kinds)
    @rule(handle=st.integers(0, 1), partitions=st.integers(1, 24), data=st.data())
    def split(self, handle: int, partitions: int, data: st.DataObject) -> None:
        """To a multiple of what the topic has, most of the time."""
        name = data.draw(st.sampled_from(sorted(self.kinds)))
        present = self.store.topic(name).partitions
        wanted = partitions // present * present or 2 * present
        if partitions % 6 == 5 or wanted > 24:
            wanted = partitions
        self.both(self.handles[handle], lambda log: _description(log.alter_topic(name, partitions=wanted)))

    @precondition(lambda self: self.kinds)
    @rule(handle=st.integers(0, 1), data=st.data())
    def delete(self, handle: int, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.kinds)))
        self.both(self.handles[handle], lambda log: log.delete_topic(name))
        del self.kinds[name]
        for reader in [reader for reader in self.readers if name in reader.topics]:
            assert isinstance(self.both(reader, lambda side: side.poll(timeout_s=0)), hw.errors.TopicNotFound)
            self.forget(self.readers, reader)

    # Writing

    @precondition(lambda self: self.kinds)
    @rule(handle=st.integers(0, 1), atomic=st.booleans(), data=st.data())
    def append(self, handle: int, atomic: bool, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.kinds)))
        rows = data.draw(rows_of(self.kinds[name]))
        self.both(self.handles[handle], lambda log: log.append(name, rows, atomic=atomic))

    @precondition(lambda self: self.kinds)
    @rule(handle=st.integers(0, 1), seed=st.integers(0, 9), batches=st.sampled_from([2, 6, 15]), data=st.data())
    def grow(self, handle: int, seed: int, batches: int, data: st.DataObject) -> None:
        """Enough for segments to roll."""
        name = data.draw(st.sampled_from(sorted(self.kinds)))
        chance = random.Random(seed)
        for _ in range(batches):
            rows = many_rows(self.kinds[name], chance.randint(1, 8), chance)
            self.both(self.handles[handle], lambda log, rows=rows: log.append(name, rows))
            self.now += chance.choice([0, 0, 1_000_000])

    @precondition(lambda self: self.kinds)
    @rule(handle=st.integers(0, 1), data=st.data())
    def transact(self, handle: int, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.kinds)), min_size=1, max_size=4))
        parts = [(name, data.draw(rows_of(self.kinds[name]))) for name in names]

        def work(log: Log) -> Any:
            with log.transaction() as transaction:
                for name, rows in parts:
                    transaction.append(name, rows)
            return transaction.offsets

        self.both(self.handles[handle], work)

    @precondition(lambda self: len(self.producers) < 4)
    @rule(handle=st.integers(0, 1), name=st.sampled_from([None, "p", "q"]))
    def open_producer(self, handle: int, name: str | None) -> None:
        logs = self.handles[handle]
        self.producers.append(
            Pair(handle, *(log.producer(id=name, linger_ms=3_600_000) for log in (logs.local, logs.model)))
        )
        self.producers[-1].topics = frozenset([name or ""])

    @precondition(lambda self: self.producers and self.kinds)
    @rule(data=st.data(), numbered=st.booleans(), again=st.integers(0, 3))
    def send(self, data: st.DataObject, numbered: bool, again: int) -> None:
        producer = data.draw(st.sampled_from(self.producers))
        name = data.draw(st.sampled_from(sorted(self.kinds)))
        more: dict[str, Any] = {}
        if numbered:
            self.sequence += 1
            more["sequence"] = max(0, self.sequence - again * (self.sequence % 5 == 0))
        for row in data.draw(rows_of(self.kinds[name])):
            value, key, extra = _as_sent(row, self.kinds[name])
            receipts: list[Receipt] = []

            def work(
                side: Producer, value: Any = value, key: Any = key, extra: Any = extra, receipts: Any = receipts
            ) -> None:
                receipts.append(side.send(name, value, key=key, headers=extra, **more))

            self.both(producer, work)
            if receipts:
                self.receipts.append((receipts[0], receipts[1]))
            if numbered:
                self.sequence += 1
                more["sequence"] = self.sequence

    @precondition(lambda self: self.producers)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        producer = data.draw(st.sampled_from(self.producers))
        self.both(producer, lambda side: side.flush())
        self.settle_receipts()

    @precondition(lambda self: self.producers)
    @rule(data=st.data())
    def close_producer(self, data: st.DataObject) -> None:
        self.forget(self.producers, data.draw(st.sampled_from(self.producers)))
        self.settle_receipts()

    # Reading

    @precondition(lambda self: self.kinds and len(self.readers) < 4)
    @rule(handle=st.integers(0, 1), start=places, data=st.data())
    def open_reader(self, handle: int, start: Any, data: st.DataObject) -> None:
        topics = data.draw(st.lists(st.sampled_from(sorted(self.kinds)), min_size=1, max_size=2, unique=True))
        readers: list[Reader] = []
        self.both(self.handles[handle], lambda log: readers.append(log.reader(topics, start=start)))
        if readers:
            self.readers.append(Pair(handle, readers[0], readers[1], frozenset(topics)))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), events_max=st.sampled_from([1, 2, 5, 100]), arrow=st.booleans())
    def poll(self, data: st.DataObject, events_max: int, arrow: bool) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        if arrow:
            self.both(reader, lambda side: _rows(side.poll_arrow(events_max=events_max, timeout_s=0)))
        else:
            self.both(reader, lambda side: side.poll(events_max=events_max, timeout_s=0))
        self.both(reader, lambda side: [side.positions(), side.lag()])

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), start=places)
    def seek(self, data: st.DataObject, start: Any) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        self.both(reader, lambda side: side.seek(start))
        self.both(reader, lambda side: side.positions())

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def close_reader(self, data: st.DataObject) -> None:
        self.forget(self.readers, data.draw(st.sampled_from(self.readers)))

    @precondition(lambda self: self.kinds)
    @rule(handle=st.integers(0, 1), start=places, end=places, data=st.data())
    def read(self, handle: int, start: Any, end: Any, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.kinds)))
        self.both(self.handles[handle], lambda log: log.read(name, start=start, end=end).to_pylist())

    @precondition(lambda self: self.kinds)
    @rule(handle=st.integers(0, 1), time=times, by=st.sampled_from(["time", "appended"]), data=st.data())
    def find(self, handle: int, time: datetime, by: Any, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.kinds)))
        self.both(self.handles[handle], lambda log: log.offsets_at(name, time, by=by))
        self.both(self.handles[handle], lambda log: _by_key(log.table(name, as_of=time).to_pylist()))

    # What must make no difference

    @rule(seconds=st.sampled_from([0, 0, 1, 1, 30, -10]))
    def let_time_pass(self, seconds: int) -> None:
        self.now += seconds * 1_000_000

    @rule(handle=st.integers(0, 1))
    def reopen(self, handle: int) -> None:
        self.drop(handle)
        self.handles[handle].local.close()
        self.handles[handle] = self.open_handle(handle)

    @rule(handle=st.integers(0, 1))
    def seal(self, handle: int) -> None:
        log = self.handles[handle].local
        for name in log.topics():
            log.store.seal(name)

    @precondition(lambda self: any(self.folder.rglob("*.index")))
    @rule()
    def delete_indexes(self) -> None:
        for path in self.folder.rglob("*.index"):
            path.unlink()

    @rule(handle=st.integers(0, 1))
    def compare(self, handle: int) -> None:
        self.compare_everything(self.handles[handle])

    # Comparing

    def compare_everything(self, handle: Pair) -> None:
        """All that a handle shows."""
        assert self.both(handle, lambda log: log.topics()) == sorted(self.kinds)
        for name in self.kinds:
            self.both(handle, lambda log, name=name: _description(log.topic(name)))
            self.both(handle, lambda log, name=name: log.offsets(name))
            self.both(handle, lambda log, name=name: _events(log, name))
            self.both(handle, lambda log, name=name: log.read(name, columns=OWN_COLUMNS).to_pylist())
            self.both(handle, lambda log, name=name: _by_key(log.table(name).to_pylist()))
            for second in (-20, 0, 7, 40, 9_999):
                moment = NOON + timedelta(seconds=second)
                self.both(handle, lambda log, name=name, moment=moment: log.offsets_at(name, moment))
                self.both(handle, lambda log, name=name, moment=moment: log.offsets_at(name, moment, by="appended"))

    def both(self, pair: Pair, work: Callable[[Any], Any]) -> Any:
        """What the work gives on both sides, which is the same, or the error that both raise."""
        local, model = _outcome(work, pair.local), _outcome(work, pair.model)
        if isinstance(local, Exception) or isinstance(model, Exception):
            assert _code(local) == _code(model), f"the local log: {local!r}, the model: {model!r}"
        else:
            assert local == model
        return local

    def settle_receipts(self) -> None:
        """Receipts that are done say the same on both sides."""
        waiting = []
        for local, model in self.receipts:
            assert local.done() == model.done()
            if local.done():
                self.both(Pair(0, local, model), lambda receipt: receipt.result())
            else:
                waiting.append((local, model))
        self.receipts = waiting

    def forget(self, pairs: list[Pair], pair: Pair) -> None:
        """Closes something on both sides."""
        pairs.remove(pair)
        self.both(pair, lambda side: side.close())

    def drop(self, handle: int) -> None:
        """Closes what a handle gave out."""
        for pairs in (self.readers, self.producers):
            for pair in [pair for pair in pairs if pair.handle == handle]:
                self.forget(pairs, pair)
        self.settle_receipts()


def _outcome(work: Callable[[Any], Any], side: Any) -> Any:
    try:
        return work(side)
    except hw.HeadwaterError as error:
        return error


def _code(outcome: Any) -> Any:
    return outcome.code if isinstance(outcome, hw.HeadwaterError) else outcome


def _description(topic: hw.Topic) -> tuple[Any, ...]:
    settings = (topic.partitions, topic.splits, topic.lateness_us, topic.future_us)
    return (topic.name, topic.schemas, topic.key, topic.time, *settings)


def _events(log: Log, topic: str) -> list[hw.Event]:
    found: list[hw.Event] = []
    with log.reader(topic) as reader:
        while events := reader.poll(events_max=7, timeout_s=0):
            found += events
    return found


def _rows(batches: list[Any]) -> list[Any]:
    return [row for batch in batches for row in batch.to_pylist()]


def _by_key(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=repr)


def _as_sent(row: Any, kind: str) -> tuple[Any, Any, Any]:
    """A row as `send` takes it: value, key, headers."""
    if kind == "bytes":
        return (row["value"], row["key"], None) if isinstance(row, dict) else (row, None, None)
    values = {name: value for name, value in row.items() if not name.startswith("_")}
    if row.get("_deleted"):
        return None, values["id"], row.get("_headers")
    return values, None, row.get("_headers")


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.slow
class TestLogsAgree(LogsAgree.TestCase):  # type: ignore[name-defined,misc]
    """A few hundred steps in every run."""

    settings = settings(max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=CHECKS)


@pytest.mark.bench
class TestLogsAgreeForLong(LogsAgree.TestCase):  # type: ignore[name-defined,misc]
    """Many more, in the long tier."""

    settings = settings(max_examples=1_000, stateful_step_count=80, deadline=None, suppress_health_check=CHECKS)
