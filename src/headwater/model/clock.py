"""Time as microseconds since 1970 in UTC, and durations as people write them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from headwater.model.errors import InvalidInput

Clock = Callable[[], int]
"""Gives the present as microseconds since 1970. Injected everywhere, so that tests own time."""

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
        return duration // timedelta(microseconds=1)
    total, at = 0.0, 0
    text = duration.strip() if isinstance(duration, str) else ""
    while at < len(text):
        part = _PART.match(text, at)
        unit = _unit_us(part[2].lower()) if part else None
        if part is None or unit is None:
            raise InvalidInput(
                f"{duration!r} is not a duration.",
                advice='Write a number and a unit, such as "90 seconds", "1 minute", "1 hour 30 minutes" or "250 ms".',
            )
        total += float(part[1]) * unit
        at = part.end()
    if not text:
        raise InvalidInput(f"{duration!r} is no duration.", advice='Write a number and a unit, such as "1 minute".')
    return round(total)


def _unit_us(word: str) -> int | None:
    return _UNIT_US.get(word) or _UNIT_US.get(word.removesuffix("s"))


def time_us(moment: object) -> int:
    """Microseconds since 1970 of a `datetime` (naive means UTC), an ISO 8601 string, or such a number itself."""
    if isinstance(moment, int):
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
