"""What may follow what in a stage, a writer that writes each of its batches exactly once, whoever dies in between.

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

import msgspec

from headwater.model.errors import CheckpointConflict, Fenced
from headwater.model.marker import Marker

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
        why = "The batch was planned again, to other ends in its sources, as after a power loss that took back the checkpoint"
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
        raise _conflict(name, last, "a checkpoint that has no batch yet does not continue from there", _FOREIGN)
    if last is not None and query != last.query:
        raise _conflict(name, last, f"query {query!r} does not continue from there", _FOREIGN)


def _conflict(name: str, last: Marker, what: str, why: str) -> CheckpointConflict:
    return CheckpointConflict(
        f"Stage {name!r} has last written {last}, and {what}. {why}.",
        advice="Nothing was written. Restore the checkpoint of the last marker, or begin a new one where that "
        "marker ends: `headwater run … --accept-new-checkpoint STAGE=marker` (or `STAGE=earliest`, `STAGE=latest`), in Python "
        "`stage.accept_new_checkpoint()`.",
    )
