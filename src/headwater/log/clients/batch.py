"""A receipt: the promise of one event's place in the log, kept by the batch the event travels in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from itertools import repeat
from typing import Any

import msgspec
import numpy as np

from headwater.log.arrow.placement import Placement
from headwater.log.port.topic import Topic
from headwater.log.port.write import Write
from headwater.model.errors import TimedOut
from headwater.model.position import Position

STORED_BEFORE = -1
"""The offset in the position of an event whose sequence number was stored before: it has one, but not from this call."""


NO_THREAD = 0
"""The owner of a batch to which several threads add."""


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
            raise TimedOut(f"The batch was not written in {timeout_s} s.", advice="Ask again; it is still on its way.")
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
