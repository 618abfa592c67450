"""The stream reader: Spark asks it how far a query may go on, and tasks read what lies between two such offsets.

Spark makes it in two kinds of processes. One Python process for each query plans: it lives as long as the query and is asked for
offsets before every batch. Workers read: there the reader arrives pickled, and only `read` is called. So nothing is opened before
it is needed, and nothing that fails stands in the constructor, from which Spark would carry another error than ours.

A partition that the query has not seen before (a new topic that matches, a topic that grew) enters a batch with its first offset
as its end and is read from there in the next. So where its reading began stands in the checkpoint, and a batch that is run
again reads the same. One that was split off waits until its parent was read up to the fence, so every key keeps its order.

The rows of a small batch are read where it is planned, and handed to Spark with the plan (see `planned_rows`); in a log in a folder while
Spark still writes down that it will come (see `prefetch`). Where nothing is to be read, a source of an application waits until something
comes (see `arrivals`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from headwater.log.port.split import is_held
from headwater.log.port.topic import Topic
from headwater.model.clock import NO_TIME
from headwater.model.errors import HeadwaterError
from headwater.processing.checkpoint.offsets import (
    EVENTS,
    LATEST,
    REACHED,
    VERSION,
    WATERMARK,
    At,
    Offsets,
    reached_to_json,
    share,
    to_json,
)
from headwater.processing.operators.beats import Pace
from headwater.processing.source.arrivals import Arrivals
from headwater.processing.source.capture_transactions import whole_ends
from headwater.processing.source.load import Load
from headwater.processing.source.prefetch import Prefetch
from headwater.processing.source.range_reader import OffsetRange, WatermarkOnly, reached_in
from headwater.processing.source.topic_subscription import TopicSubscription, taken_back
from headwater.processing.spark.errors import crossing
from headwater.processing.spark.planned_rows import PlannedRowsReader
from headwater.processing.time.event_time import BATCH_WATERMARK

_Batch = tuple[Sequence[InputPartition], list[pa.RecordBatch] | None]

FETCH_BYTES_MAX = 4 << 20
"""So large, or smaller, is a batch that is read where it is planned."""


class StreamReader(PlannedRowsReader, SupportsTriggerAvailableNow):
    """Reads topics as a stream."""

    def __init__(self, query: Load) -> None:
        self._query = query
        self._target: Mapping[At, int] | None = None
        self._next: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._ahead = Prefetch[_Batch]()
        self._idle_at: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Where a new query begins: `startingOffsets`, without it the present end."""
        with crossing():
            places: dict[At, int] = {}
            for query in self._query.sides.values() or (self._query,):
                where, subscription = query.options.starting, query.checked
                where = LATEST if where is None else where
                places |= subscription.resolve("startingOffsets", where, subscription.topics())
            read = self._subscription.read_with(self._subscription.topics())
            return self._offsets(places, Offsets({}, {}), read).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """`maxOffsetsPerTrigger`."""
        with crossing():
            limit = self._query.options.offsets_max
            return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        """What is there now is what this run reads."""
        with crossing():
            stop = self._query.options.stop
            if self._query.options.capture is not None:
                self._target = self._whole_ends()
            else:
                self._target = self._ends() if stop is None else Offsets.from_json(json.loads(stop)).places

    def reportLatestOffset(self) -> dict[str, Any]:
        """The ends, so that Spark's progress shows the lag.

        Spark asks right behind `latestOffset`, and comes back for the batch when it has written down that there is one.
        """
        with crossing():
            ends = to_json(self._ends())
            if self._next is not None and self._query.log.store.capabilities.folder is not None:
                asked, self._next = self._next, None
                self._ahead.begin(asked, partial(self._batch, *asked))
            return ends

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """How far the next batch goes.

        The second time that nothing is new since the last batch, it waits for something. Not the first time: only behind the answer
        does Spark see whether its own operators need a batch without events, and tell that the query has nothing to do.
        """
        with crossing():
            if self._arrivals is not None:
                self._arrivals.wait(is_idle=self._idle_at == start)
            end = self._latest(start, limit)
            self._idle_at = end if end == start and self._is_whole(end) else None
        self._next = None if end == start else (start, end)
        return end

    def commit(self, end: dict[str, Any]) -> None:
        """Spark has begun with a batch, maybe one without events; another may be due right after it."""
        self._idle_at = None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The tasks of a batch."""
        with crossing():
            self._idle_at = None
            tasks, self.fetched = self._ahead.take((start, end)) or self._batch(start, end)
            return tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task."""
        return self._query.read(partition)

    @property
    def _subscription(self) -> TopicSubscription:
        return self._query.checked

    @cached_property
    def _arrivals(self) -> Arrivals | None:
        """What may be waited for; a run over what is there never waits."""
        awaits = self._query.options.awaits
        return Arrivals(self._query.log, awaits) if awaits and self._target is None else None

    def _is_whole(self, end: dict[str, Any]) -> bool:
        """Whether nothing but an arrival can change this answer: events of a capture may be there whose transaction is not whole."""
        return self._query.options.capture is None or Offsets.from_json(end).places == self._ends()

    def _latest(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        before = Offsets.from_json(start)
        topics = self._subscription.checked(before)
        if self._query.options.capture is not None:
            return self._whole(before, topics).to_json()
        bounds = self._subscription.bounds(topics)
        self._subscription.check_as_planned()
        places = dict(before.places)
        lags: dict[At, int] = {}
        for at, bound in bounds.items():
            end = bound.end if self._target is None else min(bound.end, self._target.get(at, -1))
            if at in before.places:
                if before.places[at] > bound.end:
                    raise taken_back(at, before.places[at], bound.end)
                lags[at] = 0 if _is_held(topics, at, before) else end - before.places[at]
            elif end >= 0:
                places[at] = bound.first
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else sum(max(lag, 0) for lag in lags.values())
        for at, count in share(lags, most).items():
            places[at] += count
        return self._paced(before, self._offsets(places, before, self._subscription.read_with(topics)), topics)

    def _batch(self, start: dict[str, Any], end: dict[str, Any]) -> _Batch:
        """The tasks of a batch, and its rows where it is small."""
        before, after = Offsets.from_json(start), Offsets.from_json(end)
        topics = {topic.name: topic for topic in self._subscription.checked(after)}
        bounds = self._subscription.bounds(topics.values())
        watermark, reached = after.more.get(WATERMARK, NO_TIME), after.reached
        ranges: list[OffsetRange] = []
        for at in sorted(after.places.keys() & bounds.keys() & before.places.keys()):
            if after.places[at] > bounds[at].end:
                raise taken_back(at, after.places[at], bounds[at].end)
            if before.places[at] < after.places[at]:
                first = min(self._subscription.check_kept(at, before.places[at], bounds[at]), after.places[at])
                skips = not self._query.options.fails_on_loss
                running = reached[at][1] if at in reached else None
                wanted = OffsetRange(topics[at[0]], at[1], first, after.places[at], skips=skips, running=running)
                wanted.watermark, wanted.passed = watermark, before.more.get(WATERMARK, NO_TIME)
                ranges.append(wanted)
        if not ranges and BATCH_WATERMARK in self._query.names and watermark > before.more.get(WATERMARK, NO_TIME):
            passing = WatermarkOnly(watermark)
            return [passing], None if self._query.is_nested else list(self.read(passing))
        tasks = self._query.tasks(ranges) if self._query.fused is None else self._query.roots(ranges, before, after)
        return tasks, self._fetch(tasks[0]) if len(tasks) == 1 and self._query.is_small(ranges) else None

    def _fetch(self, task: InputPartition) -> list[pa.RecordBatch] | None:
        """The rows of a small batch; none if they are too large, or if reading fails: a task says that better.

        What it gives is read by one task either way, so the number of tasks never depends on it. Arrays, maps and structs are left
        to tasks: Spark fails where it copies nulls in them.
        """
        if self._query.is_nested:
            return None
        fetched, size = [], 0
        try:
            for batch in self.read(task):
                fetched.append(batch)
                size += batch.nbytes
                if size > FETCH_BYTES_MAX:
                    return None
        except HeadwaterError:
            return None
        return fetched

    def _whole(self, before: Offsets, topics: Sequence[Topic]) -> Offsets:
        """The next ends at which transactions of a capture are whole, in all partitions at once: nothing waits for another."""
        ends = self._whole_ends() if self._target is None else self._target
        for at, end in ends.items():
            if before.places.get(at, 0) > end:
                raise taken_back(at, before.places[at], end)
        events = sum(end - before.places.get(at, 0) for at, end in ends.items())
        if not events:
            return before
        offsets = self._offsets({**before.places, **ends}, before, self._subscription.read_with(topics))
        return msgspec.structs.replace(offsets, more={**before.more, EVENTS: before.more.get(EVENTS, 0) + events})

    def _whole_ends(self) -> dict[At, int]:
        options = self._query.options
        assert options.capture is not None
        return whole_ends(self._query.log, options.capture, options.topics)

    def _paced(self, begin: Offsets, offsets: Offsets, topics: Sequence[Topic]) -> dict[str, Any]:
        """The offsets, with their watermark where it is asked for, told to those who keep pace."""
        pace = self._query.options.pace
        if pace is None and not self._query.has_watermark and self._query.maxima is None:
            return self._numbered(begin, offsets).to_json()
        before, maxima = offsets.more.get(WATERMARK, NO_TIME), self._query.maxima
        told: dict[str, Any] = {}
        reached: Mapping[At, int] = {}
        if self._query.log.store.capabilities.tells_lateness:
            reached = self._subscription.reached(topics, offsets.places)
        elif maxima is not None:
            known = maxima.reached(begin.places, begin.reached, self._read_again)
            told, reached = {REACHED: reached_to_json(known)}, {at: time for at, (_, time) in known.items()}
        passed = self._passed(topics, reached)
        more = {**offsets.more, **told, WATERMARK: max(before, passed, self._stopped(offsets.places))}
        paced = self._numbered(begin, msgspec.structs.replace(offsets, more=more)).to_json()
        if pace is not None:
            Pace(pace).tell(sorted(offsets.topics), paced)
        return paced

    def _passed(self, topics: Sequence[Topic], reached: Mapping[At, int]) -> int:
        """The watermark. Who has several inputs waits for each of them, also for one that has no event yet."""
        tells = self._query.has_watermark and self._query.log.store.capabilities.tells_lateness
        groups = [topics] if self._query.inside is None else [[topic] for topic in topics]
        return min(self._subscription.watermark(group, reached, tells=tells) for group in groups)

    def _numbered(self, begin: Offsets, offsets: Offsets) -> Offsets:
        """The offsets, with what Spark cannot know where not all events become rows: how many were read in all.

        Where an operator is inside the source, with the next version of its state.
        """
        if offsets == begin or (self._query.inside is None and not self._query.options.where):
            return offsets
        events = sum(offsets.places[at] - offset for at, offset in begin.places.items())
        counted = {EVENTS: begin.more.get(EVENTS, 0) + events}
        if self._query.fused is not None:
            counted[VERSION] = begin.more.get(VERSION, -1) + 1
        return msgspec.structs.replace(offsets, more={**offsets.more, **counted})

    def _read_again(self, at: At, start: int, end: int, running: int) -> int:
        topic = next(topic for topic in self._subscription.topics() if topic.name == at[0])
        return reached_in(OffsetRange(topic, at[1], start, end, skips=True), self._query.log, running)

    def _stopped(self, places: Mapping[At, int]) -> int:
        """The watermark that the other query had at these offsets, if it is they that this one ends at."""
        stop = self._query.options.stop
        if stop is None:
            return NO_TIME
        other = Offsets.from_json(json.loads(stop))
        is_there = all(places.get(at) == offset for at, offset in other.places.items())
        return int(other.more.get(WATERMARK, NO_TIME)) if is_there else NO_TIME

    def _ends(self) -> dict[At, int]:
        return {at: bound.end for at, bound in self._subscription.bounds(self._subscription.topics()).items()}

    def _offsets(self, places: Mapping[At, int], before: Offsets, read: Mapping[str, Any]) -> Offsets:
        kept = msgspec.structs.replace(before, places=places, topics={**before.topics, **read})
        return msgspec.structs.replace(kept, incarnation=self._subscription.incarnation())


def _is_held(topics: Sequence[Topic], at: At, before: Offsets) -> bool:
    """Whether a partition that was split off has to wait: its keys' events of before are read in earlier batches."""
    name, number = at
    ancestors = next((topic.ancestors(number) for topic in topics if topic.name == name), ())
    return is_held(ancestors, lambda ancestor: before.places.get((name, ancestor), 0))
