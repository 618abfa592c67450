"""A store: what a kind of log has to provide; `Log` puts the API that users see on top of it.

`file://` (`local`), `memory://` (`memory`) and `kafka://` are the three stores. All pass the contract suite of
`headwater.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from headwater.log.file.commit import OffsetPart
from headwater.log.file.partition.heartbeats import Heartbeat
from headwater.log.file.segments.frame import Stamp
from headwater.log.port.group import Group
from headwater.log.port.topic import Topic
from headwater.model.errors import Diverged, EventsMissed, Repartitioned, TopicNotFound

if TYPE_CHECKING:
    from headwater.log.port.stage import StageCommit, StageState
    from headwater.log.queue.state import QueueStates
    from headwater.model.marker import Marker

TimeKind = Literal["time", "appended"]


class Chunk(msgspec.Struct, frozen=True):
    """Some consecutive events of one partition, as a store hands them out.

    `batch` holds the columns of `topic`, then `_headers` and `_deleted` where any event has them, and `_appended`
    where `appended` is None. Offsets run from `base_offset` without gaps; or, where compaction left some, they are given
    in `offsets`, and the chunk stands for everything from `base_offset` to `end`, though its first and last events may lie
    further inside, or there may be none. `running` is the greatest event time of the partition before the chunk, where the store
    knows it and the chunk is whole.
    """

    topic: Topic
    partition: int
    base_offset: int
    batch: pa.RecordBatch
    appended: int | None
    offsets: Any = None
    end: int = -1
    running: int | None = None

    @property
    def end_offset(self) -> int:
        """The offset after the last event, and after the gap that follows it."""
        return self.base_offset + self.batch.num_rows if self.offsets is None else self.end

    def all_offsets(self) -> Any:
        """The offset of each event, as an array."""
        if self.offsets is not None:
            return self.offsets
        return np.arange(self.base_offset, self.base_offset + self.batch.num_rows, dtype=np.int64)

    def offset_of(self, row: int) -> int:
        """The offset of the event in a row."""
        return self.base_offset + row if self.offsets is None else int(self.offsets[row])

    def slice(self, start: int, end: int) -> Chunk:
        """The events with offsets from `start` to `end`."""
        if self.offsets is None:
            batch = self.batch.slice(start - self.base_offset, end - start)
            return msgspec.structs.replace(self, base_offset=start, batch=batch, running=None)
        first, last = (int(row) for row in np.searchsorted(self.offsets, (start, end)))
        return msgspec.structs.replace(
            self,
            base_offset=start,
            batch=self.batch.slice(first, last - first),
            offsets=self.offsets[first:last],
            end=end,
            running=None,
        )

    def slice_events(self, events_max: int) -> Chunk:
        """Its first events, with the gap that follows them."""
        if self.batch.num_rows <= events_max:
            return self
        return self.slice(self.base_offset, self.offset_of(events_max))


class Write(msgspec.Struct, frozen=True):
    """Events on their way to one partition: the rows at `indices` of a batch, or all of it.

    The batch has the topic's columns in order, then `_headers` and `_deleted` if any event has them. The rows are picked
    piece by piece when they are written, so that the partitions of a large batch are prepared in parallel.

    For copies of a log: `at` is the offset that the first event must get (any other is refused with `Diverged`), and `appended`
    holds an append time for each event, in µs, to be kept instead of the store's own. Both hold for `write_atomically` too.
    """

    topic: Topic
    partition: int
    batch: pa.RecordBatch
    indices: Any = None
    stamp: Stamp = Stamp()
    at: int | None = None
    appended: Any = None

    @property
    def count(self) -> int:
        """How many events."""
        return self.batch.num_rows if self.indices is None else len(self.indices)

    def runs(self) -> list[tuple[int, int]]:
        """Its events from the start-th to the end-th, cut where the append time to keep is another one."""
        if self.appended is None:
            return [(0, self.count)]
        cuts = [0, *(np.flatnonzero(np.diff(self.appended)) + 1).tolist(), self.count]
        return list(pairwise(cuts))

    def rows(self, start: int = 0, count: int | None = None) -> pa.RecordBatch:
        """Its events from the `start`-th on."""
        stop = self.count if count is None else min(start + count, self.count)
        if self.indices is None:
            return self.batch if stop - start == self.batch.num_rows else self.batch.slice(start, stop - start)
        return self.batch.take(pa.array(self.indices[start:stop]))


def check_place(at: int, end: int, where: str) -> None:
    """Refuses events that are meant for another offset than the next one; the caller holds what keeps it the next one."""
    if at != end:
        raise Diverged(
            f"Events from offset {at} on were to be copied to {where}, which ends at {end}.",
            advice="Something else writes to the copy, or another mirror did; run the mirror again to see what differs.",
        )


def repartitioned(topic: Topic) -> Repartitioned:
    """The refusal of events that were placed when the topic had fewer partitions."""
    return Repartitioned(
        f"Topic {topic.name!r} has {topic.partitions} partitions by now, and the events were placed by another number.",
        advice="Nothing was stored; place them again.",
    )


def made_anew(name: str) -> TopicNotFound:
    """The topic that a handle knows is gone, though there is one of its name."""
    return TopicNotFound(f"Topic {name!r} was deleted and created again.", advice="Open another reader or producer.")


class Bounds(msgspec.Struct, frozen=True, gc=False):
    """The offsets a partition holds: from `first` up to, and not with, `end`."""

    first: int
    end: int

    def described(self) -> str:
        """How errors say what there is."""
        return f"It holds offsets {self.first} to {self.end - 1}" if self.first < self.end else "It holds no events"


class Cursor(Protocol):
    """A place in one partition from which a reader goes on."""

    offset: int

    def read(self, end: int, *, events_max: int) -> list[Chunk]:
        """The next events below the offset `end`, at least one if there is one, at most `events_max`; `EventsMissed`."""


def check_not_missed(name: str, number: int, offset: int, *, first: int) -> None:
    """Refuses to read below a partition's first offset: what stood there was not read in time."""
    if offset < first:
        raise EventsMissed(
            f"Events {offset} to {first - 1} of partition {number} of topic {name!r} were removed by retention before they "
            "were read.",
            advice='Go on with seek("earliest"), read with missed="skip", or give the topic a longer retention.',
            first=offset,
            last=first - 1,
        )


class Waiter(Protocol):
    """Sleeps until some topic may have new events."""

    def wait(self, timeout_s: float) -> None:
        """Returns when something was appended, or after the time; it may also return for nothing."""

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when something was appended, or None where there is none."""

    def close(self) -> None:
        """Frees the descriptor."""


class Store(Protocol):
    """A kind of log."""

    url: str
    has_share_groups: bool
    """Whether its queues are share groups of Kafka, and not windows that we keep."""
    takes_offsets: bool
    """Whether a write can say at which offset it goes (`Write.at`, `place`), and a named producer costs no offsets."""

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""

    def topic(self, name: str) -> Topic:
        """One topic as this handle knows it; `TopicNotFound`."""

    def refresh(self, name: str) -> Topic:
        """One topic as it is now, even if another process changed it a moment ago."""

    def create(self, topic: Topic) -> Topic:
        """Makes a topic; `TopicExists`."""

    def change(self, name: str, change: Callable[[Topic], Topic]) -> Topic:
        """Changes a topic, as it is in that moment: two changes at once both count."""

    def split(self, name: str, partitions: int, *, at: Sequence[int] | None = None) -> Topic:
        """Gives a topic more partitions, a multiple of what it has (see `split`); `Unsupported` where keys would lose order.

        For copies of a log: `at` is where each partition must end at that moment (`Diverged` where one does not).
        """

    def delete(self, name: str) -> None:
        """Removes a topic with all its events."""

    def write(self, writes: Sequence[Write]) -> list[range | Exception]:
        """Appends each batch; for each the offsets given, or why it was not stored. Returns when all are durable.

        Where a log cannot keep others from writing in between, the range goes from the batch's first event to its last, and a
        batch with a producer's stamp gets a list with the offset of each event instead. A batch that was placed before the
        topic was split is refused with `Repartitioned`, unless it is stored already.
        """

    def write_atomically(self, writes: Sequence[Write], offsets: Sequence[OffsetPart] = ()) -> list[range]:
        """Appends all batches or none of them: readers see all or nothing, after any crash.

        The offsets are committed for their groups if and only if the batches are appended; `NotOwner`.
        """

    def place(self, write: Write, offsets: Any, *, end: int) -> None:
        """For copies of a log: stores events at their own `offsets`, as the whole of what lies from `write.at` to `end`.

        Where it brings no events, and the partition holds none, the partition begins at `end`. `Unsupported` where a store
        keeps no gaps.
        """

    def bounds(self, names: Sequence[str]) -> Mapping[tuple[str, int], Bounds]:
        """The visible offsets of every partition of these topics, as one consistent snapshot."""

    def cursor(self, name: str, partition: int, *, offset: int) -> Cursor:
        """A cursor at an offset."""

    def offset_at(self, name: str, partition: int, *, time: int, by: TimeKind) -> int:
        """The first offset whose event (or append) time is at or after `time`; the end if there is none."""

    def reached(self, name: str, partition: int, *, offset: int) -> int:
        """The greatest event time before an offset, as lateness counts it (see `lateness`), or that a heartbeat told."""

    def heartbeat(self, name: str, partition: int, *, time: int, appended_before: int) -> bool:
        """Event time has come so far in a partition, unless something was appended to it since; returns whether that is news."""

    def heartbeats(self, name: str, partition: int) -> Sequence[Heartbeat]:
        """The heartbeats of a partition in order (see `heartbeats`)."""

    def waiter(self, names: Sequence[str]) -> Waiter:
        """Something to wait on for new events in these topics."""

    def seal(self, name: str) -> int:
        """Puts what was appended long ago into its final form; returns how many files were written."""

    def tidy(self, name: str) -> int:
        """Removes what the topic's settings no longer keep; returns how many events that were."""

    def register_producer(self, name: str) -> tuple[bytes, int]:
        """Id and epoch for a named producer; every earlier producer of that name is fenced from now on."""

    def sequence_of(self, name: str, partition: int, *, producer: bytes) -> int | None:
        """The last sequence number a producer has stored in a partition."""

    def incarnation(self) -> int:
        """How many unclean stops of its machine the log has lived through."""

    def lost_after(self, name: str, partition: int, *, incarnation: int) -> int | None:
        """The first offset that later unclean stops took back from what a reader of `incarnation` may have seen."""

    def queue_states(self, group: str, topic: Topic, *, has_keys: bool) -> QueueStates:
        """Where the state of a queue is kept; `Unsupported` where this store has no queues."""

    def queues(self) -> list[dict[str, Any]]:
        """What each queue is that somebody has opened: group, topic, topic_id, order, dead."""

    def delete_queue(self, group: str, topic: str) -> None:
        """Forgets what a group has done of a topic; `GroupNotFound`, `GroupInUse` while some member lives."""

    def groups(self) -> list[str]:
        """The names of all groups, sorted."""

    def group(self, name: str, *, create: bool) -> Group:
        """One group; `GroupNotFound`, unless it is to be made."""

    def stages(self) -> list[str]:
        """The names of all stages, sorted."""

    def take_stage(self, name: str) -> int:
        """A new fencing number for a stage, made at its first use; every earlier holder of it is fenced from now on."""

    def stage_state(self, name: str) -> StageState:
        """What is known of a stage now, transactions of dead processes included."""

    def commit_stage(
        self, name: str, number: int, marker: Marker | None, writes: Sequence[Write], *, gaps: bool = False
    ) -> StageCommit:
        """Appends all batches and commits the marker, or does nothing (see `stage`); without a marker forgets the last one.

        With `gaps` epochs may be left out. `Fenced`, `CheckpointConflict`.
        """

    def counters(self) -> Mapping[str, int]:
        """What this handle has done so far."""

    def close(self) -> None:
        """Frees everything."""
