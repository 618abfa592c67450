"""The captured topics of one source in the log: made, widened when a table changes, and told that time goes on.

A topic belongs to one capture. One that somebody else made, or that another capture fills, is never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa

from headwater.capture.progress import TableProgress, captures
from headwater.capture.source import MESSAGES_SCHEMA, TRANSACTIONS_SCHEMA, SourceTable
from headwater.capture.topics import (
    EVENT_BYTES_MAX,
    HISTORY,
    TIME,
    history_schema,
    key_column,
    reached_us,
    table_schema,
)
from headwater.log.log import Log
from headwater.log.port.topic import Topic, check_name
from headwater.model.clock import Duration
from headwater.model.errors import NotCapturable, SchemaConflict, Unsupported
from headwater.model.schema import has_room_for


class CapturedTopics:
    """The topics of one source; safe from any thread."""

    def __init__(
        self,
        log: Log,
        source: str,
        *,
        prefix: str,
        names: Mapping[str, str],
        partitions: int,
        retention: Duration | None,
    ) -> None:
        self._log = log
        self._source = source
        self._prefix = prefix
        self._names = dict(names)
        self._partitions = partitions
        self._retention = retention
        self.transactions = f"{source}.transactions"
        self.messages = f"{source}.messages"

    def name(self, table: str) -> str:
        """The topic that is a table."""
        return check_name(self._names.get(table, self._prefix + table))

    def make(self, info: SourceTable) -> bool:
        """Makes the topics of a table, or widens them; returns whether they hold events already. `NotCapturable`, `SchemaConflict`."""
        topic = self.name(info.name)
        self._check_free(topic)
        kept = {"retention": self._retention}
        settings = {
            "key": key_column(info),
            "time": TIME,
            "partitions": self._partitions,
            "event_bytes_max": EVENT_BYTES_MAX,
        }
        self._make(topic + HISTORY, history_schema(info), {**settings, **kept})
        self._make(topic, table_schema(info), {**settings, "compact": True})
        for name, schema in ((self.transactions, TRANSACTIONS_SCHEMA), (self.messages, MESSAGES_SCHEMA)):
            self._log.create_topic(name, schema, time=TIME, partitions=1, exist_ok=True, **kept)  # type: ignore[arg-type]
        return any(span.stop for span in self._log.offsets(topic).values())

    def reached_us(self, tables: Mapping[str, TableProgress]) -> int:
        """The latest event time that any of the topics has been told."""
        there = self._log.topics()
        return reached_us(self._log, *(name for name in self._all(tables) if name in there))

    def heartbeat(self, tables: Mapping[str, TableProgress], time_us: int) -> None:
        """Says that nothing more comes up to a time; a log on Kafka has no heartbeats."""
        there = set(self._log.topics())
        with suppress(Unsupported):
            for name in self._all(tables):
                if name in there:
                    self._log.heartbeat(name, time_us)

    def _all(self, tables: Mapping[str, TableProgress]) -> Iterable[str]:
        live = [table.topic for table in tables.values() if table.state != "stopped"]
        return [*live, *(name + HISTORY for name in live), self.transactions]

    def _check_free(self, topic: str) -> None:
        for name, progress in captures(self._log).items():
            if name != self._source and topic in {table.topic for table in progress.tables.values()}:
                raise NotCapturable(
                    f"Topic {topic!r} belongs to a table of another source, {name!r}.",
                    advice="Use a prefix for the names of this capture's topics: --prefix, or prefix= in Python.",
                )
        there = self._log.topics()
        if topic in there and topic + HISTORY not in there and any(s.stop for s in self._log.offsets(topic).values()):
            raise NotCapturable(
                f"Topic {topic!r} already exists, and a capture did not create it.",
                advice="Use a prefix for the names of the captured topics: --prefix, or prefix= in Python.",
            )

    def _make(self, name: str, schema: pa.Schema, settings: Mapping[str, Any]) -> None:
        if name not in self._log.topics():
            self._log.create_topic(name, schema, exist_ok=True, **settings)
            return
        topic = self._log.topic(name)
        _check_key(topic, settings["key"])
        wider = pa.schema(_merged(list(topic.schema), list(schema)))
        if wider != topic.schema:
            try:
                self._log.alter_topic(name, schema=wider)
            except SchemaConflict as error:
                raise SchemaConflict(
                    f"Topic {name!r} cannot take the new schema of its table: {error.what}",
                    advice=f"Delete the topics {name.removesuffix(HISTORY)!r} and {name.removesuffix(HISTORY) + HISTORY!r} and "
                    "start the capture again, which copies the table into new topics. Or revert the change of the column.",
                ) from None


def _check_key(topic: Topic, key: str) -> None:
    if topic.key != key:
        raise SchemaConflict(
            f"The key of topic {topic.name!r} is {topic.key!r}, but the key of its table is now {key!r}.",
            advice="The key of a topic cannot change. Delete the table's topics and start the capture again, or revert "
            "the change of the key.",
        )


def _merged(old: list[pa.Field], new: list[pa.Field]) -> list[pa.Field]:
    """The new columns, and the old ones that are gone, which are null from now on.

    One that is narrower than it was stays as it is: the table may have become wider behind the changes that are still to come.
    """
    names = {field.name for field in new}
    known = {field.name: field for field in old}
    fields = []
    for field in new:
        before = known.get(field.name)
        if before is not None and pa.types.is_struct(before.type) and pa.types.is_struct(field.type):
            field = field.with_type(pa.struct(_merged(list(before.type), list(field.type))))
        elif before is not None and has_room_for(before.type, field.type):
            field = field.with_type(before.type)
        fields.append(field if before is None else field.with_nullable(before.nullable or field.nullable))
    merged = {field.name: field for field in fields}
    order = [field.name for field in old] + [field.name for field in new if field.name not in known]
    return [merged[name] if name in names else known[name] for name in order]
