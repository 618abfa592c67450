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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from headwater.log.topic import Topic
from headwater.model.errors import HeadwaterError, InvalidApp
from headwater.model.schema import DELETED, to_arrow_schema
from headwater.processing.beats import NAME
from headwater.processing.beats import SCHEMA as BEATS
from headwater.processing.event_time import MARK
from headwater.processing.graph import CHANGES, Graph, StageNode
from headwater.processing.operator import Building, building
from headwater.processing.table import Table
from headwater.processing.types import to_arrow, to_spark

# What a stateless stage consists of; anything else remembers, compares or reorders events.
_STATELESS = {
    "Project", "Filter", "Generate", "EventTimeWatermark", "Union", "SubqueryAlias", "StreamingRelation", "ResolvedHint",
    "MapInPandas", "MapInArrow", "PythonMapInArrow", "BatchEvalPython", "ArrowEvalPython", "TypedFilter", "View",
}  # fmt: skip
_TIMED = {
    "DeduplicateWithinWatermark",
    "FlatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState",
    "TransformWithState",
    "TransformWithStateInPandas",
}
"""What may ask for the watermark, and drops what is before it."""

LOG_COLUMNS = {
    "_time": pa.field("_time", pa.timestamp("us", tz="UTC")),
    "_appended": pa.field("_appended", pa.timestamp("us", tz="UTC")),
    "_partition": pa.field("_partition", pa.int32()),
    "_offset": pa.field("_offset", pa.int64()),
    "_topic": pa.field("_topic", pa.string()),
}
"""What a stage can have of the log beside its inputs' own columns."""

_RELATION = "StreamingRelation"
_PATH = re.compile(r"FileSource\[(?:file:)?([^\]]+)\]")


class Facts(msgspec.Struct, frozen=True):
    """What a stage's input looks like: its columns, its event time and how late that may be."""

    schema: pa.Schema
    time: str | None = None
    lateness_us: int = 0
    is_table: bool = False


class Analysed(msgspec.Struct, frozen=True):
    """What is known of a stage: the columns of its result, those it needs of each input, what keeps state in it, and which
    operators of ours those are; and whether the result depends on the order of event times, so that late rows are left out."""

    schema: pa.Schema
    columns: Mapping[str, tuple[str, ...]]
    stateful: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    uses_time: bool = False


def facts_of_topic(topic: Topic) -> Facts:
    """The facts of a topic in the log."""
    return Facts(topic.schema, topic.time, topic.lateness_us)


def with_watermark(frame: DataFrame, facts: Facts) -> DataFrame:
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
            advice="Return the DataFrame that its result is to be made of.",
        )
    return result


class Analysis:
    """Calls every function of a graph, in the order in which events flow; `facts` tells of topics that nobody writes."""

    def __init__(self, spark: SparkSession, graph: Graph, facts: Callable[[str], Facts]) -> None:
        self._spark = spark
        self._graph = graph
        self._outside = facts
        self.stages: dict[str, Analysed] = {}

    def run(self) -> dict[str, Analysed]:
        """All stages, analysed."""
        with tempfile.TemporaryDirectory(prefix="headwater-plan-") as folder:
            for stage in self._graph.order():
                self.stages[stage.name] = self._analyse(stage, Path(folder))
        return self.stages

    def facts(self, topic: str) -> Facts:
        """What a topic looks like, whoever writes it."""
        writer = self._graph.writer_of(topic)
        if writer is None or writer.name not in self.stages or topic.endswith(CHANGES):
            return self._outside(topic)
        settings = writer.settings
        time, lateness = settings.get("time"), settings.get("lateness_us", 0)
        return Facts(self.stages[writer.name].schema, time, lateness)

    def inputs(self, stage: StageNode) -> dict[str, Facts]:
        """What the inputs of a stage look like, with the columns of the log that it asks for."""
        for name in stage.log_columns:
            if name not in LOG_COLUMNS:
                raise InvalidApp(
                    f"{stage.place} asks for {name!r}, which is no column of the log.",
                    advice=f"Use some of {', '.join(LOG_COLUMNS)}.",
                )
        more = [LOG_COLUMNS[name] for name in stage.log_columns]
        found = {topic: self.facts(topic) for topic in stage.inputs}
        return {
            topic: msgspec.structs.replace(facts, schema=pa.schema([*facts.schema, *more]))
            for topic, facts in found.items()
        }

    def _analyse(self, stage: StageNode, folder: Path) -> Analysed:
        facts = self.inputs(stage)
        with building(Building("", partitions=1, beats=lambda: self._empty(folder / NAME, BEATS))) as made:
            result = apply(stage, [self._frame(folder, topic, fact) for topic, fact in facts.items()])
        operators = tuple(sorted(made.uids))
        if not result.isStreaming:
            raise InvalidApp(
                f"{stage.place} returned a DataFrame that does not come from its inputs.",
                advice="Make the result of the DataFrames that the function is given.",
            )
        self._check_mode(stage, result)
        schema = _checked_schema(stage, result)
        uses_time = made.uses_time or self._uses_time(result)
        _check_late(stage, uses_time=uses_time, operators=operators)
        if operators:
            everything = {topic: tuple(fact.schema.names) for topic, fact in facts.items()}
            return Analysed(schema, everything, operators, operators, uses_time)
        columns = self._pruned(stage, facts, folder, result)
        stateful = tuple(sorted(set(self._stateful(result))))
        return Analysed(schema, columns, stateful, uses_time=uses_time)

    def _frame(self, folder: Path, topic: str, facts: Facts, columns: Sequence[str] | None = None) -> DataFrame | Table:
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
            checker.checkForStreaming(result._jdf.queryExecution().analyzed(), mode)
        except Exception as error:  # noqa: BLE001 - the bridge to Java has errors of its own, and all of them mean no
            said = str(error).strip().splitlines()[0].rstrip(";")
            raise InvalidApp(
                f"{stage.place} cannot run as a stream in mode {stage.mode!r}: {said}",
                advice="Change the function, or its mode=.",
            ) from None

    def _pruned(
        self, stage: StageNode, facts: Mapping[str, Facts], folder: Path, result: DataFrame
    ) -> dict[str, tuple[str, ...]]:
        """The columns that the stage needs of each input."""
        everything = {topic: tuple(fact.schema.names) for topic, fact in facts.items()}
        if stage.function is None or any(fact.is_table for fact in facts.values()):
            return everything
        needed = {topic: set[str]() for topic in facts}
        plan = self._optimised(result)
        for leaf, used in _leaves(plan, ()):
            found = _PATH.search(leaf)
            topic = Path(found[1]).name if found else ""
            if topic not in needed or used is None:
                return everything
            needed[topic] |= used
        columns = {topic: _kept(facts[topic], names) for topic, names in needed.items()}
        try:
            again = apply(stage, [self._frame(folder, topic, fact, columns[topic]) for topic, fact in facts.items()])
        except InvalidApp:
            return everything
        return columns if again.schema == result.schema else everything

    def _optimised(self, result: DataFrame) -> Any:
        state = self._spark._jsparkSession.sessionState()
        return state.optimizer().execute(result._jdf.queryExecution().analyzed())

    def _stateful(self, result: DataFrame) -> Iterator[str]:
        return (node.nodeName() for node in _nodes(result) if _kind(node) not in _STATELESS)

    def _uses_time(self, result: DataFrame) -> bool:
        """Whether Spark would drop late rows: where it groups by a time, compares rows by one, or joins streams that have one."""
        for node in _nodes(result):
            match _kind(node):
                case "Aggregate" if any(map(_asks_time, _sequence(node.groupingExpressions()))):
                    return True
                case "Deduplicate" if any(map(_asks_time, _sequence(node.keys()))):
                    return True
                case "Join" if all(child.isStreaming() and _has_time(child) for child in _children(node)):
                    return True
                case kind if kind in _TIMED and any(map(_has_time, _children(node))):
                    return True
        return False


def _nodes(result: DataFrame) -> Iterator[Any]:
    """The nodes of a plan."""
    nodes = [result._jdf.queryExecution().analyzed()]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += _children(node)


def _kind(node: Any) -> str:
    return str(node.nodeName().removeprefix("~"))


def _asks_time(expression: Any) -> bool:
    """Whether an expression uses an event time."""
    return any(column.metadata().contains(MARK) for column in _sequence(expression.references().toSeq()))


def _has_time(plan: Any) -> bool:
    """Whether a column that a plan gives is an event time."""
    return any(column.metadata().contains(MARK) for column in _sequence(plan.output()))


def _leaves(node: Any, above: tuple[Any, ...]) -> Iterator[tuple[str, set[str] | None]]:
    """Each input of a plan, and the columns that are used of it; None where that cannot be told."""
    if node.nodeName() == _RELATION:
        yield node.toString(), _used(above)
    for child in _children(node):
        yield from _leaves(child, (*above, node))


def _used(above: Sequence[Any]) -> set[str] | None:
    used = set[str]()
    for node in reversed(above):
        kind = node.nodeName()
        if kind not in ("Project", "Filter", "EventTimeWatermark"):
            return None
        used |= {attribute.name() for attribute in _sequence(node.references().toSeq())}
        if kind == "Project":
            return used
    return None


def _children(node: Any) -> list[Any]:
    return _sequence(node.children())


def _sequence(scala: Any) -> list[Any]:
    return [scala.apply(at) for at in range(scala.size())]


def _kept(facts: Facts, used: set[str]) -> tuple[str, ...]:
    """The used columns in the topic's order; one at least, because rows are to be counted."""
    kept = tuple(name for name in facts.schema.names if name in used or name == facts.time)
    return kept or (facts.schema.names[0],)


def _checked_schema(stage: StageNode, result: DataFrame) -> pa.Schema:
    names = result.columns
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InvalidApp(
            f"{stage.place} returns the column {sorted(twice)[0]!r} twice.", advice="Rename one of them with alias()."
        )
    missing = [name for name in stage.key if name not in names]
    if missing:
        raise InvalidApp(
            f"{stage.place} has lost its key: there is no column {missing[0]!r} in its result.",
            advice=f"Its columns are {', '.join(names)}; keep the key, or name another with key=.",
        )
    try:
        return to_arrow_schema(to_arrow(result.schema))
    except (HeadwaterError, PySparkException) as error:
        said = error.what if isinstance(error, HeadwaterError) else str(error).splitlines()[0]
        raise InvalidApp(
            f"{stage.place} returns columns that the log cannot keep: {said}", advice="Cast them to another type."
        ) from None


def _check_late(stage: StageNode, *, uses_time: bool, operators: Sequence[str]) -> None:
    """Refuses a way with late events that a stage cannot go."""
    if stage.late in ("topic", "correct") and not uses_time:
        raise InvalidApp(
            f"{stage.place} has late={stage.late!r}, but nothing comes too late for it: it has no window, join or operator by event time.",
            advice="Leave late= out, or give its inputs an event time (time=) and group by a window of it.",
        )
    if stage.late == "correct" and (operators or stage.mode != "update"):
        raise InvalidApp(
            f'{stage.place} cannot correct what it gave: late="correct" is for windows in mode "update".',
            advice='Use mode="update", whose later row of a key replaces the earlier one; or late="topic".',
        )


def _line(stage: StageNode, error: BaseException) -> str:
    """The line of the script where an error came from, if it is known."""
    assert stage.function is not None
    file = stage.function.__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f", line {lines[-1]}" if lines else ""


def _described(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
