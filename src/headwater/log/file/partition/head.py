"""A partition's head: how far it is written and how far it is on disk, shared by all processes.

Format: a slot file (see `slots`) with magic "HWHEAD" and the facts `written`, `durable`, `poisoned`, `deleted`,
`first` and `changes`. The first two are marks: a place between two frames, with all that is needed to go on from there. `first` is the
first offset that the partition still holds, and the first that it or its archive does; it came to format 1 before its first
release, and where it was never written both are 0. `changes` counts how often the topic's file was replaced by one with more
partitions, twice each: it is odd while that is being done. Where it was never written it is 0.

Invariants:
- `written`, `deleted` and `changes` change only under the partition's append lock, `durable` and `poisoned` under its sync lock,
  `first` under its `seal` lock;
- `durable.end` never passes what fdatasync has covered. It may therefore be believed even after a power loss, whichever
  version of this page reached the disk; `written` may not;
- `first` only grows (but a power loss may take back what was not synced), and is on disk before anything below it is removed;
  it never passes the base of the newest segment;
- readers see events from `first` on and below `durable.end` (below `written.end` with `durability="os"`), and nothing else.
"""

from __future__ import annotations

import struct
from contextlib import suppress

import msgspec

from headwater.log.disk.disk import Disk
from headwater.log.disk.slots import SlotFile, create_slot_file
from headwater.log.file.segments.frame import Frame
from headwater.model.clock import NO_TIME
from headwater.model.errors import Damaged

FORMAT = 1

_MAGIC = b"HWHEAD"
_MARK = struct.Struct("<qqqqqIIqI")
_FLAG = struct.Struct("<Q")
_FIRSTS = struct.Struct("<qq")
_COUNT = struct.Struct("<Q")
_SHAPES = (_MARK, _MARK, _FLAG, _FLAG, _FIRSTS, _COUNT)
_WRITTEN, _DURABLE, _POISONED, _DELETED, _FIRST, _CHANGES = range(6)


class Appended(msgspec.Struct, frozen=True, gc=False):
    """Events that are written but perhaps not on disk: their offsets, and how often the partition had been healed."""

    offsets: range
    heals: int


class Mark(msgspec.Struct, frozen=True, gc=False):
    """A place between two frames: offsets below `end` lie before it, the next frame goes to `position` of segment `base`.

    `running` is the greatest event time so far, `appended` the last append time, `chain` the last header's checksum.
    `heals` counts how often the partition went back to what was on disk, so that nobody trusts what it remembers from
    before. While a writer begins another segment, `rolling` is that segment's base; a writer that finds it set removes what
    the one before it, which died, has begun. `writing` is set while frames are written to a topic with
    `durability="os"`: a dead writer's frames are cut there before others take their place, or a power loss could bring
    them back in place of events that were seen.
    """

    end: int = 0
    base: int = 0
    position: int = 0
    running: int = NO_TIME
    appended: int = 0
    chain: int = 0
    heals: int = 0
    rolling: int = -1
    writing: int = 0

    def behind(self, frame: Frame) -> Mark:
        """The place behind the frame that stands at this one, in the same segment."""
        return Mark(
            end=frame.end_offset,
            base=self.base,
            position=self.position + frame.stride,
            running=frame.running_after,
            appended=frame.appended,
            chain=frame.header_crc,
        )


class Head:
    """The mapped head of one partition."""

    def __init__(self, disk: Disk, path: str, *, writable: bool = True) -> None:
        self._facts = SlotFile(disk, path, magic=_MAGIC, format_max=FORMAT, shapes=_SHAPES, writable=writable)
        self._facts.take_unwritten_for(_FIRST, 0, 0)
        self._facts.take_unwritten_for(_CHANGES, 0)
        self._marks: dict[int, tuple[tuple[int, ...], Mark]] = {}

    def written(self) -> Mark:
        """How far the partition is written."""
        return self._mark(_WRITTEN)

    def durable(self) -> Mark:
        """How far the partition is on disk."""
        return self._mark(_DURABLE)

    def durable_after_power_loss(self) -> Mark | None:
        """The furthest durable mark that is whole: each one was true when it was written, and stays true."""
        return max(
            (Mark(*values) for values in self._facts.read_all(_DURABLE)), key=lambda mark: mark.end, default=None
        )

    def firsts(self) -> tuple[int, int]:
        """The first offset that the partition holds, and the first that it or the archive holds."""
        return self._facts.read(_FIRST)

    def bounds(self, *, archived: bool, durable: bool) -> tuple[int, int]:
        """The first offset, of the archive too if that is asked for, and the end of what is durable, or written."""
        read = self._facts.read
        return read(_FIRST)[archived], read(_DURABLE if durable else _WRITTEN)[0]

    def firsts_after_power_loss(self) -> tuple[int, int] | None:
        """The greatest first offset that is whole, since what lies below it may be gone; None where none is."""
        unknown = None if self._facts.is_written(_FIRST) else (0, 0)
        return max(((first, archived) for first, archived in self._facts.read_all(_FIRST)), default=unknown)

    def is_poisoned(self) -> bool:
        """Whether an fsync has failed since the partition was last opened and checked."""
        return bool(self._facts.read(_POISONED)[0])

    def is_deleted(self) -> bool:
        """Whether the topic was deleted while this head was open."""
        return bool(self._facts.read(_DELETED)[0])

    def is_as_seen(self, changes: int) -> bool:
        """Whether the topic is there, and its file still the one that was read when `changes` gave this number."""
        read = self._facts.read
        return not read(_DELETED)[0] and bool(read(_CHANGES)[0] == changes)

    def changes(self) -> int:
        """Another number than the last time: the topic's file must be read again. Odd: it is about to be replaced."""
        return int(self._facts.read(_CHANGES)[0])

    def publish_written(self, mark: Mark) -> None:
        """Publishes what was written; the caller holds the append lock."""
        self._facts.write(_WRITTEN, *msgspec.structs.astuple(mark))

    def publish_durable(self, mark: Mark) -> None:
        """Publishes what is on disk; the caller holds the sync lock."""
        self._facts.write(_DURABLE, *msgspec.structs.astuple(mark))

    def publish_past_damage(self, mark: Mark) -> None:
        """Publishes what is written and on disk where older marks may be damaged; the caller settles a transaction that ends there.

        A mark that is damaged must not stay behind one of an older version that is whole: after a power loss that would be believed.
        """
        for fact in (_DURABLE, _WRITTEN):
            if all(Mark(*values).end < mark.end for values in self._facts.read_all(fact)):
                self._facts.write_after_power_loss(fact, *msgspec.structs.astuple(mark))

    def publish_firsts(self, first: int, archived: int) -> None:
        """Gives up what lies below; the caller holds the `seal` lock, and syncs the head before it removes anything."""
        self._facts.write(_FIRST, first, archived)

    def set_after_power_loss(self, mark: Mark, *, firsts: tuple[int, int]) -> None:
        """Everything up to the mark is written and durable, and nothing is wrong; the caller holds both locks."""
        values = msgspec.structs.astuple(mark)
        self._facts.write_after_power_loss(_DURABLE, *values)
        self._facts.write_after_power_loss(_WRITTEN, *values)
        self._facts.write_after_power_loss(_POISONED, 0)
        self._facts.write_after_power_loss(_DELETED, 0)
        self._facts.write_after_power_loss(_FIRST, *firsts)
        self._facts.write_after_power_loss(_CHANGES, 0)

    def set_poisoned(self, *, poisoned: bool) -> None:
        """The caller holds the sync lock."""
        self._facts.write(_POISONED, int(poisoned))

    def set_deleted(self) -> None:
        """The caller holds the append lock."""
        self._facts.write(_DELETED, 1)

    def set_changes(self, changes: int) -> None:
        """The caller holds the append lock."""
        self._facts.write(_CHANGES, changes)

    def sync(self) -> None:
        """Returns when the head itself is on disk."""
        self._facts.sync()

    def close(self) -> None:
        """Ends the mapping."""
        self._facts.close()

    def _mark(self, fact: int) -> Mark:
        values = self._facts.read(fact)
        known = self._marks.get(fact)
        if known is not None and known[0] is values:
            return known[1]
        mark = Mark(*values)
        self._marks[fact] = (values, mark)
        return mark


def create_head(disk: Disk, path: str, mark: Mark, *, first: int = 0) -> None:
    """A new head, written and durable up to the mark."""
    values = msgspec.structs.astuple(mark)
    facts = ((_MARK, values), (_MARK, values), (_FLAG, (0,)), (_FLAG, (0,)), (_FIRSTS, (first, first)))
    create_slot_file(disk, path, magic=_MAGIC, version=FORMAT, facts=facts)


def mark_deleted(disk: Disk, folder: str) -> None:
    """Tells every process that has the partition open that its topic is gone."""
    lock = disk.open(f"{folder}/lock", "write")
    try:
        lock.lock()
        head = Head(disk, f"{folder}/head")
        head.set_deleted()
        head.close()
    finally:
        lock.close()


def sync_head(disk: Disk, folder: str) -> None:
    """Returns when a partition's head is on disk, without opening the partition.

    One that is gone or damaged says nothing after a power loss either: what was decided is then told by the frames.
    """
    with suppress(Damaged, FileNotFoundError):
        head = Head(disk, f"{folder}/head")
        try:
            head.sync()
        finally:
            head.close()


def is_marked_deleted(disk: Disk, folder: str) -> bool:
    """Whether a deletion of its topic was begun."""
    try:
        head = Head(disk, f"{folder}/head", writable=False)
    except (Damaged, FileNotFoundError):
        return False
    try:
        return head.is_deleted()
    except Damaged:
        return False
    finally:
        head.close()
