"""Operators by event time inside sources: late rows, heartbeats, partitions added, batches run again, kills; equal to the same operator
behind Spark, batch by batch, and to brute force over all events."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.log.arrow.placement import key_bytes, partitions_of
from headwater.model.clock import NO_TIME
from headwater.processing.checkpoint.offsets import WATERMARK
from headwater.processing.operators.operator import Time, left_out_by
from headwater.processing.source.topic_subscription import tell_empty
from headwater.processing.state.state import StateStore
from headwater.processing.time.event_time import BATCH_WATERMARK, FIELDS, LATE
from headwater.processing.time.late_rows import LateRows
from headwater.processing.time.late_rows import apart as apart_from_source
from tests.rigs.processing.fused_runs import (
    HOPS,
    LATENESS_US,
    OVER_US,
    TIMED,
    TOPIC,
    FusedRun,
    make_log,
    once,
    rows_of,
    run_killed,
)
from tests.rigs.processing.operator_runs import hashed, seeds

SECOND = 1_000_000
NOON, FUTURE = 1_769_860_800 * SECOND, 4_070_908_800 * SECOND
KEYS = [f"k{number}" for number in range(12)]
KINDS = ["pace", "once", "best_in_time", "hops", "visits", "peaks", "rises"]
KILLS = 3

Row = dict[str, Any]


class Feed:
    """Appends events at their own pace: most a little out of order, some far too late, some without a time or from 2099.

    Some partitions stay empty at first, and the first event that comes there may be far too late as well.
    """

    def __init__(self, log: hw.Log, random: Random) -> None:
        self._log, self._random, self._now = log, random, NOON
        self._keys = KEYS[: random.choice([1, 12])]

    def all_keys(self) -> None:
        """An event of each key, so that no partition is empty."""
        self._append([self._bid(who, self._now) for who in KEYS])

    def some(self, count: int) -> None:
        """So many events."""
        random, rows = self._random, list[Row]()
        for _ in range(count):
            self._now += random.choice([0, 1, 2]) * SECOND
            behind = random.choice([0, 0, 3 * SECOND, LATENESS_US, LATENESS_US + 1, 90 * SECOND])
            at = random.choice([None, FUTURE]) if random.random() < 0.04 else self._now - behind
            rows.append(self._bid(random.choice(self._keys), at))
        self._append(rows)
        self._keys = KEYS

    def heartbeat(self) -> None:
        """Time passes, without an event."""
        self._now += self._random.choice([1, 60]) * SECOND
        self._log.heartbeat(TOPIC, self._now)

    def _bid(self, who: str, at: int | None) -> Row:
        lot, price = self._random.choice([None, 1, 2]), self._random.choice([None, self._random.randrange(50)])
        return {"who": who, "lot": lot, "price": price, "at": at}

    def _append(self, rows: list[Row]) -> None:
        plain = pa.schema([field.with_type(pa.int64()) if field.name == "at" else field for field in TIMED])
        self._log.append(TOPIC, pa.Table.from_pylist(rows, plain).cast(TIMED))


@pytest.mark.parametrize("seed", seeds(12))
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_operator_by_time_gives_what_it_gives_apart(tmp_path: Path, kind: str, seed: int) -> None:
    """Batch by batch the same rows, in the end what all events give that were not late; and how many were is told."""
    random = Random(seed)
    roots = random.randint(1, 3)
    with make_log(tmp_path, roots, timed=True) as log:
        feed, run = Feed(log, random), FusedRun(tmp_path, roots, kind=kind)
        for _ in range(random.randint(1, 4)):
            feed.some(random.choice([1, 30, 200]))
            if random.random() < 0.3:
                feed.heartbeat()
            if random.random() < 0.2 and log.topic(TOPIC).partitions == roots:
                log.alter_topic(TOPIC, partitions=roots * random.choice([2, 3]))
                if random.random() < 0.5:
                    feed.all_keys()
            while run.batch(random):
                pass
        check(run, log, tmp_path, kind)


def timed_bids(log: hw.Log, who: str, *seconds: int) -> None:
    """Bids of one who, so many seconds after noon."""
    plain = pa.schema([field.with_type(pa.int64()) if field.name == "at" else field for field in TIMED])
    rows = [{"who": who, "lot": 1, "price": 1, "at": NOON + second * SECOND} for second in seconds]
    log.append(TOPIC, pa.Table.from_pylist(rows, plain).cast(TIMED))


def all_batches(run: FusedRun, seed: int = 0) -> FusedRun:
    random = Random(seed)
    while run.batch(random):
        pass
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_event_of_an_empty_partition_is_late_by_the_log(tmp_path: Path, kind: str) -> None:
    """Before the watermark passes an empty partition that stands in the log: what comes there first and is older is late, counted, and
    late again for whoever reads the log in other batches. What is not older than the lateness allows is on time."""
    first, other = apart_keys()
    with make_log(tmp_path, 2, timed=True) as log:
        timed_bids(log, first, 0, 50, 100)
        run = all_batches(FusedRun(tmp_path, 2, kind=kind))
        assert log.reached(TOPIC) == dict.fromkeys((0, 1), NOON + 100 * SECOND)
        timed_bids(log, other, 10, 79, 80, 200)
        timed_bids(log, first, 200)
        check(all_batches(run), log, tmp_path, kind)
        assert run.late() == 2
    again = tmp_path / "again"
    again.mkdir()
    (again / "log").symlink_to(tmp_path / "log")
    for seed in range(3):
        for part in ("given", "state", "offsets", "checkpoint"):
            shutil.rmtree(again / part, ignore_errors=True)
        (again / "offsets").unlink(missing_ok=True)
        assert all_batches(FusedRun(again, 2, kind=kind), seed).late() == 2


def test_an_event_that_was_first_is_waited_for(tmp_path: Path) -> None:
    """Nobody says of a partition that time has passed it once an event is there: the watermark waits until that was read."""
    first, other = apart_keys()
    with make_log(tmp_path, 2, timed=True) as log:
        timed_bids(log, first, 0, 100)
        timed_bids(log, other, 10)
        for partition in (0, 1):
            assert tell_empty(log.url, (TOPIC, partition), NOON + 3600 * SECOND) is None
        run = all_batches(FusedRun(tmp_path, 2, kind="pace"))
        assert run.late() == 0
        assert run.planned()[-1][WATERMARK] == NOON + 10 * SECOND - LATENESS_US - 1


def test_what_an_operator_leaves_out_by_a_time_of_its_own_is_counted(tmp_path: Path) -> None:
    """Of a topic whose time is another column it may be given rows that are passed by its own, or have none."""
    operator = once().operator
    times = pa.array([None, 5, 10, 11, 30], pa.timestamp("us", tz="UTC"))
    rows = pa.table({"t": times, "w": pa.array(list("abcde"))})
    assert left_out_by(operator, [rows], Time(10, 20)) == 3
    assert left_out_by(operator, [rows], Time(NO_TIME, 20)) == 1
    assert left_out_by(operator, [rows.drop_columns("t")], Time(10, 20)) == 0, "of combined rows"
    told = LateRows(str(tmp_path))
    told.tell((apart_from_source("dedupe-1"), 0), 4, 5, 3)
    told.tell((apart_from_source("dedupe-1"), 0), 4, 5, 3)
    assert told.take({(apart_from_source("dedupe-1"), 0): (0, 4)}) == 0, "of a batch that is not done"
    assert told.take({(apart_from_source("dedupe-1"), 0): (0, 5)}) == 3
    assert told.take({(apart_from_source("dedupe-1"), 0): (0, 9)}) == 0


def test_what_a_watermark_has_passed_is_late_also_with_a_greater_lateness(tmp_path: Path) -> None:
    """An operator would drop it without a word: it is counted."""
    with make_log(tmp_path, 1, timed=True) as log:
        timed_bids(log, KEYS[0], 0, 100)
        run = all_batches(FusedRun(tmp_path, 1, kind="pace"))
        log.alter_topic(TOPIC, lateness="1 hour")
        timed_bids(log, KEYS[0], 70, 80, 90)
        all_batches(run)
        assert run.late() == 1
        log.heartbeat(TOPIC, NOON + 2 * 3600 * SECOND)
        rows = [row for rows in all_batches(run).given() for row in rows]
        assert sorted((row["at"] - NOON) // SECOND for row in rows) == [0, 80, 90, 100]


def apart_keys() -> tuple[str, str]:
    """Two keys that are in different partitions of two."""
    placed = partitions_of(key_bytes(pa.array(KEYS)), 2).tolist()
    return KEYS[placed.index(0)], KEYS[placed.index(1)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.bench) for seed in range(2, 8))])
def test_no_kill_makes_an_event_late_or_lost(tmp_path: Path, seed: int) -> None:
    """`kill -9` at any moment; the next process runs the batch again that was planned, by the watermarks that it had."""
    random = Random(seed)
    with make_log(tmp_path, 3, timed=True) as log:
        feed = Feed(log, random)
        for _ in range(60):
            feed.some(20)
        feed.heartbeat()
        check(run_killed(tmp_path, 3, random, "pace", kills=KILLS), log, tmp_path, "pace")


def check(run: FusedRun, log: hw.Log, folder: Path, kind: str) -> None:
    """What a run gave is what the operator gives apart, and what brute force gives."""
    given = run.given()
    assert [in_order(rows) for rows in given] == [in_order(rows) for rows in apart(run, folder)]
    everything = [row for rows in given for row in rows]
    in_time, late, watermark = told(log)
    assert run.late() == late
    if kind == "pace":
        assert in_order(everything) == in_order(brute_pace(in_time, watermark))
    elif kind == "once":
        found = [(row["w"], row["n"], row["t"]) for row in everything]
        assert len(found) == len(set(found)) and set(found) == {(r["who"], r["lot"], r["at"]) for r in in_time}
    elif kind == "hops":
        assert in_order(everything) == in_order(brute_hops(in_time, watermark))
    elif kind == "visits":
        assert in_order(everything) == in_order(brute_visits(in_time, watermark))
    elif kind == "rises":
        found = [(row["who"], row["matched_at"], row["_t0_0"], row["_t1_0"]) for row in everything]
        assert sorted(found) == sorted(brute_rises(in_time, watermark))
    elif kind == "peaks":
        assert in_order(everything) == in_order(brute_peaks(in_time, watermark))
    else:
        assert {(row["who"], row["rank"]): row["price"] for row in everything} == brute_best(in_time)


def brute_rises(events: list[Row], watermark: int) -> list[tuple[Any, ...]]:
    """Of each who, in the order of time, pairs of which the second has the higher price."""
    found, last = list[tuple[Any, ...]](), dict[str, Row]()
    for event in sorted((each for each in events if each["at"] <= watermark), key=lambda each: each["at"]):
        before = last.get(event["who"], {"price": None})["price"]
        if before is not None and event["price"] is not None and event["price"] > before:
            found.append((event["who"], event["at"], before, event["price"]))
        last[event["who"]] = event
    return found


def in_order(rows: list[Row]) -> list[str]:
    """Rows that can be compared: a batch gives them in any order."""
    return sorted(repr(sorted(row.items())) for row in rows)


def apart(run: FusedRun, folder: Path) -> list[list[Row]]:
    """The same batches through the operator with a state of its own, given what a source without an operator reads."""
    operator, schema, columns, key, _ = run.work
    key = [schema.names[columns.index(name)] for name in key]
    store = StateStore(
        str(folder / "apart"), uid="op", query="q", fingerprint="f", partition=0, partitions=1, specs=operator.tables
    )
    nothing = pa.schema(
        [field.with_nullable(True) for field in [*TIMED, FIELDS[LATE], FIELDS[BATCH_WATERMARK]]]
    ).empty_table()
    found, start = list[list[Row]](), run.plain().initialOffset()
    for epoch, end in enumerate(run.planned()):
        reader = run.plain()
        batches = [batch for task in reader.partitions(start, end) for batch in reader.read(task)]
        rows = pa.concat_tables([nothing, *(pa.Table.from_batches([batch]).cast(nothing.schema) for batch in batches)])
        is_given = [row[LATE] is False and row["at"] is not None for row in rows.to_pylist()]
        mine = rows.filter(pa.array(is_given, pa.bool_())).select(columns).rename_columns(schema.names)
        state = store.load(epoch - 1)
        result = operator.process(state, [hashed(mine, key)], Time(start.get(WATERMARK, NO_TIME), end[WATERMARK]))
        store.save(state, epoch)
        found.append(rows_of(result.select(operator.schema.names)))
        start = end
    return found


def told(log: hw.Log) -> tuple[list[Row], int, int]:
    """Row by row, by their own partitions: the events that are not late, how many are, and the watermark in the end."""
    events = rows_of(log.read(TOPIC, columns=[*TIMED.names, "_partition", "_offset"]))
    in_time, reached = list[Row](), list[int]()
    for partition in range(log.topic(TOPIC).partitions):
        beats = [(beat.offset, beat.time) for beat in log.store.heartbeats(TOPIC, partition)]
        greatest = begun_with(log, partition, events)
        for row in sorted((row for row in events if row["_partition"] == partition), key=lambda row: row["_offset"]):
            greatest = max(greatest, *(time for offset, time in beats if offset <= row["_offset"]), NO_TIME)
            if row["at"] is not None and row["at"] >= greatest - LATENESS_US:
                in_time.append(row)
            greatest = max(greatest, NO_TIME if row["at"] in (None, FUTURE) else row["at"])
        reached.append(max([greatest, *(time for _, time in beats)]))
    waits = any(time == NO_TIME and log.offsets(TOPIC)[number].stop for number, time in enumerate(reached))
    known = [time - LATENESS_US - 1 for time in reached if time != NO_TIME]
    return in_time, len(events) - len(in_time), NO_TIME if waits else min(known, default=NO_TIME)


def begun_with(log: hw.Log, partition: int, events: list[Row]) -> int:
    """How far time had come in a partition that was split off: as far as the events of the one it came from, when it was."""
    times = [
        row["at"]
        for ancestor, fence in log.topic(TOPIC).ancestors(partition)
        for row in events
        if row["_partition"] == ancestor and row["_offset"] < fence and row["at"] not in (None, FUTURE)
    ]
    return max(times, default=NO_TIME)


def brute_pace(in_time: list[Row], watermark: int) -> list[Row]:
    found = []
    for row in in_time:
        if row["at"] <= watermark:
            near = [r for r in in_time if r["who"] == row["who"] and row["at"] - OVER_US <= r["at"] <= row["at"]]
            prices = [r["price"] for r in near if r["price"] is not None]
            own = {name: row[name] for name in TIMED.names}
            found.append({**own, "n": len(near), "total": sum(prices) if prices else None})
    return found


def in_windows(in_time: list[Row], watermark: int) -> dict[tuple[str, int], list[Row]]:
    """The rows of each who in each window that has ended."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in in_time:
        for start in range(row["at"] // HOPS.every * HOPS.every, row["at"] - HOPS.over, -HOPS.every):
            if start + HOPS.over - 1 <= watermark:
                found.setdefault((row["who"], start), []).append(row)
    return found


def summed(rows: list[Row]) -> Row:
    prices = [row["price"] for row in rows if row["price"] is not None]
    return {"bids": len(rows), "total": sum(prices) if prices else None}


def brute_hops(in_time: list[Row], watermark: int) -> list[Row]:
    return [
        {"who": who, "window_start": start, "window_end": start + HOPS.over, **summed(rows)}
        for (who, start), rows in in_windows(in_time, watermark).items()
    ]


def brute_peaks(in_time: list[Row], watermark: int) -> list[Row]:
    found = list[Row]()
    for (_, start), rows in in_windows(in_time, watermark).items():
        highest = max((row["price"] for row in rows if row["price"] is not None), default=None)
        ends = {"window_start": start, "window_end": start + HOPS.over}
        found += [
            {"rank": 1, **{name: row[name] for name in TIMED.names}, **ends} for row in rows if row["price"] == highest
        ]
    return found


def brute_visits(in_time: list[Row], watermark: int) -> list[Row]:
    found, rows = list[list[Row]](), list[Row]()
    keys = {(row["who"], row["lot"]) for row in in_time}
    for key in keys:
        mine = sorted((row for row in in_time if (row["who"], row["lot"]) == key), key=lambda row: row["at"])
        rows = []
        for row in mine:
            if not rows or row["at"] - rows[-1]["at"] > OVER_US:
                found.append(rows := [])
            rows.append(row)
    ends = [(rows, {"window_start": rows[0]["at"], "window_end": rows[-1]["at"] + OVER_US}) for rows in found]
    return [
        {"w": rows[0]["who"], "n": rows[0]["lot"], **end, **summed(rows)}
        for rows, end in ends
        if end["window_end"] <= watermark
    ]


def brute_best(in_time: list[Row]) -> dict[Any, int | None]:
    found = {}
    for who in {row["who"] for row in in_time}:
        mine = sorted(
            (r["price"] for r in in_time if r["who"] == who), key=lambda price: (price is None, -(price or 0))
        )
        found |= {(who, rank): price for rank, price in enumerate(mine[:2], 1)}
    return found
