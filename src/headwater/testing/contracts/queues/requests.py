"""The contract of requests: an event sent to a queue, whose sender waits for the answer until a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

from headwater.log.log import Log
from headwater.log.queue.lease import Lease
from headwater.model.errors import InvalidInput, TimedOut
from headwater.testing.contracts.case import LogCase, refused


@contextmanager
def workers(log: Log, topic: str, work: Callable[[Lease], Any], *, count: int = 2) -> Any:
    """So many threads that lease from a topic and work, until the block ends."""
    done = threading.Event()

    def run() -> None:
        with log.queue(topic, group="workers") as queue:
            while not done.is_set():
                for lease in queue.lease(events_max=1, timeout_s=0.05):
                    work(lease)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(30)


class RequestContract(LogCase):
    """What holds for request and reply."""

    @pytest.mark.covers("TIBCO EMS")
    def test_each_sender_gets_its_own_reply(self, log: Log, other: Log) -> None:
        """Many at once, over queues shared by several workers; the request is acknowledged with the reply."""
        log.create_topic("square", "n INT", partitions=2)
        answers: dict[int, Any] = {}

        def ask(handle: Log, n: int) -> None:
            answers[n] = handle.request("square", {"n": n}, timeout_s=20).value

        with workers(log, "square", lambda lease: lease.reply({"square": lease.event.value["n"] ** 2})):
            threads = [threading.Thread(target=ask, args=((log, other)[n % 2], n)) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        assert answers == {n: {"square": n * n} for n in range(8)}
        with log.queue("square", group="workers") as queue:
            assert queue.lease(timeout_s=0) == []

    @pytest.mark.covers("TIBCO EMS")
    def test_a_request_without_reply_times_out(self, log: Log) -> None:
        """At its deadline; a reply after that is refused, and the lease can still be settled."""
        log.create_topic("ask", partitions=1)
        begun = time.monotonic()
        with refused(TimedOut, "ask"):
            log.request("ask", b"anybody?", timeout_s=0.1)
        assert 0.1 <= time.monotonic() - begun < 5
        with log.queue("ask") as queue:
            (lease,) = queue.lease()
            with refused(TimedOut, "deadline"):
                lease.reply(b"too late")
            lease.ack()
            log.append("ask", [b"no request"])
            (plain,) = queue.lease()
            with refused(InvalidInput, "not a request"):
                plain.reply(b"to whom?")
            with refused(InvalidInput, "timeout_s"):
                log.request("ask", b"x", timeout_s=0)

    @pytest.mark.covers("TIBCO EMS")
    def test_a_topic_is_bridged_to_a_queue(self, log: Log, other: Log) -> None:
        """What is published once, every subscriber gets, and of the queue's workers one: nothing has to be copied for it."""
        log.create_topic("prices", "n INT", key="n", partitions=2)
        seen: list[int] = []

        def work(lease: Lease) -> None:
            seen.append(lease.event.value["n"])
            lease.ack()

        with workers(log, "prices", work, count=3):
            with log.reader("prices") as first, other.reader("prices") as second:
                log.append("prices", [{"n": n} for n in range(40)])
                for reader in (first, second):
                    got: list[int] = []
                    while len(got) < 40:
                        got += [event.value["n"] for event in reader.poll(timeout_s=20)]
                    assert sorted(got) == list(range(40))
            deadline = time.monotonic() + 30
            while len(seen) < 40 and time.monotonic() < deadline:
                time.sleep(0.01)
        assert sorted(seen) == list(range(40))
        with log.queue("prices", group="workers") as queue:
            assert queue.lease(timeout_s=0) == []

    def test_replies_are_bytes_or_json_or_rows_of_a_topic(self, log: Log) -> None:
        """What the worker gave is what the sender gets."""
        log.create_topic("echo", partitions=1)
        log.create_topic("rows", "n INT", partitions=1)
        with workers(log, "echo", lambda lease: lease.reply(lease.event.value), count=1):
            assert log.request("echo", b"bytes", key=b"k", timeout_s=20).value == b"bytes"
            assert log.topics() == ["echo", "echo.replies", "rows"]
        with workers(log, "echo", lambda lease: lease.reply({"n": 3}), count=1):
            assert log.request("echo", b"?", timeout_s=20, reply_topic="rows").value == {"n": 3}
            assert log.request("echo", b"?", timeout_s=20).value == {"n": 3}
