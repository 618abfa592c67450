"""Overload: what happens to an append when its partition is at the topic's `bytes_max`, or the disk is full.

    block        `TopicFull`, which a producer tries again for its `retry_s` and `log.append` for half a minute; nothing is lost
    reject       `Overloaded` at once; the counter `rejected` says how many events were refused
    drop_oldest  the oldest segments go to make room; the counter `dropped` says how many events that were
    buffer       it takes up to `buffer_bytes` more, out of room that is set aside on the disk (see `reserve`); the counter `buffered`
                 says how many events that were. Behind that as `reject`

A partition is measured before each batch, without its append lock, so writers at the same moment may go over the limit by one
batch each. What is expired goes first and may make the room.
A transaction is refused at once where others would wait.

Thread-safety: a gauge may be used by many threads.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn
from weakref import WeakKeyDictionary, WeakSet

from headwater.log.disk.disk import Disk
from headwater.log.file.partition.head import Appended
from headwater.log.file.partition.partition import Partition
from headwater.log.file.segments.frame import Payload
from headwater.log.file.upkeep.keeper import holding
from headwater.log.file.upkeep.reserve import fill, take
from headwater.log.file.upkeep.retention import give_up, segment_sizes
from headwater.model.errors import DiskFull, Overloaded, TopicFull

_LOOKS_MAX = 100
_LOOK_S = 0.01
_EVER_US = 1 << 62


class Gauge:
    """How full the partitions of one log are, as one process sees it."""

    def __init__(self, disk: Disk, counters: Counter[str], expire: Callable[[Partition], object]) -> None:
        self._disk = disk
        self._counters = counters
        self._expire = expire
        self._reserved: WeakSet[Partition] = WeakSet()
        self._closed_bytes: WeakKeyDictionary[Partition, tuple[tuple[int, int], int]] = WeakKeyDictionary()

    def append(
        self,
        partition: Partition,
        payloads: Sequence[Payload],
        *,
        generation: int,
        epoch: Callable[[], int] | None = None,
    ) -> Appended:
        """Appends, and does what the topic says where there is no room."""
        buffered = self.admit(partition, payloads)
        end = partition.written().end if partition.topic.overload == "buffer" else 0
        try:
            appended = partition.append(payloads, generation=generation, epoch=epoch)
        except DiskFull as error:
            buffered |= self._disk_is_full(partition, payloads, error)
            appended = partition.append(payloads, generation=generation, epoch=epoch)
        if buffered and appended.offsets.start >= end:  # and not stored before
            self.count_buffered(payloads)
        return appended

    def count_buffered(self, payloads: Sequence[Payload]) -> None:
        """These were admitted to the buffer, and are there."""
        self._counters["buffered"] += _measure(payloads)[0]

    def admit(self, partition: Partition, payloads: Sequence[Payload]) -> bool:
        """Lets events pass, makes room for them, or refuses them; whether they go to the buffer."""
        limit, is_buffered = partition.topic.bytes_max, partition.topic.overload == "buffer"
        if limit is None and not is_buffered:
            return False
        events, size = _measure(payloads)
        if is_buffered and partition not in self._reserved:
            self._reserved.add(partition)
            fill(self._disk, partition)
        if limit is None or self._used(partition) + size <= limit:
            return False
        if size > limit + (partition.topic.buffer_bytes if is_buffered else 0):
            self._refuse(events, f"{events} events of {size:,} bytes are more than {partition.where()} may ever hold.")
        self._expire(partition)
        limit = partition.topic.bytes_max
        if limit is None or self._measured(partition) + size <= limit:
            return False
        full = f"No room is left in {partition.where()}: it may hold {limit:,} bytes."
        match partition.topic.overload:
            case "drop_oldest":
                self._drop_oldest(partition, room_bytes=limit - size)
            case "reject":
                self._refuse(events, full)
            case "buffer":
                if self._measured(partition) + size > limit + partition.topic.buffer_bytes:
                    self._refuse(events, f"{full[:-1]}, and as many as {partition.topic.buffer_bytes:,} in its buffer.")
                fill(self._disk, partition, coming_bytes=size)
                return True
            case "block":
                self._counters["blocked"] += 1
                raise TopicFull(
                    full, advice="The append is retried for a while. Retention or a larger bytes_max makes room."
                )
        return False

    def _disk_is_full(self, partition: Partition, payloads: Sequence[Payload], error: DiskFull) -> bool:
        """Makes room on a full disk, or raises what the topic's policy says; whether it is taken from the reserve."""
        events, size = _measure(payloads)
        if partition.topic.overload == "reject":
            self._refuse(events, error.what)
        if partition.topic.overload == "block":
            raise error
        if partition.topic.overload == "buffer":
            if not take(self._disk, partition, size):
                self._refuse(events, error.what)
            return True
        if not self._drop_oldest(partition, room_bytes=max(0, self._measured(partition) - size)):
            raise error
        return False

    def _drop_oldest(self, partition: Partition, *, room_bytes: int) -> bool:
        """Gives up the oldest segments until a partition has at most so many bytes; the active one too if it must be."""
        for _ in range(_LOOKS_MAX):
            with holding(self._disk, partition) as alone:
                if alone:
                    return self._drop_alone(partition, room_bytes)
            time.sleep(_LOOK_S)
        return False

    def _drop_alone(self, partition: Partition, room_bytes: int) -> bool:
        before = partition.first()
        for is_last_try in (False, True):
            sizes = segment_sizes(self._disk, partition)
            total = sum(sizes.values())
            first = before
            for base, size in sizes.items():
                first = base
                if total <= room_bytes or base >= partition.durable_base():
                    break
                total -= size
            if total <= room_bytes or is_last_try:
                break
            partition.roll_older_than(_EVER_US)
        first = give_up(self._disk, partition, first)
        self._counters["dropped"] += first - before
        return first > before

    def _refuse(self, events: int, what: str) -> NoReturn:
        self._counters["rejected"] += events
        raise Overloaded(what, advice="Nothing was stored. Append less, or give the topic more room.")

    def _used(self, partition: Partition) -> int:
        written = partition.written()
        known = self._closed_bytes.get(partition)
        if known is None or known[0] != (partition.first(), written.base):
            return self._measured(partition)
        return known[1] + written.position

    def _measured(self, partition: Partition) -> int:
        """Measured anew: sealing and compaction make segments smaller at any time."""
        written, first = partition.written(), partition.first()
        sizes = segment_sizes(self._disk, partition)
        closed = sum(size for base, size in sizes.items() if base < written.base)
        self._closed_bytes[partition] = ((first, written.base), closed)
        return closed + written.position


def _measure(payloads: Sequence[Payload]) -> tuple[int, int]:
    """How many events, and how many bytes they take."""
    return sum(payload.count for payload in payloads), sum(payload.stride for payload in payloads)
