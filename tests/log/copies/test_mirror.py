"""A mirror: the copy equals its log by offset, goes on where it ended, and refuses what is no copy."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import headwater as hw
from headwater.log.copies.mirror import Mirror
from headwater.log.copies.mirror_topic import CopiedTopic
from headwater.log.port.write import Write
from headwater.model.errors import DiskFull, Diverged, Fenced, InvalidInput, NoAccess, TopicNotFound
from headwater.testing import SimDisk
from headwater.testing.crash.disk import RecordingDisk
from headwater.testing.crash.points import crash_points
from headwater.testing.simulation.process import Crashed
from tests.rigs.children import NOBODY, in_child, let_others_in
from tests.rigs.commands import Command, refused, start
from tests.rigs.log.pairs import KINDS, every_pair

SCHEMA = "id STRING NOT NULL, v BIGINT, at TIMESTAMP"


files_only = pytest.mark.parametrize("logs", [("file", "file")], indirect=True, ids=["file"])


def fill(log: hw.Log) -> None:
    """Events over several segments, with headers, deletions, transactions and two schema versions."""
    log.create_topic("t", SCHEMA, key="id", time="at", lateness="3 seconds", partitions=3, segment_bytes=4096)
    for number in range(20):
        log.append(
            "t", [{"id": f"k{row % 7}", "v": row + number, "at": f"2026-01-01T00:00:{number:02}Z"} for row in range(50)]
        )
    log.append("t", [{"id": "k1", "_deleted": True}])
    with log.producer(id="p") as producer:
        producer.send("t", {"id": "k2", "v": 1}, headers={"h": b"\xff"}, sequence=9)
    log.seal("t")
    log.alter_topic("t", schema=f"{SCHEMA}, w STRING", lateness="4 seconds")
    with log.transaction() as transaction:
        transaction.append("t", [{"id": f"z{row}", "w": "x"} for row in range(30)])
    log.create_topic("bytes", partitions=1)
    log.append("bytes", [b"one", b"two"])
    log.create_topic("empty", "n INT")


def seen(log: hw.Log, topic: str) -> list[object]:
    """Every event of a topic with everything it carries."""
    with log.reader(topic) as reader:
        events = []
        while polled := reader.poll(timeout_s=0):
            events += polled
    return sorted(
        (e.partition, e.offset, repr(e.key), repr(e.value), e.time_us, e.appended_us, repr(e.headers)) for e in events
    )


def check_same(source: hw.Log, target: hw.Log) -> None:
    assert source.topics() == target.topics()
    for name in source.topics():
        assert seen(source, name) == seen(target, name)
        here, there = source.topic(name), target.topic(name)
        assert (here.schemas, here.key, here.time, here.lateness_us) == (
            there.schemas,
            there.key,
            there.time,
            there.lateness_us,
        )


@every_pair
@pytest.mark.covers("concept: replication")
def test_the_copy_equals_its_log_by_offset(logs: tuple[hw.Log, hw.Log]) -> None:
    """Offsets, keys, values, times, append times, headers, deletions, schemas; and a second run finds nothing to do."""
    source, target = logs
    fill(source)
    assert source.mirror(target).events == 20 * 50 + 2 + 30 + 2
    check_same(source, target)
    assert source.mirror(target).events == 0
    source.append("t", [{"id": "k3", "w": "later"}])
    source.create_topic("late", "n INT")
    assert source.mirror(target).events == 1
    check_same(source, target)


@every_pair
def test_it_follows_new_events_topics_and_schemas_until_told_to_stop(logs: tuple[hw.Log, hw.Log]) -> None:
    source, target = logs
    stop, failures = threading.Event(), []

    def follow() -> None:
        try:
            source.mirror(target, pattern="orders.*", follow=True, stop=stop)
        except hw.HeadwaterError as error:
            failures.append(error)

    follower = threading.Thread(target=follow)
    follower.start()
    source.create_topic("orders.eu", SCHEMA, key="id")
    source.create_topic("other", SCHEMA)
    source.append("orders.eu", [{"id": "a", "v": 1}])
    await_events(target, "orders.eu", 1)
    source.alter_topic("orders.eu", schema=f"{SCHEMA}, more INT")
    source.append("orders.eu", [{"id": "b", "more": 2}])
    source.create_topic("orders.us", "n INT")
    source.append("orders.us", [{"n": 7}])
    await_events(target, "orders.eu", 2)
    await_events(target, "orders.us", 1)
    source.delete_topic("orders.us")
    source.append("orders.eu", [{"id": "c"}])
    await_events(target, "orders.eu", 3)
    stop.set()
    follower.join(timeout=20)
    assert not failures and not follower.is_alive()
    assert target.topics() == ["orders.eu", "orders.us"]
    assert seen(source, "orders.eu") == seen(target, "orders.eu")


def await_events(log: hw.Log, topic: str, count: int) -> None:
    deadline = time.monotonic() + 20
    while topic not in log.topics() or sum(map(len, log.offsets(topic).values())) < count:
        assert time.monotonic() < deadline, f"{topic} never had {count} events"
        time.sleep(0.005)


def test_a_mirror_that_keeps_up_shows_transactions_whole(tmp_path: Path) -> None:
    """What is new in several partitions goes into the copy by one transaction."""
    disk = RecordingDisk()
    with hw.open_log("memory://") as source, hw.open_log(tmp_path / "copy", disk=disk) as target:
        for name in ("a", "b"):
            source.create_topic(name, "n INT", partitions=1)
        mirror = Mirror(source.store, target.store)
        mirror.catch_up()
        for number in range(5):
            with source.transaction() as transaction:
                transaction.append("a", [{"n": number}])
                transaction.append("b", [{"n": number}])
            assert mirror.catch_up() == 2
            assert disk.points["commit: done"] == number + 1


@every_pair
def test_a_target_that_holds_other_events_is_refused(logs: tuple[hw.Log, hw.Log]) -> None:
    """More events, other events, other columns, other partitions: each is told apart, and nothing is written."""
    source, target = logs
    for name, here, there in (
        ("more", [1, 2], [1, 2, 3]),
        ("other", [1, 2, 3], [1, 9]),
        ("recreated", [5], [1, 2]),
    ):
        for log, values in ((source, here), (target, there)):
            log.create_topic(name, "n INT", partitions=1)
            log.append(name, [{"n": value} for value in values])
        with pytest.raises(Diverged, match=name):
            source.mirror(target, topics=[name])
        assert target.read(name)["n"].to_pylist() == there
    source.create_topic("columns", "n INT")
    target.create_topic("columns", "n BIGINT")
    source.create_topic("partitions", "n INT", partitions=2)
    target.create_topic("partitions", "n INT", partitions=3)
    for name in ("columns", "partitions"):
        with pytest.raises(Diverged, match=name):
            source.mirror(target, topics=[name])


def test_a_log_whose_schema_grows_while_a_mirror_begins_is_no_other_log(tmp_path: Path) -> None:
    """The events that both sides hold are compared by the columns that the copy knows."""
    with hw.open_log(tmp_path / "log") as log, hw.open_log(tmp_path / "copy") as copy:
        log.create_topic("t", "n BIGINT", partitions=1)
        log.append("t", [{"n": number} for number in range(5)])
        known = log.topic("t")
        log.mirror(copy)
        log.alter_topic("t", schema="n BIGINT, more STRING")
        log.append("t", [{"n": 5, "more": "x"}])
        assert CopiedTopic(log.store, copy.store, known).ends == {0: 5}
        assert log.mirror(copy).events == 1
        assert copy.read("t").to_pylist() == log.read("t").to_pylist()


@every_pair
@pytest.mark.covers("DistributedLog")
def test_the_later_of_two_mirrors_fences_the_earlier(logs: tuple[hw.Log, hw.Log]) -> None:
    """Also inside a transaction, and nothing of the refused write is stored."""
    source, target = logs
    fill(source)
    first, second = (Mirror(source.store, target.store) for _ in range(2))
    first.catch_up()
    second.catch_up()
    source.append("t", [{"id": f"k{row}"} for row in range(20)])
    source.append("bytes", [b"three"])
    with pytest.raises(Fenced):
        first.catch_up()
    assert second.catch_up() == 21
    check_same(source, target)


@every_pair
def test_somebody_elses_write_to_the_copy_is_found(logs: tuple[hw.Log, hw.Log]) -> None:
    """The next step of a running mirror would land on another offset, and is refused."""
    source, target = logs
    source.create_topic("t", "n INT", partitions=1)
    source.append("t", [{"n": 1}])
    mirror = Mirror(source.store, target.store)
    mirror.catch_up()
    target.append("t", [{"n": 99}])
    source.append("t", [{"n": 2}, {"n": 3}])
    with pytest.raises(Diverged):
        mirror.catch_up()
    with pytest.raises(Diverged):
        source.mirror(target)
    assert target.read("t")["n"].to_pylist() == [1, 99]


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_says_where_it_belongs_and_when_it_was_appended(kind: str, tmp_path: Path) -> None:
    """A store takes `at` only where the partition ends, alone and in a transaction, and keeps the append times given."""
    with hw.open_log("memory://" if kind == "memory" else tmp_path / "log") as log:
        topic = log.create_topic("t", "n INT", partitions=2)
        batch = pa.RecordBatch.from_pydict({"n": pa.array([1, 2, 3], pa.int32())}, schema=topic.schema)
        good = Write(topic, 0, batch, at=0, appended=np.array([5, 5, 9]))
        assert log.store.write([good]) == [range(3)]
        assert [event.appended_us for event in log.reader("t").poll()] == [5, 5, 9]
        (refusal,) = log.store.write([good])
        assert isinstance(refusal, Diverged)
        with pytest.raises(Diverged):
            log.store.write_atomically([Write(topic, 1, batch, at=0), Write(topic, 0, batch, at=2)])
        assert log.offsets("t") == {0: range(3), 1: range(0)}
        assert log.store.write_atomically([Write(topic, 1, batch, at=0), Write(topic, 0, batch, at=3)])


@files_only
def test_a_copy_inside_the_log_or_onto_itself_is_refused(logs: tuple[hw.Log, hw.Log], tmp_path: Path) -> None:
    source, target = logs
    for to in (source.url, f"{source.url}/inside", str(tmp_path), f"{tmp_path}/0/../0/x"):
        with pytest.raises(InvalidInput):
            source.mirror(to)
    with pytest.raises(InvalidInput):
        source.mirror(source)
    with pytest.raises(TopicNotFound):
        source.mirror(tmp_path / "new", topics=["nope"])
    for wrong in ({"topics": "t"}, {"topics": []}, {"topics": ["a"], "pattern": "a"}, {"pattern": "("}):
        with pytest.raises(InvalidInput):
            source.mirror(target, **wrong)
    assert not (tmp_path / "new").exists() and not (tmp_path / "0/x").exists()


def test_a_full_disk_ends_the_mirror_and_room_lets_it_go_on() -> None:
    """On the simulated disk; the copy is a beginning of the log at every time."""
    disk = SimDisk(3, capacity_bytes=300_000)
    with hw.open_log("memory://") as source, hw.open_log("/disk/copy", disk=disk.process("mirror")) as target:
        source.create_topic("t", "text STRING", partitions=2)
        for _ in range(40):
            source.append("t", [{"text": os.urandom(500).hex()} for _ in range(20)])
        with pytest.raises(DiskFull):
            source.mirror(target)
        disk.capacity_bytes = None
        source.mirror(target)
        check_same(source, target)


@pytest.mark.parametrize("seed", range(8))
def test_a_power_loss_of_the_copys_machine_costs_only_time(seed: int) -> None:
    """The copy's disk loses what was not synced, again and again; the next mirror goes on from what is left."""
    chance = random.Random(seed)
    disk = SimDisk(seed)
    with hw.open_log("memory://") as source:
        source.create_topic("t", "n BIGINT, text STRING", partitions=2, segment_bytes=4096)
        source.create_topic("swift", "n BIGINT", partitions=1, durability="os")
        for life in range(6):
            for number in range(chance.randint(1, 5)):
                source.append(
                    "t", [{"n": number, "text": "x" * chance.randrange(300)} for _ in range(chance.randint(1, 20))]
                )
                source.append("swift", [{"n": life}])
            process = disk.process(f"mirror {life}")
            disk.crash_at(f"mirror {life}", chance.choice(crash_points()), nth=chance.randint(1, 4))
            try:
                with hw.open_log("/disk/copy", disk=process) as target:
                    source.mirror(target)
                    check_same(source, target)
            except Crashed:
                disk.kill(f"mirror {life}")
            if chance.random() < 0.7:
                disk.power_loss()
        with hw.open_log("/disk/copy", disk=disk.process("last")) as target:
            source.mirror(target)
            check_same(source, target)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("t", "n INT")

    def attempt() -> None:
        with hw.open_log(tmp_path / "log", read_only=True) as log:
            log.mirror(tmp_path / "copy")

    let_others_in(tmp_path)
    with pytest.raises(NoAccess):
        in_child(attempt, user=NOBODY)


def test_the_command_copies_and_tells_in_json(command: Command) -> None:
    with hw.open_log("data") as log:
        fill(log)
    assert command("mirror", "data", "copy").rows == [{"topics": 3, "events": 1034, "behind": 0}]
    assert command("mirror", "data", "copy", "--topic", "t").rows == [{"topics": 1, "events": 0, "behind": 0}]
    with hw.open_log("data") as log, hw.open_log("copy") as copy:
        check_same(log, copy)
        copy.append("bytes", [b"mine"])
    refused(command("mirror", "data", "copy"), "diverged", "bytes")
    refused(command("mirror", "data", "data"), "invalid_input")
    refused(command("mirror", "data", "data/x"), "invalid_input")
    refused(command("mirror", "nothing", "copy"), "log_not_found")
    refused(command("mirror", "data", "copy", "-t", "nope"), "topic_not_found")
    refused(command("mirror", "data", "ftp://x"), "unsupported")


def test_the_command_follows_until_it_is_interrupted(tmp_path: Path) -> None:
    """One line of JSON whenever it has caught up; Ctrl-C is the way to end it, and no failure."""
    with hw.open_log(tmp_path / "data") as log:
        log.create_topic("t", "n INT", partitions=1)
        log.append("t", [{"n": 1}])
        with start("mirror", str(tmp_path / "data"), str(tmp_path / "copy"), "--follow") as running:
            assert running.stdout is not None and running.stderr is not None
            assert json.loads(running.stdout.readline()) == {"topics": 1, "events": 1, "behind": 0}
            log.append("t", [{"n": 2}, {"n": 3}])
            assert json.loads(running.stdout.readline()) == {"topics": 1, "events": 3, "behind": 0}
            running.send_signal(signal.SIGINT)
            assert running.stdout.read() == b"" and running.stderr.read() == b""
            assert running.wait(timeout=20) == 0


def test_what_queues_keep_for_themselves_is_not_copied(tmp_path: Path) -> None:
    """Notes of units of work belong to queues that the copy has not; and a copy keeps what was acknowledged here."""
    with hw.open_log(str(tmp_path / "a")) as log, hw.open_log(str(tmp_path / "b")) as copy:
        log.create_topic("tasks", partitions=1, retain="until_acked")
        log.append("tasks", [b"%d" % number for number in range(10)])
        log.mirror(copy)
        with log.queue("tasks") as queue, log.transaction() as unit:
            unit.ack(queue.lease())
        assert log.tidy("tasks.default.acks") == 1 and log.tidy("tasks") == 10
        log.append("tasks", [b"10"])
        assert log.mirror(copy).events == 1
        assert copy.topics() == ["tasks"] and copy.topic("tasks").retain == "all"
        with copy.queue("tasks") as queue:
            queue.ack(queue.lease())
        assert copy.tidy("tasks") == 0
        assert copy.offsets("tasks") == {0: range(11)} and log.offsets("tasks") == {0: range(10, 11)}
