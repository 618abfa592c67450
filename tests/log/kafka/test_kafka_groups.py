"""Groups on a real Kafka: members killed, stopped and started again, other programs in the group, retention, refusals."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

import headwater
from headwater.log.kafka import group as kafka_group
from headwater.log.kafka import writer as kafka_writer
from headwater.log.log import Log
from headwater.log.port.group import Committed
from headwater.model.errors import Closed, EventsMissed, InvalidInput, NoAccess, NotOwner
from headwater.testing.contracts.case import refused
from headwater.testing.contracts.groups.case import drain, numbered, numbers_of, until
from headwater.testing.servers.kafka import KafkaServer
from tests.rigs.children import Child
from tests.rigs.log.group_storm import PARTITIONS, Storm

pytestmark = pytest.mark.service("kafka")

MODES = ("transactions", "manual", "auto")
CI_ROUNDS = [range(first, first + 3) for first in range(0, 18, 3)]
"""Three at once: they wait for the brokers most of the time."""

BENCH_ROUNDS = range(100, 280)
QUICK = "heartbeat.interval.ms=50"
"""A group's members hear of each other sooner."""

TRANSACTION_S = 2.0
"""How long the brokers wait for the transaction of a worker that was killed or stopped."""


class KafkaStorm(Storm):
    """A round on a real broker; what is stored is read by Kafka's own client. Some of what is sent is rolled back."""

    poll_interval_s = 1.5
    finish_s = 60.0
    batch_max = 400
    polled_max = 12  # so that most strikes fall into a commit or a transaction
    sync_delays_ms = (0.0,)  # the disks are the brokers'

    def __init__(self, kafka: KafkaServer, folder: Path, seed: int, *, pause_s_max: float, workers: int) -> None:
        self.pause_s = (0.1, pause_s_max)
        prefix = f"storm{os.getpid()}-{seed}-{next(_ROUNDS)}."
        self.bootstrap, self.prefix = kafka.bootstrap, prefix
        self._rolling_back = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": prefix})
        self._rolling_back.init_transactions(20)
        url = f"kafka://{kafka.bootstrap}?{QUICK}&prefix={prefix}"
        super().__init__(folder, seed, MODES[seed % len(MODES)], url=url, workers=workers)

    def work(self, account: str, random: Random) -> None:
        gc.freeze()  # clients that the parent is done with are not this process's to end
        kafka_writer.TRANSACTION_S = kafka_writer.DELIVERY_S = TRANSACTION_S
        super().work(account, random)

    def stored(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for record in self._records("in", PARTITIONS):
            found[record.partition()].append(record.offset())
        return found

    def output(self) -> list[int]:
        return [number_of(record) for record in self._records("out", 2)]

    def _produce(self) -> None:
        if self.random.random() < 0.5:
            self._rolling_back.begin_transaction()
            for number in range(self.random.randint(1, 5)):
                self._rolling_back.produce(
                    f"{self.prefix}in", b'{"n": -1}', partition=number % PARTITIONS, headers=[("rolled", b"back")]
                )
            self._rolling_back.flush(20)
            self._rolling_back.abort_transaction(20)
        super()._produce()

    def _records(self, topic: str, partitions: int) -> list[Any]:
        """Everything in a topic that is committed."""
        reading = Consumer(
            {"bootstrap.servers": self.bootstrap, "group.id": "oracle", "enable.partition.eof": True,
             "isolation.level": "read_committed", "enable.auto.commit": False}
        )  # fmt: skip
        reading.assign([TopicPartition(f"{self.prefix}{topic}", number, 0) for number in range(partitions)])
        found, ended = [], set()
        while len(ended) < partitions:
            record = reading.poll(20)
            assert record is not None, f"{topic}: of {partitions} partitions only {ended} were read to their ends"
            if record.error() is None:
                found.append(record)
            else:
                assert record.error().code() == KafkaError._PARTITION_EOF
                ended.add(record.partition())
        reading.close()
        return found


_ROUNDS = itertools.count()


def run_storm(
    kafka: KafkaServer, folder: Path, seed: int, *, strikes: int, pause_s_max: float, workers: int = 3
) -> None:
    print(f"seed {seed}")
    storm = KafkaStorm(kafka, folder, seed, pause_s_max=pause_s_max, workers=workers)
    try:
        storm.run(strikes=strikes)
        storm.check()
        turns = {(line["partition"], line["generation"]) for line in storm.lines()}
        print(f"{storm.mode}: {storm.sent} events, {len(turns)} turns, {storm.lives} lives, {dict(storm.strikes)}")
        assert storm.sent > 0
    finally:
        storm.log.close()


@pytest.mark.slow
@pytest.mark.covers("Kafka", backends=["kafka"])
@pytest.mark.parametrize("seeds", CI_ROUNDS, ids=str)
def test_groups_survive_storms(kafka: KafkaServer, tmp_path: Path, seeds: range) -> None:
    """Nothing skipped, nothing read that was rolled back, no two owners in one generation, and in transactions exactly once."""

    def one(seed: int) -> None:
        gc.freeze()
        folder = tmp_path / str(seed)
        folder.mkdir()
        run_storm(kafka, folder, seed, strikes=4, pause_s_max=1.0)

    failures = []
    for seed, storm in [(seed, Child(lambda seed=seed: one(seed))) for seed in seeds]:
        try:
            storm.result(timeout_s=100)
        except Exception as failure:  # noqa: BLE001 - the others go on, and it is raised when they are done
            failure.add_note(f"seed {seed}")
            failures.append(failure)
    if failures:
        raise ExceptionGroup("storms", failures)


@pytest.mark.bench
@pytest.mark.parametrize("seed", BENCH_ROUNDS)
def test_a_group_survives_many_storms(kafka: KafkaServer, tmp_path: Path, seed: int) -> None:
    """The same with eight processes, more than a hundred times."""
    run_storm(kafka, tmp_path, seed, strikes=8, pause_s_max=2.5, workers=8)


def number_of(record: Any) -> int:
    """The column of an event, by Kafka's client and a JSON parser."""
    return int(json.loads(record.value())["n"])


# One group, many kinds of member


@pytest.fixture
def url(kafka: KafkaServer) -> str:
    """The address of an empty log."""
    return f"kafka://{kafka.bootstrap}?{QUICK}&prefix=groups{os.getpid()}-{next(_ROUNDS)}."


@pytest.fixture
def log(url: str) -> Iterator[Log]:
    """An empty log."""
    with headwater.open_log(url) as log:
        yield log


@pytest.fixture
def admin(kafka: KafkaServer) -> AdminClient:
    """Kafka's own client for settings."""
    return AdminClient({"bootstrap.servers": kafka.bootstrap})


def test_what_was_given_in_a_generation_that_is_over_is_not_handed_out(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client says -1 between two generations, as after a long pause: the partition may be another member's by then."""
    numbered(log, partitions=1, count=30)
    with monkeypatch.context() as between:
        between.setattr(kafka_group, "_generation", lambda metadata: -1)
        consumer = log.consumer("t", group="g")
        assert consumer.poll(timeout_s=0.5) == []
    with consumer:
        assert numbers_of(consumer.poll(timeout_s=10)) == list(range(30))


@pytest.mark.covers("Kafka")
def test_other_programs_go_on_where_a_group_ended_and_back(log: Log, kafka: KafkaServer) -> None:
    """A group is Kafka's own behind the prefix: offsets that others commit count here, and ours there."""
    numbered(log, partitions=1, count=30)
    with log.consumer("t", group="g") as consumer:
        consumer.poll(events_max=10)
    other = Consumer(
        {"bootstrap.servers": kafka.bootstrap, "group.id": f"{_prefix(log)}g", "enable.auto.commit": False,
         "auto.offset.reset": "error"}
    )  # fmt: skip
    other.subscribe([f"{_prefix(log)}t"])
    seen = [record.offset() for record in iter_records(other, 10)]
    assert seen == list(range(10, 20))
    other.commit(offsets=[TopicPartition(f"{_prefix(log)}t", 0, 20, "theirs")], asynchronous=False)
    other.close()
    assert log.group("g").partitions[0].committed == 20
    with log.consumer("t", group="g", start="latest") as consumer:
        assert numbers_of(drain(consumer)) == list(range(20, 30))


def test_a_group_goes_on_after_its_topic_is_adopted(log: Log, admin: AdminClient) -> None:
    """The topic is the same, though it has a schema now."""
    admin.create_topics([NewTopic(f"{_prefix(log)}raw", 1)])[f"{_prefix(log)}raw"].result(30)
    deadline = time.monotonic() + 20
    while log.topics() != ["raw"]:
        assert time.monotonic() < deadline
    log.append("raw", [{"value": b'{"n": %d}' % number} for number in range(10)])
    with log.consumer("raw", group="g") as consumer:
        assert [event.value for event in consumer.poll(events_max=4)] == [b'{"n": %d}' % n for n in range(4)]
    log.adopt_topic("raw", "n INT")
    with log.consumer("raw", group="g") as consumer:
        assert numbers_of(drain(consumer)) == list(range(4, 10))


@pytest.mark.parametrize("missed", ["raise", "skip"])
def test_what_was_removed_before_a_group_read_it_is_told(log: Log, admin: AdminClient, missed: Any) -> None:
    """The brokers remove it when they see fit; the next poll says which events are gone, or counts them."""
    numbered(log, partitions=1, count=30)
    with log.consumer("t", group="g", missed=missed, commit="manual") as consumer:
        assert numbers_of(consumer.poll(events_max=5)) == list(range(5))
        consumer.commit()
        place = TopicPartition(f"{_prefix(log)}t", 0, 12)
        admin.delete_records([place])[place].result(30)
        time.sleep(1.1)  # a handle may know the first offset for a second
        if missed == "raise":
            with pytest.raises(EventsMissed) as caught:
                consumer.poll()
            assert (caught.value.first, caught.value.last) == (5, 11)
            consumer.seek("earliest")
        assert numbers_of(drain(consumer)) == list(range(12, 30))
        assert consumer.missed == (0 if missed == "raise" else 7)


def test_a_reader_is_told_what_was_removed_under_it(log: Log, admin: AdminClient) -> None:
    """Also when it was removed between the question for the first offset and the read."""
    numbered(log, partitions=1, count=30)
    cursor = log.store.cursor("t", 0, offset=5)
    place = TopicPartition(f"{_prefix(log)}t", 0, 12)
    admin.delete_records([place])[place].result(30)
    with pytest.raises(EventsMissed) as caught:
        cursor.read(30, events_max=10)
    assert (caught.value.first, caught.value.last) == (5, 11)


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_the_partitions_of_a_dead_member_are_taken_over(log: Log, url: str, what: str) -> None:
    """When its session is over; the time is printed."""
    numbered(log, count=0)

    def join() -> None:
        consumer = headwater.open_log(url).consumer("t", group="g", poll_interval_s_max=1.0)
        while True:
            consumer.poll(timeout_s=0.05)

    with log.consumer("t", group="g") as consumer:
        child = Child(join)
        until(lambda: [len(member.partitions) for member in log.group("g").members] == [2, 2], consumer)
        os.kill(child.pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        began = time.monotonic()
        until(lambda: len(consumer.assignment()) == 4, consumer)
        print(f"taken over {time.monotonic() - began:.1f} s after {what}")
        child.kill()
        [member] = log.group("g").members
        assert (member.pid, len(member.partitions)) == (os.getpid(), 4)


def test_a_member_that_was_taken_for_dead_holds_on_to_nothing(log: Log, url: str) -> None:
    """It hung while it was to give up one partition of two; the other, too, has another owner when it comes back."""
    numbered(log, partitions=2, count=40)
    with (
        headwater.open_log(url) as other,
        log.consumer("t", group="g", commit="manual", poll_interval_s_max=1.0) as hung,
        other.consumer("t", group="g", commit="manual") as healthy,
    ):
        time.sleep(0.5)  # the client of the one that hangs has heard of the other by itself
        assert len(hung.assignment()) == 2
        found = until(lambda: len(healthy.assignment()) == 2, healthy)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:  # and the healthy one keeps both, as it does not poll meanwhile
            assert (hung.poll(timeout_s=0), hung.assignment()) == ([], [])
        until(lambda: len(hung.assignment()) == len(healthy.assignment()) == 1, hung, healthy)
        assert set(hung.assignment() + healthy.assignment()) == {("t", 0), ("t", 1)}
        assert found or drain(hung, healthy)


def test_who_looks_waits_for_what_its_own_log_has_committed(log: Log, url: str, kafka: KafkaServer) -> None:
    """Brokers settle a transaction after they have said yes. One of others may be a dead program's, and is not waited for."""
    numbered(log, partitions=1, count=10)
    with log.consumer("t", group="g", commit="manual") as consumer:
        drain(consumer)
        with log.transaction() as transaction:
            transaction.commit_offsets(consumer)
    other = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": f"{_prefix(log)}other"})
    reader = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": f"{_prefix(log)}g"})
    other.init_transactions(30)
    other.begin_transaction()
    place = TopicPartition(f"{_prefix(log)}t", 0, 7)
    other.send_offsets_to_transaction([place], reader.consumer_group_metadata(), 30)
    with headwater.open_log(url) as looking:
        assert looking.group("g").partitions[0].committed == 10
    later = threading.Timer(3 * kafka_group._SETTLED_S, other.commit_transaction)
    later.start()
    assert log.group("g").partitions[0].committed == 7
    later.join()
    reader.close()


def test_a_transaction_commits_while_others_join(log: Log, url: str) -> None:
    """A new generation does not refuse a member what is still its own."""
    numbered(log, partitions=2, count=20)
    log.create_topic("out", "n INT", partitions=1)
    with log.consumer("t", group="g", commit="manual") as consumer:
        events = consumer.poll()
        with headwater.open_log(url) as other, other.consumer("t", group="g", commit="manual") as second:
            deadline = time.monotonic() + 20
            while len(log.group("g").members) < 2:
                assert time.monotonic() < deadline
                second.poll(timeout_s=0.01)
            with log.transaction() as transaction:
                transaction.append("out", [{"n": event.value["n"]} for event in events])
                transaction.commit_offsets(consumer)
            until(lambda: len(second.assignment()) == 1, consumer, second)
            assert drain(consumer, second) == []
    assert log.read("out").num_rows == 20


@pytest.mark.parametrize("how", ["transaction", "commit"])
def test_what_a_member_gave_away_it_cannot_commit(log: Log, url: str, how: str) -> None:
    """The brokers would take it, since they look at the member and not at the partition: the new owner would be set back."""
    numbered(log, partitions=2, count=40)
    log.create_topic("out", "n INT", partitions=1)
    with log.consumer("t", group="g", commit="manual") as first, headwater.open_log(url) as other:
        transaction = log.transaction()
        transaction.append("out", [{"n": event.value["n"]} for event in drain(first)])
        transaction.commit_offsets(first)
        with other.consumer("t", group="g", commit="manual") as second:
            until(lambda: len(first.assignment()) == len(second.assignment()) == 1, first, second)
            [(_, number)] = second.assignment()
            log.append("t", [{"n": n} for n in range(40, 80)])
            until(lambda: second.lag().events == 0, second)
            second.commit()
            end = log.offsets("t")[number].stop
            late = {("t", number): Committed(1, topic_id=log.topic("t").id)}
            commit = transaction.commit if how == "transaction" else lambda: first._membership.commit(late)
            with pytest.raises(NotOwner):
                commit()
            assert {part.partition: part.committed for part in log.group("g").partitions}[number] == end
    assert log.read("out").num_rows == 0


def test_a_member_that_hung_cannot_commit_what_others_took_over(log: Log, url: str) -> None:
    """Neither by a transaction that it began before, nor by one that it begins when it wakes up."""
    numbered(log, partitions=1, count=20)
    log.create_topic("out", "n INT", partitions=1)
    with (
        log.consumer("t", group="g", commit="manual", poll_interval_s_max=1.0) as hung,
        headwater.open_log(url) as other,
    ):
        copies = [{"n": event.value["n"]} for event in drain(hung)]
        before = log.transaction()
        before.append("out", copies)
        before.commit_offsets(hung)
        with other.consumer("t", group="g", commit="manual") as healthy:
            until(lambda: len(healthy.assignment()) == 1, healthy)
            with other.transaction() as transaction:
                transaction.append("out", copies)
                transaction.commit_offsets(healthy)
            after = log.transaction()
            after.append("out", copies)
            after.commit_offsets(hung)
            for stale in (before, after):
                with pytest.raises(NotOwner):
                    stale.commit()
    assert sorted(log.read("out")["n"].to_pylist()) == list(range(20))


def test_a_forked_child_is_no_member(log: Log) -> None:
    """Its copy of the consumer is closed, and the parent goes on."""
    numbered(log, partitions=1, count=10)
    with log.consumer("t", group="g") as consumer:

        def use() -> str:
            try:
                consumer.poll()
            except Closed as error:
                return str(error)
            return "polled"

        assert "forked" in Child(use).result()
        assert numbers_of(drain(consumer)) == list(range(10))


# Refusals


def test_a_group_whose_members_share_otherwise_is_refused(log: Log, kafka: KafkaServer) -> None:
    """Another program holds it with an assignor that gives up everything at once."""
    numbered(log, partitions=2, count=0)
    other = Consumer(
        {"bootstrap.servers": kafka.bootstrap, "group.id": f"{_prefix(log)}g", "partition.assignment.strategy": "range"}
    )
    other.subscribe([f"{_prefix(log)}t"])
    deadline = time.monotonic() + 20
    while not other.assignment():
        assert time.monotonic() < deadline
        other.poll(0.05)
    with refused(InvalidInput, "'g'"), log.consumer("t", group="g") as consumer:
        until(lambda: False, consumer)
    other.close()


def test_a_poll_interval_below_what_brokers_allow_is_refused(log: Log) -> None:
    """With the setting that decides it."""
    numbered(log, count=0)
    with refused(InvalidInput, "'g'"):
        log.consumer("t", group="g", poll_interval_s_max=0.05)


def test_a_missing_right_to_a_group_is_named(log: Log, admin: AdminClient) -> None:
    """At once."""
    numbered(log, count=0)
    rule = AclBinding(
        ResourceType.GROUP, f"{_prefix(log)}g", ResourcePatternType.LITERAL, "User:ANONYMOUS", "*", AclOperation.READ,
        AclPermissionType.DENY,
    )  # fmt: skip
    for future in admin.create_acls([rule]).values():
        future.result(30)
    time.sleep(0.5)
    with refused(NoAccess, "'g'"):
        log.consumer("t", group="g")


def iter_records(consumer: Consumer, count: int) -> Iterator[Any]:
    """So many records, as Kafka's client gives them."""
    while count:
        record = consumer.poll(20)
        assert record is not None and record.error() is None
        count -= 1
        yield record


def _prefix(log: Log) -> str:
    return log.url.partition("prefix=")[2]
