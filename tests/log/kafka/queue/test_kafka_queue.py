"""Queues on a real Kafka: the contract, what share groups cannot do, and what only they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

import headwater
from headwater.cli.main import main
from headwater.log.kafka.queue.member import ShareMember
from headwater.log.kafka.queue.share_group import ShareGroup
from headwater.log.log import Log
from headwater.model.errors import Closed, InvalidInput, NoAccess, SchemaMismatch, Unsupported
from headwater.testing.contracts.case import OpenLog, refused, values_of
from headwater.testing.contracts.queues.case import one, take
from headwater.testing.contracts.queues.queue import QueueContract
from headwater.testing.servers.kafka import KafkaServer
from tests.rigs.children import in_child
from tests.rigs.services import fresh_logs

pytestmark = pytest.mark.service("kafka")


@pytest.fixture(scope="module")
def fresh_urls(kafka: KafkaServer) -> Iterator[Iterator[str]]:
    """Addresses of empty logs."""
    yield from fresh_logs(kafka)


@pytest.fixture
def url(fresh_urls: Iterator[str]) -> str:
    """The address of an empty log."""
    return next(fresh_urls)


@pytest.fixture
def log(url: str) -> Iterator[Log]:
    """An empty log."""
    with headwater.open_log(url) as log:
        yield log


class TestKafkaQueues(QueueContract):
    """Queues made of share groups."""

    backend = "kafka"
    queues_can_be_counted = False
    lease_s_min = 1.0

    @pytest.fixture
    def open_log(self, url: str) -> OpenLog:
        return lambda: headwater.open_log(url)


def test_what_share_groups_cannot_do_is_refused_with_advice(log: Log) -> None:
    """When the queue is opened, or when it is asked for; nothing is settled by it."""
    log.create_topic("tasks", partitions=1)
    log.append("tasks", [b"x"])
    for settings in (
        {"order": "key"},
        {"order": "sticky"},
        {"duplicates_s": 5},
        {"where": lambda event: True},
        {"deliveries_max": None},
    ):
        with refused(Unsupported, next(iter(settings)), "Kafka"):
            log.queue("tasks", **settings)
    assert log.store.queues() == []
    with log.queue("tasks") as queue:
        lease = one(queue)
        for name, use in {
            "delay_s": lambda: lease.nack(delay_s=1),
            "extend": lambda: lease.extend(5),
            "defer": lease.defer,
            "recall": lambda: queue.recall([]),
            "browse": queue.browse,
            "depth": queue.depth,
            "floors": queue.floors,
            "seek": lambda: queue.seek("earliest"),
            "at=": lambda: queue.send(b"y", at=5),
            "tx.ack": lambda: log.transaction().ack([lease]),
        }.items():
            with refused(Unsupported, name):
                use()
        queue.ack([lease])
        assert queue.counters()["acked"] == 1


def test_leases_and_limits_that_the_brokers_forbid_are_refused(log: Log) -> None:
    """The error has the brokers' own words; the brokers' delivery limit would drop what is no dead letter yet."""
    log.create_topic("tasks", partitions=1)
    for lease_s in (0.5, 3_600):
        with log.queue("tasks", lease_s=lease_s) as queue, refused(InvalidInput, "share.record.lock.duration.ms"):
            queue.lease()
    with log.queue("tasks", deliveries_max=10) as queue, refused(Unsupported, "10 deliveries"):
        queue.lease()


def test_what_a_transaction_rolls_back_is_not_delivered(log: Log) -> None:
    """A share group of Kafka would read it if nobody told it otherwise, and begin at the end of the topic."""
    log.create_topic("tasks", partitions=1)
    bootstrap = log.url.removeprefix("kafka://").partition("?")[0]
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": log.url})
    producer.init_transactions()
    log.append("tasks", [b"before"])
    producer.begin_transaction()
    producer.produce(log.url.partition("prefix=")[2] + "tasks", b"never")
    producer.flush()
    producer.abort_transaction()
    log.append("tasks", [b"after"])
    with log.queue("tasks") as queue:
        assert [lease.event.value for lease in take(queue, 2)] == [b"before", b"after"]
        assert queue.lease(timeout_s=0) == []


def test_an_event_that_does_not_fit_the_schema_is_named_and_holds_up_nobody(log: Log) -> None:
    """The events around it are delivered; it comes again, and is named again, until the brokers drop it."""
    log.create_topic("numbers", "n INT", partitions=1)
    bootstrap, prefix = log.url.removeprefix("kafka://").split("?prefix=")
    producer = Producer({"bootstrap.servers": bootstrap})
    for value in (b'{"n": 1}', b"no JSON", b'{"n": 3}'):
        producer.produce(f"{prefix}numbers", value)
    producer.flush()
    with log.queue("numbers") as queue:
        found: list[int] = []
        failures: list[str] = []
        for _ in range(100):
            try:
                leases = queue.lease(timeout_s=0.1)
            except SchemaMismatch as error:
                failures.append(str(error))
                leases = []
            found += [lease.event.value["n"] for lease in leases]
            queue.ack(leases)
            if len(failures) == 10:
                break
        assert sorted(found) == [1, 3]
        assert len(failures) == 10 and all("offset 1" in failure for failure in failures)
        assert queue.lease(timeout_s=0) == []


def test_the_leases_of_a_killed_process_come_back(log: Log, url: str, tmp_path: Path) -> None:
    """When the brokers miss it: after the session of a member, or its lease if that is longer."""
    log.create_topic("tasks", partitions=2)
    log.append("tasks", [{"key": b"%d" % n, "value": b"%d" % n} for n in range(100)])
    program = (
        "import sys, time, headwater\n"
        "with headwater.open_log(sys.argv[1]) as log, log.queue('tasks', lease_s=1) as queue:\n"
        "    count = 0\n"
        "    while not count:\n"
        "        count = len(queue.lease())\n"
        "    print(count, flush=True)\n"
        "    time.sleep(60)\n"
    )
    source = str(Path(headwater.__file__).resolve().parent.parent)
    holder = subprocess.Popen(
        [sys.executable, "-c", program, url], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": source}
    )
    assert holder.stdout is not None
    held = int(holder.stdout.readline())
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with log.queue("tasks", lease_s=1) as queue:
        values, again = set(), 0
        deadline = time.monotonic() + 30
        while len(values) < 100 and time.monotonic() < deadline:
            leases = queue.lease()
            values |= {lease.event.value for lease in leases}
            again += sum(lease.deliveries > 1 for lease in leases)
            queue.ack(leases)
    assert len(values) == 100
    assert again >= held > 0


def test_a_forked_child_has_no_part_in_its_parents_queue(log: Log) -> None:
    """Its copy is of no use, and ends without waiting for the parent's clients."""
    log.create_topic("tasks", partitions=1)
    log.append("tasks", [b"x"])
    with log.queue("tasks") as queue:
        lease = one(queue)

        def use() -> None:
            with refused(Closed, "forked"):
                queue.lease(timeout_s=0)
            with refused(Closed):
                lease.ack()
            queue.close()

        in_child(use)
        lease.ack()
        queue.flush()
        assert queue.counters()["acked"] == 1


def test_a_broker_without_share_groups_is_named(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not know their settings, when the queue is opened; one that has them switched off, at the first lease."""
    log.create_topic("tasks", partitions=1)
    described = ShareGroup._described
    monkeypatch.setattr(ShareGroup, "_described", lambda self: {"consumer.session.timeout.ms": "45000"})
    with refused(Unsupported, "do not support share groups"):
        log.queue("tasks")
    monkeypatch.setattr(ShareGroup, "_described", described)

    class Off:
        """A consumer as it is on a broker where share.version is 0."""

        def poll(self, wait_s: float) -> list[Any]:
            raise KafkaException(KafkaError(KafkaError.UNSUPPORTED_VERSION, "ShareGroupHeartbeat", True))

        def close(self) -> None:
            """Nothing to leave."""

    monkeypatch.setattr(ShareMember, "_new", lambda self: Off())
    with log.queue("tasks") as queue, refused(Unsupported, "do not support share groups", "share.version"):
        queue.lease()


def test_the_commands_show_what_can_be_known(
    log: Log, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queues are listed with their dead letters, which are shown and sent back; the rest says why not."""
    log.create_topic("tasks", partitions=1)
    log.append("tasks", [b"poison", b"left"])
    with log.queue("tasks", group="workers", deliveries_max=1) as queue:
        poison, _ = take(queue, 2)
        poison.nack(reason="no such customer")

    def cli(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headwater", *arguments, "--log", url])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    code, out, _ = cli("queues", "list", "--json")
    known = {"topic": "tasks", "group": "workers", "order": "none", "dead": 1}
    assert (code, json.loads(out)) == (0, known | {"ready": None, "leased": None, "scheduled": None})
    code, out, _ = cli("queues", "list")
    assert code == 0 and "workers" in out and "None" not in out
    code, out, _ = cli("queues", "dead", "tasks")
    assert code == 0 and "no such customer" in out
    for command in ("show", "peek"):
        code, _, err = cli("queues", command, "tasks")
        assert code == 1 and "kafka-share-groups.sh" in err and "Traceback" not in err
    code, out, _ = cli("queues", "redrive", "tasks")
    assert (code, out) == (0, "1 event sent back to tasks, for group workers\n")
    assert values_of(log, "tasks") == [b"poison", b"left", b"poison"]


def test_a_read_only_handle_sees_dead_letters_and_leases_nothing(log: Log, url: str) -> None:
    """It makes no queue either."""
    log.create_topic("tasks", partitions=1)
    log.append("tasks", [b"poison"])
    with log.queue("tasks", group="workers") as queue:
        one(queue).reject("no such customer")
    with headwater.open_log(url, read_only=True) as reading:
        with reading.queue("tasks", group="workers") as queue:
            assert [letter.value for letter in queue.dead()] == [b"poison"]
            for change in (queue.redrive, queue.lease):
                with refused(NoAccess, "read-only"):
                    change()
        with reading.queue("tasks", group="others") as queue:
            assert queue.dead() == []
        assert [made["group"] for made in reading.store.queues()] == ["workers"]
