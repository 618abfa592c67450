"""Windows of our own against brute force: any cut, any order within the lateness, late rows, batches run again, another number of
partitions; and the same of rows that were combined before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from headwater.log.frame import NO_TIME
from headwater.processing.aggregate import Aggregate, aggregates_of
from headwater.processing.panes import Panes
from headwater.processing.partials import KINDS
from headwater.processing.runs import H1, H2
from headwater.processing.sessions import Sessions
from headwater.processing.windowed import Windowed
from operator_rig import UTC_US, cut, hashed, in_time, run_batches, seeds, shuffled

SECOND = 1_000_000
SCHEMA = pa.schema([("id", pa.string()), ("v", pa.int64()), ("at", UTC_US)])
WANTED = {
    "n": "count", "some": ("count", "v"), "total": ("sum", "v"), "mean": ("avg", "v"), "low": ("min", "v"), "high": ("max", "v"),
    "latest": ("max", "at"),
}  # fmt: skip
SHAPES = [(10, 10), (10, 2), (10, 4), (7, 3), (1, 1), (100, 50)]

Row = dict[str, Any]
Operators = Windowed | Sessions
Expect = Callable[[list[Row]], list[Row]]


def aggregates(schema: pa.Schema, wanted: dict[str, Any]) -> list[Aggregate]:
    return aggregates_of(wanted, schema, taken=["id", "window_start", "window_end"], kinds=KINDS)


def summed(rows: Sequence[Row], wanted: dict[str, Any]) -> Row:
    """The aggregates of rows, one by one."""
    values = [row["v"] for row in rows if row["v"] is not None]
    found = {
        "n": len(rows),
        "some": len(values),
        "total": sum(values) if values else None,
        "mean": float(sum(values)) / len(values) if values else None,
        "low": min(values, default=None),
        "high": max(values, default=None),
        "latest": max(row["at"] for row in rows),
    }
    return {name: found[name] for name in wanted}


def windows(rows: Sequence[Row], over: int, every: int, wanted: dict[str, Any]) -> list[Row]:
    """All windows of all keys: each window that a row is in, by going back from it."""
    inside: dict[tuple[str | None, int], list[Row]] = {}
    for row in rows:
        start = row["at"] - row["at"] % every
        while start + over > row["at"]:
            inside.setdefault((row["id"], start), []).append(row)
            start -= every
    return [
        {"id": key, "window_start": start, "window_end": start + over, **summed(mine, wanted)}
        for (key, start), mine in inside.items()
    ]


def sessions(rows: Sequence[Row], gap: int, wanted: dict[str, Any]) -> list[Row]:
    """All sessions of all keys."""
    found = []
    for key in {row["id"] for row in rows}:
        mine = sorted((row for row in rows if row["id"] == key), key=lambda row: row["at"])
        cuts = [0, *(at for at, (a, b) in enumerate(pairwise(mine), 1) if b["at"] - a["at"] > gap), len(mine)]
        for start, end in pairwise(cuts):
            times = {"window_start": mine[start]["at"], "window_end": mine[end - 1]["at"] + gap}
            found.append({"id": key, **times, **summed(mine[start:end], wanted)})
    return found


def plain(rows: Sequence[Row]) -> list[str]:
    """Rows that can be compared: times in µs, in no order."""
    return sorted(repr({name: _micros(value) for name, value in row.items()}) for row in rows)


def _micros(value: Any) -> Any:
    return round(value.timestamp() * SECOND) if hasattr(value, "timestamp") else value


def events(random: Random, number: Callable[[int], Any], *, until_s: int = 300) -> list[Row]:
    """Rows of few keys, one of which is null; some times are before 1970, some on the edge of a window."""
    nothing = random.choice([[None], []])
    values = [*nothing, *map(number, range(-9, 50))]
    return [
        {
            "id": random.choice([None, "a", "b", "c"]),
            "v": random.choice(values),
            "at": random.randrange(-50, until_s) * SECOND - random.choice([0, 0, 1, SECOND // 2]),
        }
        for _ in range(120)
    ]


def combined(operator: Any, batches: Sequence[Sequence[pa.Table]], watermarks: Sequence[int], random: Random) -> Any:
    """Each batch in pieces that were combined apart; what is late is left out before, as sources do."""
    found, before = list[list[pa.Table]](), NO_TIME
    for (rows,), until in zip(batches, watermarks, strict=True):
        times = rows.column("at").cast(pa.int64()).to_pylist()
        mine = rows.filter(pa.array([at > before for at in times], pa.bool_())).drop_columns([H1, H2])
        middle = random.randint(0, mine.num_rows)
        pieces = [operator.combine(piece) for piece in (mine.slice(0, middle), mine.slice(middle))]
        assert all(piece.schema.equals(operator.combined) for piece in pieces)
        found.append([hashed(pa.concat_tables(pieces), ["id"])])
        before = until
    return found


def check(operator: Operators, expect: Expect, folder: Path, seed: int, rows: list[Row], schema: pa.Schema) -> None:
    """What the operator gives of rows in batches is what is expected of those that are in time; raw, and combined or some of both."""
    random = Random(seed)
    lateness = random.choice([0, 5, 50]) * SECOND
    rows = shuffled(random, rows, at="at", lateness_us=lateness, late=random.choice([0, 0.2]))
    batches, watermarks = cut(random, rows, schema, ["id"], at="at", lateness_us=lateness)
    expected = plain(expect(in_time(rows, batches, watermarks, at="at")))
    assert plain(run_batches(operator, random, folder / "raw", batches, watermarks)) == expected
    pieces = combined(operator, batches, watermarks, random)
    mixed = [random.choice(both) for both in zip(batches, pieces, strict=True)] if seed % 2 else pieces
    assert plain(run_batches(operator, random, folder / "combined", mixed, watermarks)) == expected


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("kind", ["tumbling", "hopping", "session"])
def test_each_window_has_the_aggregates_of_its_rows(tmp_path: Path, kind: str, seed: int) -> None:
    """Given once, of all rows that were in time, of integers, floating numbers and decimals."""
    random = Random(seed)
    number, type_ = ((int, pa.int64()), (float, pa.float64()), (Decimal, pa.decimal128(10, 2)))[seed % 3]
    schema = SCHEMA.set(1, pa.field("v", type_))
    if type_ == pa.decimal128(10, 2):
        number = lambda value: Decimal(value).quantize(Decimal("0.01"))  # noqa: E731
    names = random.sample(list(WANTED), random.randint(1, len(WANTED)))
    wanted = {name: WANTED[name] for name in names}
    rows = events(random, number)
    if kind == "session":
        gap = random.choice([1, 3, 20]) * SECOND
        operator: Operators = Sessions(schema, ["id"], "at", gap, aggregates(schema, wanted))
        check(operator, lambda kept: sessions(kept, gap, wanted), tmp_path, seed, rows, schema)
    else:
        shapes = [shape for shape in SHAPES if (shape[0] == shape[1]) == (kind == "tumbling")]
        over, every = (seconds * SECOND for seconds in random.choice(shapes))
        operator = Windowed(schema, ["id"], "at", Panes(over, every), aggregates(schema, wanted))
        check(operator, lambda kept: windows(kept, over, every, wanted), tmp_path, seed, rows, schema)
