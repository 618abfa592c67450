"""Topics that free what was acknowledged, on a local log: with kills at any moment, after a power loss, with an archive."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

import headwater as hw
from headwater.log.kafka.catalog import topic_settings
from headwater.model.errors import LeaseExpired, Unsupported
from headwater.testing import SimDisk
from headwater.testing.contracts.case import refused, values_of
from headwater.testing.crash.disk import CrashingDisk
from headwater.testing.crash.points import crash_points, keeping_points, queue_points
from tests.rigs.children import Child

EVENTS = 600
PARTITIONS = 2
ROUNDS = 4
BENCH_ROUNDS = 60
POINTS = [point for point in (*queue_points(), *keeping_points()) if "archive" not in point]


def work(folder: str, account: Path, seed: int, point: str | None) -> None:
    """Leases, acknowledges one by one or not, and frees now and then, until it is told to end.

    Before each acknowledgement it writes down the event, and after it whether that happened.
    """
    chance = random.Random(seed)
    handle = os.open(account, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    disk = None if point is None else CrashingDisk(point, chance.choice([1, 2, 5]))
    with hw.open_log(folder, disk=disk) as log, log.queue("tasks", lease_s=0.3, deliveries_max=None) as queue:
        while not os.path.exists(f"{folder}.done"):
            leases = queue.lease(events_max=chance.choice([1, 10, 60]), timeout_s=0.05)
            done = [lease for lease in leases if chance.random() < 0.9]
            for lease in done:
                place = [lease.event.partition, lease.event.offset, int(lease.event.value[:6])]
                os.write(handle, json.dumps(["begun", *place]).encode() + b"\n")
                try:
                    queue.ack([lease])
                    outcome = "acked"
                except LeaseExpired:
                    outcome = "refused"
                os.write(handle, json.dumps([outcome, *place]).encode() + b"\n")
            if chance.random() < 0.3:
                log.tidy("tasks")


Places = dict[tuple[int, int], int]


def acknowledged(accounts: Path) -> tuple[Places, Places]:
    """What workers have acknowledged, by place, and what the last word of a worker leaves open: it was at it when it died or is now."""
    acked, unknown = Places(), Places()
    for file in accounts.iterdir():
        lines = [json.loads(raw) for raw in file.read_bytes().splitlines()]
        for outcome, partition, offset, number in lines:
            if outcome == "acked":
                acked[partition, offset] = number
        if lines and lines[-1][0] == "begun":
            _, partition, offset, number = lines[-1]
            unknown[partition, offset] = number
    return acked, unknown


def fire(folder: Path, seed: int) -> None:
    """One round: what is gone was acknowledged, whenever one looks, and in the end everything was."""
    chance, where = random.Random(seed), str(folder / "log")
    accounts = folder / "accounts"
    accounts.mkdir()
    with hw.open_log(where, durability="os") as log:
        log.create_topic("tasks", partitions=PARTITIONS, segment_bytes=4096, retain="until_acked")
        log.queue("tasks", lease_s=0.3, deliveries_max=None).close()
    count, alive, sent = 0, list[Child[None]](), 0

    def start(*, point: str | None) -> None:
        nonlocal count
        count += 1
        name, worker_seed = accounts / f"w{count}", chance.randrange(1 << 30)
        alive.append(Child(lambda: work(where, name, worker_seed, point)))

    def looks_right(log: hw.Log) -> None:
        held = log.offsets("tasks")
        acked, unknown = acknowledged(accounts)
        for partition, offsets in held.items():
            gone = set(range(offsets.start)) - {offset for number, offset in acked | unknown if number == partition}
            assert not gone, f"seed {seed}: {sorted(gone)} of partition {partition} went and nobody had done them"

    try:
        for _ in range(4):
            start(point=None)
        with hw.open_log(where) as log:
            while sent < EVENTS:
                log.append("tasks", [b"%06d" % (sent + n) + b"x" * 200 for n in range(20)])
                sent += 20
                time.sleep(chance.uniform(0, 0.04))
                looks_right(log)
                alive = [child for child in alive if child.is_running()]
                if len(alive) > 2 and chance.random() < 0.3:
                    chance.choice(alive).kill()
                while len(alive) < 4:
                    start(point=chance.choice(POINTS) if chance.random() < 0.6 else None)
    finally:
        Path(f"{where}.done").touch()
        for child in alive:
            child.wait()
    Path(f"{where}.done").unlink()
    with hw.open_log(where) as log:
        looks_right(log)
        start(point=None)
        with log.queue("tasks", lease_s=0.3, deliveries_max=None) as queue:
            while (depth := queue.depth()).ready + depth.leased and alive[-1].is_running():
                time.sleep(0.05)
        Path(f"{where}.done").touch()
        alive[-1].result()
        acked, unknown = acknowledged(accounts)
        assert sorted((acked | unknown).values()) == list(range(EVENTS)), f"seed {seed}: an event was lost"
        assert len(unknown.keys() - acked.keys()) <= count, "one for each worker that died, at most"
        log.tidy("tasks")
        assert all(len(offsets) == 0 for offsets in log.offsets("tasks").values()), f"seed {seed}: all was done"
        assert len(list(Path(where, "topics", "tasks").glob("*/0*.*"))) <= 3 * PARTITIONS


def work_in_units(folder: str, seed: int, point: str | None) -> None:
    """Writes a result for each event in the transaction that acknowledges it, and frees what is done and noted."""
    chance = random.Random(seed)
    disk = None if point is None else CrashingDisk(point, chance.choice([1, 2, 5]))
    with hw.open_log(folder, disk=disk) as log, log.queue("tasks", lease_s=0.3, deliveries_max=None) as queue:
        while not os.path.exists(f"{folder}.done"):
            leases = queue.lease(events_max=chance.choice([1, 5, 20]), timeout_s=0.05)
            if leases:
                with suppress(LeaseExpired), log.transaction() as unit:
                    unit.append("results", [lease.event.value[:6] for lease in leases])
                    unit.ack(leases)
            for topic in ("tasks", "tasks.default.acks"):
                if chance.random() < 0.4 and topic in log.topics():
                    log.tidy(topic)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.bench) for n in range(100, 140))])
def test_units_of_work_happen_once_though_their_notes_are_freed(tmp_path: Path, seed: int) -> None:
    """Whoever finds a unit half done looks for its note: it must not be gone before."""
    print(f"seed {seed}")
    chance, where = random.Random(seed), str(tmp_path / "log")
    with hw.open_log(where, durability="os") as log:
        log.create_topic("tasks", partitions=PARTITIONS, segment_bytes=4096, retain="until_acked")
        log.create_topic("results", partitions=1)
        log.append("tasks", [b"%06d" % number + b"x" * 200 for number in range(EVENTS)])
        alive = list[Child[None]]()
        try:
            for step in range(60):
                alive = [child for child in alive if child.is_running()]
                while len(alive) < 4:
                    point = chance.choice(POINTS) if chance.random() < 0.7 and step < 50 else None
                    worker_seed = chance.randrange(1 << 30)
                    alive.append(Child(lambda s=worker_seed, p=point: work_in_units(where, s, p)))
                time.sleep(0.03)
                if chance.random() < 0.3:
                    chance.choice(alive).kill()
            with log.queue("tasks", lease_s=0.3, deliveries_max=None) as queue:
                while (depth := queue.depth()).ready + depth.leased and any(child.is_running() for child in alive):
                    time.sleep(0.05)
        finally:
            Path(f"{where}.done").touch()
            for child in alive:
                child.wait()
        results = sorted(int(value) for value in values_of(log, "results"))
        assert results == list(range(EVENTS)), f"seed {seed}"
        for topic in ("tasks", "tasks.default.acks"):
            log.tidy(topic)
            assert all(len(held) == 0 for held in log.offsets(topic).values()), f"seed {seed}: {topic}"


@pytest.mark.slow
@pytest.mark.covers("concept: acknowledged and deleted")
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_workers_are_killed_and_nothing_goes_that_was_not_done(tmp_path: Path, seed: int) -> None:
    """The oracle knows only what workers wrote down before they acknowledged."""
    fire(tmp_path, seed)


@pytest.mark.bench
@pytest.mark.parametrize("seed", range(1000, 1000 + BENCH_ROUNDS))
def test_workers_are_killed_for_long(tmp_path: Path, seed: int) -> None:
    """As above, with more seeds."""
    fire(tmp_path, seed)


@pytest.mark.parametrize("seed", range(8))
def test_a_power_loss_that_takes_events_back_takes_their_acknowledgements_back_too(seed: int) -> None:
    """With durability="os" other events may get the same offsets: they are not freed for what those before them were."""
    disk = SimDisk(seed)
    log = hw.open_log("/disk/log", disk=disk.process("one"), durability="os")
    log.create_topic("tasks", partitions=1, segment_bytes=4096, retain="until_acked")
    for number in range(20):
        log.append("tasks", [b"old %d" % number + b"x" * 300])
    with log.queue("tasks") as queue:
        queue.ack(queue.lease(events_max=20))
    disk.power_loss()
    log = hw.open_log("/disk/log", disk=disk.process("two"), durability="os")
    kept = log.offsets("tasks")[0].stop
    for number in range(20):
        log.append("tasks", [b"new %d" % number + b"x" * 300])
    log.tidy("tasks")
    assert log.offsets("tasks")[0].start <= kept
    with log.queue("tasks") as queue:
        found = [lease.event.value for lease in queue.lease(events_max=100)]
    assert [value for value in found if value.startswith(b"new")] == [b"new %d" % n + b"x" * 300 for n in range(20)]


def test_what_was_acknowledged_goes_to_the_archive_first(tmp_path: Path) -> None:
    """Nothing is missed then: it is read from there."""
    with hw.open_log(str(tmp_path / "log")) as log:
        where = (tmp_path / "archive").as_uri()
        log.create_topic("tasks", partitions=1, segment_bytes=4096, retain="until_acked", archive=where)
        for number in range(30):
            log.append("tasks", [b"%d" % number + b"x" * 500])
        with log.queue("tasks") as queue:
            queue.ack(queue.lease(events_max=30))
        assert log.tidy("tasks") == 30
        assert log.read("tasks").num_rows == 30
        assert len(list((tmp_path / "archive").rglob("*.parquet"))) >= 2


def test_a_damaged_window_frees_nothing(tmp_path: Path) -> None:
    """What a group has done cannot be known then."""
    with hw.open_log(str(tmp_path / "log")) as log:
        log.create_topic("tasks", partitions=1, segment_bytes=4096, retain="until_acked")
        for number in range(30):
            log.append("tasks", [b"%d" % number + b"x" * 500])
        with log.queue("tasks") as queue:
            queue.ack(queue.lease(events_max=30))
        window = tmp_path / "log" / "queues" / "default" / "tasks" / "0.window"
        whole = window.read_bytes()
        window.write_bytes(b"?" + whole[1:])
        assert log.tidy("tasks") == 0
        window.write_bytes(whole)
        assert log.tidy("tasks") == 30


def test_kafka_refuses_it() -> None:
    """Its brokers do not know what a queue has done."""
    with hw.open_log("memory://") as log, refused(Unsupported, "until_acked"):
        topic_settings(log.create_topic("tasks", retain="until_acked"))


@pytest.mark.slow
def test_the_keeper_frees_by_itself(tmp_path: Path) -> None:
    """A process that has the topic open for writing looks after it."""
    code = (
        "import headwater.log.file.upkeep.keeper as k\n"
        "k.Keeper.__init__.__kwdefaults__.update(after_s=0.1, every_s=0.1)\n"
        "import sys, time, headwater as hw\n"
        "log = hw.open_log(sys.argv[1]); log.topic('tasks')\n"
        "while log.offsets('tasks')[0].start < 30: time.sleep(0.05)\n"
        "log.close()\n"
    )
    with hw.open_log(str(tmp_path)) as log:
        log.create_topic("tasks", partitions=1, retain="until_acked")
        log.append("tasks", [b"x"] * 30)
        with log.queue("tasks") as queue:
            queue.ack(queue.lease(events_max=30))

        def look() -> None:
            os.execv(os.sys.executable, [os.sys.executable, "-c", code, str(tmp_path)])  # type: ignore[attr-defined]

        child = Child(look)
        try:
            deadline = time.monotonic() + 30
            while child.is_running() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not child.is_running() and child.wait() == 0
        finally:
            if child.is_running():
                os.kill(child.pid, signal.SIGKILL)
        assert log.offsets("tasks") == {0: range(30, 30)}


@pytest.mark.slow
@pytest.mark.parametrize("point", [point for point in crash_points() if point.startswith(("transaction:", "commit:"))])
def test_a_unit_of_work_whose_process_dies_while_it_commits_happens_once(tmp_path: Path, point: str) -> None:
    """Its record decides, also where nobody has published it yet when the next one looks for the note."""
    folder = str(tmp_path / "log")
    with hw.open_log(folder) as log:
        for name in ("tasks", "results"):
            log.create_topic(name, partitions=1)
        log.append("tasks", [b"%d" % number for number in range(10)])

    def use() -> None:
        with hw.open_log(folder, disk=CrashingDisk(point)) as mine, mine.queue("tasks", lease_s=600) as queue:
            leases, unit = queue.lease(), mine.transaction()
            unit.append("results", [lease.event.value for lease in leases])
            unit.ack(leases)
            unit.commit()

    child = Child(use)
    died = os.WIFSIGNALED(child.wait())
    with hw.open_log(folder) as log, log.queue("tasks") as queue:
        leases = queue.lease(timeout_s=0.5)
        with log.transaction() as unit:
            unit.append("results", [lease.event.value for lease in leases])
            unit.ack(leases)
        assert died and sorted(int(value) for value in values_of(log, "results")) == list(range(10))
