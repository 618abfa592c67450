"""The disk: the only way the log reaches files.

Everything that touches the file system goes through a `Disk`, so that `headwater.testing` can put another one in its
place: one that loses, tears and reorders unsynced writes, fails fsync and runs full by seed, or one that kills the
process at a named point (`headwater.model.points`).

Thread-safety: a `File`'s reads and writes may run in parallel; its lock is one lock per `File`, so threads of one process
exclude each other by other means first (see `partition`).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow as pa

from headwater.log.disk.fork import tell_when_forked
from headwater.model.errors import Damaged, DiskFull, NoAccess, StorageError
from headwater.model.points import Points

Buffer = Any
"""Anything with the buffer protocol: bytes, memoryview, pyarrow.Buffer."""

Mode = Literal["read", "write", "create"]
"""`read` an existing file, `write` an existing file, or `create` it when it is missing (and write)."""


_WRITEV_MAX = 1000


class File(Protocol):
    """One open file."""

    path: str

    def size(self) -> int:
        """The file's length in bytes."""

    def read_at(self, position: int, length: int) -> bytes:
        """Up to `length` bytes from `position`; fewer at the end of the file."""

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        """Writes all buffers one after the other; returns when the operating system has them all."""

    def allocate(self, length: int) -> None:
        """Makes room up to `length` bytes, as zeros, so that later writes cannot find the disk full."""

    def truncate(self, length: int) -> None:
        """Cuts the file to `length` bytes."""

    def sync(self) -> None:
        """Returns when everything written so far, by any process, is on the disk (fdatasync)."""

    def view(self, length: int) -> pa.Buffer:
        """The first `length` bytes without copying; stays valid after the file is closed or deleted."""

    def lock(self, *, wait: bool = True, shared: bool = False) -> bool:
        """Takes the file's lock, alone or shared with others; it is freed when this process ends, however it ends."""

    def unlock(self) -> None:
        """Frees the lock."""

    def close(self) -> None:
        """Closes the file and frees its lock."""


class Map(Protocol):
    """A small file mapped into memory and shared by all processes."""

    view: memoryview

    def sync(self) -> None:
        """Returns when the mapped bytes are on the disk."""

    def close(self) -> None:
        """Ends the mapping."""


class Disk(Protocol):
    """A file system, as much of it as the log needs. Paths are absolute strings."""

    def boot_id(self) -> str:
        """Changes whenever unsynced writes may have been lost: with every start of the machine."""

    def open(self, path: str, mode: Mode = "read") -> File:
        """Opens one file; `FileNotFoundError` when it is missing and not to be created."""

    def map(self, path: str, length: int, *, writable: bool = True) -> Map:
        """Maps the first `length` bytes of an existing file."""

    def names(self, folder: str) -> list[str]:
        """The names in a folder; `FileNotFoundError` when there is none."""

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there."""

    def make_folder(self, path: str) -> None:
        """Creates a folder and its parents where they are missing."""

    def rename(self, path: str, to: str) -> None:
        """Moves a file onto another name, atomically."""

    def remove(self, path: str) -> None:
        """Removes a file; no error when it is gone already."""

    def remove_folder(self, path: str) -> None:
        """Removes a folder with all that is in it."""

    def sync_folder(self, path: str) -> None:
        """Returns when the folder's names are on the disk: without it a new file may be gone after a power loss.

        `FileNotFoundError` when there is none.
        """

    def free_bytes(self, path: str) -> int:
        """The room left on the disk that holds `path`."""

    def changed_us(self, path: str) -> int:
        """When a file was last written to, by the clock of the disk; `FileNotFoundError` when it is missing."""

    def reach(self, point: str) -> None:
        """Says that one of `DISK_POINTS` is reached: a crash test strikes there."""


class RealDisk(Points):
    """The machine's own file system. Who watches this process hears of the points."""

    def boot_id(self) -> str:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

    def open(self, path: str, mode: Mode = "read") -> File:
        flags = {"read": os.O_RDONLY, "write": os.O_RDWR, "create": os.O_RDWR | os.O_CREAT}[mode]
        try:
            handle = os.open(path, flags | os.O_NONBLOCK, 0o666)  # or a pipe would be waited for
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, path) from error
        file = RealFile(path, handle)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            file.close()
            raise StorageError(
                f"{path} is not a file: something else has its name.", advice="Move it out of the log's folder."
            )
        return file

    def map(self, path: str, length: int, *, writable: bool = True) -> Map:
        try:
            return _RealMap(path, length, writable=writable)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, path) from error

    def names(self, folder: str) -> list[str]:
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, folder) from error

    def exists(self, path: str) -> bool:
        return os.access(path, os.F_OK)

    def make_folder(self, path: str) -> None:
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise storage_error(error, path) from error

    def rename(self, path: str, to: str) -> None:
        try:
            os.replace(path, to)
        except OSError as error:
            raise storage_error(error, to) from error

    def remove(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(error, path) from error

    def remove_folder(self, path: str) -> None:
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error(error, path) from error

    def sync_folder(self, path: str) -> None:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, path) from error

    def free_bytes(self, path: str) -> int:
        try:
            return shutil.disk_usage(path).free
        except OSError as error:
            raise storage_error(error, path) from error

    def changed_us(self, path: str) -> int:
        try:
            return os.stat(path).st_mtime_ns // 1000
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, path) from error


class RealFile:
    """One file of the machine's own file system."""

    _handle = -1  # also where Ctrl-C came before the first line of `__init__`

    def __init__(self, path: str, handle: int) -> None:
        self.path = path
        self._handle = handle
        self._locked_by = 0
        # One call into C: Ctrl-C falls before or after it, and never between a `finally` and the lock it frees.
        self.unlock: Callable[[], None] = partial(fcntl.flock, handle, fcntl.LOCK_UN)

    def size(self) -> int:
        return os.fstat(self._handle).st_size

    def read_at(self, position: int, length: int) -> bytes:
        try:
            return os.pread(self._handle, length, position)
        except OSError as error:
            raise storage_error(error, self.path) from error

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        try:
            for start in range(0, len(buffers), _WRITEV_MAX):
                some = buffers[start : start + _WRITEV_MAX]
                length = sum(memoryview(buffer).nbytes for buffer in some)
                written = os.pwritev(self._handle, some, position)
                if written != length:
                    self._write_rest(position, some, written)
                position += length
        except OSError as error:
            raise storage_error(error, self.path) from error

    def _write_rest(self, position: int, buffers: Sequence[Buffer], written: int) -> None:
        """The kernel writes at most 2 GiB in one call, and less when a signal or the end of the disk comes between."""
        for buffer in buffers:
            rest = memoryview(buffer).cast("B")
            if written >= rest.nbytes:
                written -= rest.nbytes
                position += rest.nbytes
                continue
            rest, position, written = rest[written:], position + written, 0
            while rest.nbytes:
                done = os.pwrite(self._handle, rest, position)
                rest, position = rest[done:], position + done

    def allocate(self, length: int) -> None:
        try:
            os.posix_fallocate(self._handle, 0, length)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise storage_error(error, self.path) from error
            if self.size() < length:
                self.truncate(length)

    def truncate(self, length: int) -> None:
        try:
            os.ftruncate(self._handle, length)
        except OSError as error:
            raise storage_error(error, self.path) from error

    def sync(self) -> None:
        try:
            os.fdatasync(self._handle)
        except OSError as error:
            raise storage_error(error, self.path) from error

    def view(self, length: int) -> pa.Buffer:
        if length == 0:
            return pa.py_buffer(b"")
        try:
            return pa.py_buffer(mmap.mmap(self._handle, length, mmap.MAP_SHARED, mmap.PROT_READ))
        except (OSError, ValueError) as error:
            raise Damaged(
                f"{self.path} is shorter than {length} bytes or cannot be mapped: {error}.",
                advice="Run `headwater doctor` on this log.",
            ) from error

    def lock(self, *, wait: bool = True, shared: bool = False) -> bool:
        if not self._locked_by:
            tell_when_forked(self)
        self._locked_by = os.getpid()
        try:
            fcntl.flock(self._handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError as error:
            raise storage_error(error, self.path) from error
        return True

    def close(self) -> None:
        """Frees the lock by itself first: a child that was forked meanwhile has a copy of the file, which would keep it.

        Not in that child, which would free the lock of its parent.
        """
        if self._locked_by == os.getpid():
            self.unlock()
            self._locked_by = 0
        self.unlock = partial(fcntl.flock, -1, fcntl.LOCK_UN)
        handle, self._handle = self._handle, -1  # first, so that an interrupt cannot make us close the number twice
        if handle >= 0:
            os.close(handle)

    def _forked(self) -> None:
        """In a child: lets go of a lock of the parent's, which the copy would keep after the parent's death."""
        self.close()

    def __del__(self) -> None:
        self.close()


class _RealMap:
    def __init__(self, path: str, length: int, *, writable: bool) -> None:
        handle = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK)
        try:
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(handle, length, mmap.MAP_SHARED, protection)
        except ValueError as error:
            raise Damaged(
                f"{path} is shorter than {length} bytes.", advice="Run `headwater doctor` on this log."
            ) from error
        finally:
            os.close(handle)
        self.view = memoryview(self._map)

    def sync(self) -> None:
        try:
            self._map.flush()
        except OSError as error:
            raise StorageError(f"A mapped file could not be synced: {error}.") from error

    def close(self) -> None:
        self.view.release()
        self._map.close()


def wait_until_free(file: File) -> None:
    """Returns when nobody holds a file's lock alone; all who wait go on together, unlike those who wait to hold it."""
    try:
        file.lock(shared=True)
    finally:
        file.unlock()


def storage_error(error: OSError, path: str) -> StorageError:
    """The operating system's refusal, in our words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"No room is left on the disk for {path}.",
            advice="Free some space, then repeat the call. Nothing stored is lost.",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return NoAccess(
            f"The operating system refused access to {path}: {os.strerror(error.errno)}.",
            advice="Check the owner and rights of the log's folder, or open it with read_only=True.",
        )
    if error.errno == errno.ENOTDIR:
        return NoAccess(
            f"{path} cannot be created: something above it is a file, not a folder.", advice="Check the log's path."
        )
    if error.errno == errno.ENOENT:
        return NoAccess(f"{path} cannot be created: {os.strerror(error.errno)}.", advice="Check the log's path.")
    return StorageError(f"{path}: {error.strerror or error}.", advice="Run `headwater doctor` on this log.")
