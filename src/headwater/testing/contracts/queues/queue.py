"""The contract of queues: every event is leased to one consumer at a time, acknowledged or delivered again, and never lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import pytest

from headwater.log.log import Log
from headwater.model.errors import Closed, InvalidInput, InvalidName, LeaseExpired, TopicNotFound
from headwater.testing.contracts.case import ORDERS, order, refused, values_of
from headwater.testing.contracts.queues.case import QueueCase, drain, one, take
from headwater.testing.contracts.queues.dead_letters import DeadLetterContract, WholeDeadLetterContract
from headwater.testing.contracts.queues.order import QueueOrderContract
from headwater.testing.contracts.queues.requests import RequestContract
from headwater.testing.contracts.queues.stateful import WholeLeaseContract
from headwater.testing.contracts.split import QueueSplitContract


class LeaseContract(QueueCase):
    """What holds for leases and acknowledgements."""

    def test_what_is_acknowledged_does_not_come_again(self, log: Log) -> None:
        """Each event is delivered once to the group, in the order of its partition, whatever handle asks."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"%d" % n for n in range(1_200)])
        with log.queue("tasks", group="workers") as queue:
            leases = queue.lease(events_max=500, timeout_s=0)
            assert [lease.event.value for lease in leases] == [b"%d" % n for n in range(500)]
            assert {lease.deliveries for lease in leases} == {1}
            for lease in leases:
                lease.ack()
            assert drain(queue) == [b"%d" % n for n in range(500, 1_200)]
            assert self.is_left(queue)
        with log.queue("tasks", group="workers") as again:
            assert again.lease(timeout_s=0) == []
            log.append("tasks", [b"new"])
            assert one(again).event.value == b"new"

    @pytest.mark.covers("concept: load balancing and fan-out")
    def test_groups_are_given_every_event_and_share_it_among_themselves(self, log: Log, other: Log) -> None:
        """Two groups of three consumers: every event once per group, and no consumer idle."""
        log.create_topic("tasks", partitions=2)
        for start in range(0, 600, 20):
            log.append("tasks", [{"key": b"%d" % n, "value": b"%d" % n} for n in range(start, start + 20)])
        seen: dict[str, list[list[bytes]]] = {}
        for group in ("a", "b"):
            handles = [handle.queue("tasks", group=group) for handle in (log, other, log)]
            seen[group] = [[] for _ in handles]
            deadline = time.monotonic() + 60
            while sum(map(len, seen[group])) < 600 and time.monotonic() < deadline:
                for number, handle in enumerate(handles):
                    leases = handle.lease(events_max=20, timeout_s=0)
                    seen[group][number] += [lease.event.value for lease in leases]
                    handle.ack(leases)
            for handle in handles:
                handle.close()
        for shares in seen.values():
            assert sorted(int(value) for share in shares for value in share) == list(range(600))
            assert all(shares)
        assert len(values_of(log, "tasks")) == 600

    def test_a_lease_is_nobody_elses_until_it_expires(self, log: Log, other: Log) -> None:
        """Then the event comes again with a higher count, and the late acknowledgement is refused and changes nothing."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"x"])
        lease_s = 0.6 if self.lease_s_min < 0.6 else 2 * self.lease_s_min
        with log.queue("tasks", lease_s=lease_s) as queue, other.queue("tasks", lease_s=30) as second:
            begun = time.time()
            first = one(queue)
            assert second.lease(timeout_s=0.05) == []
            again = one(second)
            assert time.time() - begun >= lease_s
            assert (again.event, again.deliveries) == (first.event, 2)
            with refused(LeaseExpired, "1 lease"):
                queue.ack([first])
            assert queue.counters()["expired"] == 1
            assert self.is_left(second, leased=1)
            second.ack([again])
            assert self.is_left(second)

    def test_a_gathered_acknowledgement_that_came_too_late_is_told_by_flush(self, log: Log, other: Log) -> None:
        """Once; the event belongs to the other consumer."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"x"])
        with log.queue("tasks", lease_s=self.lease_s_min) as queue, other.queue("tasks") as second:
            late = one(queue)
            again = one(second)
            late.ack()
            with refused(LeaseExpired):
                queue.flush()
            queue.flush()
            again.ack()
            second.flush()

    def test_acknowledging_twice_is_acknowledging_once(self, log: Log) -> None:
        """By the lease or by the queue."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"x"])
        with log.queue("tasks") as queue:
            lease = one(queue)
            lease.ack()
            lease.ack()
            queue.ack([lease])
            queue.flush()
            assert queue.counters()["acked"] == 1

    @pytest.mark.covers("concept: head-of-line blocking")
    def test_one_slow_event_delays_nobody(self, log: Log, other: Log) -> None:
        """Its consumer sits on it; everything behind it in the same partition is done by others."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"slow"])
        log.append("tasks", [b"%d" % n for n in range(1_500)])
        with log.queue("tasks") as queue, other.queue("tasks") as second:
            (slow,) = queue.lease(events_max=1)
            assert drain(second) == [b"%d" % n for n in range(1_500)]
            assert not self.queues_can_be_counted or second.floors() == {0: 0}
            slow.ack()
            queue.flush()
            assert not self.queues_can_be_counted or second.floors() == {0: 1_501}
            assert second.lease(timeout_s=0) == []

    @pytest.mark.covers("Qpid")
    def test_credit_limits_what_a_handle_has_out(self, log: Log, other: Log) -> None:
        """A credit of n delivers at most n unacknowledged; each settled lease makes room for another."""
        log.create_topic("tasks", partitions=2)
        log.append("tasks", [{"key": b"%d" % n, "value": b"%d" % n} for n in range(50)])
        with log.queue("tasks", credit=7) as queue, other.queue("tasks") as unlimited:
            leases = take(queue, 7)
            assert queue.lease(timeout_s=0.02) == []
            leases[0].ack()
            leases[1].nack()
            leases[2].ack()
            assert len(take(queue, 3)) == 3
            assert queue.lease(timeout_s=0) == []
            assert not self.queues_can_be_counted or len(unlimited.lease(timeout_s=0)) == 50 - 2 - 7

    def test_credit_comes_back_when_leases_expire(self, log: Log) -> None:
        """A lease that ran out is not out any more."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"a", b"b"])
        with log.queue("tasks", credit=1, lease_s=self.lease_s_min) as queue:
            assert one(queue).event.value == b"a"
            assert one(queue).deliveries == 2

    def test_closing_gives_back_what_was_not_settled(self, log: Log, other: Log) -> None:
        """At once, not when the leases end; and the handle is of no use any more."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"done", b"not done"])
        with other.queue("tasks") as second:
            queue = log.queue("tasks")
            done, pending = queue.lease()
            done.ack()
            queue.close()
            queue.close()
            assert one(second).event.value == b"not done"
            with refused(Closed):
                pending.ack()
            for use in (queue.lease, queue.depth, queue.flush, queue.browse):
                with refused(Closed):
                    use()

    def test_closing_the_log_writes_acknowledgements(self, open_log: object, log: Log, other: Log) -> None:
        """As closing the queue does."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"x"])
        queue = other.queue("tasks")
        one(queue).ack()
        queue.close()
        assert log.queue("tasks").lease(timeout_s=0) == []

    def test_a_consumer_waits_until_something_comes(self, log: Log, other: Log) -> None:
        """It sleeps, and has the event soon after its append."""
        log.create_topic("tasks", partitions=2)
        with log.queue("tasks") as queue:
            begun = time.monotonic()
            assert queue.lease(timeout_s=0.1) == []
            assert time.monotonic() - begun >= 0.1
            timer = threading.Timer(0.05, lambda: other.append("tasks", [b"x"]))
            timer.start()
            assert one(queue).event.value == b"x"
            timer.join()

    def test_tasks_of_asyncio_lease_and_acknowledge(self, log: Log) -> None:
        """Others run while one waits."""
        log.create_topic("tasks", partitions=1)

        async def work() -> list[bytes]:
            with log.queue("tasks") as queue:
                waiting = asyncio.create_task(queue.lease_async(timeout_s=10))
                await asyncio.sleep(0.02)
                assert not waiting.done()
                log.append("tasks", [b"a", b"b"])
                leases = await waiting
                await queue.ack_async(leases)
                assert await queue.lease_async(timeout_s=0) == []
                return [lease.event.value for lease in leases]

        assert asyncio.run(work()) == [b"a", b"b"]

    def test_many_threads_share_one_handle(self, log: Log) -> None:
        """Every event is done once."""
        log.create_topic("tasks", partitions=3)
        log.append("tasks", [{"key": b"%d" % n, "value": b"%d" % n} for n in range(3_000)])
        done: list[bytes] = []
        with log.queue("tasks") as queue:

            def work() -> None:
                while leases := queue.lease(events_max=50, timeout_s=0):
                    for lease in leases:
                        done.append(lease.event.value)
                        lease.ack()

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            queue.flush()
            assert Counter(map(int, done)) == Counter(range(3_000))
            assert self.is_left(queue)

    def test_what_is_given_back_comes_again(self, log: Log, other: Log) -> None:
        """To anybody of the group, with a higher count; what was given back is not to be acknowledged any more."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"a", b"b"])
        with log.queue("tasks") as queue, other.queue("tasks") as second:
            first, last = take(queue, 2)
            first.nack()
            again = one(second)
            assert (again.event, again.deliveries) == (first.event, 2)
            with refused(LeaseExpired):
                queue.nack([first])
            queue.ack([last])
            again.ack()
            second.flush()
            assert queue.lease(timeout_s=0) == []
            assert self.is_left(queue)

    @pytest.mark.covers("ActiveMQ")
    def test_a_subscription_outlives_its_consumers(self, log: Log, other: Log) -> None:
        """What came while nobody was there is delivered to whoever comes next, from where the group had stopped."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"a", b"b"])
        with log.queue("tasks", group="durable") as queue:
            queue.ack(queue.lease(events_max=1))
        log.append("tasks", [b"c"])
        with other.queue("tasks", group="durable") as queue:
            assert [lease.event.value for lease in take(queue, 2)] == [b"b", b"c"]

    def test_a_topic_made_anew_has_a_queue_that_knows_nothing(self, log: Log) -> None:
        """The old handle says so; the new one begins with the first event."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"a", b"b", b"c"])
        old = log.queue("tasks")
        assert len(drain(old)) == 3
        log.delete_topic("tasks")
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"x"])
        with refused(TopicNotFound, "created again"):
            old.lease(timeout_s=0)
        with log.queue("tasks") as queue:
            assert drain(queue) == [b"x"]

    def test_senseless_settings_are_refused(self, log: Log) -> None:
        """At once, with what would do."""
        log.create_topic("tasks", partitions=1)
        for settings in (
            {"lease_s": 0},
            {"lease_s": "long"},
            {"deliveries_max": 0},
            {"deliveries_max": 255},
            {"order": "time"},
            {"credit": 0},
            {"duplicates_s": -1},
        ):
            with refused(InvalidInput):
                log.queue("tasks", **settings)
        for group in ("", "a/b", ".."):
            with refused(InvalidName):
                log.queue("tasks", group=group)
        with refused(TopicNotFound):
            log.queue("nothing")
        with log.queue("tasks") as queue:
            with refused(InvalidInput):
                queue.lease(events_max=0)
            with refused(InvalidInput):
                queue.send(b"x", delay_s=1, at=5)
            for given in (["x"], "x", 5, None, [None]):
                for settle in (queue.ack, queue.nack):
                    with refused(InvalidInput, "queue.lease()"):
                        settle(given)  # type: ignore[arg-type]
            log.append("tasks", [b"x"])
            with log.queue("tasks", group="another") as another, refused(InvalidInput, "another queue"):
                queue.ack([one(another)])

    def test_an_order_with_a_schema_is_leased_as_a_reader_would_read_it(self, log: Log) -> None:
        """Columns, keys, times and headers are the same."""
        log.create_topic("orders", ORDERS, key="id", time="at", partitions=1)
        log.append("orders", [order(1) | {"_headers": {"trace": b"t"}}, order(2)])
        with log.queue("orders") as queue, log.reader("orders") as reader:
            assert [lease.event for lease in queue.lease()] == reader.poll()


class QueueContract(LeaseContract, DeadLetterContract, RequestContract):
    """What every queue promises, whoever keeps its state."""


class WholeQueueContract(
    QueueContract, WholeLeaseContract, WholeDeadLetterContract, QueueOrderContract, QueueSplitContract
):
    """And what a queue promises whose state we keep: order, delays, looking in, going back, units of work, partitions added."""
