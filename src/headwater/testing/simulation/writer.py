"""Simulated writers: they append in every way the log offers, retry, take over from each other, and tell the oracle.

No thread runs beside them, so that a history is the same each time: a `Producer` is flushed by hand after each few events, and
its own thread (a subclass here) ends at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from headwater.log.clients.producer import Producer
from headwater.log.log import Log
from headwater.log.port.topic import Topic
from headwater.log.port.write import Stamp, Write
from headwater.model.errors import Fenced, SchemaConflict, TopicExists, TopicNotFound
from headwater.testing.oracle import KEYS, LENGTHS, NEVER, LineSource, PartitionId, SentBatch, Violation
from headwater.testing.simulation.reader import ReaderView, read_temporary
from headwater.testing.simulation.world import COLUMNS, TEMPORARY, Actor, Refused, World

BATCH_EVENTS_MAX = 5
RETRIES_MAX = 3
EXTRAS_MAX = 2


class StillProducer(Producer):
    """A producer whose thread does nothing: batches go out at `flush` only."""

    def _run(self) -> None:
        """Ends at once."""


class SimWriter(Actor):
    """A process that writes."""

    def __init__(self, world: World, name: str, *, sources: Sequence[LineSource] = (), actions: int = 0) -> None:
        super().__init__(world, name, actions=actions)
        self.topics = list(world.topics)
        self._sources = sources
        self._producers: dict[int, tuple[StillProducer, int]] = {}
        self._anonymous: StillProducer | None = None
        self._left: int | None = None
        """Since which change of the topic that comes and goes an interrupted flush may have left events for it."""
        self._stamps = 0

    def forget(self) -> None:
        super().forget()
        self._producers.clear()
        self._anonymous = None

    def act(self) -> None:
        acts: list[tuple[int, Callable[[], None]]] = [
            (4, self._append),
            (3, self.append_atomically),
            (4, self.transact),
            (3, self._write_stamped),
            (4, self.produce_lines),
            (3, self.produce),
            (1, self._add_column),
            (2, self._seal),
            (2, self._look),
            (1, self.close),
        ]
        self.random.choices([act for _, act in acts], [weight for weight, _ in acts])[0]()

    # Plain and atomic appends

    def append_one(self, topic: str, key: str) -> None:
        """One event with that key."""
        self._append_batch(self.batch(topic, key=key))

    def _append(self) -> None:
        self._append_batch(self.batch(self._topic()))

    def _append_batch(self, batch: SentBatch) -> None:
        topic = batch.topic
        with self.ending(batch):
            offsets = self.call_on({topic}, f"append {_name(batch)}", lambda: self.log.append(topic, self.rows(batch)))
        self.acknowledge(batch, offsets)

    def append_atomically(self) -> None:
        topic = self._topic()
        batch = self.batch(topic, group=self.world.oracle.number())
        with self.ending(batch):
            offsets = self.call_on(
                {topic},
                f"append {_name(batch)} atomically",
                lambda: self.log.append(topic, self.rows(batch), atomic=True),
            )
        self.acknowledge(batch, offsets)

    def transact(self) -> None:
        group = self.world.oracle.number()
        batches = [self.batch(self._topic(), group=group) for _ in range(self.random.randint(2, 4))]
        with self.ending(*batches):
            offsets = self.call_on(
                {batch.topic for batch in batches},
                f"transaction {', '.join(map(_name, batches))}",
                lambda: self._commit(batches),
            )
        durable = any(place.durable for batch in batches if (place := self._place(batch, 0)))
        for batch in batches:
            for partition, spans in offsets[batch.topic].items():
                place = self._place(batch, partition)
                if place is None or not self.world.oracle.rows_in(batch, place):
                    continue
                span = spans.pop(0)
                self.acknowledge(batch, {partition: span})
                if durable:
                    self.world.oracle.survives_power_loss(place, span.stop)

    def _commit(self, batches: Sequence[SentBatch]) -> dict[str, dict[int, list[range]]]:
        with self.log.transaction() as transaction:
            for batch in batches:
                transaction.append(batch.topic, self.rows(batch))
        return transaction.offsets

    # Producers

    def _write_stamped(self) -> None:
        """An idempotent batch for one partition, written again when it was refused, and sometimes when it was not."""
        topic, changes = self._topic(), self.world.comings.changes
        known = self.call_on({topic}, f"look at {topic}", lambda: self.log.topic(topic))
        self._stamps += 1
        producer = f"{self.world.oracle.number():016d}".encode()
        batch = self.batch(topic, partition=self.random.randrange(known.partitions))
        assert batch.partition is not None
        stamp = Stamp(producer=producer, sequence_first=0, sequence_last=len(batch.keys) - 1)
        rows = _to_arrow(self.rows(batch, known), known.schema)
        write = Write(known, batch.partition, rows, stamp=stamp)
        stored: range | None = None
        with self.ending(batch):
            for _ in range(self.random.randint(1, RETRIES_MAX)):
                try:
                    found = self.call_on(
                        {topic}, f"write {_name(batch)} stamped", lambda: self._write(write), changes=changes
                    )
                except Refused:
                    continue
                if stored not in (None, found):
                    raise Violation(f"Batch {batch.number} was stored at {stored}, and its retry at {found}.")
                stored = found
                self.acknowledge(batch, {batch.partition: stored})

    def _write(self, write: Write) -> range:
        (outcome,) = self.log.store.write([write])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def produce(self) -> None:
        """Single events through a producer without a name; a refused batch is not sent again."""
        if self._anonymous is None:
            self._anonymous, self._left = StillProducer(self.log.store, linger_ms=1e9, retry_s=0), None
        producer, topic = self._anonymous, self._topic()
        batch = self.batch(topic)
        if topic == TEMPORARY and self._left is None:
            self._left = self.world.comings.changes
        topics = {topic} if self._left is None else {topic, TEMPORARY}
        with self.ending(batch):
            receipts = self.call_on(
                topics, f"produce {_name(batch)}", lambda: self._send(producer, batch), changes=self._left
            )
            self._left = None
            for row, receipt in enumerate(receipts):
                if receipt.offset < 0:
                    raise Violation(f"Event {(batch.number, row)} is said to be stored before.")
        spans: dict[int, list[int]] = {}
        for receipt in receipts:
            spans.setdefault(receipt.partition, []).append(receipt.offset)
        self.acknowledge(batch, {partition: range(min(found), max(found) + 1) for partition, found in spans.items()})

    def _send(self, producer: StillProducer, batch: SentBatch) -> list[Any]:
        receipts = [self._send_row(producer, batch.topic, row) for row in self.rows(batch)]
        producer.flush()
        return [receipt.result() for receipt in receipts]

    def _send_row(
        self, producer: StillProducer, topic: str, row: Mapping[str, Any], sequence: int | None = None
    ) -> Any:
        if "value" in row:
            return producer.send(topic, row["value"], key=row["key"], sequence=sequence)
        return producer.send(topic, row, sequence=sequence)

    def produce_lines(self) -> None:
        """The next lines of a source, through a producer with its name; what others have stored already is sent again."""
        source = self.random.choice(self._sources)
        if source.number not in self._producers or self.random.random() < 0.1:
            self._take_over(source)
        producer, instance = self._producers[source.number]
        first = max(0, source.acknowledged - self.random.randint(0, 3))
        last = max(first, source.acknowledged) + self.random.randint(1, BATCH_EVENTS_MAX)
        attempt = self.world.oracle.number()
        if source.is_replaced(instance):
            source.stale.add(attempt)
        source.sent = max(source.sent, last)
        try:
            receipts = self.call(
                f"lines {first} to {last - 1} of {source.name} for {source.topic}, attempt {attempt}",
                lambda: self._send_lines(producer, source, range(first, last), attempt),
                (Fenced,),
            )
        except Refused as refusal:
            if isinstance(refusal.error, Fenced) and not source.may_be_replaced(instance):
                raise Violation(f"The newest producer of {source.name} was fenced: {refusal.error}") from refusal
            if isinstance(refusal.error, Fenced) or self.random.random() < 0.5:
                del self._producers[source.number]
            raise
        for row, receipt in zip(range(first, last), receipts, strict=True):
            place = self.world.place(source.topic, receipt.partition)
            assert place is not None
            self.world.oracle.line_acknowledged(source, row, place, receipt.offset)
        source.acknowledged = max(source.acknowledged, last)

    def _take_over(self, source: LineSource) -> None:
        self._producers.pop(source.number, None)
        begun, instance = self.world.oracle.number(), len(source.producers)
        source.producers.append((begun, NEVER))
        producer = self.call(
            f"producer {source.name}", lambda: StillProducer(self.log.store, id=source.name, linger_ms=1e9, retry_s=0)
        )
        source.producers[instance] = (begun, self.world.oracle.number())
        self._producers[source.number] = producer, instance

    def _send_lines(self, producer: StillProducer, source: LineSource, lines: range, attempt: int) -> list[Any]:
        receipts = []
        for line in lines:
            event = (source.number, line)
            row = {
                "key": source.key(line),
                "batch": source.number,
                "row": line,
                "text": self.world.oracle.text(event),
                "attempt": attempt,
            }
            receipts.append(self._send_row(producer, source.topic, row, line))
        producer.flush()
        return [receipt.result() for receipt in receipts]

    # Everything else

    def _add_column(self) -> None:
        topic = next(iter(self.world.topics))
        known = self.call(f"look at {topic}", lambda: self.log.topic(topic))
        have = sum(name.startswith("extra") for name in known.schema.names)
        extras = "".join(f", extra{number} BIGINT" for number in range(min(have + 1, EXTRAS_MAX)))
        self.call(f"alter {topic}", lambda: self.log.alter_topic(topic, schema=COLUMNS + extras), (SchemaConflict,))

    def _seal(self) -> None:
        topic = self._topic()
        self.call_on({topic}, f"seal {topic}", lambda: self.log.seal(topic))

    def _look(self) -> None:
        if self.random.random() < 0.3:
            read_temporary(self)
        else:
            ReaderView(self, list(self.world.topics)).poll()

    # Batches

    def batch(self, topic: str, *, group: int = 0, partition: int | None = None, key: str | None = None) -> SentBatch:
        """Some events for a topic, with the columns it has as far as this process knows."""
        count = self.random.randint(1, BATCH_EVENTS_MAX)
        keys = self.random.choices(KEYS, k=count) if key is None else [key]
        lengths = self.random.choices(LENGTHS, k=len(keys))
        batch = self.world.oracle.batch(topic, keys, lengths, group=group, partition=partition)
        batch.changes = self.world.comings.changes
        return batch

    def rows(self, batch: SentBatch, topic: Topic | None = None) -> list[dict[str, Any]]:
        """The events of a batch as users would give them, with the columns that the topic has."""
        topic = topic or self.log.topic(batch.topic)
        texts = [self.world.oracle.text((batch.number, row)) for row in range(len(batch.keys))]
        if not topic.has_schema:
            return [
                {"key": key.encode(), "value": f"{batch.number}|{row}|{text}".encode()}
                for row, (key, text) in enumerate(zip(batch.keys, texts, strict=True))
            ]
        batch.extras = frozenset(name for name in topic.schema.names if name.startswith("extra"))
        return [
            {"key": key, "batch": batch.number, "row": row, "text": text} | dict.fromkeys(batch.extras, batch.number)
            for row, (key, text) in enumerate(zip(batch.keys, texts, strict=True))
        ]

    def acknowledge(self, batch: SentBatch, offsets: Mapping[int, range]) -> None:
        """Tells the oracle what the log has answered."""
        for partition, span in offsets.items():
            place = self._place(batch, partition)
            if place is not None:
                self.world.note(self.name, f"has batch {batch.number} at {span} of {batch.topic}/{partition}")
                self.world.oracle.acknowledged(batch, place, span)

    @contextmanager
    def ending(self, *batches: SentBatch) -> Iterator[None]:
        """Notes when the call that wrote the batches was over, however it ended."""
        try:
            yield
        finally:
            for batch in batches:
                batch.ended = self.world.oracle.number()

    def _place(self, batch: SentBatch, partition: int) -> PartitionId | None:
        """A partition of the topic that a batch was written to; None when it may have been replaced meanwhile."""
        if batch.topic == TEMPORARY and batch.changes != self.world.comings.changes:
            return None
        return self.world.place(batch.topic, partition)

    def _topic(self) -> str:
        return self.random.choice(self.topics)


class TopicOwner(SimWriter):
    """The writer that also creates and deletes the topic that comes and goes."""

    def act(self) -> None:
        if self.random.random() < 0.8:
            super().act()
        elif self.world.comings.state == "absent" or (
            self.world.comings.state == "unsure" and self.random.random() < 0.5
        ):
            self._create()
        else:
            self._delete()

    def _create(self) -> None:
        comings, unsure = self.world.comings, self.world.comings.state == "unsure"
        since = self.world.oracle.number()
        comings.change("unsure")
        try:
            topic = self.call(
                f"create {TEMPORARY}", lambda: self._create_topic(self.log), (TopicExists,) if unsure else ()
            )
        except Refused as refusal:
            if isinstance(refusal.error, TopicExists):
                comings.change("present")
            raise
        comings.since[topic.id] = since
        comings.change("present", topic)

    def _create_topic(self, log: Log) -> Topic:
        """Each time a little different, so that events of one cannot be taken for those of another."""
        columns = COLUMNS.split(", ")
        self.random.shuffle(columns)
        return log.create_topic(
            TEMPORARY,
            ", ".join(columns),
            key="key",
            partitions=self.random.choice((1, 2)),
            durability=self.random.choice(("fsync", "os")),
            segment_bytes=4096,
        )

    def _delete(self) -> None:
        comings, unsure = self.world.comings, self.world.comings.state == "unsure"
        comings.change("unsure")
        try:
            self.call(
                f"delete {TEMPORARY}", lambda: self.log.delete_topic(TEMPORARY), (TopicNotFound,) if unsure else ()
            )
        except Refused as refusal:
            if isinstance(refusal.error, TopicNotFound):
                comings.change("absent")
            raise
        comings.change("absent")


def _to_arrow(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = [pa.array([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _name(batch: SentBatch) -> str:
    return f"batch {batch.number} ({len(batch.keys)}) to {batch.topic}"
