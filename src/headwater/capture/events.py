"""An event batch: what one step of a capture appends, put together from changes and from rows of a backfill.

Event time of a source never goes back, and is never ahead of the clock here: a time that is earlier than one given out before counts as
that one. So a database whose clock jumps makes nothing late, and one in the future does not hold back the rest.

A single small transaction is made of its plain values at once: taking columns apart, putting them together and looking at each costs as
much for one row as for some thousand. Invariant: the events are those that the way by columns would give. A change that needs more (a
deletion, a key of several columns, a topic with other columns than the table has now) goes by columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.capture.byte_columns import Indexes
from headwater.capture.progress import CaptureProgress
from headwater.capture.source import (
    DELETE,
    TRANSACTIONS_SCHEMA,
    TRUNCATE,
    ChangeBatch,
    Changes,
    FewRows,
    SourceTable,
    as_table,
    changes_schema,
)
from headwater.capture.spill import Spill, placed
from headwater.capture.topics import (
    HISTORY,
    TIME,
    events_of_changes,
    events_of_rows,
    fitted,
    history_schema,
    key_column,
    live_keys,
    one,
    reached_us,
    removals,
    table_schema,
    times,
)
from headwater.log.arrow.rows import check_size, to_batch
from headwater.log.log import Log
from headwater.log.port.topic import Topic
from headwater.log.port.write import Write
from headwater.model.errors import HeadwaterError

SPILL_BYTES = 128 << 20
"""So much of a transaction whose end has not come is kept in memory."""

_TRANSACTION = pa.struct(list(TRANSACTIONS_SCHEMA))
_COMMITTED = TRANSACTIONS_SCHEMA.get_field_index(TIME)


class EventBatch:
    """Gathers events. Not thread-safe."""

    def __init__(self, log: Log, source: str, committed_us: int, spill: Spill, few: dict[str, FewTopics]) -> None:
        """`committed_us` is the event time that the source had reached; `few` keeps what is known of each table for the next batch."""
        self._log = log
        self._source = source
        self._spill = spill
        self._few = few
        self._now_us = log.clock()
        self._appends: list[tuple[Topic, pa.RecordBatch]] = []
        """With the topic as it was when the events were made: the table may change within a step, and its topics with it."""
        self.committed_us = committed_us
        self.events = 0

    def __bool__(self) -> bool:
        return bool(self._appends) or bool(self._spill)

    def writes(self) -> list[Write]:
        """All events, placed, in order."""
        now = [write for topic, batch in self._appends for write in placed(topic, batch)]
        return [*self._spill.writes(), *now]

    def spill(self) -> None:
        """Puts what was gathered so far into files, if it is much."""
        if sum(batch.nbytes for _, batch in self._appends) < SPILL_BYTES:
            return
        for topic, batch in self._appends:
            self._spill.add(placed(topic, batch))
        self._appends.clear()

    def add(self, part: Changes, tables: Mapping[str, SourceTable], progress: CaptureProgress) -> list[tuple[str, str]]:
        """The events of changes; of tables that cannot take theirs the name, and why."""
        refused, reached = [], self.committed_us
        for batch in part.batches:
            table = progress.tables.get(batch.table)
            if table is None or table.state == "stopped":
                continue
            try:
                reached = max(reached, self._add_batch(batch, tables[batch.table], table.topic))
            except HeadwaterError as error:
                refused.append((batch.table, str(error)))
        for topic, rows in (
            (f"{self._source}.transactions", part.transactions),
            (f"{self._source}.messages", part.messages),
        ):
            if rows is not None:
                reached = max(reached, self._add_told(topic, rows))
        self.committed_us = reached
        return refused

    def add_rows(self, table: SourceTable, topic: str, rows: pa.Table, *, position: str) -> str | None:
        """Rows of a backfill; why the table cannot take them, if so."""
        if not rows.num_rows:
            return None
        self.committed_us = max(self.committed_us, self._now_us, reached_us(self._log, topic, topic + HISTORY))
        current, history = events_of_rows(rows, table, position=position, committed_us=self.committed_us)
        try:
            self._put(topic, current)
            self._put(topic + HISTORY, history)
        except HeadwaterError as error:
            return str(error)
        self.events += rows.num_rows
        return None

    def remove(self, keys: pa.Array, table: SourceTable, topic: str, *, position: str) -> None:
        """Keys that are gone from the table, nobody saw how."""
        committed = times(np.full(len(keys), max(self.committed_us, self._now_us)))
        positions = pa.repeat(position, len(keys))
        self._remove(keys, table, topic, op=DELETE, positions=positions, committed=committed)

    def _add_told(self, topic: str, rows: pa.Table | FewRows) -> int:
        """What is told beside the tables, and its last time."""
        described = self._log.store.topic(topic)
        if isinstance(rows, FewRows) and described.schema.equals(TRANSACTIONS_SCHEMA):
            events, last_us = few_transactions(rows.rows, floor_us=self._floor_us(topic), now_us=self._now_us)
            self._appends.append((described, events))
            return last_us
        table = as_table(rows)
        us = self._clamped(table, topic)
        if len(us):
            self._put(topic, table.set_column(table.schema.get_field_index(TIME), TIME, times(us)))
        return int(us[-1]) if len(us) else 0

    def _add_batch(self, batch: ChangeBatch, table: SourceTable, topic: str) -> int:
        """Changes of one table, and the last time."""
        if isinstance(batch.given, FewRows):
            last_us = self._add_few(batch.given.rows, table, topic)
            if last_us is not None:
                return last_us
        us = self._clamped(batch.changes, topic, topic + HISTORY)
        self._add_changes(batch.changes, table, topic, us)
        return int(us[-1]) if len(us) else 0

    def _add_few(self, rows: Sequence[tuple[Any, ...]], table: SourceTable, topic: str) -> int | None:
        """A few changes, and the last time; None where they are not plain."""
        current, history = self._log.store.topic(topic), self._log.store.topic(topic + HISTORY)
        known = self._few.get(topic)
        if known is None or not known.are(table, current, history):
            known = self._few[topic] = few_topics(table, current, history)
        floor_us = self._floor_us(topic, topic + HISTORY)
        made = few_events(rows, known, floor_us=floor_us, now_us=self._now_us)
        if made is None:
            return None
        events, told, last_us = made
        check_size(events, current)
        check_size(told, history)
        self._appends += [(current, events), (history, told)]
        self.events += len(rows)
        return last_us

    def _add_changes(self, changes: pa.Table, table: SourceTable, topic: str, us: Indexes) -> None:
        """Changes of one table; a truncation removes each key that lives there."""
        truncates = []
        if changes.column("after").null_count:
            truncates = np.flatnonzero(pc.equal(changes.column("op"), TRUNCATE).to_numpy()).tolist()
        start, committed = 0, times(us)
        for at in [*truncates, changes.num_rows]:
            if at > start:
                some, when = changes, committed
                if truncates:
                    some, when = changes.slice(start, at - start), committed.slice(start, at - start)
                current, history = events_of_changes(some, table, when)
                self._put(topic, current)
                self._put(topic + HISTORY, history)
                self.events += some.num_rows
            if at < changes.num_rows:
                self._truncate(changes.slice(at, 1), table, topic, int(us[at]))
            start = at + 1

    def _truncate(self, change: pa.Table, table: SourceTable, topic: str, committed_us: int) -> None:
        """Tombstones for the keys that live in the log, and for those that this batch has put there before."""
        described = self._log.topic(topic)
        there = live_keys(self._log, described)
        added = [write.rows().column(described.key) for write in self.writes() if write.topic.name == topic]
        keys = pc.unique(pa.chunked_array([there, *added], there.type))
        positions = pa.repeat(change.column("position")[0], len(keys))
        when = times(np.full(len(keys), committed_us))
        self._remove(keys, table, topic, op=TRUNCATE, positions=positions, committed=when)

    def _remove(
        self, keys: pa.Array, table: SourceTable, topic: str, *, op: str, positions: pa.Array, committed: pa.Array
    ) -> None:
        if len(keys):
            current, history = removals(keys, table, op=op, position=positions, committed=committed)
            self._put(topic, current)
            self._put(topic + HISTORY, history)
            self.events += len(keys)

    def _put(self, topic: str, events: pa.Table | pa.RecordBatch) -> None:
        described = self._log.store.topic(topic)
        schema = described.schema
        batch = to_batch(fitted(events, schema), schema)
        check_size(batch, described)
        self._appends.append((described, batch))

    def _clamped(self, rows: pa.Table, *topics: str) -> Indexes:
        """When rows count as committed."""
        us = np.minimum(one(rows.column(TIME)).view(pa.int64()).to_numpy(), self._now_us)
        clamped: Indexes = np.maximum.accumulate(np.maximum(us, self._floor_us(*topics)))
        return clamped

    def _floor_us(self, *topics: str) -> int:
        """No event is earlier: what was told of a topic meanwhile, by whoever waits for it, holds as well."""
        return max(self.committed_us, reached_us(self._log, *topics))


class FewTopics(NamedTuple):
    """A table and its topics as they were when this was made.

    `events` are the columns of its changes but for `before`; `key` is the key's place in a row, None where the other way is needed.
    """

    table: SourceTable
    current: Topic
    history: Topic
    events: pa.StructType
    key: int | None

    def are(self, table: SourceTable, current: Topic, history: Topic) -> bool:
        """Whether it still holds."""
        return self.table is table and self.current is current and self.history is history


def few_topics(table: SourceTable, current: Topic, history: Topic) -> FewTopics:
    """What is known of a table before its next change comes."""
    is_same = current.schema.equals(table_schema(table)) and history.schema.equals(history_schema(table))
    key = table.schema.names.index(key_column(table)) if is_same and len(table.key) == 1 else None
    columns = [field for field in changes_schema(table.schema) if field.name != "before"]
    return FewTopics(table, current, history, pa.struct(columns), key)


def few_events(
    changes: Sequence[tuple[Any, ...]], topics: FewTopics, *, floor_us: int, now_us: int
) -> tuple[pa.RecordBatch, pa.RecordBatch, int] | None:
    """The events of the table's topic, those of its history, and the last time; None where they have to be made the other way.

    `changes` are values as a `Change` has them. One counts as committed at `floor_us` or later, and never before one in front of it nor
    after `now_us`.
    """
    if topics.key is None:
        return None
    rows, befores = [], []
    for op, before, after, position, transaction, order, committed_us in changes:
        if after is None:
            return None
        floor_us = max(floor_us, min(committed_us, now_us))
        rows.append((op, after, position, transaction, order, floor_us))
        befores.append(before)
    op, after, *others = pa.array(rows, topics.events).flatten()
    columns = after.flatten()
    # A type in which there are no values costs as much as one with some.
    before = pa.array(befores, after.type) if any(befores) else pa.nulls(len(rows), after.type)
    current = pa.RecordBatch.from_arrays([*columns, others[-1]], schema=topics.current.schema)
    history = [columns[topics.key], op, before, after, *others]
    return current, pa.RecordBatch.from_arrays(history, schema=topics.history.schema), floor_us


def few_transactions(rows: Sequence[tuple[Any, ...]], *, floor_us: int, now_us: int) -> tuple[pa.RecordBatch, int]:
    """Begin and end of transactions, with times as `few_events` has them, and the last time."""
    made = []
    for row in rows:
        floor_us = max(floor_us, min(row[_COMMITTED], now_us))
        made.append((*row[:_COMMITTED], floor_us, *row[_COMMITTED + 1 :]))
    return pa.RecordBatch.from_arrays(pa.array(made, _TRANSACTION).flatten(), schema=TRANSACTIONS_SCHEMA), floor_us
