"""Simulated processes meet faults, full disks, damage, crashes and locks as real ones do, and replay by seed."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.log.disk.disk import Disk, RealDisk
from headwater.model.errors import DiskFull, HeadwaterError, NoAccess, StorageError
from headwater.testing import Crashed, SimDisk, WouldDeadlock
from tests.rigs.log.simulated_files import PATH, change_at_random, stored

SECTOR = 512
SEEDS = range(200)


def test_a_failed_sync_is_not_made_good_by_a_later_one() -> None:
    """Reads still show the bytes, the next sync succeeds, and after a power loss some of them are gone."""
    lost = 0
    for seed in SEEDS:
        disk = SimDisk(seed)
        stored(disk, b"o" * SECTOR * 4)
        disk.fail("sync", PATH, errno.EIO)
        file = disk.process("p").open(PATH, "write")
        file.write_at(0, [b"n" * SECTOR * 4])
        with pytest.raises(StorageError):
            file.sync()
        file.write_at(4 * SECTOR, [b"later"])
        file.sync()
        assert file.read_at(0, 4 * SECTOR) == b"n" * 4 * SECTOR
        disk.power_loss()
        assert disk.content(PATH)[4 * SECTOR :] == b"later"
        lost += b"o" in disk.content(PATH)
    assert lost > len(SEEDS) / 4


def test_a_failed_sync_is_told_once_to_every_file_open_then() -> None:
    """As on Linux: another process's next sync fails once; a file opened afterwards hears nothing."""
    disk = SimDisk(0)
    stored(disk, bytes(8))
    one, other = disk.process("one").open(PATH, "write"), disk.process("other").open(PATH, "write")
    mapped = disk.process("third").map(PATH, 8)
    disk.fail("sync", "*", errno.EIO)
    one.write_at(0, [b"x"])
    with pytest.raises(StorageError):
        one.sync()
    one.sync()
    disk.process("new").open(PATH).sync()
    for opened in (other, mapped):
        with pytest.raises(StorageError):
            opened.sync()
        opened.sync()


def test_faults_come_where_and_when_they_are_scripted() -> None:
    """`after` calls pass, then `times` fail; other paths and operations are left alone; the error is the real disk's."""
    disk = SimDisk(0)
    process = disk.process("p")
    file, other = process.open(PATH, "create"), process.open("/disk/b", "create")
    fault = disk.fail("write", "*/a", errno.ENOSPC, after=1, times=2)
    file.write_at(0, [b"1"])
    for _ in range(2):
        with pytest.raises(DiskFull):
            file.write_at(1, [b"2"])
        other.write_at(0, [b"2"])
    file.write_at(1, [b"3"])
    assert fault.struck == 2
    disk.fail("rename", "*/c", errno.EACCES)
    with pytest.raises(NoAccess):
        process.rename(PATH, "/disk/c")
    disk.fail("open", PATH, errno.ENOENT)
    with pytest.raises(FileNotFoundError):
        process.open(PATH)
    disk.fail("sync_folder", "/disk")
    disk.fail("allocate", PATH)
    disk.heal()
    process.sync_folder("/disk")
    file.allocate(100)
    disk.fail("read", "*", probability=0.5, times=1000)
    failed = 0
    for _ in range(100):
        try:
            file.read_at(0, 1)
        except StorageError:
            failed += 1
    assert 20 < failed < 80


def test_a_failing_write_leaves_a_beginning_behind() -> None:
    """Over many seeds: nothing, a part and all of the bytes; always a prefix."""
    lengths = set()
    for seed in SEEDS:
        disk = SimDisk(seed)
        disk.fail("write", "*", errno.ENOSPC)
        with pytest.raises(DiskFull):
            disk.process("p").open(PATH, "create").write_at(0, [b"01", b"23"])
        assert b"0123".startswith(disk.content(PATH))
        lengths.add(len(disk.content(PATH)))
    assert lengths == {0, 1, 2, 3, 4}


def test_a_full_disk_refuses_growth_and_works_again_when_there_is_room() -> None:
    """What fits is written; allocated room can always be written; removing or enlarging helps."""
    disk = SimDisk(0, capacity_bytes=100)
    process = disk.process("p")
    file, other = process.open(PATH, "create"), process.open("/disk/b", "create")
    file.allocate(60)
    with pytest.raises(DiskFull):
        other.write_at(0, [b"x" * 41])
    assert other.size() == 40
    assert process.free_bytes("/disk") == 0
    file.write_at(0, [b"y" * 60])
    with pytest.raises(DiskFull):
        file.allocate(61)
    process.remove("/disk/b")
    file.allocate(100)
    disk.capacity_bytes = 1000
    file.write_at(100, [b"z" * 900])
    assert process.free_bytes("/disk") == 0


def test_a_flipped_bit_and_a_cut_are_in_the_cache_and_on_the_platter() -> None:
    """Damage is seen at once, through mappings too, and again after a power loss."""
    disk = SimDisk(0)
    stored(disk, b"\x00\x00\x00\x00")
    mapped = disk.process("p").map(PATH, 4)
    disk.flip(PATH, 9)
    assert bytes(mapped.view) == b"\x00\x02\x00\x00"
    disk.power_loss()
    assert disk.content(PATH) == b"\x00\x02\x00\x00"
    disk.truncate_file(PATH, 2)
    disk.power_loss()
    assert disk.content(PATH) == b"\x00\x02"
    with pytest.raises(ValueError, match="no bit 16"):
        disk.flip(PATH, 16)


# Processes, crashes, locks


def test_a_kill_keeps_what_was_written_and_ends_the_process() -> None:
    """The page cache survives; every object of the dead process raises; the name can be used again."""
    disk = SimDisk(0)
    process = disk.process("p")
    assert disk.process("p") is process
    boot = process.boot_id()
    file = process.open(PATH, "create")
    file.write_at(0, [b"kept"])
    disk.kill("p")
    uses: list[Callable[[], object]] = [
        file.size,
        file.sync,
        file.unlock,
        lambda: file.read_at(0, 1),
        lambda: file.write_at(0, [b"x"]),
        lambda: process.exists(PATH),
        lambda: process.reach("sync: done"),
        process.boot_id,
    ]
    for use in uses:
        with pytest.raises(Crashed):
            use()
    file.close()
    assert not issubclass(Crashed, HeadwaterError)
    assert disk.process("p").open(PATH).read_at(0, 9) == b"kept"
    assert disk.process("p").boot_id() == boot
    disk.power_loss()
    assert disk.process("p").boot_id() != boot


def test_a_scripted_crash_comes_at_the_nth_time() -> None:
    """Only that process, only that point; `points` counts every one reached."""
    disk = SimDisk(0)
    disk.crash_at("p", "append: written", nth=2)
    process, other = disk.process("p"), disk.process("other")
    for _ in range(3):
        other.reach("append: written")
    process.reach("append: locked")
    process.reach("append: written")
    with pytest.raises(Crashed, match="append: written"):
        process.reach("append: written")
    assert disk.points == {"append: written": 5, "append: locked": 1}
    disk.process("p").reach("append: written")
    other.reach("append: written")


def test_a_random_crash_may_come_within_a_write() -> None:
    """Over many seeds a process dies before, between and within its writes; what is there is always a prefix."""
    lengths = set()
    for seed in SEEDS:
        disk = SimDisk(seed)
        stored(disk, b"")
        disk.crash_randomly("p", 0.2)
        with pytest.raises(Crashed):
            write_numbers(disk.process("p"))
        content = disk.content(PATH)
        assert (b"0123456789" * 100).startswith(content)
        lengths.add(len(content) % 10)
    assert lengths == set(range(10))


def write_numbers(process: Disk) -> None:
    file = process.open(PATH, "write")
    for at in range(0, 1000, 10):
        file.write_at(at, [b"01234", b"56789"])
        process.reach("append: written")


@pytest.mark.parametrize("end", ["unlock", "close", "kill"])
def test_locks_exclude_and_are_freed_by_unlock_close_and_kill(end: str) -> None:
    """One holder at a time, also among the files of one process; every end of the holder frees the lock."""
    disk = SimDisk(0)
    stored(disk, b"")
    process = disk.process("one")
    one, same, other = process.open(PATH), process.open(PATH), disk.process("other").open(PATH)
    assert one.lock()
    assert one.lock()
    for waiting in (same, other):
        assert not waiting.lock(wait=False)
        with pytest.raises(WouldDeadlock):
            waiting.lock()
    {"unlock": one.unlock, "close": one.close, "kill": lambda: disk.kill("one")}[end]()
    assert other.lock(wait=False)
    assert other.lock()


def test_a_closed_file_refuses_every_use() -> None:
    """As on the real disk; closing twice is fine."""
    disk = SimDisk(0)
    stored(disk, b"")
    file = disk.process("p").open(PATH)
    file.close()
    file.close()
    for use in (file.size, file.sync, file.lock, lambda: file.read_at(0, 1)):
        with pytest.raises(StorageError):
            use()


def test_a_thread_waits_for_a_lock_until_another_frees_it() -> None:
    """Threads wait; when nobody frees the lock in time it is called a deadlock."""
    disk = SimDisk(0)
    stored(disk, b"")
    one, other = disk.process("one").open(PATH), disk.process("other").open(PATH)
    one.lock()
    got: list[bool] = []
    waiter = threading.Thread(target=lambda: got.append(other.lock()))
    waiter.start()
    disk.kill("one")
    waiter.join(10)
    assert got == [True]
    disk.lock_wait_s = 0.01
    with pytest.raises(WouldDeadlock):
        disk.process("third").open(PATH).lock()


# Replay, and the real disk as the oracle


def test_a_file_tells_when_it_was_last_written_to(tmp_path: Path) -> None:
    """By the disk's own clock; renaming is no writing, and a file that is gone has no time."""
    real, sim = RealDisk(), SimDisk(0, folder=str(tmp_path)).process("p")
    for disk in (real, sim):
        paths = [f"{tmp_path}/{name}" for name in "abc"]
        times = []
        for path in paths[:2]:
            file = disk.open(path, "create")
            file.write_at(0, [b"1"])
            file.close()
            times.append(disk.changed_us(path))
            time.sleep(0.02)  # the kernel's clock goes by ticks
        assert times[0] < times[1]
        disk.rename(paths[0], paths[2])
        assert disk.changed_us(paths[2]) == times[0]
        file = disk.open(paths[2], "write")
        file.truncate(0)
        file.close()
        assert disk.changed_us(paths[2]) > times[1]
        with pytest.raises(FileNotFoundError):
            disk.changed_us(paths[0])


def test_the_same_seed_and_calls_give_the_same_outcome() -> None:
    """A history with faults, crashes and power losses replays exactly; another seed takes another course."""
    assert [course(seed) for seed in range(30)] == [course(seed) for seed in range(30)]
    assert len({str(course(seed)) for seed in range(30)}) > 25


def course(seed: int) -> list[object]:
    """What happens to one process that works and is restarted whenever it dies."""
    disk, chance, seen = SimDisk(seed, capacity_bytes=40_000), random.Random(7), list[object]()
    disk.fail("sync", probability=0.1, times=100)
    disk.crash_randomly("p", 0.03)
    for step in range(120):
        try:
            process = disk.process("p")
            seen.append(process.names("/disk"))
            file = process.open(f"/disk/{chance.randint(0, 3)}", "create")
            change_at_random(file, chance)
            if chance.random() < 0.2:
                file.sync()
            if chance.random() < 0.2:
                process.sync_folder("/disk")
            if chance.random() < 0.1:
                process.rename(file.path, f"/disk/{chance.randint(4, 5)}")
            file.close()
        except (Crashed, StorageError) as error:
            seen.append(str(error))
        if step % 40 == 39:
            disk.power_loss()
            seen.append([(path, disk.content(path)) for path in disk.paths()])
    return seen


def test_without_faults_it_behaves_as_the_real_disk_does(tmp_path: Path) -> None:
    """The same random calls on both give the same answers, errors, names and bytes."""
    for seed in range(30):
        folder = f"{tmp_path}/{seed}"
        sim, real = SimDisk(seed, folder=folder).process("p"), RealDisk()
        real.make_folder(folder)
        answers = [answers_of(disk, folder, random.Random(seed)) for disk in (sim, real)]
        assert answers[0] == answers[1]


def answers_of(disk: Disk, folder: str, chance: random.Random) -> list[object]:
    """What a disk says to a random course of calls."""
    answers: list[object] = []
    paths = [f"{folder}/{name}" for name in ("a", "b", "x", "x/c", "x/y", "x/y/d")]
    for _ in range(200):
        path, to = chance.choice(paths), chance.choice(paths)
        call = chance.choice(
            ("change", "change", "change", "rename", "remove", "folder", "remove_folder", "names", "map")
        )
        state = chance.getstate()
        try:
            answers.append((call, answer_of(disk, call, path, to, chance)))
        except FileNotFoundError:
            answers.append((call, "missing"))
        except StorageError as error:
            answers.append((call, type(error)))
        chance.setstate(state)
        chance.random()
    return answers


def answer_of(disk: Disk, call: str, path: str, to: str, chance: random.Random) -> object:
    if call == "change":
        file = disk.open(path, chance.choice(("read", "write", "create")))
        try:
            change_at_random(file, chance)
            file.sync()
            disk.sync_folder(path.rpartition("/")[0])
            return (
                file.size(),
                file.read_at(chance.randint(0, 3000), chance.randint(0, 3000)),
                file.view(file.size()).to_pybytes(),
            )
        finally:
            file.close()
    if call == "rename" and not to.startswith(path):
        return disk.rename(path, to)
    if call == "remove":
        return disk.remove(path)
    if call == "folder":
        return disk.make_folder(path)
    if call == "remove_folder":
        return disk.remove_folder(path)
    if call == "map":
        mapped = disk.map(path, 700)
        mapped.view[chance.randint(0, 699)] = 42
        content = bytes(mapped.view)
        mapped.sync()
        mapped.close()
        return content
    return sorted(disk.names(path)), disk.exists(to)
