"""A store: what a kind of log has to provide; `Log` puts the API that users see on top of it.

A store is one object with all of this. Whoever needs only a part of it takes the protocol of that part.

`file://`, `memory://` and `kafka://` are the three stores. All pass the contract suite of
`headwater.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from headwater.log.port.capabilities import Capabilities
from headwater.log.port.chunk import Chunk
from headwater.log.port.group import Group, OffsetPart
from headwater.log.port.lateness import Heartbeat
from headwater.log.port.lease_engine import LeaseEngine, QueueOpening
from headwater.log.port.topic import Topic
from headwater.log.port.write import Write
from headwater.model.errors import EventsMissed

if TYPE_CHECKING:
    from headwater.log.port.lease_engine import LeaseEngine, QueueOpening
    from headwater.log.port.stage import StageCommit, StageState
    from headwater.model.marker import Marker

TimeKind = Literal["time", "appended"]


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
            advice='Continue with seek("earliest"), read with missed="skip", or give the topic a longer retention.',
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


class TopicLookup(Protocol):
    """Which topics there are."""

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""

    def topic(self, name: str) -> Topic:
        """One topic as this handle knows it; `TopicNotFound`."""

    def refresh(self, name: str) -> Topic:
        """One topic as it is now, even if another process changed it a moment ago."""


class TopicStore(TopicLookup, Protocol):
    """Topics are made, changed and removed."""

    def create(self, topic: Topic) -> Topic:
        """Makes a topic; `TopicExists`."""

    def adopt(self, topic: Topic) -> Topic:
        """Gives a topic that another program made a schema; `Unsupported` where there are none."""

    def change(self, name: str, change: Callable[[Topic], Topic]) -> Topic:
        """Changes a topic, as it is in that moment: two changes at once both count."""

    def split(self, name: str, partitions: int, *, at: Sequence[int] | None = None) -> Topic:
        """Gives a topic more partitions, a multiple of what it has (see `split`); `Unsupported` where keys would lose order.

        For copies of a log: `at` is where each partition must end at that moment (`Diverged` where one does not).
        """

    def delete(self, name: str) -> None:
        """Removes a topic with all its events."""


class WriteStore(TopicLookup, Protocol):
    """Events are appended."""

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

    def register_producer(self, name: str) -> tuple[bytes, int]:
        """Id and epoch for a named producer; every earlier producer of that name is fenced from now on."""

    def sequence_of(self, name: str, partition: int, *, producer: bytes) -> int | None:
        """The last sequence number a producer has stored in a partition."""

    def incarnation(self) -> int:
        """How many unclean stops of its machine the log has lived through."""


class ReadStore(TopicLookup, Protocol):
    """Events are read, and waited for."""

    def bounds(self, names: Sequence[str]) -> Mapping[tuple[str, int], Bounds]:
        """The visible offsets of every partition of these topics, as one consistent snapshot."""

    def cursor(self, name: str, partition: int, *, offset: int) -> Cursor:
        """A cursor at an offset."""

    def offset_at(self, name: str, partition: int, *, time: int, by: TimeKind) -> int:
        """The first offset whose event (or append) time is at or after `time`; the end if there is none."""

    def waiter(self, names: Sequence[str]) -> Waiter:
        """Something to wait on for new events in these topics."""

    def incarnation(self) -> int:
        """How many unclean stops of its machine the log has lived through."""

    def lost_after(self, name: str, partition: int, *, incarnation: int) -> int | None:
        """The first offset that later unclean stops took back from what a reader of `incarnation` may have seen."""


class LatenessStore(Protocol):
    """How far event time has come."""

    def reached(self, name: str, partition: int, *, offset: int) -> int:
        """The greatest event time before an offset, as lateness counts it (see `lateness`), or that a heartbeat told."""

    def heartbeat(self, name: str, partition: int, *, time: int, appended_before: int) -> bool:
        """Event time has come so far in a partition, unless something was appended to it since; returns whether that is news."""

    def heartbeats(self, name: str, partition: int) -> Sequence[Heartbeat]:
        """The heartbeats of a partition in order (see `heartbeats`)."""


class GroupStore(ReadStore, Protocol):
    """Groups of consumers, and what they read."""

    def groups(self) -> list[str]:
        """The names of all groups, sorted."""

    def group(self, name: str, *, create: bool) -> Group:
        """One group; `GroupNotFound`, unless it is to be made."""


class StageStore(Protocol):
    """Stages, each of whose batches is written exactly once."""

    def stages(self) -> list[str]:
        """The names of all stages, sorted."""

    def take_stage(self, name: str) -> int:
        """A new fencing number for a stage, made at its first use; every earlier holder of it is fenced from now on."""

    def held_stage(self, name: str) -> int | None:
        """The number by which this process holds a stage that nobody has opened since; None where it is to be opened again."""

    def stage_state(self, name: str) -> StageState:
        """What is known of a stage now, transactions of dead processes included."""

    def commit_stage(
        self, name: str, number: int, marker: Marker | None, writes: Sequence[Write], *, gaps: bool = False
    ) -> StageCommit:
        """Appends all batches and commits the marker, or does nothing (see `stage`); without a marker forgets the last one.

        With `gaps` epochs may be left out. `Fenced`, `CheckpointConflict`.
        """


class QueueStore(Protocol):
    """Where queues keep what was acknowledged."""

    def lease_engine(self, opening: QueueOpening) -> LeaseEngine:
        """What hands out and settles the events of a queue, for one handle; `Unsupported` where this store has no queues."""

    def queues(self) -> list[dict[str, Any]]:
        """What each queue is that somebody has opened: group, topic, topic_id, order, dead."""

    def delete_queue(self, group: str, topic: str) -> None:
        """Forgets what a group has done of a topic; `GroupNotFound`, `GroupInUse` while some member lives."""


class CopyStore(Protocol):
    """Events of another log, at the offsets that they have there."""

    def place(self, write: Write, offsets: Any, *, end: int) -> None:
        """For copies of a log: stores events at their own `offsets`, as the whole of what lies from `write.at` to `end`.

        Where it brings no events, and the partition holds none, the partition begins at `end`. `Unsupported` where a store
        keeps no gaps.
        """


class UpkeepStore(Protocol):
    """What keeps a log small."""

    def seal(self, name: str) -> int:
        """Puts what was appended long ago into its final form; returns how many files were written."""

    def tidy(self, name: str) -> int:
        """Removes what the topic's settings no longer keep; returns how many events that were."""

    def is_overtaken(self, name: str, partition: int, *, end: int, since_us: int) -> bool:
        """Whether compaction may have removed events before `end` since a time for the sake of events after it."""


class Store(
    TopicStore,
    WriteStore,
    GroupStore,
    LatenessStore,
    StageStore,
    QueueStore,
    CopyStore,
    UpkeepStore,
    Protocol,
):
    """A kind of log, whole."""

    url: str
    capabilities: Capabilities

    def counters(self) -> Mapping[str, int]:
        """What this handle has done so far."""

    def close(self) -> None:
        """Frees everything."""
