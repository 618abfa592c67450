"""Fusion: which operators of a stage run inside the source that reads their topic (see `fused`).

It is sound where all rows that the operator must see together are read by one task:
- the operator has one input, and that is a topic of a log in a folder, which places every event by its key (on Kafka others may place
  events otherwise);
- the topic's key is among the columns of the operator's key, and NOT NULL: an event without a key may be in any partition;
- between the topic and the operator is nothing but a choice of columns, under other names perhaps;
- the stage does not work by event time, or has one input only: its watermark is the least of all its inputs', and a source knows its own;
- nothing else in the stage reads that topic, so there is one source for it.

A query with a fused operator has other sources than one without, so a checkpoint stays as it was begun. Which operators are fused is
written beside it before its first batch, in `fused`; a checkpoint without that file has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame

from headwater.log.catalog import read_text, write_text
from headwater.log.disk import RealDisk
from headwater.model.errors import Conflict
from headwater.processing.fused import Fused
from headwater.processing.hashing import is_hashable
from headwater.processing.operator import Input, Operator
from headwater.processing.plans import analyzed, children, kind, sequence
from headwater.processing.types import to_arrow

_FILE = _KIND = "fused"
_PASSED_THROUGH = ("EventTimeWatermark", "SubqueryAlias")


def placed_by(schema: pa.Schema, key: str | None) -> str | None:
    """The column whose value alone says in which partition of a log in a folder an event is; None where there is none."""
    if key is None or key not in schema.names:
        return None
    field = schema.field(key)
    return key if not field.nullable and is_hashable(field.type) else None


class Origin(NamedTuple):
    """An input of a stage as its source gives it. `make` makes a source that has an operator in it, of its columns and further options."""

    topic: str
    frame: DataFrame
    placed_by: str | None
    roots: int = 1
    time: str | None = None
    """Its event time, where what is late by it is left out."""
    make: Callable[[Sequence[str], Mapping[str, str]], DataFrame] | None = None


class Fusion:
    """The inputs of a stage whose function is being called, and what is fused with them.

    `wanted` are the operators that are to be; without it they are only noted, in `found`, with their topics.
    `apart` says of the others why they are not.
    """

    def __init__(self, origins: Iterable[Origin], *, checkpoint: str = "", wanted: Sequence[str] | None = None) -> None:
        self._origins = [(analyzed(each.frame), each) for each in origins]
        self._checkpoint, self._wanted = checkpoint, wanted
        self.found: dict[str, str] = {}
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
        origin = taken.origin
        self.found[uid] = origin.topic
        if self._wanted is None:
            return None
        assert origin.make is not None and origin.placed_by is not None
        [each] = inputs
        schema, key = to_arrow(each.frame.schema), [taken.names[name] for name in each.key]
        columns = [taken.names[name] for name in schema.names]
        time = None if origin.time is None else to_arrow(origin.frame.schema).field(origin.time)
        fused = Fused(
            operator, schema, columns, key, origin.placed_by, origin.roots, state, uid, fingerprint, self._checkpoint, time,
        )  # fmt: skip
        return origin.make(fused.read.names, {"operator": fused.to_option()})

    def _sound(self, inputs: Sequence[Input]) -> _Taken | str:
        """What an operator takes of its input; or why it cannot be inside the source of that."""
        if len(inputs) > 1:
            return f"it has {len(inputs)} inputs"
        [each] = inputs
        taken = self._taken(each.frame)
        if taken is None:
            return "its input is not just columns of a topic"
        topic, placed = taken.origin.topic, taken.origin.placed_by
        if placed is None:
            return f"{topic} has no key that is NOT NULL and of a type that can be hashed here"
        key, schema = {taken.names[name]: name for name in each.key}, to_arrow(each.frame.schema)
        if placed not in key:
            return f"the key of {topic} is {placed}, the operator's is ({', '.join(key)})"
        unhashed = [column for column, name in key.items() if not is_hashable(schema.field(name).type)]
        return f"{unhashed[0]} of its key can be hashed by Spark only" if unhashed else taken

    def _taken(self, frame: DataFrame) -> _Taken | None:
        """What a DataFrame takes of an input; None where it does anything else."""
        node = analyzed(frame)
        wanted = {attribute.name(): attribute.exprId().id() for attribute in sequence(node.output())}
        if len(wanted) < node.output().size():
            return None
        while True:
            for plan, origin in self._origins:
                if node.fastEquals(plan):
                    own = {attribute.exprId().id(): attribute.name() for attribute in sequence(node.output())}
                    return _Taken(origin, {name: own[found] for name, found in wanted.items()})
            if kind(node) == "Project":
                origins = dict(_renamed(each) for each in sequence(node.projectList()))
                wanted = {name: origins[found] for name, found in wanted.items()}
                if None in wanted.values():
                    return None
            elif kind(node) not in _PASSED_THROUGH:
                return None
            [node] = children(node)


def chosen(checkpoint: str, sound: Sequence[str]) -> list[str]:
    """The operators that a query with this checkpoint has fused: those it began with, and the sound ones of one that begins."""
    kept, batches = Path(checkpoint, _FILE), Path(checkpoint, "offsets")
    if not batches.exists() or not any(path.name.isdigit() for path in batches.iterdir()):
        if sound or kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_text(RealDisk(), str(kept), _KIND, sorted(sound))
        return sorted(sound)
    begun = list(read_text(RealDisk(), str(kept), _KIND)) if kept.exists() else []
    lost = sorted(set(begun) - set(sound))
    if lost:
        raise Conflict(
            f"Operator {lost[0]!r} was begun inside its source, and the stage's function or its topic have changed so that it "
            "cannot be there any more.",
            advice="Undo the change; or give it another uid= and begin from the first events with "
            "--accept-new-checkpoint STAGE=earliest.",
        )
    return begun


class _Taken(NamedTuple):
    """Columns of an input, by the names that a DataFrame has for them."""

    origin: Origin
    names: Mapping[str, str]


def _renamed(expression: Any) -> tuple[int, int | None]:
    """The id of a column, and that of the one it is; None where it is computed."""
    if _is_a(expression, "AttributeReference"):
        return expression.exprId().id(), expression.exprId().id()
    is_alias = _is_a(expression, "Alias") and _is_a(expression.child(), "AttributeReference")
    return expression.exprId().id(), expression.child().exprId().id() if is_alias else None


def _is_a(expression: Any, name: str) -> bool:
    return bool(expression.getClass().getSimpleName() == name)
