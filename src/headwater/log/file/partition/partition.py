"""A partition: a totally ordered part of a topic, appended to and read by many processes without a server.

A folder with `head` (see `head`), `lock`, `sync` and `seal` (lock files, never replaced) and segments. A writer takes the
append lock, writes its frames where the head says, publishes `written`, and lets go. fdatasync happens outside that lock,
under the sync lock, and covers whatever anybody has written so far: one sync serves all who wait. `Active` is the newest
segment, open for writing; `Sequences` are what producers have stored last.

Invariants:
- a frame is written only at `written.position`; what a dead writer left there is overwritten, and can never be taken for
  a continuation because frames are chained;
- lock order is seal before append before sync, and partitions in the order of (topic, number); a holder of a sync lock takes no other;
- an event goes in only if it was placed by the topic's present number of partitions, which is known under the append lock:
  whoever adds partitions holds all append locks, and counts `changes` of each head up before and after (see `split`);
- threads of one process exclude each other by mutexes first, since a file lock belongs to the process's file.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

import msgspec

from headwater.log.disk.disk import Disk, File, wait_until_free
from headwater.log.file.partition.head import Appended, Head, Mark, create_head
from headwater.log.file.segments import frame as frames
from headwater.log.file.segments.frame import Payload
from headwater.log.file.segments.index import Index
from headwater.log.file.segments.sealed_segment import sealed_name
from headwater.log.file.segments.segment import (
    ProducerSequence,
    Segment,
    SegmentHeader,
    create_segment,
    recent_producers,
    segment_name,
)
from headwater.log.port.store import Bounds
from headwater.log.port.topic import Topic
from headwater.log.port.write import NO_PRODUCER, Stamp, check_place, repartitioned
from headwater.model.clock import NO_TIME, Clock
from headwater.model.errors import Damaged, Fenced, HeadwaterError, Poisoned, SequenceGap, StorageError, TopicNotFound

_ROOM_FIRST = 64 << 10
ALL = -1
"""In place of a partition's number: every partition of the topic."""

FIRST_HEADER = SegmentHeader(0, NO_TIME, 0, 0, {})


class Partition:
    """One partition opened by one process."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        *,
        topic: Topic,
        number: int,
        clock: Clock,
        counters: Counter[str],
        settle: Callable[[], None],
        rolled: Callable[[], None],
        refresh: Callable[[str], Topic],
        writable: bool,
    ) -> None:
        self.folder = folder
        self.topic = topic
        self.number = number
        self._disk = disk
        self._clock = clock
        self._counters = counters
        self._settle = settle
        self._rolled = rolled
        self._refresh = refresh
        self._looked = self.seen = -1
        self.index: tuple[int, Index | None] = (-1, None)
        self._append_mutex = threading.Lock()
        self._sync_mutex = threading.Lock()
        self._head = Head(disk, f"{folder}/head", writable=writable)
        self._lock_file = disk.open(f"{folder}/lock", "write" if writable else "read")
        self._sync_file = disk.open(f"{folder}/sync", "write" if writable else "read")
        self._active = Active(disk, folder, self._head)
        self._sequences = Sequences(disk, folder)

    # What readers ask

    def visible(self) -> Mark:
        """How far readers see."""
        return self._head.written() if self.topic.durability == "os" else self._head.durable()

    def bounds(self) -> Bounds:
        """The offsets that readers see, those in the archive too."""
        topic = self.topic
        return Bounds(*self._head.bounds(archived=bool(topic.archive), durable=topic.durability != "os"))

    def first(self) -> int:
        """The first offset it holds."""
        return self._head.firsts()[0]

    def oldest(self) -> int:
        """The first offset that it or its archive holds."""
        return self._head.firsts()[1 if self.topic.archive else 0]

    def written(self) -> Mark:
        """How far it is written."""
        return self._head.written()

    def durable_base(self) -> int:
        """Where the newest segment begins; all before it are closed and whole on disk."""
        return self._head.durable().base

    def is_deleted(self) -> bool:
        """Whether its topic was deleted."""
        return self._head.is_deleted()

    def is_as_seen(self) -> bool:
        """Whether its topic is there, and as it was when `seen` was counted."""
        return self._head.is_as_seen(self.seen)

    def is_poisoned(self) -> bool:
        """Whether an fsync has failed since it was last opened and checked."""
        return self._head.is_poisoned()

    def changes(self) -> int:
        """Another number than the one `seen`: the topic's file must be read again."""
        return self._head.changes()

    # What writers do

    @contextmanager
    def appending(self) -> Iterator[None]:
        """Holds the append lock, with every dead transaction settled and the partition fit to be written."""
        with self._append_mutex:
            try:
                self._lock_file.lock()
                self._settle()
                if not self._head.is_as_seen(self._looked):
                    self._look_at_topic()
                self._check_not_poisoned()
                yield
            finally:
                self._lock_file.unlock()

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Holds the sync lock, with every dead transaction settled: nobody else publishes here from now on."""
        with self._sync_mutex:
            try:
                self._sync_file.lock()
                self._settle()
                yield
            finally:
                self._sync_file.unlock()

    def append(
        self, payloads: Sequence[Payload], *, generation: int, epoch: Callable[[], int] | None = None
    ) -> Appended:
        """Writes payloads as frames and publishes them; they are durable once `sync` of the answer has returned.

        All payloads carry the stamps of one producer. A batch that is stored already is not stored again: its offsets are
        given as they were, whatever `generation` of the topic it was placed by. Any other must be placed by the present
        one. `epoch` reads the producer's present epoch; a stale producer is fenced.
        """
        with self.appending():
            stamp = payloads[0].stamp
            if stamp.producer != NO_PRODUCER:
                self.check_epoch(stamp, epoch)
                stored = self._stored_before(payloads, foreign=epoch is not None)
                if stored is not None:
                    return Appended(stored, self._head.written().heals)
            self.check_generation(generation)
            after = self.stage(payloads)
            self._disk.reach("append: written")
            self._sequences.doubt()
            self._head.publish_written(after)
            self._sequences.remember(payloads, after)
            self._disk.reach("append: published")
            offsets = range(after.end - sum(payload.count for payload in payloads), after.end)
            return Appended(offsets, after.heals)

    def check_epoch(self, stamp: Stamp, epoch: Callable[[], int] | None) -> None:
        """Refuses a stale producer; the caller holds the append lock."""
        if epoch is not None and epoch() != stamp.epoch:
            raise Fenced(
                f"Producer epoch {stamp.epoch} was replaced by {epoch()} in {self.where()}.",
                advice="Another producer with the same id took over; close this one.",
            )

    def check_topic(self, topic_id: str) -> None:
        """Refuses events made for a topic that was deleted and created again since."""
        if self.topic.id != topic_id:
            raise TopicNotFound(
                f"Topic {self.topic.name!r} was deleted and created again.",
                advice="Nothing was stored. Append again with the new topic's schema.",
            )

    def check_generation(self, generation: int) -> None:
        """Refuses events that were placed by another number of partitions; the caller holds the append lock."""
        if generation != self.topic.generation:
            raise repartitioned(self.topic)

    def stage(self, payloads: Sequence[Payload], *, transaction: int = 0) -> Mark:
        """Writes payloads as frames behind the published end, without publishing.

        The caller holds the append lock, and the sync lock too if it is a transaction.
        """
        mark = self._written_in_order(is_syncing=bool(transaction))
        if payloads[0].at is not None:
            check_place(payloads[0].at, mark.end, self.where())
        total = sum(payload.stride for payload in payloads)
        if mark.position + total > self.topic.segment_bytes and mark.end > mark.base:
            if transaction:
                mark = self._roll(mark)
            else:
                with self.syncing():
                    mark = self._roll(mark)
        file = self._active.file(mark.base)
        self._active.make_room(file, mark.position + total, segment_bytes=self.topic.segment_bytes)
        now = self._clock()
        buffers: list[object] = []
        after = mark
        for payload in payloads:
            appended = max(now if payload.appended is None else payload.appended, after.appended)
            header, running, crc = frames.encode(
                payload,
                base_offset=after.end,
                running=after.running,
                future_us=self.topic.future_us,
                appended=appended,
                chain=after.chain,
                transaction=transaction,
            )
            buffers += (header, *payload.buffers, frames.padding(payload.size))
            after = Mark(
                end=after.end + payload.count,
                base=mark.base,
                position=after.position + payload.stride,
                running=running,
                appended=appended,
                chain=crc,
                heals=mark.heals,
            )
        if self.topic.durability == "os":
            self._head.publish_written(msgspec.structs.replace(mark, writing=1))
        self._disk.reach("append: locked")
        file.write_at(mark.position, buffers)
        self._counters["frames"] += len(payloads)
        self._counters["bytes"] += total
        return after

    def sync(self, appended: Appended) -> None:
        """Returns when these events are on disk, through this process's fdatasync or another's."""
        if self.topic.durability == "os" or self._is_durable(appended):
            return
        with self._sync_mutex:
            wait_until_free(self._sync_file)  # the fdatasync of another may do for all who wait for it
        if self._is_durable(appended):
            return
        with self.syncing():
            if not self._is_durable(appended):
                self._check_not_healed(self._head.written(), appended)
                self.sync_written()
                if not self._is_durable(appended):
                    raise self._never_written(appended)

    def sync_written(self) -> None:
        """fdatasync, and publishes as durable what was written before it; the caller holds the sync lock."""
        mark = self._head.written()
        self.sync_file(mark.base)
        self._disk.reach("sync: done")
        self._head.publish_durable(mark)
        self._disk.reach("sync: published")

    def sync_file(self, base: int) -> None:
        """fdatasync of a segment; a failure poisons the partition. The caller holds the sync lock.

        After a failed sync the kernel takes what it could not write for written: the next one would succeed and mean
        nothing. So a poisoned partition is not synced at all.
        """
        self._check_not_poisoned()
        file = self._active.file(base)
        try:
            file.sync()
        except StorageError as error:
            self._head.set_poisoned(poisoned=True)
            raise self._poisoned() from error
        self._counters["fdatasyncs"] += 1

    def poison(self) -> None:
        """Closes the partition to appends until it is opened again; the caller holds the sync lock."""
        self._head.set_poisoned(poisoned=True)

    def publish(self, mark: Mark) -> None:
        """Publishes a transaction's end as written and durable; the caller holds both locks, or settles a dead one."""
        if mark.end > self._head.written().end:
            self._head.publish_written(mark)
        if mark.end > self._head.durable().end:
            self._head.publish_durable(mark)

    def sequence_of(self, producer: bytes) -> ProducerSequence | None:
        """The last that a producer has stored here, on disk before the answer."""
        with self.appending():
            mark = self._head.written()
            found = self._sequences.of(producer, mark, foreign=True)
        if found is not None:
            self.sync(Appended(range(found.end_offset, found.end_offset), mark.heals))
        return found

    def fence(self) -> tuple[Mark, dict[bytes, ProducerSequence]]:
        """The end of all that was written, on disk, and what each producer stored last; the caller holds both locks."""
        mark = self._written_in_order(is_syncing=True)
        if mark.end > self._head.durable().end:
            self.sync_written()
        return mark, self._sequences.all(mark)

    def count_change(self, *, is_done: bool) -> None:
        """The topic's file is about to be replaced, or was; the caller holds the append lock."""
        changes = self._head.changes()
        self._head.set_changes(changes + 1 if is_done else changes | 1)

    def heal(self) -> None:
        """After a failed fsync: goes back to what is certainly on disk, and takes events again.

        Events behind `durable` were never acknowledged and never seen by readers. With `durability="os"` readers have
        seen them, so there they stay. Segments that were begun behind that go, or what is in them would be served once others
        have those offsets.
        """
        with self._append_mutex:
            try:
                self._lock_file.lock()
                with self.syncing():
                    if not self._head.is_poisoned():
                        return
                    mark = self.visible()
                    mark = msgspec.structs.replace(mark, heals=self._head.written().heals + 1, rolling=-1, writing=0)
                    file = self._active.cut(mark.base, mark.position)
                    self._write_again(file, mark)
                    file.sync()
                    self._disk.reach("heal: cut")
                    remove_begun(self._disk, self.folder, mark.base)
                    self._disk.sync_folder(self.folder)
                    self._disk.reach("heal: begun segments removed")
                    self._head.publish_written(mark)
                    self._head.set_poisoned(poisoned=False)
            finally:
                self._lock_file.unlock()

    def _write_again(self, file: File, end: Mark) -> None:
        """What lies behind the durable mark and stays: its pages count as written since the failed sync, though they are not."""
        durable = self._head.durable()
        start = durable.position if durable.base == end.base else 0
        if start < end.position:
            file.write_at(start, [file.read_at(start, end.position - start)])

    def sync_head(self) -> None:
        """Returns when the head is on disk."""
        self._head.sync()

    def publish_first(self, first: int, *, oldest: int) -> None:
        """Gives up everything below an offset, on disk when it returns; the caller holds the `seal` lock.

        From `oldest` on the archive has it.
        """
        self._head.sync()
        self._head.publish_firsts(first, oldest)
        self._disk.reach("retention: first published")
        self._head.sync()

    def roll_older_than(self, time_us: int) -> None:
        """Begins another segment if the newest one has events and all were appended before a time."""
        with self.appending():
            mark = self._written_in_order(is_syncing=False)
            if mark.end > mark.base and mark.appended < time_us:
                with self.syncing():
                    self._roll(mark)

    def empty_segment(self) -> Mark:
        """The end of what is written, in a newest segment that holds nothing; the caller holds both locks."""
        mark = self._written_in_order(is_syncing=True)
        return self._roll(mark) if mark.end > mark.base else mark

    def where(self) -> str:
        """How errors name it."""
        return f"partition {self.number} of topic {self.topic.name!r}"

    def close(self) -> None:
        """Frees everything."""
        self._active.close()
        self._sync_file.close()
        self._lock_file.close()
        self._head.close()

    def _look_at_topic(self) -> None:
        """It may be gone, or have more partitions. Who began to add some and died here has done so if the topic's file says it."""
        if self._head.is_deleted():
            raise TopicNotFound(f"Topic {self.topic.name!r} was deleted while it was open.", advice="Create it again.")
        changes = self._head.changes()
        self.topic = self._refresh(self.topic.name)
        if changes & 1:
            changes += 1
            self._head.set_changes(changes)
        self._looked = changes

    # Segments

    def _written_in_order(self, *, is_syncing: bool) -> Mark:
        """The written mark, after what a writer that died in the middle has begun is removed.

        The caller holds the append lock; `is_syncing` says whether it holds the sync lock, too.
        """
        mark = self._head.written()
        if mark.rolling >= 0:
            self._disk.remove(f"{self.folder}/{segment_name(mark.rolling)}")
            if mark.rolling > mark.end:  # it was to begin behind a gap (see `copies`)
                self._disk.remove(f"{self.folder}/{sealed_name(mark.end)}")
            self._disk.sync_folder(self.folder)
            mark = msgspec.structs.replace(mark, rolling=-1)
            self._head.publish_written(mark)
        if mark.writing:
            self._active.cut(mark.base, mark.position)
            with nullcontext() if is_syncing else self.syncing():
                self.sync_file(mark.base)
            mark = msgspec.structs.replace(mark, writing=0)
            self._head.publish_written(mark)
        return mark

    def _roll(self, mark: Mark) -> Mark:
        """Closes the active segment and begins the next one; the caller holds both locks.

        The old segment is cut and synced first: what a dead writer left behind its end must not come back by a power loss
        once the next segment stands.
        """
        self._check_not_poisoned()
        self._active.cut(mark.base, mark.position)
        self.sync_file(mark.base)
        if mark.end > self._head.durable().end:
            self._head.publish_durable(mark)
        self._disk.reach("roll: synced")
        header = SegmentHeader(mark.end, mark.running, mark.appended, mark.chain, self._sequences.all(mark))
        fresh = self.begin_segment(mark, header)
        self._sequences.go_on(fresh)
        return fresh

    def begin_segment(self, mark: Mark, header: SegmentHeader, *, first: Callable[[], None] = lambda: None) -> Mark:
        """Makes the next segment, whose base may lie behind a gap that `first` fills; the caller holds both locks."""
        self._head.publish_written(msgspec.structs.replace(mark, rolling=header.base))
        self._disk.reach("roll: begun")
        first()
        position = create_segment(self._disk, self.folder, header)
        self._disk.reach("roll: created")
        fresh = Mark(header.base, header.base, position, header.running, header.appended, header.chain, mark.heals)
        self._head.publish_written(fresh)
        self._disk.reach("roll: written published")
        self._head.publish_durable(fresh)
        self._counters["rolls"] += 1
        self._rolled()
        return fresh

    # Producers

    def _stored_before(self, payloads: Sequence[Payload], *, foreign: bool) -> range | None:
        """The offsets of a batch that is here already, because its producer did not learn so the first time."""
        before = self._sequences.of(payloads[0].stamp.producer, self._head.written(), foreign=foreign)
        if before is None or payloads[0].stamp.sequence_first > before.last:
            return None
        if payloads[-1].stamp.sequence_last != before.last:
            raise SequenceGap(
                f"A batch with sequences {payloads[0].stamp.sequence_first} to {payloads[-1].stamp.sequence_last} came "
                f"after sequence {before.last} was stored in {self.where()}.",
                advice="A producer retries only its last batch; give each producer its own id.",
            )
        self._counters["duplicates"] += 1
        return range(before.end_offset - sum(payload.count for payload in payloads), before.end_offset)

    def _is_durable(self, appended: Appended) -> bool:
        durable = self._head.durable()
        if durable.end < appended.offsets.stop:
            return False
        self._check_not_healed(durable, appended)
        return True

    def _check_not_healed(self, mark: Mark, appended: Appended) -> None:
        """After a failed sync and its mending the same offsets may belong to other events."""
        if mark.heals != appended.heals:
            raise self._poisoned()

    def _never_written(self, appended: Appended) -> AssertionError:
        """Our own mistake, under `python -O` too: nobody may get a receipt for what is not there."""
        end = self._head.durable().end
        return AssertionError(
            f"Events up to {appended.offsets.stop} of {self.where()} count as stored; it ends at {end}."
        )

    def _check_not_poisoned(self) -> None:
        if self._head.is_poisoned():
            raise self._poisoned()

    def _poisoned(self) -> Poisoned:
        return Poisoned(
            f"An fsync of {self.where()} failed ({self.folder}).",
            advice="Nothing acknowledged is lost. Check the disk, then open the log again: the partition is checked and "
            "takes events again.",
        )


class Active:
    """The active segment of one partition: the newest file, open for writing, with room made ahead in it.

    Invariant: it is as long as the head says that it was written, or it is not opened: what were written behind the end of a file that
    was cut, nobody would ever read.

    Thread-safety: holders of either lock of the partition use it, so opening has a mutex of its own; all else happens under the
    append lock.
    """

    def __init__(self, disk: Disk, folder: str, head: Head) -> None:
        self._disk = disk
        self._folder = folder
        self._head = head
        self._mutex = threading.Lock()
        self._open: tuple[int, File] | None = None
        self._room = 0

    def file(self, base: int) -> File:
        """The file of the segment that begins at an offset; `Damaged` where it is shorter than it was."""
        with self._mutex:
            if self._open is None or self._open[0] != base:
                file = self._opened(base)
                self._open = (base, file)
                self._room = file.size()
            return self._open[1]

    def make_room(self, file: File, length: int, *, segment_bytes: int) -> None:
        """Allocates ahead in growing steps: syncing into allocated room is twice as fast, and cannot find a full disk."""
        if length <= self._room:
            return
        self._room = file.size()
        if length <= self._room:
            return
        step = min(max(self._room, _ROOM_FIRST), max(segment_bytes - self._room, 0))
        room = max(length, self._room + step)
        try:
            file.allocate(room)
        except StorageError:
            if room == length:
                raise
            room = length
            file.allocate(room)
        self._room = room

    def cut(self, base: int, position: int) -> File:
        """Takes away what lies behind a position; `Damaged` where the file is shorter."""
        file = self.file(base)
        size = file.size()
        if size < position:
            raise lost(file.path, f"it has {size} bytes, and its events took {position}")
        file.truncate(position)
        self._room = position
        return file

    def close(self) -> None:
        """Frees the file."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _opened(self, base: int) -> File:
        path = f"{self._folder}/{segment_name(base)}"
        # Whoever heals a poisoned partition cuts it to what is on disk, and may have died or failed before the head said so.
        mark = self._head.durable() if self._head.is_poisoned() else self._head.written()
        try:
            file = self._disk.open(path, "write")
        except FileNotFoundError:
            if self._head.is_deleted():
                raise TopicNotFound(f"The topic of {path} was deleted.", advice="Create it again.") from None
            raise lost(path, "it is missing") from None
        size = file.size()
        if mark.base == base and size < mark.position:
            file.close()
            raise lost(path, f"it has {size} bytes, and its events took {mark.position}")
        Segment(self._disk, self._folder, base).close()  # behind a damaged header nobody would read anything
        return file


class Sequences:
    """The last that each producer has stored in one partition, as far as one process has looked.

    That is in the header of each segment and in the frames behind it. This process's own frames are remembered once they are
    published, so only those of others are ever read. The holder of the partition's append lock uses it.

    Invariant: nothing is remembered that is not published, and what is published is remembered or in doubt: then the frames are
    read. So Ctrl-C between the two neither lets a batch pass for stored nor stores it twice.

    Producers with a name are remembered for a time, those without one by their number (see `recent_producers`): however many of the
    latter come and go, a named producer that starts again finds what it stored.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._known: dict[bytes, ProducerSequence] = {}
        self._mark: tuple[int, int, int] = (-1, 0, 0)
        self._doubts = 0

    def of(self, producer: bytes, mark: Mark, *, foreign: bool) -> ProducerSequence | None:
        """`foreign`: other processes may have written under the same id, so their frames must be looked at."""
        if foreign or self._doubts or producer not in self._known or self._mark[2] != mark.heals:
            self._look(mark)
        return self._known.get(producer)

    def all(self, mark: Mark) -> dict[bytes, ProducerSequence]:
        """Those of every producer that is remembered, up to the written mark."""
        self._look(mark)
        self._known = recent_producers(self._known, now=mark.appended)
        return self._known

    def doubt(self) -> None:
        """Frames of our own are about to be published: what is known may be too little until they are remembered."""
        self._doubts += 1

    def remember(self, payloads: Sequence[Payload], after: Mark) -> None:
        """Keeps the sequences of our own frames, which were published up to a mark."""
        stamp = payloads[-1].stamp
        if stamp.producer != NO_PRODUCER:
            self._known[stamp.producer] = ProducerSequence(stamp.epoch, stamp.sequence_last, after.end, after.appended)
        start = after.position - sum(payload.stride for payload in payloads)
        if self._mark == (after.base, start, after.heals):
            self.go_on(after)
        self._doubts -= 1

    def go_on(self, mark: Mark) -> None:
        """All up to the mark is known."""
        self._mark = (mark.base, mark.position, mark.heals)

    def _look(self, mark: Mark) -> None:
        base, position, heals = self._mark
        if (base, position, heals) != (mark.base, mark.position, mark.heals):
            self._look_from(None if (base, heals) != (mark.base, mark.heals) else position, mark)
        self._doubts = 0

    def _look_from(self, position: int | None, mark: Mark) -> None:
        """Reads the frames from a position on, or the whole segment; Ctrl-C leaves what was known as it was."""
        try:
            segment = Segment(self._disk, self._folder, mark.base)
        except FileNotFoundError:
            raise lost(f"{self._folder}/{segment_name(mark.base)}", "it is missing") from None
        try:
            if position is None:
                self._known = {**segment.header.producers, **segment.producers(segment.start, end=mark.position)}
            else:
                self._known.update(segment.producers(position, end=mark.position))
        finally:
            segment.close()
        self.go_on(mark)


def synced(done: tuple[Partition, Appended] | HeadwaterError) -> range | Exception:
    """The offsets of an append once they are on disk; of one that failed, why."""
    if isinstance(done, HeadwaterError):
        return done
    partition, appended = done
    try:
        partition.sync(appended)
        return appended.offsets
    except HeadwaterError as error:
        return error


def create_partition(disk: Disk, folder: str, header: SegmentHeader = FIRST_HEADER) -> None:
    """The files of an empty partition; one that is split off goes on with the times and producers of its parent."""
    disk.make_folder(folder)
    for name in ("lock", "sync", "seal"):
        disk.open(f"{folder}/{name}", "create").close()
    position = create_segment(disk, folder, header)
    create_head(disk, f"{folder}/head", Mark(position=position, running=header.running, appended=header.appended))
    disk.sync_folder(folder)


def bases_of(disk: Disk, folder: str, ending: str) -> list[int]:
    """The base offsets in the names of a partition's files with an ending; a stranger's file has none."""
    stems = [name.removesuffix(ending) for name in disk.names(folder) if name.endswith(ending)]
    return [int(stem) for stem in stems if stem.isascii() and stem.isdigit()]


def remove_begun(disk: Disk, folder: str, base: int) -> None:
    """Removes what writers that died have begun behind the newest segment that counts; the caller syncs the folder.

    A sealed segment with its base stands for events that were not published (see `copies`).
    """
    for ending, first in ((".frames", base + 1), (".arrow", base), (".index", base)):
        for begun in bases_of(disk, folder, ending):
            if begun >= first:
                disk.remove(f"{folder}/{begun:020d}{ending}")


def publish_past_damage(disk: Disk, folder: str, mark: Mark) -> None:
    """Publishes a transaction's end in a partition that cannot be opened, as far as its head can still say anything.

    The caller settles the transaction, so nobody has written behind it.
    """
    with suppress(Damaged, FileNotFoundError), _head_past_damage(disk, folder, mark) as head:
        head.publish_past_damage(mark)


def poison_past_damage(disk: Disk, folder: str, mark: Mark) -> None:
    """Closes a partition that cannot be opened to appends, also to those who have it open, as `publish_past_damage` publishes there."""
    with suppress(Damaged, FileNotFoundError), _head_past_damage(disk, folder, mark) as head:
        head.set_poisoned(poisoned=True)


@contextmanager
def _head_past_damage(disk: Disk, folder: str, mark: Mark) -> Iterator[Head]:
    """The head, if the frames before a mark are there: another topic of the same name does not have them."""
    segment = Segment(disk, folder, mark.base)
    try:
        ends = [(at + frame.stride, frame.header_crc) for at, frame in segment.scan(segment.start, end=mark.position)]
    finally:
        segment.close()
    if ends[-1:] != [(mark.position, mark.chain)]:
        raise Damaged(f"The frames before {mark.end} are not in {folder}.", advice="Run `headwater doctor`.")
    head = Head(disk, f"{folder}/head")
    try:
        yield head
    finally:
        head.close()


def lost(path: str, what: str) -> Damaged:
    """The refusal to write to a segment of which something is gone."""
    return Damaged(
        f"{path} is damaged: {what}.",
        advice="Nothing was written to it. Restore the partition from a mirror or a backup; `headwater doctor` reports what is lost.",
    )
