"""The log as a side: the table of a topic, or the rows of a view, as its topic of changes folds to.

Both are exact up to any offsets that are still there. A compacted topic may have lost what a key was at earlier ones, so there a
difference is final only where it was read up to its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc

from headwater.capture.progress import captures
from headwater.capture.topics import PRIMARY_KEY, TIME
from headwater.log.arrow.table import Newest
from headwater.log.log import Log, open_log
from headwater.model.errors import InvalidInput, NotFound, Unsupported
from headwater.model.url import without_password
from headwater.sinks.newest_rows import PLACE
from headwater.sinks.sink import Shape, Sink
from headwater.sinks.view_changes import rows_of_changes
from headwater.verify.side import Follows, Look, Places, nullable, picked
from headwater.views.catalog import ViewCatalog
from headwater.views.definition import ViewDefinition
from headwater.views.topic import changes_topic

_PIECE_ROWS = 65_536


class TopicSide:
    """The newest row of each key of a topic; with `view` that of a view whose changes it has."""

    def __init__(self, log: Log, topic: str, *, view: ViewDefinition | None = None) -> None:
        self.url = f"{without_password(log.url)}#{topic if view is None else view.name}"
        self.topic = topic
        self._log = log
        self._view = view
        self._shape: Shape | None = None

    def shape(self) -> Shape | None:
        topic = self._log.topic(self.topic)
        if self._view is not None:
            return Shape(self._view.name, nullable(self._view.schema), self._view.key)
        if topic.key is None:
            raise InvalidInput(
                f"Topic {self.topic!r} has no key, so it is not a table.", advice="Choose a topic with a key."
            )
        return Shape(self.topic, topic.schema, (topic.key,))

    def added(self) -> set[str]:
        """The columns that the table has besides those of the database it is captured from."""
        tables = [table for progress in captures(self._log).values() for table in progress.tables.values()]
        return {PRIMARY_KEY, TIME} if any(table.topic == self.topic for table in tables) else set()

    def take(self, shape: Shape) -> None:
        self._shape = shape

    @contextmanager
    def look(self, *, at: Places | None = None, topic: str | None = None, stage: str | None = None) -> Iterator[Look]:
        assert self._shape is not None
        ends = {number: span.stop for number, span in self._log.offsets(self.topic).items()}
        asked = {number: offset for (name, number), offset in (at or {}).items() if name == self.topic}
        read = {number: min(end, asked.get(number, 0)) for number, end in ends.items()} if asked else ends
        compacts = self._log.topic(self.topic).compact
        yield _TopicLook(self._rows(read), self._shape, is_final=read == ends or not compacts)

    def behind(self, places: Places) -> int:
        """How many events the log has beyond some places."""
        spans = self._log.offsets(self.topic).items()
        return sum(max(0, span.stop - places.get((self.topic, number), span.start)) for number, span in spans)

    def repairs(self, stage: str) -> Sink:
        raise Unsupported(
            f"{self.url} is a log, and events in a log never change.",
            advice="Append the missing events. Repair a captured table with a new backfill.",
        )

    def close(self) -> None:
        self._log.close()

    def _rows(self, ends: dict[int, int]) -> pa.Table:
        """The newest rows up to these offsets."""
        topic = self._log.topic(self.topic)
        newest = Newest(topic, as_of=None)
        extra = list(PLACE) if self._view is not None else []
        columns = list(dict.fromkeys([*newest.columns, *extra]))
        for batch in self._log.scan(self.topic, end=ends, columns=columns):
            newest.add(batch)
        assert self._shape is not None
        if self._view is None:
            return newest.table(self._log.store, columns=self._shape.schema.names)
        rows = rows_of_changes(newest.table(self._log.store, columns=columns))
        return rows.filter(pc.invert(rows.column("_deleted"))).select(self._shape.schema.names)


class _TopicLook:
    is_moment = True

    def __init__(self, rows: pa.Table, shape: Shape, *, is_final: bool) -> None:
        self._rows = rows.cast(nullable(shape.schema))
        self._shape = shape
        self.is_final = is_final
        self.follows: Follows | None = None
        self.unreadable: list[str] = []

    def chunks(self) -> Iterator[pa.Table]:
        for start in range(0, self._rows.num_rows, _PIECE_ROWS):
            yield self._rows.slice(start, _PIECE_ROWS)

    def rows(self, keys: pa.Table) -> pa.Table:
        return picked(self.chunks(), keys, self._shape)


def open_log_side(url: str) -> TopicSide:
    """The side of `<log>#<topic or view>`; `NotFound`."""
    address, _, name = url.rpartition("#")
    log = open_log(address, create=False, read_only=True)
    try:
        if name in log.topics():
            return TopicSide(log, name)
        catalog = ViewCatalog(log)
        if name in catalog.names():
            definition = catalog.get(name).definition
            return TopicSide(log, changes_topic(log, definition), view=definition)
        raise NotFound(
            f"{without_password(address)} has neither a topic nor a view {name!r}.",
            advice="`headwater topics list` prints the topics.",
        )
    except BaseException:
        log.close()
        raise
