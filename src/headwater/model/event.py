"""An event: an immutable fact as a reader sees it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event of a topic.

    `value` is a dict of columns, or bytes for a topic without a schema; `None` says that the key was deleted.
    Times are kept as microseconds since 1970 and become `datetime` only when asked for: a reader of a million events
    a second cannot afford two `datetime`s for each.
    """

    key: Any
    value: Any
    time_us: int
    appended_us: int
    topic: str
    partition: int
    offset: int
    headers: Mapping[str, bytes] | None = None

    @property
    def time(self) -> datetime:
        """Event time: when it happened. The log's time where the topic declares no time column."""
        return _EPOCH + timedelta(microseconds=self.time_us)

    @property
    def appended(self) -> datetime:
        """The log's time: when it was appended."""
        return _EPOCH + timedelta(microseconds=self.appended_us)
