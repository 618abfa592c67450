"""The inputs of a stage as DataFrames, and what its function makes of them.

Streams come with their event time and without what is late, as far as the stage works by time (see `event_time`); what failed is looked at
again as tables of one batch. Operators that can are put into the sources here (see `fusion`).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headwater.log.disk.disk import RealDisk
from headwater.log.log import Log
from headwater.model.errors import StorageError
from headwater.model.schema import DELETED
from headwater.processing.graph.table import Table
from headwater.processing.operators.beats import NAME as BEATS
from headwater.processing.operators.operator import OperatorContext, operator_context
from headwater.processing.sink.staging import can_stage
from headwater.processing.source.capture_transactions import whole_options
from headwater.processing.source.options import columns_text
from headwater.processing.stages.analysis import TopicFacts, apply, with_watermark
from headwater.processing.stages.fusion import Fusion, Origin, chosen, placed_by
from headwater.processing.stages.skips import Skips
from headwater.processing.stages.stage_plan import StagePlan
from headwater.processing.stages.status import LATE_ROWS, LATE_TAKEN, LateCount, spans_in
from headwater.processing.time.event_time import BATCH_WATERMARK, LATE, only_late, with_time, without_late
from headwater.processing.time.late_rows import LateRows, apart, inside
from headwater.processing.time.maxima import maxima_of

REPLAY_EVENTS = 1_000_000
"""So many events of an input are in one batch of a run that replays what another query has read."""

_TIME = "_time"


class Inputs:
    """Makes the inputs of stages, in one Spark session from one log."""

    def __init__(self, spark: SparkSession, log: Log, folder: Path) -> None:
        """`folder` is for what the readers of running queries tell each other; what a killed run left there is removed."""
        self._spark = spark
        self._log = log
        self._folder = str(folder)
        self._disk = RealDisk()
        self._told: dict[str, str] = {}
        self.close()

    def close(self) -> None:
        """Removes what running queries told each other."""
        self._remove(self._folder)

    def frames(
        self, plan: StagePlan, skips: Skips, *, batch: Mapping[str, Any] | None = None, pace: str | None = None
    ) -> list[DataFrame | Table]:
        """The inputs of a stage: as streams, or for one `batch` of theirs as tables."""
        return [self._frame(plan, number, skips, batch, pace) for number in range(len(plan.stage.inputs))]

    def result(self, plan: StagePlan, skips: Skips) -> DataFrame:
        """What a stage's function makes of its inputs as streams; those of a capture are one stream."""
        if plan.stage.capture is not None:
            options = whole_options(self._log, plan.stage.capture, plan.stage.inputs, plan.start) | _awaits(plan)
            return self._spark.readStream.format("headwater").options(**options).load()
        pace = self._new_folder(plan)
        if not plan.analysed.operators:
            return apply(plan.stage, self.frames(plan, skips))
        options = {"pace": pace, "partitions": str(plan.state_partitions)}
        frames = self.frames(plan, skips, pace=pace)
        stage = OperatorContext(
            plan.operators,
            partitions=plan.state_partitions,
            beats=cache(self._spark.readStream.format(BEATS).options(**options).load),
            tasks=self._tasks(plan.state_partitions),
            fusion=self._fusion(plan, skips, frames, pace),
            late_rows=self._late_rows(plan, 0) if self._log.store.capabilities.tells_lateness else None,
            late_by_window=plan.analysed.window_us is not None,
        )
        with operator_context(stage):
            return apply(plan.stage, frames)

    def late_in(self, plan: StagePlan, progress: Mapping[str, Any]) -> LateCount:
        """How many late rows tasks have told of, in a batch that is done; asked again, none."""
        if plan.checkpoint not in self._told:
            return LateCount()
        spans, counts = spans_in(progress), {False: 0, True: 0}
        for number, topic in enumerate(plan.stage.inputs):
            counts[plan.facts[topic].is_table] += LateRows(self._late_rows(plan, number)).take(spans)
        first, until = LateRows(self._late_rows(plan, 0)), int(progress["batchId"]) + 1
        for uid in plan.analysed.operators:
            counts[False] += first.take({(inside(uid), number): span for (_, number), span in spans.items()})
            counts[False] += first.take({(apart(uid), at): (0, until) for at in range(plan.state_partitions)})
        return LateCount(left_out=counts[False], taken=counts[True])

    def _late_rows(self, plan: StagePlan, number: int) -> str:
        return f"{self._told[plan.checkpoint]}/late-{number}"

    def _new_folder(self, plan: StagePlan) -> str:
        """An empty folder: a reader that an earlier run of the query left behind writes into another one."""
        if before := self._told.pop(plan.checkpoint, None):
            self._remove(before)
        folder = self._told[plan.checkpoint] = f"{self._folder}/{plan.stage.name}.{uuid.uuid4().hex}"
        self._disk.make_folder(folder)
        return folder

    def _remove(self, folder: str) -> None:
        """Removes a folder, or most of it: a reader that was left behind may be writing into it."""
        with suppress(StorageError):
            self._disk.remove_folder(folder)

    def _tasks(self, partitions: int) -> int:
        """How many tasks work on the partitions of a state: more than there are processors cost time and bring nothing.

        On Kafka each task writes for itself, so their number must not depend on the machine.
        """
        return min(partitions, self._spark.sparkContext.defaultParallelism) if can_stage(self._log) else partitions

    def _fusion(self, plan: StagePlan, skips: Skips, frames: Sequence[DataFrame | Table], pace: str) -> Fusion:
        """What puts operators into the sources of a stage: those that its query began with, or may begin with."""
        origins = []
        for number, frame in enumerate(frames if self._log.store.capabilities.is_placed_by_key else ()):
            topic = self._log.topic(plan.stage.inputs[number])
            placed, roots = placed_by(topic.schema, topic.key), topic.partitions_first
            time = plan.facts[topic.name].time if plan.analysed.uses_time else None
            options = partial(self._side_options, plan, number, skips, pace)
            origins.append(Origin.of(topic.name, frame, placed_by=placed, roots=roots, time=time, options=options))
        roots_of = {each.topic: each.roots for each in origins if each.placed_by is not None}
        sound = [
            uid
            for uid, topics in plan.analysed.fused.items()
            if all(topic in roots_of and roots_of[topic] == roots_of[topics[0]] for topic in topics)
        ]
        return Fusion(
            origins,
            checkpoint=plan.checkpoint,
            wanted=chosen(plan.begun or plan.checkpoint, sound),
            combining=list(plan.analysed.combined),
            make=lambda options: self._spark.readStream.format("headwater").options(**options).load(),
        )

    def _side_options(
        self, plan: StagePlan, number: int, skips: Skips, pace: str, columns: Sequence[str]
    ) -> dict[str, str]:
        """How an input of a stage is read by what works inside its source."""
        options = self._options(plan, number, columns, skips, pace, is_batch=False)
        if LATE in columns:
            options["lateRows"] = self._late_rows(plan, number)
        return options

    def _frame(
        self, plan: StagePlan, number: int, skips: Skips, batch: Mapping[str, Any] | None, pace: str | None
    ) -> DataFrame | Table:
        topic = plan.stage.inputs[number]
        facts = plan.facts[topic]
        names = [*plan.analysed.columns[topic], *self._of_time(plan, facts, is_batch=batch is not None)]
        names += [DELETED.name, _TIME] if facts.is_table else []
        options = self._options(plan, number, names, skips, pace, is_batch=batch is not None)
        if batch is not None:
            options |= {"startingOffsets": batch[topic][0], "endingOffsets": batch[topic][1]}
            frame = without_late(self._spark.read.format("headwater").options(**options).load(), facts.time)
            return Table(topic, _with_times(frame, facts)) if facts.is_table else frame
        if BATCH_WATERMARK in names and self._log.store.capabilities.tells_lateness:
            options["lateRows"] = self._late_rows(plan, number)
        frame = self._spark.readStream.format("headwater").options(**options).load()
        if facts.is_table:
            frame = _with_times(frame, facts)
        if plan.stage.late == "only":
            return only_late(frame, facts.time)
        if BATCH_WATERMARK in names:
            assert facts.time is not None
            kind = LATE_TAKEN if facts.is_table else LATE_ROWS
            count = None if self._log.store.capabilities.tells_lateness else f"{kind} {number}"
            lateness_us, drops = facts.lateness_us, not facts.is_table
            frame = with_time(frame, facts.time, lateness_us=lateness_us, count_as=count, drops=drops)
        elif (
            "Join" in plan.analysed.stateful
        ):  # any other would drop late rows by it, in silence, though it does not need it
            frame = with_watermark(frame, facts)
        return Table(topic, frame) if facts.is_table else frame

    def _options(
        self, plan: StagePlan, number: int, names: Sequence[str], skips: Skips, pace: str | None, *, is_batch: bool
    ) -> dict[str, str]:
        """How an input of a stage is read."""
        topic = plan.stage.inputs[number]
        options = {
            "log": self._log.url,
            "topic": topic,
            "columns": columns_text(names),
            "startingOffsets": plan.start.get(topic, "earliest"),
        }
        if pace is not None:
            options["pace"] = pace
        if not is_batch:
            options |= _awaits(plan)
        if LATE in names and not self._log.store.capabilities.tells_lateness:
            options["maxima"] = maxima_of(plan.checkpoint, number)
        if LATE in names and plan.analysed.floor is not None and not plan.facts[topic].is_table:
            options["lateUntil"] = str(plan.analysed.floor)
        if LATE in names and plan.analysed.window_us is not None:
            options["lateWindow"] = str(plan.analysed.window_us)
        if plan.stage.corrections_us:
            options["lateness"] = f"{plan.facts[topic].lateness_us + plan.stage.corrections_us} microseconds"
        if events_max := plan.stage.settings.get("events_max"):
            options["maxOffsetsPerTrigger"] = str(events_max)
        if topic in plan.stop:
            options |= {"stopOffsets": plan.stop[topic], "maxOffsetsPerTrigger": str(REPLAY_EVENTS)}
        if plan.anew is not None:
            options["schemaVersion"] = str(plan.analysed.versions[topic])
        condition, where = skips.condition(topic), plan.analysed.filters.get(topic)
        if condition:
            options["filter"] = condition
        if where:
            options["where"] = where
        return options

    def _of_time(self, plan: StagePlan, facts: TopicFacts, *, is_batch: bool) -> list[str]:
        """The columns by which an input's late rows are told, and its watermark.

        No row of a table comes too late: it is what later events are to find. What failed on Kafka is looked for in late rows, too:
        there only tasks of the stream know which those are.
        """
        if facts.time is None or (is_batch and not self._log.store.capabilities.tells_lateness):
            return []
        if plan.stage.late == "only":
            return [LATE]
        if not plan.analysed.uses_time:
            return []
        if is_batch:
            return [] if facts.is_table else [LATE]
        return [LATE, BATCH_WATERMARK]


def _awaits(plan: StagePlan) -> dict[str, str]:
    """Lets sources wait for all inputs of a stage; with a trigger of its own Spark asks seldom, and at times that must not shift."""
    return {} if plan.stage.trigger is not None else {"awaits": ",".join(dict.fromkeys(plan.stage.inputs))}


def _with_times(versions: DataFrame, facts: TopicFacts) -> DataFrame:
    """The versions of a table's rows; a row was deleted when the log was told."""
    if facts.time is not None:
        versions = versions.withColumn(facts.time, F.coalesce(f"`{facts.time}`", _TIME))
    return versions.drop(_TIME)
