"""A few changes as events, made of their plain values at once: what a single small transaction is, for which nobody should have to wait.

`topics.events_of_changes` takes columns apart and puts them together, and `to_batch` looks at each of them: calls that cost as much for one
row as for some thousand. Here one call makes the columns of the history, and the table's topic has those of its `after`.

Invariant: the events are those that the other way would give. A change that needs more (a deletion, a key of several columns, a topic with
other columns than the table has now) goes that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from headwater.capture.source import TRANSACTIONS_SCHEMA, TableInfo, changes_schema
from headwater.capture.topics import TIME, history_schema, key_column, table_schema
from headwater.log.port.topic import Topic

_TRANSACTION = pa.struct(list(TRANSACTIONS_SCHEMA))
_COMMITTED = TRANSACTIONS_SCHEMA.get_field_index(TIME)


class FewTopics(NamedTuple):
    """A table and its topics as they were when this was made.

    `events` are the columns of its changes but for `before`; `key` is the key's place in a row, None where the other way is needed.
    """

    table: TableInfo
    current: Topic
    history: Topic
    events: pa.StructType
    key: int | None

    def are(self, table: TableInfo, current: Topic, history: Topic) -> bool:
        """Whether it still holds."""
        return self.table is table and self.current is current and self.history is history


def few_topics(table: TableInfo, current: Topic, history: Topic) -> FewTopics:
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
