"""The topics of a log as users see them: made, altered, adopted, deleted, and what offsets they hold."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import UNSET, UnsetType

from headwater.log.arrow.placement import key_bytes
from headwater.log.port.split import check_split
from headwater.log.port.store import Store, TimeKind
from headwater.log.port.topic import (
    BUFFER_BYTES,
    Durability,
    Overload,
    Retain,
    Topic,
    check_name,
    check_topic,
)
from headwater.model.clock import NO_TIME, Clock, Duration, duration_us, time_us
from headwater.model.errors import InvalidInput, TopicExists
from headwater.model.schema import BYTES_SCHEMA, SchemaLike, to_arrow_schema, widen

SEGMENT_BYTES = 64 << 20
EVENT_BYTES_MAX = 8 << 20
PARTITIONS = 4
FUTURE_MAX = "1 day"
TOMBSTONES = "1 day"


class LogTopics:
    """The part of a log that is about its topics."""

    def __init__(self, store: Store, durability: Durability, clock: Clock) -> None:
        self._store = store
        self._durability = durability
        self._clock = clock

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
                retention_us=None if retention is None else duration_us(retention),
                retention_bytes=retention_bytes,
                compact=compact,
                tombstones_us=duration_us(tombstones),
                bytes_max=bytes_max,
                overload=overload,
                archive=archive,
                retain=retain,
                buffer_bytes=buffer_bytes,
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
        plain = {
            "event_bytes_max": event_bytes_max,
            "retention_bytes": retention_bytes,
            "compact": compact,
            "bytes_max": bytes_max,
            "overload": overload,
            "archive": archive,
            "retain": retain,
            "buffer_bytes": buffer_bytes,
        }
        durations = {
            "lateness_us": lateness,
            "future_us": future_max,
            "tombstones_us": tombstones,
            "retention_us": retention,
        }
        changes: dict[str, Any] = {setting: value for setting, value in plain.items() if value is not UNSET}
        changes |= {
            setting: None if value is None else duration_us(value)
            for setting, value in durations.items()
            if value is not UNSET
        }

        def change(topic: Topic) -> Topic:
            wider = {} if schema is UNSET else {"schemas": _wider(topic, schema)}
            return check_topic(msgspec.structs.replace(topic, **changes, **wider))

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
        columns = to_arrow_schema(schema)
        if key in columns.names:
            key_bytes(pa.nulls(0, columns.field(key).type))
        topic = Topic(
            name=check_name(name),
            id=uuid.uuid4().hex,
            schemas=(columns,),
            has_schema=True,
            key=key,
            time=time,
            lateness_us=duration_us(lateness),
            future_us=duration_us(future_max),
            partitions=1,
            durability=self._durability,
            segment_bytes=SEGMENT_BYTES,
            event_bytes_max=EVENT_BYTES_MAX,
            created=self._clock(),
        )
        return self._store.adopt(check_topic(topic))

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
                advice="Use a time that has come.",
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
            raise InvalidInput(f"There is no time of the kind {by!r}.", advice='Use "time" or "appended".')
        return {
            number: self._store.offset_at(topic, number, time=at, by=by)
            for number in range(self.topic(topic).partitions)
        }


def _wider(topic: Topic, schema: SchemaLike) -> tuple[pa.Schema, ...]:
    if not topic.has_schema:
        raise InvalidInput(
            f"Topic {topic.name!r} carries bytes and cannot get a schema.", advice="Create another topic."
        )
    wider = widen(topic.schema, to_arrow_schema(schema), key=topic.key)
    return topic.schemas if wider == topic.schema else (*topic.schemas, wider)
