"""A topic: a named, partitioned sequence of events with one schema."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, Literal, TypedDict, get_args

import msgspec
import pyarrow as pa

from headwater.model.clock import Duration
from headwater.model.ddl import schema_from_json, schema_to_json, type_to_ddl
from headwater.model.errors import FormatTooNew, InvalidInput, InvalidName, TopicNotFound, Unsupported

Durability = Literal["fsync", "os"]
Overload = Literal["block", "buffer", "drop_oldest", "reject"]
Retain = Literal["all", "until_acked"]


class TopicSettings(TypedDict, total=False):
    """What a topic can be told beside its schema and key, as keyword arguments of `log.create_topic`, which has the defaults."""

    time: str | None
    lateness: Duration
    future_max: Duration
    partitions: int
    durability: Durability | None
    segment_bytes: int
    event_bytes_max: int
    retention: Duration | None
    retention_bytes: int | None
    compact: bool
    tombstones: Duration
    bytes_max: int | None
    overload: Overload
    archive: str | None
    retain: Retain
    buffer_bytes: int


PARTITIONS = 4
SEGMENT_BYTES = 64 << 20
EVENT_BYTES_MAX = 8 << 20
FUTURE_MAX = "1 day"
TOMBSTONES = "1 day"
BUFFER_BYTES = 64 << 20

NAME_CHARACTERS_MAX = 200
PARTITIONS_MAX = 4096
TOMBSTONES_US = 86_400_000_000

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class Split(msgspec.Struct, frozen=True):
    """A moment at which a topic got more partitions: how many it had before, and where each of them ended (the fences).

    With `n` before and `k * n` after, the keys of partition `p` go to `p`, `p + n`, `p + 2n` … from then on. So each new
    partition has one parent, and all that its keys had before lies in the parent below the fence.
    """

    partitions: int
    fences: tuple[int, ...]


class Topic(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A topic as it was created and altered. `schemas` holds every version; the last one is in force.

    The settings with a default came later: a topic's file may lack them. What follows from the settings alone, and every append wants
    to know, is found once.
    """

    name: str
    id: str
    schemas: tuple[pa.Schema, ...]
    has_schema: bool
    key: str | None
    time: str | None
    lateness_us: int
    future_us: int
    partitions: int
    durability: Durability
    segment_bytes: int
    event_bytes_max: int
    created: int
    retention_us: int | None = None
    retention_bytes: int | None = None
    compact: bool = False
    tombstones_us: int = TOMBSTONES_US
    bytes_max: int | None = None
    overload: Overload = "block"
    archive: str | None = None
    splits: tuple[Split, ...] = ()
    retain: Retain = "all"
    buffer_bytes: int = BUFFER_BYTES

    def __repr__(self) -> str:
        columns = ", ".join(f"{field.name} {type_to_ddl(field.type)}" for field in self.schema)
        roles = f"key={self.key!r}, time={self.time!r}, partitions={self.partitions}"
        return f"Topic(name={self.name!r}, schema={columns!r}, {roles})"

    @cached_property
    def generation(self) -> int:
        """How often partitions were added: who places events by another generation's number is refused."""
        return len(self.splits)

    @property
    def partitions_first(self) -> int:
        """How many partitions it was created with."""
        return self.splits[0].partitions if self.splits else self.partitions

    def ancestors(self, number: int) -> tuple[tuple[int, int], ...]:
        """The parent of a partition and the fence in it, then the parent's, and so on; none of one that was created with it.

        A partition's ancestors never change, however often the topic is split later.
        """
        found = []
        for split in reversed(self.splits):
            if number >= split.partitions:
                number %= split.partitions
                found.append((number, split.fences[number]))
        return tuple(found)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of an event, as they are now."""
        return self.schemas[-1]

    @cached_property
    def is_kept_small(self) -> bool:
        """Whether it is to be looked after: something is to be removed from it, or room set aside for it."""
        limits = (self.retention_us, self.retention_bytes)
        is_asked_for = self.compact or self.retain == "until_acked" or self.overload == "buffer"
        return is_asked_for or limits != (None, None)

    @cached_property
    def is_limited(self) -> bool:
        """Whether an append looks at the room that is left. Elsewhere a full disk is the only limit, and refuses."""
        return self.bytes_max is not None or self.overload != "block"

    @cached_property
    def schema_id(self) -> int:
        """The number of the present schema."""
        return len(self.schemas) - 1


def check_name(name: object, *, of: str = "topic") -> str:
    """The name itself if a topic (or a group) may have it: letters, digits, `.`, `_` and `-`, as in Kafka."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > NAME_CHARACTERS_MAX:
        shown = name if isinstance(name, str) and len(name) <= 60 else f"{str(name)[:60]}…"
        raise InvalidName(
            f"{shown!r} cannot be a {of}'s name.",
            advice=f"Use up to {NAME_CHARACTERS_MAX} letters, digits, '.', '_' and '-', not starting with '.' or '-'.",
        )
    return name


def check_topic(topic: Topic) -> Topic:
    """The topic itself if its settings fit together."""
    check_name(topic.name)
    if not _is_whole(topic.partitions, 1, PARTITIONS_MAX):
        raise InvalidInput(
            f"Topic {topic.name!r} cannot have {topic.partitions!r} partitions.", advice=f"Use 1 to {PARTITIONS_MAX}."
        )
    for role, column in (("key", topic.key), ("time", topic.time)):
        if column is not None and column not in topic.schema.names:
            raise InvalidInput(
                f"Topic {topic.name!r} has no column {column!r} to be its {role}.",
                advice=f"Its columns are {', '.join(topic.schema.names)}.",
            )
    if topic.time is not None and not pa.types.is_timestamp(topic.schema.field(topic.time).type):
        raise InvalidInput(
            f"Column {topic.time!r} of topic {topic.name!r} is {topic.schema.field(topic.time).type}, not a time.",
            advice="Declare it as TIMESTAMP.",
        )
    if topic.compact and topic.key is None:
        raise InvalidInput(
            f"Topic {topic.name!r} has no key, so it cannot keep the last event of each key.",
            advice="Create it with key=…, or without compact.",
        )
    durations = {"lateness": topic.lateness_us, "future_max": topic.future_us, "tombstones": topic.tombstones_us}
    for name, duration in durations.items():
        if duration < 0:
            raise InvalidInput(f"A {name} of {duration} µs is not valid.", advice="Use a duration of zero or more.")
    if topic.overload not in get_args(Overload) or (topic.compact and topic.overload == "drop_oldest"):
        raise InvalidInput(
            f"overload={topic.overload!r} does not fit topic {topic.name!r}.",
            advice='Use "block" (the default), "buffer", "reject", or "drop_oldest" for a topic that is not compacted.',
        )
    if topic.retain not in get_args(Retain) or (topic.compact and topic.retain == "until_acked"):
        raise InvalidInput(
            f"retain={topic.retain!r} does not fit topic {topic.name!r}.",
            advice='Use "all" (the default), or "until_acked" for a topic that is not compacted.',
        )
    limits = {"retention": topic.retention_us, "retention_bytes": topic.retention_bytes, "bytes_max": topic.bytes_max}
    limits["buffer_bytes"] = topic.buffer_bytes
    for setting, limit in limits.items():
        if limit is not None and not _is_whole(limit, 1, 1 << 62):
            raise InvalidInput(
                f"{setting}={limit!r} of topic {topic.name!r} would keep nothing.",
                advice="Use more than zero, or leave it out for no limit.",
            )
    if topic.durability not in ("fsync", "os"):
        raise InvalidInput(
            f"Unknown durability {topic.durability!r}.", advice='Use "fsync" (the default) or "os" (faster, unsafe).'
        )
    if not _is_whole(topic.event_bytes_max, 1, 1 << 30):
        raise InvalidInput(
            f"event_bytes_max={topic.event_bytes_max!r} is out of range.", advice="Use a number of bytes up to 1 GiB."
        )
    if not _is_whole(topic.segment_bytes, 4096, 1 << 40):
        raise InvalidInput(f"segment_bytes={topic.segment_bytes!r} is out of range.", advice="Use 4096 or more.")
    return topic


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def no_foreign_topics(url: str) -> Unsupported:
    """The refusal to adopt a topic where every topic is ours."""
    return Unsupported(f"{url} has no topics that others made.", advice="Create the topic with log.create_topic(…).")


def made_anew(name: str) -> TopicNotFound:
    """The topic that a handle knows is gone, though there is one of its name."""
    return TopicNotFound(f"Topic {name!r} was deleted and created again.", advice="Open another reader or producer.")


def topic_to_json(topic: Topic) -> dict[str, Any]:
    """The topic as its file holds it."""
    fields = {name: getattr(topic, name) for name in topic.__struct_fields__ if name != "splits"}
    fields["schemas"] = [schema_to_json(schema) for schema in topic.schemas]
    if topic.splits:  # an older Headwater reads a topic that was never split, and refuses one that was
        fields["splits"] = [{"partitions": split.partitions, "fences": list(split.fences)} for split in topic.splits]
    return fields


def topic_from_json(fields: dict[str, Any]) -> Topic:
    """The topic from its file; settings it lacks have their default, and those of a later Headwater are not passed over."""
    unknown = sorted(set(fields) - set(Topic.__struct_fields__))
    if unknown:
        raise FormatTooNew(
            f"Topic {fields.get('name')!r} has settings that this Headwater does not know: {', '.join(unknown)}.",
            advice="Upgrade Headwater.",
        )
    schemas = tuple(schema_from_json(schema) for schema in fields["schemas"])
    splits = tuple(Split(split["partitions"], tuple(split["fences"])) for split in fields.get("splits", ()))
    return Topic(**(fields | {"schemas": schemas, "splits": splits}))
