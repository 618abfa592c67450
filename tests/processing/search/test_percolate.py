"""`hw.percolate` against plain Python: any cut, batches run again, other numbers of partitions, searches that change meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from headwater.model.clock import NO_TIME
from headwater.processing.operators.copies import owning_keys
from headwater.processing.operators.operator import Time
from headwater.processing.search.percolate import Percolate, shelf
from headwater.processing.spark.hashing import hashes_of
from headwater.processing.state.sorted_runs import H1, H2
from headwater.processing.state.state import State, StateStore, partition_of
from tests.rigs.processing.operator_runs import UTC_US, run_batches, seeds
from tests.rigs.processing.searches import SCHEMA, TEXTS, RandomSearch, random_document, random_search

SECOND = 1_000_000
DOCUMENTS = pa.schema(
    [pa.field("id", pa.int64()), *(field for field in SCHEMA if field.name != "at"), pa.field("at", UTC_US)]
)
SEARCHES = pa.schema(
    [
        ("search", pa.string()),
        ("query", pa.string()),
        ("owner", pa.string()),
        ("changed", UTC_US),
        ("_deleted", pa.bool_()),
    ]
)
PLACES = {"home": ("lat", "lon")}
BROKEN = RandomSearch('"broken', lambda document: False)
Row = dict[str, Any]


class ForgetfulPercolate(Percolate):
    """The operator in processes that come and go: the index is made again of what the state has."""

    random = Random(0)

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        if self.random.random() < 0.3:
            shelf.cache_clear()
        return super().process(state, inputs, time)


def operator(ties: str = "table", at: str | None = "at") -> Percolate:
    searches_at = None if at is None else "changed"
    return ForgetfulPercolate(DOCUMENTS, SEARCHES, TEXTS, at=at, searches_at=searches_at, ties=ties, places=PLACES)  # type: ignore[arg-type]


def changes(random: Random, count: int) -> list[tuple[Row, RandomSearch]]:
    """Versions of a few searches: some removed, some broken, some at the same time."""
    found = []
    for number in range(count):
        search = BROKEN if random.random() < 0.1 else random_search(random, 1)
        is_gone = random.random() < 0.15
        row = {
            "search": f"s{random.randrange(count // 3 + 1)}", "query": None if is_gone else search.text, "owner": f"o{number}",
            "changed": random.randrange(200) * SECOND, "_deleted": is_gone,
        }  # fmt: skip
        found.append((row, search))
    return found


def table(rows: list[Row], schema: pa.Schema, at: str) -> pa.Table:
    plain = pa.schema([field.with_type(pa.int64()) if field.name == at else field for field in schema])
    return pa.Table.from_pylist(rows, plain).cast(schema)


def hashed(rows: pa.Table, number: list[int]) -> pa.Table:
    """Rows with the hashes of the numbers that are their key."""
    h1, h2 = hashes_of([pa.array(number, pa.int64())])
    return rows.append_column(H1, pa.array(h1)).append_column(H2, pa.array(h2))


def found_by_hand(
    documents: list[Row], versions: list[tuple[Row, RandomSearch]], *, is_equal: bool
) -> set[tuple[int, str, str]]:
    """Each document with each search whose last version before its time says so."""
    found = set()
    for document in documents:
        for name in {row["search"] for row, _ in versions}:
            before = [
                (row["changed"], number)
                for number, (row, _) in enumerate(versions)
                if row["search"] == name
                and (row["changed"] < document["at"] or (is_equal and row["changed"] == document["at"]))
            ]
            if not before:
                continue
            row, search = versions[max(before)[1]]
            if not row["_deleted"] and search.holds(
                {**document, "at": datetime.fromtimestamp(document["at"] / SECOND, UTC)}
            ):
                found.add((document["id"], name, row["owner"]))
    return found


def test_each_partition_has_a_number_of_its_own() -> None:
    for partitions in (1, 2, 7, 64, 200):
        h1, _ = hashes_of([pa.array(owning_keys(partitions))])
        assert partition_of(h1, partitions).tolist() == list(range(partitions))


@pytest.mark.parametrize("seed", seeds())
def test_documents_are_matched_with_the_searches_of_their_time(tmp_path: Path, seed: int) -> None:
    """Changes and documents come in any order within the lateness, and in any cut."""
    random = Random(seed)
    ties, lateness = random.choice(["table", "event"]), random.choice([0, 5, 40]) * SECOND
    documents = [{**random_document(random), "id": at, "at": random.randrange(200) * SECOND} for at in range(60)]
    versions = changes(random, random.choice([1, 30, 90]))
    arrivals = [(row["at"] + random.randint(0, lateness), 0, number) for number, row in enumerate(documents)]
    sent = sorted(
        arrivals + [(row["changed"] + random.randint(0, lateness), 1, at) for at, (row, _) in enumerate(versions)]
    )
    batches, watermarks, start, reached = [], [], 0, NO_TIME
    order = []
    while start < len(sent):
        part = sent[start : start + random.choice([1, 9, 40])]
        start += len(part)
        mine, theirs = (
            [documents[at] for _, side, at in part if not side],
            [versions[at][0] for _, side, at in part if side],
        )
        order += [versions[at] for _, side, at in part if side]
        reached = max([reached, *(row["at"] for row in mine), *(row["changed"] for row in theirs)])
        keys = ([row["id"] for row in mine], [0] * len(theirs))
        batches.append(
            [hashed(table(mine, DOCUMENTS, "at"), keys[0]), hashed(table(theirs, SEARCHES, "changed"), keys[1])]
        )
        watermarks.append(reached - lateness - 1)
    given = run_batches(operator(ties), random, tmp_path, batches, watermarks, copied=[1])
    found = [(row["id"], row["search"], row["owner"]) for row in given]
    assert len(found) == len(set(found))
    assert set(found) == found_by_hand(documents, order, is_equal=ties == "table")


@pytest.mark.parametrize("ties", ["table", "event"])
def test_without_event_time_batches_decide(tmp_path: Path, ties: str) -> None:
    """Changes come before the documents of their batch, or after them."""
    random, versions = Random(5), changes(Random(5), 30)
    documents = [{**random_document(random), "id": at, "at": 0} for at in range(60)]
    batches, expected = [], set[tuple[int, str, str]]()
    for number in range(6):
        mine, theirs = documents[number * 10 : number * 10 + 10], versions[number * 5 : number * 5 + 5]
        known = versions[: number * 5 + (5 if ties == "table" else 0)]
        by_order = [({**row, "changed": at}, search) for at, (row, search) in enumerate(known)]
        expected |= found_by_hand([{**row, "at": 99} for row in mine], by_order, is_equal=True)
        changed = table([row for row, _ in theirs], SEARCHES, "changed")
        batches.append([hashed(table(mine, DOCUMENTS, "at"), [row["id"] for row in mine]), hashed(changed, [0] * 5)])
    given = run_batches(operator(ties, None), random, tmp_path, batches, [NO_TIME] * 6, copied=[1])
    assert {(row["id"], row["search"], row["owner"]) for row in given} == expected
    assert len(given) == len(expected) > 20


def test_a_condition_must_hold_too(tmp_path: Path) -> None:
    """One that fails for a document does not hold of it; one that cannot be compiled parks its search."""
    schema = pa.schema([("search", pa.string()), ("query", pa.string()), ("where", pa.string())])
    documents = pa.schema([("id", pa.int64()), ("title", pa.string()), ("price", pa.int64())])
    matching = Percolate(documents, schema, ["title"], at=None, searches_at=None)
    rows = [
        {"id": at, "title": title, "price": price}
        for at, (title, price) in enumerate([("red", 2), ("red", 0), ("blue", 5), ("red", None)])
    ]
    searches = [
        ("divided", "red", "10 / price > 1"), ("alone", None, "price >= 2"), ("both", "red OR blue", "price < 3"),
        ("no", "red", "colour = 1"), ("nor", "red", "sin("),
    ]  # fmt: skip
    changed = pa.Table.from_pylist([dict(zip(schema.names, each, strict=True)) for each in searches], schema)
    batch = [hashed(pa.Table.from_pylist(rows, documents), [0, 1, 2, 3]), hashed(changed, [0] * len(searches))]
    given = run_batches(matching, Random(1), tmp_path, [batch], [NO_TIME], copied=[1])
    assert sorted((row["search"], row["id"]) for row in given) == [
        ("alone", 0),
        ("alone", 2),
        ("both", 0),
        ("both", 1),
        ("divided", 0),
    ]
    state = StateStore(
        str(tmp_path), uid="op", query="q", fingerprint="f", partition=0, partitions=1, specs=matching.tables
    ).load(1)
    parked = {row["search"]: row["reason"] for row in state["parked"].rows().to_pylist()}
    assert set(parked) == {"no", "nor"} and "colour" in parked["no"]
    [summary] = state["summary"].rows().to_pylist()
    assert (summary["searches"], summary["parked"], summary["always"]) == (3, 2, 1)
