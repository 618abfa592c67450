"""A subscription: the topics that a query reads, as the log has them now, and the places in them that options name.

It lives where Spark plans (one Python process for each stream), never in a task. Thread-safety: none.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import pyarrow as pa

from headwater.log.arrow.events import output_schema
from headwater.log.log import Log
from headwater.log.port.store import Bounds
from headwater.log.port.topic import Topic
from headwater.model.clock import NO_TIME, time_us
from headwater.model.ddl import type_to_ddl
from headwater.model.errors import (
    EventsMissed,
    HeadwaterError,
    InvalidInput,
    PositionLost,
    SchemaConflict,
    SchemaMoved,
    TopicNotFound,
)
from headwater.model.schema import DELETED, to_ddl
from headwater.processing.checkpoint.offsets import EARLIEST, LATEST, At, Offsets, Place, Places, TopicVersion
from headwater.processing.source.condition import Condition, parse_condition
from headwater.processing.source.options import Options
from headwater.processing.spark.log_cache import log_for_writing
from headwater.processing.time.event_time import BATCH_WATERMARK, FIELDS, may_be_null
from headwater.processing.time.watermark import reached_at, watermark_at

LOG_COLUMNS = ("_key", "_time", "_appended", "_partition", "_offset", "_topic", "_headers", "_deleted")
"""What every event has beside its topic's own columns; in a DataFrame on request."""

_LOOK_S = 1.0
_say = logging.getLogger("headwater.processing")


class TopicSubscription:
    """What one query reads."""

    def __init__(self, log: Log, options: Options) -> None:
        self._log = log
        self._options = options
        self._names: Sequence[str] = ()
        self._looked = 0.0
        self._versions: dict[str, int] = {}

    # Topics and their schema

    def topics(self) -> list[Topic]:
        """The topics as they are now: those named, or those that match by now."""
        return self._found(self._subscribed(), read=self._versions)

    def schema(self) -> pa.Schema:
        """The columns of the DataFrame: those that were asked for, which all topics must have alike."""
        topics = self.topics()
        if not topics:
            raise TopicNotFound(
                f"Option subscribePattern={self._options.pattern!r} matches no topic of {self._log.url} yet.",
                advice=f"Topics of the log: {', '.join(self._log.topics()[:10]) or 'none yet'}. Create one first, or give the schema "
                "with .schema(…).",
            )
        first = self._columns(topics[0])
        fields = [*first]
        for topic in topics[1:]:
            other = self._columns(topic)
            check_alike(first, other, topics[0].name, topic.name)
            fields = [field.with_nullable(field.nullable or other.field(field.name).nullable) for field in fields]
        return pa.schema(fields)

    def condition(self) -> Condition | None:
        """The `filter`, understood."""
        text = self._options.condition
        if text is None:
            return None
        topics = self.topics()
        known = [*topics[0].schema, *output_schema(topics[0], LOG_COLUMNS)] if topics else []
        return parse_condition(text, tuple(known))

    def read_with(self, topics: Iterable[Topic]) -> dict[str, TopicVersion]:
        """The topics' ids, and the schema versions that this run of the query began with."""
        return {
            topic.name: TopicVersion(topic.id, self._versions.setdefault(topic.name, topic.schema_id))
            for topic in topics
        }

    # Places

    def bounds(self, topics: Iterable[Topic]) -> Mapping[At, Bounds]:
        """The offsets that each partition holds, at one moment."""
        names = [topic.name for topic in topics]
        return self._log.store.bounds(names) if names else {}

    def reached(self, topics: Iterable[Topic], places: Mapping[At, int]) -> dict[At, int]:
        """The greatest event time of each partition before these offsets."""
        return reached_at(self._log, topics, places)

    def watermark(self, topics: Iterable[Topic], reached: Mapping[At, int], *, tells: bool = False) -> int:
        """The event time that is passed when partitions have reached so much; with `tells` it is written to the log of empty ones."""
        tell = partial(tell_empty, self._options.log) if tells else None
        return watermark_at(self._log, topics, reached, lateness_us=self._options.lateness_us, tell=tell)

    def incarnation(self) -> int:
        """The log's."""
        return self._log.store.incarnation()

    def resolve(self, option: str, where: Place | Places, topics: Sequence[Topic]) -> dict[At, int]:
        """The offset of each partition that an option names."""
        bounds = self.bounds(topics)
        if isinstance(where, Mapping):
            _check_named(option, where, bounds)
            return {at: self._offset(option, where[at[0]][at[1]], at, bound) for at, bound in bounds.items()}
        return {at: self._place(where, at, bound) for at, bound in bounds.items()}

    def checked(self, before: Offsets) -> list[Topic]:
        """The topics of offsets that were kept, and new ones: each still the one that the offsets belong to.

        One that is no longer subscribed to keeps its offsets and is not read. Says once when a topic's schema has moved on since
        the query ran last.
        """
        names = [*self._subscribed()]
        if self._options.pattern is not None:
            names += [name for name in before.topics if re.fullmatch(self._options.pattern, name)]
        topics = self._found(dict.fromkeys(names), read=before.topics)
        for topic in topics:
            read = before.topics.get(topic.name)
            if read is None:
                continue
            if read.id != topic.id:
                raise PositionLost(
                    f"Topic {topic.name!r} was deleted and created again since this query read it: the offsets in its "
                    "checkpoint belong to events that are gone.",
                    advice="Start the query with a new checkpoint, so that it reads the new topic from its beginning.",
                )
            if topic.name not in self._versions and read.schema < topic.schema_id:
                _say.warning("%s", _moved_on(topic, read.schema))
        self._check_not_lost(before, {topic.name for topic in topics})
        return topics

    def check_as_planned(self) -> None:
        """Refuses to go on where the topic no longer has the columns that the query was planned with.

        To be asked behind `bounds`: whatever is in them then has the columns that are seen here.
        """
        planned = self._options.schema_version
        moved = [topic for topic in self.topics() if planned not in (None, str(topic.schema_id))]
        if moved:
            raise SchemaMoved(
                f"Topic {moved[0].name!r} no longer has the columns that the query was planned with: {to_ddl(moved[0].schema)}.",
                advice="Start the query again.",
            )

    def check_kept(self, at: At, offset: int, bound: Bounds) -> int:
        """The offset to read from: this one, or with failOnDataLoss=false the first one that is left."""
        if offset >= bound.first:
            return offset
        if self._options.fails_on_loss:
            raise missed(at, offset, bound.first)
        _say.warning(
            "Events %d to %d of partition %d of topic %r are gone and were skipped.",
            offset,
            bound.first - 1,
            at[1],
            at[0],
        )
        return bound.first

    # Below

    def _subscribed(self) -> Sequence[str]:
        if self._options.pattern is None:
            return self._options.topics
        if not self._names or time.monotonic() - self._looked > _LOOK_S:
            self._names = [name for name in self._log.topics() if re.fullmatch(self._options.pattern, name)]
            self._looked = time.monotonic()
        return self._names

    def _found(self, names: Iterable[str], *, read: Container[str]) -> list[Topic]:
        """The topics of these names; one that was read before and is gone is lost data."""
        topics: list[Topic] = []
        for name in names:
            try:
                topics.append(self._log.topic(name))
            except TopicNotFound:
                if name not in read:
                    raise
                if self._options.fails_on_loss:
                    raise TopicNotFound(
                        f"Topic {name!r} was deleted, and this query has read it before.",
                        advice="Set failOnDataLoss=false to continue without it, or start the query with a new checkpoint.",
                    ) from None
        return topics

    def _columns(self, topic: Topic) -> pa.Schema:
        own = {name.lower(): name for name in [*FIELDS, *LOG_COLUMNS, *topic.schema.names]}
        names: list[str] = []
        for name in self._options.columns:
            names += topic.schema.names if name == "*" else [own.get(name.lower(), name)]
        if len(set(names)) < len(names):
            raise InvalidInput(
                "Option columns names a column twice.", advice='"*" has all columns of the topic already.'
            )
        try:
            found = output_schema(topic, [name for name in names if name not in FIELDS])
        except InvalidInput as error:
            raise InvalidInput(f"Option columns: {error.what}", advice=error.advice) from None
        schema = pa.schema([FIELDS.get(name) or found.field(name) for name in names])
        if DELETED.name in names:  # a deletion has its key and nothing else
            return pa.schema([field.with_nullable(True) for field in schema])
        return pa.schema(map(may_be_null, schema)) if BATCH_WATERMARK in names else schema

    def _place(self, where: Place, at: At, bound: Bounds) -> int:
        if where == EARLIEST:
            return bound.first
        if where == LATEST:
            return bound.end
        assert isinstance(where, int)
        return self._log.store.offset_at(*at, time=where, by="time")

    def _offset(self, option: str, offset: int | str, at: At, bound: Bounds) -> int:
        if isinstance(offset, str):
            return self._place(time_us(offset), at, bound)
        if offset < 0:
            return bound.end if offset == -1 else bound.first
        if offset > bound.end:
            raise InvalidInput(
                f"Option {option}: offset {offset} is not in partition {at[1]} of topic {at[0]!r}.",
                advice=f"{bound.described()}; -1 means its end.",
            )
        return offset

    def _check_not_lost(self, before: Offsets, names: Container[str]) -> None:
        for (name, number), offset in before.places.items():
            if name not in names:
                continue
            lost = self._log.store.lost_after(name, number, incarnation=before.incarnation)
            if lost is not None and offset > lost:
                raise taken_back((name, number), offset, lost)


def check_alike(first: pa.Schema, other: pa.Schema, first_name: str, other_name: str) -> None:
    """Refuses two topics whose columns cannot stand in one DataFrame."""
    different = [
        f"{field.name} is {type_to_ddl(field.type)} and "
        + (type_to_ddl(other.field(field.name).type) if field.name in other.names else "not there")
        for field in first
        if field.name not in other.names or other.field(field.name).type != field.type
    ]
    different += [
        f"{name} is not there and {type_to_ddl(other.field(name).type)}"
        for name in other.names
        if name not in first.names
    ]
    if different:
        raise SchemaConflict(
            f"Topics {first_name!r} and {other_name!r} cannot be read as one: {'; '.join(different)}.",
            advice="Read them one by one, or name the columns that they share with the option columns.",
        )


def missed(at: At, offset: int, first: int) -> EventsMissed:
    """The error for events that retention removed before they were read."""
    return EventsMissed(
        f"Events {offset} to {first - 1} of partition {at[1]} of topic {at[0]!r} were removed by retention before they were read.",
        advice="Set failOnDataLoss=false to continue with the first event that is left, and give the topic a longer retention.",
        first=offset,
        last=first - 1,
    )


def taken_back(at: At, offset: int, lost: int) -> PositionLost:
    """The error for an offset that the log no longer has, or has given to another event."""
    return PositionLost(
        f"Offset {offset} of partition {at[1]} of topic {at[0]!r}, up to which this query has read, was lost: the machine "
        f"stopped uncleanly, or the log was restored from a backup, and continued from offset {lost}.",
        advice="The query's results from those events are void. Start it with a new checkpoint, and repair what it wrote.",
    )


def _check_named(option: str, where: Places, bounds: Mapping[At, Bounds]) -> None:
    named = {(name, number) for name, partitions in where.items() for number in partitions}
    for (name, number), what in [(at, "names") for at in named - set(bounds)] + [
        (at, "does not name") for at in set(bounds) - named
    ]:
        raise InvalidInput(
            f"Option {option} {what} partition {number} of topic {name!r}, "
            f"which is {'not ' if what == 'names' else ''}there.",
            advice="Name every partition of every topic that is read, and no others.",
        )


def _moved_on(topic: Topic, before: int) -> str:
    old, new = topic.schemas[before], topic.schema
    changes = [
        f"column {field.name} {type_to_ddl(field.type)} was added" for field in new if field.name not in old.names
    ]
    changes += [
        f"column {field.name} was {type_to_ddl(field.type)} and is {type_to_ddl(new.field(field.name).type)}"
        for field in old
        if new.field(field.name).type != field.type
    ]
    return (
        f"The schema of topic {topic.name!r} has moved on since this query ran last: {'; '.join(changes) or to_ddl(new)}. "
        "The query reads with the new one from here on."
    )


def tell_empty(url: str, at: At, until: int) -> int | None:
    """Gives an empty partition a heartbeat. Where the log cannot be written to, what it passes is counted as late by the query alone."""
    with suppress(HeadwaterError, OSError):
        store = log_for_writing(url).store
        store.heartbeat(*at, time=until, appended_before=NO_TIME)
        told = store.reached(*at, offset=0)
        return told if told >= until else None
    return NO_TIME
