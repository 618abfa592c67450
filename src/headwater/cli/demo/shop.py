"""One shop of the demonstration, a process of its own: sends its orders with a named producer.

It speaks in lines: `ready`, then after each flush the number of orders that are acknowledged. It is told when the day began
in one line on stdin, and ends when stdin ends, which is also what happens when whoever started it dies. A shop that starts
again sends from its first order, since it remembers nothing: the producer's id and the orders' numbers (`sequence`) make
the log store each one once.
"""

from __future__ import annotations

import os
import select
import sys
import time
from datetime import UTC, datetime

from headwater.cli.demo.orders import SHOPS, TOPIC, order, orders_until
from headwater.log.log import open_log
from headwater.log.producer import Producer

PAUSE_S = 0.1
LINGER_MS = 100
BURST = 5_000


def main() -> None:
    """Sells until stdin ends: `python -m headwater.cli.demo.shop LOG SHOP RATE`."""
    url, shop, rate = sys.argv[1], sys.argv[2], float(sys.argv[3])
    with open_log(url, create=False) as log, log.producer(id=shop, linger_ms=LINGER_MS) as producer:
        _say("ready")
        told = os.read(0, 64)
        if told:
            _sell(producer, shop, rate=rate, begun=float(told))


def _sell(producer: Producer, shop: str, *, rate: float, begun: float) -> None:
    """Sends what is due until stdin ends, and then what is due at that moment."""

    def due() -> int:
        return orders_until(time.time() - begun, rate=rate, phase=SHOPS.index(shop))

    sent = 0
    while not _is_over(0 if due() - sent > BURST else PAUSE_S):
        sent = _send(producer, shop, sent, min(due(), sent + BURST))
    last = due()
    while sent < last:
        sent = _send(producer, shop, sent, min(last, sent + BURST))


def _send(producer: Producer, shop: str, first: int, end: int) -> int:
    """Sends the orders from `first` up to `end`, and says so when they are on disk."""
    now = datetime.now(UTC)
    for number in range(first, end):
        producer.send(TOPIC, order(shop, number, now), sequence=number)
    producer.flush()
    _say(str(end))
    return end


def _is_over(pause_s: float) -> bool:
    """Waits a moment; True when stdin has ended."""
    return bool(select.select([0], [], [], pause_s)[0]) and not os.read(0, 64)


def _say(word: str) -> None:
    os.write(1, f"{word}\n".encode("ascii"))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(1)  # nobody listens any more
