"""Fusion: which operators of a stage run inside the source that reads their topics (see `source_operator`).

It is sound where all rows that the operator must see together are read by one task:
- each of its inputs is a topic of a log in a folder, which places every event by its key (on Kafka others may place events otherwise);
- the topic's key is among the columns of the operator's key, and NOT NULL: an event without a key may be in any partition;
- several inputs are partitioned alike: by the same column of the operator's key, into as many partitions;
- between a topic and the operator is nothing but a choice of columns, under other names perhaps, and conditions that Arrow can ask;
- the stage does not work by event time, or all its inputs are the operator's: its watermark is the least of all its inputs', and a
  source knows its own;
- nothing else in the stage reads these topics, so there is one source for them.

A query with a fused operator has other sources than one without, so a checkpoint stays as it was begun. Which operators are fused is
written beside it before its first batch, in `source_operator`; a checkpoint without that file has none.

Of an operator with one input that is not fused, rows can become fewer in the source of its topic (see `combiner`), wherever nothing but
columns and such conditions stand between. That changes no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import pyarrow as pa
from pyspark.sql import DataFrame

from headwater.log.disk.disk import RealDisk
from headwater.log.disk.text import read_text, write_text
from headwater.model.errors import Conflict
from headwater.processing.checkpoint.marker import planned
from headwater.processing.graph.table import Table
from headwater.processing.operators.grouping import ALL
from headwater.processing.operators.operator import Combining, Input, Operator
from headwater.processing.source.combiner import Combiner
from headwater.processing.source.operator_input import TIME, OperatorInput, to_option
from headwater.processing.source.pushdown import ConditionTree, condition_tree, text_of
from headwater.processing.source.source_operator import FusedOperator
from headwater.processing.spark.hashing import is_hashable
from headwater.processing.spark.plans import analyzed, children, kind, sequence
from headwater.processing.spark.types import to_arrow
from headwater.processing.time.event_time import FIELDS, LATE

_FILE = _KIND = "fused"
_PASSED_THROUGH = ("EventTimeWatermark", "SubqueryAlias")


def placed_by(schema: pa.Schema, key: str | None) -> str | None:
    """The column whose value alone says in which partition of a log in a folder an event is; None where there is none."""
    if key is None or key not in schema.names:
        return None
    field = schema.field(key)
    return key if not field.nullable and is_hashable(field.type) else None


class Origin(NamedTuple):
    """An input of a stage as its source gives it."""

    topic: str
    frame: DataFrame
    placed_by: str | None
    roots: int
    time: str | None = None
    """Its event time, where the stage works by it."""
    is_table: bool = False
    options: Callable[[Sequence[str]], Mapping[str, str]] | None = None
    """How a source reads some columns of it."""

    @classmethod
    def of(cls, topic: str, given: DataFrame | Table, **more: Any) -> Origin:
        """An input as a function is given it."""
        is_table = isinstance(given, Table)
        return cls(topic, given.versions if isinstance(given, Table) else given, is_table=is_table, **more)


class Fusion:
    """The inputs of a stage whose function is being called, and what is fused with them.

    `wanted` are the operators that are to be, `combining` those whose rows are to be combined, and `make` makes a source of its options.
    Without `wanted` they are only noted, in `found` and `combined`, with their topics; `apart` says of the others why they are not fused.
    """

    def __init__(
        self,
        origins: Iterable[Origin],
        *,
        checkpoint: str = "",
        wanted: Sequence[str] | None = None,
        combining: Sequence[str] = (),
        make: Callable[[Mapping[str, str]], DataFrame] | None = None,
    ) -> None:
        self._origins = [(analyzed(each.frame), each) for each in origins]
        self._checkpoint, self._wanted, self._combining, self._make = checkpoint, wanted, combining, make
        self.found: dict[str, tuple[str, ...]] = {}
        self.combined: dict[str, str] = {}
        self.apart: dict[str, str] = {}

    def fuse(
        self, operator: Operator, inputs: Sequence[Input], state: str, uid: str, fingerprint: str
    ) -> DataFrame | None:
        """The operator's result, made by a source; None where it is to be made by Spark."""
        if self._wanted is not None and uid not in self._wanted:
            return None
        taken = self._sound(inputs)
        if isinstance(taken, str):
            self.apart[uid] = taken
            return None
        self.found[uid] = tuple(each.origin.topic for each in taken)
        if self._wanted is None:
            return None
        sides = [each.side(given) for each, given in zip(taken, inputs, strict=True)]
        return self._source(
            FusedOperator(operator, sides, taken[0].origin.roots, state, uid, fingerprint, self._checkpoint)
        )

    def combine(self, operator: Operator, inputs: Sequence[Input], uid: str) -> Sequence[Input]:
        """The inputs of an operator that is made by Spark, with rows that became fewer in their source."""
        if self._wanted is not None and uid not in self._combining:
            return inputs
        taken = self._taken(inputs[0].frame, but=ALL) if len(inputs) == 1 and hasattr(operator, "combine") else None
        if taken is None:
            return inputs
        self.combined[uid] = taken.origin.topic
        if self._wanted is None:
            return inputs
        side = taken.side(inputs[0])
        return [Input(self._source(Combiner(cast(Combining, operator), side)), inputs[0].key)]

    def _source(self, inside: FusedOperator | Combiner) -> DataFrame:
        assert self._make is not None
        topics = ",".join(side.topic for side in inside.sides)
        return self._make({**inside.sides[0].options, "topic": topics, "operator": to_option(inside)})

    def _sound(self, inputs: Sequence[Input]) -> list[_Taken] | str:
        """What an operator takes of its inputs; or why it cannot be inside their source."""
        found = list[_Taken]()
        for each in inputs:
            taken = self._taken(each.frame)
            why = "its input is not just columns of a topic" if taken is None else taken.trouble(each)
            if taken is None or why:
                return why
            found.append(taken)
        one = found[0].origin
        for other, each in zip(found[1:], inputs[1:], strict=True):
            if other.place(each) != found[0].place(inputs[0]):
                return f"{one.topic} and {other.origin.topic} are partitioned by different columns of its key"
            if other.origin.roots != one.roots:
                return f"{one.topic} has {one.roots} partitions, {other.origin.topic} has {other.origin.roots}"
        return found

    def _taken(self, frame: DataFrame, *, but: str | None = None) -> _Taken | None:
        """What a DataFrame takes of an input, but for a column of this name; None where it does anything else."""
        node, where = analyzed(frame), list[Any]()
        wanted = {attribute.name(): attribute.exprId().id() for attribute in sequence(node.output())}
        if len(wanted) < node.output().size():
            return None
        wanted.pop(but, None)
        while True:
            for plan, origin in self._origins:
                if node.fastEquals(plan):
                    own = {attribute.exprId().id(): attribute.name() for attribute in sequence(node.output())}
                    conditions = [_asked_of(each, own) for each in where]
                    if None in conditions:
                        return None
                    return _Taken(origin, {name: own[found] for name, found in wanted.items()}, conditions)
            if kind(node) == "Project":
                origins = dict(_renamed(each) for each in sequence(node.projectList()))
                wanted = {name: origins[found] for name, found in wanted.items()}
                if None in wanted.values():
                    return None
            elif kind(node) == "Filter":
                where.append(node.condition())
            elif kind(node) not in _PASSED_THROUGH:
                return None
            [node] = children(node)


def chosen(checkpoint: str, sound: Sequence[str]) -> list[str]:
    """The operators that a query with this checkpoint has fused: those it began with, and the sound ones of one that begins."""
    disk, kept = RealDisk(), f"{checkpoint}/{_FILE}"
    if planned(checkpoint) is None:
        if sound or disk.exists(kept):
            disk.make_folder(checkpoint)
            write_text(disk, kept, _KIND, sorted(sound))
        return sorted(sound)
    begun = list(read_text(disk, kept, _KIND)) if disk.exists(kept) else []
    lost = sorted(set(begun) - set(sound))
    if lost:
        raise Conflict(
            f"Operator {lost[0]!r} started inside its source and can no longer run there, because the stage's function "
            "or its topic changed.",
            advice="Undo the change; or give it another uid= and start from the first events with "
            "--accept-new-checkpoint STAGE=earliest.",
        )
    return begun


class _Taken(NamedTuple):
    """Columns of an input, by the names that a DataFrame has for them; and what it asks of each row."""

    origin: Origin
    names: Mapping[str, str]
    asked: Sequence[Any]

    def trouble(self, given: Input) -> str:
        """Why rows of a key may be read by several tasks, or cannot be told apart where they are read; nothing if all is well."""
        topic, placed = self.origin.topic, self.origin.placed_by
        if placed is None:
            return f"{topic} has no key that is NOT NULL and of a type that can be hashed here"
        key, schema = {self.names[name]: name for name in given.key}, to_arrow(given.frame.schema)
        if placed not in key:
            return f"the key of {topic} is {placed}, the operator's is ({', '.join(key)})"
        unhashed = [column for column, name in key.items() if not is_hashable(schema.field(name).type)]
        return f"{unhashed[0]} of its key can be hashed by Spark only" if unhashed else ""

    def place(self, given: Input) -> int:
        """Which column of the operator's key the topic is partitioned by."""
        return [self.names[name] for name in given.key].index(self.origin.placed_by or "")

    def side(self, given: Input) -> OperatorInput:
        """The same, for the source."""
        origin, there = self.origin, to_arrow(self.origin.frame.schema)
        schema = pa.schema([field for field in to_arrow(given.frame.schema) if field.name in self.names])
        columns, key = (
            [self.names[name] for name in names if name in self.names] for names in (schema.names, given.key)
        )
        read = {source: field.with_name(source) for source, field in zip(columns, schema, strict=True)}
        where: ConditionTree | None = None
        for each, used in self.asked:
            where = each if where is None else ["And", where, each]
            read |= {name: there.field(name) for name in used if name not in read}
        time = None if origin.is_table else origin.time
        if time is not None:
            read |= {time: there.field(time), LATE: FIELDS[LATE]}
        deleted_at = origin.time if origin.is_table and origin.time in read else None
        if deleted_at is not None:
            read[TIME.name] = TIME
        assert origin.options is not None
        options = dict(origin.options(list(read)))
        late_rows = options.pop("lateRows", None)
        return OperatorInput(
            origin.topic, pa.schema(list(read.values())), options, schema, columns, key,
            origin.placed_by or "", time, deleted_at, None if where is None else text_of(where), late_rows,
        )  # fmt: skip


def _asked_of(condition: Any, own: Mapping[int, str]) -> tuple[ConditionTree, list[str]] | None:
    """A condition that Arrow can ask in the source, and the columns it is about; None where it cannot."""
    used = {attribute.exprId().id(): attribute.name() for attribute in sequence(condition.references().toSeq())}
    found = condition_tree(condition) if all(own.get(each) == name for each, name in used.items()) else None
    return None if found is None else (found, list(used.values()))


def _renamed(expression: Any) -> tuple[int, int | None]:
    """The id of a column, and that of the one it is; None where it is computed."""
    if _is_a(expression, "AttributeReference"):
        return expression.exprId().id(), expression.exprId().id()
    is_alias = _is_a(expression, "Alias") and _is_a(expression.child(), "AttributeReference")
    return expression.exprId().id(), expression.child().exprId().id() if is_alias else None


def _is_a(expression: Any, name: str) -> bool:
    return bool(expression.getClass().getSimpleName() == name)
