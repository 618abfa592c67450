"""The contract of transactions: appends to several topics and partitions happen together or not at all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from headwater.log.log import Log
from headwater.model.errors import Closed, InvalidInput, SchemaMismatch, TopicNotFound
from headwater.testing.contracts.case import (
    ORDERS,
    LogCase,
    events_of,
    order,
    orders,
    refused,
    values_by_partition,
    values_of,
)


class TransactionContract(LogCase):
    """What holds for transactions and atomic appends."""

    def test_everything_is_there_when_the_block_ends(self, log: Log) -> None:
        """And nothing before; the offsets are given by topic and partition."""
        log.create_topic("orders", ORDERS, key="id", partitions=3)
        log.create_topic("raw", partitions=1)
        log.append("raw", [b"before"])
        with log.transaction() as transaction:
            transaction.append("orders", orders(10))
            transaction.append("raw", [b"x", b"y"])
            assert values_of(log, "orders") == []
            assert values_of(log, "raw") == [b"before"]
        assert values_of(log, "raw") == [b"before", b"x", b"y"]
        assert transaction.offsets["raw"] == {0: [range(1, 3)]}
        assert sum(len(span) for spans in transaction.offsets["orders"].values() for span in spans) == 10
        assert len(values_of(log, "orders")) == 10

    def test_the_order_of_its_appends_is_kept(self, log: Log) -> None:
        """Several appends to one topic stand one behind the other, at the offsets that are given."""
        log.create_topic("orders", ORDERS, key="id", partitions=2)
        with log.transaction() as transaction:
            for number in range(30):
                transaction.append("orders", [order(number)])
        for partition, values in values_by_partition(log, "orders").items():
            amounts = [value["amount"] for value in values]
            assert amounts == sorted(amounts)
            assert transaction.offsets["orders"][partition] == [range(at, at + 1) for at in range(len(amounts))]

    def test_an_exception_in_the_block_stores_nothing(self, log: Log) -> None:
        """Whatever it was."""
        log.create_topic("raw", partitions=2)
        transaction = log.transaction()

        def fail() -> None:
            with transaction:
                transaction.append("raw", [b"x"])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert values_of(log, "raw") == []
        assert transaction.offsets == {}

    @pytest.mark.parametrize("end", ["raised", "committed", "committed in the block", "refused"])
    def test_a_transaction_that_is_over_is_not_used_again(self, log: Log, end: str) -> None:
        """What was rolled back never happens, and nothing is taken that would not be stored."""
        for name in ("raw", "gone"):
            log.create_topic(name, partitions=1)
        transaction = log.transaction()
        with suppress(ZeroDivisionError, TopicNotFound), transaction:
            transaction.append("raw", [b"first"])
            if end == "raised":
                raise ZeroDivisionError
            if end == "committed in the block":
                transaction.commit()
            if end == "refused":
                transaction.append("gone", [b"first"])
                log.delete_topic("gone")
        stored = [] if end in ("raised", "refused") else [b"first"]
        assert values_of(log, "raw") == stored
        with log.consumer("raw", group="g", commit="manual") as consumer:
            uses: list[Callable[[], object]] = [
                lambda: transaction.append("raw", [b"again"]),
                lambda: transaction.commit_offsets(consumer),
                lambda: transaction.ack([]),
                transaction.commit,
                transaction.__enter__,
            ]
            for use in uses:
                with refused(Closed, "over"):
                    use()
        assert values_of(log, "raw") == stored

    @pytest.mark.parametrize("given", ["x", None, 7, object()], ids=lambda given: type(given).__name__)
    def test_a_transaction_takes_consumers_and_leases_only(self, log: Log, given: Any) -> None:
        """Anything else is refused in our words."""
        with log.transaction() as transaction:
            uses: list[Callable[[], object]] = [
                lambda: transaction.commit_offsets(given),
                lambda: transaction.ack(given),
                lambda: transaction.ack([given]),
            ]
            for use in uses:
                with refused(InvalidInput):
                    use()

    def test_a_row_that_does_not_fit_stores_nothing(self, log: Log) -> None:
        """Neither of its topic nor of the others."""
        log.create_topic("orders", ORDERS, key="id")
        log.create_topic("raw")
        with refused(SchemaMismatch, "amount"), log.transaction() as transaction:
            transaction.append("raw", [b"x"])
            transaction.append("orders", [order(0), {"amount": "much"}])
        assert values_of(log, "raw") == values_of(log, "orders") == []

    def test_a_topic_deleted_before_the_commit_stores_nothing(self, log: Log) -> None:
        """All or nothing also when a topic is gone."""
        log.create_topic("a", partitions=1)
        log.create_topic("b", partitions=1)
        with refused(TopicNotFound, "b"), log.transaction() as transaction:
            transaction.append("a", [b"x"])
            transaction.append("b", [b"x"])
            log.delete_topic("b")
        assert values_of(log, "a") == []
        log.append("a", [b"y"])
        assert values_of(log, "a") == [b"y"]

    def test_an_empty_transaction_is_no_error(self, log: Log) -> None:
        """It stores nothing."""
        log.create_topic("raw", partitions=1)
        with log.transaction():
            pass
        with log.transaction() as transaction:
            transaction.append("raw", [])
        assert values_of(log, "raw") == []

    def test_a_reader_sees_all_of_a_transaction_or_nothing(self, log: Log, other: Log) -> None:
        """Each poll is one moment of the whole log, in every handle, while transactions go on."""
        log.create_topic("a", "n INT", key="n", partitions=3)
        log.create_topic("b", "n INT", key="n", partitions=2)
        done = threading.Event()
        polls: list[Counter[tuple[str, int]]] = []

        def watch(handle: Log) -> None:
            with handle.reader(["a", "b"]) as reader:
                while True:
                    last = done.is_set()
                    events = reader.poll(events_max=1_000_000, timeout_s=0.01)
                    polls.append(Counter((event.topic, event.partition) for event in events))
                    if last:
                        return

        watchers = [threading.Thread(target=watch, args=(handle,)) for handle in (log, other)]
        for watcher in watchers:
            watcher.start()
        for _ in range(25):
            with log.transaction() as transaction:
                for start in (0, 6):
                    rows = [{"n": number} for number in range(start, start + 6)]
                    transaction.append("a", rows)
                    transaction.append("b", rows)
        done.set()
        for watcher in watchers:
            watcher.join()
        stored = events_of(other, ["a", "b"])
        assert len(stored) == 25 * 24
        share = {place: n // 25 for place, n in Counter((event.topic, event.partition) for event in stored).items()}
        for counts in polls:
            assert not [place for place, count in counts.items() if count % share[place]]
            if self.transactions_in_one_moment:
                assert len({counts[place] // share[place] for place in share}) == 1

    def test_an_atomic_append_is_seen_whole_over_all_partitions(self, log: Log) -> None:
        """What `append` promises for each partition, `atomic` promises for all together."""
        log.create_topic("t", "n INT", key="n", partitions=4)
        done = threading.Event()
        counts: set[int] = set()
        ends: set[tuple[int, int]] = set()

        def watch() -> None:
            while not done.is_set():
                spans = log.offsets("t")
                counts.add(sum(map(len, spans.values())))
                ends.update((partition, span.stop) for partition, span in spans.items())

        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(20):
            spans = log.append("t", [{"n": number} for number in range(50)], atomic=True)
            assert len(spans) == 4
        done.set()
        watcher.join()
        assert max(Counter(partition for partition, _ in ends).values()) <= 21
        if self.transactions_in_one_moment:
            assert {count % 50 for count in counts} <= {0}

    def test_transactions_and_appends_of_many_threads_all_happen(self, log: Log, other: Log) -> None:
        """None waits for ever, none is lost."""
        for name in ("a", "b"):
            log.create_topic(name, partitions=2)

        def write(handle: Log, first: str, second: str) -> None:
            for number in range(10):
                with handle.transaction() as transaction:
                    transaction.append(first, [b"%d" % number])
                    transaction.append(second, [b"%d" % number])
                handle.append(second, [b"alone"])

        pairs = [(log, "a", "b"), (other, "b", "a"), (log, "b", "a"), (other, "a", "b")]
        threads = [threading.Thread(target=write, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert len(values_of(log, "a")) == len(values_of(log, "b")) == 4 * 10 + 2 * 10
