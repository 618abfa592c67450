"""The local log on a disk that is full, fails or loses power: what was acknowledged stays, and it goes on when it can."""

from __future__ import annotations

import errno
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headwater as hw
from headwater.log.log import Log
from headwater.log.memory import store as memory  # noqa: F401 (a child with another user may not be able to load them)
from headwater.model.errors import (
    DiskFull,
    Poisoned,
    PositionLost,
)
from headwater.testing import Crashed, SimDisk
from headwater.testing.contracts.case import refused, values_of


class FullDisk:
    """A log on a disk without room, and a way to make room."""

    def __init__(self, log: Log, fill: Callable[[], object], free: Callable[[], object]) -> None:
        self.log = log
        self.fill = fill
        self.free = free


@pytest.fixture(params=["simulated", "real"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FullDisk]:
    """A disk of half a megabyte with a log on it: a simulated one, and a real one where we may mount it."""
    if request.param == "simulated":
        disk = SimDisk(7, capacity_bytes=1 << 19)
        process = disk.process("writer")
        filler = f"{disk.folder}/filler"

        def fill() -> None:
            process.open(filler, "create").write_at(0, [bytes(disk.free_bytes())])

        with hw.open_log(f"{disk.folder}/log", disk=process) as log:
            yield FullDisk(log, fill, lambda: process.remove(filler))
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        with hw.open_log(str(tmp_path / "log")) as log:
            yield FullDisk(log, lambda: fill_up(tmp_path / "filler"), (tmp_path / "filler").unlink)
    finally:
        # Lazily, because a traceback may still hold a file of it.
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def append_until_full(log: Log, topic: str, *, atomic: bool = False) -> list[bytes]:
    """Appends until the disk is full; what was acknowledged."""
    stored: list[bytes] = []
    with refused(DiskFull):
        while True:
            value = b"%d" % len(stored) * 300
            log.append(topic, [value], atomic=atomic)
            stored.append(value)
    return stored


@pytest.mark.parametrize("atomic", [False, True], ids=["append", "transaction"])
def test_a_full_disk_refuses_and_works_again_when_there_is_room(small_disk: FullDisk, atomic: bool) -> None:
    """Nothing acknowledged is lost, nothing torn is seen, and the same handle goes on."""
    log = small_disk.log
    log.create_topic("raw", partitions=1, segment_bytes=32_768)
    small_disk.fill()
    stored = append_until_full(log, "raw", atomic=atomic)
    assert values_of(log, "raw") == stored
    with refused(DiskFull):
        log.append("raw", [b"x" * 50_000], atomic=atomic)
    assert hw.errors.DiskFull.retriable
    small_disk.free()
    log.append("raw", [b"room again"], atomic=atomic)
    log.append("raw", [b"x" * 50_000])
    assert values_of(log, "raw") == [*stored, b"room again", b"x" * 50_000]


def test_a_topic_is_made_whole_or_not_at_all_on_a_full_disk(small_disk: FullDisk) -> None:
    """Half a topic would be worse than none."""
    log = small_disk.log
    small_disk.fill()
    with refused(DiskFull):
        log.create_topic("raw", partitions=16)
    assert log.topics() == []
    small_disk.free()
    log.create_topic("raw", partitions=1)
    log.append("raw", [b"x"])
    assert values_of(log, "raw") == [b"x"]


def test_a_producer_waits_for_room(small_disk: FullDisk) -> None:
    """For `retry_s`: what it was given is stored, once and in order, as soon as there is room."""
    log = small_disk.log
    log.create_topic("raw", partitions=1, segment_bytes=32_768)
    small_disk.fill()
    timer = threading.Timer(0.3, small_disk.free)
    timer.start()
    with log.producer(linger_ms=0, retry_s=30) as producer:
        for number in range(200):
            producer.send("raw", b"%d" % number * 100)
    timer.join()
    assert values_of(log, "raw") == [b"%d" % number * 100 for number in range(200)]


def test_a_producer_that_waited_in_vain_says_so(small_disk: FullDisk) -> None:
    """The receipt and the flush raise `DiskFull`; when there is room the producer goes on."""
    log = small_disk.log
    log.create_topic("raw", partitions=1, segment_bytes=32_768)
    small_disk.fill()
    append_until_full(log, "raw")
    before = len(values_of(log, "raw"))
    producer = log.producer(linger_ms=60_000, retry_s=0.05)
    lost = producer.send("raw", b"x" * 5_000)
    with refused(DiskFull):
        lost.result(timeout_s=20)
    with refused(DiskFull):
        producer.flush(timeout_s=20)
    small_disk.free()
    assert producer.send("raw", b"stored").result(timeout_s=20).offset == before
    producer.close()
    assert values_of(log, "raw")[before:] == [b"stored"]


def test_a_full_disk_at_the_commit_record_is_a_full_disk() -> None:
    """The transaction did not happen, and the next one does: no need to open the log again."""
    disk = SimDisk(3)
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("writer")) as log:
        log.create_topic("raw", partitions=2)
        for operation in ("allocate", "write"):
            disk.fail(operation, "*/commits", errno.ENOSPC)
            try:
                log.append("raw", [b"x"], atomic=True)
            except DiskFull:
                log.append("raw", [b"x"], atomic=True)
            disk.heal()
            log.append("raw", [b"y"])
        assert sorted(values_of(log, "raw")) == [b"x", b"x", b"y", b"y"]


def test_a_failed_fsync_closes_its_partition_until_the_log_is_opened_again() -> None:
    """No silent retry: what was not acknowledged is not there, what was is, and the other partitions go on."""
    disk = SimDisk(5)
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("writer")) as log:
        log.create_topic("raw", partitions=1)
        log.create_topic("other", partitions=1)
        log.append("raw", [b"stored"])
        disk.fail("sync", "*/raw/0/*.frames")
        with refused(Poisoned, "raw"):
            log.append("raw", [b"lost"])
        with refused(Poisoned, "raw"):
            log.append("raw", [b"not tried"])
        log.append("other", [b"fine"])
        assert values_of(log, "raw") == [b"stored"]
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("again")) as log:
        log.append("raw", [b"stored too"])
        assert values_of(log, "raw") == [b"stored", b"stored too"]
        assert values_of(log, "other") == [b"fine"]


@pytest.mark.parametrize("seed", range(8))
def test_an_fsync_that_fails_behind_a_dead_writer_closes_the_partition_too(seed: int) -> None:
    """What that writer began is cut off and synced; a later transaction, which makes events durable, must not count on that sync."""
    disk = SimDisk(seed)
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("before")) as log:
        log.create_topic("swift", partitions=1, durability="os")
        log.create_topic("other", partitions=1)
        log.append("swift", [b"a"])
        log.append("swift", [b"b"])
    disk.crash_at("dying", "append: locked")
    with pytest.raises(Crashed):
        hw.open_log(f"{disk.folder}/log", disk=disk.process("dying")).append("swift", [b"never"])
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("next")) as log:
        disk.fail("sync", "*/swift/0/*.frames")
        with refused(Poisoned, "swift"):
            log.append("swift", [b"not stored"])
    disk.heal()
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("again")) as log, log.transaction() as transaction:
        transaction.append("swift", [b"c"])
        transaction.append("other", [b"d"])
    disk.power_loss()
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("after")) as log:
        assert values_of(log, "swift") == [b"a", b"b", b"c"]


def test_a_log_is_mended_though_a_topic_is_half_deleted() -> None:
    """A commit whose sync failed is replaced with every partition's head on disk; those of a topic that is going do not count."""
    disk = SimDisk(3)
    writer, deleter, other = (
        hw.open_log(f"{disk.folder}/log", disk=disk.process(name)) for name in ("writer", "deleter", "other")
    )
    for name in ("raw", "more", "going"):
        writer.create_topic(name, partitions=1)
    disk.fail("sync", "*/commits*")
    transaction = writer.transaction()
    for name in ("raw", "more"):
        transaction.append(name, [b"x"])
    with refused(Poisoned, "commit record"):
        transaction.commit()
    disk.heal()
    disk.crash_at("deleter", "delete: marked one")
    with pytest.raises(Crashed):
        deleter.delete_topic("going")
    with writer, other:
        other.append("raw", [b"y"])
        assert values_of(other, "raw")[-1] == b"y"


@pytest.mark.parametrize("seed", range(8))
def test_a_place_that_a_power_loss_took_back_is_refused(seed: int) -> None:
    """With `durability="os"` events can be lost; a position behind them is never taken for the events that came after."""
    disk = SimDisk(seed)
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("before"), durability="os") as log:
        log.create_topic("raw", partitions=1)
        for number in range(20):
            log.append("raw", [b"old %d" % number])
        with log.reader("raw") as reader:
            assert len(reader.poll()) == 20
            saved = reader.positions()
        disk.power_loss()
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("after")) as log:
        kept = values_of(log, "raw")
        assert kept == [b"old %d" % number for number in range(len(kept))]
        log.append("raw", [b"new"] * 30)
        if len(kept) == 20:
            assert log.read("raw", start=saved).num_rows == 30
        else:
            with refused(PositionLost, "20", str(len(kept))):
                log.read("raw", start=saved)
        with log.reader("raw", start="latest") as reader:
            assert reader.positions()[0].incarnation > saved[0].incarnation
            assert log.read("raw", start=reader.positions()).num_rows == 0
