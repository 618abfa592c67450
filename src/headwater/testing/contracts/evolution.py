"""The contract of schema changes: what old events survive is accepted, anything else is refused and spelled out."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from headwater.log.log import Log
from headwater.model.errors import InvalidInput, SchemaConflict, SchemaMismatch
from headwater.testing.contracts.case import ORDERS, LogCase, orders, refused, values_of

OLD = "id STRING NOT NULL, n INT, x FLOAT, d DECIMAL(4, 2), place STRUCT<lat: DOUBLE>, tags ARRAY<INT>"
OLD_ROW = {"id": "a", "n": 1, "x": 1.5, "d": 9, "place": {"lat": 1.0}, "tags": [1]}

WIDER = [
    OLD.replace("n INT", "n BIGINT"),
    OLD.replace("n INT", "n DOUBLE"),
    OLD.replace("x FLOAT", "x DOUBLE"),
    OLD.replace("DECIMAL(4, 2)", "DECIMAL(20, 2)"),
    OLD.replace("id STRING NOT NULL", "id STRING"),
    OLD.replace("lat: DOUBLE", "lat: DOUBLE, lon: DOUBLE"),
    OLD.replace("ARRAY<INT>", "ARRAY<BIGINT>"),
    OLD + ", note STRING",
]

CONFLICTING = [
    (OLD.replace(", n INT", ""), ["n INT", "missing"]),
    (OLD.replace("n INT", "N INT"), ["n INT", "N"]),
    (OLD.replace("n INT", "n STRING"), ["n", "INT", "STRING"]),
    (OLD.replace("n INT", "n SMALLINT"), ["n", "INT", "SMALLINT"]),
    (OLD.replace("n INT", "n INT NOT NULL"), ["n", "NOT NULL"]),
    (OLD.replace("x FLOAT", "x INT"), ["x", "FLOAT", "INT"]),
    (OLD.replace("DECIMAL(4, 2)", "DECIMAL(4, 1)"), ["d", "DECIMAL(4, 2)", "DECIMAL(4, 1)"]),
    (OLD.replace("lat: DOUBLE", "lon: DOUBLE"), ["place.lat"]),
    (OLD.replace("ARRAY<INT>", "ARRAY<STRING>"), ["tags"]),
    (OLD + ", note STRING NOT NULL", ["note", "NOT NULL"]),
    ("other STRING", ["id", "n", "x", "d", "place", "tags"]),
]


class EvolutionContract(LogCase):
    """What holds for changes of a topic."""

    def test_old_events_are_read_with_nulls_in_an_added_column(self, log: Log) -> None:
        """As events, as Arrow and as a table."""
        log.create_topic("orders", ORDERS, key="id", time="at", partitions=1)
        log.append("orders", orders(2))
        log.alter_topic("orders", schema=ORDERS + ", note STRING")
        log.append("orders", [{**row, "note": "new"} for row in orders(2, start=2)])
        assert [value["note"] for value in values_of(log, "orders")] == [None, None, "new", "new"]
        assert log.read("orders", columns=["note"]).column("note").to_pylist() == [None, None, "new", "new"]
        assert log.table("orders").column("note").to_pylist() == [None, None, "new", "new"]
        assert log.topic("orders").schema.names == ["id", "amount", "at", "note"]

    def test_old_events_are_read_in_a_widened_type(self, log: Log) -> None:
        """Old and new values stand in one column."""
        log.create_topic("t", "n INT", partitions=1)
        log.append("t", [{"n": 2**31 - 1}])
        log.alter_topic("t", schema="n BIGINT")
        log.append("t", [{"n": 2**40}])
        assert log.read("t").column("n").type == pa.int64()
        assert values_of(log, "t") == [{"n": 2**31 - 1}, {"n": 2**40}]

    @pytest.mark.parametrize("schema", WIDER, ids=lambda schema: schema[:0] or str(WIDER.index(schema)))
    def test_a_wider_schema_is_accepted(self, log: Log, schema: str) -> None:
        """A nullable column or field added, a type that holds all the old one holds, NOT NULL dropped."""
        log.create_topic("t", OLD, partitions=1)
        log.append("t", [OLD_ROW])
        log.alter_topic("t", schema=schema)
        log.append("t", [OLD_ROW])
        before, after = values_of(log, "t")
        assert before == after
        assert before["id"] == "a"
        assert log.read("t").num_rows == 2

    @pytest.mark.parametrize(("schema", "words"), CONFLICTING, ids=lambda value: str(value)[-30:])
    def test_a_schema_that_old_events_would_not_survive_is_refused(
        self, log: Log, schema: str, words: list[str]
    ) -> None:
        """Every difference is named, and nothing has changed."""
        before = log.create_topic("t", OLD, partitions=1)
        log.append("t", [OLD_ROW])
        with refused(SchemaConflict, *words):
            log.alter_topic("t", schema=schema)
        assert log.topic("t") == before
        log.append("t", [OLD_ROW])
        assert len(values_of(log, "t")) == 2

    def test_the_key_keeps_its_partition(self, log: Log) -> None:
        """It may only become a wider integer, which hashes to the same partition."""
        log.create_topic("numbers", "n INT, v INT", key="n", partitions=16)
        log.append("numbers", [{"n": n, "v": 0} for n in range(50)])
        log.alter_topic("numbers", schema="n BIGINT, v INT")
        log.append("numbers", [{"n": n, "v": 1} for n in range(50)])
        places = log.read("numbers", columns=["n", "v", "_partition"]).to_pylist()
        homes = [{row["n"]: row["_partition"] for row in places if row["v"] == v} for v in (0, 1)]
        assert homes[0] == homes[1]
        with refused(SchemaConflict, "key"):
            log.alter_topic("numbers", schema="n DOUBLE, v INT")

    def test_the_same_schema_again_changes_nothing(self, log: Log) -> None:
        """An application may say at every start what its topics are."""
        before = log.create_topic("orders", ORDERS)
        assert log.alter_topic("orders", schema=ORDERS) == before

    def test_a_topic_of_bytes_cannot_get_a_schema(self, log: Log) -> None:
        """Its events have no columns to fill."""
        log.create_topic("raw")
        with refused(InvalidInput, "raw"):
            log.alter_topic("raw", schema=ORDERS)

    def test_lateness_and_limits_can_change(self, log: Log) -> None:
        """And what cannot work is refused as at creation."""
        log.create_topic("orders", ORDERS, time="at")
        log.alter_topic("orders", lateness="2 minutes", future_max="1 hour", event_bytes_max=1000)
        topic = log.topic("orders")
        assert (topic.lateness_us, topic.future_us, topic.event_bytes_max) == (120_000_000, 3_600_000_000, 1000)
        unworkable: list[dict[str, Any]] = [{"lateness": "soon"}, {"future_max": 5}, {"event_bytes_max": "1"}]
        for changes in unworkable:
            with refused(InvalidInput):
                log.alter_topic("orders", **changes)
        assert log.topic("orders") == topic

    def test_a_reader_goes_on_through_a_change(self, log: Log) -> None:
        """Also from the middle of a batch that was appended before it."""
        log.create_topic("t", "n INT", partitions=1)
        log.append("t", [{"n": n} for n in range(5)])
        with log.reader("t") as reader:
            assert [event.value for event in reader.poll(events_max=2)] == [{"n": 0}, {"n": 1}]
            log.alter_topic("t", schema="n BIGINT, note STRING")
            log.append("t", [{"n": 5, "note": "new"}])
            rest = [event.value for event in reader.poll(events_max=2)]
            while batches := reader.poll_arrow(timeout_s=0):  # one poll may give what came before the change alone
                rest += pa.Table.from_batches(batches).to_pylist()
        assert rest == [{"n": n, "note": None} for n in (2, 3, 4)] + [{"n": 5, "note": "new"}]

    def test_a_change_made_elsewhere_is_seen(self, log: Log, other: Log) -> None:
        """Another handle appends, reads and follows by the new schema at once."""
        log.create_topic("t", "n INT", key="n", partitions=1)
        log.append("t", [{"n": 1}])
        assert values_of(other, "t") == [{"n": 1}]
        with other.reader("t") as reader:
            reader.poll()
            log.alter_topic("t", schema="n BIGINT, note STRING")
            log.append("t", [{"n": 2**40, "note": "a"}])
            other.append("t", [{"n": 3, "note": "b"}])
            assert [event.value["note"] for event in reader.poll()] == ["a", "b"]
        expected = [{"n": 1, "note": None}, {"n": 2**40, "note": "a"}, {"n": 3, "note": "b"}]
        assert other.read("t").to_pylist() == other.table("t").to_pylist() == expected

    def test_rows_of_the_old_shape_still_fit(self, log: Log, other: Log) -> None:
        """A producer that has not heard of the change goes on; what it does not know is null."""
        log.create_topic("t", "n INT", partitions=1)
        with other.producer() as producer:
            producer.send("t", {"n": 1}).result()
            log.alter_topic("t", schema="n BIGINT, note STRING")
            producer.send("t", {"n": 2}).result()
            producer.send("t", {"n": 2**40, "note": "now it has"}).result()
            with refused(SchemaMismatch, "unknown"):
                producer.send("t", {"n": 1, "unknown": 1}).result()
            with pytest.raises(SchemaMismatch):
                producer.flush()
        assert [value["note"] for value in values_of(log, "t")] == [None, None, "now it has"]
