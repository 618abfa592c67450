"""Crashing disks: the machine's own disk for a process that is to be killed, by itself, at a chosen or a random moment.

`kill -9` loses nothing that was written, so these test what a dead process leaves to the living: torn frames, held locks,
half-done operations. What a power loss leaves is for `SimDisk`.

    disk = CrashingDisk("append: written", nth=3)     # SIGKILL where that point is reached for the third time
    disk = RandomCrashDisk(seed, probability=0.01)    # at any operation or point; a write dies with a part of it written
    disk = RecordingDisk()                            # disk.points: every point reached, how often
    disk = SlowSyncDisk(delay_s=0.005)                 # a slow disk on a fast one

Everything else is `RealDisk`'s own; nothing is done per byte. Thread-safety: as `RealDisk`; with several threads a random
crash does not come at the same moment again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from random import Random

import pyarrow as pa

from headwater.log.disk.disk import Buffer, File, Map, Mode, RealDisk
from headwater.model.points import DISK_POINTS, check_point
from headwater.testing.crash.points import kill_self


class CrashingDisk(RealDisk):
    """Kills its own process where `point` is reached for the nth time."""

    def __init__(self, point: str, nth: int = 1) -> None:
        self._point = check_point(point, among=DISK_POINTS)
        self._left = nth

    def reach(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                kill_self()


class RecordingDisk(RealDisk):
    """Counts the points reached, to list them all."""

    def __init__(self) -> None:
        self.points: Counter[str] = Counter()

    def reach(self, point: str) -> None:
        self.points[check_point(point, among=DISK_POINTS)] += 1


class RandomCrashDisk(RealDisk):
    """Kills its own process at any operation that changes something and at any point, each time with the same probability."""

    def __init__(self, seed: int, probability: float) -> None:
        self._random = Random(seed)
        self._probability = probability

    def strike(self) -> None:
        """Perhaps the end."""
        if self.strikes():
            kill_self()

    def strikes(self) -> bool:
        """Whether the end is now; the caller may do a part of its work first."""
        return self._random.random() < self._probability

    def part(self, length: int) -> int:
        """How much of a write is done before the end."""
        return self._random.randint(0, length)

    def open(self, path: str, mode: Mode = "read") -> File:
        self.strike()
        return _RandomCrashFile(super().open(path, mode), self)

    def map(self, path: str, length: int, *, writable: bool = True) -> Map:
        self.strike()
        return _RandomCrashMap(super().map(path, length, writable=writable), self)

    def make_folder(self, path: str) -> None:
        self.strike()
        super().make_folder(path)

    def rename(self, path: str, to: str) -> None:
        self.strike()
        super().rename(path, to)

    def remove(self, path: str) -> None:
        self.strike()
        super().remove(path)

    def remove_folder(self, path: str) -> None:
        self.strike()
        super().remove_folder(path)

    def sync_folder(self, path: str) -> None:
        self.strike()
        super().sync_folder(path)

    def reach(self, point: str) -> None:
        self.strike()


def of_boot(disk: RealDisk, boot: int) -> RealDisk:
    """The disk, in a boot of the machine that its test counts: a log is recovered without a boot."""
    disk.boot_id = lambda: f"boot-{boot}"  # type: ignore[method-assign]
    return disk


class SlowSyncDisk(RealDisk):
    """Makes every sync of a file, mapping or folder take `delay_s` longer."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def open(self, path: str, mode: Mode = "read") -> File:
        return _SlowSyncFile(super().open(path, mode), self._delay_s)

    def map(self, path: str, length: int, *, writable: bool = True) -> Map:
        return _SlowSyncMap(super().map(path, length, writable=writable), self._delay_s)

    def sync_folder(self, path: str) -> None:
        time.sleep(self._delay_s)
        super().sync_folder(path)


class _FileThrough:
    """Hands every call on to another file."""

    def __init__(self, file: File) -> None:
        self.path = file.path
        self._file = file

    def size(self) -> int:
        return self._file.size()

    def read_at(self, position: int, length: int) -> bytes:
        return self._file.read_at(position, length)

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        self._file.write_at(position, buffers)

    def allocate(self, length: int) -> None:
        self._file.allocate(length)

    def truncate(self, length: int) -> None:
        self._file.truncate(length)

    def sync(self) -> None:
        self._file.sync()

    def view(self, length: int) -> pa.Buffer:
        return self._file.view(length)

    def lock(self, *, wait: bool = True, shared: bool = False) -> bool:
        return self._file.lock(wait=wait, shared=shared)

    def unlock(self) -> None:
        self._file.unlock()

    def close(self) -> None:
        self._file.close()


class _MapThrough:
    """Hands every call on to another mapping."""

    def __init__(self, mapped: Map) -> None:
        self.view = mapped.view
        self._map = mapped

    def sync(self) -> None:
        self._map.sync()

    def close(self) -> None:
        self._map.close()


class _RandomCrashFile(_FileThrough):
    def __init__(self, file: File, disk: RandomCrashDisk) -> None:
        super().__init__(file)
        self._disk = disk

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        if self._disk.strikes():
            payload = b"".join(buffers)
            self._file.write_at(position, [payload[: self._disk.part(len(payload))]])
            kill_self()
        self._file.write_at(position, buffers)

    def allocate(self, length: int) -> None:
        self._disk.strike()
        self._file.allocate(length)

    def truncate(self, length: int) -> None:
        self._disk.strike()
        self._file.truncate(length)

    def sync(self) -> None:
        self._disk.strike()
        self._file.sync()

    def lock(self, *, wait: bool = True, shared: bool = False) -> bool:
        self._disk.strike()
        return self._file.lock(wait=wait, shared=shared)

    def unlock(self) -> None:
        self._disk.strike()
        self._file.unlock()


class _RandomCrashMap(_MapThrough):
    def __init__(self, mapped: Map, disk: RandomCrashDisk) -> None:
        super().__init__(mapped)
        self._disk = disk

    def sync(self) -> None:
        self._disk.strike()
        self._map.sync()


class _SlowSyncFile(_FileThrough):
    def __init__(self, file: File, delay_s: float) -> None:
        super().__init__(file)
        self._delay_s = delay_s

    def sync(self) -> None:
        time.sleep(self._delay_s)
        self._file.sync()


class _SlowSyncMap(_MapThrough):
    def __init__(self, mapped: Map, delay_s: float) -> None:
        super().__init__(mapped)
        self._delay_s = delay_s

    def sync(self) -> None:
        time.sleep(self._delay_s)
        self._map.sync()
