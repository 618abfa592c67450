"""The contract of retention: what a topic no longer keeps goes, oldest first, and who missed it is told exactly what."""

from __future__ import annotations

import pickle
import time
from datetime import timedelta

import pytest

from headwater.log.clients.reader import Reader
from headwater.log.log import Log
from headwater.model.errors import EventsMissed, InvalidInput, TopicFull
from headwater.testing.contracts.case import ORDERS, LogCase, events_of, order, orders, refused, values_of


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
        log.alter_topic("orders", retention=None, retention_bytes=None)
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

    @pytest.mark.covers("concept: acknowledged and deleted")
    def test_what_every_queue_group_has_acknowledged_is_given_up(self, log: Log, other: Log) -> None:
        """Up to the first event that some group still needs; who comes later is told what is gone."""
        log.create_topic("tasks", partitions=1, segment_bytes=4096, retain="until_acked")
        log.create_topic("kept", partitions=1, segment_bytes=4096)
        for name in ("tasks", "kept"):
            for number in range(40):
                log.append(name, [b"%d" % number + b"x" * 500])
        assert log.tidy("tasks") == 0, "nobody has said that it may go"
        with log.queue("tasks", group="a") as a, other.queue("tasks", group="b") as b, log.queue("kept") as c:
            c.ack(c.lease(events_max=40))
            a.ack(a.lease(events_max=40))
            assert log.tidy("tasks") == 0, "the other group has not even begun"
            held = b.lease(events_max=40)
            b.ack(held[:21] + held[22:])
            gone = log.tidy("tasks")
            assert 0 < gone <= 21
            assert [event.offset for event in events_of(other, "tasks")] == list(range(gone, 40))
            with pytest.raises(EventsMissed) as caught:
                other.read("tasks", start=0)
            assert (caught.value.first, caught.value.last) == (0, gone - 1)
            held[21].nack()
            again = b.lease()
            assert [lease.event.offset for lease in again] == [21]
            b.ack(again)
            assert log.tidy("tasks") == 40 - gone
            assert log.offsets("tasks") == {0: range(40, 40)}
            log.append("tasks", [b"one more"])
            for queue in (a, b):
                assert [lease.event.value for lease in queue.lease()] == [b"one more"]
        assert log.tidy("tasks") == log.tidy("kept") == 0
        assert values_of(log, "tasks") == [b"one more"] and len(values_of(log, "kept")) == 40

    def test_retain_fits_or_is_refused(self, log: Log) -> None:
        """Acknowledged events cannot be what a compacted topic keeps; age takes also what nobody acknowledged."""
        assert log.create_topic("tasks", ORDERS, key="id").retain == "all"
        assert log.alter_topic("tasks", retain="until_acked").retain == "until_acked"
        with refused(InvalidInput, "until_acked"):
            log.alter_topic("tasks", compact=True)
        with refused(InvalidInput, "later"):
            log.create_topic("other", retain="later")  # type: ignore[arg-type]
        log.queue("tasks").close()
        log.append("tasks", orders(8))
        assert log.tidy("tasks") == 0
        time.sleep(0.02)
        log.alter_topic("tasks", retention="10 ms")
        assert log.tidy("tasks") == 8

    def test_an_acknowledgement_makes_room(self, log: Log) -> None:
        """A full topic with `overload="block"` is a queue with back-pressure: it takes events as others are done."""
        log.create_topic("tasks", partitions=1, segment_bytes=4096, bytes_max=20_000, retain="until_acked")
        with log.queue("tasks") as queue, log.producer(retry_s=0.05, linger_ms=0) as producer:
            sent, full = 0, False
            while not full:
                try:
                    producer.send("tasks", b"x" * 1000).result()
                    sent += 1
                except TopicFull:
                    full = True
            with refused(TopicFull):
                producer.flush()
            queue.ack(queue.lease())
            producer.send("tasks", b"x" * 1000).result()
        assert log.offsets("tasks")[0].stop == sent + 1
        assert log.counters()["expired"] > 0

    def test_ids_are_remembered_as_long_as_they_may_come_again(self, log: Log, other: Log) -> None:
        """An acknowledged event stays while its id is in the duplicate window of some group."""
        log.create_topic("tasks", partitions=1, retain="until_acked")
        with log.queue("tasks", duplicates_s=60) as queue:
            queue.send(b"once", id="a")
            queue.ack(queue.lease())
            assert log.tidy("tasks") == 0
        with refused(InvalidInput, "duplicates_s=60"):
            other.queue("tasks", duplicates_s=600)
        with other.queue("tasks", duplicates_s=60) as queue:
            queue.send(b"twice", id="a")
            queue.send(b"new", id="b")
            assert [lease.event.value for lease in queue.lease()] == [b"new"]
        with (
            log.queue("tasks", group="short", duplicates_s=0.01) as short,
            log.queue("tasks", duplicates_s=60) as queue,
        ):
            short.ack(short.lease())
            queue.ack(queue.lease())
            assert log.tidy("tasks") == 0

    def test_the_notes_of_units_of_work_are_given_up(self, log: Log) -> None:
        """What a queue has applied of its transactions is not needed again."""
        log.create_topic("tasks", partitions=2)
        log.create_topic("done")
        with log.queue("tasks") as queue:
            for number in range(6):
                log.append("tasks", [b"%d" % number])
                with log.transaction() as unit:
                    leases = queue.lease(events_max=1)
                    unit.append("done", [leases[0].event.value])
                    unit.ack(leases)
            log.tidy("tasks.default.acks")
            assert log.offsets("tasks.default.acks") == {0: range(6, 6)}
            log.append("tasks", [b"6"])
            with log.transaction() as unit:
                unit.ack(queue.lease())
            assert queue.lease(timeout_s=0) == []
        assert sorted(values_of(log, "done")) == [b"%d" % number for number in range(6)]

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
