"""The local log shared by processes: appending together, following each other, forking, and dying with a lock in hand."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.log.disk import wait
from headwater.log.file.upkeep.keeper import holding
from headwater.log.log import Log
from headwater.model.errors import Closed, Fenced
from headwater.testing.contracts.case import events_of, refused, values_by_partition, values_of
from tests.rigs.children import Child, Gate, in_child


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.mark.slow
def test_processes_append_together_without_loss(folder: str) -> None:
    """Every batch of every process is stored once, whole, at the offsets it was told, and offsets stay dense over rolls."""
    with hw.open_log(folder) as log:
        log.create_topic("raw", partitions=2, segment_bytes=8192)

    def write(name: str) -> list[tuple[int, range, bytes]]:
        spans = []
        with hw.open_log(folder) as mine:
            for number in range(40):
                value = f"{name}-{number}".encode()
                if number % 4:
                    spans += [(p, span, value) for p, span in mine.append("raw", [value] * 5).items()]
                else:
                    with mine.transaction() as transaction:
                        transaction.append("raw", [value] * 5)
                    spans += [(p, span, value) for p, found in transaction.offsets["raw"].items() for span in found]
        return spans

    children = [Child(lambda name=name: write(name)) for name in "abc"]
    spans = [span for child in children for span in child.result()]
    with hw.open_log(folder) as log:
        found = values_by_partition(log, "raw")
        assert len(list(Path(folder).glob("topics/raw/*/*.frames"))) > 4
    assert sum(map(len, found.values())) == 3 * 40 * 5
    for partition, span, value in spans:
        assert found[partition][span.start : span.stop] == [value] * 5


@pytest.mark.slow
def test_producers_of_many_processes_keep_their_order(folder: str) -> None:
    """Each receipt is right, and what one process sent stands in its order."""
    with hw.open_log(folder) as log:
        log.create_topic("t", "name STRING, n INT", key="name", partitions=3)

    def produce(name: str) -> list[tuple[int, int, int]]:
        with hw.open_log(folder) as mine, mine.producer(linger_ms=1) as producer:
            receipts = [producer.send("t", {"name": name, "n": number}) for number in range(500)]
            places = [receipt.result() for receipt in receipts]
        return [(number, place.partition, place.offset) for number, place in enumerate(places)]

    children = {name: Child(lambda name=name: produce(name)) for name in ("one", "two", "three", "four")}
    places = {name: child.result() for name, child in children.items()}
    with hw.open_log(folder) as log:
        stored = {(event.partition, event.offset): event.value for event in events_of(log, "t")}
    assert len(stored) == 4 * 500
    by_name: dict[str, list[int]] = defaultdict(list)
    for value in (stored[place] for place in sorted(stored)):
        by_name[value["name"]].append(value["n"])
    assert dict(by_name) == {name: list(range(500)) for name in children}
    for name, found in places.items():
        assert all(stored[partition, offset] == {"name": name, "n": number} for number, partition, offset in found)


@pytest.mark.covers("DistributedLog", backends=["file"])
def test_a_stale_writer_in_another_process_is_refused(folder: str) -> None:
    """It slept, another took over by its name; when it wakes up not one of its events is stored."""
    with hw.open_log(folder) as log, Gate() as asleep, Gate() as woken:
        log.create_topic("raw", partitions=1)

        def sleep_then_write() -> str:
            with hw.open_log(folder) as mine:
                stale = mine.producer(id="writer", linger_ms=60_000)
                stale.send("raw", b"before").result()
                waiting = stale.send("raw", b"too late")
                asleep.open()
                woken.wait()
                try:
                    waiting.result()
                except Fenced as error:
                    return error.code
                return "stored"

        child = Child(sleep_then_write)
        asleep.wait()
        with log.producer(id="writer") as fresh:
            fresh.send("raw", b"fresh").result()
            woken.open()
            assert child.result() == Fenced.code
            fresh.send("raw", b"fresh again").result()
        assert values_of(log, "raw") == [b"before", b"fresh", b"fresh again"]


def test_a_reader_in_another_process_wakes_at_once(folder: str) -> None:
    """It sleeps, and has each event within milliseconds of its append."""
    with hw.open_log(folder, durability="os") as log:
        log.create_topic("raw", partitions=2)
        delays = delays_of_a_follower(folder, log)
    assert statistics.median(delays) < 0.01


@pytest.mark.parametrize("refusing", ["inotify_init1", "inotify_add_watch"])
def test_a_reader_polls_where_inotify_is_exhausted(folder: str, monkeypatch: pytest.MonkeyPatch, refusing: str) -> None:
    """A machine allows few watches to each user; without one a reader is a little slower and otherwise the same."""
    real = ctypes.CDLL(None)
    calls: dict[str, Any] = {name: getattr(real, name) for name in ("inotify_init1", "inotify_add_watch")}
    calls[refusing] = lambda *_: -1
    monkeypatch.setattr(wait.ctypes, "CDLL", lambda _: SimpleNamespace(**calls))
    with hw.open_log(folder, durability="os") as log:
        log.create_topic("raw", partitions=2)
        assert isinstance(log.store.waiter(["raw"]), wait.PollingWaiter)
        for _ in range(2):
            log.append("raw", [b"one for each partition"])
        before = open_files(folder)
        delays = delays_of_a_follower(folder, log)
        assert open_files(folder) <= before + 1
    assert statistics.median(delays) < 0.05


def open_files(folder: str) -> int:
    """How many files of a log this process has open, and inotify instances; other tests of the process may have left others."""
    found = 0
    for handle in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{handle}")
            found += target.startswith(folder) or "inotify" in target
    return found


def delays_of_a_follower(folder: str, log: Log) -> list[float]:
    """How long after its append another process has each of a few events."""

    def follow() -> list[float]:
        delays: list[float] = []
        with hw.open_log(folder) as mine, mine.reader("raw", start="latest") as reader:
            reader.poll(timeout_s=0)
            ready.open()
            while len(delays) < 20:
                delays += [time.time() - float(event.value) for event in reader.poll(timeout_s=20)]
        return delays

    with Gate() as ready:
        child = Child(follow)
        ready.wait()
        for _ in range(20):
            time.sleep(0.01)
            log.append("raw", [b"%f" % time.time()])
        return child.result()


def test_an_event_loop_in_another_process_is_woken(folder: str) -> None:
    """By the same watch, without a thread."""
    with hw.open_log(folder) as log, Gate() as ready:
        log.create_topic("raw", partitions=1)

        async def follow() -> tuple[list[bytes], int]:
            found: list[bytes] = []
            with hw.open_log(folder) as mine, mine.reader("raw") as reader:
                await reader.poll_async(timeout_s=0)
                ready.open()
                while len(found) < 5:
                    found += [event.value for event in await reader.poll_async(timeout_s=20)]
                return found, threading.active_count()

        child = Child(lambda: asyncio.run(follow()))
        ready.wait()
        for number in range(5):
            log.append("raw", [b"%d" % number])
            time.sleep(0.002)
        found, threads = child.result()
        assert found == [b"0", b"1", b"2", b"3", b"4"]
        assert threads == 1


def test_a_forked_child_uses_the_log_it_inherited(folder: str) -> None:
    """Both go on writing and reading, and their offsets join."""
    with hw.open_log(folder) as log:
        log.create_topic("raw", partitions=1, segment_bytes=4096)
        log.append("raw", [b"before"])

        def use() -> int:
            for number in range(30):
                log.append("raw", [b"child %d" % number])
            with log.transaction() as transaction:
                transaction.append("raw", [b"child, together"])
            with log.producer(id="child") as producer:
                producer.send("raw", b"child, sent").result()
            log.create_topic("of-the-child")
            return len(values_of(log, "raw"))

        child = Child(use)
        for number in range(30):
            log.append("raw", [b"parent %d" % number])
        assert child.result() >= 33
        values = values_of(log, "raw")
        assert len(values) == 63
        for who in (b"child", b"parent"):
            numbers = [int(value.split()[1]) for value in values if value.startswith(who + b" ")]
            assert numbers == list(range(30))
        assert log.topics() == ["of-the-child", "raw"]


def test_a_forked_child_appends_much_as_its_parent_did(folder: str) -> None:
    """What the parent keeps running for large batches does not run in the child, and is not waited for there."""
    batch = pa.record_batch({"n": pa.array(range(150_000))})
    with hw.open_log(folder, durability="os") as log:
        log.create_topic("numbers", "n BIGINT", key="n", partitions=3)
        log.append("numbers", batch)
        assert len(in_child(lambda: log.append("numbers", batch), timeout_s=30)) == 3
        log.append("numbers", batch)
        assert log.read("numbers").num_rows == 450_000


def test_a_producer_belongs_to_the_process_that_opened_it(folder: str) -> None:
    """In a forked child it is refused and sends nothing again, not even when it is closed there."""
    with hw.open_log(folder) as log:
        log.create_topic("raw", partitions=1)
        producer = log.producer(linger_ms=60_000)
        receipt = producer.send("raw", b"once")

        def use() -> None:
            with refused(Closed, "fork"):
                producer.send("raw", b"by the child")
            with refused(Closed, "fork"):
                producer.flush()
            with refused(Closed, "fork"):
                receipt.result(timeout_s=5)
            producer.close()
            with log.producer() as mine:
                mine.send("raw", b"by the child's own").result()

        in_child(use)
        assert receipt.result().offset == 1
        producer.close()
        assert values_of(log, "raw") == [b"by the child's own", b"once"]


def test_a_reader_of_the_parent_is_not_disturbed_by_a_fork(folder: str) -> None:
    """A child that goes on with its copy reads from the same place; the parent misses neither events nor wake-ups."""
    with hw.open_log(folder) as log:
        log.create_topic("raw", partitions=1)
        with log.reader("raw") as reader:
            log.append("raw", [b"0", b"1"])
            assert len(reader.poll(events_max=1)) == 1
            reader.poll(timeout_s=0.001, events_max=1)
            with log.reader("raw", start=1) as inherited:
                inherited.poll(events_max=1)
                inherited.poll(timeout_s=0.01)

                def follow() -> list[bytes]:
                    found: list[bytes] = []
                    while len(found) < 10:
                        found += [event.value for event in inherited.poll(timeout_s=20)]
                    return found

                child = Child(follow)
                delays = []
                for number in range(2, 12):
                    log.append("raw", [b"%d" % number])
                    begun = time.monotonic()
                    assert [event.value for event in inherited.poll(timeout_s=20)] == [b"%d" % number]
                    delays.append(time.monotonic() - begun)
                    time.sleep(0.005)
                assert child.result() == [b"%d" % number for number in range(2, 12)]
                assert max(delays) < 0.9


def test_a_fork_in_the_middle_of_an_append_does_not_block_the_child(folder: str) -> None:
    """A thread of the parent holds the partition at that moment; the child waits for it and goes on."""
    with hw.open_log(folder) as log:
        log.create_topic("raw", partitions=1)
        log.append("raw", [b"before"])
        stop = threading.Event()

        def append() -> None:
            while not stop.is_set():
                log.append("raw", [b"x"] * 100)

        threads = [threading.Thread(target=append) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(15):
                assert in_child(lambda: log.append("raw", [b"child"]), timeout_s=20)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert values_of(log, "raw").count(b"child") == 15


def test_a_fork_while_another_thread_appends_for_the_first_time_does_not_block_the_child(tmp_path: Path) -> None:
    """PyArrow imports pandas under a lock when it builds its first array; a fork waits until that is over."""
    slow = tmp_path / "pandas"
    slow.mkdir()
    (slow / "__init__.py").write_text(
        "import pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'begun')!r}).touch()\n"
        "time.sleep(1)\n"
        "raise ImportError('as if it were not installed')\n"
    )
    code = (
        "import os, pathlib, signal, sys, threading, time\n"
        "import headwater as hw\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "log = hw.open_log(folder / 'log')\n"
        "log.create_topic('raw', partitions=1)\n"
        "threading.Thread(target=lambda: log.append('raw', [b'parent'])).start()\n"
        "while not (folder / 'begun').exists():\n"
        "    time.sleep(0.001)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    log.append('raw', [b'child'])\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0, 'the child hung'\n"
        "log.close()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    with hw.open_log(str(tmp_path / "log")) as log:
        assert sorted(values_of(log, "raw")) == [b"child", b"parent"]


@pytest.mark.parametrize("parent_dies", [False, True])
def test_a_lock_that_another_thread_held_at_a_fork_is_not_kept_by_the_child(folder: str, parent_dies: bool) -> None:
    """Its file is known to a thread that the child does not have; it is freed when the parent lets go of it, or dies."""
    with hw.open_log(folder) as log, Gate() as forked, Gate() as done:
        log.create_topic("raw", partitions=1)

        def hold_and_fork() -> None:
            with hw.open_log(folder) as mine:
                held, fork = threading.Event(), threading.Event()

                def hold() -> None:
                    with lock_of(mine, "seal"):
                        held.set()
                        fork.wait()

                thread = threading.Thread(target=hold)
                thread.start()
                held.wait()
                grandchild = os.fork()
                if grandchild == 0:
                    if parent_dies:  # said by the child, which has let go of the lock when it gets here
                        forked.open(b"%d" % os.getpid())
                    time.sleep(60)
                    os._exit(0)
                if parent_dies:
                    time.sleep(60)
                fork.set()
                thread.join()
                forked.open(b"%d" % grandchild)
                done.wait()

        parent = Child(hold_and_fork)
        grandchild = int(forked.wait())
        try:
            if parent_dies:
                parent.kill()
            with lock_of(log, "seal") as is_free:
                assert is_free
        finally:
            os.kill(grandchild, signal.SIGKILL)
            if not parent_dies:
                done.open()
                parent.result()


@pytest.mark.slow
@pytest.mark.parametrize("held", ["append", "sync", "catalog", "commit"])
def test_a_lock_dies_with_its_process_though_a_child_of_it_lives(folder: str, held: str) -> None:
    """`flock` survives a fork: a child that kept its parent's files would keep its locks for ever."""
    with hw.open_log(folder) as log, Gate() as forked:
        log.create_topic("raw", partitions=1)
        log.append("raw", [b"before"])

        def hold_and_fork() -> None:
            mine = hw.open_log(folder)
            mine.append("raw", [b"mine"])
            with lock_of(mine, held):
                grandchild = os.fork()
                if grandchild == 0:
                    time.sleep(60)
                    os._exit(0)
                forked.open(b"%d" % grandchild)
                time.sleep(60)

        parent = Child(hold_and_fork)
        grandchild = int(forked.wait())
        try:
            parent.kill()
            begun = time.monotonic()
            with hw.open_log(folder) as fresh:
                fresh.append("raw", [b"after"])
                fresh.append("raw", [b"after"], atomic=True)
                fresh.create_topic("also")
            log.append("raw", [b"after"])
            assert time.monotonic() - begun < 10
        finally:
            os.kill(grandchild, signal.SIGKILL)
        assert values_of(log, "raw") == [b"before", b"mine", b"after", b"after", b"after"]


def lock_of(log: Log, held: str) -> Any:
    """Holds one of the log's locks, as an operation in its middle does."""
    store: Any = log.store
    if held == "catalog":
        return store._catalog()
    if held == "commit":
        return store._commits.locked()
    partition = store.handles.partition("raw", 0)
    if held == "seal":
        return holding(store._disk, partition)
    return partition.appending() if held == "append" else partition.syncing()


@pytest.mark.slow
def test_many_logs_opened_and_closed_leave_nothing_behind(folder: str) -> None:
    """Neither descriptors nor threads nor anything that a later fork would trip over."""
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for number in range(20):
        with hw.open_log(f"{folder}{number}") as log:
            log.create_topic("raw", partitions=1, segment_bytes=4096)
            with log.producer() as producer, log.reader("raw") as reader:
                for _ in range(10):
                    producer.send("raw", b"x" * 1000).result()
                reader.poll()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
    assert in_child(lambda: "fine") == "fine"
