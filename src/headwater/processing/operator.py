"""Operators: functions from DataFrames to a DataFrame that remember something from batch to batch, in a state of our own.

Rows are hashed by their key in Spark's JVM and sent to the state partition that owns the key; there a task loads the state of the batch
before, works on Arrow tables, and saves the state of this one. With them travels a beat for each partition (see `beats`): it names the
partition and the batch's watermarks.

An operator sees the rows of a batch in any order and in any cut, so it must put them in an order of its own before that matters.
Event time is in µs; `Time.before` is what had passed before the batch, `Time.until` what has passed with it. Rows at or before `before`
come too late for it.

On a DataFrame that is no stream it runs over everything at once: nothing was before, and all time has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import AtomicType, DoubleType, FloatType, StructType

from headwater.log.frame import NO_TIME
from headwater.model.errors import InvalidInput
from headwater.processing.border import crossing
from headwater.processing.runs import H1, H2, column
from headwater.processing.state import State, StateStore, TableSpec, check_uid, fingerprint_of
from headwater.processing.types import to_arrow, to_spark

MAX_TIME = 2**63 - 1
_P, _SIDE, _BEFORE, _UNTIL = "_p", "_side", "_before", "_until"
_EPOCH, _QUERY = "streaming.sql.batchId", "sql.streaming.queryId"


class Time(NamedTuple):
    """The watermarks of a batch, in µs."""

    before: int
    until: int


class Operator(Protocol):
    """What an operator does. It is pickled into tasks, and two with the same `settings` and columns are the same."""

    name: str
    settings: tuple[Any, ...]
    schema: pa.Schema
    tables: dict[str, TableSpec]

    def process(self, state: State, inputs: Sequence[pa.Table], time: Time) -> pa.Table:
        """What a batch gives. Each table has the columns of its input, and the key's hashes `_h1` and `_h2`."""


class Input(NamedTuple):
    """A DataFrame and the columns that are its key."""

    frame: DataFrame
    key: Sequence[str]


class Building:
    """A stage whose function is being called: where its operators keep their state, and where beats come from."""

    def __init__(self, state: str, *, partitions: int, beats: Callable[[], DataFrame]) -> None:
        self.state = state
        self.partitions = partitions
        self.beats = beats
        self.uids: set[str] = set()
        self.uses_time = False
        """Whether one of its operators works by event time, so that late rows are none of its business."""

    def uid(self, name: str, given: str | None) -> str:
        """A name for an operator's state: the one given, or the operator's and how many of them came before."""
        if given is not None:
            uid = check_uid(given)
            if uid in self.uids:
                raise InvalidInput(f"Two operators have uid={uid!r}.", advice="Give each another one.")
        else:
            uid = next(uid for number in range(1, 10_000) if (uid := f"{name}-{number}") not in self.uids)
        self.uids.add(uid)
        return uid


_building: ContextVar[Building | None] = ContextVar("building", default=None)


@contextmanager
def building(stage: Building) -> Iterator[Building]:
    """Operators that are made inside belong to this stage."""
    token = _building.set(stage)
    try:
        yield stage
    finally:
        _building.reset(token)


def note_time() -> None:
    """An operator that is being made works by event time."""
    stage = _building.get()
    if stage is not None:
        stage.uses_time = True


def operate(operator: Operator, inputs: Sequence[Input], *, uid: str | None = None) -> DataFrame:
    """The operator's result over its inputs."""
    schemas = [each.frame.schema for each in inputs]
    is_stream = any(each.frame.isStreaming for each in inputs)
    stage = _building.get()
    if is_stream and stage is None:
        raise InvalidInput(
            f"hw.{operator.name} keeps a state on a stream, and does not know where.",
            advice="Use it in a function of an application (@app.stream or @app.view).",
        )
    partitions = stage.partitions if stage is not None else 4
    rows = _united([_hashed(each, number, partitions) for number, each in enumerate(inputs)])
    if not is_stream:
        task = _task(operator, schemas, None)
        return rows.repartitionById(partitions, F.col(_P)).mapInArrow(task, to_spark(operator.schema))
    assert stage is not None
    known = fingerprint_of(operator.name, operator.settings, [schema.json() for schema in schemas])
    kept = _Kept(stage.state, stage.uid(operator.name, uid), known, partitions)
    rows = rows.unionByName(stage.beats(), allowMissingColumns=True)
    return rows.repartitionById(partitions, F.col(_P)).mapInArrow(
        _task(operator, schemas, kept), to_spark(operator.schema)
    )


class _Kept(NamedTuple):
    """Where the state of an operator is kept."""

    url: str
    uid: str
    fingerprint: str
    partitions: int


def _hashed(each: Input, side: int, partitions: int) -> DataFrame:
    """The rows with the hashes of their key; their own columns have numbers, so that no name is in the way."""
    h1, h2 = hashes(hashed_parts(each.frame, each.key))
    columns = [F.col(f"`{name}`").alias(f"c{side}_{number}") for number, name in enumerate(each.frame.columns)]
    return each.frame.select(F.lit(side).alias(_SIDE), h1.alias(H1), h2.alias(H2), *columns).withColumn(
        _P, F.pmod(F.col(H1), F.lit(partitions)).cast("int")
    )


def hashed_parts(frame: DataFrame, names: Sequence[str]) -> list[Column]:
    """What is hashed of some columns, so that equal values have equal hashes, and null is a value."""
    parts: list[Column] = []
    for name in names:
        if name not in frame.columns:
            raise InvalidInput(
                f"There is no column {name!r} to be a key.", advice=f"Columns are {', '.join(frame.columns)}."
            )
        kind = frame.schema[name].dataType
        if not isinstance(kind, AtomicType):  # Spark's hash leaves out nulls inside of them, so different ones are one
            raise InvalidInput(
                f"Column {name!r} is {kind.simpleString()}, which is no key.",
                advice="Use its parts, as columns of their own.",
            )
        value = F.col(f"`{name}`")
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


def _task(operator: Operator, schemas: Sequence[StructType], kept: _Kept | None) -> Any:
    """What a task does with the rows of its partition."""
    arrow = [to_arrow(schema) for schema in schemas]

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with crossing():
            whole = list(batches)
            table = pa.Table.from_batches(whole) if whole else None
            result = _once(operator, arrow, table) if kept is None else _in_batch(operator, arrow, table, kept)
            if result is not None:
                yield from result.select(operator.schema.names).cast(operator.schema).to_batches(max_chunksize=65_536)

    return run


def _once(operator: Operator, schemas: Sequence[pa.Schema], table: pa.Table | None) -> pa.Table | None:
    if table is None or not table.num_rows:
        return None
    from headwater.processing.state import StateTable

    state = State({name: StateTable(spec) for name, spec in operator.tables.items()})
    return operator.process(state, _inputs(table, schemas), Time(NO_TIME, MAX_TIME))


def _in_batch(operator: Operator, schemas: Sequence[pa.Schema], table: pa.Table | None, kept: _Kept) -> pa.Table | None:
    assert table is not None, "every partition has a beat"
    beats = table.filter(table.column(_UNTIL).is_valid())
    assert beats.num_rows == 1, "one beat for a partition and a batch"
    partition, before, until = (beats.column(name)[0].as_py() for name in (_P, _BEFORE, _UNTIL))
    rows = table.filter(table.column(_UNTIL).is_null())
    assert bool(np.all(column(rows, _P) == partition)), "rows are where their key belongs"
    context = TaskContext.get()
    assert context is not None
    epoch, query = int(context.getLocalProperty(_EPOCH) or 0), context.getLocalProperty(_QUERY) or ""
    store = StateStore(
        kept.url, uid=kept.uid, query=query, fingerprint=kept.fingerprint, partition=partition,
        partitions=kept.partitions, specs=operator.tables,
    )  # fmt: skip
    state = store.load(epoch - 1)
    result = operator.process(state, _inputs(rows, schemas), Time(before, until))
    store.save(state, epoch, watermark=until if until > NO_TIME else None)
    return result


def _inputs(table: pa.Table, schemas: Sequence[pa.Schema]) -> list[pa.Table]:
    """The rows of each input, with its own columns and the key's hashes."""
    found = []
    for side, schema in enumerate(schemas):
        rows = table if len(schemas) == 1 else table.filter(pc.equal(table.column(_SIDE), side))
        columns = {name: rows.column(f"c{side}_{number}") for number, name in enumerate(schema.names)}
        found.append(pa.table({**columns, H1: rows.column(H1), H2: rows.column(H2)}))
    return found
