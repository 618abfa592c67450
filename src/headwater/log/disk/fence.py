"""A fence: the epoch of a named producer, shared by all processes.

`producers/<id>` is a slot file (magic "HWPROD") with one fact, the epoch. Whoever opens a producer by name raises it; the
epoch is looked at under the append lock of every partition written to, so an older producer of that name is refused from
then on, even if it was only asleep.
"""

from __future__ import annotations

import hashlib
import struct

from headwater.log.disk.disk import Disk
from headwater.log.disk.slots import SlotFile, create_slot_file

FORMAT = 1

_MAGIC = b"HWPROD"
_EPOCH = struct.Struct("<Q")


class Fence:
    """The fence of one producer name, opened by one process."""

    def __init__(self, disk: Disk, path: str, producer: bytes) -> None:
        self.producer = producer
        self._facts = SlotFile(disk, path, magic=_MAGIC, format_max=FORMAT, shapes=(_EPOCH,), writable=True)
        self._lock = disk.open(f"{path}.lock", "create")

    def epoch(self) -> int:
        """The epoch in force."""
        return int(self._facts.read(0)[0])

    def _last_epoch(self) -> int:
        """The greatest epoch that is whole: a power loss may have torn the one that counts. The caller holds the lock."""
        epochs = [int(epoch) for (epoch,) in self._facts.read_all(0)]
        return max(epochs) if epochs else self.epoch()

    def raise_epoch(self) -> int:
        """Fences every producer of this name that is open now; returns the new epoch."""
        self._lock.lock()
        try:
            epoch = self._last_epoch() + 1
            self._facts.write_after_power_loss(0, epoch)
            self._facts.sync()
        finally:
            self._lock.unlock()
        return epoch

    def close(self) -> None:
        """Frees everything."""
        self._lock.close()
        self._facts.close()


def check_fence(disk: Disk, path: str) -> None:
    """Raises what is wrong with a fence's file."""
    facts = SlotFile(disk, path, magic=_MAGIC, format_max=FORMAT, shapes=(_EPOCH,), writable=False)
    try:
        facts.read(0)
    finally:
        facts.close()


def create_fence(disk: Disk, folder: str, name: str, epoch: int) -> None:
    """The fence of a restored log: the file of a producer id, with the epoch that it had."""
    create_slot_file(disk, f"{folder}/{name}", magic=_MAGIC, version=FORMAT, facts=((_EPOCH, (epoch,)),))
    disk.open(f"{folder}/{name}.lock", "create").close()


def open_fence(disk: Disk, folder: str, name: str) -> Fence:
    """The fence of a producer name, made at its first use."""
    producer = hashlib.blake2b(name.encode("utf-8"), digest_size=16).digest()
    path = f"{folder}/{producer.hex()}"
    if not disk.exists(path):
        lock = disk.open(f"{path}.lock", "create")
        lock.lock()
        try:
            if not disk.exists(path):
                create_slot_file(disk, path, magic=_MAGIC, version=FORMAT, facts=((_EPOCH, (0,)),))
                disk.sync_folder(folder)
        finally:
            lock.close()
    return Fence(disk, path, producer)
