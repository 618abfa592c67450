"""The contract of consumers: where they begin, what they seek, pause and are told, and how a group is reset."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from headwater.log.clients.progress import PartitionProgress
from headwater.log.log import Log
from headwater.model.errors import Closed, GroupInUse, GroupNotFound, InvalidInput, InvalidName, TopicNotFound
from headwater.model.event import Event
from headwater.testing.contracts.case import NOON, LogCase, refused
from headwater.testing.contracts.groups.case import append, drain, numbered, numbers_of, until


class GroupReadingContract(LogCase):
    """What holds for one consumer, and for what is said of its group."""

    @pytest.mark.covers("concept: subscription by pattern")
    def test_a_pattern_picks_up_topics_made_later(self, log: Log) -> None:
        """From their first event on, whatever `start` says; topics that are deleted are let go."""
        numbered(log, "orders.eu", partitions=1, count=5)
        numbered(log, "other", partitions=1, count=5)
        with log.consumer(pattern=r"orders\..*", group="g", start="latest") as consumer:
            assert consumer.assignment() == [("orders.eu", 0)]
            numbered(log, "orders.us", partitions=2, count=10)
            found = until(lambda: len(consumer.assignment()) == 3, consumer)
            assert numbers_of(found + drain(consumer)) == list(range(10))
            log.delete_topic("orders.eu")
            until(lambda: [topic for topic, _ in consumer.assignment()] == ["orders.us"] * 2, consumer)
            append(log, "orders.us", [10])
            assert numbers_of(drain(consumer)) == [10]

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
                assert [event.value["n"] for event in consumer.poll(timeout_s=0)] == list(range(expected, 10)), to
            consumer.seek({0: 5})
            consumer.commit()
        with log.consumer("t", group="g") as consumer:
            assert [event.value["n"] for event in consumer.poll()] == list(range(5, 10))
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
        """The same events of each partition in the same order, as they were handed out; other groups undisturbed. Refused while a member
        lives."""
        numbered(log, partitions=2, count=30)
        with log.consumer("t", group="bystander") as bystander:
            seen = bystander.poll(events_max=10)
            with log.consumer("t", group="g") as consumer:
                first = drain(consumer)
                with refused(GroupInUse, "'g'", "process"):
                    other.reset_group("g", to="earliest")
            assert other.reset_group("g", to="earliest") == {("t", 0): 0, ("t", 1): 0}
            with log.consumer("t", group="g") as consumer:
                again = drain(consumer)
            assert _by_partition(first) == _by_partition(again)
            assert numbers_of(first) == list(range(30))
            end = log.offsets("t")[1].stop
            assert other.reset_group("g", to={1: end}) == {("t", 1): end}
            assert _by_partition([*seen, *drain(bystander)]) == _by_partition(first)

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
        assert {part.committed for part in _known(log, "g")} <= {None}
        with log.consumer("t", group="g") as consumer:
            assert numbers_of(consumer.poll()) == [0, 1, 2]

    def test_a_log_may_be_closed_under_a_consumer(self, log: Log) -> None:
        """A poll that waits is told so; closing the consumer then is no error."""
        numbered(log, partitions=2, count=5)
        consumer = log.consumer("t", group="g")
        told: list[Exception] = []

        def wait() -> None:
            try:
                while True:
                    consumer.poll(timeout_s=20)
            except Closed as error:
                told.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.05)
        log.close()
        waiting.join(20)
        assert len(told) == 1
        consumer.close()

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


def _known(log: Log, group: str) -> list[PartitionProgress]:
    """What is said of a group's partitions; a log may have forgotten it together with its only topic."""
    try:
        return log.group(group).partitions
    except GroupNotFound:
        return []


def _by_partition(events: list[Event]) -> dict[tuple[str, int], list[tuple[int, Any]]]:
    """The events of each partition in the order in which they came."""
    found: dict[tuple[str, int], list[tuple[int, Any]]] = {}
    for event in events:
        found.setdefault((event.topic, event.partition), []).append((event.offset, event.value))
    return found
