"""Where the source begins, ends and goes on, without a Spark: offsets, limits, ranges, and topics that come and go."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import headwater as hw
from headwater.model.errors import (
    Damaged,
    EventsMissed,
    InvalidInput,
    PositionLost,
    TopicNotFound,
)
from headwater.processing.checkpoint.offsets import Offsets, cut, share
from headwater.processing.source.load import TASK_EVENTS_MIN
from headwater.processing.source.range_reader import OffsetRange
from headwater.processing.source.spark_source import HeadwaterSource
from headwater.processing.source.stream import FETCH_BYTES_MAX, StreamReader
from tests.rigs.processing.source_topics import NOON, Topics

ALL = ReadAllAvailable()


def test_offsets_survive_the_checkpoint_with_keys_of_a_later_version() -> None:
    """What stands beside the topics begins with a dot, which no topic's name does; what is not known is kept."""
    kept = {
        "b": {"10": 4, "2": 7},
        "a": {"0": 1},
        ".incarnation": 2,
        ".topics": {"a": {"id": "x", "schema": 1}},
        ".watermark": {"a": 5},
    }
    offsets = Offsets.from_json(json.loads(json.dumps(kept)))
    assert offsets.places == {("a", 0): 1, ("b", 2): 7, ("b", 10): 4}
    assert offsets.more == {".watermark": {"a": 5}}
    assert Offsets.from_json(offsets.to_json()) == offsets
    assert list(offsets.to_json()["b"]) == ["2", "10"]


def test_a_limit_is_shared_in_proportion_and_starves_nobody() -> None:
    """All of the limit is used, nobody gets more than waits, everybody gets something where the limit allows it."""
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    for _ in range(500):
        lags = {("t", n): rng.choice([0, 1, 3, 1000, 10**9]) for n in range(rng.randint(1, 9))}
        limit = rng.choice([1, 2, 7, 500, 10**6])
        given = share(lags, limit)
        assert sum(given.values()) == min(limit, sum(lags.values())), seed
        assert all(0 < given[at] <= lags[at] for at in given), seed
        if limit >= len(lags):
            assert set(given) == {at for at, lag in lags.items() if lag}, seed
    assert share({("t", 0): 3000, ("t", 1): 1000}, 400) == {("t", 0): 300, ("t", 1): 100}


def test_a_range_is_cut_without_gaps() -> None:
    assert cut(3, 10, 3) == [(3, 5), (5, 7), (7, 10)]
    assert cut(3, 5, 9) == [(3, 4), (4, 5)]
    assert cut(3, 10, 0) == [(3, 10)]


def test_starting_and_ending_offsets_name_the_same_events_as_the_log(topics: Topics) -> None:
    """By word, by offset of each partition, and by time; the log's own reading is the measure."""
    topics.add(40)
    ends = {number: held.stop for number, held in topics.log.offsets("orders").items()}
    places = json.dumps({"orders": {"0": 5, "1": -1}})
    later = json.dumps({"orders": {"0": 7, "1": (NOON + timedelta(seconds=30)).isoformat()}})
    cases: list[tuple[dict[str, str], Any, Any]] = [
        ({}, "earliest", "latest"),
        ({"startingOffsets": "latest"}, "latest", "latest"),
        ({"startingOffsets": places}, {0: 5, 1: ends[1]}, "latest"),
        ({"startingOffsets": "2026-01-31T12:00:20Z"}, NOON + timedelta(seconds=20), "latest"),
        ({"endingOffsets": "2026-01-31T12:00:20Z"}, "earliest", NOON + timedelta(seconds=20)),
        (
            {"endingOffsets": later},
            "earliest",
            {0: 7, 1: topics.log.offsets_at("orders", NOON + timedelta(seconds=30))[1]},
        ),
    ]
    for options, start, end in cases:
        expected = sorted(topics.log.read("orders", start=start, end=end).column("amount").to_pylist())
        assert topics.amounts(topics.batch(**options)) == expected, options
        if "endingOffsets" not in options:
            stream = topics.stream(**{"startingOffsets": "earliest", **options})
            first = stream.initialOffset()
            assert topics.amounts(stream, first, stream.latestOffset(first, ALL)) == expected, options


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"orders": {"0": 1}}, "does not name partition 1 of topic 'orders'"),
        ({"orders": {"0": 1, "1": 1, "2": 1}}, "names partition 2 of topic 'orders'"),
        ({"orders": {"0": 1, "1": 1}, "others": {"0": 1}}, "names partition 0 of topic 'others'"),
        ({"orders": {"0": 99, "1": 1}}, "offset 99 is not in partition 0"),
    ],
)
def test_offsets_of_partitions_that_are_not_there_are_refused(topics: Topics, places: Any, words: str) -> None:
    topics.add(10)
    with pytest.raises(InvalidInput, match=f"startingOffsets:? {words}"):
        topics.batch(startingOffsets=json.dumps(places)).partitions()


def test_a_stream_goes_on_by_its_limit_until_there_is_nothing(topics: Topics) -> None:
    """Batches are disjoint and together everything; an offset that does not move is the same text."""
    topics.add(100)
    stream = topics.stream(startingOffsets="earliest", maxOffsetsPerTrigger="30")
    limit = stream.getDefaultReadLimit()
    assert limit == ReadMaxRows(30)
    start, seen, sizes = stream.initialOffset(), [], []
    while (end := stream.latestOffset(start, limit)) != start:
        rows = topics.amounts(stream, start, end)
        sizes.append(len(rows))
        seen += rows
        start = json.loads(json.dumps(end))
    assert (sorted(seen), sizes) == (list(range(100)), [30, 30, 30, 10])
    assert json.dumps(stream.latestOffset(start, ALL)) == json.dumps(start)
    assert stream.reportLatestOffset() == {"orders": start["orders"]}


def test_available_now_ends_where_it_began_to_look(topics: Topics) -> None:
    topics.add(10)
    stream = topics.stream(startingOffsets="earliest")
    stream.prepareForTriggerAvailableNow()
    topics.add(5)
    topics.log.create_topic("later", "id STRING, amount BIGINT, at TIMESTAMP", key="id", time="at")
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    assert topics.amounts(stream, start, end) == list(range(10))
    assert stream.latestOffset(end, ALL) == end


def test_a_topic_that_matches_later_is_read_from_its_beginning(topics: Topics) -> None:
    """It enters with its first offset, which stands in the checkpoint before anything of it is read."""
    topics.add(4)
    stream = topics.stream(subscribePattern="orders.*", startingOffsets="latest")
    start = stream.initialOffset()
    topics.log.create_topic("orders.eu", "id STRING, amount BIGINT, at TIMESTAMP", key="id", time="at", partitions=1)
    topics.add(3, topic="orders.eu")
    stream._query.subscription._looked = 0.0
    entered = stream.latestOffset(start, ALL)
    assert entered["orders.eu"] == {"0": 0}
    assert topics.amounts(stream, start, entered) == []
    end = stream.latestOffset(entered, ALL)
    assert topics.amounts(stream, entered, end) == [0, 1, 2]


def test_a_topic_that_was_made_again_is_refused(topics: Topics) -> None:
    """Its offsets would name other events; running queries and restarted ones both say so."""
    topics.add(6)
    stream = topics.stream(startingOffsets="earliest")
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    [first, *_] = stream.partitions(start, end)
    topics.log.delete_topic("orders")
    with pytest.raises(TopicNotFound, match="failOnDataLoss"):
        stream.latestOffset(end, ALL)
    topics.log.create_topic("orders", "id STRING, amount BIGINT, at TIMESTAMP", key="id", time="at", partitions=2)
    topics.add(6)
    for reader in (stream, topics.stream()):
        for ask in (lambda r=reader: r.latestOffset(end, ALL), lambda r=reader: r.partitions(start, end)):
            with pytest.raises(PositionLost, match=r"deleted and created again.*new checkpoint"):
                ask()
        with pytest.raises(PositionLost, match="deleted and created again"):
            list(reader.read(first))


def test_a_deleted_topic_is_left_alone_where_loss_is_accepted(topics: Topics) -> None:
    topics.log.create_topic("more", "id STRING, amount BIGINT, at TIMESTAMP", key="id", time="at", partitions=1)
    topics.add(3)
    stream = topics.stream(subscribePattern="orders|more", startingOffsets="earliest", failOnDataLoss="false")
    start = stream.initialOffset()
    topics.log.delete_topic("more")
    stream._query.subscription._looked = 0.0
    end = stream.latestOffset(start, ALL)
    assert end["more"] == start["more"]
    assert topics.amounts(stream, start, end) == [0, 1, 2]


def test_a_topic_that_is_no_longer_subscribed_to_keeps_its_offsets(topics: Topics) -> None:
    """Leaving a topic out of the option is a decision; naming it again goes on where it was."""
    topics.log.create_topic("more", "id STRING, amount BIGINT, at TIMESTAMP", key="id", time="at", partitions=1)
    both = topics.stream(topic="orders,more", startingOffsets="earliest")
    start = both.initialOffset()
    topics.add(3)
    topics.add(2, topic="more")
    one = topics.stream(topic="orders", startingOffsets="earliest")
    middle = one.latestOffset(start, ALL)
    assert (middle["more"], topics.amounts(one, start, middle)) == (start["more"], [0, 1, 2])
    end = both.latestOffset(middle, ALL)
    assert topics.amounts(both, middle, end) == [0, 1]


def test_offsets_beyond_the_log_are_refused(topics: Topics) -> None:
    """A log that was restored from an older backup does not have them."""
    topics.add(6)
    stream = topics.stream(startingOffsets="earliest")
    start = stream.initialOffset()
    kept = {**start, "orders": {"0": 50, "1": 50}}
    with pytest.raises(PositionLost, match="Offset 50 of partition 0"):
        stream.latestOffset(kept, ALL)
    with pytest.raises(PositionLost, match="Offset 50 of partition 0"):
        stream.partitions(start, kept)


def test_what_retention_removed_is_an_error_or_skipped(tmp_path: Path) -> None:
    """Before the batch is planned, and between planning and reading."""
    log = hw.open_log(tmp_path / "log")
    log.create_topic("t", "n BIGINT", partitions=1, segment_bytes=4096, retention_bytes=8192)
    numbers: list[int] = []

    def grow() -> None:
        for _ in range(40):
            log.append("t", [{"n": n} for n in range(len(numbers), len(numbers) + 50)])
            numbers.extend(range(len(numbers), len(numbers) + 50))

    def stream(**options: str) -> StreamReader:
        source = HeadwaterSource({"log": log.url, "topic": "t", "startingOffsets": "earliest", **options})
        return source.streamReader(source.schema())

    grow()
    strict, lenient = stream(), stream(failOnDataLoss="false")
    start = strict.initialOffset()
    end = strict.latestOffset(start, ALL)
    [early] = strict.partitions(start, end)
    [early_lenient] = lenient.partitions(start, end)
    assert log.tidy("t") > 0
    first = log.offsets("t")[0].start
    for ask in (lambda: strict.partitions(start, end), lambda: list(strict.read(early))):
        with pytest.raises(
            EventsMissed, match=f"Events 0 to {first - 1} of partition 0 of topic 't'.*failOnDataLoss=false"
        ) as caught:
            ask()
        assert (caught.value.first, caught.value.last) == (0, first - 1)
    for wanted in (early_lenient, *lenient.partitions(start, end)):
        assert [n for batch in lenient.read(wanted) for n in batch.column("n").to_pylist()] == numbers[first:]
    log.close()


def test_large_ranges_are_cut_where_more_tasks_are_wanted(topics: Topics) -> None:
    topics.add(100)
    reader = topics.batch(minPartitions="8")
    ranges = reader.partitions()
    assert all(isinstance(wanted, OffsetRange) for wanted in ranges)
    assert 7 <= len(ranges) <= 9
    assert topics.amounts(reader) == list(range(100))
    assert len(topics.batch().partitions()) == 2


def test_few_events_of_a_micro_batch_are_read_by_one_task(topics: Topics) -> None:
    """The fixed cost of a task is paid once; many events, or minPartitions, make a task for each partition again. Partitions are woven by
    event time, and each keeps its order."""
    topics.add(TASK_EVENTS_MIN)
    stream = topics.stream(startingOffsets="earliest")
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    [task] = stream.partitions(start, end)
    rows = topics.rows(stream, [task])
    assert sorted(row["amount"] for row in rows) == list(range(TASK_EVENTS_MIN))
    places = topics.rows(topics.stream(columns="_partition,_offset,_time"), [task])
    assert [row["_time"] for row in places] == sorted(row["_time"] for row in places)
    for partition in (0, 1):
        offsets = [row["_offset"] for row in places if row["_partition"] == partition]
        assert offsets == list(range(len(offsets)))
    assert len(topics.stream(minPartitions="2").partitions(start, end)) == 2
    topics.add(1)
    more = stream.latestOffset(start, ALL)
    assert len(stream.partitions(start, more)) == 2
    assert topics.amounts(stream, start, more) == list(range(TASK_EVENTS_MIN + 1))


def test_a_small_batch_is_read_where_it_is_planned(topics: Topics) -> None:
    """Spark knows by the class who holds rows; once they are taken the reader is what it was, which reports its lag."""
    topics.add(20)
    stream = topics.stream(startingOffsets="earliest")
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    [task] = stream.partitions(start, end)
    assert isinstance(stream, _SimpleStreamReaderWrapper)
    fetched = [row for batch in stream.getCache(start, end) or () for row in batch.to_pylist()]
    assert sorted(row["amount"] for row in fetched) == list(range(20))
    assert not isinstance(stream, _SimpleStreamReaderWrapper) and isinstance(stream, StreamReader)
    assert fetched == topics.rows(stream, [task])
    assert stream.getCache(start, end) is None


def test_what_is_large_or_damaged_is_left_to_a_task(topics: Topics) -> None:
    """It is one task all the same; an error is told by the task that meets it."""
    topics.log.append("orders", [{"id": "x" * FETCH_BYTES_MAX, "amount": 1, "at": NOON}])
    stream = topics.stream(startingOffsets="earliest")
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    [task] = stream.partitions(start, end)
    assert stream.getCache(start, end) is None
    assert [row["amount"] for row in topics.rows(stream, [task])] == [1]
    topics.add(1)
    for segment in Path(topics.url).glob("topics/orders/*/0*.frames"):
        segment.write_bytes(segment.read_bytes().replace(b"o1", b"o2"))
    after = stream.latestOffset(end, ALL)
    [task] = stream.partitions(end, after)
    assert stream.getCache(end, after) is None
    with pytest.raises(Damaged):
        topics.rows(stream, [task])


def test_an_empty_topic_gives_no_rows(topics: Topics) -> None:
    """Spark makes a task of its own where there is none."""
    from pyspark.sql.datasource import InputPartition

    reader = topics.batch()
    assert reader.partitions() == []
    assert list(reader.read(InputPartition(None))) == []
