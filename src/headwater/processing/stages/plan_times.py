"""What a stage's plan does with event time: whether its result depends on it, and what is known of the times in its result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pyspark.sql import DataFrame

from headwater.processing.graph.graph import StageNode
from headwater.processing.operators.operator import KEPT
from headwater.processing.spark.plans import children, kind, nodes, remembering, sequence
from headwater.processing.time.event_time import MARK

Times = Literal["kept", "windows"]
"""The event times of a result: none of them is computed, or all are those of windows that are given once (see `idle_partitions`)."""

TIMED = {
    "DeduplicateWithinWatermark",
    "FlatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState",
    "TransformWithState",
    "TransformWithStateInPandas",
}
"""What may ask for the watermark, and drops what is before it; some run batches of their own when the clock goes on."""

_WINDOW = "spark.timeWindow"
"""By this key in a column's metadata Spark knows windows, other than sessions."""

_SESSION = "spark.sessionWindow"
"""By this one it knows sessions."""


def uses_time_of(result: DataFrame) -> bool:
    """Whether Spark would drop late rows: where it groups by a time, compares rows by one, or joins streams that have one."""
    return any(True for _ in _by_time(result))


def floor_of(result: DataFrame) -> int | None:
    """The time, in µs, at and before which Spark drops rows whatever the watermark is; None where it drops none.

    Its watermark begins in 1970, and cannot lie before. A window is dropped when its end is passed, any other row when its time is.
    """
    found = [kind(node) == "Aggregate" and _groups_by_windows(node) for node in _by_time(result)]
    return None if not found else -1 if all(found) else 0


def _by_time(result: DataFrame) -> Iterator[Any]:
    """The nodes of a plan that drop late rows."""
    for node in nodes(result):
        match kind(node):
            case "Aggregate" if any(map(_asks_time, sequence(node.groupingExpressions()))):
                yield node
            case "Deduplicate" if any(map(_asks_time, sequence(node.keys()))):
                yield node
            case "Join" if all(child.isStreaming() and _has_time(child) for child in children(node)):
                yield node
            case name if name in TIMED and any(map(_has_time, children(node))):
                yield node


def times_of(stage: StageNode, result: DataFrame) -> Times | None:
    """What is known of the event times of a result: none is computed, or all are those of windows that are given once."""
    time = stage.settings.get("time")
    if time is None or time not in result.columns:
        return None
    remembers = list(remembering(result))
    if not remembers:
        return "kept" if {MARK, KEPT} & set(result.schema[time].metadata or {}) else None
    return "windows" if stage.mode == "append" and all(map(_is_by_window, remembers)) else None


def _is_by_window(node: Any) -> bool:
    """Whether a node groups by windows of event time, each as long as the others."""
    return kind(node) == "Aggregate" and any(
        column.metadata().contains(MARK) and column.metadata().contains(_WINDOW)
        for expression in sequence(node.groupingExpressions())
        for column in sequence(expression.references().toSeq())
    )


def _groups_by_windows(node: Any) -> bool:
    """Whether what a node groups by has no event time in it but those of windows and sessions."""
    columns = [
        column
        for expression in sequence(node.groupingExpressions())
        for column in sequence(expression.references().toSeq())
        if column.metadata().contains(MARK)
    ]
    return all(any(column.metadata().contains(each) for each in (_WINDOW, _SESSION)) for column in columns)


def _asks_time(expression: Any) -> bool:
    """Whether an expression uses an event time."""
    return any(column.metadata().contains(MARK) for column in sequence(expression.references().toSeq()))


def _has_time(plan: Any) -> bool:
    """Whether a column that a plan gives is an event time."""
    return any(column.metadata().contains(MARK) for column in sequence(plan.output()))
