"""The simulated disk: one machine in memory that loses power, runs full and fails by seed, shared by simulated processes.

    disk = SimDisk(seed)
    writer, reader = disk.process("writer"), disk.process("reader")     # each a `Disk`; only `disk.folder` is there
    disk.fail("sync", "*.frames", errno.EIO, after=3)                   # the fourth sync of such a file fails
    disk.crash_at("writer", "append: written")                          # kills the writer where it reaches that point
    disk.kill("writer"); disk.power_loss()                              # or at any time

What survives what:

- a kill: everything the process wrote; a write during which it died leaves a beginning of its bytes
- a power loss: what was synced (`simfile` says how bytes and lengths are lost, `simtree` names); all processes are dead, and
  the boot id is another
- a failed sync: nothing of what it should have written, though every read still shows it until the power is lost

The same seed and the same calls give the same outcome, if one thread makes them. Stores into mapped memory are noticed at the
next call of any process; those between two calls count as one.

Thread-safety: one mutex around everything.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from random import Random
from typing import Literal

from headwater.log.disk.disk import storage_error
from headwater.model.points import DISK_POINTS, check_point
from headwater.testing.simulation.file import Inode
from headwater.testing.simulation.process import Crashed, SimProcess
from headwater.testing.simulation.tree import Tree

Operation = Literal[
    "boot_id", "open", "map", "names", "exists", "make_folder", "rename", "remove", "remove_folder", "sync_folder",
    "free_bytes", "changed_us", "size", "read", "write", "allocate", "truncate", "sync", "view", "lock", "unlock",
]  # fmt: skip
"""What a process asks of the disk. `sync` is that of a file or of a mapping."""

UNLIMITED_BYTES = 1 << 40


@dataclass
class Fault:
    """A refusal that waits for its operation; `struck` counts how often it has come."""

    operation: Operation
    path_pattern: str
    error: int
    after: int
    times: int
    probability: float
    struck: int = 0

    def strikes(self, operation: Operation, path: str, random: Random) -> bool:
        """Whether this operation is refused; counts it."""
        if operation != self.operation or self.struck >= self.times or not fnmatchcase(path, self.path_pattern):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.probability < 1.0 and random.random() >= self.probability:
            return False
        self.struck += 1
        return True


class SimDisk:
    """One machine: a file system, the processes that use it, and what befalls them."""

    def __init__(self, seed: int, *, folder: str = "/disk", capacity_bytes: int | None = None) -> None:
        self.seed = seed
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self.points: Counter[str] = Counter()
        self.now_us = 0
        """The clock of the disk: every operation takes a microsecond."""
        self.lock_wait_s = 5.0
        self.random = Random(seed)
        self.tree = Tree(self.random)
        self.mapped: list[Inode] = []
        self.mutex = threading.RLock()
        self.freed = threading.Condition(self.mutex)
        self._boots = 1
        self._processes: dict[str, SimProcess] = {}
        self._faults: list[Fault] = []
        self._crash_points: dict[tuple[str, str], int] = {}
        self._crash_probabilities: dict[str, float] = {}
        self._interrupt_points: dict[tuple[str, str], int] = {}
        self.tree.make_folders(folder)
        self.tree.sync_all()

    def process(self, name: str) -> SimProcess:
        """The living process of that name, a new one if there is none."""
        with self.mutex:
            process = self._processes.get(name)
            if process is None:
                process = self._processes[name] = SimProcess(self, name)
            return process

    def kill(self, name: str) -> None:
        """Ends the process as `kill -9` would; no error when there is none."""
        with self.mutex:
            process = self._processes.pop(name, None)
            if process is not None:
                process.end()
                self.freed.notify_all()

    def power_loss(self) -> None:
        """Ends all processes and loses, tears and reorders what was not synced."""
        with self.mutex:
            for name in list(self._processes):
                self.kill(name)
            self.tree.lose_power()
            self._boots += 1

    @property
    def boot_id(self) -> str:
        """Another one after every power loss."""
        return f"simulated-{self.seed}-{self._boots}"

    def fail(
        self,
        operation: Operation,
        path_pattern: str = "*",
        error: int = errno.EIO,
        *,
        after: int = 0,
        times: int = 1,
        probability: float = 1.0,
    ) -> Fault:
        """Refuses the operation on matching paths (`*` spans folders), after so many calls, so many times.

        A write leaves a beginning of its bytes behind, a sync marks everything clean, a rename is known by its new name.
        """
        fault = Fault(operation, path_pattern, error, after, times, probability)
        with self.mutex:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Takes back every fault and every crash that has not come yet."""
        with self.mutex:
            self._faults.clear()
            self._crash_points.clear()
            self._crash_probabilities.clear()
            self._interrupt_points.clear()

    def crash_at(self, process: str, point: str, nth: int = 1) -> None:
        """Kills the process when it reaches the point for the nth time from now; once."""
        check_point(point, among=DISK_POINTS)
        with self.mutex:
            self._crash_points[process, point] = nth

    def interrupt_at(self, process: str, point: str, nth: int = 1) -> None:
        """Ctrl-C for the process where it reaches the point for the nth time from now; once. It lives on."""
        check_point(point, among=DISK_POINTS)
        with self.mutex:
            self._interrupt_points[process, point] = nth

    def crash_randomly(self, process: str, probability: float) -> None:
        """Kills whatever process has that name at any call or point, until the probability is set to 0 or `heal` is called."""
        with self.mutex:
            self._crash_probabilities[process] = probability

    def flip(self, path: str, bit: int) -> None:
        """Flips one bit, in the cache and on the platter: bit 0 is the lowest of the first byte."""
        with self.mutex:
            inode = self._inode(path)
            if not 0 <= bit < inode.length * 8:
                raise ValueError(f"{path} has {inode.length * 8} bits and so no bit {bit}.")
            inode.damage(bit=bit)

    def truncate_file(self, path: str, length: int) -> None:
        """Cuts the file, in the cache and on the platter."""
        with self.mutex:
            self._inode(path).damage(length=length)

    def paths(self) -> list[str]:
        """Every file there is, in order, for the test to look at."""
        with self.mutex:
            return sorted(path for path, _ in self.tree.files())

    def content(self, path: str) -> bytes:
        """What a process would read now, for the test to look at."""
        with self.mutex:
            inode = self._inode(path)
            return inode.read(0, inode.length)

    def free_bytes(self) -> int:
        """The room left; the lengths of all files that have a name are taken."""
        if self.capacity_bytes is None:
            return UNLIMITED_BYTES
        return max(0, self.capacity_bytes - sum(inode.length for _, inode in self.tree.files()))

    def begin(self, process: SimProcess, operation: Operation, path: str) -> None:
        """A process starts an operation that happens whole or not at all."""
        refusal = self.strike(process, operation, path)
        if refusal is not None:
            raise refusal

    def strike(self, process: SimProcess, operation: Operation, path: str) -> Exception | None:
        """A process starts an operation: what it is to raise, when a part is done. A crash has killed it already."""
        self._look(process)
        self.now_us += 1
        if self._crashes(process):
            return self._end(process, f"{operation} {path}")
        for fault in self._faults:
            if fault.strikes(operation, path, self.random):
                error = OSError(fault.error, os.strerror(fault.error), path)
                if isinstance(error, FileNotFoundError):
                    return error
                refusal = storage_error(error, path)
                refusal.__cause__ = error
                return refusal
        return None

    def reach(self, process: SimProcess, point: str) -> None:
        """A process reaches a point."""
        check_point(point, among=DISK_POINTS)
        self._look(process)
        self.points[point] += 1
        if self._counted_down(self._crash_points, process.name, point) or self._crashes(process):
            raise self._end(process, point)
        if self._counted_down(self._interrupt_points, process.name, point):
            raise KeyboardInterrupt(f"Process {process.name} was interrupted at {point} (seed {self.seed}).")

    def _look(self, process: SimProcess) -> None:
        if not process.alive:
            raise Crashed(f"Process {process.name} is dead.")
        for inode in self.mapped:
            inode.capture()

    def _counted_down(self, points: dict[tuple[str, str], int], name: str, point: str) -> bool:
        left = points.get((name, point), 0) - 1
        if left >= 0:
            points[name, point] = left
        return left == 0

    def _crashes(self, process: SimProcess) -> bool:
        probability = self._crash_probabilities.get(process.name, 0.0)
        return probability > 0.0 and self.random.random() < probability

    def _end(self, process: SimProcess, where: str) -> Crashed:
        self.kill(process.name)
        return Crashed(f"Process {process.name} was killed at {where} (seed {self.seed}).")

    def _inode(self, path: str) -> Inode:
        node = self.tree.find(path)
        if not isinstance(node, Inode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node
