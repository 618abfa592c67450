"""The visitors of one region: a process that sends their clicks with a named producer.

It prints `ready`, then the number of acknowledged clicks after each flush. It reads the start time from one line on stdin,
and ends when stdin closes, also because its parent died. A restarted process remembers nothing and sends from its first
click; because of the producer's id and the clicks' `sequence` numbers the log stores each click once.
"""

from __future__ import annotations

import os
import select
import sys
import time

from headwater.cli.demo.clicks import REGIONS, TOPIC, clicks, clicks_until
from headwater.log.clients.producer import Producer
from headwater.log.log import open_log

PAUSE_S = 0.1
LINGER_MS = 100
BURST = 5_000


def main() -> None:
    """Clicks until stdin ends: `python -m headwater.cli.demo.visitors LOG REGION RATE`."""
    url, region, rate = sys.argv[1], sys.argv[2], float(sys.argv[3])
    with open_log(url, create=False) as log, log.producer(id=region, linger_ms=LINGER_MS) as producer:
        _say("ready")
        told = os.read(0, 64)
        if told:
            _click(producer, region, rate=rate, begun_us=int(told))


def _click(producer: Producer, region: str, *, rate: float, begun_us: int) -> None:
    """Sends what is due until stdin ends, and then what is due at that moment."""

    def due() -> int:
        return clicks_until(time.time() - begun_us / 1e6, rate=rate, phase=REGIONS.index(region))

    def send(first: int, end: int) -> int:
        """Sends the clicks from `first` up to `end`, and says so when they are on disk."""
        events = clicks(region, first, end, begun_us=begun_us, rate=rate).to_pylist()
        for number, event in enumerate(events, first):
            producer.send(TOPIC, event, sequence=number)
        producer.flush()
        _say(str(end))
        return end

    sent = 0
    while not _is_over(0 if due() - sent > BURST else PAUSE_S):
        sent = send(sent, max(sent, min(due(), sent + BURST)))
    last = due()
    while sent < last:
        sent = send(sent, min(last, sent + BURST))


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
