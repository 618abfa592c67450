"""The progress of a capture: how far it has come, kept in the marker of its stage and so with the very events it speaks of."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headwater.capture.source import SourceLag
from headwater.log.log import Log
from headwater.model.marker import Marker

TableState = Literal["copying", "refreshing", "live", "stopped"]
"""`refreshing`: copied again, though its topic has rows already; what is gone from the table is removed at the end.
`stopped`: it cannot be captured as it is; the others go on."""

STAGE = "capture."
"""How the stages of captures are called, before the source's name."""


class TableProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One table. `done` is how far its backfill has come, in the source's own words; `why` it has stopped, as a sentence.

    `columns` are those that the events up to here know, with their types: a capture that finds others when it starts has missed a change
    of the table that no event speaks of.
    """

    topic: str
    state: TableState = "copying"
    done: Any = None
    fraction: float | None = None
    why: str | None = None
    columns: tuple[str, ...] = ()


class CaptureProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A capture. `committed_us` is the latest event time that it has given out, behind which it never goes back."""

    url: str
    position: str
    committed_us: int = 0
    at_us: int = 0
    events: int = 0
    tables: dict[str, TableProgress] = {}

    def with_table(self, name: str, table: TableProgress) -> CaptureProgress:
        """The same with one table another."""
        return msgspec.structs.replace(self, tables={**self.tables, name: table})


class CaptureStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A capture as people see it. `waiting` is for the next attempt after an error."""

    name: str
    state: Literal["starting", "copying", "live", "waiting", "failed", "ended"]
    progress: CaptureProgress
    lag: SourceLag | None = None
    error: str | None = None


def progress_of(marker: Marker | None) -> CaptureProgress | None:
    """What a marker says; None where nothing was written yet."""
    return None if marker is None else msgspec.convert(marker.ends, CaptureProgress)


def captures(log: Log) -> dict[str, CaptureProgress]:
    """How far each capture of a log has come, by the name of its source; asking stops nobody."""
    found = {
        name.removeprefix(STAGE): log.store.stage_state(name).last for name in log.stages() if name.startswith(STAGE)
    }
    told = {name: progress_of(marker) for name, marker in found.items()}
    return {name: progress for name, progress in told.items() if progress is not None}
