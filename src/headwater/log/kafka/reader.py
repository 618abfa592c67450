"""Reading from Kafka: consumers without groups, each at one place of one partition, shared by all cursors.

A cursor knows only its offset. When it reads, it takes the fetcher that stands exactly there, or sends another one there
(some 10 ms), and gives it back. So a reader that goes on finds its prefetched events, and a thousand cursors need no thousand
clients. At most `FETCHERS_MAX` fetchers are kept; one that nobody takes for `REST_S` seconds stops asking the broker for more.

A read of many events is cut into pieces: one is decoded from JSON by another thread while the next one is fetched. Decoding
leaves other threads alone (Arrow does it), so reading takes the time of fetching where there is a second core.

Offsets on Kafka have gaps where transactions ended or were rolled back; chunks have none, so they are cut there. A cursor
that learns that nothing stands before `end` moves there.

Thread-safety: a cursor belongs to one thread, the fetchers to everybody.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.log.kafka.brokers import BEGINNING, Brokers
from headwater.log.kafka.records import Records, to_columns
from headwater.log.port.chunk import Chunk
from headwater.log.port.store import check_not_missed
from headwater.log.port.topic import Topic
from headwater.model.backoff import Backoff
from headwater.model.errors import Closed, HeadwaterError, PositionLost, Unreachable

FETCHERS_MAX = 32
REST_S = 1.0
CHUNK_EVENTS_MAX = 16_384
"""More events at a time cost more: the garbage collector looks at each again and again while they are held."""

READ_EVENTS_MAX = 4 * CHUNK_EVENTS_MAX
"""What one read may give: while a piece is decoded in another thread, the next one is fetched."""

_PIECE_BYTES_MAX = 16 << 20
_STALL_S = 30.0
_SUSPECT_S = 2.0
_POLL_S = 0.5
_TIMESTAMP = pa.timestamp("us", tz="UTC")
_BY_BROKER = 2  # TIMESTAMP_LOG_APPEND_TIME
_WAIT_S = (0.001, 0.02)
"""The first and the longest pause between two looks at the ends of partitions."""


class KafkaCursor:
    """A place in one partition."""

    def __init__(
        self, fetchers: Fetchers, look_up: Callable[[], tuple[Topic, str]], partition: int, offset: int
    ) -> None:
        """`look_up` gives the topic as it is now and its name on Kafka, and raises when it is another topic by now."""
        self.offset = offset
        self._fetchers = fetchers
        self._brokers = fetchers.brokers
        self._look_up = look_up
        self._partition = partition

    def read(self, end: int, *, events_max: int) -> list[Chunk]:
        topic, name = self._look_up()
        if self.offset >= end:
            return []
        fetcher = self._fetchers.take(topic, name, self._partition, self.offset)
        pieces: list[tuple[Callable[[], list[Chunk]], int]] = []
        try:
            for events, at, is_last in fetcher.pieces(end, events_max):
                decode = partial(to_chunks, events, topic, self._partition)
                pieces.append((decode if is_last else self._brokers.decode(decode), at))
        except PositionLost:
            [first] = self._brokers.offsets([(name, self._partition)], BEGINNING)
            check_not_missed(topic.name, self._partition, self.offset, first=first)
            raise
        except HeadwaterError:
            if not pieces:
                raise  # otherwise the next read meets it
        else:
            self._fetchers.give_back(fetcher)
        return self._decoded(pieces)

    def _decoded(self, pieces: Sequence[tuple[Callable[[], list[Chunk]], int]]) -> list[Chunk]:
        """The chunks of pieces, and this cursor behind them; one that cannot be read is raised when it is the first."""
        chunks: list[Chunk] = []
        for decoded, at in pieces:
            try:
                chunks += decoded()
            except HeadwaterError:
                if not chunks:
                    raise
                break
            self.offset = at
        return chunks


class Fetcher:
    """One consumer at one place."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self.consumer = brokers.consumer()
        self.place = ("", -1)
        self.offset = -1
        self._at: Any = None
        self._pending: list[Any] = []
        self._eof = -1
        self._fetching = False
        self.idle_since = 0.0

    @property
    def is_fetching(self) -> bool:
        """Whether its client asks the broker for events, read or not."""
        return self._fetching

    def rest(self) -> None:
        """Asks for no more until it is read again, from where it stands."""
        self.consumer.unassign()
        self._fetching = False

    def go(self, topic: Topic, name: str, partition: int, offset: int) -> None:
        """Stands at an offset from now on."""
        self._brokers.know(self.consumer, name, topic.id, topic.partitions)
        self._at = self._brokers.kafka.TopicPartition(name, partition, offset)
        self.place, self.offset = (topic.id, partition), offset
        self._pending, self._eof, self._fetching = [], -1, False

    def pieces(self, end: int, events_max: int) -> Iterator[tuple[list[Any], int, bool]]:
        """The next events below `end` in pieces, each with the offset to go on from and whether it is the last for now."""
        left, is_last = min(events_max, READ_EVENTS_MAX), False
        while not is_last:
            wanted = min(left, CHUNK_EVENTS_MAX)
            events, at = self.read(end, wanted)
            left -= len(events)
            is_last = len(events) < wanted or left <= 0 or at >= end or _are_large(events)
            yield events, at, is_last

    def read(self, end: int, events_max: int) -> tuple[list[Any], int]:
        """The next events below `end`, at least one if there is one, and the offset to go on from."""
        if not self._pending and not self._fetching:
            self._at.offset, self._eof = self.offset, -1
            self.consumer.assign([self._at])
            self._fetching = True
        begun = last = time.monotonic()
        while not self._pending and self._eof < end:
            if not self._fill(events_max, wait_s=_POLL_S) and time.monotonic() - last > _SUSPECT_S:
                self._start_over()
                last = time.monotonic()
            if time.monotonic() - begun > _STALL_S:
                raise Unreachable(
                    f"{self._brokers.address.url} gave no event of {self._at.topic!r}, partition {self._at.partition}, "
                    f"at offset {self.offset} in {_STALL_S:g} s.",
                    advice="Check that the partition has a leader, then read again from the same place.",
                )
        while len(self._pending) < events_max and self._fill(events_max - len(self._pending), wait_s=0):
            pass
        events = self._pending[:events_max]
        if events and events[-1].offset() >= end:
            events = events[: int(np.searchsorted([event.offset() for event in events], end))]
        self._pending = self._pending[len(events) :]
        if self._pending:
            self.offset = min(end, self._pending[0].offset()) if len(events) < events_max else events[-1].offset() + 1
        elif self._eof >= 0:
            self.offset = max(min(end, self._eof), events[-1].offset() + 1 if events else 0)
        elif events:
            self.offset = events[-1].offset() + 1
        if self._fetching and (self._eof >= 0 or (self.offset >= end and not self._pending)):
            # Otherwise it would ask the broker for more all the time; to resume a pause takes a second, to assign two ms.
            self.rest()
        return events, self.offset

    def _start_over(self) -> None:
        """A new client: one whose broker died may go on asking it for minutes."""
        if not self._brokers.is_alive():
            raise Unreachable(
                f"{self._brokers.address.url} does not answer: could not read {self._at.topic!r}.",
                advice="Check that the brokers run, then read again from the same place.",
            )
        self._brokers.forget(self.consumer)
        self.consumer.close()
        self.consumer = self._brokers.consumer()
        self._at.offset = self.offset
        self.consumer.assign([self._at])

    def _fill(self, events_max: int, *, wait_s: float) -> bool:
        """Takes what the client has; False when it had nothing."""
        kafka = self._brokers.kafka
        try:
            first = self.consumer.poll(wait_s) if wait_s else None
            found = ([first] if first is not None else []) + self.consumer.consume(max(1, min(events_max, 100_000)), 0)
        except RuntimeError:
            raise Closed("The Kafka log was closed.", advice="Open another with open_log.") from None
        except kafka.KafkaException as caught:
            raise self._brokers.as_ours(caught.args[0], what=f"read {self._at.topic!r}") from None
        if found and found[-1].error() is None:
            self._eof = -1
            if not any(map(type(found[0]).error, found)):
                self._pending += found
                return True
        for event in found:
            error = event.error()
            if error is None:
                self._pending.append(event)
                self._eof = -1
            elif error.code() == kafka.KafkaError._PARTITION_EOF:
                self._eof = event.offset()
            elif not error.retriable() and error.code() not in (kafka.KafkaError._TRANSPORT,):
                raise self._brokers.as_ours(error, what=f"read {self._at.topic!r}")
        return bool(found)


class Fetchers:
    """The fetchers that nobody uses at the moment."""

    def __init__(self, brokers: Brokers) -> None:
        self.brokers = brokers
        self._lock = threading.Lock()
        self._idle: list[Fetcher] = []
        self._timer: threading.Timer | None = None
        self._closed = False

    def take(self, topic: Topic, name: str, partition: int, offset: int) -> Fetcher:
        """A fetcher that stands there."""
        place = topic.id, partition
        with self._lock:
            if self._closed:
                raise Closed("The Kafka log was closed.", advice="Open another with open_log.")
            standing = next((f for f in self._idle if f.place == place and f.offset == offset), None)
            longest_idle = self._idle[0] if len(self._idle) >= FETCHERS_MAX else None
            found = standing or longest_idle
            if found is not None:
                self._idle.remove(found)
        if standing is not None:
            return standing
        fetcher = found or Fetcher(self.brokers)
        fetcher.go(topic, name, partition, offset)
        return fetcher

    def give_back(self, fetcher: Fetcher) -> None:
        """It may be taken again; one that failed is not given back, and ends with its last reference."""
        with self._lock:
            if not self._closed and len(self._idle) < FETCHERS_MAX:
                fetcher.idle_since = time.monotonic()
                self._idle.append(fetcher)
                self._look_again()
                return
        self.brokers.forget(fetcher.consumer)
        fetcher.consumer.close()

    def close(self) -> None:
        """Frees all of them."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            if self._timer is not None:
                self._timer.cancel()
        for fetcher in idle:
            fetcher.consumer.close()

    def _look_again(self) -> None:
        """Sees to it that fetchers that are not taken come to rest; the caller holds the lock."""
        if self._timer is None and any(fetcher.is_fetching for fetcher in self._idle):
            timer = threading.Timer(REST_S, self._send_to_rest)
            timer.daemon = True
            timer.start()
            self._timer = timer

    def _send_to_rest(self) -> None:
        with self._lock:
            self._timer = None
            if self._closed:
                return
            for fetcher in self._idle:
                if fetcher.is_fetching and time.monotonic() - fetcher.idle_since >= REST_S:
                    fetcher.rest()
            self._look_again()


class KafkaWaiter:
    """Sleeps a little, longer each time nothing came: the reader itself asks the brokers for the ends."""

    def __init__(self) -> None:
        self._backoff = Backoff(*_WAIT_S, jitter=0.0)
        self._last = 0.0

    def wait(self, timeout_s: float) -> None:
        """Returns after a millisecond or, when it is asked again and again, up to 20."""
        if time.monotonic() - self._last >= 0.1:
            self._backoff.reset()
        self._backoff.sleep(timeout_s)
        self._last = time.monotonic()

    def fileno(self) -> int | None:
        """There is none."""
        return None

    def close(self) -> None:
        """Nothing to free."""


def to_chunks(events: Sequence[Any], topic: Topic, partition: int) -> list[Chunk]:
    """Events of one partition as chunks, cut where offsets have gaps."""
    if not events:
        return []
    kind = type(events[0])  # `map` over the methods of a type takes half the time of a comprehension
    values, headers = list(map(kind.value, events)), list(map(kind.headers, events))
    has_keys = not topic.has_schema or None in values
    keys = list(map(kind.key, events)) if has_keys else [None] * len(events)
    records = Records(keys, values, headers if any(headers) else None)
    offsets = _offsets(events)
    batch = to_columns(records, topic, partition=partition, offsets=offsets)
    times = _appended_us(events)
    starts = [0, *(np.flatnonzero(np.diff(offsets) != 1) + 1).tolist(), len(events)]
    chunks = []
    for start, stop in itertools.pairwise(starts):
        piece, moments = batch.slice(start, stop - start), times[start:stop]
        appended: int | None = int(moments[0])
        if (moments != moments[0]).any():
            appended = None
            piece = piece.append_column("_appended", pa.array(moments).cast(_TIMESTAMP))
        chunks.append(Chunk(topic, partition, int(offsets[start]), piece, appended))
    return chunks


def _are_large(events: Sequence[Any]) -> bool:
    """Whether so many events of this size fill memory quickly."""
    return bool(events) and len(events) * len(events[-1].value() or b"") > _PIECE_BYTES_MAX


def _offsets(events: Sequence[Any]) -> Any:
    """The offset of each event; they rise, so where the first and the last are as far apart as there are events, none is asked."""
    first, last = events[0].offset(), events[-1].offset()
    if last - first == len(events) - 1:
        return np.arange(first, last + 1)
    return np.fromiter(map(type(events[0]).offset, events), np.int64, len(events))


def _appended_us(events: Sequence[Any]) -> Any:
    """When each event was appended. The broker gives one time to a whole record batch, so only the borders are looked for.

    That needs times that do not fall inside of what was read at once; where the times are the producers' own, each is asked.
    """
    if events[0].timestamp()[0] != _BY_BROKER:
        return np.fromiter(map(itemgetter(1), map(type(events[0]).timestamp, events)), np.int64, len(events)) * 1000
    times = np.empty(len(events), np.int64)
    left = [(0, len(events) - 1)]
    while left:
        first, last = left.pop()
        time_first, time_last = events[first].timestamp()[1], events[last].timestamp()[1]
        if time_first == time_last or last - first < 2:
            times[first : last + 1] = time_first
            times[last] = time_last
        else:
            middle = (first + last) // 2
            left += [(first, middle), (middle, last)]
    return times * 1000
