"""Debezium's topics as tables, and our changes as its topics; the events are those that a real Debezium wrote."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.capture.progress import captures
from headwater.capture.source_url import open_source, parse_source_url
from headwater.databases.connect_types import from_base64, from_decimals, reading_of, to_base64, to_decimals, writing_of
from headwater.log.log import Log, open_log
from headwater.model.errors import CaptureLost, InvalidInput, NotCapturable
from headwater.model.points import points_of
from headwater.sinks.debezium_export import DebeziumExport
from headwater.testing.crash.points import kill_at
from tests.rigs.capture.debezium import captured, envelope, history, pour, samples, unscaled
from tests.rigs.capture.sqlite import Rig
from tests.rigs.children import Child

COLUMNS = "columns.users=id BIGINT, name STRING"


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Where captures bring tables to."""
    return open_log(tmp_path / "log", durability="os")


@pytest.fixture
def topics(tmp_path: Path) -> Log:
    """Where Debezium writes."""
    return open_log(tmp_path / "kafka", durability="os")


def url(tmp_path: Path, options: str = "") -> str:
    return f"debezium+file://{tmp_path}/kafka?topics=dbz.shop{options}"


def test_every_type_of_a_row_comes_as_what_it_is(tmp_path: Path, log: Log, topics: Log) -> None:
    """A row of PostgreSQL with one column of each kind, by the schema part that came with it."""
    events = samples("schemas")
    pour(topics, events)
    captured(log, url(tmp_path))
    after = [
        json.loads(event["value"])["payload"]["after"]
        for event in events
        if event["topic"].endswith("everything") and event["value"]
    ]
    told = next(row for row in after if row and row["id"] == 1)
    (row,) = (change["after"] for change in history(log, "everything") if change["op"] == "r" and change["id"] == 1)
    assert row == {
        "id": 1,
        "small": 2,
        "whole": 3,
        "price": Decimal(unscaled(told["price"])).scaleb(-2),
        "loose": "0.000123",
        "ratio": 1.5,
        "single": 0.25,
        "flag": True,
        "name": 'Ada "quoted" ü',
        "code": "ab ",
        "raw": b"\x00\xff\x10",
        "day": date(2026, 1, 31),
        "at_ms": datetime.fromisoformat("2026-01-31T12:00:00.123"),
        "at": datetime.fromisoformat("2026-01-31T12:00:00.123456"),
        "zoned": datetime(2026, 1, 31, 10, 0, 0, 123_456, UTC),
        "clock": "13:14:15.678901",
        "took": 26 * 3600 * 1_000_000,
        "doc": '{"a": [1, 2]}',
        "uid": "6f1f9a7e-0d7f-4a3b-9a49-6a8a7e0b2c11",
        "mood": "ok",
        "tags": ["x", "y"],
        "bits": b"\x05",
    }
    assert row["price"] == Decimal("12.34")


@pytest.mark.parametrize("kind", ["schemas", "bare"])
def test_snapshot_changes_truncation_and_an_added_column_become_a_table(
    tmp_path: Path, log: Log, topics: Log, kind: str
) -> None:
    """With and without the schema part; tombstones behind deletes tell nothing new."""
    pour(topics, samples(kind))
    options = "" if kind == "schemas" else "&table=pairs&columns.pairs=a INT, b STRING, note STRING, extra INT"
    captured(log, url(tmp_path, options))
    changes = [(change["op"], change["primary_key"]) for change in history(log, "pairs") if change["op"] != "t"]
    assert changes == [
        ("r", '[1,"x"]'),
        ("d", '[1,"x"]'),  # its key became another
        ("c", '[1,"y"]'),
        ("c", '[2,"z"]'),
        ("d", '[1,"y"]'),
        ("c", '[3,"w"]'),
        ("c", '[1,"x"]'),
    ]
    truncated = {change["primary_key"] for change in history(log, "pairs") if change["op"] == "t"}
    assert truncated >= {'[2,"z"]', '[3,"w"]'}
    rows = log.table("pairs").select(["a", "b", "note", "extra"]).to_pylist()
    assert rows == [{"a": 1, "b": "x", "note": "first", "extra": None}]


def test_the_form_of_the_json_does_not_matter(tmp_path: Path, log: Log, topics: Log) -> None:
    """White space, the order of the two parts, NaN as Connect writes it; mixed with events as Connect writes them."""
    events = [event for event in samples("schemas") if event["topic"].endswith("everything")]
    pour(topics, events[:2])
    for event in events[2:]:
        if event["value"] is not None:
            parts = json.loads(event["value"])
            parts["payload"]["before"]["ratio"] = "NaN"
            event = {**event, "value": json.dumps({"payload": parts["payload"], "schema": parts["schema"]}, indent=1)}
        pour(topics, [event])
    captured(log, url(tmp_path))
    changes = history(log, "everything")
    assert [change["op"] for change in changes] == ["r", "r", "u", "d"]
    assert changes[2]["before"]["ratio"] != changes[2]["before"]["ratio"]  # NaN
    assert changes[2]["after"]["name"] == "Ada II"


def test_transactions_times_and_places_are_kept(tmp_path: Path, log: Log, topics: Log) -> None:
    """The envelope's transaction block, the database's commit time, and where the event stood."""
    events = samples("schemas")
    pour(topics, events)
    captured(log, url(tmp_path, "&table=everything"))
    told = [json.loads(e["value"])["payload"] for e in events if e["topic"].endswith("everything") and e["value"]]
    changes = history(log, "everything")
    assert [change["op"] for change in changes] == [payload["op"] for payload in told]
    blocks = [(payload["transaction"] or {"id": str(payload["source"]["txId"])}) for payload in told]
    assert [change["transaction"] for change in changes] == [block["id"] for block in blocks]
    assert [change["transaction_order"] for change in changes] == [block.get("total_order") for block in blocks]
    micros = [round(change["committed"].timestamp() * 1e6) for change in changes]
    assert micros == [payload["source"]["ts_us"] for payload in told]
    assert [change["position"].partition(" ")[2] for change in changes] == [f"everything/0@{at}" for at in (0, 1, 2, 3)]


def test_topics_that_hold_no_envelopes_are_left_out(tmp_path: Path, log: Log, topics: Log) -> None:
    """Debezium's transaction topic stands beside the tables' own."""
    pour(topics, samples("schemas"))
    capture = captured(log, f"debezium+file://{tmp_path}/kafka?topics=dbz")
    assert set(capture.source.left_out) == {"transaction"}
    assert "does not contain Debezium events" in capture.source.left_out["transaction"]
    assert set(captures(log)["dbz"].tables) == {"shop.everything", "shop.pairs"}


def test_a_tombstone_whose_delete_compaction_removed_is_a_delete(tmp_path: Path, log: Log, topics: Log) -> None:
    """A compacted topic has the tombstone only; a delete right before its tombstone counts once, over batches too."""
    topics.create_topic("dbz.shop.users", partitions=1)

    def append(*events: tuple[int, str | None]) -> None:
        rows = [{"key": json.dumps({"id": n}).encode(), "value": v and v.encode()} for n, v in events]
        topics.append("dbz.shop.users", rows)
        captured(log, url(tmp_path, f"&{COLUMNS}"))

    append((1, envelope(1)), (2, envelope(2)), (3, envelope(3)), (1, envelope(1, op="d")), (1, None), (2, None))
    assert [(change["op"], change["id"]) for change in history(log, "users")] == [
        ("c", 1), ("c", 2), ("c", 3), ("d", 1), ("d", 2),
    ]  # fmt: skip
    append((3, envelope(3, op="d")))
    append((3, None))
    assert [(change["op"], change["id"]) for change in history(log, "users")][5:] == [("d", 3)]
    assert log.table("users").num_rows == 0
    append((7, None), (8, envelope(8)), (9, None), (9, None), (8, envelope(8, op="d")), (8, None), (8, envelope(8)))
    told = [(change["op"], change["id"], change["position"][-1]) for change in history(log, "users")][6:]
    assert told == [("d", 7, "8"), ("c", 8, "9"), ("d", 9, "0"), ("d", 9, "1"), ("d", 8, "2"), ("c", 8, "4")]


def test_a_restarted_capture_goes_on_and_an_added_column_is_followed(tmp_path: Path, log: Log, topics: Log) -> None:
    """Event by event, each read by another capture: the same as at once."""
    for event in samples("schemas"):
        pour(topics, [event])
        if event["topic"].startswith("dbz.shop."):
            captured(log, url(tmp_path))
    again = open_log(tmp_path / "again", durability="os")
    captured(again, url(tmp_path))
    for table in ("pairs", "everything"):
        assert [c["op"] for c in history(log, table) if c["op"] != "t"] == [
            c["op"] for c in history(again, table) if c["op"] != "t"
        ]
        columns = [name for name in log.table(table).column_names if name != "committed"]
        assert log.table(table).select(columns).to_pylist() == again.table(table).select(columns).to_pylist()


def test_a_value_that_was_not_sent_is_taken_from_before_or_stops_the_table(
    tmp_path: Path, log: Log, topics: Log
) -> None:
    """Never the placeholder, and null only where that was asked for."""
    missing = "__debezium_unavailable_value"
    key = json.dumps({"id": 1})
    first = {"topic": "dbz.shop.users", "key": key, "value": envelope(1, name="large")}
    known = {**first, "value": envelope(1, op="u", name=missing, before={"id": 1, "name": "large"})}
    pour(topics, [first, known])
    captured(log, url(tmp_path, f"&{COLUMNS}"))
    assert [change["after"]["name"] for change in history(log, "users")] == ["large", "large"]
    pour(topics, [{**first, "value": envelope(1, op="u", name=missing)}])
    captured(log, url(tmp_path, f"&{COLUMNS}"))
    stopped = captures(log)["dbz"].tables["users"]
    assert stopped.state == "stopped"
    assert "offset 2" in (stopped.why or "") and "REPLICA IDENTITY FULL" in (stopped.why or "")
    assert log.table("users").to_pylist()[0]["name"] == "large"
    captured(log, url(tmp_path, f"&{COLUMNS}&unavailable=null"))
    assert captures(log)["dbz"].tables["users"].state == "live"
    assert log.table("users").to_pylist()[0]["name"] is None


def test_one_table_that_cannot_be_read_stops_alone(tmp_path: Path, log: Log, topics: Log) -> None:
    """An event of another kind in one topic; the other goes on."""
    key = json.dumps({"id": 1})
    for name in ("users", "orders"):
        pour(topics, [{"topic": f"dbz.shop.{name}", "key": key, "value": envelope(1)}])
    options = "&" + COLUMNS + "&columns.orders=id BIGINT, name STRING"
    captured(log, url(tmp_path, options))
    pour(topics, [{"topic": "dbz.shop.users", "key": key, "value": '{"before":null,"after":{"id":"x"},"op":"c"}'}])
    pour(topics, [{"topic": "dbz.shop.orders", "key": key, "value": envelope(1, op="u", name="new")}])
    capture = captured(log, url(tmp_path, options))
    states = {name: table.state for name, table in capture.progress.tables.items()}
    assert states == {"users": "stopped", "orders": "live"}
    assert "partition 0" in (capture.progress.tables["users"].why or "")
    assert log.table("orders").to_pylist()[0]["name"] == "new"


def test_mistakes_are_told_in_a_sentence(tmp_path: Path, log: Log, topics: Log) -> None:
    """What is missing, and what to do."""
    key = json.dumps({"id": 1})
    pour(topics, [{"topic": "dbz.shop.users", "key": key, "value": envelope(1)}])
    with pytest.raises(NotCapturable, match=r"columns\.users=id BIGINT"):
        captured(log, url(tmp_path, "&table=users"))
    pour(topics, [{"topic": "dbz.shop.keyless", "key": None, "value": envelope(1)}])
    with pytest.raises(NotCapturable, match="--key keyless="):
        captured(log, url(tmp_path, "&table=keyless&columns.keyless=id BIGINT, name STRING"))
    topics.create_topic("dbz.shop.empty", partitions=1)
    with pytest.raises(NotCapturable, match="Start Debezium first"):
        captured(log, url(tmp_path, "&table=empty"))
    pour(topics, [{"topic": "dbz.shop.avro", "key": key, "value": "\x00\x01"}])
    with pytest.raises(NotCapturable, match="JsonConverter"):
        captured(log, url(tmp_path, "&table=avro"))
    with pytest.raises(InvalidInput, match="time_unit"):
        open_source(url(tmp_path, "&time_unit=hours"))


def test_a_topic_that_is_shorter_than_what_was_read_is_another_one(tmp_path: Path, log: Log, topics: Log) -> None:
    """Made anew: nothing is skipped in silence, and read again only when told."""
    events = [{"topic": "dbz.shop.users", "key": json.dumps({"id": n}), "value": envelope(n)} for n in range(3)]
    pour(topics, events)
    captured(log, url(tmp_path, f"&{COLUMNS}"))
    topics.delete_topic("dbz.shop.users")
    pour(topics, events[1:2])
    with pytest.raises(CaptureLost, match="--backfill-again"):
        captured(log, url(tmp_path, f"&{COLUMNS}"))
    captured(log, url(tmp_path, f"&{COLUMNS}"), backfill_again=True)
    assert log.table("users").column("id").to_pylist() == [1]


def test_several_brokers_stand_in_a_url_and_passwords_are_not_shown() -> None:
    """What is shown is kept in the log, too."""
    parsed = parse_source_url("debezium+kafka://a:9092,b:9092?topics=erp.HR&sasl.password=secret&table=STAFF")
    assert (parsed.host, parsed.database, parsed.tables) == ("a:9092,b:9092", "erp", ("STAFF",))
    assert "secret" not in parsed.shown
    assert parse_source_url(parsed.shown).host == "a:9092,b:9092"


# Our changes in Debezium's envelope


STATEMENTS = (
    "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, raw BLOB, ratio REAL, is_new BOOLEAN)",
    "CREATE TABLE pairs (a INT, b TEXT, n INT, PRIMARY KEY (b, a))",
    "INSERT INTO users VALUES (1, 'A\"d\na', x'00ff', 1.5, 1), (2, NULL, NULL, NULL, NULL)",
    "INSERT INTO pairs VALUES (1, 'x', 3), (2, 'y', NULL)",
)


@pytest.mark.parametrize("schemas", [True, False])
def test_what_is_written_in_the_envelope_is_read_back_equal(tmp_path: Path, topics: Log, schemas: bool) -> None:
    """Backfill, insert, update, delete, a change of a key; keys of one and of two columns."""
    rig = Rig(tmp_path, *STATEMENTS)
    rig.capture.catch_up()
    rig.run(
        "UPDATE users SET name = 'Ada', is_new = 0 WHERE id = 1",
        "DELETE FROM users WHERE id = 2",
        "INSERT INTO users VALUES (3, 'Eve', x'', -0.25, NULL)",
        "UPDATE pairs SET a = 9 WHERE b = 'x'",
        "DELETE FROM pairs WHERE b = 'y'",
    )
    written = {name: rig.history(name) for name in ("users", "pairs")}
    for name, key in (("users", ()), ("pairs", ("b", "a"))):
        export = DebeziumExport(
            rig.log, f"{name}.changes", to=topics, topic=f"dbz.shop.{name}", key=key, schemas=schemas
        )
        export.open()
        export.catch_up()
        assert export.changes == len(written[name])
    columns = "&columns.users=id BIGINT, name STRING, raw BINARY, ratio DOUBLE, is_new BOOLEAN&columns.pairs=a BIGINT, b STRING, n BIGINT"
    for name in written:
        back = open_log(tmp_path / f"back-{name}", durability="os")
        captured(back, url(tmp_path, f"&table={name}" + ("" if schemas else columns)))
        same = [name for name in rig.log.topic(f"{name}.changes").schema.names if name != "position"]
        read = [[change[column] for column in same] for change in history(back, name)]
        assert read == [[change[column] for column in same] for change in written[name]]
        assert back.table(name).select(rig.log.table(name).column_names).num_rows == rig.log.table(name).num_rows


def test_every_type_of_the_log_is_written_and_read_back(tmp_path: Path, topics: Log) -> None:
    """By a history of its own, whose rows hold each type, also inside of arrays and structs."""
    from headwater.model.schema import to_arrow_schema
    from headwater.sinks.debezium_envelope import EnvelopeWriter

    row = to_arrow_schema(
        "id STRING, t TINYINT, s SMALLINT, i INT, l BIGINT, f FLOAT, d DOUBLE, b BOOLEAN, x BINARY, n DECIMAL(38, 9), day DATE, "
        "z TIMESTAMP, p TIMESTAMP_NTZ, a ARRAY<DATE>, o STRUCT<v: BINARY, w: TIMESTAMP>"
    )
    values: dict[str, Any] = {
        "id": 'k"1', "t": -1, "s": 2, "i": 3, "l": 1 << 60, "f": 0.5, "d": -1.25, "b": True, "x": b"\xff", "n": Decimal("-0.000000001"),
        "day": date(1969, 12, 31), "z": datetime(2026, 1, 1, 1, 1, 1, 1, UTC), "p": datetime.fromisoformat("1900-01-01T00:00:00.000005"),
        "a": [date(2026, 1, 1), None], "o": {"v": b"\x00", "w": datetime(2026, 1, 1, tzinfo=UTC)},
    }  # fmt: skip
    struct = pa.struct(list(row))
    now = datetime(2026, 1, 1, tzinfo=UTC)
    changes = pa.table(
        {
            "id": ['k"1', "gone"],
            "op": ["c", "d"],
            "before": pa.array([None, None], struct),
            "after": pa.array([values, None], struct),
            "position": ["1", "2"],
            "transaction": ['t"1', None],
            "transaction_order": pa.array([1, None], pa.int64()),
            "committed": pa.array([now, now], pa.timestamp("us", tz="UTC")),
        }
    )
    writer = EnvelopeWriter(changes.schema, key_column="id", key=["id"], table="all", server="dbz.shop", schemas=True)
    topics.create_topic("dbz.shop.all", partitions=1)
    topics.append("dbz.shop.all", writer.events(changes, tombstones=True))
    back = open_log(tmp_path / "back", durability="os")
    captured(back, url(tmp_path))
    created, deleted = history(back, "all")
    assert created["after"] == values
    assert (deleted["op"], deleted["before"]["id"], deleted["before"]["l"]) == ("d", "gone", None)
    assert back.table("all").num_rows == 1


def test_octets_are_those_of_the_standard_library() -> None:
    """Base64 and two's complement over whole columns, with nulls, empty values and slices."""
    chance = random.Random(5)
    values = [None if chance.random() < 0.2 else chance.randbytes(chance.randrange(20)) for _ in range(500)]
    for column in (
        pa.array(values, pa.binary()),
        pa.array(values, pa.binary()).slice(3, 100),
        pa.array([], pa.binary()),
    ):
        texts = to_base64(column)
        assert texts.to_pylist() == [
            None if value is None else b64encode(value).decode() for value in column.to_pylist()
        ]
        assert from_base64(texts).to_pylist() == column.to_pylist()
    numbers = [None, 0, 1, -1, 127, 128, -128, -129, 255, 256, -257, 10**38 - 1, 1 - 10**38]
    decimals = pa.array([None if n is None else Decimal(f"{n}E-4") for n in numbers], pa.decimal128(38, 4))
    octets = from_decimals(decimals)
    assert [None if o is None else int.from_bytes(o, "big", signed=True) for o in octets.to_pylist()] == numbers
    assert [len(o) for o in octets.to_pylist()[1:10]] == [1, 1, 1, 1, 2, 1, 2, 2, 2]
    assert to_decimals(octets, decimals.type).equals(decimals)
    for bad in ("abc", "ab*=", "a=bc"):
        with pytest.raises(ValueError, match="base64"):
            from_base64(pa.array([bad]))


@pytest.mark.parametrize(
    ("schema", "read", "value"),
    [
        ({"type": "int32", "name": "org.apache.kafka.connect.data.Date"}, 1, date(1970, 1, 2)),
        ({"type": "int32", "name": "org.apache.kafka.connect.data.Time"}, 3_600_001, "01:00:00.001"),
        ({"type": "int64", "name": "org.apache.kafka.connect.data.Timestamp"}, -1, datetime.fromisoformat("1969-12-31T23:59:59.999")),
        ({"type": "int64", "name": "io.debezium.time.NanoTimestamp"}, -1, datetime.fromisoformat("1969-12-31T23:59:59.999999")),
        ({"type": "int64", "name": "io.debezium.time.NanoTime"}, 999, "00:00:00"),
        ({"type": "int64", "name": "io.debezium.time.MicroTime"}, -90_000_000_000, "-25:00:00"),
        ({"type": "string", "name": "io.debezium.time.ZonedTimestamp"}, "2026-01-01T02:00:00.1234567+02:00",
         datetime(2026, 1, 1, 0, 0, 0, 123_456, UTC)),
        ({"type": "string", "name": "io.debezium.time.IsoDate"}, "2026-01-31Z", date(2026, 1, 31)),
        ({"type": "int32", "name": "io.debezium.time.Year"}, 2026, 2026),
        ({"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": {"scale": "50"}}, "AQ==", "0." + "0" * 49 + "1"),
        ({"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal",
          "parameters": {"scale": "2", "connect.decimal.precision": "5"}}, "/w==", Decimal("-0.01")),
        ({"type": "struct", "name": "io.debezium.data.VariableScaleDecimal"}, {"scale": -2, "value": "Bw=="}, "700"),
        ({"type": "string", "name": "io.debezium.data.Json"}, "{}", "{}"),
    ],
)  # fmt: skip
def test_a_logical_type_is_read_as_it_is_documented(schema: dict[str, Any], read: Any, value: Any) -> None:
    """Also null, and beside one another."""
    reading = reading_of(schema)
    assert reading.decode(pa.array([read, None, read], reading.read)).to_pylist() == [value, None, value]
    assert reading.decode(pa.array([], reading.read)).type == reading.log


def test_a_type_of_the_log_has_one_form_in_connect() -> None:
    """What is written is what is read."""
    for type_ in (
        pa.int8(),
        pa.float32(),
        pa.string(),
        pa.binary(),
        pa.date32(),
        pa.timestamp("us"),
        pa.decimal128(9, 2),
    ):
        assert reading_of(writing_of(type_).schema).log == type_


def test_all_changes_are_written_in_the_order_of_their_commits(
    tmp_path: Path, topics: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history of several partitions becomes a topic of one, in steps that cut where the database has committed."""
    monkeypatch.setattr("headwater.sinks.debezium_export.EVENTS_MAX", 7)
    rig = Rig(tmp_path, "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)")
    chance = random.Random(11)
    for number in range(60):
        rig.run(f"INSERT OR REPLACE INTO users VALUES ({chance.randrange(20)}, 'n{number}')")
        if number % 9 == 0:
            rig.capture.catch_up()
    written = rig.history("users")
    export = DebeziumExport(rig.log, "users.changes", to=topics, topic="dbz.shop.users", schemas=False)
    export.open()
    export.catch_up()
    events = [json.loads(value) for value in topics.read("dbz.shop.users").column("value").to_pylist() if value]
    assert [event["source"]["position"] for event in events] == [change["position"] for change in written]


def test_a_history_is_asked_for(tmp_path: Path, topics: Log) -> None:
    """A table that is none, and a key that nobody can know."""
    rig = Rig(tmp_path, *STATEMENTS)
    rig.capture.catch_up()
    with pytest.raises(InvalidInput, match=r"users\.changes"):
        DebeziumExport(rig.log, "users", to=topics, topic="x")
    with pytest.raises(InvalidInput, match="--key a,b"):
        DebeziumExport(rig.log, "pairs.changes", to=topics, topic="x")


@pytest.mark.slow
@pytest.mark.parametrize("point", points_of("export:"))
def test_a_killed_export_goes_on_with_the_next_change(tmp_path: Path, point: str) -> None:
    """`kill -9` at each step of three lives: every change is there once, in order."""
    rig = Rig(tmp_path, "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)")
    for life in range(3):
        rig.run(*(f"INSERT OR REPLACE INTO users VALUES ({n}, 'life {life}')" for n in range(30)))
        rig.capture.catch_up()
        with pytest.raises(AssertionError, match="SIGKILL"):
            Child(lambda: export_until(tmp_path, point)).result()
    Child(lambda: export_until(tmp_path, "")).result()
    with open_log(tmp_path / "kafka") as topics:
        events = [json.loads(value) for value in topics.read("dbz.shop.users").column("value").to_pylist()]
    assert [event["source"]["position"] for event in events] == [change["position"] for change in rig.history("users")]


def export_until(folder: Path, point: str) -> None:
    """An export that dies where it is told."""
    kill_at(point)
    with open_log(folder / "log") as log, open_log(folder / "kafka", durability="os") as topics:
        export = DebeziumExport(log, "users.changes", to=topics, topic="dbz.shop.users", schemas=False)
        export.open()
        export.catch_up()
