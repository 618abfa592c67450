"""Stages on Kafka: refused so far."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.log.stage import StageCommit, StageState
from headwater.log.store import Write
from headwater.model.errors import Unsupported
from headwater.model.marker import Marker


class KafkaStages:
    """The part of a Kafka log that knows stages."""

    def stages(self) -> list[str]:
        return []

    def take_stage(self, name: str) -> int:
        raise _unsupported()

    def stage_state(self, name: str) -> StageState:
        raise _unsupported()

    def commit_stage(self, name: str, number: int, marker: Marker | None, writes: Sequence[Write]) -> StageCommit:
        raise _unsupported()


def _unsupported() -> Unsupported:
    return Unsupported("A log on Kafka keeps no stages.", advice="Use a log in a folder.")
