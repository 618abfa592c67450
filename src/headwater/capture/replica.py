"""A database read as its replicas read it, by the log that it writes anyway: what PostgreSQL and MariaDB have in common.

Changes come from a session that goes on behind a position. Whatever goes wrong ends the session, and the next call begins another behind
the position it is given, so nothing is told twice and nothing is passed over. What differs (how a session is begun, what it reads) is in
the two classes. So is the choice of tables: which of a database are captured, and by which key.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from headwater.capture.source import Changes
from headwater.capture.source_url import SourceUrl
from headwater.model.errors import HeadwaterError, NotCapturable

T = TypeVar("T")
Key = tuple[str, ...]


class ReplicaSource(ABC):
    """One database; made by `source_of`, which connects to nothing yet."""

    def __init__(self, url: SourceUrl, *, name: str, keys: Mapping[str, tuple[str, ...]]) -> None:
        self.name = name
        self.url = url.shown
        self.identity = ""
        self.left_out: dict[str, str] = {}
        self._keys = keys
        self._names = url.tables
        self._ready: deque[Changes] = deque()
        """Read, and not handed over yet."""
        self._watch_lock = threading.Lock()
        """Of the connection that `lag` asks by."""

    @abstractmethod
    def _read(self, after: str, timeout_s: float) -> list[Changes]:
        """What the session has next; a new one is begun where there is none that goes on behind `after`."""

    @abstractmethod
    def _end_session(self) -> None:
        """Ends the session and forgets what it has read."""

    def changes(self, after: str, *, timeout_s: float) -> Changes | None:
        """What committed behind `after`; waits up to `timeout_s` for the first.

        With 0 the answer is none only if nothing is left of what had committed when it was asked for.
        """
        if not self._ready:
            try:
                self._ready.extend(self._read(after, timeout_s))
            except HeadwaterError:
                self._end_session()
                raise
        return self._ready.popleft() if self._ready else None


def with_keys(
    tables: Mapping[str, T],
    names: Sequence[str],
    keys: Mapping[str, Sequence[str]],
    key_of: Callable[[T, Sequence[str]], Key],
) -> tuple[dict[str, Key], dict[str, str]]:
    """The keys of the tables that are named, or of all that can be captured; and why the others cannot."""
    if names:
        return {name: key_of(tables[name], keys.get(name, ())) for name in names}, {}
    found, left_out = {}, {}
    for name, table in tables.items():
        try:
            found[name] = key_of(table, keys.get(name, ()))
        except NotCapturable as error:
            left_out[name] = str(error)
    return found, left_out


def nothing_to_capture(shown: str) -> NotCapturable:
    """No table has what it takes."""
    return NotCapturable(
        f"{shown} has no table that can be captured.",
        advice="Add a primary key to a table: ALTER TABLE … ADD PRIMARY KEY (…);",
    )


def not_captured(table: str) -> NotCapturable:
    """A table was captured, and is no more."""
    return NotCapturable(f"Table {table} is no longer captured.", advice="See `headwater capture status`.")
