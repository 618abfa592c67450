"""The share group behind a queue on Kafka: its settings on the brokers, and what our queues are.

The group of the queue `group` on `topic` is `<prefix><topic>/<group>`; no name holds a slash, so no two queues share one. What
a queue is (and how far its dead letters were sent back) is a record of the compacted topic `<prefix>__headwater.queues`,
readable as JSON; the last one counts. A topic that was made anew has a new id and so a new record.

What Kafka sets by itself would break our promises: a group begins at the end of its topic, and is given what transactions roll
back. So a handle that leases first sets the group right: `earliest`, `read_committed`, its lease, and the highest delivery limit
that the brokers allow, since an event that reaches that limit is dropped by the broker without a word.

Thread-safety: may be used by many threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.log.kafka.catalog import FORMAT, INTERNAL, CompactedTopic
from headwater.log.kafka.cluster import Cluster
from headwater.log.port.lease_engine import QueueFeatures, QueueSettings
from headwater.log.port.topic import Topic
from headwater.model.errors import InvalidInput, Unsupported

LIMITS = ("25", "10")
LOCKS = ("10000", "4000")
"""Delivery limits, and how many events may follow one that is out, to ask for: the highest that brokers can be set up to
allow, and the highest they allow by default."""

SHARE_FEATURES = QueueFeatures(
    store="Kafka",
    missing={
        "order='key'": (
            "no share group orders events by key",
            "Read with a consumer group: log.consumer(…) keeps the order of each key.",
        ),
        "order='sticky'": (
            "no share group keeps a key with one consumer",
            "Read with a consumer group: log.consumer(…).",
        ),
        "duplicates_s=": (
            "no share group remembers ids",
            "Use a named producer (id=), which stores a retried event once.",
        ),
        "where=": ("no share group selects events", "Use a topic for each kind of event."),
        "deliveries_max=None": (
            "no share group delivers an event without a limit",
            "Give a limit below the brokers' group.share.max.delivery.count.limit.",
        ),
        "nack(delay_s=…)": (
            "no share group delays an event that is given back",
            "Give it back without a delay, or append it again later.",
        ),
        "send(delay_s=…) and send(at=…)": (
            "no share group delivers an event at a given time",
            "Append the event when it is due.",
        ),
        "extend": (
            "this client of Kafka cannot extend a lease",
            "Use a longer lease_s= (up to 60 s unless the brokers allow more).",
        ),
        "defer": (
            "no share group sets events aside",
            "Append the event to a topic of its own and acknowledge it.",
        ),
        "recall": (
            "no share group sets events aside",
            "Append the event to a topic of its own and acknowledge it.",
        ),
        "browse": (
            "no share group shows the events that wait",
            "Read the topic. `kafka-share-groups.sh --describe` shows the group's place.",
        ),
        "depth": (
            "this client of Kafka cannot count the events that wait",
            "Run `kafka-share-groups.sh --describe --offsets`.",
        ),
        "floors": (
            "this client of Kafka cannot read the place of a share group",
            "Run `kafka-share-groups.sh --describe --offsets`.",
        ),
        "seek": (
            "this client of Kafka cannot move a share group",
            "Run `kafka-share-groups.sh --reset-offsets`, or use another group.",
        ),
        "tx.ack": (
            "no share group takes part in a transaction",
            "Acknowledge after the transaction, and make what it appends idempotent.",
        ),
    },
)
"""What share groups, or their client for Python, cannot do, and what to do instead."""

_SHOWS_SHARES = "share.auto.offset.reset"
_LIMIT = "share.delivery.count.limit"
_ANSWER_S = 8.0


class QueueRecords:
    """What our queues on Kafka are."""

    def __init__(self, cluster: Cluster, prefix: str) -> None:
        self._cluster = cluster
        self._records = CompactedTopic(cluster, f"{prefix}{INTERNAL}queues", self._apply)
        self._made: dict[str, dict[str, Any]] = {}

    def all(self) -> list[dict[str, Any]]:
        """Every queue that somebody has opened."""
        self._records.refresh()
        return [self._made[key] for key in sorted(self._made)]

    def get(self, topic: str, group: str) -> dict[str, Any] | None:
        """One of them as it is now."""
        self._records.refresh()
        return self._made.get(_key(topic, group))

    def put(self, made: dict[str, Any]) -> None:
        """Says what a queue is."""
        self._records.make()
        value = json.dumps({"format": FORMAT, **made}).encode()
        parcel = self._records.parcel([(_key(made["topic"], made["group"]).encode(), value)])
        self._cluster.writer.send(parcel).result()

    def _apply(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            self._made.pop(key.decode(), None)
            return
        made = json.loads(value)
        made.pop("format")
        self._made[key.decode()] = made


class ShareGroup:
    """The share group of one queue: its settings, and how far its dead letters were sent back."""

    def __init__(
        self, cluster: Cluster, records: QueueRecords, *, topic: Topic, physical: str, group: str, writable: bool
    ) -> None:
        self.writable = writable
        self.cluster = cluster
        self.records = records
        self.topic = topic
        self.physical = physical
        self.id = _key(physical, group)
        self._group = group
        self._is_ready = False
        if _SHOWS_SHARES not in self._described():
            raise no_share_groups(cluster)

    def settings(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """What the queue is: as it was made, or as wanted if it is new."""
        found = self.records.get(self.topic.name, self._group)
        if found is not None and found["topic_id"] == wanted["topic_id"]:
            return found
        if self.writable:
            self.records.put(wanted)
        return wanted

    def places(self, topic_id: str) -> dict[int, int]:
        made = self.records.get(self.topic.name, self._group) or {}
        noted = made.get("sent_back", {})
        return {int(number): at for number, at in noted.get("to", {}).items()} if noted.get("id") == topic_id else {}

    def note(self, topic_id: str, places: Mapping[int, int]) -> None:
        noted = self.places(topic_id) | dict(places)
        made = self.records.get(self.topic.name, self._group)
        assert made is not None
        self.records.put(made | {"sent_back": {"id": topic_id, "to": {str(n): at for n, at in noted.items()}}})

    def prepare(self, settings: QueueSettings) -> None:
        """Sets the group right before anybody is a member; the lease of the last handle to do so counts for all of them."""
        if self._is_ready:
            return
        now = self._described()
        self._set(now, "share.auto.offset.reset", "earliest")
        self._set(now, "share.isolation.level", "read_committed")
        self._set(now, "share.record.lock.duration.ms", str(max(1, settings.lease_us // 1000)))
        if "share.assignment.interval.ms" in now:
            self._set(now, "share.assignment.interval.ms", "0")
        self._raise(now, _LIMIT, LIMITS)
        self._raise(now, "share.partition.max.record.locks", LOCKS)
        self._check_limit(int(self._described().get(_LIMIT, 5)), settings)
        self._is_ready = True

    def _raise(self, now: dict[str, str], name: str, values: Sequence[str]) -> None:
        """Sets what older brokers do not know as high as these allow."""
        for value in values if name in now else ():
            if int(now[name]) >= int(value) or self._set(now, name, value, is_needed=False):
                return

    def _check_limit(self, limit: int, settings: QueueSettings) -> None:
        assert settings.deliveries_max is not None
        if settings.deliveries_max >= limit:
            raise Unsupported(
                f"The brokers drop an event after {limit} deliveries, so deliveries_max={settings.deliveries_max} "
                "would lose it before it becomes a dead letter.",
                advice=f"Use deliveries_max={limit - 1} or less, or raise group.share.max.delivery.count.limit.",
            )

    def _described(self) -> dict[str, str]:
        """The settings of the group."""
        admin = self.cluster.admin_library
        resource = admin.ConfigResource(admin.ConfigResource.Type.GROUP, self.id)
        code = self.cluster.kafka.KafkaError
        try:
            future = self.cluster.admin.describe_configs([resource], request_timeout=_ANSWER_S)[resource]
            return {name: entry.value for name, entry in future.result(_ANSWER_S + 1).items()}
        except self.cluster.kafka.KafkaException as caught:
            error = caught.args[0]
            if error.code() in (code.INVALID_REQUEST, code.UNSUPPORTED_VERSION, code.INVALID_CONFIG):
                return {}
            raise self.cluster.as_ours(error, what=f"describe group {self.id!r}") from None

    def _set(self, now: dict[str, str], name: str, value: str, *, is_needed: bool = True) -> bool:
        """Changes one setting of the group unless it is so; False where the brokers do not allow the value."""
        if now.get(name) == value:
            return True
        admin = self.cluster.admin_library
        entry = admin.ConfigEntry(name, value, incremental_operation=admin.AlterConfigOpType.SET)
        resource = admin.ConfigResource(admin.ConfigResource.Type.GROUP, self.id, incremental_configs=[entry])
        try:
            futures = self.cluster.admin.incremental_alter_configs([resource], request_timeout=_ANSWER_S)
            futures[resource].result(_ANSWER_S + 1)
        except self.cluster.kafka.KafkaException as caught:
            error = caught.args[0]
            if error.code() != self.cluster.kafka.KafkaError.INVALID_CONFIG:
                raise self.cluster.as_ours(error, what=f"alter group {self.id!r}") from None
            if is_needed:
                raise InvalidInput(
                    f"The brokers do not allow {name}={value}: {error.str()}.",
                    advice="Choose another lease_s= (15 to 60 s, unless the brokers say otherwise).",
                ) from None
            return False
        return True


def no_share_groups(cluster: Cluster) -> Unsupported:
    """The brokers are too old, or share groups are switched off."""
    return Unsupported(
        f"The brokers of {cluster.address.url} do not support share groups, which queues on Kafka need.",
        advice="Use Kafka 4.2 or newer with the feature share.version=1, or a file:// log.",
    )


def _key(topic: str, group: str) -> str:
    return f"{topic}/{group}"
