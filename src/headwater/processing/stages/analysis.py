"""The analysis of an application's stages by Spark, before anything runs.

Each function is called once with empty streaming DataFrames of the right schemas. That shows what it returns (its schema becomes
that of the topic or view it writes), whether Spark can run it as a stream in the output mode asked for, whether it keeps state,
and which columns of its inputs it really uses. Nothing is read or written.

Columns are pruned by looking at the optimised plan, and only if the function gives the same result for fewer columns: a function
may name a column whose value Spark then finds to be unused.
"""

from __future__ import annotations

import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from headwater.log.port.topic import Topic
from headwater.log.topics import PARTITIONS
from headwater.model.clock import duration_us
from headwater.model.errors import HeadwaterError, InvalidApp
from headwater.model.schema import DELETED, to_arrow_schema
from headwater.processing.graph.graph import CHANGES, Graph, StageNode
from headwater.processing.graph.table import Table
from headwater.processing.operators.beats import NAME, SOURCES_MAX
from headwater.processing.operators.beats import SCHEMA as BEATS
from headwater.processing.operators.operator import OperatorContext, operator_context
from headwater.processing.sink.batch_order import Order, order_of
from headwater.processing.source.pushdown import condition_above
from headwater.processing.spark.plans import (
    analyzed,
    children,
    keeps_state,
    kind,
    may_shuffle,
    nodes,
    remembering,
    sequence,
)
from headwater.processing.spark.types import to_arrow, to_spark
from headwater.processing.stages.fusion import Fusion, Origin, placed_by
from headwater.processing.stages.plan_times import TIMED, Times, floor_of, times_of, uses_time_of

LOG_COLUMNS = {
    "_time": pa.field("_time", pa.timestamp("us", tz="UTC")),
    "_appended": pa.field("_appended", pa.timestamp("us", tz="UTC")),
    "_partition": pa.field("_partition", pa.int32()),
    "_offset": pa.field("_offset", pa.int64()),
    "_topic": pa.field("_topic", pa.string()),
    DELETED.name: DELETED,
}
"""What a stage can have of the log beside its inputs' own columns."""

_RELATION = "StreamingRelation"
_PATH = re.compile(r"FileSource\[(?:file:)?([^\]]+)\]")


class TopicFacts(msgspec.Struct, frozen=True):
    """What a stage's input looks like: its columns, its event time and how late that may be, and how it is partitioned."""

    schema: pa.Schema
    time: str | None = None
    lateness_us: int = 0
    is_table: bool = False
    placed_by: str | None = None
    """The column by which the log places its events, where that is certain (see `fusion`)."""
    schema_version: int | None = None
    """That of the schema in the log, where it is there."""
    roots: int = PARTITIONS
    """How many partitions it is, or will be, created with."""


class StageAnalysis(msgspec.Struct, frozen=True):
    """What is known of a stage: the columns of its result, those it needs of each input, what keeps state in it, and which
    operators of ours those are; and whether the result depends on the order of event times, so that late rows are left out."""

    schema: pa.Schema
    columns: Mapping[str, tuple[str, ...]]
    stateful: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    uses_time: bool = False
    fused: Mapping[str, tuple[str, ...]] = {}
    """Of the operators those that can run inside a source, with the topics it reads."""
    combined: Mapping[str, str] = {}
    """Of the others those whose rows can become fewer where they are read, with the topic."""
    apart: Mapping[str, str] = {}
    """Of the operators those that cannot, with the reason."""
    is_prompt: bool = False
    """Whether all state is that of operators which give for each row a few at once."""
    is_shuffled: bool = False
    """Whether Spark may send rows to other tasks than those that read them."""
    floor: int | None = None
    """The time, in µs, at and before which Spark would drop rows in silence, so that they count as late (see `plan_times.floor_of`)."""
    window_us: int | None = None
    """How long the windows are in which an open one takes late events."""
    times: Times | None = None
    """What is known of the event times of its result (see `idle_partitions`)."""
    versions: Mapping[str, int | None] = {}
    """Of inputs that are in the log, the schema that `columns` are of."""
    filters: Mapping[str, str] = {}
    """Of inputs whose rows are looked at before anything else, what is asked of them (see `pushdown`)."""

    @property
    def is_simple(self) -> bool:
        """Whether each row of the result is made of one row, whatever came before that, and whenever."""
        return not (self.stateful or self.uses_time)

    @property
    def order(self) -> Order:
        """The order in which the rows of a batch are appended to the topic of its result."""
        return order_of(self.stateful, has_operators=bool(self.operators), is_shuffled=self.is_shuffled)


def facts_of_topic(topic: Topic) -> TopicFacts:
    """The facts of a topic in the log."""
    placed, roots = placed_by(topic.schema, topic.key), topic.partitions_first
    return TopicFacts(topic.schema, topic.time, topic.lateness_us, placed_by=placed, roots=roots)


def with_watermark(frame: DataFrame, facts: TopicFacts) -> DataFrame:
    """The frame with its event time declared, so that Spark knows what may still come."""
    if facts.time is None or facts.time not in frame.columns:
        return frame
    return frame.withWatermark(facts.time, f"{facts.lateness_us} microseconds")


def apply(stage: StageNode, frames: Sequence[DataFrame | Table]) -> DataFrame:
    """The result of a stage's function; what it raises is told with the line of the script."""
    if stage.function is None:
        (frame,) = frames
        assert isinstance(frame, DataFrame)
        return frame
    try:
        result = stage.function(*frames)
    except HeadwaterError as error:
        raise InvalidApp(f"{stage.place}{_line(stage, error)}: {error.what}", advice=error.advice) from error
    except PySparkException as error:
        said = str(error).strip().splitlines()[0]
        raise InvalidApp(
            f"{stage.place}{_line(stage, error)}: Spark refuses: {said}", advice="Correct the function."
        ) from error
    except Exception as error:
        raise InvalidApp(
            f"{stage.place}{_line(stage, error)} raised {type(error).__name__}: {error}", advice="Correct the function."
        ) from error
    if not isinstance(result, DataFrame):
        raise InvalidApp(
            f"{stage.place} returned {_described(result)}, not a DataFrame.",
            advice="Return the DataFrame that has its result.",
        )
    return result


class Analysis:
    """Calls every function of a graph, in the order in which events flow; `facts` tells of topics that nobody writes."""

    def __init__(
        self, spark: SparkSession, graph: Graph, facts: Callable[[str], TopicFacts], *, is_placed_by_key: bool = True
    ) -> None:
        """`is_placed_by_key`: whether the log places every event by its key; elsewhere others may put it anywhere."""
        self._spark = spark
        self._graph = graph
        self._outside = facts
        self._is_placed_by_key = is_placed_by_key
        self.stages: dict[str, StageAnalysis] = {}

    def run(self) -> dict[str, StageAnalysis]:
        """All stages, analysed."""
        with tempfile.TemporaryDirectory(prefix="headwater-plan-") as folder:
            for stage in self._graph.order():
                self.stages[stage.name] = self._analyse(stage, Path(folder))
        for stage in self._graph.order():
            self.stages[stage.name] = self._with_floor(stage, self.stages[stage.name])
        return self.stages

    def run_one(self, stage: StageNode) -> StageAnalysis:
        """A stage, whose inputs are there, analysed."""
        with tempfile.TemporaryDirectory(prefix="headwater-plan-") as folder:
            return self._with_floor(stage, self._analyse(stage, Path(folder)))

    def _with_floor(self, stage: StageNode, found: StageAnalysis) -> StageAnalysis:
        """Late events are kept by the rule of the stage that they come too late for."""
        of = self.stages.get(stage.late_of)
        return found if of is None else msgspec.structs.replace(found, floor=of.floor)

    def facts(self, topic: str) -> TopicFacts:
        """What a topic looks like, whoever writes it."""
        writer = self._graph.writer_of(topic)
        if writer is None or writer.name not in self.stages or topic.endswith(CHANGES):
            return self._outside(topic)
        settings = writer.settings
        time, lateness = settings.get("time"), duration_us(settings.get("lateness", "0 seconds"))
        schema, key = self.stages[writer.name].schema, writer.key[0] if writer.key else None
        roots = settings.get("partitions", PARTITIONS)
        return TopicFacts(schema, time, lateness, placed_by=placed_by(schema, key), roots=roots)

    def inputs(self, stage: StageNode) -> dict[str, TopicFacts]:
        """What the inputs of a stage look like, with the columns of the log that it asks for."""
        for name in stage.log_columns:
            if name not in LOG_COLUMNS:
                raise InvalidApp(
                    f"{stage.place} requests {name!r}, which is not a column of the log.",
                    advice=f"Use some of {', '.join(LOG_COLUMNS)}.",
                )
        more = [LOG_COLUMNS[name] for name in stage.log_columns]
        found = {topic: self.facts(topic) for topic in stage.inputs}
        if (
            stage.kind == "sink"
        ):  # it takes rows as they come, deletions too, and has no function that would get a table
            found = {topic: msgspec.structs.replace(facts, is_table=False) for topic, facts in found.items()}
        return {
            topic: msgspec.structs.replace(facts, schema=pa.schema([*facts.schema, *more]))
            for topic, facts in found.items()
        }

    def _analyse(self, stage: StageNode, folder: Path) -> StageAnalysis:
        facts = self.inputs(stage)
        if stage.capture is not None:  # its tables are written one beside the other, each with its own columns
            return StageAnalysis(pa.schema([]), {topic: tuple(fact.schema.names) for topic, fact in facts.items()})
        frames = {topic: self._frame(folder, topic, fact) for topic, fact in facts.items()}
        fusion = Fusion(
            Origin.of(topic, frame, placed_by=facts[topic].placed_by, roots=facts[topic].roots)
            for topic, frame in frames.items()
            if self._is_placed_by_key
        )
        with self._building(folder, fusion) as made:
            result = apply(stage, list(frames.values()))
        operators = tuple(sorted(made.uids))
        if not result.isStreaming:
            raise InvalidApp(
                f"{stage.place} returned a DataFrame that does not come from its inputs.",
                advice="Derive the result from the DataFrames that are the function's arguments.",
            )
        self._check_mode(stage, result)
        schema = _checked_schema(stage, result.drop(*stage.log_columns) if stage.kind == "sink" else result)
        uses_time = made.uses_time or uses_time_of(result)
        windows = set[int | None]() if uses_time_of(result) else set(made.windows)
        _check_late(stage, uses_time=uses_time, operators=operators, windows=windows)
        stateful = operators or tuple(sorted({kind(node) for node in remembering(result)}))
        found = StageAnalysis(
            schema, {}, stateful, operators, uses_time, floor=floor_of(result), times=times_of(stage, result),
            window_us=windows.pop() if stage.late == "window" else None, is_shuffled=any(map(may_shuffle, nodes(result))),
        )  # fmt: skip
        columns, filters = self._pruned(stage, facts, folder, result, is_simple=found.is_simple)
        if operators:
            apart = self._apart(fusion, found, result, inputs=len(facts))
            fused = {uid: topics for uid, topics in fusion.found.items() if uid not in apart}
            often = Counter(_topics(result))
            combined = {uid: topic for uid, topic in fusion.combined.items() if uid in apart and often[topic] == 1}
            timed = {topic for topic, fact in facts.items() if fact.time is not None}
            passes = uses_time or _has_own_watermark(result, timed)
            _check_operated(stage, result, is_paced=len(fused) < len(operators), passes=passes)
            is_prompt = made.is_prompt and not any(remembering(result))
            return msgspec.structs.replace(
                found, columns=columns, fused=fused, combined=combined, apart=apart, is_prompt=is_prompt
            )
        versions = {topic: fact.schema_version for topic, fact in facts.items()}
        return msgspec.structs.replace(found, columns=columns, versions=versions, filters=filters)

    def _apart(self, fusion: Fusion, found: StageAnalysis, result: DataFrame, *, inputs: int) -> dict[str, str]:
        """The operators that cannot run inside a source, by themselves or for the sake of the whole stage, with the reason."""
        if not self._is_placed_by_key:
            return dict.fromkeys(found.operators, "the log is not a folder")
        apart, often = dict(fusion.apart), Counter(_topics(result))
        for uid, topics in fusion.found.items():
            for topic in (topic for topic in topics if often[topic] != 1):
                apart[uid] = f"the stage reads {topic} {often[topic]} times"
            if found.uses_time and inputs > len(topics):
                apart.setdefault(uid, f"the stage works by event time over {inputs} inputs")
        return apart

    def _building(self, folder: Path, fusion: Fusion | None = None) -> AbstractContextManager[OperatorContext]:
        return operator_context(
            OperatorContext("", partitions=1, beats=lambda: self._empty(folder / NAME, BEATS), fusion=fusion)
        )

    def _frame(
        self, folder: Path, topic: str, facts: TopicFacts, columns: Sequence[str] | None = None
    ) -> DataFrame | Table:
        """An empty stream that looks like the topic."""
        kept = facts.schema if columns is None else pa.schema([facts.schema.field(name) for name in columns])
        if facts.is_table:
            kept = kept.append(DELETED)
        frame = with_watermark(self._empty(folder / topic, kept), facts)
        return Table(topic, frame) if facts.is_table else frame

    def _empty(self, folder: Path, schema: pa.Schema) -> DataFrame:
        folder.mkdir(exist_ok=True)
        return self._spark.readStream.schema(to_spark(schema)).json(str(folder))

    def _check_mode(self, stage: StageNode, result: DataFrame) -> None:
        jvm = self._spark._jvm
        assert jvm is not None
        mode = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, stage.mode.capitalize())()
        checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
        try:
            checker.checkForStreaming(analyzed(result), mode)
        except Exception as error:  # noqa: BLE001 - the bridge to Java has errors of its own, and all of them mean no
            said = str(error).strip().splitlines()[0].rstrip(";")
            raise InvalidApp(
                f"{stage.place} cannot run as a stream in mode {stage.mode!r}: {said}",
                advice="Change the function, or its mode=.",
            ) from None

    def _pruned(
        self, stage: StageNode, facts: Mapping[str, TopicFacts], folder: Path, result: DataFrame, *, is_simple: bool
    ) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
        """The columns that the stage needs of each input, and what it asks of their rows before anything else.

        The times of rows are needed where rows are compared; where some are late, these are counted before anything else.
        """
        everything = {topic: tuple(fact.schema.names) for topic, fact in facts.items()}
        if stage.function is None or any(fact.is_table for fact in facts.values()):
            return everything, {}
        needed = {topic: set[str]() for topic in facts}
        leaves = [(_topic(node.toString()), above) for node, above in _leaves(self._optimised(result), ())]
        filters = _filters(leaves) if is_simple else {}
        for topic, above in leaves:
            if topic == NAME:
                continue
            used = _used(above, with_time=not is_simple)
            if topic not in needed or used is None:
                return everything, filters
            needed[topic] |= used
        columns = {topic: _kept(facts[topic], names, with_time=not is_simple) for topic, names in needed.items()}
        try:
            with self._building(folder):
                frames = [self._frame(folder, topic, fact, columns[topic]) for topic, fact in facts.items()]
                again = apply(stage, frames)
        except InvalidApp:
            return everything, filters
        return columns if again.schema == result.schema else everything, filters

    def _optimised(self, result: DataFrame) -> Any:
        state = self._spark._jsparkSession.sessionState()
        return state.optimizer().execute(analyzed(result))


def _leaves(node: Any, above: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each input of a plan, with the nodes above it, the nearest last."""
    if node.nodeName() == _RELATION:
        yield node, above
    for child in children(node):
        yield from _leaves(child, (*above, node))


def _filters(leaves: Sequence[tuple[str, Sequence[Any]]]) -> dict[str, str]:
    """What is asked of the rows of inputs that are used once; who uses one twice may ask something else the second time."""
    often = Counter(topic for topic, _ in leaves)
    found = {topic: condition_above(above) for topic, above in leaves if often[topic] == 1}
    return {topic: condition for topic, condition in found.items() if condition is not None}


def _topics(result: DataFrame) -> Iterator[str]:
    """The inputs in a plan, each as often as it is there."""
    return map(_topic, _relations(analyzed(result)))


def _topic(leaf: str) -> str:
    found = _PATH.search(leaf)
    return Path(found[1]).name if found else ""


def _used(above: Sequence[Any], *, with_time: bool) -> set[str] | None:
    """The columns that are used of an input; None where that cannot be told."""
    used = set[str]()
    for node in reversed(above):
        if kind(node) not in ("Project", "Filter", "EventTimeWatermark"):
            return None
        if with_time or kind(node) != "EventTimeWatermark":
            used |= {attribute.name() for attribute in sequence(node.references().toSeq())}
        if kind(node) == "Project":
            return used
    return None


def _kept(facts: TopicFacts, used: set[str], *, with_time: bool) -> tuple[str, ...]:
    """The used columns in the topic's order; one at least, because rows are to be counted."""
    kept = tuple(name for name in facts.schema.names if name in used or (with_time and name == facts.time))
    return kept or (facts.schema.names[0],)


def _checked_schema(stage: StageNode, result: DataFrame) -> pa.Schema:
    names = result.columns
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InvalidApp(
            f"{stage.place} returns the column {sorted(twice)[0]!r} twice.", advice="Rename one of them with alias()."
        )
    missing = [] if stage.log_columns and stage.kind == "sink" else [name for name in stage.key if name not in names]
    if missing:
        raise InvalidApp(
            f"{stage.place} has lost its key: its result has no column {missing[0]!r} in its result.",
            advice=f"Its columns are {', '.join(names)}; keep the key, or name another with key=.",
        )
    kept = to_arrow(result.schema)
    if stage.kind == "view":  # rows with it remove their key, so it is no column of the view
        kept = pa.schema([field for field in kept if field.name != DELETED.name])
    try:
        return to_arrow_schema(kept)
    except (HeadwaterError, PySparkException) as error:
        said = error.what if isinstance(error, HeadwaterError) else str(error).splitlines()[0]
        raise InvalidApp(
            f"{stage.place} returns columns that the log cannot keep: {said}", advice="Cast them to another type."
        ) from None


def _check_late(
    stage: StageNode, *, uses_time: bool, operators: Sequence[str], windows: Collection[int | None]
) -> None:
    """Refuses a way with late events that a stage cannot go. `windows` are the lengths of those that may take late events."""
    if stage.late == "window" and (len(windows) != 1 or None in windows):
        raise InvalidApp(
            f'{stage.place} cannot count late events by their windows: late="window" is for hw.windowed with over= alone.',
            advice="Let hw.windowed be the only operator by event time in the stage, with over= and without every=, by the time that the "
            'topic declares; or leave late= out, or use late="topic".',
        )
    if stage.late in ("topic", "correct") and not uses_time:
        raise InvalidApp(
            f"{stage.place} has late={stage.late!r}, but no event can be too late for it: "
            "it has no window, join or operator by event time.",
            advice="Leave late= out, or give its inputs an event time (time=) and group by a window of it.",
        )
    if stage.late == "correct" and (operators or stage.mode != "update"):
        raise InvalidApp(
            f'{stage.place} cannot correct what it gave: late="correct" is for windows in mode "update".',
            advice='Use mode="update", whose later row of a key replaces the earlier one; or late="topic".',
        )


def _check_operated(stage: StageNode, result: DataFrame, *, is_paced: bool, passes: bool) -> None:
    """Refuses what operators of ours cannot stand in: behind more inputs than Spark asks in order, or with state of Spark's own.

    Where event time `passes`, Spark runs batches in which no source has anything, and beats are a source; and what its windows and joins
    give when the watermark has passed is, for an operator in the same batch, late.
    """
    inputs = set(_topics(result)) - {NAME}
    if is_paced and len(inputs) >= SOURCES_MAX:
        raise InvalidApp(
            f"{stage.place} has an operator of Headwater over {len(inputs)} inputs; {SOURCES_MAX - 1} are allowed.",
            advice="Merge some of them into one topic in an earlier stage.",
        )
    for node in remembering(result):
        if NAME in map(_topic, _relations(node)):
            raise InvalidApp(
                f"{stage.place} has Spark's {kind(node)} after an operator of Headwater that does not preserve event time.",
                advice="Write the operator's result to a topic (@app.stream(…, time=…)), and read that topic in another stage.",
            )
        if keeps_state(node) and (passes or kind(node) in TIMED):
            raise InvalidApp(
                f"{stage.place} has Spark's {kind(node)} and an operator of Headwater, and works by event time: what Spark gives when the "
                "watermark has passed would be late for the operator.",
                advice=f"Write what the {kind(node)} gives to a topic (@app.stream(…, time=…)), and use the operator "
                "in another stage that reads it.",
            )


def _has_own_watermark(result: DataFrame, timed: set[str]) -> bool:
    """Whether a function calls `withWatermark` itself, beside the one that each of its inputs with a time has here."""
    given = sum(topic in timed for topic in _topics(result))
    return sum(kind(node) == "EventTimeWatermark" for node in nodes(result)) > given


def _relations(node: Any) -> Iterator[str]:
    """The inputs below a node of a plan."""
    if node.nodeName() == _RELATION:
        yield node.toString()
    for child in children(node):
        yield from _relations(child)


def _line(stage: StageNode, error: BaseException) -> str:
    """The line of the script where an error came from, if it is known."""
    assert stage.function is not None
    file = stage.function.__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f", line {lines[-1]}" if lines else ""


def _described(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
