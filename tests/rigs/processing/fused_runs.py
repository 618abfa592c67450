"""A fused operator without a Spark: the stream reader is asked as Spark asks it, with a checkpoint of our own that a kill leaves behind.

Before a batch runs, its end stands in the file `offsets`; when it is done, what it gave stands in `given/<batch>`, written in one step.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import headwater as hw
from headwater.processing.checkpoint.offsets import EVENTS, VERSION
from headwater.processing.operators.aggregate import Aggregate, aggregates_of
from headwater.processing.operators.dedupe import Dedupe
from headwater.processing.operators.operator import Operator
from headwater.processing.operators.panes import Panes
from headwater.processing.operators.partials import KINDS as WINDOWED_KINDS
from headwater.processing.operators.session_windows import Sessions
from headwater.processing.operators.sliding import Sliding
from headwater.processing.operators.top_n import TopOfEvents
from headwater.processing.operators.totals import KINDS, Totals
from headwater.processing.operators.window_top_n import TopOfWindows
from headwater.processing.operators.windowed import Windowed
from headwater.processing.source.operator_input import OperatorInput, to_option
from headwater.processing.source.source_operator import FusedOperator
from headwater.processing.source.spark_source import HeadwaterSource
from headwater.processing.source.stream import StreamReader
from headwater.processing.time.event_time import FIELDS, LATE
from headwater.processing.time.late_rows import LateRows
from tests.rigs.processing.pattern_runs import Pattern

ROOT = Path(__file__).parents[3]
TOPIC = "bids"
SCHEMA = pa.schema([pa.field("who", pa.string(), nullable=False), ("lot", pa.int64()), ("price", pa.int64())])
TIMED = SCHEMA.append(pa.field("at", pa.timestamp("us", tz="UTC")))
LATENESS_US, OVER_US = 20_000_000, 30_000_000
HOPS = Panes(30_000_000, 10_000_000)
WANTED = {"n": "count", "total": ("sum", "price"), "low": ("min", "price")}


class Work(NamedTuple):
    """An operator, its input, the topic's columns that this is made of, and the operator's key among them."""

    operator: Operator
    schema: pa.Schema
    columns: list[str]
    key: list[str]
    time: pa.Field | None = None

    @property
    def topic(self) -> pa.Schema:
        """The columns of the topic."""
        return SCHEMA if self.time is None else TIMED

    def side(self, options: dict[str, str], late_rows: str) -> OperatorInput:
        """The input as it is read."""
        read = {source: field.with_name(source) for source, field in zip(self.columns, self.schema, strict=True)}
        if self.time is not None:
            read |= {self.time.name: self.time, LATE: FIELDS[LATE]}
        options = {**options, "columns": ",".join(read)}
        time = None if self.time is None else self.time.name
        return OperatorInput(
            TOPIC, pa.schema(list(read.values())), options, self.schema, self.columns, self.key, "who", time,
            late_rows=late_rows,
        )  # fmt: skip


def totals() -> Work:
    """Totals by who and lot, with the input that `hw.totals` makes of the topic."""
    aggregates = aggregates_of(WANTED, SCHEMA, taken=["who", "lot"], kinds=KINDS)
    made = Totals([SCHEMA.field("who"), SCHEMA.field("lot")], aggregates, SCHEMA, is_signed=False)
    return Work(made, *_renamed(SCHEMA, b0="who", b1="lot", v0="price"), ["who", "lot"])


def best() -> Work:
    """The two best of each who."""
    return Work(TopOfEvents(SCHEMA, 2, ["price DESC"], ["who"]), SCHEMA, SCHEMA.names, ["who"])


def best_in_time() -> Work:
    """The same in a stage that works by event time: of what is not late."""
    return best()._replace(time=TIMED.field("at"))


def pace() -> Work:
    """Each bid with those of its who in the time up to it."""
    aggregates = aggregates_of({"n": "count", "total": ("sum", "price")}, TIMED, taken=TIMED.names)
    return Work(Sliding(TIMED, "at", OVER_US, aggregates), TIMED, TIMED.names, ["who"], TIMED.field("at"))


def once() -> Work:
    """Each time of a who and lot once."""
    schema, columns = _renamed(TIMED, w="who", n="lot", t="at")
    return Work(Dedupe(schema, "t", 0), schema, columns, ["who", "lot"], TIMED.field("at"))


def hops() -> Work:
    """How many bids and how much of each who in overlapping windows."""
    operator = Windowed(TIMED, ["who"], "at", HOPS, _windowed())
    return Work(operator, TIMED, TIMED.names, ["who"], TIMED.field("at"))


def visits() -> Work:
    """The same in sessions of who and lot."""
    schema, columns = _renamed(TIMED, w="who", n="lot", price="price", t="at")
    return Work(
        Sessions(schema, ["w", "n"], "t", OVER_US, _windowed()), schema, columns, ["who", "lot"], TIMED.field("at")
    )


def peaks() -> Work:
    """The highest bids of each who in windows, all of equal price."""
    operator = TopOfWindows(TIMED, 1, ["price DESC"], ["who"], "at", HOPS, ties=True)
    return Work(operator, TIMED, TIMED.names, ["who"], TIMED.field("at"))


def rises() -> Work:
    """Bids of a who that are higher than the one before."""
    text = """PARTITION BY who ORDER BY at MEASURES a.price AS low, b.price AS high
        AFTER MATCH SKIP TO NEXT ROW PATTERN (a b) DEFINE b AS price > PREV(price)"""
    return Work(Pattern(text, TIMED).operator, TIMED, TIMED.names, ["who"], TIMED.field("at"))


WORKS = {made.__name__: made for made in (totals, best, best_in_time, pace, once, hops, visits, peaks, rises)}


def _windowed() -> list[Aggregate]:
    wanted = {"bids": "count", "total": ("sum", "price")}
    return aggregates_of(wanted, TIMED, taken=["who"], kinds=WINDOWED_KINDS)


def _renamed(schema: pa.Schema, **named: str) -> tuple[pa.Schema, list[str]]:
    return pa.schema([schema.field(name).with_name(alias) for alias, name in named.items()]), list(named.values())


class FusedRun:
    """A stream with an operator in its source, that goes on from what its folder holds."""

    def __init__(self, folder: Path, roots: int, *, kind: str) -> None:
        self.work = work = WORKS[kind]()
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "metadata").write_text('{"id": "q"}')
        options = {"log": str(folder / "log"), "topic": TOPIC, "startingOffsets": "earliest"}
        side = work.side(options, str(folder / "late"))
        fused = FusedOperator(work.operator, [side], roots, str(folder / "state"), "op", "f", str(checkpoint))
        self.folder = folder
        (folder / "given").mkdir(exist_ok=True)
        shutil.rmtree(folder / "late", ignore_errors=True)
        self._source = HeadwaterSource({**options, "operator": to_option(fused)})
        self._plain = HeadwaterSource({**options, "columns": ",".join([*work.topic.names, "_late", "_watermark"])})

    def reader(self) -> StreamReader:
        """A reader as Spark makes it after each start."""
        return self._source.streamReader(self._source.schema())

    def plain(self) -> StreamReader:
        """A reader of the same topic without an operator, for a stage that works by event time."""
        return self._plain.streamReader(self._plain.schema())

    @property
    def done(self) -> int:
        """The last batch that was done."""
        return max((int(path.name) for path in (self.folder / "given").iterdir() if path.name.isdigit()), default=-1)

    def batch(self, random: Random) -> bool:
        """Plans the next batch, or the one that was planned before a kill, and runs it; False where nothing is new."""
        reader, number = self.reader(), self.done + 1
        planned = self.planned()
        start = planned[number - 1] if number else reader.initialOffset()
        if number == len(planned):
            limit = ReadMaxRows(random.choice([10, 60, 300])) if random.random() < 0.7 else ReadAllAvailable()
            end = reader.latestOffset(start, limit)
            if self.work.time is not None:
                apart = self.plain().latestOffset(start, limit)
                assert {**apart, **_numbers(end)} == end, "the watermark is that which Spark would have"
            if end == start:
                return False
            if random.random() < 0.5:
                reader.reportLatestOffset()  # begins with the batch
            _write(self.folder / "offsets", json.dumps([*planned, end]))
        else:
            end = planned[number]
        rows: list[Any] = []
        for _ in range(random.choice([1, 1, 2])):
            rows = self._run(reader, start, end, random)
        _write(self.folder / "given" / str(number), json.dumps([rows, self._late(start, end)]))
        return True

    def given(self) -> list[list[dict[str, Any]]]:
        """What each batch gave."""
        return [rows for rows, _ in self._done()]

    def late(self) -> int:
        """How many late rows were told of."""
        return sum(late for _, late in self._done())

    def planned(self) -> list[Any]:
        """Up to where each batch goes."""
        path = self.folder / "offsets"
        return json.loads(path.read_text()) if path.exists() else []

    def _done(self) -> list[tuple[list[dict[str, Any]], int]]:
        return [json.loads((self.folder / "given" / str(number)).read_text()) for number in range(self.done + 1)]

    def _late(self, start: Any, end: Any) -> int:
        spans = {
            (TOPIC, int(number)): (start[TOPIC].get(number, 0), offset) for number, offset in end.get(TOPIC, {}).items()
        }
        return LateRows(str(self.folder / "late")).take(spans)

    def _run(self, reader: StreamReader, start: Any, end: Any, random: Random) -> list[Any]:
        """A batch once: by what was fetched while it was planned, or by tasks, of which some ran before in vain."""
        tasks = reader.partitions(start, end)
        fetched = reader.getCache(start, end)
        if fetched is not None and random.random() < 0.5:
            return [row for batch in fetched for row in rows_of(batch)]
        for wanted in random.sample(tasks, random.randint(0, len(tasks))):
            self._read(wanted)
        return [row for wanted in random.sample(tasks, len(tasks)) for row in self._read(wanted)]

    def _read(self, wanted: Any) -> list[Any]:
        worker = pickle.loads(pickle.dumps(self.reader()))
        return [row for batch in worker.read(pickle.loads(pickle.dumps(wanted))) for row in rows_of(batch)]


def rows_of(rows: pa.RecordBatch | pa.Table) -> list[dict[str, Any]]:
    """Rows with times in µs."""
    fields = [f.with_type(pa.int64()) if pa.types.is_timestamp(f.type) else f for f in rows.schema]
    return rows.cast(pa.schema(fields)).to_pylist()


def make_log(folder: Path, partitions: int, *, timed: bool = False) -> hw.Log:
    """A log with the empty topic."""
    log = hw.open_log(folder / "log")
    more = {"time": "at", "lateness": f"{LATENESS_US} microseconds"} if timed else {}
    log.create_topic(TOPIC, TIMED if timed else SCHEMA, key="who", partitions=partitions, **more)
    return log


def bids(random: Random, count: int) -> list[dict[str, Any]]:
    """Random events of few keys."""
    return [
        {
            "who": f"w{'x' * random.randrange(40)}{random.randrange(4)}",
            "lot": random.choice([None, 1, 2]),
            "price": random.choice([None, random.randrange(50)]),
        }
        for _ in range(count)
    ]


def run_all(folder: str, roots: int, seed: int, kind: str) -> None:
    """Runs to the end, wherever an earlier process was killed."""
    run, random = FusedRun(Path(folder), roots, kind=kind), Random(seed)
    while run.batch(random):
        pass


def _numbers(end: dict[str, Any]) -> dict[str, Any]:
    """What only the offsets of a source with an operator say."""
    return {name: end[name] for name in (VERSION, EVENTS) if name in end}


def run_killed(folder: Path, roots: int, random: Random, kind: str, *, kills: int) -> FusedRun:
    """Runs to the end by processes that are killed at any moment, but for the last one."""
    run, paths = FusedRun(folder, roots, kind=kind), os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    for _ in range(kills):
        call = f"run_all({str(folder)!r}, {roots}, {random.randrange(1000)}, {kind!r})"
        process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.rigs.processing import fused_runs as r; r.{call}"],
            env={**os.environ, "PYTHONPATH": paths},
        )
        until = run.done + random.randint(1, 5)
        while run.done < until and process.poll() is None:
            time.sleep(random.random() / 200)
        process.send_signal(signal.SIGKILL)
        assert process.wait() in (0, -signal.SIGKILL)
    run_all(str(folder), roots, random.randrange(1000), kind)
    return run


def _write(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_text(text)
    draft.replace(path)
