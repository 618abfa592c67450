"""A producer: gathers single events into batches, and gives a receipt for each.

Events are kept as Python values and become Arrow, are hashed to their partitions and written a batch at a time. A batch goes
out when it is full, when its first event is `linger_ms` old, at `flush`, or when somebody asks a receipt for its result. With
`linger_ms=0` nothing is gathered: `send` returns when the event is durable.
Who fills a batch writes it, so `send` waits when the log cannot keep up (back-pressure), and at most one batch of each topic is
held.

Each batch carries the producer's id and a sequence number for each partition, so a batch written again is stored once. A
batch that was planned before its topic was split is placed again, with the same numbers. A
full disk is tried again for `retry_s`; every other failure goes to the receipts of the batch and to the next `flush`.

Thread-safety: a producer may be used by many threads. Batches are written one at a time, in the order they were begun.
After a fork it belongs to the parent; the child opens its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from threading import get_ident
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa

from headwater.log.arrow.placement import Placement, place
from headwater.log.clients.appender import place_again
from headwater.log.clients.batch import (
    NO_THREAD,
    STORED_BEFORE,
    Batch,
    Outcome,
    Plan,
    Receipt,
    to_rows,
    to_rows_one_by_one,
    untraced,
)
from headwater.log.disk.fork import tell_when_forked
from headwater.log.disk.threads import Background
from headwater.log.port.store import WriteStore
from headwater.log.port.topic import Topic, check_name
from headwater.log.port.write import Stamp, Write
from headwater.model.backoff import Backoff
from headwater.model.errors import (
    Closed,
    DiskFull,
    Fenced,
    HeadwaterError,
    InvalidInput,
    Repartitioned,
    SchemaMismatch,
    SequenceGap,
    TimedOut,
)
from headwater.model.text import is_text

BATCH_EVENTS_MAX = 32_768
BATCH_BYTES_MAX = 8 << 20
SEQUENCE_MAX = 2**62

_MUTABLE = (dict, bytearray)
_MOMENT_S = 0.001
_RETRY_S = (0.01, 0.5)
"""The first and the longest pause before a write to a full disk is tried again."""
_SMALL_BATCH = 256


class Producer:
    """Sends events to any topic of one log."""

    def __init__(
        self,
        store: WriteStore,
        *,
        id: str | None = None,
        linger_ms: float = 20.0,
        batch_events_max: int = BATCH_EVENTS_MAX,
        retry_s: float = 30.0,
    ) -> None:
        _check_settings(id, linger_ms=linger_ms, retry_s=retry_s)
        self._store = store
        self._id = id
        self._producer, self._epoch = store.register_producer(id) if id else (os.urandom(16), 0)
        self._linger_s = linger_ms / 1000
        self._batch_events_max = batch_events_max
        self._events_max: dict[str, int] = {}
        self._retry_s = retry_s
        self._next: dict[tuple[str, int], int] = {}
        self._sticky = 0
        self._failure: Exception | None = None
        self._foreign = False
        self._closed = False
        self._begin_empty()
        tell_when_forked(self)

    def send(
        self,
        topic: str,
        value: Any = None,
        *,
        key: Any = None,
        headers: Mapping[str, bytes] | None = None,
        sequence: int | None = None,
    ) -> Receipt:
        """Takes one event; its receipt says later where it stands.

        `value` is a dict of columns, or bytes for a topic without a schema; None says that `key` was deleted. `sequence` is
        for producers with an id: any number that grows from event to event (a line number, a position in the source). An
        event whose number was stored before, by this producer or one before it with the same id, is not stored again.
        """
        if value.__class__ is not bytes and value.__class__ in _MUTABLE:
            value = value.copy()
        batch = self._open.get(topic)
        if (
            batch is None
            or batch.thread != get_ident()
            or headers is not None
            or sequence is not None
            or batch.sequences
        ):
            return self._send_locked(topic, value, key, headers, sequence)
        events = batch.events
        index = len(events)
        events += (key, value)
        if index < batch.last:
            return Receipt(batch, index >> 1)
        return self._send_last(topic, value, key, batch, index)

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Returns when every event sent so far is durable; raises the first failure since the last flush."""
        self._check_usable()
        with self._mutex:
            for topic in list(self._open):
                self._close_batch(topic)
        if not self._write_all(timeout_s):
            raise TimedOut(
                f"Not everything was written within {timeout_s} s.", advice="Flush again; the rest is still on its way."
            )
        failure, self._failure = self._failure, None
        if failure is not None:
            raise untraced(failure)

    async def send_async(self, topic: str, value: Any = None, **more: Any) -> Receipt:
        """`send` for asyncio: other tasks run while a full batch is written."""
        batch = self._open.get(topic)
        if batch is not None and len(batch.events) < batch.last:
            return self.send(topic, value, **more)
        return await asyncio.get_running_loop().run_in_executor(None, lambda: self.send(topic, value, **more))

    async def flush_async(self, *, timeout_s: float | None = None) -> None:
        """`flush` for asyncio."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, lambda: self.flush(timeout_s=timeout_s))

    def close(self) -> None:
        """Flushes, and ends."""
        if self._closed or self._foreign:
            return
        try:
            self.flush()
        finally:
            with self._mutex:
                self._closed = True
                self._work.notify_all()
            if self._thread is not None:
                self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Producer(id={self._id!r}, {'closed' if self._closed or self._foreign else 'open'})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def _forked(self) -> None:
        """In a child: what was gathered is the parent's to write."""
        self._foreign = True
        self._begin_empty()

    def _begin_empty(self) -> None:
        self._open: dict[str, Batch] = {}
        self._full: deque[Batch] = deque()
        self._shared: set[str] = set()
        self._mutex = threading.Lock()
        self._work = threading.Condition(self._mutex)
        self._writing = threading.Lock()
        self._ticking = False
        self._thread: Background | None = None

    # Gathering
    #
    # The thread that began a batch adds to it without a lock: one `+=` of a list is a single step of the interpreter, and
    # whoever closes a batch sets `last` first and counts then. So the event was counted if `last` was still good after it
    # was added; otherwise `_send_last` finds out under the lock. A topic to which a second thread sends is shared from then on:
    # its batches belong to no thread, and everybody takes the lock.

    def _send_locked(
        self, topic: str, value: Any, key: Any, headers: Mapping[str, bytes] | None, sequence: int | None
    ) -> Receipt:
        """What `send` does where it cannot do without a lock."""
        with self._mutex:
            batch = self._open.get(topic)
            foreign = batch is not None and batch.thread not in (NO_THREAD, get_ident())
            if foreign:
                self._shared.add(topic)
                self._close_batch(topic)
            if batch is None or foreign:
                batch = self._begin(topic)
            if sequence is not None or batch.sequences is not None:
                self._check_number(batch, sequence)
            index = len(batch.events)
            # No call in these lines, so Ctrl-C cannot part an event from what belongs to it.
            if headers is not None:
                batch.headers[index >> 1] = headers
            if sequence is not None:
                if batch.sequences is None:
                    batch.sequences = [sequence]
                else:
                    batch.sequences += (sequence,)
            batch.events += (key, value)
            is_full = index >= batch.last
            if is_full:
                self._close_batch(topic)
        if is_full or foreign:
            self._write_all(None)
        return Receipt(batch, index >> 1)

    def _send_last(self, topic: str, value: Any, key: Any, batch: Batch, index: int) -> Receipt:
        """An event that filled its batch, or came when the batch was due or already closed."""
        with self._mutex:
            if self._open.get(topic) is batch:
                self._close_batch(topic)
            is_in = index >> 1 < batch.count
        if not is_in:
            return self.send(topic, value, key=key)
        self._write_all(None)
        return Receipt(batch, index >> 1)

    def _begin(self, topic: str) -> Batch:
        """An open batch for a topic; the caller holds `_mutex`, here and below."""
        self._check_usable()
        check_name(topic)
        events_max = self._events_max.get(topic, self._batch_events_max) if self._linger_s else 1
        batch = Batch(
            self._store.topic(topic),
            thread=NO_THREAD if topic in self._shared else get_ident(),
            begun=time.monotonic(),
            events_max=events_max,
            send=self._send_now,
        )
        self._open[topic] = batch
        if self._thread is None and self._linger_s:
            self._thread = Background(self._run)
        if self._thread is not None and not self._ticking:
            self._work.notify_all()
        return batch

    def _close_batch(self, topic: str) -> None:
        """A batch takes no more events and is the next to be written.

        It goes over in one call into C, which Ctrl-C cannot divide: a batch that is nowhere would never be written.
        """
        self._open[topic].close()
        self._full.extend(map(self._open.pop, (topic,)))

    def _check_number(self, batch: Batch, sequence: int | None) -> None:
        """Refuses a number that does not come after those before it."""
        if self._id is None or sequence is None or (batch.sequences is None and batch.events):
            raise InvalidInput(
                "`sequence` needs a producer with an id, and is given with every event or with none.",
                advice='Open it with log.producer(id="…") and number all events.',
            )
        if type(sequence) is not int or not 0 <= sequence <= SEQUENCE_MAX:
            raise InvalidInput(f"{sequence!r} is not a sequence number.", advice=f"Use 0 to {SEQUENCE_MAX}.")
        if batch.sequences and sequence <= batch.sequences[-1]:
            raise SequenceGap(
                f"Sequence {sequence} came after {batch.sequences[-1]} from producer {self._id!r}.",
                advice="Give the events of a producer increasing numbers.",
            )

    # Writing

    def _run(self) -> None:
        """Sees to it that no event lingers for too long.

        A batch that is due is written by whoever adds the next event to it: two threads that fight for the interpreter are
        slower than one. Only where nobody does within a moment it is written here.
        """
        while True:
            with self._mutex:
                if self._closed:
                    return
                self._ticking = bool(self._open)
                self._work.wait(self._linger_s if self._open else None)
                self._ticking = True
                due = time.monotonic() - self._linger_s
                late = [(topic, batch) for topic, batch in self._open.items() if batch.begun <= due]
                for _, batch in late:
                    batch.last = -1
                if late:
                    self._work.wait(_MOMENT_S)
                for topic, batch in late:
                    if self._open.get(topic) is batch:
                        self._close_batch(topic)
            if late:
                self._write_all(None)

    def _send_now(self, timeout_s: float | None) -> None:
        self._check_usable()
        with self._mutex:
            for topic in list(self._open):
                self._close_batch(topic)
        self._write_all(timeout_s)

    def _write_all(self, timeout_s: float | None) -> bool:
        """Writes every full batch in order, unless another thread does; False when the time ran out before."""
        if timeout_s is not None:
            # Not `acquire(timeout=…)`: Ctrl-C behind it would leave the lock taken, which `with` never does.
            deadline = time.monotonic() + timeout_s
            while self._writing.locked():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_MOMENT_S)
        with self._writing:
            while self._full:
                batch = self._full[0]
                batch.outcome = batch.outcome or self._outcome(batch)
                self._failure = self._failure or batch.outcome.error()
                self._full.popleft()
                batch.forget()
        return True

    def _outcome(self, batch: Batch) -> Outcome:
        try:
            if batch.plan is None:
                batch.plan = self._plan(batch)
            return self._write(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the receipts, and the next batch goes on
            nowhere = [-1] * batch.count
            return Outcome(nowhere, nowhere, {}, {-1: untraced(error)}, 0)

    def _plan(self, batch: Batch) -> Plan:
        """What is written where, with which stamps: decided once, so that a write that was interrupted can be repeated."""
        topic, rows, taken, found = self._rows(batch)
        refused = {index: untraced(error) for index, error in found.items()}
        if rows.num_rows >= _SMALL_BATCH:
            self._events_max[topic.name] = _events_for(rows, self._batch_events_max)
        self._sticky += 1
        own = self._own_sticky(batch)
        placement = place(rows, topic.key, topic.partitions, sticky=self._sticky if own is None else own)
        return Plan(batch.count, taken, refused, placement, self._writes(batch, topic, rows, placement))

    def _write(self, batch: Batch) -> Outcome:
        assert batch.plan is not None
        plan, outcomes = batch.plan, self._write_with_retry(batch.plan.writes)
        while moved := [number for number, outcome in enumerate(outcomes) if isinstance(outcome, Repartitioned)]:
            # The plan comes first: a write that is interrupted is repeated by it. What was stored is found, not stored again.
            plan = batch.plan = self._planned_again(batch, plan, moved)
            outcomes = self._write_with_retry(plan.writes)
        stored: list[tuple[Write, Sequence[int]]] = []
        failed = {}
        for write, outcome in zip(plan.writes, outcomes, strict=True):
            if isinstance(outcome, Exception):
                failed[write.partition] = untraced(outcome)
                self._start_over(write.topic.name, write.partition)
            else:
                stored.append((write, outcome))
                self._next[write.topic.name, write.partition] = write.stamp.sequence_last + 1
        incarnation, count = self._store.incarnation(), plan.count
        partitions, only, refused, taken = plan.placement.partitions, plan.placement.only, plan.refused, plan.taken
        if only is not None and not refused and len(stored) == 1 and len(stored[0][1]) == count:
            return Outcome([only] * count, stored[0][1], refused, failed, incarnation)
        if refused:
            partitions = np.full(count, -1, dtype=np.int32)
            partitions[taken] = plan.placement.partitions
        offsets = np.full(count, STORED_BEFORE, dtype=np.int64)
        for write, found in stored:
            mine = slice(None) if write.indices is None else write.indices
            numbers = np.arange(found.start, found.stop) if isinstance(found, range) else found
            offsets[taken[mine] if refused else mine] = numbers
        return Outcome(partitions, offsets, refused, failed, incarnation)

    def _own_sticky(self, batch: Batch) -> int | None:
        """Where numbered events without a key go: always to the same partition, since their numbers are known there."""
        return None if batch.sequences is None else int.from_bytes(self._producer[:4], "big")

    def _planned_again(self, batch: Batch, plan: Plan, moved: Sequence[int]) -> Plan:
        """The plan after a split: the writes that it has moved are placed by the new number; they keep their sequences."""
        writes, partitions = [], np.array(plan.placement.partitions)
        for number, write in enumerate(plan.writes):
            some = [write]
            if number in moved:
                some = place_again(self._store, [write], sticky=self._own_sticky(batch))
            for one in some:
                partitions[slice(None) if one.indices is None else one.indices] = one.partition
            writes += some
        placement = Placement(partitions, max(write.topic.partitions for write in writes))
        return msgspec.structs.replace(plan, placement=placement, writes=writes)

    def _rows(self, batch: Batch) -> tuple[Topic, pa.RecordBatch, Any, dict[int, Exception]]:
        """The batch as columns, which of its events they are, and why the others are refused."""
        everything = slice(None)
        try:
            return batch.topic, to_rows(batch, batch.topic), everything, {}
        except SchemaMismatch:
            fresh = self._store.refresh(batch.topic.name)
            try:
                return fresh, to_rows(batch, fresh), everything, {}
            except HeadwaterError:
                return fresh, *to_rows_one_by_one(batch, fresh)
        except HeadwaterError:
            return batch.topic, *to_rows_one_by_one(batch, batch.topic)

    def _writes(self, batch: Batch, topic: Topic, rows: pa.RecordBatch, placement: Placement) -> list[Write]:
        """One write for each partition; without the events whose sequence number was stored before."""
        numbers = None if batch.sequences is None else np.asarray(batch.sequences, dtype=np.int64)
        writes = []
        for partition, indices in placement.groups():
            first = self._next_sequence(topic.name, partition)
            if numbers is not None:
                indices = np.arange(rows.num_rows) if indices is None else indices
                indices = indices[numbers[indices] >= first]
                if not len(indices):
                    continue
                stamp = self._stamp(int(numbers[indices[0]]), int(numbers[indices[-1]]))
            else:
                count = rows.num_rows if indices is None else len(indices)
                stamp = self._stamp(first, first + count - 1)
            writes.append(Write(topic, partition, rows, indices, stamp))
        return writes

    def _stamp(self, first: int, last: int) -> Stamp:
        return Stamp(producer=self._producer, epoch=self._epoch, sequence_first=first, sequence_last=last)

    def _next_sequence(self, topic: str, partition: int) -> int:
        """The sequence number that comes next in a partition; a named producer goes on where the one before ended."""
        known = self._next.get((topic, partition))
        if known is None:
            if self._id:
                stored = self._store.sequence_of(topic, partition, producer=self._producer)
                known = 0 if stored is None else stored + 1
            else:  # a partition that was split off has its parent's sequences
                ancestors = self._store.topic(topic).ancestors(partition)
                known = max((self._next.get((topic, number), 0) for number, _ in ancestors), default=0)
            self._next[topic, partition] = known
        return known

    def _start_over(self, topic: str, partition: int) -> None:
        """After a failure nobody knows whether the batch is stored: its numbers must never go to other events."""
        if self._id is None:
            self._producer = os.urandom(16)
            self._next.clear()
        else:
            self._next.pop((topic, partition), None)

    def _write_with_retry(self, writes: list[Write]) -> list[range | Exception]:
        outcomes = self._store.write(writes)
        backoff, deadline = Backoff(*_RETRY_S), time.monotonic() + self._retry_s
        while time.monotonic() < deadline:
            again = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, DiskFull)]
            if not again:
                break
            backoff.sleep()
            for number, outcome in zip(again, self._store.write([writes[number] for number in again]), strict=True):
                outcomes[number] = outcome
        return outcomes

    def _check_usable(self) -> None:
        if self._foreign:
            raise Closed(
                "This producer belongs to the process that forked this one.", advice="Open a producer in this process."
            )
        if self._closed:
            raise Closed("The producer was closed.", advice="Open another with log.producer().")
        if isinstance(self._failure, Fenced):
            raise untraced(self._failure)


def _check_settings(id: object, *, linger_ms: object, retry_s: object) -> None:
    if id is not None and not (isinstance(id, str) and id and is_text(id)):
        raise InvalidInput(
            f"{id!r} cannot be a producer's id.", advice="Use Unicode text that is not empty, or leave out the id."
        )
    for name, value in (("linger_ms", linger_ms), ("retry_s", retry_s)):
        if not isinstance(value, (int, float)) or not 0 <= value <= 1e9:
            raise InvalidInput(f"{name}={value!r} is not valid.", advice="Use 0 or a larger number.")


def _events_for(rows: pa.RecordBatch, events_max: int) -> int:
    """How many events like these make a batch of a good size."""
    return max(1, min(events_max, BATCH_BYTES_MAX * rows.num_rows // pa.ipc.get_record_batch_size(rows)))
