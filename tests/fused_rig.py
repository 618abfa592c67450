"""A fused operator without a Spark: the stream reader is asked as Spark asks it, with a checkpoint of our own that a kill leaves behind.

Before a batch runs, its end stands in the file `offsets`; when it is done, what it gave stands in `given/<batch>`, written in one step.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import headwater as hw
from headwater.processing.aggregate import aggregates_of
from headwater.processing.fused import Fused
from headwater.processing.operator import Operator
from headwater.processing.source import HeadwaterSource
from headwater.processing.stream import StreamReader
from headwater.processing.top_n import TopN
from headwater.processing.totals import KINDS, Totals

TOPIC = "bids"
SCHEMA = pa.schema([pa.field("who", pa.string(), nullable=False), ("lot", pa.int64()), ("price", pa.int64())])
WANTED = {"n": "count", "total": ("sum", "price"), "low": ("min", "price")}


def totals() -> tuple[Operator, pa.Schema, list[str]]:
    """Totals by who and lot, with the input that `hw.totals` makes of the topic, and of which columns."""
    aggregates = aggregates_of(WANTED, SCHEMA, taken=["who", "lot"], kinds=KINDS)
    made = Totals([SCHEMA.field("who"), SCHEMA.field("lot")], aggregates, SCHEMA, is_signed=False)
    named = {"b0": "who", "b1": "lot", "v0": "price"}
    return made, pa.schema([SCHEMA.field(name).with_name(alias) for alias, name in named.items()]), list(named.values())


def best() -> tuple[Operator, pa.Schema, list[str]]:
    """The two best of each who."""
    return TopN(SCHEMA, 2, ["price DESC"]), SCHEMA, SCHEMA.names


class FusedRun:
    """A stream with an operator in its source, that goes on from what its folder holds."""

    def __init__(self, folder: Path, roots: int, *, kind: str) -> None:
        operator, schema, columns = {"totals": totals, "best": best}[kind]()
        key = ["who", "lot"] if kind == "totals" else ["who"]
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "metadata").write_text('{"id": "q"}')
        fused = Fused(operator, schema, columns, key, "who", roots, str(folder / "state"), "op", "f", str(checkpoint))
        self.folder, self.operator = folder, operator
        self._options = {
            "log": str(folder / "log"), "topic": TOPIC, "startingOffsets": "earliest", "columns": ",".join(fused.read.names),
            "operator": fused.to_option(),
        }  # fmt: skip
        (folder / "given").mkdir(exist_ok=True)
        self._source = HeadwaterSource(self._options)

    def reader(self) -> StreamReader:
        """A reader as Spark makes it after each start."""
        return self._source.streamReader(self._source.schema())

    @property
    def done(self) -> int:
        """The last batch that was done."""
        return max((int(path.name) for path in (self.folder / "given").iterdir() if path.name.isdigit()), default=-1)

    def batch(self, random: Random) -> bool:
        """Plans the next batch, or the one that was planned before a kill, and runs it; False where nothing is new."""
        reader, number = self.reader(), self.done + 1
        planned = self._planned()
        start = planned[number - 1] if number else reader.initialOffset()
        if number == len(planned):
            limit = ReadMaxRows(random.choice([10, 60, 300])) if random.random() < 0.7 else ReadAllAvailable()
            end = reader.latestOffset(start, limit)
            if end == start:
                return False
            _write(self.folder / "offsets", json.dumps([*planned, end]))
        else:
            end = planned[number]
        rows: list[Any] = []
        for _ in range(random.choice([1, 1, 2])):
            rows = self._run(reader, start, end, random)
        _write(self.folder / "given" / str(number), json.dumps(rows))
        return True

    def given(self) -> list[list[dict[str, Any]]]:
        """What each batch gave."""
        return [json.loads((self.folder / "given" / str(number)).read_text()) for number in range(self.done + 1)]

    def _run(self, reader: StreamReader, start: Any, end: Any, random: Random) -> list[Any]:
        """A batch once: by what was fetched while it was planned, or by tasks, of which some ran before in vain."""
        tasks = reader.partitions(start, end)
        fetched = reader.getCache(start, end)
        if fetched is not None and random.random() < 0.5:
            return [row for batch in fetched for row in batch.to_pylist()]
        for wanted in random.sample(tasks, random.randint(0, len(tasks))):
            self._read(wanted)
        return [row for wanted in random.sample(tasks, len(tasks)) for row in self._read(wanted)]

    def _read(self, wanted: Any) -> list[Any]:
        worker = pickle.loads(pickle.dumps(self.reader()))
        return [row for batch in worker.read(pickle.loads(pickle.dumps(wanted))) for row in batch.to_pylist()]

    def _planned(self) -> list[Any]:
        path = self.folder / "offsets"
        return json.loads(path.read_text()) if path.exists() else []


def make_log(folder: Path, partitions: int) -> hw.Log:
    """A log with the empty topic."""
    log = hw.open_log(folder / "log")
    log.create_topic(TOPIC, SCHEMA, key="who", partitions=partitions)
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


def _write(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_text(text)
    draft.replace(path)
