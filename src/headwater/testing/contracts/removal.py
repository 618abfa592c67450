"""The contract of removing groups: what a group has done is forgotten, nothing else is, and nobody who lives loses his work."""

from __future__ import annotations

import pytest

from headwater.log.log import Log
from headwater.model.errors import Closed, GroupInUse, GroupNotFound
from headwater.testing.contracts.case import LogCase, refused, values_of
from headwater.testing.contracts.groups.case import drain, numbered


class RemovalContract(LogCase):
    """What holds when a group is removed."""

    def test_a_removed_group_begins_anew(self, log: Log, other: Log) -> None:
        """It is not there any more; one of its name reads everything again, and others stand where they stood."""
        numbered(log, "events", partitions=2, count=20)
        for group in ("gone", "kept"):
            with log.consumer("events", group=group) as consumer:
                assert len(drain(consumer)) == 20
        with other.consumer("events", group="gone") as member:
            drain(member)
            with refused(GroupInUse, "gone"):
                log.delete_group("gone")
        log.delete_group("gone")
        assert other.groups() == log.groups() == ["kept"]
        for act in (log.group, other.group, log.delete_group):
            with refused(GroupNotFound, "gone"):
                act("gone")
        assert log.group("kept").lag.events == 0
        for reading in (other, log):
            with reading.consumer("events", group="gone") as consumer:
                assert len(drain(consumer)) == (20 if reading is other else 0)
        assert log.groups() == ["gone", "kept"] and log.group("gone").lag.events == 0

    def test_a_removed_queue_begins_anew(self, log: Log, other: Log) -> None:
        """What was leased, acknowledged and noted is forgotten; events, dead letters and other groups stay."""
        log.create_topic("tasks", partitions=2)
        log.create_topic("done")
        log.append("tasks", [{"key": b"%d" % n, "value": b"%d" % n} for n in range(10)])
        for group in ("gone", "kept"):
            with log.queue("tasks", group=group, deliveries_max=1) as queue:
                leases = queue.lease()
                with log.transaction() as unit:
                    unit.append("done", [b"five"])
                    unit.ack(leases[:5])
                leases[5].reject("cannot be done")
                queue.ack(leases[6:])
        early = other.queue("tasks", group="gone")
        looking = other.queue("tasks", group="gone")
        assert looking.depth().ready == 0
        with log.queue("tasks", group="gone") as queue:
            queue.lease(timeout_s=0)
            with refused(GroupInUse):
                other.delete_queue("tasks", group="gone")
        log.delete_queue("tasks", group="gone")
        assert [made["group"] for made in other.store.queues() if made["topic"] == "tasks"] == ["kept"]
        assert "tasks.gone.acks" not in log.topics() and "tasks.kept.acks" in log.topics()
        with refused(GroupNotFound, "gone", "tasks"):
            log.delete_queue("tasks", group="gone")
        with pytest.raises(Closed):
            early.lease(timeout_s=0)
        for handle in (early, looking):
            handle.close()
        assert len(values_of(log, "tasks")) == 10
        with other.queue("tasks", group="gone") as queue, other.queue("tasks", group="kept") as kept:
            assert kept.lease(timeout_s=0) == [] and len(kept.dead()) == 1
            leases = queue.lease()
            assert sorted(int(lease.event.value) for lease in leases) == list(range(10))
            assert {lease.deliveries for lease in leases} == {1}
            queue.ack(leases)
            assert queue.lease(timeout_s=0) == []

    def test_a_removed_queue_keeps_nothing_back(self, log: Log) -> None:
        """With `retain="until_acked"` a group that nobody uses any more would keep everything for ever."""
        log.create_topic("tasks", partitions=1, retain="until_acked")
        log.queue("tasks", group="forgotten").close()
        log.append("tasks", [b"x"] * 10)
        with log.queue("tasks", group="workers") as queue:
            queue.ack(queue.lease())
            assert log.tidy("tasks") == 0
            log.delete_queue("tasks", group="forgotten")
            assert log.tidy("tasks") == 10
