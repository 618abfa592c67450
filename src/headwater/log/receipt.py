"""A receipt: the promise of one event's place in the log, kept by the batch the event travels in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from typing import Any

import msgspec

from headwater.log.topic import Topic
from headwater.model.errors import TimedOut
from headwater.model.position import Position

STORED_BEFORE = -1
"""The offset in the position of an event whose sequence number was stored before: it has one, but not from this call."""


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The promise of one event's place in the log."""

    _batch: Batch
    _index: int

    def result(self, *, timeout_s: float | None = None) -> Position:
        """The event's position once it is durable; raises what went wrong. Sends the batch if nobody has yet."""
        batch = self._batch
        if batch.outcome is None:
            batch.settle(timeout_s)
        return batch.position(self._index, timeout_s)

    def done(self) -> bool:
        """Whether the result is there."""
        return self._batch.outcome is not None

    def __await__(self) -> Generator[Any, None, Position]:
        if self._batch.outcome is None:
            loop = asyncio.get_running_loop()
            yield from loop.run_in_executor(None, self._batch.settle, None).__await__()
        return self._batch.position(self._index, None)


class Batch:
    """Events of one topic on their way, and what became of them."""

    __slots__ = ("begun", "events_max", "headers", "keys", "outcome", "send", "sequences", "topic", "values")

    def __init__(self, topic: Topic, *, begun: float, events_max: int, send: Callable[[float | None], None]) -> None:
        self.topic = topic
        self.begun = begun
        self.events_max = events_max
        self.send = send
        self.values: list[Any] = []
        self.keys: list[Any] = []
        self.headers: dict[int, Mapping[str, bytes]] = {}
        self.sequences: list[int] | None = None
        self.outcome: Outcome | None = None

    def only(self, index: int) -> Batch:
        """One of its events as a batch of its own."""
        one = Batch(self.topic, begun=self.begun, events_max=1, send=self.send)
        one.values, one.keys = [self.values[index]], [self.keys[index]]
        if index in self.headers:
            one.headers = {0: self.headers[index]}
        return one

    def settle(self, timeout_s: float | None) -> None:
        """Sends everything up to this batch, and waits for it."""
        if self.outcome is None:
            self.send(timeout_s)

    def position(self, index: int, timeout_s: float | None) -> Position:
        """Where one of its events stands."""
        if self.outcome is None:
            raise TimedOut(f"The batch was not written in {timeout_s} s.", advice="Ask again; it is still on its way.")
        return self.outcome.position(index, self.topic.name)


class Outcome(msgspec.Struct, frozen=True):
    """What became of a batch: a partition and an offset for each event, or an error for some events or partitions."""

    partitions: list[int]
    offsets: list[int]
    refused: Mapping[int, Exception]
    failed: Mapping[int, Exception]
    incarnation: int

    def position(self, index: int, topic: str) -> Position:
        """Where an event stands; raises why it does not."""
        partition = self.partitions[index]
        if self.refused or self.failed:
            error = self.refused.get(index) or self.failed.get(partition)
            if error is not None:
                raise error
        return Position(topic, partition, self.offsets[index], self.incarnation)

    def error(self) -> Exception | None:
        """The first thing that went wrong, if any did."""
        return next(iter(self.refused.values()), None) or next(iter(self.failed.values()), None)
