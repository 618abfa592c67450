"""A stage: a writer that writes each of its batches exactly once, whoever dies in between.

A batch is identified by its marker (query, epoch, where it ends in its sources). The newest marker that a stage has
committed is stored by the very transaction that appends the batch's events; it is looked at, together with the stage's
fencing number, under a lock that is held until that transaction has ended. So of two writers of one stage the one that came
later wins, and the other can no longer write anything (`Fenced`), even if it was only asleep.

What a marker may follow (`is_new`):
- the same marker again: the batch is there, nothing is written;
- no marker at all, or the epoch before it of the same query (with `gaps` any epoch before it): written;
- anything else, another query, other ends, an epoch that goes back or jumps, is refused (`CheckpointConflict`), and never
  passed over: events would be lost or doubled without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.log.port.split import place_again
from headwater.model.errors import CheckpointConflict, Fenced, Repartitioned
from headwater.model.marker import Marker

if TYPE_CHECKING:
    from headwater.log.log import Log
    from headwater.log.port.store import Write

Positions = dict[str, dict[int, range]]
"""Where events stand: topic, partition, offsets."""

_FOREIGN = "The checkpoint was deleted, or it belongs to another application"


class StageState(msgspec.Struct, frozen=True):
    """What a log knows of a stage: its fencing number, its newest marker, and where that one's events stand."""

    number: int = 0
    last: Marker | None = None
    positions: Positions = {}


class StageCommit(msgspec.Struct, frozen=True):
    """What became of a batch: whether it was written now (or had been before), and where its events stand."""

    marker: Marker | None
    written: bool
    positions: Positions


class Stage:
    """A stage as its newest holder sees it. Opening one takes a new fencing number: earlier holders are refused.

    A holder that lives in several processes opens it in one of them, and gives its `number` to the others (not on Kafka).
    With `gaps` epochs may be left out, as by one of many tasks that has nothing to write in each batch.
    """

    def __init__(self, log: Log, name: str, *, number: int | None = None, gaps: bool = False) -> None:
        self.name = name
        self._log = log
        self._gaps = gaps
        self.number = log.store.take_stage(name) if number is None else number

    @property
    def last(self) -> Marker | None:
        """The newest committed marker, whoever committed it."""
        return self._log.store.stage_state(self.name).last

    @property
    def positions(self) -> Positions:
        """Where the events of the newest marker stand."""
        return self._log.store.stage_state(self.name).positions

    def commit(self, marker: Marker, appends: Iterable[tuple[str, Any]] = ()) -> StageCommit:
        """Appends a batch to any topics and commits its marker: all of it or nothing, and only once.

        `Fenced` where somebody has opened the stage since, `CheckpointConflict` where the marker does not follow the last.
        """
        named = msgspec.structs.replace(marker, stage=self.name)
        state = self._log.store.stage_state(self.name)
        if known := already_there(self.name, self.number, state, named, gaps=self._gaps):
            return known
        writes = [write for topic, rows in appends for write in self._log._writes(topic, rows)]
        return self.commit_writes(named, writes)

    def commit_writes(self, marker: Marker, writes: Sequence[Write]) -> StageCommit:
        """`commit`, for events that were placed in their partitions before."""
        named = marker if marker.stage == self.name else msgspec.structs.replace(marker, stage=self.name)
        while True:
            try:
                return self._log.store.commit_stage(self.name, self.number, named, writes, gaps=self._gaps)
            except Repartitioned:  # a topic was split since they were placed; nothing was written
                writes = place_again(self._log.store, writes)

    def accept_new_checkpoint(self) -> Marker | None:
        """Forgets the last marker, so that the next batch may have any; returns it.

        Its `ends` say where a new checkpoint has to begin for nothing to be lost and nothing to be written twice.
        """
        last = self.last
        self._log.store.commit_stage(self.name, self.number, None, ())
        return last


def already_there(
    name: str, number: int, state: StageState, marker: Marker | None, *, gaps: bool = False
) -> StageCommit | None:
    """What is known of a marker that was committed before, None if it is to be written now; `Fenced`, `CheckpointConflict`."""
    if number != state.number:
        raise Fenced(
            f"Stage {name!r} was opened again since: number {number} was replaced by {state.number}.",
            advice="Nothing was written. Another process runs this stage now; stop this one.",
        )
    if marker is None or is_new(name, state.last, marker, gaps=gaps):
        return None
    return StageCommit(marker, written=False, positions=state.positions)


def is_new(name: str, last: Marker | None, marker: Marker, *, gaps: bool = False) -> bool:
    """Whether a marker is to be written after the last one, or is that one; `CheckpointConflict`."""
    if last is None:
        return True
    if marker.query != last.query:
        why = _FOREIGN
    elif marker.epoch == last.epoch and marker.ends == last.ends:
        return False
    elif marker.epoch == last.epoch + 1 or (gaps and marker.epoch > last.epoch):
        return True
    elif marker.epoch == last.epoch:
        why = "The batch was planned anew, to other ends in its sources, as after a power loss that took back the checkpoint"
    elif marker.epoch < last.epoch:
        why = "The checkpoint is older than what was written: an early copy of it, or one that a power loss took back"
    else:
        why = "Batches in between are missing here: the log was restored from a backup, or they were written elsewhere"
    raise _conflict(name, last, f"{marker} does not follow it", why)


def check_query(name: str, last: Marker | None, query: str | None) -> None:
    """Refuses a query, or one that is to begin, whose every batch `is_new` would refuse after the last one; `CheckpointConflict`.

    To be asked before the stage is opened: that stops whoever runs it.
    """
    if last is not None and query is None:
        raise _conflict(name, last, "a checkpoint that has no batch yet does not go on from there", _FOREIGN)
    if last is not None and query != last.query:
        raise _conflict(name, last, f"query {query!r} does not go on from there", _FOREIGN)


def _conflict(name: str, last: Marker, what: str, why: str) -> CheckpointConflict:
    return CheckpointConflict(
        f"Stage {name!r} has last written {last}, and {what}. {why}.",
        advice="Nothing was written. Put the checkpoint back that belongs to the last marker; or begin a new one where that "
        "marker ends: `headwater run … --accept-new-checkpoint STAGE=marker` (or `STAGE=earliest`, `STAGE=latest`), in Python "
        "`stage.accept_new_checkpoint()`.",
    )
