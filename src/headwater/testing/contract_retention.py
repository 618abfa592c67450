"""The contract of retention: what a topic no longer keeps goes, oldest first, and who missed it is told exactly what."""

from __future__ import annotations

import pickle
import time
from datetime import timedelta

import pytest

from headwater.log.log import Log
from headwater.log.reader import Reader
from headwater.model.errors import EventsMissed, InvalidInput
from headwater.testing.contract_case import ORDERS, LogCase, events_of, order, orders, refused


class RetentionContract(LogCase):
    """What holds for topics that are not kept for ever."""

    def test_retention_settings_are_kept_changed_and_taken_away(self, log: Log, other: Log) -> None:
        """By any handle; what keeps nothing is refused."""
        assert log.create_topic("forever", ORDERS).retention_us is None
        topic = log.create_topic("orders", ORDERS, retention="7 days", retention_bytes=1 << 30)
        assert (topic.retention_us, topic.retention_bytes) == (7 * 86_400_000_000, 1 << 30)
        assert other.topic("orders") == topic
        other.alter_topic("orders", retention=timedelta(hours=1))
        assert (log.topic("orders").retention_us, log.topic("orders").retention_bytes) == (3_600_000_000, 1 << 30)
        log.alter_topic("orders", retention="forever", retention_bytes=0)
        assert (other.topic("orders").retention_us, other.topic("orders").retention_bytes) == (None, None)
        with refused(InvalidInput, "retention"):
            log.alter_topic("orders", retention="0 seconds")
        with refused(InvalidInput, "retention_bytes"):
            log.create_topic("none", ORDERS, retention_bytes=-1)

    @pytest.mark.covers("Kafka")
    def test_events_older_than_the_retention_are_given_up(self, log: Log) -> None:
        """Everything that reads begins where the partition begins, and offsets go on as they were."""
        log.create_topic("orders", ORDERS, key="id", time="at", partitions=1)
        log.append("orders", orders(10))
        assert log.tidy("orders") == 0
        time.sleep(0.02)
        log.alter_topic("orders", retention="10 ms")
        assert log.tidy("orders") == 10
        assert log.offsets("orders") == {0: range(10, 10)}
        assert log.read("orders").num_rows == log.table("orders").num_rows == 0
        assert log.offsets_at("orders", 0) == log.offsets_at("orders", 0, by="appended") == {0: 10}
        log.alter_topic("orders", retention="1 day")
        log.append("orders", orders(5, start=10))
        assert log.tidy("orders") == 0
        assert log.offsets("orders") == {0: range(10, 15)}
        assert [event.offset for event in events_of(log, "orders")] == [10, 11, 12, 13, 14]
        assert log.offsets_at("orders", 0) == {0: 10}
        assert log.table("orders").num_rows == 5

    @pytest.mark.covers("concept: buffer limit")
    def test_the_oldest_go_when_a_partition_is_too_large(self, log: Log) -> None:
        """At least `retention_bytes` stay, and not much more; what stays is whole and the newest."""
        log.create_topic("orders", ORDERS, partitions=1, segment_bytes=4096)
        for number in range(300):
            log.append("orders", [order(number, key="x" * 100)])
        log.alter_topic("orders", retention_bytes=8192)
        given_up = log.tidy("orders")
        assert 0 < given_up < 300
        assert log.offsets("orders") == {0: range(given_up, 300)}
        assert [event.value["amount"] for event in events_of(log, "orders")] == [float(n) for n in range(given_up, 300)]
        assert log.tidy("orders") == 0

    @pytest.mark.covers("concept: buffer limit")
    def test_an_overtaken_reader_is_told_what_it_missed(self, log: Log, other: Log) -> None:
        """It stands where it stood until it decides to go on."""
        log.create_topic("orders", ORDERS, partitions=1)
        log.append("orders", orders(10))
        reader = other.reader("orders")
        assert len(reader.poll(events_max=4)) == 4
        places = reader.positions()
        time.sleep(0.02)
        log.alter_topic("orders", retention="10 ms")
        log.tidy("orders")
        log.alter_topic("orders", retention="1 day")
        log.append("orders", [order(10)])
        for reader_ in (reader, other.reader("orders", start=places), other.reader("orders", start=4)):
            for _ in range(2):
                with pytest.raises(EventsMissed) as caught:
                    reader_.poll(timeout_s=0)
                missed = pickle.loads(pickle.dumps(caught.value))
                assert (missed.first, missed.last, missed.count) == (4, 9, 6)
        with pytest.raises(EventsMissed):
            log.read("orders", start=4)
        reader.seek("earliest")
        assert [event.offset for event in reader.poll()] == [10]

    def test_an_overtaken_reader_may_go_on_by_itself(self, log: Log) -> None:
        """It counts what it did not see."""
        log.create_topic("orders", ORDERS, partitions=1)
        log.append("orders", orders(10))
        reader = log.reader("orders", start={0: 3}, missed="skip")
        time.sleep(0.02)
        log.alter_topic("orders", retention="10 ms")
        log.tidy("orders")
        log.alter_topic("orders", retention="1 day")
        assert reader.poll(timeout_s=0) == []
        log.append("orders", orders(2, start=10))
        assert [event.offset for event in reader.poll()] == [10, 11]
        assert reader.missed == 7
        with refused(InvalidInput, "missed"):
            log.reader("orders", missed="ignore")  # type: ignore[arg-type]

    @pytest.mark.covers("Databus")
    def test_a_consumer_that_fell_behind_goes_on_from_a_snapshot(self, log: Log, other: Log) -> None:
        """Changes are kept for a while, the state of each key for ever: snapshot and changes meet at one position."""
        log.create_topic("changes", "id STRING, n INT", key="id", partitions=2)
        log.create_topic("state", "id STRING, n INT", key="id", partitions=3, compact=True)
        truth: dict[str, int] = {}
        built: dict[str, int] = {}

        def change(numbers: range) -> None:
            for number in numbers:
                truth[f"k{number % 17}"] = number
                with log.transaction() as transaction:
                    transaction.append("changes", [{"id": f"k{number % 17}", "n": number}])
                    transaction.append("state", [{"id": f"k{number % 17}", "n": number}])

        def apply(reader: Reader) -> None:
            while events := reader.poll(events_max=3, timeout_s=0):
                for event in events:
                    assert event.value["n"] > built.get(event.key, -1), "an old change came after a newer one"
                    built[event.key] = event.value["n"]

        change(range(20))
        behind = other.reader("changes")
        apply(behind)
        assert built == truth
        change(range(20, 60))
        time.sleep(0.02)
        log.alter_topic("changes", retention="10 ms")
        log.tidy("changes")
        log.alter_topic("changes", retention="1 day")
        change(range(60, 70))
        with pytest.raises(EventsMissed):
            behind.poll(timeout_s=0)
        snapshot, places = other.snapshot("state", follow="changes")
        change(range(70, 90))
        built = dict(zip(*snapshot.to_pydict().values(), strict=True))
        assert max(built.values()) == 69
        behind.seek(places)
        apply(behind)
        assert built == truth
        table, own = other.snapshot("state")
        assert dict(zip(*table.to_pydict().values(), strict=True)) == truth
        assert [place.offset for place in own] == [span.stop for span in log.offsets("state").values()]
