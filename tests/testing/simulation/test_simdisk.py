"""The simulated disk keeps what was synced, loses everything else in every way a real one can, and replays by seed.

Tests that say "over many seeds" assert that each outcome really comes, so that a history which passes on this disk has met it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest

from headwater.model.errors import StorageError
from headwater.testing import Crashed, SimDisk
from headwater.testing.simulation.file import CHANGES_MAX
from tests.rigs.log.simulated_files import PATH, change_at_random, stored

SECTOR = 512
SEEDS = range(200)


def outcomes(history: Callable[[SimDisk], None], path: str = PATH) -> list[bytes | None]:
    """What the file holds after the history and a power loss, for each seed; `None` where it is gone."""
    found: list[bytes | None] = []
    for seed in SEEDS:
        disk = SimDisk(seed)
        history(disk)
        disk.power_loss()
        found.append(disk.content(path) if path in disk.paths() else None)
    return found


# What is synced


def test_synced_bytes_survive_every_power_loss() -> None:
    """Random writes, cuts and growths, synced at the end, are there whole after any power loss, and after a second one."""
    for seed in SEEDS:
        disk, chance = SimDisk(seed), random.Random(seed)
        process = disk.process("writer")
        file = process.open(PATH, "create")
        process.sync_folder("/disk")
        for _ in range(chance.randint(1, 30)):
            change_at_random(file, chance)
        file.sync()
        expected = disk.content(PATH)
        for _ in range(2):
            disk.power_loss()
            assert disk.content(PATH) == expected


def test_later_unsynced_writes_leave_synced_sectors_alone() -> None:
    """A sector that nothing touched since the sync is never harmed, whatever happens around it."""

    def history(disk: SimDisk) -> None:
        stored(disk, b"s" * 4 * SECTOR)
        disk.process("p").open(PATH, "write").write_at(SECTOR + 100, [b"x" * SECTOR])

    for content in outcomes(history):
        assert content is not None
        assert content[:SECTOR] == b"s" * SECTOR
        assert content[3 * SECTOR :] == b"s" * SECTOR


def test_any_process_may_sync_what_another_wrote() -> None:
    """`sync` covers everybody's writes so far, also of a process that is dead."""
    for seed in SEEDS:
        disk = SimDisk(seed)
        stored(disk, b"")
        disk.process("writer").open(PATH, "write").write_at(0, [b"w" * 3000])
        disk.kill("writer")
        disk.process("other").open(PATH, "read").sync()
        disk.power_loss()
        assert disk.content(PATH) == b"w" * 3000


# What is not synced


def test_unsynced_bytes_vanish_survive_or_are_torn_between_sectors() -> None:
    """Over many seeds an overwrite of four sectors is lost, kept, and torn; each sector is old or new, never a mix."""

    def history(disk: SimDisk) -> None:
        stored(disk, b"o" * 4 * SECTOR)
        disk.process("p").open(PATH, "write").write_at(0, [b"n" * 4 * SECTOR])

    seen = outcomes(history)
    assert b"o" * 4 * SECTOR in seen
    assert b"n" * 4 * SECTOR in seen
    assert len(set(seen)) > 10
    for content in seen:
        assert content is not None
        assert {content[i : i + SECTOR] for i in range(0, 4 * SECTOR, SECTOR)} <= {b"o" * SECTOR, b"n" * SECTOR}


def test_unsynced_writes_are_reordered() -> None:
    """Over many seeds the second write survives without the first, and the first without the second."""

    def history(disk: SimDisk) -> None:
        stored(disk, b"o" * 2 * SECTOR)
        file = disk.process("p").open(PATH, "write")
        file.write_at(0, [b"1" * SECTOR])
        file.write_at(SECTOR, [b"2" * SECTOR])

    seen = outcomes(history)
    assert {content[:1] + content[-1:] for content in seen if content} == {b"oo", b"1o", b"o2", b"12"}


def test_a_sector_written_often_may_hold_any_of_its_contents() -> None:
    """Writing back at any time: each version since the sync is possible."""

    def history(disk: SimDisk) -> None:
        stored(disk, b"0" * SECTOR)
        file = disk.process("p").open(PATH, "write")
        for version in (b"1", b"2", b"3"):
            file.write_at(0, [version * SECTOR])

    assert {content[:1] for content in outcomes(history) if content} == {b"0", b"1", b"2", b"3"}


def test_a_file_may_have_its_new_length_without_its_bytes_or_its_old_length() -> None:
    """An unsynced append leaves the old length, the new bytes, or zeros where they should be."""

    def history(disk: SimDisk) -> None:
        stored(disk, b"o" * SECTOR)
        disk.process("p").open(PATH, "write").write_at(SECTOR, [b"n" * SECTOR])

    assert {content[SECTOR:] for content in outcomes(history) if content} == {b"", b"n" * SECTOR, b"\0" * SECTOR}


def test_an_unsynced_cut_happened_or_not_and_what_it_cut_never_comes_back_beside_later_bytes() -> None:
    """After cut and append: the old file, the cut one, or the appended one with its bytes or zeros; never old bytes at its end."""

    def history(disk: SimDisk) -> None:
        stored(disk, b"o" * 3 * SECTOR)
        file = disk.process("p").open(PATH, "write")
        file.truncate(SECTOR)
        file.write_at(SECTOR, [b"n" * SECTOR])

    seen = {content[SECTOR:] for content in outcomes(history) if content}
    assert seen == {b"o" * 2 * SECTOR, b"", b"n" * SECTOR, b"\0" * SECTOR}


def test_allocated_room_is_zeros_and_keeps_what_is_there() -> None:
    """`allocate` never shortens, never overwrites; cutting and growing again shows zeros."""
    disk = SimDisk(0)
    file = disk.process("p").open(PATH, "create")
    file.write_at(0, [b"abc"])
    file.allocate(10)
    assert file.read_at(0, 100) == b"abc" + b"\0" * 7
    file.allocate(2)
    assert file.size() == 10
    file.truncate(1)
    file.allocate(4)
    assert file.read_at(0, 100) == b"a\0\0\0"
    assert file.view(3).to_pybytes() == b"a\0\0"
    with pytest.raises(StorageError):
        file.view(5)


def test_lost_bytes_do_not_show_when_the_file_grows_again() -> None:
    """Bytes that reached the platter beyond a length that did not are gone: growing shows zeros."""
    for seed in SEEDS:
        disk = SimDisk(seed)
        stored(disk, b"o")
        disk.process("p").open(PATH, "write").write_at(1, [b"n" * 100])
        disk.power_loss()
        length = len(disk.content(PATH))
        file = disk.process("p").open(PATH, "write")
        file.allocate(200)
        assert file.read_at(length, 200) == bytes(200 - length)


def test_a_long_journal_is_written_back_and_still_loses_the_newest() -> None:
    """Memory is bounded: of very many unsynced writes the older are on the platter, the newest may be lost."""
    for seed in range(20):
        disk = SimDisk(seed)
        stored(disk, bytes(SECTOR))
        file = disk.process("p").open(PATH, "write")
        for version in range(1, 4 * CHANGES_MAX):
            file.write_at(0, [struct.pack("<Q", version)])
        disk.power_loss()
        assert 2 * CHANGES_MAX < struct.unpack_from("<Q", disk.content(PATH))[0] < 4 * CHANGES_MAX


# Mapped files


def test_mapped_memory_is_shared_with_other_processes_and_with_reads() -> None:
    """A store is seen at once by every mapping and every read; a write is seen by every mapping."""
    disk = SimDisk(0)
    stored(disk, bytes(64))
    one, other = disk.process("one").map(PATH, 64), disk.process("other").map(PATH, 32, writable=False)
    one.view[0:2] = b"hi"
    assert bytes(other.view[0:2]) == b"hi"
    file = disk.process("third").open(PATH, "write")
    assert file.read_at(0, 2) == b"hi"
    file.write_at(1, [b"o"])
    assert bytes(one.view[0:2]) == b"ho"
    file.write_at(5000, [b"the file grows while it is mapped"])
    assert file.size() > 5000
    with pytest.raises(TypeError):
        other.view[0] = 1
    one.close()
    other.close()
    with pytest.raises(StorageError):
        disk.process("one").map(PATH, 1 << 20)


def test_synced_mappings_survive() -> None:
    """`Map.sync` and `File.sync` both put the mapped bytes on the platter."""
    for seed in SEEDS:
        disk = SimDisk(seed)
        stored(disk, bytes(1024))
        process = disk.process("p")
        mapped = process.map(PATH, 1024)
        mapped.view[8:16] = b"8 bytes!"
        mapped.sync()
        mapped.view[600:608] = b"another8"
        process.open(PATH).sync()
        disk.power_loss()
        assert disk.content(PATH)[8:16] == b"8 bytes!"
        assert disk.content(PATH)[600:608] == b"another8"


def test_unsynced_stores_mix_by_sector_and_by_word_but_never_within_a_word() -> None:
    """Over many seeds: old, new, sectors of different versions, and words of successive versions in one sector."""

    def history(disk: SimDisk) -> None:
        stored(disk, bytes(2 * SECTOR))
        process = disk.process("p")
        mapped = process.map(PATH, 2 * SECTOR)
        words = mapped.view.cast("Q")
        for version in (1, 2, 3):
            words[0] = words[1] = words[64] = version * 0x0101010101010101
            process.reach("append: written")

    seen: set[tuple[int, int, int]] = set()
    for content in outcomes(history):
        assert content is not None
        words = [struct.unpack_from("<Q", content, at)[0] for at in (0, 8, SECTOR)]
        versions = tuple(word // 0x0101010101010101 for word in words)
        assert [version * 0x0101010101010101 for version in versions] == words
        seen.add((versions[0], versions[1], versions[2]))
    assert {(0, 0, 0), (3, 3, 3)} <= seen
    assert any(first != other_sector for first, _, other_sector in seen)
    assert any(first != second for first, second, _ in seen)
    assert all(abs(first - second) <= 1 for first, second, _ in seen)


def test_a_write_to_a_mapped_file_is_torn_between_sectors_only() -> None:
    """Only stores through a mapping are mixed by word."""

    def history(disk: SimDisk) -> None:
        stored(disk, b"o" * SECTOR)
        process = disk.process("p")
        process.map(PATH, SECTOR)
        process.open(PATH, "write").write_at(0, [b"n" * SECTOR])
        process.reach("append: written")

    assert set(outcomes(history)) == {b"o" * SECTOR, b"n" * SECTOR}


def test_stores_of_a_dead_process_reach_nobody() -> None:
    """Code that goes on after the kill (a `finally`, a thread) cannot reach the shared memory through a view it kept."""
    disk = SimDisk(0)
    stored(disk, bytes(64))
    mapped = disk.process("dead").map(PATH, 64)
    words = mapped.view.cast("Q")
    words[0] = 1
    disk.kill("dead")
    words[0] = 2
    assert words[0] == 2
    assert disk.content(PATH)[0] == 1
    with pytest.raises(Crashed):
        _ = mapped.view
    with pytest.raises(Crashed):
        mapped.sync()
    mapped.close()


# Names


def test_an_unsynced_name_may_be_gone_even_if_its_bytes_are_synced() -> None:
    """Without `sync_folder` a new file may not be there; with it, it is."""

    def history(disk: SimDisk) -> None:
        file = disk.process("p").open(PATH, "create")
        file.write_at(0, [b"x"])
        file.sync()

    assert set(outcomes(history)) == {None, b"x"}

    def synced(disk: SimDisk) -> None:
        history(disk)
        disk.process("p").sync_folder("/disk")

    assert set(outcomes(synced)) == {b"x"}


def test_a_rename_is_atomic() -> None:
    """The replaced file is the old one or the new one, never missing; a lost rename leaves both names."""
    seen = set()
    for seed in SEEDS:
        disk = SimDisk(seed)
        stored(disk, b"old")
        stored(disk, b"new", "/disk/b")
        disk.process("p").rename("/disk/b", PATH)
        disk.power_loss()
        seen.add((disk.content(PATH), tuple(disk.paths())))
    assert seen == {(b"new", (PATH,)), (b"old", (PATH, "/disk/b"))}


def test_an_unsynced_remove_happened_or_not_and_names_are_lost_one_by_one() -> None:
    """Operations on different names are independent of each other and of their order."""
    seen = set()
    for seed in SEEDS:
        disk = SimDisk(seed)
        stored(disk, b"", "/disk/x")
        process = disk.process("p")
        process.remove("/disk/x")
        process.open("/disk/y", "create")
        disk.power_loss()
        seen.add(tuple(disk.paths()))
    assert seen == {(), ("/disk/x",), ("/disk/y",), ("/disk/x", "/disk/y")}


def test_an_operation_never_survives_without_those_it_stands_on() -> None:
    """A durable file that was renamed away is not lost because its old name was given to a new file."""
    for seed in SEEDS:
        disk = SimDisk(seed)
        stored(disk, b"precious")
        process = disk.process("p")
        process.rename(PATH, "/disk/b")
        process.open(PATH, "create")
        disk.power_loss()
        assert b"precious" in [disk.content(path) for path in disk.paths()]


def test_a_synced_rename_between_folders_is_whole() -> None:
    """Syncing one of the two folders is enough for the rename and for what it stands on: the file has one name."""
    for seed in SEEDS:
        disk = SimDisk(seed)
        process = disk.process("p")
        process.make_folder("/disk/x")
        process.sync_folder("/disk")
        process.open("/disk/new", "create").sync()
        process.rename("/disk/new", "/disk/x/f")
        process.sync_folder("/disk/x")
        disk.power_loss()
        assert disk.paths() == ["/disk/x/f"]


def test_a_folder_is_a_name_too() -> None:
    """A synced file in a folder whose own name was not synced may be gone; syncing both folders keeps it."""
    seen = set()
    for seed in SEEDS:
        disk = SimDisk(seed)
        process = disk.process("p")
        process.make_folder("/disk/x/y")
        process.open("/disk/x/y/f", "create").sync()
        process.sync_folder("/disk/x/y")
        process.sync_folder("/disk/x")
        if seed % 2:
            process.sync_folder("/disk")
        disk.power_loss()
        seen.add((seed % 2, tuple(disk.paths())))
    assert seen == {(0, ()), (0, ("/disk/x/y/f",)), (1, ("/disk/x/y/f",))}


def test_a_removed_folder_may_be_half_removed() -> None:
    """Removing a folder is many operations; a power loss keeps any of them."""
    seen = set()
    for seed in SEEDS:
        disk = SimDisk(seed)
        process = disk.process("p")
        process.make_folder("/disk/x")
        process.sync_folder("/disk")
        stored(disk, b"", "/disk/x/1")
        stored(disk, b"", "/disk/x/2")
        process.remove_folder("/disk/x")
        assert not process.exists("/disk/x")
        disk.power_loss()
        seen.add(tuple(disk.paths()))
    assert seen == {(), ("/disk/x/1",), ("/disk/x/2",), ("/disk/x/1", "/disk/x/2")}
