"""Leases from windows over a partitioned log: the engine of queues whose log Headwater keeps itself.

A window says for each partition what became of each event (see `window`); a window store keeps the windows and knows the
members (see `window_store`). The engine goes through the partitions in turn, takes back what dead members had out, and keeps the
order of keys across a split.

Thread-safety: may be used by many threads. Lock order: the lock of one partition's window, then those of the log. After a fork it
belongs to the parent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import compress

from headwater.log.disk.wait import wait_async
from headwater.log.port.lease_engine import Feature, Granted, LeaseEngine, QueueFeatures, QueueOpening, SentBack, Taken
from headwater.log.port.split import is_held
from headwater.log.port.store import Bounds, Store, Waiter
from headwater.log.queue.depth import Depth, QueueEntry, browse, count
from headwater.log.queue.partition import LeasedOffsets, QueuePartition
from headwater.log.queue.window import FAR_US
from headwater.log.queue.window_store import WindowStore
from headwater.model.errors import TopicNotFound

SWEEP_S = 0.1
"""How often the leases of dead members are looked for."""

_BUSY_S = 0.0005
_BLOCKED_S = 0.005
_LOOK_AGAIN_S = 0.02
_WAIT_S_MAX = 0.25


class WindowEngine:
    """Hands out and settles the events of one queue by its windows, for one handle."""

    features = QueueFeatures()
    asks = False
    sent_back: SentBack | None = None

    def __init__(self, store: Store, windows: WindowStore, opening: QueueOpening) -> None:
        self.made: Mapping[str, object] = windows.settings(opening.wanted)
        self.writable = windows.writable
        self.has_threads = windows.has_threads
        self._store = store
        self._windows = windows
        self._opening = opening
        self._topic = opening.topic
        self._settings = opening.settings_of(self.made)
        self._parts: dict[int, QueuePartition] = {}
        self._waiter: Waiter | None = None
        self._member = 0
        self._turn = 0
        self._sweep_at = 0.0
        self._peers: list[int] = []
        self._free: set[int] = set()

    # Leasing

    def patience_s(self) -> float:
        return 0.0

    def ready(self, events_max: int) -> list[Granted]:
        """Nothing: acknowledgements are written first, as they may free a key or a place."""
        return []

    def take(self, events_max: int, *, wait_s: float) -> Taken:
        if not self._member:
            self._member = self._windows.join()
            self._sweep_at = 0.0
        self._sweep()
        granted: list[Granted] = []
        if events_max <= 0:
            return Taken(again_s=self._pause_s(is_busy=False))
        bounds = self._bounds()
        numbers = list(bounds)
        self._turn += 1
        busy = []
        left = events_max
        for step in range(len(numbers)):
            number = numbers[(self._turn + self._member + step) % len(numbers)]
            if self._is_held(number, bounds):
                continue
            found = self._take_of(number, bounds[number], granted, left, wait=False)
            if found is None:
                busy.append(number)
            left -= found or 0
            if left <= 0:
                return Taken(granted)
        for number in busy if wait_s <= 0 and left == events_max else ():
            left -= self._take_of(number, bounds[number], granted, max(left, 0), wait=True) or 0
        return Taken(granted) if left < events_max else Taken(granted, self._pause_s(is_busy=bool(busy)))

    def pause(self, s: float) -> None:
        self._watch().wait(s)

    async def pause_async(self, s: float) -> None:
        await wait_async(self._watch(), s)

    # Settling

    def ack(self, partition: int, offsets: Sequence[int], token: int) -> int:
        return self.partition(partition).ack(offsets, token)

    def nack(self, partition: int, offsets: Sequence[int], token: int, *, time: int, reason: str) -> list[int]:
        return self.partition(partition).nack(offsets, token, time=time, reason=reason)

    def reject(self, partition: int, offsets: Sequence[int], token: int, *, reason: str) -> list[int]:
        return self.partition(partition).reject(offsets, token, reason=reason)

    def give_back(self) -> None:
        for part in list(self._parts.values()):
            if part.has_leased:
                part.give_back_all(self._member)

    def close(self) -> None:
        if self._waiter is not None:
            self._waiter.close()
        self._windows.close(self._member)

    def forked(self) -> None:
        self._windows.forked()

    # What only windows can do

    def partition(self, number: int) -> QueuePartition:
        """One partition: its leases and its window."""
        found = self._parts.get(number)
        if found is None:
            found = self._parts[number] = QueuePartition(
                self._store, self._windows, self._opening, number=number, settings=self._settings
            )
        return found

    def browse(self, events_max: int) -> list[QueueEntry]:
        """The first events that are not acknowledged, partition after partition."""
        return browse(self._all_parts(), events_max=events_max, now=self._opening.clock())

    def depth(self, *, dead: int) -> Depth:
        """How many events there are of each kind, with so many dead letters."""
        return count(self._all_parts(), now=self._opening.clock(), dead=dead)

    def floors(self) -> dict[int, int]:
        """In each partition the offset below which everything is acknowledged."""
        return {number: self.partition(number).floor(bounds) for number, bounds in self._bounds().items()}

    def restart(self, places: Mapping[int, int]) -> None:
        """Continues from these offsets, partition by partition, for the whole group."""
        for number, offset in places.items():
            self.partition(number).restart(offset)
        self._free.clear()

    def _take_of(
        self, number: int, bounds: Bounds, granted: list[Granted], events_max: int, *, wait: bool
    ) -> int | None:
        """Adds what one partition gives, and says how many events; None where another process has its lock."""
        part, taken = self.partition(number), 0
        while True:
            leased = part.lease(events_max - taken, member=self._member, peers=self._peers, bounds=bounds, wait=wait)
            if leased is None:
                return taken if taken else None
            if leased.count:
                one = self._granted(part, leased)
                taken += len(one.events)
                granted += [one] if one.events or one.gone else []
            if self._opening.where is None or not leased.count or taken >= events_max:
                return taken

    def _is_held(self, number: int, bounds: Mapping[int, Bounds]) -> bool:
        """In order, one that was split off waits until its ancestors are acknowledged up to their fences."""
        if not self._settings.has_keys or number in self._free:
            return False
        ancestors = self._store.topic(self._topic.name).ancestors(number)
        if is_held(ancestors, lambda ancestor: self.partition(ancestor).floor(bounds[ancestor])):
            return True
        self._free.add(number)
        return False

    def _granted(self, part: QueuePartition, leased: LeasedOffsets) -> Granted:
        """The events of what was leased; what the handle does not want goes back to the others."""
        where = self._opening.where
        try:
            events, deliveries, gone = part.events(leased)
            wanted = None if where is None else [bool(where(event)) for event in events]
        except Exception:
            for offsets in leased.offsets:
                part.nack(offsets.tolist(), leased.token, time=0, reason="", delivered=False)
            raise
        if wanted is not None and not all(wanted):
            others = [event.offset for event, is_wanted in zip(events, wanted, strict=True) if not is_wanted]
            part.pass_over(others, leased.token)
            events, deliveries = list(compress(events, wanted)), list(compress(deliveries, wanted))
        return Granted(part.number, leased.token, leased.until, events, deliveries, gone)

    def _sweep(self) -> None:
        """Now and then: what members had out whose process is dead is given back; a busy partition's share the next time."""
        at = time.monotonic()
        if at < self._sweep_at:
            return
        self._sweep_at = at + SWEEP_S
        self._free.clear()
        for member in self._windows.dead_members():
            returned = [self.partition(number).give_back_all(member, wait=False) for number in self._bounds()]
            self._opening.counters["returned"] += sum(filter(None, returned))
            self._windows.reach("queue: given back")
            if None not in returned:
                self._windows.bury_member(member)
        if self._settings.is_sticky:
            self._peers = self._windows.members()

    def _pause_s(self, *, is_busy: bool) -> float:
        """How long to sleep when there was nothing: others give back without waking us."""
        if is_busy:
            return _BUSY_S
        left_us = min((part.waits_us() for part in self._parts.values()), default=FAR_US)
        if left_us >= FAR_US:
            return _WAIT_S_MAX
        left_s = left_us / 1e6
        return _BLOCKED_S if left_s <= 0 else max(_BUSY_S, min(_LOOK_AGAIN_S, left_s))

    def _all_parts(self) -> list[tuple[QueuePartition, Bounds]]:
        return [(self.partition(number), bounds) for number, bounds in self._bounds().items()]

    def _bounds(self) -> dict[int, Bounds]:
        name = self._topic.name
        if self._store.topic(name).id != self._topic.id:
            raise TopicNotFound(f"Topic {name!r} was deleted and created again.", advice="Open the queue again.")
        return {number: bound for (_, number), bound in self._store.bounds([name]).items()}

    def _watch(self) -> Waiter:
        if self._waiter is None:
            self._waiter = self._store.waiter([self._topic.name])
        return self._waiter


def engine_with_windows(engine: LeaseEngine, feature: Feature) -> WindowEngine:
    """An engine as what can do more than every engine can; refuses the feature where it is another one."""
    engine.features.check(feature)
    assert isinstance(engine, WindowEngine)
    return engine
