"""One event with headers on its way to a topic: what `Queue.send`, requests, replies and dead letters have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headwater.log.arrow.placement import partitions_of
from headwater.log.arrow.rows import check_size, to_batch
from headwater.log.port.store import Write
from headwater.log.port.topic import Topic
from headwater.model.event import Event
from headwater.model.position import Position

if TYPE_CHECKING:
    from headwater.log.log import Log


def send_event(
    log: Log, topic: str, value: Any, *, key: Any, headers: Mapping[str, bytes], spread_by: str | None = None
) -> Position:
    """Appends one event and says where it stands. One without a key goes where `spread_by` hashes to."""
    described = log.store.topic(topic)
    row = row_of(described, key, value, headers)
    if spread_by is not None and (described.key is None or row.get(described.key) is None):
        # By the first number of partitions: where an id was once is where its duplicates are looked for.
        number = int(partitions_of(pa.array([spread_by.encode("utf-8")], pa.binary()), described.partitions_first)[0])
        batch = to_batch([row], described.schema)
        check_size(batch, described)
        (outcome,) = log._write([Write(described, number, batch)])[1]
        if isinstance(outcome, Exception):
            raise outcome
        return Position(topic, number, outcome.start, log.store.incarnation())
    ((number, span),) = log.append(topic, [row]).items()
    return Position(topic, number, span.start, log.store.incarnation())


def row_of(topic: Topic, key: Any, value: Any, headers: Mapping[str, bytes] | None) -> dict[str, Any]:
    """A row to append; a value of None says that the key was deleted."""
    if not topic.has_schema:
        row = {"key": key, "value": value}
    elif value is None:
        row = {"_deleted": True} if topic.key is None else {topic.key: key, "_deleted": True}
    else:
        row = dict(value)
        if key is not None and topic.key is not None:
            row[topic.key] = key
    return row | {"_headers": dict(headers)} if headers else row


def row_again(topic: Topic, event: Event, headers: Mapping[str, bytes]) -> dict[str, Any]:
    """An event as a row of another topic of the same columns."""
    return row_of(topic, event.key if event.value is None or not topic.has_schema else None, event.value, headers)
