"""A queue's window: what has become of each event of one partition between the floor and the newest that was looked at.

Format (a file or a piece of memory): a header of 4,096 bytes, then arrays of u64 with one entry for each place of a ring
whose capacity is a power of two. The event at offset o has the place o mod capacity.

    header   magic "HWQUEU", format u16; then u64, each with a check of its own in the highest 12 bits: capacity, floor, next,
             incarnation, moved, hint, has keys, acks from (where a unit of work that may be half done stands, plus 1; see
             `unit_of_work`), acks since (from where on the acknowledgements of units count, plus 1; 0: none does), hint at, clock
             start (see below, plus 1; 0: nobody has asked since the machine was started); at 256 the topic id, and at 288 the
             crc32c of what never changes: the start, capacity, has keys, topic id
    words    time u52 in microseconds | parity | deliveries u8 | state u3, so that one comparison finds what is due; the parity makes
             the number of ones even
    tokens   the lease: the member in the high half, a number of its own in the low half
    keys     only with order="key": murmur2 of the key + 1, 0 for none; the highest bit makes the number of ones even

States: READY (to be delivered from the time on), LEASED (until the time), BURYING (on its way to the dead letters), DELAYED (given
back or sent with a delay, to be delivered from the time on), and the word of all ones: acknowledged.

The time of a READY event is a date: microseconds since 1970 by the machine's clock, which may be set. All other times are by a clock that
nobody sets (see `SteadyClock`), counted from `clock start`: the date at which that clock began, as the first to ask took it. So they
are near the date, too, which is how a window from before this difference was made has them. A power loss or a restart forgets them.

Invariants:
- everything below `floor` is acknowledged; nothing at or above `next` has been delivered; entries exist between the two only;
- `floor` moves over acknowledged entries only; entries are written before `next` moves over them;
- a token is written before the word that makes it count, and every change of a live entry is one aligned store of eight bytes
  (NumPy's element-wise assignment, never a block copy), so a kill at any instruction leaves a window that can be read: at worst
  an event is delivered again;
- `hint at` is never later than the earliest time in any READY word, and `hint` than in any other that is not acknowledged, so that
  most leases need no search;
- no flipped bit passes: each word that is stored at once carries its own check, since a sum over several words could not be stored
  with them in one moment. A file is checked when it is opened. A bit of a token that flips ends a lease, and its event comes again.

After a power loss pages of different moments may stand side by side. The floor alone is believed then (an acknowledgement is
never untrue), everything above is forgotten; and where the power loss took events back (durability="os"), floor and next go back
with them. What transactions have acknowledged is in a topic, and is put back from there (see `partition`). `acks since` is on
disk before the first acknowledgement that counts by it, and before the floor goes back over one that no longer does.

Thread-safety: none; every method is called under the partition's queue lock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from headwater.log.disk.disk import Disk
from headwater.model.errors import Damaged, FormatTooNew

FORMAT = 1
HEADER_BYTES = 4096
CAPACITY_MIN = 4096
CAPACITY_MAX = 1 << 22
DELIVERIES_MAX = 255

READY, LEASED, BURYING, DELAYED = 0, 1, 2, 3
SHIFT = 12
FAR_US = (1 << 52) - 2
"""The latest time a word can hold: the year 2112."""

DELETE_IT = (
    "Close every program that uses the log and delete this one file. The queue then delivers its partition from the start, and no event "
    "is lost."
)

_MAGIC = b"HWQUEU"
_START = struct.Struct("<6sH")
_WORD = struct.Struct("<Q")
_CAPACITY, _FLOOR, _NEXT, _INCARNATION, _MOVED, _HINT, _HAS_KEYS, _ACKS_FROM, _ACKS_SINCE, _HINT_AT, _START_US = range(
    1, 12
)
_TOPIC_AT = 256
_TOPIC_BYTES = 32
_CRC_AT = 288
_CRC = struct.Struct("<I")
_VALUE_BITS = 52
_VALUE_MASK = (1 << _VALUE_BITS) - 1
_MIX = 0x9E3779B97F4A7C15
_CHECK_MASK = 0xFFF
_ACKED = np.uint64(0xFFFFFFFFFFFFFFFF)
_SHIFT = np.uint64(SHIFT)
_STATE_BITS = np.uint64(3)
_STATE_MASK = np.uint64(7)
_DELIVERIES_MASK = np.uint64(0xFF)
_ONE_DELIVERY = np.uint64(1 << 3)
_PARITY_AT = np.uint64(11)
_KEY_PARITY_AT = np.uint64(63)
_ONE = np.uint64(1)

Offsets = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]


class Window:
    """The window of one partition, over a buffer."""

    def __init__(self, view: memoryview, path: str) -> None:
        found, version = _START.unpack_from(view)
        if found != _MAGIC:
            raise _damaged(path, "it does not begin as a window does")
        if version > FORMAT:
            raise FormatTooNew(
                f"{path} has format {version}; this Headwater reads up to {FORMAT}.", advice="Upgrade Headwater."
            )
        _check_header(view, path)
        self.capacity = capacity = number_of(_WORD.unpack_from(view, 8 * _CAPACITY)[0])
        self.has_keys = bool(number_of(_WORD.unpack_from(view, 8 * _HAS_KEYS)[0]))
        if capacity & (capacity - 1) or window_bytes(capacity, has_keys=self.has_keys) != len(view):
            raise _damaged(path, f"its header gives an impossible capacity of {capacity} events")
        self.path = path
        self._view = view
        self._head: Any = view[:HEADER_BYTES].cast("Q")
        self._wrap = capacity - 1
        self._words: Words = np.frombuffer(view, np.uint64, capacity, HEADER_BYTES)
        self._tokens: Words = np.frombuffer(view, np.uint64, capacity, HEADER_BYTES + 8 * capacity)
        self._keys: Words | None = None
        if self.has_keys:
            self._keys = np.frombuffer(view, np.uint64, capacity, HEADER_BYTES + 16 * capacity)

    @property
    def floor(self) -> int:
        """Everything below is acknowledged."""
        return int(self._head[_FLOOR]) & _VALUE_MASK

    @property
    def next(self) -> int:
        """The first offset that nobody has looked at."""
        return max(int(self._head[_NEXT]) & _VALUE_MASK, self.floor)

    @property
    def hint(self) -> int:
        """No entry that is not READY is due before."""
        return int(self._head[_HINT]) & _VALUE_MASK

    @hint.setter
    def hint(self, time_us: int) -> None:
        self._set(_HINT, time_us)

    @property
    def hint_at(self) -> int:
        """No READY entry is due before that date."""
        return int(self._head[_HINT_AT]) & _VALUE_MASK

    @hint_at.setter
    def hint_at(self, time_us: int) -> None:
        self._set(_HINT_AT, time_us)

    @property
    def clock_start(self) -> int:
        """When the clock of leases and delays began, in microseconds since 1970, plus 1; 0 where nobody has said it."""
        return int(self._head[_START_US]) & _VALUE_MASK

    @clock_start.setter
    def clock_start(self, time_us: int) -> None:
        self._set(_START_US, time_us)

    @property
    def incarnation(self) -> int:
        """The log's incarnation when it was last put in order."""
        return int(self._head[_INCARNATION]) & _VALUE_MASK

    @incarnation.setter
    def incarnation(self, incarnation: int) -> None:
        self._set(_INCARNATION, incarnation)

    @property
    def topic_id(self) -> str:
        """The topic it speaks of: one of the same name may have been made anew."""
        return bytes(self._view[_TOPIC_AT : _TOPIC_AT + _TOPIC_BYTES]).rstrip(b"\0").decode("ascii")

    @property
    def moved(self) -> bool:
        """Whether a larger window has taken the place of this one, or was about to."""
        return bool(self._head[_MOVED] & _VALUE_MASK)

    @moved.setter
    def moved(self, moved: bool) -> None:
        self._set(_MOVED, int(moved))

    @property
    def acks_from(self) -> int:
        """Where a unit of work that may be half done has its acknowledgements, plus 1; 0 where there is none."""
        return int(self._head[_ACKS_FROM]) & _VALUE_MASK

    @acks_from.setter
    def acks_from(self, place: int) -> None:
        self._set(_ACKS_FROM, place)

    @property
    def acks_since(self) -> int:
        """From where on the acknowledgements of units of work speak of this window, plus 1; 0 where none does."""
        return int(self._head[_ACKS_SINCE]) & _VALUE_MASK

    @acks_since.setter
    def acks_since(self, place: int) -> None:
        self._set(_ACKS_SINCE, place)

    @property
    def room(self) -> int:
        """How many more entries it takes."""
        return self.capacity - (self.next - self.floor)

    def recover(self, *, lost_after: int | None) -> None:
        """After an unclean stop: believes the floor, forgets what stands above, and goes back with the topic."""
        floor = self.floor if lost_after is None else min(self.floor, lost_after)
        self.restart(floor)
        self._set(_ACKS_FROM, 0)
        self._set(_START_US, 0)

    def restart(self, offset: int) -> None:
        """Begins anew at an offset: everything below counts as acknowledged, everything from there on as never seen.

        Whichever of the two stores is the last before a kill, `next` is read as no less than the floor: at worst events come
        again.
        """
        if offset < self.floor:
            self._set(_NEXT, offset)
            self._set(_FLOOR, offset)
        else:
            self._set(_FLOOR, offset)
            self._set(_NEXT, offset)
        self._set(_HINT, FAR_US)
        self._set(_HINT_AT, FAR_US)

    # Entries come in

    def add_leased(self, count: int, *, token: int, deadline: int) -> Offsets:
        """The next `count` offsets, leased for the first time."""
        offsets = np.arange(self.next, self.next + count, dtype=np.int64)
        places = offsets & self._wrap
        self._tokens[places] = token
        self._words[places] = _word(deadline, 1, LEASED)
        self._set(_HINT, min(self.hint, deadline))
        self._set(_NEXT, int(offsets[-1]) + 1)
        return offsets

    def add(self, times: npt.NDArray[np.int64], done: Mask, keys: Words | None, *, delayed: Mask | None = None) -> None:
        """The next offsets, to be delivered from these times on, of the `delayed` by the clock that nobody sets.

        Those that are `done` count as acknowledged.
        """
        offsets = np.arange(self.next, self.next + len(times), dtype=np.int64)
        places = offsets & self._wrap
        words = np.clip(times, 0, FAR_US).astype(np.uint64) << _SHIFT
        if delayed is not None:
            words[delayed] |= np.uint64(DELAYED)
        words = _even(words, _PARITY_AT)
        words[done] = _ACKED
        self._tokens[places] = 0
        self._words[places] = words
        if self._keys is not None and keys is not None:
            self._keys[places] = _even(keys, _KEY_PARITY_AT)
        if not done.all():
            is_ready = (words & _STATE_MASK) == READY
            self._set(_HINT_AT, min(self.hint_at, _earliest(words[is_ready])))
            self._set(_HINT, min(self.hint, _earliest(words[~is_ready])))
        self._set(_NEXT, int(offsets[-1]) + 1)

    # Entries are found

    def due(
        self,
        now: int,
        limit: int,
        *,
        date: int | None = None,
        without: Offsets | None = None,
        among: tuple[int, Sequence[int]] | None = None,
    ) -> tuple[Offsets, tuple[int, int]]:
        """Up to `limit` offsets that may be delivered now, in order; and the hints of those that remain.

        `date` is what the machine's clock says, if that is not `now`. `without` those, and `among` a member's peers only
        those whose keys fall to it.
        """
        floor, words = self.floor, self._in_order(self._words)
        is_ready = (words & _STATE_MASK) == READY
        is_due = words < np.uint64((now + 1) << SHIFT)
        if date is not None and date != now:
            is_due = np.where(is_ready, words < np.uint64((date + 1) << SHIFT), is_due)
        if self._keys is not None:
            is_due &= self._is_free(words, is_due)
        if without is not None:
            is_due[without[(without >= floor) & (without < self.next)] - floor] = False
        found = np.flatnonzero(is_due)
        if among is not None and self._keys is not None:
            keys = self._in_order(self._keys)[found]
            found = found[(keys == 0) | (_owners(keys, among[1]) == np.uint64(among[0]))]
        taken = found[:limit]
        if len(found) > len(taken):
            return taken + floor, (0, 0)
        rest = words.copy()
        rest[taken] = _ACKED
        return taken + floor, (_earliest(rest[~is_ready]), _earliest(rest[is_ready]))

    def _is_free(self, words: Words, is_due: Mask) -> Mask:
        """Whether no earlier event of the same key waits and none is out. Scheduled and deferred ones have not come yet."""
        assert self._keys is not None
        keys = self._in_order(self._keys)
        is_later = ~is_due
        is_new = ((words & np.uint64(0x7FF)) == READY) | ((words & np.uint64(0x7FF)) == DELAYED)
        has_not_come = (is_new & is_later) | (words >= np.uint64(FAR_US << SHIFT))
        waits = ~has_not_come & (keys != 0)
        at = np.flatnonzero(waits)
        free = keys == 0
        free[at[np.unique(keys[at], return_index=True)[1]]] = True
        is_out = waits & is_later & ((words & _STATE_MASK) == LEASED)
        return free & ~np.isin(keys, keys[is_out]) if is_out.any() else free

    def is_burying(self, offsets: Offsets) -> Mask:
        """Which of them a dead process had begun to send to the dead letters."""
        return (self._words[offsets & self._wrap] & _STATE_MASK) == BURYING

    def is_leased(self, offsets: Offsets) -> Mask:
        """Which of them are out."""
        return (self._words[offsets & self._wrap] & _STATE_MASK) == LEASED

    def deliveries(self, offsets: Offsets) -> npt.NDArray[np.int64]:
        """How often each was delivered."""
        words = self._words[offsets & self._wrap]
        return ((words >> _STATE_BITS) & _DELIVERIES_MASK).astype(np.int64)

    def entries(self) -> tuple[Offsets, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """What is not acknowledged: offsets, states, deliveries and times, in order."""
        words = self._in_order(self._words)
        at = np.flatnonzero(words != _ACKED)
        words = words[at]
        return (
            at + self.floor,
            (words & _STATE_MASK).astype(np.int64),
            ((words >> _STATE_BITS) & _DELIVERIES_MASK).astype(np.int64),
            (words >> _SHIFT).astype(np.int64),
        )

    def holds(self, offsets: Offsets, token: int) -> Mask:
        """Which of these leases are still in force."""
        places = offsets & self._wrap
        inside = (offsets >= self.floor) & (offsets < self.next)
        is_its = self._tokens[places] == np.uint64(token)
        return inside & is_its & ((self._words[places] & _STATE_MASK) == LEASED)

    # Entries change

    def take(self, offsets: Offsets, *, token: int, deadline: int) -> npt.NDArray[np.int64]:
        """Leases offsets that are due; how often each was delivered, this time counted."""
        places = offsets & self._wrap
        deliveries = np.minimum(self.deliveries(offsets) + 1, DELIVERIES_MAX)
        self._set(_HINT, min(self.hint, deadline))
        self._tokens[places] = token
        words = np.uint64(deadline << SHIFT | LEASED) | (deliveries.astype(np.uint64) << _STATE_BITS)
        self._words[places] = _even(words, _PARITY_AT)
        return deliveries

    def settle(self, offsets: Offsets) -> None:
        """Acknowledges, and moves the floor as far as everything is acknowledged."""
        self._words[offsets & self._wrap] = _ACKED
        if self.has_keys:
            self._set(_HINT, 0)
        floor = self.floor
        if len(offsets) and self._words[floor & self._wrap] == _ACKED:
            waits = self._in_order(self._words) != _ACKED
            first = int(np.argmax(waits)) if waits.any() else len(waits)
            self._set(_FLOOR, floor + first)

    def give_back(self, offsets: Offsets, *, time: int, delivered: bool = True) -> None:
        """To be delivered again from a time on, 0 for at once, FAR_US for never; not counted as delivered where nobody saw it."""
        places, time = offsets & self._wrap, min(time, FAR_US)
        state = DELAYED if 0 < time < FAR_US else READY
        if state == DELAYED:
            self._set(_HINT, min(self.hint, time))
        else:
            self._set(_HINT_AT, min(self.hint_at, time))
        words = (self._words[places] & np.uint64(0x7F8)) | np.uint64(time << SHIFT | state)
        self._words[places] = _even(words if delivered else words - _ONE_DELIVERY, _PARITY_AT)

    def recall(self, offsets: Offsets) -> Mask:
        """What was deferred is due now; which of them were."""
        inside = (offsets >= self.floor) & (offsets < self.next)
        words = self._words[offsets & self._wrap]
        deferred = inside & ((words >> _SHIFT) == FAR_US) & ((words & _STATE_MASK) == READY)
        self.give_back(offsets[deferred], time=0)
        return deferred

    def extend(self, offsets: Offsets, *, deadline: int) -> None:
        """Leases are in force until another time."""
        places, deadline = offsets & self._wrap, min(deadline, FAR_US - 1)
        self._set(_HINT, min(self.hint, deadline))
        words = (self._words[places] & np.uint64(0x7FF)) | np.uint64(deadline << SHIFT)
        self._words[places] = _even(words, _PARITY_AT)

    def begin_burying(self, offsets: Offsets) -> None:
        """They go to the dead letters; whoever finds them so after a crash goes on with it."""
        places = offsets & self._wrap
        self._set(_HINT, 0)
        self._words[places] = _even((self._words[places] & np.uint64(0x7F8)) | np.uint64(BURYING), _PARITY_AT)

    def leased_by(self, member: int) -> Offsets:
        """What one member has out."""
        words, tokens = self._in_order(self._words), self._in_order(self._tokens)
        is_its = ((tokens >> np.uint64(32)) == np.uint64(member)) & ((words & _STATE_MASK) == LEASED)
        return np.flatnonzero(is_its) + self.floor

    # The buffer

    def copy_to(self, larger: Window) -> None:
        """Fills a larger window that nobody else knows yet."""
        offsets = np.arange(self.floor, self.next, dtype=np.int64)
        for mine, its in ((self._words, larger._words), (self._tokens, larger._tokens), (self._keys, larger._keys)):
            if mine is not None and its is not None:
                its[offsets & larger._wrap] = mine[offsets & self._wrap]
        for field in (_FLOOR, _NEXT, _INCARNATION, _HINT, _ACKS_FROM, _ACKS_SINCE, _HINT_AT, _START_US):
            larger._head[field] = self._head[field]

    def copy(self) -> Window:
        """The same in memory."""
        return Window(memoryview(bytearray(self._view)), self.path)

    def check(self) -> None:
        """Refuses entries that no process can have written; not after a power loss, when they are not believed anyhow."""
        if self.next - self.floor > self.capacity:
            raise _damaged(self.path, f"it holds {self.next - self.floor} events and has room for {self.capacity}")
        wrong = self._first_wrong()
        if wrong is not None:
            raise _damaged(self.path, f"the entry of event {wrong} has a wrong bit")

    def _first_wrong(self) -> int | None:
        for ring in (self._words, self._keys):
            if ring is not None:
                odd = (np.bitwise_count(self._in_order(ring)) & np.uint8(1)).astype(bool)
                if odd.any():
                    return self.floor + int(np.argmax(odd))
        return None

    def release(self) -> None:
        """Lets go of the buffer, so that it can be closed."""
        self._words = self._tokens = np.empty(0, np.uint64)
        self._keys = None
        self._head.release()

    def _set(self, field: int, value: int) -> None:
        self._head[field] = checked_number(value)

    def _in_order(self, ring: Words) -> Words:
        """The ring's entries from the floor to `next`."""
        start, count = self.floor & self._wrap, self.next - self.floor
        if start + count <= self.capacity:
            return ring[start : start + count]
        return np.concatenate([ring[start:], ring[: start + count - self.capacity]])


@contextmanager
def opened_window(disk: Disk, path: str, *, writable: bool = False) -> Iterator[Window]:
    """A window for one who holds no lock, to read single words of it; `Damaged`, `FileNotFoundError`."""
    file = disk.open(path)
    try:
        size = file.size()
    finally:
        file.close()
    if size < HEADER_BYTES:
        raise _damaged(path, f"it has {size} bytes, less than its header")
    mapped = disk.map(path, size, writable=writable)
    try:
        window = Window(mapped.view, path)
        try:
            yield window
        finally:
            window.release()
    finally:
        mapped.close()


def copied_window(disk: Disk, path: str) -> Window:
    """A copy in memory, to look at; the caller holds the window's lock, if only shared. `Damaged`, `FileNotFoundError`."""
    with opened_window(disk, path) as window:
        return window.copy()


def new_window(*, capacity: int, has_keys: bool, topic_id: str, floor: int, incarnation: int) -> Window:
    """A window in memory in which nothing is."""
    buffer = bytearray(window_bytes(capacity, has_keys=has_keys))
    buffer[:HEADER_BYTES] = empty_header(
        capacity=capacity, has_keys=has_keys, topic_id=topic_id, floor=floor, incarnation=incarnation
    )
    return Window(memoryview(buffer), "memory")


def window_bytes(capacity: int, *, has_keys: bool) -> int:
    """The size of a window."""
    return HEADER_BYTES + capacity * (24 if has_keys else 16)


def empty_header(*, capacity: int, has_keys: bool, topic_id: str, floor: int, incarnation: int) -> bytes:
    """The header of a window in which nothing is."""
    header = bytearray(HEADER_BYTES)
    _START.pack_into(header, 0, _MAGIC, FORMAT)
    values = {_CAPACITY: capacity, _FLOOR: floor, _NEXT: floor, _INCARNATION: incarnation}
    values |= {_HINT: FAR_US, _HINT_AT: FAR_US}
    for field, value in (values | {_HAS_KEYS: int(has_keys)}).items():
        _WORD.pack_into(header, 8 * field, checked_number(value))
    header[_TOPIC_AT : _TOPIC_AT + len(topic_id)] = topic_id.encode("ascii")
    _CRC.pack_into(header, _CRC_AT, _crc_of_header(header))
    return bytes(header)


def _owners(keys: Words, members: Sequence[int]) -> Words:
    """For each key one of the members, most of them the same ones when a member comes or goes (rendezvous hashing)."""
    peers = np.array(sorted(members), np.uint64)
    mixed = keys[:, None] * np.uint64(0x9E3779B97F4A7C15) ^ peers[None, :] * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return peers[np.argmax(mixed, axis=1)]


def _earliest(words: Words) -> int:
    return int(words.min() >> _SHIFT) if len(words) else FAR_US


def _word(time: int, deliveries: int, state: int) -> int:
    word = time << SHIFT | deliveries << 3 | state
    return word | (word.bit_count() & 1) << int(_PARITY_AT)


def _even(words: Words, at: np.uint64) -> Words:
    """The words with one more bit, which makes the number of ones even."""
    return words | ((np.bitwise_count(words) & _ONE) << at)


def checked_number(value: int) -> int:
    """A number of the header with its check."""
    return (value * _MIX >> _VALUE_BITS & _CHECK_MASK) << _VALUE_BITS | value


def number_of(word: int) -> int:
    """The number in a word of the header, without its check."""
    return word & _VALUE_MASK


def _check_header(view: memoryview, path: str) -> None:
    """Refuses a header with a wrong bit; each of its words is whole at any moment, so this needs no lock."""
    for field in range(_CAPACITY, _START_US + 1):
        (word,) = _WORD.unpack_from(view, 8 * field)
        if checked_number(number_of(word)) != word:
            raise _damaged(path, f"the number at byte {8 * field} of its header fails its check")
    if _CRC.unpack_from(view, _CRC_AT)[0] != _crc_of_header(view):
        raise _damaged(path, "the checksum of its header is wrong")


def _crc_of_header(header: memoryview | bytearray) -> int:
    """Of what never changes."""
    parts = (slice(0, _START.size), *(slice(8 * n, 8 * n + 8) for n in (_CAPACITY, _HAS_KEYS)))
    crc = 0
    for part in (*parts, slice(_TOPIC_AT, _TOPIC_AT + _TOPIC_BYTES)):
        crc = crc32c(bytes(header[part]), crc)
    return crc


def _damaged(path: str, why: str) -> Damaged:
    return Damaged(f"{path} is damaged: {why}.", advice=DELETE_IT)
