"""The log as users see it, on any store, and `open_log`."""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self

import msgspec
import pyarrow as pa

from headwater.log.disk import Disk
from headwater.log.events import joined, output_schema, to_batch_of
from headwater.log.lease import Lease
from headwater.log.placement import key_bytes, place
from headwater.log.producer import Producer
from headwater.log.queue import Queue
from headwater.log.queue_settings import Order
from headwater.log.queue_work import commit_work
from headwater.log.reader import Reader, Start
from headwater.log.request import send_request
from headwater.log.rows import check_size, to_batch
from headwater.log.store import Store, TimeKind, Write
from headwater.log.table import Newest
from headwater.log.topic import Durability, Topic, check_name, check_topic
from headwater.model.clock import Clock, duration_us, system_clock, time_us
from headwater.model.errors import InvalidInput, LeaseExpired, SchemaMismatch, TopicExists, Unsupported
from headwater.model.event import Event
from headwater.model.schema import BYTES_SCHEMA, to_arrow_schema, widen

SEGMENT_BYTES = 64 << 20
EVENT_BYTES_MAX = 8 << 20
PARTITIONS = 4
FUTURE_MAX = "1 day"

_SCAN_EVENTS = 1 << 16
_BATCH_EVENTS_MIN = 4096


def open_log(
    url: str | os.PathLike[str],
    *,
    durability: Durability = "fsync",
    create: bool = True,
    read_only: bool = False,
    disk: Disk | None = None,
    clock: Clock = system_clock,
) -> Log:
    """Opens a log: a folder (`./data` or `file:///…`), or `memory://`.

    `durability` is what topics created through this handle get by default: "fsync" (acknowledged means on disk) or "os"
    (acknowledged means with the operating system: it survives any crash of a process, not a power loss).
    """
    if not isinstance(url, (str, os.PathLike)):
        raise InvalidInput(f"{url!r} names no log.", advice='Use a folder such as "./data", or "memory://".')
    if durability not in ("fsync", "os"):
        raise InvalidInput(f"Unknown durability {durability!r}.", advice='Use "fsync" or "os".')
    url = os.fspath(url)
    scheme, _, rest = url.partition("://") if "://" in url else ("file", "", url)
    if not rest and scheme != "memory":
        raise InvalidInput(f"{url!r} names no log.", advice='Use a folder such as "./data", or "memory://".')
    match scheme:
        case "file":
            from headwater.log.local import LocalStore

            return Log(LocalStore(rest, disk=disk, clock=clock, create=create, read_only=read_only), durability, clock)
        case "memory":
            from headwater.log.memory import MemoryStore

            return Log(MemoryStore(clock=clock), durability, clock)
    raise Unsupported(f"There is no log of the kind {scheme!r}.", advice="Use a folder, file:// or memory://.")


class Log:
    """Topics of events; the truth from which everything else is derived."""

    def __init__(self, store: Store, durability: Durability, clock: Clock) -> None:
        self._store = store
        self._durability = durability
        self._clock = clock
        self._sticky = 0
        self._queues: weakref.WeakSet[Queue] = weakref.WeakSet()

    @property
    def url(self) -> str:
        """Where it is."""
        return self._store.url

    # Topics

    def create_topic(
        self,
        name: str,
        schema: str | pa.Schema | type | None = None,
        *,
        key: str | None = None,
        time: str | None = None,
        lateness: str | timedelta = "0 seconds",
        future_max: str | timedelta = FUTURE_MAX,
        partitions: int = PARTITIONS,
        durability: Durability | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        event_bytes_max: int = EVENT_BYTES_MAX,
        exist_ok: bool = False,
    ) -> Topic:
        """Makes a topic. Without a schema its events are bytes, with an optional key of bytes."""
        if schema is None and (key not in (None, "key") or time is not None):
            raise InvalidInput(
                f"Topic {name!r} has no schema, so it has no columns to be key or time.",
                advice='Give it a schema, such as schema="id STRING, at TIMESTAMP".',
            )
        columns = BYTES_SCHEMA if schema is None else to_arrow_schema(schema)
        if schema is not None and key in columns.names:
            key_bytes(pa.nulls(0, columns.field(key).type))
        topic = check_topic(
            Topic(
                name=check_name(name),
                id=uuid.uuid4().hex,
                schemas=(columns,),
                has_schema=schema is not None,
                key="key" if schema is None else key,
                time=time,
                lateness_us=duration_us(lateness),
                future_us=duration_us(future_max),
                partitions=partitions,
                durability=durability or self._durability,
                segment_bytes=segment_bytes,
                event_bytes_max=event_bytes_max,
                created=self._clock(),
            )
        )
        try:
            return self._store.create(topic)
        except TopicExists:
            if not exist_ok:
                raise
            return self._store.topic(name)

    def alter_topic(
        self,
        name: str,
        *,
        schema: str | pa.Schema | type | None = None,
        lateness: str | timedelta | None = None,
        future_max: str | timedelta | None = None,
        event_bytes_max: int | None = None,
    ) -> Topic:
        """Changes a topic. A schema may gain nullable columns and wider types; old events are read with nulls."""

        def change(topic: Topic) -> Topic:
            changes: dict[str, Any] = {}
            if schema is not None:
                changes["schemas"] = _wider(topic, schema)
            if lateness is not None:
                changes["lateness_us"] = duration_us(lateness)
            if future_max is not None:
                changes["future_us"] = duration_us(future_max)
            if event_bytes_max is not None:
                changes["event_bytes_max"] = event_bytes_max
            return check_topic(msgspec.structs.replace(topic, **changes))

        return self._store.change(check_name(name), change)

    def delete_topic(self, name: str) -> None:
        """Removes a topic with all its events."""
        self._store.delete(check_name(name))

    def topics(self) -> list[str]:
        """The names of all topics."""
        return self._store.topics()

    def topic(self, name: str) -> Topic:
        """What a topic is now, even if another process changed it a moment ago."""
        return self._store.refresh(check_name(name))

    def offsets(self, topic: str) -> dict[int, range]:
        """The offsets each partition holds."""
        bounds = self._store.bounds([self.topic(topic).name])
        return {number: range(bound.first, bound.end) for (_, number), bound in bounds.items()}

    def offsets_at(self, topic: str, time: datetime | str | int, *, by: TimeKind = "time") -> dict[int, int]:
        """In each partition the first offset at or after a time; the end where there is none."""
        at = time_us(time)
        if by not in ("time", "appended"):
            raise InvalidInput(f"There is no time of the kind {by!r}.", advice='Use "time" or "appended".')
        return {
            number: self._store.offset_at(topic, number, time=at, by=by)
            for number in range(self.topic(topic).partitions)
        }

    # Writing

    def append(self, topic: str, rows: Any, *, atomic: bool = False) -> dict[int, range]:
        """Appends many events at once: dicts, an Arrow table or batch, a pandas or Polars frame.

        Returns the offsets given in each partition once all are durable. The events of each partition become visible
        together; with `atomic` those of all partitions do.
        """
        writes = self._writes(topic, rows)
        if atomic:
            return {
                write.partition: span for write, span in zip(writes, self._store.write_atomically(writes), strict=True)
            }
        outcomes = self._store.write(writes)
        stored = {w.partition: span for w, span in zip(writes, outcomes, strict=True) if isinstance(span, range)}
        for write, outcome in zip(writes, outcomes, strict=True):
            if isinstance(outcome, Exception):
                if stored:
                    outcome.add_note(f"Partition {write.partition} refused; stored before that: {stored}.")
                raise outcome
        return stored

    def transaction(self) -> Transaction:
        """Appends to several topics that happen together or not at all: `with log.transaction() as tx: tx.append(…)`."""
        return Transaction(self)

    def producer(self, *, id: str | None = None, linger_ms: float = 20.0, retry_s: float = 30.0) -> Producer:
        """Sends single events in batches. With an `id` it resumes where the last producer of that id ended, and fences it."""
        return Producer(self._store, id=id, linger_ms=linger_ms, retry_s=retry_s)

    # Reading

    def reader(
        self, topic: str | Sequence[str], *, start: Start = "earliest", columns: Sequence[str] | None = None
    ) -> Reader:
        """Follows one or more topics from a place of its own."""
        names: list[object] = list(topic) if isinstance(topic, (list, tuple)) else [topic]
        if not names:
            raise InvalidInput("A reader of no topics would wait for ever.", advice="Name one topic, or several.")
        return Reader(self._store, [self.topic(check_name(name)).name for name in names], start=start, columns=columns)

    def read(
        self,
        topic: str,
        *,
        start: Start = "earliest",
        end: Start = "latest",
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """All events between two places, partition after partition, as one table."""
        return self.scan(topic, start=start, end=end, columns=columns).read_all()

    def scan(
        self,
        topic: str,
        *,
        start: Start = "earliest",
        end: Start = "latest",
        columns: Sequence[str] | None = None,
    ) -> pa.RecordBatchReader:
        """All events between two places as a stream of batches, for topics of any size."""
        ends = {place.partition: place.offset for place in self.reader(topic, start=end).positions()}
        starts = {place.partition: place.offset for place in self.reader(topic, start=start).positions()}
        schema = output_schema(self._store.refresh(topic), columns)
        batches = self._batches(topic, schema, starts, ends)
        return pa.RecordBatchReader.from_batches(schema, joined(batches, rows_min=_BATCH_EVENTS_MIN))

    def table(self, topic: str, *, as_of: datetime | str | int | None = None) -> pa.Table:
        """The newest row of each key, without those that were deleted; `as_of` an event time."""
        described = self._store.refresh(check_name(topic))
        newest = Newest(described, as_of=None if as_of is None else time_us(as_of))
        for batch in self.scan(topic, columns=newest.columns):
            newest.add(batch)
        return newest.table()

    # Queues

    def queue(
        self,
        topic: str,
        *,
        group: str = "default",
        lease_s: float = 30.0,
        deliveries_max: int | None = 5,
        order: Order = "none",
        credit: int | None = None,
        duplicates_s: float | None = None,
        dead: str | None = None,
        where: Callable[[Event], bool] | None = None,
    ) -> Queue:
        """The topic read with one acknowledgement per event, shared by all consumers of the group.

        An event comes again when its lease of `lease_s` ends without an acknowledgement, and after `deliveries_max`
        deliveries goes to the topic `dead` (`<topic>.dead`). With order="key" at most one event of each key is out, in order;
        with order="sticky", besides, a key's events go to one consumer as long as it is there.
        `credit` limits what this handle has out; `duplicates_s` is how long the id of an event is remembered; `where` picks
        the events that this handle wants, the others are left to the rest of the group.
        """
        queue = Queue(
            self,
            topic,
            group=group,
            lease_s=lease_s,
            deliveries_max=deliveries_max,
            order=order,
            credit=credit,
            duplicates_s=duplicates_s,
            dead=dead,
            where=where,
        )
        self._queues.add(queue)
        return queue

    def acked_floor(self, topic: str) -> dict[int, int]:
        """In each partition the offset below which every queue group has acknowledged everything; empty without queues."""
        described, floors = self.topic(topic), dict[int, int]()
        for made in self._store.queues():
            if made["topic"] == topic and made["topic_id"] == described.id:
                with Queue(
                    self, topic, group=made["group"], order=made["order"], is_dead=made["dead"] is None
                ) as queue:
                    for number, floor in queue.floors().items():
                        floors[number] = min(floor, floors.get(number, floor))
        return floors

    def request(
        self,
        topic: str,
        value: Any = None,
        *,
        key: Any = None,
        timeout_s: float = 30.0,
        reply_topic: str | None = None,
        headers: Mapping[str, bytes] | None = None,
    ) -> Event:
        """Sends an event to a queue and waits for the reply of whoever leases it; `TimedOut`."""
        return send_request(self, topic, value, key=key, timeout_s=timeout_s, reply_topic=reply_topic, headers=headers)

    # Everything else

    def seal(self, topic: str) -> int:
        """Turns closed segments into standard Arrow files now; it happens by itself a while after they are closed."""
        return self._store.seal(self.topic(topic).name)

    @property
    def store(self) -> Store:
        """The store below."""
        return self._store

    @property
    def clock(self) -> Clock:
        """Gives the present as microseconds since 1970."""
        return self._clock

    def counters(self) -> Mapping[str, int]:
        """What this handle has done so far: frames, bytes, fdatasyncs, rolls, duplicates …"""
        return self._store.counters()

    def close(self) -> None:
        """Frees everything; queues write their acknowledgements first."""
        for queue in list(self._queues):
            queue.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _writes(self, name: str, rows: Any) -> list[Write]:
        topic = self._store.topic(check_name(name))
        try:
            batch = to_batch(rows, topic.schema)
        except SchemaMismatch:
            topic, before = self._store.refresh(name), topic
            if topic.schema_id == before.schema_id:
                raise
            batch = to_batch(rows, topic.schema)
        check_size(batch, topic)
        self._sticky += 1
        placement = place(batch, topic.key, topic.partitions, sticky=self._sticky)
        return [Write(topic, partition, batch, indices) for partition, indices in placement.groups()]

    def _batches(
        self, topic: str, schema: pa.Schema, starts: Mapping[int, int], ends: Mapping[int, int]
    ) -> Iterator[pa.RecordBatch]:
        for partition, start in starts.items():
            cursor = self._store.cursor(topic, partition, offset=start)
            while chunks := cursor.read(ends[partition], events_max=_SCAN_EVENTS):
                for chunk in chunks:
                    yield to_batch_of(chunk, schema)


class Transaction:
    """Appends that become visible together when the block ends, or not at all."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._writes: list[Write] = []
        self._leases: list[Lease] = []
        self.offsets: dict[str, dict[int, list[range]]] = {}

    def append(self, topic: str, rows: Any) -> None:
        """Adds events to the transaction; nothing is written before it commits."""
        self._writes += self._log._writes(topic, rows)

    def ack(self, leases: Iterable[Lease]) -> None:
        """Acknowledges leases, of any queues, together with everything else; given back if the transaction fails."""
        self._leases += leases

    def commit(self) -> None:
        """Appends everything."""
        writes, self._writes = self._writes, []
        leases, self._leases = self._leases, []
        if leases:
            spans = commit_work(self._log, writes, leases)
            for queue in {lease._grant.queue for lease in leases}:
                queue.ack_committed([lease for lease in leases if lease._grant.queue is queue])
        elif writes:
            spans = self._log.store.write_atomically(writes)
        else:
            return
        for write, span in zip(writes, spans, strict=True):
            self.offsets.setdefault(write.topic.name, {}).setdefault(write.partition, []).append(span)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
            return
        for lease in self._leases:
            with suppress(LeaseExpired):
                lease.nack(reason="the transaction failed")


def _wider(topic: Topic, schema: str | pa.Schema | type) -> tuple[pa.Schema, ...]:
    if not topic.has_schema:
        raise InvalidInput(
            f"Topic {topic.name!r} carries bytes and cannot get a schema.", advice="Create another topic."
        )
    wider = widen(topic.schema, to_arrow_schema(schema), key=topic.key)
    return topic.schemas if wider == topic.schema else (*topic.schemas, wider)
