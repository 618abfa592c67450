"""The contract of dead letters: what fails too often is parked with its reason, and sent back when somebody asks."""

from __future__ import annotations

import pytest

from headwater.log.log import Log
from headwater.log.queue.depth import Depth
from headwater.model.errors import InvalidInput, LeaseExpired
from headwater.testing.contracts.case import ORDERS, order, refused, values_of
from headwater.testing.contracts.queues.case import QueueCase, fail, one, take


class DeadLetterContract(QueueCase):
    """What holds for dead letters."""

    @pytest.mark.covers("IBM MQ")
    @pytest.mark.covers("Azure Service Bus")
    def test_an_event_that_fails_too_often_becomes_a_dead_letter(self, log: Log) -> None:
        """After exactly `deliveries_max` deliveries, with reason, place and count; the others are not disturbed."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [{"value": b"fine"}, {"key": b"k", "value": b"poison", "_headers": {"trace": b"t"}}])
        with log.queue("tasks", group="w", deliveries_max=3) as queue:
            fine, poison = take(queue, 2)
            fine.ack()
            counts = [poison.deliveries]
            poison.nack(reason="no such customer")
            while leases := queue.lease(timeout_s=0):
                counts.append(leases[0].deliveries)
                leases[0].nack(reason=f"no such customer, {len(counts)}")
            assert counts == [1, 2, 3]
            assert self.is_left(queue, dead=1)
            (dead,) = queue.dead()
            assert (dead.key, dead.value, dead.topic) == (b"k", b"poison", "tasks.dead")
            assert dead.headers is not None
            at = int(dead.headers["_dead_at"])
            assert dead.headers == {
                "trace": b"t",
                "_dead_reason": b"no such customer, 3",
                "_dead_topic": b"tasks",
                "_dead_partition": b"0",
                "_dead_offset": b"1",
                "_dead_deliveries": b"3",
                "_dead_at": b"%d" % at,
                "_group": b"w",
            }
            assert not self.queues_can_be_counted or queue.floors() == {0: 2}

    def test_a_lease_that_expires_too_often_is_a_dead_letter_too(self, log: Log) -> None:
        """The reason says so."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"hangs"])
        with log.queue("tasks", deliveries_max=2, lease_s=self.lease_s_min) as queue:
            assert [one(queue).deliveries for _ in range(2)] == [1, 2]
            assert queue.lease(timeout_s=self.lease_s_min + 0.5) == []
            (dead,) = queue.dead()
            assert dead.headers is not None and dead.headers["_dead_reason"] == b"lease expired"

    def test_a_consumer_can_reject_an_event_at_once(self, log: Log) -> None:
        """Another delivery would not help."""
        log.create_topic("orders", ORDERS, key="id", time="at", partitions=1)
        log.append("orders", [order(1), order(2), {"id": "gone", "_deleted": True}])
        with log.queue("orders", dead="bad.orders") as queue:
            for lease in take(queue, 3):
                lease.reject("amount is odd")
            assert sorted(str(event.key) for event in queue.dead()) == ["gone", "o1", "o2"]
            assert [event.value for event in queue.dead() if event.key == "gone"] == [None]
            assert log.topic("bad.orders").schema == log.topic("orders").schema

    def test_dead_letters_are_sent_back_to_their_group_only(self, log: Log, other: Log) -> None:
        """As new events of the topic, counted from one; other groups have had them and are not bothered."""
        log.create_topic("orders", ORDERS, key="id", partitions=1)
        log.append("orders", [order(n) for n in range(6)])
        with (
            log.queue("orders", group="a", deliveries_max=1) as queue,
            other.queue("orders", group="b", deliveries_max=1) as second,
        ):
            queue.nack(take(queue, 6), reason="first try")
            second.nack(take(second, 2))
            second.ack(take(second, 4))
            assert (len(queue.dead()), len(second.dead())) == (6, 2)
            assert queue.redrive(events_max=4) == 4
            assert queue.redrive() == 2
            assert queue.redrive() == 0
            assert (len(queue.dead()), len(second.dead())) == (0, 2)
            leases = take(queue, 6)
            assert sorted(lease.event.value["amount"] for lease in leases) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
            assert {lease.deliveries for lease in leases} == {1}
            assert second.lease(timeout_s=0) == []
            assert self.is_left(second, dead=2)
            queue.nack(leases)
            assert self.is_left(queue, dead=6)
            assert len(values_of(log, "orders")) == 12

    def test_dead_letters_follow_the_topics_columns(self, log: Log) -> None:
        """A column that the topic gained stands in the dead letters too."""
        log.create_topic("t", "n INT", partitions=1)
        log.append("t", [{"n": 1}])
        with log.queue("t", deliveries_max=1) as queue:
            fail(queue, 1)
            log.alter_topic("t", schema="n INT, note STRING")
            log.append("t", [{"n": 2, "note": "x"}])
            fail(queue, 1)
            assert [event.value for event in queue.dead()] == [{"n": 1, "note": None}, {"n": 2, "note": "x"}]
            assert queue.redrive() == 2
            assert [lease.event.value["note"] for lease in take(queue, 2)] == [None, "x"]


class WholeDeadLetterContract(QueueCase):
    """What holds for dead letters where the log itself keeps the state of queues."""

    def test_dead_letters_have_none_of_their_own(self, log: Log) -> None:
        """Their topic read as a queue takes acknowledgements, and what is given back comes again for ever."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"x"])
        with log.queue("tasks", dead="bad.tasks") as queue:
            one(queue).reject("no use")
            assert len(queue.dead()) == 1
            with log.queue("bad.tasks") as of_dead, refused(InvalidInput, "dead letters"):
                one(of_dead).reject("again")

    def test_without_a_limit_an_event_comes_for_ever(self, log: Log) -> None:
        """As long as somebody gives it back."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"x"])
        with log.queue("tasks", deliveries_max=None) as queue:
            fail(queue, 300)
            assert queue.lease()[0].deliveries == 255
            assert queue.dead() == []

    @pytest.mark.covers("IBM MQ")
    def test_a_unit_of_work_over_several_queues_happens_as_one(self, log: Log, other: Log) -> None:
        """Acknowledgements in two queues and appends to two topics: all of it, or nothing and the events come again."""
        for name in ("orders", "payments", "shipments", "audit"):
            log.create_topic(name, partitions=2)
        log.append("orders", [{"key": b"%d" % n, "value": b"order"} for n in range(8)])
        log.append("payments", [b"paid"])
        with log.queue("orders") as orders, log.queue("payments") as payments, other.queue("orders") as second:
            with log.transaction() as tx:
                tx.append("shipments", [b"ship"])
                tx.ack(orders.lease() + payments.lease())
                tx.append("audit", [b"shipped"])
            assert values_of(log, "shipments") == [b"ship"] and values_of(log, "audit") == [b"shipped"]
            assert orders.depth() == payments.depth() == Depth(ready=0, leased=0, scheduled=0, dead=0)
            log.append("orders", [b"late", b"failing"])
            failing = log.transaction()

            def fail_in_it() -> None:
                with failing as tx:
                    tx.append("shipments", [b"never"])
                    tx.ack(orders.lease(events_max=1))
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                fail_in_it()
            assert [lease.deliveries for lease in orders.lease(timeout_s=0)] == [2, 1]
            orders.seek("latest")
            log.append("orders", [b"expires"])
            log.append("payments", [b"paid again"])
            (lease,), paid = orders.lease(), payments.lease()
            orders.nack([lease])
            (again,) = second.lease()
            with refused(LeaseExpired), log.transaction() as tx:
                tx.append("shipments", [b"never"])
                tx.ack([*paid, lease])
            assert values_of(log, "shipments") == [b"ship"]
            assert (orders.depth().leased, payments.depth().leased) == (1, 1)
            again.ack()
            payments.ack(paid)
