"""Recovery after the machine stopped: a partition that cannot be put in order is named, and keeps nobody from the rest of the log."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import headwater as hw
from headwater.log.doctor.doctor import Finding, examine
from headwater.model.errors import Damaged, DiskFull, HeadwaterError, StorageError
from headwater.testing import Crashed, SimDisk
from headwater.testing.contracts.case import refused, values_of
from headwater.testing.simulation.disk import Operation
from tests.rigs.log.specimen import AnotherBoot

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""A process that was killed frees what it held when it is collected, and is told that it is dead."""

VALUES = [b"%d" % number * 30 for number in range(20)]


def filled(folder: str) -> None:
    with hw.open_log(folder) as log:
        for name in ("sick", "well"):
            log.create_topic(name, partitions=1, segment_bytes=1 << 20)
            for value in VALUES:
                log.append(name, [value])
        with log.consumer("well", group="g") as consumer:
            consumer.poll()
        log.stage("copy")


def segment_of(folder: Path) -> Path:
    return next((folder / "topics" / "sick" / "0").glob("*.frames"))


@pytest.mark.parametrize("left", [0, 100, 1500])
def test_a_segment_shorter_than_what_was_acknowledged_is_damaged(tmp_path: Path, left: int) -> None:
    """It is never made longer: an event behind a hole would be acknowledged and never read."""
    filled(f"{tmp_path}/log")
    path = segment_of(tmp_path / "log")
    os.truncate(path, left)
    for _ in range(2):
        with hw.open_log(f"{tmp_path}/log", disk=AnotherBoot()) as log:
            for atomic in (False, True):
                with refused(Damaged, str(path)):
                    log.append("sick", [b"behind a hole"], atomic=atomic)
            log.append("well", [b"more"])
        assert path.stat().st_size == left
    assert any("sick" in finding.path for finding in examine(f"{tmp_path}/log").findings)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "the segment is gone": lambda folder: segment_of(folder).unlink(),
    "head and segment are gone": lambda folder: [path.unlink() for path in (folder / "topics/sick/0").iterdir()],
    "a folder in place of the segment": lambda folder: [
        path.unlink() or path.mkdir()
        for path in [segment_of(folder)]  # type: ignore[func-returns-value]
    ],
    "a folder in place of the head": lambda folder: [
        path.unlink() or path.mkdir()
        for path in [folder / "topics/sick/0/head"]  # type: ignore[func-returns-value]
    ],
    "a folder in place of the lock": lambda folder: [
        path.unlink() or path.mkdir()
        for path in [folder / "topics/sick/0/lock"]  # type: ignore[func-returns-value]
    ],
    "a file in place of the partition": lambda folder: [
        os.rename(folder / "topics/sick/0", folder / "away"),
        (folder / "topics/sick/0").touch(),
    ],
    "a file in place of the topic": lambda folder: [
        os.rename(folder / "topics/sick", folder / "away"),
        (folder / "topics/sick").touch(),
    ],
    "a stranger's file": lambda folder: [
        segment_of(folder).unlink(),
        (folder / "topics/sick/0/notes.frames").touch(),
        (folder / "topics/sick/0/notes.arrow").touch(),
    ],
    "the group's generation is cut": lambda folder: os.truncate(folder / "groups/g/generation", 10),
    "the group's offsets are gone": lambda folder: os.rename(folder / "groups/g/offsets", folder / "away"),
    "the stage's number is cut": lambda folder: os.truncate(folder / "stages/copy/number", 10),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_rest_of_a_log_opens_whatever_one_partition_has(tmp_path: Path, damage: str) -> None:
    """Read, written and looked at by the doctor; the error for the one is ours, and says what to do."""
    folder = tmp_path / "log"
    filled(str(folder))
    DAMAGES[damage](folder)
    with hw.open_log(str(folder), disk=AnotherBoot()) as log:
        log.append("well", [b"more"])
        log.append("well", [b"more"], atomic=True)
        assert values_of(log, "well") == [*VALUES, b"more", b"more"]
        if "group" not in damage and "stage" not in damage:
            with pytest.raises(HeadwaterError) as caught:
                log.append("sick", [b"more"])
            assert caught.value.advice
    report = examine(str(folder), repair=True)
    assert report.findings or damage == "the group's offsets are gone"
    with hw.open_log(str(folder)) as log:
        assert values_of(log, "well") == [*VALUES, b"more", b"more"]


UNREACHABLE = [
    *(
        (operation, "/0*", errno.EIO)
        for operation in ("open", "map", "sync", "truncate", "names", "read", "sync_folder")
    ),
    *(("names", "", error) for error in (errno.EIO, errno.EACCES, errno.EPERM)),
]


@pytest.mark.parametrize(("operation", "inside", "error"), UNREACHABLE)
@pytest.mark.parametrize("seed", range(3))
def test_a_partition_that_could_not_be_recovered_is_closed_until_it_is(
    operation: Operation, inside: str, error: int, seed: int
) -> None:
    """A bad sector, no rights: nobody reads or writes it before that is mended; then everything acknowledged is there."""
    disk = SimDisk(seed)
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("before")) as log:
        for name in ("sick", "well"):
            log.create_topic(name, partitions=1)
        for value in VALUES:
            with log.transaction() as transaction:
                transaction.append("sick", [value])
                transaction.append("well", [value])
        disk.power_loss()
    disk.fail(operation, f"*/topics/sick{inside}", error, times=10_000)
    for name in ("first", "second"):
        with hw.open_log(f"{disk.folder}/log", disk=disk.process(name)) as log:
            assert values_of(log, "well")[: len(VALUES)] == VALUES
            log.append("well", [b"more"])
            with refused(StorageError, "could not be recovered"):
                log.read("sick")
            with refused(StorageError, "could not be recovered"):
                log.append("sick", [b"more"])
    if seed == 2:
        disk.power_loss()
        with hw.open_log(f"{disk.folder}/log", disk=disk.process("third")) as log:
            log.append("well", [b"more"])
    disk.heal()
    assert any("sick" in finding.what or "sick" in finding.path for finding in diagnosed(disk, repair=False))
    if seed == 1:
        assert all(finding.repaired for finding in diagnosed(disk, repair=True))
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("again")) as log:
        assert values_of(log, "sick") == VALUES
        log.append("sick", [b"after"])
        assert values_of(log, "sick") == [*VALUES, b"after"]
    assert not diagnosed(disk, repair=False)


def test_a_partition_and_then_its_topic_cannot_be_reached() -> None:
    """Each power loss adds to what is known of the transactions in what is closed; one partition may stay closed alone."""
    disk = SimDisk(7)
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("before")) as log:
        for name in ("sick", "well"):
            log.create_topic(name, partitions=2)
        for value in VALUES:
            with log.transaction() as transaction:
                for name in ("sick", "well"):
                    transaction.append(name, [value])
        wanted = sorted(values_of(log, "sick"))
        disk.power_loss()
    disk.fail("open", "*/topics/sick/1/*", errno.EIO, times=10_000)
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("first")) as log:
        log.append("well", [b"more"])
    disk.power_loss()
    disk.fail("names", "*/topics/sick", errno.EACCES, times=10_000)
    second, third = disk.process("second"), disk.process("third")
    with hw.open_log(f"{disk.folder}/log", disk=second) as log, refused(StorageError, "could not be recovered"):
        log.append("sick", [b"more"])
    disk.heal()
    disk.fail("open", "*/topics/sick/0/*", errno.EIO, times=10_000)
    with hw.open_log(f"{disk.folder}/log", disk=third) as log, refused(StorageError, "Partition 0 of topic 'sick'"):
        log.read("sick")
    disk.heal()
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("fourth")) as log:
        assert sorted(values_of(log, "sick")) == wanted
    assert not diagnosed(disk, repair=False)


def diagnosed(disk: SimDisk, *, repair: bool) -> list[Finding]:
    return examine(f"{disk.folder}/log", disk=disk.process("doctor"), repair=repair).findings


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EMFILE])
def test_what_the_whole_machine_lacks_is_not_held_against_a_partition(error: int) -> None:
    """No room and no descriptors: the log does not open, and is recovered as a whole once there are some."""
    disk = SimDisk(3)
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("before")) as log:
        log.create_topic("t", partitions=1)
        log.append("t", VALUES)
        disk.power_loss()
    disk.fail("open", "*/t/0/*", error)
    with refused(DiskFull if error == errno.ENOSPC else StorageError):
        hw.open_log(f"{disk.folder}/log", disk=disk.process("again"))
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("again")) as log:
        assert values_of(log, "t") == VALUES


@pytest.mark.parametrize("seed", range(40))
def test_splits_that_were_killed_leave_a_log_that_opens_after_a_power_loss(seed: int) -> None:
    """What a dead split left, torn by the power loss, is no partition; the next split removes it."""
    disk = SimDisk(seed)
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("maker")) as log:
        log.create_topic("t", partitions=2)
        log.append("t", VALUES)
    for name, point in (("first", "split: counted one"), ("second", "split: partition made")):
        log = hw.open_log(f"{disk.folder}/log", disk=disk.process(name))
        disk.crash_at(name, point, seed % 2 + 1)
        with suppress(Crashed):
            log.alter_topic("t", partitions=6)
            pytest.fail("nobody died")
    disk.power_loss()
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("after")) as log:
        assert sorted(values_of(log, "t")) == sorted(VALUES)
        log.alter_topic("t", partitions=6)
        log.append("t", [b"after"])
        assert sorted(values_of(log, "t")) == sorted([*VALUES, b"after"])
    assert all(finding.severity == "warning" for finding in diagnosed(disk, repair=False))


@pytest.mark.parametrize("durability", ["fsync", "os"])
@pytest.mark.parametrize("point", ["roll: begun", "roll: created", "roll: written published"])
def test_a_partition_that_is_healed_serves_nothing_of_a_segment_that_was_begun(point: str, durability: str) -> None:
    """A writer dies while it begins a segment, the next sync fails, and the log is opened again: offsets have one event each."""
    disk = SimDisk(4)
    log = hw.open_log(f"{disk.folder}/log", disk=disk.process("writer"))
    log.create_topic("t", partitions=1, segment_bytes=4096, durability=durability)  # type: ignore[arg-type]
    kept = [b"kept 0", b"kept 1"]
    for value in kept:
        log.append("t", [value])
    disk.crash_at("writer", point)
    with suppress(Crashed):
        log.append("t", [bytes(4000)])  # more than the segment has room for: it begins another
        pytest.fail("nobody died")
    heir = hw.open_log(f"{disk.folder}/log", disk=disk.process("heir"))
    disk.fail("sync", "*.frames", errno.EIO)
    refused_values = [b"refused %d" % number for number in range(3)]
    with suppress(StorageError):
        heir.append("t", refused_values, atomic=durability == "os")
    disk.heal()
    told = []
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("again")) as log:
        for value in (b"told 0", b"told 1", bytes(4000)):  # the old segment has room for the small ones
            told.append(value)
            log.append("t", [value])
        assert values_of(log, "t") == [*kept, *told]
        for start, value in enumerate([*kept, *told]):
            assert log.read("t", start=start).column("value").to_pylist()[0] == value
    disk.power_loss()
    with hw.open_log(f"{disk.folder}/log", disk=disk.process("judge")) as log:
        values = values_of(log, "t")
        assert values == [*kept, *told][: len(values)]
        assert durability == "os" or values == [*kept, *told]
