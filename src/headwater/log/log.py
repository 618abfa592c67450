"""The log as users see it, on any store, and `open_log`."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from msgspec import UNSET, UnsetType

from headwater.log.arrow.events import joined, output_schema, to_batch_of
from headwater.log.arrow.table import Newest
from headwater.log.clients.appender import Appender
from headwater.log.clients.consumer import POLL_INTERVAL_S_MAX, CommitMode, Consumer
from headwater.log.clients.producer import Producer
from headwater.log.clients.progress import GroupProgress, progress_of, reset
from headwater.log.clients.reader import Missed, Reader, Start
from headwater.log.clients.stage import Stage
from headwater.log.disk.disk import Disk
from headwater.log.port.capabilities import Capabilities
from headwater.log.port.lease_engine import Order
from headwater.log.port.split import check_split
from headwater.log.port.store import Store, TimeKind
from headwater.log.port.topic import (
    BUFFER_BYTES,
    EVENT_BYTES_MAX,
    FUTURE_MAX,
    PARTITIONS,
    SEGMENT_BYTES,
    TOMBSTONES,
    Durability,
    Overload,
    Retain,
    Topic,
    TopicSettings,
    check_name,
)
from headwater.log.queue import settings as queue_settings
from headwater.log.queue.acks_topic import acks_name
from headwater.log.queue.queue import Queue
from headwater.log.queue.request import send_request
from headwater.log.topic_settings import altered_topic, given, new_topic
from headwater.log.transaction import Transaction
from headwater.model.clock import NO_TIME, Clock, Duration, check_queue_clock, duration_us, system_clock, time_us
from headwater.model.errors import (
    EventsMissed,
    GroupNotFound,
    InvalidInput,
    TopicExists,
    TopicNotFound,
    Unsupported,
)
from headwater.model.event import Event
from headwater.model.position import Position
from headwater.model.schema import SchemaLike, to_arrow_schema
from headwater.model.url import without_password

if TYPE_CHECKING:
    from headwater.log.copies.backup import BackedUp
    from headwater.log.copies.mirror import Mirrored


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
    """Opens a log: a folder (`./data` or `file:///…`), `memory://`, or `kafka://host:9092?prefix=…`.

    `durability` is what topics created through this handle get by default: "fsync" (acknowledged means on disk) or "os"
    (acknowledged means with the operating system: it survives any crash of a process, not a power loss).
    """
    if durability not in ("fsync", "os"):
        raise InvalidInput(f"Unknown durability {durability!r}.", advice='Use "fsync" or "os".')
    scheme, rest = _scheme_of(url)
    match scheme:
        case "file":
            from headwater.log.file.store import LocalStore

            return Log(LocalStore(rest, disk=disk, clock=clock, create=create, read_only=read_only), durability, clock)
        case "memory":
            from headwater.log.memory.store import MemoryStore

            return Log(MemoryStore(clock=clock), durability, clock)
        case _:
            from headwater.log.kafka.store import KafkaStore

            return Log(KafkaStore(rest, clock=clock, read_only=read_only), durability, clock)


def capabilities_of(url: str | os.PathLike[str]) -> Capabilities:
    """What the log at a URL can do, without opening it."""
    scheme, rest = _scheme_of(url)
    match scheme:
        case "file":
            from headwater.log.file.store import capabilities_in

            return capabilities_in(os.path.abspath(rest))
        case "memory":
            from headwater.log.memory import store as memory

            return memory.CAPABILITIES
        case _:
            from headwater.log.kafka import store as kafka

            return kafka.CAPABILITIES


def _scheme_of(url: object) -> tuple[str, str]:
    """The kind of log, and the rest of its URL."""
    if not isinstance(url, (str, os.PathLike)):
        raise InvalidInput(f"{url!r} names no log.", advice='Use a folder such as "./data", or "memory://".')
    url = os.fspath(url)
    scheme, _, rest = url.partition("://") if "://" in url else ("file", "", url)
    if "\0" in url or (not rest and scheme != "memory"):
        advice = 'Use a folder such as "./data", or "memory://".'
        if scheme == "kafka":
            advice = 'Name the brokers: "kafka://host:9092".'
        raise InvalidInput(f"{url!r} names no log.", advice=advice)
    if scheme not in ("file", "memory", "kafka"):
        raise Unsupported(f"Unknown kind of log: {scheme!r}.", advice="Use a folder, file://, memory:// or kafka://.")
    return scheme, rest


class Log:
    """Topics of events; the truth from which everything else is derived."""

    def __init__(self, store: Store, durability: Durability, clock: Clock) -> None:
        self._store = store
        self._durability = durability
        self._clock = clock
        self._appender = Appender(store)
        self._queues: weakref.WeakSet[Queue] = weakref.WeakSet()

    @property
    def url(self) -> str:
        """Where it is."""
        return self._store.url

    # Topics

    def create_topic(
        self,
        name: str,
        schema: SchemaLike | None = None,
        *,
        key: str | None = None,
        time: str | None = None,
        lateness: Duration = "0 seconds",
        future_max: Duration = FUTURE_MAX,
        partitions: int = PARTITIONS,
        durability: Durability | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        event_bytes_max: int = EVENT_BYTES_MAX,
        retention: Duration | None = None,
        retention_bytes: int | None = None,
        compact: bool = False,
        tombstones: Duration = TOMBSTONES,
        bytes_max: int | None = None,
        overload: Overload = "block",
        archive: str | None = None,
        retain: Retain = "all",
        buffer_bytes: int = BUFFER_BYTES,
        exist_ok: bool = False,
    ) -> Topic:
        """Makes a topic. Without a schema its events are bytes, with an optional key of bytes.

        `retention` removes events that were appended longer ago, `retention_bytes` the oldest of each partition once it is
        larger; both whole segments at a time, and with None nothing. `compact` keeps the last event of each key, and of a deleted key its
        tombstone for `tombstones`. A partition at `bytes_max` does what `overload` says; with
        "buffer" it takes `buffer_bytes` more, for which room is set aside on the disk. What retention
        removes goes to `archive` first, where it is still read. With `retain="until_acked"` what every queue group has
        acknowledged is removed too (see docs/keeping.md).
        """
        settings: TopicSettings = {
            "time": time,
            "lateness": lateness,
            "future_max": future_max,
            "partitions": partitions,
            "durability": durability or self._durability,
            "segment_bytes": segment_bytes,
            "event_bytes_max": event_bytes_max,
            "retention": retention,
            "retention_bytes": retention_bytes,
            "compact": compact,
            "tombstones": tombstones,
            "bytes_max": bytes_max,
            "overload": overload,
            "archive": archive,
            "retain": retain,
            "buffer_bytes": buffer_bytes,
        }
        topic = new_topic(name, schema, key=key, settings=settings, created=self._clock())
        return self._created(topic, exist_ok=exist_ok)

    def alter_topic(
        self,
        name: str,
        *,
        schema: SchemaLike | UnsetType = UNSET,
        lateness: Duration | UnsetType = UNSET,
        future_max: Duration | UnsetType = UNSET,
        event_bytes_max: int | UnsetType = UNSET,
        retention: Duration | UnsetType | None = UNSET,
        retention_bytes: int | UnsetType | None = UNSET,
        compact: bool | UnsetType = UNSET,
        tombstones: Duration | UnsetType = UNSET,
        bytes_max: int | UnsetType | None = UNSET,
        overload: Overload | UnsetType = UNSET,
        archive: str | UnsetType | None = UNSET,
        partitions: int | UnsetType = UNSET,
        retain: Retain | UnsetType = UNSET,
        buffer_bytes: int | UnsetType = UNSET,
    ) -> Topic:
        """Changes the settings that are given and leaves the others as they are.

        A schema may gain nullable columns and wider types; old events are read with nulls. `None` removes a limit, or the
        archive. `partitions` is a multiple of what the topic has; they are added while producers and consumers run, after all
        other changes, and every key keeps its order (see docs/log.md).
        """
        settings = {
            "lateness": lateness,
            "future_max": future_max,
            "event_bytes_max": event_bytes_max,
            "retention": retention,
            "retention_bytes": retention_bytes,
            "compact": compact,
            "tombstones": tombstones,
            "bytes_max": bytes_max,
            "overload": overload,
            "archive": archive,
            "retain": retain,
            "buffer_bytes": buffer_bytes,
        }
        changes = given(settings)
        change = partial(altered_topic, schema=schema, changes=changes)
        if partitions is UNSET:
            return self._store.change(check_name(name), change)
        check_split(self.topic(name), partitions)
        if changes or schema is not UNSET:
            self._store.change(check_name(name), change)
        return self._store.split(check_name(name), partitions)

    def adopt_topic(
        self,
        name: str,
        schema: SchemaLike,
        *,
        key: str | None = None,
        time: str | None = None,
        lateness: Duration = "0 seconds",
        future_max: Duration = FUTURE_MAX,
    ) -> Topic:
        """Gives a topic that another program made on Kafka a schema: its values are read and written as JSON objects."""
        settings: TopicSettings = {
            "time": time,
            "lateness": lateness,
            "future_max": future_max,
            "partitions": 1,
            "durability": self._durability,
            "segment_bytes": SEGMENT_BYTES,
            "event_bytes_max": EVENT_BYTES_MAX,
        }
        columns = to_arrow_schema(schema)
        return self._store.adopt(new_topic(name, columns, key=key, settings=settings, created=self._clock()))

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
        bounds = self._store.bounds([check_name(topic)])
        return {number: range(bound.first, bound.end) for (_, number), bound in bounds.items()}

    def reached(self, topic: str) -> dict[int, int | None]:
        """The greatest event time of each partition in µs, as lateness counts it; None where there is none yet."""
        ends = {number: span.stop for number, span in self.offsets(topic).items()}
        found = {number: self._store.reached(topic, number, offset=end) for number, end in ends.items()}
        return {number: None if time == NO_TIME else time for number, time in found.items()}

    def heartbeat(self, topic: str, time: datetime | str | int, *, idle: Duration = "0 seconds") -> int:
        """Says that event time has come to `time` in every partition of a topic to which nothing was appended for `idle`.

        Whoever waits for events up to then goes on without them; what comes later and is older is late. Returns in how many
        partitions that was news.
        """
        known, time_to = self.topic(topic), time_us(time)
        now = self._clock()
        if known.time is None:
            raise InvalidInput(
                f"Topic {topic!r} has no event time, so it needs no heartbeats.",
                advice="Name its column of event time with time= when it is created.",
            )
        if time_to > now + known.future_us:
            raise InvalidInput(
                f"A heartbeat for topic {topic!r} lies further ahead than its future_max allows.",
                advice="Use an earlier time.",
            )
        before = now + 1 - duration_us(idle)
        return sum(
            self._store.heartbeat(topic, number, time=time_to, appended_before=before)
            for number, reached in self.reached(topic).items()
            if reached is None or reached < time_to
        )

    def offsets_at(self, topic: str, time: datetime | str | int, *, by: TimeKind = "time") -> dict[int, int]:
        """In each partition the first offset at or after a time; the end where there is none."""
        at = time_us(time)
        if by not in ("time", "appended"):
            raise InvalidInput(f"Unknown kind of time: {by!r}.", advice='Use "time" or "appended".')
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
        if atomic:
            with self.transaction() as transaction:
                transaction.append(topic, rows)
            return {partition: span for partition, (span,) in transaction.offsets.get(topic, {}).items()}
        writes, outcomes = self._appender.write(self._appender.place(topic, rows))
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
        self,
        topic: str | Sequence[str],
        *,
        start: Start = "earliest",
        columns: Sequence[str] | None = None,
        missed: Missed = "raise",
    ) -> Reader:
        """Follows one or more topics from a place of its own.

        One that retention overtakes raises `EventsMissed`, or with `missed="skip"` goes on with the first event there is.
        """
        names: list[object] = list(topic) if isinstance(topic, (list, tuple)) else [topic]
        if not names:
            raise InvalidInput("A reader needs at least one topic.", advice="Name one topic, or several.")
        found = [self.topic(check_name(name)).name for name in names]
        return Reader(self._store, found, start=start, columns=columns, missed=missed)

    def consumer(
        self,
        topics: str | Sequence[str] | None = None,
        *,
        group: str,
        pattern: str | None = None,
        start: Start = "earliest",
        commit: CommitMode = "auto",
        poll_interval_s_max: float = POLL_INTERVAL_S_MAX,
        missed: Missed = "raise",
        columns: Sequence[str] | None = None,
    ) -> Consumer:
        """Joins a group, whose members share the partitions of topics, or of every topic whose name matches `pattern`.

        `start` is where the group begins in a partition for which it has committed nothing. A member that does not poll for
        longer than `poll_interval_s_max` loses its partitions to the others.
        """
        names: list[object] = list(topics) if isinstance(topics, (list, tuple)) else [topics] if topics else []
        if bool(names) == (pattern is not None):
            raise InvalidInput(
                "A consumer reads either topics or a pattern of them.", advice='Give topics, or pattern="orders.*".'
            )
        if commit not in ("auto", "manual") or missed not in ("raise", "skip"):
            raise InvalidInput(
                f"commit={commit!r} or missed={missed!r} is not valid.",
                advice='Use commit="auto" or "manual", missed="raise" or "skip".',
            )
        if not poll_interval_s_max > 0:
            raise InvalidInput(
                f"poll_interval_s_max={poll_interval_s_max!r} is not valid.", advice="Use a number of seconds above 0."
            )
        return Consumer(
            self._store,
            [self.topic(check_name(name)).name for name in names],
            pattern=pattern,
            group=check_name(group, of="group"),
            start=start,
            commit=commit,
            poll_interval_s_max=poll_interval_s_max,
            missed=missed,
            columns=columns,
            clock=self._clock,
        )

    def groups(self) -> list[str]:
        """The names of all groups."""
        return self._store.groups()

    def group(self, name: str) -> GroupProgress:
        """A group as it is now: its members and their partitions, committed offsets, lag."""
        return progress_of(self._store, check_name(name, of="group"), now_us=self._clock())

    def reset_group(self, name: str, *, to: Start) -> dict[tuple[str, int], int]:
        """Lets a group begin again elsewhere, in each partition of the topics it has read (or in those that `to` names); its new
        offsets.

        Refused while the group has members that live.
        """
        return reset(self._store, check_name(name, of="group"), to, now_us=self._clock())

    def delete_group(self, name: str) -> None:
        """Forgets a group with all its offsets; refused while it has members that live."""
        self._store.group(check_name(name, of="group"), create=False).remove()

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
        batches = self._batches(topic, schema, starts, ends, from_first=start == "earliest")
        return pa.RecordBatchReader.from_batches(schema, joined(batches, rows_min=_BATCH_EVENTS_MIN))

    def table(self, topic: str, *, as_of: datetime | str | int | None = None) -> pa.Table:
        """The newest row of each key, without those that were deleted; `as_of` an event time."""
        described = self._store.refresh(check_name(topic))
        newest = Newest(described, as_of=None if as_of is None else time_us(as_of))
        for batch in self.scan(topic, columns=newest.columns):
            newest.add(batch)
        return newest.table(self._store)

    def snapshot(self, topic: str, *, follow: str | Sequence[str] | None = None) -> tuple[pa.Table, list[Position]]:
        """The newest row of each key, and the positions from which a reader sees exactly what came after it.

        They are positions in `follow`, or in the topic itself; all ends are taken at one moment, so where a transaction
        appends to both topics, it is in the table or behind the positions, never in both or in neither.
        """
        followed = [topic] if follow is None else [follow] if isinstance(follow, str) else list(follow)
        newest = Newest(self._store.refresh(check_name(topic)), as_of=None)
        bounds = self._store.bounds([self.topic(name).name for name in dict.fromkeys([topic, *followed])])
        ends = {number: bound.end for (name, number), bound in bounds.items() if name == topic}
        for batch in self.scan(topic, end=ends, columns=newest.columns):
            newest.add(batch)
        incarnation = self._store.incarnation()
        places = [
            Position(name, number, bound.end, incarnation)
            for (name, number), bound in bounds.items()
            if name in followed
        ]
        return newest.table(self._store), places

    # Stages

    def stage(self, name: str) -> Stage:
        """A writer that writes each of its batches exactly once; every earlier holder of that stage is refused from now on."""
        return Stage(self._appender, check_name(name, of="stage"))

    def stages(self) -> list[str]:
        """The names of all stages."""
        return self._store.stages()

    # Queues

    def queue(
        self,
        topic: str,
        *,
        group: str = queue_settings.GROUP,
        lease_s: float = queue_settings.LEASE_S,
        deliveries_max: int | None = queue_settings.DELIVERIES,
        order: Order = queue_settings.ORDER,
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
        check_queue_clock(self._clock())
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

    def delete_queue(self, topic: str, *, group: str = queue_settings.GROUP) -> None:
        """Forgets what a group has done of a topic, as if it had never been; refused while consumers of it live.

        Events and dead letters stay. With `retain="until_acked"` nothing is kept for the group any more.
        """
        notes = acks_name(check_name(topic), check_name(group, of="group"))
        try:
            self._store.delete_queue(group, topic)
        except GroupNotFound:
            if notes not in self._store.topics():  # left by a process that was killed in between
                raise
        with suppress(TopicNotFound):
            self._store.delete(notes)

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
        timeout_s: float = queue_settings.REQUEST_TIMEOUT_S,
        reply_topic: str | None = None,
        headers: Mapping[str, bytes] | None = None,
    ) -> Event:
        """Sends an event to a queue and waits for the reply of whoever leases it; `TimedOut`."""
        return send_request(self, topic, value, key=key, timeout_s=timeout_s, reply_topic=reply_topic, headers=headers)

    # Copies

    def mirror(
        self,
        to: Log | str | os.PathLike[str],
        *,
        topics: Sequence[str] | None = None,
        pattern: str | None = None,
        follow: bool = False,
        stop: threading.Event | None = None,
        on_progress: Callable[[Mirrored], None] | None = None,
    ) -> Mirrored:
        """Makes another log equal to this one, offset by offset; with `follow` keeps it so until `stop` is set.

        All topics, those named, or those that match a pattern such as "orders.*", also when they are created later. It
        may be ended and started again at any time. A target that holds other events is refused (`Diverged`).
        """
        from headwater.log.copies.mirror import Mirror, check_apart, chosen_topics

        if isinstance(to, Log):
            mirror = Mirror(self._store, to.store, topics=topics, pattern=pattern)
            return mirror.run(follow=follow, stop=stop, on_progress=on_progress)
        chosen_topics(self._store, topics, pattern)
        check_apart(self.url, os.fspath(to))
        with open_log(to, clock=self._clock) as target:
            return self.mirror(
                target, topics=topics, pattern=pattern, follow=follow, stop=stop, on_progress=on_progress
            )

    def backup(self, to: str | os.PathLike[str], *, on_progress: Callable[[BackedUp], None] | None = None) -> BackedUp:
        """Copies the log to a folder, or to any file system that pyarrow knows by its URL, while others go on writing.

        It is the log as it was at one moment: of each transaction all or nothing. What an earlier backup in the same place
        holds is not copied again. `hw.restore_log` makes a log of it.
        """
        from headwater.log.copies.backup import back_up

        return back_up(self._store, os.fspath(to), clock=self._clock, on_progress=on_progress)

    # Upkeep

    def seal(self, topic: str) -> int:
        """Turns closed segments into standard Arrow files now; it happens by itself a while after they are closed."""
        return self._store.seal(self.topic(topic).name)

    def tidy(self, topic: str) -> int:
        """Removes now what the topic's settings no longer keep, which happens by itself every minute; returns how many events."""
        return self._store.tidy(self.topic(topic).name)

    # The handle

    @property
    def store(self) -> Store:
        """The store below."""
        return self._store

    @property
    def appender(self) -> Appender:
        """What places rows in partitions and writes them, for whatever else than `append` does so."""
        return self._appender

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

    def __repr__(self) -> str:
        return f"Log(url={without_password(self.url)!r}, durability={self._durability!r})"

    def _created(self, topic: Topic, *, exist_ok: bool) -> Topic:
        try:
            return self._store.create(topic)
        except TopicExists:
            if not exist_ok:
                raise
            return self._store.topic(topic.name)

    def _batches(
        self, topic: str, schema: pa.Schema, starts: Mapping[int, int], ends: Mapping[int, int], *, from_first: bool
    ) -> Iterator[pa.RecordBatch]:
        """`from_first`: all that there is was asked for, so what retention takes away meanwhile is not missed."""
        for partition, start in starts.items():
            cursor = self._store.cursor(topic, partition, offset=start)
            end = ends.get(partition, start)  # one that was added since the ends were taken is not asked for
            while cursor.offset < end:
                try:
                    chunks = cursor.read(end, events_max=_SCAN_EVENTS)
                except EventsMissed as error:
                    if not from_first:
                        raise
                    cursor = self._store.cursor(topic, partition, offset=error.last + 1)
                    continue
                for chunk in chunks:
                    yield to_batch_of(chunk, schema)
