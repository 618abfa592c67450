"""Conditions that a stage begins with, asked where rows are read: what they refuse is never carried to Spark.

Spark puts conditions as near to an input as they can go; there they are found in the optimised plan, and told to the source as its option
`where`: lists of lists in JSON, the name of what is asked first. The source answers for whole Arrow batches. Spark asks the same again of
what comes, so the source may let too much through and must never hold a row back. Only what means the same in both is told: whole
numbers, texts, times and truths compared with constants, what is null, and `and`, `or`, `not` and `in` of such; of several conditions
those that are understood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.processing.plans import kind, sequence

Asked = list[Any]
"""A condition: its kind, then what it is asked of."""

_COMPARED: dict[str, Callable[[pa.Array, pa.Scalar], pa.Array]] = {
    "EqualTo": pc.equal,
    "LessThan": pc.less,
    "LessThanOrEqual": pc.less_equal,
    "GreaterThan": pc.greater,
    "GreaterThanOrEqual": pc.greater_equal,
}
_JOINED = {"And": pc.and_kleene, "Or": pc.or_kleene}
_TURNED = {
    "LessThan": "GreaterThan",
    "LessThanOrEqual": "GreaterThanOrEqual",
    "GreaterThan": "LessThan",
    "GreaterThanOrEqual": "LessThanOrEqual",
}
_NUMBERS = {"tinyint", "smallint", "int", "bigint"}
_TYPES = {*_NUMBERS, "string", "boolean", "timestamp"}


def condition_above(above: Sequence[Any]) -> str | None:
    """What the nodes above an input, the nearest last, ask of each of its rows before anything else; None for nothing."""
    found: Asked | None = None
    for node in reversed(above):
        match kind(node):
            case "Filter":
                for each in filter(None, map(asked, _split(node.condition()))):
                    found = each if found is None else ["And", found, each]
            case "Project" if all(kind(each) == "AttributeReference" for each in sequence(node.projectList())):
                pass
            case "EventTimeWatermark":
                pass
            case _:
                break
    return None if found is None else text_of(found)


def text_of(asked: Asked) -> str:
    """A condition as an option of a source."""
    return msgspec.json.encode(asked).decode()


class Where:
    """What `condition_above` has found, in a source."""

    def __init__(self, text: str) -> None:
        self._asked: Asked = msgspec.json.decode(text)

    def mask(self, batch: pa.RecordBatch | pa.Table) -> Any:
        """For each row whether it is let through."""
        return _answer(self._asked, batch)


def _answer(asked: Asked, batch: pa.RecordBatch | pa.Table) -> Any:
    name, *of = asked
    if name in _JOINED:
        return _JOINED[name](*(_answer(each, batch) for each in of))
    if name == "Not":
        return pc.invert(_answer(of[0], batch))
    values = _values(of[0], batch)
    if name == "IsNull":
        return pc.is_null(values)
    if name == "IsNotNull":
        return pc.is_valid(values)
    if name == "In":
        found = pc.is_in(values, pa.array(of[1], values.type))
        return pc.if_else(pc.is_valid(values), found, None)
    return _COMPARED[name](values, pa.scalar(of[1], values.type))


def _values(of: Asked, batch: pa.RecordBatch | pa.Table) -> Any:
    """A column, or what is left of it when it is divided; times are numbers."""
    name, *rest = of
    column = batch.column(name)
    column = column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
    if not rest:
        return column
    by = pa.scalar(rest[0], column.type)
    return pc.subtract(column, pc.multiply(pc.divide(column, by), by))


def _split(condition: Any) -> Iterator[Any]:
    """The conditions that are all to be true."""
    if kind(condition) == "And":
        yield from _split(condition.left())
        yield from _split(condition.right())
    else:
        yield condition


def asked(expression: Any) -> Asked | None:
    """A condition of Spark's; None where it may mean something else here."""
    name = kind(expression)
    if name in _JOINED:
        sides = [asked(expression.left()), asked(expression.right())]
        return None if None in sides else [name, *sides]
    if name == "Not":
        child = asked(expression.child())
        return None if child is None else [name, child]
    if name in ("IsNull", "IsNotNull"):
        column = _column(expression.child())
        return None if column is None else [name, column]
    if name == "In":
        column, values = _column(expression.value()), [_constant(each) for each in sequence(expression.list())]
        return None if column is None or None in values else [name, column, values]
    if name == "AttributeReference":
        return ["EqualTo", [expression.name()], True]
    return _compared(name, expression.left(), expression.right()) if name in _COMPARED else None


def _compared(name: str, left: Any, right: Any) -> Asked | None:
    column, value = _column(left), _constant(right)
    if column is None or value is None:
        name, column, value = _TURNED.get(name, name), _column(right), _constant(left)
    return None if column is None or value is None else [name, column, value]


def _column(expression: Any) -> Asked | None:
    if kind(expression) == "Remainder" and _type(expression) in _NUMBERS:
        of, by = _column(expression.left()), _constant(expression.right())
        return [*of, by] if of is not None and len(of) == 1 and isinstance(by, int) and by > 0 else None
    is_plain = kind(expression) == "AttributeReference" and _type(expression) in _TYPES
    return [expression.name()] if is_plain else None


def _constant(expression: Any) -> Any:
    """The value of a constant, or of what is computed of constants; None where it is null, or of another type."""
    if not expression.foldable() or _type(expression) not in _TYPES:
        return None
    value = expression.eval(None)
    return value if value is None or _type(expression) != "string" else str(value.toString())


def _type(expression: Any) -> str:
    return str(expression.dataType().simpleString())
