"""The commit log: what makes an append over several partitions and topics all or nothing.

Two files in the log's folder. `state` is a slot file (magic "HWLOGS") with one fact: boot id, incarnation, sequence,
pending, end, last transaction, chain, sync. `commits` holds the commit records one after the other:

    file:   magic "HWCMTS", format u16, floor u64 (every transaction up to it was decided before this file began)
    record: magic "HWC1", bytes u32, transaction u64, chain u32, crc32c u32 of all the rest, then the body (msgpack):
            the partitions' shares; with magic "HWC2" (from format 2 on) those, then the offsets that groups commit; with
            "HWC3" (from format 3 on) all that, then the marker that a stage commits

A file begins with format 1 and becomes one of a later format with the first record that needs it. It is longer than its records: room
is allocated ahead of them, and zeros are no record.

A transaction holds the append and sync locks of all its partitions, in a fixed order. It writes its frames behind the
published ends, syncs them, and then, under the lock of `state`: sets `pending` to the place of its record, writes and syncs
the record, publishes every partition's new end, and clears `pending`.

Invariants:
- the record is the decision. Until it is whole on disk nothing was published; from then on the transaction happened;
- `pending` is set before the record is written, so whoever holds a partition's lock and finds `pending` set knows that its
  owner is dead, and finishes the transaction (the record is whole) or forgets it (it is not);
- a reader that finds `pending` set uses the ends from before the transaction, so it sees all of it or nothing;
- offsets that a transaction commits for groups are a part of its record, applied when it is published, again when a dead
  one is settled, and again after a power loss; the groups' locks are held from the check of ownership until then;
- a stage's marker likewise: its lock is held from the check of its number and last marker until the transaction has ended;
- when a record's sync fails, in its own process or in one that settles it, the outcome is unknown to the disk: the partitions stay
  closed to appends (poisoned) until a new `commits` without that record has replaced the file;
- `state` says that a record is on disk before any part of it is published. A process that settles such a record publishes the rest without
  another sync, because that sync could fail;
- nothing that fails behind the record makes the transaction fail: what could not be published stays `pending`;
- `commits` is never shorter than `end`. One that holds no record and is shorter has replaced another, and who did so died before
  `state` said it; any other that is shorter is damaged.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from crc32c import crc32c

from headwater.log.disk.atomic_file import replace_file
from headwater.log.disk.disk import Disk, File
from headwater.log.disk.slots import SlotFile, create_slot_file
from headwater.log.file.partition.head import Mark
from headwater.log.port.group import OffsetPart
from headwater.model.errors import Damaged, DiskFull, FormatTooNew, Poisoned, StorageError

FORMAT = 3
COMMITS_BYTES_MAX = 4 << 20
ROOM_BYTES = 64 << 10

SYNC_FAILED, SYNC_DONE = 1, 2

_STATE_MAGIC = b"HWLOGS"
_STATE_FORMAT = 1
_STATE = struct.Struct("<36sqqqqqII")
_FILE_MAGIC = b"HWCMTS"
_FILE = struct.Struct("<6sHQ")
_FORMAT_FIRST = 1
_RECORD_MAGIC = b"HWC1"
_RECORD_WITH_OFFSETS_MAGIC = b"HWC2"
_RECORD_WITH_MARKER_MAGIC = b"HWC3"
_RECORD = struct.Struct("<4sIQII")


class CommitState(msgspec.Struct, frozen=True, gc=False):
    """What the processes of one log share beside the heads. `pending` is the record's place plus one, or 0.

    `sync` says how the sync of the last record ended: 0 where nobody can say or nothing is pending, `SYNC_DONE` while that which is
    pending is on disk, `SYNC_FAILED` until `commits` has begun again.
    """

    boot_id: bytes
    incarnation: int
    sequence: int
    pending: int
    end: int
    transaction: int
    chain: int
    sync: int

    @property
    def failed(self) -> bool:
        """Whether a record could not be synced."""
        return self.sync == SYNC_FAILED


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One partition's share of a transaction: from offset `start` on, and the mark behind it."""

    topic: str
    topic_id: str
    partition: int
    start: int
    mark: Mark


class StagePart(msgspec.Struct, frozen=True, array_like=True):
    """The marker that a stage commits, in its canonical form; empty where it forgets the last one."""

    stage: str
    marker: bytes


class Decision(msgspec.Struct, frozen=True):
    """What a commit record says: the partitions' shares of a transaction, and what it commits for groups and a stage."""

    transaction: int
    parts: Sequence[Part]
    offsets: Sequence[OffsetPart] = ()
    stage: StagePart | None = None


Publish = Callable[[Decision], None]
"""Makes a decided transaction visible; done again for one whose process died in the middle of it."""

Poison = Callable[[Decision], None]
"""Closes the partitions of a transaction of which nobody can say whether its record is on disk."""


class CommitLog:
    """The commit log of one log, opened by one process."""

    def __init__(self, disk: Disk, folder: str, *, writable: bool) -> None:
        self._disk = disk
        self._folder = folder
        self._mutex = threading.RLock()
        self._depth = 0
        self._file: File | None = None
        self._known: tuple[tuple[Any, ...], CommitState] | None = None
        self._publish: Publish
        self._poison: Poison
        self._state = SlotFile(
            disk, f"{folder}/state", magic=_STATE_MAGIC, format_max=_STATE_FORMAT, shapes=(_STATE,), writable=writable
        )
        self._lock = disk.open(f"{folder}/commit.lock", "write" if writable else "read")
        self._check_file(self._read(0, _FILE.size))

    def publish_by(self, publish: Publish, poison: Poison) -> None:
        """Who makes a decided transaction visible, and who closes its partitions: known before the first of them is settled."""
        self._publish, self._poison = publish, poison

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of `state`; taken last, by holders of partitions' locks too."""
        with self._mutex:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._lock.lock()
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._lock.unlock()

    def state(self) -> CommitState:
        """The shared state as it was at one moment."""
        values, known = self._state.read(0), self._known
        if known is None or known[0] is not values:
            known = self._known = (values, CommitState(*values))
        return known[1]

    def is_torn(self) -> bool:
        """Whether a whole state is left although the one that counts is damaged: so a power loss leaves it."""
        return bool(self._state.read_all(0))

    def set_state(self, state: CommitState) -> None:
        """Changes the shared state; the caller holds the lock."""
        self._state.write(0, *msgspec.structs.astuple(state))

    def next_transaction(self, now: int) -> int:
        """A number for a new transaction, greater than all before it."""
        with self.locked():
            state = self.state()
            number = max(state.transaction + 1, now)
            self.set_state(msgspec.structs.replace(state, transaction=number))
            return number

    def commit(self, decision: Decision) -> None:
        """Decides a transaction whose frames are written and synced, and publishes it.

        Its partitions are closed when nobody can say whether the record is on disk. What fails behind the record is left
        to whoever holds one of the locks next, as if this process had died: the transaction has happened.
        """
        with self.locked():
            self.settle()
            file = self._commits()
            size = file.size()
            state = self._in_step(size)
            if state.failed:
                raise _failed(self._folder)
            record = _encode(decision, state.chain)
            _make_room(file, size, length=state.end + len(record))
            self.set_state(msgspec.structs.replace(state, pending=state.end + 1, sync=0))
            self._disk.reach("commit: intended")
            try:
                self._raise_format(file, 3 if decision.stage else 2 if decision.offsets else 1)
                file.write_at(state.end, [record])
                self._disk.reach("commit: written")
                file.sync()
            except DiskFull:
                self.set_state(state)
                raise
            except StorageError as error:
                self._poison(decision)
                self.set_state(msgspec.structs.replace(state, sync=SYNC_FAILED))
                raise _failed(self._folder) from error
            self._disk.reach("commit: recorded")
            with suppress(StorageError, FileNotFoundError):
                self._say_synced()
                self._publish(decision)
                self._finish(len(record), record)
            self._disk.reach("commit: done")

    def settle(self) -> None:
        """Finishes or forgets what a dead process left pending. Cheap when nothing is."""
        if not self.state().pending:
            return
        with self.locked():
            state = self.state()
            if not state.pending:
                return
            found = _decode(self._read(state.pending - 1), state.chain)
            if found is None:
                self.set_state(msgspec.structs.replace(state, pending=0, sync=0))
                return
            decision, record = found
            if state.sync != SYNC_DONE:
                try:
                    file = self._commits()
                    file.write_at(state.pending - 1, [record])  # a sync that failed before has left its pages clean
                    file.sync()
                except StorageError:
                    self._poison(decision)
                    self.set_state(msgspec.structs.replace(state, pending=0, sync=SYNC_FAILED))
                    raise
                self._say_synced()
            self._disk.reach("settle: before publish")
            self._publish(decision)
            self._finish(len(record), record)

    def pending_parts(self, state: CommitState) -> Sequence[Part]:
        """The partitions a pending transaction is publishing; readers use their ends from before it."""
        if not state.pending:
            return ()
        found = _decode(self._read(state.pending - 1), state.chain)
        return found[0].parts if found else ()

    def decided(self) -> tuple[int, dict[int, Decision]]:
        """The floor, and every recorded transaction in the order of their records, from the file alone."""
        data = self._read(0)
        floor = self._check_file(data)
        position, chain, found = _FILE.size, 0, {}
        while (record := _decode(data[position:], chain)) is not None:
            decision, raw = record
            found[decision.transaction] = decision
            position += len(raw)
            chain = _chain(raw)
        return floor, found

    def begin_again(self, *, floor: int) -> None:
        """Replaces `commits` by an empty file; the caller has synced what its records speak of, and holds the lock."""
        self._close_file()
        create_commits(self._disk, self._folder, floor=floor)
        self._disk.reach("records: begun again")
        state = self.state()
        self.set_state(msgspec.structs.replace(state, pending=0, end=_FILE.size, chain=0, sync=0))

    def recovered(self, *, boot_id: str, incarnation: int, floor: int) -> None:
        """Begins again after a recovery; the boot id comes last, since it says that all is done."""
        create_commits(self._disk, self._folder, floor=floor)
        state = CommitState(b"", incarnation, 0, 0, _FILE.size, floor, 0, 0)
        self._state.write_after_power_loss(0, *msgspec.structs.astuple(state))
        self._state.sync()
        self._disk.reach("recovery: begun again")
        self.set_state(msgspec.structs.replace(state, boot_id=_boot_bytes(boot_id)))
        self._state.sync()

    def is_long(self, *, tried_bytes: int = 0) -> bool:
        """Whether it is time to begin again; after an attempt that failed at some length, when it is longer by a quarter."""
        return self.state().end > max(COMMITS_BYTES_MAX, tried_bytes and tried_bytes + COMMITS_BYTES_MAX // 4)

    def close(self) -> None:
        """Frees everything."""
        self._close_file()
        self._lock.close()
        self._state.close()

    def _say_synced(self) -> None:
        self.set_state(msgspec.structs.replace(self.state(), sync=SYNC_DONE))

    def _finish(self, length: int, record: bytes) -> None:
        state = self.state()
        self.set_state(
            msgspec.structs.replace(
                state, sequence=state.sequence + 1, pending=0, end=state.end + length, chain=_chain(record), sync=0
            )
        )

    def _commits(self) -> File:
        """The file that has the name now: another process may have begun again."""
        self._close_file()
        self._file = self._disk.open(f"{self._folder}/commits", "write")
        return self._file

    def _in_step(self, size: int) -> CommitState:
        """The state, which is brought in step with the file where that was replaced by one who died before the state said so.

        The caller holds the lock, and has settled everything. The file's name may not be on disk yet.
        """
        state = self.state()
        if size >= state.end:
            return state
        if size > _FILE.size:
            raise Damaged(
                f"{self._folder}/commits is damaged: it has {size} bytes, and its records took {state.end}.",
                advice="Close every program that uses this log, then run `headwater doctor --repair`.",
            )
        self._disk.sync_folder(self._folder)
        state = msgspec.structs.replace(state, end=_FILE.size, chain=0, sync=0)
        self.set_state(state)
        return state

    def _read(self, position: int, length: int | None = None) -> memoryview:
        file = self._disk.open(f"{self._folder}/commits")
        try:
            return memoryview(file.read_at(position, max(0, file.size() - position) if length is None else length))
        finally:
            file.close()

    def _raise_format(self, file: File, needed: int) -> None:
        """An older Headwater must refuse a file whose next record it cannot read."""
        if needed == _FORMAT_FIRST:
            return
        magic, version, floor = _FILE.unpack(file.read_at(0, _FILE.size))
        if version < needed:
            file.write_at(0, [_FILE.pack(magic, needed, floor)])

    def _check_file(self, data: memoryview) -> int:
        path = f"{self._folder}/commits"
        if len(data) < _FILE.size or data[:6] != _FILE_MAGIC:
            raise Damaged(f"{path} is damaged at byte 0.", advice="Run `headwater doctor --repair`.")
        _, version, floor = _FILE.unpack_from(data)
        if version > FORMAT:
            raise FormatTooNew(
                f"{path} has format {version}; this Headwater reads up to {FORMAT}.", advice="Upgrade Headwater."
            )
        return int(floor)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def create_state(disk: Disk, folder: str, *, boot_id: str, incarnation: int = 0, transaction: int = 0) -> None:
    """The shared state of a new log, or of one whose state was lost."""
    values = (_boot_bytes(boot_id), incarnation, 0, 0, _FILE.size, transaction, 0, 0)
    create_slot_file(disk, f"{folder}/state", magic=_STATE_MAGIC, version=_STATE_FORMAT, facts=((_STATE, values),))


def create_commits(disk: Disk, folder: str, *, floor: int = 0) -> None:
    """An empty `commits`, in place of the old one if there is one."""
    replace_file(disk, f"{folder}/commits", [_FILE.pack(_FILE_MAGIC, _FORMAT_FIRST, floor)])


def _boot_bytes(boot_id: str) -> bytes:
    return boot_id.encode("ascii")[:36].ljust(36, b"\0")


def _make_room(file: File, size: int, *, length: int) -> None:
    """Allocates ahead: the sync of a file that has grown waits for the file system's journal, too."""
    if length <= size:
        return
    try:
        file.allocate(length + ROOM_BYTES)
    except DiskFull:
        file.allocate(length)


def _encode(decision: Decision, chain: int) -> bytes:
    parts, offsets, stage = list(decision.parts), list(decision.offsets), decision.stage
    content: Sequence[object]
    if stage is not None:
        magic, content = _RECORD_WITH_MARKER_MAGIC, [parts, offsets, stage]
    elif offsets:
        magic, content = _RECORD_WITH_OFFSETS_MAGIC, [parts, offsets]
    else:
        magic, content = _RECORD_MAGIC, parts
    body = msgspec.msgpack.encode(content)
    head = _RECORD.pack(magic, len(body), decision.transaction, chain, 0)[:-4]
    return head + struct.pack("<I", crc32c(body, crc32c(head))) + body


def _decode(data: memoryview, chain: int) -> tuple[Decision, bytes] | None:
    """The first record in the data, or None where no whole one with the right chain stands."""
    if len(data) < _RECORD.size:
        return None
    magic, length, transaction, before, crc = _RECORD.unpack_from(data)
    body = data[_RECORD.size : _RECORD.size + length]
    expected = crc32c(body, crc32c(data[: _RECORD.size - 4]))
    if len(body) != length or before != chain or expected != crc:
        return None
    raw = bytes(data[: _RECORD.size + length])
    if magic == _RECORD_MAGIC:
        return Decision(transaction, msgspec.msgpack.decode(body, type=tuple[Part, ...])), raw
    if magic == _RECORD_WITH_OFFSETS_MAGIC:
        both = msgspec.msgpack.decode(body, type=tuple[tuple[Part, ...], tuple[OffsetPart, ...]])
        return Decision(transaction, *both), raw
    if magic == _RECORD_WITH_MARKER_MAGIC:
        every = msgspec.msgpack.decode(body, type=tuple[tuple[Part, ...], tuple[OffsetPart, ...], StagePart])
        return Decision(transaction, *every), raw
    return None


def _chain(record: bytes) -> int:
    return int(_RECORD.unpack_from(record)[4])


def _failed(folder: str) -> Poisoned:
    return Poisoned(
        f"A commit record could not be synced in {folder}.",
        advice="Check the disk, then open the log again: that decides whether the transaction happened.",
    )
