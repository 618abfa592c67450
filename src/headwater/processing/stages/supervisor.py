"""The supervisor: starts every stage of an application as a Spark query, and looks after them.

A stage that fails is started again, later and later; the others go on. What no retry can cure stops its stage with a sentence: an
error of ours that says so (a foreign checkpoint, a schema that does not fit). A batch that fails twice at the same place has a
poison event in it: see `poison`. Where the JVM is gone no stage can go on: all of them fail with that sentence, and whoever starts
the application again goes on where it was.

Thread-safety: one thread starts, another may look after the stages (`supervise`), any may ask for the status or stop.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from headwater.log.clients.stage import Stage
from headwater.log.log import Log
from headwater.model.backoff import Backoff
from headwater.model.clock import Duration, duration_us
from headwater.model.errors import Fenced, HeadwaterError, NotFound, SchemaMoved
from headwater.processing.checkpoint.marker import committed, ends_of, planned, query_of
from headwater.processing.checkpoint.offsets import At, places_of
from headwater.processing.checkpoint.query_start import note_beginning
from headwater.processing.graph.graph import Graph
from headwater.processing.spark.errors import our_error_in
from headwater.processing.spark.java import how_it_ended
from headwater.processing.spark.listener import Listener
from headwater.processing.spark.session import activate
from headwater.processing.stages.failure import is_about_data, sentence
from headwater.processing.stages.idle_partitions import IdlePartitions, passed_by
from headwater.processing.stages.inputs import Inputs
from headwater.processing.stages.open_batches import OpenBatches
from headwater.processing.stages.poison import PoisonHunt
from headwater.processing.stages.skips import Skips
from headwater.processing.stages.stage_plan import StagePlan
from headwater.processing.stages.status import Rate, StageStatus, ends_in, reached_in
from headwater.processing.state.state_info import rows_kept

RETRY_S = (1.0, 30.0)
"""The first and the longest pause of a stage that fails again and again; after its first failure it starts again at once."""

RETRIES_MAX = 7
"""How often in a row a stage of a batch job is started again."""

OVERTAKEN_MAX, OVERTAKEN_S = 4, 600.0
"""A stage that others opened so often within this time is not opened again."""

LOOK_S = 0.2
LOOK_IDLE_S = 1.0
"""So often Spark is asked where nothing was new the last time."""

LOOK_ALL_S = 60.0
"""So often a query is looked at of which Spark has told nothing."""

LAG_S = 2.0
KEPT_S = 5.0
BEGIN_S = 10.0
BEGIN_LOOK_S = 0.02
DRAIN_S = 30.0
GONE_S = 2.0
"""So long after a call to a dead JVM failed its process may still look alive."""

_BEGINNING = "Initializing"
_ASKING = "Getting offsets"
"""What a query does while it has nothing to do: its sources wait for something to come."""


WriteWatched = Callable[[DataFrame, int], None]
"""What `foreachBatch` calls (see `open_batches`)."""


class Supervisor:
    """The stages of one application in one Spark session."""

    def __init__(
        self, spark: SparkSession, log: Log, graph: Graph, plans: Sequence[StagePlan], *, state: Path, idle_us: int
    ) -> None:
        """`idle_us`: so long without an event, and a partition is not waited for any more."""
        self.spark = spark
        self._log = log
        self._graph = graph
        self._stop = threading.Event()
        self.inputs = Inputs(spark, log, state / "pace")
        self._idle = IdlePartitions(log, idle_us, self._passed)
        self.writing = OpenBatches()
        self.stages = [_SupervisedStage(self, plan, state) for plan in plans]

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
        looked_at, changed = time.monotonic(), None
        with closing(Listener(self.spark)) as listener:
            while not self._stop.wait(LOOK_IDLE_S if self._is_idle(changed) else LOOK_S):
                changed = _changed(listener)
                if time.monotonic() > looked_at + LOOK_ALL_S:
                    looked_at, changed = time.monotonic(), None
                for stage in self.stages:
                    self._look_after(stage, has_news=changed is None or stage.query_id in changed)
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

    @property
    def is_stopping(self) -> bool:
        """Whether nothing is to be started any more."""
        return self._stop.is_set()

    @property
    def job_tag(self) -> str:
        """What the jobs of Spark are marked with that a stop need not wait for."""
        return f"headwater-{id(self)}"

    def ask_to_stop(self) -> None:
        """Lets whoever looks after the stages end soon: none is started any more, and the search for poison is given up."""
        self._stop.set()
        with suppress(Exception):  # a JVM that is gone has no jobs
            self.spark.sparkContext.cancelJobsWithTag(self.job_tag)

    def stop(self, *, drain: bool = True) -> None:
        """Ends every query; with `drain` between two batches, where that comes soon. Nobody looks after the stages any more."""
        self._stop.set()
        deadline = time.monotonic() + (DRAIN_S if drain else 0.0)
        with ExitStack() as ending:  # what goes wrong with one of them is raised when all were ended
            ending.callback(self.inputs.close)
            ending.callback(self.writing.end)
            for stage in reversed(self.stages):
                ending.callback(self._with_spark, partial(stage.end, deadline))

    def _is_idle(self, changed: set[str] | None) -> bool:
        return changed is not None and not changed and not any(stage.is_due for stage in self.stages)

    def _look_after(self, stage: _SupervisedStage, *, has_news: bool) -> None:
        """What goes wrong when a stage is looked at is told, and the others are looked after as before."""
        if not has_news and not stage.is_due:
            stage.see_rate()
            return
        try:
            self._with_spark(stage.look)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next look may find it gone
            stage.status.error = f"It cannot be looked after: {sentence(error, stage.plan.stage)}"

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

    def writer(self, plan: StagePlan, result: DataFrame, write: WriteWatched | None) -> DataStreamWriter:
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
            .option("order", plan.analysed.order)
        )

    def _passed(self, topic: str, greatest: int) -> int | None:
        """Before which time a topic gets no rows any more that the stage which writes it gives; None where none of these does."""
        writer = self._graph.writer_of(topic)
        plans = [stage.plan for stage in self.stages if writer is not None and stage.plan.stage.name == writer.name]
        return passed_by(self._log, plans[0], greatest) if plans else None

    def stage_of(self, plan: StagePlan) -> Stage:
        """The stage of the log that dead letters of a plan are written by."""
        return self._log.stage(f"{self._graph.name}.{plan.stage.name}.dead")

    @property
    def log(self) -> Log:
        """The log that is read and written."""
        return self._log


class _SupervisedStage:
    """One stage, its query, and what became of it so far."""

    def __init__(self, supervisor: Supervisor, plan: StagePlan, state: Path) -> None:
        stage = plan.stage
        self.plan = plan
        self.status = StageStatus.of(stage)
        self._supervisor = supervisor
        self._skips = Skips(state / "skipped" / f"{stage.name}.json")
        self._rate = Rate()
        self._query: StreamingQuery | None = None
        self.query_id: str | None = None
        self._raised: Exception | None = None
        self._available_now = self._has_begun = self._has_told = self._is_outdated = self._is_followed = False
        self._failures = 0
        self._backoff = Backoff(*RETRY_S)
        self._failed_at = -1
        self._overtaken_at = deque[float](maxlen=OVERTAKEN_MAX)
        self._retry_at: float | None = None
        self._ends: dict[tuple[str, int], int] = {}
        self.reached: dict[At, tuple[int, int]] = {}
        """How far event time had come where the last batch began; known only where the log does not keep it."""
        self._lag_at = 0.0
        self._kept_rows, self._kept_epoch, self._kept_at = 0, -1, 0.0
        self._skipped = 0

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
            activate(self._supervisor.spark)
            if self._is_outdated and self.plan.anew is not None:
                self.plan = self.plan.anew()
            self._is_outdated = False
            if self.plan.check is not None:
                self.plan.check()
            note_beginning(self._supervisor.log, self.plan.checkpoint, self.inputs, self.plan.start)
            result = self._supervisor.inputs.result(self.plan, self._skips)
            writer = self._supervisor.writer(self.plan, result, self._write())
            trigger = (
                {"availableNow": True} if available_now else {"processingTime": _interval(self.plan.stage.trigger)}
            )
            if self._supervisor.is_stopping:
                return
            self._query = writer.trigger(**trigger).start()
            self.query_id, self._has_begun, self._is_followed = str(self._query.id), False, False
            self.status.state = "running"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told in the status, and the other stages go on
            self._query = None
            self._fail(error)

    def _write(self) -> WriteWatched | None:
        """The function that writes the batches of this attempt in the driver, if one does."""
        if self.plan.write is None:
            return None
        return self._supervisor.writing.writer(self.plan.write(), on_dead=self.status.bury, on_error=self._keep)

    def _keep(self, error: Exception) -> None:
        """Keeps what the writer of a batch has raised."""
        self._raised = error

    @property
    def is_caught_up(self) -> bool:
        """Whether its query has done a batch, now or in an earlier run, and has told that no event waits for it."""
        has_begun = self.status.epoch >= 0 or committed(self.plan.checkpoint) is not None
        return self._has_told and self.status.lag == 0 and has_begun

    @property
    def is_beginning(self) -> bool:
        """Whether its query has not come so far as to ask its sources; asked until it has."""
        query = self._query
        if query is not None and not self._has_begun:
            self._has_begun = not (query.isActive and query.status["message"].startswith(_BEGINNING))
        return query is not None and not self._has_begun

    def look(self) -> None:
        """Takes notice of what the query did, and starts it again when it is time."""
        self._is_followed = False
        self._look()
        self._is_followed = self._query is not None and self._has_told
        self.see_rate()

    def see_rate(self) -> None:
        """Time goes by, and the events of the last seconds become fewer."""
        self.status.events_per_s = self._rate.see(self.status.events, time.monotonic())

    @property
    def is_due(self) -> bool:
        """Whether it is to be looked at although its query has told nothing: there is none, or the last look has left something to do."""
        is_counted = self._kept_epoch >= self.status.epoch or not self.plan.analysed.operators
        return not self._is_followed or (not is_counted and time.monotonic() >= self._kept_at)

    def _look(self) -> None:
        if self._query is None:
            if self._retry_at is not None and time.monotonic() >= self._retry_at:
                self._supervisor.wait_for_room()
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
        self._has_told = True
        kept = self._rows_kept(query, int(newest["batchId"]))
        late_in = partial(self._supervisor.inputs.late_in, self.plan)
        if int(newest["batchId"]) > self.status.epoch + 1:
            for progress in query.recentProgress:
                self._take(progress, rows_kept=kept, late_in=late_in)
        self._take(newest, rows_kept=kept, late_in=late_in)
        self._ends |= ends_in(newest)
        self.reached |= reached_in(newest)
        if self.status.epoch > self._failed_at:
            self._failures = 0
            self._backoff.reset()
            self.status.error = None

    def _take(self, progress: Mapping[str, Any], **known: Any) -> None:
        """Events that were set aside belong to the next batch that is done: it is the one that they stopped."""
        if self.status.follow(progress, skipped=self._skipped, **known):
            self._skipped = 0

    def _rows_kept(self, query: StreamingQuery, epoch: int) -> int:
        """How many rows its operators keep; asked now and then, and where their files cannot be read at this moment, later."""
        if not self.plan.analysed.operators or epoch == self._kept_epoch:
            return self._kept_rows
        if time.monotonic() >= self._kept_at or not query.isActive:
            self._kept_at = time.monotonic() + KEPT_S
            with suppress(HeadwaterError):
                self._kept_rows, self._kept_epoch = rows_kept(self.plan.operators), epoch
        return self._kept_rows

    def _fall_behind(self) -> None:
        """While no query tells its lag, it grows with what others append; a log that cannot be asked leaves it as it was."""
        with suppress(HeadwaterError, OSError, ValueError):
            if not self._ends:
                begun = planned(self.plan.checkpoint)
                self._ends = places_of(ends_of(self.plan.checkpoint, begun - 1)) if begun else {}
        with suppress(HeadwaterError):
            self.status.lag = sum(
                max(0, span.stop - self._ends.get((topic, number), span.start))
                for topic in self.plan.stage.inputs
                for number, span in self._supervisor.log.offsets(topic).items()
            )

    def lose(self, why: str) -> None:
        """There is no Spark any more that could run it."""
        self._query = self._retry_at = None
        if self.status.state != "done":
            self.status.state, self.status.error = "failed", why

    def end(self, deadline: float) -> None:
        """Stops the query, once its batch is done or the time is up."""
        query, self._query, self._retry_at = self._query, None, None
        if query is None and self.status.state in ("waiting", "starting"):
            query, self.status.state = self._left_behind(), "stopped"
        if query is None:
            return
        while query.isActive and is_in_a_batch(query) and time.monotonic() < deadline:
            time.sleep(0.02)
        query.stop()
        self._follow(query)
        self.status.events_per_s = 0.0
        if self.status.state == "running":
            self.status.state = "stopped"

    def _left_behind(self) -> StreamingQuery | None:
        """A query whose start was interrupted: Spark runs it, and nobody was given it."""
        with suppress(NotFound):
            own = query_of(self.plan.checkpoint)
            return next((query for query in self._supervisor.spark.streams.active if query.id == own), None)
        return None

    def _fail(self, error: BaseException) -> None:
        ours = error if isinstance(error, HeadwaterError) else our_error_in(error)
        if isinstance(ours, SchemaMoved):
            self._is_outdated, self.status.state, self._retry_at = True, "waiting", time.monotonic()
            return
        self.status.error = sentence(error, self.plan.stage) if ours is None else f"[{ours.code}] {ours}"
        epoch = self.status.epoch + 1
        self._failures += 1
        again, self._failed_at = self._failed_at == epoch, epoch
        if ours is None:
            hopeless = again and is_about_data(error) and not self._cure()
        elif isinstance(ours, Fenced):
            hopeless = not (self.plan.reopens and self._is_overtaken_rarely())
        else:
            hopeless = not ours.retriable
        gives_up = self._available_now and self._failures > RETRIES_MAX  # a batch job has an end; a stream can wait
        if hopeless or gives_up:
            self.status.state = "failed"
        else:
            self.status.state = "waiting"
            self.status.restarts += 1
            self._retry_at = time.monotonic() + (0.0 if self._failures == 1 else self._backoff.next_s())

    def _is_overtaken_rarely(self) -> bool:
        """Whether whoever opened the stage was one that an earlier run left behind, or one that was started and refused.

        That happens once. Where it goes on happening somebody else runs the stage, and one of the two has to leave.
        """
        self._overtaken_at.append(time.monotonic())
        return len(self._overtaken_at) < OVERTAKEN_MAX or self._overtaken_at[-1] - self._overtaken_at[0] > OVERTAKEN_S

    def _cure(self) -> bool:
        """Finds the poison events of a batch that failed twice and sets them aside; False where that can never be done."""
        try:
            hunt = PoisonHunt(self._supervisor, self.plan, self._skips)
            found = hunt.run(self.plan.checkpoint)
        except Exception as error:  # noqa: BLE001 - both errors are told
            ours = error if isinstance(error, HeadwaterError) else our_error_in(error)
            why = sentence(error, self.plan.stage) if ours is None else f"[{ours.code}] {ours}"
            self.status.error = f"{self.status.error}. Looking for the event that does it failed too: {why}"
            return ours is None or ours.retriable
        if isinstance(found, str):
            self.status.error = f"{self.status.error}. {found}"
            return False
        self.status.dead += found
        self._skipped += found
        self._failed_at = -1
        return True


def is_in_a_batch(query: StreamingQuery) -> bool:
    """Whether a query is at work; one that asks its sources may be waiting in them for something to come."""
    status = query.status
    return bool(status["isTriggerActive"]) and not status["message"].startswith(_ASKING)


def _interval(trigger: Duration | None) -> str:
    """How often Spark looks for a batch, in its own words."""
    return f"{0 if trigger is None else duration_us(trigger) // 1000} milliseconds"


def _changed(listener: Listener) -> set[str] | None:
    """The queries to look at; None means all, as when the JVM is gone: then the look says so."""
    try:
        return listener.changed()
    except Exception:  # noqa: BLE001 - the bridge to Java has errors of its own
        return None
