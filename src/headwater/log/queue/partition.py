"""One partition of a queue: leases, acknowledgements and dead letters as operations on its window.

Each operation takes the partition's queue lock once, whatever the number of events, and does a few NumPy operations. Events
are read from the topic as by any reader; the window says only what became of them. An event becomes an object after the
lock is free again.

Leases are found in two places: entries of the window whose time has come (given back, expired, scheduled), and after them
the events that nobody has looked at. Chunks without headers in a queue without order are leased as a whole; of others
the window is told first what each event asks for.

After a power loss the window knows its floor only (see `window`). What units of work and dead letters have acknowledged above
it stands in a topic (see `acks_topic`): whoever first holds the lock looks at all events up to the last of those, and settles them again.

Lock order: the partition's queue lock, then those of the log's topics. Thread-safety: may be used by many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np

from headwater.log.arrow.events import to_events
from headwater.log.arrow.rows import to_batch
from headwater.log.port.chunk import Chunk
from headwater.log.port.lease_engine import QueueOpening, QueueSettings
from headwater.log.port.store import Bounds, Cursor, Store
from headwater.log.port.write import NO_PRODUCER, Write
from headwater.log.queue.acks_topic import acks_name, begin_counting, decoded, encoded
from headwater.log.queue.headers import Ids, delays, delivery_times, has_headers, is_for_others, key_hashes
from headwater.log.queue.window import CAPACITY_MAX, FAR_US, READY, Offsets, Window
from headwater.log.queue.window_store import WindowStore
from headwater.model.errors import EventsMissed, Overloaded, TopicNotFound
from headwater.model.event import Event

KEYED_EVENTS_MAX = 16_384
"""With order="key": how many waiting events are looked at for one whose key is free."""

_KEYED_BLOCK = 1_024
_SKIP_MAX = 20_000
_JOIN_GAP = 64
_RECOVERED_BLOCK = 16_384
_SHOWN_US = 100_000


class LeasedOffsets(msgspec.Struct):
    """What one call got: offsets in order, how often each was delivered, and the chunks of those never seen before."""

    token: int
    deadline: int
    """By the clock of the window."""
    until: int
    """The same by the steady clock."""
    peers: Sequence[int] = ()
    offsets: list[Offsets] = []
    deliveries: list[Any] = []
    chunks: list[list[Chunk]] = []

    @property
    def count(self) -> int:
        """How many events."""
        return sum(len(some) for some in self.offsets)


class QueuePartition:
    """One partition of a queue, for one handle."""

    def __init__(
        self, store: Store, windows: WindowStore, opening: QueueOpening, *, number: int, settings: QueueSettings
    ) -> None:
        self.number = number
        self._store = store
        self._windows = windows
        self._opening = opening
        self._topic = topic = opening.topic.name
        self._group = opening.group
        self._settings = settings
        self._clock = opening.clock
        self._steady = steady = opening.steady
        self._boot_id = "" if steady.is_own else steady.boot_id()
        self._fresh = OffsetReader(store, topic, number)
        self._again = OffsetReader(store, topic, number)
        self._reading = threading.Lock()
        self._sequence = 0
        self._ids: Ids | None = None
        if settings.duplicates_us is not None:
            self._ids = Ids(store, topic, number, window_us=settings.duplicates_us)
        self._unwanted = np.empty(0, np.int64)
        self.has_leased = False
        self._waits_until: tuple[int, int] = (0, 0)

    def waits_us(self) -> int:
        """In how many microseconds something may be due, as far as the last look showed; FAR_US where the window was empty."""
        steady, date = self._waits_until
        left = [steady - self._steady()] if steady < FAR_US else []
        return min(left + ([date - self._clock()] if date < FAR_US else []), default=FAR_US)

    def lease(
        self, events_max: int, *, member: int, peers: Sequence[int], bounds: Bounds, wait: bool
    ) -> LeasedOffsets | None:
        """Up to `events_max` leases, where `peers` are given only of keys that fall to the member among them.

        None where another process has the lock and `wait` is not asked.
        """
        with self.locked(floor=bounds.first, wait=wait) as window:
            if window is None:
                return None
            self._sequence = self._sequence + 1 & 0xFFFFFFFF
            start, until = self._clock_start(window), self._steady() + self._settings.lease_us
            granted = LeasedOffsets(member << 32 | self._sequence, start + until, until, peers=peers)
            self._skip_what_is_gone(window, bounds)
            if window.hint <= start + self._steady() or window.hint_at <= self._clock():
                self._lease_due(window, granted, events_max)
            while granted.count < events_max and window.next < bounds.end:
                window, is_more = self._look_further(window, granted, events_max - granted.count, bounds.end)
                if not is_more:
                    break
            self._waits_until = (FAR_US, FAR_US)
            if window.next > window.floor:
                self._waits_until = (window.hint - start if window.hint < FAR_US else FAR_US, window.hint_at)
            self.has_leased |= granted.count > 0
        return granted

    def events(self, granted: LeasedOffsets) -> tuple[list[Event], list[int], list[int]]:
        """The events of what was granted with their deliveries, and the offsets at which there is none any more."""
        events: list[Event] = []
        deliveries: list[int] = []
        gone: list[int] = []
        for offsets, counts, chunks in zip(granted.offsets, granted.deliveries, granted.chunks, strict=True):
            if chunks:
                found = [event for chunk in chunks for event in to_events(chunk)]
            else:
                with self._reading:
                    found = self._again.pick(offsets)
            events += found
            if len(found) == len(offsets):
                deliveries += counts.tolist()
                continue
            by_offset = dict(zip(offsets.tolist(), counts.tolist(), strict=True))
            deliveries += [by_offset.pop(event.offset) for event in found]
            gone += by_offset
        return events, deliveries, gone

    def ack(self, offsets: Sequence[int], token: int) -> int:
        """Acknowledges what is still leased by the token; how many were not."""
        with self.locked() as window:
            assert window is not None
            wanted = np.array(offsets, np.int64)
            held = window.holds(wanted, token)
            window.settle(wanted[held])
        return int(np.count_nonzero(~held))

    def nack(self, offsets: Sequence[int], token: int, *, time: int, reason: str, delivered: bool = True) -> list[int]:
        """Gives leases back, until a `time` of the steady clock; those delivered too often go to the dead letters.

        Returns those that were not in force.
        """
        with self.locked() as window:
            assert window is not None
            wanted = np.array(offsets, np.int64)
            held = window.holds(wanted, token)
            mine = wanted[held]
            over = self._is_over(window, mine) & delivered
            later = min(time + self._clock_start(window), FAR_US - 1) if time else 0
            window.give_back(mine[~over], time=later, delivered=delivered)
            self._bury(window, mine[over], [reason] * int(over.sum()))
        return wanted[~held].tolist()

    def defer(self, offsets: Sequence[int], token: int) -> list[int]:
        """Lays leases aside until they are recalled; returns those that were not in force."""
        with self.locked() as window:
            assert window is not None
            wanted = np.array(offsets, np.int64)
            held = window.holds(wanted, token)
            window.give_back(wanted[held], time=FAR_US, delivered=False)
        return wanted[~held].tolist()

    def recall(self, offsets: Sequence[int]) -> int:
        """What was laid aside is due now; how many of them were."""
        with self.locked() as window:
            assert window is not None
            return int(np.count_nonzero(window.recall(np.array(offsets, np.int64))))

    def pass_over(self, offsets: Sequence[int], token: int) -> None:
        """Gives back what this handle does not want, as if it had never been out, and does not take it again."""
        with self.locked() as window:
            assert window is not None
            wanted = np.array(offsets, np.int64)
            window.give_back(wanted[window.holds(wanted, token)], time=0, delivered=False)
            known = self._unwanted[self._unwanted >= window.floor]
            self._unwanted = np.concatenate([known, wanted])

    def reject(self, offsets: Sequence[int], token: int, *, reason: str) -> list[int]:
        """Sends leases to the dead letters; returns those that were not in force."""
        with self.locked() as window:
            assert window is not None
            wanted = np.array(offsets, np.int64)
            held = window.holds(wanted, token)
            self._bury(window, wanted[held], [reason] * int(held.sum()))
        return wanted[~held].tolist()

    def extend(self, offsets: Sequence[int], token: int, *, deadline: int) -> list[int]:
        """Moves deadlines to a time of the steady clock; returns those that were not in force."""
        with self.locked() as window:
            assert window is not None
            wanted = np.array(offsets, np.int64)
            held = window.holds(wanted, token)
            window.extend(wanted[held], deadline=deadline + self._clock_start(window))
        return wanted[~held].tolist()

    def give_back_all(self, member: int, *, wait: bool = True) -> int | None:
        """What a member has out is to be delivered again; how many that were, None where another process has the lock."""
        with self.locked(wait=wait) as window:
            if window is None:
                return None
            offsets = window.leased_by(member)
            window.give_back(offsets, time=0)
        return len(offsets)

    def restart(self, offset: int) -> None:
        """Goes on from another offset; leases that are out count no more, nor does what units of work have acknowledged."""
        with self.locked(floor=offset) as window:
            assert window is not None
            if window.acks_since:
                window.acks_since = self._acks_bounds().end + 1
                self._windows.sync(self.number)
            window.restart(offset)

    def floor(self, bounds: Bounds) -> int:
        """Everything below is acknowledged."""
        with self.locked(floor=bounds.first) as window:
            assert window is not None
            self._skip_what_is_gone(window, bounds)
            return window.floor

    def waiting(self, bounds: Bounds, *, fresh_max: int) -> tuple[list[tuple[int, int, int, int]], list[Chunk], int]:
        """Everything not acknowledged, leasing nothing: entries, the events after them, and where these begin.

        The time of an entry is a date.
        """
        with self.locked(floor=bounds.first) as window:
            assert window is not None
            self._skip_what_is_gone(window, bounds)
            offsets, states, deliveries, times = window.entries()
            # Not to the microsecond: two who look would see two dates, as two clocks are never read at one moment.
            set_by = round((self._steady.start_us() - self._clock_start(window)) / _SHOWN_US) * _SHOWN_US
            times[(states != READY) & (times > 0)] += set_by
            columns = (offsets, states, deliveries, times)
            entries = list(zip(*(column.tolist() for column in columns), strict=True))
            start = window.next
        with self._reading:
            chunks = self._again.read(start, min(bounds.end, start + fresh_max)) if start < bounds.end else []
        return entries, chunks, start

    def events_at(self, offsets: Sequence[int]) -> list[Event]:
        """The events at these offsets, as far as they are still there."""
        with self._reading:
            return self._again.pick(np.array(sorted(offsets), np.int64))

    def is_skipped(self, chunk: Chunk) -> Any:
        """Which events of a chunk this group is never given: those for others. Ids are looked at when they are leased."""
        return is_for_others(chunk, self._group)

    @contextmanager
    def locked(self, *, floor: int = 0, wait: bool = True) -> Iterator[Window | None]:
        """Holds the window's lock, with what a power loss or a dead process left put in order; None where others have it."""
        with self._windows.locked(self.number, floor=floor, wait=wait) as window:
            if window is not None:
                if window.incarnation != self._store.incarnation():
                    window = self._recover(window)
                if window.acks_from:
                    self._finish_work(window)
            yield window

    def begin_unit(self, window: Window, *, end: int) -> None:
        """Notes that a unit of work acknowledges something at `end` of the topic of acknowledgements; the caller holds the lock."""
        begin_counting(window, self._windows, self.number, end=end)
        window.acks_from = end + 1

    def reach(self, point: str) -> None:
        """A step of a unit of work, at which a crash may fall."""
        self._windows.reach(point)

    # Under the lock

    def _clock_start(self, window: Window) -> int:
        """What the steady clock is counted from in a window; whoever asks first since the machine was started says it."""
        if self._steady.is_own:
            return 0
        if not window.clock_start:
            window.clock_start = self._steady.start_us() + 1
        return window.clock_start - 1

    def _finish_work(self, window: Window) -> None:
        """A dead process had begun a unit of work: does what was committed of it."""
        if self._windows.writable:
            # Its transaction may be recorded and not published: whoever asks for this first settles what the dead left.
            with suppress(TopicNotFound):
                self._store.sequence_of(acks_name(self._topic, self._group), 0, producer=NO_PRODUCER)
        for token, offsets in self._acks(window.acks_from - 1):
            window.settle(offsets[window.holds(offsets, token)])
        window.acks_from = 0

    def _recover(self, window: Window) -> Window:
        """Puts a window in order after a power loss; it may be a larger one then.

        Killed on the way, the next one begins again, at a floor that may have moved over what was settled.
        """
        lost = self._store.lost_after(self._topic, self.number, incarnation=window.incarnation)
        window.recover(lost_after=lost)
        if window.acks_since:
            every = [offsets for _, offsets in self._acks(window.acks_since - 1)]
            done = np.unique(np.concatenate([np.empty(0, np.int64), *every]))
            if lost is not None and len(done) and done[-1] >= lost:
                # They speak of events that are lost, and others get their offsets: never to be done again after another power loss.
                done = done[done < lost]
                window = self._settle_again(window, done)
                if self._windows.writable:
                    window.acks_since = self._acks_bounds().end + 1
                    self._windows.sync(self.number)
            else:
                window = self._settle_again(window, done)
        window.incarnation = self._store.incarnation()
        self._windows.reach("queue recovery: put in order")
        return window

    def _settle_again(self, window: Window, done: Offsets) -> Window:
        """Looks at all events up to the last that is `done`, and settles those."""
        done = done[done >= window.floor]
        end = min(int(done[-1]) + 1, self._bounds().end) if len(done) else 0
        while window.next < end:
            if self._windows.writable:
                while window.room < end - window.next and window.capacity < CAPACITY_MAX:
                    window = self._windows.grow(self.number)
            start, count = window.next, min(window.room, end - window.next, _RECOVERED_BLOCK)
            if count == 0:  # the floor on disk was so old that not all of them have a place: the rest comes again
                break
            self._add(window, self._fresh.read(start, start + count), start, count)
            window.settle(done[(done >= max(start, window.floor)) & (done < start + count)])
            self._windows.reach("queue recovery: settled again")
        return window

    def _acks(self, start: int) -> Iterator[tuple[int, Offsets]]:
        """What units of work have acknowledged of this partition, from a place of their topic on: tokens and offsets."""
        bounds, name = self._acks_bounds(), acks_name(self._topic, self._group)
        start = max(start, bounds.first)
        chunks = OffsetReader(self._store, name, 0).read(start, bounds.end) if start < bounds.end else []
        for chunk in chunks:
            for value in chunk.batch.column("value").to_pylist():
                number, token, offsets = decoded(value)
                if number == self.number:
                    yield token, offsets

    def _acks_bounds(self) -> Bounds:
        name = acks_name(self._topic, self._group)
        try:
            return self._store.bounds([name])[name, 0]
        except TopicNotFound:
            return Bounds(0, 0)

    def _bounds(self) -> Bounds:
        return self._store.bounds([self._topic])[self._topic, self.number]

    def _skip_what_is_gone(self, window: Window, bounds: Bounds) -> None:
        """What retention has taken counts as acknowledged."""
        if bounds.first > window.floor:
            if bounds.first >= window.next:
                window.restart(bounds.first)
            else:
                window.settle(np.arange(window.floor, bounds.first, dtype=np.int64))

    def _lease_due(self, window: Window, granted: LeasedOffsets, events_max: int) -> None:
        now, date = self._clock_start(window) + self._steady(), self._clock()
        while True:
            found, (rest, rest_at) = window.due(
                now,
                events_max,
                date=date,
                without=self._unwanted if len(self._unwanted) else None,
                among=(granted.token >> 32, granted.peers) if granted.peers else None,
            )
            over = self._is_over(window, found) | window.is_burying(found)
            if not over.any():
                break
            dying = found[over]
            leased = window.is_leased(dying)
            self._bury(window, dying, ["lease expired" if out else "given back" for out in leased.tolist()])
        if len(found):
            granted.offsets.append(found)
            granted.deliveries.append(window.take(found, token=granted.token, deadline=granted.deadline))
            granted.chunks.append([])
            self._windows.reach("queue: leased again")
            rest = min(rest, granted.deadline)
        window.hint, window.hint_at = rest, rest_at

    def _look_further(self, window: Window, granted: LeasedOffsets, wanted: int, end: int) -> tuple[Window, bool]:
        """Leases events nobody has looked at; the window, perhaps a larger one, and whether to go on."""
        block = wanted
        if self._settings.has_keys:
            waiting = len(window.entries()[0])
            block = min(max(wanted, _KEYED_BLOCK), KEYED_EVENTS_MAX - waiting)
        start = window.next
        window, block = self._make_room(window, min(block, end - start))
        if block <= 0:
            return window, False
        chunks = self._fresh.read(start, start + block)
        count = max(self._fresh.offset - start, 0)
        is_whole = sum(chunk.batch.num_rows for chunk in chunks) == count
        if is_whole and not self._settings.has_keys and not has_headers(chunks):
            granted.offsets.append(window.add_leased(count, token=granted.token, deadline=granted.deadline))
            granted.deliveries.append(np.ones(count, np.int64))
            granted.chunks.append(chunks)
            self._windows.reach("queue: leased")
            return window, True
        self._add(window, chunks, start, count)
        self._windows.reach("queue: looked at")
        self._lease_due(window, granted, wanted)
        return window, True

    def _add(self, window: Window, chunks: Sequence[Chunk], start: int, count: int) -> None:
        """Tells the window what each event asks for; what is no longer there counts as done."""
        times = np.zeros(count, np.int64)
        done = np.ones(count, np.bool_)
        keys = np.zeros(count, np.uint64)
        delayed = np.zeros(count, np.bool_)
        for chunk in chunks:
            rows = chunk.all_offsets() - start
            times[rows] = delivery_times(chunk)
            self._tell_delays(window, chunk, rows, times, delayed)
            done[rows] = is_for_others(chunk, self._group)
            if self._ids is not None:
                done[rows] |= self._ids.is_duplicate(chunk)
            if self._settings.has_keys:
                keys[rows] = key_hashes(chunk)
        window.add(times, done, keys, delayed=delayed)
        if done.any():
            window.settle(np.flatnonzero(done) + start)

    def _tell_delays(self, window: Window, chunk: Chunk, rows: Offsets, times: Any, delayed: Any) -> None:
        """A delay of this boot ends by the steady clock; of one before, at its date, and never later than if it began now."""
        for row, boot, due, delay_us in [] if self._steady.is_own else delays(chunk):
            at = rows[row]
            if boot == self._boot_id:
                times[at], delayed[at] = due + self._clock_start(window), True
            else:
                times[at] = min(times[at], self._clock() + delay_us)

    def _make_room(self, window: Window, wanted: int) -> tuple[Window, int]:
        while window.room < wanted and window.capacity < CAPACITY_MAX:
            window = self._windows.grow(self.number)
        if wanted > 0 and window.room == 0:
            raise Overloaded(
                f"Group {self._group!r} has not acknowledged event {window.floor} of partition {self.number} of topic "
                f"{self._topic!r}, and {CAPACITY_MAX:,} events after it have no room in the queue's window.",
                advice="Acknowledge or reject that event. Put events that are scheduled far ahead into a topic of their own.",
            )
        return window, min(wanted, window.room)

    def _is_over(self, window: Window, offsets: Offsets) -> Any:
        if self._settings.deliveries_max is None:
            return np.zeros(len(offsets), np.bool_)
        return window.deliveries(offsets) >= self._settings.deliveries_max

    def _bury(self, window: Window, offsets: Offsets, reasons: Sequence[str]) -> None:
        """Dead letters are written under the lock, so whoever finds one begun knows that its writer is dead."""
        if not len(offsets):
            return
        begun = dict(zip(offsets.tolist(), window.is_burying(offsets).tolist(), strict=True))
        why = dict(zip(offsets.tolist(), reasons, strict=True))
        counts = dict(zip(offsets.tolist(), window.deliveries(offsets).tolist(), strict=True))
        window.begin_burying(offsets)
        self._windows.reach("queue: burying")
        with self._reading:
            events = self._again.pick(np.sort(offsets))
        places = [event.offset for event in events]
        self._opening.bury(
            events,
            [counts[at] for at in places],
            [why[at] for at in places],
            [begun[at] for at in places],
            acks=self._note(window, offsets),
        )
        self._windows.reach("queue: buried")
        window.settle(offsets)

    def _note(self, window: Window, offsets: Offsets) -> list[Write]:
        """The acknowledgement that is written with dead letters, where a power loss could take back what the window says."""
        if not self._windows.on_disk:
            return []
        topic = self._opening.acks_topic()
        begin_counting(window, self._windows, self.number, end=self._acks_bounds().end)
        return [Write(topic, 0, to_batch([encoded(self.number, 0, offsets.tolist())], topic.schema))]


class OffsetReader:
    """Reads one partition at rising offsets, and from another place where they do not rise."""

    def __init__(self, store: Store, topic: str, partition: int) -> None:
        self._store = store
        self._topic = topic
        self._partition = partition
        self._cursor: Cursor | None = None

    @property
    def offset(self) -> int:
        """The offset after the last event read."""
        return 0 if self._cursor is None else self._cursor.offset

    def read(self, start: int, end: int) -> list[Chunk]:
        """The events between two offsets, without those that are gone: they count as done."""
        cursor = self._cursor
        if cursor is None or not start - _SKIP_MAX <= cursor.offset <= start:
            cursor = self._store.cursor(self._topic, self._partition, offset=start)
        self._cursor = None  # whatever fails below, the next read begins anew
        try:
            while cursor.offset < start and cursor.read(start, events_max=start - cursor.offset):
                pass
        except EventsMissed:
            cursor = self._store.cursor(self._topic, self._partition, offset=start)
        chunks: list[Chunk] = []
        while cursor.offset < end:
            try:
                found = cursor.read(end, events_max=end - cursor.offset)
            except EventsMissed as missed:
                offset = min(missed.last + 1, end)
                cursor = self._store.cursor(self._topic, self._partition, offset=offset)
                continue
            if not found:
                break
            chunks += found
        self._cursor = cursor
        return chunks

    def pick(self, offsets: Offsets) -> list[Event]:
        """The events at these offsets, which rise; offsets near each other are read together."""
        if not len(offsets):
            return []
        found: list[Event] = []
        for run in np.split(offsets, np.flatnonzero(np.diff(offsets) > _JOIN_GAP) + 1):
            start, end = int(run[0]), int(run[-1]) + 1
            events = [event for chunk in self.read(start, end) for event in to_events(chunk)]
            if len(run) < end - start:
                wanted = set(run.tolist())
                events = [event for event in events if event.offset in wanted]
            found += events
        return found
