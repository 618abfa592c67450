"""The local log (`file://`): a folder on one machine's disk, shared by any number of processes without a server.

    headwater            the log's id and format        topics/<name>/topic       what the topic is (see `catalog`)
    state, commits       shared state and transactions  topics/<name>/signal      written to wake readers (see `wait`)
    commit.lock          lock of `state`                topics/<name>/<n>/…       one partition (see `partition`)
    catalog.lock         lock of the list of topics     producers/<id>            epoch of a named producer
    incarnations         what unclean stops took back

Lock order: catalog, then the partitions' append and sync locks in the order of (topic, number), then `commit.lock`.

Thread-safety: a store may be used by many threads. After a fork the child's store opens everything again by itself.
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from headwater.log.catalog import read_text, topic_from_json, topic_to_json, write_text
from headwater.log.commit import CommitLog, Part, create_commits, create_state
from headwater.log.cursor import LocalCursor, offset_at
from headwater.log.disk import Disk, File, RealDisk
from headwater.log.fence import Fence, open_fence
from headwater.log.frame import Payload, prepare
from headwater.log.partition import Partition, create_partition
from headwater.log.recovery import last_boot_id, read_incarnations, recover_log
from headwater.log.seal import Sealer, seal_partition
from headwater.log.store import Bounds, Cursor, TimeKind, Waiter, Write
from headwater.log.topic import Topic
from headwater.log.wait import PollingWaiter, file_waiter
from headwater.model.clock import Clock
from headwater.model.errors import (
    Closed,
    HeadwaterError,
    LogNotFound,
    Poisoned,
    StorageError,
    TopicExists,
    TopicNotFound,
)

FRAME_EVENTS_MAX = 65_536
FRAME_BYTES_MAX = 16 << 20

_SNAPSHOTS_MAX = 10_000


class LocalStore:
    """One local log opened by one process."""

    def __init__(self, folder: str, *, disk: Disk | None = None, clock: Clock, create: bool, read_only: bool) -> None:
        self.folder = os.path.abspath(folder)
        self.url = f"file://{self.folder}"
        self._disk: Disk = disk or RealDisk()
        self._clock = clock
        self._writable = not read_only
        self._counters: Counter[str] = Counter()
        self._mutex = threading.RLock()
        self._closed = False
        self._open_files(create=create and not read_only)
        os.register_at_fork(after_in_child=_reopen_in_child(weakref.ref(self)))

    # Topics

    def topics(self) -> list[str]:
        self._check_open()
        return sorted(name for name in self._disk.names(f"{self.folder}/topics") if not name.startswith("."))

    def topic(self, name: str) -> Topic:
        with self._mutex:
            self._check_open()
            return self._topics.get(name) or self.refresh(name)

    def refresh(self, name: str) -> Topic:
        """The topic from its file: another process may have changed it."""
        try:
            topic = topic_from_json(read_text(self._disk, f"{self.folder}/topics/{name}/topic", "topic"))
        except FileNotFoundError:
            raise self._not_found(name) from None
        with self._mutex:
            if (known := self._topics.get(name)) is not None and known.id != topic.id:
                self._forget(name)
            self._topics[name] = topic
            for (of, _), partition in self._partitions.items():
                if of == name:
                    partition.topic = topic
        return topic

    def create(self, topic: Topic) -> Topic:
        self._check_writable()
        topics = f"{self.folder}/topics"
        with self._catalog():
            if self._disk.exists(f"{topics}/{topic.name}"):
                raise TopicExists(
                    f"Topic {topic.name!r} exists already.",
                    advice="Open it, or pass exist_ok=True to keep it as it is.",
                )
            fresh = f"{topics}/.{topic.name}.{topic.id}"
            try:
                self._disk.make_folder(fresh)
                for number in range(topic.partitions):
                    create_partition(self._disk, f"{fresh}/{number}")
                    self._disk.reach("create: partition made")
                self._disk.open(f"{fresh}/signal", "create").close()
                write_text(self._disk, f"{fresh}/topic", "topic", topic_to_json(topic))
                self._disk.reach("create: written")
                self._disk.rename(fresh, f"{topics}/{topic.name}")
                self._disk.reach("create: named")
                self._disk.sync_folder(topics)
            except StorageError:
                self._disk.remove_folder(fresh)
                raise
        return self.refresh(topic.name)

    def replace(self, topic: Topic) -> Topic:
        self._check_writable()
        with self._catalog():
            if self.refresh(topic.name).id != topic.id:
                raise self._not_found(topic.name)
            write_text(self._disk, f"{self.folder}/topics/{topic.name}/topic", "topic", topic_to_json(topic))
        return self.refresh(topic.name)

    def delete(self, name: str) -> None:
        self._check_writable()
        with self._catalog():
            topic = self.refresh(name)
            for number in range(topic.partitions):
                self.partition(name, number).set_deleted()
            self._disk.reach("delete: marked")
            gone = f"{self.folder}/topics/.deleted.{topic.id}"
            self._disk.rename(f"{self.folder}/topics/{name}", gone)
            self._disk.sync_folder(f"{self.folder}/topics")
            self._disk.reach("delete: renamed")
            self._forget(name)
            self._disk.remove_folder(gone)

    # Writing

    def write(self, writes: Sequence[Write]) -> list[range | Exception]:
        self._check_writable()
        outcomes: list[range | Exception] = []
        for write in writes:
            try:
                outcomes.append(self._append(write))
            except HeadwaterError as error:
                outcomes.append(error)
        for number, (write, outcome) in enumerate(zip(writes, outcomes, strict=True)):
            if isinstance(outcome, range):
                try:
                    self.partition(write.topic.name, write.partition).sync_to(outcome.stop)
                except HeadwaterError as error:
                    outcomes[number] = error
        for name in {write.topic.name for write in writes}:
            self._signal(name)
        return outcomes

    def write_atomically(self, writes: Sequence[Write]) -> list[range]:
        self._check_writable()
        ordered = sorted(range(len(writes)), key=lambda n: (writes[n].topic.name, writes[n].partition, n))
        merged: dict[tuple[str, int], list[Payload]] = {}
        for number in ordered:
            write = writes[number]
            merged.setdefault((write.topic.name, write.partition), []).extend(_payloads(write))
        transaction = self._commits.next_transaction(self._clock())
        with ExitStack() as locks:
            parts = []
            for (name, number), payloads in merged.items():
                partition = self.partition(name, number)
                locks.enter_context(partition.appending())
                locks.enter_context(partition.syncing())
                start = partition.written()
                mark = partition.stage(payloads, transaction=transaction)
                parts.append(Part(name, partition.topic.id, number, start.end, mark))
            self._disk.reach("transaction: staged")
            for part in parts:
                self.partition(part.topic, part.partition).sync_file(part.mark.base)
            self._disk.reach("transaction: synced")
            try:
                self._commits.commit(transaction, parts, publish=self._publish)
            except StorageError as error:
                for part in parts:
                    self.partition(part.topic, part.partition).poison()
                raise Poisoned(
                    f"The commit record of a transaction could not be synced in {self.folder}.",
                    advice="Whether it happened is decided when the log is opened again. Check the disk and re-open.",
                ) from error
        self._begin_again_if_long()
        for name in {part.topic for part in parts}:
            self._signal(name)
        starts = {(part.topic, part.partition): part.start for part in parts}
        ranges: dict[int, range] = {}
        for number in ordered:
            place = (writes[number].topic.name, writes[number].partition)
            ranges[number] = range(starts[place], starts[place] + writes[number].batch.num_rows)
            starts[place] = ranges[number].stop
        return [ranges[number] for number in range(len(writes))]

    def register_producer(self, name: str) -> tuple[bytes, int]:
        self._check_writable()
        fence = open_fence(self._disk, f"{self.folder}/producers", name)
        with self._mutex:
            self._fences[fence.producer] = fence
        return fence.producer, fence.raise_epoch()

    def sequence_of(self, name: str, partition: int, *, producer: bytes) -> int | None:
        found = self.partition(name, partition).sequence_of(producer)
        return None if found is None else found.last

    # Reading

    def bounds(self, names: Sequence[str]) -> Mapping[tuple[str, int], Bounds]:
        self._check_open()
        partitions = [self.partition(name, n) for name in names for n in range(self.topic(name).partitions)]
        for _ in range(_SNAPSHOTS_MAX):
            before = self._commits.state()
            ends = {(partition.topic.name, partition.number): partition.visible().end for partition in partitions}
            masks = self._commits.pending_parts(before)
            after = self._commits.state()
            if (after.sequence, after.pending) == (before.sequence, before.pending):
                break
        else:
            raise StorageError("No consistent view of the log's heads could be had.", advice="Try again.")
        for part in masks:
            place = (part.topic, part.partition)
            if place in ends and self.topic(part.topic).id == part.topic_id:
                ends[place] = min(ends[place], part.start)
        return {place: Bounds(first=0, end=end) for place, end in ends.items()}

    def cursor(self, name: str, partition: int, *, offset: int) -> Cursor:
        return LocalCursor(self, name, partition, offset=offset)

    def offset_at(self, name: str, partition: int, *, time: int, by: TimeKind) -> int:
        return offset_at(self, name, partition, time=time, by=by)

    def waiter(self, names: Sequence[str]) -> Waiter:
        self._check_open()
        if not isinstance(self._disk, RealDisk):
            return PollingWaiter()
        return file_waiter([f"{self.folder}/topics/{name}/signal" for name in names])

    # Everything else

    def seal(self, name: str) -> int:
        self._check_writable()
        return sum(seal_partition(self._disk, self.partition(name, n)) for n in range(self.topic(name).partitions))

    def partition(self, name: str, number: int) -> Partition:
        """A partition, opened at its first use; a poisoned one is checked then."""
        with self._mutex:
            self._check_open()
            found = self._partitions.get((name, number))
            if found is not None:
                return found
            topic = self.topic(name)
            if not 0 <= number < topic.partitions:
                raise TopicNotFound(
                    f"Topic {name!r} has no partition {number}.",
                    advice=f"It has partitions 0 to {topic.partitions - 1}.",
                )
            try:
                partition = self._open_partition(topic, number)
            except FileNotFoundError:
                self._forget(name)
                raise self._not_found(name) from None
            if self._writable and partition.is_poisoned():
                partition.heal()
            self._partitions[name, number] = partition
            return partition

    def incarnation(self) -> int:
        return self._commits.state().incarnation

    def lost_after(self, name: str, partition: int, *, incarnation: int) -> int | None:
        ends = [
            entry["ends"][f"{name}/{partition}"]
            for entry in read_incarnations(self._disk, self.folder)
            if entry["incarnation"] > incarnation and f"{name}/{partition}" in entry["ends"]
        ]
        return min(ends, default=None)

    def counters(self) -> Mapping[str, int]:
        return dict(self._counters)

    @property
    def disk(self) -> Disk:
        """The disk below."""
        return self._disk

    def close(self) -> None:
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            sealer = self._sealer
        if sealer is not None:
            sealer.close()
        with self._mutex:
            self._close_files()

    def reopen(self) -> None:
        """In a forked child: the parent's locks are not ours, and a copy of its files would keep them after its death."""
        if not self._closed:
            self._close_files()
            self._mutex = threading.RLock()
            self._open_files(create=False)

    # Opening

    def _open_files(self, *, create: bool) -> None:
        self._topics: dict[str, Topic] = {}
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._signals: dict[str, File] = {}
        self._fences: dict[bytes, Fence] = {}
        self._sealer: Sealer | None = None
        self._catalog_depth = 0
        try:
            read_text(self._disk, f"{self.folder}/headwater", "log")
        except (FileNotFoundError, NotADirectoryError):
            if not create:
                raise LogNotFound(
                    f"There is no log in {self.folder}.", advice="Check the path, or open it with create=True."
                ) from None
            self._create_log()
        self._catalog_file = self._disk.open(f"{self.folder}/catalog.lock", "write" if self._writable else "read")
        if self._writable and last_boot_id(self._disk, self.folder) != self._disk.boot_id():
            with self._catalog():
                self._counters += recover_log(self._disk, self.folder, clock=self._clock)
        self._commits = CommitLog(self._disk, self.folder, writable=self._writable)
        if self._writable and self._commits.state().failed:
            self._replace_failed_commits()

    def _create_log(self) -> None:
        missing, above = [], self.folder
        while not self._disk.exists(above):
            missing.append(above)
            above = os.path.dirname(above)
        self._disk.make_folder(f"{self.folder}/topics")
        self._disk.make_folder(f"{self.folder}/producers")
        self._catalog_file = self._disk.open(f"{self.folder}/catalog.lock", "create")
        with self._catalog():
            if not self._disk.exists(f"{self.folder}/headwater"):
                self._disk.open(f"{self.folder}/commit.lock", "create").close()
                create_commits(self._disk, self.folder)
                create_state(self._disk, self.folder, boot_id=self._disk.boot_id())
                self._disk.reach("open: state made")
                write_text(self._disk, f"{self.folder}/headwater", "log", {"id": uuid.uuid4().hex})
        for folder in missing:
            self._disk.sync_folder(os.path.dirname(folder))
        self._catalog_file.close()

    def _replace_failed_commits(self) -> None:
        """A commit record's sync failed: nobody can append to its partitions until this has succeeded."""
        with self._catalog():
            for name in self.topics():
                for number in range(self.topic(name).partitions):
                    self._partitions.setdefault(
                        (name, number), self._open_partition(self.topic(name), number)
                    ).sync_head()
            with self._commits.locked():
                if self._commits.state().failed:
                    self._commits.begin_again(floor=self._commits.state().transaction)
            for name in self.topics():
                self._forget(name)

    # Small things

    def _close_files(self) -> None:
        for name in {name for name, _ in self._partitions}:
            self._forget(name)
        for signal in self._signals.values():
            signal.close()
        for fence in self._fences.values():
            fence.close()
        self._commits.close()
        self._catalog_file.close()

    def _append(self, write: Write) -> range:
        partition = self.partition(write.topic.name, write.partition)
        fence = self._fences.get(write.stamp.producer)
        return partition.append(list(_payloads(write)), epoch=fence.epoch if fence else None)

    def _publish(self, parts: Sequence[Part]) -> None:
        for part in parts:
            try:
                partition = self.partition(part.topic, part.partition)
            except TopicNotFound:
                continue
            if partition.topic.id == part.topic_id:
                partition.publish(part.mark)
                self._disk.reach("commit: published one")

    def _begin_again_if_long(self) -> None:
        if not self._commits.is_long():
            return
        with self._commits.locked():
            self._commits.settle(publish=self._publish)
            for name in self.topics():
                for number in range(self.topic(name).partitions):
                    self.partition(name, number).sync_head()
            self._commits.begin_again(floor=self._commits.state().transaction)

    def _settle(self) -> None:
        self._commits.settle(publish=self._publish)

    def _seal_later(self) -> None:
        """Only on a real disk: a simulated history stays in one thread."""
        if isinstance(self._disk, RealDisk):
            with self._mutex:
                if self._sealer is None:
                    self._sealer = Sealer(lambda: [self.seal(name) for name in self.topics()])
                self._sealer.later()

    def _signal(self, name: str) -> None:
        """Wakes the readers; they would find the events without it, only later."""
        with self._mutex:
            signal = self._signals.get(name)
            if signal is None:
                try:
                    signal = self._disk.open(f"{self.folder}/topics/{name}/signal", "write")
                except FileNotFoundError:
                    return
                self._signals[name] = signal
        signal.write_at(0, [b"!"])

    def _open_partition(self, topic: Topic, number: int) -> Partition:
        return Partition(
            self._disk,
            f"{self.folder}/topics/{topic.name}/{number}",
            topic=topic,
            number=number,
            clock=self._clock,
            counters=self._counters,
            settle=self._settle,
            rolled=self._seal_later,
            writable=self._writable,
        )

    def _forget(self, name: str) -> None:
        for place in [place for place in self._partitions if place[0] == name]:
            self._partitions.pop(place).close()
        if name in self._signals:
            self._signals.pop(name).close()
        self._topics.pop(name, None)

    @contextmanager
    def _catalog(self) -> Iterator[None]:
        """Holds the lock of the list of topics."""
        with self._mutex:
            if self._catalog_depth == 0:
                self._catalog_file.lock()
            self._catalog_depth += 1
            try:
                yield
            finally:
                self._catalog_depth -= 1
                if self._catalog_depth == 0:
                    self._catalog_file.unlock()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"The log {self.folder} was closed.", advice="Open it again with open_log.")

    def _check_writable(self) -> None:
        self._check_open()
        if not self._writable:
            raise StorageError(f"The log {self.folder} was opened read-only.", advice="Open it without read_only=True.")

    def _not_found(self, name: str) -> TopicNotFound:
        known = ", ".join(self.topics()[:10]) or "none yet"
        return TopicNotFound(f"There is no topic {name!r} in {self.folder}.", advice=f"Topics here: {known}.")


def _payloads(write: Write) -> Iterator[Payload]:
    """The batch cut into frames of a size that is good to read, all with the batch's stamp."""
    batch, stamp = write.batch, write.stamp
    rows = min(FRAME_EVENTS_MAX, max(1, FRAME_BYTES_MAX * batch.num_rows // max(batch.nbytes, 1)))
    schema_id = write.topic.schema_id
    for start in range(0, batch.num_rows, rows):
        piece = batch.slice(start, rows)
        continues = start + rows < batch.num_rows
        yield prepare(piece, schema_id=schema_id, time_column=write.topic.time, stamp=stamp, continues=continues)


def _reopen_in_child(store: weakref.ref[LocalStore]) -> Callable[[], None]:
    def reopen() -> None:
        found = store()
        if found is not None:
            found.reopen()

    return reopen
