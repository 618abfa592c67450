"""The stages of a local log, in files.

    stages/<stage>/lock      the stage's lock
    stages/<stage>/number    slot file (magic "HWSTGN"): the fencing number in force
    stages/<stage>/marker    magic "HWMARK", format u16, bytes of a slot u64; then two slots: length u32, crc32c u32 of the body,
                             body (msgpack): transaction, marker (canonical JSON, empty: none), and where its events stand

Invariants:
- the number rises, and is on disk before anybody uses it, under the stage's lock; that lock is held from the moment number and
  marker are checked until the transaction has ended, so nobody commits with a number that was replaced meanwhile;
- a marker is written when its transaction is published, under `commit.lock`, into the slot that is not the newest whole one: a
  process killed in the middle leaves the one before, and whoever settles its transaction writes it again. So once everything
  is settled no slot is torn, and one whose checksum fails is damage: the older marker never passes for the present one;
- publishing cannot find the disk full: the file has room for the marker before its transaction begins;
- markers are not synced one by one: each is in its transaction's record until `sync` was called.

Lock order: a stage's lock comes after the catalog's and before the partitions'.
Thread-safety: may be used by many threads; each stage has one lock file in a process, and a mutex before it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial

import msgspec
from crc32c import crc32c

from headwater.log.disk.atomic_file import replace_file
from headwater.log.disk.disk import Disk, File
from headwater.log.disk.gate import settled
from headwater.log.disk.slots import SlotFile, create_slot_file
from headwater.log.file.commit import Decision, StagePart
from headwater.log.port.stage import Positions, StageCommit, StageState, already_there
from headwater.log.port.write import Write
from headwater.model.errors import Damaged, FormatTooNew
from headwater.model.marker import Marker

FORMAT = 1
SLOT_BYTES = 4096

_NUMBER_MAGIC = b"HWSTGN"
_NUMBER = struct.Struct("<Q")
_MARKER_MAGIC = b"HWMARK"
_MARKER = struct.Struct("<6sHQ")
_SLOT = struct.Struct("<II")
_PLACE_BYTES = 40
_BODY_BYTES = 64


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """A slot's body: `places` are topic, partition, first offset, and the offset behind the last."""

    transaction: int = 0
    marker: bytes = b""
    places: Sequence[tuple[str, int, int, int]] = ()

    def positions(self) -> Positions:
        found: Positions = {}
        for topic, partition, start, end in self.places:
            found.setdefault(topic, {})[partition] = range(start, end)
        return found


class StageFiles:
    """The stages of one log, as far as one process has used them."""

    def __init__(self, disk: Disk, folder: str, *, settle: Callable[[], None], writable: bool) -> None:
        self._disk = disk
        self._folder = f"{folder}/stages"
        self._settle = settle
        self._writable = writable
        self._mutex = threading.Lock()
        self._stages: dict[str, FileStage] = {}

    def names(self) -> list[str]:
        """The names of all stages, sorted."""
        return stage_names(self._disk, self._folder)

    def stage(self, name: str, *, create: bool) -> FileStage:
        """One stage, made if it is to be; one that nobody has opened yet has no state and no file."""
        with self._mutex:
            found = self._stages.get(name)
            if found is None:
                if create:
                    _create_stage(self._disk, self._folder, name)
                found = FileStage(self._disk, f"{self._folder}/{name}", settle=self._settle, writable=self._writable)
                if found.is_made:
                    self._stages[name] = found
            return found

    def publish(self, decision: Decision) -> None:
        """Writes the marker of a decided transaction where that was not done yet.

        A file that was damaged since must not keep everybody else from settling; its stage says so when it is next used.
        """
        if decision.stage is None:
            return
        places = [(part.topic, part.partition, part.start, part.mark.end) for part in decision.parts]
        with suppress(FileNotFoundError, Damaged):
            path = f"{self._folder}/{decision.stage.stage}/marker"
            _write_marker(self._disk, path, _Stored(decision.transaction, decision.stage.marker, places))
            self._disk.reach("stage: marker published")

    def sync(self, decisions: Iterable[Decision]) -> None:
        """Returns when the markers that these transactions have committed are on disk; the caller holds `commit.lock`.

        They are written again first, since a sync that failed before has left their pages clean. A file that is gone keeps
        nobody else from going on; its stage says so when it is next used.
        """
        for name in sorted({each.stage.stage for each in decisions if each.stage is not None}):
            with suppress(FileNotFoundError):
                file = self._disk.open(f"{self._folder}/{name}/marker", "write")
                try:
                    file.write_at(0, [file.read_at(0, file.size())])
                    file.sync()
                finally:
                    file.close()
        self._disk.reach("stage: markers synced")

    def close(self) -> None:
        """Frees everything."""
        for stage in self._stages.values():
            stage.close()


class FileStage:
    """One stage, opened by one process."""

    def __init__(self, disk: Disk, folder: str, *, settle: Callable[[], None], writable: bool) -> None:
        self._disk = disk
        self._folder = folder
        self._name = folder.rpartition("/")[2]
        self._settle = settle
        self._writable = writable
        # Re-entrant: an interrupt may leave a holder behind in its own traceback, and whoever cleans up after it is that thread.
        self._mutex = threading.RLock()
        self._slot_bytes = 0
        self.is_made = disk.exists(f"{folder}/number")
        if self.is_made:
            self._lock = disk.open(f"{folder}/lock", "write" if writable else "read")
            self._number = _open_number(disk, folder, writable=writable)

    def held(self) -> AbstractContextManager[None]:
        """Holds the stage's lock, with what a dead holder left settled; the caller has passed the log's gate."""
        return settled(self._mutex, self._lock, self._settle)

    def take(self) -> int:
        """A new fencing number: once it is returned, nobody commits with an earlier one."""
        with self.held():
            number = max(int(found) for (found,) in self._number.read_all(0)) + 1
            self._number.write_after_power_loss(0, number)
            self._disk.reach("stage: number raised")
            self._number.sync()
            self._disk.reach("stage: number synced")
            return number

    def state(self) -> StageState:
        """What is known of the stage now."""
        if not self.is_made:
            return StageState()
        if not self._writable:
            return self.seen()
        with self.held():
            return self.seen()

    def commit(
        self,
        number: int,
        marker: Marker | None,
        writes: Sequence[Write],
        *,
        gaps: bool,
        append: Callable[[StagePart], Sequence[range]],
    ) -> StageCommit:
        """Has `append` store the writes together with the marker, or does nothing (see `port.stage`)."""
        with self.held():
            if known := already_there(self._name, number, self.seen(), marker, gaps=gaps):
                return known
            part = StagePart(self._name, b"" if marker is None else marker.canonical())
            self._make_room(part, {(write.topic.name, write.partition) for write in writes})
            spans = append(part)
        return StageCommit(marker, written=True, positions=_positions(writes, spans))

    def seen(self) -> StageState:
        """What the files say; under the lock nothing is newer."""
        stored, self._slot_bytes = _read_marker(self._disk, f"{self._folder}/marker", settled=self._writable)
        last = Marker.from_canonical(stored.marker) if stored.marker else None
        return StageState(int(self._number.read(0)[0]), last, stored.positions())

    def close(self) -> None:
        """Frees everything."""
        self._number.close()
        self._lock.close()

    def _make_room(self, part: StagePart, places: set[tuple[str, int]]) -> None:
        """Makes the marker's file anew where a slot is too small for what it has to hold; the caller holds the lock, and has `seen` it."""
        needed = _SLOT.size + _BODY_BYTES + len(part.marker)
        needed += sum(_PLACE_BYTES + len(topic.encode("utf-8")) for topic, _ in places)
        if needed > self._slot_bytes:
            path = f"{self._folder}/marker"
            _create_marker(self._disk, path, _read_marker(self._disk, path)[0], slot_bytes=2 * needed)
            self._disk.reach("stage: room made")
            self._disk.sync_folder(self._folder)


def _positions(writes: Sequence[Write], spans: Sequence[range]) -> Positions:
    """Where the events of a batch stand: those of one partition stand together."""
    found: Positions = {}
    for write, span in zip(writes, spans, strict=True):
        places = found.setdefault(write.topic.name, {})
        known = places.get(write.partition, span)
        places[write.partition] = range(min(known.start, span.start), max(known.stop, span.stop))
    return found


def stage_names(disk: Disk, folder: str) -> list[str]:
    """The stages in a folder, sorted."""
    try:
        names = disk.names(folder)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if disk.exists(f"{folder}/{name}/number"))


def recover_stages(disk: Disk, folder: str, decided: Mapping[int, Decision]) -> None:
    """After an unclean stop: every holder is fenced, and the markers of recorded transactions are put back.

    A stage whose number is damaged says so when it is used; the others go on.
    """
    newest: dict[str, _Stored] = {}
    for transaction, decision in decided.items():
        if decision.stage is not None:
            places = [(part.topic, part.partition, part.start, part.mark.end) for part in decision.parts]
            newest[decision.stage.stage] = _Stored(transaction, decision.stage.marker, places)
    for name in stage_names(disk, f"{folder}/stages"):
        stage = f"{folder}/stages/{name}"
        with suppress(Damaged):
            _mend_number(disk, stage)
        if name in newest:
            found = newest[name]
            with suppress(Damaged, FileNotFoundError):
                stored, _ = _read_marker(disk, f"{stage}/marker", settled=False)
                found = max(found, stored, key=lambda each: each.transaction)
            _create_marker(disk, f"{stage}/marker", found)
        disk.sync_folder(stage)
        disk.reach("stage: recovered one")


def stage_checks(disk: Disk, folder: str) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """For the doctor: every file of every stage, how to look at it, and how to mend it when nobody uses the log."""
    for name in stage_names(disk, f"{folder}/stages"):
        stage = f"{folder}/stages/{name}"
        yield f"{stage}/number", partial(_check_number, disk, stage), partial(_mend_number, disk, stage)
        yield f"{stage}/marker", partial(_read_marker, disk, f"{stage}/marker"), partial(_refuse_to_guess, stage)


def _check_number(disk: Disk, stage: str) -> None:
    number = _open_number(disk, stage, writable=False)
    try:
        number.read(0)
    finally:
        number.close()


def _mend_number(disk: Disk, stage: str) -> None:
    number = _open_number(disk, stage, writable=True)
    try:
        number.write_after_power_loss(0, max((int(found) for (found,) in number.read_all(0)), default=0) + 1)
        number.sync()
    finally:
        number.close()


def _refuse_to_guess(stage: str) -> None:
    raise Damaged(
        f"A marker in {stage}/marker is not whole, so the last batch of the stage is unknown.",
        advice="Find the last batch in the stage's output, remove the stage's folder, and start it with a new checkpoint from there.",
    )


def _create_stage(disk: Disk, folder: str, name: str) -> None:
    """The files of a stage that has written nothing; whoever is first makes them."""
    stage = f"{folder}/{name}"
    if disk.exists(f"{stage}/number"):
        return
    disk.make_folder(stage)
    lock = disk.open(f"{stage}/lock", "create")
    try:
        lock.lock()
        if not disk.exists(f"{stage}/number"):
            _create_marker(disk, f"{stage}/marker", _Stored())
            disk.reach("stage: marker made")
            create_slot_file(disk, f"{stage}/number", magic=_NUMBER_MAGIC, version=FORMAT, facts=((_NUMBER, (0,)),))
            disk.reach("stage: made")
            for made in (stage, folder, folder.rpartition("/")[0]):
                disk.sync_folder(made)
    finally:
        lock.close()


def _open_number(disk: Disk, stage: str, *, writable: bool) -> SlotFile:
    return SlotFile(
        disk, f"{stage}/number", magic=_NUMBER_MAGIC, format_max=FORMAT, shapes=(_NUMBER,), writable=writable
    )


def _create_marker(disk: Disk, path: str, stored: _Stored, *, slot_bytes: int = SLOT_BYTES) -> None:
    body = _encoded(stored)
    slot_bytes = max(slot_bytes, 2 * len(body))
    start = _MARKER.pack(_MARKER_MAGIC, FORMAT, slot_bytes)
    pieces = [start, body.ljust(slot_bytes, b"\0"), bytes(slot_bytes)]
    replace_file(disk, path, pieces, point="stage: marker", sync_folder=False)


def _write_marker(disk: Disk, path: str, stored: _Stored) -> None:
    """Into the slot that does not count, unless the marker (or a later one) is there already."""
    file = disk.open(path, "write")
    try:
        slot_bytes = _slot_bytes(file)
        slots = [_slot(file, _MARKER.size + number * slot_bytes, slot_bytes) for number in range(2)]
        ages = [-1 if slot is None else slot.transaction for slot in slots]
        if max(ages) < stored.transaction:
            body = _encoded(stored)
            if len(body) > slot_bytes:
                raise AssertionError(f"{len(body)} bytes do not fit into a slot of {path}")  # under `python -O`, too
            file.write_at(_MARKER.size + ages.index(min(ages)) * slot_bytes, [body])
    finally:
        file.close()


def _read_marker(disk: Disk, path: str, *, settled: bool = True) -> tuple[_Stored, int]:
    """The newest marker, and the bytes of a slot.

    With everything settled a slot that is not whole is damaged, else somebody may be writing to it.
    """
    file = disk.open(path)
    try:
        slot_bytes = _slot_bytes(file)
        starts = [_MARKER.size + number * slot_bytes for number in range(2)]
        slots = [_slot(file, start, slot_bytes) for start in starts]
        is_torn = any(
            slot is None and any(file.read_at(start, slot_bytes)) for slot, start in zip(slots, starts, strict=True)
        )
    finally:
        file.close()
    whole = [slot for slot in slots if slot is not None]
    if not whole or (settled and is_torn):
        raise Damaged(f"{path} is damaged: a marker in it is not whole.", advice="Run `headwater doctor`.")
    return max(whole, key=lambda stored: stored.transaction), slot_bytes


def _slot_bytes(file: File) -> int:
    raw = file.read_at(0, _MARKER.size)
    if len(raw) < _MARKER.size or raw[:6] != _MARKER_MAGIC:
        raise Damaged(f"{file.path} is damaged: its first bytes are wrong.", advice="Run `headwater doctor`.")
    _, version, slot_bytes = _MARKER.unpack(raw)
    if version > FORMAT:
        raise FormatTooNew(
            f"{file.path} has format {version}; this Headwater reads up to {FORMAT}.", advice="Upgrade Headwater."
        )
    return int(slot_bytes)


def _slot(file: File, position: int, slot_bytes: int) -> _Stored | None:
    """A slot's body, if it is whole."""
    raw = file.read_at(position, slot_bytes)
    if len(raw) < _SLOT.size:
        return None
    length, crc = _SLOT.unpack_from(raw)
    body = raw[_SLOT.size : _SLOT.size + length]
    if not length or len(body) != length or crc32c(body) != crc:
        return None
    return msgspec.msgpack.decode(body, type=_Stored)


def _encoded(stored: _Stored) -> bytes:
    body = msgspec.msgpack.encode(stored)
    return _SLOT.pack(len(body), crc32c(body)) + body
