"""Topics that Debezium fills, as a capture source: how databases come in that we do not read ourselves (Oracle, SQL Server, Db2 …).

    debezium+kafka://host:9092?topics=shop.inventory&table=users      the topic shop.inventory.users is the table users
    debezium+file:///var/lib/events?topics=shop.inventory             in a log of ours; all topics that begin so

Debezium's snapshot is in the topic, so nothing is copied here: a table counts as copied when the capture has read what was there when it
began. A tombstone behind its delete says nothing new; one whose delete compaction has removed is a delete of its own.

A position is how many events the capture has read of all topics, then where an event stood: `00000000000000001234 users/0@567`. It sorts as
they were read, which is their order within each partition, and so for each key; Kafka keeps no order between partitions. The position
up to which everything was read names all partitions: `00000000000000001234~users/0@568,users/1@12`. There `*` behind a table's name says
that it is copied, and `d` behind an offset that the event before it was a delete, whose tombstone may follow.

Not thread-safe, except `lag`, which has a connection of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.capture.debezium.envelope import EnvelopeOptions, Envelopes, EnvelopeShape
from headwater.capture.source import (
    DELETE,
    TRUNCATE,
    BackfillChunk,
    CaptureSource,
    ChangeBatch,
    Changes,
    SourceLag,
    SourceTable,
    TableChange,
)
from headwater.capture.source_url import SourceUrl
from headwater.log.clients.reader import Reader
from headwater.log.log import Log, open_log
from headwater.model.errors import (
    CaptureLost,
    EventsMissed,
    InvalidInput,
    NotCapturable,
    PositionLost,
    SchemaConflict,
    SchemaMismatch,
    TopicNotFound,
)
from headwater.model.position import Position
from headwater.model.schema import to_arrow_schema, widen

EVENTS_MAX = 50_000
BYTES_MAX = 32 << 20
"""What is read at a time, about."""

_COLUMNS = ["key", "value", "_topic", "_partition", "_offset"]
_OWN = ("topics", "time_unit", "decimals", "unavailable", "truncates")
_LOOK_BACK = 100
_PLACE = re.compile(r"(.+?)(\*?)/(\d+)@(\d+)(d?)")


class PartitionPlace(msgspec.Struct):
    """How far a partition was read, and whether the last event was a delete."""

    offset: int
    behind_delete: bool = False


class DebeziumPosition(msgspec.Struct):
    """How far everything was read: a position, taken apart."""

    events: int = 0
    copied: set[str] = msgspec.field(default_factory=set)
    places: dict[tuple[str, int], PartitionPlace] = msgspec.field(default_factory=dict)

    @classmethod
    def at(cls, position: str) -> DebeziumPosition:
        """The parts of a position."""
        events, _, listed = position.partition("~")
        read = cls(int(events))
        for text in filter(None, listed.split(",")):
            found = _PLACE.fullmatch(text)
            assert found is not None, position
            table, copied, partition, offset, deleted = found.groups()
            read.places[table, int(partition)] = PartitionPlace(int(offset), bool(deleted))
            if copied:
                read.copied.add(table)
        return read

    @property
    def position(self) -> str:
        """The text of it."""
        places = (
            f"{table}{'*' if table in self.copied else ''}/{partition}@{place.offset}{'d' if place.behind_delete else ''}"
            for (table, partition), place in sorted(self.places.items())
        )
        return f"{self.events:020d}~{','.join(places)}"


def source_of(url: SourceUrl, *, name: str, keys: Mapping[str, tuple[str, ...]]) -> CaptureSource:
    """The topics of a log."""
    return DebeziumSource(url, name=name, keys=keys)


class DebeziumSource:
    """The topics of one Debezium server, or some of them; see the module."""

    def __init__(self, url: SourceUrl, *, name: str, keys: Mapping[str, tuple[str, ...]]) -> None:
        self.name = name
        self.url = url.shown
        self.identity = f"debezium:{url.options.get('topics', '')}"
        self.left_out: dict[str, str] = {}
        self._log_url = _log_url(url)
        self._options = url.options
        self._prefix = f"{url.options['topics']}." if url.options.get("topics") else ""
        self._chosen = url.tables
        self._keys = dict(keys)
        self._held: Log | None = None
        self._reader: Reader | None = None
        self._envelopes: dict[str, Envelopes] = {}
        self._tables: dict[str, SourceTable] = {}
        self._following: set[str] = set()
        """The tables that are read: those that are copied, or whose copying has begun."""
        self._read = DebeziumPosition()
        self._event_bytes = 1_000.0
        _check_options(url)

    # What the runner calls

    def check(self) -> list[SourceTable]:
        """The tables, by the newest event of each topic."""
        self._envelopes, self._tables, self.left_out = {}, {}, {}
        for table in self._chosen or self._found():
            try:
                self._tables[table] = self._look(table)
            except (NotCapturable, TopicNotFound) as error:
                if self._chosen:
                    raise
                self.left_out[table] = str(error)
        if not self._tables:
            why = (
                " ".join(self.left_out.values())
                or f"The names of its topics must begin with {self._prefix!r}. Check ?topics=."
            )
            raise NotCapturable(f"{self.url} has no topics of tables.", advice=why)
        return list(self._tables.values())

    def prepare(self, resume: str | None) -> str:
        """Where each partition was, or its first event."""
        self._close_reader()
        known = DebeziumPosition() if resume is None else DebeziumPosition.at(resume)
        self._read = DebeziumPosition(known.events, known.copied & self._tables.keys())
        self._following = set(self._read.copied)
        for table in self._tables:
            for partition, span in self._log.offsets(self._topic(table)).items():
                place = known.places.get((table, partition), PartitionPlace(span.start))
                if not span.start <= place.offset <= span.stop:
                    raise CaptureLost(
                        f"Topic {self._topic(table)!r}, partition {partition}, contains offsets {span.start} to {span.stop}, "
                        f"but the capture needs offset {place.offset}.",
                        advice="Retention has removed events, or the topic was created again. Start the capture with "
                        "--backfill-again: it reads the topics from their beginning and removes deleted rows.",
                    )
                self._read.places[table, partition] = place
        return self._read.position

    def changes(self, after: str, *, timeout_s: float) -> Changes | None:
        """Up to `EVENTS_MAX` events behind a position; fewer where a table changes, or events are large."""
        if after != self._read.position:
            return Changes(end=self._read.position)  # a table is copied, and nothing else has happened
        reader = self._open_reader()
        if reader is None:
            return None
        events_max = int(max(1, min(EVENTS_MAX, BYTES_MAX / self._event_bytes)))
        with self._kept_from_loss():
            found = reader.poll_arrow(events_max=events_max, timeout_s=timeout_s)
        told: list[ChangeBatch] = []
        for batch in found:
            changed = self._take(batch, told)
            if changed is not None:
                # What was read behind this event is read again: the table looks different from here on.
                self._close_reader()
                return Changes(batches=tuple(told), end=self._read.position) if told else self._changed(changed)
        self._pass_gaps(reader)
        if not found and self._read.position == after:
            return None
        return Changes(batches=tuple(told), end=self._read.position)

    def chunk(self, table: str, done: Any | None, *, position: str) -> BackfillChunk:
        """No rows: the snapshot is in the topic. The last one comes when what was there at the beginning has been read."""
        if done is None:
            self._begin(table)
        elif table not in self._following:
            self._following.add(table)
            self._close_reader()
        ends = {int(partition): end for partition, end in done.items()} if done else self._ends_now(table)
        left = sum(max(0, end - self._read.places[table, partition].offset) for partition, end in ends.items())
        if not left:
            self._read.copied.add(table)
            self._read.events += 1
        return BackfillChunk(
            rows=self._tables[table].schema.empty_table(),
            done={str(partition): end for partition, end in ends.items()},
            last=not left,
            after=position,
            until=f"{self._read.events + 1:020d}" if left else self._read.position,
            fraction=1.0 - left / max(1, sum(ends.values())),
        )

    def confirm(self, position: str) -> None:
        """Nothing to do: how long a topic keeps its events is up to the topic."""

    def heartbeat(self) -> None:
        """Nothing to do: a reader keeps nothing from being forgotten."""

    def lag(self, position: str | None = None) -> SourceLag:
        """The events that were not read yet."""
        read = self._read if position is None else DebeziumPosition.at(position)
        with open_log(self._log_url, read_only=True) as log:
            behind = 0
            for table in {table for table, _ in read.places}:
                for partition, span in log.offsets(self._topic(table)).items():
                    place = read.places.get((table, partition))
                    behind += span.stop - (span.start if place is None else max(span.start, place.offset))
        return SourceLag(rows=behind)

    def remove(self) -> None:
        """Nothing to do: a reader leaves nothing behind."""

    def close(self) -> None:
        """Closes the log."""
        self._close_reader()
        held, self._held = self._held, None
        if held is not None:
            held.close()

    # Topics

    def _topic(self, table: str) -> str:
        return self._prefix + table

    def _found(self) -> list[str]:
        return sorted(name.removeprefix(self._prefix) for name in self._log.topics() if name.startswith(self._prefix))

    def _look(self, table: str) -> SourceTable:
        """A table by the newest of its topic's events that is no tombstone."""
        topic = self._log.topic(self._topic(table))
        if topic.has_schema:
            raise NotCapturable(
                f"Topic {topic.name!r} has columns, so it does not contain Debezium events.",
                advice="Read the topic itself.",
            )
        envelopes = Envelopes(topic, table, key=self._keys.get(table), options=self._envelope_options(table))
        spans = self._log.offsets(topic.name)
        back = {partition: max(span.start, span.stop - _LOOK_BACK) for partition, span in spans.items()}
        newest = self._log.read(topic.name, start=back, columns=["key", "value"]).to_batches()
        for events in (*reversed(newest), *self._log.scan(topic.name, columns=["key", "value"])):
            valued = events.filter(events.column("value").is_valid())
            keyed = valued.filter(valued.column("key").is_valid())
            for found in (keyed, valued):
                if found.num_rows:
                    self._envelopes[table] = envelopes
                    return envelopes.look(found.column("key")[-1].as_py(), found.column("value")[-1].as_py())
        raise NotCapturable(
            f"Topic {topic.name!r} has no events yet, so its columns are unknown.",
            advice="Start Debezium first. The capture reads the columns from its snapshot.",
        )

    def _envelope_options(self, table: str) -> EnvelopeOptions:
        ddl = self._options.get(f"columns.{table}")
        return EnvelopeOptions(
            columns=None if ddl is None else to_arrow_schema(ddl),
            time_unit=self._options.get("time_unit", "us"),
            decimals=self._options.get("decimals", "base64"),
            unavailable_is_null=self._options.get("unavailable") == "null",
        )

    # Reading

    def _begin(self, table: str) -> None:
        """Reads a table from its beginning; one that was read before is read again."""
        self._following.add(table)
        self._read.copied.discard(table)
        for partition, span in self._log.offsets(self._topic(table)).items():
            self._read.places[table, partition] = PartitionPlace(span.start)
        self._close_reader()

    def _ends_now(self, table: str) -> dict[int, int]:
        return {partition: span.stop for partition, span in self._log.offsets(self._topic(table)).items()}

    def _take(self, batch: pa.RecordBatch, told: list[ChangeBatch]) -> tuple[str, SourceTable | str] | None:
        """Puts the changes of a batch behind those that were told, up to where its table looks different; that is returned then."""
        table = batch.column("_topic")[0].as_py().removeprefix(self._prefix)
        self._read.places.setdefault((table, batch.column("_partition")[0].as_py()), PartitionPlace(0))
        self._event_bytes = max(1.0, batch.nbytes / max(1, batch.num_rows))
        values = batch.column("value")
        valued = np.flatnonzero(values.is_valid())
        try:
            first_value = int(valued[0]) if len(valued) else batch.num_rows
            if first_value:
                self._tell(table, batch.slice(0, first_value), None, told)
            for shape, payloads, first, last in self._envelopes[table].runs(values.drop_null()):
                wider = self._wider(table, shape.table)
                if wider is not None:
                    return table, wider
                start = int(valued[first])
                end = int(valued[last]) if last < len(valued) else batch.num_rows
                self._tell(table, batch.slice(start, end - start), (shape, payloads), told)
        except (NotCapturable, SchemaConflict, SchemaMismatch) as error:
            return table, str(error)
        return None

    def _tell(
        self, table: str, events: pa.RecordBatch, read: tuple[EnvelopeShape, pa.Array] | None, told: list[ChangeBatch]
    ) -> None:
        """The changes of events that are read alike, with the tombstones between and behind them; or of tombstones alone."""
        envelopes, partition = self._envelopes[table], events.column("_partition")[0].as_py()
        place, offsets = self._read.places[table, partition], events.column("_offset").to_numpy()
        positions = self._positions(table, events)
        valued = np.asarray(events.column("value").is_valid())
        deletes = np.zeros(events.num_rows, bool)
        parts = []
        if read is not None:
            some = positions.filter(pa.array(valued))
            changes = envelopes.changes(*read, some, partition=partition, offsets=offsets[valued])
            deletes[valued] = pc.equal(changes.column("op"), DELETE).to_numpy()
            parts.append(self._without_truncates(table, changes))
        behind_delete = np.concatenate([[place.behind_delete], deletes[:-1]])
        alone = ~valued & ~behind_delete & np.asarray(events.column("key").is_valid())
        if alone.any():
            keys, some = (column.filter(pa.array(alone)) for column in (events.column("key"), positions))
            parts.append(envelopes.deletions(keys, some, partition=partition, offsets=offsets[alone]))
        changes = pa.concat_tables(parts).sort_by("position") if len(parts) > 1 else parts[0] if parts else None
        if changes is not None and changes.num_rows:
            told.append(ChangeBatch(table, changes))
        self._read.events += events.num_rows
        place.offset, place.behind_delete = int(offsets[-1]) + 1, bool(deletes[-1])

    def _without_truncates(self, table: str, changes: pa.Table) -> pa.Table:
        """The changes, where nothing is truncated, or it is known what was there before: in a topic of one partition."""
        kept = pc.not_equal(changes.column("op"), TRUNCATE)
        if pc.all(kept).as_py():
            return changes
        if self._options.get("truncates") == "skip":
            return changes.filter(kept)
        partitions = sum(name == table for name, _ in self._read.places)
        if partitions > 1:
            raise NotCapturable(
                f"Topic {self._topic(table)!r} has a truncation and {partitions} partitions, so the order of the "
                "truncation and the changes in other partitions is unknown.",
                advice="Use one partition for the topic. Or skip truncations: in Debezium with skipped.operations=t, in the "
                "capture with ?truncates=skip.",
            )
        return changes

    def _wider(self, table: str, seen: SourceTable) -> SourceTable | None:
        """The table with what an event knows of it besides; None where there is nothing new. `SchemaConflict`, `NotCapturable`."""
        known = self._tables[table]
        if seen.key != known.key:
            raise NotCapturable(
                f"Topic {self._topic(table)!r}: The key changed from {', '.join(known.key)} to {', '.join(seen.key)}.",
                advice="The key of a topic cannot change. Delete the table's topics, and start the capture again.",
            )
        try:
            both = widen(seen.schema, known.schema)  # what is older may be narrower
        except SchemaConflict:
            both = widen(known.schema, seen.schema)
        types = {field.name: field for field in both}
        names = [*known.schema.names, *(name for name in both.names if name not in known.schema.names)]
        schema = pa.schema([types[name] for name in names])
        return None if schema == known.schema else msgspec.structs.replace(known, schema=schema)

    def _positions(self, table: str, events: pa.RecordBatch) -> pa.Array:
        first = self._read.events + 1
        numbers = pa.array(np.arange(first, first + events.num_rows)).cast(pa.string())
        places = [events.column(name).cast(pa.string()) for name in ("_partition", "_offset")]
        return pc.binary_join_element_wise(pc.utf8_lpad(numbers, 20, "0"), f" {table}/", places[0], "@", places[1], "")

    def _changed(self, changed: tuple[str, SourceTable | str]) -> Changes:
        """Tells that a table looks different, or cannot be read on."""
        table, new = changed
        self._read.events += 1
        if isinstance(new, str):
            self._following.discard(table)
            told = TableChange(table=self._tables[table], error=new)
        else:
            self._tables[table] = new
            told = TableChange(table=new)
        return Changes(tables=(told,), end=self._read.position)

    def _pass_gaps(self, reader: Reader) -> None:
        """Where transactions ended, or compaction took events, there is nothing to read."""
        for place in reader.positions():
            at = (place.topic.removeprefix(self._prefix), place.partition)
            known = self._read.places.setdefault(at, PartitionPlace(0))
            if place.offset > known.offset:
                known.offset = place.offset
                self._read.events += 1

    # Connections

    @property
    def _log(self) -> Log:
        if self._held is None:
            self._held = open_log(self._log_url, read_only=True)
        return self._held

    def _open_reader(self) -> Reader | None:
        """A reader that stands where everything was read, of all tables that are followed."""
        if self._reader is None and self._following:
            incarnation = self._log.store.incarnation()
            start = [
                Position(self._topic(table), partition, place.offset, incarnation)
                for (table, partition), place in self._read.places.items()
                if table in self._following
            ]
            topics = [self._topic(table) for table in sorted(self._following)]
            self._reader = self._log.reader(topics, start=start, columns=_COLUMNS)
        return self._reader

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    @contextmanager
    def _kept_from_loss(self) -> Iterator[None]:
        try:
            yield
        except (EventsMissed, PositionLost) as error:
            raise CaptureLost(
                error.what,
                advice="Start the capture with --backfill-again: it reads the topics from their beginning and removes deleted rows.",
            ) from None


def _log_url(url: SourceUrl) -> str:
    """The log that the topics are in, as `open_log` takes it."""
    options = {
        name: value for name, value in url.options.items() if name not in _OWN and not name.startswith("columns.")
    }
    kind = url.scheme.partition("+")[2]
    return f"{kind}://{url.host}{url.path}" + (f"?{urlencode(options)}" if options else "")


def _check_options(url: SourceUrl) -> None:
    known = {
        "time_unit": ("ms", "us", "ns"),
        "decimals": ("base64", "text"),
        "unavailable": ("null",),
        "truncates": ("skip",),
    }
    for name, values in known.items():
        if name in url.options and url.options[name] not in values:
            raise InvalidInput(
                f"The option ?{name}={url.options[name]} is not valid.", advice=f"Use one of {', '.join(values)}."
            )
