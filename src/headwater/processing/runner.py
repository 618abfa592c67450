"""The runner: starts every stage of an application as a Spark query, and looks after them.

A stage that fails is started again, later and later; the others go on. What no retry can cure stops its stage with a sentence: an
error of ours that says so (a foreign checkpoint, a schema that does not fit). A batch that fails twice at the same place has a
poison event in it: see `poison`. Where the JVM is gone no stage can go on: all of them fail with that sentence, and whoever starts
the application again goes on where it was.

Thread-safety: one thread starts, another may look after the stages (`supervise`), any may ask for the status or stop.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from headwater.log.log import Log
from headwater.log.stage import Stage
from headwater.model.errors import Fenced, HeadwaterError
from headwater.model.schema import DELETED
from headwater.processing.analysis import Analysed, Facts, apply, with_watermark
from headwater.processing.beats import NAME as BEATS
from headwater.processing.border import told
from headwater.processing.event_time import LATE, PASSED, with_time, without_late
from headwater.processing.graph import Graph, StageNode
from headwater.processing.idle import Idle
from headwater.processing.java import how_it_ended
from headwater.processing.marker import ends_of
from headwater.processing.maxima import maxima_of
from headwater.processing.offsets import At, places_of
from headwater.processing.operator import Building, building
from headwater.processing.poison import PoisonHunt, Skips, failed_ranges
from headwater.processing.reading import is_local
from headwater.processing.session import activate
from headwater.processing.status import LATE_ROWS, Rate, StageStatus, ends_in, reached_in
from headwater.processing.table import Table

RETRY_S = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""How long a stage waits before its next attempt, by how often it has failed since it last went on."""

LOOK_S = 0.2
LAG_S = 2.0
BEGIN_S = 10.0
BEGIN_LOOK_S = 0.02
DRAIN_S = 30.0
REPLAY_EVENTS = 1_000_000
"""So many events of an input are in one batch of a run that replays what another query has read."""

GONE_S = 2.0
"""So long after a call to a dead JVM failed its process may still look alive."""

_NO_MEMORY = re.compile(r"^(?:[\w.: ]+[. ])?(?:OutOf)?MemoryError\b", re.MULTILINE)
_BEGINNING = "Initializing"
_TIME = "_time"
_WORKER_DIED = re.compile(r"Python worker (exited unexpectedly|failed to connect back)|PYTHON_WORKER_EXITED")
_DATA_EXCEPTION = re.compile(r"SQLSTATE: 22")
_RAISED = re.compile(r"^(?:: )?(?:[\w.$]+\.)?([A-Z]\w*(?:Error|Exception|Warning): .*)$", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

Write = Callable[[DataFrame, int], None]
"""What `foreachBatch` calls: the result of one batch and its number."""


class Plan(msgspec.Struct, frozen=True):
    """What it takes to start one stage again and again."""

    stage: StageNode
    analysed: Analysed
    facts: Mapping[str, Facts]
    checkpoint: str
    operators: str
    state_partitions: int
    start: Mapping[str, str] = {}
    write: Callable[[], Write] | None = None
    stop: Mapping[str, str] = {}
    """For each input the offsets at which a run over what is there ends; without them, those that are there."""


class Runner:
    """The stages of one application in one Spark session."""

    def __init__(
        self, spark: SparkSession, log: Log, graph: Graph, plans: Sequence[Plan], *, state: Path, idle_us: int
    ) -> None:
        """`idle_us`: so long without an event, and a partition is not waited for any more."""
        self.spark = spark
        self._log = log
        self._graph = graph
        self._stop = threading.Event()
        self._paces: list[str] = []
        self._idle = Idle(log, idle_us)
        self.stages = [_Supervised(self, plan, state) for plan in plans]

    @property
    def statuses(self) -> list[StageStatus]:
        """What each stage does now."""
        return [stage.status for stage in self.stages]

    def start(self) -> None:
        """Starts every stage."""
        for stage in self.stages:
            self.wait_for_room()
            stage.attempt()

    def wait_for_room(self) -> None:
        """Waits while one stage begins for every two processors, but not for ever.

        Each begins with a Python process, for whose start Spark allows ten seconds: of many at once on a busy machine none comes up.
        """
        deadline = time.monotonic() + BEGIN_S
        while sum(stage.is_beginning for stage in self.stages) >= max(1, (os.cpu_count() or 1) // 2):
            if time.monotonic() > deadline or self._stop.wait(BEGIN_LOOK_S):
                return

    def supervise(self, *, on_look: Callable[[], None] | None = None) -> None:
        """Looks after the stages until `stop` is called, or none of them will ever go on."""
        while not self._stop.wait(LOOK_S):
            for stage in self.stages:
                self._with_spark(stage.look)
            self._idle.beat(stage for stage in self.stages if stage.plan.analysed.uses_time)
            if on_look is not None:
                on_look()
            if all(stage.status.state in ("failed", "done") for stage in self.stages):
                return

    def run_to_the_end(self, *, on_look: Callable[[], None] | None = None) -> None:
        """Runs each stage over what is there now, in the order in which events flow: the application as a batch."""
        for stage in self.stages:
            stage.attempt(available_now=True)
            while stage.status.state not in ("done", "failed") and not self._stop.wait(LOOK_S):
                self._with_spark(stage.look)
                if on_look is not None:
                    on_look()

    def stop(self, *, drain: bool = True) -> None:
        """Ends every query; with `drain` between two batches, where that comes soon."""
        self._stop.set()
        deadline = time.monotonic() + (DRAIN_S if drain else 0.0)
        for stage in self.stages:
            self._with_spark(partial(stage.end, deadline))
        while self._paces:
            shutil.rmtree(self._paces.pop(), ignore_errors=True)

    def _with_spark(self, do: Callable[[], None]) -> None:
        """Does something that needs the JVM; when that is gone, every stage is told so instead."""
        try:
            do()
        except Exception:
            if how_it_ended(wait_s=GONE_S) is None:
                raise
        ended = how_it_ended()
        if ended is not None:
            for stage in self.stages:
                stage.lose(f"{ended} Start the application again: it goes on where it was.")

    def frames(
        self, plan: Plan, skips: Skips, *, batch: Mapping[str, Any] | None = None, pace: str | None = None
    ) -> list[DataFrame | Table]:
        """The inputs of a stage: as streams, or for one `batch` of theirs as tables."""
        return [self._frame(plan, number, skips, batch, pace) for number in range(len(plan.stage.inputs))]

    def result(self, plan: Plan, skips: Skips) -> DataFrame:
        """What a stage's function makes of its inputs as streams."""
        if not plan.analysed.operators:
            return apply(plan.stage, self.frames(plan, skips))
        pace = tempfile.mkdtemp(prefix="headwater-pace-")
        self._paces.append(pace)
        partitions = plan.state_partitions
        options = {"pace": pace, "partitions": str(partitions)}
        beats = self.spark.readStream.format(BEATS).options(**options).load()
        with building(Building(plan.operators, partitions=partitions, beats=lambda: beats)):
            return apply(plan.stage, self.frames(plan, skips, pace=pace))

    def _frame(
        self, plan: Plan, number: int, skips: Skips, batch: Mapping[str, Any] | None, pace: str | None
    ) -> DataFrame | Table:
        topic = plan.stage.inputs[number]
        facts = plan.facts[topic]
        names = [*plan.analysed.columns[topic], *self._of_time(plan, facts, is_batch=batch is not None)]
        names += [DELETED.name, _TIME] if facts.is_table else []
        options = {
            "log": self._log.url,
            "topic": topic,
            "columns": ",".join(f"`{name.replace('`', '``')}`" for name in names),
            "startingOffsets": plan.start.get(topic, "earliest"),
        }
        if pace is not None:
            options["pace"] = pace
        if LATE in names and not is_local(self._log):
            options["maxima"] = maxima_of(plan.checkpoint, number)
        if plan.stage.corrections_us:
            options["lateness"] = f"{facts.lateness_us + plan.stage.corrections_us} microseconds"
        if topic in plan.stop:
            options |= {"stopOffsets": plan.stop[topic], "maxOffsetsPerTrigger": str(REPLAY_EVENTS)}
        condition = skips.condition(topic)
        if condition:
            options["filter"] = condition
        if batch is not None:
            options |= {"startingOffsets": batch[topic][0], "endingOffsets": batch[topic][1]}
            frame = without_late(self.spark.read.format("headwater").options(**options).load())
            return Table(topic, _with_times(frame, facts)) if facts.is_table else frame
        frame = self.spark.readStream.format("headwater").options(**options).load()
        if facts.is_table:
            frame = _with_times(frame, facts)
        if plan.stage.late == "only":
            return frame.where(LATE).drop(LATE)
        if PASSED in names:
            assert facts.time is not None
            count, keeps = f"{LATE_ROWS} {number}", facts.is_table
            frame = with_time(frame, facts.time, lateness_us=facts.lateness_us, count_as=count, drops=not keeps)
        else:
            frame = with_watermark(frame, facts)
        return Table(topic, frame) if facts.is_table else frame

    def _of_time(self, plan: Plan, facts: Facts, *, is_batch: bool) -> list[str]:
        """The columns by which an input's late rows are told, and its watermark.

        No row of a table comes too late: it is what later events are to find. What failed on Kafka is looked for in late rows, too:
        there only tasks of the stream know which those are.
        """
        if facts.time is None or (is_batch and not is_local(self._log)):
            return []
        if plan.stage.late == "only":
            return [LATE]
        if not plan.analysed.uses_time:
            return []
        if is_batch:
            return [] if facts.is_table else [LATE]
        return [LATE, PASSED]

    def writer(self, plan: Plan, result: DataFrame, write: Write | None) -> DataStreamWriter:
        """How the result of a stage leaves it: by a function in the driver, or by the data source."""
        stage = plan.stage
        writer = (
            result.writeStream.queryName(stage.name)
            .outputMode(stage.mode)
            .option("checkpointLocation", plan.checkpoint)
        )
        if write is not None:
            return writer.foreachBatch(write)
        return (
            writer.format("headwater")
            .option("log", self._log.url)
            .option("topic", stage.to)
            .option("stage", f"{self._graph.name}.{stage.name}")
        )

    def stage_of(self, plan: Plan) -> Stage:
        """The stage of the log that dead letters of a plan are written by."""
        return self._log.stage(f"{self._graph.name}.{plan.stage.name}.dead")

    @property
    def log(self) -> Log:
        """The log that is read and written."""
        return self._log


class _Supervised:
    """One stage, its query, and what became of it so far."""

    def __init__(self, runner: Runner, plan: Plan, state: Path) -> None:
        stage = plan.stage
        self.plan = plan
        self.status = StageStatus.of(stage)
        self._runner = runner
        self._skips = Skips(state / "skipped" / f"{stage.name}.json")
        self._rate = Rate()
        self._query: StreamingQuery | None = None
        self._raised: Exception | None = None
        self._available_now = False
        self._failures = 0
        self._failed_at = -1
        self._retry_at: float | None = None
        self._ends: dict[tuple[str, int], int] = {}
        self.reached: dict[At, tuple[int, int]] = {}
        """How far event time had come where the last batch began; known only where the log does not keep it."""
        self._lag_at = 0.0

    @property
    def checkpoint(self) -> str:
        """Where its query keeps its progress."""
        return self.plan.checkpoint

    @property
    def inputs(self) -> Sequence[str]:
        """The topics it reads."""
        return self.plan.stage.inputs

    @property
    def timed(self) -> Sequence[str]:
        """Those of them that have an event time."""
        return [topic for topic, facts in self.plan.facts.items() if facts.time is not None]

    def attempt(self, *, available_now: bool = False) -> None:
        """Starts the query; what goes wrong counts like a failure of the query."""
        self._available_now = available_now
        self._retry_at = self._raised = None
        try:
            activate(self._runner.spark)
            result = self._runner.result(self.plan, self._skips)
            write = None if self.plan.write is None else self._noting(self.plan.write())
            writer = self._runner.writer(self.plan, result, write)
            trigger = (
                {"availableNow": True} if available_now else {"processingTime": self.plan.stage.trigger or "0 seconds"}
            )
            self._query = writer.trigger(**trigger).start()
            self.status.state = "running"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told in the status, and the other stages go on
            self._query = None
            self._fail(error)

    def _noting(self, write: Write) -> Write:
        """Keeps what a writer raises as it was: Spark makes a text of it in which every error looks like one of Python's."""

        def noted(result: DataFrame, epoch: int) -> None:
            try:
                write(result, epoch)
            except Exception as error:
                self._raised = error
                raise

        return noted

    @property
    def is_beginning(self) -> bool:
        """Whether its query has not come so far as to ask its sources."""
        query = self._query
        return query is not None and query.isActive and query.status["message"].startswith(_BEGINNING)

    def look(self) -> None:
        """Takes notice of what the query did, and starts it again when it is time."""
        self._look()
        self.status.events_per_s = self._rate.see(self.status.events, time.monotonic())

    def _look(self) -> None:
        if self._query is None:
            if self._retry_at is not None and time.monotonic() >= self._retry_at:
                self._runner.wait_for_room()
                self.attempt(available_now=self._available_now)
            elif self.status.state in ("waiting", "failed") and time.monotonic() >= self._lag_at:
                self._lag_at = time.monotonic() + LAG_S
                self._fall_behind()
            return
        is_active = self._query.isActive  # asked first: what it did last is then among its progress
        self._follow(self._query)
        if is_active:
            return
        error, self._query = self._query.exception(), None
        if error is not None:
            self._fail(self._raised or error)
        else:
            self.status.state = "done" if self._available_now else "stopped"

    def _follow(self, query: StreamingQuery) -> None:
        """Several batches may have been run since the last look; the newest progress tells whether there is anything new."""
        newest = query.lastProgress
        if newest is None:
            return
        if int(newest["batchId"]) > self.status.epoch + 1:
            for progress in query.recentProgress:
                self.status.follow(progress)
        self.status.follow(newest)
        self._ends |= ends_in(newest)
        self.reached |= reached_in(newest)
        if self.status.epoch > self._failed_at:
            self._failures = 0
            self.status.error = None

    def _fall_behind(self) -> None:
        """While no query tells its lag, it grows with what others append; a log that cannot be asked leaves it as it was."""
        with suppress(HeadwaterError, OSError, ValueError):
            if not self._ends:
                begun, _ = failed_ranges(self.plan.checkpoint, ())
                self._ends = places_of(ends_of(self.plan.checkpoint, begun - 1)) if begun else {}
        with suppress(HeadwaterError):
            self.status.lag = sum(
                max(0, span.stop - self._ends.get((topic, number), span.start))
                for topic in self.plan.stage.inputs
                for number, span in self._runner.log.offsets(topic).items()
            )

    def lose(self, why: str) -> None:
        """There is no Spark any more that could run it."""
        self._query = self._retry_at = None
        if self.status.state != "done":
            self.status.state, self.status.error = "failed", why

    def end(self, deadline: float) -> None:
        """Stops the query, once its batch is done or the time is up."""
        query, self._query = self._query, None
        if query is None:
            if self.status.state in ("waiting", "starting"):
                self.status.state = "stopped"
            return
        while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
            time.sleep(0.02)
        query.stop()
        self._follow(query)
        self.status.events_per_s = 0.0
        if self.status.state == "running":
            self.status.state = "stopped"

    def _fail(self, error: BaseException) -> None:
        ours = error if isinstance(error, HeadwaterError) else told(error)
        self.status.error = sentence(error, self.plan.stage) if ours is None else f"[{ours.code}] {ours}"
        epoch = self.status.epoch + 1
        self._failures += 1
        again, self._failed_at = self._failed_at == epoch, epoch
        if ours is None:
            hopeless = again and is_about_data(error) and not self._cure()
        else:
            # A task that an earlier run left behind may take the stage's number last. A run of our own sink takes another one.
            hopeless = not (ours.retriable or (isinstance(ours, Fenced) and self.plan.write is None))
        gives_up = self._available_now and self._failures > len(RETRY_S)  # a batch job has an end; a stream can wait
        if hopeless or gives_up:
            self.status.state = "failed"
        else:
            self.status.state = "waiting"
            self.status.restarts += 1
            self._retry_at = time.monotonic() + RETRY_S[min(self._failures - 1, len(RETRY_S) - 1)]

    def _cure(self) -> bool:
        """Finds the poison events of a batch that failed twice and sets them aside; False where that cannot be done."""
        try:
            hunt = PoisonHunt(self._runner, self.plan, self._skips)
            found = hunt.run(self.plan.checkpoint)
        except Exception as error:  # noqa: BLE001 - the stage stops with both errors told
            self.status.error = f"{self.status.error}. Looking for the event that does it failed too: {sentence(error, self.plan.stage)}"
            return False
        if isinstance(found, str):
            self.status.error = f"{self.status.error}. {found}"
            return False
        self.status.dead += found
        self._failed_at = -1
        return True


def is_about_data(error: BaseException) -> bool:
    """Whether it is the events, or the function, that an error is about: Python raised it, or SQL calls it a data exception.

    Anything else (a worker that did not start, a dead machine, no memory) may be gone at the next attempt.
    """
    text = str(error)
    if _NO_MEMORY.search(text) or _WORKER_DIED.search(text):
        return False
    return "Traceback (most recent call last)" in text or _DATA_EXCEPTION.search(text) is not None


def _with_times(versions: DataFrame, facts: Facts) -> DataFrame:
    """The versions of a table's rows; a row was deleted when the log was told."""
    if facts.time is not None:
        versions = versions.withColumn(facts.time, F.coalesce(f"`{facts.time}`", _TIME))
    return versions.drop(_TIME)


def sentence(error: BaseException, stage: StageNode) -> str:
    """The part of an error that says most: what Python raised and in which line of the script, or Spark's first line."""
    text = str(error)
    if _WORKER_DIED.search(text):
        return "A Python process of Spark died, or did not start in time: killed, out of memory, or a busy machine."
    raised = _RAISED.findall(text)
    if not raised:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    script = stage.function.__code__.co_filename if stage.function is not None else ""
    lines = [number for file, number in _FRAME.findall(text) if file == script]
    return f"{Path(script).name}:{lines[-1]}: {raised[-1]}" if lines else raised[-1]
