"""A simulated process: the `Disk` as one process of a `SimDisk` sees it, with its open files and mappings.

Invariants:

- Once the process is dead, every use of its disk, files and maps raises `Crashed`, except `close`, which does nothing: the
  machine has closed them already. What code of the dead process still stores into mapped memory reaches nobody.
- What it wrote stays: the page cache survives a kill. Its locks are free.
- Refusals are those of `RealDisk`: `FileNotFoundError` where it raises that, `StorageError` and its kin elsewhere.

Thread-safety: every call holds the simulated disk's mutex; waiting for a lock frees it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import pyarrow as pa

from headwater.log.disk.disk import Buffer, Mode, storage_error
from headwater.model.errors import Damaged
from headwater.testing.simulation.file import Inode
from headwater.testing.simulation.tree import Folder, FolderEntry, Node

if TYPE_CHECKING:
    from headwater.testing.simulation.disk import Operation, SimDisk

_MAP_FIXED = 0x10


class Crashed(Exception):
    """The simulated process that made this call is dead. Not a `HeadwaterError`, so that nothing handles it."""


class WouldDeadlock(Exception):
    """A lock is waited for that nobody can free: a mistake in the test, or in the code's order of locks."""


class SimProcess:
    """The disk as one process sees it; made by `SimDisk.process`."""

    def __init__(self, machine: SimDisk, name: str) -> None:
        self.name = name
        self.alive = True
        self.machine = machine
        self.files: list[SimFile] = []
        self.maps: list[SimMap] = []

    def boot_id(self) -> str:
        with self.machine.mutex:
            self._begin("boot_id", "/")
            return self.machine.boot_id

    def open(self, path: str, mode: Mode = "read") -> SimFile:
        with self.machine.mutex:
            self._begin("open", path)
            node = self._find(path)
            if isinstance(node, Folder):
                _refuse(errno.EISDIR, path)
            if node is None:
                if mode != "create":
                    raise _missing(path)
                folder, name = self.machine.tree.locate(path)
                node = Inode(self.machine.random)
                node.changed_us = self.machine.now_us
                self.machine.tree.change(FolderEntry(folder, name, node))
            return SimFile(self, path, node, writable=mode != "read")

    def map(self, path: str, length: int, *, writable: bool = True) -> SimMap:
        with self.machine.mutex:
            self._begin("map", path)
            node = self._find(path)
            if node is None:
                raise _missing(path)
            if isinstance(node, Folder):
                _refuse(errno.EISDIR, path)
            if not 0 < length <= node.length:
                raise _too_short(path, length)
            return SimMap(self, path, node, length, writable=writable)

    def names(self, folder: str) -> list[str]:
        with self.machine.mutex:
            self._begin("names", folder)
            node = self._find(folder)
            if node is None:
                raise _missing(folder)
            if not isinstance(node, Folder):
                _refuse(errno.ENOTDIR, folder)
            names = list(node.entries)
            self.machine.random.shuffle(names)  # a real folder has no order either
            return names

    def exists(self, path: str) -> bool:
        with self.machine.mutex:
            self._begin("exists", path)
            try:
                return self.machine.tree.find(path) is not None
            except NotADirectoryError:
                return False

    def make_folder(self, path: str) -> None:
        with self.machine.mutex:
            self._begin("make_folder", path)
            try:
                self.machine.tree.make_folders(path)
            except OSError as error:
                raise storage_error(error, path) from error

    def rename(self, path: str, to: str) -> None:
        with self.machine.mutex:
            self._begin("rename", to)
            try:
                self.machine.tree.rename(path, to)
            except OSError as error:
                raise storage_error(error, to) from error

    def remove(self, path: str) -> None:
        with self.machine.mutex:
            self._begin("remove", path)
            node = self._find(path)
            if isinstance(node, Folder):
                _refuse(errno.EISDIR, path)
            if node is not None:
                self.machine.tree.change(*self.machine.tree.removals(path))

    def remove_folder(self, path: str) -> None:
        """A crash or a fault may come when a part is removed."""
        with self.machine.mutex:
            refusal = self.machine.strike(self, "remove_folder", path)
            node = self._find(path)
            if node is not None and not isinstance(node, Folder):
                _refuse(errno.ENOTDIR, path)
            removals = self.machine.tree.removals(path) if node is not None else []
            if refusal is not None:
                removals = removals[: self.machine.random.randint(0, len(removals))]
            for entry in removals:
                self.machine.tree.change(entry)
            if refusal is not None:
                raise refusal

    def sync_folder(self, path: str) -> None:
        with self.machine.mutex:
            self._begin("sync_folder", path)
            folder = self._find(path)
            if folder is None:
                raise _missing(path)
            if not isinstance(folder, Folder):
                _refuse(errno.ENOTDIR, path)
            self.machine.tree.sync(folder)

    def free_bytes(self, path: str) -> int:
        with self.machine.mutex:
            self._begin("free_bytes", path)
            return self.machine.free_bytes()

    def changed_us(self, path: str) -> int:
        with self.machine.mutex:
            self._begin("changed_us", path)
            node = self._find(path)
            if node is None:
                raise _missing(path)
            if isinstance(node, Folder):
                _refuse(errno.EISDIR, path)
            return node.changed_us

    def reach(self, point: str) -> None:
        with self.machine.mutex:
            self.machine.reach(self, point)

    def end(self) -> None:
        """The process is gone: its locks are free, its mappings lead nowhere. Called by the machine."""
        self.alive = False
        for file in self.files:
            file.free_lock()
        for mapped in self.maps:
            mapped.detach()
        self.files.clear()
        self.maps.clear()

    def _find(self, path: str) -> Node | None:
        try:
            return self.machine.tree.find(path)
        except OSError as error:
            raise storage_error(error, path) from error

    def _begin(self, operation: Operation, path: str) -> None:
        self.machine.begin(self, operation, path)


class _Opened:
    """What an open file and a mapping share: they are told once of every sync that failed while they were open."""

    def __init__(self, process: SimProcess, path: str, inode: Inode, *, writable: bool) -> None:
        self.path = path
        self._process = process
        self._machine = process.machine
        self._inode = inode
        self._writable = writable
        self._errors_seen = inode.errors

    def sync(self) -> None:
        with self._machine.mutex:
            refusal = self._machine.strike(self._process, "sync", self.path)
            self._check_open()
            if isinstance(refusal, Crashed):
                raise refusal
            failed_before = self._inode.errors != self._errors_seen
            if refusal is None:
                self._inode.sync()
            else:
                self._inode.fail_sync()
            self._errors_seen = self._inode.errors
            if refusal is not None:
                raise refusal
            if failed_before:
                _refuse(errno.EIO, self.path)

    def _check_open(self, *, writing: bool = False) -> None:
        opened = self in self._process.files or self in self._process.maps
        if self._process.alive and (not opened or (writing and not self._writable)):
            _refuse(errno.EBADF, self.path)


class SimFile(_Opened):
    """One open file of a simulated process."""

    def __init__(self, process: SimProcess, path: str, inode: Inode, *, writable: bool) -> None:
        super().__init__(process, path, inode, writable=writable)
        process.files.append(self)

    def size(self) -> int:
        with self._machine.mutex:
            self._begin("size")
            return self._inode.length

    def read_at(self, position: int, length: int) -> bytes:
        with self._machine.mutex:
            self._begin("read")
            return self._inode.read(position, length)

    def write_at(self, position: int, buffers: Sequence[Buffer]) -> None:
        """A fault, a full disk and a crash each leave a beginning of the bytes behind."""
        payload = b"".join(buffers)
        with self._machine.mutex:
            refusal = self._machine.strike(self._process, "write", self.path)
            self._check_open(writing=True)
            self._inode.changed_us = self._machine.now_us
            if refusal is not None:
                self._inode.write(position, payload[: self._machine.random.randint(0, len(payload))])
                raise refusal
            room = self._machine.free_bytes() - max(0, position - self._inode.length)
            fitting = max(0, self._inode.length - position) + max(0, room)
            self._inode.write(position, payload[:fitting])
            if fitting < len(payload):
                _refuse(errno.ENOSPC, self.path)

    def allocate(self, length: int) -> None:
        with self._machine.mutex:
            self._begin("allocate", writing=True)
            if length - self._inode.length > self._machine.free_bytes():
                _refuse(errno.ENOSPC, self.path)
            self._inode.changed_us = self._machine.now_us
            self._inode.resize(max(length, self._inode.length))

    def truncate(self, length: int) -> None:
        with self._machine.mutex:
            self._begin("truncate", writing=True)
            self._inode.changed_us = self._machine.now_us
            self._inode.resize(length)

    def view(self, length: int) -> pa.Buffer:
        """The shared pages themselves, as a real mapping is."""
        with self._machine.mutex:
            self._begin("view")
            if length > self._inode.length:
                raise _too_short(self.path, length)
            return pa.py_buffer(self._inode.view(length) if length else b"")

    def lock(self, *, wait: bool = True, shared: bool = False) -> bool:
        """A shared one is held alone here, too: that keeps others waiting longer, and promises the same."""
        with self._machine.mutex:
            self._begin("lock")
            deadline = time.monotonic() + self._machine.lock_wait_s
            while self._inode.locked_by not in (None, self):
                if not wait:
                    return False
                left_s = deadline - time.monotonic()
                if self._inode.locked_in_thread == threading.get_ident() or left_s <= 0:
                    raise WouldDeadlock(f"{self._process.name} waits for {self.path}, which nobody can unlock.")
                self._machine.freed.wait(left_s)
                self._begin("lock")
            self._inode.locked_by, self._inode.locked_in_thread = self, threading.get_ident()
            return True

    def unlock(self) -> None:
        with self._machine.mutex:
            self._begin("unlock")
            self.free_lock()

    def close(self) -> None:
        with self._machine.mutex:
            if self in self._process.files:
                self.free_lock()
                self._process.files.remove(self)

    def free_lock(self) -> None:
        """Frees the lock if this file holds it."""
        if self._inode.locked_by is self:
            self._inode.locked_by = None
            self._machine.freed.notify_all()

    def _begin(self, operation: Operation, *, writing: bool = False) -> None:
        self._machine.begin(self._process, operation, self.path)
        self._check_open(writing=writing)


class SimMap(_Opened):
    """A mapped file of a simulated process: `view` is memory that all mappings of the file share."""

    view: memoryview

    def __init__(self, process: SimProcess, path: str, inode: Inode, length: int, *, writable: bool) -> None:
        super().__init__(process, path, inode, writable=writable)
        self._memory = inode.map(length, writable=writable)
        self.view = memoryview(self._memory)
        process.maps.append(self)
        process.machine.mapped.append(inode)

    def close(self) -> None:
        with self._machine.mutex:
            if self in self._process.maps:
                self.view.release()
                self._process.maps.remove(self)
                self._forget()
                self._memory.close()

    def detach(self) -> None:
        """Puts a private copy in the memory's place: views of a dead process may live on, but nobody sees their stores."""
        self._forget()
        del self.view
        if self._writable:
            _make_private(self._memory)

    def _forget(self) -> None:
        self._machine.mapped.remove(self._inode)
        self._inode.unmap()

    def __getattr__(self, name: str) -> NoReturn:
        if name == "view":
            raise Crashed(f"Process {self._process.name} is dead.")
        raise AttributeError(name)


def _refuse(code: int, path: str) -> NoReturn:
    error = OSError(code, os.strerror(code), path)
    raise storage_error(error, path) from error


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _too_short(path: str, length: int) -> Damaged:
    return Damaged(f"{path} is shorter than {length} bytes.", advice="Run `headwater doctor` on this log.")


def _make_private(memory: mmap.mmap) -> None:
    """Maps anonymous memory with the same bytes over a shared mapping, at the same address."""
    copy = memory[:]
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if libc.mmap(address, len(copy), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
        raise OSError(ctypes.get_errno(), "A mapping of the simulated disk could not be replaced.")
    memory[:] = copy
