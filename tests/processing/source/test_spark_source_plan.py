"""What Spark asks of the source before and between batches, without a Spark: options, the rows of a range, filters."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import duckdb
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import headwater as hw
from headwater.model.errors import (
    HeadwaterError,
    InvalidInput,
    InvalidName,
    SchemaConflict,
    TopicNotFound,
    Unsupported,
)
from headwater.processing.source.load import Load
from headwater.processing.source.options import NAMES, read_options
from headwater.processing.source.spark_source import BatchReader, HeadwaterSource, RemoteSource
from headwater.processing.spark.errors import our_error_in
from tests.rigs.processing.source_topics import NOON, Topics

ALL = ReadAllAvailable()


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
    with pytest.raises(SchemaConflict, match=r"Column n of topic 't' is now BIGINT.*Start the query again"):
        topics.rows(stream, stream.partitions(end, last))


def test_a_schema_of_the_users_must_fit_the_topic(topics: Topics) -> None:
    from pyspark.sql.types import LongType, StructField, StructType

    topics.add(3)
    given = {"log": topics.url, "topic": "orders"}
    fits = StructType([StructField("amount", LongType())])
    reader = BatchReader(Load(given, fits, "batch"))
    assert topics.amounts(reader) == [0, 1, 2]
    for schema, words in [
        (StructType([StructField("id", LongType())]), "has id as STRING"),
        (StructType([StructField("price", LongType())]), "has no column price"),
    ]:
        with pytest.raises(SchemaConflict, match=words):
            BatchReader(Load(given, schema, "batch")).partitions()


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
        ("sum(amount) > 5", "not a condition on one row"),
        ("amount > (select 1)", "not a condition on one row"),
        ("amount > 5; drop table t", "not a condition on one row"),
        ("select 1", "not a condition on one row"),
        ("rand() > 0.5", "random, which gives a different answer each time"),
        ("at > current_timestamp()", "different answer each time"),
        ("at > now()", "different answer each time"),
        ("uuid() = id", "different answer each time"),
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
    error = our_error_in(RuntimeError(text))
    assert type(error) is TopicNotFound
    assert str(error) == "There is no topic 'x'. Topics here: y."
    assert our_error_in(RuntimeError("java.lang.OutOfMemoryError")) is None
