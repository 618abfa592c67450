"""Conditions that a stage begins with, asked where rows are read: what they refuse is never carried to Spark.

Spark puts conditions as near to an input as they can go; there they are found in the optimised plan, and told to the source as its option
`where`: lists of lists in JSON, the name of what is asked first. The source answers for whole Arrow batches. Spark asks the same again of
what comes, so the source may let too much through and must never hold a row back. Only what means the same in both is told: whole
numbers, texts, times and truths compared with constants, what is null, and `and`, `or`, `not` and `in` of such; of several conditions
those that are understood. A whole number times a decimal is compared as the number with what the constant is divided by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.processing.spark.plans import kind, sequence

ConditionTree = list[Any]
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
_ROUNDED = {"LessThan": ceil, "LessThanOrEqual": floor, "GreaterThan": floor, "GreaterThanOrEqual": ceil}
"""What a whole number is compared with instead of a fraction."""

_NUMBERS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}
"""How many digits they have at most."""

_TYPES = {*_NUMBERS, "string", "boolean", "timestamp"}


def condition_above(above: Sequence[Any]) -> str | None:
    """What the nodes above an input, the nearest last, ask of each of its rows before anything else; None for nothing."""
    found: ConditionTree | None = None
    for node in reversed(above):
        match kind(node):
            case "Filter":
                for each in filter(None, map(condition_tree, _split(node.condition()))):
                    found = each if found is None else ["And", found, each]
            case "Project" if all(kind(each) == "AttributeReference" for each in sequence(node.projectList())):
                pass
            case "EventTimeWatermark":
                pass
            case _:
                break
    return None if found is None else text_of(found)


def text_of(tree: ConditionTree) -> str:
    """A condition as an option of a source."""
    return msgspec.json.encode(tree).decode()


class PushedFilter:
    """What `condition_above` has found, in a source."""

    def __init__(self, text: str) -> None:
        self._asked: ConditionTree = msgspec.json.decode(text)

    def mask(self, batch: pa.RecordBatch | pa.Table) -> Any:
        """For each row whether it is let through."""
        return _answer(self._asked, batch)


def _answer(tree: ConditionTree, batch: pa.RecordBatch | pa.Table) -> Any:
    name, *of = tree
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


def _values(of: ConditionTree, batch: pa.RecordBatch | pa.Table) -> Any:
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


def condition_tree(expression: Any) -> ConditionTree | None:
    """A condition of Spark's; None where it may mean something else here."""
    name = kind(expression)
    if name in _JOINED:
        sides = [condition_tree(expression.left()), condition_tree(expression.right())]
        return None if None in sides else [name, *sides]
    if name == "Not":
        child = condition_tree(expression.child())
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


def _compared(name: str, left: Any, right: Any) -> ConditionTree | None:
    if left.foldable():
        name, left, right = _TURNED.get(name, name), right, left
    times, value = _times(left), _decimal(right)
    if times is not None and value is not None and name in _ROUNDED:
        number, by = times
        bound = _ROUNDED[name](Fraction(value) / by)
        return [name, number, bound] if abs(bound) < 2**63 else None
    column, constant = _column(left), _constant(right)
    return None if column is None or constant is None else [name, column, constant]


def _times(expression: Any) -> tuple[ConditionTree, Fraction] | None:
    """A column of whole numbers, and the positive decimal that it is multiplied by, where no digit of the product is lost."""
    product = expression.child() if kind(expression) == "Cast" else expression
    if kind(product) != "Multiply":
        return None
    for number, constant in ((product.left(), product.right()), (product.right(), product.left())):
        by = _decimal(constant)
        if by is None or by <= 0 or kind(number) != "Cast" or _type(number.child()) not in _NUMBERS:
            continue
        column, digits = _column(number.child()), _NUMBERS[_type(number.child())]
        whole, behind = len(str(int(by))), max(0, -int(by.as_tuple().exponent))
        is_whole = all(_has_digits(each, digits + whole, behind) for each in (product, expression))
        if column is not None and is_whole and _has_digits(number, digits, 0):
            return column, Fraction(by)
    return None


def _has_digits(expression: Any, before: int, behind: int) -> bool:
    """Whether it is a decimal with at least so many digits before its point, and behind it."""
    found = re.fullmatch(r"decimal\((\d+),(\d+)\)", _type(expression))
    return found is not None and int(found[1]) - int(found[2]) >= before and int(found[2]) >= behind


def _decimal(expression: Any) -> Decimal | None:
    """The value of a constant that is a decimal."""
    value = expression.eval(None) if expression.foldable() and _has_digits(expression, 0, 0) else None
    return None if value is None else Decimal(str(value.toString()))


def _column(expression: Any) -> ConditionTree | None:
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
