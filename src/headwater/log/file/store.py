"""The local log (`file://`): a folder on one machine's disk, shared by any number of processes without a server.

    headwater            the log's id and format        topics/<name>/topic       what the topic is (see below)
    state, commits       shared state and transactions  topics/<name>/signal      written to wake readers (see `wait`)
    commit.lock          lock of `state`                topics/<name>/<n>/…       one partition (see `partition`)
    catalog.lock         lock of the list of topics     producers/<id>            epoch of a named producer
    incarnations         what unclean stops took back   queues/<group>/<topic>/…  a queue (see `state`)
    groups/<name>/…      one group (see `groups`)  stages/<name>/…           one stage (`stages`)

A topic's file, like `headwater`, is readable text with a checksum (`headwater.log.disk.text`). A topic's folder is made complete under
a name that starts with a dot and then renamed, and renamed back to such a name before it is removed, so that a crash leaves a whole
topic or none.

Lock order: catalog, then a stage's, then the partitions' append and sync locks in the order of (topic, number), then the
groups' locks in the order of their names, then `commit.lock`.

Thread-safety: a store may be used by many threads. After a fork the child's store opens everything again by itself.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any

from headwater.log.disk.disk import Disk, RealDisk
from headwater.log.disk.fork import tell_when_forked
from headwater.log.disk.gate import Gate
from headwater.log.disk.text import read_text, write_text
from headwater.log.disk.threads import SideBySide
from headwater.log.disk.wait import PollingWaiter, file_waiter
from headwater.log.file.commit import CommitLog, CommitState, StagePart, create_commits, create_state
from headwater.log.file.copies import Copies
from headwater.log.file.cursor import LocalCursor, offset_at, partition_chunks, reached
from headwater.log.file.groups import FileGroup, GroupFiles
from headwater.log.file.handles import GONE, Handles
from headwater.log.file.partition.head import Appended, is_marked_deleted, mark_deleted
from headwater.log.file.partition.heartbeats import read_heartbeats, tell_time
from headwater.log.file.partition.partition import Partition, create_partition, synced
from headwater.log.file.recovery import (
    last_boot_id,
    read_incarnations,
    read_unrecovered,
    recover_closed,
    recover_log,
)
from headwater.log.file.segments.archive import check_archive
from headwater.log.file.segments.frame import payloads_of
from headwater.log.file.split import split_topic
from headwater.log.file.stages import StageFiles
from headwater.log.file.transactions import Transactions
from headwater.log.file.upkeep.compaction import is_overtaken
from headwater.log.file.upkeep.overload import Gauge
from headwater.log.file.upkeep.upkeep import Upkeep
from headwater.log.port.capabilities import Capabilities
from headwater.log.port.group import OffsetPart
from headwater.log.port.lateness import Heartbeat, reached_by
from headwater.log.port.lease_engine import QueueOpening
from headwater.log.port.stage import StageCommit, StageState
from headwater.log.port.store import Bounds, Cursor, TimeKind, Waiter
from headwater.log.port.topic import Topic, no_foreign_topics, topic_to_json
from headwater.log.port.write import Write
from headwater.log.queue.floor import Acked, acked_in_folder
from headwater.log.queue.window_engine import WindowEngine
from headwater.log.queue.window_store import (
    FolderWindowStore,
    ReadOnlyWindowStore,
    delete_local_queue,
    local_queues,
)
from headwater.model.clock import Clock
from headwater.model.errors import (
    Damaged,
    HeadwaterError,
    LogNotFound,
    NoAccess,
    StorageError,
    TopicExists,
)
from headwater.model.marker import Marker

PARALLEL_EVENTS = 16_384
WRITERS = 4


class LocalStore:
    """One local log opened by one process."""

    def __init__(self, folder: str, *, disk: Disk | None = None, clock: Clock, create: bool, read_only: bool) -> None:
        self.folder = os.path.abspath(folder)
        self.url = f"file://{self.folder}"
        self.capabilities = capabilities_in(self.folder)
        self._disk: Disk = disk or RealDisk()
        self._is_real = isinstance(self._disk, RealDisk)
        self.gate: Gate
        self._upkeep: Upkeep
        self._clock = clock
        self._writable = not read_only
        self._counters: Counter[str] = Counter()
        self._open_files(create=create and not read_only)
        if self._is_real:
            tell_when_forked(self)

    # Topics

    def topics(self) -> list[str]:
        with self.gate:
            return self.handles.names()

    def topic(self, name: str) -> Topic:
        with self.gate:
            return self._looked_after(self.handles.topic(name))

    def refresh(self, name: str) -> Topic:
        with self.gate:
            return self._looked_after(self.handles.refresh(name))

    def create(self, topic: Topic) -> Topic:
        topics = f"{self.folder}/topics"
        check_archive(topic)
        with self.gate, self._catalog():
            self.handles.names()
            if self._is_half_deleted(topic.name):
                self._remove(topic.name)
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
                signal = self._disk.open(f"{fresh}/signal", "create")
                signal.write_at(0, [b"!"])
                signal.close()
                write_text(self._disk, f"{fresh}/topic", "topic", topic_to_json(topic))
                self._disk.reach("create: written")
                self._disk.rename(fresh, f"{topics}/{topic.name}")
                self._disk.reach("create: named")
                self._disk.sync_folder(topics)
            except StorageError:
                self._disk.remove_folder(fresh)
                raise
            return self._looked_after(self.handles.refresh(topic.name))

    def adopt(self, topic: Topic) -> Topic:
        raise no_foreign_topics(self.url)

    def change(self, name: str, change: Callable[[Topic], Topic]) -> Topic:
        with self.gate, self._catalog():
            topic = change(self.handles.refresh(name))
            check_archive(topic)
            write_text(self._disk, f"{self.folder}/topics/{name}/topic", "topic", topic_to_json(topic))
            self.handles.signal(name)
            return self._looked_after(self.handles.refresh(name))

    def split(self, name: str, partitions: int, *, at: Sequence[int] | None = None) -> Topic:
        with self.gate, self._catalog():
            return self._looked_after(split_topic(self.handles, name, partitions, at=at))

    def delete(self, name: str) -> None:
        with self.gate, self._catalog():
            for number in range(self.handles.refresh(name).partitions):
                mark_deleted(self._disk, f"{self.folder}/topics/{name}/{number}")
                self._disk.reach("delete: marked one")
            self._remove(name)

    # Writing

    def write(self, writes: Sequence[Write]) -> list[range | Exception]:
        with self.gate:
            self._check_writable()
            if len(writes) > 1 and self._is_real and sum(write.count for write in writes) >= PARALLEL_EVENTS:
                outcomes = list(self._writers().map(lambda write: synced(self._appended(write)), writes))
            else:
                outcomes = [synced(done) for done in [self._appended(write) for write in writes]]
            for name in sorted({write.topic.name for write in writes}):
                self.handles.signal(name)
            return outcomes

    def write_atomically(self, writes: Sequence[Write], offsets: Sequence[OffsetPart] = ()) -> list[range]:
        with self.gate:
            self._check_writable()
            return self._transactions.append(writes, offsets)

    def register_producer(self, name: str) -> tuple[bytes, int]:
        with self.gate:
            self._check_writable()
            fence = self.handles.open_fence(name)
            return fence.producer, fence.raise_epoch()

    def sequence_of(self, name: str, partition: int, *, producer: bytes) -> int | None:
        with self.gate:
            found = self.handles.usable_partition(name, partition).sequence_of(producer)
            return None if found is None else found.last

    # Reading

    def bounds(self, names: Sequence[str]) -> Mapping[tuple[str, int], Bounds]:
        with self.gate:
            while True:  # a transaction over partitions that were added a moment ago must be seen whole, too
                partitions = self._partitions(names)
                found = self._transactions.bounds(partitions)
                if partitions == self._partitions(names):
                    return found

    def cursor(self, name: str, partition: int, *, offset: int) -> Cursor:
        return LocalCursor(self, name, partition, offset=offset)

    def offset_at(self, name: str, partition: int, *, time: int, by: TimeKind) -> int:
        with self.gate:
            return offset_at(self.handles, name, partition, time=time, by=by)

    def reached(self, name: str, partition: int, *, offset: int) -> int:
        with self.gate:
            held = self.handles.partition(name, partition)
            known, beats = reached(self.handles, held, offset), read_heartbeats(self._disk, held.folder)
            return max(known, reached_by(beats, offset)) if beats else known

    def heartbeat(self, name: str, partition: int, *, time: int, appended_before: int) -> bool:
        with self.gate:
            self._check_writable()
            held = self.handles.usable_partition(name, partition)
            is_later = tell_time(self._disk, held, time, appended_before=appended_before)
            if is_later:
                self.handles.signal(name)
            return is_later

    def heartbeats(self, name: str, partition: int) -> Sequence[Heartbeat]:
        with self.gate:
            return read_heartbeats(self._disk, self.handles.partition(name, partition).folder)

    def waiter(self, names: Sequence[str]) -> Waiter:
        if not self._is_real:
            return PollingWaiter()
        return file_waiter([f"{self.folder}/topics/{name}/signal" for name in names])

    # Stages

    def stages(self) -> list[str]:
        with self.gate:
            return self._stages.names()

    def take_stage(self, name: str) -> int:
        with self.gate:
            self._check_writable()
            return self._stages.stage(name, create=True).take()

    def held_stage(self, name: str) -> int | None:
        """None: opening a stage costs little."""
        return None

    def stage_state(self, name: str) -> StageState:
        with self.gate:
            return self._stages.stage(name, create=False).state()

    def commit_stage(
        self, name: str, number: int, marker: Marker | None, writes: Sequence[Write], *, gaps: bool = False
    ) -> StageCommit:
        with self.gate:
            self._check_writable()
            stage = self._stages.stage(name, create=True)

            def append(part: StagePart) -> list[range]:
                return self._transactions.append(writes, stage=part)

            return stage.commit(number, marker, writes, gaps=gaps, append=append)

    # Copies

    @property
    def disk(self) -> Disk:
        """The disk that holds it."""
        return self._disk

    def place(self, write: Write, offsets: Any, *, end: int) -> None:
        with self.gate:
            self._check_writable()
            self._copies.place(write, offsets, end=end)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Holds the lock of the catalog: no topic is made, changed or deleted meanwhile, and a close waits."""
        with self.gate.staying(), self._catalog():
            yield

    @contextmanager
    def between_transactions(self) -> Iterator[CommitState]:
        """Holds the lock of the commit log, with what a dead process left settled: none is decided meanwhile."""
        with self.gate, self._transactions.standing_still() as state:
            yield state

    # Upkeep

    def is_overtaken(self, name: str, partition: int, *, end: int, since_us: int) -> bool:
        with self.gate:
            return is_overtaken(self.handles, name, partition, end=end, since_us=since_us)

    def seal(self, name: str) -> int:
        with self.gate:
            self._check_writable()
            return self._upkeep.seal(name)

    def tidy(self, name: str, *, dirty_share_min: float = 0.0) -> int:
        with self.gate:
            self._check_writable()
            return self._upkeep.tidy(name, dirty_share_min=dirty_share_min)

    # Unclean stops

    def incarnation(self) -> int:
        return self._incarnation

    def lost_after(self, name: str, partition: int, *, incarnation: int) -> int | None:
        ends = [
            entry["ends"][f"{name}/{partition}"]
            for entry in read_incarnations(self._disk, self.folder)
            if entry["incarnation"] > incarnation and f"{name}/{partition}" in entry["ends"]
        ]
        return min(ends, default=None)

    # Queues

    def lease_engine(self, opening: QueueOpening) -> WindowEngine:
        with self.gate:
            folder, topic = f"{self.folder}/queues/{opening.group}/{opening.topic.name}", opening.topic
            store = FolderWindowStore if self._writable else ReadOnlyWindowStore
            has_keys = opening.settings.has_keys
            windows = store(self._disk, folder, topic=topic, incarnation=self._incarnation, has_keys=has_keys)
        return WindowEngine(self, windows, opening)

    def queues(self) -> list[dict[str, Any]]:
        with self.gate:
            return local_queues(self._disk, f"{self.folder}/queues")

    def delete_queue(self, group: str, topic: str) -> None:
        with self.gate:
            self._check_writable()
            delete_local_queue(self._disk, f"{self.folder}/queues", group, topic)

    # Groups

    def groups(self) -> list[str]:
        with self.gate:
            return self._groups.names()

    def group(self, name: str, *, create: bool) -> FileGroup:
        with self.gate:
            if create:
                self._check_writable()
            return self._groups.group(name, create=create)

    # The handle

    def counters(self) -> Mapping[str, int]:
        return dict(self._counters)

    def close(self) -> None:
        self._upkeep.close()
        if self.gate.close():
            if self._pool is not None:
                self._pool.shutdown()
            self._together.close()
            self._close_files()
            self._closed = True

    def _forked(self) -> None:
        """In a child: the parent's locks are not ours, and a copy of its files would keep them after its death."""
        if self._closed:
            return
        self._close_files()
        try:
            self._open_files(create=False)
        except HeadwaterError:
            self._closed = True
            self.gate.close()

    # Opening

    def _open_files(self, *, create: bool) -> None:
        self._closed = False
        self.gate = _LogGate(self._disk, self.folder)
        self._mutex = threading.RLock()
        self._catalog_depth = 0
        self._pool: ThreadPoolExecutor | None = None
        self._together: SideBySide = SideBySide(WRITERS)
        try:
            read_text(self._disk, f"{self.folder}/headwater", "log")
        except FileNotFoundError:
            if not create:
                raise LogNotFound(
                    f"No log exists in {self.folder}.", advice="Check the path, or open it with create=True."
                ) from None
            self._create_log()
        for name in ("catalog.lock", "state", "commits", "commit.lock", "topics", "producers"):
            if not self._disk.exists(f"{self.folder}/{name}"):
                raise _missing(f"{self.folder}/{name}")
        self._catalog_file = self._disk.open(f"{self.folder}/catalog.lock", "write" if self._writable else "read")
        self._check_recovered()
        self._recover_closed()
        self._commits = CommitLog(self._disk, self.folder, writable=self._writable)
        self.handles = Handles(
            self._disk,
            self.folder,
            clock=self._clock,
            counters=self._counters,
            writable=self._writable,
            settle=self._commits.settle,
            rolled=self._rolled,
            mend=self._mend,
            closed=self._closed_partitions,
        )
        self._groups = GroupFiles(
            self._disk, self.folder, gate=self.gate, settle=self._commits.settle, writable=self._writable
        )
        self._stages = StageFiles(self._disk, self.folder, settle=self._commits.settle, writable=self._writable)
        self._upkeep = Upkeep(
            self.handles,
            self.gate,
            clock=self._clock,
            counters=self._counters,
            acked=self._acked,
            has_thread=self._is_real and self._writable,
        )
        self._gauge = Gauge(self._disk, self._counters, self._upkeep.expire)
        self._transactions = Transactions(
            self._commits,
            self.handles,
            self._groups,
            self._stages,
            gauge=self._gauge,
            clock=self._clock,
            threads=self._together if self._is_real else None,
        )
        self._copies = Copies(self.handles, clock=self._clock)
        self._incarnation = self._commits.state().incarnation
        if self._writable and self._commits.state().failed:
            with suppress(StorageError), self._catalog():
                self._transactions.replace_failed_commits()

    def _check_recovered(self) -> None:
        """After an unclean stop the first to open the log puts it in order."""
        if self._writable:
            self._disk.sync_folder(os.path.dirname(self.folder))
            self._disk.sync_folder(self.folder)
        if last_boot_id(self._disk, self.folder) == self._disk.boot_id():
            return
        if not self._writable:
            raise NoAccess(
                f"The machine was restarted since {self.folder} was last used, and the log must be recovered first.",
                advice="Open it once without read_only=True, as a user who may write to it.",
            )
        with self._catalog():
            self._counters += recover_log(self._disk, self.folder, clock=self._clock)

    def _recover_closed(self) -> None:
        """Partitions that could not be recovered are tried again by each process that opens the log and may write."""
        if self._writable and self._disk.exists(f"{self.folder}/unrecovered"):
            with self._catalog():
                recover_closed(self._disk, self.folder)

    def _closed_partitions(self) -> Mapping[tuple[str, int], str]:
        return {place: entry.why for place, entry in read_unrecovered(self._disk, self.folder).items()}

    def _create_log(self) -> None:
        missing, above = [], self.folder
        while not self._disk.exists(above):
            missing.append(above)
            above = os.path.dirname(above)
        self._disk.make_folder(f"{self.folder}/topics")
        self._disk.make_folder(f"{self.folder}/producers")
        for folder in missing:
            self._disk.sync_folder(os.path.dirname(folder))
        self._catalog_file = self._disk.open(f"{self.folder}/catalog.lock", "create")
        with self._catalog():
            if not self._disk.exists(f"{self.folder}/headwater"):
                self._disk.open(f"{self.folder}/commit.lock", "create").close()
                create_commits(self._disk, self.folder)
                create_state(self._disk, self.folder, boot_id=self._disk.boot_id())
                self._disk.sync_folder(self.folder)  # `headwater` says that all the rest is there
                self._disk.reach("open: state made")
                write_text(self._disk, f"{self.folder}/headwater", "log", {"id": uuid.uuid4().hex})
        self._catalog_file.close()

    def _close_files(self) -> None:
        self._stages.close()
        self._groups.close()
        self.handles.close()
        self._commits.close()
        self._catalog_file.close()

    # What its parts are handed, and helpers of the above

    def _partitions(self, names: Sequence[str]) -> list[Partition]:
        return [partition for name in names for partition in self.handles.partitions(name)]

    def _looked_after(self, topic: Topic) -> Topic:
        """The topic itself, tidied regularly from now on if it is to be kept small."""
        if topic.is_kept_small:
            self._upkeep.tidy_regularly()
        return topic

    def _rolled(self) -> None:
        self._upkeep.seal_later()

    def _mend(self, partition: Partition) -> None:
        """Takes a poisoned partition back into use, after the commit log: a record in it may still speak of its frames."""
        with self._catalog():
            self._transactions.replace_failed_commits()
            partition.heal()

    def _acked(self, partition: Partition) -> Acked | None:
        topic, number, end = partition.topic, partition.number, partition.visible().end

        def lost_after(incarnation: int) -> int | None:
            return self.lost_after(topic.name, number, incarnation=incarnation)

        return acked_in_folder(
            self._disk,
            f"{self.folder}/queues",
            topic,
            number,
            end=end,
            lost_after=lost_after,
            chunks=partial(partition_chunks, self.handles, partition),
        )

    def _is_half_deleted(self, name: str) -> bool:
        folder = f"{self.folder}/topics/{name}"
        if not self._disk.exists(folder):
            return False
        return any(is_marked_deleted(self._disk, f"{folder}/{n}") for n in self._disk.names(folder) if n.isdigit())

    def _remove(self, name: str) -> None:
        """Removes a topic's folder, whose partitions are marked; the caller holds the lock of the catalog."""
        gone = f"{self.folder}/topics/.deleted.{uuid.uuid4().hex}"
        self._disk.rename(f"{self.folder}/topics/{name}", gone)
        self._disk.sync_folder(f"{self.folder}/topics")
        self._disk.reach("delete: renamed")
        self.handles.forget(name)
        self._disk.remove_folder(gone)

    def _appended(self, write: Write) -> tuple[Partition, Appended] | HeadwaterError:
        try:
            partition = self.handles.usable_partition(write.topic.name, write.partition)
            partition.check_topic(write.topic.id)
            fence = self.handles.fence(write.stamp.producer)
            payloads = list(payloads_of(write))
            epoch, generation = fence.epoch if fence else None, write.topic.generation
            if not partition.topic.is_limited:
                return partition, partition.append(payloads, generation=generation, epoch=epoch)
            return partition, self._gauge.append(partition, payloads, generation=generation, epoch=epoch)
        except HeadwaterError as error:
            return error

    def _writers(self) -> ThreadPoolExecutor:
        with self._mutex:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="headwater-writer")
            return self._pool

    @contextmanager
    def _catalog(self) -> Iterator[None]:
        """Holds the lock of the list of topics."""
        self._check_writable()
        with self._mutex:
            self._catalog_depth += 1
            try:
                if self._catalog_depth == 1:
                    self._catalog_file.lock()
                yield
            finally:
                self._catalog_depth -= 1
                if self._catalog_depth == 0:
                    self._catalog_file.unlock()

    def _check_writable(self) -> None:
        if not self._writable:
            raise NoAccess(
                f"The log {self.folder} was opened read-only.",
                advice="Open it without read_only=True, as a user who may write to its folder.",
            )


def capabilities_in(folder: str) -> Capabilities:
    """What a log in a folder can do."""
    return Capabilities(folder=folder, is_placed_by_key=True, tells_lateness=True, takes_offsets=True)


class _LogGate(Gate):
    """The gate of a log: a file that is missing where it must be is told as what it is, a log that was moved away or is damaged."""

    def __init__(self, disk: Disk, folder: str) -> None:
        super().__init__(f"The log {folder}", "Open it again with open_log.")
        self._disk = disk
        self._folder = folder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.discard(threading.get_ident())
        if isinstance(error, FileNotFoundError):
            if self._disk.exists(f"{self._folder}/headwater"):
                raise _missing(str(error.filename or error)) from error
            raise LogNotFound(f"The log in {self._folder} is gone.", advice=GONE) from error


def _missing(path: str) -> Damaged:
    return Damaged(
        f"{path} is missing.", advice="Close every program that uses this log, then run `headwater doctor --repair`."
    )
