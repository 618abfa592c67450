"""The best rows of windows against brute force, raw and combined; and the ranks of rows against DuckDB's, for columns of all kinds."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headwater.model.clock import NO_TIME
from headwater.processing.operators.grouping import ALL, ALL_FIELD
from headwater.processing.operators.operator import MAX_TIME, Time
from headwater.processing.operators.panes import Panes
from headwater.processing.operators.ranking import Ranking
from headwater.processing.operators.sql import ask
from headwater.processing.operators.top_n import TopOfEvents, ordered
from headwater.processing.operators.window_top_n import TopOfWindows
from headwater.processing.state.sorted_runs import H1, H2
from headwater.processing.state.state import State, StateTable
from tests.rigs.processing.operator_runs import UTC_US, cut, hashed, in_time, run_batches, seeds, shuffled

SECOND = 1_000_000
SCHEMA = pa.schema([("id", pa.string()), ("v", pa.int64()), ("w", pa.string()), ("at", UTC_US)])
SHAPES = [(10, 10), (1, 1), (10, 2), (7, 3), (60, 20)]

Row = dict[str, Any]


def micros(rows: list[Row]) -> list[str]:
    """Rows that can be compared: times in µs, in no order."""
    return sorted(repr({name: _number(value) for name, value in row.items()}) for row in rows)


def _number(value: Any) -> Any:
    return round(value.timestamp() * SECOND) if hasattr(value, "timestamp") else value


def best_of(rows: list[Row], n: int, *, by: bool, ties: bool) -> list[Row]:
    """The first rows of each key: the greatest v, null last, of equal ones the first by all columns."""
    found = []
    for key in {row["id"] for row in rows} if by else {None}:
        mine = [row for row in rows if not by or row["id"] == key]
        mine.sort(key=lambda row: (row["v"] is None, -(row["v"] or 0), row["id"], row["w"], row["at"]))
        for place, row in enumerate(mine, 1):
            rank = 1 + next(at for at, other in enumerate(mine) if other["v"] == row["v"]) if ties else place
            if rank <= n:
                found.append({"rank": rank, **row})
    return found


def windows(rows: list[Row], over: int, every: int, n: int, *, by: bool, ties: bool) -> list[Row]:
    """The same of each window."""
    inside: dict[int, list[Row]] = {}
    for row in rows:
        start = row["at"] - row["at"] % every
        while start + over > row["at"]:
            inside.setdefault(start, []).append(row)
            start -= every
    return [
        {**row, "window_start": start, "window_end": start + over}
        for start, mine in inside.items()
        for row in best_of(mine, n, by=by, ties=ties)
    ]


def pieces(operator: Any, batch: pa.Table, before: int, random: Random, key: list[str]) -> pa.Table:
    """A batch in pieces that were combined apart, without what is late."""
    times = batch.column("at").cast(pa.int64()).to_pylist()
    rows = batch.filter(pa.array([at > before for at in times], pa.bool_())).drop_columns([H1, H2])
    middle = random.randint(0, rows.num_rows)
    found = [operator.combine(piece) for piece in (rows.slice(0, middle), rows.slice(middle))]
    assert all(piece.schema.equals(operator.combined) for piece in found)
    return hashed(pa.concat_tables(found), key)


def drawn(random: Random) -> list[Row]:
    return [
        {
            "id": random.choice(["a", "b", "c"]),
            "v": random.choice([None, *range(-3, 6)]),
            "w": random.choice(["x", "y"]),
            "at": random.randrange(-20, 200) * SECOND - random.choice([0, 0, 1]),
        }
        for _ in range(120)
    ]


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("ties", [False, True])
def test_the_best_rows_of_each_window_are_given(tmp_path: Path, ties: bool, seed: int) -> None:
    """Once, of each key or of all rows, with and without those that equal the last of them; also of rows that were combined before."""
    random = Random(seed)
    n, by, lateness = random.choice([1, 1, 2, 4]), random.random() < 0.5, random.choice([0, 5, 50]) * SECOND
    over, every = (seconds * SECOND for seconds in random.choice(SHAPES))
    rows = shuffled(random, drawn(random), at="at", lateness_us=lateness, late=random.choice([0, 0.2]))
    key, schema = (["id"], SCHEMA) if by else ([ALL], SCHEMA.append(ALL_FIELD))
    operator = TopOfWindows(schema, n, ["v DESC"], key, "at", Panes(over, every), ties=ties)
    batches, watermarks = cut(random, [{**row, ALL: 0} for row in rows], schema, key, at="at", lateness_us=lateness)
    kept = in_time(rows, batches, watermarks, at="at")
    expected = micros(windows(kept, over, every, n, by=by, ties=ties))
    assert micros(run_batches(operator, random, tmp_path / "raw", batches, watermarks)) == expected
    combined = [
        [pieces(operator, batch.drop_columns([] if by else [ALL]), before, random, key)]
        for (batch,), before in zip(batches, [NO_TIME, *watermarks], strict=False)
    ]
    assert micros(run_batches(operator, random, tmp_path / "combined", combined, watermarks)) == expected


@pytest.mark.parametrize("seed", seeds(10))
def test_the_best_rows_of_keys_are_among_those_of_pieces(tmp_path: Path, seed: int) -> None:
    """Of rows that were combined before, `top_n` keeps the same list."""
    random = Random(seed)
    operator, rows = TopOfEvents(SCHEMA, random.randint(1, 3), ["v DESC", "w"], ["id"]), drawn(random)
    batches, watermarks = cut(random, rows, SCHEMA, ["id"], at="at", lateness_us=1000 * SECOND)
    combined = [[pieces(operator, batch, NO_TIME, random, ["id"])] for (batch,) in batches]
    tables = []
    for name, given in (("raw", batches), ("combined", combined)):
        changes = run_batches(operator, random, tmp_path / name, given, watermarks)
        tables.append({(row["id"], row["rank"]): row for row in changes})
    assert tables[0] == tables[1] and len(tables[0]) >= 3


KINDS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), [0, -1, 2**62, -(2**63)]),
    (pa.int8(), [0, -1, 5]),
    (pa.float64(), [0.0, -0.0, -1.5, 2.5, float("nan"), float("inf"), float("-inf")]),
    (pa.float32(), [0.5, float("nan"), -3.0]),
    (pa.string(), ["", "a", "ä", "b"]),
    (pa.binary(), [b"", b"\x00", b"\xff"]),
    (pa.bool_(), [True, False]),
    (pa.decimal128(10, 2), [Decimal("1.50"), Decimal("-2.00")]),
    (pa.date32(), [0, 5, -7]),
    (UTC_US, [0, 5, -7]),
    (pa.list_(pa.int64()), [[], [1], [1, 2], [None]]),
    (pa.struct([("a", pa.int64())]), [{"a": 1}, {"a": 2}]),
]


@pytest.mark.parametrize("seed", seeds())
def test_rows_are_ranked_as_sql_ranks_them(seed: int) -> None:
    """By columns of any type, with nulls and NaN, up and down; of the rest all columns decide."""
    random = Random(seed)
    count, columns = random.choice([1, 5, 60]), {}
    for number in range(3):
        kind, values = random.choice(KINDS)
        nothing = random.choice([[], [None]])
        columns[f"r{number}"] = pa.array([random.choice([*values, *nothing]) for _ in range(count)], kind)
    group = np.unique([random.randrange(4) for _ in range(count)], return_inverse=True)[1]
    order = [f"r{number} {random.choice(['asc', 'DESC'])}" for number in random.sample(range(2), random.randint(1, 2))]
    n, ties, names = random.choice([1, 2, 3, 100]), random.random() < 0.5, list(columns)
    table = pa.table({**columns, "k": group, "place": np.arange(count)})
    sql = ordered(order, names)
    by = ", ".join(sql.split(", ")[: len(order)]) if ties else f"{sql}, place"
    found = ask(
        f"select k, place, {'rank' if ties else 'row_number'}() over (partition by k order by {by}) as rank from rows qualify rank <= {n}",
        rows=table,
    )
    place, rank = Ranking(n, order, names, ties=ties).best([table.column(name) for name in names], group)
    assert sorted(zip(group[place].tolist(), place.tolist(), rank.tolist(), strict=True)) == sorted(
        tuple(row.values()) for row in found.to_pylist()
    )


def test_all_rows_at_once_are_one_batch() -> None:
    """A DataFrame that is no stream: nothing was before, and all time has passed."""
    operator = TopOfWindows(SCHEMA, 1, ["v DESC"], ["id"], "at", Panes(10 * SECOND, 2 * SECOND), ties=False)
    given = [{"id": "a", "v": 1, "w": "x", "at": 5 * SECOND}, {"id": "a", "at": None}]
    rows = hashed(pa.Table.from_pylist(given, SCHEMA), ["id"])
    state = State({name: StateTable(spec) for name, spec in operator.tables.items()})
    found = operator.process(state, [rows], Time(NO_TIME, MAX_TIME)).to_pylist()
    assert [row["window_start"].timestamp() for row in found] == [-4, -2, 0, 2, 4]
    assert not len(state["panes"].rows())
