"""Windows of our own against brute force: any cut, any order within the lateness, late rows, batches run again, another number of
partitions; and the same of rows that were combined before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from headwater.model.clock import NO_TIME
from headwater.model.errors import InvalidInput
from headwater.processing.operators.aggregate import Aggregate, aggregates_of
from headwater.processing.operators.operator import MAX_TIME, Time
from headwater.processing.operators.panes import Panes
from headwater.processing.operators.partials import KINDS
from headwater.processing.operators.session_windows import Sessions
from headwater.processing.operators.window_top_n import TopOfWindows
from headwater.processing.operators.windowed import Windowed
from headwater.processing.state.sorted_runs import H1, H2
from headwater.processing.state.state import State, StateStore, StateTable
from tests.rigs.processing.operator_runs import UTC_US, cut, hashed, in_time, run_batches, seeds, shuffled, table_of

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


def empty(operator: Operators) -> State:
    return State({name: StateTable(spec) for name, spec in operator.tables.items()})


def of(values: list[Any], kind: pa.DataType, **wanted: Any) -> Row:
    """The aggregates of values in one window, each of them combined apart."""
    schema = pa.schema([("id", pa.string()), ("v", kind), ("at", UTC_US)])
    operator = Windowed(schema, ["id"], "at", Panes(10 * SECOND, 10 * SECOND), aggregates(schema, wanted))
    rows = pa.table({"id": ["a"] * len(values), "v": pa.array(values, kind), "at": [0] * len(values)}).cast(schema)
    state, found = empty(operator), list[Row]()
    given = [hashed(operator.combine(rows.slice(at, 1)), ["id"]) for at in range(len(values))]
    time = Time(NO_TIME, 10 * SECOND - 2)
    for each in given:
        found += operator.process(state, [each], time).to_pylist()
    assert not found
    found = operator.process(state, [given[0].slice(0, 0)], time._replace(until=10 * SECOND - 1)).to_pylist()
    [whole] = operator.process(empty(operator), [hashed(rows, ["id"])], Time(NO_TIME, MAX_TIME)).to_pylist()
    assert repr(found) == repr([whole])
    return {name: whole[name] for name in wanted}


def test_sums_of_integers_are_exact_beyond_64_bits() -> None:
    """What does not fit on the way may fit in the end; what does not is refused, not wrapped."""
    large = 2**63 - 1
    assert of([large, large, -large, -2], pa.int64(), s=("sum", "v")) == {"s": large - 2}
    assert of([large, large, large], pa.int64(), a=("avg", "v")) == {"a": float(large)}
    with pytest.raises(InvalidInput, match="does not fit"):
        of([large, 1], pa.int64(), s=("sum", "v"))
    digits = Decimal("9" * 38)
    assert of([digits, Decimal("-" + "9" * 38), Decimal(5)], pa.decimal128(38, 0), s=("sum", "v")) == {"s": 5}
    with pytest.raises(InvalidInput, match="does not fit"):
        of([digits, Decimal(1)], pa.decimal128(38, 0), s=("sum", "v"))


def test_nan_is_above_all_numbers() -> None:
    nan = float("nan")
    ends = {"low": ("min", "v"), "high": ("max", "v")}
    for kind in (pa.float64(), pa.float32()):
        assert repr(of([1.5, nan, None, -2.0], kind, **ends)) == repr({"low": -2.0, "high": nan})
        assert repr(of([nan, nan], kind, **ends, s=("sum", "v"))) == repr({"low": nan, "high": nan, "s": nan})


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.string(), ["b", "", "ä"]),
        (pa.binary(), [b"\x00", b"\xff", b""]),
        (pa.bool_(), [False, True]),
        (pa.date32(), [date(2026, 1, 31), date(1969, 12, 31)]),
        (UTC_US, [datetime(2026, 1, 31, tzinfo=UTC), datetime(1960, 1, 1, microsecond=1, tzinfo=UTC)]),
        (pa.decimal128(10, 2), [Decimal("1.50"), Decimal("-2.00")]),
        (pa.int8(), [-128, 127]),
    ],
    ids=str,
)
def test_columns_of_any_type_have_ends(kind: pa.DataType, values: list[Any]) -> None:
    found = of([None, *values, None], kind, low=("min", "v"), high=("max", "v"), n=("count", "v"))
    assert found == {"low": min(values), "high": max(values), "n": len(values)}


def test_nothing_but_null_has_no_sum() -> None:
    wanted = {"s": ("sum", "v"), "a": ("avg", "v"), "low": ("min", "v"), "n": ("count", "v"), "rows": "count"}
    for kind in (pa.int64(), pa.float64(), pa.decimal128(10, 2)):
        assert of([None, None], kind, **wanted) == {"s": None, "a": None, "low": None, "n": 0, "rows": 2}


@pytest.mark.parametrize("shape", ["panes", "sessions"])
def test_what_is_kept_grows_with_groups_and_not_with_batches(tmp_path: Path, shape: str) -> None:
    """Parts of a pane are made one when runs are merged; a session has one timer, however often it grows."""
    wanted = aggregates(SCHEMA, {"n": "count"})
    operator: Operators = Windowed(SCHEMA, ["id"], "at", Panes(1000 * SECOND, 1000 * SECOND), wanted)
    if shape == "sessions":
        operator = Sessions(SCHEMA, ["id"], "at", 1000 * SECOND, wanted)
    sizes, before = list[int](), NO_TIME
    for epoch in range(100):
        store = StateStore(
            str(tmp_path), uid="op", query="q", fingerprint="f", partition=0, partitions=1, specs=operator.tables
        )
        state = store.load(epoch - 1)
        rows = table_of([{"id": key, "v": 1, "at": epoch * SECOND} for key in "abc"], SCHEMA, "at", ["id"])
        assert not operator.process(state, [rows], Time(before, epoch * SECOND - 1)).num_rows
        store.save(state, epoch)
        before = epoch * SECOND - 1
        sizes.append(sum(len(table) for table in state.tables.values()))
    assert max(sizes) < 3 * 20
    found = operator.process(state, [rows.slice(0, 0)], Time(before, MAX_TIME)).to_pylist()
    assert [row["n"] for row in found] == [100] * 3
    assert not any(table.rows().num_rows for table in state.tables.values())


@pytest.mark.parametrize("kind", ["windows", "sessions", "best"])
def test_rows_leave_the_same_state_combined_or_not(kind: str) -> None:
    """So whether they are combined may change from one batch to the next."""
    random = Random(3)
    wanted = aggregates(SCHEMA, WANTED)
    operator: Any = {
        "windows": Windowed(SCHEMA, ["id"], "at", Panes(10 * SECOND, 4 * SECOND), wanted),
        "sessions": Sessions(SCHEMA, ["id"], "at", 3 * SECOND, wanted),
        "best": TopOfWindows(SCHEMA, 2, ["v DESC"], ["id"], "at", Panes(10 * SECOND, 4 * SECOND), ties=True),
    }[kind]
    raw, before, state, other = events(random, int), NO_TIME, empty(operator), empty(operator)
    raw = [{**row, "at": row["at"] // SECOND * SECOND} for row in sorted(raw, key=lambda row: row["at"])]
    for start in range(0, len(raw), 40):
        rows, until = table_of(raw[start : start + 40], SCHEMA, "at", ["id"]), raw[start]["at"] - 1
        pieces = hashed(operator.combine(rows.drop_columns([H1, H2])), ["id"])
        given = [
            operator.process(state, [rows], Time(before, until)),
            operator.process(other, [pieces], Time(before, until)),
        ]
        assert plain(given[0].to_pylist()) == plain(given[1].to_pylist())
        for name in operator.tables:
            assert plain(state[name].rows().to_pylist()) == plain(other[name].rows().to_pylist())
        before = until
    assert any(table.rows().num_rows for table in state.tables.values())
