"""The contract of transactions that consume: offsets and events are committed together or not at all."""

from __future__ import annotations

import time

import pytest

from headwater.log.log import Log
from headwater.model.errors import InvalidInput, NotOwner
from headwater.testing.contracts.case import LogCase, refused, values_of
from headwater.testing.contracts.groups.case import drain, numbered, numbers_of, until


class GroupTransactionsContract(LogCase):
    """What holds for transactions that consume, produce and commit offsets."""

    def test_offsets_and_events_happen_together(self, log: Log) -> None:
        """Consume, transform, produce: exactly once."""
        numbered(log, partitions=2, count=40)
        log.create_topic("out", "n INT", partitions=1)
        with log.consumer("t", group="g", commit="manual") as consumer:
            while events := consumer.poll(events_max=15, timeout_s=0):
                with log.transaction() as transaction:
                    transaction.append("out", [{"n": event.value["n"]} for event in events])
                    transaction.commit_offsets(consumer)
            assert log.group("g").lag.events == 0
        assert sorted(value["n"] for value in values_of(log, "out")) == list(range(40))

    def test_a_transaction_that_fails_commits_nothing(self, log: Log) -> None:
        """Neither events nor offsets, and the consumer goes back: the events come again."""
        numbered(log, partitions=2, count=20)
        log.create_topic("out", "n INT", partitions=1)
        with log.consumer("t", group="g", commit="manual") as consumer:

            def fail() -> None:
                with log.transaction() as transaction:
                    transaction.append("out", [{"n": event.value["n"]} for event in consumer.poll(events_max=9)])
                    transaction.commit_offsets(consumer)
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                fail()
            assert log.group("g").lag.events == 20
            assert numbers_of(drain(consumer)) == list(range(20))
        assert values_of(log, "out") == []

    def test_a_transaction_of_a_member_that_lost_its_partition_is_refused(self, log: Log, other: Log) -> None:
        """Nothing of it is stored, and the new owner's work stands."""
        numbered(log, partitions=1, count=10)
        log.create_topic("out", "n INT", partitions=1)
        hung = log.consumer("t", group="g", commit="manual", poll_interval_s_max=self.silence_s)
        polled = hung.poll()
        time.sleep(self.silence_s * 1.3)
        with other.consumer("t", group="g", commit="manual") as healthy:
            events = until(healthy.assignment, healthy) + drain(healthy)
            with other.transaction() as transaction:
                transaction.append("out", [{"n": event.value["n"]} for event in events])
                transaction.commit_offsets(healthy)
            with refused(NotOwner, "'g'"), log.transaction() as transaction:
                transaction.append("out", [{"n": event.value["n"]} for event in polled])
                transaction.commit_offsets(hung)
            hung.close()
        assert sorted(value["n"] for value in values_of(log, "out")) == list(range(10))

    def test_offsets_of_several_groups_and_nothing_else(self, log: Log) -> None:
        """A transaction may commit for more than one consumer, and need not append."""
        numbered(log, partitions=2, count=10)
        with (
            log.consumer("t", group="a", commit="manual") as first,
            log.consumer("t", group="b", commit="manual") as second,
        ):
            drain(first, second)
            with log.transaction() as transaction:
                transaction.commit_offsets(first)
                transaction.commit_offsets(second)
            assert (log.group("a").lag.events, log.group("b").lag.events) == (0, 0)

    def test_a_consumer_that_commits_by_itself_is_refused(self, log: Log) -> None:
        """It would commit what the transaction has not."""
        numbered(log)
        with (
            log.consumer("t", group="g") as consumer,
            refused(InvalidInput, "manual"),
            log.transaction() as transaction,
        ):
            transaction.commit_offsets(consumer)
