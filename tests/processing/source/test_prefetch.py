"""Working ahead: the batch is begun before Spark asks for it, once, and what nobody asks for does no harm."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from threading import Event, Thread, current_thread, main_thread
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from headwater.processing.checkpoint.offsets import VERSION
from headwater.processing.source.prefetch import Prefetch
from headwater.processing.source.stream import StreamReader
from tests.rigs.processing.fused_runs import TOPIC, FusedRun, bids, make_log, rows_of


def test_what_was_begun_is_given_once() -> None:
    ahead, asked = Prefetch[int](), []
    ahead.begin("a", lambda: asked.append("a") or 1)
    assert ahead.take("a") == 1
    assert ahead.take("a") is None
    assert asked == ["a"]


def test_an_error_comes_when_it_is_asked_for() -> None:
    ahead = Prefetch[int]()
    ahead.begin("a", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ahead.take("a")
    assert ahead.take("a") is None


@pytest.mark.parametrize("then", ["take", "begin"])
def test_nothing_is_begun_beside_what_nobody_asked_for(then: str) -> None:
    ahead, goes_on, ended = Prefetch[int](), Event(), list[str]()
    ahead.begin("a", lambda: goes_on.wait(0.2) or ended.append("a") or 1 // 0)
    if then == "take":
        assert ahead.take("b") is None
    else:
        ahead.begin("b", lambda: 2)
    assert ended == ["a"]
    assert ahead.take("b") == (None if then == "take" else 2)


def test_a_batch_is_read_while_spark_writes_it_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, make = list[Thread](), StreamReader._batch
    monkeypatch.setattr(StreamReader, "_batch", lambda *asked: threads.append(current_thread()) or make(*asked))
    with make_log(tmp_path, 4) as log:
        log.append(TOPIC, bids(Random(1), 50))
        reader, (start, end) = next_batch(FusedRun(tmp_path, 4, kind="totals"))
        tasks, fetched = reader.partitions(start, end), reader.getCache(start, end)
    assert len(tasks) == 1
    assert fetched is not None
    assert sum(row["n"] for batch in fetched for row in rows_of(batch)) == 50
    assert [thread is main_thread() for thread in threads] == [False]


def test_a_batch_that_nobody_asked_for_is_made_again_from_the_same_beginning(tmp_path: Path) -> None:
    with make_log(tmp_path, 4) as log:
        log.append(TOPIC, bids(Random(1), 50))
        run = FusedRun(tmp_path, 4, kind="totals")
        _, (start, first) = next_batch(run)
        log.append(TOPIC, bids(Random(2), 50))
        reader, (start, end) = next_batch(run)
        assert first[VERSION] == end[VERSION]
        reader.partitions(start, end)
        given = [row for batch in reader.getCache(start, end) or () for row in rows_of(batch)]
        assert sum(row["n"] for row in given) == 100


def next_batch(run: FusedRun) -> tuple[StreamReader, tuple[Any, Any]]:
    """A reader that was asked how far the first batch goes, as Spark asks, and what it said, as Spark says it."""
    reader = run.reader()
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    reader.reportLatestOffset()
    return reader, (json.loads(json.dumps(start)), json.loads(json.dumps(end)))
