"""Poison events: what to do about a batch that fails whenever it is tried.

A stage without state is cured: the batch is halved again and again, each half run as a batch of its own whose result is thrown
away, until the events that fail alone are found. They go to the topic `<stage>.dead` with the error, are remembered in
`<state>/skipped/<stage>.json`, and left out by the source from then on; the batch is run again without them, with the same number
and the same offsets. A stage with state cannot leave events out of a batch that it may have taken in half: it stops, and the range
is named.

The dead letters are written before the file is, with a marker of their own: a crash in between writes neither twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
from pyspark.sql import SparkSession

from headwater.log.clients.stage import Stage
from headwater.log.log import Log
from headwater.model.marker import Marker
from headwater.processing.checkpoint.marker import ends_of, planned
from headwater.processing.checkpoint.offsets import places_of
from headwater.processing.checkpoint.query_start import beginning, places_text
from headwater.processing.graph.graph import DEAD_SCHEMA
from headwater.processing.spark.errors import our_error_in
from headwater.processing.stages.analysis import apply
from headwater.processing.stages.failure import is_about_data
from headwater.processing.stages.inputs import Inputs
from headwater.processing.stages.skips import Skips
from headwater.processing.stages.stage_plan import StagePlan

POISON_MAX = 100
"""So many events are set aside of one batch; where more fail, it is the function that is wrong."""


class SuspectRange(msgspec.Struct, frozen=True):
    """Some events of one partition."""

    topic: str
    partition: int
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}] {self.start}–{self.end - 1}"

    @property
    def count(self) -> int:
        """How many offsets."""
        return self.end - self.start

    def halves(self) -> tuple[SuspectRange, SuspectRange]:
        """Both halves."""
        middle = (self.start + self.end) // 2
        return msgspec.structs.replace(self, end=middle), msgspec.structs.replace(self, start=middle)


class RunningApp(Protocol):
    """What the search needs of the application in which a batch failed (see `supervisor`)."""

    spark: SparkSession
    inputs: Inputs

    @property
    def log(self) -> Log: ...
    @property
    def is_stopping(self) -> bool: ...
    @property
    def job_tag(self) -> str: ...
    def stage_of(self, plan: StagePlan) -> Stage: ...


class PoisonHunt:
    """The search in one failed batch."""

    def __init__(self, app: RunningApp, plan: StagePlan, skips: Skips) -> None:
        self._app = app
        self._plan = plan
        self._skips = skips
        self._errors: dict[SuspectRange, str] = {}

    def run(self, checkpoint: str) -> int | str:
        """How many events were set aside; or why none could be."""
        epoch, ranges = failed_ranges(self._app.log, checkpoint, self._plan.stage.inputs)
        named = ", ".join(map(str, ranges))
        if self._plan.analysed.stateful:
            return (
                f"Batch {epoch} has events {named}; the stage keeps state ({', '.join(self._plan.analysed.stateful)}), so none "
                "of them can be left out. Correct the function or the events' source, and start again: it goes on there."
            )
        if self._plan.stage.capture is not None:
            return f"Batch {epoch} has events {named}; they are whole transactions, so none of them can be left out."
        found = list(self._poisonous(ranges))
        if not found:
            return f"Batch {epoch} has events {named}, and each half of them can be processed by itself."
        if len(found) > POISON_MAX:
            return f"More than {POISON_MAX} of the events {named} fail: it is the function that is to be corrected."
        self._bury(found)
        self._skips.add(((one.topic, one.partition), one.start) for one in found)
        return len(found)

    def _poisonous(self, ranges: Sequence[SuspectRange]) -> Iterator[SuspectRange]:
        """The single events that fail alone."""
        waiting, found = list(ranges), 0
        while waiting and found <= POISON_MAX:
            one = waiting.pop()
            error = self._tried(one)
            if error is None:
                continue
            if one.count == 1:
                self._errors[one] = error
                found += 1
                yield one
            else:
                waiting += one.halves()

    def _tried(self, one: SuspectRange) -> str | None:
        """The error of processing these events alone; what no event is to blame for is raised."""
        batch: dict[str, tuple[str, str]] = {}
        for topic in self._plan.stage.inputs:
            ends = {number: span.start for number, span in self._app.log.offsets(topic).items()}
            starts = dict(ends)
            if topic == one.topic:
                starts[one.partition], ends[one.partition] = one.start, one.end
            batch[topic] = (places_text(topic, starts), places_text(topic, ends))
        if self._app.is_stopping:
            raise InterruptedError("the application is being stopped")
        spark = self._app.spark.sparkContext
        spark.addJobTag(self._app.job_tag)
        try:
            result = apply(self._plan.stage, self._app.inputs.frames(self._plan, self._skips, batch=batch))
            result.write.format("noop").mode("overwrite").save()
        except Exception as error:
            if our_error_in(error) is not None or not is_about_data(error):
                raise
            return str(error)
        finally:
            spark.removeJobTag(self._app.job_tag)
        return None

    def _bury(self, found: Sequence[SuspectRange]) -> None:
        log, name = self._app.log, f"{self._plan.stage.name}.dead"
        log.create_topic(name, DEAD_SCHEMA, partitions=1, exist_ok=True)
        rows = []
        for one in found:
            table = log.read(one.topic, start={one.partition: one.start}, end={one.partition: one.end})
            event = json.dumps(table.to_pylist()[0], default=str) if table.num_rows else None
            last = self._errors[one].strip().splitlines()
            rows.append(
                {"topic": one.topic, "partition": one.partition, "offset": one.start, "event": event, "error": last[-1]}
            )
        stage = self._app.stage_of(self._plan)
        places = sorted([one.topic, one.partition, one.start] for one in found)
        epoch = 0 if stage.last is None else stage.last.epoch + 1
        if stage.last is None or stage.last.ends != places:
            stage.commit(Marker(query="poison", epoch=epoch, ends=places), appends=[(name, rows)])


def failed_ranges(log: Log, checkpoint: str, topics: Sequence[str]) -> tuple[int, list[SuspectRange]]:
    """The number of the batch that a checkpoint says was begun last, and the events it has that are still in the log."""
    epoch = planned(checkpoint)
    assert epoch is not None, "a batch has failed"
    ends = places_of(ends_of(checkpoint, epoch))
    starts = places_of(ends_of(checkpoint, epoch - 1)) if epoch else beginning(checkpoint)
    ranges = []
    for topic in topics:
        for partition, span in log.offsets(topic).items():
            at = (topic, partition)
            start, end = max(span.start, starts.get(at, 0)), ends.get(at, 0)
            if start < end:
                ranges.append(SuspectRange(topic, partition, start, end))
    return epoch, ranges
