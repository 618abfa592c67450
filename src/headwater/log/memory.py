"""The memory log (`memory://`): the reference model, in one process and without a disk.

It keeps each partition as a list of chunks and says in the plainest way what a log does; the local log is tested against
it. Nothing outlives the handle.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import pyarrow as pa

from headwater.log.frame import NO_PRODUCER, flags_of, physical_schema
from headwater.log.store import Bounds, Chunk, Cursor, TimeKind, Waiter, Write, check_place
from headwater.log.topic import Topic
from headwater.model.clock import Clock
from headwater.model.errors import Closed, Fenced, HeadwaterError, SequenceGap, TopicExists, TopicNotFound
from headwater.model.schema import project


class MemoryStore:
    """One log in memory."""

    def __init__(self, *, clock: Clock) -> None:
        self.url = "memory://"
        self._clock = clock
        self._changed = threading.Condition(threading.RLock())
        self._topics: dict[str, Topic] = {}
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._epochs: dict[bytes, int] = {}
        self._counters: Counter[str] = Counter()
        self._closed = False

    def topics(self) -> list[str]:
        self._check_open()
        return sorted(self._topics)

    def topic(self, name: str) -> Topic:
        self._check_open()
        if name not in self._topics:
            known = ", ".join(self.topics()[:10]) or "none yet"
            raise TopicNotFound(f"There is no topic {name!r} in {self.url}.", advice=f"Topics here: {known}.")
        return self._topics[name]

    def refresh(self, name: str) -> Topic:
        return self.topic(name)

    def create(self, topic: Topic) -> Topic:
        with self._changed:
            self._check_open()
            if topic.name in self._topics:
                raise TopicExists(
                    f"Topic {topic.name!r} exists already.",
                    advice="Open it, or pass exist_ok=True to keep it as it is.",
                )
            self._topics[topic.name] = topic
            self._partitions.update({(topic.name, number): _Partition() for number in range(topic.partitions)})
        return topic

    def change(self, name: str, change: Callable[[Topic], Topic]) -> Topic:
        with self._changed:
            self._topics[name] = change(self.topic(name))
            return self._topics[name]

    def delete(self, name: str) -> None:
        with self._changed:
            topic = self.topic(name)
            del self._topics[name]
            for number in range(topic.partitions):
                del self._partitions[name, number]

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

    def write_atomically(self, writes: Sequence[Write]) -> list[range]:
        with self._changed:
            for write in writes:
                self._partition(write.topic.name, write.partition)
                if self.topic(write.topic.name).id != write.topic.id:
                    raise _made_anew(write.topic.name)
                self._check_not_fenced(write)
                self._check_place(write)
            ranges = [self._append(write) for write in writes]
            self._changed.notify_all()
        return ranges

    def bounds(self, names: Sequence[str]) -> Mapping[tuple[str, int], Bounds]:
        with self._changed:
            return {
                (name, number): Bounds(first=0, end=self._partition(name, number).end)
                for name in names
                for number in range(self.topic(name).partitions)
            }

    def cursor(self, name: str, partition: int, *, offset: int) -> Cursor:
        return _MemoryCursor(self, name, partition, offset)

    def chunk_at(self, name: str, partition: int, offset: int) -> Chunk:
        """The whole chunk that holds an offset, with the topic's present columns."""
        with self._changed:
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
                    return chunk.base_offset + int(np.argmax(reached))
            return self._partition(name, partition).end

    def waiter(self, names: Sequence[str]) -> Waiter:
        return _MemoryWaiter(self._changed)

    def seal(self, name: str) -> int:
        self.topic(name)
        return 0

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

    def counters(self) -> Mapping[str, int]:
        return dict(self._counters)

    def close(self) -> None:
        self._closed = True

    def _append(self, write: Write) -> range:
        partition = self._partition(write.topic.name, write.partition)
        if self.topic(write.topic.name).id != write.topic.id:
            raise _made_anew(write.topic.name)
        stamp, count = write.stamp, write.count
        if stamp.producer != NO_PRODUCER:
            self._check_not_fenced(write)
            last, end = partition.sequences.get(stamp.producer, (-1, 0))
            if stamp.sequence_first <= last:
                if stamp.sequence_last != last:
                    raise SequenceGap(
                        f"A batch came after sequence {last} was stored.", advice="Use one id a producer."
                    )
                self._counters["duplicates"] += 1
                return range(end - count, end)
        self._check_place(write)
        if stamp.producer != NO_PRODUCER:
            partition.sequences[stamp.producer] = (stamp.sequence_last, partition.end + count)
        start, now = partition.end, self._clock()
        for first, end in write.runs():
            appended = max(now if write.appended is None else int(write.appended[first]), partition.appended)
            rows = write.rows(first, end - first)
            partition.chunks.append(Chunk(write.topic, write.partition, start + first, rows, appended))
            partition.appended = appended
        partition.end += count
        return range(start, partition.end)

    def _check_place(self, write: Write) -> None:
        if write.at is not None:
            where = f"partition {write.partition} of topic {write.topic.name!r}"
            check_place(write.at, self._partition(write.topic.name, write.partition).end, where)

    def _check_not_fenced(self, write: Write) -> None:
        stamp = write.stamp
        if stamp.producer != NO_PRODUCER and stamp.epoch != self._epochs.get(stamp.producer, stamp.epoch):
            raise Fenced("Another producer with the same id took over.", advice="Close this one.")

    def _partition(self, name: str, number: int) -> _Partition:
        topic = self.topic(name)
        if (name, number) not in self._partitions:
            raise TopicNotFound(
                f"Topic {name!r} has no partition {number}.", advice=f"It has partitions 0 to {topic.partitions - 1}."
            )
        return self._partitions[name, number]

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("The memory log was closed.", advice="Open another with open_log.")


class _Partition:
    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.end = 0
        self.appended = 0
        self.sequences: dict[bytes, tuple[int, int]] = {}


class _MemoryCursor:
    def __init__(self, store: MemoryStore, name: str, partition: int, offset: int) -> None:
        self.offset = offset
        self._store = store
        self._name = name
        self._number = partition
        self._topic_id = store.topic(name).id

    def read(self, end: int, *, events_max: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        if self._store.topic(self._name).id != self._topic_id:
            raise _made_anew(self._name)
        while self.offset < end and events_max > 0:
            chunk = self._store.chunk_at(self._name, self._number, self.offset)
            stop = min(chunk.end_offset, end, self.offset + events_max)
            chunks.append(chunk.slice(self.offset, stop))
            events_max -= stop - self.offset
            self.offset = stop
        return chunks


class _MemoryWaiter:
    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait(min(timeout_s, 0.05))

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        """Nothing to free."""


def _made_anew(name: str) -> TopicNotFound:
    return TopicNotFound(f"Topic {name!r} was deleted and created again.", advice="Open another reader or producer.")
