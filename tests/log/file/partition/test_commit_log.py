"""The commit log: a transaction that is recorded has happened, whatever goes wrong afterwards; one that is refused has not."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import headwater as hw
from headwater.log.doctor.doctor import examine
from headwater.log.file import commit
from headwater.log.log import Log
from headwater.model.errors import Poisoned, StorageError
from headwater.model.marker import Marker
from headwater.testing import Crashed, SimDisk

TRANSACTIONS = 25
TROUBLES: dict[str, Callable[[SimDisk], object]] = {
    "no room for a new file": lambda disk: disk.fail("write", "*/commits.new", errno.ENOSPC, times=10_000),
    "no descriptor for other partitions": lambda disk: disk.fail("open", "*/other/*", errno.EMFILE, times=10_000),
    "no mapping of other heads": lambda disk: disk.fail("map", "*/other/*", errno.ENOMEM, times=10_000),
    "another head cannot be synced": lambda disk: disk.fail("sync", "*/other/0/head", errno.EIO, times=10_000),
    "a head cannot be synced": lambda disk: disk.fail("sync", "*/a/*/head", errno.EIO, times=10_000),
    "another head is damaged": lambda disk: disk.flip(f"{disk.folder}/log/topics/other/0/head", 0),
    "another head is gone": lambda disk: disk.process("stranger").remove(f"{disk.folder}/log/topics/other/1/head"),
    "a marker is gone": lambda disk: disk.process("stranger").remove(f"{disk.folder}/log/stages/copy/marker"),
}


@pytest.fixture(autouse=True)
def short_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of commit records begins again after a few."""
    monkeypatch.setattr(commit, "COMMITS_BYTES_MAX", 400)


def opened(disk: SimDisk, process: str = "writer", **more: bool) -> Log:
    return hw.open_log(f"{disk.folder}/log", disk=disk.process(process), **more)


def prepared(disk: SimDisk) -> Log:
    log = opened(disk)
    for name, partitions in (("a", 1), ("b", 1), ("other", 2)):
        log.create_topic(name, partitions=partitions)
    return log


def transact(log: Log, number: int) -> None:
    with log.transaction() as transaction:
        transaction.append("a", [b"%d" % number])
        transaction.append("b", [b"%d" % number])


def stored(log: Log, topic: str) -> Counter[bytes]:
    return Counter(log.read(topic).column("value").to_pylist())


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_transaction_that_is_stored_raises_nothing(trouble: str) -> None:
    """Whatever keeps the file of commit records from beginning again: each is stored once, also after a power loss."""
    disk = SimDisk(5)
    log = prepared(disk)
    log.stage("copy").commit(Marker(query="q", epoch=0, ends={"x": 1}), appends=[("a", [b"first"])])
    TROUBLES[trouble](disk)
    for number in range(TRANSACTIONS):
        transact(log, number)
    wanted = Counter(b"%d" % number for number in range(TRANSACTIONS))
    assert stored(log, "b") == wanted
    disk.heal()
    disk.power_loss()
    with opened(disk, "reader") as again:
        assert stored(again, "b") == wanted
        assert stored(again, "a") == wanted + Counter([b"first"])


def test_records_go_once_nothing_keeps_them() -> None:
    """After trouble the file of commit records is short again, and no transaction is lost by it."""
    disk = SimDisk(6)
    log = prepared(disk)
    disk.fail("sync", "*/a/*/head", errno.EIO, times=1)
    for number in range(10 * TRANSACTIONS):
        transact(log, number)
    _, records = commit.CommitLog(disk.process("looker"), f"{disk.folder}/log", writable=False).decided()
    assert len(records) < TRANSACTIONS
    disk.power_loss()
    with opened(disk) as again:
        assert stored(again, "a") == Counter(b"%d" % number for number in range(10 * TRANSACTIONS))


def test_beginning_again_opens_no_partition_that_had_no_part(tmp_path: Path) -> None:
    """A log with many partitions does not run out of descriptors because of a transaction over two of them."""
    with hw.open_log(f"file://{tmp_path}/log") as log:
        log.create_topic("many", partitions=60)
        log.create_topic("a", partitions=1)
        log.create_topic("b", partitions=1)
        transact(log, 0)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(TRANSACTIONS):
            transact(log, number)
        assert len(os.listdir("/proc/self/fd")) <= before + 5


@pytest.mark.parametrize("what", ["marker", "signal"])
def test_what_follows_the_record_raises_nothing(what: str) -> None:
    """A process without descriptors at that moment: the batch is stored with its marker, once, and the next one finds it."""
    disk = SimDisk(8)
    log = prepared(disk)
    log.stage("copy").commit(Marker(query="q", epoch=0, ends={"x": 1}), appends=[("b", [b"first"])])
    disk.fail("open", f"*/{what}", errno.EMFILE, times=1, after=2 if what == "marker" else 0)
    assert log.stage("copy").commit(Marker(query="q", epoch=1, ends={"x": 2}), appends=[("a", [b"second"])]).written
    again = log.stage("copy").commit(Marker(query="q", epoch=1, ends={"x": 2}), appends=[("a", [b"second"])])
    assert not again.written
    assert stored(log, "a") == Counter([b"second"])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("heir_dies", [False, True], ids=["full", "dies"])
@pytest.mark.parametrize("point", ["replace: written", "replace: named", "records: begun again"])
def test_a_death_while_records_begin_again_splits_no_transaction(point: str, heir_dies: bool, seed: int) -> None:
    """Another one goes on from there, without room for a new file or until it dies, too; then the power is lost."""
    disk = SimDisk(seed)
    log = prepared(disk)
    disk.crash_at("writer", point)
    wanted = set()
    with suppress(Crashed):
        for number in range(TRANSACTIONS):
            transact(log, number)
            wanted.add(b"%d" % number)
        pytest.fail("nobody died")
    heir = opened(disk, "heir")
    if heir_dies:
        disk.crash_at("heir", "commit: done")
    else:
        disk.fail("write", "*/commits.new", errno.ENOSPC, times=10_000)
    with suppress(Crashed):
        for number in range(100, 103):
            transact(heir, number)
            wanted.add(b"%d" % number)
    disk.heal()
    disk.power_loss()
    with opened(disk, "judge") as judge:
        assert stored(judge, "a") == stored(judge, "b")
        assert wanted <= set(stored(judge, "a"))


@pytest.mark.parametrize("seed", range(10))
def test_a_settled_record_that_cannot_be_synced_closes_its_partitions(seed: int) -> None:
    """Nobody writes over a transaction's events as long as a power loss may bring its record back."""
    disk = SimDisk(seed)
    log = prepared(disk)
    transact(log, 0)
    disk.crash_at("writer", "commit: recorded")
    with suppress(Crashed):
        transact(log, 1)
        pytest.fail("nobody died")
    heir = opened(disk, "heir")
    disk.fail("sync", "*/commits", errno.EIO)
    with pytest.raises(StorageError):
        heir.append("a", [b"x"])
    with suppress(Poisoned):
        heir.append("a", [b"over it"])
    disk.power_loss()
    with opened(disk, "judge") as log:
        found = [stored(log, topic)[b"1"] for topic in ("a", "b")]
        assert found in ([0, 0], [1, 1])
        for topic in ("a", "b"):
            log.append(topic, [b"after"])


@pytest.mark.parametrize("point", ["commit: published one", "settle: before publish"])
def test_a_transaction_of_which_a_part_is_published_needs_no_other_sync(point: str) -> None:
    """Its record is on disk. If another sync could fail, half of it would be there for good."""
    disk = SimDisk(1)
    log = prepared(disk)
    transact(log, 0)
    name = "writer"
    if point.startswith("settle"):
        disk.crash_at("writer", "commit: recorded")
        with suppress(Crashed):
            transact(log, 1)
            pytest.fail("nobody died")
        name, log = "other", opened(disk, "other")
    disk.crash_at(name, point)
    with suppress(Crashed):
        transact(log, 2)
        pytest.fail("nobody died")
    disk.fail("sync", "*/commits", errno.EIO)
    with opened(disk, "heir") as heir:
        heir.append("a", [b"x"])
        known = 1 if point.startswith("settle") else 2
        assert [stored(heir, topic)[b"%d" % known] for topic in ("a", "b")] == [1, 1]


def test_what_was_said_of_a_damaged_record_is_not_said_of_the_next() -> None:
    """A record that was on disk is damaged and forgotten; the next one, whose process dies before its sync, needs one."""
    disk = SimDisk(1)
    log = prepared(disk)
    disk.crash_at("writer", "commit: published one")
    with suppress(Crashed):
        transact(log, 0)
        pytest.fail("nobody died")
    disk.flip(f"{disk.folder}/log/commits", 8 * (disk.content(f"{disk.folder}/log/commits").rindex(b"HWC1") + 30))
    heir = opened(disk, "heir")
    disk.crash_at("heir", "commit: written")
    with suppress(Crashed):
        transact(heir, 1)
        pytest.fail("nobody died")
    disk.fail("sync", "*/commits", errno.EIO)
    with pytest.raises(StorageError):
        opened(disk, "judge").append("a", [b"x"])


HEAD, WRITTEN, DURABLE = "topics/a/0/head", 512, 1024
SLOTS = (64 + 8, 288 + 8)
DAMAGES: dict[str, Callable[[SimDisk, str], object]] = {
    "its head is no head": lambda disk, log: disk.flip(f"{log}/{HEAD}", 0),
    "its head is cut": lambda disk, log: disk.truncate_file(f"{log}/{HEAD}", 100),
    "its head is gone": lambda disk, log: disk.process("stranger").remove(f"{log}/{HEAD}"),
    "which mark is written": lambda disk, log: disk.flip(f"{log}/{HEAD}", 8 * WRITTEN),
    "which mark is durable": lambda disk, log: disk.flip(f"{log}/{HEAD}", 8 * DURABLE),
    "the written marks": lambda disk, log: [disk.flip(f"{log}/{HEAD}", 8 * (WRITTEN + at)) for at in SLOTS],
    "one durable mark": lambda disk, log: disk.flip(f"{log}/{HEAD}", 8 * (DURABLE + SLOTS[1])),
    "the durable marks": lambda disk, log: [disk.flip(f"{log}/{HEAD}", 8 * (DURABLE + at)) for at in SLOTS],
    "its lock is gone": lambda disk, log: disk.process("stranger").remove(f"{log}/topics/a/0/lock"),
    "its sync lock is gone": lambda disk, log: disk.process("stranger").remove(f"{log}/topics/a/0/sync"),
    "its topic's file is gone": lambda disk, log: disk.process("stranger").remove(f"{log}/topics/a/topic"),
}


@pytest.mark.parametrize("after", ["the doctor", "records begin again", "a power loss", "begin again and a power loss"])
@pytest.mark.parametrize("is_open", [False, True], ids=["opened later", "open"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_transaction_is_settled_past_the_damage_of_one_of_its_partitions(
    damage: str, is_open: bool, after: str
) -> None:
    """Whoever comes next appends elsewhere at once; after a repair or recovery the transaction is whole, also without its record."""
    disk = SimDisk(9)
    log, folder = prepared(disk), f"{disk.folder}/log"
    transact(log, 0)
    heir = opened(disk, "heir")
    if is_open:
        transact(heir, 1)
    disk.crash_at("writer", "commit: recorded")
    with suppress(Crashed):
        transact(log, 2)
        pytest.fail("nobody died")
    topic_file = disk.content(f"{folder}/topics/a/topic")
    DAMAGES[damage](disk, folder)
    heir.append("other", [b"elsewhere"])
    assert stored(heir, "b")[b"2"] == 1
    for number in range(TRANSACTIONS if "begin again" in after else 1):
        with heir.transaction() as transaction:
            transaction.append("b", [b"more %d" % number])
            transaction.append("other", [b"more %d" % number])
    heir.close()
    if "power loss" in after:
        disk.power_loss()
    doctor = disk.process("doctor")
    file = doctor.open(f"{folder}/topics/a/topic", "create")
    file.write_at(0, [topic_file])
    file.close()
    if "power loss" not in after:  # or the recovery does it
        examine(folder, repair=True, disk=doctor)
    with opened(disk, "judge") as judge:
        wanted = Counter([b"0", b"2", *([b"1"] if is_open else [])])
        assert stored(judge, "a") == wanted
        assert wanted <= stored(judge, "b")
        transact(judge, 3)
        assert stored(judge, "a") == wanted + Counter([b"3"])
    assert examine(folder, disk=doctor, repair=True).healthy
    assert not examine(folder, disk=doctor).findings
