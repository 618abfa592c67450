"""The number of matches of each pattern, counted by loops that are written for it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from bench.patterns.queries import FACTOR, LARGE, MANY, SMALL, WITHIN_MS, Rule
from examples.nexmark.draws import Numbers
from examples.nexmark.topics import TIME

Count = Callable[[list[int], list[int]], int]
"""The matches in the prices and times (ms) of one key."""


def rising(prices: list[int], times: list[int]) -> int:
    """A B+ C: rises, then a fall. A match begins at the first row that it can begin at."""
    found = row = 0
    while row < len(prices) - 2:
        end = row + 1
        while end < len(prices) and prices[end] > prices[end - 1]:
            end += 1
        if end > row + 1 and end < len(prices) and prices[end] < prices[end - 1]:
            found, row = found + 1, end + 1
        else:
            row += 1
    return found


def average(prices: list[int], times: list[int]) -> int:
    """A+ B: small prices, then one far above their average."""
    found = row = 0
    while row < len(prices):
        end = row
        while end < len(prices) and prices[end] < MANY:
            end += 1
        before = prices[row:end]
        is_match = (
            before
            and end < len(prices)
            and prices[end] > FACTOR * (sum(before) / len(before))
            and times[end] - times[row] < WITHIN_MS
        )
        found, row = (found + 1, end + 1) if is_match else (found, row + 1)
    return found


def counted(bids: pa.Table, key: str, count: Count) -> int:
    """The matches in all bids."""
    return sum(count(prices.tolist(), times.tolist()) for prices, times in _by_key(bids, key))


def small_large(bids: pa.Table, key: str, small: int = SMALL, large: int = LARGE, times: int = 3) -> int:
    """A{n} B: small prices, then a large one. No row is in two of them, so each place where they are counts."""
    return _small_large(_sorted(bids, key), small, large, times)


def rules(bids: pa.Table, key: str, rules: Sequence[Rule]) -> int:
    """The matches of all rules."""
    rows = _sorted(bids, key)
    return sum(_small_large(rows, rule.small, rule.large, rule.times) for rule in rules)


def _small_large(rows: tuple[Numbers, Numbers, Numbers], small: int, large: int, times: int) -> int:
    keys, prices, at = rows
    starts = len(prices) - times
    found = (keys[times:] == keys[:starts]) & (prices[times:] >= large) & (at[times:] - at[:starts] < WITHIN_MS)
    for step in range(times):
        found &= prices[step : step + starts] < small
    return int(found.sum())


def _sorted(bids: pa.Table, key: str) -> tuple[Numbers, Numbers, Numbers]:
    keys = bids.column(key).to_numpy()
    prices = bids.column("price").to_numpy()
    times = bids.column(TIME).cast(pa.int64()).to_numpy() // 1_000
    order = np.lexsort((times, keys))
    return keys[order], prices[order], times[order]


def _by_key(bids: pa.Table, key: str) -> Iterator[tuple[Numbers, Numbers]]:
    keys, prices, times = _sorted(bids, key)
    borders = np.flatnonzero(np.diff(keys)) + 1
    yield from zip(np.split(prices, borders), np.split(times, borders), strict=True)
