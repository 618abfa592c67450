"""A launch: log, Spark, topics and views of an application put together, from its declaration to running stages.

A launch checks everything before the first stage starts. It raises `InvalidApp` for mistakes in the script, and other errors for the
world around it. One process at a time runs an application: it holds a lock on the folder `state`. Without the lock the log's fencing
numbers would still keep a second process from doing harm, but people could not see which one runs.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from headwater.app.declaration import captured_table, make_declared, make_output, writes_topic
from headwater.app.outputs.sinks import TargetWriter, check_partitioned, shape_of
from headwater.app.outputs.transactions import TransactionWriter
from headwater.app.outputs.views import Attempt, ViewStages, generation_name
from headwater.app.restarts import Restart, begin_again, beginnings, check_checkpoint, check_restart, checked_restarts
from headwater.capture.supervisor import SupervisedCaptures
from headwater.capture.topics import TIME
from headwater.log.disk.disk import RealDisk
from headwater.log.log import Log, capabilities_of, open_log
from headwater.log.port.topic import PARTITIONS, Topic
from headwater.model.clock import duration_us
from headwater.model.ddl import to_ddl
from headwater.model.errors import AppRunning, InvalidApp, LogNotFound, SchemaConflict
from headwater.model.extras import check_spark
from headwater.model.url import inside
from headwater.processing.graph.graph import Graph, StageNode
from headwater.sinks.files import FileSink, is_folder
from headwater.sinks.sink import is_target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater.processing.stages.analysis import Analysis, StageAnalysis, TopicFacts
    from headwater.processing.stages.rebuild import Rebuild
    from headwater.processing.stages.stage_plan import StagePlan
    from headwater.processing.stages.stage_plan import Write as WriteBatch
    from headwater.processing.stages.supervisor import Supervisor

SPARK_LOG = "spark.log"
STATE_PARTITIONS_MAX = 1_000


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Where an application runs."""

    log: str
    master: str | None
    conf: Mapping[str, str]
    state: Path
    views: str
    idle_us: int
    operators: str | None = None
    state_partitions: int = 4


class Launch:
    """One run of an application, from `start` to `close`."""

    def __init__(self, graph: Graph, settings: Settings, *, spark: SparkSession | None = None) -> None:
        self._graph = graph
        self._settings = settings
        self._given_spark = spark
        self._closing: list[Callable[[], object]] = []
        self._views: ViewStages | None = None
        self._targets: dict[str, TargetWriter] = {}
        declared = [node for node in graph.topics.values() if node.source is not None]
        self.captures = SupervisedCaptures([captured_table(node) for node in declared])
        self._notes: list[str] = []

    @property
    def notes(self) -> list[str]:
        """What the user should know about this run: why a view is rebuilt, where a stage starts with a new checkpoint."""
        return [*([] if self._views is None else self._views.notes), *self._notes]

    def describe(self) -> dict[str, list[str]]:
        """The notes of `plan` for each stage, by its name. Nothing is created."""
        check_spark("An application")
        from headwater.processing.spark.java import told_when_gone

        log: Log | None = None
        with suppress(LogNotFound):
            log = open_log(self._settings.log, create=False, read_only=True)
            self._closing.append(log.close)
        self._graph.check(in_log=log.topics() if log else [])
        with told_when_gone():
            analysed = self._analysis(self._session(keep_log=False), log).run()
        return {name: _notes(self._graph.stages[name], found) for name, found in analysed.items()}

    def start(
        self, *, accept: Mapping[str, Restart] | None = None, rebuild: Mapping[str, Rebuild] | None = None
    ) -> Supervisor:
        """Creates what is missing, and returns the stages, ready to run."""
        check_spark("An application")
        from headwater.processing.stages.supervisor import Supervisor

        self._graph.check_names({**(accept or {}), **(rebuild or {})})
        accept = checked_restarts(accept or {})
        self._take_lock()
        log = open_log(self._settings.log)
        self._closing.append(log.close)
        self.captures.open(log)
        self._graph.check(in_log=log.topics())
        spark = self._session(keep_log=True)
        self._check_workers(spark)
        for node in self._graph.topics.values():
            make_declared(log, node)
        analysis = self._analysis(spark, log)
        analysed = analysis.run()
        settings = self._settings
        views = self._views = ViewStages(
            self._graph, log, settings.views, state=settings.state, operators=settings.operators
        )
        self._closing.append(views.close)
        stages = self._graph.order()
        for stage in stages:
            make_output(log, stage, analysed[stage.name])
        for name, restart in accept.items():
            check_restart(self._graph.stages[name], analysed[name], restart)
        plans = []
        for stage in stages:
            plans.append(self._plan(log, views, stage, analysed[stage.name], analysis, accept.get(stage.name)))
        views.sweep()
        supervisor = Supervisor(spark, log, self._graph, plans, state=settings.state, idle_us=settings.idle_us)
        self._rebuild(supervisor, plans, rebuild or {})
        return supervisor

    def look(self, supervisor: Supervisor, attempt: Attempt) -> None:
        """Called often while stages run: a rebuilt view replaces the old one after it has caught up."""
        if self._views is not None:
            self._views.look(supervisor, attempt)

    def close(self) -> None:
        """Frees everything, and stops Spark if the launch started it."""
        while self._closing:
            self._closing.pop()()
        for target in self._targets.values():
            target.close()

    # Parts

    def _rebuild(self, supervisor: Supervisor, plans: Sequence[StagePlan], wanted: Mapping[str, Rebuild]) -> None:
        from headwater.processing.stages.rebuild import rebuild

        for plan in plans:
            if plan.stage.name in wanted:
                self._notes.append(rebuild(supervisor, plan, wanted[plan.stage.name], folder=self._settings.state))

    def _take_lock(self) -> None:
        state = self._settings.state
        disk = RealDisk()
        disk.make_folder(str(state))
        lock = disk.open(str(state / "lock"), "create")  # held until `close`
        if not lock.lock(wait=False):
            holder = lock.read_at(0, lock.size()).decode("utf-8", "replace").strip() or "another process"
            lock.close()
            here = holder == f"process {os.getpid()}"
            raise AppRunning(
                f"Application {self._graph.name!r} is already running ({'in this program' if here else holder}), "
                f"with its state in {state}.",
                advice="Call stop() on the App that runs."
                if here
                else "Stop the other one first, or pass another state= to this one.",
            )
        lock.truncate(0)
        lock.write_at(0, [f"process {os.getpid()}".encode()])
        self._closing.append(lock.close)

    def _session(self, *, keep_log: bool) -> SparkSession:
        from headwater.processing.source.spark_source import make_session, register
        from headwater.processing.spark.java import keep_quiet
        from headwater.processing.spark.session import check_reachable, listen, stop_session

        settings = self._settings
        if self._given_spark is not None:
            check_reachable(settings.log, str(self._given_spark.sparkContext.master))
            register(self._given_spark)
            listen(self._given_spark)
            return self._given_spark
        is_quiet = not os.environ.get("HEADWATER_DEBUG")  # the status shows errors in a sentence
        if is_quiet:  # before the start: py4j writes a traceback for every call that finds no JVM
            logging.getLogger("py4j").setLevel(logging.CRITICAL)
        with self._spark_log(keep=keep_log) as said:
            spark = make_session(self._graph.name, settings.master, settings.conf, log=settings.log, said=said)
        if is_quiet:
            spark.sparkContext.setLogLevel("FATAL")
            keep_quiet(spark)
        self._closing.append(lambda: stop_session(spark))
        return spark

    def _check_workers(self, spark: SparkSession) -> None:
        from headwater.processing.spark.workers import check_workers

        sinks = [
            FileSink(stage.to, stage=stage.name).folder for stage in self._graph.stages.values() if is_folder(stage.to)
        ]
        check_workers(spark, [self._settings.state, *sinks])

    @contextmanager
    def _spark_log(self, *, keep: bool) -> Iterator[IO[bytes] | None]:
        """The file for the output of Java and of Spark's workers, `<state>/spark.log`; each run starts an empty one."""
        if os.environ.get("HEADWATER_DEBUG"):
            yield None
            return
        with open(self._settings.state / SPARK_LOG, "w+b") if keep else tempfile.TemporaryFile() as said:
            yield said

    def _analysis(self, spark: SparkSession, log: Log | None) -> Analysis:
        from headwater.processing.stages.analysis import Analysis, TopicFacts
        from headwater.processing.stages.fusion import placed_by

        captured = {} if log is not None and self.captures.are_open else self.captures.schemas()

        def facts(topic: str) -> TopicFacts:
            node = self._graph.topics.get(topic)
            is_table = node is not None and node.is_table
            writer = self._graph.writer_of(topic)
            if log is not None and topic in log.topics():
                found = log.topic(topic)
                of_view = writer is not None and writer.kind == "view"
                schema = _followed(found, writer, analysis.stages[writer.name]) if writer and of_view else found.schema
                placed, roots = placed_by(schema, found.key), found.partitions_first
                return TopicFacts(schema, found.time, found.lateness_us, is_table, placed, found.schema_id, roots)
            if node is not None and node.source is not None:
                return TopicFacts(captured[topic], TIME, 0, is_table)
            if node is None or node.schema is None:
                assert writer is not None
                return TopicFacts(_changes_of(writer, analysis.stages[writer.name]))
            lateness = duration_us(node.settings.get("lateness", "0 seconds"))
            placed, roots = (
                placed_by(node.schema, node.settings.get("key")),
                node.settings.get("partitions", PARTITIONS),
            )
            return TopicFacts(node.schema, node.settings.get("time"), lateness, is_table, placed, roots=roots)

        analysis = Analysis(
            spark, self._graph, facts, is_placed_by_key=capabilities_of(self._settings.log).is_placed_by_key
        )
        return analysis

    def _plan(
        self,
        log: Log,
        views: ViewStages,
        stage: StageNode,
        analysed: StageAnalysis,
        analysis: Analysis,
        restart: Restart | None,
    ) -> StagePlan:
        from headwater.processing.stages.stage_plan import StagePlan
        from headwater.processing.state.files import StateFolder

        view = views.plan(stage, analysed) if stage.kind == "view" else None
        name = stage.name if view is None else generation_name(stage.name, view.definition.generation)
        checkpoint = self._settings.state / "checkpoints" / name
        starts = self._settings.state / "starts" / f"{name}.json"
        elsewhere = self._settings.operators
        operators = f"{checkpoint}/operators" if elsewhere is None else inside(elsewhere, name)
        named = f"{self._graph.name}.{name}"
        if restart is not None:
            self._notes.append(begin_again(log, stage, named, restart, checkpoint=checkpoint, starts=starts))
            StateFolder(operators).remove_all()
        check = partial(check_checkpoint, log, stage, named, checkpoint)
        return StagePlan(
            stage=stage,
            analysed=analysed,
            facts=analysis.inputs(stage),
            checkpoint=str(checkpoint),
            operators=operators,
            state_partitions=self._settings.state_partitions,
            start=beginnings(starts),
            write=self._writer(log, stage, analysed, str(checkpoint))
            if view is None
            else views.writer(stage, view, str(checkpoint), check=check),
            check=check,
            anew=partial(self._plan_anew, log, views, stage, analysis) if self._takes_all(stage) else None,
            reopens=writes_topic(stage),
        )

    def _takes_all(self, stage: StageNode) -> bool:
        """Whether a stage copies a topic that other programs write, and so needs the columns that the topic gets while the stage runs.

        Transactions have all columns of their tables in every batch.
        """
        return stage.kind == "sink" and stage.capture is None and self._graph.writer_of(stage.inputs[0]) is None

    def _plan_anew(self, log: Log, views: ViewStages, stage: StageNode, analysis: Analysis) -> StagePlan:
        """The plan of a stage after the columns of its topic have changed."""
        analysed = analysis.run_one(stage)
        make_output(log, stage, analysed)
        return self._plan(log, views, stage, analysed, analysis, None)

    def _writer(
        self, log: Log, stage: StageNode, analysed: StageAnalysis, path: str
    ) -> Callable[[], WriteBatch] | None:
        """The writer of a stage's batches in the driver. Each run of the query gets a new one.

        A run that ended in an error may have lost its transaction. On Kafka the stage must then be opened again.
        There each task of a batch writes its own rows through the data source, if the mode allows it. For a log in a folder the data
        source can do the same, but Spark would start new Python processes for it in every batch.
        """
        from headwater.processing.checkpoint.marker import marker_of
        from headwater.processing.sink.frame_writer import FrameWriter
        from headwater.processing.sink.staging import can_stage

        name = f"{self._graph.name}.{stage.name}"
        if stage.capture is not None:
            return self._transaction_writer(log, stage, name, path).begin
        if stage.kind == "sink" and is_target(stage.to):
            return self._target_writer(log, stage, analysed, name, path).begin
        if stage.kind == "sink" and is_folder(stage.to):
            sink = FileSink(stage.to, stage=name)
            check_partitioned(stage, analysed.schema.names, sink.partition_by)

            def add(result: DataFrame, epoch: int) -> None:
                marker = marker_of(path, epoch)
                staged = sink.begin(marker)
                if staged is not None:
                    result.write.partitionBy(*sink.partition_by).format(sink.format).save(str(staged))
                    sink.commit(marker, staged)

            return lambda: add
        if stage.mode != "append" or can_stage(log):

            def appending() -> WriteBatch:
                fetches = analysed.is_prompt or not analysed.stateful
                order = analysed.order
                return FrameWriter(
                    log.url, stage=name, topic=stage.to, checkpoint=path, fetches=fetches, order=order
                ).commit

            return appending
        return None

    def _target_writer(
        self, log: Log, stage: StageNode, analysed: StageAnalysis, name: str, checkpoint: str
    ) -> TargetWriter:
        (topic,) = stage.inputs
        writer = self._graph.writer_of(topic)
        view = writer if writer is not None and writer.kind == "view" else None
        shape = shape_of(stage, analysed.schema, key=log.topic(topic).key, view=view)
        folder = self._settings.state / "leaving" / stage.name
        if before := self._targets.pop(stage.name, None):
            before.close()
        made = self._targets[stage.name] = TargetWriter(
            log, stage, shape, name=name, checkpoint=checkpoint, folder=folder, of_view=view is not None
        )
        return made

    def _transaction_writer(self, log: Log, stage: StageNode, name: str, checkpoint: str) -> TransactionWriter:
        folder = self._settings.state / "leaving" / stage.name
        made = TransactionWriter(log, stage, name=name, checkpoint=checkpoint, folder=folder)
        self._closing.append(made.close)
        return made


def _changes_of(stage: StageNode, analysed: StageAnalysis) -> pa.Schema:
    from headwater.views.changes import changes_schema
    from headwater.views.definition import define_view

    return changes_schema(define_view(stage.name, analysed.schema, key=stage.key, mode=stage.mode))


def _followed(topic: Topic, view: StageNode, analysed: StageAnalysis) -> pa.Schema:
    """The columns of a view's topic with the results of the view's present code; `InvalidApp` if the topic cannot hold them."""
    from headwater.views.definition import define_view
    from headwater.views.topic import shared_schema

    try:
        return shared_schema(topic.schema, define_view(view.name, analysed.schema, key=view.key, mode=view.mode))
    except SchemaConflict as error:
        raise InvalidApp(
            f"{view.place} is read by other stages, but its topic {topic.name!r} cannot hold the rows of its new code: "
            f"{error.what}",
            advice="Rename the column or the view. After that, the readers start with the new one.",
        ) from None


def _notes(stage: StageNode, analysed: StageAnalysis) -> list[str]:
    reads = "; ".join(f"{topic}: {', '.join(columns)}" for topic, columns in analysed.columns.items())
    state = f"keeps state ({', '.join(analysed.stateful)})" if analysed.stateful else "keeps no state"
    fused = [
        f"{uid} runs inside the source of {' and '.join(topics)}, without a shuffle"
        for uid, topics in analysed.fused.items()
    ]
    apart = [f"{uid} is not fused: {why}" for uid, why in analysed.apart.items()]
    apart += [f"{uid} has its rows combined inside the source of {topic}" for uid, topic in analysed.combined.items()]
    gives = to_ddl(analysed.schema) if stage.capture is None else "whole transactions of its source"
    return [f"gives {gives}", f"reads {reads}", state, *fused, *apart]


def check_partitions(count: Any) -> int:
    """A valid number of state partitions; `InvalidApp` for any other value."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= STATE_PARTITIONS_MAX:
        raise InvalidApp(
            f"state_partitions={count!r} is not a number of partitions.", advice=f"Use 1 to {STATE_PARTITIONS_MAX}."
        )
    return count
