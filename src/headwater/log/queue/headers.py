"""Reserved headers: how an event tells the queues what to do with it, and how it is sent with them.

    _deliver_at     not before that time (microseconds since 1970, as digits)
    _delay          beside that: not before that time of the steady clock of that boot, and how long the delay was (microseconds)
    _id             an event with an id that was there less than `duplicates_s` before is not delivered
    _group          only the queue group of that name is given the event (dead letters, and those sent back)
    _dead_…         on a dead letter: reason, topic, partition, offset, deliveries, at
    _correlation, _reply_to, _deadline    on a request: what to answer, where, and until when

Functions work on whole chunks; a chunk without headers costs nothing. The duplicate window looks at one id after the other, in
Python: only queues that ask for it pay, and only for events with an id.

Thread-safety: `Ids` is used under the partition's queue lock, the functions by anybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.log.arrow.placement import key_bytes, murmur2, partitions_of
from headwater.log.arrow.rows import check_size, to_batch
from headwater.log.port.chunk import Chunk
from headwater.log.port.store import Store
from headwater.log.port.topic import Topic
from headwater.log.port.write import Write
from headwater.log.queue.queue_log import QueueLog
from headwater.log.queue.settings import check_delay
from headwater.log.queue.window import FAR_US
from headwater.model.clock import SteadyClock, time_us
from headwater.model.errors import EventsMissed, InvalidInput
from headwater.model.event import Event
from headwater.model.position import Position

DELIVER_AT = "_deliver_at"
DELAY = "_delay"
ID = "_id"
GROUP = "_group"
DEAD_PREFIX = "_dead_"
CORRELATION = "_correlation"
REPLY_TO = "_reply_to"
DEADLINE = "_deadline"

_FEED_EVENTS = 16_384


def sending_headers(
    headers: Mapping[str, bytes] | None,
    *,
    delay_s: float | None,
    at: datetime | str | int | None,
    id: str | None,
    now: int,
    steady: SteadyClock,
) -> dict[str, bytes]:
    """The headers of an event that is to be delivered later, or once."""
    extra = dict(headers or {})
    if delay_s is not None:
        check_delay(delay_s)
    if delay_s is not None and at is not None:
        raise InvalidInput("delay_s= and at= both say when to deliver the event.", advice="Give one of them.")
    if delay_s is not None or at is not None:
        due = now + round((delay_s or 0) * 1e6) if at is None else time_us(at)
        extra[DELIVER_AT] = b"%d" % max(0, min(due, FAR_US))
    if delay_s is not None and not steady.is_own:
        delay_us = round(delay_s * 1e6)
        extra[DELAY] = f"{steady.boot_id()} {steady() + delay_us} {delay_us}".encode("ascii")
    if id is not None:
        extra[ID] = id.encode("utf-8")
    return extra


def send_event(
    log: QueueLog, topic: str, value: Any, *, key: Any, headers: Mapping[str, bytes], spread_by: str | None = None
) -> Position:
    """Appends one event and says where it stands. One without a key goes where `spread_by` hashes to."""
    described = log.store.topic(topic)
    row = row_of(described, key, value, headers)
    if spread_by is not None and (described.key is None or row.get(described.key) is None):
        # By the first number of partitions: where an id was once is where its duplicates are looked for.
        number = int(partitions_of(pa.array([spread_by.encode("utf-8")], pa.binary()), described.partitions_first)[0])
        batch = to_batch([row], described.schema)
        check_size(batch, described)
        (outcome,) = log.appender.write([Write(described, number, batch)])[1]
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


def has_headers(chunks: Sequence[Chunk]) -> bool:
    """Whether any of the events may have headers."""
    return any("_headers" in chunk.batch.schema.names for chunk in chunks)


def delivery_times(chunk: Chunk) -> npt.NDArray[np.int64]:
    """The time before which each event must not be delivered; 0 where it says none, or nothing that can be read."""
    found = _header(chunk, DELIVER_AT)
    if found is None:
        return np.zeros(chunk.batch.num_rows, np.int64)
    return np.array([int(raw) if raw is not None and raw.isdigit() else 0 for raw in found.to_pylist()], np.int64)


def delays(chunk: Chunk) -> list[tuple[int, str, int, int]]:
    """The rows that wait for a delay: row, boot, when it ends by the clock of that boot, and how long it was."""
    found = _header(chunk, DELAY)
    if found is None or found.null_count == len(found):
        return []
    delayed = []
    for row, raw in enumerate(found.to_pylist()):
        boot, *numbers = (raw or b"").decode("ascii", "replace").split(" ")
        if len(numbers) == 2 and all(number.isdecimal() for number in numbers):
            delayed.append((row, boot, int(numbers[0]), int(numbers[1])))
    return delayed


def is_for_others(chunk: Chunk, group: str) -> npt.NDArray[np.bool_]:
    """Which events are for another group only."""
    found = _header(chunk, GROUP)
    if found is None:
        return np.zeros(chunk.batch.num_rows, np.bool_)
    other = pc.not_equal(found, pa.scalar(group.encode("utf-8"), pa.binary())).fill_null(False)
    return np.asarray(other.to_numpy(zero_copy_only=False), np.bool_)


def key_hashes(chunk: Chunk) -> npt.NDArray[np.uint64]:
    """A number for the key of each event, 0 where it has none; keys that share a number only wait for each other."""
    column = chunk.topic.key
    if column is None:
        return np.zeros(chunk.batch.num_rows, np.uint64)
    keys = key_bytes(chunk.batch.column(column))
    hashes = murmur2(keys).view(np.uint32).astype(np.uint64) + np.uint64(1)
    if keys.null_count:
        hashes[keys.is_null().to_numpy(zero_copy_only=False)] = 0
    return hashes


class Ids:
    """The ids of one partition's events and of its ancestors', as far back as the duplicate window goes."""

    def __init__(self, store: Store, topic: str, partition: int, *, window_us: int) -> None:
        self._store = store
        self._topic = topic
        self._partition = partition
        self._window_us = window_us
        self._seen: dict[bytes, int] = {}
        self._upto = -1

    def is_duplicate(self, chunk: Chunk) -> npt.NDArray[np.bool_]:
        """Which events have an id that another had, of an event appended less than the window before."""
        self._catch_up(chunk)
        return self._feed(chunk)

    def _catch_up(self, chunk: Chunk) -> None:
        """Reads what stands between the last chunk and this one; at first, as far back as the window goes."""
        if self._upto > chunk.base_offset:
            self._seen, self._upto = {}, -1
        if self._upto < 0:
            oldest = int(_appended(chunk)[0]) - self._window_us
            for ancestor, fence in reversed(chunk.topic.ancestors(self._partition)):
                self._read(ancestor, self._store.offset_at(self._topic, ancestor, time=oldest, by="appended"), fence)
            at = self._store.offset_at(self._topic, self._partition, time=oldest, by="appended")
            self._upto = min(at, chunk.base_offset)
        self._read(self._partition, self._upto, chunk.base_offset)

    def _read(self, partition: int, start: int, end: int) -> None:
        cursor = self._store.cursor(self._topic, partition, offset=start)
        while cursor.offset < end:
            try:
                found = cursor.read(end, events_max=_FEED_EVENTS)
            except EventsMissed as missed:  # they were removed since, and their ids are no longer asked for
                cursor = self._store.cursor(self._topic, partition, offset=missed.last + 1)
                continue
            for before in found:
                self._feed(before)
            self._upto = cursor.offset

    def _feed(self, chunk: Chunk) -> npt.NDArray[np.bool_]:
        again = np.zeros(chunk.batch.num_rows, np.bool_)
        self._upto = chunk.end_offset
        found = _header(chunk, ID)
        if found is None:
            return again
        for row, (name, at) in enumerate(zip(found.to_pylist(), _appended(chunk).tolist(), strict=True)):
            if name is not None:
                again[row] = at - self._seen.get(name, -self._window_us) < self._window_us
                self._seen[name] = at
        if len(self._seen) > 2 * _FEED_EVENTS:
            oldest = int(_appended(chunk)[-1]) - self._window_us
            self._seen = {name: at for name, at in self._seen.items() if at > oldest}
        return again


def _header(chunk: Chunk, name: str) -> pa.Array | None:
    """One header of each event as bytes; None where no event can have it."""
    if "_headers" not in chunk.batch.schema.names:
        return None
    return pc.map_lookup(chunk.batch.column("_headers"), pa.scalar(name), "last")


def _appended(chunk: Chunk) -> npt.NDArray[np.int64]:
    if chunk.appended is not None:
        return np.full(chunk.batch.num_rows, chunk.appended, np.int64)
    return np.asarray(chunk.batch.column("_appended").cast(pa.int64()))
