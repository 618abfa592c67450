"""What the tests of captured servers share: a database of its own for each test, and a log that captures it."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import headwater
from headwater.capture.capture import Capture
from headwater.capture.source_url import open_source
from headwater.log.log import Log

_NUMBERS = itertools.count()

R = TypeVar("R", bound="ServerRig")


class ServerRig(ABC):
    """One database, one log; a capture between them whenever one is asked for."""

    url: str

    def __init__(self, log: Log) -> None:
        self.log = log
        self.name = f"shop{next(_NUMBERS)}"

    @abstractmethod
    def run(self, *statements: str) -> list[Any]:
        """Statements, each a transaction of its own; the rows of the last."""

    @abstractmethod
    def end_position(self) -> str:
        """Where the database is now, so that what has committed is before it."""

    @abstractmethod
    def end(self) -> None:
        """Everything is removed, the database too."""

    @contextmanager
    def capture(
        self, *tables: str, backfill_again: bool = False, heartbeat_s: float = 1000.0, url: str = "", key: Any = None
    ) -> Iterator[Capture]:
        """A capture that has caught up, and is closed at the end."""
        source = open_source(url or self.url, tables, name=self.name, key=key)
        capture = Capture(self.log, source, backfill_again=backfill_again, heartbeat_s=heartbeat_s)
        try:
            capture.open()
            follow(capture, self)
            yield capture
        finally:
            capture.close()

    def table(self, name: str) -> list[dict[str, Any]]:
        """A topic's table, by its first column."""
        rows = self.log.table(name).to_pylist()
        return sorted(
            ({k: v for k, v in row.items() if k != "committed"} for row in rows),
            key=lambda row: str(next(iter(row.values()))),
        )

    def history(self, name: str) -> list[dict[str, Any]]:
        """What happened to a table, in order."""
        return sorted(self.log.read(f"{name}.changes").to_pylist(), key=lambda row: (row["position"], row["op"]))


def follow(capture: Capture, rig: ServerRig) -> None:
    """Lets a capture come to where the database is now."""
    wanted = rig.end_position()
    while capture._end < wanted or capture._is_copying():
        capture.step()


@contextmanager
def rigged(make: Callable[[Log], R], folder: Path) -> Iterator[R]:
    """A rig that leaves nothing behind."""
    with headwater.open_log(str(folder / "log"), durability="os") as log:
        rig = make(log)
        try:
            yield rig
        finally:
            rig.end()
