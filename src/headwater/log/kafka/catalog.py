"""The catalog of a log on Kafka: what our topics are, as records of one compacted topic, `__headwater.topics`.

The key of a record is a topic's name, its value what a log in a folder writes into a topic's file
(`topic_to_json`), or nothing once the topic was deleted. The topic has one partition, so its records have one order.

Changes are made one at a time, over all processes: who changes something holds the transactional id of the catalog, which
fences everybody who held it before; then it reads to the end, decides, and commits. A commit that comes too late is refused by
the broker, and the change is decided anew. So two changes at once both count.

A topic that is being made is in the catalog, as `begun`, before it is on Kafka: were it the other way round, a creator that dies would
leave a topic without a schema. Whoever finds one that was begun finishes it.

A handle sees every change at its next use: it asks for the catalog's end (one round trip) and reads what is new.

Thread-safety: one lock guards what is known; it is held while the broker is asked.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from headwater.log.kafka.cluster import Cluster
from headwater.log.kafka.reader import Fetcher
from headwater.log.kafka.records import Records
from headwater.log.kafka.writer import Parcel, Transactor
from headwater.log.port.topic import Topic, topic_from_json, topic_to_json
from headwater.model.backoff import Backoff
from headwater.model.errors import Fenced, HeadwaterError, TopicExists, TopicNotFound, Unreachable, Unsupported
from headwater.model.schema import BYTES_SCHEMA

INTERNAL = "__headwater."
FOREIGN = "kafka:"
"""How the id of a topic begins that somebody else made."""
FOREIGN_BYTES_MAX = 8 << 20
FORMAT = 1

_BEGUN = "begun"
_ATTEMPTS_MAX = 30
_CHANGE_AGAIN_S = (0.02, 0.3)
"""The first and the longest pause after another process changed the catalog first."""
_GONE_S = 8.0
_PATIENCE = {"operation_timeout": _GONE_S, "request_timeout": _GONE_S}
_COMPACTED = {
    "cleanup.policy": "compact",
    "segment.bytes": str(16 << 20),
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": str(7 * 24 * 3600 * 1000),
    "max.message.bytes": str(8 << 20),
}


class Catalog:
    """The topics of one log on Kafka."""

    def __init__(self, cluster: Cluster, prefix: str) -> None:
        self._cluster = cluster
        self.records = CompactedTopic(cluster, f"{prefix}{INTERNAL}topics", self._apply)
        self._topics: dict[str, Topic] = {}
        self._begun: set[str] = set()
        self._transactor: Transactor | None = None
        self._changing = threading.Lock()

    def refresh(self) -> None:
        """Reads what is new."""
        self.records.refresh()

    def get(self, name: str) -> Topic | None:
        """One of our topics, as known."""
        return self._topics.get(name)

    def is_begun(self, name: str) -> bool:
        """Whether a topic is being made, or somebody died who made it."""
        return name in self._begun

    def change(
        self, name: str, decide: Callable[[Topic | None], Topic | None], *, begins: bool = False
    ) -> Topic | None:
        """Replaces the record of a topic by what `decide` makes of the present one; None removes it. `begins`: it is yet to be made."""
        backoff = Backoff(*_CHANGE_AGAIN_S, jitter=1.0)
        with self._changing:
            for _ in range(_ATTEMPTS_MAX):
                try:
                    return self._change(name, decide, begins=begins)
                except Fenced:
                    if self._transactor is not None:
                        self._transactor.close()
                        self._transactor = None
                    backoff.sleep()
        raise Unreachable(
            f"Other processes keep changing the catalog of {self._cluster.address.url}.", advice="Try again later."
        )

    def finish(self, name: str, make: Callable[[Topic], None]) -> None:
        """Makes a topic that was begun, by this process or one that may be dead; a topic that Kafka refuses is taken back."""
        topic = self.get(name)
        if topic is None or not self.is_begun(name):
            return

        def settle(after: Topic | None) -> Callable[[Topic | None], Topic | None]:
            def decide(now: Topic | None) -> Topic | None:
                if now is None or now.id != topic.id or not self.is_begun(name):
                    raise _Settled
                return after

            return decide

        with suppress(_Settled):
            try:
                make(topic)
            except HeadwaterError as error:
                if not error.retriable:
                    self.change(name, settle(None))
                raise
            self.change(name, settle(topic))

    def close(self) -> None:
        """Its client ends."""
        with self._changing:
            if self._transactor is not None:
                self._transactor.close()
                self._transactor = None

    def _change(self, name: str, decide: Callable[[Topic | None], Topic | None], *, begins: bool) -> Topic | None:
        self.records.make()
        if self._transactor is None:
            self._transactor = Transactor(self._cluster, self.records.name)
        self._transactor.wait_until_seen()  # a change whose commit nobody saw in time is decided on, not passed over
        self.refresh()
        before = self.get(name)
        after = decide(before)
        if after == before and begins == self.is_begun(name):
            return after
        told = {"format": FORMAT, **({_BEGUN: True} if begins else {})}
        value = None if after is None else json.dumps({**told, **topic_to_json(after)}).encode()
        self._transactor.commit([self.records.parcel([(name.encode(), value)])])
        self._transactor.wait_until_seen()
        self.refresh()
        return after

    def _apply(self, key: bytes, value: bytes | None) -> None:
        name = key.decode()
        self._begun.discard(name)
        if value is None:
            self._topics.pop(name, None)
            return
        fields = msgspec.json.decode(value)
        fields.pop("format")
        if fields.pop(_BEGUN, False):
            self._begun.add(name)
        self._topics[name] = topic_from_json(fields)


class _Settled(Exception):
    """Somebody else has finished a topic that was begun, or removed it."""


class ProducerSequences:
    """The last sequence numbers of named producers, as records of the compacted topic `__headwater.producers`.

    They are written in the transaction that stores the events they count, so neither is there without the other. A key is the
    producer's id, the topic's id and the partition.

    All producers share the topic, and a transaction that one of them holds open keeps readers before it. So whoever takes a
    producer's name commits a record that says nothing (its key is the producer's id), and reads when that is seen: then all
    that earlier holders of the name have committed is seen, too.
    """

    def __init__(self, cluster: Cluster, prefix: str) -> None:
        self.records = CompactedTopic(cluster, f"{prefix}{INTERNAL}producers", self._apply)
        self._last: dict[bytes, int] = {}

    def last(self, producer: bytes, topic_id: str, partition: int) -> int | None:
        """The last number of a producer in a partition, as known."""
        return self._last.get(_sequence_key(producer, topic_id, partition))

    def taken(self, producer: bytes) -> Parcel:
        """The record by which whoever takes a name sees how far readers are."""
        return self.records.parcel([(producer.hex().encode(), None)])

    def parcel(self, producer: bytes, topic_id: str, partition: int, sequence: int) -> Parcel:
        """The record that says so, to be stored together with the events."""
        return self.records.parcel([(_sequence_key(producer, topic_id, partition), b"%d" % sequence)])

    def note(self, producer: bytes, topic_id: str, partition: int, sequence: int) -> None:
        """What was just committed by the only one who may; it need not be read back."""
        self._last[_sequence_key(producer, topic_id, partition)] = sequence

    def _apply(self, key: bytes, value: bytes | None) -> None:
        if value is not None:
            self._last[key] = max(int(value), self._last.get(key, -1))


class CompactedTopic:
    """A topic of one partition of which only the last record of each key counts; read from its beginning, then followed."""

    def __init__(self, cluster: Cluster, name: str, apply: Callable[[bytes, bytes | None], None]) -> None:
        self.name = name
        self._cluster = cluster
        self._apply = apply
        self._lock = threading.Lock()
        self._exists = False
        self._position = 0
        self._described = _bytes_topic(name, name, partitions=1, segment_bytes=1 << 20, event_bytes_max=1 << 20)

    @property
    def exists(self) -> bool:
        """Whether the topic was seen on the cluster."""
        return self._exists

    def is_behind(self, end: int) -> bool:
        """Whether there is something to read before an end of the topic."""
        return end > self._position

    def make(self) -> None:
        """Sees to it that the topic is there."""
        if self._exists:
            return
        if not self._cluster.list_topics(self.name):
            make_topic(self._cluster, self.name, partitions=1, settings=_COMPACTED, exist_ok=True)
        self._exists = True

    def parcel(self, pairs: list[tuple[bytes, bytes | None]]) -> Parcel:
        """Records on their way into the topic."""
        records = Records([key for key, _ in pairs], [value for _, value in pairs], None)
        return Parcel(self.name, self.name, 1, 0, records)

    def refresh(self) -> None:
        """Applies every record that is new."""
        with self._lock:
            if not self._exists:
                self._exists = self.name in self._cluster.list_topics(self.name)
                if not self._exists:
                    return
            try:
                [end] = self._cluster.offsets([(self.name, 0)], -1)
            except TopicNotFound:
                return
            if end > self._position:
                self._read_to(end)

    def _read_to(self, end: int) -> None:
        [first] = self._cluster.offsets([(self.name, 0)], -2)
        position = max(first, self._position)
        fetchers = self._cluster.fetchers
        while position < end:
            fetcher: Fetcher = fetchers.take(self._described, self.name, 0, position)
            events, position = fetcher.read(end, 10_000)
            fetchers.give_back(fetcher)
            for event in events:
                self._apply(event.key() or b"", event.value())
        self._position = position


def topic_settings(topic: Topic) -> dict[str, str]:
    """A topic's settings as Kafka calls them: the broker's clock, room for an event as JSON, what is kept; refuses what it cannot do."""
    if topic.archive is not None:
        raise Unsupported(
            f"Topic {topic.name!r} cannot have an archive on Kafka.", advice="Use the brokers' own tiered storage."
        )
    if topic.bytes_max is not None or topic.overload == "buffer":
        raise Unsupported(
            f"Topic {topic.name!r} cannot have bytes_max= or overload='buffer' on Kafka.",
            advice="Use retention_bytes=, or quotas.",
        )
    if topic.retain != "all":
        raise Unsupported(
            f"Topic {topic.name!r} cannot have retain={topic.retain!r} on Kafka, whose brokers do not know what queues have acknowledged.",
            advice="Use retention=.",
        )
    room = min(2 * topic.event_bytes_max + (1 << 20), 90_000_000)
    return {
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(room),
        "retention.ms": "-1" if topic.retention_us is None else str(topic.retention_us // 1000),
        "retention.bytes": "-1" if topic.retention_bytes is None else str(topic.retention_bytes),
        "cleanup.policy": "compact" if topic.compact else "delete",
        "delete.retention.ms": str(topic.tombstones_us // 1000),
    }


def make_topic(
    cluster: Cluster, name: str, *, partitions: int, settings: dict[str, str], exist_ok: bool = False
) -> None:
    """Makes a topic on the cluster; `TopicExists`."""
    topic = cluster.admin_library.NewTopic(name, partitions, -1, config=settings)
    try:
        _done(cluster, cluster.admin.create_topics([topic], **_PATIENCE)[name], f"make topic {name!r}")
    except TopicExists:
        if not exist_ok:
            raise


def alter_topic(cluster: Cluster, name: str, settings: dict[str, str]) -> None:
    """Changes settings of a topic on the cluster."""
    admin = cluster.admin_library
    entries = [admin.ConfigEntry(n, v, incremental_operation=admin.AlterConfigOpType.SET) for n, v in settings.items()]
    resource = admin.ConfigResource(admin.ConfigResource.Type.TOPIC, name, incremental_configs=entries)
    futures = cluster.admin.incremental_alter_configs([resource], request_timeout=_PATIENCE["request_timeout"])
    _done(cluster, futures[resource], f"alter topic {name!r}")


def remove_topic(cluster: Cluster, name: str) -> None:
    """Removes a topic from the cluster, and returns when it is gone."""
    _done(cluster, cluster.admin.delete_topics([name], **_PATIENCE)[name], f"delete topic {name!r}")
    deadline = time.monotonic() + _GONE_S
    while cluster.list_topics(name) and time.monotonic() < deadline:
        time.sleep(0.005)


def _done(cluster: Cluster, future: Any, what: str) -> None:
    try:
        future.result(_GONE_S + 1)
    except cluster.kafka.KafkaException as caught:
        raise cluster.as_ours(caught.args[0], what=what) from None


def _sequence_key(producer: bytes, topic_id: str, partition: int) -> bytes:
    return f"{producer.hex()}/{topic_id}/{partition}".encode()


def foreign_topic(name: str, partitions: int) -> Topic:
    """A topic that somebody else made, read as bytes."""
    return _bytes_topic(
        name, FOREIGN + name, partitions=partitions, segment_bytes=1 << 30, event_bytes_max=FOREIGN_BYTES_MAX
    )


def _bytes_topic(name: str, topic_id: str, *, partitions: int, segment_bytes: int, event_bytes_max: int) -> Topic:
    return Topic(
        name=name,
        id=topic_id,
        schemas=(BYTES_SCHEMA,),
        has_schema=False,
        key="key",
        time=None,
        lateness_us=0,
        future_us=0,
        partitions=partitions,
        durability="fsync",
        segment_bytes=segment_bytes,
        event_bytes_max=event_bytes_max,
        created=0,
    )
