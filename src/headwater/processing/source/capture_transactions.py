"""Whole transactions: the topics of one capture read as one, to ends at which each transaction of the source is there or is not.

A capture appends all that a transaction changed, in all its tables, in one step, and with it a marker that tells how each table is: being
copied, or live. The ends of a batch are those of all topics at one moment, and the marker of that moment says that every table is live:
up to there the newest row of each key is what the source held at a commit. While a table is copied there are no such ends, and
the query waits.

A query over such topics only plans batches; the events of one of them are read by `Span`, table by table, since their columns differ.
Functions and frozen data only: safe from any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from headwater.log.log import Log
from headwater.log.port.stage import Positions
from headwater.model.errors import NotCapturable, TimedOut
from headwater.model.marker import Marker
from headwater.processing.checkpoint.marker import committed, ends_of, forget_plan, planned, planned_at_us
from headwater.processing.checkpoint.offsets import At, places_of
from headwater.processing.checkpoint.query_start import beginning, places_text
from headwater.processing.source.options import columns_text

PLANNING_US = 10_000_000
"""So long before Spark has noted a batch its ends may have been looked up."""

LOOKS_MAX = 100
"""So often a moment is looked for at which the capture appends nothing; it needs some ten microseconds of that."""


class _Table(msgspec.Struct, frozen=True):
    """What a capture tells of a table, as far as it matters here."""

    topic: str
    state: Literal["copying", "refreshing", "live", "stopped"]
    why: str | None = None


class _Progress(msgspec.Struct, frozen=True):
    tables: Mapping[str, _Table]


def whole_options(log: Log, capture: str, topics: Sequence[str], start: Mapping[str, str]) -> dict[str, str]:
    """How the topics of a capture are read as one stream, which begins where `start` says; it has places, not columns."""
    given = [start.get(topic, "earliest") for topic in topics]
    told = {name: places for text in given if text.startswith("{") for name, places in json.loads(text).items()}
    return {
        "log": log.url,
        "topic": ",".join(topics),
        "columns": columns_text(("_partition", "_offset")),
        "startingOffsets": json.dumps(told) if told else "earliest",
        "capture": capture,
    }


def whole_ends(log: Log, capture: str, topics: Sequence[str]) -> dict[At, int]:
    """Where the topics of a capture end now, behind whole transactions; nothing while a table is copied.

    A marker is published before its events are: with the same newest marker before and after the look nothing newer was seen, and
    what was seen is all of it if it reaches as far as that marker's own events.
    """
    for _ in range(LOOKS_MAX):
        state = log.store.stage_state(capture)
        ends = {at: bound.end for at, bound in log.store.bounds(topics).items()}
        if log.store.stage_state(capture).last == state.last and _holds(ends, state.positions):
            return ends if _are_live(state.last, topics) else {}
    return {}


class Span(msgspec.Struct, frozen=True):
    """The events of a topic that a batch has: for each partition the first offset, and the one behind the last."""

    topic: str
    starts: Mapping[int, int]
    ends: Mapping[int, int]

    @property
    def count(self) -> int:
        """How many offsets."""
        return sum(end - self.starts[number] for number, end in self.ends.items())

    def table(self, log: Log, columns: Sequence[str]) -> pa.Table:
        """Its events, read here and now."""
        return log.read(self.topic, start=self.starts, end=self.ends, columns=columns)

    def frame(self, spark: SparkSession, log: Log, columns: Sequence[str]) -> DataFrame:
        """Its events, to be read by tasks."""
        options = {
            "log": log.url,
            "topic": self.topic,
            "columns": columns_text(columns),
            "startingOffsets": places_text(self.topic, self.starts),
            "endingOffsets": places_text(self.topic, self.ends),
        }
        return spark.read.format("headwater").options(**options).load()


def span_of(log: Log, topic: str, *, checkpoint: str, epoch: int) -> Span:
    """What a batch has of a topic; a partition that is new begins with its first event."""
    before = places_of(ends_of(checkpoint, epoch - 1)) if epoch else beginning(checkpoint)
    after = places_of(ends_of(checkpoint, epoch))
    starts = {number: before.get((topic, number), span.start) for number, span in log.offsets(topic).items()}
    return Span(topic, starts, {number: after.get((topic, number), start) for number, start in starts.items()})


def forget_old_plan(checkpoint: str, *, written: Marker | None) -> None:
    """Lets a batch that was planned by an earlier run, and is not written, be planned anew: its ends have become old."""
    epoch = planned(checkpoint)
    is_open = epoch is not None and epoch != committed(checkpoint)
    if epoch is not None and is_open and (written is None or written.epoch < epoch):
        forget_plan(checkpoint, epoch)


def check_not_overtaken(log: Log, checkpoint: str, epoch: int) -> None:
    """Refuses a batch of which compaction may have taken rows for the sake of some behind its ends; `TimedOut`.

    To be called when its events were read. Planned anew, the batch ends behind those.
    """
    since_us = planned_at_us(checkpoint, epoch) - PLANNING_US
    for (topic, number), end in places_of(ends_of(checkpoint, epoch)).items():
        if log.store.is_overtaken(topic, number, end=end, since_us=since_us):
            raise TimedOut(
                f"Compaction came by partition {number} of topic {topic!r} while batch {epoch} was read, so what its rows were at offset "
                f"{end} is not certain any more.",
                advice="Nothing was written; Headwater plans the batch again.",
            )


def _holds(ends: Mapping[At, int], positions: Positions) -> bool:
    return all(
        ends.get((topic, number), span.stop) >= span.stop
        for topic, spans in positions.items()
        for number, span in spans.items()
    )


def _are_live(marker: Marker | None, topics: Sequence[str]) -> bool:
    if marker is None:
        return False
    tables = {table.topic: table for table in msgspec.convert(marker.ends, _Progress).tables.values()}
    for topic in topics:
        if topic in tables and tables[topic].state == "stopped":
            raise NotCapturable(
                f"The capture of {topic!r} has stopped, so it is no longer what its database holds: {tables[topic].why}",
                advice="Repair the capture, and start the application again: it then copies the table again.",
            )
    return all(topic in tables and tables[topic].state == "live" for topic in topics)
