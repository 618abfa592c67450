"""A simulated file: its bytes as the page cache shows them, and as the platter holds them.

Between the two stands the journal: every change since the last sync, in order. A change of bytes covers whole sectors and
carries what they held after it; a change of length is a growth or a cut.

Invariants, each of which `tests/testing/simulation/test_simdisk.py` checks over many seeds:

- After `sync` the platter equals the cache, unless a failed sync came between (below).
- A power loss leaves in each sector one of the contents it has had since the last sync, each sector on its own: writes are
  lost, torn between sectors and reordered. In a mapped file a sector may also hold the words of two successive contents,
  because the disk can fetch it between two stores; an aligned 8-byte word is never torn.
- Changes of length survive as a prefix of what happened, and independently of the bytes: a file may have its new length and
  zeros. Bytes that a surviving cut removed never come back.
- A failed sync writes some sectors and marks all of them clean. The cache still shows what was lost, a later sync does not
  write it, and every file that was open when the sync failed is told once (`errors`, as Linux does since 4.13).
- Bytes beyond `length` are zeros, in the cache and in each sector of the journal.

Not thread-safe: the disk's mutex is held around every call.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

SECTOR_BYTES = 512
MAPPED_BYTES_MAX = 16 << 20
CHANGES_MAX = 256


@dataclass(frozen=True, slots=True)
class Bytes:
    """What some sectors hold after a change; `before` is known for a mapped file only, where words can be mixed."""

    first: int
    after: bytes
    before: bytes | None = None


@dataclass(frozen=True, slots=True)
class Length:
    """The file's length after a change."""

    length: int
    kind: Literal["grow", "cut"]


class Inode:
    """One file, whatever its name is; lives as long as anybody has it open."""

    def __init__(self, random: Random) -> None:
        self.length = 0
        self.changed_us = 0
        self.errors = 0
        self.locked_by: object | None = None
        self.locked_in_thread = 0
        self.maps = 0
        self._random = random
        self._pages: SharedPages | None = None
        self._data: bytearray | mmap.mmap = bytearray()
        self._captured = b""
        self._platter = bytearray()
        self._platter_length = 0
        self._journal: list[Bytes | Length] = []

    def read(self, position: int, length: int) -> bytes:
        """Up to `length` bytes of the cache from `position`."""
        end = min(position + length, self.length)
        return bytes(self._data[position:end]).ljust(end - position, b"\0")

    def write(self, position: int, payload: bytes) -> None:
        """Puts bytes into the cache; the file grows as needed."""
        if not payload:
            return
        end = position + len(payload)
        first, last = _floor(position), _ceiling(end)
        self._make_room(last)
        self._data[position:end] = payload
        if end > self.length:
            self.length = end
            self._note(Length(end, "grow"))
        self._note(Bytes(first, bytes(self._data[first:last])))
        self._captured = bytes(self._data[: len(self._captured)])

    def resize(self, length: int) -> None:
        """Cuts the file, or lengthens it with zeros that take no room in memory."""
        if length < self.length:
            end = min(len(self._data), _ceiling(self.length))
            self._data[length:end] = bytes(max(0, end - length))
            self._captured = bytes(self._data[: len(self._captured)])
            self._note(Length(length, "cut"))
        elif length > self.length:
            self._note(Length(length, "grow"))
        self.length = length

    def sync(self) -> None:
        """Everything in the journal reaches the platter."""
        self.capture()
        for change in self._journal:
            self._land(change)
        self._journal.clear()

    def fail_sync(self) -> None:
        """Some sectors reach the platter and all are forgotten; only the changes of length stay to be written."""
        self.capture()
        self._land_some(0)
        self._journal = [change for change in self._journal if isinstance(change, Length)]
        self.errors += 1

    def lose_power(self) -> None:
        """What reached the platter becomes the cache; everything else is gone."""
        self.capture()
        lengths = sum(isinstance(change, Length) for change in self._journal)
        self._land_some(self._random.choice((0, lengths, self._random.randint(0, lengths))))
        self._journal.clear()
        self._restart()

    def damage(self, *, bit: int | None = None, length: int | None = None) -> None:
        """Flips a bit or cuts the file, in the cache and on the platter, after writing back what was pending."""
        self.sync()
        if length is not None:
            self.resize(length)
        if bit is not None:
            at, sector = bit // 8, _floor(bit // 8)
            self._make_room(_ceiling(at + 1))
            self._data[at] ^= 1 << (bit % 8)
            self._captured = bytes(self._data[: len(self._captured)])
            self._note(Bytes(sector, bytes(self._data[sector : sector + SECTOR_BYTES])))
        self.sync()

    def map(self, length: int, *, writable: bool) -> mmap.mmap:
        """Maps the first `length` bytes; all mappings and the cache are the same memory."""
        pages = self._share()
        self.maps += 1
        self._captured = bytes(self._data[: max(len(self._captured), _ceiling(length))])
        return pages.map(length, writable=writable)

    def view(self, length: int) -> mmap.mmap:
        """The first `length` bytes as everybody sees them, now and later; nobody writes through it."""
        return self._share().map(length, writable=False)

    def _share(self) -> SharedPages:
        self.capture()
        if self._pages is None:
            self._pages = SharedPages()
            self._pages.memory[: len(self._data)] = bytes(self._data)
            self._data = self._pages.memory
        return self._pages

    def unmap(self) -> None:
        """One mapping less."""
        self.capture()
        self.maps -= 1
        if self.maps == 0:
            self._captured = b""

    def capture(self) -> None:
        """Journals what was stored into the mapped memory since the last look."""
        before = self._captured
        after = bytes(self._data[: len(before)])
        if before == after:
            return
        for sector in np.flatnonzero((_sectors(before) != _sectors(after)).any(axis=1)).tolist():
            first, last = sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES
            self._note(Bytes(first, after[first:last], before[first:last]))
        self._captured = after

    def _restart(self) -> None:
        self.length = self._platter_length
        del self._platter[_ceiling(self.length) :]
        end = len(self._platter)
        if self.length < end:
            self._platter[self.length :] = bytes(end - self.length)
        self._pages, self._data, self._captured, self.maps = None, bytearray(self._platter), b"", 0
        self.errors, self.locked_by = 0, None

    def _make_room(self, end: int) -> None:
        missing = end - len(self._data)
        if missing <= 0:
            return
        if isinstance(self._data, mmap.mmap):
            raise ValueError(f"A simulated file that is mapped holds at most {MAPPED_BYTES_MAX} bytes.")
        self._data.extend(bytes(missing))

    def _note(self, change: Bytes | Length) -> None:
        self._journal.append(change)
        if len(self._journal) > CHANGES_MAX:
            self._write_back()

    def _write_back(self) -> None:
        """The operating system writes by itself now and then: here the older half of the journal, when it is long."""
        for change in self._journal[: CHANGES_MAX // 2]:
            self._land(change)
        del self._journal[: CHANGES_MAX // 2]

    def _land(self, change: Bytes | Length) -> None:
        if isinstance(change, Length):
            self._platter_length = change.length
            if change.kind == "cut":
                del self._platter[_ceiling(change.length) :]
                tail = len(self._platter) - change.length
                if tail > 0:
                    self._platter[change.length :] = bytes(tail)
        else:
            end = change.first + len(change.after)
            self._reserve_platter(end)
            self._platter[change.first : end] = change.after

    def _land_some(self, lengths: int) -> None:
        """Some sectors of the journal and the first so many changes of length reach the platter."""
        reachable = 1 << 62
        for change in self._journal:
            if isinstance(change, Bytes):
                self._land_by_chance(change, reachable)
            elif lengths:
                self._land(change)
                lengths -= 1
            elif change.kind == "cut":  # what was written behind a cut that never happened lies in blocks nobody finds
                reachable = min(reachable, _ceiling(change.length))

    def _land_by_chance(self, change: Bytes, reachable: int) -> None:
        """None, all or some of the change's sectors reach the platter; those of a mapped file possibly mixed by word."""
        fate = self._random.choice(("none", "all", "some", "some"))
        if fate == "none" or change.first >= reachable:
            return
        after = _sectors(change.after)[: (reachable - change.first) // SECTOR_BYTES]
        count = len(after)
        if change.before is not None and self._random.random() < 0.5:
            words = _coins(self._random, count * SECTOR_BYTES // 8).reshape(count, -1)
            mixed = np.where(words, _words(after), _words(_sectors(change.before)[:count]))
            after = mixed.view(np.uint8)
        landed = np.ones(count, dtype=bool) if fate == "all" else _coins(self._random, count)
        end = change.first + count * SECTOR_BYTES
        self._reserve_platter(end)
        _sectors(self._platter)[change.first // SECTOR_BYTES : end // SECTOR_BYTES][landed] = after[landed]

    def _reserve_platter(self, end: int) -> None:
        missing = end - len(self._platter)
        if missing > 0:
            self._platter.extend(bytes(missing))


class SharedPages:
    """Memory that several mappings share, as the page cache of a mapped file is shared."""

    def __init__(self) -> None:
        self._handle = os.memfd_create("headwater-simulated-file")
        os.ftruncate(self._handle, MAPPED_BYTES_MAX)  # sparse: only pages that are touched take memory
        self.memory = mmap.mmap(self._handle, MAPPED_BYTES_MAX)

    def map(self, length: int, *, writable: bool) -> mmap.mmap:
        """One more mapping of the first `length` bytes."""
        return mmap.mmap(self._handle, length, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))

    def __del__(self) -> None:
        os.close(self._handle)


def _floor(position: int) -> int:
    return position // SECTOR_BYTES * SECTOR_BYTES


def _ceiling(position: int) -> int:
    return -(-position // SECTOR_BYTES) * SECTOR_BYTES


def _sectors(data: bytes | bytearray) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, SECTOR_BYTES)


def _words(sectors: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    return sectors.view(np.uint64)


def _coins(random: Random, count: int) -> npt.NDArray[np.bool_]:
    return np.frombuffer(random.randbytes(count), dtype=np.uint8) < 128
