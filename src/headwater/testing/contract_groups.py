"""The contract of groups: members share partitions, commit, rebalance, and skip nothing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest

from headwater.log.consumer import Consumer
from headwater.log.log import Log
from headwater.model.errors import (
    Closed,
    GroupInUse,
    GroupNotFound,
    InvalidInput,
    InvalidName,
    NotOwner,
    TopicNotFound,
)
from headwater.model.event import Event
from headwater.testing.contract_case import NOON, LogCase, refused, values_of

NUMBERS = "n INT, at TIMESTAMP"


def numbered(log: Log, name: str = "t", *, partitions: int = 4, count: int = 100) -> None:
    """A topic of numbers."""
    log.create_topic(name, NUMBERS, key="n", time="at", partitions=partitions)
    append(log, name, range(count))


def append(log: Log, name: str, numbers: Iterable[int]) -> None:
    """More of them, one event a second."""
    log.append(name, [{"n": number, "at": NOON + timedelta(seconds=number)} for number in numbers])


def numbers_of(events: Iterable[Event]) -> list[int]:
    """What the events say, sorted."""
    return sorted(event.value["n"] for event in events)


def drain(*consumers: Consumer, polls_max: int = 200) -> list[Event]:
    """All that is there for these members, in turns, until none of them gets anything for a while."""
    found: list[Event] = []
    quiet = 0
    for _ in range(polls_max):
        events = [event for consumer in consumers for event in consumer.poll(timeout_s=0.02)]
        found += events
        quiet = 0 if events else quiet + 1
        if quiet == 4:
            return found
    raise AssertionError("the members were not done")


def until(condition: Callable[[], Any], *consumers: Consumer, timeout_s: float = 20.0) -> list[Event]:
    """The members poll until something is true; what they got meanwhile."""
    found: list[Event] = []
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        found += [event for consumer in consumers for event in consumer.poll(timeout_s=0.01)]
    return found


class GroupsContract(LogCase):
    """What holds for groups and their consumers."""

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
            assert log.group("g").generation > generation

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
        hung = log.consumer("t", group="g", commit="manual", poll_interval_s_max=0.15)
        polled = hung.poll(events_max=20)
        with other.consumer("t", group="g", commit="manual") as healthy:
            time.sleep(0.2)
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
            log.consumer("t", group="g", poll_interval_s_max=0.15) as patient,
            other.consumer("t", group="g") as second,
        ):
            until(lambda: len(second.assignment()) == 1, patient, second)
            generation = log.group("g").generation
            patient.poll(timeout_s=0.5)
            second.poll(timeout_s=0)
            assert log.group("g").generation == generation

    @pytest.mark.covers("concept: subscription by pattern")
    def test_a_pattern_picks_up_topics_made_later(self, log: Log) -> None:
        """From their first event on, whatever `start` says; topics that are deleted are let go."""
        numbered(log, "orders.eu", partitions=1, count=5)
        numbered(log, "other", partitions=1, count=5)
        with log.consumer(pattern=r"orders\..*", group="g", start="latest") as consumer:
            assert consumer.assignment() == [("orders.eu", 0)]
            numbered(log, "orders.us", partitions=2, count=10)
            assert numbers_of(drain(consumer)) == list(range(10))
            assert len(consumer.assignment()) == 3
            log.delete_topic("orders.eu")
            until(lambda: [topic for topic, _ in consumer.assignment()] == ["orders.us"] * 2, consumer)
            append(log, "orders.us", [10])
            assert numbers_of(drain(consumer)) == [10]

    def test_members_with_different_topics_get_what_they_asked_for(self, log: Log, other: Log) -> None:
        """One group may read several topics, and not every member all of them."""
        numbered(log, "a", partitions=2, count=10)
        numbered(log, "b", partitions=2, count=10)
        with log.consumer(["a", "b"], group="g") as both, other.consumer("b", group="g") as one:
            found = until(lambda: len(one.assignment()) == 2, both, one)
            assert both.assignment() == [("a", 0), ("a", 1)]
            assert one.assignment() == [("b", 0), ("b", 1)]
            assert Counter(event.topic for event in found + drain(both, one)) == {"a": 10, "b": 10}

    @pytest.mark.parametrize("start", ["earliest", "latest", 3, NOON + timedelta(seconds=6), {0: 8}])
    def test_a_new_group_begins_at_its_start(self, log: Log, start: Any) -> None:
        """And never again there, once it has begun."""
        numbered(log, partitions=1, count=10)
        expected = {"earliest": 0, "latest": 10, 3: 3}.get(start, 6) if not isinstance(start, dict) else 8
        with log.consumer("t", group="g", start=start, commit="manual") as consumer:
            append(log, "t", [10])
            assert numbers_of(consumer.poll()) == list(range(expected, 11))
        append(log, "t", [11])
        with log.consumer("t", group="g", start="latest") as consumer:
            assert numbers_of(consumer.poll()) == list(range(expected, 12))

    @pytest.mark.covers("Google Cloud Pub/Sub")
    @pytest.mark.covers("concept: replay")
    def test_seeking_brings_events_again(self, log: Log) -> None:
        """To an offset, a time, either end, an offset for each partition, or saved positions."""
        numbered(log, partitions=1, count=10)
        with log.consumer("t", group="g") as consumer:
            places = consumer.positions()
            for to, expected in (
                ("earliest", 0),
                (4, 4),
                (NOON + timedelta(seconds=7), 7),
                ({0: 2}, 2),
                (places, 0),
                ("latest", 10),
            ):
                consumer.seek(to)
                assert numbers_of(consumer.poll(timeout_s=0)) == list(range(expected, 10)), to
            consumer.seek({0: 5})
            consumer.commit()
        with log.consumer("t", group="g") as consumer:
            assert numbers_of(consumer.poll()) == list(range(5, 10))
            with refused(InvalidInput, "7"):
                consumer.seek({7: 0})
            with refused(InvalidInput, "11"):
                consumer.seek(11)

    def test_paused_partitions_wait(self, log: Log) -> None:
        """They stay with the member and lose nothing."""
        numbered(log, partitions=2, count=40)
        with log.consumer("t", group="g") as consumer:
            consumer.pause([1])
            assert {event.partition for event in drain(consumer)} == {0}
            assert len(consumer.assignment()) == 2
            consumer.pause([("t", 0)])
            append(log, "t", range(40, 80))
            assert drain(consumer) == []
            consumer.resume([0])
            assert {event.partition for event in drain(consumer)} == {0}
            consumer.resume()
            assert {event.partition for event in drain(consumer)} == {1}
            assert consumer.lag().events == 0
            with refused(InvalidInput, "9"):
                consumer.pause([9])

    def test_lag_is_told_in_events_and_in_time(self, log: Log) -> None:
        """Of a member by what it was handed, of a group by what was committed."""
        numbered(log, partitions=2, count=40)
        time.sleep(0.02)
        with log.consumer("t", group="g", commit="manual") as consumer:
            assert consumer.lag().events == 40
            assert 0.02 <= consumer.lag().seconds < 60
            consumer.poll(events_max=40)
            assert (consumer.lag().events, consumer.lag().seconds) == (0, 0.0)
            assert log.group("g").lag.events == 40
            assert log.group("g").lag.seconds >= 0.02
            consumer.commit()
            described = log.group("g")
        assert described.lag.events == 0
        assert [part.committed for part in described.partitions] == [part.end for part in described.partitions]
        assert {part.member for part in described.partitions} == {described.members[0].member}

    def test_groups_are_listed(self, log: Log, other: Log) -> None:
        """Once they have had a member."""
        numbered(log)
        assert log.groups() == []
        log.consumer("t", group="b").close()
        log.consumer("t", group="a").close()
        assert other.groups() == ["a", "b"]
        with refused(GroupNotFound, "'c'"):
            other.group("c")
        with refused(GroupNotFound, "'c'"):
            other.reset_group("c", to="earliest")

    @pytest.mark.covers("concept: replay")
    def test_a_reset_lets_a_group_begin_again(self, log: Log, other: Log) -> None:
        """The same events in the same order, other groups undisturbed; refused while a member lives."""
        numbered(log, partitions=2, count=30)
        with log.consumer("t", group="bystander") as bystander:
            bystander.poll(events_max=10)
            with log.consumer("t", group="g") as consumer:
                first = drain(consumer)
                with refused(GroupInUse, "'g'", "process"):
                    other.reset_group("g", to="earliest")
            assert other.reset_group("g", to="earliest") == {("t", 0): 0, ("t", 1): 0}
            with log.consumer("t", group="g") as consumer:
                again = drain(consumer)
            assert sorted(first, key=_place) == sorted(again, key=_place)
            end = log.offsets("t")[1].stop
            assert other.reset_group("g", to={1: end}) == {("t", 1): end}
            assert len(drain(bystander)) == 20

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

    def test_arrow_batches_are_consumed_like_events(self, log: Log) -> None:
        """With the columns that were asked for."""
        numbered(log, partitions=2, count=40)
        with log.consumer("t", group="g", columns=["n", "_partition", "_offset"]) as consumer:
            batches = consumer.poll_arrow()
            assert sorted(n for batch in batches for n in batch.column("n").to_pylist()) == list(range(40))
            assert batches[0].schema.names == ["n", "_partition", "_offset"]
            assert consumer.poll_arrow(timeout_s=0) == []
        assert log.group("g").lag.events == 0

    def test_everything_has_its_twin_for_asyncio(self, log: Log) -> None:
        """Other tasks run while a consumer waits."""
        numbered(log, partitions=2, count=40)

        async def consume() -> list[Event]:
            found: list[Event] = []
            async with log.consumer("t", group="g") as consumer:
                found += await consumer.poll_async(events_max=10)
                await consumer.commit_async()
                rows = sum(batch.num_rows for batch in await consumer.poll_arrow_async(events_max=10))
                assert rows == 10
                async for event in consumer:
                    found.append(event)
                    if len(found) == 30:
                        break
                waiting = asyncio.create_task(consumer.poll_async(timeout_s=20))
                await asyncio.sleep(0.05)
                assert not waiting.done()
                append(log, "t", [40])
                found += await waiting
            return found

        assert len(asyncio.run(consume())) == 31
        assert log.group("g").lag.events == 0

    def test_a_topic_made_anew_is_read_from_its_start(self, log: Log) -> None:
        """Offsets of the one that was deleted mean nothing in it."""
        numbered(log, partitions=1, count=10)
        with log.consumer("t", group="g") as consumer:
            drain(consumer)
        log.delete_topic("t")
        numbered(log, partitions=1, count=3)
        assert log.group("g").partitions[0].committed is None
        with log.consumer("t", group="g") as consumer:
            assert numbers_of(consumer.poll()) == [0, 1, 2]

    def test_what_cannot_be_consumed_is_refused(self, log: Log) -> None:
        """With advice."""
        numbered(log)
        with refused(InvalidInput, "pattern"):
            log.consumer(group="g")
        with refused(InvalidInput, "pattern"):
            log.consumer("t", pattern="t", group="g")
        with refused(InvalidInput, "regular expression"):
            log.consumer(pattern="(", group="g")
        with refused(TopicNotFound, "nothing"):
            log.consumer("nothing", group="g")
        with refused(InvalidName, "group"):
            log.consumer("t", group="../g")
        with refused(InvalidInput, "commit"):
            log.consumer("t", group="g", commit="often")  # type: ignore[arg-type]
        consumer = log.consumer("t", group="g")
        with refused(InvalidInput, "events_max"):
            consumer.poll(events_max=0)
        consumer.close()
        consumer.close()
        with refused(Closed):
            consumer.poll()
        with refused(Closed):
            consumer.commit()


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
        hung = log.consumer("t", group="g", commit="manual", poll_interval_s_max=0.1)
        polled = hung.poll()
        time.sleep(0.15)
        with other.consumer("t", group="g", commit="manual") as healthy:
            events = drain(healthy)
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


def _place(event: Event) -> tuple[str, int, int]:
    return event.topic, event.partition, event.offset
