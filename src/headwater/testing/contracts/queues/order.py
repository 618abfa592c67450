"""The contract of when a queue delivers: by key in order, at a time, and once for an id."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest

from headwater.log.log import Log
from headwater.log.queue.depth import Depth
from headwater.model.errors import InvalidInput, LeaseExpired
from headwater.testing.contracts.case import LogCase, refused


class QueueOrderContract(LogCase):
    """What holds for order, scheduled delivery and duplicates."""

    @pytest.mark.covers("Azure Service Bus")
    @pytest.mark.covers("concept: redelivery and order")
    def test_with_order_by_key_one_event_of_each_key_is_out(self, log: Log, other: Log) -> None:
        """Whatever is given back, by whichever consumer, each key's events are done in the order they were appended."""
        log.create_topic("steps", "user STRING, n INT", key="user", partitions=2)
        log.append("steps", [{"user": f"u{n % 7}", "n": n} for n in range(210)])
        done: dict[str, list[int]] = defaultdict(list)
        out: set[str] = set()
        chance = random.Random(7)
        with (
            log.queue("steps", order="key", deliveries_max=None) as first,
            other.queue("steps", order="key", deliveries_max=None) as second,
        ):
            while sum(map(len, done.values())) < 210:
                for queue in (first, second):
                    leases = queue.lease(events_max=chance.randint(1, 10), timeout_s=0)
                    keys = [lease.event.key for lease in leases]
                    assert len(set(keys)) == len(keys) and not out & set(keys)
                    out |= set(keys)
                    for lease in leases:
                        if chance.random() < 0.3:
                            lease.nack(delay_s=chance.choice([0, 0.002]))
                        else:
                            done[lease.event.key].append(lease.event.value["n"])
                            queue.ack([lease])
                        out.discard(lease.event.key)
        assert dict(done) == {f"u{user}": list(range(user, 210, 7)) for user in range(7)}

    @pytest.mark.covers("concept: redelivery and order")
    def test_without_order_redelivery_reorders(self, log: Log) -> None:
        """What was given back comes after what was behind it; events of one key may be out together."""
        log.create_topic("steps", "user STRING, n INT", key="user", partitions=1)
        log.append("steps", [{"user": "u", "n": n} for n in range(3)])
        with log.queue("steps") as queue:
            (first,) = queue.lease(events_max=1)
            first.nack(delay_s=0.4)
            rest = queue.lease(events_max=5)
            assert [lease.event.value["n"] for lease in rest] == [1, 2]
            assert [lease.event.value["n"] for lease in queue.lease()] == [0]

    def test_a_dead_letter_makes_way_for_the_next_of_its_key(self, log: Log) -> None:
        """And events without a key wait for nobody."""
        log.create_topic("steps", "user STRING, n INT", key="user", partitions=1)
        log.append("steps", [{"user": "u", "n": 0}, {"user": "u", "n": 1}, {"n": 2}, {"n": 3}])
        with log.queue("steps", order="key", deliveries_max=1) as queue:
            leases = queue.lease(timeout_s=0)
            assert [lease.event.value["n"] for lease in leases] == [0, 2, 3]
            leases[0].nack()
            assert [lease.event.value["n"] for lease in queue.lease(timeout_s=0)] == [1]

    def test_handles_of_a_queue_agree_on_its_order(self, log: Log, other: Log) -> None:
        """A consumer that did not keep to it would break it for all."""
        log.create_topic("tasks", partitions=1)
        log.queue("tasks", group="a", order="key", dead="d").close()
        with refused(InvalidInput, "order='key'"):
            other.queue("tasks", group="a")
        with refused(InvalidInput, "dead='d'"):
            other.queue("tasks", group="a", order="key", dead="e")
        other.queue("tasks", group="b").close()

    @pytest.mark.covers("Azure Service Bus")
    def test_a_scheduled_event_is_never_early(self, log: Log) -> None:
        """By a delay or at a time; what is ready is not held up by it."""
        log.create_topic("tasks", partitions=1)
        with log.queue("tasks") as queue:
            soon = time.time() + 0.9
            queue.send(b"later", at=datetime.fromtimestamp(soon, UTC))
            queue.send(b"sooner", delay_s=0.6)
            queue.send(b"far", at=datetime.now(UTC) + timedelta(days=300))
            queue.send(b"past", at=1)
            queue.send(b"now")
            assert queue.depth() == Depth(ready=2, leased=0, scheduled=3, dead=0)
            leases = queue.lease(timeout_s=0)
            assert [lease.event.value for lease in leases] == [b"past", b"now"]
            assert queue.depth() == Depth(ready=0, leased=2, scheduled=3, dead=0)
            (sooner,) = queue.lease(timeout_s=5)
            assert sooner.event.value == b"sooner"
            assert sooner.deliveries == 1
            (later,) = queue.lease(timeout_s=5)
            assert time.time() >= soon
            assert later.event.value == b"later"
            queue.ack([*leases, sooner, later])
            assert [entry.event.value for entry in queue.browse()] == [b"far"]

    def test_an_event_scheduled_for_later_does_not_hold_up_its_key(self, log: Log) -> None:
        """It has not come yet; when it has, it waits its turn."""
        log.create_topic("tasks", partitions=1)
        with log.queue("tasks", order="key") as queue:
            queue.send(b"later", key=b"k", delay_s=0.4)
            queue.send(b"now", key=b"k")
            (now,) = queue.lease(timeout_s=0)
            assert now.event.value == b"now"
            time.sleep(0.42)
            assert queue.lease(timeout_s=0) == []
            now.ack()
            assert [lease.event.value for lease in queue.lease(timeout_s=0)] == [b"later"]

    @pytest.mark.covers("Azure Service Bus")
    def test_an_id_is_delivered_once_within_the_window(self, log: Log, other: Log) -> None:
        """The second is acknowledged without delivery, whichever consumer meets it; after the window it is new."""
        log.create_topic("tasks", partitions=4)
        with log.queue("tasks", duplicates_s=60) as queue, other.queue("tasks", duplicates_s=60) as second:
            for name in ("a", "b", "a", "c", "b", "a"):
                queue.send(name.encode(), id=name)
            queue.send(b"no id")
            queue.send(b"no id")
            (lease,) = second.lease(events_max=1, timeout_s=0)
            found = [lease, *queue.lease(timeout_s=0)]
            assert sorted(some.event.value for some in found) == [b"a", b"b", b"c", b"no id", b"no id"]
            queue.send(b"a again", id="a")
            assert second.lease(timeout_s=0) == []
        with log.queue("tasks", group="forgetful", duplicates_s=0.05) as queue:
            queue.seek("latest")
            queue.send(b"first", id="x")
            time.sleep(0.06)
            queue.send(b"second", id="x")
            assert [lease.event.value for lease in queue.lease(timeout_s=0)] == [b"first", b"second"]

    def test_without_a_window_ids_mean_nothing(self, log: Log) -> None:
        """They are headers like others."""
        log.create_topic("tasks", partitions=1)
        with log.queue("tasks") as queue:
            queue.send(b"x", id="a", headers={"trace": b"t"})
            place = queue.send(b"x", id="a")
            assert (place.topic, place.partition, place.offset) == ("tasks", 0, 1)
            leases = queue.lease(timeout_s=0)
            assert [lease.event.headers for lease in leases] == [{"trace": b"t", "_id": b"a"}, {"_id": b"a"}]

    @pytest.mark.covers("Azure Service Bus")
    def test_a_deferred_event_comes_when_it_is_recalled(self, log: Log, other: Log) -> None:
        """By its position, whoever asks; until then it is out of the way, of its key too."""
        log.create_topic("steps", "user STRING, n INT", key="user", partitions=2)
        log.append("steps", [{"user": "u", "n": n} for n in range(3)])
        with (
            log.queue("steps", order="key", deliveries_max=1, lease_s=0.05) as queue,
            other.queue("steps", order="key", deliveries_max=1) as second,
        ):
            (lease,) = queue.lease(timeout_s=0)
            place = lease.defer()
            with refused(LeaseExpired):
                lease.defer()
            time.sleep(0.06)
            for n in (1, 2):
                (following,) = second.lease(timeout_s=0)
                assert following.event.value["n"] == n
                second.ack([following])
            assert second.lease(timeout_s=0) == []
            assert second.depth() == Depth(ready=0, leased=0, scheduled=1, dead=0)
            assert second.recall([place]) == 1
            assert second.recall([place]) == 0
            assert [lease.event.value["n"] for lease in queue.lease(timeout_s=0)] == [0]

    @pytest.mark.covers("Azure Service Bus")
    def test_deferring_is_no_delivery(self, log: Log) -> None:
        """However often, it does not bring an event nearer to the dead letters."""
        log.create_topic("tasks", partitions=1)
        log.append("tasks", [b"a", b"b"])
        with log.queue("tasks", deliveries_max=2) as queue:
            places = queue.defer(queue.lease())
            for _ in range(3):
                assert queue.lease(timeout_s=0) == []
                assert queue.recall(places[1:]) == 1
                (lease,) = queue.lease(timeout_s=0)
                assert (lease.event.value, lease.deliveries) == (b"b", 1)
                assert lease.defer() == places[1]

    @pytest.mark.covers("ActiveMQ")
    def test_a_selector_leaves_the_rest_to_others(self, log: Log, other: Log) -> None:
        """Each handle is given what it wants, however much else stands before it; nothing counts as delivered to it."""
        log.create_topic("tasks", "n INT, kind STRING", partitions=2)
        log.append("tasks", [{"n": n, "kind": "large" if n % 50 == 49 else "small"} for n in range(1_000)])
        with (
            log.queue("tasks", where=lambda event: event.value["kind"] == "large") as picky,
            other.queue("tasks") as others,
        ):
            large = picky.lease(events_max=15, timeout_s=0)
            assert len(large) == 15
            picky.ack(large)
            assert len(picky.lease(events_max=500, timeout_s=0)) == 5
            with log.queue("tasks", where=lambda event: bool(1 // 0)) as broken, pytest.raises(ZeroDivisionError):
                broken.lease(timeout_s=0)
            assert picky.lease(timeout_s=0) == []
            rest = others.lease(events_max=2_000, timeout_s=0)
            assert {lease.deliveries for lease in rest} == {1}
            assert sorted(lease.event.value["n"] for lease in rest) == [n for n in range(1_000) if n % 50 != 49]

    @pytest.mark.covers("ActiveMQ")
    def test_a_key_sticks_to_one_consumer(self, log: Log, other: Log) -> None:
        """As long as it is there; then another goes on with it, in order. Each consumer has some of the keys."""
        log.create_topic("steps", "user STRING, n INT", key="user", partitions=2)
        log.append("steps", [{"user": f"u{n % 40}", "n": n} for n in range(400)])
        done: list[dict[str, list[int]]] = [defaultdict(list), defaultdict(list)]
        first, second = (handle.queue("steps", order="sticky") for handle in (log, other))
        for queue in (first, second):
            queue.nack(queue.lease(events_max=1, timeout_s=0))
        time.sleep(0.15)
        for _ in range(4):
            for queue, mine in zip((first, second), done, strict=True):
                leases = queue.lease(timeout_s=0)
                for lease in leases:
                    mine[lease.event.key].append(lease.event.value["n"])
                queue.ack(leases)
        assert done[0] and done[1] and not set(done[0]) & set(done[1])
        assert len(done[0]) + len(done[1]) == 40
        second.close()
        while leases := first.lease(timeout_s=0.3):
            for lease in leases:
                done[lease.event.key in done[1]][lease.event.key].append(lease.event.value["n"])
            first.ack(leases)
        first.close()
        assert done[0] | done[1] == {f"u{user}": list(range(user, 400, 40)) for user in range(40)}
