"""A side of a comparison: a system that holds at most one row of each key, looked at for one moment.

A look is a snapshot where the system has such (`is_moment`): a transaction, a version of a table, a range of offsets. What feeds
a target by a sink has left its marker there; it is read in the same look, and says up to which offsets of which topic the rows follow
the log (`places`). So the other side, where it is that topic, is read up to exactly those offsets, and both may go on meanwhile.

`is_final` says that a difference found now is one: nothing that is still on its way could explain it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.databases.keys import key_texts
from headwater.model.marker import Marker
from headwater.sinks.ledger import LedgerEntry
from headwater.sinks.sink import Shape, Sink, open_sink

At = tuple[str, int]
Places = Mapping[At, int]
"""The next offset of each partition of each topic."""


class Follows(msgspec.Struct, frozen=True):
    """Which stage feeds a target, and how far it has come."""

    stage: str
    marker: Marker

    @property
    def places(self) -> Places:
        """Where the last batch ended in its topics; a capture's or a foreign marker has none."""
        found: dict[At, int] = {}
        for source in self.marker.ends if isinstance(self.marker.ends, list) else []:
            for topic, partitions in (source or {}).items():
                if not topic.startswith("."):
                    found |= {(topic, int(number)): int(offset) for number, offset in partitions.items()}
        return found


class Look(Protocol):
    """What a side holds at one moment."""

    is_moment: bool
    is_final: bool
    follows: Follows | None
    unreadable: list[str]
    """What stands where a row should be, and is none."""

    def chunks(self) -> Iterator[pa.Table]:
        """All rows, in the columns of the shape."""

    def rows(self, keys: pa.Table) -> pa.Table:
        """The rows of some keys."""


class VerifySide(Protocol):
    """One system. `url` has no password in it."""

    url: str

    def shape(self) -> Shape | None:
        """Its columns and key as far as it knows them itself; None where it takes those of the other side."""

    def take(self, shape: Shape) -> None:
        """From now on rows are read in these columns."""

    def look(
        self, *, at: Places | None = None, topic: str | None = None, stage: str | None = None
    ) -> AbstractContextManager[Look]:
        """One moment; `at` asks a log for exactly those offsets, `topic` and `stage` choose among the stages that feed a target."""

    def repairs(self, stage: str) -> Sink:
        """What rows are put right with; `Unsupported` where that is not ours to do."""

    def close(self) -> None:
        """Frees connections."""


class SinkSide:
    """A target of one of our sinks: the sink's own code finds, reads and repairs it. Each kind adds how it is looked at."""

    _sink: Sink

    def __init__(self, url: str) -> None:
        self._given = url
        self._sink = open_sink(url, stage="")
        self.url = self._sink.url
        self._shape: Shape | None = None

    def shape(self) -> Shape | None:
        """None: it takes its columns from the other side."""
        return None

    def take(self, shape: Shape) -> None:
        """From now on rows are read in these columns."""
        self._shape = shape
        self._sink.attach(shape)

    def repairs(self, stage: str) -> Sink:
        """The sink of the stage that feeds the target."""
        assert self._shape is not None
        sink = open_sink(self._given, stage=stage)
        sink.attach(self._shape)
        return sink

    def close(self) -> None:
        """Frees connections."""
        self._sink.close()


def chosen(entries: Mapping[str, LedgerEntry], *, topic: str | None, stage: str | None) -> Follows | None:
    """The stage that is meant among those that feed a target: the one that is named, or the only one that reads the topic."""
    found = [Follows(name, entry.last) for name, entry in entries.items() if entry.last is not None]
    if stage is not None:
        return next((one for one in found if one.stage == stage), None)
    if topic is not None:
        found = [one for one in found if any(name == topic for name, _ in one.places)]
    return found[0] if len(found) == 1 else None


def picked(chunks: Iterator[pa.Table], keys: pa.Table, shape: Shape) -> pa.Table:
    """The rows of some keys among all; for sides that cannot look one up."""
    wanted = key_texts(keys, shape.key)
    found = [chunk.filter(pc.is_in(key_texts(chunk, shape.key), value_set=wanted)) for chunk in chunks]
    return pa.concat_tables([nullable(shape.schema).empty_table(), *found])


def nullable(schema: pa.Schema) -> pa.Schema:
    """The columns as a side gives them: what is missing is null."""
    return pa.schema([field.with_nullable(True) for field in schema])
