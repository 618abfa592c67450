"""Spark's logical plans, as far as Python has to look into them: nodes of the JVM, over the bridge to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame

# What a stateless stage consists of; anything else remembers, compares or reorders events.
STATELESS = {
    "Project", "Filter", "Generate", "EventTimeWatermark", "Union", "SubqueryAlias", "StreamingRelation", "ResolvedHint",
    "MapInPandas", "MapInArrow", "PythonMapInArrow", "BatchEvalPython", "ArrowEvalPython", "TypedFilter", "View",
    "Repartition", "RepartitionByExpression", "RebalancePartitions", "CollectMetrics", "Expand",
}  # fmt: skip

SHUFFLING = {"Repartition", "RepartitionByExpression", "RebalancePartitions"}
"""Of these what gives a task rows that several tasks have read."""


def analyzed(frame: DataFrame) -> Any:
    """The plan of a DataFrame as it was written, names resolved."""
    return frame._jdf.queryExecution().analyzed()


def nodes(frame: DataFrame) -> Iterator[Any]:
    """The nodes of that plan."""
    found = [analyzed(frame)]
    while found:
        node = found.pop()
        yield node
        found += children(node)


def remembering(frame: DataFrame) -> Iterator[Any]:
    """The nodes of that plan that keep a state of Spark's own."""
    return (node for node in nodes(frame) if kind(node) not in STATELESS)


def may_shuffle(node: Any) -> bool:
    """Whether rows may leave a node in another task than they came in: also a join with what is no stream may be such."""
    return kind(node) in SHUFFLING or (bool(children(node)) and kind(node) not in STATELESS)


def keeps_state(node: Any) -> bool:
    """Whether such a node keeps it from batch to batch: what is no stream, and a join with that, are the same in each."""
    if kind(node) == "Join":
        return all(child.isStreaming() for child in children(node))
    return bool(node.isStreaming())


def kind(node: Any) -> str:
    """What a node is."""
    return str(node.nodeName().removeprefix("~"))


def children(node: Any) -> list[Any]:
    """What a node is made of."""
    return sequence(node.children())


def sequence(scala: Any) -> list[Any]:
    """A sequence of Scala's as a list."""
    return [scala.apply(at) for at in range(scala.size())]
