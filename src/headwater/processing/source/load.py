"""A query's reading: the options and the schema of one `load()`, as stream and batch readers share them.

It is pickled into tasks with nothing but what the user gave; what it opens and understands, it finds again wherever it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from headwater.log.log import Log
from headwater.model.ddl import type_to_ddl
from headwater.model.errors import SchemaConflict
from headwater.processing.checkpoint.offsets import Offsets, cut
from headwater.processing.source.combiner import Combiner
from headwater.processing.source.operator_input import from_option
from headwater.processing.source.options import Options, Use, read_options
from headwater.processing.source.pushdown import PushedFilter
from headwater.processing.source.range_reader import (
    OffsetRange,
    OffsetRanges,
    RowSelection,
    TableSnapshot,
    WatermarkOnly,
    read_in_time_order,
    read_ranges,
    read_snapshot,
)
from headwater.processing.source.source_operator import FusedOperator, Root, Roots
from headwater.processing.source.topic_subscription import TopicSubscription
from headwater.processing.spark.errors import crossing
from headwater.processing.spark.log_cache import log_for_reading
from headwater.processing.spark.session import check_reachable
from headwater.processing.spark.types import to_arrow, to_spark
from headwater.processing.time.event_time import BATCH_WATERMARK, FIELDS, REACHED, LatenessRule, watermark_row
from headwater.processing.time.maxima import Maxima

TASK_EVENTS_MIN = 1_000
"""So many events, or fewer, of a micro-batch are read by one task."""

OPTIONS_KEPT_MAX = 64
"""The options of this many queries stay checked in a process."""


class Load:
    """What one `load()` reads."""

    def __init__(self, given: Mapping[str, str], schema: StructType, use: Use, master: str = "local") -> None:
        self._given = dict(given)
        self._schema = schema
        self._use: Use = use
        self._master = master

    def __reduce__(self) -> tuple[Any, ...]:
        return (Load, (self._given, self._schema, self._use, self._master))

    @cached_property
    def options(self) -> Options:
        """The options, checked."""
        return _checked_options(tuple(self._given.items()), self._use, self._master)

    @property
    def log(self) -> Log:
        """The log that it reads."""
        return log_for_reading(self.options.log)

    @property
    def names(self) -> list[str]:
        """The columns of the DataFrame."""
        return list(self._gives.names)

    @cached_property
    def inside(self) -> FusedOperator | Combiner | None:
        """What works on what is read, if anything does."""
        return None if self.options.operator is None else from_option(self.options.operator)

    @cached_property
    def sides(self) -> Mapping[str, Load]:
        """How the topics of what works inside are read; otherwise nothing."""
        sides = () if self.inside is None else self.inside.sides
        return {side.topic: Load(side.options, to_spark(side.read), self._use, self._master) for side in sides}

    @property
    def fused(self) -> FusedOperator | None:
        """The operator that works on what is read, if that is one with a state."""
        return self.inside if isinstance(self.inside, FusedOperator) else None

    @property
    def has_watermark(self) -> bool:
        """Whether what is made of its rows depends on a watermark."""
        return BATCH_WATERMARK in self.names or (self.inside is not None and self.inside.has_time)

    @cached_property
    def _gives(self) -> pa.Schema:
        """The columns of the DataFrame."""
        return to_arrow(self._schema)

    @cached_property
    def subscription(self) -> TopicSubscription:
        """The topics that it reads."""
        return TopicSubscription(log_for_reading(self.options.log), self.options)

    @cached_property
    def checked(self) -> TopicSubscription:
        """The same, when the columns fit into the types of the DataFrame; a user may have given its schema."""
        if self.inside is not None:
            for side in self.sides.values():
                side.checked  # noqa: B018 - looks, and refuses
            return self.subscription
        there = {field.name: field for field in self.subscription.schema()}
        for field in self._gives:
            found = there.get(field.name)
            if found is None or found.type != field.type:
                has = (
                    f"has no column {field.name}" if found is None else f"has {field.name} as {type_to_ddl(found.type)}"
                )
                raise SchemaConflict(
                    f"The DataFrame's schema has {field.name} {type_to_ddl(field.type)}, and what is read {has}.",
                    advice="Leave out .schema(…) to use the topic's schema. To read fewer columns, use the option columns.",
                )
        return self.subscription

    def tasks(self, ranges: Sequence[OffsetRange]) -> list[InputPartition]:
        """The tasks of a micro-batch: `split`, and few events of a log in a folder in one task.

        A task costs its fixed time in the JVM and in two Python processes, more than reading a thousand events does; with one
        for each partition that is most of what a small batch takes. On Kafka tasks mostly wait for the broker, each for itself,
        and each commits what it writes, so there they stay as they are.
        """
        if len(ranges) > 1 and self.options.partitions_min == 1 and self.is_small(ranges):
            return [OffsetRanges(ranges)]
        return self.split(ranges)

    def roots(self, ranges: Sequence[OffsetRange], before: Offsets, after: Offsets) -> list[InputPartition]:
        """The tasks of a micro-batch with an operator: one for each root, or one for them all."""
        assert self.fused is not None
        found = self.fused.tasks(ranges, before, after)
        return [Roots(found)] if self.is_small(ranges) else [*found]

    @cached_property
    def maxima(self) -> Maxima | None:
        """Where tasks tell how far event time has come, if they have to."""
        return None if self.options.maxima is None else Maxima(self.options.maxima)

    @cached_property
    def is_nested(self) -> bool:
        """Whether a column of the DataFrame has columns or elements of its own."""
        return any(pa.types.is_nested(field.type) for field in self._gives)

    def is_small(self, ranges: Sequence[OffsetRange]) -> bool:
        """Whether these are few events of a log in a folder."""
        few = sum(wanted.end - wanted.start for wanted in ranges) <= TASK_EVENTS_MIN
        return few and log_for_reading(self.options.log).store.capabilities.folder is not None

    def split(self, ranges: Sequence[OffsetRange]) -> list[InputPartition]:
        """The ranges, the large ones cut until there are about `minPartitions` of them; not where one goes on by what was before it."""
        if self.maxima is not None:
            return list(ranges)
        least, total = self.options.partitions_min, sum(wanted.end - wanted.start for wanted in ranges)
        pieces: list[InputPartition] = []
        for wanted in ranges:
            count = round(least * (wanted.end - wanted.start) / total) if least > len(ranges) else 1
            pieces += [wanted.part(start, end) for start, end in cut(wanted.start, wanted.end, count)]
        return pieces

    def read(self, wanted: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task."""
        with crossing():
            if isinstance(wanted, (OffsetRange, OffsetRanges)):
                ranges = wanted.ranges if isinstance(wanted, OffsetRanges) else (wanted,)
                if isinstance(self.inside, Combiner):
                    yield from self.inside.give(ranges, self._rows_of_side, self._gives)
                else:
                    yield from self._woven_rows(ranges) if isinstance(wanted, OffsetRanges) else self.rows(ranges)
            elif isinstance(wanted, WatermarkOnly):
                yield watermark_row(self._gives, wanted.watermark)
            elif isinstance(wanted, (Root, Roots)):
                assert self.fused is not None
                roots = wanted.roots if isinstance(wanted, Roots) else (wanted,)
                yield from self.fused.give(roots, lambda topic, ranges: self.sides[topic].rows(ranges), self._gives)
            elif isinstance(wanted, TableSnapshot):
                yield from read_snapshot(wanted, log_for_reading(self.options.log), self._selection)

    def rows(self, ranges: Sequence[OffsetRange]) -> Iterator[pa.RecordBatch]:
        """The rows of ranges, one after the other."""
        return read_ranges(ranges, log_for_reading(self.options.log), self._selection)

    def _rows_of_side(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        return self.sides[wanted.topic].rows((wanted,))

    def _woven_rows(self, ranges: Sequence[OffsetRange]) -> Iterator[pa.RecordBatch]:
        """The rows of ranges, as event time went on."""
        if not any(wanted.has_time for wanted in ranges) or REACHED in self._gives.names:
            return self.rows(ranges)
        return read_in_time_order(ranges, log_for_reading(self.options.log), self._weaving)

    @cached_property
    def _selection(self) -> RowSelection:
        return self._selecting(self._gives)

    @cached_property
    def _weaving(self) -> RowSelection:
        return self._selecting(self._gives.append(FIELDS[REACHED]))

    def _selecting(self, schema: pa.Schema) -> RowSelection:
        options = self.options
        where = None if options.where is None else PushedFilter(options.where)
        condition = self.subscription.condition()
        rule = LatenessRule(options.lateness_us, options.late_until, options.late_window)
        return RowSelection(schema, condition, where, rule=rule, maxima=self.maxima, late_rows=options.late_rows)


@lru_cache(maxsize=OPTIONS_KEPT_MAX)
def _checked_options(given: tuple[tuple[str, str], ...], use: Use, master: str) -> Options:
    """The options, read and checked. Each task of a query gets the same ones, so a process checks them once."""
    options = read_options(dict(given))
    options.check_use(use)
    check_reachable(options.log, master)
    return options
