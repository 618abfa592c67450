"""The scheduled disk: the disk of a simulated process whose every call is a turn in a `Schedule`.

A lock that is held elsewhere is waited for in the schedule, not in the operating system, so that a deadlock is found instead
of met. Stores into mapped memory are no turns: between two calls of the disk a process runs alone.

Thread-safety: as `Schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pyarrow as pa

from headwater.log.disk.disk import Buffer, File, Map, Mode
from headwater.testing.simulation.process import Crashed, SimProcess
from headwater.testing.simulation.schedule import Schedule

Result = TypeVar("Result")


class _Turns:
    """Makes calls of the disk turns; a process that dies in one frees its locks."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def _call(self, operation: Callable[[], Result]) -> Result:
        self._schedule.turn()
        try:
            return operation()
        except Crashed:
            self._schedule.wake()
            raise


class ScheduledDisk(_Turns):
    """The disk as one simulated process of a schedule sees it."""

    def __init__(self, process: SimProcess, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.process = process

    def boot_id(self) -> str:
        return self._call(self.process.boot_id)

    def open(self, path: str, mode: Mode = "read") -> File:
        return _ScheduledFile(self._call(lambda: self.process.open(path, mode)), self._schedule)

    def map(self, path: str, length: int, *, writable: bool = True) -> Map:
        return _ScheduledMap(self._call(lambda: self.process.map(path, length, writable=writable)), self._schedule)

    def names(self, folder: str) -> list[str]:
        return self._call(lambda: self.process.names(folder))

    def exists(self, path: str) -> bool:
        return self._call(lambda: self.process.exists(path))

    def make_folder(self, path: str) -> None:
        self._call(lambda: self.process.make_folder(path))

    def rename(self, path: str, to: str) -> None:
        self._call(lambda: self.process.rename(path, to))

    def remove(self, path: str) -> None:
        self._call(lambda: self.process.remove(path))

    def remove_folder(self, path: str) -> None:
        self._call(lambda: self.process.remove_folder(path))

    def sync_folder(self, path: str) -> None:
        self._call(lambda: self.process.sync_folder(path))

    def free_bytes(self, path: str) -> int:
        return self._call(lambda: self.process.free_bytes(path))

    def changed_us(self, path: str) -> int:
        return self._call(lambda: self.process.changed_us(path))

    def reach(self, point: str) -> None:
        self._call(lambda: self.process.reach(point))


class _ScheduledFile(_Turns):
    def __init__(self, file: File, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.path = file.path
        self._file = file

    def size(self) -> int:
        return self._call(self._file.size)

    def read_at(self, position: int, length: int) -> bytes:
        return self._call(lambda: self._file.read_at(position, length))

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        self._call(lambda: self._file.write_at(position, buffers))

    def allocate(self, length: int) -> None:
        self._call(lambda: self._file.allocate(length))

    def truncate(self, length: int) -> None:
        self._call(lambda: self._file.truncate(length))

    def sync(self) -> None:
        self._call(self._file.sync)

    def view(self, length: int) -> pa.Buffer:
        return self._call(lambda: self._file.view(length))

    def lock(self, *, wait: bool = True, shared: bool = False) -> bool:
        while not self._call(lambda: self._file.lock(wait=False)):
            if not wait:
                return False
            self._schedule.wait()
        return True

    def unlock(self) -> None:
        self._call(self._file.unlock)
        self._schedule.wake()

    def close(self) -> None:
        self._file.close()
        self._schedule.wake()


class _ScheduledMap(_Turns):
    def __init__(self, mapped: Map, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.view = mapped.view
        self._map = mapped

    def sync(self) -> None:
        self._call(self._map.sync)

    def close(self) -> None:
        self.view.release()
        self._map.close()
