"""The stages of a memory log: the reference model, in plain dictionaries."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from headwater.log.port.stage import Positions, StageCommit, StageState, already_there
from headwater.log.port.write import Write
from headwater.model.marker import Marker


class MemoryStages(ABC):
    """The part of a memory log that knows stages; the rest of it is `MemoryStore`."""

    _changed: threading.Condition
    _states: dict[str, StageState]

    @abstractmethod
    def write_atomically(self, writes: Sequence[Write]) -> list[range]:
        """What the rest of the log gives."""

    def stages(self) -> list[str]:
        return sorted(self._states)

    def take_stage(self, name: str) -> int:
        with self._changed:
            before = self._states.get(name, StageState())
            self._states[name] = StageState(before.number + 1, before.last, before.positions)
            return before.number + 1

    def held_stage(self, name: str) -> int | None:
        """None: opening a stage costs little."""
        return None

    def stage_state(self, name: str) -> StageState:
        return self._states.get(name, StageState())

    def commit_stage(
        self, name: str, number: int, marker: Marker | None, writes: Sequence[Write], *, gaps: bool = False
    ) -> StageCommit:
        with self._changed:
            if known := already_there(name, number, self.stage_state(name), marker, gaps=gaps):
                return known
            positions: Positions = {}
            for write, span in zip(writes, self.write_atomically(writes), strict=True):
                spans = positions.setdefault(write.topic.name, {})
                spans[write.partition] = range(spans.get(write.partition, span).start, span.stop)
            self._states[name] = StageState(number, marker, positions)
            return StageCommit(marker, written=True, positions=positions)
