"""The contract of adding partitions: nothing lost, nothing doubled, and each key's events in order, for whoever reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pytest

from headwater.log.arrow.placement import key_bytes, partitions_of
from headwater.log.clients.consumer import Consumer
from headwater.log.clients.reader import Reader
from headwater.log.log import Log
from headwater.log.port.topic import Split
from headwater.model.errors import InvalidInput
from headwater.model.event import Event
from headwater.testing.contracts.case import LogCase, events_of, refused

NUMBERS = "k STRING, n BIGINT"
KEYS = 40


def numbered(start: int, count: int) -> list[dict[str, Any]]:
    """Rows whose keys take turns, and whose numbers rise."""
    return [{"k": f"k{number % KEYS}", "n": number} for number in range(start, start + count)]


def polled(reader: Reader | Consumer, *, empty_max: int = 2) -> list[Event]:
    """Everything there is, in the order in which it is handed out; a consumer may need a moment for new partitions."""
    found: list[Event] = []
    empty = 0
    while empty < empty_max:
        events = reader.poll(events_max=97, timeout_s=0.15 if isinstance(reader, Consumer) else 0)
        empty = 0 if events else empty + 1
        found += events
    return found


def check_in_order(events: Iterable[Event], expected: Iterable[int]) -> None:
    """These numbers and no others, each once, and those of each key rising."""
    by_key: dict[Any, list[int]] = defaultdict(list)
    for event in events:
        by_key[event.key].append(event.value["n"])
    assert sorted(number for numbers in by_key.values() for number in numbers) == sorted(expected)
    for key, numbers in by_key.items():
        assert numbers == sorted(numbers), f"the events of {key} came as {numbers}"


def _partition(key: str, partitions: int) -> int:
    return int(partitions_of(key_bytes(pa.array([key])), partitions)[0])


class SplitContract(LogCase):
    """What holds while and after a topic gets more partitions."""

    def test_partitions_are_added_by_multiples_only(self, log: Log) -> None:
        """Any other number would move keys between old partitions; the same number changes nothing."""
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        for partitions in (1, 3, 0, -4, 2.0, 8192):
            with refused(InvalidInput, "t"):
                log.alter_topic("t", partitions=partitions)  # type: ignore[arg-type]
        assert log.alter_topic("t", partitions=2).generation == 0
        assert log.alter_topic("t", partitions=6, lateness="1 minute").lateness_us == 60_000_000
        assert (log.topic("t").partitions, log.topic("t").generation) == (6, 1)

    def test_the_fences_are_the_ends_of_that_moment(self, log: Log, other: Log) -> None:
        """They are kept with the topic, for every handle, and a new partition has one parent."""
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        log.append("t", numbered(0, 100))
        ends = [span.stop for span in log.offsets("t").values()]
        log.alter_topic("t", partitions=4)
        log.append("t", numbered(100, 100))
        log.alter_topic("t", partitions=8)
        topic = other.topic("t")
        assert topic.splits[0] == Split(2, tuple(ends))
        assert (topic.splits[1].partitions, topic.generation, topic.partitions_first) == (4, 2, 2)
        assert topic.ancestors(1) == ()
        assert topic.ancestors(3) == ((1, ends[1]),)
        assert topic.ancestors(7) == ((3, topic.splits[1].fences[3]), (1, ends[1]))

    @pytest.mark.covers("Kinesis")
    def test_events_go_where_the_new_number_says(self, log: Log, other: Log) -> None:
        """Also from a handle that knows the topic as it was: by append, in a transaction, from a producer."""
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        other.append("t", numbered(0, KEYS))
        with other.producer(linger_ms=60_000) as producer, other.transaction() as transaction:
            for row in numbered(KEYS, KEYS):
                producer.send("t", row)
            transaction.append("t", numbered(2 * KEYS, KEYS))
            log.alter_topic("t", partitions=4)
            places = [producer.send("t", row) for row in numbered(3 * KEYS, KEYS)]
            producer.flush()
            transaction.append("t", numbered(4 * KEYS, KEYS))
        written = other.append("t", numbered(5 * KEYS, KEYS))
        atomic = other.append("t", numbered(6 * KEYS, KEYS), atomic=True)
        assert sum(map(len, written.values())) == sum(map(len, atomic.values())) == KEYS
        fences = log.topic("t").splits[0].fences
        found = events_of(log, "t")
        check_in_order(sorted(found, key=lambda event: (event.key, event.value["n"])), range(7 * KEYS))
        keys = [event.key for event in found]
        right = partitions_of(key_bytes(pa.array(keys)), 4).tolist()
        for event, partition in zip(found, right, strict=True):
            is_before = event.partition < 2 and event.offset < fences[event.partition]
            assert event.partition == (partition % 2 if is_before else partition)
        by_place = {(event.partition, event.offset): event.value["n"] for event in found}
        for number, receipt in enumerate(places, 3 * KEYS):
            position = receipt.result()
            assert by_place[position.partition, position.offset] == number

    @pytest.mark.covers("Kinesis")
    def test_a_reader_picks_up_new_partitions_and_keeps_the_order_of_keys(self, log: Log, other: Log) -> None:
        """Through a chain of splits; one that was opened before them, and one that begins afterwards."""
        log.create_topic("t", NUMBERS, key="k", partitions=1)
        with other.reader("t") as early:
            for turn in range(5):
                log.append("t", numbered(100 * turn, 100))
                if turn < 4:
                    log.alter_topic("t", partitions=2 ** (turn + 1))
            check_in_order(polled(early), range(500))
            assert early.lag() == 0
            assert {position.partition for position in early.positions()} == set(range(16))
        with other.reader("t") as late:
            check_in_order(polled(late), range(500))

    def test_a_reader_goes_on_from_positions_from_before(self, log: Log) -> None:
        """They say nothing of the new partitions, so all of those is new."""
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        log.append("t", numbered(0, 100))
        with log.reader("t") as reader:
            first = reader.poll(events_max=30)
            positions = reader.positions()
        log.alter_topic("t", partitions=6)
        log.append("t", numbered(100, 100))
        with log.reader("t", start=positions) as reader:
            check_in_order([*first, *polled(reader)], range(200))

    @pytest.mark.covers("Kinesis")
    def test_a_group_reads_a_new_partition_when_its_parent_is_committed(self, log: Log, other: Log) -> None:
        """Not when it is only read: another member may be at the events that come first."""
        log.create_topic("t", NUMBERS, key="k", partitions=1)
        log.append("t", numbered(0, KEYS))
        with other.consumer("t", group="g", commit="manual") as consumer:
            first = polled(consumer)
            log.alter_topic("t", partitions=2)
            log.append("t", numbered(KEYS, KEYS))
            meanwhile = polled(consumer)
            assert {event.partition for event in meanwhile} == {0}
            consumer.commit()
            rest = polled(consumer)
            assert {event.partition for event in rest} == {1}
            check_in_order([*first, *meanwhile, *rest], range(2 * KEYS))
            consumer.commit()
        assert log.group("g").lag.events == 0

    def test_a_reset_moves_a_group_in_new_partitions_too(self, log: Log) -> None:
        """Which nobody of it has ever owned: otherwise it would read there what it was to leave out."""
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        log.append("t", numbered(0, 50))
        with log.consumer("t", group="g") as consumer:
            polled(consumer)
        log.alter_topic("t", partitions=4)
        log.append("t", numbered(50, 50))
        ends = {("t", number): offsets.stop for number, offsets in log.offsets("t").items()}
        assert log.reset_group("g", to="latest") == ends
        assert log.group("g").lag.events == 0
        log.append("t", numbered(100, 50))
        with log.consumer("t", group="g") as consumer:
            check_in_order(polled(consumer), range(100, 150))
        assert log.reset_group("g", to={3: 0}) == {("t", 3): 0}
        with log.consumer("t", group="g") as consumer:
            assert [event.offset for event in polled(consumer)] == list(range(log.offsets("t")[3].stop))

    def test_a_group_that_was_away_reads_all_of_a_new_partition(self, log: Log) -> None:
        """Wherever a consumer that knows nothing of it would begin: the group has begun long ago."""
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        with log.consumer("t", group="g", start="latest") as consumer:
            log.append("t", numbered(0, 50))
            found = polled(consumer)
        log.alter_topic("t", partitions=4)
        log.append("t", numbered(50, 50))
        with log.consumer("t", group="g", start="latest") as consumer:
            check_in_order([*found, *polled(consumer)], range(100))
        with log.consumer("t", group="fresh", start="latest") as consumer:
            log.append("t", numbered(100, 50))
            check_in_order(polled(consumer), range(100, 150))

    def test_two_members_share_what_was_split(self, log: Log, other: Log) -> None:
        """Each key's events are handed out in order, over both members together."""
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        found: list[Event] = []
        with log.consumer("t", group="g") as one, other.consumer("t", group="g") as two:
            for turn in range(3):
                log.append("t", numbered(100 * turn, 100))
                for consumer in (one, two):
                    found += consumer.poll(events_max=13, timeout_s=0.05)
                log.alter_topic("t", partitions=2 ** (turn + 2))
            while len(found) < 300:
                for consumer in (one, two):
                    found += consumer.poll(events_max=50, timeout_s=0.05)
        check_in_order(found, range(300))

    @pytest.mark.covers("Kinesis")
    def test_a_source_sent_again_after_a_split_adds_nothing(self, log: Log, other: Log) -> None:
        """A named producer knows what the parent holds, with keys and without."""
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        log.create_topic("raw", partitions=2)
        for handle, count, partitions in ((log, 60, 4), (other, 90, 8), (log, 120, 16), (other, 120, 16)):
            with handle.producer(id="import", linger_ms=60_000) as producer:
                for number, row in enumerate(numbered(0, count)):
                    producer.send("t", row, sequence=number)
                    producer.send("raw", b"%d" % number, sequence=number)
                    if number == count - 20:
                        producer.flush()
                log.alter_topic("t", partitions=partitions)
                log.alter_topic("raw", partitions=partitions)
        with log.reader("t") as reader:
            check_in_order(polled(reader), range(120))
        assert sorted(int(event.value) for event in events_of(log, "raw")) == list(range(120))

    def test_a_table_has_the_newest_row_of_keys_that_moved(self, log: Log) -> None:
        """Rows from after the move win over those in the parent, deletions too, whatever is compacted meanwhile."""
        log.create_topic("t", NUMBERS, key="k", partitions=1, compact=True, tombstones="0 seconds")
        log.append("t", numbered(0, KEYS))
        log.alter_topic("t", partitions=4)
        log.append("t", numbered(KEYS, KEYS // 2))
        log.append("t", [{"k": f"k{number}", "_deleted": True} for number in range(5)])
        expected = {f"k{n % KEYS}": n for n in range(KEYS + KEYS // 2) if n % KEYS >= 5}
        for _ in range(4):
            rows = log.table("t").to_pylist()
            assert {row["k"]: row["n"] for row in rows} == expected
            assert len(rows) == len(expected)
            assert {row["k"]: row["n"] for row in log.snapshot("t")[0].to_pylist()} == expected
            log.tidy("t")

    def test_a_table_shows_no_row_that_a_removed_one_replaced(self, log: Log) -> None:
        """Retention may take a key's newest row from the new partition while an older one is left in the parent."""
        log.create_topic("t", "k STRING, n BIGINT, text STRING", key="k", partitions=1, segment_bytes=4096)
        log.append("t", [row | {"text": ""} for row in numbered(0, KEYS)])
        log.alter_topic("t", partitions=2, retention_bytes=2_000)
        for turn in range(1, 30):  # the parent gets nothing more, and the new partition more than it may keep
            rows = [row | {"text": "x" * 200} for row in numbered(turn * KEYS, KEYS)]
            log.append("t", [row for row in rows if _partition(row["k"], 2) == 1])
        log.tidy("t")
        assert log.offsets("t")[0].start == 0 < log.offsets("t")[1].start
        left = {row["k"]: row["n"] for row in log.table("t").to_pylist()}
        assert all(n < KEYS if _partition(key, 2) == 0 else n >= KEYS for key, n in left.items())
        assert sum(n < KEYS for n in left.values()) == sum(_partition(f"k{n}", 2) == 0 for n in range(KEYS))
        assert {row["k"]: row["n"] for row in log.snapshot("t")[0].to_pylist()} == left

    def test_what_is_bounded_stays_right(self, log: Log) -> None:
        """`read`, `offsets_at` and `snapshot` over a topic that was split."""
        log.create_topic("t", NUMBERS, key="k", partitions=2)
        log.append("t", numbered(0, 100))
        before = {number: span.stop for number, span in log.offsets("t").items()}
        log.alter_topic("t", partitions=4)
        log.append("t", numbered(100, 100))
        assert sorted(log.read("t")["n"].to_pylist()) == list(range(200))
        assert sorted(log.read("t", end=before)["n"].to_pylist()) == list(range(100))
        assert log.offsets_at("t", 0, by="appended") == dict.fromkeys(range(4), 0)
        _, positions = log.snapshot("t")
        log.append("t", numbered(200, 10))
        with log.reader("t", start=positions) as reader:
            check_in_order(polled(reader), range(200, 210))


class QueueSplitContract(LogCase):
    """What holds for queues whose topic gets more partitions."""

    @pytest.mark.covers("Kinesis")
    @pytest.mark.parametrize("order", ["key", "sticky"])
    def test_a_queue_in_order_waits_for_the_parent(self, log: Log, other: Log, order: Any) -> None:
        """As long as an event of the parent is out, none of a new partition is given: it may be of the same key."""
        log.create_topic("t", NUMBERS, key="k", partitions=1)
        log.append("t", numbered(0, KEYS))
        with other.queue("t", order=order) as queue:
            first = queue.lease(events_max=KEYS, timeout_s=1)
            assert len(first) == KEYS
            log.alter_topic("t", partitions=2)
            log.append("t", numbered(KEYS, KEYS))
            queue.ack(first[1:])
            meanwhile = queue.lease(timeout_s=0)
            assert {lease.event.partition for lease in meanwhile} <= {0}
            queue.ack([first[0], *meanwhile])
            rest: Sequence[Any] = ()
            while found := queue.lease(timeout_s=0.2):
                queue.ack(found)
                rest = [*rest, *found]
        check_in_order([lease.event for lease in (*first, *meanwhile, *rest)], range(2 * KEYS))

    def test_a_queue_without_order_does_not_wait(self, log: Log) -> None:
        """Whoever did not ask for order gets what is there."""
        log.create_topic("t", NUMBERS, key="k", partitions=1)
        log.append("t", numbered(0, KEYS))
        log.alter_topic("t", partitions=2)
        log.append("t", numbered(KEYS, KEYS))
        with log.queue("t") as queue:
            assert len(queue.lease(events_max=500, timeout_s=0)) == 2 * KEYS

    def test_an_id_from_before_is_known_in_the_new_partition(self, log: Log) -> None:
        """Duplicates are found across a split, with a key and without."""
        log.create_topic("t", partitions=1)
        with log.queue("t", duplicates_s=60) as queue:
            for _ in range(2):
                for number in range(10):
                    queue.send(b"keyed", key=b"k%d" % number, id=f"keyed {number}")
                    queue.send(b"alone", id=f"alone {number}")
                log.alter_topic("t", partitions=4)
            assert sorted(lease.event.value for lease in queue.lease(timeout_s=0)) == [b"alone"] * 10 + [b"keyed"] * 10
