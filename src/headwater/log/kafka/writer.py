"""Writing to Kafka: small batches as one record batch each, large ones and transactions as Kafka transactions.

Invariant: the events of one `Parcel` (what one write puts into one partition) become visible together. Kafka promises that
for one record batch, and for a transaction. So a parcel that fits is sent as one record batch: the producer lingers until it
is told to flush, and one thread hands it everything that waits, up to `BATCH_BYTES` for each partition. What does not fit,
or belongs together over several partitions, goes through a transaction, which costs some 10 ms and leaves a gap of one
offset in each partition behind it.

The work is done by threads of ours, never by the caller's: Ctrl-C in a caller leaves nothing half done, and a write that is
repeated after it finds the first one (see `KafkaStore.write`). After a commit the writer waits until readers see it, because
Kafka answers before that. How long that takes is not in its hands: any transaction that somebody else holds open in the same
partition keeps readers before it. So a commit that has happened is never reported as an error because of that wait; the
transactor remembers what nobody sees yet, and whoever has to know what it committed waits for that first (`wait_until_seen`).

There is one delivery report, and one call into the client, for each event: its Python API has no other way to say an offset.

Thread-safety: all methods may be called by many threads. Nothing here is called with a lock held.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from headwater.log.kafka.brokers import Brokers
from headwater.log.kafka.records import Records
from headwater.model.errors import Closed, Fenced, HeadwaterError, TimedOut, TopicNotFound, Unreachable

BATCH_BYTES = 400_000
BATCH_EVENTS = 5_000
DELIVERY_S = 30.0
TRANSACTION_S = 30.0
TRANSACTIONS_AT_ONCE = 8

_SUSPECT_S = 4.0
_VISIBLE_S = TRANSACTION_S + 15.0  # the transaction of a dead process holds readers up until the brokers end it
_LINGER_MS = 25_000  # the client allows nothing above the delivery timeout

Offsets = list[int]


class Parcel(msgspec.Struct, frozen=True):
    """Events on their way to one partition of a topic, as Kafka names it."""

    topic: str
    topic_id: str
    partitions: int
    partition: int
    records: Records

    @property
    def is_small(self) -> bool:
        """Whether it surely fits into one record batch."""
        return len(self.records.values) <= BATCH_EVENTS and self.records.size <= BATCH_BYTES


class Consumed(msgspec.Struct, frozen=True):
    """Offsets of a group that a transaction commits, and what the brokers know its member by."""

    positions: list[Any]
    metadata: bytes


class Writer:
    """Sends parcels, alone or in transactions."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._waiting: queue.SimpleQueue[tuple[Parcel, Future[Offsets]] | None] = queue.SimpleQueue()
        self._held: list[tuple[Parcel, Future[Offsets]]] = []
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(TRANSACTIONS_AT_ONCE, thread_name_prefix="headwater-kafka")
        self._idle: queue.SimpleQueue[Transactor] = queue.SimpleQueue()
        self._closed = False

    def send(self, parcel: Parcel) -> Future[Offsets]:
        """Sends a parcel by itself; its offsets come when all replicas in sync have it and readers see it."""
        if not parcel.is_small:
            return self.run(lambda: self._in_transaction([parcel])[0])
        done: Future[Offsets] = Future()
        with self._starting:
            if self._closed:
                raise _closed()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, args=(self._producer(),), name="headwater-kafka-writer", daemon=True
                )
                self._thread.start()
            self._waiting.put((parcel, done))
        return done

    def send_together(self, parcels: Sequence[Parcel], consumed: Sequence[Consumed] = ()) -> Future[list[Offsets]]:
        """Sends all parcels in one transaction, and commits what was consumed for them."""
        return self.run(lambda: self._in_transaction(parcels, consumed))

    def run(self, work: Callable[[], Any]) -> Future[Any]:
        """Does something in one of the writer's threads."""
        try:
            return self._pool.submit(work)
        except RuntimeError:
            raise _closed() from None

    def close(self) -> None:
        """Ends when what was handed in is settled."""
        with self._starting:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._waiting.put(None)
            thread.join()
        self._pool.shutdown()
        # The clients end now, and not when garbage is collected: each has threads that ask the brokers.
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return

    def _in_transaction(self, parcels: Sequence[Parcel], consumed: Sequence[Consumed] = ()) -> list[Offsets]:
        try:
            transactor = self._idle.get_nowait()
        except queue.Empty:
            transactor = Transactor(self._brokers, f"{self._brokers.name}-{uuid.uuid4().hex[:8]}")
        try:
            offsets = transactor.commit(parcels, consumed)
        except BaseException as error:
            transactor.close()  # one that failed is not used again
            if not isinstance(error, Fenced):
                raise
            raise TimedOut(
                f"A transaction took longer than {TRANSACTION_S:g} s, and {self._brokers.address.url} rolled it back.",
                advice="Nothing of it is stored. Repeat the transaction.",
            ) from None
        self._idle.put(transactor)
        return offsets

    def _producer(self) -> Any:
        return self._brokers.producer(**{"linger.ms": _LINGER_MS, "message.timeout.ms": int(DELIVERY_S * 1000)})

    # The thread of small parcels

    def _work(self, producer: Any) -> None:
        while True:
            parcels, is_last = self._next_round()
            deliveries = [(_Delivery(parcel), done) for parcel, done in parcels]
            try:
                for delivery, _ in deliveries:
                    delivery.hand_to(producer, self._brokers)
                if not _flush(producer, self._brokers):
                    self._brokers.forget(producer)
                    producer = self._producer()
            except BaseException as error:  # noqa: BLE001 - it belongs to those who wait
                for delivery, _ in deliveries:
                    delivery.error = delivery.error or error
            for delivery, done in deliveries:
                delivery.settle(done, self._brokers)
            if is_last and not self._held:
                return

    def _next_round(self) -> tuple[list[tuple[Parcel, Future[Offsets]]], bool]:
        """Everything that waits, as far as it fits into one record batch of each partition; the rest is held, in order."""
        waiting, self._held = self._held, []
        is_last = False
        if not waiting:
            first = self._waiting.get()
            if first is None:
                return [], True
            waiting.append(first)
        while not self._waiting.empty():
            item = self._waiting.get()
            if item is None:
                is_last = True
                break
            waiting.append(item)
        room: dict[tuple[str, int], tuple[int, int]] = {}
        taken = []
        for parcel, done in waiting:
            place = parcel.topic, parcel.partition
            size, count = room.get(place, (0, 0))
            size, count = size + parcel.records.size, count + len(parcel.records.values)
            room[place] = size, count
            if size > BATCH_BYTES or count > BATCH_EVENTS:
                room[place] = BATCH_BYTES, BATCH_EVENTS  # nothing overtakes it
                self._held.append((parcel, done))
            else:
                taken.append((parcel, done))
        if is_last and self._held:
            self._waiting.put(None)
            is_last = False
        return taken, is_last


class Transactor:
    """A producer of transactions, with an id of its own: whoever else takes the id fences this one."""

    def __init__(self, brokers: Brokers, transactional_id: str) -> None:
        self._brokers = brokers
        self._lock = threading.Lock()
        self._refused: Callable[[], Fenced] | None = None
        self._looking = threading.Lock()
        self._unseen: dict[tuple[str, int], int] = {}
        self._producer: Any = brokers.producer(
            **{
                "transactional.id": transactional_id,
                "linger.ms": 5,
                "transaction.timeout.ms": int(TRANSACTION_S * 1000),
                "message.timeout.ms": int(DELIVERY_S * 1000),
            }
        )
        # A client that has no connection yet asks for its coordinator again after half a second only.
        brokers.ask(lambda left: self._producer.list_topics(timeout=left), "reach the brokers")
        brokers.ask(self._producer.init_transactions, "begin transactions")

    def commit(self, parcels: Sequence[Parcel], consumed: Sequence[Consumed] = ()) -> list[Offsets]:
        """Stores all parcels and commits what was consumed, or raises and does nothing.

        Returns when readers see them, or when that takes too long: they are stored either way (see `wait_until_seen`).
        """
        with self._lock:
            if self._refused is not None:
                raise self._refused()
            for parcel in parcels:
                self._brokers.know(self._producer, parcel.topic, parcel.topic_id, parcel.partitions)
            deliveries = [_Delivery(parcel) for parcel in parcels]
            self._run(deliveries, consumed)
            last = _last_offsets(deliveries)
            with self._looking:
                self._unseen |= last
        with suppress(HeadwaterError):
            self._see(last)
        return [delivery.offsets for delivery in deliveries]

    def wait_until_seen(self) -> None:
        """Returns when readers see all that was committed; `Unreachable` where they do not for too long."""
        with self._looking:
            last = dict(self._unseen)
        self._see(last)

    def _see(self, last: Mapping[tuple[str, int], int]) -> None:
        wait_until_visible(self._brokers, last)
        with self._looking:
            self._unseen = {place: at for place, at in self._unseen.items() if at > last.get(place, -1)}

    @property
    def is_usable(self) -> bool:
        """Whether nothing has happened after which its id has to be taken again."""
        return self._refused is None

    def close(self) -> None:
        """Nothing more is written by this one, and its client ends."""
        with self._lock:
            self._refused = _fenced
            self._brokers.forget(self._producer)
            self._producer = None

    def _run(self, deliveries: Sequence[_Delivery], consumed: Sequence[Consumed]) -> None:
        producer, kafka = self._producer, self._brokers.kafka
        left_open = "The transaction was left to the broker to roll back"
        try:
            producer.begin_transaction()
            for delivery in deliveries:
                delivery.hand_to(producer, self._brokers)
            _flush(producer, self._brokers)
            for delivery in deliveries:
                if delivery.error is not None:
                    raise delivery.error
            for one in consumed:
                send = partial(producer.send_offsets_to_transaction, one.positions, one.metadata)
                self._brokers.ask(send, "commit offsets")
            left_open = "It is not known whether the transaction was committed"
            self._brokers.ask(producer.commit_transaction, "commit a transaction")
        except kafka.KafkaException as caught:
            raise self._aborted(self._brokers.as_ours(caught.args[0], what="write"), left_open) from None
        except BaseException as error:  # noqa: BLE001 - whatever it is, nothing of it may stay
            raise self._aborted(error, left_open) from None

    def _aborted(self, error: BaseException, left_open: str) -> BaseException:
        """Rolls back; the error to raise, which is `Fenced` wherever that was the cause."""
        try:
            if not isinstance(error, Fenced):
                self._producer.abort_transaction(5)
                return error
        except self._brokers.kafka.KafkaException as caught:
            if caught.args[0].code() != self._brokers.kafka.KafkaError._FENCED:
                error.add_note(f"{left_open}: {caught}.")
                self._refused = _unknown
                return error
        self._refused = _fenced
        return _fenced()


class _Delivery:
    """A parcel in the client's hands: its offsets as they are reported, or what went wrong."""

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        self.offsets: Offsets = []
        self.error: BaseException | None = None
        self._brokers: Any = None

    def hand_to(self, producer: Any, brokers: Brokers) -> None:
        """Gives every event to the client, which holds them in their order."""
        self._brokers = brokers
        parcel, records = self.parcel, self.parcel.records
        try:
            brokers.know(producer, parcel.topic, parcel.topic_id, parcel.partitions)
            produce, topic, partition, report = producer.produce, parcel.topic, parcel.partition, self._report
            headers = records.headers or [None] * len(records.values)
            for key, value, pairs in zip(records.keys, records.values, headers, strict=True):
                while True:
                    try:
                        if pairs:
                            produce(topic, value, key, partition, on_delivery=report, headers=pairs)
                        else:
                            produce(topic, value, key, partition, on_delivery=report)
                        break
                    except BufferError:
                        producer.poll(0.1)
        except brokers.kafka.KafkaException as caught:
            self.error = brokers.as_ours(caught.args[0], what=f"write to {parcel.topic!r}")
        except HeadwaterError as error:
            self.error = error

    def settle(self, done: Future[Offsets], brokers: Brokers) -> None:
        """Tells who waits."""
        if self.error is None and len(self.offsets) != len(self.parcel.records.values):
            self.error = _unknown_fate(brokers, self.parcel.topic)
        if self.error is None:
            done.set_result(self.offsets)
        else:
            done.set_exception(self.error)

    def _report(self, refusal: Any, event: Any) -> None:
        if refusal is None:
            self.offsets.append(event.offset())
        elif self.error is None:
            self.error = self._as_ours(refusal)

    def _as_ours(self, refusal: Any) -> HeadwaterError:
        code = self._brokers.kafka.KafkaError
        if refusal.code() in (code._MSG_TIMED_OUT, code._PURGE_QUEUE, code._PURGE_INFLIGHT):
            return _unknown_fate(self._brokers, self.parcel.topic)
        return self._brokers.as_ours(refusal, what=f"write to {self.parcel.topic!r}")


def _last_offsets(deliveries: Sequence[_Delivery]) -> dict[tuple[str, int], int]:
    """The last offset of each partition that something went to."""
    last: dict[tuple[str, int], int] = {}
    for delivery in deliveries:
        place = delivery.parcel.topic, delivery.parcel.partition
        last[place] = max([last.get(place, -1), *delivery.offsets[-1:]])
    return last


def wait_until_visible(brokers: Brokers, last: Mapping[tuple[str, int], int]) -> None:
    """Returns when readers see these offsets: Kafka answers a commit before its partitions know of it."""
    deadline = time.monotonic() + _VISIBLE_S
    while last:
        places = list(last)
        try:
            ends = brokers.offsets(places, -1)
        except TopicNotFound:
            return  # deleted meanwhile
        last = {place: last[place] for place, end in zip(places, ends, strict=True) if end <= last[place]}
        if last and time.monotonic() > deadline:
            topic, partition = next(iter(last))
            raise Unreachable(
                f"What was committed to partition {partition} of {topic!r} is not visible after {_VISIBLE_S:g} s.",
                advice="It is stored. Another transaction keeps readers waiting; try again when that has ended.",
            )
        if last:
            time.sleep(0.001)


def _flush(producer: Any, brokers: Brokers) -> bool:
    """Waits for every delivery report; gives up on what is on its way when no broker answers any more.

    False when the producer has met an error that it does not get over.
    """
    begun = time.monotonic()
    try:
        while producer.flush(0.5):
            if time.monotonic() - begun > _SUSPECT_S and not brokers.is_alive():
                producer.purge()
                producer.flush(1)
                break
    except SystemError:  # the client's way to say that it is fenced or broken for good; the next call has the reason
        return False
    return True


def _unknown_fate(brokers: Brokers, topic: str) -> Unreachable:
    return Unreachable(
        f"{brokers.address.url} did not confirm a write to {topic!r} in time; it may or may not be stored.",
        advice="Check that the brokers run; a producer with an id and sequence= can safely send again.",
    )


def _unknown() -> Fenced:
    return Fenced(
        "The outcome of the last transaction is unknown, so nothing more is written.",
        advice="Open the producer or the stage again, which finds out what is stored.",
    )


def _fenced() -> Fenced:
    return Fenced("Another producer with the same id took over.", advice="Close this one.")


def _closed() -> Closed:
    return Closed("The Kafka log was closed.", advice="Open another with open_log.")
