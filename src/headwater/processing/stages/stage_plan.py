"""The plan of a stage: what it takes to start its query, again and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from pyspark.sql import DataFrame

from headwater.log.port.stage import StageCommit
from headwater.processing.graph.graph import StageNode
from headwater.processing.stages.analysis import StageAnalysis, TopicFacts

Write = Callable[[DataFrame, int], "int | StageCommit | None"]
"""Writes the result of one batch, which has this number. A number that it returns is that of the rows set aside as dead letters."""


class StagePlan(msgspec.Struct, frozen=True):
    """What it takes to start one stage again and again."""

    stage: StageNode
    analysed: StageAnalysis
    facts: Mapping[str, TopicFacts]
    checkpoint: str
    operators: str
    state_partitions: int
    start: Mapping[str, str] = {}
    write: Callable[[], Write] | None = None
    stop: Mapping[str, str] = {}
    """For each input the offsets at which a run over what is there ends; without them, those that are there."""
    begun: str | None = None
    """The checkpoint that says which operators are inside sources, where that is another one."""
    anew: Callable[[], StagePlan] | None = None
    """Makes it again, where the stage is to have all columns of its input and that got others."""
    check: Callable[[], None] | None = None
    """Refuses a checkpoint that is not the stage's, before anything is opened."""
    reopens: bool = False
    """Whether each run of the query opens the stage anew, so that one which was overtaken can go on."""
