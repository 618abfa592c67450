"""Placement: the partition of a key is Kafka's, for every way in which a batch of keys can look."""

from __future__ import annotations

import random
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headwater as hw
from headwater.log.arrow.placement import Placement, key_bytes, murmur2, partitions_of, place
from headwater.model.errors import InvalidSchema
from headwater.model.schema import to_arrow_schema
from headwater.sinks.newest_rows import newest

KAFKAS_OWN = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def java_murmur2(data: bytes) -> int:
    """Kafka's `Utils.murmur2`, statement by statement."""

    def int32(number: int) -> int:
        return struct.unpack(">i", struct.pack(">I", number & 0xFFFFFFFF))[0]

    def unsigned_shift(number: int, bits: int) -> int:
        return (number & 0xFFFFFFFF) >> bits

    length, m = len(data), 0x5BD1E995
    h = int32(0x9747B28C ^ length)
    for i in range(length // 4):
        k = data[i * 4] + (data[i * 4 + 1] << 8) + (data[i * 4 + 2] << 16) + (data[i * 4 + 3] << 24)
        k = int32(k * m)
        k ^= unsigned_shift(k, 24)
        k = int32(k * m)
        h = int32(h * m)
        h = int32(h ^ k)
    rest, remaining = length & ~3, length % 4
    if remaining == 3:
        h ^= data[rest + 2] << 16
    if remaining >= 2:
        h ^= data[rest + 1] << 8
    if remaining >= 1:
        h ^= data[rest]
        h = int32(h * m)
    h = int32(h ^ unsigned_shift(h, 13))
    h = int32(h * m)
    return int32(h ^ unsigned_shift(h, 15))


@pytest.mark.parametrize("copies", [1, 100])
def test_hashes_are_kafkas(copies: int) -> None:
    """The vectors of Kafka's own tests, by the path for few keys and by the one for many."""
    keys = pa.array(list(KAFKAS_OWN) * copies, pa.binary())
    assert murmur2(keys).tolist() == list(KAFKAS_OWN.values()) * copies
    for key, expected in KAFKAS_OWN.items():
        assert murmur2(pa.array([key] * copies, pa.binary())).tolist() == [expected] * copies


@given(
    st.lists(st.none() | st.binary(max_size=40), max_size=60),
    st.integers(0, 20),
    st.integers(1, 5),
    st.integers(1, 300),
)
def test_every_batch_of_keys_is_placed_as_kafka_places_it(
    keys: list[bytes | None], skipped: int, repeated: int, partitions: int
) -> None:
    """Any mix of lengths, slices, nulls and empty keys agrees with the Java code; no key says -1."""
    column = pa.array(keys * repeated, pa.binary()).slice(skipped)
    expected = [-1 if key is None else (java_murmur2(key) & 0x7FFFFFFF) % partitions for key in column.to_pylist()]
    assert partitions_of(column, partitions).tolist() == expected


def test_blocks_and_very_long_keys_agree() -> None:
    """More keys than one block holds, and a few keys that are a thousand times as long as the others."""
    rng = random.Random(7)
    keys = [rng.randbytes(rng.choice([0, 3, 8, 10, 11, 100])) for _ in range(70_000)]
    for at in (5, 40_000, 40_001):
        keys[at] = rng.randbytes(70_001)
    column = pa.array(keys, pa.binary())
    hashes = murmur2(column)
    for at in [5, 40_000, 40_001, *rng.sample(range(len(keys)), 2_000)]:
        assert hashes[at] == java_murmur2(keys[at])
    same = pa.array([b"%010d" % at for at in range(70_000)], pa.binary())
    assert murmur2(same)[69_999] == java_murmur2(b"0000069999")


@pytest.mark.parametrize(
    ("ddl", "value", "expected"),
    [
        ("STRING", "grün", "grün".encode()),
        ("BINARY", b"\x00\xff", b"\x00\xff"),
        ("TINYINT", -1, b"\xff" * 8),
        ("INT", 1, b"\x00" * 7 + b"\x01"),
        ("BIGINT", -(2**63), b"\x80" + b"\x00" * 7),
        ("BOOLEAN", True, b"true"),
        ("DOUBLE", 1.5, b"1.5"),
        ("DOUBLE", 0.0, b"0.0"),
        ("DOUBLE", -0.0, b"0.0"),
        ("FLOAT", -0.0, b"0.0"),
        ("DOUBLE", float("nan"), b"null"),
        ("DOUBLE", float("-inf"), b"null"),
        ("STRUCT<x: DOUBLE, l: ARRAY<FLOAT>>", {"x": -0.0, "l": [-0.0, -1.0]}, b'{"l":[0.0,-1.0],"x":0.0}'),
        ("DECIMAL(5,2)", Decimal("1.50"), b'"1.50"'),
        ("DATE", date(2026, 1, 31), b'"2026-01-31"'),
        ("TIMESTAMP", datetime(2026, 1, 31, 12, tzinfo=UTC), b'"2026-01-31T12:00:00Z"'),
        ("TIMESTAMP_NTZ", datetime(2026, 1, 31, 12, 0, 0, 500_000), b'"2026-01-31T12:00:00.500000"'),  # noqa: DTZ001
        ("ARRAY<STRING>", ["ü", None], '["ü",null]'.encode()),
        ("STRUCT<b: INT, a: BINARY>", {"b": 1, "a": b"x"}, b'{"a":"eA==","b":1}'),
    ],
)
def test_the_bytes_of_a_key_are_fixed(ddl: str, value: Any, expected: bytes) -> None:
    """Stored behaviour: partitions of existing topics depend on these bytes."""
    column = pa.array([value, value, None, value], to_arrow_schema(f"k {ddl}").field(0).type)
    assert key_bytes(column).to_pylist() == [expected, expected, None, expected]
    assert key_bytes(column.slice(1)).to_pylist() == [expected, None, expected]
    assert key_bytes(column.slice(0, 0)).to_pylist() == []
    key_bytes(column).validate(full=True)


def test_a_map_is_no_key() -> None:
    """Its entries have no order, so equal maps could part."""
    with pytest.raises(InvalidSchema, match="cannot be a key"):
        key_bytes(pa.array([], to_arrow_schema("k STRUCT<m: ARRAY<MAP<STRING, INT>>>").field(0).type))


@given(st.integers(1, 400), st.data())
def test_rows_are_grouped_by_partition_in_order(partitions: int, data: st.DataObject) -> None:
    """Every row goes to its own partition, none is lost, and rows of one partition keep their order."""
    places = data.draw(st.lists(st.integers(0, partitions - 1), max_size=50))
    groups = Placement(np.array(places, np.int32), partitions).groups()
    expected = [(p, [n for n, at in enumerate(places) if at == p]) for p in sorted(set(places))]
    everything = list(range(len(places)))
    assert [(p, everything if rows is None else rows.tolist()) for p, rows in groups] == expected


@pytest.mark.parametrize("type_", [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.string(), pa.binary()])
def test_a_single_row_goes_where_it_goes_in_a_batch(type_: pa.DataType) -> None:
    """It is placed by another path, which must agree for ever."""
    numbers = [None, 0, 1, -1, 127, -128]
    values = numbers if pa.types.is_integer(type_) else [None if n is None else str(n) for n in numbers]
    rows = pa.record_batch({"k": pa.array(values, type_)})
    together = place(rows, "k", 7, sticky=3).partitions.tolist()
    assert together == [place(rows.slice(at, 1), "k", 7, sticky=3).only for at in range(len(values))]


def test_what_stays_together_is_not_picked_apart() -> None:
    """The usual single event, or a batch of one key, is handed on as it is."""
    assert Placement(np.array([3, 3], np.int32), 4).groups() == [(3, None)]


def test_rows_without_a_key_go_together_to_the_sticky_partition() -> None:
    """Null keys and topics without a key follow `sticky`; keyed rows do not."""
    rows = pa.record_batch({"k": pa.array([b"21", None, b"21", None])})
    placed = place(rows, "k", 4, sticky=7).partitions
    assert placed[[1, 3]].tolist() == [3, 3]
    assert placed[[0, 2]].tolist() == partitions_of(pa.array([b"21", b"21"]), 4).tolist()
    assert place(rows, None, 4, sticky=6).partitions.tolist() == [2] * 4


OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0007))[0]
ZEROS_AND_NANS = [
    (0.0, "a"),
    (-0.0, "b"),
    (float("nan"), "c"),
    (OTHER_NAN, "d"),
    (float("inf"), "e"),
    (float("-inf"), "f"),
]


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize("ddl", ["DOUBLE", "STRUCT<x: DOUBLE>"])
def test_keys_that_sql_takes_for_the_same_are_one_key(tmp_path: Path, scheme: str, ddl: str) -> None:
    """-0.0 is 0.0 and NaN is NaN, in the table and for compaction; the infinities are others, and the values stay as they were sent."""
    url = str(tmp_path / "log") if scheme == "file" else "memory://"
    with hw.open_log(url) as log:
        log.create_topic("t", f"k {ddl}, v STRING", key="k", partitions=8, compact=True, segment_bytes=4096)
        keys = [({"x": number}, value) for number, value in ZEROS_AND_NANS] if "STRUCT" in ddl else ZEROS_AND_NANS
        for key, value in keys:
            log.append("t", [{"k": key, "v": value}])
        assert {row["v"] for row in log.table("t").to_pylist()} == {"b", "d", "e", "f"}
        places = {row["v"]: row["_partition"] for row in log.read("t", columns=["_partition", "v"]).to_pylist()}
        assert places["a"] == places["b"] and len({places[value] for value in "cdef"}) == 1
        for _ in range(8):  # so that the segments are closed
            log.append("t", [{"k": {"x": 1.5} if "STRUCT" in ddl else 1.5, "v": "x" * 5000}])
            log.append("t", [{"k": key, "v": value} for key, value in keys])
        log.seal("t") if scheme == "file" else None
        log.tidy("t")
        assert {row["v"] for row in log.table("t").to_pylist() if len(row["v"]) == 1} == {"b", "d", "e", "f"}


def test_a_sink_gets_one_row_of_keys_that_a_database_takes_for_the_same() -> None:
    """Two rows of one key in one statement are refused there."""
    keys = pa.array([0.0, -0.0, 1.0, float("nan"), OTHER_NAN])
    rows = pa.table({"k": keys, "_partition": [0] * 5, "_offset": range(5), "_deleted": [False] * 5})
    assert newest(rows, ["k"]).column("_offset").to_pylist() == [1, 2, 4]
