"""A stage as its newest holder sees it: a writer that writes each of its batches exactly once (see `headwater.log.port.stage`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headwater.log.clients.appender import Appender, place_again
from headwater.log.port.stage import Positions, StageCommit, already_there
from headwater.log.port.store import StageStore
from headwater.log.port.write import Write
from headwater.model.errors import Repartitioned
from headwater.model.marker import Marker


class Stage:
    """A stage as its newest holder sees it. Opening one takes a new fencing number: earlier holders are refused.

    A holder that lives in several processes opens it in one of them, and gives its `number` to the others (not on Kafka).
    With `gaps` epochs may be left out, as by one of many tasks that has nothing to write in each batch.
    """

    def __init__(self, appender: Appender, name: str, *, number: int | None = None, gaps: bool = False) -> None:
        self.name = name
        self._appender = appender
        self._store: StageStore = appender.store
        self._gaps = gaps
        self.number = self._store.take_stage(name) if number is None else number

    @property
    def last(self) -> Marker | None:
        """The newest committed marker, whoever committed it."""
        return self._store.stage_state(self.name).last

    @property
    def positions(self) -> Positions:
        """Where the events of the newest marker stand."""
        return self._store.stage_state(self.name).positions

    def commit(self, marker: Marker, appends: Iterable[tuple[str, Any]] = ()) -> StageCommit:
        """Appends a batch to any topics and commits its marker: all of it or nothing, and only once.

        `Fenced` where somebody has opened the stage since, `CheckpointConflict` where the marker does not follow the last.
        """
        named = msgspec.structs.replace(marker, stage=self.name)
        state = self._store.stage_state(self.name)
        if known := already_there(self.name, self.number, state, named, gaps=self._gaps):
            return known
        writes = [write for topic, rows in appends for write in self._appender.place(topic, rows)]
        return self.commit_writes(named, writes)

    def commit_writes(self, marker: Marker, writes: Sequence[Write]) -> StageCommit:
        """`commit`, for events that were placed in their partitions before."""
        named = marker if marker.stage == self.name else msgspec.structs.replace(marker, stage=self.name)
        while True:
            try:
                return self._store.commit_stage(self.name, self.number, named, writes, gaps=self._gaps)
            except Repartitioned:  # a topic was split since they were placed; nothing was written
                writes = place_again(self._appender.store, writes)

    def accept_new_checkpoint(self) -> Marker | None:
        """Forgets the last marker, so that the next batch may have any; returns it.

        Its `ends` say where a new checkpoint has to begin for nothing to be lost and nothing to be written twice.
        """
        last = self.last
        self._store.commit_stage(self.name, self.number, None, ())
        return last
