"""The contract of a closed log: its handles refuse to work, and what was stored is still there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwater.log.log import Log
from headwater.model.errors import Closed, HeadwaterError
from headwater.testing.contracts.case import ORDERS, LogCase, orders, refused

USES: dict[str, Callable[[Log], Any]] = {
    "topics": lambda log: log.topics(),
    "topic": lambda log: log.topic("orders"),
    "create": lambda log: log.create_topic("new"),
    "alter": lambda log: log.alter_topic("orders", lateness="1 second"),
    "delete": lambda log: log.delete_topic("orders"),
    "offsets": lambda log: log.offsets("orders"),
    "offsets_at": lambda log: log.offsets_at("orders", 0),
    "append": lambda log: log.append("orders", orders(1)),
    "atomic append": lambda log: log.append("orders", orders(1), atomic=True),
    "producer": lambda log: log.producer().send("orders", orders(1)[0]).result(),
    "named producer": lambda log: log.producer(id="x"),
    "reader": lambda log: log.reader("orders"),
    "read": lambda log: log.read("orders"),
    "scan": lambda log: log.scan("orders"),
    "table": lambda log: log.table("orders"),
}


class ClosedLogContract(LogCase):
    """What holds for closed handles, and for errors in general."""

    @pytest.mark.parametrize("use", USES.values(), ids=USES)
    def test_a_closed_log_is_refused(self, log: Log, use: Callable[[Log], Any]) -> None:
        """For each method. A second close is not an error."""
        log.create_topic("orders", ORDERS, key="id")
        log.append("orders", orders(3))
        log.close()
        log.close()
        with refused(Closed):
            use(log)

    def test_what_a_log_gave_out_is_closed_with_it(self, log: Log) -> None:
        """A reader, a transaction and a producer say so; so does a receipt whose batch was not written."""
        log.create_topic("orders", ORDERS, key="id")
        reader, transaction, producer = log.reader("orders"), log.transaction(), log.producer(linger_ms=60_000)
        transaction.append("orders", orders(1))
        receipt = producer.send("orders", orders(1)[0])
        log.close()
        with refused(Closed):
            reader.poll(timeout_s=0)
        with refused(Closed):
            transaction.commit()
        with refused(Closed):
            receipt.result(timeout_s=10)
        with pytest.raises(Closed):
            producer.close()
        reader.close()

    def test_what_was_read_outlives_the_log(self, log: Log) -> None:
        """Events and Arrow tables are the reader's own."""
        log.create_topic("orders", ORDERS, key="id", partitions=1)
        log.append("orders", orders(100))
        table = log.read("orders")
        with log.reader("orders") as reader:
            events = reader.poll()
        log.close()
        assert table.column("amount").to_pylist() == [event.value["amount"] for event in events]
        assert len(events) == 100

    def test_a_block_closes_the_log(self, log: Log) -> None:
        """However it ends."""
        log.create_topic("raw")
        with pytest.raises(ZeroDivisionError), log:
            raise ZeroDivisionError
        with refused(Closed):
            log.read("raw")

    def test_every_error_has_a_code_of_its_own(self) -> None:
        """Programs tell errors apart by it, so no two kinds share one."""
        kinds = [HeadwaterError]
        for kind in kinds:
            kinds += kind.__subclasses__()
        ours = [kind for kind in kinds if kind.__module__.startswith("headwater.")]
        codes = [kind.code for kind in ours]
        assert len(codes) == len(set(codes)) > 20
        assert all(code == code.lower() and code.isidentifier() for code in codes)
        assert all(kind.__doc__ for kind in ours)
