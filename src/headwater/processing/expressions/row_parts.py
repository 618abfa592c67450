"""Row parts: the largest parts of an expression that refer to the columns of one row only.

An operator over several rows (a row pattern, say) gets an expression in which some parts refer to other rows. What refers to its own
row alone can be computed before the operator, by Spark or by `compile_expression`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlglot import expressions as sql


def own_row_parts(node: Any, is_foreign: Callable[[Any], bool]) -> list[Any]:
    """The maximal parts of a tree that read a column and contain nothing for which `is_foreign` is true, in the order of the text.

    A part that `is_foreign` is not looked into: it belongs to the operator, with everything in it. Constants alone are no parts.
    """
    found: list[Any] = []
    _collect(node, is_foreign, found)
    return found


def _collect(node: Any, is_foreign: Callable[[Any], bool], found: list[Any]) -> None:
    if is_foreign(node):
        return
    if not any(is_foreign(inner) for inner in node.walk()):
        if isinstance(node, sql.Condition) and node.find(sql.Column) is not None:
            found.append(node.unnest())
            return
        if node.find(sql.Column) is None:
            return
    for child in node.iter_expressions():
        _collect(child, is_foreign, found)
