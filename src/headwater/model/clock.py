"""Time as microseconds since 1970 in UTC, and durations as people write them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from headwater.model.errors import InvalidInput, Unsupported

Clock = Callable[[], int]
"""Gives the present as microseconds since 1970. Injected everywhere, so that tests own time."""

Duration = str | timedelta
"""A length of time as people write it: "90 seconds", "1 hour 30 minutes", or a `timedelta`."""

_UNIT_US = {
    "microsecond": 1,
    "us": 1,
    "millisecond": 1_000,
    "ms": 1_000,
    "second": 1_000_000,
    "s": 1_000_000,
    "minute": 60_000_000,
    "min": 60_000_000,
    "m": 60_000_000,
    "hour": 3_600_000_000,
    "h": 3_600_000_000,
    "day": 86_400_000_000,
    "d": 86_400_000_000,
    "week": 7 * 86_400_000_000,
}
DURATION_US_MAX = 1 << 62
"""Some 146,000 years: a time of today and such a duration still fit into 64 bits together."""
TIME_US_MIN, TIME_US_MAX = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999 in UTC: what Python and Spark can show."""
NO_TIME = -(2**63)
"""In place of a time where there is none."""
QUEUE_TIME_US_MAX = (1 << 52) - 2 - 366 * 86_400_000_000
"""In the autumn of 2111: a lease or a delay of a year still ends within the 52 bits of a deadline."""

_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)


def system_clock() -> int:
    """The machine's clock."""
    return time.time_ns() // 1_000


class SteadyClock:
    """Microseconds of a clock that nobody sets: it runs on evenly from the machine's start, asleep or not, for all its processes.

    Where tests own the time it is their clock, which nobody sets either.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.is_own = clock is not system_clock

    def __call__(self) -> int:
        return self._clock() if self.is_own else time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000

    def boot_id(self) -> str:
        """Another one after each start of the machine, with which the clock begins again."""
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

    def start_us(self) -> int:
        """When it began, in microseconds since 1970, by what the machine's clock says at this moment."""
        return max(0, self._clock() - self())


def duration_us(duration: object) -> int:
    """Microseconds of "1 minute", "1 hour 30 minutes", "250 ms" or a `timedelta`."""
    if isinstance(duration, timedelta):
        return _bounded(duration // timedelta(microseconds=1), duration)
    total, at = 0.0, 0
    text = duration.strip() if isinstance(duration, str) else ""
    while at < len(text):
        part = _PART.match(text, at)
        unit = _unit_us(part[2].lower()) if part else None
        if part is None or unit is None:
            raise InvalidInput(
                f"{duration!r:.80} is not a duration.",
                advice='Write a number and a unit, such as "90 seconds", "1 minute", "1 hour 30 minutes" or "250 ms".',
            )
        total += float(part[1]) * unit
        at = part.end()
    if not text:
        raise InvalidInput(f"{duration!r} is not a duration.", advice='Write a number and a unit, such as "1 minute".')
    return _bounded(total, duration)


def _bounded(total: float, duration: object) -> int:
    if not abs(total) <= DURATION_US_MAX:
        raise InvalidInput(
            f"{duration!r:.80} is longer than 146,000 years.", advice='Use a shorter duration, such as "365 days".'
        )
    return round(total)


def _unit_us(word: str) -> int | None:
    return _UNIT_US.get(word) or _UNIT_US.get(word.removesuffix("s"))


def time_us(moment: object) -> int:
    """Microseconds since 1970 of a `datetime` (naive means UTC), an ISO 8601 string, or such a number itself."""
    if isinstance(moment, int):
        if abs(moment) > DURATION_US_MAX:
            raise InvalidInput(
                f"{moment!r:.80} is not a number of microseconds since 1970.",
                advice='Use a datetime or ISO 8601, such as "2026-01-31T12:00:00+00:00".',
            )
        return moment
    found = moment
    if isinstance(moment, str):
        try:
            found = datetime.fromisoformat(moment)
        except ValueError:
            found = None
    if not isinstance(found, datetime):
        raise InvalidInput(
            f"{moment!r:.80} is not a time.", advice='Use a datetime or ISO 8601, such as "2026-01-31T12:00:00+00:00".'
        )
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    return (found - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def time_of(us: int) -> datetime:
    """The time so many microseconds after 1970, or the first or the last that Python can show."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=min(max(us, TIME_US_MIN), TIME_US_MAX))


def check_queue_clock(now_us: int) -> None:
    """Refuses to lease by a clock that is out of all bounds: a deadline has 52 bits; `Unsupported`."""
    if not 0 <= now_us < QUEUE_TIME_US_MAX:
        raise Unsupported(
            f"The clock of this machine says {time_of(now_us):%Y-%m-%d}; queues work from 1970 to 2111.",
            advice="Set the clock, then open the queue again.",
        )
