"""Rows that become fewer where they are read: the same result as without, in whatever pieces they are read; late rows are told of."""

from __future__ import annotations

import pickle
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import headwater as hw
from headwater.model.clock import NO_TIME
from headwater.processing.operators.aggregate import aggregates_of
from headwater.processing.operators.operator import MAX_TIME, Combining, Time
from headwater.processing.operators.panes import Panes
from headwater.processing.operators.partials import KINDS
from headwater.processing.operators.session_windows import Sessions
from headwater.processing.operators.window_top_n import TopOfWindows
from headwater.processing.operators.windowed import Windowed
from headwater.processing.source import combiner as module
from headwater.processing.source.combiner import Combiner
from headwater.processing.source.operator_input import OperatorInput, to_option
from headwater.processing.source.spark_source import HeadwaterSource
from headwater.processing.source.stream import StreamReader
from headwater.processing.state.state import State, StateTable
from headwater.processing.time.event_time import FIELDS, LATE
from headwater.processing.time.late_rows import LateRows
from tests.rigs.processing.fused_runs import TIMED, TOPIC, make_log
from tests.rigs.processing.operator_runs import hashed, seeds

SECOND = 1_000_000
NOON = 1_769_860_800 * SECOND
ROWS = [f"k{number}" for number in range(7)]
AGGREGATES = aggregates_of({"n": "count", "most": ("max", "price")}, TIMED, taken=["lot"], kinds=KINDS)
OPERATORS: dict[str, Combining] = {
    "windows": Windowed(TIMED, ["lot"], "at", Panes(10 * SECOND, 5 * SECOND), AGGREGATES),
    "sessions": Sessions(TIMED, ["lot"], "at", 4 * SECOND, AGGREGATES),
    "best": TopOfWindows(TIMED, 2, ["price DESC"], ["lot"], "at", Panes(10 * SECOND, 10 * SECOND), ties=True),
}


def bids(random: Random, count: int) -> pa.Table:
    """Events of any lot: most a little out of order, some too late, some without a time."""
    rows = []
    for number in range(count):
        behind = random.choice([0, 0, 3, 20, 90]) * SECOND
        at = None if random.random() < 0.03 else NOON + number * SECOND // 4 - behind
        price = random.choice([None, random.randrange(20)])
        rows.append({"who": random.choice(ROWS), "lot": random.choice([None, 1, 2, 3]), "price": price, "at": at})
    plain = pa.schema([field.with_type(pa.int64()) if field.name == "at" else field for field in TIMED])
    return pa.Table.from_pylist(rows, plain).cast(TIMED)


def reader_of(folder: Path, operator: Combining, where: str | None = None) -> StreamReader:
    """A source with the operator's first step in it."""
    read = pa.schema([*TIMED, FIELDS[LATE]])
    options = {"log": str(folder / "log"), "topic": TOPIC, "startingOffsets": "earliest"}
    side = OperatorInput(
        TOPIC, read, {**options, "columns": ",".join(read.names)}, TIMED, TIMED.names, ["lot"],
        time="at", where=where, late_rows=str(folder / "late"),
    )  # fmt: skip
    source = HeadwaterSource({**options, "operator": to_option(Combiner(operator, side))})
    return source.streamReader(source.schema())


def given(reader: StreamReader, worker: StreamReader) -> tuple[pa.Table, Any, Any]:
    """All that is there, planned by one reader and read by the tasks of another."""
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    tasks = pickle.loads(pickle.dumps(reader.partitions(start, end)))
    return pa.Table.from_batches(batch for task in tasks for batch in worker.read(task)), start, end


def result(operator: Combining, rows: pa.Table) -> list[Any]:
    """What the operator makes of rows, combined or not, when all time has passed."""
    state = State({name: StateTable(spec) for name, spec in operator.tables.items()})
    found = operator.process(state, [hashed(rows, ["lot"])], Time(NO_TIME, MAX_TIME))
    return sorted(map(repr, found.select(operator.schema.names).to_pylist()))


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("kind", OPERATORS)
def test_combined_rows_give_what_all_rows_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    """In pieces of any size, by one task or several; without what is late, of which it is told how many that are."""
    random, operator = Random(seed), OPERATORS[kind]
    monkeypatch.setattr(module, "COMBINED_ROWS", random.choice([1, 50, 1 << 20]))
    count = random.choice([30, 600, 3000])
    with make_log(tmp_path, random.randint(1, 3), timed=True) as log:
        log.append(TOPIC, bids(random, count))
        rows, start, end = given(reader_of(tmp_path, operator), reader_of(tmp_path, operator))
        apart = _in_time(log)
    assert rows.schema.names == operator.combined.names and rows.num_rows <= apart.num_rows
    assert result(operator, rows) == result(operator, apart)
    spans = {(TOPIC, int(number)): (start[TOPIC][number], offset) for number, offset in end[TOPIC].items()}
    assert LateRows(str(tmp_path / "late")).take(spans) == count - apart.num_rows
    assert end[".events"] == count and ".version" not in end, "it has no state, and events are counted all the same"


def test_what_is_asked_of_rows_is_asked_behind_the_lateness(tmp_path: Path) -> None:
    """Late rows that would not be asked for are late all the same, as they are where Spark asks."""
    random, operator = Random(3), OPERATORS["windows"]
    with make_log(tmp_path, 2, timed=True) as log:
        log.append(TOPIC, bids(random, 900))
        readers = [reader_of(tmp_path, operator, where='["GreaterThan", ["price"], 9]') for _ in range(2)]
        rows, start, end = given(*readers)
        apart = _in_time(log)
    kept = apart.filter(pa.array([price is not None and price > 9 for price in apart.column("price").to_pylist()]))
    assert 0 < kept.num_rows < apart.num_rows
    assert result(operator, rows) == result(operator, kept)
    spans = {(TOPIC, int(number)): (start[TOPIC][number], offset) for number, offset in end[TOPIC].items()}
    assert LateRows(str(tmp_path / "late")).take(spans) == 900 - apart.num_rows


def _in_time(log: hw.Log) -> pa.Table:
    """The events that are not late by their own partition, row by row."""
    lateness, reached, kept = log.topic(TOPIC).lateness_us, dict[int, int](), list[int]()
    rows = log.read(TOPIC, columns=[*TIMED.names, "_partition"])
    times = rows.column("at").cast(pa.int64()).to_pylist()
    for place, (partition, at) in enumerate(zip(rows.column("_partition").to_pylist(), times, strict=True)):
        if at is not None and at >= reached.get(partition, NO_TIME) - lateness:
            kept.append(place)
            reached[partition] = max(reached.get(partition, NO_TIME), at)
    return rows.select(TIMED.names).take(pa.array(kept, pa.int64()))
