"""The log on Apache Kafka (`kafka://`): the same API, kept by a cluster of brokers.

Each topic is a Kafka topic of the same name behind the prefix of the URL. What Kafka does not know about it (schema, key,
time) stands in the catalog (`catalog`); a topic that somebody else made is read as bytes until it is adopted with a schema.
Values are JSON by one map of types (`records`), keys go where Kafka's own partitioner puts them, a deletion is a tombstone.
`appended` is the broker's clock, in milliseconds.

What differs from a file log, because Kafka differs: offsets have gaps where transactions ended; a transaction becomes visible
partition by partition; searching by event time reads the partition. `docs/kafka.md` has the whole list.

Thread-safety: a store may be used by many threads. Clients are shared by all handles of a process (`cluster`). After a
fork a handle belongs to the parent; the child opens its own.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time as clock_time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from headwater.log.disk.fork import tell_when_forked
from headwater.log.kafka.brokers import BEGINNING, END, read_address
from headwater.log.kafka.catalog import (
    INTERNAL,
    Catalog,
    ProducerSequences,
    alter_topic,
    foreign_topic,
    make_topic,
    remove_topic,
    topic_settings,
)
from headwater.log.kafka.cluster import join, leave
from headwater.log.kafka.group import KafkaGroup, KafkaGroups
from headwater.log.kafka.queue.share_engine import ShareEngine
from headwater.log.kafka.queue.share_group import SHARE_FEATURES, QueueRecords, ShareGroup
from headwater.log.kafka.reader import KafkaCursor, KafkaWaiter
from headwater.log.kafka.records import to_records
from headwater.log.kafka.stages import KafkaStages
from headwater.log.kafka.writer import Parcel, Transactor
from headwater.log.port.capabilities import Capabilities
from headwater.log.port.group import OffsetPart
from headwater.log.port.lease_engine import QueueOpening
from headwater.log.port.stage import StageCommit, StageState
from headwater.log.port.store import Bounds, Cursor, TimeKind, Waiter
from headwater.log.port.topic import NAME_CHARACTERS_MAX, Topic, made_anew
from headwater.log.port.write import NO_PRODUCER, Write
from headwater.model.clock import Clock
from headwater.model.errors import (
    Closed,
    Fenced,
    HeadwaterError,
    InvalidInput,
    InvalidName,
    SequenceGap,
    TopicExists,
    TopicNotFound,
    Unsupported,
)
from headwater.model.marker import Marker

KAFKA_NAME_CHARACTERS_MAX = 249

_FIRST_KNOWN_S = 1.0
_FLIGHTS_MAX = 1024
_SCAN_EVENTS = 1 << 16
_T = TypeVar("_T")


CAPABILITIES = Capabilities(is_placed_by_key=False, tells_lateness=False, takes_offsets=False, queues=SHARE_FEATURES)


class KafkaStore:
    """One log on a Kafka cluster."""

    capabilities = CAPABILITIES

    def __init__(self, rest: str, *, clock: Clock, read_only: bool = False) -> None:
        address = read_address(rest)
        if len(address.prefix) + NAME_CHARACTERS_MAX > KAFKA_NAME_CHARACTERS_MAX:
            raise InvalidInput(
                f"The prefix {address.prefix!r} leaves too little room for names.",
                advice=f"Use up to {KAFKA_NAME_CHARACTERS_MAX - NAME_CHARACTERS_MAX} characters.",
            )
        self.url = address.url
        self._prefix = address.prefix
        self._clock = clock
        self._read_only = read_only
        self._cluster = join(msgspec.structs.replace(address, prefix=""))
        self._catalog = Catalog(self._cluster, self._prefix)
        self._sequences = ProducerSequences(self._cluster, self._prefix)
        self._stages = KafkaStages(self._cluster, self._prefix)
        self._queues = QueueRecords(self._cluster, self._prefix)
        self._groups = KafkaGroups(self._cluster, self._prefix, check_writable=self._check_writable)
        self._seen: dict[str, int] = {}
        self._foreign: dict[str, Topic] = {}
        self._firsts: dict[str, tuple[float, list[int]]] = {}
        self._lock = threading.Lock()
        self._epochs = itertools.count(1)
        self._producers: dict[tuple[bytes, int], Transactor] = {}
        self._in_flight: dict[tuple[bytes, int, str, int], tuple[int, Future[Any]]] = {}
        self._counters: Counter[str] = Counter()
        self._closed = False
        tell_when_forked(self)

    # Topics

    def topics(self) -> list[str]:
        self._check_open()
        names = self._cluster.list_topics()
        ours = (name[len(self._prefix) :] for name in names if name.startswith(self._prefix))
        return sorted(name for name in ours if name and INTERNAL not in name and not name.startswith(("__", ".", "-")))

    def topic(self, name: str) -> Topic:
        return self.refresh(name)

    def refresh(self, name: str) -> Topic:
        self._check_open()
        self._catalog.refresh()
        return self._found(name)

    def create(self, topic: Topic) -> Topic:
        self._check_writable()
        name = self._physical(topic.name)

        def begin(before: Topic | None) -> Topic:
            is_mine = before is not None and before.id == topic.id  # and it was not known whether the catalog has it
            if not is_mine and (self._catalog.is_begun(topic.name) or self._cluster.list_topics(name)):
                raise _exists(topic.name)
            return topic

        try:
            self._catalog.change(topic.name, begin, begins=True)
        except TopicExists:
            self._catalog.finish(topic.name, self._make)
            raise
        self._catalog.finish(topic.name, self._make)
        self._know(name, topic)
        self._seen[topic.id] = topic.partitions
        self._foreign.pop(topic.name, None)
        return topic

    def _make(self, topic: Topic) -> None:
        name, settings = self._physical(topic.name), topic_settings(topic)
        make_topic(self._cluster, name, partitions=topic.partitions, settings=settings, exist_ok=True)

    def adopt(self, topic: Topic) -> Topic:
        """Gives a topic that somebody else made a schema: its values are read and written as JSON from now on."""
        self._check_writable()
        there = self._cluster.list_topics(self._physical(topic.name))
        if not there:
            raise self._not_found(topic.name)
        adopted = msgspec.structs.replace(topic, partitions=next(iter(there.values())))

        def decide(before: Topic | None) -> Topic:
            if before is not None:
                raise _exists(topic.name)
            return adopted

        self._catalog.change(topic.name, decide)
        self._foreign.pop(topic.name, None)
        return adopted

    def change(self, name: str, change: Callable[[Topic], Topic]) -> Topic:
        self._check_writable()
        before = self.refresh(name)

        def decide(topic: Topic | None) -> Topic:
            if topic is not None:
                return change(topic)
            if name not in self._foreign:
                raise self._not_found(name)
            change(self._foreign[name])
            raise Unsupported(
                f"Topic {name!r} was not made by Headwater and carries bytes.",
                advice="Give it a schema with log.adopt_topic(…); its settings are those of the Kafka topic.",
            )

        after = self._catalog.change(name, decide)
        assert after is not None
        if topic_settings(after) != topic_settings(before):
            alter_topic(self._cluster, self._physical(name), topic_settings(after))
        return after

    def delete(self, name: str) -> None:
        self._check_writable()
        topic = self.refresh(name)
        remove_topic(self._cluster, self._physical(name))
        self._foreign.pop(name, None)
        self._catalog.change(name, lambda now: None if now is not None and now.id == topic.id else now)

    def split(self, name: str, partitions: int, *, at: Sequence[int] | None = None) -> Topic:
        _refuse(
            f"Topic {name!r} cannot get more partitions on Kafka without its keys losing their order.",
            "Create another topic with more partitions and copy the events to it in order.",
        )

    # Writing

    def write(self, writes: Sequence[Write]) -> list[range | Exception]:
        self._check_writable()
        handed: list[tuple[Write, Future[Any] | HeadwaterError]] = []
        self._catalog.refresh()
        for write in writes:
            try:
                handed.append((write, self._handed(write)))
            except HeadwaterError as error:
                handed.append((write, error))
        outcomes: list[Any] = []
        for write, result in handed:
            try:
                outcomes.append(_given(self._settled(result), write))
            except HeadwaterError as error:
                with self._lock:
                    self._in_flight.pop(_flight(write), None)
                outcomes.append(error)
        return outcomes

    def write_atomically(self, writes: Sequence[Write], offsets: Sequence[OffsetPart] = ()) -> list[range]:
        self._check_writable()
        self._catalog.refresh()
        parcels = [self._parcel(write) for write in writes]
        found = self._groups.commit_with(
            offsets, lambda consumed: self._settled(self._cluster.writer.send_together(parcels, consumed))
        )
        return [range(given[0], given[-1] + 1) for given in found]

    def register_producer(self, name: str) -> tuple[bytes, int]:
        self._check_writable()
        producer = hashlib.blake2b(name.encode("utf-8"), digest_size=16).digest()
        self._sequences.records.make()
        transactor = self._settled(self._cluster.writer.run(lambda: self._taken(producer)))
        with self._lock:
            for key in [key for key in self._producers if key[0] == producer]:
                self._producers.pop(key).close()
            epoch = next(self._epochs)
            self._producers[producer, epoch] = transactor
        return producer, epoch

    def _taken(self, producer: bytes) -> Transactor:
        """The transactions of a named producer, whose earlier holders are fenced; what they have committed is known."""
        transactor = Transactor(self._cluster, f"{self._prefix}{INTERNAL}producer.{producer.hex()}")
        try:
            transactor.commit([self._sequences.taken(producer)])
            transactor.wait_until_seen()
            self._sequences.records.refresh()
        except BaseException:
            transactor.close()
            raise
        return transactor

    def sequence_of(self, name: str, partition: int, *, producer: bytes) -> int | None:
        self._check_open()
        return self._sequences.last(producer, self._found(name).id, partition)

    # Reading

    def bounds(self, names: Sequence[str]) -> Mapping[tuple[str, int], Bounds]:
        self._check_open()
        topics = [self._known(name) for name in names]
        catalog = self._catalog.records
        for is_last in itertools.chain([False] * 3, itertools.repeat(True)):
            places = [(self._physical(topic.name), number) for topic in topics for number in range(topic.partitions)]
            asked = [*places, (catalog.name, 0)] if catalog.exists else places
            try:
                ends = self._cluster.offsets(asked, END)
            except TopicNotFound:
                if is_last:
                    raise
                for topic in topics:
                    self._seen.pop(topic.id, None)
                    self._foreign.pop(topic.name, None)
                topics = [self.refresh(name) for name in names]
                continue
            if not catalog.exists or not catalog.is_behind(ends[-1]):
                break
            topics = [self.refresh(name) for name in names]
        firsts = [first for topic in topics for first in self._first_offsets(topic)]
        keys = [(topic.name, number) for topic in topics for number in range(topic.partitions)]
        return {
            key: Bounds(first=min(first, end), end=end)
            for key, first, end in zip(keys, firsts, ends[: len(keys)], strict=True)
        }

    def cursor(self, name: str, partition: int, *, offset: int) -> Cursor:
        topic = self._known(name)
        topic_id, physical = topic.id, self._physical(name)

        def look_up() -> tuple[Topic, str]:
            self._check_open()
            now = self._found(name)
            if now.id != topic_id:
                raise made_anew(name)
            return now, physical

        return KafkaCursor(self._cluster.fetchers, look_up, partition, offset)

    def offset_at(self, name: str, partition: int, *, time: int, by: TimeKind) -> int:
        topic = self.refresh(name)
        bound = self.bounds([name])[name, partition]
        if by == "time" and topic.time is not None:
            return self._first_at(topic, partition, bound, time)
        if time <= 0:
            return bound.first
        [offset] = self._cluster.offsets([(self._physical(name), partition)], -(-time // 1000))
        return bound.end if offset < 0 else min(offset, bound.end)

    def waiter(self, names: Sequence[str]) -> Waiter:
        return KafkaWaiter()

    def is_overtaken(self, name: str, partition: int, *, end: int, since_us: int) -> bool:
        """The brokers compact when they see fit: it may be."""
        return self.topic(name).compact

    def reached(self, name: str, partition: int, *, offset: int) -> int:
        _refuse(
            f"Kafka does not keep how far event time had come in topic {name!r}.",
            "Read it without the columns _late and _watermark; applications have them on Kafka too.",
        )

    def heartbeat(self, name: str, partition: int, *, time: int, appended_before: int) -> bool:
        _refuse("A topic on Kafka has no heartbeats.", "Append an event of your own whose time is the present.")

    def heartbeats(self, name: str, partition: int) -> Sequence[Any]:
        """There are none."""
        return ()

    # Stages

    def stages(self) -> list[str]:
        self._check_open()
        return self._stages.names()

    def take_stage(self, name: str) -> int:
        self._check_writable()
        return self._stages.take(name)

    def held_stage(self, name: str) -> int | None:
        self._check_writable()
        return self._stages.held(name)

    def stage_state(self, name: str) -> StageState:
        self._check_open()
        return self._stages.state(name)

    def commit_stage(
        self, name: str, number: int, marker: Marker | None, writes: Sequence[Write], *, gaps: bool = False
    ) -> StageCommit:
        self._check_writable()
        self._catalog.refresh()
        return self._stages.commit(name, number, marker, writes, gaps=gaps, parcel=self._parcel)

    # Queues

    def lease_engine(self, opening: QueueOpening) -> ShareEngine:
        self._check_open()
        group = ShareGroup(
            self._cluster,
            self._queues,
            topic=opening.topic,
            physical=self._physical(opening.topic.name),
            group=opening.group,
            writable=not self._read_only,
        )
        return ShareEngine(self, group, opening)

    def queues(self) -> list[dict[str, Any]]:
        self._check_open()
        return self._queues.all()

    def delete_queue(self, group: str, topic: str) -> None:
        _refuse("Queues on Kafka are not removed from here.", "Use the broker's own kafka-share-groups.")

    # Groups

    def groups(self) -> list[str]:
        self._check_open()
        return self._groups.names()

    def group(self, name: str, *, create: bool) -> KafkaGroup:
        self._check_open()
        return self._groups.group(name)

    # What Kafka keeps for itself

    def seal(self, name: str) -> int:
        _refuse("The brokers keep the files of a Kafka topic.", "Nothing needs to be sealed; see docs/kafka.md.")

    def tidy(self, name: str) -> int:
        _refuse(
            "The brokers remove what retention and compaction no longer keep, when they see fit.",
            "Set retention= and compact= on the topic.",
        )

    def place(self, write: Write, offsets: Any, *, end: int) -> None:
        _refuse(
            f"Events {write.at} to {end - 1} of partition {write.partition} of topic {write.topic.name!r} have gaps between their "
            "offsets, or are gone, and Kafka gives every event the next offset.",
            "Mirror this topic into a log in a folder, which keeps the gaps; or read it and append it to a topic on Kafka, where "
            "its events get new offsets.",
        )

    def incarnation(self) -> int:
        """Always 0: what the replicas have acknowledged is not taken back."""
        return 0

    def lost_after(self, name: str, partition: int, *, incarnation: int) -> int | None:
        return None

    def counters(self) -> Mapping[str, int]:
        return dict(self._counters)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for transactor in self._producers.values():
                transactor.close()
            self._stages.release()
            self._catalog.close()
            leave(self._cluster)

    def _forked(self) -> None:
        self._closed = True

    # Below

    def _known(self, name: str) -> Topic:
        """A topic as this handle knows it, without a question where it can be avoided."""
        found = self._catalog.get(name)
        is_seen = name in self._foreign if found is None else found.id in self._seen
        return self._found(name) if is_seen else self.refresh(name)

    def _found(self, name: str) -> Topic:
        """A topic by the catalog as it was read last; whether Kafka has it, with how many partitions, is asked once."""
        physical = self._physical(name)
        topic = self._catalog.get(name) or self._foreign.get(name)
        if topic is not None and topic.id in self._seen:
            count = self._seen[topic.id]
            return topic if topic.partitions == count else msgspec.structs.replace(topic, partitions=count)
        there = self._cluster.list_topics(physical)
        if not there:
            raise self._not_found(name)
        if topic is None:
            topic = self._foreign[name] = foreign_topic(name, there[physical])
        topic = msgspec.structs.replace(topic, partitions=there[physical])
        self._know(physical, topic)
        self._seen[topic.id] = topic.partitions
        return topic

    def _know(self, physical: str, topic: Topic) -> None:
        with self._cluster.askers.one() as asker:
            self._cluster.know(asker, physical, topic.id, topic.partitions)

    def _physical(self, name: str) -> str:
        if name.startswith(INTERNAL):
            raise InvalidName(f"{name!r} is reserved for the log.", advice="Choose another one.")
        return self._prefix + name

    def _handed(self, write: Write) -> Future[Any]:
        """A write on its way; one with the stamp of a write that is on its way already is that one."""
        stamp = write.stamp
        if stamp.producer == NO_PRODUCER:
            return self._cluster.writer.send(self._parcel(write))
        flight = self._in_flight.get(_flight(write))
        if flight is not None and flight[0] == stamp.sequence_last:
            self._counters["duplicates"] += 1
            return flight[1]
        parcel = self._parcel(write)
        if stamp.epoch:
            future = self._cluster.writer.run(lambda: self._write_named(write, parcel))
        else:
            future = self._cluster.writer.send(parcel)
        with self._lock:
            self._in_flight[_flight(write)] = (stamp.sequence_last, future)
            while len(self._in_flight) > _FLIGHTS_MAX:
                del self._in_flight[next(iter(self._in_flight))]
        return future

    def _write_named(self, write: Write, parcel: Parcel) -> list[int]:
        """Events of a named producer and its new last sequence number, in one transaction of its own id."""
        stamp, topic_id = write.stamp, write.topic.id
        last = self._sequences.last(stamp.producer, topic_id, write.partition)
        if last is not None and stamp.sequence_first <= last:
            raise SequenceGap(
                f"A batch came after sequence {last} was stored.", advice="Use a separate id for each producer."
            )
        transactor = self._producers.get((stamp.producer, stamp.epoch))
        if transactor is None:
            raise Fenced("Another producer with the same id took over.", advice="Close this one.")
        number = self._sequences.parcel(stamp.producer, topic_id, write.partition, stamp.sequence_last)
        offsets = transactor.commit([parcel, number])[0]
        self._sequences.note(stamp.producer, topic_id, write.partition, stamp.sequence_last)
        return offsets

    def _parcel(self, write: Write) -> Parcel:
        topic = self._found(write.topic.name)
        if topic.id != write.topic.id:
            raise made_anew(topic.name)
        if not 0 <= write.partition < topic.partitions:
            raise TopicNotFound(
                f"Topic {topic.name!r} has no partition {write.partition}.",
                advice=f"It has partitions 0 to {topic.partitions - 1}.",
            )
        records = to_records(write.rows(), write.topic)
        return Parcel(self._physical(topic.name), topic.id, topic.partitions, write.partition, records)

    def _settled(self, result: Future[_T] | HeadwaterError) -> _T:
        if isinstance(result, HeadwaterError):
            raise result
        return result.result()

    def _first_offsets(self, topic: Topic) -> list[int]:
        """The first offset of each partition; only retention moves it, so it may be a second old."""
        at, firsts = self._firsts.get(topic.id, (0.0, []))
        if not firsts or clock_time.monotonic() - at > _FIRST_KNOWN_S:
            places = [(self._physical(topic.name), number) for number in range(topic.partitions)]
            firsts = self._cluster.offsets(places, BEGINNING)
            self._firsts[topic.id] = (clock_time.monotonic(), firsts)
        return firsts

    def _first_at(self, topic: Topic, partition: int, bound: Bounds, time: int) -> int:
        """The first event that reaches an event time: Kafka has no index of it, so the partition is read."""
        cursor = self.cursor(topic.name, partition, offset=bound.first)
        assert topic.time is not None
        while chunks := cursor.read(bound.end, events_max=_SCAN_EVENTS):
            for chunk in chunks:
                times = np.asarray(chunk.batch.column(topic.time).cast(pa.int64()).fill_null(-(2**63)))
                appended: Any = chunk.appended
                if appended is None:
                    appended = np.asarray(chunk.batch.column("_appended").cast(pa.int64()))
                reached = (times >= time) & (times <= appended + topic.future_us)
                if reached.any():
                    return chunk.base_offset + int(np.argmax(reached))
        return bound.end

    def _not_found(self, name: str) -> TopicNotFound:
        known = ", ".join(self.topics()[:10]) or "none yet"
        return TopicNotFound(f"Topic {name!r} does not exist in {self.url}.", advice=f"Topics here: {known}.")

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(
                f"The log {self.url} was closed, or belongs to the process that forked this one.",
                advice="Open another with open_log.",
            )

    def _check_writable(self) -> None:
        self._check_open()
        if self._read_only:
            raise Unsupported(f"{self.url} was opened read-only.", advice="Open it without read_only=True.")


def _given(offsets: list[int], write: Write) -> range | list[int]:
    """The offsets of a write: a range, unless others came in between and each event's own offset is asked for."""
    span = range(offsets[0], offsets[-1] + 1)
    return span if len(span) == len(offsets) or write.stamp.producer == NO_PRODUCER else offsets


def _flight(write: Write) -> tuple[bytes, int, str, int]:
    return write.stamp.producer, write.stamp.epoch, write.topic.id, write.partition


def _exists(name: str) -> TopicExists:
    return TopicExists(f"Topic {name!r} exists already.", advice="Open it, or pass exist_ok=True to keep it as it is.")


def _refuse(what: str, advice: str) -> NoReturn:
    raise Unsupported(what, advice=advice)
