"""Rows: everything that users append becomes exactly the topic's columns, or an error that says where and what to do."""

from __future__ import annotations

import enum
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.log.arrow.rows import to_batch, to_values
from headwater.model.errors import SchemaMismatch
from headwater.model.schema import BYTES_SCHEMA, DELETED, HEADERS, to_arrow_schema

ORDERS = to_arrow_schema("id STRING NOT NULL, amount DOUBLE, at TIMESTAMP")
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
ROWS = [{"id": "a", "amount": 1.5, "at": NOON}, {"id": "b", "amount": None, "at": None}]
BATCH = pa.RecordBatch.from_pylist(ROWS, schema=ORDERS)
NAIVE = NOON.replace(tzinfo=None)


@dataclass(slots=True)
class Order:
    id: str
    amount: float | None
    at: datetime | None


class Colour(enum.StrEnum):
    RED = "red"


def test_all_kinds_of_rows_give_the_same_batch() -> None:
    """Dicts, dataclass instances, Arrow data and frames differ in nothing afterwards."""
    table = pa.Table.from_batches([BATCH])
    given_as = [
        ROWS,
        tuple(ROWS),
        iter(ROWS),
        [ROWS[0], Order("b", None, None)],
        [Order(**row) for row in ROWS],
        [defaultdict(lambda: 1, {"id": "a", "amount": 1.5, "at": NOON}), {"id": "b"}],
        BATCH,
        table,
        pa.concat_tables([table.slice(0, 1), table.slice(1)]),
        pa.RecordBatchReader.from_batches(ORDERS, [BATCH.slice(0, 1), BATCH.slice(1)]),
        table.select(["at", "id", "amount"]),
        pd.DataFrame(ROWS, index=[7, 9]),
        pl.DataFrame(ROWS),
        pl.DataFrame(ROWS).with_columns(pl.col("id").cast(pl.Categorical)),
    ]
    for rows in given_as:
        batch = to_batch(rows, ORDERS)
        assert batch.equals(BATCH) and batch.schema.equals(ORDERS, check_metadata=True), rows
    assert to_batch(ROWS[0], ORDERS).equals(BATCH.slice(0, 1))
    assert to_batch(Order("b", None, None), ORDERS).equals(BATCH.slice(1))


def test_what_already_fits_is_not_copied() -> None:
    """A batch of the topic's schema is handed on as it is."""
    assert to_batch(BATCH, ORDERS) is BATCH
    table = pa.Table.from_batches([BATCH])
    assert to_batch(table, ORDERS).column(0).buffers()[2].address == BATCH.column(0).buffers()[2].address


@pytest.mark.parametrize("rows", [[], iter([]), ORDERS.empty_table(), pd.DataFrame(), pl.DataFrame()])
def test_no_rows_are_an_empty_batch(rows: Any) -> None:
    """Nothing is something that can be appended."""
    assert to_batch(rows, ORDERS).equals(BATCH.slice(0, 0))


def test_missing_columns_are_null() -> None:
    """In dicts row by row, in frames as a whole."""
    assert to_values(to_batch([{"id": "a"}, {"id": "b", "amount": 2}], ORDERS)) == [
        {"id": "a", "amount": None, "at": None},
        {"id": "b", "amount": 2.0, "at": None},
    ]
    assert to_batch(pa.table({"id": ["a"]}), ORDERS).equals(to_batch([{"id": "a"}], ORDERS))


def test_headers_and_deletions_ride_along() -> None:
    """`_headers` and `_deleted` are kept, in this order, after the topic's columns; a deletion needs no NOT NULL column."""
    schema = to_arrow_schema("id STRING NOT NULL, amount DOUBLE NOT NULL")
    batch = to_batch(
        [{"_deleted": True, "id": "a"}, {"id": "b", "amount": 1, "_headers": {"trace": b"\x01", "by": "me"}}], schema
    )
    assert batch.schema.equals(pa.schema([*schema, HEADERS, DELETED]))
    assert [row["_headers"] for row in to_values(batch)] == [None, {"trace": b"\x01", "by": b"me"}]
    assert to_batch(pa.Table.from_batches([batch]), schema).equals(batch)
    with pytest.raises(SchemaMismatch, match="Column amount, row 1"):
        to_batch([{"_deleted": True, "id": "a"}, {"_deleted": False, "id": "b"}], schema)


def test_a_topic_without_schema_takes_bytes() -> None:
    """Bare values have no key; a null value deletes."""
    expected = [{"key": None, "value": b"a"}, {"key": None, "value": b"b"}, {"key": None, "value": None}]
    assert to_values(to_batch([b"a", "b", None], BYTES_SCHEMA)) == expected
    assert to_values(to_batch(b"a", BYTES_SCHEMA)) == expected[:1]
    assert to_values(to_batch([{"key": "k", "value": "v"}], BYTES_SCHEMA)) == [{"key": b"k", "value": b"v"}]


@pytest.mark.parametrize(
    ("ddl", "value", "stored"),
    [
        ("INT", 3.0, 3),
        ("INT", np.int64(3), 3),
        ("BIGINT", enum.IntEnum("Level", {"HIGH": 9}).HIGH, 9),
        ("DOUBLE", 3, 3.0),
        ("DOUBLE", np.float32(0.5), 0.5),
        ("FLOAT", float("inf"), float("inf")),
        ("BOOLEAN", np.True_, True),
        ("STRING", Colour.RED, "red"),
        ("BINARY", bytearray(b"x"), b"x"),
        ("BINARY", "é", "é".encode()),
        ("DECIMAL(5,2)", "9.5", Decimal("9.50")),
        ("DECIMAL(5,2)", 9, Decimal("9.00")),
        ("DATE", "2026-01-31", date(2026, 1, 31)),
        ("TIMESTAMP", NAIVE, NOON),
        ("TIMESTAMP", NOON.astimezone(timezone(timedelta(hours=5))), NOON),
        ("TIMESTAMP", "2026-01-31T12:00:00Z", NOON),
        ("TIMESTAMP", "2026-01-31T13:00:00+01:00", NOON),
        ("TIMESTAMP", "2026-01-31 12:00", NOON),
        ("TIMESTAMP", pd.Timestamp(NOON), NOON),
        ("TIMESTAMP", pd.NaT, None),
        ("TIMESTAMP_NTZ", NAIVE, NAIVE),
        ("ARRAY<BIGINT>", (1, 2.0, None), [1, 2, None]),
        ("ARRAY<DOUBLE>", np.array([1.5]), [1.5]),
        ("ARRAY<TIMESTAMP>", ["2026-01-31T12:00:00"], [NOON]),
        ("MAP<STRING, ARRAY<INT>>", {"a": [1], "b": None}, {"a": [1], "b": None}),
        ("MAP<STRING, INT>", [("a", 1)], {"a": 1}),
        (
            "STRUCT<id: STRING, amount: DOUBLE, at: TIMESTAMP>",
            Order("a", 1, NAIVE),
            {"id": "a", "amount": 1.0, "at": NOON},
        ),
        ("STRUCT<a: INT, b: STRUCT<c: INT>>", {"a": 1}, {"a": 1, "b": None}),
    ],
)
def test_values_that_mean_the_same_are_accepted(ddl: str, value: Any, stored: Any) -> None:
    """Only where nothing is lost; what comes out has the column's type, also beside nulls."""
    schema = to_arrow_schema(f"c {ddl}")
    batch = to_batch([{"c": None}, {"c": value}, {}], schema)
    batch.validate(full=True)
    assert to_values(batch) == [{"c": None}, {"c": stored}, {"c": None}]


@pytest.mark.parametrize(
    ("ddl", "value", "says"),
    [
        ("STRING", 5, "5 (int) is not a valid STRING"),
        ("STRING", b"x", "nor bytes decoded"),
        ("STRING", "\ud800", "is not a valid STRING"),
        ("BINARY", 5, "is not a valid BINARY"),
        ("BOOLEAN", 1, "is not a valid BOOLEAN"),
        ("INT", 1.5, "1.5 (float) is not a valid INT"),
        ("INT", float("nan"), "is not a valid INT"),
        ("INT", True, "True (bool) is not a valid INT"),
        ("INT", "1", "is not a valid INT"),
        ("INT", 2**31, "from -2147483648 to 2147483647"),
        ("BIGINT", 2**63, "is not a valid BIGINT"),
        ("DOUBLE", 2**53 + 1, "is not a valid DOUBLE"),
        ("DOUBLE", True, "is not a valid DOUBLE"),
        ("DOUBLE", "1.5", "is not a valid DOUBLE"),
        ("FLOAT", 1e300, "is not a valid FLOAT"),
        ("DECIMAL(5,2)", 1.5, "for a float say how to round"),
        ("DECIMAL(5,2)", Decimal("1.555"), "is not a valid DECIMAL(5, 2)"),
        ("DECIMAL(5,2)", 10**6, "is not a valid DECIMAL(5, 2)"),
        ("DECIMAL(5,2)", "one", "is not a valid DECIMAL(5, 2)"),
        ("DATE", NOON, "take .date()"),
        ("DATE", 5, "is not a valid DATE"),
        ("TIMESTAMP", 1_700_000_000, "datetime.fromtimestamp"),
        ("TIMESTAMP", "yesterday", "is not a valid TIMESTAMP"),
        ("TIMESTAMP", date(2026, 1, 1), "is not a valid TIMESTAMP"),
        ("TIMESTAMP", pd.Timestamp(1, unit="ns"), "is not a valid TIMESTAMP"),
        ("TIMESTAMP_NTZ", NOON, "without a time zone"),
        ("ARRAY<STRING>", "abc", "is not a valid ARRAY<STRING>"),
        ("ARRAY<INT>", [1, "2"], "Column c[], row 2 (from 0): '2' (str) is not a valid INT"),
        ("MAP<STRING, INT>", {"a": "x"}, "Column c.value, row 2 (from 0): 'x' (str)"),
        ("MAP<STRING, INT>", {None: 1}, "Column c.key, row 2"),
        ("MAP<STRING, INT>", 5, "is not a valid MAP<STRING, INT>"),
        ("STRUCT<a: INT>", {"a": 1, "b": 2}, "row 2 (from 0): unknown field 'b'"),
        ("STRUCT<a: INT>", (1,), "is not a valid STRUCT<a: INT>"),
        ("STRUCT<a: INT NOT NULL>", {}, "Column c.a, row 2 (from 0): null is not a valid INT NOT NULL"),
        ("ARRAY<STRUCT<a: ARRAY<INT>>>", [{"a": [1]}, {"a": [2, "x" * 999]}], "Column c[].a[], row 2 (from 0): 'xxxx"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_place(ddl: str, value: Any, says: str) -> None:
    """The error names column, row and value (shortened), and says what to give instead."""
    with pytest.raises(SchemaMismatch) as caught:
        to_batch([{}, {"c": None}, {"c": value}, {}], to_arrow_schema(f"c {ddl}"))
    assert says in str(caught.value)
    assert "row 2" in caught.value.what and caught.value.advice
    assert len(caught.value.what) < 250


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"id": "a"}, {"amount": 1.0}], "Column id, row 1 (from 0): null is not a valid STRING NOT NULL"),
        (
            [{"id": "a"}, {"id": "b", "amont": 1}],
            "Column 'amont', row 1 (from 0): the topic has no such column. Did you mean amount?",
        ),
        ([{"id": "a", "amount": 1.0, "at": NOON, 5: 1}], "Column 5, row 0"),
        ([{"id": "a", "_offset": 1}], "Column '_offset'"),
        ([{"id": "a"}, 5], "Row 1 (from 0): 5 (int) is not a row"),
        (["text"], "'text' (str) is not a row"),
        (b"text", "is not a row"),
        (5, "5 (int) is not a row"),
        (None, "is not a row"),
        (pa.table({"id": ["a", None]}), "Column id, row 1 (from 0): null"),
        (pa.table({"amount": [1.0]}), "Column id, row 0"),
        (pa.table({"id": ["a"], "more": [1]}), "Column 'more': the topic has no such column"),
        (pa.table([["a"], ["b"]], names=["id", "id"]), "Column id occurs twice"),
        (pd.DataFrame({"id": ["a", 5]}), "one type"),
        (pd.DataFrame({"id": ["a"], "at": ["2026-01-31"]}), "Column at: the rows have string, the topic has TIMESTAMP"),
        (pl.DataFrame({"id": [5]}), "Column id: the rows have int64, the topic has STRING"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: Any, says: str) -> None:
    """Unknown columns, missing values and things that are no rows."""
    with pytest.raises(SchemaMismatch) as caught:
        to_batch(rows, ORDERS)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("column", "ddl", "stored"),
    [
        (pa.array([1, 2], pa.uint64()), "INT", [1, 2]),
        (pa.array([1.0, None]), "BIGINT", [1, None]),
        (pa.array([1, 2], pa.int32()), "DOUBLE", [1.0, 2.0]),
        (pa.array([0.5], pa.float16()), "FLOAT", [0.5]),
        (pa.array([12], pa.int64()), "DECIMAL(5,2)", [Decimal("12.00")]),
        (pa.array([Decimal("1.50")], pa.decimal128(38, 3)), "DECIMAL(5,2)", [Decimal("1.50")]),
        (pa.array([NOON], pa.timestamp("ns", tz="Asia/Tokyo")), "TIMESTAMP", [NOON]),
        (pa.array([NAIVE], pa.timestamp("s")), "TIMESTAMP", [NOON]),
        (pa.array(["a"], pa.string_view()), "BINARY", [b"a"]),
        (pa.array([b"0" * 16], pa.uuid()), "BINARY", [b"0" * 16]),
        (pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"]), "STRING", ["a", "a", "b"]),
        (pa.array([None, None]), "ARRAY<INT>", [None, None]),
        (pa.array([[1], None], pa.large_list(pa.int8())), "ARRAY<BIGINT>", [[1], None]),
        (pa.array([{"a": 1}]), "STRUCT<b: STRING, a: DOUBLE>", [{"b": None, "a": 1.0}]),
        (pa.array([[("k", "v")]], pa.map_(pa.string(), pa.large_string())), "MAP<STRING, BINARY>", [{"k": b"v"}]),
    ],
)
def test_arrow_columns_are_cast_where_no_value_changes(column: pa.Array, ddl: str, stored: list[Any]) -> None:
    """Other widths, units, zones and encodings of the same values."""
    batch = to_batch(pa.table({"c": column}), to_arrow_schema(f"c {ddl}"))
    batch.validate(full=True)
    assert [row["c"] for row in to_values(batch)] == stored


@pytest.mark.parametrize(
    ("column", "ddl", "says"),
    [
        (pa.array([1, 2, 300]), "TINYINT", "Column c, row 2 (from 0)"),
        (pa.array([1.0, 1.5]), "INT", "Column c, row 1"),
        (pa.array([1, 2**53 + 1]), "DOUBLE", "Column c, row 1"),
        (pa.array([0.1]), "FLOAT", "the rows have double, the topic has FLOAT"),
        (pa.array([0, 1], pa.timestamp("ns", tz="UTC")), "TIMESTAMP", "Column c, row 1"),
        (pa.array([1000]), "DECIMAL(3,1)", "Column c, row 0"),
        (pa.array([Decimal("1.55")]), "DECIMAL(5,1)", "Column c, row 0"),
        (pa.array([1.5]), "DECIMAL(5,1)", "the rows have double"),
        (pa.array([5]), "STRING", "the rows have int64"),
        (pa.array(["5"]), "INT", "the rows have string"),
        (pa.array([True]), "INT", "the rows have bool"),
        (pa.array([1]), "BOOLEAN", "the rows have int64"),
        (pa.array([5]), "TIMESTAMP", "the rows have int64"),
        (pa.array([NOON]), "DATE", "the rows have timestamp"),
        (pa.array([NOON]), "TIMESTAMP_NTZ", "the rows have timestamp"),
        (pa.array([b"\xff"]), "STRING", "the rows have binary"),
        (pa.array([[1]], pa.list_view(pa.int64())), "ARRAY<BIGINT>", "the rows have list_view"),
        (pa.array([{"a": 1, "b": 2}]), "STRUCT<a: BIGINT>", "the rows have struct"),
        (pa.array([{"a": 1}]), "STRUCT<a: BIGINT, b: INT NOT NULL>", "the rows have struct"),
        (pa.array([{"a": 1}, {"a": None}]), "STRUCT<a: BIGINT NOT NULL>", "Column c, row 1"),
        (
            pa.array([0, 2**62]).view(pa.timestamp("us", tz="UTC")),
            "TIMESTAMP",
            "row 1 (from 0): a time outside the years",
        ),
        (pa.array([0, 2**30], pa.int32()).view(pa.date32()), "DATE", "row 1 (from 0): a time outside the years"),
        (
            pa.array([[{"a": 0}], [{"a": 2**62}]], pa.list_(pa.struct([("a", pa.timestamp("us"))]))),
            "ARRAY<STRUCT<a: TIMESTAMP_NTZ>>",
            "row 1 (from 0): a time outside the years",
        ),
    ],
)
def test_arrow_columns_that_would_change_are_refused(column: pa.Array, ddl: str, says: str) -> None:
    """Arrow's own casts would change or lose these in silence, or store times that no reader could show."""
    with pytest.raises(SchemaMismatch) as caught:
        to_batch(pa.table({"c": column}), to_arrow_schema(f"c {ddl}"))
    assert says in str(caught.value)
    assert caught.value.advice


times = st.datetimes(timezones=st.just(UTC))
a_row = st.fixed_dictionaries(
    {
        "t": st.none() | times,
        "n": st.none() | st.datetimes(),
        "s": st.none() | st.text(st.characters(blacklist_categories=["Cs"])),
        "m": st.none() | st.dictionaries(st.text("abc"), st.none() | st.lists(st.none() | times)),
        "r": st.none() | st.fixed_dictionaries({"i": st.none() | st.integers(-(2**63), 2**63 - 1), "d": st.dates()}),
    }
)
NESTED = to_arrow_schema(
    "t TIMESTAMP, n TIMESTAMP_NTZ, s STRING, m MAP<STRING, ARRAY<TIMESTAMP>>, r STRUCT<i: BIGINT, d: DATE NOT NULL>"
)


@given(st.lists(a_row, max_size=6), st.integers(0, 3), st.integers(0, 4))
def test_what_goes_in_comes_out(rows: list[dict[str, Any]], start: int, count: int) -> None:
    """Rows survive the way into Arrow and back, whole or as a slice, nested or not."""
    batch = to_batch(rows, NESTED)
    batch.validate(full=True)
    assert to_values(batch) == rows
    assert to_values(batch.slice(min(start, len(rows)), count)) == rows[start : start + count]
    assert to_batch(pa.Table.from_batches([batch.slice(min(start, len(rows)))]), NESTED).num_rows == max(
        len(rows) - start, 0
    )
    assert all(row["t"].tzinfo is UTC for row in to_values(batch) if row["t"])


def test_libraries_that_were_not_asked_for_are_not_imported() -> None:
    """Who appends dicts pays neither for Polars nor for the DDL parser; pandas is loaded by pyarrow's first `array`."""
    code = (
        "import sys, pyarrow as pa; from headwater.log.arrow import placement, rows; assert 'pandas' not in sys.modules;"
        "rows.to_batch([{'a': 1}], pa.schema([('a', pa.int64())]));"
        "print([name for name in ('polars', 'sqlglot', 'pyspark') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
