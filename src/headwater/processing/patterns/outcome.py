"""The outcome of a search: what becomes of each row as the start of a match.

A row **bound** is a number of rows from the first: bound 3 lies between rows 2 and 3. The **horizon** of a start is the bound that
its match cannot pass, by WITHIN or by `rows_max`. A start is **open** while a row to come can still change what it finds. Its **reach**
is the bound up to which rows had to be known.

Each match has the time at which it was **decided**: the least watermark at which it is certain. It depends on the data alone, so it tells
a match that an earlier batch gave.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

Array = Any
"""A NumPy array."""

NEVER = 2**31 - 1
"""In place of a bound: no end, or a reach beyond the rows that are known."""
MAX_TIME = 2**63 - 1


class SearchRows(NamedTuple):
    """The rows of some keys, and what is known of them."""

    holds: Array
    """For each row and variable of the automaton, whether the row satisfies its condition."""
    times: Array
    """In µs; within a key they increase."""
    key: Array
    """The first row of each key, and at the end the number of rows."""
    start: Array
    """The first row of each key at which a match may begin; those before are there for PREV."""
    is_begin: Array
    """Whether that row of a key is the first of its partition."""
    until: int
    """The watermark: all rows up to it are there."""
    is_over: bool = False
    """Whether no row will come any more."""
    within: Array | None = None
    """For each row the bound after the last row that WITHIN allows a match from there, where that is known already."""


class Rule(NamedTuple):
    """How matches follow each other and how long they may be."""

    within_us: int | None = None
    rows_max: int = 100_000
    skip: Literal["past", "next", "first", "last"] = "past"
    skip_to: frozenset[int] = frozenset()
    """The variables that `skip` names, by their numbers."""
    ahead: int = 0
    """The number of rows after a row that its conditions refer to."""
    is_ordered: bool = False
    """Whether a match waits until all starts before it are decided."""
    timeouts: bool = False
    """Whether what was open when its time was over is found, too."""


class Matches(NamedTuple):
    """Matches in the order of their starts. Rows are given by their numbers."""

    start: Array
    end: Array
    """The bound after the last row; of an empty match it is `start`."""
    decided: Array
    """The time from which on the match is certain."""
    path: Array
    """The rows of all matches, one after the other."""
    position: Array
    """Which position of the automaton each of these has."""
    offset: Array
    """Where the rows of each match begin in `path`, and at the end their number."""
    failed: Array
    """Rows at which no match begins; by `failed_at` it is certain."""
    failed_at: Array
    given_up: Array
    """Starts whose match grew beyond `rows_max`, or took too many steps."""
    given_up_at: Array
    open: Array
    """For each key the first row that is still needed as a start, or the end of the key."""
    is_timeout: Array
    """Whether it was not complete when its time was over."""
    steps: int
    """How many times targets of a row were looked at."""


class SearchOutcome:
    """Collects what a search finds; `key` is for each row its key, `known` for each key the bound of its known rows."""

    def __init__(self, rule: Rule, rows: SearchRows) -> None:
        self._rule, self._rows = rule, rows
        ends = rows.key[1:]
        self.known = np.maximum(ends if rows.is_over else ends - rule.ahead, rows.start)
        self.key = np.repeat(np.arange(len(ends)), np.diff(rows.key))
        self._end = ends[self.key]
        self.horizon, self.is_by_rows = self._horizons()
        self.is_closed = self._closed()
        self._open = ends.copy() if rows.is_over else self.known.copy()
        count = len(rows.times)
        self._failed_at = np.zeros(count, np.int64)
        self._is_failed, self._is_given_up, self._is_timeout = np.zeros((3, count), bool)
        self._count = self._looks = 0
        self._matches: list[tuple[Array, Array, Array, Array, Array]] = []
        self._steps: list[tuple[Array, Array, Array]] = []

    def numbers(self, count: int) -> Array:
        """Numbers for so many starts that are searched from."""
        self._count += count
        return np.arange(self._count - count, self._count)

    def note_looks(self, count: int) -> None:
        """The targets of so many rows were looked at."""
        self._looks += count

    def note_failing(self, start: Array, reach: Array, *, is_given_up: Array = False) -> None:
        """No match begins at some rows; of those that are given up one cannot know."""
        self._failed_at[start] = self._decided(reach, start)
        self._is_timeout[start] = (reach > self.horizon[start]) & ~self.is_by_rows[start]
        self._is_given_up[start] = ((reach > self.horizon[start]) & self.is_by_rows[start]) | is_given_up

    def note_failed(self, row: Array, until: Array) -> None:
        """The search went on from some rows to others and found that no match begins between them."""
        counts = until - row
        places = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(row, counts)
        self._is_failed[places] = True

    def note_open(self, start: Array) -> None:
        """What becomes of some starts depends on rows to come."""
        np.minimum.at(self._open, self.key[start], start)

    def note_steps(self, number: Array, row: Array, position: Array) -> None:
        """Searches, by their numbers, take rows as positions; those of a search come in their order."""
        self._steps.append((number, row, position))

    def timeouts(self, start: Array) -> Array:
        """Of some rows the starts that were open when their time was over."""
        return start[self._is_timeout[start] & self._is_failed[start]]

    def note_matches(self, number: Array, start: Array, end: Array, reach: Array, *, is_timeout: bool = False) -> None:
        """Searches end with a match, or with what there was of one when its time was over."""
        self._matches.append((number, start, end, np.maximum(reach, end), np.full(len(start), int(is_timeout))))

    def matches(self) -> Matches:
        """All of them."""
        none = np.zeros(0, np.int64)
        number, start, end, reach, timeout = (
            np.concatenate([none, *(each[at] for each in self._matches)]) for at in range(5)
        )
        order = np.argsort(start, kind="stable")
        number, start, end, reach, timeout = (each[order] for each in (number, start, end, reach, timeout))
        decided, failed = self._decided(reach, start), np.flatnonzero(self._is_failed)
        failed_at = self._failed_at[failed]
        is_given_up = self._is_given_up[failed]
        given_up, given_up_at = failed[is_given_up], failed_at[is_given_up]
        if self._rule.is_ordered or self._rule.skip != "next":
            is_sure = start < self._open[self.key[start]]
            number, start, end, decided, timeout = (each[is_sure] for each in (number, start, end, decided, timeout))
            is_sure = failed < self._open[self.key[failed]]
            failed, failed_at = failed[is_sure], failed_at[is_sure]
            latest = self._latest(np.r_[start, failed], np.r_[decided, failed_at])
            decided, failed_at = latest[: len(start)], latest[len(start) :]
        rank = np.full(self._count, -1)
        rank[number] = np.arange(len(number))
        step, path, position = (np.concatenate([none, *(each[at] for each in self._steps)]) for at in range(3))
        step = rank[step]
        order = np.argsort(step, kind="stable")
        order = order[np.searchsorted(step[order], 0) :]
        offset = np.r_[0, np.cumsum(end - start)]
        return Matches(
            start, end, decided, path[order], position[order], offset, failed, failed_at, given_up, given_up_at,
            self._open, timeout > 0, self._looks,
        )  # fmt: skip

    def _horizons(self) -> tuple[Array, Array]:
        """For each row as a start the bound that its match cannot pass, and whether that is by `rows_max`."""
        rows, rule = self._rows, self._rule
        by_time = self._end
        if rule.within_us is not None:
            by_time = rows.within
            if by_time is None:
                by_time = last_within(rows.times, self.key, rows.key, rule.within_us)
        by_rows = np.arange(len(rows.times)) + rule.rows_max
        return np.minimum(by_time, by_rows), by_rows <= by_time

    def _closed(self) -> Array:
        """For each row as a start whether all rows up to its horizon are known."""
        rows, rule, known = self._rows, self._rule, self.known[self.key]
        if rows.is_over:
            return np.ones(len(rows.times), bool)
        closed = np.arange(len(rows.times)) + rule.rows_max <= known
        if rule.within_us is not None:
            closed |= (rows.times <= rows.until - rule.within_us) & (self.horizon <= known)
        return closed

    def _decided(self, reach: Array, start: Array) -> Array:
        """The times from which on it is certain what becomes of some starts whose targets reach so far."""
        rows, rule = self._rows, self._rule
        horizon, is_by_rows = self.horizon[start], self.is_by_rows[start]
        is_beyond = reach > horizon
        place = np.where(is_beyond, horizon, reach) - 1 + rule.ahead
        last = self._end[start] - 1
        found = np.where(place > last, MAX_TIME, rows.times[np.clip(place, 0, last)])
        is_by_time = is_beyond & ~is_by_rows
        if rule.within_us is None:
            return np.where(is_by_time, MAX_TIME, found)
        over = np.minimum(rows.times[start], MAX_TIME - rule.within_us) + rule.within_us
        return np.where(is_by_time, np.maximum(over, found) if rule.ahead else over, found)

    def _latest(self, row: Array, decided: Array) -> Array:
        """The greatest of the times of all starts of the same key up to each."""
        order = np.lexsort((row, self.key[row]))
        times, place = np.unique(decided, return_inverse=True)
        key = self.key[row][order]
        found = np.empty(len(row), np.int64)
        if len(row):
            found[order] = times[np.maximum.accumulate(key * len(times) + place[order]) % len(times)]
        return found


def last_within(times: Array, key: Array, first: Array, within_us: int) -> Array:
    """For each row the bound after the last row of its key whose time is at most so much later."""
    different, place = np.unique(times, return_inverse=True)
    latest = np.searchsorted(different, np.minimum(times, MAX_TIME - within_us) + within_us, "right") - 1
    width = len(different) + 1
    return np.searchsorted(key * width + place, key * width + latest, "right")
