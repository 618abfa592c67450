"""What Spark asks of the source before and between batches, without a Spark: options, offsets, ranges, and the rows of a range."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import headwater as hw
from headwater.log.log import Log
from headwater.model.errors import (
    EventsMissed,
    HeadwaterError,
    InvalidInput,
    InvalidName,
    PositionLost,
    SchemaConflict,
    TopicNotFound,
    Unsupported,
)
from headwater.processing.border import told
from headwater.processing.offsets import Offsets, cut, share
from headwater.processing.options import NAMES, read_options
from headwater.processing.query import TASK_EVENTS_MIN, Query
from headwater.processing.reading import Range
from headwater.processing.source import BatchReader, HeadwaterSource, RemoteSource
from headwater.processing.stream import StreamReader

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
ALL = ReadAllAvailable()


class Topics:
    """A log with a topic, and the source that reads it."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder / "log")
        self.log: Log = hw.open_log(self.url)
        self.log.create_topic("orders", "id STRING, amount BIGINT, at TIMESTAMP", key="id", time="at", partitions=2)

    def add(self, count: int, *, topic: str = "orders") -> None:
        """Appends so many orders; the second of each is its number so far."""
        ends = sum(len(held) for held in self.log.offsets(topic).values())
        rows = [{"id": f"o{n}", "amount": n, "at": NOON + timedelta(seconds=n)} for n in range(ends, ends + count)]
        self.log.append(topic, rows)

    def source(self, **options: str) -> HeadwaterSource:
        return HeadwaterSource(
            {"log": self.url, **({} if "subscribePattern" in options else {"topic": "orders"}), **options}
        )

    def stream(self, **options: str) -> StreamReader:
        source = self.source(**options)
        return source.streamReader(source.schema())

    def batch(self, **options: str) -> BatchReader:
        source = self.source(**options)
        return source.reader(source.schema())

    def rows(self, reader: Any, ranges: Any) -> list[dict[str, Any]]:
        """What tasks read, each from a reader that was pickled as Spark does it."""
        return [
            row
            for wanted in ranges
            for batch in pickle.loads(pickle.dumps(reader)).read(pickle.loads(pickle.dumps(wanted)))
            for row in batch.to_pylist()
        ]

    def amounts(self, reader: Any, *offsets: Any) -> list[int]:
        return sorted(row["amount"] for row in self.rows(reader, reader.partitions(*offsets)))


@pytest.fixture
def topics(tmp_path: Path) -> Iterator[Topics]:
    made = Topics(tmp_path)
    yield made
    made.log.close()


# Options


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"topic": "orders", "startingOffset": "earliest"}, InvalidInput, ["startingOffset", "Did you mean startingOffsets", *NAMES]),
        ({}, InvalidInput, ["topic", "subscribePattern"]),
        ({"topic": "orders", "subscribePattern": "o.*"}, InvalidInput, ["topic", "subscribePattern"]),
        ({"topic": "orders,no/name"}, InvalidName, ["topic", "no/name"]),
        ({"subscribePattern": "("}, InvalidInput, ["subscribePattern", "regular expression"]),
        ({"topic": "orders", "startingOffsets": "begin"}, InvalidInput, ["startingOffsets", '"earliest"', '"latest"', "ISO 8601"]),
        ({"topic": "orders", "startingOffsets": '{"orders": '}, InvalidInput, ["startingOffsets", "line 1, column 12"]),
        ({"topic": "orders", "startingOffsets": '{"orders": {"0": -3}}'}, InvalidInput, ["startingOffsets", "-3"]),
        ({"topic": "orders", "startingOffsets": '{"orders": {"x": 3}}'}, InvalidInput, ["startingOffsets", "'x'"]),
        ({"topic": "orders", "startingOffsets": '{"orders": 3}'}, InvalidInput, ["startingOffsets", "orders"]),
        ({"topic": "orders", "endingOffsets": "earliest"}, InvalidInput, ["endingOffsets", '"latest"']),
        ({"topic": "orders", "endingOffsets": '{"orders": {"0": -2}}'}, InvalidInput, ["endingOffsets", "-2"]),
        ({"topic": "orders", "maxOffsetsPerTrigger": "0"}, InvalidInput, ["maxOffsetsPerTrigger", "1 or more"]),
        ({"topic": "orders", "maxOffsetsPerTrigger": "many"}, InvalidInput, ["maxOffsetsPerTrigger", "'many'"]),
        ({"topic": "orders", "minPartitions": "-1"}, InvalidInput, ["minPartitions"]),
        ({"topic": "orders", "failOnDataLoss": "yes"}, InvalidInput, ["failOnDataLoss", '"true" or "false"']),
        ({"topic": "orders", "columns": "id,,amount"}, InvalidInput, ["columns"]),
        ({"topic": "orders", "columns": "id,ID"}, InvalidInput, ["columns"]),
        ({"topic": "orders", "asOf": "yesterday"}, InvalidInput, ["asOf", '"latest"', "ISO 8601"]),
        ({"topic": "orders", "asOf": "latest", "startingOffsets": "earliest"}, InvalidInput, ["asOf", "startingOffsets"]),
    ],
)  # fmt: skip
def test_a_bad_option_is_named_with_what_it_takes(
    options: dict[str, str], kind: type[HeadwaterError], words: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        read_options({"log": "./data", **options})
    assert type(caught.value) is kind
    assert caught.value.advice
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("log", ["", "memory://"])
def test_the_log_must_be_one_that_other_processes_can_open(log: str) -> None:
    with pytest.raises(InvalidInput, match="Option log"):
        read_options({"log": log, "topic": "orders"} if log else {"topic": "orders"})


def test_options_are_read_whatever_their_case() -> None:
    """Spark hands them over in lower case."""
    options = read_options({"LOG": "./data", "Topic": "a, b", "failondataloss": "False", "columns": "`a,b`, *,_offset"})
    assert (options.log, options.topics, options.fails_on_loss) == ("./data", ("a", "b"), False)
    assert options.columns == ("a,b", "*", "_offset")


def test_a_column_or_topic_that_is_not_there_is_refused_when_the_frame_is_made(topics: Topics) -> None:
    with pytest.raises(InvalidInput, match=r"Option columns: .*'price'.*Choose from id, amount"):
        topics.source(columns="id,price").schema()
    with pytest.raises(InvalidInput, match=r"columns names a column twice"):
        topics.source(columns="*,id").schema()
    with pytest.raises(TopicNotFound, match=r"subscribePattern='none.*' matches no topic"):
        topics.source(subscribePattern="none.*").schema()
    with pytest.raises(TopicNotFound, match="'returns'"):
        topics.source(topic="orders,returns").schema()


def test_what_only_a_batch_can_do_is_refused_for_a_stream(topics: Topics) -> None:
    for option, value in [("endingOffsets", "latest"), ("asOf", "latest")]:
        with pytest.raises(Unsupported, match=option):
            topics.stream(**{option: value}).initialOffset()


def test_a_folder_is_refused_where_tasks_run_elsewhere(topics: Topics) -> None:
    """A Spark on other machines cannot see it; the advice names what it can see."""
    source = RemoteSource({"log": topics.url, "topic": "orders"})
    with pytest.raises(Unsupported, match="kafka://"):
        source.schema()
    for reader in (source.reader, source.streamReader):
        with pytest.raises(Unsupported, match="kafka://"):
            _ = reader(topics.source().schema())._query.options


def test_topics_that_are_read_as_one_have_the_same_columns(topics: Topics) -> None:
    """Refused with the difference; columns that they share can be named. A column is nullable if it is in one of them."""
    topics.log.create_topic(
        "returns", "id STRING NOT NULL, amount DOUBLE, at TIMESTAMP, why STRING", key="id", time="at"
    )
    with pytest.raises(SchemaConflict, match="amount is BIGINT and DOUBLE; why is not there and STRING"):
        topics.source(topic="orders,returns").schema()
    schema = topics.source(topic="returns,orders", columns="id,at,_topic").schema()
    assert schema.fieldNames() == ["id", "at", "_topic"]
    assert schema["id"].nullable


# Offsets


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
    assert all(isinstance(wanted, Range) for wanted in ranges)
    assert 7 <= len(ranges) <= 9
    assert topics.amounts(reader) == list(range(100))
    assert len(topics.batch().partitions()) == 2


def test_few_events_of_a_micro_batch_are_read_by_one_task(topics: Topics) -> None:
    """The fixed cost of a task is paid once; many events, or minPartitions, make a task for each partition again."""
    topics.add(TASK_EVENTS_MIN)
    stream = topics.stream(startingOffsets="earliest")
    start = stream.initialOffset()
    end = stream.latestOffset(start, ALL)
    [task] = stream.partitions(start, end)
    rows = topics.rows(stream, [task])
    assert sorted(row["amount"] for row in rows) == list(range(TASK_EVENTS_MIN))
    places = [
        (row["_partition"], row["_offset"]) for row in topics.rows(topics.stream(columns="_partition,_offset"), [task])
    ]
    assert places == sorted(places)
    assert len(topics.stream(minPartitions="2").partitions(start, end)) == 2
    topics.add(1)
    more = stream.latestOffset(start, ALL)
    assert len(stream.partitions(start, more)) == 2
    assert topics.amounts(stream, start, more) == list(range(TASK_EVENTS_MIN + 1))


def test_an_empty_topic_gives_no_rows(topics: Topics) -> None:
    """Spark makes a task of its own where there is none."""
    from pyspark.sql.datasource import InputPartition

    reader = topics.batch()
    assert reader.partitions() == []
    assert list(reader.read(InputPartition(None))) == []


# Rows


def test_a_query_keeps_its_columns_while_the_schema_moves_on_and_a_restart_says_so(
    topics: Topics, caplog: pytest.LogCaptureFixture
) -> None:
    """New columns are not seen, wider types are read as they were; what does not fit is refused with the way out."""
    topics.log.create_topic("t", "n INT, s STRUCT<a: INT>", partitions=1)
    topics.log.append("t", [{"n": 1, "s": {"a": 1}}])
    stream = topics.stream(topic="t", startingOffsets="earliest")
    start = stream.initialOffset()
    topics.log.alter_topic("t", schema="n BIGINT, s STRUCT<a: INT, b: STRING>, note STRING")
    topics.log.append("t", [{"n": 2, "s": {"a": 2, "b": "x"}, "note": "new"}])
    end = stream.latestOffset(start, ALL)
    assert topics.rows(stream, stream.partitions(start, end)) == [{"n": 1, "s": {"a": 1}}, {"n": 2, "s": {"a": 2}}]
    assert end[".topics"]["t"]["schema"] == 0
    assert not caplog.records
    restarted = topics.stream(topic="t", startingOffsets="earliest")
    after = restarted.latestOffset(end, ALL)
    assert after[".topics"]["t"]["schema"] == 1
    [said] = [record.getMessage() for record in caplog.records]
    assert "column note STRING was added" in said and "column n was INT and is BIGINT" in said
    topics.log.append("t", [{"n": 1 << 40}])
    last = stream.latestOffset(end, ALL)
    with pytest.raises(SchemaConflict, match=r"Column n of topic 't' is BIGINT by now.*Start the query again"):
        topics.rows(stream, stream.partitions(end, last))


def test_a_schema_of_the_users_must_fit_the_topic(topics: Topics) -> None:
    from pyspark.sql.types import LongType, StructField, StructType

    topics.add(3)
    given = {"log": topics.url, "topic": "orders"}
    fits = StructType([StructField("amount", LongType())])
    reader = BatchReader(Query(given, fits, "batch"))
    assert topics.amounts(reader) == [0, 1, 2]
    for schema, words in [
        (StructType([StructField("id", LongType())]), "has id as STRING"),
        (StructType([StructField("price", LongType())]), "has no column price"),
    ]:
        with pytest.raises(SchemaConflict, match=words):
            BatchReader(Query(given, schema, "batch")).partitions()


def test_deleted_events_are_left_out_unless_they_are_asked_for(tmp_path: Path) -> None:
    """With `_deleted` every column may be null, since a deletion has only its key."""
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("t", "id STRING NOT NULL, n INT NOT NULL", key="id", partitions=1)
        log.append("t", [{"id": "a", "n": 1}, {"id": "b", "n": 2}, {"id": "a", "_deleted": True}])
        source = HeadwaterSource({"log": log.url, "topic": "t"})
        assert not source.schema()["n"].nullable
        shown = HeadwaterSource({"log": log.url, "topic": "t", "columns": "id,n,_deleted"})
        assert shown.schema()["n"].nullable
        rows = {}
        for name, made in (("left out", source), ("shown", shown)):
            reader = made.reader(made.schema())
            rows[name] = [
                row for wanted in reader.partitions() for batch in reader.read(wanted) for row in batch.to_pylist()
            ]
        assert rows["left out"] == [{"id": "a", "n": 1}, {"id": "b", "n": 2}]
        assert rows["shown"] == [
            {"id": "a", "n": 1, "_deleted": False},
            {"id": "b", "n": 2, "_deleted": False},
            {"id": "a", "n": None, "_deleted": True},
        ]


def test_a_null_struct_with_fields_that_are_not_null_is_read(topics: Topics) -> None:
    topics.log.create_topic("t", "n INT, place STRUCT<lat: DOUBLE NOT NULL>", partitions=1)
    topics.log.append("t", [{"n": 1, "place": None}, {"n": 2, "place": {"lat": 1.5}}])
    reader = topics.batch(topic="t", columns="place,_offset")
    expected = [{"place": None, "_offset": 0}, {"place": {"lat": 1.5}, "_offset": 1}]
    assert topics.rows(reader, reader.partitions()) == expected
    assert topics.log.read("t", columns=["place", "_offset"]).to_pylist() == expected


def test_many_small_appends_become_few_batches(topics: Topics) -> None:
    """And events of one partition stay in order."""
    for _ in range(50):
        topics.add(4)
    reader = topics.batch(columns="amount,_offset")
    for wanted in reader.partitions():
        [batch] = list(reader.read(wanted))
        assert batch.column("_offset").to_pylist() == list(range(batch.num_rows))


def test_a_table_as_of_a_time_equals_the_logs_own(topics: Topics) -> None:
    for round_ in range(6):
        topics.log.append(
            "orders",
            [{"id": f"o{n}", "amount": round_ * 100 + n, "at": NOON + timedelta(minutes=round_)} for n in range(20)],
        )
    topics.log.append("orders", [{"id": "o3", "_deleted": True, "at": NOON + timedelta(minutes=9)}])
    for as_of in (None, NOON - timedelta(minutes=1), NOON, NOON + timedelta(minutes=3, seconds=5)):
        reader = topics.batch(
            asOf="latest" if as_of is None else as_of.isoformat(), columns="*,_time,_partition", filter="amount % 2 = 1"
        )
        found = topics.rows(reader, reader.partitions())
        expected = [row for row in topics.log.table("orders", as_of=as_of).to_pylist() if row["amount"] % 2]
        assert sorted(row["id"] for row in found) == sorted(row["id"] for row in expected)
        assert sorted(row["amount"] for row in found) == sorted(row["amount"] for row in expected)
        assert all(row["_time"] == row["at"] for row in found)


def test_a_topic_without_a_key_is_no_table(topics: Topics) -> None:
    topics.log.create_topic("t", "n INT")
    with pytest.raises(InvalidInput, match="no key"):
        topics.batch(topic="t", asOf="latest").partitions()


# Filters


@pytest.mark.parametrize(
    "condition",
    [
        "amount > 50",
        "amount BETWEEN 10 AND 20 OR id = 'o3'",
        "id LIKE 'o1%' AND NOT amount IN (1, 10, 11)",
        "note IS NULL",
        "note <> 'even'",
        "at >= '2026-01-31T12:00:30Z' and AT < timestamp'2026-01-31 12:01:00'",
        "place.lat > 2 AND size(tags) = 1",
        "upper(id) = 'O7' OR amount / 4 = 2",
        "_partition = 1 AND _offset < 10",
        "`amount` = 5 or _key = 'o6'",
        "true",
        "null",
    ],
)
def test_a_filter_picks_what_spark_would_pick(tmp_path: Path, condition: str) -> None:
    """DuckDB, asked in its own words over the log's own table, is the measure; nulls are neither true nor false."""
    own = {
        "upper(id) = 'O7' OR amount / 4 = 2": "upper(id) = 'O7' or amount = 8",
        "place.lat > 2 AND size(tags) = 1": "place.lat > 2 and len(tags) = 1",
        "at >= '2026-01-31T12:00:30Z' and AT < timestamp'2026-01-31 12:01:00'": 'second("at") >= 30 and minute("at") = 0',
        "`amount` = 5 or _key = 'o6'": "amount = 5 or id = 'o6'",
    }
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic(
            "t",
            "id STRING, amount BIGINT, at TIMESTAMP, note STRING, tags ARRAY<STRING>, place STRUCT<lat: DOUBLE>",
            key="id",
            partitions=2,
        )
        log.append(
            "t",
            [
                {
                    "id": f"o{n}",
                    "amount": n,
                    "at": NOON + timedelta(seconds=n),
                    "note": [None, "even", "odd"][n % 3],
                    "tags": ["a"] * (n % 3),
                    "place": {"lat": float(n % 5)},
                }
                for n in range(100)
            ],
        )
        source = HeadwaterSource({"log": log.url, "topic": "t", "columns": "amount", "filter": condition})
        reader = source.reader(source.schema())
        found = [
            n for wanted in reader.partitions() for batch in reader.read(wanted) for n in batch.column(0).to_pylist()
        ]
        events = log.read("t", columns=["id", "amount", "at", "note", "tags", "place", "_partition", "_offset"])
        connection = duckdb.connect()
        connection.execute("set TimeZone = 'UTC'")
        connection.register("events", events)
        query = f"select amount from events where {own.get(condition, condition)} order by _partition, _offset"
        assert found == [n for (n,) in connection.sql(query).fetchall()]
        assert condition == "null" or found


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("amount > 5\n  5 or", "not understood at '5', line 2, column 3"),
        ("amount > 5 and", "line 1, column 14"),
        ("id = 'o1", "quotes"),
        ("price > 5", "'price'.*Its columns are id, amount, at, _key"),
        ("amount", "gives int64"),
        ("sum(amount) > 5", "no condition on one row"),
        ("amount > (select 1)", "no condition on one row"),
        ("amount > 5; drop table t", "no condition on one row"),
        ("select 1", "no condition on one row"),
        ("rand() > 0.5", "random, which gives another answer each time"),
        ("at > current_timestamp()", "another answer each time"),
        ("at > now()", "another answer each time"),
        ("uuid() = id", "another answer each time"),
        ("no_such_function(amount) = 1", "no_such_function"),
        ("id > 5 + tags", "'tags'"),
    ],
)
def test_a_filter_that_is_none_is_refused_with_the_place(topics: Topics, condition: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=f"(?s)Option filter=.*{words}") as caught:
        topics.source(filter=condition).schema()
    assert caught.value.advice
    assert "\n" not in str(caught.value)


# Errors across the border


def test_an_error_of_ours_is_found_in_what_spark_raises() -> None:
    text = "[PYTHON_ERROR] Failed: headwater.model.errors.TopicNotFound: There is no topic 'x'. Topics here: y.\n SQLSTATE: 38000"
    error = told(RuntimeError(text))
    assert type(error) is TopicNotFound
    assert str(error) == "There is no topic 'x'. Topics here: y."
    assert told(RuntimeError("java.lang.OutOfMemoryError")) is None
