"""The matcher: it finds the matches of a pattern in the rows of many keys at once, in time that is linear in the rows.

Rows are in the order of their keys and within a key in that of the search. `holds` says for each row which variables' conditions it
satisfies. The matcher goes over the rows twice, with all keys in step (each step is a few NumPy calls for all of them):

1. **Backward.** For each row and position of the automaton it computes two bounds from those of the next row. `ends` is the least end of
   a match from there. `reach` says how many rows must be known to see that nothing more can come from there.
2. **Forward.** From the start of a match it takes at each row the first target, in the order of preference, from which a match can be
   completed within the horizon of that start. So it never goes back. The targets that it passed over have failed at their `reach`.

A row **bound** is a number of rows from the first: bound 3 lies between rows 2 and 3. The **horizon** of a start is the bound that
its match cannot pass, by WITHIN or by `rows_max`. A start is **open** while a row to come can still change what it finds.

Each match has the time at which it was **decided**: the least watermark at which it is certain. It depends on the data alone, so it tells
a match that an earlier batch gave.

Rows are cut into segments where no match can go on from a row to the next; the segments are what goes in step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from headwater.processing.patterns.automaton import Automaton

Array = Any
"""A NumPy array."""

NEVER = 2**31 - 1
"""In place of a bound: no end, or a reach beyond the rows that are known."""
MAX_TIME = 2**63 - 1
CELLS_MAX = 8_000_000
"""The number of pairs of a row and a position that are computed at once."""


class Rows(NamedTuple):
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
    """Starts whose match grew beyond `rows_max`, as times at which that was certain."""
    open: Array
    """For each key the first row that is still needed as a start, or the end of the key."""


class Tables(NamedTuple):
    """An automaton as arrays. Behind the positions there are three more targets: `accept`, `at_end` and `dead`."""

    positions: int
    """Their number."""
    variable: Array
    lists: Array
    """For each position its targets in order, filled up with `dead`; then those of a start, and of a start at the begin."""
    edges: Array
    first_edge: Array
    """The targets of all positions in one row, and where those of each begin."""
    pairs: Sequence[tuple[int, int]]
    """Which variables may have neighbouring rows."""
    is_skip: Array
    """Whether the variable of a position is one that SKIP TO names."""

    @classmethod
    def of(cls, automaton: Automaton, skip_to: frozenset[int]) -> Tables:
        """The tables of an automaton."""
        count = len(automaton.position)
        lists = [each or (count + 2,) for each in (*automaton.follow, automaton.first, automaton.first_at_begin)]
        table = np.full((len(lists), max(map(len, lists))), count + 2, np.int64)
        for number, each in enumerate(lists):
            table[number, : len(each)] = each
        edges = np.array([to for each in lists[:count] for to in each], np.int64)
        first_edge = np.cumsum([0, *(len(each) for each in lists[:count])])[:-1].astype(np.int64)
        pairs = {
            (automaton.position[at], automaton.position[to])
            for at, targets in enumerate(automaton.follow)
            for to in targets
            if to < count
        }
        is_skip = np.array([number in skip_to for number in automaton.position], bool)
        return cls(count, np.array(automaton.position, np.int64), table, edges, first_edge, sorted(pairs), is_skip)


def find_matches(automaton: Automaton, rule: Rule, rows: Rows) -> Matches:
    """All matches that are certain, and where each key is open."""
    return _Search(Tables.of(automaton, rule.skip_to), rule, rows).matches()


class _Group(NamedTuple):
    """Segments that are searched together. Each has a line in `ends` and `reach` for each of its rows and one for the bound after them."""

    first: Array
    end: Array
    line: Array
    """The line of the first row of each segment."""
    ends: Array
    reach: Array


class _Walks(NamedTuple):
    """Searches that are under way, one for each start."""

    number: Array
    segment: Array
    start: Array
    bound: Array
    """Up to where each has come."""
    source: Array
    """The list that its next target comes from: that of its last position, or that of starts."""
    reach: Array
    """How far the targets reach that it has passed over."""
    first: Array
    last: Array
    """The first and the last row of a variable that SKIP TO names, or -1."""

    def only(self, which: Array) -> _Walks:
        """Some of them."""
        return _Walks(*(each[which] for each in self))


_FAILS, _GOES_ON, _OPEN = 0, 1, 2
"""What comes of a start: no match, perhaps a match, or it depends on rows to come."""


class _Search:
    """One search: horizons, then both passes over groups of segments that fit into memory."""

    def __init__(self, tables: Tables, rule: Rule, rows: Rows) -> None:
        self._tables, self._rule, self._rows = tables, rule, rows
        ends = rows.key[1:]
        self._known = np.maximum(ends if rows.is_over else ends - rule.ahead, rows.start)
        self._key = np.repeat(np.arange(len(ends)), np.diff(rows.key))
        self._end = ends[self._key]
        self._horizon, self._is_by_rows = self._horizons()
        self._is_closed = self._closed()
        self._open = ends.copy() if rows.is_over else self._known.copy()
        count = len(rows.times)
        self._failed_at = np.zeros(count, np.int64)
        self._is_failed, self._is_given_up = np.zeros(count, bool), np.zeros(count, bool)
        self._starts = np.zeros(0, np.int64)
        self._walked = 0
        self._matches: list[tuple[Array, Array, Array, Array]] = []
        self._steps: list[tuple[Array, Array, Array]] = []

    def matches(self) -> Matches:
        """Everything."""
        first, end = self._segments()
        order = np.argsort(first - end, kind="stable")
        first, end = first[order], end[order]
        group = np.cumsum(end - first) * max(self._tables.positions, 1) // CELLS_MAX
        for number in np.unique(group).tolist():
            self._search(first[group == number], end[group == number])
        return self._gathered()

    def _horizons(self) -> tuple[Array, Array]:
        """For each row as a start the bound that its match cannot pass, and whether that is by `rows_max`."""
        rows, rule = self._rows, self._rule
        by_time = self._end if rule.within_us is None else _last_within(rows.times, self._key, rows.key, rule.within_us)
        by_rows = np.arange(len(rows.times)) + rule.rows_max
        return np.minimum(by_time, by_rows), by_rows <= by_time

    def _closed(self) -> Array:
        """For each row as a start whether all rows up to its horizon are known."""
        rows, rule, known = self._rows, self._rule, self._known[self._key]
        if rows.is_over:
            return np.ones(len(rows.times), bool)
        closed = np.arange(len(rows.times)) + rule.rows_max <= known
        if rule.within_us is not None:
            closed |= (rows.times <= rows.until - rule.within_us) & (self._horizon <= known)
        return closed

    def _decided(self, reach: Array, start: Array) -> Array:
        """The times from which on it is certain what becomes of some starts whose targets reach so far."""
        rows, rule = self._rows, self._rule
        horizon, is_by_rows = self._horizon[start], self._is_by_rows[start]
        is_beyond = reach > horizon
        place = np.where(is_beyond, horizon, reach) - 1 + rule.ahead
        last = self._end[start] - 1
        found = np.where(place > last, MAX_TIME, rows.times[np.clip(place, 0, last)])
        is_by_time = is_beyond & ~is_by_rows
        if rule.within_us is None:
            return np.where(is_by_time, MAX_TIME, found)
        over = np.minimum(rows.times[start], MAX_TIME - rule.within_us) + rule.within_us
        return np.where(is_by_time, np.maximum(over, found) if rule.ahead else over, found)

    def _segments(self) -> tuple[Array, Array]:
        """The first rows and the ends of stretches that no match leaves."""
        rows, count = self._rows, len(self._rows.times)
        goes_on = np.zeros(count, bool)
        for before, after in self._tables.pairs:
            goes_on[1:] |= rows.holds[:-1, before] & rows.holds[1:, after]
        goes_on[rows.start[rows.start < count]] = False
        row = np.arange(count)
        first = np.flatnonzero(~goes_on & (row >= rows.start[self._key]) & (row < self._known[self._key]))
        following = np.r_[first[1:], count][: len(first)]
        return first, np.minimum(following, self._known[self._key[first]])

    def _search(self, first: Array, end: Array) -> None:
        """The matches of segments, which are ordered by their lengths, the longest first."""
        lengths = end - first + 1
        group = self._backward(first, end, np.cumsum(lengths) - lengths)
        starts = self._begin(group)
        if self._rule.skip == "next":
            self._walk(group, self._walks(group, starts.segment, starts.start))
        else:
            self._walk(group, self._next_walks(group, np.arange(len(first)), first))

    def _backward(self, first: Array, end: Array, line: Array) -> _Group:
        """`ends` and `reach` of all rows and targets."""
        tables, rows, lengths = self._tables, self._rows, end - first
        count = tables.positions
        ends, reach = np.empty((2, int(lengths.sum()) + len(lengths), count + 3), np.int32)
        self._put_bounds(ends, reach, line + lengths, end)
        many = len(lengths) - np.searchsorted(lengths[::-1], np.arange(int(lengths.max(initial=0))), "right")
        for step, active in enumerate(many.tolist()):
            row = end[:active] - 1 - step
            at = line[:active] + (row - first[:active])
            holds = rows.holds[row][:, tables.variable]
            found = np.minimum.reduceat(ends[at + 1][:, tables.edges], tables.first_edge, axis=1)
            far = np.maximum.reduceat(reach[at + 1][:, tables.edges], tables.first_edge, axis=1)
            ends[at, :count] = np.where(holds, found, NEVER)
            reach[at, :count] = np.where(holds, far, (row + 1)[:, None])
            ends[at, count], ends[at, count + 1], ends[at, count + 2] = row, NEVER, NEVER
            reach[at, count], reach[at, count + 1], reach[at, count + 2] = row, row + 1, row
        return _Group(first, end, line, ends, reach)

    def _put_bounds(self, ends: Array, reach: Array, line: Array, end: Array) -> None:
        """The lines of the bounds after segments: no row comes there, or one that no match has, or the known rows end."""
        count = self._tables.positions
        is_last = end == self._known[self._key[end - 1]]
        ends[line] = NEVER
        reach[line] = np.where(is_last, NEVER, end + 1)[:, None]
        ends[line, count], reach[line, count], reach[line, count + 2] = end, end, end
        if self._rows.is_over:
            ends[line[is_last], count + 1] = end[is_last]

    def _choices(self, group: _Group, walks: _Walks) -> tuple[Array, Array, Array]:
        """For each search what comes of it, its next target, and how far those reach that it has passed over."""
        line = group.line[walks.segment] + (walks.bound - group.first[walks.segment])
        targets = self._tables.lists[walks.source]
        ends, reach = group.ends[line[:, None], targets], group.reach[line[:, None], targets]
        is_good = ends <= self._horizon[walks.start][:, None]
        is_open = (reach == NEVER) & ~self._is_closed[walks.start][:, None]
        found = is_good | is_open
        place, one = np.argmax(found, axis=1), np.arange(len(line))
        is_found = found[one, place]
        place = np.where(is_found, place, found.shape[1])
        passed = np.where(np.arange(found.shape[1]) < place[:, None], reach, -1).max(axis=1, initial=-1)
        place = np.minimum(place, found.shape[1] - 1)
        state = np.where(~is_found, _FAILS, np.where(is_good[one, place], _GOES_ON, _OPEN))
        return state, targets[one, place], np.maximum(passed, walks.reach)

    def _begin(self, group: _Group) -> _Walks:
        """The starts from which something may come; what becomes of all rows as starts is noted."""
        lengths = group.end - group.first
        segment = np.repeat(np.arange(len(lengths)), lengths)
        start = np.arange(len(segment)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + group.first[segment]
        walks = self._walks(group, segment, start)
        state, _, reach = self._choices(group, walks)
        fails = state == _FAILS
        self._failed_at[start[fails]] = self._decided(reach[fails], start[fails])
        is_given_up = (reach > self._horizon[start]) & self._is_by_rows[start] & fails
        self._is_given_up[start[is_given_up]] = True
        self._starts = np.sort(start[~fails])
        if self._rule.skip == "next":
            self._is_failed[start[fails]] = True
        return walks.only(~fails)

    def _walks(self, group: _Group, segment: Array, start: Array) -> _Walks:
        rows, key = self._rows, self._key[start]
        source = self._tables.positions + (rows.is_begin[key] & (start == rows.start[key])).astype(np.int64)
        none = np.full(len(start), -1)
        number = np.arange(len(start)) + self._walked
        self._walked += len(start)
        return _Walks(number, segment, start, start.copy(), source, start + 1, none, none.copy())

    def _next_walks(self, group: _Group, segment: Array, row: Array) -> _Walks:
        """The searches that begin at a row of their segments or at the first later one at which something may come."""
        place = np.searchsorted(self._starts, row)
        start = np.r_[self._starts, NEVER][place] if len(self._starts) else np.full(len(row), NEVER)
        end = group.end[segment]
        self._note_failed(row, np.minimum(start, end))
        is_there = start < end
        return self._walks(group, segment[is_there], start[is_there])

    def _note_failed(self, row: Array, until: Array) -> None:
        counts = until - row
        places = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(row, counts)
        self._is_failed[places] = True

    def _walk(self, group: _Group, walks: _Walks) -> None:
        """Goes on with searches until all are done."""
        count = self._tables.positions
        while len(walks.start):
            state, target, reach = self._choices(group, walks)
            walks = walks._replace(reach=reach)
            is_open, is_done = state == _OPEN, (state == _GOES_ON) & (target >= count)
            np.minimum.at(self._open, self._key[walks.start[is_open]], walks.start[is_open])
            done, goes_on = walks.only(is_done), (state == _GOES_ON) & ~is_done
            walks, target = walks.only(goes_on), target[goes_on]
            self._steps.append((walks.number, walks.bound, target))
            is_skip = self._tables.is_skip[target]
            walks = walks._replace(
                bound=walks.bound + 1, source=target, last=np.where(is_skip, walks.bound, walks.last),
                first=np.where(is_skip & (walks.first < 0), walks.bound, walks.first),
            )  # fmt: skip
            if len(done.start):
                self._matches.append((done.number, done.start, done.bound, np.maximum(done.reach, done.bound)))
                walks = self._with_following(group, walks, done)

    def _with_following(self, group: _Group, walks: _Walks, done: _Walks) -> _Walks:
        """The searches, and those that begin where others were done."""
        skip = self._rule.skip
        if skip == "next":
            return walks
        row = done.bound if skip == "past" else done.first if skip == "first" else done.last
        row = np.maximum(row, done.start + 1)
        following = self._next_walks(group, done.segment, np.minimum(row, group.end[done.segment]))
        return _Walks(*(np.concatenate(pair) for pair in zip(walks, following, strict=True)))

    def _gathered(self) -> Matches:
        none = np.zeros(0, np.int64)
        number, start, end, reach = (np.concatenate([none, *(each[at] for each in self._matches)]) for at in range(4))
        order = np.argsort(start, kind="stable")
        number, start, end, reach = number[order], start[order], end[order], reach[order]
        decided, failed = self._decided(reach, start), np.flatnonzero(self._is_failed)
        failed_at = self._failed_at[failed]
        given_up = failed_at[self._is_given_up[failed]]
        if self._rule.is_ordered or self._rule.skip != "next":
            is_sure = start < self._open[self._key[start]]
            number, start, end, decided = number[is_sure], start[is_sure], end[is_sure], decided[is_sure]
            is_sure = failed < self._open[self._key[failed]]
            failed, failed_at = failed[is_sure], failed_at[is_sure]
            latest = self._latest(np.r_[start, failed], np.r_[decided, failed_at])
            decided, failed_at = latest[: len(start)], latest[len(start) :]
        rank = np.full(self._walked, -1)
        rank[number] = np.arange(len(number))
        step, path, position = (np.concatenate([none, *(each[at] for each in self._steps)]) for at in range(3))
        step = rank[step]
        order = np.argsort(step, kind="stable")
        order = order[np.searchsorted(step[order], 0) :]
        offset = np.r_[0, np.cumsum(end - start)]
        return Matches(
            start, end, decided, path[order], position[order], offset, failed, failed_at, given_up, self._open
        )

    def _latest(self, row: Array, decided: Array) -> Array:
        """The greatest of the times of all starts of the same key up to each."""
        order = np.lexsort((row, self._key[row]))
        times, place = np.unique(decided, return_inverse=True)
        key = self._key[row][order]
        found = np.empty(len(row), np.int64)
        if len(row):
            found[order] = times[np.maximum.accumulate(key * len(times) + place[order]) % len(times)]
        return found


def _last_within(times: Array, key: Array, first: Array, within_us: int) -> Array:
    """For each row the bound after the last row of its key whose time is at most so much later."""
    different, place = np.unique(times, return_inverse=True)
    latest = np.searchsorted(different, np.minimum(times, MAX_TIME - within_us) + within_us, "right") - 1
    width = len(different) + 1
    return np.searchsorted(key * width + place, key * width + latest, "right")
