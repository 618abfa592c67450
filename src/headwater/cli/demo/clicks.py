"""The clicks of the demonstration: each can be computed again from its number, so that the log can be checked against them."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa

TOPIC = "clicks"
REGIONS = ("europe", "america", "asia")
USERS = 100_000
"""A region's users have numbers of their own: the region's place in `REGIONS` times this, and up."""

_PAGES = ("/", "/products", "/products/1?from=mail", "/products/2", "/cart", "/checkout", "/help", "/health")
_OFTEN = np.repeat(np.arange(len(_PAGES)), (9, 7, 5, 4, 3, 2, 1, 1))
_LATE_US_MAX = 3_000_000


def clicks(region: str, first: int, end: int, *, begun_us: int, rate: float) -> pa.Table:
    """The clicks of a region with these numbers: user, page, and when it was, up to three seconds before it is sent."""
    numbers = np.arange(first, end, dtype=np.uint64)
    dice = _shuffled(numbers + np.uint64(REGIONS.index(region) << 40))
    users = REGIONS.index(region) * USERS + (dice % np.uint64(5_000)).astype(np.int64)
    pages = pa.array(_PAGES).take(pa.array(_OFTEN[(dice >> np.uint64(16)) % np.uint64(len(_OFTEN))]))
    late = ((dice >> np.uint64(32)) % np.uint64(_LATE_US_MAX)).astype(np.int64)
    at = begun_us + (numbers * (1e6 / rate)).astype(np.int64) - late
    return pa.table({"user_id": users, "page": pages, "at": pa.array(at).cast(pa.timestamp("us", "UTC"))})


def clicks_until(elapsed_s: float, *, rate: float, phase: float) -> int:
    """How many clicks a region has had after so many seconds: about `rate` each second, with busy and quiet moments."""
    waves = 0.45 * (math.sin(1.3 * elapsed_s + phase) - math.sin(phase))
    return max(0, int(rate * (elapsed_s + waves)))


def _shuffled(numbers: np.ndarray) -> np.ndarray:
    """A number that looks like chance for each (splitmix64): the same in every process, whole arrays at a time."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
