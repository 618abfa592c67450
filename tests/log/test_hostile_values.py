"""Hostile values in the API: text that is no text, times beyond the calendar, clocks that are wrong. Each is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.log.arrow.columns import values_of
from headwater.model.clock import duration_us, time_us
from headwater.model.errors import InvalidInput, SchemaMismatch, Unsupported

HALF = "a\ud800"
"""A character that is half of a surrogate pair: no UTF-8 can hold it."""
NOW = datetime(2026, 1, 31, tzinfo=UTC)


@pytest.fixture(params=["file", "memory"])
def open_log(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., hw.Log]:
    """Opens a log in a folder, or in memory."""
    return lambda **more: hw.open_log(str(tmp_path / "log") if request.param == "file" else "memory://", **more)


@pytest.fixture
def log(open_log: Callable[..., hw.Log]) -> Iterator[hw.Log]:
    """A log with a topic."""
    with open_log() as log:
        log.create_topic("t", schema="id STRING, at TIMESTAMP, d DATE", key="id", time="at")
        yield log


@pytest.mark.parametrize("headers", [{HALF: b"x"}, {"a": HALF}], ids=["name", "value"])
def test_a_header_that_is_no_text_is_refused_and_its_neighbours_are_stored(log: hw.Log, headers: Any) -> None:
    """The event's receipt says so; the rest of the batch is appended."""
    with log.producer() as producer:
        good = producer.send("t", {"id": "1", "at": NOW})
        bad = producer.send("t", {"id": "2", "at": NOW}, headers=headers)
        assert good.result().offset == 0
        with pytest.raises(SchemaMismatch, match="Headers are a dict of names to bytes"):
            bad.result()
        with pytest.raises(SchemaMismatch):
            producer.flush()
    assert log.read("t").num_rows == 1


def test_a_producers_id_is_text(log: hw.Log) -> None:
    with pytest.raises(InvalidInput, match="cannot be a producer's id"):
        log.producer(id=HALF)


@pytest.mark.parametrize("pattern", [HALF, "(" * 5_000, "["], ids=["half", "deep", "open"])
def test_a_pattern_that_cannot_be_compiled_is_refused(log: hw.Log, pattern: str) -> None:
    with pytest.raises(InvalidInput, match=r"pattern|regular expression"):
        log.consumer(pattern=pattern, group="g")


@pytest.mark.parametrize(
    "at",
    [
        "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59-23:59",
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1))),
        datetime(9999, 12, 31, 23, 30, tzinfo=timezone(timedelta(hours=-1))),
    ],
)
def test_a_time_that_is_another_year_in_utc_is_refused_where_it_is_appended(log: hw.Log, at: object) -> None:
    """Stored, it would stop every reader of the topic: in UTC it is no year that Python knows."""
    with pytest.raises(SchemaMismatch, match="Column at, row 0"):
        log.append("t", [{"id": "1", "at": at}])
    edges = [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)]
    log.create_topic("edges", schema="at TIMESTAMP")
    log.append("edges", [{"at": edge} for edge in edges])
    assert sorted(value["at"] for value in log.read("edges").to_pylist()) == edges


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**63 - 1], pa.timestamp("us", "UTC")),
        pa.array([[-(2**63) + 1]], pa.list_(pa.timestamp("us"))),
        pa.array([2**31 - 1], pa.int32()).cast(pa.date32()),
    ],
    ids=["timestamp", "list", "date"],
)
def test_a_time_that_python_cannot_hold_is_told_where_it_is_read(column: pa.Array) -> None:
    with pytest.raises(Unsupported, match=r"outside the years 1 to 9999.*Read it as Arrow"):
        values_of(column)


@pytest.mark.parametrize("now_us", [-1, -(2**62), 2**52, 2**53, 253_402_300_800_000_000, 2**63 - 1])
def test_a_queue_refuses_a_clock_that_is_out_of_all_bounds(open_log: Callable[..., hw.Log], now_us: int) -> None:
    """Before 1970 and beyond 2111: a lease's deadline has 52 bits."""
    with open_log(clock=lambda: now_us) as log:
        log.create_topic("t")
        log.append("t", [b"x"])
        with pytest.raises(Unsupported, match=r"The clock of this machine says .*Set the clock"):
            log.queue("t", group="workers")


@pytest.mark.parametrize("given", ["9" * 400 + " days", "99999999999999999999 weeks", timedelta.max])
def test_a_duration_beyond_all_bounds_is_refused(given: object) -> None:
    with pytest.raises(InvalidInput, match="longer than 146,000 years"):
        duration_us(given)


def test_a_number_that_is_no_time_is_refused(log: hw.Log) -> None:
    with pytest.raises(InvalidInput, match="not a number of microseconds"):
        time_us(10**30)
    with pytest.raises(InvalidInput, match="not a number of microseconds"):
        log.table("t", as_of=10**30)
