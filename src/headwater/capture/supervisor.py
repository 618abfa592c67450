"""Supervised captures: those of an application, each in a thread of its own, from the tables that were declared with a source.

All tables of one database are one capture. One that fails for good is told in the status; the others go on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import msgspec
import pyarrow as pa

from headwater.capture.capture import Capture
from headwater.capture.progress import CaptureStatus
from headwater.capture.source import CaptureSource
from headwater.capture.source_url import open_source, parse_source_url
from headwater.capture.topics import table_schema
from headwater.log.log import Log
from headwater.model.errors import NotCapturable


class CapturedTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table as it was declared: the topic, where it comes from, and its key if that was given."""

    topic: str
    url: str
    key: tuple[str, ...] | None = None

    @property
    def table(self) -> str:
        """The table in the database: the one that the URL names, or the topic's name."""
        named = parse_source_url(self.url).tables
        if len(named) > 1:
            raise NotCapturable(
                f"Table {self.topic!r} declares {len(named)} tables of its source.",
                advice="Declare each table separately: app.table(name, source=…?table=…).",
            )
        return named[0] if named else self.topic

    @property
    def shown(self) -> str:
        """Where it comes from, without secrets."""
        return parse_source_url(self.url).shown


class SupervisedCaptures:
    """The captures of one application. `start`, `stop` and `catch_up` belong to one thread; `statuses` may be asked from any."""

    def __init__(self, declared: Sequence[CapturedTable]) -> None:
        self._groups: dict[str, list[CapturedTable]] = {}
        for table in declared:
            where = msgspec.structs.replace(parse_source_url(table.url), tables=())
            self._groups.setdefault(msgspec.json.encode(where).decode(), []).append(table)
        self._captures: list[Capture] = []
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()

    @property
    def are_open(self) -> bool:
        """Whether the topics are there."""
        return bool(self._captures)

    def schemas(self) -> dict[str, pa.Schema]:
        """The columns that the topics have or will have; nothing is made."""
        found: dict[str, pa.Schema] = {}
        for tables in self._groups.values():
            names = {table.table: table.topic for table in tables}
            source = _source(tables)
            try:
                found |= {names[info.name]: table_schema(info) for info in source.check()}
            finally:
                source.close()
        return found

    def open(self, log: Log) -> None:
        """Makes databases and topics ready."""
        for tables in self._groups.values():
            names = {table.table: table.topic for table in tables}
            capture = Capture(log, _source(tables), names=names)
            self._captures.append(capture)
            capture.open()

    def start(self) -> None:
        """Begins to capture, each in its thread."""
        for capture in self._captures:
            name = f"headwater-capture-{capture.source.name}"
            thread = threading.Thread(target=self._run, args=(capture,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def catch_up(self) -> None:
        """Brings what there is now, and returns."""
        for capture in self._captures:
            capture.catch_up()

    def stop(self) -> None:
        """Lets each finish its step, and ends."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for capture in self._captures:
            capture.close()
        self._threads = []

    def statuses(self) -> list[CaptureStatus]:
        """How each is at this moment."""
        return [capture.status() for capture in self._captures]

    def _run(self, capture: Capture) -> None:
        try:
            capture.run(self._stopping)
        except Exception:  # noqa: BLE001 - whatever it was, the status tells it
            return


def _source(tables: Sequence[CapturedTable]) -> CaptureSource:
    keys: Mapping[str, Sequence[str]] = {table.table: table.key for table in tables if table.key is not None}
    return open_source(tables[0].url, [table.table for table in tables], key=keys)
