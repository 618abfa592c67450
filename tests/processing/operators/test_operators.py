"""Our operators against brute force: any cut, any order within the lateness, batches run again, another number of partitions."""

from __future__ import annotations

import statistics
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from headwater.model.clock import NO_TIME
from headwater.processing.operators.aggregate import aggregates_of
from headwater.processing.operators.dedupe import Dedupe
from headwater.processing.operators.lookup import Lookup
from headwater.processing.operators.operator import _Side, _task
from headwater.processing.operators.sliding import Sliding
from headwater.processing.operators.top_n import TopOfEvents
from tests.rigs.processing.operator_runs import UTC_US, cut, delay, in_time, run_batches, seeds, shuffled, table_of

SECOND = 1_000_000
SCHEMA = pa.schema([("id", pa.string()), ("v", pa.int64()), ("at", UTC_US)])
SEEDS = seeds()


def micros(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "at": round(row["at"].timestamp() * SECOND)}


def sorted_rows(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted(tuple(micros(row).values()) for row in rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_of_copies_one_is_let_through(tmp_path: Path, seed: int) -> None:
    """Copies have the key and the time of their event, and come in any order, batches apart."""
    random = Random(seed)
    lateness, within = random.choice([0, 5, 50]) * SECOND, random.choice([0, 2]) * SECOND
    events = [{"id": f"k{n % 40}", "v": n, "at": n * 4 * SECOND} for n in range(120)]
    copies = [dict(random.choice(events)) for _ in range(80)]
    rows = shuffled(random, events + copies, at="at", lateness_us=lateness)
    batches, watermarks = cut(random, rows, SCHEMA, ["id"], at="at", lateness_us=lateness)
    given = run_batches(Dedupe(SCHEMA, "at", within), random, tmp_path, batches, watermarks)
    assert sorted_rows(given) == sorted(tuple(event.values()) for event in events)


@pytest.mark.parametrize("seed", seeds(10))
def test_of_copies_that_differ_the_first_is_let_through(tmp_path: Path, seed: int) -> None:
    """Copies of one time may differ in other columns: the one that was appended first is let through, however batches are cut."""
    random = Random(seed)
    lateness = random.choice([0, 5, 50]) * SECOND
    events = [{"id": f"k{n % 40}", "v": random.randrange(99), "at": n // 3 * 4 * SECOND} for n in range(120)]
    copies = [{**random.choice(events), "v": random.randrange(99)} for _ in range(80)]
    rows = shuffled(random, events + copies, at="at", lateness_us=lateness)
    batches, watermarks = cut(random, rows, SCHEMA, ["id"], at="at", lateness_us=lateness)
    given = run_batches(Dedupe(SCHEMA, "at", 0), random, tmp_path, batches, watermarks)
    first: dict[Any, dict[str, Any]] = {}
    for row in rows:
        first.setdefault((row["id"], row["at"]), row)
    assert sorted_rows(given) == sorted(tuple(row.values()) for row in first.values())


@pytest.mark.parametrize("seed", seeds(10))
def test_of_copies_with_other_times_one_is_let_through(tmp_path: Path, seed: int) -> None:
    """Whoever sends again may note another time: up to `within` apart they are copies. Which of them it is depends on who comes first."""
    random = Random(seed)
    lateness, within = random.choice([0, 5, 50]) * SECOND, 3 * SECOND
    events = [{"id": f"k{n % 30}", "v": n, "at": n * 4 * SECOND} for n in range(120)]
    copies = [{**event, "at": event["at"] + random.randint(0, within)} for event in random.choices(events, k=120)]
    rows = shuffled(random, events + copies, at="at", lateness_us=lateness)
    batches, watermarks = cut(random, rows, SCHEMA, ["id"], at="at", lateness_us=lateness)
    given = list(map(micros, run_batches(Dedupe(SCHEMA, "at", within), random, tmp_path, batches, watermarks)))
    assert sorted((row["v"], row["id"]) for row in given) == sorted((row["v"], row["id"]) for row in events)
    assert all(row in rows for row in given)


@pytest.mark.parametrize("seed", seeds(10))
def test_what_the_watermark_has_passed_is_let_through_no_more(tmp_path: Path, seed: int) -> None:
    """Whether a copy of it was there is forgotten; of what comes in time one is let through as ever."""
    random = Random(seed)
    events = [{"id": f"k{n % 40}", "v": n, "at": n * 4 * SECOND} for n in range(120)]
    copies = [dict(random.choice(events)) for _ in range(80)]
    rows = shuffled(random, events + copies, at="at", lateness_us=5 * SECOND, late=0.3)
    batches, watermarks = cut(random, rows, SCHEMA, ["id"], at="at", lateness_us=5 * SECOND)
    given = run_batches(Dedupe(SCHEMA, "at", 0), random, tmp_path, batches, watermarks)
    kept = in_time(rows, batches, watermarks, at="at")
    assert len(kept) < len(rows)
    assert sorted_rows(given) == sorted({tuple(event.values()) for event in kept})


@pytest.mark.parametrize("seed", SEEDS)
def test_each_event_has_the_aggregates_of_the_time_before_it(tmp_path: Path, seed: int) -> None:
    """With aggregates that NumPy computes alone, and with some that need SQL; of numbers of either kind. What came too late is neither
    given nor counted."""
    random = Random(seed)
    lateness, over = random.choice([0, 5, 50]) * SECOND, random.choice([1, 10, 100]) * SECOND
    number, nothing = (int, float)[seed % 2], random.choice([[None], []])
    schema = SCHEMA.set(1, pa.field("v", pa.int64() if number is int else pa.float64()))
    values = [*nothing, *map(number, range(-9, 50))]
    events = [
        {"id": f"k{random.randrange(4)}", "v": random.choice(values), "at": random.randrange(300) * SECOND}
        for _ in range(120)
    ]
    rows = shuffled(random, events, at="at", lateness_us=lateness, late=random.choice([0, 0.2]))
    wanted = {
        "n": "count", "total": ("sum", "v"), "mean": ("avg", "v"), "low": ("min", "v"), "high": ("max", "v"),
        "some": ("count", "v"),
    }  # fmt: skip
    if seed % 3 == 0:
        wanted |= {"kinds": ("distinct", "v"), "middle": ("percentile", "v")}
    operator = Sliding(schema, "at", over, aggregates_of(wanted, schema, taken=schema.names))
    batches, watermarks = cut(random, rows, schema, ["id"], at="at", lateness_us=lateness)
    given = run_batches(operator, random, tmp_path, batches, watermarks)
    kept = in_time(rows, batches, watermarks, at="at")
    expected = [{**event, **brute_force(event, kept, over, wanted)} for event in kept]
    assert sorted(map(repr, map(micros, given))) == sorted(map(repr, expected))


def brute_force(
    event: dict[str, Any], events: list[dict[str, Any]], over: int, wanted: dict[str, Any]
) -> dict[str, Any]:
    near = [e for e in events if e["id"] == event["id"] and event["at"] - over <= e["at"] <= event["at"]]
    values = [e["v"] for e in near if e["v"] is not None]
    found = {
        "n": len(near),
        "total": sum(values) if values else None,
        "mean": sum(values) / len(values) if values else None,
        "low": min(values, default=None),
        "high": max(values, default=None),
        "some": len(values),
        "kinds": len(set(values)),
        "middle": float(statistics.median(values)) if values else None,
    }
    return {name: found[name] for name in wanted}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_rows_of_each_key_are_kept(tmp_path: Path, seed: int) -> None:
    """The changes, applied one after the other, give the table that sorting everything gives."""
    random = Random(seed)
    events = [
        {"id": f"k{random.randrange(6)}", "v": random.choice([None, random.randrange(30)]), "at": n * SECOND} for n in range(200)
    ]  # fmt: skip
    random.shuffle(events)
    n = random.randint(1, 5)
    batches, watermarks = cut(random, events, SCHEMA, ["id"], at="at", lateness_us=1000 * SECOND)
    given = run_batches(TopOfEvents(SCHEMA, n, ["v DESC"], ["id"]), random, tmp_path, batches, watermarks)
    table = {(row["id"], row["rank"]): micros(row) for row in given}
    expected = {}
    for key in {event["id"] for event in events}:
        mine = [event for event in events if event["id"] == key]
        mine.sort(key=lambda event: (event["v"] is None, -(event["v"] or 0), event["at"]))
        expected |= {(key, rank): {"rank": rank, **event} for rank, event in enumerate(mine[:n], 1)}
    assert table == expected


VERSIONS = pa.schema([("id", pa.string()), ("rate", pa.int64()), ("since", UTC_US), ("_deleted", pa.bool_())])


@pytest.mark.parametrize("seed", SEEDS)
def test_each_event_sees_the_row_of_its_time(tmp_path: Path, seed: int) -> None:
    """However late the change was read, within the lateness; at equal times by `ties`. Of changes with one time the last in the log
    counts, also where it came in a later batch. An event that is later is left out; a change that is later is found by the events
    that are given from then on."""
    random = Random(seed)
    late = random.choice([0, 0.2])
    lateness, how, ties = (
        random.choice([0, 5, 50]) * SECOND,
        random.choice(["left", "inner"]),
        random.choice(["table", "event"]),
    )
    events = [{"id": f"k{random.randrange(5)}", "v": n, "at": random.randrange(200) * SECOND} for n in range(150)]
    changes = [
        {"id": f"k{random.randrange(5)}", "rate": n, "since": at * SECOND, "_deleted": random.random() < 0.2}
        for n, at in enumerate(random.choices(range(0, 200, random.choice([1, 20])), k=40))
    ]
    mixed = [("e", row["at"], row) for row in events] + [("c", row["since"], row) for row in changes]
    mixed.sort(key=lambda each: each[1] + delay(random, lateness, late))
    batches, watermarks, reached = [], [], NO_TIME
    kept, came, logged = list[dict[str, Any]](), dict[int, int](), [row for kind, _, row in mixed if kind == "c"]
    while mixed:
        part, mixed = mixed[: (size := random.choice([1, 5, 40]))], mixed[size:]
        before = watermarks[-1] if watermarks else NO_TIME
        kept += [row for kind, at, row in part if kind == "e" and at > before]
        came |= {row["rate"]: len(batches) for kind, _, row in part if kind == "c"}
        reached = max(reached, *(at for _, at, _ in part))
        watermarks.append(reached - lateness - 1)
        batches.append(
            [table_of([row for kind, _, row in part if kind == "e"], SCHEMA, "at", ["id"]),
             table_of([row for kind, _, row in part if kind == "c"], VERSIONS, "since", ["id"])]
        )  # fmt: skip
    operator = Lookup(SCHEMA, VERSIONS, ["id"], at="at", table_at="since", how=how, ties=ties)
    given = run_batches(operator, random, tmp_path, batches, watermarks)
    expected = []
    for event in kept:
        due = next((number for number, until in enumerate(watermarks) if until >= event["at"]), len(batches))
        seen = [
            c for c in logged
            if c["id"] == event["id"] and (c["since"] < event["at"] or (c["since"] == event["at"] and ties == "table"))
            and came[c["rate"]] <= due
        ]  # fmt: skip
        last = max(reversed(seen), key=lambda change: change["since"], default=None)
        rate = None if last is None or last["_deleted"] else last["rate"]
        if rate is not None or how == "left":
            expected.append({**event, "rate": rate})
    assert sorted(map(repr, map(micros, given))) == sorted(map(repr, expected))


def test_rows_come_to_an_operator_in_the_order_of_the_tasks_that_gave_them() -> None:
    """A shuffle on a cluster brings the rows of tasks in any order. What was read first is first all the same."""
    side = _Side({"id": "c0", "v": "c1", "at": "c2"}, "c0")
    batches = [
        pa.record_batch(
            {
                "_side": pa.array([task * 16] * 2, pa.int32()),
                "c0": pa.array(["a", "b"]),
                "c1": pa.array([9 - task, 9 - task]),
                "c2": pa.array([0, 0], UTC_US),
            }
        )
        for task in (2, 0, 1)
    ]
    [given] = _task(Dedupe(SCHEMA, "at", 0), [side], None)(iter(batches))
    assert sorted_rows(given.to_pylist()) == [("a", 9, 0), ("b", 9, 0)]
