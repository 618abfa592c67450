"""The contract of named producers: what is sent again is stored once, and a producer that was replaced is refused."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.log.clients.batch import STORED_BEFORE
from headwater.log.log import Log
from headwater.model.errors import Fenced, HeadwaterError, InvalidInput
from headwater.testing.contracts.case import ORDERS, LogCase, events_of, order, refused, values_of


class SequenceContract(LogCase):
    """What holds for producers with an id."""

    def test_a_named_producer_resumes_where_the_one_before_ended(self, log: Log, other: Log) -> None:
        """A source sent again from its beginning adds only what was not stored."""
        log.create_topic("orders", ORDERS, key="id", partitions=3)
        with log.producer(id="import") as producer:
            for number in range(60):
                producer.send("orders", order(number), sequence=number)
        with other.producer(id="import") as producer:
            receipts = [producer.send("orders", order(number), sequence=number) for number in range(100)]
            places = [receipt.result() for receipt in receipts]
        assert sorted(value["amount"] for value in values_of(log, "orders")) == [float(n) for n in range(100)]
        assert all(place.offset == STORED_BEFORE for place in places[:60])
        assert all(place.offset >= 0 for place in places[60:])

    def test_resuming_does_not_depend_on_how_batches_were_cut(self, log: Log) -> None:
        """Events without a key are recognised too, wherever their batches went."""
        log.create_topic("raw", partitions=3)
        for count, flush_every in ((5, 1), (9, 100), (14, 2), (14, 3)):
            with log.producer(id="lines", linger_ms=60_000) as producer:
                for number in range(count):
                    producer.send("raw", b"%d" % number, sequence=number)
                    if number % flush_every == 0:
                        producer.flush()
            assert sorted(map(int, values_of(log, "raw"))) == list(range(count))

    def test_sequences_may_have_gaps(self, log: Log) -> None:
        """A position in a file, a time, a primary key: any number that grows."""
        log.create_topic("raw", partitions=1)
        for _ in range(2):
            with log.producer(id="bytes") as producer:
                for sequence in (0, 17, 4_000_000_000, 2**62):
                    producer.send("raw", b"%d" % sequence, sequence=sequence)
        assert values_of(log, "raw") == [b"0", b"17", b"4000000000", b"%d" % 2**62]

    def test_each_topic_is_resumed_for_itself(self, log: Log) -> None:
        """What went to one topic says nothing about another."""
        for name in ("a", "b"):
            log.create_topic(name, partitions=2)
        with log.producer(id="x") as producer:
            for number in range(10):
                producer.send("a", b"%d" % number, key=b"%d" % number, sequence=number)
        with log.producer(id="x") as producer:
            for number in range(10):
                for name in ("a", "b"):
                    producer.send(name, b"%d" % number, key=b"%d" % number, sequence=number)
        assert len(values_of(log, "a")) == len(values_of(log, "b")) == 10

    def test_producers_of_other_names_do_not_meet(self, log: Log) -> None:
        """The same numbers from another producer are other events."""
        log.create_topic("raw", partitions=1)
        for name in ("one", "two", "ünï/../cöde", "x" * 10_000):
            with log.producer(id=name) as producer:
                producer.send("raw", name.encode(), sequence=0)
        assert len(values_of(log, "raw")) == 4

    @pytest.mark.covers("DistributedLog")
    def test_a_producer_that_was_replaced_is_refused(self, log: Log, other: Log) -> None:
        """From the moment another one of its name is opened, even if it was only asleep; it stores nothing more."""
        log.create_topic("raw", partitions=2)
        stale = log.producer(id="importer", linger_ms=60_000)
        stale.send("raw", b"stale, stored", key=b"k").result()
        late = stale.send("raw", b"stale, too late", key=b"k")
        with other.producer(id="importer") as fresh:
            fresh.send("raw", b"fresh", key=b"k").result()
            with refused(Fenced, "id"):
                late.result()
            with refused(Fenced):
                stale.send("raw", b"never", key=b"k").result()
            with refused(Fenced):
                stale.flush()
            fresh.send("raw", b"fresh again", key=b"k").result()
        with pytest.raises(Fenced):
            stale.close()
        assert [event.value for event in events_of(log, "raw")] == [b"stale, stored", b"fresh", b"fresh again"]

    def test_the_newest_of_many_producers_wins(self, log: Log, other: Log) -> None:
        """One of a name can write, never two."""
        log.create_topic("raw", partitions=1)
        producers = [handle.producer(id="x", linger_ms=60_000) for handle in (log, other) * 3]
        for producer in producers[:-1]:
            with refused(Fenced):
                producer.send("raw", b"stale").result()
        producers[-1].send("raw", b"newest").result()
        for producer in producers:
            _end(producer)
        assert values_of(log, "raw") == [b"newest"]

    def test_a_sequence_needs_a_name_and_goes_with_every_event(self, log: Log) -> None:
        """What is refused leaves nothing behind for the next event."""
        log.create_topic("raw", partitions=1)
        with log.producer() as producer:
            with refused(InvalidInput, "id"):
                producer.send("raw", b"no name", headers={"left": b"over"}, sequence=1)
            producer.send("raw", b"first").result()
        with log.producer(id="x", linger_ms=60_000) as producer:
            producer.send("raw", b"second", sequence=1)
            with refused(InvalidInput, "sequence"):
                producer.send("raw", b"no number", headers={"left": b"over"})
            producer.send("raw", b"third", sequence=2)
        found = [(event.value, event.headers) for event in events_of(log, "raw")]
        assert found == [(b"first", None), (b"second", None), (b"third", None)]

    @pytest.mark.parametrize("sequence", [-1, -(2**63), 2**63, 2**70, "1", 1.5, b"1", []], ids=repr)
    def test_a_number_that_cannot_be_a_sequence_is_refused(self, log: Log, sequence: Any) -> None:
        """Not stored, and not taken for one that was stored before."""
        log.create_topic("raw", partitions=1)
        with log.producer(id="x", linger_ms=60_000) as producer:
            with refused(InvalidInput, "sequence"):
                producer.send("raw", b"refused", sequence=sequence)
            producer.send("raw", b"stored", sequence=0)
        assert values_of(log, "raw") == [b"stored"]

    @pytest.mark.parametrize("name", ["", 7, b"x", [], True], ids=repr)
    def test_a_producers_id_is_a_text(self, log: Log, name: Any) -> None:
        """An empty one would be nobody's."""
        with refused(InvalidInput, "id"):
            log.producer(id=name)

    def test_a_sequence_never_goes_back_in_silence(self, log: Log) -> None:
        """A smaller number than the last is either refused or was stored before; it is not stored out of order."""
        log.create_topic("raw", partitions=1)
        producer = log.producer(id="x", linger_ms=60_000)
        producer.send("raw", b"5", sequence=5)
        with pytest.raises(HeadwaterError) as caught:
            producer.send("raw", b"3", sequence=3).result()
        assert caught.value.code in ("sequence_gap", "invalid_input")
        assert caught.value.advice
        producer.send("raw", b"6", sequence=6)
        _end(producer)
        assert values_of(log, "raw") == [b"5", b"6"]


def _end(producer: object) -> None:
    """A producer that was refused something says so again when it closes."""
    try:
        producer.close()  # type: ignore[attr-defined]
    except HeadwaterError:
        return
