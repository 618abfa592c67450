"""The log of a queue: what queues and transactions use of a log. `Log` offers it; nothing here knows `Log` itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa
from msgspec import UnsetType

from headwater.log.clients.appender import Appender
from headwater.log.clients.reader import Reader, Start
from headwater.log.port.store import Store
from headwater.log.port.topic import Durability, Retain, Topic
from headwater.model.clock import Clock
from headwater.model.schema import SchemaLike


class QueueLog(Protocol):
    """A log, as far as its queues and transactions use it."""

    @property
    def store(self) -> Store: ...

    @property
    def appender(self) -> Appender: ...

    @property
    def clock(self) -> Clock: ...

    def create_topic(
        self,
        name: str,
        schema: SchemaLike | None = ...,
        *,
        key: str | None = ...,
        time: str | None = ...,
        partitions: int = ...,
        durability: Durability | None = ...,
        segment_bytes: int = ...,
        event_bytes_max: int = ...,
        retain: Retain = ...,
        exist_ok: bool = ...,
    ) -> Topic: ...

    def alter_topic(
        self, name: str, *, schema: SchemaLike | UnsetType = ..., retain: Retain | UnsetType = ...
    ) -> Topic: ...

    def append(self, topic: str, rows: Any) -> Mapping[int, range]: ...

    def reader(self, topic: str | Sequence[str], *, start: Start = ...) -> Reader: ...

    def scan(self, topic: str, *, columns: Sequence[str] | None = ...) -> pa.RecordBatchReader: ...
