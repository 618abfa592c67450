"""Flink's side of the Nexmark figures gives the answers that it is measured by: those of DuckDB over the same events."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.nexmark import flink_sql
from bench.nexmark.flink import Flink
from bench.nexmark.rig import House
from examples.nexmark.ours import QUERIES
from tests.rigs.app.nexmark_oracle import Oracle

pytestmark = pytest.mark.bench

EVENTS, PERIOD_US = 2_000, 50_000


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("house"), EVENTS, period_us=PERIOD_US)


@pytest.fixture(scope="module")
def flink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flink]:
    with Flink(tmp_path_factory.mktemp("flink")) as flink:
        yield flink


@pytest.fixture(scope="module")
def oracle(house: House) -> Iterator[Oracle]:
    with Oracle({topic.name: pq.read_table(topic) for topic in house.files.iterdir()}) as oracle:
        yield oracle


def test_each_query_is_run_or_refused_with_a_reason() -> None:
    assert {*flink_sql.QUERIES, *flink_sql.REFUSED} == {*QUERIES}
    assert not {*flink_sql.QUERIES} & {*flink_sql.REFUSED}


# q12 is by the clock of Flink, and has no other answer twice.
@pytest.mark.parametrize("name", sorted({*flink_sql.QUERIES} - {"q12"}))
def test_its_answers_are_duckdbs(name: str, flink: Flink, house: House, oracle: Oracle) -> None:
    assert sorted(map(tuple, flink.rows(name, house.files))) == sorted(as_text(oracle.answer(name)))


def as_text(table: pa.Table) -> list[tuple[object, ...]]:
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return [tuple(json.loads(json.dumps(row, default=str))) for row in rows]
