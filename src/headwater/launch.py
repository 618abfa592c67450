"""A launch: log, Spark, topics and views of an application put together, from its declaration to running stages.

Everything is checked before the first stage starts, and what is wrong is said in one sentence: `InvalidApp` for the script,
other errors for the world around it. One process at a time runs an application: it holds a lock on the folder `state` (the log's
fencing numbers would keep a second one from doing harm, but not from confusing people).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import msgspec
import pyarrow as pa

from headwater.log.log import Log, open_log
from headwater.model.clock import duration_us
from headwater.model.ddl import to_ddl
from headwater.model.errors import AppRunning, HeadwaterError, InvalidApp, LogNotFound
from headwater.model.schema import widen
from headwater.processing.graph import Graph, StageNode, TopicNode
from headwater.sinks.files import FileSink, is_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater.processing.analysis import Analysed, Analysis, Facts
    from headwater.processing.rebuild import Rebuild
    from headwater.processing.runner import Plan, Runner
    from headwater.processing.runner import Write as WriteBatch
    from headwater.views.catalog import Plan as ViewPlan
    from headwater.views.maintain import Maintainer
    from headwater.views.store import ViewStore

SPARK_LOG = "spark.log"
STATE_PARTITIONS_MAX = 1_000

Restart = Literal["marker", "earliest", "latest"]
"""Where a stage begins whose checkpoint is gone: behind what it wrote last, or at one end of its inputs."""


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
        self._building: dict[str, Maintainer] = {}
        self._store: ViewStore | None = None
        self.notes: list[str] = []
        """What the user should know about this run: why a view is built anew, where a stage begins again."""

    def describe(self) -> dict[str, list[str]]:
        """What `plan` says of each stage, by its name; nothing is made."""
        log: Log | None = None
        with suppress(LogNotFound):
            log = open_log(self._settings.log, create=False, read_only=True)
            self._closing.append(log.close)
        self._graph.check(in_log=log.topics() if log else [])
        analysed = self._analysis(self._session(keep_log=False), log).run()
        return {name: _notes(self._graph.stages[name], found) for name, found in analysed.items()}

    def start(
        self, *, accept: Mapping[str, Restart] | None = None, rebuild: Mapping[str, Rebuild] | None = None
    ) -> Runner:
        """Makes what is missing and returns the stages, ready to run."""
        from headwater.processing.runner import Runner

        self._graph.check_names({**(accept or {}), **(rebuild or {})})
        accept = checked_restarts(accept or {})
        self._take_lock()
        log = open_log(self._settings.log)
        self._closing.append(log.close)
        self._graph.check(in_log=log.topics())
        spark = self._session(keep_log=True)
        self._check_workers(spark)
        for node in self._graph.topics.values():
            make_declared(log, node)
        analysis = self._analysis(spark, log)
        analysed = analysis.run()
        stages = self._graph.order()
        for stage in stages:
            _make_output(log, stage, analysed[stage.name])
        for name, restart in accept.items():
            _check_restart(self._graph.stages[name], analysed[name], restart)
        plans = []
        for stage in stages:
            plans.append(self._plan(log, stage, analysed[stage.name], analysis, accept.get(stage.name)))
        runner = Runner(spark, log, self._graph, plans, state=self._settings.state, idle_us=self._settings.idle_us)
        self._rebuild(runner, plans, rebuild or {})
        return runner

    def look(self, runner: Runner) -> None:
        """To be called while stages run: a view that was built anew replaces the old one once it has caught up."""
        for status in runner.statuses:
            maintainer = self._building.get(status.name)
            if maintainer is not None and status.epoch >= 0 and status.lag == 0:
                maintainer.swap()
                del self._building[status.name]

    def close(self) -> None:
        """Frees everything, Spark too where it was started here."""
        while self._closing:
            self._closing.pop()()

    # Parts

    def _rebuild(self, runner: Runner, plans: Sequence[Plan], wanted: Mapping[str, Rebuild]) -> None:
        from headwater.processing.rebuild import rebuild

        for plan in plans:
            if plan.stage.name in wanted:
                self.notes.append(rebuild(runner, plan, wanted[plan.stage.name], folder=self._settings.state))

    def _take_lock(self) -> None:
        state = self._settings.state
        state.mkdir(parents=True, exist_ok=True)
        lock = open(state / "lock", "a+")  # noqa: SIM115 - held until `close`
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            here = holder == f"process {os.getpid()}"
            raise AppRunning(
                f"Application {self._graph.name!r} is running already ({'in this program' if here else holder}), "
                f"with its state in {state}.",
                advice="Call stop() of the App that was started."
                if here
                else "Stop that one first, or give this one another state=.",
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()}")
        lock.flush()
        self._closing.append(lock.close)

    def _session(self, *, keep_log: bool) -> SparkSession:
        from headwater.processing.session import check_reachable, make_session, stop_session
        from headwater.processing.source import register

        settings = self._settings
        if self._given_spark is not None:
            check_reachable(settings.log, str(self._given_spark.sparkContext.master))
            register(self._given_spark)
            return self._given_spark
        with self._spark_log(keep=keep_log) as said:
            spark = make_session(self._graph.name, settings.master, settings.conf, log=settings.log, said=said)
        if not os.environ.get("HEADWATER_DEBUG"):  # what went wrong is told in the status, in a sentence
            spark.sparkContext.setLogLevel("FATAL")
            logging.getLogger("py4j").setLevel(logging.CRITICAL)
        self._closing.append(lambda: stop_session(spark))
        return spark

    def _check_workers(self, spark: SparkSession) -> None:
        from headwater.processing.workers import check_workers

        sinks = [
            FileSink(stage.to, stage=stage.name).folder for stage in self._graph.stages.values() if is_folder(stage.to)
        ]
        check_workers(spark, [self._settings.state, *sinks])

    @contextmanager
    def _spark_log(self, *, keep: bool) -> Iterator[IO[bytes] | None]:
        """Where the words of Java and of Spark's workers go: to `<state>/spark.log`, begun anew by each run."""
        if os.environ.get("HEADWATER_DEBUG"):
            yield None
            return
        with open(self._settings.state / SPARK_LOG, "w+b") if keep else tempfile.TemporaryFile() as said:
            yield said

    def _analysis(self, spark: SparkSession, log: Log | None) -> Analysis:
        from headwater.processing.analysis import Analysis, Facts

        def facts(topic: str) -> Facts:
            node = self._graph.topics.get(topic)
            is_table = node is not None and node.is_table
            if log is not None and topic in log.topics():
                found = log.topic(topic)
                return Facts(found.schema, found.time, found.lateness_us, is_table)
            writer = self._graph.writer_of(topic)
            if node is None or node.schema is None:
                assert writer is not None
                return Facts(_changes_of(writer, analysis.stages[writer.name]))
            lateness = duration_us(node.settings.get("lateness", "0 seconds"))
            return Facts(node.schema, node.settings.get("time"), lateness, is_table)

        analysis = Analysis(spark, self._graph, facts)
        return analysis

    def _plan(
        self, log: Log, stage: StageNode, analysed: Analysed, analysis: Analysis, restart: Restart | None
    ) -> Plan:
        from headwater.processing.runner import Plan
        from headwater.processing.state_files import StateFolder

        view = self._view_plan(log, stage, analysed) if stage.kind == "view" else None
        generation = 1 if view is None else view.definition.generation
        name = stage.name if generation == 1 else f"{stage.name}.{generation}"
        checkpoint = self._settings.state / "checkpoints" / name
        starts = self._settings.state / "starts" / f"{name}.json"
        elsewhere = self._settings.operators
        operators = f"{checkpoint}/operators" if elsewhere is None else f"{elsewhere}/{name}"
        if restart is not None:
            self._begin_again(log, stage, f"{self._graph.name}.{name}", checkpoint, starts, restart)
            StateFolder(operators).remove_all()
        return Plan(
            stage=stage,
            analysed=analysed,
            facts=analysis.inputs(stage),
            checkpoint=str(checkpoint),
            operators=operators,
            state_partitions=self._settings.state_partitions,
            start=json.loads(starts.read_text()) if starts.exists() else {},
            write=self._writer(log, stage, analysed, checkpoint, view),
        )

    def _view_plan(self, log: Log, stage: StageNode, analysed: Analysed) -> ViewPlan:
        from headwater.views.catalog import plan_view
        from headwater.views.definition import define_view

        definition = define_view(
            stage.name,
            analysed.schema,
            key=stage.key,
            mode=stage.mode,
            order=stage.settings["order"] or (),
            limit=stage.settings["limit"],
            code=stage.function,
        )
        return plan_view(log, definition)

    def _maintainer(self, log: Log, stage: StageNode, plan: ViewPlan) -> Maintainer:
        from headwater.views.maintain import Maintainer
        from headwater.views.store import open_store

        if self._store is None:
            self._store = open_store(self._settings.views)
            self._closing.append(self._store.close)
        maintainer = Maintainer(log, self._store, plan.definition, app=self._graph.name)
        if plan.rebuild:
            note = f"{plan.why} The old one is read until the new one has caught up."
            self.notes += [note] if note not in self.notes else []
            self._building[stage.name] = maintainer
        return maintainer

    def _writer(
        self, log: Log, stage: StageNode, analysed: Analysed, checkpoint: Path, view: ViewPlan | None
    ) -> Callable[[], WriteBatch] | None:
        """What writes the batches of a stage in the driver, made anew for each run of its query.

        A run that ended in an error may have lost its transaction: on Kafka whoever holds a stage cannot go on then, only open it again.
        There each task of a batch writes its own rows by the data source, if the mode allows it. For a log in a folder the data
        source can do the same, but Spark starts new Python processes for it in every batch.
        """
        from headwater.processing.marker import marker_of
        from headwater.processing.reading import is_local
        from headwater.processing.stage import FrameWriter

        name, path = f"{self._graph.name}.{stage.name}", str(checkpoint)
        if view is not None:
            made = [self._maintainer(log, stage, view)]  # here, so that what it refuses is told before anything starts

            def maintaining() -> WriteBatch:
                maintainer = made.pop() if made else self._maintainer(log, stage, view)
                return lambda result, epoch: _done(maintainer.maintain(result.toArrow(), marker_of(path, epoch)))

            return maintaining
        if stage.kind == "sink" and is_folder(stage.to):
            sink = FileSink(stage.to, stage=name)

            def add(result: DataFrame, epoch: int) -> None:
                marker = marker_of(path, epoch)
                staged = sink.begin(marker)
                if staged is not None:
                    result.write.format(sink.format).save(str(staged))
                    sink.commit(marker, staged)

            return lambda: add
        if stage.mode != "append" or is_local(log):

            def appending() -> WriteBatch:
                fetches = not analysed.stateful
                writer = FrameWriter(log.url, stage=name, topic=stage.to, checkpoint=path, fetches=fetches)
                return lambda result, epoch: _done(writer.commit(result, epoch))

            return appending
        return None

    def _begin_again(
        self, log: Log, stage: StageNode, name: str, checkpoint: Path, starts: Path, restart: Restart
    ) -> None:
        """Forgets a stage's checkpoint and its last marker; where it begins instead stands in a file before that."""
        from headwater.processing.offsets import places_of

        sink = FileSink(stage.to, stage=name) if stage.kind == "sink" and is_folder(stage.to) else None
        last = log.stage(name).last if sink is None else sink.last
        own = re.compile(rf"{re.escape(name)}\.\d+")  # on Kafka each task has a stage of its own
        tasks = [each for each in log.stages() if own.fullmatch(each)]
        if restart == "marker" and last is None and tasks:
            raise InvalidApp(
                f"{stage.place} writes to Kafka task by task: which tasks of its last batch had written is not known.",
                advice=f"Put the checkpoint back; or leave out what came since, with --accept-new-checkpoint {stage.name}=latest.",
            )
        if restart == "marker" and last is None:
            raise InvalidApp(
                f"{stage.place} has written nothing yet, so there is no marker to go on from.",
                advice=f"Use --accept-new-checkpoint {stage.name}=earliest, or leave it out.",
            )
        begin = dict.fromkeys(stage.inputs, str(restart))
        if restart == "marker" and last is not None:
            offsets = dict[str, dict[str, int]]()
            for (topic, partition), offset in places_of(last.ends).items():
                offsets.setdefault(topic, {})[str(partition)] = offset
            begin = {topic: json.dumps({topic: offsets[topic]}) for topic in stage.inputs}
        starts.parent.mkdir(parents=True, exist_ok=True)
        partial = starts.with_suffix(".partial")
        partial.write_text(json.dumps(begin))
        partial.replace(starts)
        shutil.rmtree(checkpoint, ignore_errors=True)
        if sink is None:
            for each in (name, *tasks):
                log.stage(each).accept_new_checkpoint()
        else:
            sink.accept_new_checkpoint()
        where = (
            f"behind what it wrote last ({last})" if restart == "marker" else f"at the {restart} events of its inputs"
        )
        self.notes.append(f"{stage.place} begins again {where}.")


def _done(result: object) -> None:
    """Spark wants nothing back from what writes a batch."""


def _check_restart(stage: StageNode, analysed: Analysed, restart: Restart) -> None:
    """The state of a query is in its checkpoint: without it only a replay from the beginning gives the same answers."""
    if analysed.stateful and restart != "earliest":
        raise InvalidApp(
            f"{stage.place} keeps state ({', '.join(analysed.stateful)}), which is gone with its checkpoint.",
            advice=f"Begin from its first events: --accept-new-checkpoint {stage.name}=earliest.",
        )
    if not analysed.stateful and restart == "earliest" and stage.kind != "view":
        raise InvalidApp(
            f"{stage.place} would write everything again that it has written before.",
            advice=f"Go on behind what it wrote last: --accept-new-checkpoint {stage.name}=marker.",
        )


def make_declared(log: Log, node: TopicNode) -> None:
    """A declared topic is made; one that is there must have the columns that were declared."""
    if node.schema is None:
        return
    if node.name not in log.topics():
        log.create_topic(node.name, node.schema, exist_ok=True, **node.settings)
        return
    there = log.topic(node.name).schema
    for field in node.schema:
        found = there.field(field.name) if field.name in there.names else None
        if found is None or found.type != field.type:
            has = f"has no column {field.name}" if found is None else f"has {field.name} {to_ddl(pa.schema([found]))}"
            raise InvalidApp(
                f"{node.where}: topic {node.name!r} was declared with {field.name}, and in the log it {has}.",
                advice="Declare it as it is (`headwater topics show`), or alter the topic.",
            )


def _make_output(log: Log, stage: StageNode, analysed: Analysed) -> None:
    """The topic of a stage's result is made; one that is there takes the new columns, or the stage is refused."""
    if stage.kind == "view" or is_folder(stage.to):
        return
    if stage.to not in log.topics():
        settings = {name: value for name, value in stage.settings.items() if name != "lateness_us"}
        log.create_topic(stage.to, analysed.schema, exist_ok=True, **settings)
        return
    there = log.topic(stage.to)
    if there.key != (stage.key[0] if stage.key else None):
        raise InvalidApp(
            f"{stage.place} writes topic {stage.to!r} with key {stage.key[0] if stage.key else None!r}, and its key is {there.key!r}.",
            advice="A topic's key is for ever; write to another topic.",
        )
    try:
        if widen(there.schema, analysed.schema) != there.schema:
            log.alter_topic(stage.to, schema=analysed.schema)
    except HeadwaterError as error:
        raise InvalidApp(f"{stage.place} does not fit topic {stage.to!r}: {error.what}", advice=error.advice) from None


def _changes_of(stage: StageNode, analysed: Analysed) -> pa.Schema:
    from headwater.views.changes import changes_schema
    from headwater.views.definition import define_view

    return changes_schema(define_view(stage.name, analysed.schema, key=stage.key, mode=stage.mode))


def _notes(stage: StageNode, analysed: Analysed) -> list[str]:
    reads = "; ".join(f"{topic}: {', '.join(columns)}" for topic, columns in analysed.columns.items())
    state = f"keeps state ({', '.join(analysed.stateful)})" if analysed.stateful else "keeps no state"
    return [f"gives {to_ddl(analysed.schema)}", f"reads {reads}", state]


def check_partitions(count: Any) -> int:
    """How many partitions the state of an operator may have; `InvalidApp`."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= STATE_PARTITIONS_MAX:
        raise InvalidApp(
            f"state_partitions={count!r} is no number of partitions.", advice=f"Use 1 to {STATE_PARTITIONS_MAX}."
        )
    return count


def checked_restarts(given: Mapping[str, str]) -> dict[str, Restart]:
    """Where stages are to begin, checked; `InvalidApp`."""
    known: dict[str, Restart] = {"marker": "marker", "earliest": "earliest", "latest": "latest"}
    for name, start in given.items():
        if start not in known:
            raise InvalidApp(f"Stage {name!r} cannot begin from {start!r}.", advice="Use marker, earliest or latest.")
    return {name: known[start] for name, start in given.items()}
