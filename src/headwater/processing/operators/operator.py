"""Operators: functions from DataFrames to a DataFrame that remember something from batch to batch, in a state of our own.

Rows are sent to the state partition that owns their key, by its hash; there a task loads the state of the batch before, works on Arrow
tables, and saves the state of this one. With them travels a beat for each partition (see `beats`): it names the partition and the batch's
watermarks. Tasks hash keys once more, which is quicker than carrying the hashes; those of several columns, and of types that only Spark
hashes, are carried.

An operator sees the rows of a batch in any cut. Those of one input come in the order of the tasks that gave them, and of each task in
its own: for rows that are read of a topic and go through nothing but columns and conditions, the rows of a partition come in the order of
their offsets (see `in_log_order`). Rows that Spark has shuffled before come in any order, and an operator must put them in one of its own
before that matters.
Event time is in µs; `Time.before` is what had passed before the batch, `Time.until` what has passed with it. Rows at or before `before`
come too late for it.

On a DataFrame that is no stream it runs over everything at once: nothing was before, and all time has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import AtomicType, DoubleType, FloatType, StructType

from headwater.model.clock import NO_TIME
from headwater.model.errors import InvalidInput, Unsupported
from headwater.processing.spark.errors import crossing
from headwater.processing.spark.hashing import hashes_of_values, is_hashable
from headwater.processing.spark.plans import SHUFFLING, STATELESS, children, kind, nodes
from headwater.processing.spark.types import to_arrow, to_spark
from headwater.processing.state.sorted_runs import H1, H2, check_fits, column
from headwater.processing.state.state import (
    State,
    StateStore,
    StateTable,
    TableSpec,
    check_uid,
    fingerprint_of,
    partition_of,
)
from headwater.processing.time.late_rows import LateRows, apart

MAX_TIME = 2**63 - 1
KEPT = "headwater.time"
"""By this key in a column's metadata it is known that an operator gives event times as they were, each when or before it is passed."""

_SIDE, _TOLD = "_side", "_told"
"""Which input a row is of, and which task gave it: the task's number times `_SIDES`, and the input's; below 0 that of a beat, by its
partition. And what a beat tells: the watermarks, as two numbers in a text."""

PARTITIONS = 4
"""So many has the state of an operator over rows that are no stream."""

_SIDES = 16
"""More inputs than an operator has."""

_OURS = "directshufflepartitionid"
"""What Spark calls the exchange before an operator of ours."""

_EPOCH, _QUERY = "streaming.sql.batchId", "sql.streaming.queryId"


class Time(NamedTuple):
    """The watermarks of a batch, in µs."""

    before: int
    until: int


class Operator(Protocol):
    """What an operator does. It is pickled into tasks, and two with the same `settings` and columns are the same.

    One that has `is_prompt = True` gives for each row a few at once: a batch gives about as many rows as it reads. One that has
    `keeps = "at"` gives its rows with that time as it was, and none that was passed before the batch. One that has
    `remembers = ()` keeps these columns of its input in its state, beside what is in its settings, and no whole rows. One that has
    `at = "sent"` works by that time of its first input, and leaves out rows that have none or were passed before the batch.
    """

    name: str
    settings: tuple[Any, ...]
    schema: pa.Schema
    tables: dict[str, TableSpec]

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """What a batch gives. Each table has the columns of its input, and the key's hashes `_h1` and `_h2`."""


class Combining(Operator, Protocol):
    """An operator with one input that can begin with any few of its rows, whatever came before: these become fewer.

    `process` takes both: rows as they are, and what `combine` made of them, which has the columns of `combined` (the key's among them).
    """

    combined: pa.Schema

    def combine(self, rows: pa.Table) -> pa.Table:
        """What is left of some rows; without hashes."""


class Input(NamedTuple):
    """A DataFrame and the columns that are its key."""

    frame: DataFrame
    key: Sequence[str]


class OperatorFusion(Protocol):
    """What puts operators into sources (see `fusion`)."""

    def fuse(
        self, operator: Operator, inputs: Sequence[Input], state: str, uid: str, fingerprint: str
    ) -> DataFrame | None:
        """The operator's result, made by the source of its input; None where it is to be made here."""

    def combine(self, operator: Operator, inputs: Sequence[Input], uid: str) -> Sequence[Input]:
        """The inputs of an operator that is made here, combined in their source where that is possible."""


class OperatorContext:
    """A stage whose function is being called: where its operators keep their state, where beats come from, and what fuses operators."""

    def __init__(
        self,
        state: str,
        *,
        partitions: int,
        beats: Callable[[], DataFrame],
        tasks: int | None = None,
        fusion: OperatorFusion | None = None,
        late_rows: str | None = None,
        late_by_window: bool = False,
    ) -> None:
        """`tasks`: so many work on the state's partitions, each on several where that are fewer. `late_rows` is the folder in which it
        is told how many rows operators left out. `late_by_window`: an event counts as long as its window is open."""
        self.late_rows = late_rows
        self.late_by_window = late_by_window
        self.state = state
        self.partitions = partitions
        self.tasks = tasks or partitions
        self.beats = beats
        self.fusion = fusion
        self.uids: set[str] = set()
        self.uses_time = False
        """Whether one of its operators works by event time, so that late rows are none of its business."""
        self.is_prompt = True
        """Whether all of them are."""
        self.windows: list[int | None] = []
        """For each operator by event time the length of its windows, in µs, where they follow each other by the time of its input."""

    def uid(self, name: str, given: str | None) -> str:
        """A name for an operator's state: the one given, or the operator's and how many of them came before."""
        if given is not None:
            uid = check_uid(given)
            if uid in self.uids:
                raise InvalidInput(f"Two operators have uid={uid!r}.", advice="Give one of them another uid.")
        else:
            uid = next(uid for number in range(1, 10_000) if (uid := f"{name}-{number}") not in self.uids)
        self.uids.add(uid)
        return uid


_building: ContextVar[OperatorContext | None] = ContextVar("building", default=None)


@contextmanager
def operator_context(stage: OperatorContext) -> Iterator[OperatorContext]:
    """Operators that are made inside belong to this stage."""
    token = _building.set(stage)
    try:
        yield stage
    finally:
        _building.reset(token)


def left_out_by(operator: Operator, inputs: Sequence[pa.Table], time: Time) -> int:
    """How many rows of a batch an operator leaves out: none by the event time of its topic, by which late rows never come so far."""
    at = getattr(operator, "at", None)
    if at is None or at not in inputs[0].column_names:
        return 0
    times = inputs[0].column(at).cast(pa.int64()).fill_null(NO_TIME).to_numpy()
    return int(np.count_nonzero(times <= time.before))


def state_partitions() -> int:
    """How many partitions the state of an operator has that is being made."""
    stage = _building.get()
    return stage.partitions if stage is not None else PARTITIONS


def note_time() -> None:
    """An operator that is being made works by event time."""
    stage = _building.get()
    if stage is not None:
        stage.uses_time = True
        stage.windows.append(None)


def note_windows(over_us: int) -> bool:
    """The operator that noted its time has windows of this length by it, one after the other; whether an open one takes late rows."""
    stage = _building.get()
    if stage is None:
        return False
    stage.windows[-1] = over_us
    return stage.late_by_window


def in_log_order(frame: DataFrame) -> bool:
    """Whether rows come in the order in which they were read, or operators of ours gave them: Spark shuffles nothing by itself."""
    for node in nodes(frame):
        if children(node) and kind(node) not in STATELESS:
            return False
        if kind(node) in SHUFFLING and _OURS not in node.toString().splitlines()[0].lower():
            return False
    return True


def operate(operator: Operator, inputs: Sequence[Input], *, uid: str | None = None) -> DataFrame:
    """The operator's result over its inputs."""
    is_stream = any(each.frame.isStreaming for each in inputs)
    stage = _building.get()
    if not is_stream:
        return _spread(operator, inputs, state_partitions())
    if stage is None:
        raise InvalidInput(
            f"hw.{operator.name} keeps a state on a stream, and has no folder for it.",
            advice="Use it in a function of an application (@app.stream or @app.view).",
        )
    known = fingerprint_of(operator.name, operator.settings, [_remembered(operator, each) for each in inputs])
    kept = _Kept(stage.state, stage.uid(operator.name, uid), known, stage.partitions, stage.late_rows)
    stage.is_prompt &= getattr(operator, "is_prompt", False)
    if stage.fusion is not None:
        fused = stage.fusion.fuse(operator, inputs, kept.url, kept.uid, known)
        if fused is not None:
            return fused
        inputs = stage.fusion.combine(operator, inputs, kept.uid)
    return _spread(operator, inputs, stage.partitions, tasks=stage.tasks, kept=kept, beats=stage.beats())


def _remembered(operator: Operator, each: Input) -> list[tuple[str, str]]:
    """The columns of an input that the state depends on, with their types: its key's, and those that are kept in it."""
    names = [*each.key, *getattr(operator, "remembers", each.frame.columns)]
    return [(name, each.frame.schema[name].dataType.simpleString()) for name in dict.fromkeys(names)]


def _spread(
    operator: Operator,
    inputs: Sequence[Input],
    partitions: int,
    *,
    tasks: int | None = None,
    kept: _Kept | None = None,
    beats: DataFrame | None = None,
) -> DataFrame:
    """The operator in tasks that have the state's partitions between them."""
    tasks = tasks or partitions
    carried = not all(_is_hashed_by_tasks(each) for each in inputs)
    rows = _united([_travelling(each, number, carried=carried) for number, each in enumerate(inputs)])
    side = F.col(_SIDE).bitwiseAND(_SIDES - 1)
    owner = F.coalesce(*(F.when(side == at, _h1(each, carried=carried)) for at, each in enumerate(inputs)))
    owner = F.pmod(owner, F.lit(partitions))
    if beats is not None:
        nothing = [F.lit(0).cast("long").alias(name) for name in (H1, H2) if carried]
        told = F.concat_ws(" ", "_before", "_until").alias(_TOLD)
        rows = rows.unionByName(beats.select((-1 - F.col("_p")).alias(_SIDE), told, *nothing), allowMissingColumns=True)
        owner = F.when(F.col(_SIDE) < 0, -1 - F.col(_SIDE)).otherwise(owner)
    task = _task(operator, [_Side.of(each, carried=carried) for each in inputs], kept)
    return rows.repartitionById(tasks, F.pmod(owner, F.lit(tasks)).cast("int")).mapInArrow(task, _result_of(operator))


def _result_of(operator: Operator) -> StructType:
    """The columns of an operator's result."""
    schema = to_spark(operator.schema)
    for field in schema:
        if field.name == getattr(operator, "keeps", None):
            field.metadata = {KEPT: True}
    return schema


class _Side(NamedTuple):
    """An input as tasks get it: the places of its columns among those that travel, and of its key, where they are to hash it."""

    columns: Mapping[str, str]
    key: str | None

    @classmethod
    def of(cls, each: Input, *, carried: bool) -> _Side:
        columns = _places(each.frame.schema)
        return cls(columns, None if carried else columns[each.key[0]])


class _Kept(NamedTuple):
    """Where the state of an operator is kept."""

    url: str
    uid: str
    fingerprint: str
    partitions: int
    late_rows: str | None = None
    """The folder in which it is told how many rows were left out."""


def _is_hashed_by_tasks(each: Input) -> bool:
    key = [field for field in each.frame.schema if field.name in each.key]
    return len(each.key) == len(key) == 1 and is_hashable(to_arrow(StructType(key)).field(0).type)


def _travelling(each: Input, side: int, *, carried: bool) -> DataFrame:
    """The rows as they travel; their own columns have places, so that no name is in the way."""
    columns = [F.col(f"`{name}`").alias(place) for name, place in _places(each.frame.schema).items()]
    hashed = zip((H1, H2), hashes(hashed_parts(each.frame, each.key)), strict=True)
    more = [hash_.alias(name) for name, hash_ in hashed if carried]
    return each.frame.select((F.spark_partition_id() * _SIDES + side).alias(_SIDE), *more, *columns)


def _h1(each: Input, *, carried: bool) -> Column:
    """The first hash of a travelling row."""
    if carried:
        return F.col(H1)
    return hashes(hashed_parts(each.frame, each.key, _places(each.frame.schema)))[0]


def _places(schema: StructType) -> dict[str, str]:
    """A name for each column, by its type and how many of that come before: inputs share the columns that they have alike.

    All inputs of an operator travel as one; each column that only some have is carried by the rows of the others, too.
    """
    found: dict[str, str] = {}
    for field in schema:
        kind = fingerprint_of(field.dataType.json())[:8]
        found[field.name] = f"c{sum(place.endswith(kind) for place in found.values())}_{kind}"
    return found


def hashed_parts(frame: DataFrame, names: Sequence[str], called: Mapping[str, str] | None = None) -> list[Column]:
    """What is hashed of some columns, so that equal values have equal hashes, and null is a value.

    `called` are the names that they have by now, where those are others.
    """
    parts: list[Column] = []
    for name in names:
        if name not in frame.columns:
            raise InvalidInput(
                f"The key column {name!r} does not exist.", advice=f"Columns are {', '.join(frame.columns)}."
            )
        kind = frame.schema[name].dataType
        if not isinstance(kind, AtomicType):  # Spark's hash leaves out nulls inside of them, so different ones are one
            raise InvalidInput(
                f"Column {name!r} is {kind.simpleString()}, which cannot be a key.",
                advice="Use its parts, as columns of their own.",
            )
        value = F.col(f"`{name if called is None else called[name]}`")
        if isinstance(kind, (FloatType, DoubleType)):
            value = value + F.lit(0.0)  # -0.0 is 0.0
        parts += [value.isNull(), value]  # Spark's hash leaves nulls out
    return parts


def hashes(parts: Sequence[Column]) -> tuple[Column, Column]:
    """Two hashes, which together tell keys apart."""
    return F.xxhash64(*parts), F.xxhash64(F.lit(1), *parts)


def _united(frames: Sequence[DataFrame]) -> DataFrame:
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.unionByName(frame, allowMissingColumns=True)
    return whole


def _task(operator: Operator, sides: Sequence[_Side], kept: _Kept | None) -> Any:
    """What a task does with the rows of its partition."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with crossing():
            whole = list(batches)
            table = pa.Table.from_batches(whole) if whole else None
            results = _once(operator, sides, table) if kept is None else _in_batch(operator, sides, table, kept)
            for result in results:
                yield from result.select(operator.schema.names).cast(operator.schema).to_batches(max_chunksize=65_536)

    return run


def _once(operator: Operator, sides: Sequence[_Side], table: pa.Table | None) -> Iterator[pa.Table]:
    if table is None or not table.num_rows:
        return
    state = State({name: StateTable(spec) for name, spec in operator.tables.items()})
    number, task = _sides(table)
    inputs = [_input(table, side, _hashes(table, side), number == at, task) for at, side in enumerate(sides)]
    yield operator.process(state, inputs, Time(NO_TIME, MAX_TIME))


def _in_batch(operator: Operator, sides: Sequence[_Side], table: pa.Table | None, kept: _Kept) -> Iterator[pa.Table]:
    """What each partition of a task gives, one after the other; a beat says which there are."""
    if table is None:
        raise _misplaced(kept.uid, "a task has got no rows at all")
    number, task = _sides(table)
    beats = table.select([_SIDE, _TOLD]).filter(pa.array(number < 0)).to_pylist()
    times = {-1 - beat[_SIDE]: Time(*map(int, beat[_TOLD].split())) for beat in beats}
    if len(times) < len(beats):
        raise _misplaced(kept.uid, "a state partition has two beats in one batch")
    hashed = [_hashes(table, side) for side in sides]
    owner = np.full(len(number), -1)
    for at, (h1, _) in enumerate(hashed):
        owner = np.where(number == at, partition_of(h1, kept.partitions), owner)
    if not bool(np.isin(owner, [-1, *times]).all()):
        raise _misplaced(kept.uid, "rows are in a task where their key does not belong")
    for partition, time in times.items():
        inputs = [
            _input(table, side, hashed[at], (owner == partition) & (number == at), task)
            for at, side in enumerate(sides)
        ]
        yield _in_partition(operator, inputs, kept, partition, time)


def _misplaced(uid: str, what: str) -> Unsupported:
    """The error for rows that are not where they were sent: an operator would work with the wrong state, so nothing is done."""
    return Unsupported(
        f"Spark changed the partitions of operator {uid!r}: {what}.",
        advice="Run the Spark version that Headwater is made for, and leave its settings spark.sql.adaptive.… as they are.",
    )


def _in_partition(operator: Operator, inputs: Sequence[pa.Table], kept: _Kept, partition: int, time: Time) -> pa.Table:
    check_fits(inputs)
    context = TaskContext.get()
    assert context is not None
    epoch, query = int(context.getLocalProperty(_EPOCH) or 0), context.getLocalProperty(_QUERY) or ""
    store = StateStore(
        kept.url, uid=kept.uid, query=query, fingerprint=kept.fingerprint, partition=partition,
        partitions=kept.partitions, specs=operator.tables,
    )  # fmt: skip
    state = store.load(epoch - 1)
    result = operator.process(state, inputs, time)
    if kept.late_rows is not None and (left_out := left_out_by(operator, inputs, time)):
        LateRows(kept.late_rows).tell((apart(kept.uid), partition), epoch, epoch + 1, left_out)
    store.save(state, epoch, watermark=time.until if time.until > NO_TIME else None)
    return result


def _sides(table: pa.Table) -> tuple[Any, Any]:
    """For each row which input it is of, below 0 for beats; and which task gave it."""
    told = column(table, _SIDE)
    return np.where(told < 0, told, told % _SIDES), told // _SIDES


def _hashes(table: pa.Table, side: _Side) -> tuple[Any, Any]:
    """The hashes of the keys of an input; those of other rows say nothing."""
    if side.key is None:
        return column(table, H1), column(table, H2)
    return hashes_of_values(table.column(side.key))


def _input(table: pa.Table, side: _Side, hashed: tuple[Any, Any], is_mine: Any, task: Any) -> pa.Table:
    """Some rows of one input, with its own columns and the key's hashes, in the order of the tasks that gave them."""
    own = {name: table.column(place) for name, place in side.columns.items()}
    rows = pa.table({**own, H1: pa.array(hashed[0]), H2: pa.array(hashed[1])})
    if not bool(is_mine.all()):
        rows, task = rows.filter(pa.array(is_mine)), task[is_mine]
    return rows if bool((task[1:] >= task[:-1]).all()) else rows.take(pa.array(np.argsort(task, kind="stable")))
