"""A batch of events on their way: the receipts that promise each its place in the log, and the rows that it becomes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Generator, Mapping
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headwater.log.arrow.placement import Placement
from headwater.log.arrow.rows import check_size, to_batch
from headwater.log.port.topic import Topic
from headwater.log.port.write import Write
from headwater.model.errors import HeadwaterError, InvalidInput, SchemaMismatch, TimedOut
from headwater.model.position import Position
from headwater.model.schema import DELETED, HEADERS

STORED_BEFORE = -1
"""The offset in the position of an event whose sequence number was stored before: it has one, but not from this call."""


NO_THREAD = 0
"""The owner of a batch to which several threads add."""

_BINARY = pa.binary()
_EXTRA = (HEADERS.name, DELETED.name)
"""In this order they follow the topic's columns, if any event has them."""

_OFFSETS = struct.Struct("<ii")


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The promise of one event's place in the log."""

    _batch: Batch
    _index: int

    def result(self, *, timeout_s: float | None = None) -> Position:
        """The event's position once it is durable; raises what went wrong. Sends the batch if nobody has yet."""
        place = (self._batch.places or self._batch.settled(timeout_s))[self._index]
        if isinstance(place, Exception):
            raise untraced(place)
        return place

    def done(self) -> bool:
        """Whether the result is there."""
        return self._batch.outcome is not None

    def __await__(self) -> Generator[Any, None, Position]:
        if self._batch.outcome is None:
            loop = asyncio.get_running_loop()
            yield from loop.run_in_executor(None, self._batch.settled, None).__await__()
        return self.result()


class Batch:
    """Events of one topic on their way, and what became of them.

    While it is open, `events` holds key and value of each event in turn, and `last` is the index from which on an event may be
    the last one (-1: the batch is due or closed). `thread` may add without a lock.
    """

    __slots__ = (
        "begun",
        "count",
        "events",
        "headers",
        "keys",
        "last",
        "outcome",
        "places",
        "plan",
        "send",
        "sequences",
        "thread",
        "topic",
        "values",
    )

    def __init__(
        self, topic: Topic, *, thread: int, begun: float, events_max: int, send: Callable[[float | None], None]
    ) -> None:
        self.topic = topic
        self.thread = thread
        self.begun = begun
        self.last = 2 * (events_max - 1)
        self.send = send
        self.events: list[Any] = []
        self.headers: dict[int, Mapping[str, bytes]] = {}
        self.sequences: list[int] | None = None
        self.plan: Plan | None = None
        self.outcome: Outcome | None = None
        self.places: list[Position | Exception] | None = None
        self.count = 0
        self.keys: list[Any] = []
        self.values: list[Any] = []

    def close(self) -> None:
        """Takes no more events: what is added from now on does not count."""
        self.last = -1
        self.count = len(self.events) >> 1
        self.keys, self.values = self.events[: 2 * self.count : 2], self.events[1 : 2 * self.count : 2]

    def forget(self) -> None:
        """Keys and values are stored, or never will be: receipts must not keep them in memory."""
        self.events[: 2 * self.count] = [None] * (2 * self.count)
        self.keys = self.values = []
        self.plan = None

    def only(self, index: int) -> Batch:
        """One of its events as a batch of its own."""
        one = Batch(self.topic, thread=NO_THREAD, begun=self.begun, events_max=1, send=self.send)
        one.count, one.values, one.keys = 1, [self.values[index]], [self.keys[index]]
        if index in self.headers:
            one.headers = {0: self.headers[index]}
        return one

    def settled(self, timeout_s: float | None) -> list[Position | Exception]:
        """Sends everything up to this batch, waits for it, and says where each of its events stands, or why it does not.

        Made when the first receipt is asked: most never are, and who asks one asks all.
        """
        if self.outcome is None:
            self.send(timeout_s)
        if self.outcome is None:
            raise TimedOut(
                f"The batch was not written within {timeout_s} s.",
                advice="Call result() again; the batch is still on its way.",
            )
        self.places = self.outcome.places(self.topic.name)
        return self.places


class Plan(msgspec.Struct, frozen=True):
    """How a batch of `count` events is written: those that are `taken` (all of them where none is refused), and where."""

    count: int
    taken: Any
    refused: Mapping[int, Exception]
    placement: Placement
    writes: list[Write]


class Outcome(msgspec.Struct, frozen=True):
    """What became of a batch: a partition and an offset for each event, or an error (`untraced`) for some events or partitions."""

    partitions: Any
    offsets: Any
    refused: Mapping[int, Exception]
    failed: Mapping[int, Exception]
    incarnation: int

    def places(self, topic: str) -> list[Position | Exception]:
        """Where each event stands, or why it does not."""
        partitions, offsets = (
            column.tolist() if isinstance(column, np.ndarray) else column for column in (self.partitions, self.offsets)
        )
        found: list[Position | Exception] = list(
            map(Position, repeat(topic), partitions, offsets, repeat(self.incarnation))
        )
        if self.refused or self.failed:
            for index, partition in enumerate(partitions):
                error = self.refused.get(index) or self.failed.get(partition)
                found[index] = error or found[index]
        return found

    def error(self) -> Exception | None:
        """The first thing that went wrong, if any did."""
        return next(iter(self.refused.values()), None) or next(iter(self.failed.values()), None)


def untraced(error: Exception) -> Exception:
    """The same error without the frames that it went through, to be kept or to be raised once more.

    Those frames hold receipts, and receipts hold what became of their batch: with the error in it that would be a circle which
    nobody collects, since receipts are too many to be followed by the collector.
    """
    again = type(error).__new__(type(error), *error.args)
    again.__dict__.update(error.__dict__)
    cause = error.__cause__
    again.__cause__ = untraced(cause) if isinstance(cause, Exception) else None
    return again


def to_rows(batch: Batch, topic: Topic) -> pa.RecordBatch:
    """The batch's columns, from values as users give them."""
    if topic.has_schema:
        if topic.key is None and None in batch.values:
            raise InvalidInput(
                f"Topic {topic.name!r} has no key, so events cannot be deleted by key.",
                advice="Send the row's columns; create the topic with key=… for deletions.",
            )
        rows = [
            value if value is not None else {topic.key: key, "_deleted": True}
            for value, key in zip(batch.values, batch.keys, strict=True)
        ]
        columns = to_batch(rows, topic.schema)
    else:
        columns = _bytes_rows(batch, topic)
    if batch.headers:
        columns = columns.add_column(len(topic.schema), HEADERS, _headers_column(batch))
    check_size(columns, topic)
    return columns


def to_rows_one_by_one(batch: Batch, topic: Topic) -> tuple[pa.RecordBatch, Any, dict[int, Exception]]:
    """The slow way, once something is wrong: one bad event must not keep its neighbours out of the log."""
    pieces, taken = [], []
    refused: dict[int, Exception] = {}
    for index in range(len(batch.values)):
        try:
            pieces.append(to_rows(batch.only(index), topic))
            taken.append(index)
        except HeadwaterError as error:
            refused[index] = error
    if not pieces:
        raise next(iter(refused.values()))
    table = pa.concat_tables([pa.Table.from_batches([piece]) for piece in pieces], promote_options="default")
    table = table.select([*topic.schema.names, *(name for name in _EXTRA if name in table.column_names)])
    if batch.sequences is not None:
        batch.sequences = [batch.sequences[index] for index in taken]
    return table.combine_chunks().to_batches()[0], np.asarray(taken), refused


def _headers_column(batch: Batch) -> pa.Array:
    pairs = [batch.headers.get(number) for number in range(len(batch.values))]
    try:
        return pa.array([None if pair is None else list(pair.items()) for pair in pairs], HEADERS.type)
    except (pa.ArrowException, AttributeError, TypeError, UnicodeError):
        raise SchemaMismatch(
            f"Headers are a dict of names to bytes; got {next(iter(batch.headers.values()))!r:.80}.",
            advice='Write headers={"trace": b"…"}.',
        ) from None


def _bytes_rows(batch: Batch, topic: Topic) -> pa.RecordBatch:
    try:
        arrays = [_bytes_column(batch.keys), _bytes_column(batch.values)]
    except (pa.ArrowException, TypeError, UnicodeError):
        fits = (bytes, bytearray, memoryview, str, type(None))
        bad = next((value for value in (*batch.keys, *batch.values) if not isinstance(value, fits)), "such text")
        raise SchemaMismatch(
            f"Topic {topic.name!r} has no schema, so keys and values are bytes; got {type(bad).__name__} {bad!r:.60}.",
            advice="Encode it, or create the topic with a schema.",
        ) from None
    return pa.RecordBatch.from_arrays(arrays, schema=topic.schema)


def _bytes_column(values: list[Any]) -> pa.Array:
    if len(values) == 1 and values[0].__class__ is bytes:  # four times as fast for an event that is sent alone
        offsets = pa.py_buffer(_OFFSETS.pack(0, len(values[0])))
        return pa.Array.from_buffers(_BINARY, 1, [None, offsets, pa.py_buffer(values[0])], 0)
    return pa.array(values, _BINARY)
