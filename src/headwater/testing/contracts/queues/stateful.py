"""The contract of queues in a log that keeps their state itself: leases that are extended, delays, looking in, going back."""

from __future__ import annotations

import time

import pytest

from headwater.log.log import Log
from headwater.log.queue.depth import Depth
from headwater.model.errors import InvalidInput, LeaseExpired
from headwater.testing.contracts.case import ORDERS, LogCase, orders, refused
from headwater.testing.contracts.queues.case import drain, one


class WholeLeaseContract(LogCase):
    """What holds for leases where the log itself knows who has which event."""

    def test_acknowledgements_are_written_a_moment_later_by_themselves(self, log: Log, other: Log) -> None:
        """A consumer that is busy with other things need not call anything."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"x", b"y"])
        with log.queue("tasks") as queue, other.queue("tasks") as second:
            for lease in queue.lease():
                lease.ack()
            deadline = time.monotonic() + 5
            while second.depth().leased and time.monotonic() < deadline:
                time.sleep(0.005)
            assert second.depth() == Depth(ready=0, leased=0, scheduled=0, dead=0)

    @pytest.mark.covers("Google Cloud Pub/Sub")
    def test_a_lease_can_be_extended(self, log: Log, other: Log) -> None:
        """As often as needed; nobody else is given the event meanwhile."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"x"])
        with log.queue("tasks", lease_s=0.5) as queue, other.queue("tasks") as second:
            lease = one(queue)
            for _ in range(3):
                lease.extend(1.0)
                assert second.lease(timeout_s=0.2) == []
            lease.ack()
            queue.flush()
            assert second.lease(timeout_s=0.2) == []
            with refused(InvalidInput, "lease_s=0"):
                lease.extend(0)

    @pytest.mark.covers("Google Cloud Pub/Sub")
    def test_seeking_to_a_time_delivers_again(self, log: Log) -> None:
        """Everything from there on, acknowledged or not; leases from before count no more."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"old"])
        time.sleep(0.002)
        log.append("tasks", [b"new"])
        time.sleep(0.002)
        with log.queue("tasks") as queue:
            assert drain(queue) == [b"old", b"new"]
            log.append("tasks", [b"newest"])
            lease = one(queue)
            queue.seek(log.read("tasks", columns=["_appended"])["_appended"][1].as_py())
            with refused(LeaseExpired):
                queue.ack([lease])
            assert drain(queue) == [b"new", b"newest"]
            queue.seek("earliest")
            assert len(drain(queue)) == 3
            queue.seek("earliest")
            queue.seek("latest")
            assert drain(queue) == []

    def test_what_is_given_back_comes_again_after_its_delay(self, log: Log) -> None:
        """Not before, and others are not held up."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"a", b"b"])
        with log.queue("tasks") as queue:
            first, second = queue.lease()
            begun = time.time()
            first.nack(delay_s=0.6)
            second.nack()
            at_once = one(queue)
            assert (at_once.event.value, at_once.deliveries) == (b"b", 2)
            assert queue.depth() == Depth(ready=0, leased=1, scheduled=1, dead=0)
            later = one(queue)
            assert (later.event.value, later.deliveries) == (b"a", 2)
            assert time.time() - begun >= 0.6
            with refused(LeaseExpired):
                queue.extend([second, later], 5)

    def test_browsing_leases_nothing(self, log: Log) -> None:
        """It shows what is ready, leased and scheduled, and how often it was delivered."""
        log.create_topic("orders", ORDERS, key="id", partitions=1)
        log.append("orders", orders(5))
        with log.queue("orders") as queue:
            first, second, third = queue.lease(events_max=3)
            first.ack()
            second.nack(delay_s=60)
            for _ in range(2):
                entries = queue.browse()
                assert [entry.event.value["amount"] for entry in entries] == [1.0, 2.0, 3.0, 4.0]
                assert [entry.state for entry in entries] == ["scheduled", "leased", "ready", "ready"]
                assert [entry.deliveries for entry in entries] == [1, 1, 0, 0]
            assert len(queue.browse(events_max=3)) == 3
            assert queue.depth() == Depth(ready=2, leased=1, scheduled=1, dead=0)
            queue.ack([third])
            assert [lease.event.value["amount"] for lease in queue.lease()] == [3.0, 4.0]

    def test_the_floor_says_what_every_group_has_acknowledged(self, log: Log) -> None:
        """Retention may free what stands below; a group that acknowledged less holds it back."""
        log.create_topic("tasks", partitions=2)
        assert log.acked_floor("tasks") == {}
        for partition_key in (b"a", b"b", b"c", b"d"):
            log.append("tasks", [{"key": partition_key, "value": b"%d" % n} for n in range(10)])
        ends = {number: offsets.stop for number, offsets in log.offsets("tasks").items()}
        with log.queue("tasks", group="quick") as quick, log.queue("tasks", group="slow") as slow:
            drain(quick)
            assert quick.floors() == ends
            assert log.acked_floor("tasks") == dict.fromkeys(ends, 0)
            leases = slow.lease(timeout_s=0)
            held = next(lease for lease in leases if lease.event.offset == 5)
            slow.ack(lease for lease in leases if lease is not held)
            number = held.event.partition
            assert log.acked_floor("tasks") == ends | {number: 5}
            held.ack()
            slow.flush()
            assert log.acked_floor("tasks") == ends

    def test_a_window_grows_with_what_is_out(self, log: Log, other: Log) -> None:
        """Far more leases than a window has places at first, settled in any order."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"%d" % n for n in range(20_000)])
        with log.queue("tasks") as queue, other.queue("tasks") as second:
            early = second.lease(events_max=10)
            leases = queue.lease(events_max=15_000)
            assert len(leases) == 15_000
            rest = second.lease(events_max=10_000)
            queue.ack(leases[::2])
            queue.nack(leases[1::2])
            second.ack(early)
            second.ack(rest)
            assert [int(value) for value in drain(second)] == list(range(11, 15_010, 2))
            assert queue.floors() == {0: 20_000}
