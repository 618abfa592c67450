"""The schema of a topic: how it may be written, what is refused, how it may grow, and how old batches are read with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Optional

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas import types as spark_arrow
from pyspark.sql.types import StructType

from headwater.model.ddl import make_list, make_map
from headwater.model.errors import InvalidSchema, SchemaConflict
from headwater.model.schema import (
    BYTES_SCHEMA,
    has_room_for,
    project,
    schema_from_json,
    schema_to_json,
    to_arrow_schema,
    to_ddl,
    widen,
)

UTC_TIME = pa.timestamp("us", tz="UTC")

plain_types = st.sampled_from(
    [
        pa.string(),
        pa.binary(),
        pa.bool_(),
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.date32(),
        UTC_TIME,
        pa.timestamp("us"),
        pa.decimal128(10, 2),
        pa.decimal128(38, 0),
    ]
)
names = st.one_of(
    st.sampled_from(
        ["id", "Order", "select", "not", "end", "a b", "`", "a``", "日付", "1a", "a.b", "x'", '"', "\\", "--", "/*"]
    ),
    st.text(st.characters(blacklist_categories=["C", "Z"]), min_size=1, max_size=6),
).filter(lambda name: not name.startswith("_") and name.isprintable())


def fields(types: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[list[pa.Field]]:
    field = st.builds(pa.field, names, types, nullable=st.booleans())
    return st.lists(field, min_size=1, max_size=4, unique_by=lambda field: field.name.lower())


any_type = st.recursive(
    plain_types,
    lambda types: st.one_of(
        st.builds(make_list, types), st.builds(make_map, plain_types, types), fields(types).map(pa.struct)
    ),
    max_leaves=5,
)
schemas = fields(any_type).map(pa.schema)


@pytest.mark.parametrize(
    ("ddl", "expected"),
    [
        ("STRING", pa.string()),
        ("VARCHAR(10)", pa.string()),
        ("CHAR(3)", pa.string()),
        ("BINARY", pa.binary()),
        ("BOOLEAN", pa.bool_()),
        ("TINYINT", pa.int8()),
        ("byte", pa.int8()),
        ("SMALLINT", pa.int16()),
        ("short", pa.int16()),
        ("INT", pa.int32()),
        ("integer", pa.int32()),
        ("BIGINT", pa.int64()),
        ("long", pa.int64()),
        ("FLOAT", pa.float32()),
        ("REAL", pa.float32()),
        ("DOUBLE", pa.float64()),
        ("DATE", pa.date32()),
        ("TIMESTAMP", UTC_TIME),
        ("TIMESTAMP_LTZ", UTC_TIME),
        ("TIMESTAMP_NTZ", pa.timestamp("us")),
        ("DECIMAL", pa.decimal128(10, 0)),
        ("DECIMAL(5)", pa.decimal128(5, 0)),
        ("NUMERIC(10, 2)", pa.decimal128(10, 2)),
        ("ARRAY<STRING>", make_list(pa.string())),
        ("MAP<STRING, INT>", make_map(pa.string(), pa.int32())),
        (
            "STRUCT<a: INT NOT NULL, b STRING>",
            pa.struct([pa.field("a", pa.int32(), nullable=False), ("b", pa.string())]),
        ),
        (
            "ARRAY<ARRAY<MAP<INT,STRUCT<a:INT>>>>",
            make_list(make_list(make_map(pa.int32(), pa.struct([("a", pa.int32())])))),
        ),
    ],
)
def test_ddl_types_are_sparks(ddl: str, expected: pa.DataType) -> None:
    """Each DDL type becomes the Arrow type that PySpark uses for it, and NOT NULL and comments are understood."""
    assert to_arrow_schema(f"a {ddl}, b: {ddl} NOT NULL COMMENT 'why', -- a remark\n c {ddl} NULL") == pa.schema(
        [pa.field("a", expected), pa.field("b", expected, nullable=False), pa.field("c", expected)]
    )


@given(schemas)
def test_every_schema_survives_both_spellings_and_is_sparks_own(schema: pa.Schema) -> None:
    """DDL and JSON give back an equal schema, and PySpark reads the JSON as the very same Arrow types."""
    assert to_arrow_schema(to_ddl(schema)) == schema
    stored = json.loads(json.dumps(schema_to_json(schema)))
    assert schema_from_json(stored) == schema
    assert spark_arrow.to_arrow_schema(StructType.fromJson(stored), timezone="UTC").equals(schema)
    assert to_arrow_schema(schema).equals(schema)


@pytest.mark.parametrize(
    ("given_type", "expected"),
    [
        (pa.large_string(), pa.string()),
        (pa.string_view(), pa.string()),
        (pa.large_binary(), pa.binary()),
        (pa.binary(16), pa.binary()),
        (pa.uuid(), pa.binary()),
        (pa.timestamp("ns", tz="Europe/Berlin"), UTC_TIME),
        (pa.timestamp("s"), pa.timestamp("us")),
        (pa.dictionary(pa.int32(), pa.large_string()), pa.string()),
        (pa.uint8(), pa.int16()),
        (pa.uint16(), pa.int32()),
        (pa.uint32(), pa.int64()),
        (pa.uint64(), pa.decimal128(20, 0)),
        (pa.float16(), pa.float32()),
        (pa.date64(), pa.date32()),
        (pa.decimal256(20, 3), pa.decimal128(20, 3)),
        (pa.list_(pa.field("item", pa.uint8(), nullable=False)), make_list(pa.int16())),
        (pa.large_list(pa.int8()), make_list(pa.int8())),
        (pa.map_(pa.large_string(), pa.uint8()), make_map(pa.string(), pa.int16())),
        (
            pa.struct([pa.field("a", pa.uint8(), nullable=False)]),
            pa.struct([pa.field("a", pa.int16(), nullable=False)]),
        ),
    ],
)
def test_arrow_types_become_those_that_spark_reads(given_type: pa.DataType, expected: pa.DataType) -> None:
    """A foreign Arrow type becomes the Spark type that holds all of its values; metadata goes."""
    foreign = pa.schema([pa.field("a", given_type, nullable=False, metadata={"x": "y"})], metadata={"pandas": "{}"})
    assert to_arrow_schema(foreign).equals(pa.schema([pa.field("a", expected, nullable=False)]), check_metadata=True)


@dataclass
class Place:
    lat: float
    lon: float | None


@dataclass
class Order:
    id: str
    count: int
    at: datetime
    day: date
    price: Annotated[Decimal, pa.decimal128(10, 2)]
    rate: Decimal
    paid: bool
    raw: bytes | None
    note: Optional[str]  # noqa: UP045 - both spellings are understood
    tags: list[str]
    seen: dict[str, int] | None
    places: list[Place]


@dataclass
class Loop:
    inner: list[Loop]


@dataclass
class Odd:
    length: timedelta


def test_a_dataclass_is_a_schema() -> None:
    """Annotations become columns; only those with None are nullable."""
    place = "STRUCT<lat: DOUBLE NOT NULL, lon: DOUBLE>"
    assert to_arrow_schema(Order) == to_arrow_schema(
        "id STRING NOT NULL, count BIGINT NOT NULL, at TIMESTAMP NOT NULL, day DATE NOT NULL, price DECIMAL(10,2) NOT NULL, "
        "rate DECIMAL(38,18) NOT NULL, paid BOOLEAN NOT NULL, raw BINARY, note STRING, tags ARRAY<STRING> NOT NULL, "
        f"seen MAP<STRING, BIGINT>, places ARRAY<{place}> NOT NULL"
    )


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("", "no columns"),
        (pa.schema([]), "no columns"),
        ("a", "is not valid DDL"),
        ("a INT b", "syntax error at 'b'"),
        ("a " + "ARRAY<" * 3000 + "INT" + ">" * 3000, "is not valid DDL"),
        ("a " + "ARRAY<" * 32 + "INT" + ">" * 32, "Column a nests types deeper than 32 levels"),
        ("a \0 INT", "is not valid DDL"),
        ("\ud800 INT", "is not valid DDL"),
        ("a NOSUCH", "is not valid DDL"),
        ("a `INT", "is not valid DDL"),
        ("a INT>, b STRUCT<c INT", "not a list"),
        ("a INT>) ; DROP TABLE t; CREATE TABLE x (y STRUCT<b INT", "not a list"),
        ("INT", "without a column name"),
        ("a INT DEFAULT 3", "Only NOT NULL and COMMENT"),
        ("a INT PRIMARY KEY", "Only NOT NULL and COMMENT"),
        ("a ARRAY", "Column a has the type ARRAY"),
        ("a MAP<STRING>", "Column a has the type MAP"),
        ("a INTERVAL DAY TO SECOND", "Column a"),
        ("a TIME", "Column a has the type TIME"),
        ("a TIMESTAMP(3)", "Column a"),
        ("s STRUCT<x: ARRAY<VARIANT>>", "Column s.x[] has the type VARIANT"),
        ("a DECIMAL(39, 2)", "1 to 38"),
        ("a DECIMAL(3, 5)", "between 0 and"),
        ("_key STRING", "are reserved for the log"),
        ("a INT, A STRING", "Columns a and A"),
        ("s ARRAY<STRUCT<x: INT, X: INT>>", "s[].x and s[].X"),
        (pa.schema([("", pa.int8())]), "empty"),
        (pa.schema([("a\nb", pa.int8())]), "control characters"),
        (pa.schema([("a", pa.int8()), ("a", pa.int8())]), "Columns a and a"),
        (
            pa.schema([("a", pa.duration("s"))]),
            "Column a has the type duration[s], which Spark does not support. Store the duration",
        ),
        (
            pa.schema([("t", pa.list_(pa.time64("us")))]),
            "Column t[] has the type time64[us], which Spark does not support",
        ),
        (pa.schema([("n", pa.null())]), "Declare a type"),
        (pa.schema([("s", pa.struct([]))]), "Column s"),
        (pa.schema([("d", pa.decimal256(50, 2))]), "1 to 38"),
        (pa.schema([("d", pa.decimal128(5, -2))]), "between 0 and"),
        (pa.schema([("v", pa.list_view(pa.int8()))]), "Column v"),
        (Odd, "Column length"),
        (Loop, "Column inner[]: Loop contains itself"),
        (int, "is not a schema"),
        (None, "is not a schema"),
        ({"a": "INT"}, "is not a schema"),
    ],
)
def test_what_is_no_schema_is_refused_by_name(schema: Any, says: str) -> None:
    """The error names the column and what to use instead."""
    with pytest.raises(InvalidSchema) as caught:
        to_arrow_schema(schema)
    assert says in str(caught.value)
    assert caught.value.advice


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"fields": 3},
        {"fields": [{"name": "a"}]},
        {"fields": [{"name": "a", "type": "nope", "nullable": True}]},
        {"fields": [{"name": "a", "type": {"type": "udt"}, "nullable": True}]},
    ],
)
def test_a_stored_schema_that_is_none_is_refused(stored: dict[str, Any]) -> None:
    """A file that somebody edited gives an error of ours."""
    with pytest.raises(InvalidSchema, match="stored schema"):
        schema_from_json(stored)


@pytest.mark.parametrize(
    ("old", "new", "wide"),
    [
        ("a INT", "b STRING, a INT", "a INT, b STRING"),
        ("a TINYINT", "a SMALLINT", "a SMALLINT"),
        ("a TINYINT", "a BIGINT", "a BIGINT"),
        ("a INT NOT NULL", "a DOUBLE", "a DOUBLE"),
        ("a FLOAT", "a DOUBLE", "a DOUBLE"),
        ("a DECIMAL(5,2)", "a DECIMAL(9,2)", "a DECIMAL(9,2)"),
        ("s STRUCT<x: INT>", "s STRUCT<y: STRING, x: BIGINT>", "s STRUCT<x: BIGINT, y: STRING>"),
        (
            "l ARRAY<INT>, m MAP<STRING, FLOAT>",
            "l ARRAY<BIGINT>, m MAP<STRING, DOUBLE>",
            "l ARRAY<BIGINT>, m MAP<STRING, DOUBLE>",
        ),
        ("l ARRAY<STRUCT<x: INT NOT NULL>>", "l ARRAY<STRUCT<x: INT, y: DATE>>", "l ARRAY<STRUCT<x: INT, y: DATE>>"),
    ],
)
def test_a_schema_may_grow(old: str, new: str, wide: str) -> None:
    """Nullable columns added, types widened, NOT NULL dropped; the old columns keep their order."""
    assert widen(to_arrow_schema(old), to_arrow_schema(new)) == to_arrow_schema(wide)


@pytest.mark.parametrize(
    ("type_", "narrower", "expected"),
    [
        ("BIGINT", "INT", True),
        ("DECIMAL(14,2)", "DECIMAL(12,2)", True),
        ("ARRAY<BIGINT>", "ARRAY<INT>", True),
        ("INT", "BIGINT", False),
        ("DECIMAL(14,2)", "DECIMAL(12,3)", False),
        ("STRING", "INT", False),
    ],
)
def test_a_type_has_room_for_what_may_grow_to_it(type_: str, narrower: str, expected: bool) -> None:
    """Every value of the narrower one; never one that would be rounded or read as another."""
    column, other = (to_arrow_schema(f"a {ddl}").field("a").type for ddl in (type_, narrower))
    assert has_room_for(column, other) is expected


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("a INT, b INT", "a INT", ["column b INT is missing"]),
        ("a INT", "A INT", ["column a INT is missing (A is a different name)"]),
        ("a INT", "a INT NOT NULL", ["column a is nullable"]),
        ("a INT", "a INT, b INT NOT NULL", ["column b INT is new and NOT NULL"]),
        (
            "a BIGINT, b DOUBLE",
            "a INT, b BIGINT",
            ["a is BIGINT and cannot become INT", "b is DOUBLE and cannot become BIGINT"],
        ),
        ("a BIGINT", "a DOUBLE", ["a is BIGINT and cannot become DOUBLE"]),
        ("a DATE", "a TIMESTAMP", ["a is DATE and cannot become TIMESTAMP"]),
        ("a TIMESTAMP", "a TIMESTAMP_NTZ", ["cannot become TIMESTAMP_NTZ"]),
        ("a DECIMAL(5,2)", "a DECIMAL(9,3)", ["cannot become DECIMAL(9, 3)"]),
        (
            "s STRUCT<x: INT, y: ARRAY<INT>>",
            "s STRUCT<y: ARRAY<STRING>>",
            ["s.x INT is missing", "s.y[] is INT and cannot become STRING"],
        ),
        ("m MAP<INT, INT>", "m MAP<BIGINT, INT>", ["m is MAP<INT, INT> and cannot become MAP<BIGINT, INT>"]),
    ],
)
def test_other_changes_are_refused_with_every_difference(old: str, new: str, says: list[str]) -> None:
    """All differences stand in one error, not only the first."""
    with pytest.raises(SchemaConflict) as caught:
        widen(to_arrow_schema(old), to_arrow_schema(new))
    assert all(difference in str(caught.value) for difference in says)
    assert "new topic" in caught.value.advice


def test_a_key_keeps_its_partition_when_the_schema_grows() -> None:
    """Integers of all widths hash alike; an INT key that became DOUBLE would move to other partitions."""
    narrow = to_arrow_schema("k INT")
    assert widen(narrow, to_arrow_schema("k BIGINT"), key="k") == to_arrow_schema("k BIGINT")
    with pytest.raises(SchemaConflict, match="would move to other partitions"):
        widen(narrow, to_arrow_schema("k DOUBLE"), key="k")


@given(schemas)
def test_no_change_is_always_accepted(schema: pa.Schema) -> None:
    """A schema is as wide as itself."""
    assert widen(schema, schema).equals(schema)


def test_an_old_batch_is_read_with_the_newer_schema() -> None:
    """New columns are null, types are wider, at any depth; values do not change."""
    old = to_arrow_schema(
        "i INT, f FLOAT, d DECIMAL(5,2), s STRUCT<x: INT>, l ARRAY<STRUCT<x: INT>>, m MAP<STRING, INT>"
    )
    new = to_arrow_schema(
        "n STRING, i DOUBLE, f DOUBLE, d DECIMAL(9,2), s STRUCT<x: BIGINT, y: STRING>, l ARRAY<STRUCT<x: BIGINT, y: DATE>>, "
        "m MAP<STRING, BIGINT>, z ARRAY<INT>"
    )
    row = {"i": 7, "f": 0.5, "d": Decimal("1.50"), "s": {"x": 1}, "l": [{"x": 2}], "m": [("k", 3)]}
    batch = pa.RecordBatch.from_pylist([row, dict.fromkeys(row)], schema=old)
    read = project(batch, widen(old, new))
    assert read.schema.equals(widen(old, new))
    read.validate(full=True)
    expected = row | {"i": 7.0, "n": None, "z": None, "s": {"x": 1, "y": None}, "l": [{"x": 2, "y": None}]}
    assert read.to_pylist() == [expected, dict.fromkeys(expected)]


def test_a_batch_of_the_same_schema_is_not_touched() -> None:
    """The usual case costs nothing; fewer columns cost no copy."""
    batch = pa.RecordBatch.from_pylist([{"key": b"k", "value": b"v"}], schema=BYTES_SCHEMA)
    assert project(batch, BYTES_SCHEMA) is batch
    assert project(batch, pa.schema([BYTES_SCHEMA.field("value")])).column(0).equals(batch.column(1))
    with pytest.raises(SchemaConflict, match="NOT NULL"):
        project(batch, to_arrow_schema("other INT NOT NULL"))
