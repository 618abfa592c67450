"""Nexmark's events, appended to a log: persons, auctions and bids, any number of them, the same for the same seed.

python -m examples.nexmark.generate --log ./nexmark --events 1000000 --seed 7
python -m examples.nexmark.generate --log ./nexmark --events 1000000 --seed 7 --shuffled --late 0.01
python -m examples.nexmark.generate --log ./nexmark --first 1000000 --events 1000000 --seed 7     the next million, alone
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

import pyarrow as pa

import headwater as hw
from examples.nexmark.arrival import Arrival
from examples.nexmark.events import PERIOD_US, Nexmark
from examples.nexmark.topics import LATENESS, TOPICS
from headwater.errors import HeadwaterError, InvalidInput

EVENTS_PER_APPEND = 250_000
RATE_MAX = 1_000_000


def batches(events: Nexmark, arrival: Arrival, events_max: int = EVENTS_PER_APPEND) -> Iterator[dict[str, pa.Table]]:
    """All events in the order in which they arrive: tables by topic, about so many events at a time."""
    for start in range(arrival.first, arrival.end, events_max):
        yield events.tables(arrival.numbers(start, min(start + events_max, arrival.end)))


def create(log: hw.Log, *, lateness: str = LATENESS, partitions: int = 4) -> None:
    """Make the three topics where they are missing."""
    for name, topic in TOPICS.items():
        log.create_topic(name, **topic.declared(lateness), partitions=partitions, exist_ok=True)


def fill(log: hw.Log, events: Nexmark, arrival: Arrival, *, events_max: int = EVENTS_PER_APPEND) -> dict[str, int]:
    """Append all events; how many each topic got. The topics are there."""
    appended = dict.fromkeys(TOPICS, 0)
    for tables in batches(events, arrival, events_max):
        for topic, table in tables.items():
            if table.num_rows:
                log.append(topic, table)
                appended[topic] += table.num_rows
    return appended


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill a log as the command line says; what it refuses is said in one line."""
    given = _parser().parse_args(arguments)
    try:
        period_us = _period_us(given)
        with hw.open_log(given.log) as log:
            create(log, lateness=given.lateness, partitions=given.partitions)
            arrival = Arrival(
                given.first,
                given.first + given.events,
                seed=given.seed,
                lateness_events=log.topic("bids").lateness_us // period_us,
                shuffled=given.shuffled,
                late=given.late,
            )
            began = time.monotonic()
            appended = fill(log, Nexmark(given.seed, period_us), arrival)
    except HeadwaterError as error:
        sys.exit(f"{error}")
    seconds = time.monotonic() - began
    told = ", ".join(f"{count:,} {topic}" for topic, count in appended.items())
    print(f"{told} in {seconds:.1f} s ({given.events / max(seconds, 1e-9) / 1e6:.2f} M events/s)")


def _period_us(given: argparse.Namespace) -> int:
    """The time between two events, once everything about the events was found sensible."""
    if not 0 < given.rate <= RATE_MAX:
        raise InvalidInput(
            f"--rate {given.rate:g}: events cannot happen at that rate.",
            advice=f"Give a rate above 0, and at most {RATE_MAX:,}: no two events happen in the same microsecond.",
        )
    if given.first < 0 or given.events < 0:
        raise InvalidInput("Events are counted from 0.", advice="Give --first and --events that are not negative.")
    if not 0 <= given.late <= 1:
        raise InvalidInput(f"--late {given.late:g} is no share.", advice="Give a number from 0 to 1, such as 0.01.")
    return round(1_000_000 / given.rate)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m examples.nexmark.generate", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--log", default="./nexmark", help="where the log is: a folder, or kafka://…")
    parser.add_argument("--events", type=int, default=1_000_000, help="how many events")
    parser.add_argument("--first", type=int, default=0, help="the number of the first of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1_000_000 / PERIOD_US, help="events per second of event time")
    parser.add_argument("--lateness", default=LATENESS, help="of the topics, and how far --shuffled delays events")
    parser.add_argument("--shuffled", action="store_true", help="events come in another order, none of them late")
    parser.add_argument("--late", type=float, default=0.0, help="the share of events that come later than the lateness")
    parser.add_argument("--partitions", type=int, default=4, help="of each topic")
    return parser


if __name__ == "__main__":
    main()
