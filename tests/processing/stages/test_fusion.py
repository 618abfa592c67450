"""Operators inside sources: any cut, batches run again, partitions added, kills; equal to the same without fusion and to brute force."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from headwater.model.clock import NO_TIME
from headwater.model.errors import Conflict, StorageError, Unsupported
from headwater.processing.operators.operator import MAX_TIME, Time
from headwater.processing.spark.hashing import hashes_of, hashes_of_values, is_hashable
from headwater.processing.stages.fusion import chosen, placed_by
from headwater.processing.state.state import State, StateTable
from tests.rigs.processing.fused_runs import SCHEMA, TOPIC, WORKS, FusedRun, bids, make_log, rows_of, run_killed
from tests.rigs.processing.operator_runs import hashed, seeds

KILLS = 4
Row = dict[str, Any]


@pytest.mark.parametrize("seed", seeds())
def test_a_fused_operator_gives_what_it_gives_apart(tmp_path: Path, seed: int) -> None:
    """Batch by batch the same changes, in the end what all events give; also when the topic gets more partitions meanwhile."""
    random = Random(seed)
    kind, roots = random.choice(["totals", "best"]), random.randint(1, 3)
    with make_log(tmp_path, roots) as log:
        run = FusedRun(tmp_path, roots, kind=kind)
        for _ in range(random.randint(1, 4)):
            log.append(TOPIC, bids(random, random.choice([1, 20, 200])))
            if random.random() < 0.2 and log.topic(TOPIC).partitions == roots:
                log.alter_topic(TOPIC, partitions=roots * random.choice([2, 3]))
            while run.batch(random):
                pass
        events = log.read(TOPIC).to_pylist()
    check(run.given(), kind, events)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.bench) for seed in range(2, 8))])
def test_no_kill_counts_an_event_twice_or_not_at_all(tmp_path: Path, seed: int) -> None:
    """`kill -9` at any moment; the next process runs the batch again that was planned, and goes on."""
    random, roots = Random(seed), 3
    with make_log(tmp_path, roots) as log:
        for _ in range(60):
            log.append(TOPIC, bids(random, 20))
        run = run_killed(tmp_path, roots, random, "totals", kills=KILLS)
        events = log.read(TOPIC).to_pylist()
    check(run.given(), "totals", events)


def check(given: list[list[Row]], kind: str, events: list[Row]) -> None:
    """The changes of all batches, applied one after the other, are the table that all events give at once, and that brute force gives."""
    key = ("who", "lot") if kind == "totals" else ("who", "rank")
    table: dict[Any, Row] = {}
    for rows in given:
        assert len({tuple(row[name] for name in key) for row in rows}) == len(rows), "a batch says one thing of a key"
        table |= {tuple(row[name] for name in key): row for row in rows}
    apart = {tuple(row[name] for name in key): row for row in at_once(kind, events)}
    assert table == apart
    assert table == (brute_totals(events) if kind == "totals" else brute_best(events))


def at_once(kind: str, events: list[Row]) -> list[Row]:
    """The operator over everything, with hashes of its own and no source."""
    operator, schema, columns, key, _ = WORKS[kind]()
    rows = pa.Table.from_pylist(events, SCHEMA).select(columns).rename_columns(schema.names)
    state = State({name: StateTable(spec) for name, spec in operator.tables.items()})
    key = [schema.names[columns.index(name)] for name in key]
    return operator.process(state, [hashed(rows, key)], Time(NO_TIME, MAX_TIME)).to_pylist()


def brute_totals(events: list[Row]) -> dict[Any, Row]:
    found: dict[Any, Row] = {}
    for event in events:
        key = event["who"], event["lot"]
        row = found.setdefault(key, {"who": key[0], "lot": key[1], "n": 0, "total": None, "low": None})
        row["n"] += 1
        if event["price"] is not None:
            row["total"] = (row["total"] or 0) + event["price"]
            row["low"] = event["price"] if row["low"] is None else min(row["low"], event["price"])
    return found


def brute_best(events: list[Row]) -> dict[Any, Row]:
    def order(row: Row) -> Any:
        return row["price"] is None, -(row["price"] or 0), row["lot"] is None, row["lot"] or 0

    found = {}
    for who in {event["who"] for event in events}:
        mine = sorted((event for event in events if event["who"] == who), key=order)
        found |= {(who, rank): {"rank": rank, **row} for rank, row in enumerate(mine[:2], 1)}
    return found


def test_a_key_where_it_does_not_belong_is_refused(tmp_path: Path) -> None:
    """A topic may have been copied from a log that places keys by other rules: nothing is counted apart in silence."""
    with make_log(tmp_path, 2) as log:
        log.append(TOPIC, bids(Random(1), 50))
        run = FusedRun(tmp_path, 5, kind="best")
        with pytest.raises(Unsupported, match="does not belong"):
            run.batch(Random(1))


def test_a_small_batch_is_one_task_and_one_arrow_batch(tmp_path: Path) -> None:
    """However many roots it has: each batch costs Spark its time."""
    with make_log(tmp_path, 4) as log:
        log.append(TOPIC, bids(Random(1), 50))
        reader = FusedRun(tmp_path, 4, kind="totals").reader()
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadAllAvailable())
        assert len(reader.partitions(start, end)) == 1
        [batch] = reader.getCache(start, end) or ()
        assert batch.num_rows
        states = sorted(path.parent.name for path in tmp_path.rglob("*.state"))
        assert states == [f"0000{root}-of-00004.topic" for root in range(4)]


def test_nothing_is_given_before_all_states_are_saved(tmp_path: Path) -> None:
    """One that cannot be saved fails the batch; the others may be there, and it is run again from the version before."""
    with make_log(tmp_path, 4) as log:
        log.append(TOPIC, bids(Random(1), 50))
        run = FusedRun(tmp_path, 4, kind="totals")
        reader = run.reader()
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadAllAvailable())
        in_the_way = tmp_path / "state" / "op" / "00002-of-00004.topic" / "000000000000.state" / "x"
        in_the_way.mkdir(parents=True)
        [task] = reader.partitions(start, end)
        assert reader.getCache(start, end) is None
        with pytest.raises(StorageError):
            next(iter(run.reader().read(task)))
        shutil.rmtree(in_the_way.parent)
        assert sum(row["n"] for batch in run.reader().read(task) for row in rows_of(batch)) == 50


def test_a_checkpoint_stays_as_it_was_begun(tmp_path: Path) -> None:
    """Fused where it begins so; apart where it was begun before; and refused where it cannot go on as it was."""
    fresh, old = str(tmp_path / "fresh"), str(tmp_path / "old")
    assert chosen(fresh, ["top_n-1"]) == ["top_n-1"]
    assert chosen(fresh, ["totals-1"]) == ["totals-1"], "no batch yet, so it may begin otherwise"
    (tmp_path / "fresh" / "offsets").mkdir()
    (tmp_path / "fresh" / "offsets" / "0").touch()
    assert chosen(fresh, ["totals-1", "top_n-1"]) == ["totals-1"]
    with pytest.raises(Conflict, match="can no longer run there"):
        chosen(fresh, [])
    (tmp_path / "old" / "offsets").mkdir(parents=True)
    (tmp_path / "old" / "offsets" / "0").touch()
    assert chosen(old, ["totals-1"]) == []


def test_only_a_key_that_is_never_null_places_events() -> None:
    never_null = [pa.field(name, kind, nullable=False) for name, kind in (("a", pa.string()), ("c", pa.float64()))]
    schema = pa.schema([*never_null, ("b", pa.string())])
    assert [placed_by(schema, key) for key in ("a", "b", "c", None)] == ["a", None, None, None]


def test_hashes_are_those_of_spark() -> None:
    """Values that Spark 4.3 gave for xxhash64(isnull(v), v) and xxhash64(1, isnull(v), v)."""
    for values, expected in SPARK_HASHES:
        h1, h2 = hashes_of([values])
        assert list(zip(h1.tolist(), h2.tolist(), strict=True)) == expected
        once = hashes_of_values(pa.chunked_array([values, values.slice(1), values], values.type))
        assert list(zip(*(each.tolist() for each in once), strict=True)) == [*expected, *expected[1:], *expected]
    assert [len(each) for each in hashes_of_values(pa.chunked_array([], pa.string()))] == [0, 0]
    assert not is_hashable(pa.float64())


SPARK_HASHES: Iterable[tuple[pa.Array, list[tuple[int, int]]]] = [
    (
        pa.array(["", "abc", "abcd", "äöü€ twenty-five bytes", "x" * 32, "y" * 77, None]),
        [
            (-6955412699463271691, 5227494197184784708),
            (2632047830828564796, 2178580530066809961),
            (-6870513741320518630, -7496935404451645692),
            (5409878902399965874, 4957733566378783496),
            (8346466930215358248, 1881204884477740008),
            (243975164085314824, 173350483844820988),
            (-6698625589789238999, 9083826852238114423),
        ],
    ),
    (
        pa.array([0, -1, 2**62, None]),
        [
            (-2984540310115537990, -712763008061114655),
            (5740949786098319654, -8875006554550997031),
            (-2477086462744799099, 7050952761526254690),
            (-6698625589789238999, 9083826852238114423),
        ],
    ),
    (pa.array([-7], pa.int8()), [(-6935808467821448330, -5698459813195780573)]),
    (pa.array([True]), [(7945966957015589024, -2325561461537681649)]),
    (pa.array([date(2026, 1, 31)]), [(2359015993244691073, -506659716033873414)]),
    (pa.array([b"\xff\x00"]), [(4765880758286379732, 6522196383030401472)]),
    (
        pa.array([1_769_860_800_123_456], pa.timestamp("us", "UTC")),
        [(6174706760842069824, -5236497077155398173)],
    ),
]
