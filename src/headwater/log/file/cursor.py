"""A cursor: a place in one local partition from which a reader goes on, through segments of both kinds.

It never looks behind the end it is given, so it needs no lock: everything before a published end is whole and never
changes. A segment may be sealed (replaced by another file with the same events), compacted (by one with fewer) or merged with
its neighbour while it is read; the mapped file stays valid, and a file that vanished before it was opened is looked for again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import pyarrow as pa

from headwater.log.disk.disk import Disk
from headwater.log.file.handles import Handles
from headwater.log.file.partition.partition import Partition
from headwater.log.file.segments.archive import Archive, ArchivedSegment
from headwater.log.file.segments.frame import damaged
from headwater.log.file.segments.sealed_segment import Sealed
from headwater.log.file.segments.segment import Segment
from headwater.log.port.chunk import Chunk
from headwater.log.port.lateness import reached_after
from headwater.log.port.store import TimeKind, check_not_missed
from headwater.log.port.topic import Topic
from headwater.model.clock import NO_TIME
from headwater.model.errors import Damaged, EventsMissed, TopicNotFound

_LOOKS_MAX = 5
_CHUNK_EVENTS = 1 << 16


class Opened(Protocol):
    """What a cursor needs of its store."""

    @property
    def handles(self) -> Handles:
        """The files this process has open."""

    @property
    def gate(self) -> AbstractContextManager[None]:
        """Passed by whoever uses them."""


class LocalCursor:
    """A cursor in a local partition."""

    def __init__(self, store: Opened, name: str, number: int, *, offset: int) -> None:
        self.offset = offset
        self._store = store
        self._name = name
        self._number = number
        with store.gate:
            self._topic_id = store.handles.topic(name).id
        self._segment: Segment | Sealed | ArchivedSegment | None = None
        self._place = self._after = 0
        self._rest: Chunk | None = None

    def read(self, end: int, *, events_max: int) -> list[Chunk]:
        """The next events below the offset `end`, at most `events_max`."""
        with self._store.gate:
            return self._read_on(end, events_max)

    def _read_on(self, end: int, events_max: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        began = self.offset
        topic = self._store.handles.topic(self._name)
        if topic.id != self._topic_id:
            raise TopicNotFound(
                f"Topic {self._name!r} was deleted and created again while it was read.", advice="Open another reader."
            )
        partition = self._store.handles.partition(self._name, self._number)
        if self.offset < end:
            check_not_missed(self._name, self._number, self.offset, first=partition.oldest())
        if self._rest is not None and self._rest.topic is not topic:
            self._rest = None
        while self.offset < end and events_max > 0:
            try:
                chunk = self._rest or self._next(partition, topic)
            except EventsMissed:
                if self.offset > began:
                    break  # what was read is whole; the next read begins where they are missed, and says so
                raise
            stop = min(chunk.end_offset, end)
            part = chunk
            if self.offset != chunk.base_offset or stop != chunk.end_offset:
                part = chunk.slice(self.offset, stop)
            part = part.slice_events(events_max)
            self._rest = chunk if part.end_offset < chunk.end_offset else None
            if self._rest is None:
                self._place = self._after
            if part.batch.num_rows:
                chunks.append(part)
            events_max -= part.batch.num_rows
            self.offset = part.end_offset
        return chunks

    def _next(self, partition: Partition, topic: Topic) -> Chunk:
        """The whole chunk that holds the offset."""
        where = partition.folder
        for _ in range(_LOOKS_MAX):
            if self._segment is None:
                self._segment = open_segment(self._store.handles, self._name, self._number, self.offset)
                self._place = _find(self._segment, self.offset, partition)
            where = self._segment.path
            found = self._read_place(self._segment, topic)
            if found is not None:
                chunk, self._after = found
                if chunk.base_offset <= self.offset < chunk.end_offset:
                    return chunk
                break
            self._segment.close()
            self._segment = None
        raise damaged(where, self._place, f"event {self.offset} is not where it should be")

    def _read_place(self, segment: Segment | Sealed | ArchivedSegment, topic: Topic) -> tuple[Chunk, int] | None:
        try:
            return segment.read(self._place, topic=topic, partition=self._number)
        except Damaged:
            fresh = self._store.handles.refresh(self._name)
            if fresh.schema_id == topic.schema_id:
                raise
            return segment.read(self._place, topic=fresh, partition=self._number)


def ancestors_chunks(handles: Handles, partition: Partition) -> Iterator[Chunk]:
    """What the ancestors of a partition hold below their fences; for those who use the files already."""
    for number, fence in partition.topic.ancestors(partition.number):
        ancestor = handles.partition(partition.topic.name, number)
        cursor = LocalCursor(_Inside(handles), partition.topic.name, number, offset=min(ancestor.oldest(), fence))
        while cursor.offset < fence:
            yield from cursor.read(fence, events_max=_CHUNK_EVENTS)


def partition_chunks(handles: Handles, partition: Partition) -> Iterator[Chunk]:
    """What a partition holds, from its first event on; for those who use the files already."""
    end = partition.bounds().end
    cursor = LocalCursor(_Inside(handles), partition.topic.name, partition.number, offset=partition.first())
    while cursor.offset < end:
        yield from cursor.read(end, events_max=_CHUNK_EVENTS)


class _Inside:
    """What has passed the gate already."""

    def __init__(self, handles: Handles) -> None:
        self.handles = handles
        self.gate = nullcontext()


def open_segment(handles: Handles, name: str, number: int, offset: int) -> Segment | Sealed | ArchivedSegment:
    """The segment that holds an offset, in the partition or in its archive."""
    partition = handles.partition(name, number)
    for _ in range(_LOOKS_MAX):
        active = partition.visible().base
        if offset < partition.first():  # asked first: where retention removes it only now, the next look says so
            check_not_missed(name, number, offset, first=partition.oldest())
            return Archive(partition.topic).open(number, offset)
        try:
            if offset >= active:
                segment: Segment | Sealed = Segment(handles.disk, partition.folder, active)
            else:
                bases = segments(handles.disk, partition.folder)
                base = max((base for base in bases if base <= offset), default=None)
                if base is None:
                    break
                segment = bases[base](handles.disk, partition.folder, base)
        except FileNotFoundError:
            continue
        if partition.is_deleted():
            break
        return segment
    check_not_missed(name, number, offset, first=partition.oldest())
    if partition.is_deleted():
        raise TopicNotFound(f"Topic {name!r} was deleted while it was read.", advice="Create it again.")
    raise damaged(partition.folder, 0, f"no segment holds event {offset}")


def reached(handles: Handles, partition: Partition, offset: int) -> int:
    """The greatest event time before an offset (see `lateness`); `NO_TIME` where there is none."""
    mark = partition.visible()
    if offset >= mark.end:
        return mark.running
    name, number = partition.topic.name, partition.number
    segment = open_segment(handles, name, number, offset)
    if isinstance(segment, ArchivedSegment):
        running, place = segment.running, 0  # which knows it for the first of its events only
    else:
        running, place = NO_TIME, _find(segment, offset, partition)
    while (found := segment.read(place, topic=handles.topic(name), partition=number)) is not None:
        chunk, place = found
        running = running if chunk.running is None else chunk.running
        running = reached_after(chunk.slice(chunk.base_offset, min(offset, chunk.end_offset)), running)
        if offset < chunk.end_offset:
            return running
    raise damaged(segment.path, place, f"event {offset} is not where it should be")


def segments(disk: Disk, folder: str) -> dict[int, type[Segment] | type[Sealed]]:
    """The base offsets of all segments and what kind each is; a sealed one stands for its frames."""
    found: dict[int, type[Segment] | type[Sealed]] = {}
    for name in disk.names(folder):
        base, _, kind = name.partition(".")
        if not base.isdigit():  # a stranger's
            continue
        if kind == "arrow":
            found[int(base)] = Sealed
        elif kind == "frames":
            found.setdefault(int(base), Segment)
    return found


def offset_at(handles: Handles, name: str, number: int, *, time: int, by: TimeKind) -> int:
    """The first offset whose event (or append) time is at or after `time`, among visible events; the end if none is."""
    for _ in range(_LOOKS_MAX):
        try:
            return _offset_at(handles, handles.partition(name, number), time, by)
        except FileNotFoundError:
            continue
    raise damaged(handles.partition(name, number).folder, 0, "its segments vanish while they are looked at")


def _offset_at(handles: Handles, partition: Partition, time: int, by: TimeKind) -> int:
    topic = handles.topic(partition.topic.name)
    by = by if topic.time is not None else "appended"
    first = partition.first()
    end = partition.visible().end
    if first > partition.oldest() and (found := _archived_at(partition, topic, time, by)) is not None:
        return found
    kinds = segments(handles.disk, partition.folder)
    bases = sorted(base for base in kinds if first <= base < end)
    active = partition.visible().base
    if active < end and active not in kinds:
        raise damaged(partition.folder, 0, f"no segment holds event {active}")
    low, high = 0, len(bases)
    while high - low > 1:
        middle = (low + high) // 2
        if _reached_before(kinds[bases[middle]](handles.disk, partition.folder, bases[middle]), by) >= time:
            high = middle
        else:
            low = middle
    if not bases:
        return end
    if not low and bases[0] != first:
        if partition.first() != first:
            raise FileNotFoundError(f"{partition.folder} lost its first segments a moment ago")
        raise damaged(partition.folder, 0, f"event {first} is not where it should be")
    for number, base in enumerate(bases[low:], low):
        segment = kinds[base](handles.disk, partition.folder, base)
        goes_to = bases[number + 1] if number + 1 < len(bases) else end
        if _end_offset(segment, partition) < goes_to:
            raise damaged(segment.path, 0, f"event {goes_to - 1} is not where it should be")
        found = _offset_in(segment, partition, topic, time, by)
        if found is not None:
            return min(end, found)
    return end


def _archived_at(partition: Partition, topic: Topic, time: int, by: TimeKind) -> int | None:
    """The first offset in the archive that reaches a time."""
    archive = Archive(topic)
    for entry in archive.entries(partition.number):
        reached = entry.running_after if by == "time" else entry.appended_after
        if entry.end <= partition.oldest() or reached < time:
            continue
        segment = archive.open_entry(partition.number, entry)
        place: int | None = 0
        while place is not None and (found := segment.read(place, topic=topic, partition=partition.number)):
            chunk, place = found
            row = _first_row(chunk, topic, time, by)
            if row is not None:
                return max(partition.oldest(), chunk.offset_of(row))
    return None


def _offset_in(segment: Segment | Sealed, partition: Partition, topic: Topic, time: int, by: TimeKind) -> int | None:
    """The first offset of a segment that reaches a time. The event that reached it first may have been compacted away."""
    place = _place_at(segment, partition, time, by)
    while place is not None and (found := segment.read(place, topic=topic, partition=partition.number)) is not None:
        chunk, place = found
        row = _first_row(chunk, topic, time, by)
        if row is not None:
            return chunk.offset_of(row)
        if not isinstance(segment, Sealed) and place >= _end_position(segment, partition):
            break
    return None


def _find(segment: Segment | Sealed | ArchivedSegment, offset: int, partition: Partition) -> int:
    if not isinstance(segment, Segment):
        return segment.find(offset)
    if offset == segment.base:
        return segment.start
    # A segment that grows is looked at again and again, by cursors that live for a moment: each begins where the last one ended.
    base, known = partition.index
    known = known if base == segment.base else None
    place = segment.find(offset, end=_end_position(segment, partition), known=known)
    partition.index = (segment.base, segment.seen)
    return place


def _end_position(segment: Segment, partition: Partition) -> int:
    mark = partition.visible()
    return mark.position if mark.base == segment.base else segment.size()


def _end_offset(segment: Segment | Sealed, partition: Partition) -> int:
    if isinstance(segment, Sealed):
        return segment.end_offset
    return max(segment.base, segment.index(end=_end_position(segment, partition)).end_offset)


def _reached_before(segment: Segment | Sealed, by: TimeKind) -> int:
    """The greatest time the partition had reached when the segment began."""
    if isinstance(segment, Segment):
        return segment.header.running if by == "time" else segment.header.appended
    return segment.running_before if by == "time" else segment.appended_before


def _place_at(segment: Segment | Sealed, partition: Partition, time: int, by: TimeKind) -> int | None:
    column = "running" if by == "time" else "appended"
    if isinstance(segment, Sealed):
        return segment.batch_at(time, by=column)
    return segment.index(end=_end_position(segment, partition)).position_at(time, by=column)


def _first_row(chunk: Chunk, topic: Topic, time: int, by: TimeKind) -> int | None:
    if by == "appended" and chunk.appended is not None:
        return 0 if chunk.appended >= time else None
    column = chunk.batch.column(topic.time if by == "time" and topic.time else "_appended")
    times = np.asarray(column.cast(pa.int64()).fill_null(-(2**63)))
    reached = times >= time
    if by == "time":
        appended = chunk.appended or np.asarray(chunk.batch.column("_appended").cast(pa.int64()))
        reached &= times <= appended + topic.future_us
    return int(np.argmax(reached)) if reached.any() else None
