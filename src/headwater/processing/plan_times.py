"""What a stage's plan does with event time: whether its result depends on it, and what is known of the times in its result."""

from __future__ import annotations

from typing import Any, Literal

from pyspark.sql import DataFrame

from headwater.processing.event_time import MARK
from headwater.processing.graph import StageNode
from headwater.processing.operator import KEPT
from headwater.processing.plans import children, kind, nodes, remembering, sequence

Times = Literal["kept", "windows"]
"""The event times of a result: none of them is computed, or all are those of windows that are given once (see `passed`)."""

_TIMED = {
    "DeduplicateWithinWatermark",
    "FlatMapGroupsWithState",
    "FlatMapGroupsInPandasWithState",
    "TransformWithState",
    "TransformWithStateInPandas",
}
"""What may ask for the watermark, and drops what is before it."""

_WINDOW = "spark.timeWindow"
"""By this key in a column's metadata Spark knows windows, other than sessions."""


def uses_time_of(result: DataFrame) -> bool:
    """Whether Spark would drop late rows: where it groups by a time, compares rows by one, or joins streams that have one."""
    for node in nodes(result):
        match kind(node):
            case "Aggregate" if any(map(_asks_time, sequence(node.groupingExpressions()))):
                return True
            case "Deduplicate" if any(map(_asks_time, sequence(node.keys()))):
                return True
            case "Join" if all(child.isStreaming() and _has_time(child) for child in children(node)):
                return True
            case name if name in _TIMED and any(map(_has_time, children(node))):
                return True
    return False


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


def _asks_time(expression: Any) -> bool:
    """Whether an expression uses an event time."""
    return any(column.metadata().contains(MARK) for column in sequence(expression.references().toSeq()))


def _has_time(plan: Any) -> bool:
    """Whether a column that a plan gives is an event time."""
    return any(column.metadata().contains(MARK) for column in sequence(plan.output()))
