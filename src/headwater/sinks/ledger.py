"""The ledger: what a target itself knows of the stage that writes to it, so that each batch counts once.

An entry has the stage's fencing number and the marker of the batch that was applied last. It is changed by the very transaction that
applies a batch: where the rows are, the marker is. Rules for what may follow (`admits`):
- a writer whose number was replaced is refused (`Fenced`), also when it only slept;
- the marker that is there already: nothing is written again;
- a marker that does not follow the last is refused (`CheckpointConflict`), as by the log's own stages;
- a target without an entry takes the first batch of a query only: one that was emptied, or put back from an old copy, would
  otherwise silently lack everything from before.
"""

from __future__ import annotations

import msgspec

from headwater.log.port.stage import is_new
from headwater.model.errors import CheckpointConflict, Conflict, Fenced
from headwater.model.marker import Marker

TABLE = "headwater_ledger"


class LedgerEntry(msgspec.Struct, frozen=True):
    """What a target knows of a stage."""

    number: int = 0
    last: Marker | None = None


NO_ENTRY = LedgerEntry()


def admits(stage: str, entry: LedgerEntry, number: int, marker: Marker) -> bool:
    """Whether a batch is to be applied now; False where it is there already."""
    if entry.number != number:
        raise Fenced(
            f"Another process opened sink {stage!r}: fencing number {number} was replaced by {entry.number}.",
            advice="The sink wrote nothing. Another process runs this stage, so stop this one.",
        )
    if entry.last is None and marker.epoch > 0:
        raise CheckpointConflict(
            f"The target of sink {stage!r} has no batch before {marker}: it was emptied, or is another target.",
            advice="The sink wrote nothing. Write everything again with --accept-new-checkpoint STAGE=earliest.",
        )
    return is_new(stage, entry.last, marker)


def check_unmoved(stage: str, entry: LedgerEntry, marker: Marker | None) -> None:
    """For a repair: refuses to go on where a batch was applied since the rows were compared; `Conflict`."""
    if entry.last != marker:
        raise Conflict(
            f"Sink {stage!r} has applied {entry.last} since the comparison.",
            advice="The repair wrote nothing. Compare again.",
        )
