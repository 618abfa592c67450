"""Totals, and tables that change, against brute force: any cut, batches run again, other numbers of partitions, rows taken back."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c

import headwater as hw
from headwater.model.clock import NO_TIME
from headwater.model.errors import InvalidInput
from headwater.processing.operators.aggregate import aggregates_of
from headwater.processing.operators.signed_rows import SIGN, SignedRows
from headwater.processing.operators.top_n import TopOfTable
from headwater.processing.operators.totals import KINDS, Totals, used_columns
from headwater.testing import transform
from tests.rigs.processing.operator_runs import UTC_US, cut, hashed, run_batches, run_each, seeds, shuffled, table_of

SECOND = 1_000_000
SCHEMA = pa.schema(
    [("id", pa.string()), ("g", pa.string()), ("v", pa.int64()), ("d", pa.decimal128(20, 2)), ("at", UTC_US), ("_deleted", pa.bool_())]
)  # fmt: skip
WANTED = {
    "n": "count", "some": ("count", "v"), "total": ("sum", "v"), "mean": ("avg", "v"), "cents": ("sum", "d"),
    "kinds": ("distinct", "v"), "ids": ("distinct", "id"), "low": ("min", "v"), "high": ("max", "d"),
}  # fmt: skip
RETRACTABLE = {name: want for name, want in WANTED.items() if name not in ("low", "high")}
BIG = 2**61
SEEDS = seeds()
Row = dict[str, Any]


def drawn(random: Random, number: int, *, large: bool = True) -> Row:
    value = random.choice([None, random.randrange(12), BIG + random.randrange(3) if large else -random.randrange(5)])
    cents = random.choice([None, Decimal(random.randrange(-999, 999)) / 100])
    group = random.choice(["a", "b", "c", None])
    return {
        "id": f"k{random.randrange(30)}",
        "g": group,
        "v": value,
        "d": cents,
        "at": number * SECOND,
        "_deleted": False,
    }


def prepared(rows: pa.Table, wanted: dict[str, Any]) -> pa.Table:
    """What `hw.totals` makes of rows in Spark."""
    aggregates = aggregates_of(wanted, SCHEMA, taken=[], kinds=KINDS)
    columns = {"b0": rows.column("g")} | {f"v{n}": rows.column(name) for n, name in enumerate(used_columns(aggregates))}
    for number, each in enumerate(each for each in aggregates if each.kind == "distinct"):
        pairs = zip(rows.column("g").to_pylist(), rows.column(each.column).to_pylist(), strict=True)
        hashes = [None if value is None else crc32c(repr((group, number, value)).encode()) for group, value in pairs]
        columns[f"d{number}_1"] = pa.array([None if h is None else h % 97 - 40 for h in hashes], pa.int64())
        columns[f"d{number}_2"] = pa.array(hashes, pa.int64())
    if SIGN in rows.column_names:
        columns[SIGN] = rows.column(SIGN)
    return hashed(pa.table(columns), ["b0"])


def expected(rows: list[Row], wanted: dict[str, Any]) -> dict[Any, Row]:
    """Row by row, as SQL means it."""
    found = {}
    for group in {row["g"] for row in rows}:
        mine = [row for row in rows if row["g"] == group]
        values, cents = ([row[name] for row in mine if row[name] is not None] for name in ("v", "d"))
        answer = {
            "n": len(mine),
            "some": len(values),
            "total": sum(values) if values else None,
            "mean": float(sum(values)) / len(values) if values else None,
            "cents": sum(cents, Decimal(0)) if cents else None,
            "kinds": len(set(values)),
            "ids": len({row["id"] for row in mine}),
            "low": min(values, default=None),
            "high": max(cents, default=None),
        }
        found[group] = {"g": group} | {name: answer[name] for name in wanted}
    return found


def totals_of(wanted: dict[str, Any], *, is_signed: bool) -> Totals:
    aggregates = aggregates_of(wanted, SCHEMA, taken=["g"], kinds=KINDS)
    return Totals([SCHEMA.field("g")], aggregates, SCHEMA, is_signed=is_signed)


def some_of(random: Random, wanted: dict[str, Any]) -> dict[str, Any]:
    """All aggregates, for which SQL is asked, or some: NumPy knows no decimals."""
    left_out = random.choice([set(), {"cents", "high"}, set(random.sample(sorted(wanted), len(wanted) - 1))])
    return {name: want for name, want in wanted.items() if name not in left_out}


def fits(rows: list[Row]) -> list[Row]:
    """Without the second and further large numbers of a group: their sum would be none of 64 bits."""
    large: set[Any] = set()
    return [row for row in rows if (row["v"] or 0) < BIG or not (row["g"] in large or large.add(row["g"]))]


@pytest.mark.parametrize("seed", SEEDS)
def test_totals_are_those_of_all_rows_so_far(tmp_path: Path, seed: int) -> None:
    """The last row of each group; and no row says what the one before said."""
    random = Random(seed)
    large = random.random() < 0.5
    rows = fits([drawn(random, number, large=large) for number in range(120)])
    wanted = some_of(random, WANTED)
    batches, watermarks = cut(random, rows, SCHEMA, ["g"], at="at", lateness_us=0)
    inputs = [[prepared(given, wanted)] for (given,) in batches]
    table: dict[Any, Row] = {}
    for given in run_each(totals_of(wanted, is_signed=False), random, tmp_path, inputs, watermarks):
        assert len({row["g"] for row in given}) == len(given)
        assert not [row for row in given if table.get(row["g"]) == row]
        table |= {row["g"]: row for row in given}
    assert table == expected(rows, wanted)


def history(random: Random) -> tuple[list[Row], dict[str, Row]]:
    """Changes of a table, no two of them at the same time, some of them deletions; and what is left."""
    changes, table, large, some = [], {}, set[Any](), random.random() < 0.5
    for number in range(60):
        row = drawn(random, number, large=some) | {"_deleted": random.random() < 0.15}
        if (row["v"] or 0) >= BIG and (row["g"] in large or large.add(row["g"])):
            row["v"] = 7
        changes.append(row)
        table[row["id"]] = row
    return changes, {key: row for key, row in table.items() if not row["_deleted"]}


def singles(random: Random, changes: list[Row]) -> list[list[Row]]:
    """Batches in which each key has one row."""
    batches: list[list[Row]] = [[]]
    for row in changes:
        if row["id"] in {other["id"] for other in batches[-1]} or random.random() < 0.1:
            batches.append([])
        batches[-1].append(row)
    return batches


def signed_batches(random: Random, folder: Path, changes: list[Row], *, at: str | None) -> list[pa.Table]:
    """What a table's changes are as signed rows, batch by batch, where each time counts, or each batch does."""
    if at is None:
        batches = [[table_of(part, SCHEMA, "at", ["id"])] for part in singles(random, changes)]
        watermarks = [NO_TIME] * len(batches)
    else:
        rows = shuffled(random, changes, at="at", lateness_us=50 * SECOND)
        batches, watermarks = cut(random, rows, SCHEMA, ["id"], at="at", lateness_us=50 * SECOND)
    operator = SignedRows(SCHEMA, ["id"], at)
    return [
        pa.Table.from_pylist(given, operator.schema)
        for given in run_each(operator, random, folder, batches, watermarks)
    ]


@pytest.mark.parametrize("seed", seeds(10))
def test_of_changes_with_one_time_the_last_counts(tmp_path: Path, seed: int) -> None:
    """A transaction of a database gives all its changes one time: the last in the log counts, also where it deletes the row, and also
    where it comes in a later batch."""
    random = Random(seed)
    changes = [
        {"id": f"k{random.randrange(5)}", "v": n, "at": random.randrange(4) * 20 * SECOND, "_deleted": random.random() < 0.3}
        for n in range(60)
    ]  # fmt: skip
    random.shuffle(changes)
    schema = pa.schema([("id", pa.string()), ("v", pa.int64()), ("at", UTC_US), ("_deleted", pa.bool_())])
    batches, watermarks = cut(random, changes, schema, ["id"], at="at", lateness_us=100 * SECOND)
    given = run_batches(SignedRows(schema, ["id"], "at"), random, tmp_path, batches, watermarks)
    table: Counter[int] = Counter()
    for row in given:
        table[row["v"]] += row[SIGN]
    last = {row["id"]: row for row in sorted(changes, key=lambda row: row["at"])}
    assert {v for v, count in table.items() if count} == {row["v"] for row in last.values() if not row["_deleted"]}
    assert max(table.values()) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_replaced_is_taken_back(tmp_path: Path, seed: int) -> None:
    """Also where the new row belongs to another group, and where it came before the old one; a group without rows is gone."""
    random, at = Random(seed), ("at", None)[seed % 2]
    changes, left = history(random)
    wanted = some_of(random, RETRACTABLE)
    batches = [[prepared(rows, wanted)] for rows in signed_batches(random, tmp_path / "rows", changes, at=at)]
    table: dict[Any, Row] = {}
    operator = totals_of(wanted, is_signed=True)
    for given in run_each(operator, random, tmp_path / "totals", batches, [NO_TIME] * len(batches)):
        for row in given:
            assert table.get(row["g"]) != row
            if row.pop("_deleted"):
                del table[row["g"]]
            else:
                table[row["g"]] = row
    assert table == expected(list(left.values()), wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_fell_off_the_list_comes_back(tmp_path: Path, seed: int) -> None:
    """The best rows of a table that changes, where rows get worse, move to other groups and are deleted."""
    random, at = Random(seed), ("at", None)[seed % 2]
    changes, left = history(random)
    n = random.randint(1, 5)
    batches = [[hashed(rows, ["g"])] for rows in signed_batches(random, tmp_path / "rows", changes, at=at)]
    operator = TopOfTable(batches[0][0].select([*SCHEMA.names[:-1], SIGN]).schema, n, ["v DESC"])
    table: dict[Any, Row] = {}
    for given in run_each(operator, random, tmp_path / "top", batches, [NO_TIME] * len(batches)):
        for row in given:
            place = (row["g"], row["rank"])
            assert table.get(place) != row
            if row.pop("_deleted"):
                del table[place]
            else:
                table[place] = row
    found = {}
    for group in {row["g"] for row in left.values()}:
        mine = sorted((row for row in left.values() if row["g"] == group), key=order)
        found |= {(group, rank): {"rank": rank, **row} for rank, row in enumerate(mine[:n], 1)}
    assert {place: row["id"] for place, row in table.items()} == {place: row["id"] for place, row in found.items()}
    assert [row["v"] for row in table.values()] == [found[place]["v"] for place in table]


def order(row: Row) -> tuple[Any, ...]:
    """The greatest value first, and of equal ones the first by all columns; ids differ."""
    return (row["v"] is None, -(row["v"] or 0), row["id"])


def test_the_state_does_not_keep_what_went(tmp_path: Path) -> None:
    """Rows that came and went are forgotten when runs are merged: a table of one row stays one, however often it changes."""
    from headwater.processing.operators.operator import Time
    from headwater.processing.state.state import StateStore

    schema = pa.schema([("g", pa.string()), ("v", pa.int64()), (SIGN, pa.int64())])
    operator, kept = TopOfTable(schema, 1, ["v"]), 0
    store = StateStore(
        str(tmp_path), uid="op", query="q", fingerprint="f", partition=0, partitions=1, specs=operator.tables
    )
    for epoch in range(80):
        state = store.load(epoch - 1)
        goes = [{"g": "a", "v": epoch - 1, SIGN: -1}] if epoch else []
        rows = hashed(pa.Table.from_pylist([*goes, {"g": "a", "v": epoch, SIGN: 1}], schema), ["g"])
        operator.process(state, [rows], Time(NO_TIME, NO_TIME))
        kept = len(state["rows"])
        store.save(state, epoch)
    assert kept < 30


def test_two_rows_of_one_key_in_a_batch_are_refused_without_a_time(tmp_path: Path) -> None:
    rows = [drawn(Random(1), 1) | {"id": "k1"}, drawn(Random(2), 2) | {"id": "k1"}]
    batch = [table_of(rows, SCHEMA, "at", ["id"])]
    with pytest.raises(InvalidInput, match=r"two rows of the key id='k1'"):
        list(run_each(SignedRows(SCHEMA, ["id"], None), Random(1), tmp_path, [batch], [0]))


def test_a_sum_beyond_64_bits_is_refused_not_wrapped(tmp_path: Path) -> None:
    rows = [drawn(Random(1), number) | {"g": "a", "v": 2**62} for number in range(2)]
    inputs = [[prepared(table_of(rows, SCHEMA, "at", ["g"]), {"total": ("sum", "v")})]]
    with pytest.raises(InvalidInput, match="no longer fits"):
        list(run_each(totals_of({"total": ("sum", "v")}, is_signed=False), Random(1), tmp_path, inputs, [0]))


BIDS = [
    {"auction": auction, "bidder": bidder, "price": price, "seller": seller}
    for auction, bidder, price, seller in (
        (1, "ann", 5, "s"), (1, "bob", 9, "s"), (2, "ann", 4, "s"), (3, "cat", 7, "t"), (3, "cat", 2, "t"), (2, "bob", 3, "s"),
    )
]  # fmt: skip


@pytest.mark.slow
def test_totals_of_a_table_as_spark_runs_them() -> None:
    """Average of the winning prices of each seller, and how many people bid."""

    def winning(bids: Any) -> Any:
        best = hw.top_n(bids, 1, by="auction", order="price DESC")
        return hw.totals(best, by="seller", key=["auction", "rank"], n="count", total=("sum", "price"))

    def people(bids: Any) -> Any:
        return hw.totals(bids, by="seller", people=("distinct", "bidder"), n=("count", "price"))

    def second(bids: Any) -> Any:
        best = hw.top_n(bids, 1, by="auction", order="price DESC").drop("rank")
        return hw.top_n(best, 1, by="seller", order="price", key="auction").select("seller", "auction", "rank")

    found = {row["seller"]: (row["n"], row["total"], row["_deleted"]) for row in transform(winning, bids=BIDS)}
    assert found == {"s": (2, 13, False), "t": (1, 7, False)}
    found = {row["seller"]: (row["people"], row["n"]) for row in transform(people, bids=BIDS)}
    assert found == {"s": (2, 4), "t": (1, 2)}
    assert sorted(row["auction"] for row in transform(second, bids=BIDS)) == [2, 3]


@pytest.mark.slow
def test_a_table_of_the_log_goes_by_its_own_order() -> None:
    """Of several changes of a key in one batch the one with the highest offset counts, whatever their columns say; a deletion too."""
    changes = [
        {"id": 1, "shelf": "a", "price": 5, "_offset": 0, "_deleted": False},
        {"id": 1, "shelf": "b", "price": 3, "_offset": 7, "_deleted": False},
        {"id": 1, "shelf": "c", "price": 9, "_offset": 6, "_deleted": False},
        {"id": 2, "shelf": "b", "price": 4, "_offset": 1, "_deleted": False},
        {"id": 3, "shelf": "b", "price": 8, "_offset": 8, "_deleted": False},
        {"id": 3, "shelf": None, "price": None, "_offset": 9, "_deleted": True},
    ]

    def per_shelf(changes: Any) -> Any:
        return hw.totals(changes, by="shelf", key="id", at="_offset", n="count", total=("sum", "price"))

    found = transform(per_shelf, changes=changes)
    assert [(row["shelf"], row["n"], row["total"], row["_deleted"]) for row in found] == [("b", 2, 7, False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"by": "seller"}, "No aggregate"),
        ({"by": "seller", "n": "sum"}, "sum of which column"),
        ({"by": "seller", "n": ("sum", "bidder")}, "has no sum, it is STRING"),
        ({"by": "seller", "n": ("percentile", "price")}, "aggregate 'percentile' is not available"),
        ({"by": "seller", "seller": "count"}, "a column 'seller' already"),
        ({"by": "nobody", "n": "count"}, "key column 'nobody'"),
        ({"by": "seller", "n": "count", "at": "price"}, "at= orders"),
        ({"by": "seller", "key": "auction", "n": ("max", "price")}, "takes its max with it"),
        (
            {"by": "seller", "key": "auction", "at": "price", "n": "count"},
            "'price' with times .TIMESTAMP. does not exist",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        transform(lambda bids: hw.totals(bids, **asked), bids=BIDS)


@pytest.mark.slow
@pytest.mark.parametrize("over", [partial(hw.totals, n="count"), partial(hw.top_n, n=1, order="price")])
def test_changes_without_a_key_are_refused(over: Any) -> None:
    """A row that takes its key away would be counted as one more."""
    changes = [bid | {"_deleted": False} for bid in BIDS]
    with pytest.raises(InvalidInput, match="are changes of a table"):
        transform(lambda bids: over(bids, by="seller"), bids=changes)
