"""Transactions of a local log: appends over partitions and topics that happen together or not at all.

`commit` says how one is decided; this is the order in which its partitions are locked, written, synced and published. On a real disk
they are synced side by side: a disk that is asked to flush for one file does so for the others in the same go.
The locks of the groups whose offsets it commits are taken when everything else is done, so they are held for one sync only.
The lock of a stage whose marker it commits is held by the caller.

The file of commit records begins again, once it is long, before a transaction and never after its decision: what keeps it from doing so (a
full disk, say) keeps no transaction from happening, and is tried again later. Only the files that its records speak of are synced for
that, one at a time.

A partition that cannot be opened, because one of its files is damaged or gone, keeps nobody from settling a transaction that it has a
part in: its head is written past the damage, or rebuilt later from frames and records. Where the records have begun again since,
each transaction up to their floor counts as decided for a head of which nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from headwater.log.disk.gate import Held, hold, leave
from headwater.log.disk.threads import SideBySide
from headwater.log.file.commit import CommitLog, CommitState, Decision, Part, StagePart
from headwater.log.file.groups import GroupFiles
from headwater.log.file.handles import Handles
from headwater.log.file.partition.head import sync_head
from headwater.log.file.partition.partition import Partition, poison_past_damage, publish_past_damage
from headwater.log.file.segments.frame import Payload, payloads_of
from headwater.log.file.stages import StageFiles
from headwater.log.file.upkeep.overload import Gauge
from headwater.log.port.group import OffsetPart
from headwater.log.port.store import Bounds
from headwater.log.port.write import Write, repartitioned
from headwater.model.clock import Clock
from headwater.model.errors import Damaged, StorageError, TopicNotFound

_SNAPSHOTS_MAX = 10_000


class Transactions:
    """The transactions of one log in one process."""

    def __init__(
        self,
        commits: CommitLog,
        handles: Handles,
        groups: GroupFiles,
        stages: StageFiles,
        *,
        gauge: Gauge,
        clock: Clock,
        threads: SideBySide | None,
    ) -> None:
        """Without `threads` everything happens one after the other, in the caller's."""
        self._commits = commits
        self._handles = handles
        self._groups = groups
        self._stages = stages
        self._gauge = gauge
        self._disk = handles.disk
        self._clock = clock
        self._threads = threads
        self._tried_bytes = 0
        commits.publish_by(self._publish, self._poison)

    def append(
        self, writes: Sequence[Write], offsets: Sequence[OffsetPart] = (), *, stage: StagePart | None = None
    ) -> list[range]:
        """Appends all of them, and commits the offsets for their groups together with it; the offsets of each.

        `NotOwner` where a member has lost its partition.
        """
        ordered = sorted(range(len(writes)), key=lambda n: (writes[n].topic.name, writes[n].partition, n))
        merged: dict[tuple[str, int, str, int], list[Payload]] = {}
        placed: dict[str, int] = {}
        for number in ordered:
            write = writes[number]
            name, generation = write.topic.name, write.topic.generation
            if placed.setdefault(name, generation) != generation:  # it was split between two of them
                raise repartitioned(self._handles.refresh(name))
            merged.setdefault((name, write.partition, write.topic.id, generation), []).extend(payloads_of(write))
        buffered = [
            payloads
            for (name, number, *_), payloads in merged.items()
            if self._gauge.admit(self._handles.usable_partition(name, number), payloads)
        ]
        starts = self._append(merged, offsets, stage)
        for payloads in buffered:
            self._gauge.count_buffered(payloads)
        for name in sorted(placed):
            self._handles.signal(name)
        ranges: dict[int, range] = {}
        for number in ordered:
            place = (writes[number].topic.name, writes[number].partition)
            ranges[number] = range(starts[place], starts[place] + writes[number].count)
            starts[place] = ranges[number].stop
        return [ranges[number] for number in range(len(writes))]

    def bounds(self, partitions: Sequence[Partition]) -> dict[tuple[str, int], Bounds]:
        """The visible offsets of partitions, as one snapshot: of each transaction all or nothing."""
        for _ in range(_SNAPSHOTS_MAX):
            before = self._commits.state()
            found = {(partition.topic.name, partition.number): partition.bounds() for partition in partitions}
            masks = self._commits.pending_parts(before)
            after = self._commits.state()
            if after is before or (after.sequence, after.pending) == (before.sequence, before.pending):
                break
        else:
            raise StorageError("No consistent view of the log's heads could be read.", advice="Try again.")
        if masks:
            ids = {(partition.topic.name, partition.number): partition.topic.id for partition in partitions}
            for part in masks:
                place = (part.topic, part.partition)
                if ids.get(place) == part.topic_id:
                    found[place] = Bounds(found[place].first, min(found[place].end, part.start))
        return found

    @contextmanager
    def standing_still(self) -> Iterator[CommitState]:
        """Holds the lock of the commit log, with what a dead process left settled: none is decided meanwhile."""
        with self._commits.locked():
            self._commits.settle()
            yield self._commits.state()

    def replace_failed_commits(self) -> None:
        """A commit record's sync failed: nobody can append to its partitions until this has succeeded.

        The caller holds the lock of the catalog.
        """
        with self._commits.locked():
            if self._commits.state().failed:
                self._begin_again()

    def _append(
        self,
        payloads: Mapping[tuple[str, int, str, int], Sequence[Payload]],
        offsets: Sequence[OffsetPart],
        stage: StagePart | None,
    ) -> dict[tuple[str, int], int]:
        """Appends to each (topic, partition, topic id, generation), given in this order; returns the first offset in each."""
        partitions = []
        for name, number, topic_id, _ in payloads:
            partition = self._handles.usable_partition(name, number)
            partition.check_topic(topic_id)
            partitions.append(partition)
        self._begin_again_if_long()
        transaction = self._commits.next_transaction(self._clock())
        held: Held = []
        try:
            parts = []
            for partition, (place, pieces) in zip(partitions, payloads.items(), strict=True):
                hold(held, partition.appending())
                hold(held, partition.syncing())
                partition.check_generation(place[3])
                fence = self._handles.fence(pieces[0].stamp.producer)
                partition.check_epoch(pieces[0].stamp, fence.epoch if fence else None)
                start = partition.written().end
                mark = partition.stage(pieces, transaction=transaction)
                parts.append(Part(partition.topic.name, partition.topic.id, partition.number, start, mark))
            self._disk.reach("transaction: staged")
            self._sync([(partition, part.mark.base) for partition, part in zip(partitions, parts, strict=True)])
            self._disk.reach("transaction: synced")
            for name in sorted({part.group for part in offsets}):
                hold(held, self._groups.group(name, create=False).held())
            self._groups.check(offsets)
            decision = Decision(transaction, parts, offsets, stage)
            self._commits.commit(decision)
        finally:
            try:
                leave(held)
            finally:
                held.clear()
        return {(part.topic, part.partition): part.start for part in parts}

    def _sync(self, segments: Sequence[tuple[Partition, int]]) -> None:
        """Returns when these segments are on disk, and no thread is at work on them any more."""
        calls = [partial(partition.sync_file, base) for partition, base in segments]
        if self._threads is not None and len(calls) > 1:
            self._threads.run(calls)
        else:
            for call in calls:
                call()

    def _publish(self, decision: Decision) -> None:
        self._groups.publish(decision, now_us=self._clock())
        self._stages.publish(decision)
        for part in decision.parts:
            try:
                partition = self._handles.partition(part.topic, part.partition)
                if partition.topic.id == part.topic_id:
                    partition.publish(part.mark)
            except TopicNotFound:
                continue
            except Damaged:
                publish_past_damage(self._disk, self._folder(part), part.mark)
            self._disk.reach("commit: published one")

    def _poison(self, decision: Decision) -> None:
        for part in decision.parts:
            try:
                partition = self._handles.partition(part.topic, part.partition)
                if partition.topic.id == part.topic_id:
                    partition.poison()
            except TopicNotFound:
                continue
            except Damaged:
                poison_past_damage(self._disk, self._folder(part), part.mark)

    def _folder(self, part: Part) -> str:
        return f"{self._handles.folder}/topics/{part.topic}/{part.partition}"

    def _begin_again_if_long(self) -> None:
        """Raises nothing but what settling a dead transaction does: the caller's own has not begun."""
        if not self._commits.is_long(tried_bytes=self._tried_bytes):
            return
        with self._commits.locked():
            self._commits.settle()
            try:
                self._begin_again()
                self._tried_bytes = 0
            except (StorageError, FileNotFoundError):
                self._tried_bytes = self._commits.state().end

    def _begin_again(self) -> None:
        """Puts on disk what the recorded transactions have published, and begins with no records; the caller holds the lock of `state`."""
        decisions = list(self._commits.decided()[1].values())
        for topic, number in sorted({(part.topic, part.partition) for each in decisions for part in each.parts}):
            sync_head(self._disk, f"{self._handles.folder}/topics/{topic}/{number}")
        self._groups.sync(decisions)
        self._stages.sync(decisions)
        self._commits.begin_again(floor=self._commits.state().transaction)
