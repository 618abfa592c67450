"""Settings of a topic as users give them, and the topic that they make."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
import pyarrow as pa
from msgspec import UNSET, UnsetType

from headwater.log.arrow.placement import key_bytes
from headwater.log.port.topic import Topic, TopicSettings, check_name, check_topic
from headwater.model.clock import duration_us
from headwater.model.errors import InvalidInput
from headwater.model.schema import BYTES_SCHEMA, SchemaLike, to_arrow_schema, widen

_IN_MICROSECONDS = {
    "lateness": "lateness_us",
    "future_max": "future_us",
    "tombstones": "tombstones_us",
    "retention": "retention_us",
}
"""The settings that are durations, and the topic's names for them."""


def new_topic(name: str, schema: SchemaLike | None, *, key: str | None, settings: TopicSettings, created: int) -> Topic:
    """A topic that is yet to be made. Without a schema its events are bytes, with an optional key of bytes."""
    if schema is None and (key not in (None, "key") or settings.get("time") is not None):
        raise InvalidInput(
            f"Topic {name!r} has no schema, so it has no columns to be key or time.",
            advice='Give it a schema, such as schema="id STRING, at TIMESTAMP".',
        )
    columns = BYTES_SCHEMA if schema is None else to_arrow_schema(schema)
    if schema is not None and key in columns.names:
        key_bytes(pa.nulls(0, columns.field(key).type))
    return check_topic(
        Topic(
            name=check_name(name),
            id=uuid.uuid4().hex,
            schemas=(columns,),
            has_schema=schema is not None,
            key="key" if schema is None else key,
            created=created,
            **_fields(settings),
        )
    )


def altered_topic(topic: Topic, *, schema: SchemaLike | UnsetType, changes: Mapping[str, Any]) -> Topic:
    """The topic with what `given` has found, and with wider columns unless the schema is UNSET."""
    wider = {} if isinstance(schema, UnsetType) else {"schemas": _wider(topic, schema)}
    return check_topic(msgspec.structs.replace(topic, **changes, **wider))


def given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not UNSET, by the topic's names for them."""
    return _fields({setting: value for setting, value in settings.items() if value is not UNSET})


def _fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as the topic has them: durations in microseconds, None where there is no limit."""
    fields = {}
    for setting, value in settings.items():
        if setting in _IN_MICROSECONDS:
            fields[_IN_MICROSECONDS[setting]] = None if value is None else duration_us(value)
        else:
            fields[setting] = value
    return fields


def _wider(topic: Topic, schema: SchemaLike) -> tuple[pa.Schema, ...]:
    if not topic.has_schema:
        raise InvalidInput(
            f"Topic {topic.name!r} carries bytes and cannot get a schema.", advice="Create another topic."
        )
    wider = widen(topic.schema, to_arrow_schema(schema), key=topic.key)
    return topic.schemas if wider == topic.schema else (*topic.schemas, wider)
