"""The memory log (`memory://`): the reference model, in one process and without a disk.

It keeps each partition as a list of chunks and says in the plainest way what a log does; the local log is tested against
it. Nothing outlives the handle.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headwater.log.arrow.placement import comparable_keys, key_bytes
from headwater.log.memory.group import MemoryGroup
from headwater.log.port.capabilities import Capabilities
from headwater.log.port.chunk import Chunk
from headwater.log.port.group import Committed, OffsetPart, Owner, commit_offsets, not_owner
from headwater.log.port.lateness import Heartbeat, add_heartbeat, reached_after, reached_by
from headwater.log.port.lease_engine import QueueOpening
from headwater.log.port.split import after_split, check_fences, check_split
from headwater.log.port.stage import Positions, StageCommit, StageState, already_there
from headwater.log.port.store import Bounds, Cursor, TimeKind, Waiter, check_not_missed
from headwater.log.port.topic import Topic, made_anew, no_foreign_topics
from headwater.log.port.write import NO_PRODUCER, Write, check_place, flags_of, physical_schema, repartitioned
from headwater.log.queue.floor import acked_in_memory
from headwater.log.queue.window_engine import WindowEngine
from headwater.log.queue.window_store import MemoryWindowStore, no_queue
from headwater.model.clock import NO_TIME, Clock
from headwater.model.errors import (
    Closed,
    Fenced,
    GroupNotFound,
    HeadwaterError,
    Overloaded,
    SequenceGap,
    TopicExists,
    TopicFull,
    TopicNotFound,
    Unsupported,
)
from headwater.model.marker import Marker
from headwater.model.schema import project

CAPABILITIES = Capabilities(is_placed_by_key=True, tells_lateness=True, takes_offsets=True)


class MemoryStore:
    """One log in memory."""

    capabilities = CAPABILITIES

    def __init__(self, *, clock: Clock) -> None:
        self.url = "memory://"
        self._clock = clock
        self._changed = threading.Condition(threading.RLock())
        self._topics: dict[str, Topic] = {}
        self._partitions: dict[tuple[str, int], MemoryPartition] = {}
        self._epochs: dict[bytes, int] = {}
        self._queues: dict[tuple[str, str], MemoryWindowStore] = {}
        self._groups: dict[str, MemoryGroup] = {}
        self._states: dict[str, StageState] = {}
        self._counters: Counter[str] = Counter()
        self._closed = False

    # Topics

    def topics(self) -> list[str]:
        self._check_open()
        return sorted(self._topics)

    def topic(self, name: str) -> Topic:
        self._check_open()
        if name not in self._topics:
            known = ", ".join(self.topics()[:10]) or "none yet"
            raise TopicNotFound(f"Topic {name!r} does not exist in {self.url}.", advice=f"Topics here: {known}.")
        return self._topics[name]

    def refresh(self, name: str) -> Topic:
        return self.topic(name)

    def create(self, topic: Topic) -> Topic:
        _check_no_archive(topic)
        with self._changed:
            self._check_open()
            if topic.name in self._topics:
                raise TopicExists(
                    f"Topic {topic.name!r} exists already.",
                    advice="Open it, or pass exist_ok=True to keep it as it is.",
                )
            self._topics[topic.name] = topic
            self._partitions.update({(topic.name, number): MemoryPartition() for number in range(topic.partitions)})
        return topic

    def adopt(self, topic: Topic) -> Topic:
        raise no_foreign_topics(self.url)

    def change(self, name: str, change: Callable[[Topic], Topic]) -> Topic:
        with self._changed:
            changed = change(self.topic(name))
            _check_no_archive(changed)
            self._topics[name] = changed
            return changed

    def split(self, name: str, partitions: int, *, at: Sequence[int] | None = None) -> Topic:
        with self._changed:
            topic = self.topic(name)
            check_split(topic, partitions)
            if partitions > topic.partitions:
                parents = [self._partition(name, number) for number in range(topic.partitions)]
                fences = [parent.end for parent in parents]
                check_fences(topic, at, fences)
                self._topics[name] = after_split(topic, partitions, fences)
                for number in range(topic.partitions, partitions):
                    self._partitions[name, number] = parents[number % topic.partitions].split_off()
                self._changed.notify_all()
            return self._topics[name]

    def delete(self, name: str) -> None:
        with self._changed:
            topic = self.topic(name)
            del self._topics[name]
            for number in range(topic.partitions):
                del self._partitions[name, number]

    # Writing

    def write(self, writes: Sequence[Write]) -> list[range | Exception]:
        outcomes: list[range | Exception] = []
        with self._changed:
            for write in writes:
                try:
                    outcomes.append(self._append(write))
                except HeadwaterError as error:
                    outcomes.append(error)
            self._changed.notify_all()
        return outcomes

    def write_atomically(self, writes: Sequence[Write], offsets: Sequence[OffsetPart] = ()) -> list[range]:
        with self._changed:
            for write in writes:
                self._partition(write.topic.name, write.partition)
                if self.topic(write.topic.name).id != write.topic.id:
                    raise made_anew(write.topic.name)
                self._check_placed(write)
                self._check_not_fenced(write)
                self._check_place(write)
            self._check_owners(offsets)
            sizes: Counter[tuple[str, int]] = Counter()
            for write in writes:
                sizes[write.topic.name, write.partition] += write.rows().nbytes
            for (name, number), size in sizes.items():
                self._free_acked(self.topic(name), number)
                events = sum(w.count for w in writes if (w.topic.name, w.partition) == (name, number))
                self._admit(self.topic(name), self._partition(name, number), size=size, events=events)
            ranges = [self._append(write, is_admitted=True) for write in writes]
            for part in offsets:
                place, owner = (part.topic, part.partition), Owner(part.member, part.generation)
                committed = Committed(part.offset, part.incarnation, at_us=self._clock(), topic_id=part.topic_id)
                commit_offsets(self._groups[part.group], {place: committed}, {place: owner})
            self._changed.notify_all()
        return ranges

    def place(self, write: Write, offsets: Any, *, end: int) -> None:
        with self._changed:
            partition = self._partition(write.topic.name, write.partition)
            if self.topic(write.topic.name).id != write.topic.id:
                raise made_anew(write.topic.name)
            self._check_not_fenced(write)
            self._check_placed(write)
            self._check_place(write)
            chunks, base, appended = [], partition.end, partition.appended
            for first, last in write.runs():
                stop = int(offsets[last]) if last < write.count else end
                appended = max(int(write.appended[first]) if write.count else 0, appended)
                rows, at = write.rows(first, last - first), offsets[first:last]
                chunks.append(Chunk(write.topic, write.partition, base, rows, appended, at, stop))
                base = stop
            stamp = write.stamp
            partition.add(chunks, end=base, producer=stamp.producer, last=stamp.sequence_last)
            while partition.chunks and not any(chunk.batch.num_rows for chunk in partition.chunks):
                self._give_up_oldest(partition)
            self._changed.notify_all()

    # Reading

    def bounds(self, names: Sequence[str]) -> Mapping[tuple[str, int], Bounds]:
        with self._changed:
            return {
                (name, number): Bounds(self._partition(name, number).first, self._partition(name, number).end)
                for name in names
                for number in range(self.topic(name).partitions)
            }

    def cursor(self, name: str, partition: int, *, offset: int) -> Cursor:
        return MemoryCursor(self, name, partition, offset)

    def first(self, name: str, partition: int) -> int:
        """The first offset a partition holds."""
        return self._partition(name, partition).first

    def chunk_at(self, name: str, partition: int, offset: int) -> Chunk:
        """The whole chunk that holds an offset, with the topic's present columns."""
        with self._changed:
            check_not_missed(name, partition, offset, first=self.first(name, partition))
            chunk = next(chunk for chunk in self._partition(name, partition).chunks if offset < chunk.end_offset)
            schema = physical_schema(self.topic(name).schema, flags_of(chunk.batch))
            return msgspec.structs.replace(chunk, topic=self.topic(name), batch=project(chunk.batch, schema))

    def offset_at(self, name: str, partition: int, *, time: int, by: TimeKind) -> int:
        with self._changed:
            topic = self.topic(name)
            for chunk in self._partition(name, partition).chunks:
                times = np.full(chunk.batch.num_rows, chunk.appended)
                limit = (chunk.appended or 0) + topic.future_us
                if by == "time" and topic.time is not None:
                    times = np.asarray(chunk.batch.column(topic.time).cast(pa.int64()).fill_null(-(2**63)))
                reached = (times >= time) & ((times <= limit) | (topic.time is None))
                if reached.any():
                    return chunk.offset_of(int(np.argmax(reached)))
            return self._partition(name, partition).end

    def reached(self, name: str, partition: int, *, offset: int) -> int:
        with self._changed:
            held = self._partition(name, partition)
            told = reached_by(held.heartbeats, offset)
            if offset >= held.end:
                return max(held.running, told)
            chunk = self.chunk_at(name, partition, offset)
            assert chunk.running is not None
            return max(told, reached_after(chunk.slice(chunk.base_offset, offset), chunk.running))

    def heartbeat(self, name: str, partition: int, *, time: int, appended_before: int) -> bool:
        with self._changed:
            held = self._partition(name, partition)
            if (held.end and held.appended >= appended_before) or self.reached(
                name, partition, offset=held.end
            ) >= time:
                return False
            add_heartbeat(held.heartbeats, Heartbeat(held.end, time))
            return True

    def heartbeats(self, name: str, partition: int) -> Sequence[Heartbeat]:
        with self._changed:
            return list(self._partition(name, partition).heartbeats)

    def waiter(self, names: Sequence[str]) -> Waiter:
        return MemoryWaiter(self._changed)

    # Stages

    def stages(self) -> list[str]:
        return sorted(self._states)

    def take_stage(self, name: str) -> int:
        with self._changed:
            before = self._states.get(name, StageState())
            self._states[name] = StageState(before.number + 1, before.last, before.positions)
            return before.number + 1

    def held_stage(self, name: str) -> int | None:
        """None: opening a stage costs little."""
        return None

    def stage_state(self, name: str) -> StageState:
        return self._states.get(name, StageState())

    def commit_stage(
        self, name: str, number: int, marker: Marker | None, writes: Sequence[Write], *, gaps: bool = False
    ) -> StageCommit:
        with self._changed:
            if known := already_there(name, number, self.stage_state(name), marker, gaps=gaps):
                return known
            positions: Positions = {}
            for write, span in zip(writes, self.write_atomically(writes), strict=True):
                spans = positions.setdefault(write.topic.name, {})
                spans[write.partition] = range(spans.get(write.partition, span).start, span.stop)
            self._states[name] = StageState(number, marker, positions)
            return StageCommit(marker, written=True, positions=positions)

    # Upkeep

    def seal(self, name: str) -> int:
        self.topic(name)
        return 0

    def tidy(self, name: str) -> int:
        with self._changed:
            topic = self.topic(name)
            partitions = [self._partition(name, number) for number in range(topic.partitions)]
            removed = sum(self._free_acked(topic, number) for number in range(topic.partitions))
            removed += sum(self._expire(topic, partition) for partition in partitions)
            if topic.compact:
                for number, partition in enumerate(partitions):
                    older = [partitions[ancestor] for ancestor, _ in topic.ancestors(number)]
                    removed += self._compact(topic, partition, older)
            return removed

    def is_overtaken(self, name: str, partition: int, *, end: int, since_us: int) -> bool:
        """Nobody knows when compaction came by: it may have."""
        return self.topic(name).compact

    # Producers, and unclean stops, which it does not survive

    def register_producer(self, name: str) -> tuple[bytes, int]:
        self._check_open()
        producer = hashlib.blake2b(name.encode("utf-8"), digest_size=16).digest()
        with self._changed:
            self._epochs[producer] = self._epochs.get(producer, 0) + 1
            return producer, self._epochs[producer]

    def sequence_of(self, name: str, partition: int, *, producer: bytes) -> int | None:
        with self._changed:
            found = self._partition(name, partition).sequences.get(producer)
            return None if found is None else found[0]

    def incarnation(self) -> int:
        return 0

    def lost_after(self, name: str, partition: int, *, incarnation: int) -> int | None:
        return None

    # Queues

    def lease_engine(self, opening: QueueOpening) -> WindowEngine:
        with self._changed:
            self._check_open()
            place, topic = (opening.group, opening.topic.name), opening.topic
            found = self._queues.get(place)
            if found is None or found.topic.id != topic.id:
                found = self._queues[place] = MemoryWindowStore(topic=topic, has_keys=opening.settings.has_keys)
        return WindowEngine(self, found, opening)

    def queues(self) -> list[dict[str, Any]]:
        with self._changed:
            found = [self._queues[place].made for place in sorted(self._queues)]
            return [made for made in found if made is not None]

    def delete_queue(self, group: str, topic: str) -> None:
        with self._changed:
            found = self._queues.get((group, topic))
            if found is None or found.made is None:
                raise no_queue(group, topic)
            found.delete()
            del self._queues[group, topic]

    # Groups

    def groups(self) -> list[str]:
        self._check_open()
        return sorted(name for name, group in self._groups.items() if not group.is_deleted)

    def group(self, name: str, *, create: bool) -> MemoryGroup:
        with self._changed:
            self._check_open()
            if not create and name not in self.groups():
                known = ", ".join(self.groups()[:10]) or "none yet"
                raise GroupNotFound(f"Group {name!r} does not exist in {self.url}.", advice=f"Groups here: {known}.")
            if name not in self._groups:
                self._groups[name] = MemoryGroup(name, self._changed)
            return self._groups[name]

    # The handle

    def counters(self) -> Mapping[str, int]:
        return dict(self._counters)

    def close(self) -> None:
        self._closed = True

    # Helpers of the above

    def _check_owners(self, offsets: Sequence[OffsetPart]) -> None:
        for part in offsets:
            place = (part.topic, part.partition)
            if self._groups[part.group].owner(place) != Owner(part.member, part.generation):
                raise not_owner(part.group, place)

    def _append(self, write: Write, *, is_admitted: bool = False) -> range:
        partition = self._partition(write.topic.name, write.partition)
        if self.topic(write.topic.name).id != write.topic.id:
            raise made_anew(write.topic.name)
        stamp, count = write.stamp, write.count
        if stamp.producer != NO_PRODUCER:
            self._check_not_fenced(write)
            last, end = partition.sequences.get(stamp.producer, (-1, 0))
            if stamp.sequence_first <= last:
                if stamp.sequence_last != last:
                    raise SequenceGap(
                        f"A batch came after sequence {last} was stored.", advice="Use a separate id for each producer."
                    )
                self._counters["duplicates"] += 1
                return range(end - count, end)
        self._check_placed(write)
        self._check_place(write)
        if not is_admitted:
            size = write.rows().nbytes
            self._free_acked(self.topic(write.topic.name), write.partition)
            self._admit(self.topic(write.topic.name), partition, size=size, events=count)
        start, now, appended = partition.end, self._clock(), partition.appended
        chunks = []
        for first, end in write.runs():
            appended = max(now if write.appended is None else int(write.appended[first]), appended)
            rows = write.rows(first, end - first)
            chunks.append(Chunk(write.topic, write.partition, start + first, rows, appended))
        partition.add(chunks, end=start + count, producer=stamp.producer, last=stamp.sequence_last)
        self._expire(self.topic(write.topic.name), partition)
        return range(start, partition.end)

    def _expire(self, topic: Topic, partition: MemoryPartition) -> int:
        """Retention: a chunk here is what a segment is elsewhere."""
        before, keep_us, keep_bytes = partition.first, topic.retention_us, topic.retention_bytes
        while partition.chunks:
            oldest = partition.chunks[0]
            old = keep_us is not None and (oldest.appended or 0) < self._clock() - keep_us
            if not old and (keep_bytes is None or partition.bytes - oldest.batch.nbytes < keep_bytes):
                break
            self._give_up_oldest(partition)
        self._counters["expired"] += partition.first - before
        return partition.first - before

    def _check_placed(self, write: Write) -> None:
        topic = self.topic(write.topic.name)
        if write.topic.generation != topic.generation:
            raise repartitioned(topic)

    def _free_acked(self, topic: Topic, number: int) -> int:
        """With retain="until_acked": what no queue group needs any more goes."""
        partition = self._partition(topic.name, number)
        before = partition.first
        if topic.retain == "until_acked":
            acked = acked_in_memory(list(self._queues.values()), topic, number, end=partition.end)
            while acked is not None and partition.chunks and partition.chunks[0].end_offset <= acked.end:
                if acked.ids_us and (partition.chunks[0].appended or 0) >= self._clock() - acked.ids_us:
                    break
                self._give_up_oldest(partition)
        self._counters["expired"] += partition.first - before
        return partition.first - before

    def _give_up_oldest(self, partition: MemoryPartition) -> Chunk:
        oldest = partition.chunks.pop(0)
        partition.bytes -= oldest.batch.nbytes
        partition.first = oldest.end_offset
        return oldest

    def _check_place(self, write: Write) -> None:
        if write.at is not None:
            where = f"partition {write.partition} of topic {write.topic.name!r}"
            check_place(write.at, self._partition(write.topic.name, write.partition).end, where)

    def _check_not_fenced(self, write: Write) -> None:
        stamp = write.stamp
        if stamp.producer != NO_PRODUCER and stamp.epoch != self._epochs.get(stamp.producer, stamp.epoch):
            raise Fenced("Another producer with the same id took over.", advice="Close this one.")

    def _admit(self, topic: Topic, partition: MemoryPartition, *, size: int, events: int) -> None:
        """What the topic's overload policy says where there is no room."""
        if topic.bytes_max is None:
            return
        limit = topic.bytes_max + (topic.buffer_bytes if topic.overload == "buffer" else 0)
        if size <= limit:
            self._expire(topic, partition)
            while topic.overload == "drop_oldest" and partition.bytes + size > topic.bytes_max:
                self._counters["dropped"] += self._give_up_oldest(partition).batch.num_rows
            if partition.bytes + size <= limit:
                self._counters["buffered"] += events if partition.bytes + size > topic.bytes_max else 0
                return
            if topic.overload == "block":
                self._counters["blocked"] += 1
                raise TopicFull(
                    f"No room is left in topic {topic.name!r}.", advice="The append is retried for a while."
                )
        self._counters["rejected"] += events
        raise Overloaded(
            f"No room is left in topic {topic.name!r}.",
            advice="Nothing was stored. Append less, or give the topic more room.",
        )

    def _compact(self, topic: Topic, partition: MemoryPartition, ancestors: Sequence[MemoryPartition]) -> int:
        """Compaction, event by event: it is what the other logs are tested against.

        A tombstone stays as long as an ancestor holds its key: without it the key would come back.
        """
        older = {key for ancestor in ancestors for chunk in ancestor.chunks for key in _keys_of(chunk, topic)[0]}
        now, last, count = self._clock(), {}, 0
        rows = [
            list(zip(*_keys_of(chunk, topic), chunk.all_offsets().tolist(), strict=True)) for chunk in partition.chunks
        ]
        for key, _, offset in chain.from_iterable(rows):
            last[key] = offset
        for number, chunk in enumerate(partition.chunks):
            keep = []
            for key, is_tombstone, offset in rows[number]:
                kept = key is None or last[key] == offset
                if kept and is_tombstone:
                    since = partition.tombstones.setdefault(offset, now)
                    kept = now < since + topic.tombstones_us or since == now or key in older
                keep.append(kept)
            count += keep.count(False)
            offsets = chunk.all_offsets()[np.array(keep, dtype=bool)]
            batch = chunk.batch.filter(pa.array(keep, pa.bool_()))
            partition.chunks[number] = msgspec.structs.replace(
                chunk, batch=batch, offsets=offsets, end=chunk.end_offset
            )
        partition.bytes = sum(chunk.batch.nbytes for chunk in partition.chunks)
        self._counters["compacted"] += count
        return count

    def _partition(self, name: str, number: int) -> MemoryPartition:
        topic = self.topic(name)
        if (name, number) not in self._partitions:
            raise TopicNotFound(
                f"Topic {name!r} has no partition {number}.", advice=f"It has partitions 0 to {topic.partitions - 1}."
            )
        return self._partitions[name, number]

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("The memory log was closed.", advice="Open another with open_log.")


class MemoryPartition:
    """A partition: its chunks from old to new, and what is remembered of those that are gone."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.first = 0
        self.end = 0
        self.bytes = 0
        self.appended = 0
        self.running = NO_TIME
        self.heartbeats: list[Heartbeat] = []
        self.tombstones: dict[int, int] = {}
        self.sequences: dict[bytes, tuple[int, int]] = {}

    def add(self, chunks: Sequence[Chunk], *, end: int, producer: bytes = NO_PRODUCER, last: int = -1) -> None:
        """Puts chunks of one producer, up to its sequence `last`, behind the others.

        Everything is made ready first; the lines that change it hold no call, so Ctrl-C cannot fall between two of them.
        """
        fresh, running, size = [], self.running, self.bytes
        for chunk in chunks:
            fresh.append(msgspec.structs.replace(chunk, running=running))
            size += chunk.batch.nbytes
            running = reached_after(chunk, running)
        appended = chunks[-1].appended if chunks else self.appended
        assert appended is not None
        self.chunks += fresh
        self.bytes, self.appended, self.running, self.end = size, appended, running, end
        if producer != NO_PRODUCER:
            self.sequences[producer] = (last, end)

    def split_off(self) -> MemoryPartition:
        """A new partition that goes on where this one stands, for some of its keys."""
        child = MemoryPartition()
        child.appended, child.running = self.appended, self.running
        child.sequences = {producer: (last, 0) for producer, (last, _) in self.sequences.items()}
        return child


class MemoryCursor:
    """A place in one partition."""

    def __init__(self, store: MemoryStore, name: str, partition: int, offset: int) -> None:
        self.offset = offset
        self._store = store
        self._name = name
        self._number = partition
        self._topic_id = store.topic(name).id

    def read(self, end: int, *, events_max: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        if self._store.topic(self._name).id != self._topic_id:
            raise made_anew(self._name)
        if self.offset < end:
            check_not_missed(self._name, self._number, self.offset, first=self._store.first(self._name, self._number))
        while self.offset < end and events_max > 0:
            chunk = self._store.chunk_at(self._name, self._number, self.offset)
            part = chunk.slice(self.offset, min(chunk.end_offset, end)).slice_events(events_max)
            if part.batch.num_rows:
                chunks.append(part)
            events_max -= part.batch.num_rows
            self.offset = part.end_offset
        return chunks


class MemoryWaiter:
    """Sleeps until something was appended anywhere."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait(min(timeout_s, 0.05))

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        """Nothing to free."""


def _keys_of(chunk: Chunk, topic: Topic) -> tuple[list[Any], list[bool]]:
    """For each event its key, and whether it is a tombstone."""
    column = comparable_keys(chunk.batch.column(topic.key))
    # NaN is not equal to itself in Python; its text is.
    keys = (column.cast(pa.string()) if pa.types.is_floating(column.type) else key_bytes(column)).to_pylist()
    gone = [False] * len(keys)
    if "_deleted" in chunk.batch.schema.names:
        gone = [bool(deleted) for deleted in chunk.batch.column("_deleted").to_pylist()]
    if not topic.has_schema:
        gone = [
            value is None or deleted
            for value, deleted in zip(chunk.batch.column("value").to_pylist(), gone, strict=True)
        ]
    return keys, gone


def _check_no_archive(topic: Topic) -> None:
    if topic.archive is not None:
        raise Unsupported(f"Topic {topic.name!r} is in memory and has no archive.", advice="Use a log in a folder.")
