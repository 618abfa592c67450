"""A reader: follows topics from a place of its own, without a group and without commits.

Thread-safety: none; give each thread its own reader. Events of one partition come in order; each poll takes one snapshot
of the log's ends, so it sees all of a transaction or nothing of it. Partitions that are added are read from their beginning
on; one that was split off waits until its ancestors are read up to their fences, so each key's events come in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Literal, Self, get_args

import pyarrow as pa

from headwater.log.arrow.events import output_schema, to_batch_of, to_events
from headwater.log.disk.wait import wait_async
from headwater.log.port.chunk import Chunk
from headwater.log.port.split import is_held
from headwater.log.port.store import Bounds, Cursor, ReadStore, Waiter
from headwater.model.clock import time_us
from headwater.model.errors import Closed, EventsMissed, HeadwaterError, InvalidInput, PositionLost, TopicNotFound
from headwater.model.event import Event
from headwater.model.position import Position

Start = str | int | datetime | Mapping[int, int] | Sequence[Position]
"""Where to begin: "earliest", "latest", an offset, a time, an offset for each partition, or saved positions."""

Missed = Literal["raise", "skip"]
"""What a reader does that retention has overtaken: raises `EventsMissed`, or goes on with the first event there is."""

_WAIT_S_MAX = 1.0


class Reader:
    """A follower of one or more topics. `missed` counts the events it skipped because retention had removed them."""

    def __init__(
        self,
        store: ReadStore,
        topics: Sequence[str],
        *,
        start: Start = "earliest",
        columns: Sequence[str] | None = None,
        missed: Missed = "raise",
    ) -> None:
        if missed not in get_args(Missed):
            raise InvalidInput(f"missed={missed!r} is not valid.", advice='Use "raise" or "skip".')
        self.missed = 0
        self._skips = missed == "skip"
        self._store = store
        self._names = list(topics)
        self._columns = columns
        self._closed = False
        self._waiter: Waiter | None = None
        self._cursors: dict[tuple[str, int], Cursor] = {}
        self._ancestors: dict[tuple[str, int], tuple[tuple[int, int], ...]] = {}
        self._ids: dict[str, str] = {}
        self._turn = 0
        for name in self._names:
            output_schema(store.topic(name), columns)
        self.seek(start)

    def poll(self, *, events_max: int = 500, timeout_s: float = 1.0) -> list[Event]:
        """The next events; an empty list when none came in time."""
        return self._events(self._wait_for_chunks(events_max, timeout_s))

    def poll_arrow(self, *, events_max: int = 1_000_000, timeout_s: float = 1.0) -> list[pa.RecordBatch]:
        """The next events as Arrow batches, each of one partition; an empty list when none came in time."""
        return self._batches(self._wait_for_chunks(events_max, timeout_s))

    async def poll_async(self, *, events_max: int = 500, timeout_s: float = 1.0) -> list[Event]:
        """`poll` for asyncio: other tasks run while it waits."""
        return self._events(await self._wait_for_chunks_async(events_max, timeout_s))

    async def poll_arrow_async(self, *, events_max: int = 1_000_000, timeout_s: float = 1.0) -> list[pa.RecordBatch]:
        """`poll_arrow` for asyncio."""
        return self._batches(await self._wait_for_chunks_async(events_max, timeout_s))

    def seek(self, start: Start) -> None:
        """Goes on from another place."""
        self._check_open()
        bounds = self._store.bounds(self._names)
        self._cursors = {
            (name, number): self._store.cursor(name, number, offset=self._offset(start, name, number, bound))
            for (name, number), bound in bounds.items()
        }
        self._ids = {}
        self._look_at_topics(bounds)

    def positions(self) -> list[Position]:
        """The place after the last event read of each partition; `seek` and `start=` take it."""
        incarnation = self._store.incarnation()
        return [Position(name, number, cursor.offset, incarnation) for (name, number), cursor in self._cursors.items()]

    def lag(self) -> int:
        """How many events are there to be read now."""
        bounds = self._bounds()
        return sum(_end_of(bounds, place) - cursor.offset for place, cursor in self._cursors.items())

    def close(self) -> None:
        """Frees what it waits on."""
        self._closed = True
        if self._waiter is not None:
            self._waiter.close()
            self._waiter = None

    def __iter__(self) -> Iterator[Event]:
        while not self._closed:
            yield from self.poll()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while not self._closed:
            for event in await self.poll_async():
                yield event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        places = {f"{name}/{number}": cursor.offset for (name, number), cursor in self._cursors.items()}
        return f"Reader(topics={self._names!r}, {'closed' if self._closed else f'next={places}'})"

    def _events(self, chunks: list[Chunk]) -> list[Event]:
        events: list[Event] = []
        for chunk in chunks:
            events += to_events(chunk)
        return events

    def _batches(self, chunks: list[Chunk]) -> list[pa.RecordBatch]:
        return [to_batch_of(chunk, output_schema(chunk.topic, self._columns)) for chunk in chunks]

    def _wait_for_chunks(self, events_max: int, timeout_s: float) -> list[Chunk]:
        _check_poll(events_max, timeout_s)
        chunks = self._chunks(events_max)
        if chunks or timeout_s <= 0:
            return chunks
        waiter = self._watch()
        deadline = time.monotonic() + timeout_s
        while not (chunks := self._chunks(events_max)):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            waiter.wait(min(left, _WAIT_S_MAX))
        return chunks

    async def _wait_for_chunks_async(self, events_max: int, timeout_s: float) -> list[Chunk]:
        _check_poll(events_max, timeout_s)
        chunks = self._chunks(events_max)
        if chunks or timeout_s <= 0:
            await asyncio.sleep(0)
            return chunks
        waiter = self._watch()
        deadline = time.monotonic() + timeout_s
        while not (chunks := self._chunks(events_max)):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            await wait_async(waiter, min(left, _WAIT_S_MAX))
        return chunks

    def _chunks(self, events_max: int) -> list[Chunk]:
        """What can be read now; after a failure the reader stands where it stood, so that nothing is skipped."""
        self._check_open()
        bounds = self._bounds()
        before = {
            place: at.offset
            for place, at in self._cursors.items()
            if _end_of(bounds, place) > at.offset and not self._is_held(place)
        }
        if not before:
            return []
        missed = self.missed
        try:
            chunks = self._chunks_in_turn(list(before), bounds, events_max)
            has_moved = any(self._cursors[place].offset != offset for place, offset in before.items())
            return chunks or (
                self._chunks(events_max) if has_moved else []
            )  # a gap was passed: others may wait for that
        except HeadwaterError:
            self.missed = missed
            for (name, number), offset in before.items():
                if self._cursors[name, number].offset != offset:
                    self._cursors[name, number] = self._store.cursor(name, number, offset=offset)
            raise

    def _bounds(self) -> Mapping[tuple[str, int], Bounds]:
        """The bounds of all partitions; one that was added begins at its first offset, since all of it is new."""
        bounds = self._store.bounds(self._names)
        if len(bounds) > len(self._cursors):
            new = bounds.keys() - self._cursors.keys()
            self._look_at_topics(new)
            self._cursors |= {place: self._store.cursor(*place, offset=0) for place in new}
        return bounds

    def _look_at_topics(self, places: Iterable[tuple[str, int]]) -> None:
        """Learns the ancestors of these partitions, if they are of the topics that were there before."""
        topics = {name: self._store.topic(name) for name in self._names}
        for name, topic in topics.items():
            if self._ids.setdefault(name, topic.id) != topic.id:
                raise TopicNotFound(
                    f"Topic {name!r} was deleted and created again while it was read.", advice="Open another reader."
                )
        self._ancestors |= {(name, number): topics[name].ancestors(number) for name, number in places}

    def _is_held(self, place: tuple[str, int]) -> bool:
        ancestors = self._ancestors[place]
        return bool(ancestors) and is_held(ancestors, lambda number: self._cursors[place[0], number].offset)

    def _chunks_in_turn(
        self, places: Sequence[tuple[str, int]], bounds: Mapping[tuple[str, int], Bounds], events_max: int
    ) -> list[Chunk]:
        """One partition after the other, beginning with another one each time so that none starves."""
        chunks: list[Chunk] = []
        self._turn += 1
        for step in range(len(places)):
            place = places[(self._turn + step) % len(places)]
            found = self._read(place, bounds[place].end, events_max)
            events_max -= sum(chunk.batch.num_rows for chunk in found)
            chunks += found
            if events_max <= 0:
                break
        return chunks

    def _read(self, place: tuple[str, int], end: int, events_max: int) -> list[Chunk]:
        while True:
            try:
                return self._cursors[place].read(end, events_max=events_max)
            except EventsMissed as error:
                if not self._skips:
                    raise
                self.missed += error.count
                self._cursors[place] = self._store.cursor(*place, offset=error.last + 1)

    def _watch(self) -> Waiter:
        if self._waiter is None:
            self._waiter = self._store.waiter(self._names)
        return self._waiter

    def _offset(self, start: Start, name: str, number: int, bound: Bounds) -> int:
        if isinstance(start, str) and start in ("earliest", "latest"):
            return bound.first if start == "earliest" else bound.end
        if isinstance(start, int):
            return self._checked(start, name, number, bound)
        if isinstance(start, (datetime, str)):
            return self._store.offset_at(name, number, time=time_us(start), by="time")
        if isinstance(start, Mapping):
            if not set(start) <= set(range(self._store.topic(name).partitions)):
                raise _no_start(start)
            return self._checked(start.get(number, bound.first), name, number, bound)
        if not isinstance(start, Sequence):
            raise _no_start(start)
        for position in start:
            if not isinstance(position, Position):
                raise _no_start(start)
            if (position.topic, position.partition) == (name, number):
                self._check_not_lost(position)
                return self._checked(position.offset, name, number, bound)
        return bound.first

    def _checked(self, offset: object, name: str, number: int, bound: Bounds) -> int:
        if not isinstance(offset, int) or not 0 <= offset <= bound.end:
            raise InvalidInput(
                f"Offset {offset!r} is not in partition {number} of topic {name!r}.",
                advice=f'{bound.described()}; use "earliest" or "latest" for its ends.',
            )
        return offset

    def _check_not_lost(self, position: Position) -> None:
        lost = self._store.lost_after(position.topic, position.partition, incarnation=position.incarnation)
        if lost is not None and position.offset > lost:
            raise PositionLost(
                f"Offset {position.offset} of partition {position.partition} of topic {position.topic!r} was taken back: the "
                f"machine stopped uncleanly, or the log was restored from a backup, and continued from offset {lost}.",
                advice=f"Read again from offset {lost}, and discard what you computed from events {lost} to {position.offset - 1}.",
            )

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("The reader was closed.", advice="Open another with log.reader(…).")


def _check_poll(events_max: object, timeout_s: object) -> None:
    if not isinstance(events_max, int) or events_max < 1:
        raise InvalidInput(f"events_max={events_max!r} is not valid.", advice="Use 1 or more.")
    if not isinstance(timeout_s, (int, float)):
        raise InvalidInput(f"timeout_s={timeout_s!r} is not valid.", advice="Use a number of seconds; 0 does not wait.")


def _end_of(bounds: Mapping[tuple[str, int], Bounds], place: tuple[str, int]) -> int:
    if place not in bounds:
        raise TopicNotFound(
            f"Topic {place[0]!r} was deleted and created again with fewer partitions.", advice="Open another reader."
        )
    return bounds[place].end


def _no_start(start: object) -> InvalidInput:
    return InvalidInput(
        f"{start!r:.80} is not a place to start.",
        advice='Use "earliest", "latest", an offset, a time, {partition: offset}, or saved positions.',
    )
