"""A window store: where the windows of one queue are kept, their locks, and who the queue's members are.

In a local log this is the folder `queues/<group>/<topic>/`:

    queue             what the queue is (text, see `headwater.log.disk.text`): group, topic, order, the topic of its dead letters
    lock              lock of the members' folder and of `queue`
    members/<id>      held locked by each handle that takes leases: where the lock is free, the member is dead
    <n>.lock          lock of the partition's window; never replaced
    <n>.window        the window (see `window`); a larger one is written beside it, synced and renamed

A window that is about to be replaced is marked `moved` first. Whoever holds the lock and finds the mark opens the file by its
name again; is the mark there too, the one who set it died before the rename, and it is taken away.

A log that may only be read has a `ReadOnlyWindowStore`: whoever looks takes the lock of a window shared, which needs no right to
write, copies the window and lets go. What looking puts in order (after a power loss, after a dead process, where retention has taken
events) is put in order in the copy. A queue that nobody has opened looks as it would when it is made.

A queue is removed by taking away the file `queue`: that is the decision. Its windows are removed after it, or, where the remover was
killed, before the queue is made again. Locks stay: they are never replaced. A handle that was opened before and has leased nothing yet
finds no `queue` when it wants to become a member; one that only looks finds its window marked as moved, and then a new one.

Lock order: `lock` or one `<n>.lock`, never both, never two of them; then the locks of the log (see `file.store`).

Thread-safety: may be used by many threads; a lock of the process stands before each file lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NoReturn, Protocol

from headwater.log.disk.disk import Disk, File, Map, RealDisk
from headwater.log.disk.text import read_text, write_text
from headwater.log.port.lease_engine import was_closed
from headwater.log.port.topic import Topic
from headwater.log.queue.window import (
    CAPACITY_MIN,
    DELETE_IT,
    HEADER_BYTES,
    Window,
    copied_window,
    empty_header,
    new_window,
    opened_window,
    window_bytes,
)
from headwater.model.errors import Closed, Damaged, GroupInUse, GroupNotFound

_KIND = "queue"


class WindowStore(Protocol):
    """The windows of one queue and its members."""

    has_threads: bool
    """Whether a thread may write acknowledgements: not on a simulated disk."""

    writable: bool
    """Whether anything may be changed; where not, the windows are copies to look at."""

    on_disk: bool
    """Whether windows outlive a power loss, so that dead letters have to be acknowledged where one takes nothing back."""

    def settings(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """What the queue is: as it was made, or as wanted if it is new."""

    def locked(self, partition: int, *, floor: int, wait: bool = True) -> AbstractContextManager[Window | None]:
        """Holds the window's lock; None where somebody has it and `wait` is not asked. A new window begins at `floor`."""

    def grow(self, partition: int) -> Window:
        """A window with twice the room; the caller holds its lock."""

    def sync(self, partition: int) -> None:
        """Returns when the window is on disk; the caller holds its lock."""

    def join(self) -> int:
        """Becomes a member; its number."""

    def members(self) -> list[int]:
        """Everybody who has joined and not left; the dead, too, until they are buried."""

    def dead_members(self) -> list[int]:
        """Members whose process is dead. They are not named again to anybody else until `bury_member`."""

    def bury_member(self, member: int) -> None:
        """Its leases were given back: it is forgotten."""

    def reach(self, point: str) -> None:
        """A step between which a crash may fall."""

    def close(self, member: int) -> None:
        """Ends a membership (0: there was none) and frees everything."""

    def forked(self) -> None:
        """In a child: lets go of the parent's files without unlocking them."""


class FolderWindowStore:
    """The windows of a queue in a folder, opened by one handle."""

    writable = True
    on_disk = True

    def __init__(self, disk: Disk, folder: str, *, topic: Topic, incarnation: int, has_keys: bool) -> None:
        self.has_threads = isinstance(disk, RealDisk)
        self._disk = disk
        self._folder = folder
        self._topic = topic
        self._incarnation = incarnation
        self._has_keys = has_keys
        self._closed = False
        self._mutex = threading.Lock()
        self._places: dict[int, _Place] = {}
        self._member: tuple[int, File] | None = None
        self._dead: dict[int, File] = {}
        disk.make_folder(f"{folder}/members")
        self._lock = disk.open(f"{folder}/lock", "create")

    def settings(self, wanted: dict[str, Any]) -> dict[str, Any]:
        path = f"{self._folder}/queue"
        with self._mutex:
            try:
                self._lock.lock()
                if self._disk.exists(path):
                    found = read_queue(self._disk, path)
                    if found["topic_id"] == wanted["topic_id"] and not _may_change(found, wanted):
                        return found
                else:
                    forget_windows(self._disk, self._folder)
                above = self._folder
                for _ in range(4):  # its own names, then itself in its group, that in `queues`, and that in the log
                    self._disk.sync_folder(above)
                    above = os.path.dirname(above)
                write_text(self._disk, path, _KIND, wanted)
                return wanted
            finally:
                self._lock.unlock()

    @contextmanager
    def locked(self, partition: int, *, floor: int, wait: bool = True) -> Iterator[Window | None]:
        place = self._place(partition)
        with place.mutex:
            if place.closed:
                raise was_closed(self._topic.name)
            try:
                if not place.lock.lock(wait=wait):
                    yield None
                    return
                yield self._window(place, partition, floor)
            finally:
                place.lock.unlock()

    def grow(self, partition: int) -> Window:
        place = self._places[partition]
        window = place.window
        assert window is not None
        self._write(partition, window, floor=window.floor, capacity=2 * window.capacity)
        place.close_window()
        return self._window(place, partition, 0)

    def sync(self, partition: int) -> None:
        mapped = self._places[partition].map
        assert mapped is not None
        mapped.sync()

    def join(self) -> int:
        with self._mutex:
            if self._member is not None:
                return self._member[0]
            try:
                self._lock.lock()
                if not self._disk.exists(f"{self._folder}/queue"):
                    raise was_deleted()
                number, path = _new_member(self._folder)
                while self._disk.exists(path):
                    number, path = _new_member(self._folder)
                file = self._disk.open(path, "create")
                file.lock()
                self._member = (number, file)
                return number
            finally:
                self._lock.unlock()

    def members(self) -> list[int]:
        return [int(name, 16) for name in self._disk.names(f"{self._folder}/members")]

    def dead_members(self) -> list[int]:
        with self._mutex:
            try:
                if not self._lock.lock(wait=False):
                    return []
                mine = -1 if self._member is None else self._member[0]
                for name in self._disk.names(f"{self._folder}/members"):
                    number = int(name, 16)
                    if number == mine or number in self._dead:
                        continue
                    file = self._disk.open(f"{self._folder}/members/{name}", "write")
                    if file.lock(wait=False):
                        self._dead[number] = file
                    else:
                        file.close()
                return list(self._dead)
            except FileNotFoundError:
                return []
            finally:
                self._lock.unlock()

    def bury_member(self, member: int) -> None:
        with self._mutex:
            try:
                self._lock.lock()
                self._disk.remove(f"{self._folder}/members/{member:08x}")
                self._dead.pop(member).close()
            finally:
                self._lock.unlock()

    def reach(self, point: str) -> None:
        self._disk.reach(point)

    def close(self, member: int) -> None:
        with self._mutex:
            try:
                self._lock.lock()
                if member:
                    self._disk.remove(f"{self._folder}/members/{member:08x}")
            finally:
                self._lock.unlock()
            self._closed = True
        for place in self._places.values():
            with place.mutex:
                place.close()
        self._close_files()

    def forked(self) -> None:
        self._closed = True
        self._mutex = threading.Lock()
        for place in self._places.values():
            place.mutex = threading.Lock()
            with suppress(BufferError):  # a thread that is not here was about to use it
                place.close()
        self._close_files()

    def _close_files(self) -> None:
        for file in [self._lock, *self._dead.values(), *([] if self._member is None else [self._member[1]])]:
            file.close()
        self._member = None
        self._dead = {}

    def _place(self, partition: int) -> _Place:
        found = self._places.get(partition)
        if found is None:
            with self._mutex:
                if self._closed:
                    raise was_closed(self._topic.name)
                found = self._places.get(partition)
                if found is None:
                    found = _Place(self._disk.open(f"{self._folder}/{partition}.lock", "create"))
                    self._places[partition] = found
        return found

    def _window(self, place: _Place, partition: int, floor: int) -> Window:
        """The window as it is now; the caller holds its lock."""
        if place.window is not None and place.window.moved:
            place.close_window()
        if place.window is None:
            path = f"{self._folder}/{partition}.window"
            if not self._disk.exists(path):
                self._write(partition, None, floor=floor, capacity=CAPACITY_MIN)
            place.window = window = self._map(place, path)
            if window.topic_id != self._topic.id or window.has_keys != self._has_keys:
                place.close_window()
                self._write(partition, None, floor=floor, capacity=CAPACITY_MIN)
                place.window = window = self._map(place, path)
            window.moved = False
        return place.window

    def _map(self, place: _Place, path: str) -> Window:
        file = self._disk.open(path)
        try:
            size = file.size()
        finally:
            file.close()
        if size < HEADER_BYTES:
            raise Damaged(f"{path} has {size} bytes, less than its header.", advice=DELETE_IT)
        place.map = self._disk.map(path, size)
        window = Window(place.map.view, path)
        if window.incarnation == self._incarnation:
            try:
                window.check()
            except Damaged:
                window.release()
                raise
        return window

    def _write(self, partition: int, old: Window | None, *, floor: int, capacity: int) -> None:
        """A new window in the place of the old one."""
        path = f"{self._folder}/{partition}.window"
        size = window_bytes(capacity, has_keys=self._has_keys)
        file = self._disk.open(f"{path}.new", "create")
        try:
            file.truncate(0)
            file.allocate(size)
            header = empty_header(
                capacity=capacity,
                has_keys=self._has_keys,
                topic_id=self._topic.id,
                floor=floor,
                incarnation=self._incarnation,
            )
            file.write_at(0, [header])
            if old is not None:
                mapped = self._disk.map(f"{path}.new", size)
                larger = Window(mapped.view, path)
                old.copy_to(larger)
                larger.release()
                mapped.sync()
                mapped.close()
            file.sync()
        finally:
            file.close()
        self._disk.reach("queue: window written")
        if old is not None:
            old.moved = True
        self._disk.reach("queue: window marked")
        self._disk.rename(f"{path}.new", path)
        self._disk.reach("queue: window named")
        self._disk.sync_folder(self._folder)


class _Place:
    """What a handle has open for one partition."""

    def __init__(self, lock: File) -> None:
        self.mutex = threading.Lock()
        self.lock = lock
        self.closed = False
        self.map: Map | None = None
        self.window: Window | None = None

    def close(self) -> None:
        self.closed = True
        self.lock.close()
        self.close_window()

    def close_window(self) -> None:
        if self.window is not None:
            self.window.release()
            self.window = None
        if self.map is not None:
            self.map.close()
            self.map = None


class ReadOnlyWindowStore:
    """Copies of the windows of a queue in a folder, of which nothing is written."""

    has_threads = False
    writable = False
    on_disk = True

    def __init__(self, disk: Disk, folder: str, *, topic: Topic, incarnation: int, has_keys: bool) -> None:
        self._disk = disk
        self._folder = folder
        self._topic = topic
        self._incarnation = incarnation
        self._has_keys = has_keys

    def settings(self, wanted: dict[str, Any]) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            found = read_queue(self._disk, f"{self._folder}/queue")
            if found["topic_id"] == wanted["topic_id"]:
                return found
        return wanted

    @contextmanager
    def locked(self, partition: int, *, floor: int, wait: bool = True) -> Iterator[Window | None]:
        """A copy: nobody else has it, so there is nothing to hold or to wait for."""
        yield self._copied(partition) or new_window(
            capacity=CAPACITY_MIN,
            has_keys=self._has_keys,
            topic_id=self._topic.id,
            floor=floor,
            incarnation=self._incarnation,
        )

    def _copied(self, partition: int) -> Window | None:
        """The window as it is now; None where there is none of this topic."""
        try:
            lock = self._disk.open(f"{self._folder}/{partition}.lock")
        except FileNotFoundError:
            return None
        try:
            lock.lock(shared=True)
            window = copied_window(self._disk, f"{self._folder}/{partition}.window")
        except FileNotFoundError:
            return None
        finally:
            lock.unlock()
            lock.close()
        if window.topic_id != self._topic.id or window.has_keys != self._has_keys:
            return None
        if window.incarnation == self._incarnation:
            window.check()
        return window

    def reach(self, point: str) -> None:
        """Nothing is written, so no crash can fall between two steps."""

    def close(self, member: int) -> None:
        """Nothing is open."""

    def forked(self) -> None:
        """Nothing is open."""

    # What only those ask for who change something

    def grow(self, partition: int) -> Window:
        _never()

    def sync(self, partition: int) -> None:
        _never()

    def join(self) -> int:
        _never()

    def members(self) -> list[int]:
        _never()

    def dead_members(self) -> list[int]:
        _never()

    def bury_member(self, member: int) -> None:
        _never()


class MemoryWindowStore:
    """The windows of a queue in memory, shared by the handles of one process."""

    has_threads = True
    writable = True
    on_disk = False

    def __init__(self, *, topic: Topic, has_keys: bool) -> None:
        self.topic = topic
        self._has_keys = has_keys
        self.made: dict[str, Any] | None = None
        self.is_deleted = False
        self._mutex = threading.Lock()
        self._locks: dict[int, threading.Lock] = {}
        self._windows: dict[int, Window] = {}
        self._last_member = 0
        self._members: set[int] = set()

    def settings(self, wanted: dict[str, Any]) -> dict[str, Any]:
        with self._mutex:
            self.made = self.made or wanted
            return self.made

    @contextmanager
    def locked(self, partition: int, *, floor: int, wait: bool = True) -> Iterator[Window | None]:
        with self._mutex:
            lock = self._locks.setdefault(partition, threading.Lock())
        with lock:
            if partition not in self._windows:
                self._windows[partition] = self._make(CAPACITY_MIN, floor)
            yield self._windows[partition]

    def windows(self) -> dict[int, Window]:
        """Those there are, by partition; what one says without its lock may be a moment old."""
        return dict(self._windows)

    def grow(self, partition: int) -> Window:
        window = self._windows[partition]
        larger = self._make(2 * window.capacity, window.floor)
        window.copy_to(larger)
        self._windows[partition] = larger
        return larger

    def sync(self, partition: int) -> None:
        """It is lost with the process anyhow."""

    def delete(self) -> None:
        """It is forgotten, and so are those who hold it; `GroupInUse` while some member lives."""
        with self._mutex:
            if self._members:
                raise in_use(len(self._members))
            self.is_deleted = True

    def join(self) -> int:
        with self._mutex:
            if self.is_deleted:
                raise was_deleted()
            self._last_member += 1
            self._members.add(self._last_member)
            return self._last_member

    def members(self) -> list[int]:
        with self._mutex:
            return list(self._members)

    def dead_members(self) -> list[int]:
        return []

    def bury_member(self, member: int) -> None:
        """There are none."""

    def reach(self, point: str) -> None:
        """Nothing survives a crash here."""

    def close(self, member: int) -> None:
        with self._mutex:
            self._members.discard(member)

    def forked(self) -> None:
        """In a child it is a copy."""

    def _make(self, capacity: int, floor: int) -> Window:
        return new_window(
            capacity=capacity, has_keys=self._has_keys, topic_id=self.topic.id, floor=floor, incarnation=0
        )


def local_queues(disk: Disk, folder: str) -> list[dict[str, Any]]:
    """What each queue is that stands below a folder, in the order of group and topic."""
    found: list[dict[str, Any]] = []
    if not disk.exists(folder):
        return found
    for group in sorted(disk.names(folder)):
        for topic in sorted(disk.names(f"{folder}/{group}")):
            with suppress(FileNotFoundError):
                found.append(read_queue(disk, f"{folder}/{group}/{topic}/queue"))
    return found


def read_queue(disk: Disk, path: str) -> dict[str, Any]:
    """What a queue is, by its file; `Damaged`, `FileNotFoundError`."""
    try:
        made: dict[str, Any] = read_text(disk, path, _KIND)
    except Damaged as error:
        raise Damaged(
            error.what,
            advice="Close every program that uses it, then run `headwater doctor --repair`: nothing is lost.",
        ) from None
    return made


def delete_local_queue(disk: Disk, folder: str, group: str, topic: str) -> None:
    """Removes the queue of a group on a topic; `GroupNotFound`, `GroupInUse` while some member lives."""
    where = f"{folder}/{group}/{topic}"
    if not disk.exists(f"{where}/queue"):
        raise no_queue(group, topic)
    lock = disk.open(f"{where}/lock", "write")
    try:
        lock.lock()
        if not disk.exists(f"{where}/queue"):
            raise no_queue(group, topic)
        alive = _bury_the_dead(disk, f"{where}/members")
        if alive:
            raise in_use(alive)
        disk.remove(f"{where}/queue")
        disk.sync_folder(where)
        disk.reach("removal: queue unnamed")
        forget_windows(disk, where)
    finally:
        lock.unlock()
        lock.close()


def forget_windows(disk: Disk, folder: str) -> None:
    """Removes the windows of a queue that is no more; nobody is a member of it."""
    names = [name for name in disk.names(folder) if name.endswith(".window")]
    for name in names:
        path = f"{folder}/{name}"
        with suppress(Damaged), opened_window(disk, path, writable=True) as window:
            window.moved = True  # whoever has it open looks for another
        disk.remove(path)
        disk.reach("removal: window removed")
    if names:
        disk.sync_folder(folder)


def no_queue(group: str, topic: str) -> GroupNotFound:
    """The group never opened a queue on the topic, or it was deleted."""
    return GroupNotFound(
        f"Group {group!r} has no queue on topic {topic!r}.", advice="List the queues with `headwater queues list`."
    )


def in_use(members: int) -> GroupInUse:
    """The queue has open consumers."""
    return GroupInUse(
        "1 consumer of the queue is open." if members == 1 else f"{members} consumers of the queue are open.",
        advice="Close every consumer of the queue first. Otherwise nobody would deliver again what they have leased.",
    )


def was_deleted() -> Closed:
    """A handle outlived its queue."""
    return Closed("The queue was deleted while this handle was open.", advice="Open another with log.queue(…).")


def _may_change(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether the doctor has made the file again: of what nobody knew any more, whoever opens the queue says what it is."""
    return "restored" in found and any(found[name] != wanted[name] for name in ("order", "dead", "duplicates_us"))


def _new_member(folder: str) -> tuple[int, str]:
    number = int.from_bytes(os.urandom(4), "little") | 1
    return number, f"{folder}/members/{number:08x}"


def _bury_the_dead(disk: Disk, folder: str) -> int:
    """Removes what dead members left; how many live."""
    alive = 0
    for name in disk.names(folder):
        file = disk.open(f"{folder}/{name}", "write")
        try:
            if file.lock(wait=False):
                disk.remove(f"{folder}/{name}")
            else:
                alive += 1
        finally:
            file.close()
    return alive


def _never() -> NoReturn:
    raise AssertionError("a queue of a log that may only be read was about to be changed")
