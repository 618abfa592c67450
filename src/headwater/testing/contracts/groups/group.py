"""The contract of groups: members share partitions, commit, rebalance, and skip nothing."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from headwater.log.log import Log
from headwater.model.errors import NotOwner
from headwater.testing.contracts.case import LogCase, refused
from headwater.testing.contracts.groups.case import append, drain, numbered, numbers_of, until


class GroupsContract(LogCase):
    """What holds for the members of a group."""

    @pytest.mark.covers("concept: load balancing and fan-out")
    def test_each_event_goes_to_one_member_of_each_group(self, log: Log, other: Log) -> None:
        """Two groups of three members: every event once per group."""
        numbered(log, partitions=6, count=300)
        members = {
            name: [handle.consumer("t", group=name) for handle in (log, other, log)] for name in ("billing", "search")
        }
        for name, three in members.items():
            found = until(lambda three=three: [len(one.assignment()) for one in three] == [2, 2, 2], *three)  # type: ignore[misc]
            assert numbers_of(found + drain(*three)) == list(range(300)), name
        append(log, "t", range(300, 600))
        for three in members.values():
            shares = [drain(one) for one in three]
            assert numbers_of(event for share in shares for event in share) == list(range(300, 600))
            assert all(shares)
            for one in three:
                one.close()

    @pytest.mark.covers("Kafka")
    def test_a_group_goes_on_from_what_it_committed(self, log: Log, other: Log) -> None:
        """In another handle, after all members have left."""
        numbered(log)
        with log.consumer("t", group="g") as consumer:
            first = consumer.poll(events_max=30) + consumer.poll(events_max=12)
            assert len(first) == 42
        with other.consumer("t", group="g") as consumer:
            assert numbers_of(first + drain(consumer)) == list(range(100))

    def test_what_was_polled_last_is_not_committed_when_the_program_fails(self, log: Log) -> None:
        """It comes again; what was polled before that was done with."""
        numbered(log, partitions=1, count=30)

        def fail() -> None:
            with log.consumer("t", group="g") as consumer:
                consumer.poll(events_max=10)
                consumer.poll(events_max=10)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        with log.consumer("t", group="g") as consumer:
            assert numbers_of(consumer.poll()) == list(range(10, 30))

    def test_manual_commits_count_and_nothing_else(self, log: Log) -> None:
        """Without one everything comes again, whatever was polled."""
        numbered(log, partitions=2, count=50)
        with log.consumer("t", group="g", commit="manual") as consumer:
            drain(consumer)
        with log.consumer("t", group="g", commit="manual") as consumer:
            assert len(consumer.poll(events_max=20)) == 20
            consumer.commit()
            assert [place.offset for place in consumer.committed()] == [p.offset for p in consumer.positions()]
            consumer.poll(events_max=20)
        with log.consumer("t", group="g", commit="manual") as consumer:
            assert len(drain(consumer)) == 30

    def test_iteration_commits_event_by_event(self, log: Log) -> None:
        """The events that were fetched and not reached come again, those before do not."""
        numbered(log, partitions=1, count=20)
        with log.consumer("t", group="g") as consumer:
            seen = []
            for event in consumer:
                seen.append(event)
                if len(seen) == 7:
                    break
            assert consumer.positions()[0].offset == 7
            assert numbers_of(consumer.poll(events_max=3)) == [7, 8, 9]
        with log.consumer("t", group="g", commit="manual") as consumer:
            for event in consumer:
                if event.offset == 14:
                    consumer.commit()
                    break
        with log.consumer("t", group="g") as consumer:
            assert numbers_of(consumer.poll()) == list(range(15, 20))

    def test_the_event_in_hand_comes_again_after_an_error(self, log: Log) -> None:
        """The one whose handling failed, and none before it."""
        numbered(log, partitions=1, count=20)

        def fail() -> None:
            with log.consumer("t", group="g") as consumer:
                for event in consumer:
                    if event.offset == 5:
                        raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        with log.consumer("t", group="g") as consumer:
            assert numbers_of(consumer.poll()) == list(range(5, 20))

    @pytest.mark.covers("Kafka")
    def test_partitions_move_to_new_members_and_back(self, log: Log, other: Log) -> None:
        """Balanced within one; what stays need not move, and nothing is read twice when all is committed."""
        numbered(log, partitions=4, count=200)
        with log.consumer("t", group="g") as first:
            found = first.poll(events_max=50)
            before = first.assignment()
            with other.consumer("t", group="g") as second:
                found += until(lambda: len(second.assignment()) == 2, first, second)
                assert set(first.assignment()) | set(second.assignment()) == set(before)
                generation = log.group("g").generation
                found += drain(first, second)
            assert numbers_of(found) == list(range(200))
            until(lambda: first.assignment() == before, first)
            assert generation is None or (log.group("g").generation or 0) > generation

    @pytest.mark.covers("concept: head-of-line blocking")
    def test_more_members_than_partitions_idle(self, log: Log, other: Log) -> None:
        """They are shown as idle, and take over when another leaves."""
        numbered(log, partitions=4, count=40)
        members = [handle.consumer("t", group="g") for handle in (log, other, log, other, log)]
        until(lambda: sorted(len(one.assignment()) for one in members) == [0, 1, 1, 1, 1], *members)
        described = other.group("g")
        assert len(described.idle) == 1
        assert len(described.members) == 5
        assert sum(len(member.partitions) for member in described.members) == 4
        idle = next(one for one in members if not one.assignment())
        leaving = next(one for one in members if one is not idle)
        left = leaving.assignment()
        leaving.close()
        until(lambda: idle.assignment() == left, *[one for one in members if one is not leaving])
        for one in members:
            one.close()
        assert other.group("g").members == []

    def test_a_hung_member_loses_its_partitions(self, log: Log, other: Log) -> None:
        """Its commit is refused, and at its next poll it joins again; nothing is skipped."""
        numbered(log, partitions=2, count=40)
        hung = log.consumer("t", group="g", commit="manual", poll_interval_s_max=self.silence_s)
        polled = hung.poll(events_max=20)
        with other.consumer("t", group="g", commit="manual") as healthy:
            time.sleep(self.silence_s * 1.3)
            found = until(lambda: len(healthy.assignment()) == 2, healthy)
            with refused(NotOwner, "'t'", "'g'"):
                hung.commit()
            assert numbers_of(found + drain(healthy)) == list(range(40))
            healthy.commit()
            assert len(polled) == 20
            assert hung.poll(timeout_s=0) == []
            assert hung.assignment() == []
            until(lambda: len(hung.assignment()) == 1, hung, healthy)
            append(log, "t", range(40, 60))
            assert numbers_of(drain(hung, healthy)) == list(range(40, 60))
        hung.close()

    def test_a_member_that_waits_is_not_hung(self, log: Log, other: Log) -> None:
        """A long poll is a sign of life too."""
        numbered(log, partitions=2, count=0)
        with (
            log.consumer("t", group="g", poll_interval_s_max=self.silence_s) as patient,
            other.consumer("t", group="g") as second,
        ):
            until(lambda: len(second.assignment()) == 1, patient, second)
            generation = log.group("g").generation
            patient.poll(timeout_s=self.silence_s * 3)
            second.poll(timeout_s=0)
            assert log.group("g").generation == generation
            assert len(patient.assignment()) == len(second.assignment()) == 1

    def test_members_with_different_topics_get_what_they_asked_for(self, log: Log, other: Log) -> None:
        """One group may read several topics, and not every member all of them."""
        numbered(log, "a", partitions=2, count=10)
        numbered(log, "b", partitions=2, count=10)
        with log.consumer(["a", "b"], group="g") as both, other.consumer("b", group="g") as one:
            found = until(lambda: len(one.assignment()) == 2, both, one)
            assert both.assignment() == [("a", 0), ("a", 1)]
            assert one.assignment() == [("b", 0), ("b", 1)]
            assert Counter(event.topic for event in found + drain(both, one)) == {"a": 10, "b": 10}

    @pytest.mark.covers("Wormhole")
    def test_a_slow_group_delays_no_other(self, log: Log, other: Log) -> None:
        """One has read everything while the other still holds its first event."""
        numbered(log, partitions=1, count=50)
        with log.consumer("t", group="slow") as slow, other.consumer("t", group="fast") as fast:
            slow.poll(events_max=1)
            assert len(drain(fast)) == 50
            append(log, "t", range(50, 100))
            assert len(drain(fast)) == 50
            assert (log.group("slow").lag.events, log.group("fast").lag.events) == (100, 0)
            assert len(drain(slow)) == 99

    @pytest.mark.covers("concept: head-of-line blocking")
    def test_a_slow_event_delays_its_partition_only(self, log: Log, other: Log) -> None:
        """The other members go on while one is busy with an event."""
        numbered(log, partitions=2, count=40)
        with log.consumer("t", group="g") as busy, other.consumer("t", group="g") as free:
            until(lambda: len(free.assignment()) == 1, busy, free)
            append(log, "t", range(40, 80))
            held = until(lambda: busy.lag().events == 0, busy)
            assert {event.partition for event in drain(free)} == {1 - held[-1].partition}
            append(log, "t", range(80, 120))
            assert drain(free)
