"""A copied topic: one topic on both sides of a mirror, where the copy ends, and the next piece of it.

Invariants:
- before the first event is copied, the last events of both sides are compared (`CHECKED_OFFSETS`): at the offsets that both hold they
  must be the same. Either side may have compacted more than the other;
- a partition of the copy that holds no events begins where its log does; one that holds some and lacks others that the log no
  longer has is refused, since nobody could say what is missing. What compaction removed is no such loss: a later event of its
  key follows;
- a piece stands for everything from the copy's end to its own, gaps included.

Thread-safety: none; it belongs to the thread of its mirror.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from headwater.log.arrow.columns import values_of
from headwater.log.arrow.events import output_schema, to_batch_of
from headwater.log.port.chunk import Chunk
from headwater.log.port.store import Bounds, Cursor, Store
from headwater.log.port.topic import Split, Topic
from headwater.log.port.write import HAS_DELETED, HAS_HEADERS, Stamp, Write, physical_schema
from headwater.model.errors import Diverged, EventsMissed, TopicExists, TopicNotFound
from headwater.model.schema import project

PIECE_EVENTS_MAX = 65_536
PIECE_BYTES = 8 << 20
CHECKED_OFFSETS = 256

_FIRST_PIECE_EVENTS = 1_024


class CopyPiece(msgspec.Struct, frozen=True):
    """Events on their way to the copy, up to `end`; with their `offsets` where those have gaps."""

    write: Write
    end: int
    offsets: Any = None


class CopiedTopic:
    """One topic on both sides: its settings, where the target ends, and where the source is read."""

    def __init__(self, source: Store, target: Store, topic: Topic) -> None:
        self._source = source
        self._target = target
        self.source_id = topic.id
        self._piece_events = _FIRST_PIECE_EVENTS
        self._cursors: dict[int, Cursor] = {}
        try:
            self._topic = target.refresh(topic.name)
        except TopicNotFound:
            try:
                self._topic = target.create(msgspec.structs.replace(topic, retain="all"))
            except TopicExists:
                self._topic = target.refresh(topic.name)
        self._splits: tuple[Split, ...] = ()
        self._partitions = topic.partitions
        topic = self._alike(topic)
        self._stamp = Stamp()
        if target.capabilities.takes_offsets:
            self._stamp = Stamp(*target.register_producer(f"mirror:{topic.name}"))
            for number in range(self._topic.partitions):  # what a dead mirror wrote is on disk after this
                target.sequence_of(topic.name, number, producer=self._stamp.producer)
        self.follow(topic)
        self.follow_splits(topic)
        held = target.bounds([topic.name])
        self.ends = {number: held[topic.name, number].end for number in range(self._topic.partitions)}
        self._check_equal(topic, {number: held[topic.name, number].first for number in self.ends})

    def follow(self, topic: Topic) -> None:
        """Brings the target's settings and schema versions up to those of the source."""
        topic = self._alike(topic)
        wanted = {
            "schemas": topic.schemas,
            "lateness_us": topic.lateness_us,
            "future_us": topic.future_us,
            "event_bytes_max": topic.event_bytes_max,
        }
        if any(getattr(self._topic, name) != value for name, value in wanted.items()):
            self._topic = self._target.change(
                topic.name,
                lambda held: (
                    held if len(held.schemas) > len(topic.schemas) else msgspec.structs.replace(held, **wanted)
                ),
            )

    def follow_splits(self, topic: Topic) -> None:
        """Knows how the source was split."""
        self._splits, self._partitions = topic.splits, topic.partitions

    def upto(self, number: int, end: int) -> int:
        """How far a partition may be copied: before the target is split, to the fence."""
        due = self._splits[self._topic.generation :]
        return min(end, due[0].fences[number]) if due else end

    def split_if_due(self) -> bool:
        """Splits the target as the source was, once it has all that lies below the fences."""
        due = self._splits[self._topic.generation :]
        if not due or any(self.ends[number] < fence for number, fence in enumerate(due[0].fences)):
            return False
        partitions = due[1].partitions if len(due) > 1 else self._partitions
        self._topic = self._target.split(self._topic.name, partitions, at=due[0].fences)
        self.ends = {number: self.ends.get(number, 0) for number in range(partitions)}
        return True

    def fits(self, number: int, end: int) -> bool:
        """Whether what is left of a partition makes one piece."""
        return end - self.ends[number] <= self._piece_events

    def next_piece(self, number: int, end: int) -> CopyPiece:
        """The next piece of a partition below `end`, ready for the target."""
        start = self.ends[number]
        cursor = self._cursors.get(number)
        if cursor is None or cursor.offset != start:
            cursor = self._cursors[number] = self._source.cursor(self._topic.name, number, offset=start)
        try:
            chunks = cursor.read(end, events_max=self._piece_events)
        except EventsMissed as missed:
            if not self._is_empty(number):
                raise self._missed(number, start, missed.last + 1) from None
            return self._beginning(number, min(missed.last + 1, end))
        if chunks and chunks[-1].topic.schema_id > self._topic.schema_id:
            self.follow(chunks[-1].topic)
        batch, appended = _joined(chunks, self._topic.schema)
        if batch.num_rows:
            self._piece_events = _piece_events(batch)
        offsets = np.concatenate([np.zeros(0, np.int64), *(chunk.all_offsets() for chunk in chunks)])
        return self._piece(number, batch, appended, cursor.offset, offsets)

    def _piece(self, number: int, batch: pa.RecordBatch, appended: Any, end: int, offsets: Any) -> CopyPiece:
        start, stamp = self.ends[number], self._stamp
        if self._target.capabilities.takes_offsets:
            # A partition that was split off has its parent's sequences, and goes on behind them.
            below = sum(fence for _, fence in self._topic.ancestors(number))
            stamp = msgspec.structs.replace(stamp, sequence_first=below + start, sequence_last=below + end - 1)
        write = Write(self._topic, number, batch, stamp=stamp, at=start, appended=appended)
        return CopyPiece(write, end, None if 0 < batch.num_rows == end - start else offsets)

    def _beginning(self, number: int, offset: int) -> CopyPiece:
        """A piece without events, by which a partition that holds none begins at an offset."""
        batch, appended = _joined([], self._topic.schema)
        return self._piece(number, batch, appended, offset, np.zeros(0, np.int64))

    def _is_empty(self, number: int) -> bool:
        """Whether the copy holds no event of a partition."""
        bound = self._target.bounds([self._topic.name])[self._topic.name, number]
        return not self._target.cursor(self._topic.name, number, offset=bound.first).read(bound.end, events_max=1)

    def _alike(self, topic: Topic) -> Topic:
        """The source's topic as it is known, or as it is now where another mirror has brought the target further than that."""
        try:
            self._check_alike(topic)
        except Diverged:
            topic = self._source.refresh(topic.name)
            self._check_alike(topic)
        return topic

    def _check_alike(self, topic: Topic) -> None:
        """Refuses a target whose topic could never hold the same events at the same places."""
        held = self._topic
        partitions = (
            topic.splits[held.generation].partitions if topic.generation > held.generation else topic.partitions
        )
        if held.splits != topic.splits[: held.generation] or held.partitions != partitions:
            raise Diverged(
                f"Topic {topic.name!r} has {topic.partitions} partitions in {self._source.url}, and {held.partitions} in "
                f"{self._target.url}, which was not split at the same offsets.",
                advice=_DIVERGED_ADVICE,
            )
        for what in ("key", "time", "has_schema"):
            if getattr(held, what) != getattr(topic, what):
                raise Diverged(
                    f"Topic {topic.name!r} has {what} {getattr(topic, what)!r} in {self._source.url}, and "
                    f"{getattr(held, what)!r} in {self._target.url}.",
                    advice=_DIVERGED_ADVICE,
                )
        if held.schemas != topic.schemas[: len(held.schemas)]:
            raise Diverged(
                f"Topic {topic.name!r} has different schema versions in {self._target.url}.", advice=_DIVERGED_ADVICE
            )

    def _check_equal(self, topic: Topic, firsts: Mapping[int, int]) -> None:
        """Compares the last events that both sides should have."""
        bounds = self._source.bounds([topic.name])
        for number, end in self.ends.items():
            bound: Bounds = bounds[topic.name, number]
            if end > bound.end:
                raise Diverged(
                    f"Partition {number} of topic {topic.name!r} ends at {bound.end} in {self._source.url}, but the copy in "
                    f"{self._target.url} already ends at {end}.",
                    advice=_DIVERGED_ADVICE,
                )
            if firsts[number] < bound.first and self._is_empty(number):
                begun = self._beginning(number, max(end, self.upto(number, bound.first)))
                self._target.place(begun.write, begun.offsets, end=begun.end)
                self.ends[number] = begun.end
                continue
            if end < bound.first:
                raise self._missed(number, end, bound.first)
            first = max(bound.first, firsts[number], end - CHECKED_OFFSETS)
            columns = self._topic.schema.names  # the log may have got more of them since
            here = checksums(self._source, topic.name, number, first, end, columns=columns)
            there = checksums(self._target, topic.name, number, first, end, columns=columns)
            if any(here[offset] != there[offset] for offset in here.keys() & there.keys()):
                raise Diverged(
                    f"The last events before offset {end} in partition {number} of topic {topic.name!r} differ between "
                    f"{self._source.url} and {self._target.url}.",
                    advice=_DIVERGED_ADVICE,
                )

    def _missed(self, number: int, end: int, first: int) -> Diverged:
        return Diverged(
            f"Partition {number} of topic {self._topic.name!r} no longer holds events {end} to {first - 1}, which the copy "
            "lacks.",
            advice="Restore the target from a backup that has them, then mirror; or delete the topic there and mirror what is left.",
        )


_DIVERGED_ADVICE = (
    "Nothing was copied. Delete the topic in the target and mirror again, or mirror into another log; to see what differs "
    "export both and compare."
)


def checksums(
    store: Store, name: str, partition: int, first: int, end: int, *, columns: Sequence[str]
) -> dict[int, int]:
    """A checksum of each event by its content (not its append time), by offset: the same on any store that holds the same ones."""
    columns = [*columns, "_headers", "_deleted"]
    found: dict[int, int] = {}
    cursor = store.cursor(name, partition, offset=first)
    while chunks := cursor.read(end, events_max=CHECKED_OFFSETS):
        for chunk in chunks:
            batch = to_batch_of(chunk, output_schema(chunk.topic, columns))
            rows = zip(*(values_of(column) for column in batch.columns), strict=True)
            for offset, row in zip(chunk.all_offsets().tolist(), rows, strict=True):
                found[offset] = crc32c(repr(row).encode("utf-8", "surrogatepass"))
    return found


def _joined(chunks: Sequence[Chunk], schema: pa.Schema) -> tuple[pa.RecordBatch, Any]:
    """Chunks as one batch with the columns of a schema, and the append time of each event."""
    if not chunks:
        return pa.RecordBatch.from_pylist([], schema=schema), np.zeros(0, np.int64)
    physical = physical_schema(schema, HAS_HEADERS | HAS_DELETED)
    appended = np.concatenate([_appended(chunk) for chunk in chunks])
    batch = pa.concat_batches([project(chunk.batch, physical) for chunk in chunks])
    kept = list(range(len(schema)))
    if batch.column("_headers").null_count < batch.num_rows:
        kept.append(len(schema))
    if pc.any(batch.column("_deleted")).as_py():
        kept.append(len(schema) + 1)
    return batch.select(kept), appended


def _appended(chunk: Chunk) -> Any:
    if chunk.appended is not None:
        return np.full(chunk.batch.num_rows, chunk.appended, dtype=np.int64)
    return np.asarray(chunk.batch.column("_appended").cast(pa.int64()))


def _piece_events(batch: pa.RecordBatch) -> int:
    """How many such events make a piece that is good to write."""
    size = pa.ipc.get_record_batch_size(batch) // batch.num_rows + 1
    return min(PIECE_EVENTS_MAX, max(1, PIECE_BYTES // size))
