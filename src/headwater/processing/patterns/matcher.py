"""The matcher: it finds the matches of a pattern in the rows of many keys at once, in time that is linear in the rows.

Rows are in the order of their keys and within a key in that of the search. `holds` says for each row which variables' conditions it
satisfies. The matcher goes over the rows twice, with all keys in step (each step is a few NumPy calls for all of them):

1. **Backward.** For each row and position of the automaton it computes two bounds from those of the next row. `ends` is the least end of
   a match from there. `reach` says how many rows must be known to see that nothing more can come from there.
2. **Forward.** From the start of a match it takes at each row the first target, in the order of preference, from which a match can be
   completed within the horizon of that start. So it never goes back. The targets that it passed over have failed at their `reach`.

Rows are cut into segments where no match can go on from a row to the next; the segments are what goes in step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from headwater.processing.patterns.automaton import Automaton
from headwater.processing.patterns.outcome import NEVER, Matches, Rule, SearchOutcome, SearchRows

Array = Any
"""A NumPy array."""

CELLS_MAX = 8_000_000
"""The number of pairs of a row and a position that are computed at once."""

FEW = 4
"""So few segments or searches are computed one after the other, in plain Python: NumPy's calls would take longer than their work."""
FEW_POSITIONS_MAX = 100
ROWS_AT_ONCE = 10_000
"""The number of rows that are Python objects at once."""


class Tables(NamedTuple):
    """An automaton as arrays. After the positions there are `accept`, `at_end`, `at_horizon` and `dead`."""

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
        lists = [each or (count + 3,) for each in (*automaton.follow, automaton.first, automaton.first_at_begin)]
        table = np.full((len(lists), max(map(len, lists))), count + 3, np.int64)
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


def segments_of(tables: Tables, rows: SearchRows, outcome: SearchOutcome) -> tuple[Array, Array]:
    """The first rows and the ends of stretches that no match leaves."""
    count, known = len(rows.times), outcome.known
    goes_on = np.zeros(count, bool)
    for before, after in tables.pairs:
        goes_on[1:] |= rows.holds[:-1, before] & rows.holds[1:, after]
    goes_on[rows.start[rows.start < count]] = False
    row = np.arange(count)
    first = np.flatnonzero(~goes_on & (row >= rows.start[outcome.key]) & (row < known[outcome.key]))
    following = np.r_[first[1:], count][: len(first)]
    return first, np.minimum(following, known[outcome.key[first]])


def find_matches(automaton: Automaton, rule: Rule, rows: SearchRows) -> Matches:
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

    def __init__(self, tables: Tables, rule: Rule, rows: SearchRows) -> None:
        self._tables, self._rule, self._rows = tables, rule, rows
        self._outcome = SearchOutcome(rule, rows)
        self._starts = np.zeros(0, np.int64)
        self._follow = [[to for to in each if to != tables.positions + 3] for each in tables.lists.tolist()]

    def matches(self) -> Matches:
        """Everything."""
        first, end = self._with_starts(*segments_of(self._tables, self._rows, self._outcome))
        order = np.argsort(first - end, kind="stable")
        first, end = first[order], end[order]
        group = np.cumsum(end - first) * max(self._tables.positions, 1) // CELLS_MAX
        for number in np.unique(group).tolist():
            self._search(first[group == number], end[group == number])
        return self._outcome.matches()

    def _with_starts(self, first: Array, end: Array) -> tuple[Array, Array]:
        """The segments in which a match may begin: in the others every row fails as a start, as soon as it is known."""
        count, rule = self._tables.positions, self._rule
        targets = {*self._follow[count], *self._follow[count + 1]}
        if rule.is_ordered or rule.ahead or any(target >= count for target in targets):
            return first, end
        begins = self._rows.holds[:, sorted({int(self._tables.variable[target]) for target in targets})].any(axis=1)
        before = np.r_[0, np.cumsum(begins)]
        is_there = before[end] > before[first]
        return first[is_there], end[is_there]

    def _search(self, first: Array, end: Array) -> None:
        """The matches of segments, which are ordered by their lengths, the longest first."""
        lengths = end - first + 1
        group = self._backward(first, end, np.cumsum(lengths) - lengths)
        starts = self._begin(group)
        if self._rule.skip == "next":
            self._walk(group, self._walks(group, starts.segment, starts.start))
        else:
            self._walk(group, self._next_walks(group, np.arange(len(first)), first))
        if self._rule.timeouts:
            self._walk_to_horizon(group)

    def _backward(self, first: Array, end: Array, line: Array) -> _Group:
        """`ends` and `reach` of all rows and targets."""
        tables, rows, lengths = self._tables, self._rows, end - first
        count = tables.positions
        ends, reach = np.empty((2, int(lengths.sum()) + len(lengths), count + 4), np.int32)
        self._put_bounds(ends, reach, line + lengths, end)
        many = len(lengths) - np.searchsorted(lengths[::-1], np.arange(int(lengths.max(initial=0))), "right")
        for step, active in enumerate(many.tolist()):
            if active <= FEW and count <= FEW_POSITIONS_MAX:
                for number in range(active):
                    self._backward_one(ends, reach, int(line[number]), int(first[number]), int(lengths[number]) - step)
                break
            self._outcome.note_looks(active)
            row = end[:active] - 1 - step
            at = line[:active] + (row - first[:active])
            holds = rows.holds[row][:, tables.variable]
            found = np.minimum.reduceat(ends[at + 1][:, tables.edges], tables.first_edge, axis=1)
            far = np.maximum.reduceat(reach[at + 1][:, tables.edges], tables.first_edge, axis=1)
            ends[at, :count] = np.where(holds, found, NEVER)
            reach[at, :count] = np.where(holds, far, (row + 1)[:, None])
            ends[at, count:], reach[at, count:] = NEVER, row[:, None]
            ends[at, count], reach[at, count + 1] = row, row + 1
        return _Group(first, end, line, ends, reach)

    def _backward_one(self, ends: Array, reach: Array, line: int, first: int, count: int) -> None:
        """The same for the first rows of one segment, of which the later ones are done."""
        tables, positions = self._tables, self._tables.positions
        self._outcome.note_looks(count)
        follow = self._follow
        after, far_after = ends[line + count].tolist(), reach[line + count].tolist()
        for start in reversed(range(0, count, ROWS_AT_ONCE)):
            end = min(count, start + ROWS_AT_ONCE)
            holds = self._rows.holds[first + start : first + end][:, tables.variable].tolist()
            found, far = list[list[int]](), list[list[int]]()
            for row, own in zip(range(first + end - 1, first + start - 1, -1), reversed(holds), strict=True):
                ends_of, reach_of = [NEVER] * positions, [row + 1] * positions
                for at, is_held in enumerate(own):
                    if is_held and follow[at]:
                        ends_of[at] = min([after[to] for to in follow[at]])
                        reach_of[at] = max([far_after[to] for to in follow[at]])
                after, far_after = [*ends_of, row, NEVER, NEVER, NEVER], [*reach_of, row, row + 1, row, row]
                found.append(after)
                far.append(far_after)
            ends[line + start : line + end] = found[::-1]
            reach[line + start : line + end] = far[::-1]

    def _put_bounds(self, ends: Array, reach: Array, line: Array, end: Array) -> None:
        """The lines of the bounds after segments: no row comes there, or one that no match has, or the known rows end."""
        count = self._tables.positions
        is_last = end == self._outcome.known[self._outcome.key[end - 1]]
        ends[line] = NEVER
        reach[line] = np.where(is_last, NEVER, end + 1)[:, None]
        ends[line, count], reach[line, count], reach[line, count + 3] = end, end, end
        if self._rows.is_over:
            ends[line[is_last], count + 1] = end[is_last]

    def _choices(self, group: _Group, walks: _Walks) -> tuple[Array, Array, Array]:
        """For each search what comes of it, its next target, and how far those reach that it has passed over."""
        self._outcome.note_looks(len(walks.start))
        line = group.line[walks.segment] + (walks.bound - group.first[walks.segment])
        targets = self._tables.lists[walks.source]
        ends, reach = group.ends[line[:, None], targets], group.reach[line[:, None], targets]
        is_good = ends <= self._outcome.horizon[walks.start][:, None]
        is_open = (reach == NEVER) & ~self._outcome.is_closed[walks.start][:, None]
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
        self._outcome.note_failing(start[fails], reach[fails])
        self._starts = np.sort(start[~fails])
        if self._rule.skip == "next":
            self._outcome.note_failed(start[fails], start[fails] + 1)
        return walks.only(~fails)

    def _walks(self, group: _Group, segment: Array, start: Array) -> _Walks:
        rows, key = self._rows, self._outcome.key[start]
        source = self._tables.positions + (rows.is_begin[key] & (start == rows.start[key])).astype(np.int64)
        none = np.full(len(start), -1)
        return _Walks(
            self._outcome.numbers(len(start)), segment, start, start.copy(), source, start + 1, none, none.copy()
        )

    def _next_walks(self, group: _Group, segment: Array, row: Array) -> _Walks:
        """The searches that begin at a row of their segments or at the first later one at which something may come."""
        place = np.searchsorted(self._starts, row)
        start = np.r_[self._starts, NEVER][place] if len(self._starts) else np.full(len(row), NEVER)
        end = group.end[segment]
        self._outcome.note_failed(row, np.minimum(start, end))
        is_there = start < end
        return self._walks(group, segment[is_there], start[is_there])

    def _walk(self, group: _Group, walks: _Walks) -> None:
        """Goes on with searches until all are done."""
        count = self._tables.positions
        while len(walks.start):
            if len(walks.start) <= FEW:
                walks = self._walk_few(group, walks)
                continue
            state, target, reach = self._choices(group, walks)
            walks = walks._replace(reach=np.where(target == count + 1, NEVER, reach))  # nobody knows an end before it
            is_open, is_done = state == _OPEN, (state == _GOES_ON) & (target >= count)
            self._outcome.note_open(walks.start[is_open])
            done, goes_on = walks.only(is_done), (state == _GOES_ON) & ~is_done
            walks, target = walks.only(goes_on), target[goes_on]
            self._outcome.note_steps(walks.number, walks.bound, target)
            is_skip = self._tables.is_skip[target]
            walks = walks._replace(
                bound=walks.bound + 1, source=target, last=np.where(is_skip, walks.bound, walks.last),
                first=np.where(is_skip & (walks.first < 0), walks.bound, walks.first),
            )  # fmt: skip
            if len(done.start):
                self._outcome.note_matches(done.number, done.start, done.bound, done.reach)
                walks = self._with_following(group, walks, done)

    def _walk_few(self, group: _Group, walks: _Walks) -> _Walks:
        """Goes on with each of a few searches until it is done; gives those that follow."""
        done = list[_Walks]()
        for number in range(len(walks.start)):
            walk = walks.only(slice(number, number + 1))
            found = self._walk_one(group, walk)
            if found is None:
                self._outcome.note_open(walk.start)
            else:
                done.append(found)
        if not done:
            return walks.only(slice(0, 0))
        ended = _Walks(*(np.concatenate(each) for each in zip(*done, strict=True)))
        self._outcome.note_matches(ended.number, ended.start, ended.bound, ended.reach)
        return self._with_following(group, walks.only(slice(0, 0)), ended)

    def _walk_one(self, group: _Group, walk: _Walks) -> _Walks | None:
        """A search at its end; None where it is open."""
        count, start = self._tables.positions, int(walk.start[0])
        horizon, is_closed = int(self._outcome.horizon[start]), bool(self._outcome.is_closed[start])
        begun, source, reach = int(walk.bound[0]), int(walk.source[0]), int(walk.reach[0])
        line, lists = int(group.line[walk.segment[0]] - group.first[walk.segment[0]]), self._follow
        bound, path = begun, list[int]()
        while True:
            ends_of, reach_of = group.ends[line + bound].tolist(), group.reach[line + bound].tolist()
            for target in lists[source]:
                if ends_of[target] <= horizon:
                    break
                if reach_of[target] == NEVER and not is_closed:
                    return None
                reach = max(reach, reach_of[target])
            if target >= count:
                reach = NEVER if target == count + 1 else reach  # nobody knows an end before it
                break
            path.append(target)
            source, bound = target, bound + 1
        self._outcome.note_looks(len(path) + 1)
        position, rows = np.array(path, np.int64), np.arange(begun, bound)
        self._outcome.note_steps(np.full(len(path), walk.number[0]), rows, position)
        named = rows[self._tables.is_skip[position]]
        first, last = walk.first, walk.last
        if len(named):
            first, last = np.where(first < 0, named[:1], first), named[-1:]
        return walk._replace(bound=np.array([bound]), reach=np.array([reach]), first=first, last=last)

    def _walk_to_horizon(self, group: _Group) -> None:
        """Finds what there was of matches whose time was over: the first targets from which one could reach beyond the horizon."""
        lengths = group.end - group.first
        segment = np.repeat(np.arange(len(lengths)), lengths)
        row = np.arange(len(segment)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + group.first[segment]
        start = self._outcome.timeouts(row)
        segment_of = np.zeros(len(self._rows.times), np.int64)
        segment_of[row] = segment
        walks = self._walks(group, segment_of[start], start)
        while len(walks.start):
            horizon = self._outcome.horizon[walks.start]
            is_done = walks.bound == horizon
            done, walks = walks.only(is_done), walks.only(~is_done)
            self._outcome.note_matches(
                done.number, done.start, done.bound, np.full(len(done.start), NEVER), is_timeout=True
            )  # fmt: skip
            self._outcome.note_looks(len(walks.start))
            line = group.line[walks.segment] + (walks.bound - group.first[walks.segment])
            targets = self._tables.lists[walks.source]
            is_far = group.reach[line[:, None], targets] > horizon[~is_done][:, None]
            target = targets[np.arange(len(line)), np.argmax(is_far, axis=1)]
            self._outcome.note_steps(walks.number, walks.bound, target)
            walks = walks._replace(bound=walks.bound + 1, source=target)

    def _with_following(self, group: _Group, walks: _Walks, done: _Walks) -> _Walks:
        """The searches, and those that begin where others were done."""
        skip = self._rule.skip
        if skip == "next":
            return walks
        row = done.bound if skip == "past" else done.first if skip == "first" else done.last
        row = np.maximum(row, done.start + 1)
        following = self._next_walks(group, done.segment, np.minimum(row, group.end[done.segment]))
        return _Walks(*(np.concatenate(pair) for pair in zip(walks, following, strict=True)))
